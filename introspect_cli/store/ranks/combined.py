"""The records of one step of all ranks while they are put together.

A row for each site, which begins as the first record of it. Whoever finds out that it stands for something else (parts
of a whole, copies, different values) says so and fills in what is then known; other rows stay as they were recorded.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import Joined, Status
from introspect_cli.store.format.batch import StepBatch, absent, rows_of
from introspect_cli.store.format.columns import filled
from introspect_cli.store.ranks.plan import any_of, group_of, starts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from introspect_cli.store.ranks.plan import Plan
    from introspect_cli.store.ranks.stacked import StackedStep

    Array = NDArray[Any]
    from collections.abc import Sequence


NONFINITE = ("nans", "posinfs", "neginfs")
_EXTREMA = {"min": np.fmin, "max": np.fmax, "absmin": np.fmin}


class CombinedStep:
    """One row for each group of the plan, filled in while the ranks' records are combined.

    Attributes:
        row: int64, the row of all ranks that a group stands for.
    """

    def __init__(self, step: StackedStep, plan: Plan, layout: Array) -> None:
        self.step, self.plan, self.layout = step, plan, layout
        self.row = plan.rows[plan.starts]
        self.size = len(self.row)
        block = step.block
        self.status = block.status[self.row].astype(np.uint8)
        self.checksum = block.checksum[self.row]
        self.how = np.full(self.size, Joined.AS_RECORDED, np.uint8)
        self.ranks = np.zeros(self.size, np.uint32)
        self.elements = np.full(self.size, -1, np.int64)
        self.text = [block.text[row] for row in self.row.tolist()] if len(filled(block.text)) else [""] * self.size
        self.counts = {name: column[self.row] for name, column in block.counts.items()}
        self.floats = {name: column[self.row].astype(np.float64) for name, column in block.floats.items()}
        self.sketch = None if block.sketch is None else block.sketch[self.row]

    def set(self, groups: Array, how: int, status: int) -> None:
        """Set `how` and `status` of groups and clear their statistics and sketches."""
        self.how[groups], self.status[groups] = how, status
        for column in (*self.counts.values(), *self.floats.values()):
            column[groups] = absent(column.dtype.str, 1)[0]
        if self.sketch is not None:
            self.sketch[groups] = np.nan

    def unseen(self, group: int, why: str) -> None:
        """Make a group NOT_OBSERVED, with the reason `why` as its text."""
        self.set(np.array([group]), Joined.GATHERED, int(Status.NOT_OBSERVED))
        self.checksum[group], self.text[group] = 0, why

    def put_moments(self, groups: Array, rows: Array, starts: Array, sizes: Array) -> None:
        """Fill in counts, extrema and moments over all elements of several rows.

        Args:
            groups: the groups to fill in.
            rows: their rows, group after group.
            starts: where in `rows` each group begins.
            sizes: elements of each row.
        """
        block, group = self.step.block, group_of(starts, len(rows))
        finite = sizes.astype(np.float64)
        for name, column in block.counts.items():
            values = column[rows]
            counted = np.minimum.reduceat(values, starts) >= 0
            self.counts[name][groups] = np.where(counted, np.add.reduceat(values, starts), -1)
            if name in NONFINITE:
                finite -= np.maximum(values, 0)
        used = finite > 0
        full = bool(used.all())
        total = np.add.reduceat(np.where(used, finite, 0.0), starts)

        def of(name: str, other: float = 0.0) -> Array:
            values: Array = block.floats[name][rows].astype(np.float64)
            return values if full else np.where(used, values, other)

        def mean(values: Array) -> Array:
            """Mean over each group, weighted by finite elements; NaN where a group has none."""
            sums = np.add.reduceat(finite * values, starts)
            of_all: Array = np.divide(sums, total, out=np.full(len(starts), np.nan), where=total > 0)
            return of_all

        for name in block.floats:
            if name in _EXTREMA:
                self.floats[name][groups] = _EXTREMA[name].reduceat(of(name, np.nan), starts)
            elif name in ("mean", "amean"):
                self.floats[name][groups] = mean(of(name))
            elif name == "var" and "mean" in block.floats:
                means = of("mean")
                self.floats[name][groups] = mean(of(name) + (means - mean(means)[group]) ** 2)

    def mark(self, groups: Array, at: Array, starts: Array, *, ordered: bool) -> None:
        """Give each group a hash of its members' checksums as its checksum, with or without regard to their order."""
        sums = np.split(self.step.block.checksum[self.plan.rows[at]], starts[1:])
        for group, members in zip(groups.tolist(), sums, strict=True):
            data = (members if ordered else np.sort(members)).tobytes()
            self.checksum[group] = int.from_bytes(blake2b(data, digest_size=8).digest(), "little")

    def members(self, groups: Array) -> tuple[Array, Array, Array]:
        """Positions in `plan.rows` of some groups' members, starts of groups among them, and each one's group."""
        wanted = np.zeros(self.size, np.bool_)
        wanted[groups] = True
        at = np.flatnonzero(wanted[self.plan.group])
        starts = starts_of(self.plan.group[at])
        return at, starts, group_of(starts, len(at))

    def equal(self) -> Array:
        """Bool (groups,), whether all members of a group have one checksum."""
        sums, plan = self.step.block.checksum[self.plan.rows], self.plan
        return ~any_of(sums != sums[plan.starts][plan.group], plan.starts)

    def distinct(self, at: Array, group: Array) -> Array:
        """Bool (members,), False for a value that another rank has too; equal values of one rank's calls all count."""
        rows = self.plan.rows[at]
        sums, rank = self.step.block.checksum[rows], self.step.rows.rank[rows]
        order = np.lexsort((np.arange(len(at)), rank, sums, group))
        changed = [column[order][1:] != column[order][:-1] for column in (group, sums, rank)]
        first = np.ones(len(at), np.bool_)  # of its group, checksum and rank
        first[1:] = changed[0] | changed[1] | changed[2]
        starts = np.flatnonzero(first)
        time = np.arange(len(at)) - np.repeat(starts, np.diff(starts, append=len(at)))
        again = np.lexsort((rank[order], time, sums[order], group[order]))
        order, time = order[again], time[again]
        new = np.ones(len(at), np.bool_)
        new[1:] = (group[order][1:] != group[order][:-1]) | (sums[order][1:] != sums[order][:-1])
        new[1:] |= time[1:] != time[:-1]
        out = np.zeros(len(at), np.bool_)
        out[order] = new
        return out

    def of_ranks(self, at: Array, starts: Array) -> list[str]:
        """For each group `3 ranks`, or `2 calls` where one rank has all its values."""
        every = np.split(self.step.rows.rank[self.plan.rows[at]], starts[1:])
        numbers = [len(np.unique(ranks)) for ranks in every]
        return [
            f"{number} ranks" if number > 1 else f"{len(ranks)} calls"
            for number, ranks in zip(numbers, every, strict=True)
        ]

    def batch(self) -> StepBatch:
        """The combined records as a batch, to be given to `join_slices`."""
        return StepBatch(
            site=self.plan.site,
            sequence=self.step.block.sequence[self.row],
            layout=self.layout,
            status=self.status,
            checksum=self.checksum,
            counts=self.counts,
            floats=self.floats,
            sketch=self.sketch,
            text=self.text,
            how=self.how,
            ranks=self.ranks,
            calls=self.plan.calls,
            elements=self.elements,
        )


def join_slices(slices: Sequence[StepBatch]) -> StepBatch:
    """Join a step's slices into one batch, sorted by site, with `sequence` renumbered from 0 without gaps."""
    batch = slices[0]
    if len(slices) > 1:
        order = np.argsort(np.concatenate([each.site for each in slices]), kind="stable")
        batch = rows_of(slices, [np.arange(len(each)) for each in slices], order)
    return replace(batch, sequence=np.argsort(np.argsort(batch.sequence, kind="stable")).astype(np.uint32))
