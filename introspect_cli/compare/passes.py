"""What each opened step goes through: functions from a table of its records to one in which more is decided.

`pair` puts rows of a beside rows of b, by site, as their checksums compare.

*What one run could not have* (`drop_unrecorded`). A site that only one run has may mean that the model changed, or just
that the other capture was told not to look, that a compiler hid the module, or that a tensor is recorded once more with
the value that it had. So each one-sided row is held against what the manifests and the other run's records say; what
means nothing is no divergence.

*What is let pass* (`accept_rearranged`, `accept_tolerated`). What they share out is compared as the whole that it is.
Where the samples of both runs are equal, whichever rank has which, so are the records; of other values that were
gathered from several ranks, extrema and means are compared, and no more is claimed. Then differences pass that are
small enough by a stated tolerance, or by measured noise.

A tolerance is put to the root-mean-square difference of two tensors: RMS(a - b) <= atol + rtol * max(RMS(a), RMS(b)).
Noise is measured: runs that should equal a, compared with it, give each site a floor, the largest relative distance
seen there up to this step, and a divergence counts where it exceeds the floor by a factor. Integers, random states and
shapes tolerate nothing; NaNs and infinities must be as many.

Calls are counted within a step. Where a run calls a network once more, at first, the second call of one is the third
of the other, and every call after it would be compared with another. So the run that has more counts those that are
given the same as the other run's calls (`paired_calls`); the rest come last. Where inputs are on record of one run or
of none, those that give the same.

*Gradients of rounding alone* (`accept_rounding`). A key's bias in attention, and a bias before a BatchNorm, change no
output: their gradient is 0, and what is computed is the rounding of a sum whose terms cancel. Adam and its like divide
a gradient by its size, so another order of the same sums moves such a parameter otherwise. Nothing of the training
rests on where it goes. So where a tolerance is put to two runs, such a parameter is within it, with its optimizer
state, what its module returns, and the running statistics of what takes that; a note says so. Whatever takes part in
the loss is compared as ever: a bias that has an effect shows there.

*What nothing rests on* (`drop_unused`). A mask is a tensor of numbers for one implementation and one of truths for
another; a scaler multiplies a loss and divides the gradients again; a loader reads a batch before it is needed; samples
are padded to another length; a gradient is sparse in one run alone. Only what comes of such a value says whether it is
another one. So a record that differs is *unused* where all that rests on it is on record in both runs, and agrees:

- on a batch, what outermost modules are given, and the losses (and all that follows, where a tolerance let them pass),
  unless one run alone read it, or more of it;
- on an input of another form, the outputs of its call, which may be rounded otherwise;
- on a gradient that is sparse in one run alone, what the optimizer leaves of its parameter;
- on gradients on their way back, the gradients that the optimizer takes, and what it leaves; so on a loss that is one
  multiple of the other's, as each gradient on its way back is;
- on what has another shape on its way, where a batch is cut differently: the same, and the losses.

What was not recorded is never taken to agree.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.ledger import TENSORS, At
from introspect_cli.compare.measure import (
    LEAST_BOUND,
    Floats,
    Ids,
    Layouts,
    Mask,
    distances,
    least_distances,
    plain_distance,
    same_nonfinite,
)
from introspect_cli.compare.names import owner_of
from introspect_cli.compare.result import Restored
from introspect_cli.compare.resumed import holds_part, repeated_values, with_copied_starts
from introspect_cli.compare.say import what
from introspect_cli.compare.settings.hyperparameters import OPTIMIZERS, learning_rates
from introspect_cli.compare.steps import are_of_one_dtype, gathered_agree, moments_agree
from introspect_cli.compare.table import (
    ABSENT,
    CUT,
    DIFFERENT,
    EQUAL,
    EVALUATING,
    FLOWING_BACK,
    MODULE_KINDS,
    NOT_SEEN,
    ONLY_A,
    ONLY_B,
    UNUSED,
    WITHIN,
    Alignment,
    Learned,
    Table,
    among,
    unseen,
)
from introspect_cli.compare.watched import STATE_KINDS, evaluates, is_list, is_ordered, ran_evaluation, stopped_within
from introspect_cli.compare.wholes import autocasts
from introspect_cli.derived import ROUNDING
from introspect_cli.records import Joined, Kind, Phase, Status
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.compare.comparison import Comparison
    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.compare.table import Columns, Half
    from introspect_cli.store.batch import StepBatch


def pair(comparison: Comparison, step_a: int, step_b: int) -> Table:
    """The table of one step, with a row for each record of a, of b or of both, by site; reads both steps.

    Parameters and buffers that one run alone has as the step begins are copied for the other from what it recorded
    last before; of a list, and where it updates by hand, optimizer states too.
    Calls that one run makes more often, and batches, are renumbered (`paired_calls`).
    Where only b's records are in the order of computation, a's get that order.

    Args:
        comparison: the rank of both runs.
        step_a: number of the step in a.
        step_b: number of the step in b.
    """
    alignment, steps = comparison.alignment, (step_a, step_b)
    runs = At(comparison.a, alignment.a, step_a), At(comparison.b, alignment.b, step_b)
    batches = [run.batch for run in runs]
    listed = comparison.lists_starts
    for side, other in ((0, 1), (1, 0)):
        if not listed[side] and (listed[other] or (steps[other] > 0 and not comparison.is_whole)):
            wanted, kinds = alignment.ids[other][runs[other].batch.site], STATE_KINDS if listed[other] else TENSORS
            batches[side] = with_copied_starts(alignment, side, runs[side].later(-1), batches[side], wanted, kinds)
    a, b = (ids[batch.site] for ids, batch in zip(alignment.ids, batches, strict=True))
    if not comparison.is_whole and np.setxor1d(a, b, assume_unique=True).size:
        batches = paired_calls((alignment.a, alignment.b), batches)
    table = table_of(alignment, comparison.compared, steps, batches, comparison.layouts)
    if [is_ordered(manifest) for manifest in comparison.manifests] == [False, True]:
        table = replace(table, a=_in_order_of_b(table))
    return replace(table, chosen=comparison.chosen[table.site])


def _in_order_of_b(table: Table) -> StepBatch:
    """Records of a, renumbered in the order of b's; those that b lacks come last, in a's order."""
    place, (half_a, half_b) = np.full(len(table.alignment), np.iinfo(np.int64).max), table.halves
    place[half_b.sites] = table.b.sequence
    order = np.lexsort((table.a.sequence, place[half_a.sites]))
    return replace(table.a, sequence=np.argsort(order).astype(np.uint32))


def table_of(
    alignment: Alignment,
    compared: Mask,
    steps: tuple[int, int],
    batches: Sequence[StepBatch],
    layouts: tuple[Layouts, Layouts],
) -> Table:
    """Table of two batches, rows put side by side by site.

    A pair is EQUAL or DIFFERENT by checksum. It is NOT_SEEN where either has no value; and where it differs at a site
    that is not compared, or one run saw a part alone, or one had not drawn from a generator. A row of one run is ONLY_A
    or ONLY_B; ABSENT where it has no value or is not compared.

    Args:
        alignment: both runs' sites.
        compared: mask of sites that can be compared.
        steps: number of the step in a, and in b.
        batches: records of a and of b.
        layouts: of a and of b.
    """
    a, b = batches
    site_a, site_b = a.site.astype(np.int64), alignment.b_ids[b.site]
    place = np.full(len(alignment), -1, dtype=np.int64)
    place[site_a] = np.arange(len(site_a))
    partner = place[site_b]
    alone = np.delete(np.arange(len(site_a)), partner[partner >= 0])
    site, row_a = np.append(site_b, site_a[alone]), np.append(partner, alone)
    row_b = np.append(np.arange(len(site_b)), np.full(len(alone), -1, np.int64))
    both, counts = (row_a >= 0) & (row_b >= 0), compared[site]
    checksums, blanks, parts, plain = (  # 0 for a record that a run lacks
        [np.append(of, of.dtype.type(0))[rows] for of, rows in zip(map(column, batches), (row_a, row_b), strict=True)]
        for column in (attrgetter("checksum"), unseen, _in_part, lambda batch: batch.status == Status.VALUE)
    )
    differs = both & np.not_equal(*checksums)
    # a random state that nothing has drawn from yet is recorded as a text
    unlike = np.not_equal(*plain) & alignment.are(Kind.RNG, sites=site)
    blind = np.logical_or(*blanks) | (differs & np.not_equal(*parts))
    state = np.select([differs, both, row_a >= 0], [DIFFERENT, EQUAL, ONLY_A], ONLY_B)
    unknown = (blind & (counts | ~both)) | (differs & (unlike | ~counts)) | ~(both | counts)
    state[unknown] = np.where(both, NOT_SEEN, ABSENT)[unknown]
    cause, codes = np.zeros(len(site), np.bool_), state.astype(np.int8)
    return Table(alignment, *steps, a, b, site, row_a, row_b, codes, counts, cause, layouts)


def _in_part(batch: StepBatch) -> Mask:
    """Mask of records that were seen in part, such as an expanded tensor's memory; not those that ranks add up to."""
    joined = batch.how is not None and batch.how != Joined.AS_RECORDED
    return np.asarray((batch.status == Status.PARTIAL) & np.logical_not(joined))


# --- what one run could not have


def drop_unrecorded(table: Table, learned: Learned, comparison: Comparison) -> tuple[Table, Learned]:
    """Pass: mark one-sided rows ABSENT that the other run could not record, or that repeat a tensor's last value.

    Could not: left out by options, unobservable, or after the other run was stopped. Rows that only a run made of a
    list of values has become NOT_SEEN. One-sided evaluation becomes EVALUATING if one run alone evaluates in the step,
    start values in any case. In the step at which a resumed run begins, diverging batches and random states of parts
    that it restored become ABSENT; so do random states that the runs looked at before and after an evaluation. None of
    these with `strict`.
    """
    for place, half in enumerate(table.halves):
        rows = np.flatnonzero(table.state == half.alone)
        if is_list(comparison.manifests[place]) and not comparison.match.is_port:
            table = table.marked(rows, NOT_SEEN)
        elif len(rows):
            counts = comparison.covered[place][table.site[rows]]
            counts[counts] = ~_unobservable(table.alignment, table.site[rows[counts]], table.halves[1 - place])
            table = table.marked(rows[~counts], ABSENT)
    if not comparison.options.strict:
        every = not all(evaluates(table))
        alone = table.diverging & table.one_sided & table.alignment.evaluating[table.site]
        table = table.marked(_states_of_other_moments(table, comparison), ABSENT)
        table = _without_restored(table.marked(alone & (table.are(Phase.START) | every), EVALUATING), comparison)
    if (table.diverging & table.one_sided & table.are(*STATE_KINDS)).any():
        table = table.marked(repeated_values(comparison, table), ABSENT)
    return _without_cut(table, comparison), learned


def _without_cut(table: Table, comparison: Comparison) -> Table:
    """Mark rows of one run CUT that come after the last common record, if the other was stopped within this step."""
    ends = comparison.b.last_step == table.step_b, comparison.a.last_step == table.step
    for half, other, is_last in zip(table.halves, comparison.manifests[::-1], ends, strict=True):
        if is_last and stopped_within(other) and len(half.batch):
            sequence = np.asarray(half.batch.sequence, np.int64)[half.row]
            late = sequence > sequence[~table.one_sided].max(initial=-1)
            table = table.marked((table.state == half.alone) & late, CUT)
    return table


def _states_of_other_moments(table: Table, comparison: Comparison) -> Mask:
    """Mask of random states as the step begins, where one run begins it after an evaluation and the other with one.

    What is an evaluation in one run counts as training in the other: the step begins there with records of it alone.
    """
    begins = False
    others = ran_evaluation(table, comparison.manifests)[::-1]
    for half in compress(table.halves, others):
        left_out = table.alignment.are(Kind.RNG) | table.alignment.are(Phase.START, Phase.EVAL)
        ran = np.flatnonzero(~left_out[half.sites])
        first = ran[np.argsort(np.asarray(half.batch.sequence)[ran], kind="stable")[:1]]
        begins |= bool(np.isin(first, half.only).any())
    return table.are(Phase.START, Kind.RNG) & begins


def _without_restored(table: Table, comparison: Comparison) -> Table:
    """In the step at which a resumed run begins, mark diverging batches and start random states ABSENT.

    Only those of parts that were restored: a script may read batches and draw numbers to get to where it goes on.
    """
    resumption = comparison.resumption if comparison.is_resume_step(table.step) else None
    if resumption is None:
        return table
    restored = [part for part in resumption.parts if part.state is Restored.YES]
    rows = np.flatnonzero(table.diverging & table.are(Kind.RNG, Kind.BATCH, Phase.START, Phase.DATA))
    held = [any(holds_part(table.named(row), part) for part in restored) for row in rows.tolist()]
    return table.marked(rows[np.array(held, np.bool_)], ABSENT)


def _unobservable(alignment: Alignment, sites: Ids, other: Half) -> Mask:
    """Mask of one-sided sites that lie inside what the other run could not observe.

    Three cases: it recorded the module (compiled) as not observed; it recorded a loss as not observed, which stands for
    several; in a step with a loss, it has gradients of the root but none of its module records (a compiled `forward`
    that is called by name), which hides start values of parameters and buffers too.

    Args:
        alignment: both runs' sites.
        sites: union numbers of the one-sided sites.
        other: the other run's records.
    """
    written = alignment.are(Kind.BUFFER, Phase.FORWARD, sites=sites)  # as the call of a module begins
    every = zip(sites.tolist(), written.tolist(), strict=True)
    names = [owner_of(alignment.fqn[site]) if of_buffer else alignment.fqn[site] for site, of_buffer in every]
    of_modules = alignment.are(*MODULE_KINDS, sites=sites) | written
    recorded = (other.sites, Kind.GRAD), (sites, *MODULE_KINDS), (other.sites, *MODULE_KINDS)
    trained, ran, seen = ({name.partition(".")[0] for name in alignment.names_of(*each)} for each in recorded)
    # without a loss, an optimizer steps once more
    silent = (trained & ran) - seen if alignment.names_of(other.sites, Kind.LOSS) else set[str]()
    began = alignment.are(Kind.PARAM, Kind.BUFFER, Phase.START, sites=sites)
    unseen = (began | of_modules) & among([name.partition(".")[0] for name in names], silent)
    blind = other.sites[other.batch.status == Status.NOT_OBSERVED]
    inside = among(names, alignment.names_of(blind, Kind.OUTPUT, Kind.LOSS))
    return np.asarray(unseen | (inside & (of_modules | alignment.are(Kind.LOSS, sites=sites))))


# --- what is let pass


def accept_rearranged(table: Table, learned: Learned, comparison: Comparison) -> tuple[Table, Learned]:
    """Pass: mark what holds the same numbers in parts or in another order WITHIN.

    That is states of saved optimizers, numbered in the order of groups (`_renumbered_states`). Where ranks or calls are
    put together, it is gathered values that agree; learned are the factors they show (`gathered_agree`). Module values
    of two dtypes are not marked. Of two implementations of one model, it is what has another shape, and tensors of
    several dimensions, which may be transposed, where extrema and means agree within rtol; gradients within ten times
    rtol, as they gather the rounding of a whole backward pass.
    """
    table = table.marked(_renumbered_states(table), WITHIN)  # which parameter a number stands for is not on record
    if not len(table.differing) or not (comparison.is_whole or comparison.match.is_port):
        return table, learned
    rows, differ = table.differing, table.of(table.differing)
    if comparison.is_whole:
        rtol, _ = relative_tolerance(table, learned, comparison.options)
        agree, learned = gathered_agree(differ, rtol, learned)
        table = table.marked(rows[agree & are_of_one_dtype(differ)], WITHIN)
    if comparison.match.is_port:
        transposed = differ.are(*STATE_KINDS, Kind.GRAD) & (differ.of_layouts("dims")[0] > 1)
        may = np.equal(*differ.of_layouts("numel")) & (np.not_equal(*differ.of_layouts("shape")) | transposed)
        known = np.isfinite(differ.statistic("mean")).all(axis=0)
        rtol = np.where(differ.are(Kind.GRAD), 10.0, 1.0) * comparison.options.rtol
        table = table.marked(rows[may & known & moments_agree(differ, rtol, 1.0)], WITHIN)
    return table, learned


def _renumbered_states(table: Table) -> Ids:
    """DIFFERENT rows of saved optimizer states whose values the file of the other run holds under other numbers."""
    rows = np.flatnonzero(table.are(Kind.PRODUCT) & (table.state == DIFFERENT))
    rows = rows[[_STATE_NUMBER.search(table.named(row).path) is not None for row in rows.tolist()]]
    files = [(of.fqn, of.call, _STATE_NUMBER.sub("", of.path)) for of in map(table.named, rows.tolist())]
    sides = [[*zip(files, of_run.column("checksum").tolist(), strict=True)] for of_run in table.both(rows)]
    held, other = map(Counter, sides)
    return rows[[held[one] == other[one] and held[two] == other[two] for one, two in zip(*sides, strict=True)]]


_STATE_NUMBER = re.compile(r"(?<=\['state'\]\[)\d+(?=\])")
"""Which parameter a saved optimizer state is of: a number in the order of the optimizer's groups."""


def accept_tolerated(table: Table, learned: Learned, comparison: Comparison) -> tuple[Table, Learned]:
    """Pass: mark DIFFERENT rows WITHIN that the tolerance or any noise run lets pass; learn `coarse` with `rtol_fine`.

    Rows without a sketch, as in lean steps, are NOT_SEEN where no more is known than that they may be within.
    Where ranks or calls are put together, the tolerance does not let module values of two dtypes pass.
    """
    if comparison.options.tolerant:
        rows, differ = table.differing, table.of(table.differing)
        rtol, learned = relative_tolerance(table, learned, comparison.options)
        passes, lean = _within_tolerance(differ, comparison.options, rtol)
        if comparison.is_whole:
            passes &= are_of_one_dtype(differ)
        table = table.marked(rows[passes], WITHIN).marked(rows[passes & lean], NOT_SEEN)
    for floor in comparison.floors:
        differ = table.of(table.differing)
        table = table.marked(table.differing[floor.within(differ, differ.relative())], WITHIN)
    return table, learned


def relative_tolerance(table: Table, learned: Learned, options: DiffOptions) -> tuple[Floats, Learned]:
    """(rtol of each DIFFERENT row, float64, `learned` with this step as `coarse` if it is).

    With `rtol_fine`, that is the rtol before anything coarse: the first value that is bfloat16 or float16 in both runs,
    in this step or an earlier one; inputs, batches and buffers do not count.
    """
    rtol = np.full(len(table.differing), options.rtol)
    if options.rtol_fine and learned.coarse >= table.step:
        both = np.flatnonzero(~(table.one_sided | table.are(Kind.INPUT, Kind.BATCH, Kind.BUFFER)))
        coarse = both[np.fmin(*table.of_layouts("unit", both)) >= ROUNDING["float16"]]
        rtol[table.order[table.differing] < table.order[coarse].min(initial=np.inf)] = options.rtol_fine
        learned = learned._replace(coarse=table.step) if len(coarse) else learned
    return rtol, learned


def _within_tolerance(differ: Table, options: DiffOptions, rtol: Floats) -> tuple[Mask, Mask]:
    """(mask of rows that are, or may be, within rtol and atol; mask of rows of lean steps, of which no more is known).

    Floats by root-mean-square, plain numbers by value. False for random states, dtypes without rounding, unequal counts
    of NaNs or infinities, and unknown distances.

    Args:
        differ: those rows of a step that differ.
        options: what counts.
        rtol: relative tolerance of each row.
    """
    one, two = differ.both()
    distance, scale = distances(one, two)
    plain = np.array([of_run.column("status") == Status.VALUE for of_run in (one, two)])
    # of a lean step, the distance is known to be no less than something
    lean = (one.lacks_sketch | two.lacks_sketch) & (one.layout("shape") == two.layout("shape")) & ~plain.any(axis=0)
    if lean.any():
        distance = np.where(lean, least_distances(one, two), distance)
    for at in np.flatnonzero(plain.all(axis=0)).tolist():
        distance[at], scale[at] = plain_distance(*(of.batch.text[int(of.rows[at])] for of in (one, two)))
    root = np.sqrt(np.maximum(one.layout("numel"), 1.0))
    with np.errstate(invalid="ignore"):
        passes = distance / root <= options.atol + rtol * scale / root
    numbers = one.layout("floating") & two.layout("floating") & same_nonfinite(one, two) & ~differ.are(Kind.RNG)
    return passes & np.where(plain.any(axis=0), plain.all(axis=0), numbers), lean


# --- gradients of rounding alone


_MAX_ROUNDINGS = 64.0
"""Of its dtype, relative to the other gradients of its module: what is left of a sum whose terms cancel."""

_HALF_UNIT = 2.0 * ROUNDING["bfloat16"]
"""The same where autocast computes a float32 gradient in bfloat16 or float16."""

_UNRELATED = 0.05
"""Relative L2 from which two roundings have no digit in common."""

_MAX_ZERO_SHARE = 8.0


def accept_rounding(table: Table, learned: Learned, comparison: Comparison) -> tuple[Table, Learned]:
    """Pass: mark rows WITHIN that rest only on parameters whose gradients are rounding alone; learn which these are.

    They stay so in later steps: learned are `unsettled`, and `let_pass` where a row of one was marked. Nothing without
    a tolerance, or where the step has no norms.
    """
    if not comparison.options.tolerant or any("mean" not in batch.floats for batch in (table.a, table.b)):
        return table, learned
    known = dict(learned.unsettled)
    for fqn, partly in rounding_gradients(table, comparison).items():
        begun, was = known.get(fqn, (table.step, partly))
        known[fqn] = min(table.step, begun), partly and was
    learned = learned._replace(unsettled=known)
    since = {fqn: step for fqn, (step, _) in known.items() if step <= table.step}
    if not since or not len(table.differing):
        return table, learned
    differ, alignment = table.of(table.differing), table.alignment
    fqns, entirely = differ.fqns, {fqn for fqn in since if not known[fqn][1]}
    held = differ.are(Kind.PARAM) & among(fqns, since) & _within_updates(differ, comparison, since)
    held |= differ.are(Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE) & among(fqns, entirely)
    # what a step before left of the parameter shows in what its module returns, where it was given the same
    moved = {owner_of(fqn) for fqn, step in since.items() if step < table.step}
    returned = differ.are(Kind.OUTPUT) & among(fqns, moved - alignment.names_of(differ.site, Kind.INPUT))
    values = [of_run.column("checksum") for of_run in differ.both()]
    same = [np.isin(of_run, of_run[returned & (of_run != 0)]) for of_run in values]
    # running means take what is moved; another momentum or mode would show in the variance
    settled = alignment.names_of(table.site[table.agreeing])
    means = [fqn.endswith(".running_mean") and f"{fqn.removesuffix('mean')}var" in settled for fqn in fqns]
    let_pass = learned.let_pass | alignment.names_of(differ.site[held])
    passes = held | returned | (differ.are(Kind.INPUT, Kind.OUTPUT) & same[0] & same[1]) | np.array(means, np.bool_)
    return table.marked(table.differing[passes], WITHIN), learned._replace(let_pass=let_pass)


def _within_updates(differ: Table, comparison: Comparison, since: Mapping[str, int]) -> Mask:
    """Mask of rows as far apart as optimizers can move them: twice the learning rate, per step and element.

    It is the largest of either run, in its first settings or in this step. False where the distance is unknown.

    Args:
        differ: those rows of a step that differ.
        comparison: the rank of both runs.
        since: by name, the first step in which its gradient was rounding; steps are counted from it.
    """
    settings = (run.settings_of(comparison.rank).get(OPTIMIZERS) for run in comparison.runs)
    rates = [rate for document in settings for rate in learning_rates(document)]
    for site in np.flatnonzero(differ.alignment.are(Kind.HYPERPARAMETER)).tolist():
        if differ.alignment.path[site].endswith("['lr']"):
            with suppress(ValueError):  # of what a run says, which anyone may have written
                rates += [float(differ.plain(site, side) or 0.0) for side in "ab"]
    steps = np.array([differ.step - since.get(fqn, differ.step) + 1 for fqn in differ.fqns])
    with np.errstate(invalid="ignore"):
        far = 2 * max(rates, default=0.0) * steps * np.sqrt(differ.of_layouts("numel")[0])
        return np.asarray(distances(*differ.both())[0] <= far)


def rounding_gradients(table: Table, comparison: Comparison) -> dict[str, bool]:
    """Parameters whose gradient is rounding in both runs, by name; True where that is so of some elements only.

    Of all: its size is a few roundings of its module's largest gradient, and a's and b's are farther apart than
    `_UNRELATED`. Of some: a bias that agrees, and whose smallest element is so small (as in one bias for queries, keys
    and values). Empty where all gradients of the step are equal; none is partly so where `absmin` was not kept.
    """
    rows = np.flatnonzero(table.are(Kind.GRAD, Phase.OPTIMIZER) & ~table.one_sided)
    if not np.isin(table.state[rows], (DIFFERENT, WITHIN)).any():
        return {}
    sides, numel = table.both(rows), table.of_layouts("numel", rows)[0]
    sizes = np.array([of_run.norms for of_run in sides]) / np.sqrt(np.maximum(numel, 1.0))
    few = np.maximum(*(of_run.count("zeros") for of_run in sides)) <= numel / _MAX_ZERO_SHARE  # else it is switched off
    names = np.array(table.of(rows).fqns, np.object_)
    owners, owner = np.unique(list(map(owner_of, names)), return_inverse=True)
    largest = np.zeros(len(owners))
    np.fmax.at(largest, owner, np.fmax(*sizes))
    coarse = np.array([[_HALF_UNIT * autocasts(run)] for run in comparison.runs])
    bound = np.maximum(_MAX_ROUNDINGS * np.fmax(*table.of_layouts("unit", rows)), coarse) * largest[owner]
    bias = few & (sides[0].layout("dims") <= 1) & (table.state[rows] != DIFFERENT)
    with np.errstate(invalid="ignore"):
        whole = (sizes <= bound).all(axis=0) & (table.relative(rows) > _UNRELATED)
        partly = bias & (table.statistic("absmin", rows) <= bound).all(axis=0)
    return dict.fromkeys(names[partly], True) | dict.fromkeys(names[whole], False)


def rounding_note(learned: Learned) -> str:
    """One sentence on the parameters that `accept_rounding` let pass; "" for none."""
    if not learned.let_pass:
        return ""
    first, *others = sorted(learned.let_pass)
    more = f" and of {count(len(others), 'other parameter')}" if others else ""
    partly = "of some elements " * all(learned.unsettled[name][1] for name in learned.let_pass)
    rests = "what the optimizer makes of that, and what modules return of it, was not compared"
    return f"The gradient of {first}{more} is {partly}nothing but rounding in both runs: {rests}."


# --- what nothing rests on


_AGREEING = (EQUAL, WITHIN, UNUSED)
_AFTER_FORWARD = (Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)


def drop_unused(table: Table, learned: Learned, comparison: Comparison) -> tuple[Table, Learned]:
    """Pass: mark diverging rows UNUSED, one-sided ones ABSENT, if all that rests on them is on record and agrees.

    On record means in both runs. Nothing with `strict`.
    """
    if comparison.options.strict or not table.diverging.any():
        return table, learned
    for edge in (_unused_forms, _unused_backward, _unused_batches):
        table = table.marked(edge(table, comparison), UNUSED, alone=ABSENT)
    return table, learned


def _agree(table: Table, rows: Ids | Mask) -> bool:
    """Whether there is at least one of these rows, and the state of each is EQUAL, WITHIN or UNUSED."""
    states = table.state[rows]
    return bool(len(states) and np.isin(states, _AGREEING).all())


# --- what rests on what


def _unused_forms(table: Table, _comparison: Comparison) -> Ids:
    """Rows of values in another form whose outputs agree: shape, floats or others, sparse or not.

    Those of inputs are the outputs of their call, which may differ by rounding; those of gradients that optimizers take
    are what these leave of the parameter. Some have to be in both runs.
    """
    fed = table.are(Kind.INPUT) | table.are(Kind.GRAD, Phase.OPTIMIZER)
    rows = np.flatnonzero(fed & (table.state == DIFFERENT))
    forms = [np.not_equal(*table.of_layouts(name, rows)) for name in ("shape", "floating", "stored")]
    rows, call = rows[np.logical_or.reduce(forms)], attrgetter("phase", "fqn", "call")
    if not len(rows):
        return rows
    computed = table.are(Kind.OUTPUT) & ~table.one_sided
    rests = np.flatnonzero(computed | table.are(Kind.PARAM, Kind.OPTIMIZER_STATE, Phase.OPTIMIZER))
    agree, differ = np.isin(table.state, _AGREEING), np.flatnonzero(computed & (table.state == DIFFERENT))
    one, two = table.of_layouts("unit", differ)
    agree[differ] = (one == two) & (table.relative(differ) <= LEAST_BOUND * one)
    each = (rows, rests[agree[rests]], rests[~agree[rests]])
    given, agreeing, others = ([call(table.named(row)) for row in of.tolist()] for of in each)
    return rows[among(given, {*agreeing} - {*others})]


def _unused_backward(table: Table, comparison: Comparison) -> Ids:
    """Rows of losses and backward gradients that differ, if all gradients that optimizers take and all updates agree.

    If losses differ, b's have to be one factor times a's, and so have backward gradients. Where batches are cut
    differently and a loss does not differ, also rows of batches and module values with another number of elements.
    """
    differ, losses = table.state == DIFFERENT, table.are(Kind.LOSS)
    left = table.are(Kind.PARAM, Kind.OPTIMIZER_STATE, Kind.GRAD, Phase.OPTIMIZER)
    back = differ & table.are(*FLOWING_BACK, Phase.BACKWARD)
    scaled = np.flatnonzero((differ & losses) | back)
    if not _agree(table, table.are(Kind.GRAD, Phase.OPTIMIZER)) or (table.diverging & left).any():
        return scaled[:0]
    if (differ & losses).any():
        hidden = not back.any() and table.are(*FLOWING_BACK).any()
        if hidden or not _is_multiple(table, scaled, comparison.options.rtol * bool(back.any())):
            return scaled[:0]
    cut = comparison.splits is not None and comparison.splits.differ and (losses & ~differ).any()
    flowing = np.flatnonzero(differ & table.are(Kind.BATCH, Kind.INPUT, Kind.OUTPUT, *FLOWING_BACK) & bool(cut))
    return np.concatenate([scaled, flowing[_other_numbers(table, flowing)]])


def _other_numbers(table: Table, rows: Ids) -> Mask:
    """Mask of rows of both runs with another number of elements, summed over calls that were put together."""
    summed = ((of_run.column("elements", -1), of_run.layout("numel")) for of_run in table.both(rows))
    return np.asarray(np.not_equal(*(np.where(elements >= 0, elements, numel) for elements, numel in summed)))


def _is_multiple(table: Table, rows: Ids, close: float) -> bool:
    """Whether b is one factor (above 0, not 1) times a in all rows, by means and extrema to `close`, relative.

    Args:
        table: the step.
        rows: rows of the table that both runs have.
        close: relative tolerance; 0 for a factor that fits bit for bit, as a power of two does.
    """
    one, two = np.concatenate([table.statistic(name, rows) for name in ("mean", "min", "max")], axis=1)
    with np.errstate(all="ignore"):
        factor = two[0] / one[0]
        return bool(0 < factor != 1 and np.allclose(two, one * factor, rtol=close, atol=0, equal_nan=True))


def _unused_batches(table: Table, _comparison: Comparison) -> Ids:
    """Rows of diverging batches, if all inputs of root modules agree and so do the losses; else none.

    Without losses that agree, if each of these batches is one-sided or has another number of elements. Losses within a
    tolerance do not suffice where anything after the forward pass diverges: that hides labels.
    """
    rows, losses = np.flatnonzero(table.are(Kind.BATCH, Phase.DATA) & table.diverging), table.are(Kind.LOSS)
    given = np.flatnonzero(table.are(Kind.INPUT, Phase.FORWARD)) if len(rows) else rows
    roots = given[np.array(["." not in table.named(row).fqn for row in given.tolist()], np.bool_)]
    hides = (table.state[losses] == WITHIN).any() and (table.diverging & table.are(*_AFTER_FORWARD)).any()
    agree = (_agree(table, losses) and not hides) or _other_numbers(table, rows[~table.one_sided[rows]]).all()
    return rows if agree and _agree(table, roots) else rows[:0]


# --- words


def unused_note(table: Table, rows: Mask) -> str:
    """Sentence with the number of UNUSED differences of a step, and the first of them; "" for none.

    Args:
        table: the step.
        rows: mask of the UNUSED rows.
    """
    first, much = table.first_of(rows), count(int(rows.sum()), "difference")
    text = f"Nothing recorded rests on {much} in step {table.step}, first "
    return "" if first is None else f"{text}{what(first)}: what comes of it agrees."


# --- calls of a module by what it is given, where one run calls it more often

_MOST_CALLS = 2000

Given = dict[int, frozenset[tuple[str, int]]]
"""By call, the paths and checksums of what goes in, or of what comes out."""


def paired_calls(columns: tuple[Columns, Columns], batches: Sequence[StepBatch]) -> list[StepBatch]:
    """Records of a and b, with calls of modules, and batches of loaders, renumbered in the run that has more of them.

    Calls with equal inputs get one number, in order; by outputs where either run recorded no inputs. Modules called
    equally often stay as they are, and so do those called more than `_MOST_CALLS` times. Of batches, one run may lack
    the first numbers, which an evaluation took.

    Args:
        columns: sites of a and of b.
        batches: records of a and of b.
    """
    for kind in (Kind.INPUT, Kind.OUTPUT):
        a, b = (_values_by_call(*side, kind) for side in zip(columns, batches, strict=True))
        if a and b:
            break
    drawn = (_values_by_call(*side, Kind.BATCH, Phase.DATA) for side in zip(columns, batches, strict=True))
    a, b = (calls | loaded for calls, loaded in zip((a, b), drawn, strict=True))
    numbers: tuple[dict[str, dict[int, int]], ...] = {}, {}
    for fqn in a.keys() & b.keys():
        shorter, longer = sorted((a[fqn], b[fqn]), key=len)
        if shorter.keys() != longer.keys() and len(longer) <= _MOST_CALLS:
            numbers[longer is b[fqn]][fqn] = _new_numbers(longer, shorter)
    return [_renumbered(*side) for side in zip(columns, batches, numbers, strict=True)]


def _values_by_call(columns: Columns, batch: StepBatch, kind: Kind, phase: Phase = Phase.FORWARD) -> dict[str, Given]:
    """By module or loader, and call in the phase, the (path, checksum) of its values of `kind`."""
    found: dict[str, dict[int, set[tuple[str, int]]]] = defaultdict(lambda: defaultdict(set))
    rows = np.flatnonzero(columns.are(kind, phase, sites=batch.site))
    for site, checksum in zip(batch.site[rows].tolist(), batch.checksum[rows].tolist(), strict=True):
        found[columns.fqn[site]][int(columns.call[site])].add((columns.path[site], checksum))
    return {fqn: {call: frozenset(of[call]) for call in sorted(of)} for fqn, of in found.items()}


def _new_numbers(longer: Given, shorter: Given) -> dict[int, int]:
    """The new number of each call of the longer run, by its old one.

    Equal calls, paired in order, take the number that the shorter run has; the others take those numbers of both runs
    that are left, in order.
    """
    one, two = list(longer), list(shorter)
    matcher = SequenceMatcher(None, list(longer.values()), list(shorter.values()), autojunk=False)
    pairs = {one[i + k]: two[j + k] for i, j, size in matcher.get_matching_blocks() for k in range(size)}
    rest = iter(sorted({*longer, *shorter} - {*pairs.values()}))
    return {call: pairs[call] if call in pairs else next(rest) for call in one}


def _renumbered(columns: Columns, batch: StepBatch, numbers: Mapping[str, Mapping[int, int]]) -> StepBatch:
    """The records with calls renumbered; unchanged if any renumbered record would have no site.

    Only batches, and module values of the phases `forward` and `backward`, are renumbered.

    Args:
        columns: the run's sites.
        batch: its records of the step.
        numbers: by module, the number of a call to its new number.
    """
    moved = columns.are(*MODULE_KINDS, Phase.FORWARD, Phase.BACKWARD) | columns.are(Kind.BATCH, Phase.DATA)
    moved, new = moved & among(columns.fqn, numbers), np.arange(len(columns))
    of_site = {columns.site(number): number for number in np.flatnonzero(moved).tolist()}
    for site, number in of_site.items():
        new[number] = of_site.get(replace(site, call=numbers[site.fqn].get(site.call, site.call)), -1)
    sites = new[batch.site]
    return batch if (sites < 0).any() else replace(batch, site=sites.astype(batch.site.dtype))


# --- the passes


def mark_causes(table: Table, learned: Learned, comparison: Comparison) -> tuple[Table, Learned]:
    """Pass: mark in `Table.cause` the rows that diverge but are not counted as divergences.

    These are random states that differ, and rows of one run alone whose kind or name the other run may lack
    (`Comparison.causes`), or whose saved tensor the other run saves under another name, or not in this step. With
    `strict` none is marked.
    """
    if comparison.causes is None:
        return table, learned
    random, alone = (mask[table.site] for mask in comparison.causes)
    alone = alone | _saved_elsewhere(table)
    return replace(table, cause=table.diverging & (random | (table.one_sided & alone))), learned


def _saved_elsewhere(table: Table) -> Mask:
    """Mask of one-sided rows of saved tensors that the other run saves in this step under another name, by checksum.

    All, where the other run saves nothing in this step.
    """
    mask, saved = np.zeros(len(table), np.bool_), table.one_sided & table.are(Kind.PRODUCT)
    for half, other in zip(table.halves, table.halves[::-1], strict=True):
        rows = np.flatnonzero(saved & (half.row >= 0))
        others = other.batch.checksum[table.alignment.are(Kind.PRODUCT, sites=other.sites)]
        mask[rows] = np.isin(half.batch.checksum[half.row[rows]], others) if len(others) else True
    return mask


Pass = Callable[["Table", Learned, "Comparison"], tuple["Table", Learned]]
"""(table, what was learned, comparison) to (new table, what is learned then); changes none of its arguments."""

PASSES: tuple[Pass, ...] = (
    drop_unrecorded,  # first, since no later pass may take what a run could not have recorded for a divergence
    accept_rearranged,  # before any tolerance: equal samples are equal, and a share or another order has no distance
    accept_tolerated,  # before causes are told from values, so that what is let pass is neither
    accept_rounding,  # after it, since only where differences are let pass may those of rounding alone be
    drop_unused,  # after it, since what rests on a value may be within tolerance
    mark_causes,  # last: marks what diverges still
)
"""What each opened step goes through, in this order, after `pair` has put its records side by side: table and what was
learned in, table and what was learned out.

Of the first step that diverges then, `choose` finds the divergence that leads, and `judge` explains it.
"""
