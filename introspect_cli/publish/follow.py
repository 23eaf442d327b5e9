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

from introspect_cli.derived import l2_norm
from introspect_cli.records import Kind, Status
from introspect_cli.store.run import open_run, poll

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from introspect_cli.records import Record
    from introspect_cli.selection import Selection
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.reader import RankReader
    from introspect_cli.store.run import Run


def follow(
    path: str | Path,
    take: Callable[[RankReader, int], None],
    *,
    rank: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> int:
    """Hand on every step of a run's lowest rank (or of `rank`), in order, and wait until the run is over.

    Args:
        path: the run.
        take: called with the rank's reader and the number of a step.
        rank: the only one to look at; None for the lowest of all.
        between: called after each look at the run, whether or not it had new steps.

    Returns:
        how many steps were handed on.

    Raises:
        StoreError: the run cannot be read.
    """
    taken = [-1]

    def look(run: Run) -> int:
        """Hand on the steps after the last one taken, none where no rank is there yet; returns how many all were."""
        for reader in map(run.rank, run.ranks[:1]):
            for step in reader.entries["step"].tolist():
                if step > taken[-1]:
                    take(reader, step)
                    taken.append(step)
        return len(taken) - 1

    only = None if rank is None else {rank}
    return poll(path, look, opened=partial(open_run, only=only), between=between)


TOTALS = {Kind.GRAD.value: "grad_norm", Kind.PARAM.value: "param_norm"}
_SINGLE = {Kind.LOSS.value, Kind.HYPERPARAMETER.value}


def numbers_of(
    reader: RankReader, step: int, selection: Selection | None = None, stats: Sequence[str] = ()
) -> dict[str, float]:
    """The numbers of a step to publish, by name.

    Where they were recorded: losses (`loss` for the first of call 0, others `loss/CALL` and the path), the first
    learning rate, L2 norms over all gradients and over all parameters (the last record of each), the framework's epoch
    and `global_step` where they are numbers. Always counts of NaN and infinities over all records. And what is
    selected, as `kind/fqn.../stat`: the last record of a name wins.

    Args:
        reader: of the rank.
        step: its number.
        selection: of which values statistics are published; None for none.
        stats: which statistics; one that a record does not have is left out.

    Raises:
        KeyError: the rank has no such step.
    """
    batch, sites = reader.read(step), reader.sites
    numbers: dict[str, float] = {}
    last: dict[tuple[str, str, str], int] = {}
    for row in np.argsort(batch.sequence, kind="stable").tolist():
        number = int(batch.site[row])
        kind = sites.kind[number]
        if kind in TOTALS:
            last[kind, sites.fqn[number], sites.path[number]] = row
        selected = selection is not None and selection.wants(Kind(kind), sites.fqn[number])
        if not selected and kind not in _SINGLE:
            continue
        record = reader.record(batch, row, step)
        site, summary = record.site, record.summary
        if site.kind is Kind.LOSS and "mean" in summary.stats:
            name = "loss" if site.call == 0 and "loss" not in numbers else f"loss/{site.call}{site.path}"
            numbers[name] = _value(record)
        if site.kind is Kind.HYPERPARAMETER and site.path.endswith("['lr']") and summary.status is Status.VALUE:
            with contextlib.suppress(ValueError):  # a store of somebody else's may hold any text
                numbers.setdefault("learning_rate", float(summary.text))
        if selected:
            name = f"{site.kind.value}/{site.fqn}{site.path}{f'/call{site.call}' if site.call else ''}"
            numbers |= {f"{name}/{stat}": float(summary.stats[stat]) for stat in stats if stat in summary.stats}
    for kind, name in TOTALS.items():
        rows = [row for (of, _, _), row in last.items() if of == kind]
        total = _norm_of(reader, batch, rows)
        numbers |= {name: total} if total is not None else {}
    left_out = {name: int(np.maximum(column, 0).sum()) for name, column in batch.counts.items()}
    numbers["nans"] = float(left_out.get("nans", 0))
    numbers["infs"] = float(left_out.get("posinfs", 0) + left_out.get("neginfs", 0))
    return numbers


def _norm_of(reader: RankReader, batch: StepBatch, rows: list[int]) -> float | None:
    """The L2 norm over all elements of the records at `rows`; records without mean and variance are left out.

    None where that leaves none.
    """
    if not rows or not {"mean", "var"} <= batch.floats.keys():
        return None
    mean, var = (np.asarray(batch.floats[name], np.float64)[rows] for name in ("mean", "var"))
    sizes = np.array([reader.layouts[number].numel for number in batch.layout[rows].tolist()], np.float64)
    known = ~np.isnan(mean) & ~np.isnan(var)
    return math.sqrt(float((l2_norm(mean, var, sizes)[known] ** 2).sum())) if known.any() else None


def _value(record: Record) -> float:
    """The mean of a loss's record; NaN where the loss holds a NaN, else +inf where it holds an infinity of any sign."""
    stats = record.summary.stats
    return math.nan if stats.get("nans", 0) else math.inf if stats.get("infs", 0) else float(stats["mean"])
