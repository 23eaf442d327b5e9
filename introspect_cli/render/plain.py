"""What results are made of as plain values: dicts, lists, texts and finite numbers."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.result import RESOLUTION, Divergence
from introspect_cli.records import Summary

if TYPE_CHECKING:
    from introspect_cli.labels import Labels
    from introspect_cli.records import Site


def finite(value: Any) -> Any:
    """A value as it is; of floats, None for NaN, which JSON has no word for, and "inf" or "-inf" for infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def plain(value: Any) -> Any:
    """A value as dicts, lists, texts and finite numbers; NaN is None, infinities are texts.

    Dataclasses become dicts, members of an Enum their values, times ISO 8601, paths texts; other objects stay as they
    are.
    """
    if isinstance(value, Divergence):
        return divergence_document(value)
    if isinstance(value, Summary):
        return summary_document(value)
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {finite(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dt.datetime):
        return value.isoformat()
    return str(value) if isinstance(value, Path) else finite(value)


def site_document(site: Site, module_class: str) -> dict[str, Any]:
    """A site and its module's class as plain values."""
    return {
        "phase": site.phase.value,
        "kind": site.kind.value,
        "fqn": site.fqn,
        "module_class": module_class,
        "call": site.call,
        "path": site.path,
    }


def divergence_document(divergence: Divergence) -> dict[str, Any]:
    """A divergence as plain values; keys beyond the usual ones only where they have a value.

    `rel_l2` is None, with `rel_l2_below`, where sketches cannot tell the values apart.
    """
    site = divergence.site
    unresolved = divergence.rel_l2 == 0 and not divergence.exact  # sketches cannot tell values this close apart
    document = {
        "step": divergence.step,
        "rank": divergence.rank,
        **site_document(site, divergence.module_class),
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
        "size": divergence.size.value if divergence.size is not None else None,
        "labels": label_document(divergence.labels),
        "labels_b": label_document(divergence.labels_b),
    }
    return document | {name: finite(value) for name, value in extra.items() if value is not None}


def summary_document(summary: Summary | None) -> dict[str, Any] | None:
    """A summary as plain values; None for None."""
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


def label_document(labels: Labels) -> dict[str, Any] | None:
    """Labels of a step as plain values, ranges as [first, last]; None where there are none."""
    return {name: list(label) if isinstance(label, tuple) else label for name, label in labels.items()} or None
