"""One step of all ranks put together, site by site, without looking at one record after the other.

Sixty-four ranks with two thousand sites each are 128,000 records a step, of which nearly all mean the same: one of
equal copies, or parts that add up. What becomes of a site follows from its layouts and from what was seen of it, which
hardly change from step to step: that is planned once. The values are then added up over the sorted columns of all
ranks. Checksums are exact: the sums under them are integers modulo 2**64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import KIND_CODES, Joined, Kind, Status
from introspect_cli.store.format.kinds import codes_that
from introspect_cli.store.ranks.combined import NONFINITE, CombinedStep
from introspect_cli.store.ranks.plan import UNPLACED, Plan, any_of, plan_of, starts_of
from introspect_cli.store.ranks.stacked import batched_layout, whole_layout
from introspect_cli.sums import mix, unmix
from introspect_cli.texts import rank_list

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.ranks.stacked import LayoutTables, Rows, StackedStep
    from introspect_cli.store.ranks.whole_names import WholeNames

    Array = NDArray[Any]


_COPIED, _STATE, _FIRSTS, _OWN = map(codes_that, ("copied", "state", "first", "own"))

_ROUNDING = 1e-4
"""Copies whose sketches are further apart than this share of them are different."""

_PARTIAL, _VALUE, _OBSERVED = int(Status.PARTIAL), int(Status.VALUE), int(Status.OBSERVED)


_FIRST = np.zeros(1, np.int64)
"""Where a group begins among its own members."""


class Combiner:
    """Combines the records of all ranks step by step, reusing the plan of the last step where the rows are the same."""

    def __init__(self, places: LayoutTables, names: WholeNames, lacking: str = "", *, complete: bool = False) -> None:
        """Start without a plan.

        Args:
            places: the ranks' layouts.
            names: the common site numbers.
            lacking: why values that each rank has its own of are not all there; "" where they are.
            complete: whether all ranks were recorded, so that a missing part of the model is an error.
        """
        self._places, self._names = places, names
        self._lacking, self._complete = lacking, complete
        self._batched: dict[bytes, int] = {}
        self.plan: Plan | None = None  # of the step that was put together last
        self._layouts = np.zeros(0, np.uint32)

    @property
    def rows(self) -> Rows | None:
        """`Rows` of the step that was combined last; None before the first."""
        return None if self.plan is None else self.plan.basis

    def combine(self, step: StackedStep) -> StepBatch:
        """Combine a step of all ranks into one batch, one record per site."""
        plan = self.plan
        if plan is None or plan.basis is not step.rows:
            self.plan = plan = plan_of(step, self._places, self._names.kinds, self._names.left_out(step))
            numbers = plan.basis.number[plan.rows[plan.starts]].tolist()
            wholes = {number: self._whole_number(number) for number in dict.fromkeys(numbers)}
            self._layouts = np.array([wholes[number] for number in numbers], np.uint32)
        result = CombinedStep(step, plan, self._layouts.copy())
        for group, row in plan.unseen.items():
            result.unseen(group, step.block.text[row])
            result.row[group] = row
            result.layout[group] = self._whole_number(int(step.rows.number[row]))
        for group in np.flatnonzero(plan.mixed).tolist():
            result.unseen(group, "some ranks hold parts of it and others what has no known place")
        samples = self._put_parts(result)
        self._put_owed(result)
        self._put_partless(result, plan.partless | samples)
        several = plan.flows | np.isin(plan.kind, _OWN)
        members = np.bincount(plan.group, minlength=len(plan.starts))
        alike = (result.how == Joined.AS_RECORDED) & (plan.flows & (plan.ranks > 1) | several & (plan.calls > 1))
        for group in np.flatnonzero(alike).tolist():
            if not result.text[group]:
                result.how[group], result.ranks[group] = Joined.ALIKE, members[group]
                where = f"on {plan.ranks[group]} ranks" if plan.ranks[group] > 1 else f"in {members[group]} calls"
                result.text[group] = f"equal {where}"
        return result.batch()

    def _whole_number(self, part: int) -> int:
        """The number of the whole tensor's layout, given the number of a part's."""
        return self._names.layout_number(whole_layout(self._places.layouts[part]))

    def _batched_number(self, numbers: Array) -> int:
        """The number of the layout of tensors concatenated along dimension 0, given their layouts' numbers."""
        key = numbers.tobytes()
        if key not in self._batched:
            layouts = [self._places.layouts[number] for number in numbers.tolist()]
            self._batched[key] = self._names.layout_number(batched_layout(layouts))
        return self._batched[key]

    def _put_parts(self, result: CombinedStep) -> Array:
        """Assemble wholes from their parts, each part counted once however many ranks hold a copy.

        Returns:
            bool (groups,), activations and their gradients that differ between ranks with the same part: other samples.
        """
        step, plan = result.step, result.plan
        unlike = plan.copies
        if len(unlike):
            unlike = unlike[
                step.block.checksum[plan.rows[unlike]] != step.block.checksum[plan.rows[plan.owner[unlike]]]
            ]
        doubled = np.zeros(result.size, np.bool_)
        doubled[plan.group[unlike]] = True
        doubled &= plan.parts
        for group, text in plan.unfit.items():
            doubled[group] = False
            if self._complete and plan.kind[group] in _STATE and text != UNPLACED:
                one = np.array([group])
                at, starts, _ = result.members(one)
                result.set(one, Joined.INCOMPLETE, _OBSERVED)
                result.mark(one, at, starts, ordered=True)
                result.text[group] = f"parts are not the whole: {text}"
            else:
                result.unseen(group, text)
        for group in np.flatnonzero(doubled & ~plan.flows).tolist():
            where = int(unlike[plan.group[unlike] == group][0])
            ranks = [step.rank_of(int(plan.rows[at])) for at in (plan.owner[where], where)]
            result.unseen(group, f"{rank_list(ranks)} hold the same part of it with different values")
        fitting = plan.parts & ~doubled
        fitting[list(plan.unfit)] = False
        groups = np.flatnonzero(fitting)
        if len(groups):
            at = np.flatnonzero(fitting[plan.group] & (plan.owner == np.arange(len(plan.rows))))
            rows, starts = plan.rows[at], starts_of(plan.group[at])
            number = step.rows.number[rows]
            headers = self._places.header[number]
            result.set(groups, Joined.PARTS, _OBSERVED)
            added = np.add.reduceat(unmix(step.block.checksum[rows]) - headers, starts)
            result.checksum[groups] = mix(added + headers[starts])
            if result.sketch is not None:
                result.sketch[groups] = np.add.reduceat(_sketches(step, rows), starts)
            result.put_moments(groups, rows, starts, self._places.local_numel[number])
            for group in groups.tolist():
                result.text[group] = ""
        return doubled & plan.flows

    def _put_owed(self, result: CombinedStep) -> None:
        """Add up the sketches of sums (or means) that ranks have not reduced yet; other statistics stay unknown."""
        step, plan = result.step, result.plan
        groups = np.flatnonzero(plan.owed)
        if not len(groups):
            return
        at, starts, group_of_member = result.members(groups)
        distinct = np.add.reduceat(result.distinct(at, group_of_member), starts).tolist()
        for group, members, values in zip(groups.tolist(), np.split(at, starts[1:]), distinct, strict=True):
            part = self._places.layouts[int(step.rows.number[result.row[group]])].part
            assert part is not None  # so it was planned
            if part.owed not in ("sum", "avg") or values > part.owing or result.sketch is None:
                result.unseen(group, f"a {part.owed} over {part.owing} ranks is still owed")
                continue
            rows, one = plan.rows[members], np.array([group])
            total = _sketches(step, rows).sum(axis=0) * (part.owing / len(rows))
            result.set(one, Joined.OWED, _PARTIAL)
            result.sketch[group] = total / part.owing if part.owed == "avg" else total
            for name in NONFINITE:
                if name in result.counts:
                    result.counts[name][group] = step.block.counts[name][rows].sum()
            result.mark(one, members, _FIRST, ordered=True)
            result.text[group] = f"{part.owed} over {part.owing} ranks, still owed"

    def _put_partless(self, result: CombinedStep, partless: Array) -> None:
        """Combine groups without parts: equal copies, unequal copies, or each rank's own values."""
        step, plan = result.step, result.plan
        if not partless.any():
            return
        for at in np.flatnonzero(self._places.unplaced[step.rows.number[plan.rows]] & partless[plan.group]).tolist():
            group = int(plan.group[at])
            if partless[group]:
                result.unseen(group, step.block.text[int(plan.rows[at])])
                partless[group] = False
        if self._lacking:
            for group in np.flatnonzero(partless & np.isin(plan.kind, _OWN)).tolist():
                result.unseen(group, self._lacking)
                partless[group] = False
        cut = any_of(self._places.part[step.rows.number[plan.rows]] > 0, plan.starts)
        differ = partless & (cut | ~result.equal())
        for group in np.flatnonzero(differ & self._names.buffers_at_first[plan.site]).tolist():
            result.unseen(group, "another one on each rank")
        differ &= ~np.isin(plan.kind, _FIRSTS)
        random = plan.kind == KIND_CODES[Kind.RNG]
        for group in np.flatnonzero(differ & random).tolist():
            result.unseen(group, "each rank has its own")
        copied = np.isin(plan.kind, _COPIED)
        _put_copies(result, np.flatnonzero(differ & copied))
        self._put_gathered(result, np.flatnonzero(differ & ~copied & ~random))

    def _put_gathered(self, result: CombinedStep, groups: Array) -> None:
        """Combine differing values of ranks: by their sum where `_are_summed`, else by extrema and moments."""
        step, plan = result.step, result.plan
        if not len(groups):
            return
        at, starts, _ = result.members(groups)
        plain = any_of(step.block.status[plan.rows[at]] == _VALUE, starts)
        for group in groups[plain].tolist():
            result.unseen(group, "a plain value, another on each rank")
        groups = groups[~plain]
        summed = self._are_summed(result, groups)
        _put_summed(result, groups[summed])
        groups = groups[~summed]
        if not len(groups):
            return
        at, starts, group_of_member = result.members(groups)
        of_ranks = result.of_ranks(at, starts)
        kept = result.distinct(at, group_of_member)
        at, starts = at[kept], starts_of(group_of_member[kept])
        rows = plan.rows[at]
        result.set(groups, Joined.GATHERED, _OBSERVED)
        result.mark(groups, at, starts, ordered=False)
        held = self._places.local_numel[step.rows.number[rows]]
        result.elements[groups] = np.add.reduceat(held, starts)
        result.put_moments(groups, rows, starts, held)
        for group, whose, members in zip(groups.tolist(), of_ranks, np.split(rows, starts[1:]), strict=True):
            result.text[group] = f"values of {whose} together"
            numbers = step.rows.number[members]
            parts = self._places.part[numbers]
            result.layout[group] = self._batched_number(numbers[parts == parts[0]])

    def _are_summed(self, result: CombinedStep, groups: Array) -> Array:
        """Whether each group is a gradient of a value that is equal on all ranks, so that the ranks' gradients add up.

        A value counts as equal only where no output of the same layout differs between ranks.
        """
        step, equals = result.step, result.equal()
        here, layouts = step.rows.site[result.row], step.rows.number[result.row]
        equals &= ~np.isin(layouts, layouts[~equals & (result.plan.kind == KIND_CODES[Kind.OUTPUT])])
        equal, whole = (
            dict(zip(here.tolist(), mask.tolist(), strict=True)) for mask in (equals, result.how == Joined.PARTS)
        )
        values = self._names.value_of[here[groups]].tolist()
        # of parts, the copies of each are equal where they add up to the whole
        both = zip(values, result.plan.parts[groups].tolist(), strict=True)
        return np.array([equal.get(site, False) or (cut and whole.get(site, False)) for site, cut in both], np.bool_)


def _sketches(step: StackedStep, rows: Array) -> Array:
    """float64 (rows, 16), the sketches of some rows; every rank must have kept them."""
    assert step.block.sketch is not None
    return step.block.sketch[rows].astype(np.float64)


def _put_copies(result: CombinedStep, groups: Array) -> None:
    """Combine unequal copies into the first rank's record, where all sketches are within `_ROUNDING` of it.

    Else only a hash of all checksums is kept, with a text that names the ranks that differ.
    """
    step = result.step
    if not len(groups):
        return
    at, starts, group_of_member = result.members(groups)
    rows = result.plan.rows[at]
    near = np.zeros(len(groups), np.bool_)
    if result.sketch is not None:
        kept = _sketches(step, rows)
        distance = np.maximum.reduceat(np.linalg.norm(kept - kept[starts][group_of_member], axis=1), starts)
        near = distance <= _ROUNDING * np.maximum.reduceat(np.linalg.norm(kept, axis=1), starts)
    ends = np.append(starts[1:], len(at))
    for place in np.flatnonzero(~near).tolist():
        span, one = slice(int(starts[place]), int(ends[place])), groups[place : place + 1]
        first, *others = rows[span].tolist()
        others = [row for row in others if step.block.checksum[row] != step.block.checksum[first]]
        result.set(one, Joined.COPIES, int(result.status[one[0]]))
        result.mark(one, at[span], _FIRST, ordered=True)
        ranks = rank_list([step.rank_of(row) for row in others])
        result.text[int(one[0])] = f"copies differ: {ranks} from rank {step.rank_of(first)}"


def _put_summed(result: CombinedStep, groups: Array) -> None:
    """Add up the sketches of what ranks hold; not observed where no sketches were kept."""
    if result.sketch is None:
        for group in groups.tolist():
            result.unseen(group, "each rank's share of a sum")
    elif len(groups):
        at, _, group_of_member = result.members(groups)
        kept = result.distinct(at, group_of_member)
        at, starts = at[kept], starts_of(group_of_member[kept])
        result.set(groups, Joined.OWED, _PARTIAL)
        result.sketch[groups] = np.add.reduceat(_sketches(result.step, result.plan.rows[at]), starts)
        result.mark(groups, at, starts, ordered=False)
        for group in groups.tolist():
            result.text[group] = "gradients of several ranks, added up"
