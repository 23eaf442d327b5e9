"""The numbers of a step that are published: losses and totals, and statistics of what is selected."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Kind, Status
from introspect_cli.store.step_reader import l2_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.labels import Labels
    from introspect_cli.records import Record
    from introspect_cli.selection import Selection

TOTALS = {Kind.GRAD: "grad_norm", Kind.PARAM: "param_norm"}


def numbers_of(
    records: Sequence[Record], labels: Labels, selection: Selection | None = None, stats: Sequence[str] = ()
) -> dict[str, float]:
    """Numbers by name.

    Args:
        records: of one step.
        labels: what its framework calls it; numbers among them are published, too.
        selection: of which values statistics are published; None for none.
        stats: which statistics.
    """
    numbers: dict[str, float] = {}
    squares: dict[str, float] = {}
    last: dict[tuple[str, str], Record] = {}
    nans = infs = 0
    for record in records:
        site, summary = record.site, record.summary
        nans += max(int(summary.stats.get("nans", 0)), 0)
        infs += max(int(summary.stats.get("infs", 0)), 0)
        if site.kind is Kind.LOSS and "mean" in summary.stats:
            numbers["loss" if site.call == 0 and "loss" not in numbers else f"loss/{site.call}{site.path}"] = _value(
                record
            )
        if site.kind is Kind.HYPERPARAMETER and site.path.endswith("['lr']") and summary.status is Status.VALUE:
            with contextlib.suppress(ValueError):  # a store of somebody else's may hold any text
                numbers.setdefault("learning_rate", float(summary.text))
        if site.kind in TOTALS:
            last[site.kind.value, f"{site.fqn}{site.path}"] = record
        if selection is not None and selection.wants(site.kind, site.fqn):
            name = f"{site.kind.value}/{site.fqn}{site.path}{f'/call{site.call}' if site.call else ''}"
            numbers |= {f"{name}/{stat}": float(summary.stats[stat]) for stat in stats if stat in summary.stats}
    for record in last.values():
        stats_of, numel = record.summary.stats, record.summary.layout.numel
        if "mean" in stats_of and "var" in stats_of:
            norm = float(l2_norm(np.float64(stats_of["mean"]), np.float64(stats_of["var"]), np.float64(numel)))
            name = TOTALS[record.site.kind]
            squares[name] = squares.get(name, 0.0) + norm * norm
    numbers |= {name: math.sqrt(total) for name, total in squares.items()}
    numbers |= {"nans": float(nans), "infs": float(infs)}
    for name in ("epoch", "global_step"):
        label = labels.get(name)
        if isinstance(label, (int, float)):
            numbers[name] = float(label)
    return numbers


def _value(record: Record) -> float:
    """A loss; of one that is not finite, what it is."""
    stats = record.summary.stats
    return math.nan if stats.get("nans", 0) else math.inf if stats.get("infs", 0) else float(stats["mean"])
