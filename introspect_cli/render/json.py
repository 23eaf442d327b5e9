"""What the verbs say as plain nested data, and as strict JSON; scripts build on it, so the docs have its keys.

A document is what the verb's result is made of, field by field. A few types have a form of their own.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.result import RESOLUTION

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.changes.statements import CodeChanges, Ranked
    from introspect_cli.compare.result import DiffResult, Divergence
    from introspect_cli.health.findings import CheckResult, Rule
    from introspect_cli.inspect.module_tree import ModuleRow
    from introspect_cli.records import Record, Site, Summary

FORMAT = 1
"""Version of every document; a key may be added under the same version, none removed or changed."""

_LONGEST_CODE = 4000
"""Characters of one changed statement."""


def document(**parts: Any) -> dict[str, Any]:
    """A document: its version, and its parts as plain values."""
    return {"format": FORMAT, **plain(parts)}


def to_json(document: dict[str, Any]) -> str:
    """A document as strict JSON in ASCII, indented by 2: no character of a name is one that a terminal would obey."""
    return json.dumps(document, indent=2, allow_nan=False).replace("\x7f", "\\u007f")


def to_yaml(document: dict[str, Any]) -> str:
    """A document as YAML: block style, keys in order, without a line end after it."""
    import yaml  # JSON is what most ask for

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(document, Dumper=dumper, sort_keys=False, allow_unicode=True, width=100)).rstrip("\n")


# --- plain values


def finite(value: Any) -> Any:
    """A value as it is; of floats, None for NaN, which JSON has no word for, and "inf" or "-inf" for infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def plain(value: Any) -> Any:
    """A value as dicts, lists, texts and finite numbers; NaN is None, infinities are texts.

    Types whose names are in `_FORMS` have a form of their own. Other dataclasses become dicts, members of an Enum their
    values, times ISO 8601, paths texts, arrays nested lists, complex numbers [real part, imaginary part]; other objects
    stay as they are.
    """
    form = _FORMS.get(type(value).__name__)
    if form is not None:
        return form(value)
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {finite(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, complex):
        value = [value.real, value.imag]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dt.datetime):
        return value.isoformat()
    return str(value) if isinstance(value, Path) else finite(value)


def _site(site: Site, module_class: str) -> dict[str, Any]:
    """A site and its module's class as plain values."""
    return {
        "phase": site.phase.value,
        "kind": site.kind.value,
        "fqn": site.fqn,
        "module_class": module_class,
        "call": site.call,
        "path": site.path,
    }


def _divergence(divergence: Divergence) -> dict[str, Any]:
    """A divergence; keys beyond the usual ones only where they have a value.

    `rel_l2` is None, with `rel_l2_below`, where sketches cannot tell the values apart.
    """
    unresolved = divergence.rel_l2 == 0 and not divergence.exact  # sketches cannot tell values this close apart
    usual = {
        "step": divergence.step,
        "rank": divergence.rank,
        **_site(divergence.site, divergence.module_class),
        "role": divergence.role,
        "reason": divergence.reason,
        "a": divergence.a,
        "b": divergence.b,
        "rel_l2": None if unresolved else divergence.rel_l2,
    }
    extra: dict[str, Any] = {
        "step_b": divergence.step_b if divergence.step_b != divergence.step else None,
        "exact": divergence.exact or None,
        "rel_l2_below": RESOLUTION if unresolved else None,
        "scale": divergence.scale,
        "residual": divergence.residual,
        "source": divergence.source or None,
        "noise": divergence.floor,
        "size": divergence.size,
        "labels": divergence.labels or None,
        "labels_b": divergence.labels_b or None,
    }
    made: dict[str, Any] = plain(usual | {name: value for name, value in extra.items() if value is not None})
    return made


def _summary(summary: Summary) -> dict[str, Any]:
    """A summary, its statistics by name beside the rest."""
    return {
        "status": summary.status.name.lower(),
        "shape": list(summary.layout.shape),
        "dtype": summary.layout.dtype,
        "device": summary.layout.device,
        "checksum": f"{summary.checksum:016x}",
        **{name: finite(value) for name, value in summary.stats.items()},
        "text": summary.text,
    }


def _record(record: Record) -> dict[str, Any]:
    """A record: rank and sequence, site and summary beside one another."""
    where = {"rank": record.rank, "sequence": record.sequence}
    return where | _site(record.site, record.info.module_class) | _summary(record.summary)


# --- comparisons

_DIFF = (
    *("a", "b", "verdict", "sentence", "first", "divergences", "settings", "counts", "evidence", "candidates"),
    *("notes", "rests_on"),
)


def diff_document(result: DiffResult) -> dict[str, Any]:
    """A comparison of two runs; `findings` are those that explain the divergence.

    `origins` only where there are others than the first divergence, `resumed` and `map` only where there are any.
    """
    others = any(one.part or one.divergence != result.first for one in result.origins)
    found = {"origins": result.origins if others else None, "resumed": result.resumed, "map": result.map}
    return document(
        **{name: getattr(result, name) for name in _DIFF},
        findings=result.explains,
        causes=result.causes,
        training=result.training,
        evaluation=result.evaluation,
        structure=result.structure,
        code=result.code,
        **{name: value for name, value in found.items() if value is not None},
    )


def _code(code: CodeChanges) -> dict[str, Any]:
    """Changed statements, the most likely cause first, and files of which none are told."""
    return {
        "changes": plain(code.ranked),
        "in_comments": list(code.in_comments),
        "in_names": list(code.in_names),
        "unread": [{"file": name, "why": why} for name, why in code.unread],
    }


def _with_place(change: Any) -> dict[str, Any]:
    """A change, or a setting that differs, with its place."""
    return {"place": change.place, **plain(vars(change))}


def _ranked(one: Ranked) -> dict[str, Any]:
    """A changed statement and how near to the divergence it is."""
    change = {name: getattr(one.change, name) for name in ("place", "file", "scope", "unit", "a", "b")}
    made: dict[str, Any] = plain(change | {"nearness": one.nearness, "likely": one.likely})
    return made


# --- one run


def _module(row: ModuleRow) -> dict[str, Any]:
    """A row of the module tree."""
    info = row.info
    named = {"fqn": info.fqn, "class": info.module_class, "variable": info.variable or None, "source": info.source}
    own = {"own_parameters": info.parameters, "own_buffers": info.buffers, "aliases": info.aliases}
    output = {"output_shape": row.shape, "output_dtype": row.dtype or None, "output_std": row.scale}
    made: dict[str, Any] = plain(
        named | own | {"parameters": row.parameters} | output | {"calls": row.calls, "folded": row.folded}
    )
    return made


def check_document(result: CheckResult) -> dict[str, Any]:
    """A check's result; `not_observed` are the rules that could not be decided, and what each needs."""
    named = {name: getattr(result, name) for name in ("run", "steps", "findings", "checked", "notes")}
    return document(**named, not_observed=[{"rule": rule, "needs": needs} for rule, needs in result.unseen])


def _rule(rule: Rule) -> dict[str, Any]:
    """A rule of a check."""
    return {"rule": rule.id, "level": rule.level.value, "about": rule.about, "when": rule.when, "cause": rule.cause}


_FORMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "Divergence": _divergence,
    "Summary": _summary,
    "Record": _record,
    "DiffResult": diff_document,
    "CodeChanges": _code,
    "Ranked": _ranked,
    "Change": _with_place,
    "Difference": _with_place,
    "Side": lambda side: {**vars(side), "text": side.text[:_LONGEST_CODE]},
    "ModuleRow": _module,
    "Rule": _rule,
}
"""The form of a type, by its name: most verbs import few of them."""
