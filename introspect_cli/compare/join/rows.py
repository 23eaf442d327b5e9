"""One step of both runs, row against row.

A step has thousands of records and nearly all of them agree. Rows are matched by union site number through one
scatter and one gather, checksums are compared as arrays, and what is left, the rows that differ, is what
everything else looks at.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from introspect_cli.compare.join.sites import kind_code
from introspect_cli.records import EXPANDED_TEXT, Kind, Status

if TYPE_CHECKING:
    from introspect_cli.compare.join.sites import Alignment, Ids, Mask
    from introspect_cli.store.batch import StepBatch

_UNSEEN = int(Status.NOT_OBSERVED)
_PARTIAL = int(Status.PARTIAL)


@dataclass(frozen=True)
class StepPair:
    """What two batches of records have in common and where they differ.

    Attributes:
        step: the step of run a.
        step_b: the step of run b.
        a: run a's records of the step, as the store's columns.
        b: run b's.
        matched: how many records both have, settings left out.
        rows_a: rows of a that differ from their partners.
        rows_b: those partners, in the same order.
        only_a: rows of a without a partner.
        only_b: rows of b without a partner.
        unseen_a: rows of a where one side at least saw nothing, and
        unseen_b: their partners.
        alone: union numbers of sites that one run has and the other could not see.
        within_a: rows of a that differ by no more than the tolerance or the noise.
        left: union numbers of tensors at the start of the step of which one run has only what the step before left.
    """

    step: int
    step_b: int
    a: StepBatch
    b: StepBatch
    matched: int
    rows_a: Ids
    rows_b: Ids
    only_a: Ids
    only_b: Ids
    unseen_a: Ids
    unseen_b: Ids
    alone: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    within_a: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    left: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def diverged(self) -> int:
        """How many records diverge, one-sided ones included."""
        return len(self.rows_a) + len(self.only_a) + len(self.only_b)

    def sites(self, alignment: Alignment) -> tuple[Ids, Ids]:
        """Union numbers of the sites of all records, of a's and of b's, by row."""
        return sites_of(alignment, self.a, self.b)


def sites_of(alignment: Alignment, a: StepBatch, b: StepBatch) -> tuple[Ids, Ids]:
    """Union numbers of the sites of two batches of records, by row."""
    return np.asarray(a.site).astype(np.int64), alignment.b_ids[np.asarray(b.site)]


def _partners(alignment: Alignment, union_a: Ids, union_b: Ids) -> tuple[Ids, Ids, Ids, Ids]:
    """Rows of a and b with the same site, and the rows that have no partner."""
    none = np.empty(0, dtype=np.int64)
    if len(union_a) == len(union_b) and np.array_equal(union_a, union_b):
        rows = np.arange(len(union_a), dtype=np.int64)
        return rows, rows, none, none
    place = np.full(alignment.size, -1, dtype=np.int64)
    place[union_a] = np.arange(len(union_a))
    partner = place[union_b]
    found = partner >= 0
    rows_b = np.flatnonzero(found)
    rows_a = partner[rows_b]
    lonely = np.ones(len(union_a), dtype=np.bool_)
    lonely[rows_a] = False
    return rows_a, rows_b, np.flatnonzero(lonely), np.flatnonzero(~found)


def _blind(batch: StepBatch, rows: Ids) -> Mask:
    """Rows whose value was not seen: nothing observed, or so little that there is no checksum."""
    status = np.asarray(batch.status)[rows]
    unseen: Mask = status == _UNSEEN
    partial = status == _PARTIAL
    if partial.any():
        unseen |= partial & (np.asarray(batch.checksum)[rows] == 0)
    return unseen


def _expanded(a: StepBatch, b: StepBatch, rows_a: Ids, rows_b: Ids, differs: Mask) -> Mask:
    """Rows that one run read element by element and of which the other only tells what is in memory."""
    status_a, status_b = np.asarray(a.status)[rows_a], np.asarray(b.status)[rows_b]
    apart: Mask = differs & (status_a != status_b) & ((status_a == _PARTIAL) | (status_b == _PARTIAL))
    for at in np.flatnonzero(apart):
        texts = a.text[rows_a[at]], b.text[rows_b[at]]
        apart[at] = any(text.startswith(EXPANDED_TEXT) for text in texts)
    return apart


def _untouched(alignment: Alignment, union_a: Ids, a: StepBatch, b: StepBatch, rows_a: Ids, rows_b: Ids) -> Mask:
    """Random states that one run records as untouched, in words, and the other as a state: these do not compare.

    Whether a generator counts as touched depends on when the capture began; what is drawn from it shows by itself.
    """
    random = alignment.kind[union_a[rows_a]] == kind_code(Kind.RNG)
    if not random.any():
        return np.asarray(random)
    value = int(Status.VALUE)
    return np.asarray(random & ((np.asarray(a.status)[rows_a] == value) != (np.asarray(b.status)[rows_b] == value)))


def match(alignment: Alignment, counted: Mask, step: int, step_b: int, a: StepBatch, b: StepBatch) -> StepPair:
    """Compare one step.

    Args:
        alignment: the runs' sites.
        counted: by union number, which sites count at all.
        step: step of run a.
        step_b: step of run b.
        a: records of run a.
        b: records of run b.
    """
    union_a, union_b = sites_of(alignment, a, b)
    rows_a, rows_b, only_a, only_b = _partners(alignment, union_a, union_b)
    if not counted.all():
        keep = counted[union_a[rows_a]]
        if not keep.all():
            rows_a, rows_b = rows_a[keep], rows_b[keep]
        only_a = only_a[counted[union_a[only_a]]]
        only_b = only_b[counted[union_b[only_b]]]
    differs = np.asarray(a.checksum)[rows_a] != np.asarray(b.checksum)[rows_b]
    unseen = _blind(a, rows_a) | _blind(b, rows_b) | _expanded(a, b, rows_a, rows_b, differs)
    differs &= ~(unseen | _untouched(alignment, union_a, a, b, rows_a, rows_b))
    return StepPair(
        step=step,
        step_b=step_b,
        a=a,
        b=b,
        matched=len(rows_a),
        rows_a=rows_a[differs],
        rows_b=rows_b[differs],
        only_a=only_a[~_blind(a, only_a)],
        only_b=only_b[~_blind(b, only_b)],
        unseen_a=rows_a[unseen],
        unseen_b=rows_b[unseen],
    )


def with_equal(pair: StepPair, same: Mask) -> StepPair:
    """The step with some differing rows as equal ones, for whoever looks at checksums too."""
    checksums = np.array(pair.b.checksum)
    checksums[pair.rows_b[same]] = np.asarray(pair.a.checksum)[pair.rows_a[same]]
    batch = replace(pair.b, checksum=checksums)
    return replace(pair, b=batch, rows_a=pair.rows_a[~same], rows_b=pair.rows_b[~same])


@dataclass(frozen=True)
class Items:
    """The divergences of one step in the order they were recorded.

    Attributes:
        union: union site number of each.
        row_a: row of a, -1 where only b has it.
        row_b: row of b, -1 where only a has it.
        order: place in a's order; what only b has comes before the next record that both have.
    """

    union: Ids
    row_a: Ids
    row_b: Ids
    order: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.union)


def _after(
    preceding: npt.NDArray[np.float64], sequence_a: npt.NDArray[np.float64], matched: Ids
) -> npt.NDArray[np.float64]:
    """Places in a's order for what only b has: before the next record both have, after what only a has there."""
    known = np.sort(sequence_a[matched])
    following = np.searchsorted(known, preceding, side="right")
    ends = np.append(known, sequence_a.max(initial=0.0) + 2.0)
    return np.asarray(ends[following] - 0.5)


def in_order(alignment: Alignment, pair: StepPair) -> Items:
    """All divergences of a step, the earliest first."""
    sequence_a = np.asarray(pair.a.sequence).astype(np.float64)
    site_a, site_b = pair.sites(alignment)
    order_b = np.empty(0)
    sequence_b = np.asarray(pair.b.sequence)
    if len(pair.only_b):
        by_union = np.full(alignment.size, -1.0)
        by_union[site_a] = sequence_a
        arrival = np.argsort(sequence_b, kind="stable")
        reached = np.empty(len(arrival))
        reached[arrival] = np.maximum.accumulate(by_union[site_b[arrival]])
        order_b = _after(reached[pair.only_b], sequence_a, np.delete(np.arange(len(sequence_a)), pair.only_a))
    none_b = np.full(len(pair.only_a), -1, dtype=np.int64)
    none_a = np.full(len(pair.only_b), -1, dtype=np.int64)
    row_a = np.concatenate([pair.rows_a, pair.only_a, none_a])
    row_b = np.concatenate([pair.rows_b, none_b, pair.only_b])
    union = np.concatenate([site_a[pair.rows_a], site_a[pair.only_a], site_b[pair.only_b]])
    order = np.concatenate([sequence_a[pair.rows_a], sequence_a[pair.only_a], order_b])
    tie = np.concatenate([np.zeros(len(pair.rows_a) + len(pair.only_a)), sequence_b[pair.only_b].astype(float)])
    rank = np.lexsort((tie, order))
    return Items(union[rank], row_a[rank], row_b[rank], order[rank])
