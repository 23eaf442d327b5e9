"""What becomes of each site of a step of several ranks, as far as layouts and what was seen tell.

That hardly changes from step to step, so it is found out once: which rows belong together, which of them hold parts,
copies of the same part, or nothing.

Counting the elements of parts does not tell whether they are the whole: a shard written at a wrong offset leaves a hole
and overlaps its neighbour, and the numbers add up. So the parts are painted on a grid whose lines are the ends of their
ranges: as many cells as there are parts, however large the tensor is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.records import Status
from introspect_cli.store.format.kinds import codes_that
from introspect_cli.texts import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from introspect_cli.records import Layout, Part
    from introspect_cli.store.ranks.stacked import LayoutTables, Rows, StackedStep

    Array = NDArray[Any]

_NOT_SEEN = int(Status.NOT_OBSERVED)


@dataclass(frozen=True)
class Plan:
    """How each site of a step is combined, as far as layouts and statuses decide it. A group is one site's rows.

    Attributes:
        basis: the rows of the step.
        rows: positions in `basis`, by site and then by rank, without rows that hold nothing others lack.
        starts: positions in `rows` where each group begins.
        group: for each of `rows`, its group's number.
        kind: for each group, the code of its kind.
        flows: bool (groups,), activations and their gradients.
        unseen: groups that a rank could not observe, with the row that says why.
        mixed: bool (groups,), some ranks hold parts and others values without a known place.
        unreduced: bool (groups,), sums that ranks have not reduced yet.
        parts: bool (groups,), to be assembled from parts.
        partless: bool (groups,), without parts.
        owner: for each of `rows`, the position in `rows` of the first rank with the same part.
        misfits: groups whose parts leave some of the whole out or overlap, with the reason; None where it could not be
            worked out where the parts lie.
    """

    basis: Rows
    rows: Array
    starts: Array
    group: Array
    kind: Array
    flows: Array
    unseen: dict[int, int]
    mixed: Array
    unreduced: Array
    parts: Array
    partless: Array
    owner: Array
    misfits: dict[int, str | None]

    @cached_property
    def copies(self) -> Array:
        """Positions in `rows` of records whose part, or whole, an earlier row of the group has too."""
        return np.flatnonzero(self.owner != np.arange(len(self.rows)))

    @cached_property
    def _of_rank(self) -> Array:
        """Positions in `rows` where the records of one rank in one group begin."""
        rank = self.basis.rank[self.rows]
        new = np.ones(len(rank), np.bool_)
        new[1:] = (rank[1:] != rank[:-1]) | (self.group[1:] != self.group[:-1])
        return np.flatnonzero(new)

    @cached_property
    def ranks(self) -> Array:
        """int64 (groups,), number of ranks with a record in each group."""
        return np.bincount(self.group[self._of_rank], minlength=len(self.starts))

    @cached_property
    def members(self) -> Array:
        """int64 (groups,), number of records in each group."""
        return np.bincount(self.group, minlength=len(self.starts))

    @cached_property
    def calls(self) -> Array:
        """int64 (groups,), the largest number of records (calls) that one rank has in each group."""
        most = np.zeros(len(self.starts), np.int64)
        np.maximum.at(most, self.group[self._of_rank], np.diff(self._of_rank, append=len(self.rows)))
        return most

    @cached_property
    def site(self) -> Array:
        """uint32, the site of each group."""
        return self.basis.site[self.rows[self.starts]].astype(np.uint32)


def starts_of(values: Array) -> Array:
    """Positions in sorted `values`, none below 0, where a new value begins."""
    return np.flatnonzero(np.diff(values, prepend=-1)) if len(values) else np.zeros(0, np.int64)


def any_of(mask: Array, starts: Array) -> Array:
    """Bool (groups,), whether `mask` is true for any row of each group; groups begin at `starts`."""
    return np.logical_or.reduceat(mask, starts) if len(starts) else np.zeros(0, np.bool_)


def group_of(starts: Array, size: int) -> Array:
    """int64 (size,), the group number of each row; groups begin at `starts`."""
    return np.repeat(np.arange(len(starts)), np.diff(starts, append=size))


def plan_of(step: StackedStep, tables: LayoutTables, kinds: Array, left_out: Array) -> Plan:
    """Plan how the sites of a step are combined.

    Args:
        step: of all ranks.
        tables: the ranks' layouts.
        kinds: code of each site's kind.
        left_out: bool, rows that are ignored.
    """
    basis = step.rows
    rows = np.flatnonzero(~left_out)
    rows = rows[np.argsort(basis.site[rows], kind="stable")]
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
    flows = np.isin(kind, codes_that("flows"))  # samples beside one another may each be cut: only what fits is added up
    samples = mixed & flows & ~any_of(part == 0, starts)
    unreduced = parts & ~mixed & tables.unreduced[number[starts]]
    mixed = mixed & ~samples
    parts = parts & ~mixed & ~unreduced & ~samples
    owner = np.arange(len(rows))
    by_part = np.lexsort((owner, part, group))
    new = (np.diff(part[by_part], prepend=-1) != 0) | (np.diff(group[by_part], prepend=-1) != 0)
    if len(rows):
        owner[by_part] = by_part[np.flatnonzero(new)][np.cumsum(new) - 1]
    unseen = np.flatnonzero(basis.status[rows] == _NOT_SEEN)[::-1]
    return Plan(
        basis=basis,
        rows=rows,
        starts=starts,
        group=group,
        kind=kind,
        flows=flows,
        unseen=dict(zip(group[unseen].tolist(), rows[unseen].tolist(), strict=True)),
        mixed=mixed,
        unreduced=unreduced,
        parts=parts,
        partless=~(partly_unseen | mixed | unreduced | parts),
        owner=owner,
        misfits=_misfits(step, tables, rows, starts, parts),
    )


def _misfits(
    step: StackedStep, tables: LayoutTables, rows: Array, starts: Array, parts: Array
) -> dict[int, str | None]:
    """Groups of `parts` whose parts are not exactly their whole, with the reason by `_misfit` (None: unknown).

    Groups with equal lists of layouts have the reason of the first, with its ranks.

    Args:
        step: of all ranks.
        tables: the ranks' layouts.
        rows: positions in the step's rows, group after group.
        starts: where in `rows` each group begins.
        parts: bool (groups,), which groups are assembled from parts.
    """
    by_layouts: dict[bytes, str | None] = {}
    out = {}
    ends = np.append(starts[1:], len(rows)).tolist()
    for group in np.flatnonzero(parts).tolist():
        members = rows[starts[group] : ends[group]]
        numbers = step.rows.layout[members]
        key = numbers.tobytes()
        if key not in by_layouts:
            layouts = [tables.layouts[number] for number in numbers.tolist()]
            by_layouts[key] = _misfit(layouts, step.ranks_of(members))
        if by_layouts[key] != "":
            out[group] = by_layouts[key]
    return out


def _misfit(layouts: Sequence[Layout], ranks: Sequence[int]) -> str | None:
    """Why the parts that ranks hold of one tensor are not exactly its whole; "" where they are, None if unknown.

    Equal parts count once. Of several faults, the first overlap is named, with the first rank that holds either part; a
    gap only without one. The first layout says how large the whole is.
    """
    held = [(rank, layout.part) for rank, layout in zip(ranks, layouts, strict=True)]
    holders = {part: rank for rank, part in reversed(held) if part is not None}
    parts = [part for part in dict.fromkeys(part for _, part in held) if part is not None]
    covered = covering(parts)
    if covered is None:
        return None
    if covered.first is not None:
        return f"parts of it overlap: those of {rank_list(sorted(holders[parts[place]] for place in covered.first))}"
    whole = layouts[0].numel
    if covered.covered == whole:
        return ""
    return f"the parts of it on record cover {share(covered.covered, whole)}{same_parts(held)}"


# --- how much of a whole its parts cover

_MOST_CELLS = 1 << 24
_SIMPLE = 64


class Covering(NamedTuple):
    """How many elements of a whole its parts cover.

    Attributes:
        covered: elements in at least one part.
        doubled: elements in more than one part.
        first: positions of two parts that overlap; None where none do.
    """

    covered: int
    doubled: int
    first: tuple[int, int] | None = None


def covering(parts: Sequence[Part]) -> Covering | None:
    """How many elements of a tensor its distinct parts cover, and whether they overlap; empty parts are ignored.

    None where the parts differ in their number of dimensions, or cut the tensor into more than `_MOST_CELLS` cells.
    """
    filled = [number for number, part in enumerate(parts) if part.numel]
    if not filled:
        return Covering(0, 0)
    dims = {len(parts[number].ranges) for number in filled}
    if len(dims) != 1:
        return None
    lines = []
    for dim in range(dims.pop()):
        ends = {end for n in filled for start, size in parts[n].ranges[dim] for end in (start, start + size)}
        lines.append(np.array(sorted(ends), np.int64))
    cells = tuple(len(ends_of_cells) - 1 for ends_of_cells in lines)
    if float(np.prod(cells, dtype=np.float64)) > _MOST_CELLS:
        return None
    painted = np.zeros(cells, np.int32)
    holder = np.full(cells, -1, np.int32)
    first = None
    for number in filled:
        inside = np.ix_(*starmap(_cells, zip(lines, parts[number].ranges, strict=True)))
        if first is None and (painted[inside] > 0).any():
            first = int(holder[inside].max()), number
        painted[inside] += 1
        holder[inside] = number
    sizes = np.ones((), np.float64)
    for ends_of_cells in lines:
        sizes = np.multiply.outer(sizes, np.diff(ends_of_cells))
    return Covering(int(sizes[painted > 0].sum()), int(sizes[painted > 1].sum()), first)


def _cells(lines: np.ndarray[tuple[int, ...], np.dtype[np.int64]], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of the cells that `ranges` cover; cell i goes from lines[i] to lines[i + 1].

    Args:
        lines: ascending; both ends of every range are among them.
        ranges: (start, size) of each; cells of ranges that overlap are given twice.
    """
    return [
        cell
        for start, size in ranges
        for cell in range(int(np.searchsorted(lines, start)), int(np.searchsorted(lines, start + size)))
    ]


def same_parts(holders: Iterable[tuple[int, Part | None]]) -> str:
    """`: ranks 0, 1 hold the same part` for (rank, part) pairs; "" where no two ranks hold the same non-empty part."""
    holders_of: dict[Part, list[int]] = {}
    for rank, part in holders:
        if part is not None and part.numel:
            holders_of.setdefault(part, []).append(rank)
    sentences = [f"{rank_list(ranks)} hold the same part" for ranks in holders_of.values() if len(ranks) > 1]
    return f": {' and '.join(sentences)}" if sentences else ""


def share(of: int, whole: int) -> str:
    """How many elements of a whole, in words: `3/4 of it`, or `1,234 of its 5,678 elements`.

    The fraction is reduced, and written where its denominator is at most `_SIMPLE`; `0/1 of it` for an empty whole.

    Args:
        of: number of elements.
        whole: number of elements of the whole.
    """
    common = math.gcd(of, whole) or 1
    if whole // common <= _SIMPLE:
        return f"{of // common}/{whole // common or 1} of it"
    return f"{of:,} of its {whole:,} elements"
