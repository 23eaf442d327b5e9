"""After tolerance: parameters whose gradient is nothing but rounding, so that an optimizer moves them at random.

A key's bias in attention, and a bias before a BatchNorm, change no output: their gradient is 0, and what is computed is
the rounding of a sum whose terms cancel. Adam and its like divide a gradient by its size, so another order of the same
sums moves such a parameter otherwise. Nothing of the training rests on where it goes. So where a tolerance is put to
two runs, such a parameter is within it, with its optimizer state, what its module returns, and the running statistics
of what takes that; a note says so. Whatever takes part in the loss is compared as ever: a bias that has an effect shows
there.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.wholes import autocasts
from introspect_cli.compare.settings.hyperparameters import OPTIMIZERS, learning_rates
from introspect_cli.compare.terms.distance import ROUNDING, Floats, Layouts, distances, has_norms, norms, relative
from introspect_cli.compare.terms.names import owner_of
from introspect_cli.compare.terms.sites import Ids, Mask, kind_code, of_kinds, phase_code
from introspect_cli.compare.terms.table import DIFFERENT, EQUAL, WITHIN, Table
from introspect_cli.records import Kind, Phase
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from introspect_cli.compare.passes.learned import Learned
    from introspect_cli.compare.step.comparison import Comparison
    from introspect_cli.store.format.batch import StepBatch

_ROUNDINGS = 64.0
"""Of its dtype, relative to the other gradients of its module: what is left of a sum whose terms cancel."""

_IN_HALF = 2.0 * ROUNDING["bfloat16"]
"""The same where autocast computes a float32 gradient in bfloat16 or float16."""

_NO_DIGIT = 0.05
"""Relative L2 from which two roundings have no digit in common."""

_FEW = 8.0

_MEAN, _VARIANCE = ".running_mean", ".running_var"
_HELD = (Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE)
_GIVEN = (Kind.INPUT, Kind.OUTPUT)


def unsettle(table: Table, learned: Learned, comparison: Comparison) -> tuple[Table, Learned]:
    """The table in which what rests on such parameters alone is within tolerance."""
    if not comparison.options.tolerant or not (has_norms(table.a) and has_norms(table.b)):
        return table, learned
    known = dict(learned.unsettled)
    for fqn, partly in _rounded(table, comparison).items():
        since, was = known.get(fqn, (table.step, partly))
        known[fqn] = min(table.step, since), partly and was
    learned = learned._replace(unsettled=known)
    names = {fqn: step for fqn, (step, _) in known.items() if step <= table.step}
    some = {fqn: step for fqn, step in names.items() if known[fqn][1]}
    rows = np.flatnonzero(table.state == DIFFERENT)
    if not known or not len(rows):
        return table, learned
    alignment, sites = table.alignment, table.site[rows]
    fqns = [alignment.fqn[site] for site in sites.tolist()]
    kinds = alignment.kind[sites]
    inputs = kinds == kind_code(Kind.INPUT)
    held = of_kinds(kinds, _HELD) & _are(fqns, names.keys() - some.keys())
    # what a step before left of the parameter shows in what its module returns, where it was given the same
    moved = {owner_of(fqn) for fqn, step in names.items() if step < table.step}
    moved -= {fqns[place] for place in np.flatnonzero(inputs).tolist()}
    returned = (kinds == kind_code(Kind.OUTPUT)) & _are(fqns, moved)
    given = of_kinds(kinds, _GIVEN) & _same_values(table, rows, rows[returned])
    takers = {fqns[place] for place in np.flatnonzero(given & inputs).tolist()}
    counted = (kinds == kind_code(Kind.BUFFER)) & _are(map(owner_of, fqns), takers)
    counted |= _carries_bias(table, comparison, rows, fqns, names.keys())
    if some:
        within = _within_updates(table, comparison, rows, fqns, some)
        held |= (kinds == kind_code(Kind.PARAM)) & _are(fqns, some) & within
    let_pass = learned.let_pass.union(fqns[place] for place in np.flatnonzero(held).tolist())
    return table.marked(rows[held | returned | given | counted], WITHIN), learned._replace(let_pass=let_pass)


def _within_updates(table: Table, comparison: Comparison, rows: Ids, fqns: list[str], since: Mapping[str, int]) -> Mask:
    """Parameters that are no further apart than updates of a learning rate each, one way in a and the other in b."""
    runs = (comparison.tensors.a, comparison.tensors.b)
    rates = [rate for run in runs for rate in learning_rates(run.settings_of(comparison.rank).get(OPTIMIZERS))]
    for site in np.flatnonzero(table.alignment.kind == kind_code(Kind.HYPERPARAMETER)).tolist():
        if table.alignment.path[site].endswith("['lr']"):
            with suppress(ValueError):  # of what a run says, which anyone may have written
                rates += [float(table.plain(site, side) or 0.0) for side in "ab"]
    distance, _ = distances(table.a, table.b, table.row_a[rows], table.row_b[rows], *comparison.layouts)
    numel = comparison.layouts[0].numel[table.a.layout[table.row_a[rows]]]
    steps = np.array([table.step - since.get(fqn, table.step) + 1 for fqn in fqns])
    with np.errstate(invalid="ignore"):
        return np.asarray(distance <= 2 * max(rates, default=0.0) * steps * np.sqrt(numel))


def _carries_bias(table: Table, comparison: Comparison, rows: Ids, fqns: list[str], names: Collection[str]) -> Mask:
    """Running means that such a bias alone can have moved: by no more than it differs, and the variance agrees.

    What takes a compiled module's output is not on record. Another momentum or mode would show in the variance.
    """
    alignment, (layouts, _) = table.alignment, comparison.layouts
    means = np.array([fqn.endswith(_MEAN) for fqn in fqns], np.bool_)
    if not means.any():
        return means
    agree = np.flatnonzero(np.isin(table.state, (EQUAL, WITHIN)) & ~table.one_sided)
    settled = {alignment.fqn[site] for site in table.site[agree].tolist()}
    distance, _ = distances(table.a, table.b, table.row_a[rows], table.row_b[rows], *comparison.layouts)
    numel = layouts.numel[table.a.layout[table.row_a[rows]]]
    biases = _are(fqns, names) & (alignment.kind[table.site[rows]] == kind_code(Kind.PARAM))
    for at in np.flatnonzero(means).tolist():
        near = biases & (numel == numel[at])
        means[at] = fqns[at].removesuffix(_MEAN) + _VARIANCE in settled and distance[at] <= distance[near].max(
            initial=0
        )
    return means


def _are(fqns: Iterable[str], names: Iterable[str]) -> Mask:
    wanted = {*names}
    return np.array([fqn in wanted for fqn in fqns], np.bool_)


def _same_values(table: Table, rows: Ids, of: Ids) -> Mask:
    """Which rows have the values that some rows have, in both runs."""
    checksums = table.a.checksum[table.row_a], table.b.checksum[table.row_b]
    values = {
        (one, two) for one, two in zip(*(column[of].tolist() for column in checksums), strict=True) if one and two
    }
    pairs = zip(*(column[rows].tolist() for column in checksums), strict=True)
    return np.array([pair in values for pair in pairs], np.bool_)


def _rounded(table: Table, comparison: Comparison) -> dict[str, bool]:
    """Parameters whose gradient is rounding in both runs, and whether that is so of some elements of it only.

    It is small beside its module's other ones, and no digit is equal; or of a bias that agrees, an element is so small,
    as in one for queries, keys and values together.
    """
    alignment = table.alignment
    taken = (alignment.kind == kind_code(Kind.GRAD)) & (alignment.phase == phase_code(Phase.OPTIMIZER))
    rows = np.flatnonzero(taken[table.site] & ~table.one_sided)
    if (
        not np.isin(table.state[rows], (DIFFERENT, WITHIN)).any()
        or "absmin" not in table.a.floats.keys() & table.b.floats.keys()
    ):
        return {}
    of_run, layouts = (table.row_a[rows], table.row_b[rows]), comparison.layouts
    sides = tuple(zip((table.a, table.b), of_run, layouts, strict=True))
    sizes = np.array([_root_mean_square(batch, at, table_of) for batch, at, table_of in sides])
    units = np.fmax(*(table_of.unit[batch.layout[at]] for batch, at, table_of in sides))
    zeros = [np.asarray(batch.counts["zeros"])[at] for batch, at, _ in sides]  # a unit that is switched off gives those
    few = np.maximum(*zeros) <= layouts[0].numel[table.a.layout[of_run[0]]] / _FEW
    least = np.array([np.asarray(batch.floats["absmin"], np.float64)[at] for batch, at, _ in sides])
    far = relative(*distances(table.a, table.b, *of_run, *layouts))
    owners = [owner_of(alignment.fqn[site]) for site in table.site[rows].tolist()]
    largest: dict[str, float] = {}
    for owner, size in zip(owners, np.fmax(*sizes).tolist(), strict=True):
        largest[owner] = max(largest.get(owner, 0.0), size)
    coarse = np.array([[_IN_HALF * autocasts(run)] for run in (comparison.tensors.a, comparison.tensors.b)])
    bound = np.maximum(_ROUNDINGS * units, coarse) * np.array([largest[owner] for owner in owners])
    flat = np.array([len(comparison.a.layouts[at].shape) == 1 for at in table.a.layout[of_run[0]].tolist()], np.bool_)
    with np.errstate(invalid="ignore"):
        whole = (sizes <= bound).all(axis=0) & (far > _NO_DIGIT)
        partly = flat & few & (least <= bound).all(axis=0) & (table.state[rows] != DIFFERENT)
    names = [alignment.fqn[site] for site in table.site[rows].tolist()]
    return {
        name: not all_of_it for name, all_of_it, some in zip(names, whole, partly, strict=True) if all_of_it or some
    }


def _root_mean_square(batch: StepBatch, rows: Ids, layouts: Layouts) -> Floats:
    return norms(batch, rows, layouts) / np.sqrt(np.maximum(layouts.numel[batch.layout[rows]], 1.0))


def unsettled_note(learned: Learned) -> list[str]:
    """A sentence on those of which a difference was let pass; none for none."""
    names = sorted(learned.let_pass)
    if not names:
        return []
    more, whose = "", "its module returns"
    if names[1:]:
        more, whose = f" and of {count(len(names) - 1, 'other parameter')}", "their modules return"
    partly = "of some elements nothing" if all(learned.unsettled[name][1] for name in names) else "nothing"
    made = f"what the optimizer makes of that, and what {whose}, was not compared"
    return [f"The gradient of {names[0]}{more} is {partly} but rounding in both runs: {made}."]
