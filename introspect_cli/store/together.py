"""One step of all ranks put together, site by site, without looking at one record after the other.

Sixty-four ranks with two thousand sites each are 128,000 records a step, of which nearly all mean the same: one of
equal copies, or parts that add up. What becomes of a site follows from its layouts and from what was seen of it, which
hardly change from step to step: that is planned once. The values are then added up over the sorted columns of all
ranks. Checksums are exact: the sums under them are integers modulo 2**64.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import KIND_CODES, SKETCH_SIZE, Kind, Status
from introspect_cli.store.adding import EXTREMA, NONFINITE, Adding
from introspect_cli.store.batch import AS_RECORDED, COPIES, GATHERED, OWED, PARTS, StepBatch, absent
from introspect_cli.store.launched import rank_list
from introspect_cli.store.plan import UNPLACED, Plan, any_of, group_of, planned, starts_of
from introspect_cli.store.ranked import whole_layout
from introspect_cli.sums import MASK

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from introspect_cli.records import Layout
    from introspect_cli.store.ranked import Places, RankedStep, Rows

    Array = NDArray[Any]

DIFFERENT_COPIES = "copies differ"
"""How the text of a record begins that stands for copies which are not equal."""

NOT_WHOLE = "parts are not the whole"
"""How the text of a record begins whose parts leave some of it out, or overlap, though all ranks were recorded."""

VALUES_OF = "values of"
"""How the text of a record begins that stands for different values of several ranks: no tensor has its shape."""

EQUAL_ON = "equal on"
"""How the text of a record begins that stands for equal values of several ranks: copies, or equal parts."""

_COPIED = (Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE)
_FIRSTS = (Kind.BUFFER, Kind.HYPERPARAMETER)
"""Of these the first rank's counts: DDP gives its buffers to the others before each forward pass."""

_OWN = (Kind.BATCH, Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.LOSS, Kind.RNG)
"""Of these each rank may have its own."""

_COPIES_APART = 1e-4
_NOT_SEEN, _PARTIAL, _VALUE = int(Status.NOT_OBSERVED), int(Status.PARTIAL), int(Status.VALUE)
_MIXED = "some ranks hold parts of it and others what has no known place"


class Together:
    """Puts steps together, and remembers how."""

    def __init__(
        self,
        places: Places,
        kinds: Array,
        left_out: Callable[[RankedStep], Array],
        number_of: Callable[[Layout], int],
        lacking: str = "",
        *,
        of: Array | None = None,
        complete: bool = False,
    ) -> None:
        """Start without a plan.

        Args:
            places: the ranks' layouts.
            kinds: of each site of the whole, the code of its kind.
            left_out: says of a step which rows count for nothing.
            number_of: the whole's number of a layout.
            lacking: why the values that each rank has its own of are not all there; "" where they are.
            of: of each site of the whole, the site of the value that it is a gradient of; -1 where it is of none.
            complete: whether all ranks were recorded, so that a part of the model that is missing is missing there.
        """
        self.of = of
        self.lacking, self.complete = lacking, complete
        self._places, self._kinds, self._left_out, self._number_of = places, kinds, left_out, number_of
        self._plan: Plan | None = None
        self._adding: tuple[bytes, Adding] | None = None
        self._layouts: Array | None = None
        self._wholes: dict[int, int] = {}
        self._gathered: dict[bytes, int] = {}

    def put(self, step: RankedStep) -> StepBatch:
        """The records of a step of all ranks, as one rank's."""
        if self._plan is None or not self._plan.fits(step):
            self._plan = planned(step, self._places, self._kinds, self._left_out(step))
            self._adding = self._layouts = None
        return _Putting(self, self._places, step, self._plan).batch()

    @property
    def rows(self) -> Rows | None:
        """The rows of the step that was put together last; None before."""
        return None if self._plan is None else self._plan.basis

    def layouts(self, plan: Plan) -> Array:
        """Of each group, the whole's number of its first record's layout; uint32."""
        if self._layouts is None:
            numbers = plan.basis.number[plan.rows[plan.starts]].tolist()
            self._layouts = np.array([self.whole(number) for number in numbers], np.uint32)
        return np.array(self._layouts)

    def adding(self, plan: Plan, groups: Array) -> Adding:
        """What adds up the parts of some groups, in their order."""
        key = groups.tobytes()
        if self._adding is None or self._adding[0] != key:
            place = np.full(len(plan.starts), -1)
            place[groups] = np.arange(len(groups))
            at = np.flatnonzero((place[plan.group] >= 0) & (plan.owner == np.arange(len(plan.rows))))
            rows, own = plan.rows[at], plan.basis
            rank, number = own.rank[rows], own.number[rows]
            held, heads = self._places.held[number], self._places.header[number]
            self._adding = key, Adding(rank, rows - own.starts[rank], place[plan.group[at]], held, heads)
        return self._adding[1]

    def whole(self, number: int) -> int:
        """The whole's number of a layout of a part of it."""
        found = self._wholes.get(number)
        if found is None:
            found = self._wholes[number] = self._number_of(whole_layout(self._places.layouts[number]))
        return found

    def batched(self, numbers: Array) -> int:
        """The whole's number of what tensors of some layouts are together: one tensor, if only the first size differs.

        Args:
            numbers: int64, of layouts.
        """
        key = numbers.tobytes()
        found = self._gathered.get(key)
        if found is None:
            layouts = [self._places.layouts[number] for number in numbers.tolist()]
            shape = layouts[0].shape
            shapes = [own.shape for own in layouts if own.shape]
            if shape and all(own[1:] == shape[1:] for own in shapes):
                shape = (sum(own[0] for own in shapes), *shape[1:])
            found = self._gathered[key] = self._number_of(replace(whole_layout(layouts[0]), shape=shape))
        return found


class _Putting:
    """One step while it is put together: a row of the result for each group."""

    def __init__(self, memory: Together, places: Places, step: RankedStep, plan: Plan) -> None:
        self.memory, self.places, self.step, self.plan = memory, places, step, plan
        self.row = plan.rows[plan.starts]
        self.size = len(self.row)
        self.layout = memory.layouts(plan)
        self.status = step.status[self.row].astype(np.uint8)
        self.checksum = step.taken(self.row, [batch.checksum for batch in step.batches])
        self.adrift = np.zeros(self.size, np.bool_)
        """Groups of parts of which ranks with the same part have other values: other samples, then."""
        self.how = np.full(self.size, AS_RECORDED, np.uint8)
        self.text = [""] * self.size
        some = step.batches[0]
        self.counts = {name: absent(some.counts[name].dtype.str, self.size) for name in step.count_names}
        self.floats = {name: absent("<f8", self.size) for name in step.float_names}
        self.sketch = np.full((self.size, SKETCH_SIZE), np.nan, np.float32) if step.sketched else None
        self.samples: dict[int, int] = {}

    def batch(self) -> StepBatch:
        step, plan = self.step, self.plan
        if step.texts:
            self.text = [step.texts.get(row, "") for row in self.row.tolist()]
        for group, row in plan.blind.items():
            self._unseen(group, step.texts.get(row, ""), row)
        for group in np.flatnonzero(plan.mixed).tolist():
            self._unseen(group, _MIXED)
        self._parts()
        self._owed()
        self._loose()
        self._as_recorded()
        order = step.taken(self.row, [batch.sequence for batch in step.batches])
        return StepBatch(
            site=plan.site,
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
        )

    def _as_recorded(self) -> None:
        """Fill in what is known of groups that stayed one of their records."""
        step = self.step
        groups = np.flatnonzero(self.how == AS_RECORDED)
        if not len(groups):
            return
        rows = self.row[groups]
        for name, counts in self.counts.items():
            counts[groups] = step.taken(rows, [batch.counts[name] for batch in step.batches])
        for name, floats in self.floats.items():
            floats[groups] = step.taken(rows, [batch.floats[name] for batch in step.batches])
        if self.sketch is not None:
            self.sketch[groups] = step.taken(rows, [np.asarray(batch.sketch) for batch in step.batches])
        if step.samples:
            own = zip(groups.tolist(), rows.tolist(), strict=True)
            self.samples |= {group: step.samples[row] for group, row in own if row in step.samples}
        for group in groups[self.plan.flows[groups] & (self.plan.ranks[groups] > 1)].tolist():
            self.text[group] = self.text[group] or f"{EQUAL_ON} {self.plan.ranks[group]} ranks"

    # --- what becomes of a group

    def _put(self, groups: Array, how: int, status: int) -> None:
        """Make groups something else than one of their records: nothing is known of them but what is then set."""
        self.how[groups], self.status[groups] = how, status
        for columns in (self.counts, self.floats):
            for column in columns.values():
                column[groups] = absent(column.dtype.str, 1)[0]
        if self.sketch is not None:
            self.sketch[groups] = np.nan

    def _unseen(self, group: int, why: str, row: int | None = None) -> None:
        self._put(np.array([group]), GATHERED, _NOT_SEEN)
        if row is not None:
            self.row[group] = row
            self.layout[group] = self.memory.whole(int(self.step.number[row]))
        self.checksum[group], self.text[group] = 0, why

    def _members(self, groups: Array) -> tuple[Array, Array, Array]:
        """Where in the plan's rows some groups' are: places, starts of groups among them, and each one's group."""
        wanted = np.zeros(self.size, np.bool_)
        wanted[groups] = True
        at = np.flatnonzero(wanted[self.plan.group])
        own = self.plan.group[at]
        starts = starts_of(own)
        return at, starts, group_of(starts, len(at))

    def _equal(self) -> Array:
        """Of each group, whether all its checksums are equal."""
        sums, plan = self.step.checksum[self.plan.rows], self.plan
        return ~any_of(sums != sums[plan.starts][plan.group], plan.starts)

    def _distinct(self, at: Array, own: Array) -> Array:
        """Of members, whether a checksum is seen for the first time in its group."""
        sums = self.step.checksum[self.plan.rows[at]]
        order = np.lexsort((np.arange(len(at)), sums, own))
        new = np.ones(len(at), np.bool_)
        new[1:] = (sums[order][1:] != sums[order][:-1]) | (own[order][1:] != own[order][:-1])
        out = np.zeros(len(at), np.bool_)
        out[order] = new
        return out

    def _marks(self, groups: Array, at: Array, starts: Array, *, ordered: bool) -> None:
        """Give groups a checksum over those of their members: equal for equal ones, and no tensor's."""
        sums = self.step.checksum[self.plan.rows[at]]
        ends = [*starts[1:].tolist(), len(at)]
        for group, start, end in zip(groups.tolist(), starts.tolist(), ends, strict=True):
            own = sums[start:end] if ordered else np.sort(sums[start:end])
            self.checksum[group] = int.from_bytes(blake2b(own.tobytes(), digest_size=8).digest(), "little")

    def _parts(self) -> None:
        """Wholes out of their parts: each once, whoever else has a copy of it."""
        step, plan = self.step, self.plan
        unlike = plan.copies
        if len(unlike):
            unlike = unlike[step.checksum[plan.rows[unlike]] != step.checksum[plan.rows[plan.owner[unlike]]]]
        doubled = np.zeros(self.size, np.bool_)
        doubled[plan.group[unlike]] = True
        doubled &= plan.parts
        for group, text in plan.unfit.items():
            doubled[group] = False
            if self.memory.complete and plan.kind[group] in _STATE and text != UNPLACED:
                one = np.array([group])
                self._put(one, PARTS, int(Status.OBSERVED))
                at, _, _ = self._members(one)
                self._marks(one, at, _FIRST, ordered=True)
                self.text[group] = f"{NOT_WHOLE}: {text}"
            else:
                self._unseen(group, text)
        self.adrift = doubled & plan.flows
        for group in np.flatnonzero(doubled & ~plan.flows).tolist():
            where = int(unlike[plan.group[unlike] == group][0])
            ranks = [step.rank_of(int(plan.rows[own])) for own in (plan.owner[where], where)]
            self._unseen(group, f"{rank_list(ranks)} hold the same part of it with different values")
        fitting = plan.parts & ~doubled
        fitting[list(plan.unfit)] = False
        groups = np.flatnonzero(fitting)
        if not len(groups):
            return
        added = self.memory.adding(plan, groups).add(step.batches, step.count_names, step.float_names)
        self._put(groups, PARTS, int(Status.OBSERVED))
        self.checksum[groups] = added.checksum
        if self.sketch is not None:
            self.sketch[groups] = added.sketch
        for name, values in (*added.counts.items(), *added.floats.items()):
            (self.counts if name in added.counts else self.floats)[name][groups] = values
        for group in groups.tolist() if step.texts else ():
            self.text[group] = ""

    def _owed(self) -> None:
        """Sums that ranks still owe one another, which only sketches can add up."""
        step, plan = self.step, self.plan
        groups = np.flatnonzero(plan.owed)
        if not len(groups):
            return
        at, starts, own = self._members(groups)
        distinct = np.add.reduceat(self._distinct(at, own), starts)
        sizes = np.diff(starts, append=len(at))
        for place, group in enumerate(groups.tolist()):
            part = self.places.layouts[int(step.number[self.row[group]])].part
            assert part is not None  # so it was planned
            if part.owed not in ("sum", "avg") or distinct[place] > part.owing or self.sketch is None:
                self._unseen(group, f"a {part.owed} over {part.owing} ranks is still owed")
                continue
            assert step.sketch is not None  # as above
            own_rows = at[starts[place] : starts[place] + sizes[place]]
            members = plan.rows[own_rows]
            total = step.sketch[members].astype(np.float64).sum(axis=0) * (part.owing / len(members))
            self._put(groups[place : place + 1], OWED, _PARTIAL)
            self.sketch[group] = total / part.owing if part.owed == "avg" else total
            for name in NONFINITE:
                if name in self.counts:
                    self.counts[name][group] = step.counts[name][members].sum()
            self._marks(
                groups[place : place + 1], at[starts[place] : starts[place] + sizes[place]], _FIRST, ordered=True
            )
            self.text[group] = f"{part.owed} over {part.owing} ranks, still owed"

    def _loose(self) -> None:
        """What has no parts: one of equal copies, copies that are not equal, or what each rank has its own of."""
        step, plan = self.step, self.plan
        loose = plan.loose | self.adrift
        if not loose.any():
            return
        if step.texts:
            for at in np.flatnonzero((step.status[plan.rows] == _PARTIAL) & loose[plan.group]).tolist():
                group, text = int(plan.group[at]), step.texts.get(int(plan.rows[at]), "")
                if loose[group] and "not known" in text:
                    self._unseen(group, text)
                    loose[group] = False
        if self.memory.lacking:
            for group in np.flatnonzero(loose & np.isin(plan.kind, [KIND_CODES[kind] for kind in _OWN])).tolist():
                self._unseen(group, self.memory.lacking)
                loose[group] = False
        cut = any_of(self.places.part[step.number[plan.rows]] > 0, plan.starts)
        apart = loose & (cut | ~self._equal()) & ~np.isin(plan.kind, [KIND_CODES[kind] for kind in _FIRSTS])
        random = plan.kind == KIND_CODES[Kind.RNG]
        for group in np.flatnonzero(apart & random).tolist():
            self._unseen(group, "each rank has its own")
        copied = np.isin(plan.kind, [KIND_CODES[kind] for kind in _COPIED])
        self._copies(np.flatnonzero(apart & copied))
        self._gather(np.flatnonzero(apart & ~copied & ~random))

    def _copies(self, groups: Array) -> None:
        """Copies that are not the same bits: one of them where rounding explains that, and else none."""
        step = self.step
        if not len(groups):
            return
        at, starts, own = self._members(groups)
        rows = self.plan.rows[at]
        near = np.zeros(len(groups), np.bool_)
        if step.sketch is not None:
            sketches = step.sketch[rows].astype(np.float64)
            apart = np.maximum.reduceat(np.linalg.norm(sketches - sketches[starts][own], axis=1), starts)
            near = apart <= _COPIES_APART * np.maximum.reduceat(np.linalg.norm(sketches, axis=1), starts)
        ends = np.append(starts[1:], len(at))
        for place in np.flatnonzero(~near).tolist():
            start, end = int(starts[place]), int(ends[place])
            members, one = rows[start:end], groups[place : place + 1]
            others = [row for row in members.tolist() if step.checksum[row] != step.checksum[members[0]]]
            self._put(one, COPIES, int(self.status[one[0]]))
            self._marks(one, at[start:end], _FIRST, ordered=True)
            ranks = rank_list([step.rank_of(row) for row in others])
            self.text[int(one[0])] = f"{DIFFERENT_COPIES}: {ranks} from rank {step.rank_of(int(members[0]))}"

    def _gather(self, groups: Array) -> None:
        """Values of ranks that differ, as one: their extrema and moments."""
        step, plan = self.step, self.plan
        if not len(groups):
            return
        at, starts, _ = self._members(groups)
        plain = any_of(step.status[plan.rows[at]] == _VALUE, starts)
        for group in groups[plain].tolist():
            self._unseen(group, "a plain value, another on each rank")
        groups = groups[~plain]
        added = self._added(groups)
        self._add(groups[added])
        groups = groups[~added]
        if not len(groups):
            return
        at, starts, own = self._members(groups)
        of_ranks = self._of_ranks(groups, at, starts)
        kept = self._distinct(at, own)
        at = at[kept]
        starts = starts_of(own[kept])
        own = group_of(starts, len(at))
        rows = plan.rows[at]
        self._put(groups, GATHERED, int(Status.OBSERVED))
        self._marks(groups, at, starts, ordered=False)
        sizes = np.diff(starts, append=len(at)).tolist()
        for group, start, size in zip(groups.tolist(), starts.tolist(), sizes, strict=True):
            self.text[group] = of_ranks[group]
            numbers = step.number[rows[start : start + size]]
            parts = self.places.part[numbers]
            self.layout[group] = self.memory.batched(numbers[parts == parts[0]])
            sums = [step.samples.get(row) for row in rows[start : start + size].tolist()] if step.samples else [None]
            if None not in sums and not parts.any():
                self.samples[group] = sum(filter(None, sums)) & MASK
        self._moments(groups, rows, starts, own, self.places.held[step.number[rows]])

    def _added(self, groups: Array) -> Array:
        """Whether groups are gradients of what is equal on all ranks, such as an embedding of positions: they add up.

        They are not samples beside one another.
        """
        of = self.memory.of
        if of is None:
            return np.zeros(len(groups), np.bool_)
        here = self.step.site[self.row]
        of_group = dict(zip(here.tolist(), self._equal().tolist(), strict=True))
        return np.array([of_group.get(int(of[site]), False) for site in here[groups]], np.bool_)

    def _add(self, groups: Array) -> None:
        """The sum of what the ranks have; only sketches can be added up."""
        step = self.step
        if step.sketch is None:
            for group in groups.tolist():
                self._unseen(group, "each rank's share of a sum")
        elif len(groups):
            at, _, own = self._members(groups)
            kept = self._distinct(at, own)
            at, starts = at[kept], starts_of(own[kept])
            self._put(groups, OWED, _PARTIAL)
            assert self.sketch is not None  # as the step's
            self.sketch[groups] = np.add.reduceat(step.sketch[self.plan.rows[at]].astype(np.float64), starts)
            self._marks(groups, at, starts, ordered=False)
            for group in groups.tolist():
                self.text[group] = "gradients of several ranks, added up"

    def _of_ranks(self, groups: Array, at: Array, starts: Array) -> dict[int, str]:
        """What each group's values are together, in words; a rank that has several of them is one rank."""
        ranks = self.step.rank[self.plan.rows[at]]
        ends = np.append(starts[1:], len(at)).tolist()
        told = {}
        for group, start, end in zip(groups.tolist(), starts.tolist(), ends, strict=True):
            number = len(np.unique(ranks[start:end]))
            what = f"{number} ranks" if number > 1 else f"{end - start} calls"
            told[group] = f"{VALUES_OF} {what} together"
        return told

    def _moments(self, groups: Array, rows: Array, starts: Array, own: Array, sizes: Array) -> None:
        """Statistics of several tensors' elements together.

        Args:
            groups: int64 (m,).
            rows: int64 (n,), their rows, group after group.
            starts: int64 (m,), where among `rows` each group begins.
            own: int64 (n,), positions among `groups`.
            sizes: int64 (n,), elements of each row.
        """
        step = self.step
        for name, column in step.counts.items():
            values = column[rows]
            known = np.minimum.reduceat(values, starts) >= 0
            self.counts[name][groups] = np.where(known, np.add.reduceat(values, starts), -1)
        left_out = sum(np.maximum(step.counts[n][rows], 0) for n in NONFINITE if n in step.counts)
        finite = sizes.astype(np.float64) - left_out
        total = np.add.reduceat(finite, starts)[own]
        weight = np.divide(finite, total, out=finite.copy(), where=total != 0)
        used = finite > 0
        some = any_of(used, starts)

        def mean(values: Array) -> Array:
            found = np.add.reduceat(np.where(used, weight * np.where(used, values, 0.0), 0.0), starts)
            return np.where(some, found, np.nan)

        for name, column in step.floats.items():
            values = column[rows]
            if name in EXTREMA:
                self.floats[name][groups] = EXTREMA[name].reduceat(np.where(used, values, np.nan), starts)
            elif name in ("mean", "amean"):
                self.floats[name][groups] = mean(values)
            elif name == "var" and "mean" in step.floats:
                means = step.floats["mean"][rows]
                middle = mean(means)[own]
                self.floats[name][groups] = mean(values + (means - middle) ** 2)


_FIRST = np.zeros(1, np.int64)
_STATE = frozenset(KIND_CODES[kind.value] for kind in (*_COPIED, Kind.BUFFER))
