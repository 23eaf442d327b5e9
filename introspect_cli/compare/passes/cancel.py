"""The fifth pass: gradients of which only rounding is left, and what an optimizer makes of these.

The gradients of a module's parameters are sums over the same samples. Where such a sum cancels (the bias of keys in
attention, a bias before a normalisation), rounding is all that is left, and a tolerance relative to it means nothing.
So what a gradient may differ by is measured by the largest of its module that agrees. An optimizer that divides a
gradient by its size makes of rounding a step as long as any other. So a parameter may differ where both runs' gradients
have nothing in common and differ by little of the largest in the model. If that is so of an element of a vector only,
most other parameters have to agree: what is wrong in an optimizer shows in these, too.

What such a module returns differs with its parameter. It may, and so may what takes just that: where nothing cancels
it, the next value differs by more than the tolerance, and that is the divergence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.passes.tolerate import relative_tolerance
from introspect_cli.compare.step.comparison import Cancelled
from introspect_cli.compare.terms.distance import Floats, distances, has_norms, norms, relative
from introspect_cli.compare.terms.names import owner_of
from introspect_cli.compare.terms.sites import Ids, Mask, kind_code, of_kinds, phase_code
from introspect_cli.compare.terms.table import DIFFERENT, EQUAL, WITHIN, Because, Table
from introspect_cli.compare.terms.words import listed
from introspect_cli.records import Kind, Phase, Status
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from introspect_cli.compare.step.comparison import Comparison

_NOTHING_IN_COMMON = 0.1
"""From this relative distance of two gradients on, their elements are no larger than what rounding makes of them."""
_SHOWN = 2


def cancel(table: Table, comparison: Comparison) -> Table:
    """The table in which what rounding makes of gradients that cancel is within the tolerance."""
    if not comparison.options.tolerant or not len(table.differing) or not (has_norms(table.a) and has_norms(table.b)):
        return table
    table = _gradients(table, comparison)
    wholly, in_part = _of_rounding(table, comparison)
    start = table.diverging & (table.alignment.phase[table.site] == phase_code(Phase.START))
    begun = {table.alignment.fqn[site] for site in table.site[start].tolist()}  # a step before was not recorded
    after = _returned(table, {*comparison.cancelled, *begun & (wholly | in_part)})
    fed = of_kinds(table.alignment.kind[table.site], _FED) & (after.state == DIFFERENT)
    return after if fed.any() else _updates(after, wholly, in_part, comparison)


_FED = (Kind.BATCH, Kind.INPUT, Kind.OUTPUT, Kind.LOSS, Kind.GRAD_OUTPUT, Kind.GRAD_INPUT, Kind.GRAD)
"""Where any of these differs, that is what an optimizer makes something else of."""


def _gradients(table: Table, comparison: Comparison) -> Table:
    """Gradients, and what an optimizer keeps of them, that differ by little of the largest of their module."""
    group = comparison.alike_in_module[table.site]
    rows = np.flatnonzero(group[table.differing] >= 0)
    wanted = np.unique(group[table.differing[rows]])
    agree = np.flatnonzero(np.isin(group, wanted) & np.isin(table.state, (EQUAL, WITHIN)) & ~table.one_sided)
    if not len(rows) or not len(agree):
        return table
    largest = np.zeros(len(wanted))
    np.fmax.at(largest, np.searchsorted(wanted, group[agree]), _rms(table, agree, comparison))
    size = largest[np.searchsorted(wanted, group[table.differing[rows]])]
    root = _root(table, table.differing[rows], comparison)
    distance, own = (values[rows] for values in table.distances(comparison.layouts))
    with np.errstate(invalid="ignore"):
        near = distance / root <= relative_tolerance(table, comparison)[rows] * size
        near &= relative(distance, own) >= _NOTHING_IN_COMMON
    near &= np.asarray(table.a.status)[table.rows_a[rows]] == int(Status.OBSERVED)
    return table.marked(table.differing[rows[near]], WITHIN, Because.CANCELLED)


def _root(table: Table, rows: Ids, comparison: Comparison) -> Floats:
    return np.asarray(np.sqrt(np.maximum(comparison.layouts[0].numel[table.a.layout[table.row_a[rows]]], 1.0)))


def _rms(table: Table, rows: Ids, comparison: Comparison) -> Floats:
    """The root mean square of what both runs have, the smaller of both."""
    one, two = comparison.layouts
    sizes = norms(table.a, table.row_a[rows], one), norms(table.b, table.row_b[rows], two)
    return np.asarray(np.fmin(*sizes) / _root(table, rows, comparison))


# --- parameters


def _updates(table: Table, wholly: frozenset[str], in_part: frozenset[str], comparison: Comparison) -> Table:
    """Parameters that differ by what an optimizer makes of such gradients."""
    alignment, both = table.alignment, ~table.one_sided
    kinds, params = alignment.kind[table.site], alignment.kind[table.site] == kind_code(Kind.PARAM)
    differ = of_kinds(kinds, (Kind.PARAM, Kind.OPTIMIZER_STATE)) & table.diverging & both
    if in_part:
        after = alignment.phase[table.site] == phase_code(Phase.OPTIMIZER)
        others = params & after & both & ~_of(table, wholly | in_part)
        if 2 * table.diverging[others].sum() >= others.sum():  # then the optimizer may be another one
            in_part = frozenset()
    rows = np.flatnonzero(differ & _of(table, wholly | in_part))
    at = rows[params[rows]]
    rel = relative(*distances(table.a, table.b, table.row_a[at], table.row_b[at], *comparison.layouts))
    for site, far in zip(table.site[at].tolist(), np.nan_to_num(rel).tolist(), strict=True):
        name = alignment.fqn[site]
        seen = comparison.cancelled.setdefault(name, Cancelled(table.step, 0.0, name in wholly))
        seen.furthest = max(seen.furthest, far)
    return table.marked(rows, WITHIN, Because.CANCELLED)


def _of_rounding(table: Table, comparison: Comparison) -> tuple[frozenset[str], frozenset[str]]:
    """The parameters of whose gradient only rounding is left, and those of an element of whose that is so."""
    taken = table.alignment.phase[table.site] == phase_code(Phase.OPTIMIZER)
    taken &= table.alignment.kind[table.site] == kind_code(Kind.GRAD)
    rows = np.flatnonzero(taken & (table.state == WITHIN) & ~table.one_sided)
    if not len(rows):
        return frozenset(), frozenset()
    row_a, row_b = table.row_a[rows], table.row_b[rows]
    distance, scale = distances(table.a, table.b, row_a, row_b, *comparison.layouts)
    every = np.flatnonzero(~table.one_sided & (comparison.alike_in_module[table.site] >= 0))
    every = every[table.alignment.kind[table.site[every]] == kind_code(Kind.GRAD)]
    largest = np.nanmax(_rms(table, every, comparison), initial=0.0)
    with np.errstate(invalid="ignore"):
        small = distance / _root(table, rows, comparison) <= comparison.options.rtol * largest
        whole = small & (relative(distance, scale) >= _NOTHING_IN_COMMON)
    least = np.full(len(rows), np.inf)
    if "absmin" in table.a.floats and "absmin" in table.b.floats:
        least = np.fmin(table.a.floats["absmin"][row_a], table.b.floats["absmin"][row_b])
    shapes = [comparison.a.layouts[number].shape for number in table.a.layout[row_a].tolist()]
    names = np.array([table.alignment.fqn[site] for site in table.site[rows].tolist()], dtype=object)
    known = np.isin(names, list(comparison.cancelled))
    part = small & ~whole & (known | ((least <= distance) & np.array([len(shape) == 1 for shape in shapes])))
    return frozenset(names[whole].tolist()), frozenset(names[part].tolist())


def _of(table: Table, names: Iterable[str]) -> Mask:
    """Rows of some names."""
    mask = np.zeros(table.alignment.size, np.bool_)
    for name in names:
        mask[table.alignment.by_fqn.get(name, [])] = True
    return np.asarray(mask[table.site])


# --- what comes of them


def _returned(table: Table, names: Iterable[str]) -> Table:
    """Outputs of the modules that have such parameters, and what takes just these: inputs, and statistics of them."""
    alignment, both = table.alignment, table.diverging & ~table.one_sided
    kinds = alignment.kind[table.site]
    returned = np.flatnonzero(both & (kinds == kind_code(Kind.OUTPUT)) & _of(table, map(owner_of, names)))
    if not len(returned):
        return table
    differ = np.flatnonzero(table.diverging & (kinds == kind_code(Kind.INPUT)))
    given = {_call(table, row) for row in differ.tolist()}
    returned = returned[[_call(table, row) not in given for row in returned.tolist()]]
    values = set(_checksums(table, returned))
    inputs = np.flatnonzero(both & (kinds == kind_code(Kind.INPUT)))
    inputs = inputs[[value in values for value in _checksums(table, inputs)]]
    takers = {alignment.fqn[site] for site in table.site[inputs].tolist()}
    buffers = np.flatnonzero(both & (kinds == kind_code(Kind.BUFFER)))
    buffers = buffers[[owner_of(alignment.fqn[site]) in takers for site in table.site[buffers].tolist()]]
    return table.marked(np.concatenate([returned, inputs, buffers]), WITHIN, Because.CANCELLED)


def _call(table: Table, row: int) -> tuple[str, int, int]:
    alignment, site = table.alignment, int(table.site[row])
    return alignment.fqn[site], int(alignment.call[site]), int(alignment.phase[site])


def _checksums(table: Table, rows: Ids) -> list[tuple[int, int]]:
    one, two = table.a.checksum[table.row_a[rows]], table.b.checksum[table.row_b[rows]]
    return list(zip(one.tolist(), two.tolist(), strict=True))


# --- in words


def cancelled_notes(cancelled: Mapping[str, Cancelled]) -> list[str]:
    """What to say of them."""
    if not cancelled:
        return []
    names, many = list(cancelled), len(cancelled) > 1
    shown = [*names[:_SHOWN], *([count(len(names) - _SHOWN, "other parameter")] if len(names) > _SHOWN else [])]
    first, furthest = cancelled[names[0]].step, max(each.furthest for each in cancelled.values())
    wholly = all(each.wholly for each in cancelled.values())
    of = ("Their" if wholly else "their") + " gradients" if many else ("Its" if wholly else "its") + " gradients"
    differ, count_as = ("differ", "They, and what their modules return, count") if many else ("differs", _ONE_COUNTS)
    note = (
        f"From step {first} on, {listed(shown)} {differ} by more than the tolerance, at most by a relative L2 of "
        f"{furthest:.1e}. {'' if wholly else 'Elements of '}{of} differ by as much as they are large, and by less than "
        "the tolerance allows of the largest gradient, as rounding makes it where a sum cancels. An optimizer that "
        f"divides a gradient by its size makes other steps of that. {count_as} as within the tolerance"
        f"{'' if wholly else ', as long as most other parameters agree'}."
    )
    return [note]


_ONE_COUNTS = "It, and what its module returns, counts"
