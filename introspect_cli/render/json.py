"""What the verbs say as plain nested data, and as strict JSON; scripts build on it, so the docs have its keys.

A document is what the verb's result is made of, field by field. A few types have a form of their own.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from dataclasses import is_dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.result import RESOLUTION

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.changes.statements import CodeChanges
    from introspect_cli.compare.result import DiffResult, Divergence
    from introspect_cli.health.findings import CheckResult
    from introspect_cli.records import Record, Summary

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
        return _fields(value, form) if isinstance(form, str) else form(value)
    if is_dataclass(value):
        value = vars(value)
    elif hasattr(value, "_asdict"):
        value = value._asdict()
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


def _fields(value: Any, names: str) -> dict[str, Any]:
    """Attributes of a value as plain values: by words such as `step`, or `dtype=layout.dtype` for another key."""
    words = (word.partition("=") for word in names.split())
    return {key: plain(attrgetter(path or key)(value)) for key, _, path in words}


_SITE = "phase=site.phase kind=site.kind fqn=site.fqn module_class={}module_class call=site.call path=site.path "


def _divergence(divergence: Divergence) -> dict[str, Any]:
    """A divergence; keys beyond the usual ones only where they have a value.

    `rel_l2` is None, with `rel_l2_below`, where sketches cannot tell the values apart.
    """
    usual = _fields(divergence, f"step rank {_SITE.format('')} role reason a b rel_l2")
    extra = _fields(divergence, "exact scale source noise=floor size labels labels_b")
    extra["step_b"] = divergence.step_b if divergence.step_b != divergence.step else None
    if divergence.rel_l2 == 0 and not divergence.exact:  # sketches cannot tell values this close apart
        usual["rel_l2"], extra["rel_l2_below"] = None, RESOLUTION
    return usual | {name: value for name, value in extra.items() if value is not False and value not in (None, "", {})}


def _summary(summary: Summary) -> dict[str, Any]:
    """A summary, its statistics by name beside the rest."""
    named = {"status": summary.status.name.lower(), **_fields(summary, "shape=layout.shape dtype=layout.dtype")}
    checked = {"device": summary.layout.device, "checksum": f"{summary.checksum:016x}"}
    return {**named, **checked, **plain(summary.stats), "text": summary.text}


def _record(record: Record) -> dict[str, Any]:
    """A record: rank and sequence, site and summary beside one another."""
    return _fields(record, f"rank sequence {_SITE.format('info.')}") | _summary(record.summary)


# --- comparisons

_DIFF = (
    "a b verdict sentence first divergences settings counts evidence candidates notes rests_on findings=explains "
    "causes training evaluation structure code"
)


def diff_document(result: DiffResult) -> dict[str, Any]:
    """A comparison of two runs; `findings` are those that explain the divergence.

    `origins` only where there are others than the first divergence, `resumed` and `map` only where there are any.
    """
    others = any(one.part or one.divergence != result.first for one in result.origins)
    found = {"origins": result.origins if others else None, "resumed": result.resumed, "map": result.map}
    more = {name: plain(value) for name, value in found.items() if value is not None}
    return {"format": FORMAT, **_fields(result, _DIFF), **more}


def _code(code: CodeChanges) -> dict[str, Any]:
    """Changed statements, the most likely cause first, and files of which none are told."""
    unread = [{"file": name, "why": why} for name, why in code.unread]
    return {**_fields(code, "changes=ranked unchanged"), "unread": unread}


def check_document(result: CheckResult) -> dict[str, Any]:
    """A check's result; `not_observed` are the rules that could not be decided, and what each needs."""
    unseen = [{"rule": rule, "needs": needs} for rule, needs in result.unseen]
    return {"format": FORMAT, **_fields(result, "run steps findings checked notes"), "not_observed": unseen}


_CHANGE = "place=change.place file=change.file scope=change.scope unit=change.unit a=change.a b=change.b "
_MODULE = (
    "fqn=info.fqn class=info.module_class variable=info.variable source=info.source own_parameters=info.parameters "
    "own_buffers=info.buffers aliases=info.aliases parameters output_shape=shape output_dtype=dtype output_std=scale "
    "calls folded"
)
_FORMS: dict[str, str | Callable[[Any], dict[str, Any]]] = {
    "Divergence": _divergence,
    "Summary": _summary,
    "Record": _record,
    "DiffResult": diff_document,
    "CodeChanges": _code,
    "Ranked": f"{_CHANGE} nearness likely",
    "Candidate": "kind name a b certainty line",
    "Change": "place file scope a b unit line file_a pieces",
    "Difference": "place axis name a b",
    "SettingChange": "source name a b explains weight",
    "Side": lambda side: {**side._asdict(), "text": side.text[:_LONGEST_CODE]},
    "ModuleRow": _MODULE,
    "Rule": "rule=id level about when cause",
}
"""The form of a type (words as `_fields` takes them, or a function), by its name: most verbs import few of them."""
