"""The records of one step of all ranks while they are put together.

A row for each site, which begins as the first record of it. Whoever finds out that it stands for something else (parts
of a whole, copies, different values) says so and fills in what is then known; other rows stay as they were recorded.

Every rank numbers its records by itself, and a rank may hold several parts of one tensor. Which row is added to which
sum hardly ever changes from step to step, so it is worked out once, in turns: in a turn, rows of one rank go to as many
different sums. Adding up a step is then a few numpy operations a turn. The order is the ranks', so that equal records
give equal bits.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.records import SKETCH_SIZE, Joined, Status
from introspect_cli.store.format.batch import StepBatch, absent, rows_of
from introspect_cli.store.ranks.plan import any_of, group_of, starts_of
from introspect_cli.sums import mix, unmix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from introspect_cli.store.ranks.plan import Plan
    from introspect_cli.store.ranks.stacked import StackedStep

    Array = NDArray[Any]
    from collections.abc import Callable, Sequence


class CombinedStep:
    """A row for each group of the plan.

    Attributes:
        row: int64, the row of all ranks that a group stands for.
    """

    def __init__(self, step: StackedStep, plan: Plan, layout: Array) -> None:
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
        """The records, for `join_slices`; groups that stayed one of theirs have what was recorded of it."""
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
        order = step.taken(self.row, [batch.sequence for batch in batches])
        return StepBatch(
            site=self.plan.site,
            sequence=order,
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
    """A step that was put together in slices of its sites, numbered in the order in which its sites were recorded."""
    batch = slices[0]
    if len(slices) > 1:
        order = np.argsort(np.concatenate([each.site for each in slices]), kind="stable")
        batch = rows_of(slices, [np.arange(len(each)) for each in slices], order)
    return replace(batch, sequence=np.argsort(np.argsort(batch.sequence, kind="stable")).astype(np.uint32))


# --- parts added up, one rank after the other


NONFINITE = ("nans", "posinfs", "neginfs")
EXTREMA = {"min": np.fmin, "max": np.fmax, "absmin": np.fmin}


class _Turn(NamedTuple):
    """Rows of one rank that are added to different sums.

    Attributes:
        rank: position of the rank.
        rows: n rows of it.
        to: the n sums that they are added to.
        held: float64 (n,), elements of each.
        headers: uint64 (n,), what each checksum has beside its elements.
    """

    rank: int
    rows: Array | slice
    to: Array | slice
    held: Array
    headers: Array


class PartSums:
    """Adds up some rows of each rank."""

    def __init__(self, rank: Array, row: Array, to: Array, held: Array, headers: Array) -> None:
        """Work out the turns.

        Args:
            rank: int64 (n,), positions of ranks.
            row: int64 (n,), rows among those of the rank.
            to: int64 (n,), the sum that it is added to; every sum from 0 to the largest has one at least.
            held: int64 (n,), elements.
            headers: uint64 (n,), what the checksum has beside its elements.
        """
        self.size = int(to.max(initial=-1)) + 1
        self._turns: list[_Turn] = []
        self._header = np.zeros(self.size, np.uint64)
        for number in np.unique(rank).tolist():
            left = np.flatnonzero(rank == number)
            left = left[np.argsort(row[left], kind="stable")]
            while len(left):
                _, first = np.unique(to[left], return_index=True)
                once = left[np.sort(first)]
                left = np.delete(left, first)
                turn = _Turn(number, _span(row[once]), _span(to[once]), held[once].astype(np.float64), headers[once])
                self._turns.append(turn)
                self._header[turn.to] = turn.headers

    def checksums(self, batches: Sequence[StepBatch]) -> Array:
        """uint64, the checksums of wholes whose parts are added up, given the ranks' batches of a step."""
        raw = np.zeros(self.size, np.uint64)
        for turn in self._turns:
            raw[turn.to] += unmix(batches[turn.rank].checksum[turn.rows]) - turn.headers
        total_checksum: Array = mix(raw + self._header)
        return total_checksum

    def sketches(self, batches: Sequence[StepBatch]) -> Array:
        """float64 (sums, 16); every rank must have kept sketches."""
        first = np.asarray(batches[0].sketch)
        out = np.zeros((self.size, first.shape[1]))
        for turn in self._turns:
            out[turn.to] += np.asarray(batches[turn.rank].sketch)[turn.rows]
        return out

    def statistics(
        self, batches: Sequence[StepBatch], counts: Sequence[str], floats: Sequence[str]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Counts and other statistics by name, of those that add up.

        Returns:
            int64, -1 where a rank did not count; and float64, NaN where absent.
        """
        counted = {name: self._count([batch.counts[name] for batch in batches]) for name in counts}
        return counted, self._moments(batches, self._finite(batches, counted), floats)

    def _count(self, columns: Sequence[Array]) -> Array:
        out, signs = np.zeros(self.size, np.int64), np.zeros(self.size, np.int64)
        for turn in self._turns:
            values = columns[turn.rank][turn.rows]
            out[turn.to] += values
            signs[turn.to] |= values
        return np.where(signs >= 0, out, -1)

    def _finite(self, batches: Sequence[StepBatch], counted: dict[str, Array]) -> list[Array]:
        """Of each turn, the numbers of finite elements."""
        names = [name for name in NONFINITE if name in counted]
        if not any(counted[name].any() for name in names):
            return [turn.held for turn in self._turns]
        every = []
        for turn in self._turns:
            columns = [batches[turn.rank].counts[name][turn.rows] for name in names]
            every.append(turn.held - sum(np.maximum(values, 0) for values in columns))
        return every

    def _moments(self, batches: Sequence[StepBatch], finite: list[Array], names: Sequence[str]) -> dict[str, Array]:
        """Extrema and moments of all finite elements, given those of each row; NaN where one is absent."""
        total = np.zeros(self.size)
        for turn, sizes in zip(self._turns, finite, strict=True):
            total[turn.to] += sizes
        full = all(bool((sizes > 0).all()) for sizes in finite)

        def used(sizes: Array, values: Array, other: float) -> Array:
            return values if full else np.where(sizes > 0, values, other)

        def mean(values_of: Callable[[_Turn], Array]) -> Array:
            sums = np.zeros(self.size)
            for turn, sizes in zip(self._turns, finite, strict=True):
                sums[turn.to] += sizes * used(sizes, values_of(turn), 0.0)
            of_all: Array = np.divide(sums, total, out=np.full(self.size, np.nan), where=total > 0)
            return of_all

        def column(name: str) -> Callable[[_Turn], Array]:
            return lambda turn: np.asarray(batches[turn.rank].floats[name][turn.rows])

        moments: dict[str, Array] = {}
        for name, which in EXTREMA.items():
            if name in names:
                moments[name] = np.full(self.size, np.nan)
                for turn, sizes in zip(self._turns, finite, strict=True):
                    moments[name][turn.to] = which(moments[name][turn.to], used(sizes, column(name)(turn), np.nan))
        for name in ("mean", "amean"):
            if name in names:
                moments[name] = mean(column(name))
        if "var" in names and "mean" in moments:
            var, means, middle = column("var"), column("mean"), moments["mean"]
            moments["var"] = mean(lambda turn: var(turn) + (means(turn) - middle[turn.to]) ** 2)
        return moments


def _span(numbers: Array) -> Array | slice:
    """Numbers that follow one another, as a slice: nothing is copied to read it."""
    span = slice(int(numbers[0]), int(numbers[0]) + len(numbers))
    return span if np.array_equal(numbers, np.arange(span.start, span.stop)) else numbers
