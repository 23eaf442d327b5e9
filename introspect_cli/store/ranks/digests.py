"""Digests of the steps of all ranks as one, that do not depend on how tensors are shared out; see `format.totals`.

A digest may say that two steps are equal only where putting all ranks together and comparing would find nothing. Which
records belong together follows from layouts, which the totals do not say; but a step with the same forms on all ranks
goes together in the same way, so one of them is read, planned as if it were compared, and looked at. Where anything in
it is more than parts that fit, equal copies, and values that each rank has its own of, there is no such digest, and
its steps are read.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import Status
from introspect_cli.store.format.totals import FIRST, LEFT_OUT, MIXED, STATE, part_hash, site_factors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from introspect_cli.store.format.totals import Totals
    from introspect_cli.store.ranks.plan import Plan
    from introspect_cli.store.ranks.stacked import LayoutTables, Rows

    Array = NDArray[Any]

_MOST_FORMS = 16
"""How many forms a run's steps may have; each costs reading a step."""


def layout_free_digests(
    totals: Sequence[Totals],
    keys: Array,
    kinds: Array,
    tables: LayoutTables,
    rows: Array,
    plans_of: Callable[[int], Sequence[Plan]],
) -> tuple[list[bytes | None], NDArray[np.int64]]:
    """Digests of steps that are equal for equal values in any layout.

    A form is the list of shares of a rank's step: rows of one kind and part, which are added up.

    Args:
        totals: of each rank.
        keys: uint64, of all sites by common number.
        kinds: int64, codes of their kinds.
        tables: the ranks' layouts.
        rows: (ranks, steps), position of each common step among each rank's entries.
        plans_of: gives the plans of all slices of the step at a position.

    Returns:
        the digest of each step, None where the ranks' totals do not determine it (a rank has none, copies differ,
        parts do not fit together), nor for any but the `_MOST_FORMS` commonest combinations of the ranks' forms; and
        int64 (steps,), the number of each step's combination, -1 where a rank has no totals.
    """
    out: list[bytes | None] = [None] * rows.shape[1]
    groups = np.full(rows.shape[1], -1, np.int64)
    form = np.stack([each.form[of_rank] for each, of_rank in zip(totals, rows, strict=True)])
    there = np.flatnonzero((form >= 0).all(axis=0))
    if not len(there):
        return out, groups
    every, group, number = np.unique(form[:, there], axis=1, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    groups[there] = group
    for which in np.argsort(-number, kind="stable")[:_MOST_FORMS].tolist():
        steps = there[group == which]
        shares = [each.forms[of] for each, of in zip(totals, every[:, which].tolist(), strict=True)]
        every_slice = [_constant_parts(keys, kinds, tables, plan, shares) for plan in plans_of(int(steps[0]))]
        slices = [each for each in every_slice if each is not None]
        if len(slices) < len(every_slice):
            continue
        unseen = np.sort(np.concatenate([keys for keys, _ in slices]))
        headers = sum(lanes for _, lanes in slices)
        values = [
            each.totals[of][each.position[of_rank[steps]]]
            for each, of_rank, of in zip(totals, rows, every[:, which].tolist(), strict=True)
        ]
        added, whole = _totals_of_all(shares, values)
        for step, lanes, is_whole in zip(steps.tolist(), added, whole.tolist(), strict=True):
            if is_whole:
                out[step] = blake2b(unseen.tobytes() + (lanes + headers).tobytes(), digest_size=16).digest()
    return out, groups


def _totals_of_all(shares: Sequence[Array], values: Sequence[Array]) -> tuple[Array, Array]:
    """Totals over all ranks, uint64 (steps, 4), and bool (steps,), whether all copies are equal.

    The first two numbers add up shares of state and parts, each share that several ranks have once, by the first rank's
    total; the other two add up what each rank has its own of. Copies of whole values of kinds in FIRST may differ.

    Args:
        shares: of each rank.
        values: of each rank, uint64 (steps, shares, 2).
    """
    steps = len(values[0])
    lanes, whole = np.zeros((steps, 4), np.uint64), np.ones(steps, np.bool_)
    first: dict[bytes, Array] = {}
    for of_rank, totals in zip(shares, values, strict=True):
        for number, (share, kind, place) in enumerate(
            zip(of_rank, of_rank["kind"].tolist(), of_rank["part"].tolist(), strict=True)
        ):
            total = totals[:, number]
            if kind == MIXED:
                lanes[:, 2:] += total
                continue
            before = first.setdefault(share.tobytes(), total)
            if before is total:
                lanes[:, :2] += total
            elif kind not in FIRST or place:
                whole &= (total == before).all(axis=1)
    return lanes, whole


def _constant_parts(
    site_keys: Array, kinds: Array, tables: LayoutTables, plan: Plan, shares: Sequence[Array]
) -> tuple[Array, Array] | None:
    """The constant parts of the digests of all steps with one plan, for a slice of their sites.

    Returns:
        keys of the sites with a row that was not observed, and a sum of the wholes' headers, each times its site's
        factors, uint64 (4,), 0 in the last two; None where totals do not determine the digests.
    """
    basis = plan.basis
    if plan.mixed.any() or plan.unreduced.any() or plan.misfits:
        return None
    kind = kinds[basis.site]
    counts = ~np.isin(kind, LEFT_OUT)
    rows = plan.rows[counts[plan.rows]]
    group = plan.group[counts[plan.rows]]
    number = basis.layout[rows]
    cut = ((tables.part[number] > 0) & (tables.local_numel[number] > 0)) | (basis.status[rows] == int(Status.PARTIAL))
    if (cut & ~plan.parts[group]).any():
        return None
    headers = tables.header[number]
    if (plan.parts[group] & (headers != tables.header[basis.layout[plan.rows[plan.starts]]][group])).any():
        return None
    if not _is_separate(group, tables.part[number], _share_of(kinds, tables, basis, rows, shares)):
        return None
    groups = np.unique(group[plan.parts[group]])
    keys = site_factors(site_keys[basis.site[plan.rows[plan.starts[groups]]]])
    head = tables.header[basis.layout[plan.rows[plan.starts[groups]]]]
    lanes = np.zeros(4, np.uint64)
    lanes[:2] = (keys * head[:, None]).sum(axis=0, dtype=np.uint64)
    unseen = plan.rows[plan.starts[np.array(sorted(plan.unseen), np.int64)]]
    return site_keys[basis.site[unseen]], lanes


def _share_of(kinds: Array, tables: LayoutTables, basis: Rows, rows: Array, shares: Sequence[Array]) -> Array:
    """For each row the number of its share, equal for shares of ranks that hold copies of the same rows.

    -1 is for values that each rank has its own of, -2 where the rank's totals do not have such a share.
    """
    kind, rank = kinds[basis.site[rows]], basis.rank[rows]
    place = np.array([part_hash(layout) for layout in tables.layouts], np.uint64)[basis.layout[rows]]
    adds_up = np.isin(kind, STATE) | (place > 0)
    numbers: dict[bytes, int] = {}
    by_rank = [
        {
            (int(kind), int(place)): numbers.setdefault(share.tobytes(), len(numbers))
            for share, kind, place in zip(of_rank, of_rank["kind"], of_rank["part"], strict=True)
        }
        for of_rank in shares
    ]
    out = np.full(len(rows), -1, np.int64)
    placed = np.flatnonzero(adds_up)
    every = np.stack([rank[placed].astype(np.uint64), kind[placed].astype(np.uint64), place[placed]])
    different, which = np.unique(every, axis=1, return_inverse=True)
    named = [by_rank[r].get((k, p), -2) for r, k, p in different.T.tolist()]
    out[placed] = np.array(named, np.int64)[which.reshape(-1)]
    return out


def _is_separate(group: Array, part: Array, share: Array) -> bool:
    """Whether all holders of one part of a site have one share, so that the total of one copy stands for all.

    False also where a row's share is not on record (-2), and where one copy counts as its rank's own (-1) and another
    not.

    Args:
        group: of each row, the number of its site's group.
        part: of each row, the number of the part that it holds.
        share: of each row, the number from `_share_of`.
    """
    order = np.lexsort((part, group))
    group, part, share = group[order], part[order], share[order]
    adjacent = (np.diff(group) == 0) & ((np.diff(part) == 0) | (share[1:] < 0) | (share[:-1] < 0))
    return bool((share > -2).all()) and not bool((adjacent & (np.diff(share) != 0)).any())
