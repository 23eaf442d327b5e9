"""One rank of both runs compared step by step.

Only steps with unequal digests are opened, one at a time, and go through the passes. Counting is done on columns;
divergences become objects, and are judged, only as far as they are listed.

*Which divergence is first.* Values that both runs have are effects and decide whether the runs diverge. Random states,
and records of one run alone whose name the other lacks, are causes: a random state moves no number until something
draws from it, and an added module may change nothing. Causes are blamed where an effect differs and does not explain
itself, and told as structure where none does.

*Other origins.* A step may diverge in several unrelated places: another seed and another learning rate. Every
divergence that rests on nothing that differs is told with its cause; where many have one cause (the parameters of one
optimizer), the first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.evidence import Cause, Known
from introspect_cli.compare.ledger import TENSORS
from introspect_cli.compare.measure import Layouts
from introspect_cli.compare.names import generator_of
from introspect_cli.compare.outcome import TRAINED, Heat, RankOutcome, Structure, changes_of, results_agree
from introspect_cli.compare.passes import PASSES, pair, rounding_note, table_of, unused_note
from introspect_cli.compare.result import Role
from introspect_cli.compare.resumed import Beginning, beginning_at_resume, lacks_start
from introspect_cli.compare.say import what
from introspect_cli.compare.settings.hyperparameters import hyperparameter_changes
from introspect_cli.compare.step import Step, divergence_at
from introspect_cli.compare.steps import differing, factor_notes, steps_of
from introspect_cli.compare.table import (
    CUT,
    EQUAL,
    EVALUATING,
    FLOWING_BACK,
    NOT_SEEN,
    UNUSED,
    WITHIN,
    Learned,
    Table,
    unseen,
)
from introspect_cli.compare.watched import evaluates, observed_kinds
from introspect_cli.records import SETTING_KINDS, Kind, Phase, Site, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.comparison import Comparison
    from introspect_cli.compare.result import Divergence
    from introspect_cli.compare.steps import Paired
    from introspect_cli.compare.table import Table
    from introspect_cli.store.log import StepEntry

_AFTER_LOSS = frozenset({Phase.BACKWARD, Phase.OPTIMIZER})
_EARLY = frozenset(Phase) - _AFTER_LOSS
_GIVING = (Kind.OUTPUT, Kind.OP_OUTPUT, Kind.PARAM, Kind.BUFFER)
_SCRIPT_PHASES = frozenset({Phase.START, Phase.DATA, Phase.LOSS})
"""Phases whose values code outside of modules makes: its draws are not on record."""


def choose_lead(account: Account, step: Step, positions: Sequence[int]) -> tuple[Step, int]:
    """(step, position of a divergence in it) that leads the answer, else the earliest of this step.

    The earliest value leads, unless a cause before it explains it (`_is_explained`), in this step or in earlier ones in
    which only causes differed. So it is one of: that value, in a copy of the step without one-sided causes; the first
    divergence of `Account.began`; or, where a random state is the first, a parameter that one run alone drew, else the
    first random state that is drawn from.

    Args:
        account: what the steps before have shown.
        step: the first step in which a value diverges.
        positions: those of its divergences that were selected, in order.
    """
    if (table := _without_renamed_inputs(step.table)) is not step.table:  # they explain nothing
        named = Step(step.comparison, table, step.begins, step.learned)
        places = {site: place for place, site in enumerate(named.sites)}
        if left := [places[step.sites[place]] for place in positions if step.sites[place] in places]:
            step, positions = named, left
    table, earliest, began = step.table, positions[0], account.began
    effect = next((place for place in positions if not step.divergences.cause[place]), None)
    if effect is None or (effect == earliest and began is None):
        return step, earliest
    one_sided, is_port = table.cause & table.one_sided, step.comparison.match.is_port
    before = [step.sites[position] for position in positions[: positions.index(effect)]]
    if is_port or not _is_explained(account, step, effect, before):
        # what one implementation alone has may be what the other has under another name, or in parts
        rest = table.marked(one_sided, NOT_SEEN) if is_port else table.keeping(~one_sided)
        alone = Step(step.comparison, rest, step.begins, step.learned)
        return alone, alone.sites.index(step.sites[effect])
    if began is not None:
        return Step(step.comparison, began, Beginning(), Learned()), 0
    if step.sites[earliest].kind is not Kind.RNG:
        return step, earliest
    blamed = drawn_in_one(step) or [place for place in positions if is_drawn_from(step, place)]
    return step, next((place for place in blamed if place in positions), earliest)


def _is_explained(account: Account, step: Step, effect: int, before: Sequence[Site]) -> bool:
    """Whether a cause explains a value that differs.

    That is a one-sided module that brings a value the other run lacks or lets a gradient flow, a batch of one run alone
    that is the value there, or a random state that the value may come of drawing from: a draw in the step differs, the
    script itself makes the value, parameters or buffers differ as the step begins, or not all draws were recorded.

    Args:
        account: what the steps before have shown.
        step: the step of the value.
        effect: its position.
        before: sites of the divergences before it.
    """
    site, begins = step.sites[effect], step.begins
    around = step.around(site.fqn, step.orders[effect]) if site.kind is Kind.INPUT else None
    makers = frozenset({site.fqn, around.fqn if around is not None else ""})
    causes, number = step.table.keeping(step.table.cause), int(step.divergences.site[effect])
    if step.alone[effect] or account.new_values or has_new_values(causes, makers, number):
        return True
    in_both = step.modules[0].keys() & step.modules[1].keys()
    back = [each for each in before if each.phase is Phase.BACKWARD and site.phase in _AFTER_LOSS]
    if any(each.kind is Kind.OP_OUTPUT or (each.kind in FLOWING_BACK and each.fqn in in_both) for each in back):
        return True
    if not (account.structure.random or any(each.kind is Kind.RNG for each in before)):
        return False
    by_script = site.phase in _SCRIPT_PHASES or (site.kind is Kind.INPUT and "." not in site.fqn)
    begun = begins.diverged or bool(begins.names)  # what the step began with was drawn, too
    return bool(_drawn(step)) or by_script or begun or not step.comparison.notices_all_draws


def drawn_in_one(step: Step) -> list[int]:
    """Position of the first start tensor that differs, if one run alone has it and a parameter before it is equal.

    Empty otherwise. Drawing such a tensor moves the generator, so later tensors differ; an equal one before shows that
    the seed is the same.
    """
    begun = np.flatnonzero(step.divergences.are(*TENSORS, Phase.START))[:1].tolist()
    sites = step.of(Kind.PARAM, Phase.START)
    equal = step.table.order_of[sites[step.state[sites] == EQUAL]].min(initial=np.inf)
    return [place for place in begun if step.alone[place] and equal < step.orders[place]]


def is_drawn_from(step: Step, position: int) -> bool:
    """Whether the divergence is a random state at the start, and a later one of its generator differs in the step."""
    site = step.sites[position]
    return site.kind is Kind.RNG and site.phase is Phase.START and generator_of(site) in _drawn(step)


def _drawn(step: Step) -> set[str]:
    """Generators of which a later state than that at the start differs in the step."""
    return {generator_of(site) for site in step.sites if site.kind is Kind.RNG and site.phase is not Phase.START}


def has_new_values(causes: Table, makers: frozenset[str] = frozenset(), effect: int = -1) -> bool:
    """Whether any one-sided record before the backward pass brings a value that the other run does not have.

    Outputs, results of operators, parameters and buffers bring one, by checksum; so does a batch that is the first
    value that differs, an input of a module with no outputs on record, or of one in whose code that value may be made.
    A wrapper or an identity brings none.

    Args:
        causes: the step's table, with causes as its only diverging rows.
        makers: modules in whose code the first value that differs may be made.
        effect: union number of the site of that value; -1 for none.
    """
    are, fqn = causes.alignment.are, causes.alignment.fqn
    agreeing = causes.both(np.flatnonzero(causes.agreeing))  # parts of a batch have another checksum
    for half, other, known in zip(causes.halves, (causes.b, causes.a), agreeing, strict=True):
        sites = half.sites[half.only]
        gives = half.batch.checksum[half.only[are(*_GIVING, *_EARLY, sites=sites)]]
        given = {fqn[site] for site in sites[are(Kind.INPUT, *_EARLY, sites=sites)]}
        gave = {fqn[site] for site in half.sites[are(Kind.OUTPUT, sites=half.sites)]}
        new = ~np.isin(gives, np.append(other.checksum, known.column("checksum")))
        loaded = half.batch.checksum[half.only[are(Kind.BATCH, sites=sites)]]
        is_loaded = causes.number("checksum", effect, half.side) in loaded
        if new.any() or given - gave or given & makers or is_loaded:  # or what it gave was not seen, or differs
            return True
    return False


def _without_renamed_inputs(table: Table) -> Table:
    """The table without one-sided inputs that the other run gives the same call under another name, by checksum."""
    names, alone = table.alignment, table.one_sided & table.cause & table.are(Kind.INPUT)
    held = list[dict[int, tuple[str, int, int]]]()
    for half in table.halves:
        rows = np.flatnonzero(alone & (half.row >= 0))
        values = half.batch.checksum[half.row[rows]].tolist()
        each = zip(rows.tolist(), table.site[rows].tolist(), values, strict=True)
        held.append({row: (names.fqn[site], int(names.call[site]), value) for row, site, value in each})
    of_both = {*held[0].values()} & {*held[1].values()}
    renamed = [row for mine in held for row, value in mine.items() if value in of_both]
    return table.keeping(np.isin(np.arange(len(table)), renamed, invert=True)) if renamed else table


# --- the other origins of the step

_MAX_JUDGED = 300
"""Divergences that are looked at, from the first on and of what the optimizers leave: nearly all follow from others."""

_MAX_ORIGINS = 8

_INDEPENDENT_REASONS = {"batch", "optimizer", "module", "op", "rng", "initial", "outside", "own_code", "buffer"}
"""Reasons that say of one record that what went into it is equal, whatever differs elsewhere."""


def origins(step: Step, positions: Sequence[int], first: Site, cause: Cause) -> list[tuple[int, Cause]]:
    """At most `_MAX_ORIGINS` further origins among `positions`, in order, one per cause (`_cause_key`).

    Each is recorded by both runs, has the role ORIGIN for a reason in `_INDEPENDENT_REASONS`, evidence that is all
    EQUAL, and an effect. Later calls of a module do not count.

    Args:
        step: the first diverging step.
        positions: those of its other divergences that were selected, in order.
        first: site of the first divergence.
        cause: why that diverges.
    """
    others = {_cause_key(step, first, cause): (-1, cause)}
    late = [position for position in positions[_MAX_JUDGED:] if step.sites[position].phase is Phase.OPTIMIZER]
    judged = (*positions[:_MAX_JUDGED], *late[:_MAX_JUDGED])
    for position in (position for position in judged if not step.alone[position]):
        site, other = step.sites[position], _judged(step, position)
        key, reason = _cause_key(step, site, other), other.reason
        if other.role is not Role.ORIGIN or reason not in _INDEPENDENT_REASONS or key in others:
            continue
        # it may come from what was not seen, or have grown from what was let pass
        stands = all(fact.known is Known.EQUAL for fact in other.evidence)
        # the first call agrees, or is listed: what a module keeps from call to call may follow from the rest
        stands = stands and not (site.call and reason in {"module", "own_code"})
        stands = stands and (reason != "rng" or is_drawn_from(step, position))
        if stands and (reason != "optimizer" or hyperparameter_changes(step.table, step.last_text)):
            others[key] = position, other
    return list(others.values())[1 : 1 + _MAX_ORIGINS]


def _judged(step: Step, position: int) -> Cause:
    """The cause of a divergence by the reasons, which are imported only where there is a divergence."""
    from introspect_cli.compare.reasons.rows import judge

    return judge(step, position)


def _cause_key(step: Step, site: Site, cause: Cause) -> tuple[str, str]:
    """What two origins with one cause have in common: the class of the module, or else the reason."""
    if cause.reason in {"module", "own_code", "op", "buffer"}:
        name = cause.module or site.fqn
        module = step.modules[0].get(name) or step.modules[1].get(name)
        return "module", name if module is None else module.module_class
    return cause.reason, ""


# --- step by step


def table_at(comparison: Comparison, learned: Learned, step_a: int, step_b: int) -> tuple[Table, Learned]:
    """(table of a step after `pair` and all passes, what is known after it).

    Args:
        comparison: the rank of both runs.
        learned: what the steps before have shown.
        step_a: number of the step in a.
        step_b: number of the step in b.
    """
    table = pair(comparison, step_a, step_b)
    for step_pass in PASSES:
        table, learned = step_pass(table, learned, comparison)
    return table, learned


def raise_floors(comparison: Comparison, entry_a: StepEntry) -> None:
    """Raise, in place, the floor of each noise run that has this step with another digest than a; reads both."""
    step = entry_a.step
    for floor in comparison.floors:
        if step in floor.reader and floor.reader.entry(floor.reader.row_of(step)).digest != entry_a.digest:
            batches, compared = (comparison.a.read(step), floor.reader.read(step)), ~floor.alignment.are(*SETTING_KINDS)
            layouts = comparison.layouts[0], Layouts(floor.reader.layouts)
            floor.learn(table_of(floor.alignment, compared, (step, step), batches, layouts))


class Account:
    """Fills the `RankOutcome` of all records of a rank, or of those of training or of evaluation alone.

    Attributes:
        which: True for evaluation alone, False for training alone, None for all.
        counted: bool per union number, whether records of the site are counted.
        structure: what differs in structure so far.
        begins: what is known of what the step after the last listed one begins with.
        learned: what the steps so far have shown.
        began: the first step in which only causes differed; None for none.
        new_values: whether one of these causes brought a value that the other run has nowhere.
        one_sided: (index, table) of the first step in which only causes differed and results do not agree; None for
            none.
        closed: whether no further step is to be seen.
        later: records of steps after the first divergence that were opened.
    """

    def __init__(self, comparison: Comparison, paired: Paired, begins: Beginning, which: bool | None) -> None:
        """Prepare for the first step.

        Args:
            comparison: the rank of both runs.
            paired: its common steps.
            begins: what is known of what the later run begins with.
            which: True for evaluation alone, False for training alone, None for all.
        """
        alignment, options = comparison.alignment, comparison.options
        self.comparison, self.begins, self.learned = comparison, begins, Learned()
        self.outcome = RankOutcome(comparison.rank, paired, comparison.match, comparison.offset)
        self.which, self.counted = which, alignment.selected(options.kinds, options.modules)
        if which is not None:  # its first divergence alone is asked for
            self.counted = self.counted & (alignment.evaluating == which)
            options = replace(options, limit=0, whole_step=False, want_map=False, later=0)
        self.options, self.structure = options, Structure()
        if begins.resumed:  # what a checkpoint did not restore
            self.outcome.results_known = Known.DIFFERS
        self.began: Table | None = None
        self.new_values = self.closed = False
        self.one_sided: tuple[int, Table] | None = None
        self.later = 0

    def see(self, place: int, table: Table, learned: Learned) -> None:
        """Count a step, narrow the results by it, and list what diverges in it.

        Unless a map or all divergences are wanted, an account is closed once more than `options.later` records were
        opened from the diverging step on; the outcome then has only the steps up to there.

        Args:
            place: index of the step among the common ones.
            table: the step after all passes.
            learned: what the steps so far have shown, this one included.
        """
        outcome, options, self.learned = self.outcome, self.options, learned
        if self.which is not None:
            table = replace(table, chosen=table.chosen & self.counted[table.site])
        self._count_passed(table)
        outcome.see_results(table)
        # a step in which only causes differ is added to the structure alone
        if (table.diverging & table.chosen).any() and not self._add_causes(place, table.keeping(table.chosen)):
            self._list_step(place, table)
        if outcome.first is not None and not (options.want_map or options.limit is None):
            records = len(table.a) * len(self.comparison.a.readers) + len(table.b) * len(self.comparison.b.readers)
            self.later += max(records, options.least)
            if self.later > options.later:
                outcome.tally["unopened"], self.closed = len(outcome.paired) - place - 1, True
                outcome.paired = replace(outcome.paired, rows=tuple(rows[: place + 1] for rows in outcome.paired.rows))

    def end(self) -> RankOutcome:
        """The outcome, with its `changes` and the records of steps that were not opened.

        Where nothing else differed, and no result agreed there, the first step in which only causes did is listed.
        """
        if self.outcome.first is None and self.one_sided is not None:
            self._list_step(*self.one_sided)
        self.outcome.changes = changes_of(self.structure, self.comparison.alignment, self.comparison.match)
        self._count_unopened()
        return self.outcome

    # --- counts

    def _count_passed(self, table: Table) -> None:
        """Add the step's equal, tolerated and unobserved records to the outcome's tally.

        Blind are those of the unobserved that one run has, as of what a list lacks; lean those that no tolerance can be
        put to. Also notes the first of the tolerated, the blind and the unused ones, and a step in which one run alone
        evaluates.
        """
        comparison, outcome, chosen, state = self.comparison, self.outcome, table.chosen, table.state
        missing = chosen & (state == NOT_SEEN)
        both = np.flatnonzero(missing & ~table.one_sided)
        one, two = (of_run.column("status") for of_run in table.both(both))
        blind = missing.copy()
        blind[both] = (one == Status.NOT_OBSERVED) != (two == Status.NOT_OBSERVED)
        recorded = self.counted[comparison.a.read(table.step).site]
        masks = {
            "equal": self.counted[table.site] & table.agreeing,
            "opened": recorded,
            "blind_both": unseen(table.a) & self.counted[table.halves[0].sites],
            "within": chosen & (state == WITHIN),
            "cut": chosen & (state == CUT),
            "lean": (one == Status.OBSERVED) & (two == Status.OBSERVED),
            "not_observed": missing,
            "blind": blind,
        }
        outcome.tally.update({name: int(mask.sum()) for name, mask in masks.items()})
        # what the step before left, where b lists it
        outcome.tally["records"] += int(self.counted[table.halves[0].sites].sum()) - int(recorded.sum())
        if (chosen & (state == EVALUATING)).any() and (runs := evaluates(table))[0] != runs[1]:
            self.structure.evaluations.setdefault("a" if runs[0] else "b", table.step)
        outcome.notes = [*filter(None, outcome.notes)] or [unused_note(table, chosen & (state == UNUSED))]
        if outcome.first is None and not outcome.tolerated and (site := table.first_of(masks["within"])):
            outcome.tolerated = f"{what(site)} in step {table.step}"
        if not outcome.blind_site and (site := table.first_of(blind)):
            outcome.blind_site = f"{what(site)} in {'the evaluation of ' * site.evaluates}step {table.step}"

    def _count_unopened(self) -> None:
        """Add the records of steps with equal digests to the tally.

        As much as of the common step in the middle is taken not to have been seen by run a, but for the last, which may
        hold what came after training. The last is blank if it has outputs but none that was observed, and neither a
        loss nor a parameter's gradient.
        """
        reader, counted, are = self.comparison.a, self.counted, self.comparison.alignment.are
        paired, tally = self.outcome.paired, self.outcome.tally  # as far as it was walked
        if not len(paired):
            return
        middle, last = (reader.read(paired[place][0].step) for place in ((len(paired) - 1) // 2, -1))
        records = paired.records or len(reader.read(paired[0][0].step)) + len(last) * (len(paired) - 1)
        if not counted.all():
            records = sum(int(counted[reader.read(entry.step).site].sum()) for entry, _ in paired)
        unopened, of_middle, of_last = records - tally["opened"], counted[middle.site], counted[last.site]
        missing, at_last = unseen(last), min(unopened, int(of_last.sum()))
        share = (unseen(middle) & of_middle).sum() / max(of_middle.sum(), 1)
        blind = min(unopened, round((unopened - at_last) * share) + int((missing & of_last).sum()))
        outputs, shows = of_last & are(Kind.OUTPUT)[last.site], are(Kind.LOSS, Kind.GRAD)[last.site]
        blank = outputs.any() and not (shows | (outputs & ~missing)).any()
        tally.update(records=records, blind_both=blind, equal=unopened - blind, blank=int(blank))

    # --- divergences

    def _list_step(self, place: int, table: Table) -> None:
        """Count a diverging step, and list its divergences as far as the limit goes.

        Of the first such step also the divergence that leads, and the other origins; in it, saved files come last. Sets
        `begins`, unless the limit was reached before.

        Args:
            place: index of the step among the common ones.
            table: the step after all passes.
        """
        comparison, outcome, limit = self.comparison, self.outcome, self.options.limit
        chosen, begins = table.keeping(table.chosen), outcome.first is None
        only_a, only_b = (len(half.only) for half in chosen.halves)
        outcome.tally.update(steps_diverged=1, diverged=len(chosen.in_order), only_a=only_a, only_b=only_b)
        if self.options.want_map:
            outcome.heat = outcome.heat or Heat(comparison.alignment, outcome.paired.steps.tolist())
            outcome.heat.add(place, chosen)
        if not begins and limit is not None and len(outcome.listed) >= limit:
            return
        step = Step(comparison, table, self._beginning_of(table), self.learned)
        place_of = {row: position for position, row in enumerate(table.in_order.tolist())}
        positions = [place_of[row] for row in chosen.in_order.tolist()]  # ordered by what was selected
        if begins:  # a file that is saved shows what was there before: it leads where nothing else differs
            positions.sort(key=lambda position: step.sites[position].kind is Kind.PRODUCT)
            lead = choose_lead(self, step, positions)
            outcome.first, outcome.cause = first, cause = self._append_divergence(*lead)
            outcome.step = lead[0]
            if outcome.step.number == step.number:
                positions = [position for position in positions if step.sites[position] != first.site]
                others = origins(step, positions, first.site, cause) if cause.role is Role.ORIGIN else ()
                outcome.origins = [(divergence_at(step, position, other), other) for position, other in others]
        if limit is not None and not (begins and self.options.whole_step):
            positions = positions[: max(limit - len(outcome.listed), 0)]
        for position in positions:
            self._append_divergence(step, position)
        self.begins = step.begins.after(comparison.recorded_after_steps, table)

    def _beginning_of(self, table: Table) -> Beginning:
        """What a step begins with; reads the step before, where both runs recorded it."""
        comparison, begins, before = self.comparison, self.begins, None
        if table.step - 1 in comparison.a and table.step_b - 1 in comparison.b:
            before, _ = table_at(comparison, self.learned, table.step - 1, table.step_b - 1)
        if before is not None or self.outcome.first is not None:
            begins = begins.after(comparison.recorded_after_steps, before)
        return replace(begins, before=before, gap=lacks_start(comparison, table))

    def _add_causes(self, place: int, table: Table) -> bool:
        """Add the step's causes to the structure; returns whether nothing but causes differs.

        In that case also sets, as far as unset, `began` and `new_values`. Before the first divergence, where results do
        not show that nothing changed, it sets `one_sided`, or without any results on record counts it as
        `unrecorded`.

        Args:
            place: index of the step among the common ones.
            table: its table, with only what was selected diverging.
        """
        causes = table.keeping(table.cause)
        self.structure.add_causes(causes)
        if causes.diverging.sum() < table.diverging.sum():
            return False
        outcome = self.outcome
        self.began = self.began or table
        self.new_values = self.new_values or has_new_values(causes)
        agree = results_agree(table)
        if outcome.first is None and not self.which and (outcome.hidden or not agree):
            if agree is not None:
                self.one_sided = self.one_sided or (place, table)
            elif not all(TRAINED & observed_kinds(manifest) for manifest in self.comparison.manifests):
                outcome.tally["unrecorded"] += 1
        return True

    def _append_divergence(self, step: Step, position: int) -> tuple[Divergence, Cause]:
        """Judge the divergence at a position of a step and add it to the outcome's list; returns both."""
        cause = _judged(step, position)
        divergence = divergence_at(step, position, cause)
        self.outcome.listed.append(divergence)
        return divergence, cause


def compare_rank(comparison: Comparison) -> RankOutcome:
    """Compare one rank, or all as one, over the common steps; raises the noise in `comparison.floors` in place.

    Where a run evaluates, and ranks are compared one by one, the outcome has `parts`: of training and of evaluation.
    """
    paired, learned = steps_of(comparison), Learned()
    opened = dict.fromkeys(differing(paired))
    evaluates = not comparison.is_whole and any(of_run.are(Phase.EVAL).any() for of_run in comparison.sites)
    begins = beginning_at_resume(comparison.resume_point) if opened and comparison.resume_point else Beginning()
    parts = (None, False, True) if evaluates else (None,)
    accounts = [Account(comparison, paired, begins, which) for which in parts]
    for place in range(len(paired) * bool(opened)) if comparison.floors else opened:  # all steps raise the floors
        entry_a, entry_b = paired[place]
        raise_floors(comparison, entry_a)
        if place in opened:
            table, learned = table_at(comparison, learned, entry_a.step, entry_b.step)
            for account in (account for account in accounts if not account.closed):
                account.see(place, table, learned)
        if all(account.closed for account in accounts):
            break
    whole, *separate = [account.end() for account in accounts]
    whole.notes = [*factor_notes(learned), rounding_note(learned), *whole.notes]
    whole.parts = dict(zip((False, True), separate, strict=False))
    whole.resumption = None if comparison.options.narrowed else comparison.resumption
    return whole
