"""The records of one step of all ranks while they are put together.

A row for each site, which begins as the first record of it. Whoever finds out that it stands for something else (parts
of a whole, copies, different values) says so and fills in what is then known; other rows stay as they were recorded.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import SKETCH_SIZE, Joined, Status
from introspect_cli.store.adding import EXTREMA, NONFINITE
from introspect_cli.store.batch import StepBatch, absent
from introspect_cli.store.plan import any_of, group_of, starts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from introspect_cli.store.plan import Plan
    from introspect_cli.store.ranked import RankedStep

    Array = NDArray[Any]


class CombinedStep:
    """A row for each group of the plan.

    Attributes:
        row: int64, the row of all ranks that a group stands for.
    """

    def __init__(self, step: RankedStep, plan: Plan, layout: Array) -> None:
        self.step, self.plan, self.layout = step, plan, layout
        self.row = plan.rows[plan.starts]
        self.size = len(self.row)
        self.status = step.rows.status[self.row].astype(np.uint8)
        self.checksum = step.taken(self.row, [batch.checksum for batch in step.batches])
        self.how = np.full(self.size, Joined.AS_RECORDED, np.uint8)
        self.ranks = np.zeros(self.size, np.uint32)
        self.elements = np.full(self.size, -1, np.int64)
        self.text = [step.texts.get(row, "") for row in self.row.tolist()] if step.texts else [""] * self.size
        some = step.batches[0].counts
        self.counts = {name: absent(some[name].dtype.str, self.size) for name in step.rows.counts}
        self.floats = {name: absent("<f8", self.size) for name in step.rows.floats}
        self.sketch = np.full((self.size, SKETCH_SIZE), np.nan, np.float32) if step.sketched else None
        self.samples: dict[int, int] = {}

    def set(self, groups: Array, how: int, status: int) -> None:
        """Make groups something else than one of their records: nothing is known of them but what is then filled in."""
        self.how[groups], self.status[groups] = how, status
        for column in (*self.counts.values(), *self.floats.values()):
            column[groups] = absent(column.dtype.str, 1)[0]
        if self.sketch is not None:
            self.sketch[groups] = np.nan

    def unseen(self, group: int, why: str) -> None:
        """Make a group one that was not seen."""
        self.set(np.array([group]), Joined.GATHERED, int(Status.NOT_OBSERVED))
        self.checksum[group], self.text[group] = 0, why

    def put_statistics(self, groups: Array, counts: dict[str, Array], floats: dict[str, Array]) -> None:
        """Fill in statistics of some groups, in their order."""
        for columns, added in ((self.counts, counts), (self.floats, floats)):
            for name, values in added.items():
                columns[name][groups] = values

    def put_moments(self, groups: Array, rows: Array, starts: Array, sizes: Array) -> None:
        """Fill in statistics of the elements of rows together: `rows` group after group, each from its start on."""
        step, group = self.step, group_of(starts, len(rows))
        counts = {}
        for name, column in step.counts.items():
            counted = np.minimum.reduceat(column[rows], starts) >= 0
            counts[name] = np.where(counted, np.add.reduceat(column[rows], starts), -1)
        left_out = sum(np.maximum(step.counts[n][rows], 0) for n in NONFINITE if n in step.counts)
        finite = sizes.astype(np.float64) - left_out
        total = np.add.reduceat(finite, starts)[group]
        weight = np.divide(finite, total, out=finite.copy(), where=total != 0)
        used = finite > 0
        some = any_of(used, starts)

        def mean(values: Array) -> Array:
            sums = np.add.reduceat(np.where(used, weight * np.where(used, values, 0.0), 0.0), starts)
            return np.where(some, sums, np.nan)

        floats = {}
        for name, column in step.floats.items():
            values = column[rows]
            if name in EXTREMA:
                floats[name] = EXTREMA[name].reduceat(np.where(used, values, np.nan), starts)
            elif name in ("mean", "amean"):
                floats[name] = mean(values)
            elif name == "var" and "mean" in step.floats:
                means = step.floats["mean"][rows]
                floats[name] = mean(values + (means - mean(means)[group]) ** 2)
        self.put_statistics(groups, counts, floats)

    def mark(self, groups: Array, at: Array, starts: Array, *, ordered: bool) -> None:
        """Give groups a checksum over those of their members: equal for equal ones, and no tensor's."""
        sums = np.split(self.step.checksum[self.plan.rows[at]], starts[1:])
        for group, members in zip(groups.tolist(), sums, strict=True):
            data = (members if ordered else np.sort(members)).tobytes()
            self.checksum[group] = int.from_bytes(blake2b(data, digest_size=8).digest(), "little")

    def members(self, groups: Array) -> tuple[Array, Array, Array]:
        """Where in the plan's rows some groups' are: places, starts of groups among them, and each one's group."""
        wanted = np.zeros(self.size, np.bool_)
        wanted[groups] = True
        at = np.flatnonzero(wanted[self.plan.group])
        starts = starts_of(self.plan.group[at])
        return at, starts, group_of(starts, len(at))

    def equal(self) -> Array:
        """Of each group, whether all its checksums are equal."""
        sums, plan = self.step.checksum[self.plan.rows], self.plan
        return ~any_of(sums != sums[plan.starts][plan.group], plan.starts)

    def distinct(self, at: Array, group: Array) -> Array:
        """Of members, whether no other rank has that value; what two calls of one rank have counts twice."""
        rows = self.plan.rows[at]
        sums, rank = self.step.checksum[rows], self.step.rows.rank[rows]
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
        """Whose each group's values are, in words; a rank that has several of them is one rank."""
        every = np.split(self.step.rows.rank[self.plan.rows[at]], starts[1:])
        numbers = [len(np.unique(ranks)) for ranks in every]
        return [
            f"{number} ranks" if number > 1 else f"{len(ranks)} calls"
            for number, ranks in zip(numbers, every, strict=True)
        ]

    def batch(self) -> StepBatch:
        """The records; groups that stayed one of theirs have what was recorded of it."""
        step, batches = self.step, self.step.batches
        groups = np.flatnonzero(np.isin(self.how, (Joined.AS_RECORDED, Joined.ALIKE)))
        if len(groups):
            rows = self.row[groups]
            for name, counts in self.counts.items():
                counts[groups] = step.taken(rows, [batch.counts[name] for batch in batches])
            for name, floats in self.floats.items():
                floats[groups] = step.taken(rows, [batch.floats[name] for batch in batches])
            if self.sketch is not None:
                self.sketch[groups] = step.taken(rows, [np.asarray(batch.sketch) for batch in batches])
            if step.samples:
                each = zip(groups.tolist(), rows.tolist(), strict=True)
                self.samples |= {group: step.samples[row] for group, row in each if row in step.samples}
        order = step.taken(self.row, [batch.sequence for batch in batches])
        return StepBatch(
            site=self.plan.site,
            sequence=np.argsort(np.argsort(order, kind="stable")).astype(np.uint32),
            layout=self.layout,
            status=self.status,
            checksum=self.checksum,
            counts=self.counts,
            floats=self.floats,
            sketch=self.sketch,
            text=self.text,
            samples=self.samples,
            how=self.how,
            ranks=self.ranks,
            calls=self.plan.calls,
            elements=self.elements,
        )
