"""Follow a run while it is written, and hand on each step that is complete, as the numbers that are published.

What publishes must never hold up training, draw from its random generators, import into it, or take it down. So it is
another process, which reads the store as any reader does: a run is readable while it goes on, and says itself whether
it still does. A logger that hangs or fails costs its own numbers and nothing else.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Kind, Status
from introspect_cli.store.read.poll import poll
from introspect_cli.store.read.run import open_run
from introspect_cli.store.read.step_reader import l2_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from introspect_cli.labels import Labels
    from introspect_cli.records import Record
    from introspect_cli.selection import Selection
    from introspect_cli.store.read.rank_reader import RankReader
    from introspect_cli.store.read.run import Run, RunState


def follow(
    path: str | Path,
    take: Callable[[RankReader, int], None],
    *,
    wait: bool = True,
    rank: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> tuple[int, RunState]:
    """Hand on every step of a run's lowest rank, in order, until the run is over.

    Args:
        path: the run.
        take: called with the rank and the number of a step.
        wait: whether to wait for a run that is being written; else what is there is all.
        rank: the only one to look at; the lowest of all, where it is None.
        between: called after each look.

    Returns:
        how many steps there were, and how the run ended.

    Raises:
        StoreError: the run cannot be read.
    """
    taken = [-1]

    def look(run: Run) -> tuple[int, RunState]:
        reader = run.rank(run.ranks[0]) if run.ranks else None
        for step in reader.entries["step"].tolist() if reader is not None else ():
            if step > taken[-1]:
                assert reader is not None
                take(reader, step)
                taken.append(step)
        return len(taken) - 1, run.state

    only = None if rank is None else {rank}
    return poll(path, look, opened=partial(open_run, only=only), wait=wait, between=between)


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
