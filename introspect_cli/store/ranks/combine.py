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

from introspect_cli.records import KIND_CODES, Joined, Kind, Status
from introspect_cli.store.format.batch import StepBatch, rows_of
from introspect_cli.store.format.kinds import codes_that
from introspect_cli.store.ranks.plan import any_of, group_of, starts_of
from introspect_cli.sums import mix, unmix
from introspect_cli.texts import rank_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from introspect_cli.store.ranks.plan import Plan
    from introspect_cli.store.ranks.stacked import StackedStep
    from introspect_cli.store.ranks.whole_reader import WholeReader

    Array = NDArray[Any]

_COPIED, _STATE, _FIRSTS, _OWN = map(codes_that, ("copied", "state", "first", "own"))
_NONFINITE = ("nans", "posinfs", "neginfs")
_EXTREMA = {"min": np.fmin, "max": np.fmax, "absmin": np.fmin}

_ROUNDING = 1e-4
"""Copies whose sketches are further apart than this share of them are different."""


class CombinedStep:
    """One row for each group of a plan, filled in while the ranks' records of a step are combined.

    A row begins as the first record of its site. What stands for something else (parts of a whole, copies, different
    values) is set, with what is then known of it; other rows stay as they were recorded. `at` are positions in the
    plan's rows, `starts` where groups begin among them.
    """

    def __init__(self, reader: WholeReader, step: StackedStep, plan: Plan, layout: Array) -> None:
        """Make each group's row of its first record; `combined` does the rest.

        Args:
            reader: whose tables count.
            step: the records of all ranks.
            plan: of that step.
            layout: uint32 (groups,), the number of each group's layout; changed here.
        """
        self.reader, self.tables = reader, reader.tables
        self.block, self.ranks_of, self.basis, self.plan = step.block, step.ranks_of, step.rows, plan
        self.row = plan.rows[plan.starts]
        self.checksums = self.block.checksum[plan.rows]
        size, firsts = len(self.row), rows_of([self.block], [self.row])
        floats = {name: column.astype(np.float64) for name, column in firsts.floats.items()}
        self.out = replace(firsts, site=plan.site, layout=layout, floats=floats, calls=plan.calls)
        self.text = [*firsts.text]
        self.how, self.ranks = np.full(size, Joined.AS_RECORDED, np.uint8), np.zeros(size, np.uint32)
        self.elements = np.full(size, -1, np.int64)

    def combined(self) -> StepBatch:
        """The batch of all groups, to be given to `join_slices`; changes the rows, so call it once."""
        plan = self.plan
        groups, rows = np.array(list(plan.unseen), np.int64), np.array(list(plan.unseen.values()), np.int64)
        self._set_unseen(groups, [self.block.text[row] for row in rows.tolist()])
        self.row[groups] = rows
        self.out.layout[groups] = [self.reader.whole_number(number) for number in self.basis.layout[rows].tolist()]
        self._set_unseen(plan.mixed, "some ranks hold parts of it and others what has no known place")
        samples = self._add_parts()
        self._add_unreduced()
        self._combine_partless(plan.partless | samples)
        self._mark_alike()
        made: dict[str, Any] = {"text": self.text, "how": self.how, "ranks": self.ranks, "elements": self.elements}
        return replace(self.out, sequence=self.block.sequence[self.row], **made)

    # --- rows

    def _reset_groups(self, groups: Array, how: int, status: int, text: str | Sequence[str]) -> None:
        """Set `how`, `status` and text of groups, and clear their statistics and sketches; checksums stay.

        Args:
            groups: int64, numbers of groups.
            how: a value of `Joined`.
            status: a value of `Status`.
            text: one for all, or one for each of them.
        """
        self.how[groups], self.out.status[groups] = how, status
        for column in (*self.out.counts.values(), *self.out.floats.values()):
            column[groups] = -1 if column.dtype.kind == "i" else np.nan
        if self.out.sketch is not None:
            self.out.sketch[groups] = np.nan
        texts = [text] * len(groups) if isinstance(text, str) else text
        for group, each in zip(groups.tolist(), texts, strict=True):
            self.text[group] = each

    def _set_unseen(self, groups: Array, why: str | Sequence[str]) -> None:
        """Make groups NOT_OBSERVED, with the checksum 0.

        Args:
            groups: int64 numbers of groups, or a bool mask over all groups.
            why: their text: one for all, or one for each of them.
        """
        groups = np.flatnonzero(groups) if groups.dtype == np.bool_ else groups
        self._reset_groups(groups, Joined.GATHERED, int(Status.NOT_OBSERVED), why)
        self.out.checksum[groups] = 0

    def _hash_checksums(self, groups: Array, at: Array, starts: Array, *, ordered: bool) -> None:
        """Set the checksum of each group to a hash of its members' checksums.

        Args:
            groups: int64, numbers of groups.
            at: int64, positions of their members in the plan's rows, group after group.
            starts: int64, where in `at` each group begins.
            ordered: whether the hash depends on the members' order.
        """
        for group, members in zip(groups.tolist(), np.split(self.checksums[at], starts[1:]), strict=True):
            data = (members if ordered else np.sort(members)).tobytes()
            self.out.checksum[group] = int.from_bytes(blake2b(data, digest_size=8).digest(), "little")

    def _set_moments(self, groups: Array, rows: Array, starts: Array, sizes: Array) -> None:
        """Fill in counts, extrema, means and variances over all elements of several rows; other statistics stay.

        A count that any row of a group lacks is -1; extrema and moments are over the rows with a finite element.

        Args:
            groups: the groups to fill in.
            rows: their rows, group after group.
            starts: where in `rows` each group begins.
            sizes: elements of each row.
        """
        block, group = self.block, group_of(starts, len(rows))
        finite = sizes.astype(np.float64)
        for name, column in block.counts.items():
            values = column[rows]
            counted = np.minimum.reduceat(values, starts) >= 0
            self.out.counts[name][groups] = np.where(counted, np.add.reduceat(values, starts), -1)
            if name in _NONFINITE:
                finite -= np.maximum(values, 0)
        used = finite > 0
        total = np.add.reduceat(np.where(used, finite, 0.0), starts)

        def values_of(name: str, unused: float = 0.0) -> Array:
            """A statistic of the rows, `unused` for those without a finite element."""
            return np.where(used, block.floats[name][rows].astype(np.float64), unused)

        def mean(values: Array) -> Array:
            """Mean over each group, weighted by finite elements; NaN where a group has none."""
            sums = np.add.reduceat(finite * values, starts)
            of_all: Array = np.divide(sums, total, out=np.full(len(starts), np.nan), where=total > 0)
            return of_all

        for name in block.floats:
            if name in _EXTREMA:
                self.out.floats[name][groups] = _EXTREMA[name].reduceat(values_of(name, np.nan), starts)
            elif name in ("mean", "amean"):
                self.out.floats[name][groups] = mean(values_of(name))
            elif name == "var" and "mean" in block.floats:
                means = values_of("mean")
                self.out.floats[name][groups] = mean(values_of(name) + (means - mean(means)[group]) ** 2)

    def _sketches(self, at: Array) -> Array:
        """float64 (members, 16), the sketches of the members at positions `at` in the plan's rows.

        The batch must have sketches.
        """
        assert self.block.sketch is not None
        return self.block.sketch[self.plan.rows[at]].astype(np.float64)

    def _members(self, groups: Array) -> tuple[Array, Array, Array]:
        """All members of some groups (numbers), group after group in rising order.

        Returns:
            their positions in the plan's rows, where among them each group begins, and for each member how many of the
            groups come before its own.
        """
        wanted = np.zeros(len(self.row), np.bool_)
        wanted[groups] = True
        at = np.flatnonzero(wanted[self.plan.group])
        starts = starts_of(self.plan.group[at])
        return at, starts, group_of(starts, len(at))

    def _distinct_members(self, groups: Array) -> tuple[Array, Array]:
        """Members of some groups (numbers), each value as often as the rank that has it most.

        So equal values of one rank's calls all count, and copies of them on other ranks do not.

        Returns:
            their positions in the plan's rows, and where among them each group begins.
        """
        at, _, group = self._members(groups)
        sums, rank = self.checksums[at], self.basis.rank[self.plan.rows[at]]
        order = np.lexsort((np.arange(len(at)), rank, sums, group))
        first = _is_new_value(group[order], sums[order], rank[order])  # of its group, checksum and rank
        starts = np.flatnonzero(first)
        time = np.arange(len(at)) - np.repeat(starts, np.diff(starts, append=len(at)))
        again = np.lexsort((rank[order], time, sums[order], group[order]))
        order, time = order[again], time[again]
        kept = np.sort(order[_is_new_value(group[order], sums[order], time)])
        return at[kept], starts_of(group[kept])

    def _is_equal(self) -> Array:
        """Bool (groups,), whether all members of each group have one checksum."""
        return ~any_of(self.checksums != self.checksums[self.plan.starts][self.plan.group], self.plan.starts)

    def _holders(self, group: int) -> str:
        """Who has a record in a group, in words: `3 ranks`, or `2 calls` where one rank has all records."""
        ranks = int(self.plan.ranks[group])
        return f"{ranks} ranks" if ranks > 1 else f"{int(self.plan.members[group])} calls"

    # --- parts

    def _add_parts(self) -> Array:
        """Assemble wholes from their parts, each part counted once however many ranks hold a copy.

        Parts that do not fit together make a group INCOMPLETE, with a hash of their checksums, where all ranks were
        recorded and it is state of the training; else it is not observed. Nor is one of which ranks have the same part
        with different values.

        Returns:
            bool (groups,), activations and their gradients that differ between ranks with the same part: other samples.
        """
        plan = self.plan
        unlike = plan.copies[self.checksums[plan.copies] != self.checksums[plan.owner[plan.copies]]]
        doubled = np.zeros(len(self.row), np.bool_)
        doubled[plan.group[unlike]] = True
        misfits = np.array(list(plan.misfits), np.int64)
        doubled &= plan.parts
        doubled[misfits] = False
        for group, text in plan.misfits.items():
            one = np.array([group])
            if text is None:
                self._set_unseen(one, "where the parts of it lie could not be worked out")
            elif self.reader.complete and plan.kind[group] in _STATE:
                at, starts, _ = self._members(one)
                self._reset_groups(one, Joined.INCOMPLETE, Status.OBSERVED, f"parts are not the whole: {text}")
                self._hash_checksums(one, at, starts, ordered=True)
            else:
                self._set_unseen(one, text)
        for group in np.flatnonzero(doubled & ~plan.flows).tolist():
            where = int(unlike[plan.group[unlike] == group][0])
            ranks = rank_list(self.ranks_of(plan.rows[[plan.owner[where], where]]))
            self._set_unseen(np.array([group]), f"{ranks} hold the same part of it with different values")
        fitting = plan.parts & ~doubled
        fitting[misfits] = False
        groups = np.flatnonzero(fitting)
        if len(groups):
            at = np.flatnonzero(fitting[plan.group] & (plan.owner == np.arange(len(plan.rows))))
            starts, number = starts_of(plan.group[at]), self.basis.layout[plan.rows[at]]
            headers = self.tables.header[number]
            self._reset_groups(groups, Joined.PARTS, Status.OBSERVED, "")
            added = np.add.reduceat(unmix(self.checksums[at]) - headers, starts)
            self.out.checksum[groups] = mix(added + headers[starts])
            if self.out.sketch is not None:
                self.out.sketch[groups] = np.add.reduceat(self._sketches(at), starts)
            self._set_moments(groups, plan.rows[at], starts, self.tables.local_numel[number])
        return doubled & plan.flows

    def _add_unreduced(self) -> None:
        """Add up the sketches of sums and means that ranks have not reduced yet, and count their NaN and infinities.

        A mean is the sum divided by the number of ranks; where fewer ranks have a record, the sum is scaled up to all.
        Other statistics stay unknown, the checksum is a hash of the members' checksums. Groups that cannot be added (a
        maximum, more values than ranks, no sketch) are not observed.
        """
        plan, groups = self.plan, np.flatnonzero(self.plan.unreduced)
        every, starts, _ = self._members(groups)
        distinct, begins = self._distinct_members(groups)
        values = np.diff(begins, append=len(distinct)).tolist()
        for group, at, number in zip(groups.tolist(), np.split(every, starts[1:]), values, strict=False):
            one = np.array([group])
            part = self.tables.layouts[int(self.basis.layout[self.row[group]])].part
            assert part is not None  # so it was planned
            if part.reduction not in ("sum", "avg") or number > part.reduced_over or self.out.sketch is None:
                self._set_unseen(one, f"a {part.reduction} over {part.reduced_over} ranks is still owed")
                continue
            total = self._sketches(at).sum(axis=0) * (part.reduced_over / len(at))
            self._reset_groups(
                one, Joined.OWED, Status.PARTIAL, f"{part.reduction} over {part.reduced_over} ranks, still owed"
            )
            self.out.sketch[group] = total / part.reduced_over if part.reduction == "avg" else total
            for name in _NONFINITE:
                if name in self.out.counts:
                    self.out.counts[name][group] = self.block.counts[name][plan.rows[at]].sum()
            self._hash_checksums(one, at, np.zeros(1, np.int64), ordered=True)

    # --- values without parts

    def _combine_partless(self, partless: Array) -> None:
        """Combine groups without parts.

        Equal copies stay as recorded, and of kinds in `_FIRSTS` the first rank's record. Other unequal copies are
        compared (`_compare_copies`), each rank's own values put together (`_gather`). Not observed are (1) groups with
        a value without a known place, (2) values of each rank's own where `lacking` says why some are missing, (3)
        random states that differ, and buffers that differ at the start.

        Args:
            partless: bool (groups,), which they are; changed in place: groups of (1) and (2) are taken out, those of
                (3) stay.
        """
        plan, tables = self.plan, self.tables
        if not partless.any():
            return
        number = self.basis.layout[plan.rows]
        at = np.flatnonzero(tables.unplaced[number] & partless[plan.group])
        groups, first = np.unique(plan.group[at], return_index=True)
        self._set_unseen(groups, [self.block.text[row] for row in plan.rows[at[first]].tolist()])
        partless[groups] = False
        if self.reader.lacking:
            own = partless & np.isin(plan.kind, _OWN)
            self._set_unseen(own, self.reader.lacking)
            partless &= ~own
        cut = any_of(tables.part[number] > 0, plan.starts)
        differ = partless & (cut | ~self._is_equal())
        self._set_unseen(differ & self.reader.buffers_at_first[plan.site], "another one on each rank")
        differ &= ~np.isin(plan.kind, _FIRSTS)
        random = differ & (plan.kind == KIND_CODES[Kind.RNG])
        self._set_unseen(random, "each rank has its own")
        copied = differ & np.isin(plan.kind, _COPIED)
        self._compare_copies(np.flatnonzero(copied))
        self._gather(np.flatnonzero(differ & ~copied & ~random))

    def _compare_copies(self, groups: Array) -> None:
        """Decide about groups (numbers) of unequal copies.

        Where all sketches are within `_ROUNDING` of the first rank's, its record stays. Of other groups only a hash of
        all checksums is kept, with a text that names the ranks that differ.
        """
        if not len(groups):
            return
        at, starts, group_of_member = self._members(groups)
        near = np.zeros(len(groups), np.bool_)
        if self.out.sketch is not None:
            kept = self._sketches(at)
            distance = np.maximum.reduceat(np.linalg.norm(kept - kept[starts][group_of_member], axis=1), starts)
            near = distance <= _ROUNDING * np.maximum.reduceat(np.linalg.norm(kept, axis=1), starts)
        every = np.split(at, starts[1:])
        for place in np.flatnonzero(~near).tolist():
            one, members = groups[place : place + 1], every[place]
            others = members[self.checksums[members] != self.checksums[members[0]]]
            [first, *ranks] = self.ranks_of(self.plan.rows[[members[0], *others]])
            text = f"copies differ: {rank_list(ranks)} from rank {first}"
            self._reset_groups(one, Joined.COPIES, int(self.out.status[one[0]]), text)
            self._hash_checksums(one, members, np.zeros(1, np.int64), ordered=True)

    def _gather(self, groups: Array) -> None:
        """Combine groups whose values differ between ranks or calls: not observed where they are plain values.

        Of tensors the sum where `_are_summed`, else extrema and moments over all elements of the different values, a
        hash of their checksums, and the layout of all end to end.
        """
        if not len(groups):
            return
        plan, layouts = self.plan, self.basis.layout
        at, starts, _ = self._members(groups)
        plain = any_of(self.block.status[plan.rows[at]] == int(Status.VALUE), starts)
        self._set_unseen(groups[plain], "a plain value, another on each rank")
        groups = groups[~plain]
        summed = self._are_summed(groups)
        self._add_gradients(groups[summed])
        groups = groups[~summed]
        if not len(groups):
            return
        at, starts = self._distinct_members(groups)
        rows = plan.rows[at]
        held = self.tables.local_numel[layouts[rows]]
        texts = [f"values of {self._holders(group)} together" for group in groups.tolist()]
        self._reset_groups(groups, Joined.GATHERED, Status.OBSERVED, texts)
        self._hash_checksums(groups, at, starts, ordered=False)
        self.elements[groups] = np.add.reduceat(held, starts)
        self._set_moments(groups, rows, starts, held)
        for group, members in zip(groups.tolist(), np.split(layouts[rows], starts[1:]), strict=True):
            parts = self.tables.part[members]
            self.out.layout[group] = self.reader.batched_number(members[parts == parts[0]])

    def _are_summed(self, groups: Array) -> Array:
        """Bool for each of `groups` (numbers), whether it is the gradient of a value that is equal on all ranks.

        Then the ranks' gradients add up. A value counts as equal only where no output of the same layout differs
        between ranks; of a gradient that has parts also a value that its parts add up to.
        """
        plan, equals = self.plan, self._is_equal()
        here, layouts = self.basis.site[self.row], self.basis.layout[self.row]
        equals &= ~np.isin(layouts, layouts[~equals & (plan.kind == KIND_CODES[Kind.OUTPUT])])
        whole = self.how == Joined.PARTS
        values = self.reader.value_of[here[groups]]
        # of parts, the copies of each are equal where they add up to the whole
        return np.isin(values, here[equals]) | (plan.parts[groups] & np.isin(values, here[whole]))

    def _add_gradients(self, groups: Array) -> None:
        """Add up the sketches of the ranks' gradients of `groups` (numbers).

        Not observed where no sketches were kept.
        """
        if self.out.sketch is None:
            self._set_unseen(groups, "each rank's share of a sum")
        elif len(groups):
            at, starts = self._distinct_members(groups)
            self._reset_groups(groups, Joined.OWED, Status.PARTIAL, "gradients of several ranks, added up")
            self.out.sketch[groups] = np.add.reduceat(self._sketches(at), starts)
            self._hash_checksums(groups, at, starts, ordered=False)

    def _mark_alike(self) -> None:
        """Mark as `ALIKE` values that may differ from rank to rank or call to call and are equal on all.

        Its text says how many ranks or calls that are. A group with a text is left as it is.
        """
        plan = self.plan
        several = plan.flows | np.isin(plan.kind, _OWN)
        alike = (self.how == Joined.AS_RECORDED) & (plan.flows & (plan.ranks > 1) | several & (plan.calls > 1))
        for group in np.flatnonzero(alike).tolist():
            if not self.text[group]:
                self.how[group], self.ranks[group] = Joined.ALIKE, plan.members[group]
                self.text[group] = f"equal {'on' if plan.ranks[group] > 1 else 'in'} {self._holders(group)}"


def _is_new_value(*columns: Array) -> Array:
    """Bool (n,), whether any of some columns has another value than in the row before; True for the first row."""
    out = np.ones(len(columns[0]), np.bool_)
    out[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return out


def join_slices(slices: Sequence[StepBatch]) -> StepBatch:
    """Join a step's slices into one batch, sorted by site, with `sequence` renumbered from 0 without gaps."""
    batch = slices[0]
    if len(slices) > 1:
        order = np.argsort(np.concatenate([each.site for each in slices]), kind="stable")
        batch = rows_of(slices, [np.arange(len(each)) for each in slices], order)
    return replace(batch, sequence=np.argsort(np.argsort(batch.sequence, kind="stable")).astype(np.uint32))
