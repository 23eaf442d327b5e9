"""The first pass: rows of a beside rows of b, by site, as their checksums compare."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.resumed.began import with_starts
from introspect_cli.compare.terms.at import At
from introspect_cli.compare.terms.sites import Alignment, Ids, Mask, kind_code
from introspect_cli.compare.terms.table import ABSENT, DIFFERENT, EQUAL, NOT_SEEN, ONLY_A, ONLY_B, Because, Table
from introspect_cli.compare.terms.watched import lists, ordered
from introspect_cli.records import EXPANDED_TEXT, Kind, Status

if TYPE_CHECKING:
    from introspect_cli.compare.step.comparison import Comparison
    from introspect_cli.store.format.batch import StepBatch

_UNSEEN, _PARTIAL, _VALUE = int(Status.NOT_OBSERVED), int(Status.PARTIAL), int(Status.VALUE)


def pair(comparison: Comparison, step_a: int, step_b: int) -> Table:
    """The table of one step.

    Where one run lists tensors at the start of a step, the other has there what its step before left.
    """
    alignment = comparison.alignment
    readers, columns, steps = (comparison.a, comparison.b), (alignment.a, alignment.b), (step_a, step_b)
    batches, left = [comparison.a.read(step_a), comparison.b.read(step_b)], np.empty(0, np.int64)
    listing = [lists(one) or by_hand for one, by_hand in zip(comparison.manifests, comparison.by_hand, strict=True)]
    if listing[0] != listing[1] and comparison.gathered is None:
        side, listed = int(listing[0]), int(listing[1])
        before, wanted = At(readers[side], columns[side], steps[side] - 1), alignment.ids[listed][batches[listed].site]
        batches[side], left = with_starts(alignment, side, before, batches[side], wanted)
    table = matched(alignment, comparison.compared, steps, (batches[0], batches[1]))
    in_order = [ordered(manifest) for manifest in comparison.manifests]
    if in_order == [False, True]:
        table = replace(table, a=_in_order_of_b(table))
    return replace(table, chosen=comparison.chosen[table.site], left=left)


def _in_order_of_b(table: Table) -> StepBatch:
    """A's records in the order of b's; those that b has not come last."""
    place = np.full(table.alignment.size, np.iinfo(np.int64).max)
    place[table.sites_b] = table.b.sequence
    order = np.lexsort((table.a.sequence, place[table.sites_a]))
    sequence = np.empty(len(order), np.uint32)
    sequence[order] = np.arange(len(order))
    return replace(table.a, sequence=sequence)


def matched(
    alignment: Alignment, compared: Mask, steps: tuple[int, int], batches: tuple[StepBatch, StepBatch]
) -> Table:
    """The records of one step of both runs, as they are."""
    a, b = batches
    sites = a.site.astype(np.int64), alignment.b_ids[b.site]
    row_a, row_b, alone_a, alone_b = _partners(alignment, *sites)
    both = len(row_a)
    state = np.concatenate([np.full(both, EQUAL), np.full(len(alone_a), ONLY_A), np.full(len(alone_b), ONLY_B)])
    because = np.full(len(state), Because.RECORDS)
    site = np.concatenate([sites[0][row_a], sites[0][alone_a], sites[1][alone_b]])
    counts = compared[site]

    differs = a.checksum[row_a] != b.checksum[row_b]
    state[:both][differs] = DIFFERENT
    blind = _blind(a, row_a) | _blind(b, row_b) | _expanded(a, b, row_a, row_b, differs)
    for rows, reason in (
        (differs & _untouched(alignment, site[:both], a, b, row_a, row_b), Because.UNTOUCHED),
        (blind & counts[:both], Because.NOT_OBSERVED),
        (differs & ~counts[:both], Because.NOT_COMPARED),
    ):
        state[:both][rows], because[:both][rows] = NOT_SEEN, reason

    blind = np.concatenate([_blind(a, alone_a), _blind(b, alone_b)])
    for rows, reason in ((blind, Because.NOT_OBSERVED), (~counts[both:], Because.NOT_COMPARED)):
        state[both:][rows], because[both:][rows] = ABSENT, reason
    return Table(
        alignment=alignment,
        step=steps[0],
        step_b=steps[1],
        a=a,
        b=b,
        site=site,
        row_a=np.concatenate([row_a, alone_a, np.full(len(alone_b), -1, np.int64)]),
        row_b=np.concatenate([row_b, np.full(len(alone_a), -1, np.int64), alone_b]),
        state=state.astype(np.int8),
        because=because.astype(np.int8),
        chosen=counts,
        cause=np.zeros(len(state), np.bool_),
        left=np.empty(0, dtype=np.int64),
    )


def _partners(alignment: Alignment, site_a: Ids, site_b: Ids) -> tuple[Ids, Ids, Ids, Ids]:
    """Rows of a and b with the same site, and the rows that have no partner."""
    none = np.empty(0, dtype=np.int64)
    if len(site_a) == len(site_b) and np.array_equal(site_a, site_b):
        rows = np.arange(len(site_a), dtype=np.int64)
        return rows, rows, none, none
    place = np.full(alignment.size, -1, dtype=np.int64)
    place[site_a] = np.arange(len(site_a))
    partner = place[site_b]
    rows_b = np.flatnonzero(partner >= 0)
    rows_a = partner[rows_b]
    alone = np.ones(len(site_a), dtype=np.bool_)
    alone[rows_a] = False
    return rows_a, rows_b, np.flatnonzero(alone), np.flatnonzero(partner < 0)


def _blind(batch: StepBatch, rows: Ids) -> Mask:
    """Rows whose value was not seen: nothing observed, or so little that there is no checksum."""
    status = batch.status[rows]
    unseen: Mask = status == _UNSEEN
    partial = status == _PARTIAL
    if partial.any():
        unseen |= partial & (batch.checksum[rows] == 0)
    return unseen


def _expanded(a: StepBatch, b: StepBatch, rows_a: Ids, rows_b: Ids, differs: Mask) -> Mask:
    """Rows that one run read element by element and of which the other only tells what is in memory."""
    status_a, status_b = a.status[rows_a], b.status[rows_b]
    unlike: Mask = differs & (status_a != status_b) & ((status_a == _PARTIAL) | (status_b == _PARTIAL))
    for at in np.flatnonzero(unlike):
        texts = a.text[rows_a[at]], b.text[rows_b[at]]
        unlike[at] = any(text.startswith(EXPANDED_TEXT) for text in texts)
    return unlike


def _untouched(alignment: Alignment, sites: Ids, a: StepBatch, b: StepBatch, rows_a: Ids, rows_b: Ids) -> Mask:
    """Random states that one run records as untouched, in words, and the other as a state: these do not compare.

    Whether a generator counts as touched depends on when the capture began; what is drawn from it shows by itself.
    """
    random = alignment.kind[sites] == kind_code(Kind.RNG)
    if not random.any():
        return np.asarray(random)
    return np.asarray(random & ((a.status[rows_a] == _VALUE) != (b.status[rows_b] == _VALUE)))
