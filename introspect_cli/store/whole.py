"""All ranks of a run as if one process had recorded it: what a comparison of two layouts reads.

Each rank numbers its sites, layouts and parts by itself. Here numbers mean the same on every rank, so that arrays can
be compared where objects would have to be.

What becomes of each site hardly changes from step to step, so it is planned once, from layouts and what was seen: which
rows belong together, which of them hold parts, copies of the same part, or nothing.

Counting the elements of parts does not tell whether they are the whole: a shard written at a wrong offset leaves a hole
and overlaps its neighbour, and the numbers add up. So they are measured once more, as if some indices were longer than
others.

A step is put together site by site, without looking at one record after the other. Sixty-four ranks with two thousand
sites each are 128,000 records a step, of which nearly all mean the same: one of equal copies, or parts that add up.
What becomes of a site follows from its layouts and from what was seen of it, which hardly change from step to step:
that is planned once. The values are then added up over the sorted columns of all ranks. Checksums are exact: the sums
under them are integers modulo 2**64.

A parameter may be whole on every rank, or cut over some; a batch is some samples here and the others there; a layer may
run on one rank alone. So records are put together by site. Equal records are copies and count once. Parts whose place
is known add up: checksum, sketch and moments are sums over elements keyed by their index in the whole. Values that
differ from rank to rank without a place (samples, activations, losses) are gathered: of these only what depends neither
on order nor on layout is known, their extrema and means. What cannot be put together counts as not observed, and says
why.
"""

from __future__ import annotations

import math
from collections import ChainMap
from dataclasses import replace
from functools import cached_property, lru_cache, reduce
from hashlib import blake2b
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.records import GRADIENT_OF, KIND_CODES, UNPLACED, Joined, Kind, Layout, ModuleInfo, Phase, Status
from introspect_cli.store.batch import StepBatch, Texts, rows_of
from introspect_cli.store.log import ENTRY
from introspect_cli.store.names import SiteTable, site_columns
from introspect_cli.store.reader import RankReader, Reader, read_rows
from introspect_cli.sums import MASK, header, mix, unmix
from introspect_cli.texts import rank_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from introspect_cli.labels import Labels
    from introspect_cli.records import Part, Site, SiteInfo
    from introspect_cli.store.log import Entries
    from introspect_cli.store.run import Stages

    Array = NDArray[Any]


def whole_layout(layout: Layout) -> Layout:
    """The layout without its part; itself where it has none."""
    return layout if layout.part is None else replace(layout, part=None)


def batched_layout(layouts: Sequence[Layout]) -> Layout:
    """The layout of tensors put end to end: dimension 0 summed, others the largest, dtypes joined by " and ".

    Device and strides are the first layout's, without a part; its shape, too, where it is 0-dimensional or another has
    another number of dimensions. Further layouts without dimensions are ignored for the shape.
    """
    shape = layouts[0].shape
    shapes = [layout.shape for layout in layouts if layout.shape]
    if shape and all(len(other) == len(shape) for other in shapes):
        widest = map(max, zip(*(other[1:] for other in shapes), strict=True))
        shape = (sum(other[0] for other in shapes), *widest)
    dtype = " and ".join(dict.fromkeys(layout.dtype for layout in layouts))  # a rank may compute in another
    return replace(whole_layout(layouts[0]), shape=shape, dtype=dtype)


class LayoutTables:
    """The layouts of all ranks under common numbers, with their properties as arrays.

    Attributes:
        layouts: every layout that any rank has.
        common_numbers: for each reader, the number of each of its layouts.
        part: int64, a number for each different part, from 1; 0 where a rank holds all of it.
        local_numel: int64, elements that the rank holds.
        shape: int64, a number for each different shape of a whole.
        unplaced: bool, whether a rank holds some of it, and where is not known.
        unreduced: bool, whether it is a sum (or mean) that the ranks have not reduced yet.
        header: uint64, `sums.header` of dtype and whole shape, which a checksum has beside its elements.
    """

    def __init__(self, readers: Sequence[RankReader]) -> None:
        """Number the layouts of all readers, equal ones alike."""
        numbers_of: dict[Layout, int] = {}
        self.common_numbers = [
            np.array([numbers_of.setdefault(layout, len(numbers_of)) for layout in reader.layouts], np.int64)
            for reader in readers
        ]
        self.layouts = list(numbers_of)
        parts: dict[Part | None, int] = {None: 0}
        shapes: dict[tuple[int, ...], int] = {}
        held = [(layout if layout.part is None else layout.part).numel for layout in self.layouts]
        self.part = np.array([parts.setdefault(layout.part, len(parts)) for layout in self.layouts], np.int64)
        self.local_numel = np.array([min(numel, (1 << 62) - 1) for numel in held], np.int64)
        self.shape = np.array([shapes.setdefault(layout.shape, len(shapes)) for layout in self.layouts], np.int64)
        self.unplaced = np.array([layout.strides == UNPLACED for layout in self.layouts], np.bool_)
        reductions = [layout.part.reduction if layout.part is not None else "" for layout in self.layouts]
        self.unreduced = np.array(reductions, np.object_) != ""
        self.header = np.array([header(layout.dtype, layout.shape) for layout in self.layouts], np.uint64)


class Rows(NamedTuple):
    """Site, rank, layout and status of each row of a step of all ranks; shared by steps with the same rows.

    Attributes:
        site: int64 (n,), common numbers.
        rank: int64 (n,), numbers of ranks, rising.
        layout: int64 (n,), common numbers.
        status: uint8 (n,).
    """

    site: Array
    rank: Array
    layout: Array
    status: Array


# --- plan


_FLOWING = frozenset({Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT})
_BY_CALL = _FLOWING | {Kind.BATCH, Kind.LOSS, Kind.VALUE}
"""Kinds with one value per call, so per microbatch."""


def _codes(*kinds: Kind) -> list[int]:
    return [KIND_CODES[kind] for kind in kinds]


_COPIED = _codes(Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE)
"""Kinds of which ranks hold equal copies, or parts or summands of one value."""
_STATE = [*_COPIED, KIND_CODES[Kind.BUFFER]]
"""What training leaves: a part of it that is missing is missing in the model."""
_FIRSTS = _codes(Kind.HYPERPARAMETER, Kind.BUFFER)
"""Where copies of these differ, the first rank's counts: DDP broadcasts its buffers before each forward pass."""
_FLOWS = _codes(*_FLOWING, Kind.OP_OUTPUT)
"""Activations and their gradients, of which data-parallel ranks have their own samples."""
_OWN = _codes(*_FLOWING, Kind.BATCH, Kind.LOSS, Kind.RNG)
"""What each rank may have its own value of: samples, and what is computed of them."""
_NOT_SEEN = int(Status.NOT_OBSERVED)


class Plan:
    """How each site of a step is combined, as far as layouts and statuses decide it. A group is one site's rows.

    Attributes:
        basis: the rows of the step.
        rows: positions in `basis`, by site and then by rank, without rows that hold nothing others lack.
        starts: positions in `rows` where each group begins.
        group: for each of `rows`, its group's number.
        kind: for each group, the code of its kind.
        flows: bool (groups,), activations and their gradients.
        rank: for each of `rows`, its rank.
        lost: groups that a rank could not observe, or has at an unknown place.
        lost_rows: for each of `lost`, the row that says why.
        mixed: bool (groups,), some ranks hold parts and others values without a known place.
        unreduced: bool (groups,), sums that ranks have not reduced yet.
        parts: bool (groups,), to be assembled from parts.
        fits: bool (groups,), of these the ones whose parts are exactly their whole.
        partless: bool (groups,), without parts.
        cut: bool (groups,), in which any rank has a part.
        owner: for each of `rows`, the position in `rows` of the first rank with the same part.
        copies: positions in `rows` of records whose part, or whole, an earlier row of the group has too.
        site: uint32, the site of each group.
        members: int64 (groups,), number of records in each group.
        ranks: int64 (groups,), number of ranks with a record in each group.
        calls: int64 (groups,), the largest number of records (calls) that one rank has in each group.
        misfits: groups whose parts leave some of the whole out or overlap, with the reason; None where it could not be
            worked out where the parts lie.
    """

    def __init__(self, basis: Rows, tables: LayoutTables, kinds: Array) -> None:
        """Plan how the sites of a step are combined.

        Args:
            basis: the rows of all ranks.
            tables: the ranks' layouts.
            kinds: code of each site's kind.
        """
        rows = np.argsort(basis.site, kind="stable")
        starts = starts_of(basis.site[rows])
        unseen = basis.status[rows] == _NOT_SEEN
        partly_unseen = any_of(unseen, starts)
        number = basis.layout[rows]
        whole = tables.part[number] == 0
        holds = whole | (tables.local_numel[number] > 0)
        placed = any_of(holds & ~whole, starts)
        partless = any_of(holds, starts) & ~placed & ~partly_unseen
        keep = holds | ~partless[group_of(starts, len(rows))]  # else it holds nothing of what others have all of
        rows = rows[keep]
        starts = starts_of(basis.site[rows])
        group = group_of(starts, len(rows))
        number = basis.layout[rows]
        part, shape = tables.part[number], tables.shape[number]
        parts = ~partly_unseen & any_of(part > 0, starts)
        mixed = parts & any_of((part == 0) | (shape != shape[starts][group]), starts)
        kind = kinds[basis.site[rows[starts]]]
        flows = np.isin(kind, _FLOWS)
        # samples beside one another may each be cut: only what fits is added up
        samples = mixed & flows & ~any_of(part == 0, starts)
        unreduced = parts & ~mixed & tables.unreduced[number[starts]]
        mixed = mixed & ~samples
        parts = parts & ~mixed & ~unreduced & ~samples
        owner = np.arange(len(rows))
        by_part = np.lexsort((owner, part, group))
        new = (np.diff(part[by_part], prepend=-1) != 0) | (np.diff(group[by_part], prepend=-1) != 0)
        if len(rows):
            owner[by_part] = by_part[np.flatnonzero(new)][np.cumsum(new) - 1]
        self.basis, self.rows, self.starts, self.group, self.owner = basis, rows, starts, group, owner
        self.kind, self.flows, self.mixed, self.unreduced, self.parts = kind, flows, mixed, unreduced, parts
        self.rank, self.cut = basis.rank[rows], any_of(part > 0, starts)
        self.misfits = _misfits(basis, tables, rows, starts, parts)
        self.fits, self.partless = parts.copy(), ~(partly_unseen | mixed | unreduced | parts)
        self.fits[list(self.misfits)] = False
        blind = (basis.status[rows] == _NOT_SEEN) | (tables.unplaced[number] & self.partless[group])
        self.lost, first = np.unique(group[blind], return_index=True)
        self.lost_rows = rows[blind][first]
        self.partless[self.lost] = False
        self.copies = np.flatnonzero(owner != np.arange(len(rows)))
        of_rank = np.flatnonzero(_is_new_value(self.rank, group))  # where the records of one rank in one group begin
        self.site = np.asarray(basis.site[rows[starts]], np.uint32)
        self.members = np.bincount(group, minlength=len(starts))
        self.ranks = np.bincount(group[of_rank], minlength=len(starts))
        self.calls = np.zeros(len(starts), np.int64)
        np.maximum.at(self.calls, group[of_rank], np.diff(of_rank, append=len(rows)))


def starts_of(values: Array) -> Array:
    """Positions in sorted `values`, none below 0, where a new value begins."""
    return np.flatnonzero(np.diff(values, prepend=-1)) if len(values) else np.zeros(0, np.int64)


def any_of(mask: Array, starts: Array) -> Array:
    """Bool (groups,), whether `mask` is true for any row of each group; groups begin at `starts`."""
    return np.logical_or.reduceat(mask, starts) if len(starts) else np.zeros(0, np.bool_)


def group_of(starts: Array, size: int) -> Array:
    """int64 (size,), the group number of each row; groups begin at `starts`."""
    return np.repeat(np.arange(len(starts)), np.diff(starts, append=size))


def _misfits(basis: Rows, tables: LayoutTables, rows: Array, starts: Array, parts: Array) -> dict[int, str | None]:
    """Groups of `parts` whose parts are not exactly their whole, with the reason by `misfit` (None: unknown).

    Groups with equal lists of layouts have the reason of the first, with its ranks.

    Args:
        basis: the rows of all ranks.
        tables: the ranks' layouts.
        rows: positions among them, group after group.
        starts: where in `rows` each group begins.
        parts: bool (groups,), which groups are assembled from parts.
    """
    by_layouts: dict[bytes, str | None] = {}
    out = {}
    ends = np.append(starts[1:], len(rows)).tolist()
    for group in np.flatnonzero(parts).tolist():
        members = rows[starts[group] : ends[group]]
        numbers = basis.layout[members]
        key = numbers.tobytes()
        if key not in by_layouts:
            layouts = [tables.layouts[number] for number in numbers.tolist()]
            held = zip(basis.rank[members].tolist(), (layout.part for layout in layouts), strict=True)
            by_layouts[key] = misfit([*held], layouts[0].shape)
        if by_layouts[key] != "":
            out[group] = by_layouts[key]
    return out


# --- how much of a whole its parts cover


def misfit(held: Sequence[tuple[int, Part | None]], shape: Sequence[int]) -> str | None:
    """Why the parts that ranks hold of one tensor are not exactly its whole; "" where they are.

    None where that is unknown, since the parts differ in their number of dimensions. Equal parts count once, empty ones
    not. Parts of fewer elements than the whole leave some out, whether they overlap or not.

    Args:
        held: (rank, part) of each.
        shape: of the tensor.
    """
    holders: dict[Part, list[int]] = {}
    for rank, part in held:
        if part is not None and part.numel:
            holders.setdefault(part, []).append(rank)
    dims, size, found = {len(part.ranges) for part in holders}, math.prod(shape), sum(part.numel for part in holders)
    if len(dims) > 1:
        return None
    if found < size:
        same = " and ".join(f"{rank_list(ranks)} hold the same part" for ranks in holders.values() if len(ranks) > 1)
        return f"the parts of it on record cover {found:,} of its {size:,} elements{f': {same}' if same else ''}"
    whole = [((0, length),) for length in (shape if dims == {len(shape)} else (size,))]  # or cut out of it flattened
    if sum(_volume(part.ranges) for part in holders) & MASK == _volume(whole) & MASK:
        return ""
    pairs = (pair for pair in combinations(holders, 2) if _meet(*(part.ranges for part in pair)))
    overlapping = sorted({rank for part in chain(*pairs) for rank in holders[part]})
    return f"parts of it overlap: those of {rank_list(overlapping)}"


def _volume(box: Sequence[Sequence[tuple[int, int]]]) -> int:
    """How much a box holds, where what lies between two indices is as long as two arbitrary numbers are apart.

    So boxes that hold as much as the whole together are the whole, each element once.
    """
    return math.prod(
        sum(mix((dim << 56) + start + size) - mix((dim << 56) + start) for start, size in ranges)
        for dim, ranges in enumerate(box)
    )


def _meet(one: Sequence[Sequence[tuple[int, int]]], two: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Whether two boxes, of one number of dimensions, have an element in common."""
    return all(
        any(begin < start + size and start < begin + length for begin, length in ranges for start, size in others)
        for ranges, others in zip(one, two, strict=True)
    )


# --- combine


_NONFINITE = ("nans", "posinfs", "neginfs")
_EXTREMA = {"min": np.fmin, "max": np.fmax, "absmin": np.fmin}

_ROUNDING = 1e-4
"""Copies whose sketches are further apart than this share of them are different."""


class Members(NamedTuple):
    """Rows of some groups that count.

    Attributes:
        groups: int64, numbers of groups, rising.
        at: int64, positions of their rows in the plan's, group after group.
        starts: int64, where in `at` each group begins.
    """

    groups: Array
    at: Array
    starts: Array

    @property
    def sizes(self) -> Array:
        """int64, how many rows each group has."""
        return np.diff(self.starts, append=len(self.at))


class CombinedStep:
    """One row for each group of a plan, filled in while the ranks' records of a step are combined.

    A row begins as the first record of its site. What stands for something else (parts of a whole, copies, different
    values) is set, with what is then known of it; other rows stay as they were recorded. Groups are given as numbers or
    as a mask.
    """

    def __init__(self, reader: WholeReader, block: StepBatch, plan: Plan, layout: Array) -> None:
        """Make each group's row of its first record; `combined` does the rest.

        Args:
            reader: whose tables count.
            block: the records of all ranks, those of a rank after those of the one before.
            plan: of that step.
            layout: uint32 (groups,), the number of each group's layout; changed here.
        """
        self.reader, self.tables, self.block, self.plan = reader, reader.tables, block, plan
        self.row = plan.rows[plan.starts]
        self.checksums = block.checksum[plan.rows]
        firsts = rows_of([block], [self.row])
        self.how, self.ranks = np.full(len(layout), Joined.AS_RECORDED, np.uint8), np.zeros(len(layout), np.uint32)
        self.elements = np.full(len(layout), -1, np.int64)
        made: dict[str, Any] = {"how": self.how, "ranks": self.ranks, "elements": self.elements, "calls": plan.calls}
        floats = {name: column.astype(np.float64) for name, column in firsts.floats.items()}
        self.out = replace(firsts, site=plan.site, layout=layout, floats=floats, text=Texts(firsts.text), **made)

    def combined(self) -> StepBatch:
        """The batch of all groups, `sequence` from 0 without gaps; changes the rows, so call it once.

        Of groups without parts, equal copies stay as recorded, and of kinds in `_FIRSTS` the first rank's record. Other
        unequal copies are compared, each rank's own values put together, unless some of them are not all there.
        """
        plan, lacking = self.plan, self.reader.lacking
        self.row[plan.lost] = plan.lost_rows
        self.out.layout[plan.lost] = self.reader.whole_numbers[plan.basis.layout[plan.lost_rows]]
        self._set(plan.lost, [self.block.text[row] for row in plan.lost_rows.tolist()])
        self._set(plan.mixed, "some ranks hold parts of it and others what has no known place")
        partless = self._add_parts() | plan.partless
        self._add_unreduced()
        if lacking:
            own = partless & np.isin(plan.kind, _OWN)
            self._set(own, lacking)
            partless &= ~own
        differ = partless & (plan.cut | ~self._is_equal())
        self._set(differ & self.reader.buffers_at_first[plan.site], "another one on each rank")
        differ &= ~np.isin(plan.kind, _FIRSTS)
        random, copied = plan.kind == KIND_CODES[Kind.RNG], np.isin(plan.kind, _COPIED)
        self._set(differ & random, "each rank has its own")
        self._compare_copies(differ & copied)
        differ &= ~copied & ~random
        plain = any_of(self.block.status[plan.rows] == int(Status.VALUE), plan.starts)
        self._set(differ & plain, "a plain value, another on each rank")
        self._gather(differ & ~plain)
        self._mark_alike()
        order = np.argsort(self.block.sequence[self.row], kind="stable")
        return replace(self.out, sequence=np.argsort(order).astype(np.uint32))

    # --- rows

    def _set(
        self,
        groups: Array,
        text: str | Sequence[str],
        how: Joined = Joined.GATHERED,
        status: Status = Status.NOT_OBSERVED,
    ) -> None:
        """Make groups what `how` and `status` say, without checksum, statistics and sketch; by default, not observed.

        `text` is one for all, or one for each of them.
        """
        groups = np.flatnonzero(groups) if groups.dtype == np.bool_ else groups
        out = self.out
        self.how[groups], out.status[groups], out.checksum[groups] = how, status, 0
        for column in out.counts.values():
            column[groups] = -1
        for column in (*out.floats.values(), *(() if out.sketch is None else (out.sketch,))):
            column[groups] = np.nan
        out.text.update(zip(groups.tolist(), [text] * len(groups) if isinstance(text, str) else text, strict=True))

    def _members(self, groups: Array, counting: Array | None = None) -> Members:
        """The rows of some groups; only those that are True in the mask `counting`, of the plan's rows, where given."""
        wanted = np.zeros(len(self.row), np.bool_)
        wanted[groups] = True
        at = np.flatnonzero(wanted[self.plan.group] if counting is None else wanted[self.plan.group] & counting)
        return Members(np.flatnonzero(wanted), at, starts_of(self.plan.group[at]))

    def _distinct(self, groups: Array) -> Members:
        """The rows of some groups, each value as often as the rank that has it most.

        So equal values of one rank's calls all count, and copies of them on other ranks do not.
        """
        every = self._members(groups)
        group, sums, rank = self.plan.group[every.at], self.checksums[every.at], self.plan.rank[every.at]
        order, place = np.lexsort((rank, sums, group)), np.arange(len(group))
        new = _is_new_value(group[order], sums[order], rank[order])
        time = place - np.maximum.accumulate(np.where(new, place, 0))  # how often the rank had it before
        again = np.lexsort((rank[order], time, sums[order], group[order]))
        order, time = order[again], time[again]
        counting = np.zeros(len(self.plan.rows), np.bool_)
        counting[every.at[order[_is_new_value(group[order], sums[order], time)]]] = True
        return self._members(groups, counting)

    def _is_equal(self) -> Array:
        """Bool (groups,), whether all members of each group have one checksum."""
        return ~any_of(self.checksums != self.checksums[self.plan.starts][self.plan.group], self.plan.starts)

    def _holders(self, group: int) -> str:
        """Who has a record in a group, in words: `3 ranks`, or `2 calls` where one rank has all records."""
        ranks = int(self.plan.ranks[group])
        return f"{ranks} ranks" if ranks > 1 else f"{int(self.plan.members[group])} calls"

    # --- what members come to

    def _hash(self, members: Members, *, ordered: bool) -> None:
        """Set the checksum of each group to a sum over its members' mixed, whose order counts if `ordered`."""
        values = self.checksums[members.at]
        if ordered:
            place = np.arange(len(values)) - np.repeat(members.starts, members.sizes)
            values = values ^ mix(place.astype(np.uint64) + np.uint64(1))
        self.out.checksum[members.groups] = np.add.reduceat(mix(values + np.uint64(1)), members.starts)

    def _add_sketches(self, members: Members, factor: Array | float = 1.0) -> None:
        """Set the sketch of each group to the sum of its members', times a factor."""
        if self.out.sketch is not None:
            added = np.add.reduceat(self._sketches(members), members.starts)
            self.out.sketch[members.groups] = added * np.reshape(factor, (-1, 1))

    def _sketches(self, members: Members) -> Array:
        assert self.block.sketch is not None  # so it was asked
        return np.asarray(self.block.sketch[self.plan.rows[members.at]], np.float64)

    def _set_moments(self, members: Members, sizes: Array) -> None:
        """Fill in counts, extrema, means and variances over all elements of several rows; other statistics stay.

        A count that any row of a group lacks is -1; extrema and moments are over the rows with a finite element.
        `sizes` are the elements of each row.
        """
        block, rows, starts = self.block, self.plan.rows[members.at], members.starts
        group, groups = group_of(starts, len(rows)), members.groups
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

    # --- what groups become

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
        unlike = unlike[plan.fits[plan.group[unlike]]]
        fitting, samples = plan.fits.copy(), np.zeros(len(self.row), np.bool_)
        doubled, first = np.unique(plan.group[unlike], return_index=True)
        fitting[doubled], samples[doubled] = False, plan.flows[doubled]
        for group, where in zip(doubled.tolist(), unlike[first].tolist(), strict=True):
            if not samples[group]:
                ranks = rank_list(plan.rank[[plan.owner[where], where]].tolist())
                self._set(np.array([group]), f"{ranks} hold the same part of it with different values")
        for group, text in plan.misfits.items():
            if text is not None and self.reader.complete and plan.kind[group] in _STATE:
                one = self._members(np.array([group]))
                self._set(one.groups, f"parts are not the whole: {text}", Joined.INCOMPLETE, Status.OBSERVED)
                self._hash(one, ordered=True)
            else:
                self._set(np.array([group]), text or "where the parts of it lie could not be worked out")
        members = self._members(fitting, plan.owner == np.arange(len(plan.rows)))
        number = plan.basis.layout[plan.rows[members.at]]
        headers = self.tables.header[number]
        self._set(fitting, "", Joined.PARTS, Status.OBSERVED)
        added = np.add.reduceat(unmix(self.checksums[members.at]) - headers, members.starts)
        self.out.checksum[members.groups] = mix(added + headers[members.starts])
        self._add_sketches(members)
        self._set_moments(members, self.tables.local_numel[number])
        return samples

    def _add_unreduced(self) -> None:
        """Add up the sketches of sums and means that ranks have not reduced yet, and count their NaN and infinities.

        A mean is the sum divided by the number of ranks; where fewer ranks have a record, the sum is scaled up to all.
        Other statistics stay unknown, the checksum is a hash of the members' checksums. Groups that cannot be added (a
        maximum, more values than ranks, no sketch) are not observed.
        """
        plan, groups = self.plan, np.flatnonzero(self.plan.unreduced)
        layouts = plan.basis.layout[self.row[groups]].tolist()
        owed = [part for number in layouts if (part := self.tables.layouts[number].part) is not None]
        over, reduction = np.array([part.reduced_over for part in owed], np.int64), [part.reduction for part in owed]
        known = np.isin(reduction, ("sum", "avg")) & (self._distinct(groups).sizes <= over)
        known &= self.out.sketch is not None
        text = np.array([f"{part.reduction} over {part.reduced_over} ranks" for part in owed], np.object_)
        self._set(groups[~known], [f"a {each} is still owed" for each in text[~known]])
        members = self._members(groups[known])
        times = np.where(np.isin(reduction, "avg"), 1, over)[known] / members.sizes
        self._owe(members, [f"{each}, still owed" for each in text[known]], times, ordered=True)

    def _owe(self, members: Members, text: str | Sequence[str], factor: Array | float = 1.0, *, ordered: bool) -> None:
        """Make groups sums over ranks, times a factor; of them only sketches, NaN and infinities are known."""
        self._set(members.groups, text, Joined.OWED, Status.PARTIAL)
        for name in {*_NONFINITE} & self.out.counts.keys():
            counted = self.block.counts[name][self.plan.rows[members.at]]
            self.out.counts[name][members.groups] = np.add.reduceat(counted, members.starts)
        self._hash(members, ordered=ordered)
        self._add_sketches(members, factor)

    def _compare_copies(self, groups: Array) -> None:
        """Decide about groups of unequal copies.

        Where all sketches are within `_ROUNDING` of the first rank's, its record stays. Of other groups only a hash of
        all checksums is kept, with a text that names the ranks that differ.
        """
        members = self._members(groups)
        near = np.zeros(len(members.groups), np.bool_)
        if self.out.sketch is not None:
            kept = self._sketches(members)
            distance = np.linalg.norm(kept - np.repeat(kept[members.starts], members.sizes, axis=0), axis=1)
            size = np.maximum.reduceat(np.linalg.norm(kept, axis=1), members.starts)
            near = np.maximum.reduceat(distance, members.starts) <= _ROUNDING * size
        members, texts = self._members(members.groups[~near]), []
        for at in np.split(members.at, members.starts[1:]) if len(members.at) else ():
            others = at[self.checksums[at] != self.checksums[at[0]]]
            [first, *ranks] = self.plan.rank[[at[0], *others]].tolist()
            texts.append(f"copies differ: {rank_list(ranks)} from rank {first}")
        self._set(members.groups, texts, Joined.COPIES, Status.OBSERVED)
        self._hash(members, ordered=True)

    def _gather(self, groups: Array) -> None:
        """Combine groups whose values differ between ranks or calls.

        The sum where `_are_summed`, not observed without sketches; else extrema and moments over all elements of the
        different values, a hash of their checksums, and the layout of all end to end.
        """
        summed = self._are_summed(groups)
        if self.out.sketch is None:
            self._set(summed, "each rank's share of a sum")
        else:
            self._owe(self._distinct(summed), "gradients of several ranks, added up", ordered=False)
        members, layouts = self._distinct(groups & ~summed), self.plan.basis.layout
        numbers = layouts[self.plan.rows[members.at]]
        held = self.tables.local_numel[numbers]
        texts = [f"values of {self._holders(group)} together" for group in members.groups.tolist()]
        self._set(members.groups, texts, Joined.GATHERED, Status.OBSERVED)
        self._hash(members, ordered=False)
        self.elements[members.groups] = np.add.reduceat(held, members.starts)
        self._set_moments(members, held)
        every = np.split(numbers, members.starts[1:]) if len(numbers) else ()
        for group, number in zip(members.groups.tolist(), every, strict=True):
            parts = self.tables.part[number]
            self.out.layout[group] = self.reader.batched_number(number[parts == parts[0]])

    def _are_summed(self, groups: Array) -> Array:
        """Bool (groups,), which of `groups` are gradients of a value that is equal on all ranks.

        Then the ranks' gradients add up. A value counts as equal only where no output of the same layout differs
        between ranks; of a gradient that has parts also a value that its parts add up to.
        """
        plan, equals = self.plan, self._is_equal()
        layouts, values = plan.basis.layout[self.row], self.reader.value_of[plan.site]
        equals &= ~np.isin(layouts, layouts[~equals & (plan.kind == KIND_CODES[Kind.OUTPUT])])
        # of parts, the copies of each are equal where they add up to the whole
        whole = plan.parts & np.isin(values, plan.site[self.how == Joined.PARTS])
        return np.asarray(groups & (np.isin(values, plan.site[equals]) | whole))

    def _mark_alike(self) -> None:
        """Mark as `ALIKE` values that may differ from rank to rank or call to call and are equal on all.

        Its text says how many ranks or calls that are. A group with a text is left as it is.
        """
        plan = self.plan
        several = plan.flows | np.isin(plan.kind, _OWN)
        alike = plan.flows & (plan.ranks > 1) | several & (plan.calls > 1)
        for group in np.flatnonzero(alike & (self.how == Joined.AS_RECORDED)).tolist():
            if not self.out.text[group]:
                self.how[group], self.ranks[group] = Joined.ALIKE, plan.members[group]
                self.out.text[group] = f"equal {'on' if plan.ranks[group] > 1 else 'in'} {self._holders(group)}"


def _is_new_value(*columns: Array) -> Array:
    """Bool (n,), whether any of some columns has another value than in the row before; True for the first row."""
    out = np.ones(len(columns[0]), np.bool_)
    out[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return out


# --- whole reader


_END = {Kind.INPUT.value: 0, Kind.GRAD_INPUT.value: 0, Kind.OUTPUT.value: -1, Kind.GRAD_OUTPUT.value: -1}
"""The stage of a pipeline, counted from either end, at which what goes into or comes out of a root is the model's."""
_VALUE_OF = {gradient.value: value.value for value, gradient in GRADIENT_OF.items()}

_STATES = frozenset({Kind.PARAM.value, Kind.OPTIMIZER_STATE.value})


class WholeReader(Reader):
    """All ranks of a run, read as one rank.

    Ranks number their sites by themselves, and stages of a pipeline have roots of the same name: here they have common
    numbers, and names as in the whole model.

    Attributes:
        rank: the lowest of them.
        readers: the ranks' own readers.
        stages: of ranks that run stages of a pipeline, these.
        lacking: why values that each rank has its own of are not all there; "" where they are.
        complete: whether all ranks were recorded, so that a missing part of the model is an error.
    """

    is_whole = True
    readers: list[RankReader]

    def __init__(
        self,
        path: str,
        readers: Sequence[RankReader],
        fold: Mapping[tuple[bool, str], int] | None = None,
        stages: Mapping[int, Stages] | None = None,
        *,
        lacking: str = "",
        complete: bool = False,
    ) -> None:
        """Combine what the ranks' readers know by now; records and names are read when asked for.

        Args:
            path: the run, for messages.
            readers: of the ranks, at least one, by rank.
            fold: how many calls of a name belong to one microbatch, of what is called more often than in the other run:
                by whether it is in evaluation, and its name. Calls are put together modulo that.
            stages: of ranks that run stages of a pipeline, these.
            lacking: why values that each rank has its own of are not all there; "" where they are.
            complete: whether these are all ranks of the run.
        """
        self.path, self.readers = path, list(readers)
        self._fold, self.stages = fold or {}, stages or {}
        self.rank_count = len(self.readers)
        self.rank = self.readers[0].rank
        self.running = any(reader.running for reader in self.readers)
        self.ended = all(reader.ended for reader in self.readers)
        self.thinned = tuple(dict.fromkeys(dropped for reader in self.readers for dropped in reader.thinned))
        self.lacking, self.complete = lacking, complete
        self._last_plan: tuple[Plan, Array] | None = None
        self._batched: dict[bytes, int] = {}
        self._read = lru_cache(maxsize=3)(self._combined_row)

    @cached_property
    def common_steps(self) -> NDArray[np.int64]:
        """int64, the numbers of the steps that every rank has, rising."""
        steps = {reader.entries["step"].tobytes(): reader.entries["step"] for reader in self.readers}
        return np.asarray(reduce(np.intersect1d, steps.values()), np.int64)

    @cached_property
    def entries(self) -> Entries:  # type: ignore[override]  # mypy takes it for a property that cannot be set
        """Entries of the steps that every rank has; only step and digest, one over the ranks' digests, are set."""
        out = np.zeros(len(self.common_steps), ENTRY)
        out["step"] = self.common_steps
        ranks = [reader.entries["digest"][rows] for reader, rows in zip(self.readers, self.positions, strict=True)]
        for row, digests in enumerate(np.stack(ranks, axis=1)):
            out["digest"][row] = np.void(blake2b(digests.tobytes(), digest_size=16).digest())
        return out

    @property
    def layout_mark(self) -> str:
        """16 hex digits over each rank's parts and names of parameters and optimizer state: equal if sharded alike."""
        digest = blake2b(digest_size=8)
        for reader in self.readers:
            parts = sorted({str((layout.shape, layout.part)) for layout in reader.layouts if layout.part is not None})
            held = sorted({row for row in zip(reader.sites.fqn, reader.sites.kind, strict=True) if row[1] in _STATES})
            digest.update(repr((reader.rank, parts, held)).encode())
        return digest.hexdigest()

    @cached_property
    def labels(self) -> dict[int, Labels]:
        """Labels by step, of each step all from the first rank that has some."""
        return dict(ChainMap(*(reader.labels for reader in self.readers)))

    # --- names

    @cached_property
    def distinct_roots(self) -> frozenset[str]:
        """Root modules whose pipeline stages have parameters of equal name and part that start with different values.

        A parameter that several stages share begins with equal values on all of them. Each rank's first step on record
        is read for it.
        """
        seen: dict[tuple[str, Part | None], tuple[int, object]] = {}
        roots = set()
        for reader in (reader for reader in self.readers if len(reader) and reader.rank in self.stages):
            stages = self.stages[reader.rank]
            for record in reader.records(int(reader.entries["step"][0])):
                site, summary = record.site, record.summary
                if site.kind is Kind.PARAM and site.phase is Phase.START:
                    stage, name = stages.stage(site.fqn.partition(".")[0]), stages.name(site.fqn)
                    mark = summary.layout.shape, summary.layout.dtype, summary.checksum
                    other = seen.setdefault((name, summary.layout.part), (stage, mark))
                    if other[0] != stage and other[1] != mark:
                        roots.add(name.partition(".")[0])
        return frozenset(roots)

    @cached_property
    def sites(self) -> SiteTable:
        """All sites of all ranks, by common number: the first rank's, then further ones of the others."""
        return self._numbered[0]

    @property
    def site_numbers(self) -> list[Array]:
        """For each reader, int64, the common number of each of its sites."""
        return self._numbered[1]

    @cached_property
    def _numbered(self) -> tuple[SiteTable, list[Array]]:
        """The common site table and, for each reader, the common number of each site.

        Sites are one where they are equal under their names in the whole model, with folded calls.
        """
        numbers: list[Array] = []
        number_of: dict[int, int] = {}
        by_site: dict[Site, int] = {}
        rows: list[tuple[Site, SiteInfo]] = []
        last: tuple[Array, Stages | None] | None = None
        for reader in self.readers:
            stages = self.stages.get(reader.rank)
            if last is not None and last[1] == stages and np.array_equal(last[0], reader.sites.key):
                numbers.append(numbers[-1])
                continue
            if last is not None and last[1] != stages:
                number_of.clear()  # the same name may be another's
            last = reader.sites.key, stages
            keys = last[0].tolist()
            for number, key in enumerate(keys):
                if key not in number_of:
                    site, info = reader.sites[number]
                    named = site.fqn if stages is None else stages.name(site.fqn)
                    each = self._fold.get((site.evaluates, named), 0) if site.kind in _BY_CALL else 0
                    if stages is not None:
                        site = replace(site, fqn=stages.name(site.fqn, self.distinct_roots))
                    if each:
                        site = replace(site, call=site.call % each)
                    number_of[key] = by_site.setdefault(site, len(rows))
                    if number_of[key] == len(rows):
                        rows.append((site, info))
            numbers.append(np.array([number_of[key] for key in keys], np.int64))
        return SiteTable(site_columns(rows)), numbers

    @cached_property
    def module_rows(self) -> list[ModuleInfo]:
        """All distinct rows of modules of all ranks, in order of rank, under their names in the whole model."""
        rows: dict[ModuleInfo, None] = {}
        for reader in self.readers:
            stages, modules = self.stages.get(reader.rank), reader.module_rows
            if stages is not None:
                modules = [replace(module, fqn=stages.name(module.fqn, self.distinct_roots)) for module in modules]
            rows |= dict.fromkeys(modules)
        return list(rows)

    @cached_property
    def kinds(self) -> Array:
        """int64 (sites,), the code of each site's kind."""
        return np.array([KIND_CODES[kind] for kind in self.sites.kind], np.int64)

    @cached_property
    def buffers_at_first(self) -> Array:
        """Bool (sites,), True for the value of a buffer at the start of a run (START, call 0)."""
        starts = np.array([phase == Phase.START.value for phase in self.sites.phase], np.bool_)
        return np.asarray(starts & (self.kinds == KIND_CODES[Kind.BUFFER]) & (self.sites.call == 0))

    @cached_property
    def value_of(self) -> Array:
        """int64 (sites,), for the gradient of an activation the site of that activation; -1 for all others."""
        sites = self.sites
        rows = list(zip(sites.kind, sites.fqn, sites.path, sites.call.tolist(), strict=True))
        values = {row: number for number, row in enumerate(rows) if row[0] in _VALUE_OF.values()}
        return np.array([values.get((_VALUE_OF.get(row[0], ""), *row[1:]), -1) for row in rows], np.int64)

    @cached_property
    def _left_out(self) -> list[Array]:
        """For each rank, bool (sites,), what is ignored: collectives, and what one pipeline stage passes to another.

        Every stage of a pipeline has a root of the same name: what goes into the model goes into that of the first,
        what comes out of it out of that of the last.
        """
        out = [self.kinds[numbers] == KIND_CODES[Kind.COLLECTIVE] for numbers in self.site_numbers]
        for reader, ignored in zip(self.readers, out, strict=True):
            if stages := self.stages.get(reader.rank):
                for number, (fqn, kind) in enumerate(zip(reader.sites.fqn, reader.sites.kind, strict=True)):
                    if "." not in fqn and kind in _END and stages.stage(fqn) != _END[kind] % stages.of:
                        ignored[number] = True
        return out

    @cached_property
    def layouts(self) -> list[Layout]:
        """Layouts of wholes, by number; `layout_number` may append."""
        return list(dict.fromkeys(whole_layout(layout) for reader in self.readers for layout in reader.layouts))

    @cached_property
    def _layout_numbers(self) -> dict[Layout, int]:
        return {layout: number for number, layout in enumerate(self.layouts)}

    def layout_number(self, layout: Layout) -> int:
        """The number of a layout of wholes; an unknown one is appended."""
        number = self._layout_numbers.setdefault(layout, len(self.layouts))
        if number == len(self.layouts):
            self.layouts.append(layout)
        return number

    @cached_property
    def whole_numbers(self) -> Array:
        """uint32, for each of `tables.layouts` the number of the whole tensor's."""
        return np.array([self.layout_number(whole_layout(layout)) for layout in self.tables.layouts], np.uint32)

    def batched_number(self, numbers: Array) -> int:
        """The number of the layout of tensors concatenated along dimension 0.

        A layout that is new gets the next number.

        Args:
            numbers: int64, the numbers of the tensors' layouts among `tables.layouts`.
        """
        key = numbers.tobytes()
        if key not in self._batched:
            layouts = [self.tables.layouts[number] for number in numbers.tolist()]
            self._batched[key] = self.layout_number(batched_layout(layouts))
        return self._batched[key]

    # --- putting together

    def read_row(self, row: int) -> StepBatch:
        """The combined records of the `row`-th step; the last 3 are cached."""
        return self._read(row)

    def _combined_row(self, row: int) -> StepBatch:
        """Combine the `row`-th step."""
        block, rows = self._stacked(row)
        plan, layouts = self._planned(rows)
        return CombinedStep(self, block, plan, layouts.copy()).combined()

    def _stacked(self, row: int) -> tuple[StepBatch, Rows]:
        """The records of the `row`-th step of all ranks, and which rows they are."""
        batches: list[StepBatch] = []
        sites: list[Array] = []
        layouts: list[Array] = []
        read = read_rows(self.readers, self.positions[:, row].tolist())
        known = zip(self.site_numbers, self.tables.common_numbers, self._left_out, strict=True)
        for batch, (numbers, common, ignored) in zip(read, known, strict=True):
            rows = np.flatnonzero(~ignored[batch.site])
            batches.append(batch if len(rows) == len(batch) else rows_of([batch], [rows]))
            sites.append(numbers[batches[-1].site])
            layouts.append(common[batches[-1].layout])
        rank = np.repeat([reader.rank for reader in self.readers], [len(batch) for batch in batches])
        block = rows_of(batches, [np.arange(len(batch)) for batch in batches])
        return block, Rows(np.concatenate(sites), rank, np.concatenate(layouts), block.status)

    def _planned(self, rows: Rows) -> tuple[Plan, Array]:
        """The plan of a step, and the layout of each group's whole; those of the step before, if its rows are equal."""
        if self._last_plan is None or not all(map(np.array_equal, self._last_plan[0].basis, rows)):
            plan = Plan(rows, self.tables, self.kinds)
            self._last_plan = plan, self.whole_numbers[rows.layout[plan.rows[plan.starts]]]
        return self._last_plan

    @cached_property
    def positions(self) -> Array:
        """int64 (ranks, steps), position of each common step among each rank's entries."""
        return np.stack([np.searchsorted(reader.entries["step"], self.common_steps) for reader in self.readers])

    @cached_property
    def tables(self) -> LayoutTables:
        """The ranks' layouts."""
        return LayoutTables(self.readers)
