"""The second pass: a record that one run alone has counts only where the other run could have had it.

A site that only one run has may mean that the model changed, or just that the other capture was told not to look, that
a compiler hid the module, or that a tensor is recorded once more with the value that it had. So each one-sided row is
held against what the manifests and the other run's records say; what means nothing is no divergence.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.resumed.began import redundant_starts, starts, updated, written
from introspect_cli.compare.resumed.parts import PLACE
from introspect_cli.compare.terms.findings import Restored
from introspect_cli.compare.terms.names import generator_of
from introspect_cli.compare.terms.sites import Alignment, Ids, Mask, kind_code, of_kinds, phase_code
from introspect_cli.compare.terms.table import (
    ABSENT,
    NOT_SEEN,
    ONLY_A,
    ONLY_B,
    Because,
    Table,
)
from introspect_cli.compare.terms.watched import MODULE_KINDS, lists, stopped_within
from introspect_cli.records import Kind, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Collection

    from introspect_cli.compare.step.comparison import Comparison
    from introspect_cli.store.format.batch import StepBatch


def cover(table: Table, comparison: Comparison) -> Table:
    """The table in which one-sided rows that mean nothing are absent, and those that cannot be compared not seen."""
    table = _without_unwatched(table, comparison)
    mask = uncounted(table.alignment, table.sites_a, table.sites_b)
    if mask is not None:
        table = table.marked(table.diverging & mask[table.site], NOT_SEEN, Because.NOT_COUNTED)
    table = _without_restored(_without_unsaved(table), comparison)
    alone = table.site[table.diverging & table.one_sided]
    if any(of(table.alignment, alone).any() for of in (starts, written, updated)):
        again_a, again_b = redundant_starts(comparison, table)
        rows_a, rows_b = np.flatnonzero(table.state == ONLY_A), np.flatnonzero(table.state == ONLY_B)
        table = table.marked(np.concatenate([rows_a[again_a], rows_b[again_b]]), ABSENT, Because.REPEATED)
    return _without_cut(_without_evaluation(table, comparison), comparison)


def _without_cut(table: Table, comparison: Comparison) -> Table:
    """Without what one run alone has after the last record of both, in a step within which the other was stopped."""
    one, two = comparison.manifests
    both = ~table.one_sided
    for state, row, batch, stopped in (
        (ONLY_A, table.row_a, table.a, stopped_within(two) and comparison.b.last_step == table.step_b),
        (ONLY_B, table.row_b, table.b, stopped_within(one) and comparison.a.last_step == table.step),
    ):
        if stopped and len(batch):
            sequence = np.asarray(batch.sequence, np.int64)[row]
            after = sequence > sequence[both].max(initial=-1)
            table = table.marked((table.state == state) & after, ABSENT, Because.CUT)
    return table


def _without_restored(table: Table, comparison: Comparison) -> Table:
    """Where a run goes on: without batches and random states that a script reads and draws to get to its place.

    What counts is whether it gets there: the last batches are the other run's, and so are the states when something
    first draws from them.
    """
    resumption = (
        comparison.resumption() if comparison.goes_on_at(table.step) and not comparison.options.strict else None
    )
    restored = [part for part in resumption.parts if part.state is Restored.YES] if resumption is not None else []
    if not restored:
        return table
    alignment, rows = table.alignment, np.flatnonzero(table.diverging)
    sites = [alignment.site(site) for site in table.site[rows].tolist()]
    begin, in_place = {part.generator for part in restored}, any(part.part == PLACE for part in restored)
    batches = [site.kind is Kind.BATCH and site.phase is Phase.DATA and in_place for site in sites]
    states = [site.kind is Kind.RNG and site.phase is Phase.START and generator_of(site) in begin for site in sites]
    rows = rows[np.array(batches, np.bool_) | np.array(states, np.bool_)]
    alone = table.one_sided[rows]
    table = table.marked(rows[alone], ABSENT, Because.RESTORED)
    return table.marked(rows[~alone], NOT_SEEN, Because.RESTORED)


def _without_unsaved(table: Table) -> Table:
    """Without files that one run alone saves: it may save more often, or by another name."""
    alignment = table.alignment
    products = alignment.kind == kind_code(Kind.PRODUCT)
    if not products.any():
        return table
    saved = [
        {(alignment.fqn[site], int(alignment.call[site])) for site in sites[products[sites]].tolist()}
        for sites in (table.sites_a, table.sites_b)
    ]
    both = saved[0] & saved[1]
    rows = np.flatnonzero(table.diverging & table.one_sided & products[table.site])
    places = ((alignment.fqn[site], int(alignment.call[site])) for site in table.site[rows].tolist())
    alone = np.fromiter((place not in both for place in places), np.bool_, len(rows))
    return table.marked(rows[alone], ABSENT, Because.NOT_SAVED)


def _without_unwatched(table: Table, comparison: Comparison) -> Table:
    """What one run could not have recorded: it was told not to, lists values of elsewhere, or hid the module."""
    manifests = comparison.manifests
    for state, manifest, other, other_sites, counts in (
        (ONLY_A, manifests[0], table.b, table.sites_b, comparison.covered[0]),
        (ONLY_B, manifests[1], table.a, table.sites_a, comparison.covered[1]),
    ):
        alone = table.state == state
        if lists(manifest):
            table = table.marked(alone, NOT_SEEN, Because.LISTED)
            continue
        table = table.marked(alone & ~counts[table.site], ABSENT, Because.NOT_WATCHED)
        rows = np.flatnonzero(table.state == state)
        hidden = _hidden(table.alignment, table.site[rows], other, other_sites)
        table = table.marked(rows[hidden], ABSENT, Because.HIDDEN)
    return table


def _hidden(alignment: Alignment, sites: Ids, other: StepBatch, other_sites: Ids) -> Mask:
    """Of sites that one run alone has in a step, those that the other could not have seen.

    The inside of a compiled or scripted module is recorded as not observed, once for each module in it: what the other
    run recorded of that module has no partner and means nothing. A loss inside a transform stands for several. And a
    model that has gradients, of which nothing ran, ran unseen: `forward` of a compiled one, called by name.
    """
    blind = other.status == int(Status.NOT_OBSERVED)
    kinds = alignment.kind
    roots = [alignment.fqn[site].partition(".")[0] for site in sites.tolist()]
    ran = (kinds[other_sites] == kind_code(Kind.LOSS)).any()  # else an optimizer steps once more
    silent = _roots_of(alignment, other_sites, {Kind.GRAD} if ran else ())
    silent = (silent - _roots_of(alignment, other_sites, MODULE_KINDS)) & _roots_of(alignment, sites, MODULE_KINDS)
    began = (alignment.phase[sites] == phase_code(Phase.START)) & of_kinds(kinds[sites], {Kind.PARAM, Kind.BUFFER})
    unseen = (began | of_kinds(kinds[sites], MODULE_KINDS)) & np.array([root in silent for root in roots], np.bool_)
    for kind, inside in ((Kind.OUTPUT, MODULE_KINDS), (Kind.LOSS, {Kind.LOSS})):
        hidden = {alignment.fqn[site] for site in other_sites[blind & (kinds[other_sites] == kind_code(kind))]}
        if hidden:
            there = np.fromiter((alignment.fqn[site] in hidden for site in sites), np.bool_, len(sites))
            unseen |= there & of_kinds(kinds[sites], inside)
    return np.asarray(unseen)


def _roots_of(alignment: Alignment, sites: Ids, kinds: Collection[Kind]) -> set[str]:
    """The models of which there is anything of some kinds."""
    return {alignment.fqn[site].partition(".")[0] for site in sites[of_kinds(alignment.kind[sites], kinds)].tolist()}


def uncounted(alignment: Alignment, sites_a: Ids, sites_b: Ids) -> Mask | None:
    """By site, operators of a step that cannot be told apart by their number; None where there are none.

    An operator's site ends in how often it has run in its module before. Where one run compiled a module, some
    operators are gone or made anew, and the numbers of the rest need not mean the same. Such a run says so, by one
    record for a module and phase. There the results of an operator are compared only if both runs have as many of them.
    """
    if not len(alignment.others):
        return None
    present = np.union1d(sites_a, sites_b)
    marks = np.intersect1d(alignment.others, present)
    if not len(marks):
        return None
    regions = {(alignment.fqn[mark], alignment.phase[mark]) for mark in marks}
    operators = present[alignment.kind[present] == kind_code(Kind.OP_OUTPUT)]
    inside = [number for number in operators if (alignment.fqn[number], alignment.phase[number]) in regions]
    group = {number: (alignment.fqn[number], alignment.phase[number], alignment.path[number]) for number in inside}
    counts = [Counter(group[number] for number in sites if number in group) for sites in (sites_a, sites_b)]
    mask = np.zeros(alignment.size, dtype=np.bool_)
    mask[[number for number in inside if counts[0][group[number]] != counts[1][group[number]]]] = True
    return mask


def _without_evaluation(table: Table, comparison: Comparison) -> Table:
    """What is there only because one run evaluates more often: it says nothing of the other.

    A copy that is only evaluated is recorded when it first is.
    """
    alignment, options = table.alignment, comparison.options
    if options.strict or not alignment.evaluating.any():
        return table
    every = options.evaluation is False or not all(evaluates(table))
    alone = table.diverging & table.one_sided & alignment.evaluating[table.site]
    start = alignment.phase[table.site] == phase_code(Phase.START)
    return table.marked(alone & (start | every), ABSENT, Because.EVALUATION)


def evaluates(table: Table) -> tuple[bool, bool]:
    """Whether run a and run b evaluate in a step."""
    phase = table.alignment.phase == phase_code(Phase.EVAL)
    return bool(phase[table.sites_a].any()), bool(phase[table.sites_b].any())
