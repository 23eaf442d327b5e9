"""A comparison as plain nested data, and as strict JSON: what scripts build on, so it is written down in the docs."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.result import RESOLUTION
from introspect_cli.records import clean

if TYPE_CHECKING:
    from introspect_cli.compare.result import DiffResult, Divergence, DivergenceMap, Separate, SettingChange
    from introspect_cli.labels import Labels
    from introspect_cli.records import Summary

FORMAT = 1
"""Version of the document; a key may be added under the same version, none removed or changed."""


_UNUSUAL = re.compile(r"[^\n -~]")


def finite(value: Any) -> Any:
    """A number, or None for NaN, which JSON has no word for; infinities as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def summary_document(summary: Summary | None) -> dict[str, Any] | None:
    """One side of a divergence."""
    if summary is None:
        return None
    return {
        "status": summary.status.name.lower(),
        "shape": list(summary.layout.shape),
        "dtype": summary.layout.dtype,
        "device": summary.layout.device,
        "checksum": f"{summary.checksum:016x}",
        **{name: finite(value) for name, value in summary.stats.items()},
        "text": summary.text,
    }


def divergence_document(divergence: Divergence) -> dict[str, Any]:
    """One divergence."""
    site = divergence.site
    unresolved = divergence.rel_l2 == 0 and not divergence.exact  # sketches cannot tell values this close apart
    document = {
        "step": divergence.step,
        "rank": divergence.rank,
        "phase": site.phase.value,
        "kind": site.kind.value,
        "fqn": site.fqn,
        "module_class": divergence.module_class,
        "call": site.call,
        "path": site.path,
        "role": divergence.role.value,
        "reason": divergence.reason,
        "a": summary_document(divergence.a),
        "b": summary_document(divergence.b),
        "rel_l2": None if divergence.rel_l2 is None or unresolved else finite(divergence.rel_l2),
    }
    extra: dict[str, Any] = {
        "step_b": divergence.step_b if divergence.step_b != divergence.step else None,
        "exact": True if divergence.exact else None,
        "rel_l2_below": RESOLUTION if unresolved else None,
        "scale": divergence.scale,
        "residual": divergence.residual,
        "source": divergence.source or None,
        "noise": divergence.floor,
        "labels": label_document(divergence.labels),
        "labels_b": label_document(divergence.labels_b),
    }
    return document | {name: finite(value) for name, value in extra.items() if value is not None}


def label_document(labels: Labels) -> dict[str, Any] | None:
    """What a framework calls a step, ranges as two numbers; None where it calls it nothing."""
    return {name: list(own) if isinstance(own, tuple) else own for name, own in labels.items()} or None


def _setting(change: SettingChange) -> dict[str, Any]:
    return {
        "source": change.source,
        "name": change.name,
        "a": change.a,
        "b": change.b,
        "explains": change.explains,
        "weight": change.weight,
    }


def _map(found: DivergenceMap) -> dict[str, Any]:
    return {
        "modules": list(found.modules),
        "steps": list(found.steps),
        "values": [[finite(value) for value in row] for row in found.values],
        "behind": [list(row) for row in found.behind],
        "unmeasured": [list(row) for row in found.unmeasured],
    }


def _separate(found: Separate | None) -> dict[str, Any] | None:
    if found is None:
        return None
    first = divergence_document(found.first) if found.first else None
    return {"verdict": found.verdict.value, "sentence": found.sentence, "first": first}


def diff_document(result: DiffResult) -> dict[str, Any]:
    """The whole comparison as dicts, lists, texts and finite numbers."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "a": result.a,
        "b": result.b,
        "verdict": result.verdict.value,
        "sentence": result.sentence,
        "first": divergence_document(result.first) if result.first else None,
        "divergences": [divergence_document(divergence) for divergence in result.divergences],
        "settings": [_setting(change) for change in result.settings],
        "counts": dict(vars(result.counts)),
        "evidence": list(result.evidence),
        "candidates": [divergence_document(divergence) for divergence in result.candidates],
        "notes": list(result.notes),
        "suggestions": list(result.suggestions),
        "training": _separate(result.training),
        "evaluation": _separate(result.evaluation),
        "structure": [dict(vars(change)) for change in result.structure],
    }
    if result.map is not None:
        document["map"] = _map(result.map)
    return document


def to_json(document: dict[str, Any]) -> str:
    """Strict JSON: no NaN, no Infinity, wherever in a document they are (settings may hold any number).

    Names come from stores and from directories; what a terminal would obey stands as JSON's escape of it.
    """
    try:
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False)
    return _UNUSUAL.sub(_harmless, text)


def _harmless(found: re.Match[str]) -> str:
    char = found[0]
    return char if clean(char) == char else "\\u007f" if char == "\x7f" else json.dumps(char)[1:-1]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {finite(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return finite(value)


def to_yaml(document: dict[str, Any]) -> str:
    """The same document as YAML: block style, keys in order."""
    import yaml  # JSON is what most ask for

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(document, Dumper=dumper, sort_keys=False, allow_unicode=True, width=100)).rstrip("\n")
