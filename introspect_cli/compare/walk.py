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
from introspect_cli.compare.measure import Layouts
from introspect_cli.compare.names import generator_of
from introspect_cli.compare.outcome import (
    TRAINED,
    Heat,
    RankOutcome,
    Structure,
    changes_of,
    results_agree,
)
from introspect_cli.compare.passes import PASSES, evaluates, pair, table_of, unused_note
from introspect_cli.compare.result import Role
from introspect_cli.compare.resumed import Beginning, beginning_at_resume, lacks_start
from introspect_cli.compare.say import what
from introspect_cli.compare.settings.hyperparameters import hyperparameter_changes
from introspect_cli.compare.step import Step, divergence_at
from introspect_cli.compare.steps import differing, steps_of
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
from introspect_cli.compare.watched import observed_kinds
from introspect_cli.records import SETTING_KINDS, Kind, Phase, Site, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.compare.comparison import Comparison
    from introspect_cli.compare.result import Divergence
    from introspect_cli.compare.steps import Paired
    from introspect_cli.compare.table import Table
    from introspect_cli.store.log import StepEntry

_AFTER_LOSS = frozenset({Phase.BACKWARD, Phase.OPTIMIZER})
_TENSORS = (Kind.PARAM, Kind.BUFFER)
_GIVING = (Kind.OUTPUT, Kind.OP_OUTPUT, Kind.PARAM, Kind.BUFFER)
_SCRIPT_PHASES = frozenset({Phase.START, Phase.DATA, Phase.LOSS})
"""Phases whose values code outside of modules makes: its draws are not on record."""


def choose_lead(
    step: Step, positions: Sequence[int], earlier: Structure, began: Table | None, *, new_values: bool
) -> tuple[Step, int]:
    """(step, position of a divergence in it) that leads the answer, else the earliest of this step.

    The earliest value leads, unless a cause before it explains it: a one-sided module that brings a value the other run
    lacks or lets a gradient flow, or a random state that something was drawn from, in this step or in earlier ones in
    which only causes differed. So it is one of: that value, in a copy of the step without one-sided causes; the first
    divergence of `began`; or, where a random state is the first, a parameter that one run alone drew, else the first
    random state that is drawn from. None too where no value differs.

    Args:
        step: the first step in which a value diverges.
        positions: those of its divergences that were selected, in order.
        earlier: what differed in structure in the steps before.
        began: the first step in which nothing but causes differed; None where there is none.
        new_values: whether one of these causes brought a value that the other run has nowhere.
    """
    table, earliest = step.table, positions[0]
    effect = next((place for place in positions if not step.divergences.cause[place]), None)
    if effect is None or (effect == earliest and began is None):
        return step, earliest
    site, before = step.sites[effect], [step.sites[position] for position in positions[: positions.index(effect)]]
    around = step.around(site.fqn, step.order_at(effect)) if site.kind is Kind.INPUT else None
    makers = frozenset([site.fqn, around.fqn if around is not None else ""])
    explained = step.is_one_sided(effect) or new_values or has_new_values(table.keeping(table.cause), makers)
    explained = explained or (site.phase in _AFTER_LOSS and _flows_in_one(step, before))
    one_sided, is_port = table.cause & table.one_sided, step.comparison.match.is_port
    if is_port or not (explained or _was_drawn_from(step, site, before, earlier)):
        # what one implementation alone has may be what the other has under another name, or in parts
        rest = table.marked(one_sided, NOT_SEEN) if is_port else table.keeping(~one_sided)
        alone = Step(step.comparison, rest, step.begins, step.learned)
        return alone, alone.sites.index(site)
    if began is not None:
        return Step(step.comparison, began, Beginning(), Learned()), 0
    if step.sites[earliest].kind is not Kind.RNG:
        return step, earliest
    drawn = drawn_in_one(step)
    blamed = [place for place in positions if place == drawn or (drawn is None and is_drawn_from(step, place))]
    return step, next(iter(blamed), earliest)


def drawn_in_one(step: Step) -> int | None:
    """Position of the first start tensor that differs, if one run alone has it and a parameter before it is equal.

    None otherwise. Drawing such a tensor moves the generator, so later tensors differ; an equal one before shows that
    the seed is the same.
    """
    begun = (place for place, site in enumerate(step.sites) if site.phase is Phase.START and site.kind in _TENSORS)
    first, sites = next(begun, None), step.of(Kind.PARAM, frozenset({Phase.START}))
    if first is None or not step.is_one_sided(first):
        return None
    equal = (step.state[sites] == EQUAL) & (step.table.order_of[sites] < step.order_at(first))
    return first if equal.any() else None


def _flows_in_one(step: Step, before: Iterable[Site]) -> bool:
    """Whether `before` has a backward gradient of a module that both runs have, or a result of a backward operator."""
    return any(
        (site.kind in FLOWING_BACK and all(site.fqn in tree for tree in step.modules))
        or (site.kind is Kind.OP_OUTPUT and site.phase is Phase.BACKWARD)
        for site in before
    )


def _was_drawn_from(step: Step, effect: Site, before: Iterable[Site], earlier: Structure) -> bool:
    """Whether a random state differs before a value, and the value may come of drawing from it.

    It may if a draw in the step differs, the script itself makes the value, parameters or buffers differ as the step
    begins, or not all draws were recorded.

    Args:
        step: the step.
        effect: site of the value.
        before: sites of the divergences before it.
        earlier: what differed in structure in the steps before.
    """
    if not (earlier.random or any(site.kind is Kind.RNG for site in before)):
        return False
    by_script = effect.phase in _SCRIPT_PHASES or (effect.kind is Kind.INPUT and "." not in effect.fqn)
    begun = step.begins.diverged or bool(step.begins.names)  # what the step began with was drawn, too
    return bool(_drawn(step)) or by_script or begun or not step.comparison.notices_all_draws


def is_drawn_from(step: Step, position: int) -> bool:
    """Whether the divergence is a random state at the start, and a later one of its generator differs in the step."""
    site = step.sites[position]
    return site.kind is Kind.RNG and site.phase is Phase.START and generator_of(site) in _drawn(step)


def _drawn(step: Step) -> set[str]:
    """Generators of which a later state than that at the start differs in the step."""
    return {generator_of(site) for site in step.sites if site.kind is Kind.RNG and site.phase is not Phase.START}


def has_new_values(causes: Table, makers: frozenset[str] = frozenset()) -> bool:
    """Whether any one-sided record before the backward pass brings a value that the other run does not have.

    Outputs, results of operators, parameters and buffers bring one, by checksum; so does an input of a module with no
    outputs on record, or of one in whose code the first value that differs may be made. A wrapper or an identity brings
    none.

    Args:
        causes: the step's table, with causes as its only diverging rows.
        makers: modules in whose code the first value that differs may be made.
    """
    alignment = causes.alignment
    agreeing = causes.both(np.flatnonzero(causes.agreeing))  # parts of a batch have another checksum
    for half, other, known in zip(causes.halves, (causes.b, causes.a), agreeing, strict=True):
        early = half.only[~alignment.are(*_AFTER_LOSS, sites=half.sites[half.only])]
        sites = half.sites[early]
        gives = half.batch.checksum[early[alignment.are(*_GIVING, sites=sites)]]
        if not (np.isin(gives, other.checksum) | np.isin(gives, known.column("checksum"))).all():
            return True
        given, gave = (
            {alignment.fqn[site] for site in at[alignment.are(kind, sites=at)].tolist()}
            for kind, at in ((Kind.INPUT, sites), (Kind.OUTPUT, half.sites))
        )
        if given - gave or given & makers:
            return True  # what it gave was not seen, or differs
    return False


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
        positions: those of its divergences that are looked at, in order.
        first: site of the first divergence.
        cause: why that diverges.
    """
    others = {_cause_key(step, first, cause): (-1, cause)}
    late = [position for position in positions[_MAX_JUDGED:] if step.sites[position].phase is Phase.OPTIMIZER]
    for position in (*positions[:_MAX_JUDGED], *late[:_MAX_JUDGED]):
        site = step.sites[position]
        if site == first or step.is_one_sided(position):
            continue
        other = _judged(step, position)
        key = _cause_key(step, site, other)
        if other.role is not Role.ORIGIN or other.reason not in _INDEPENDENT_REASONS or key in others:
            continue
        # it may come from what was not seen, or have grown from what was let pass
        stands = all(fact.known is Known.EQUAL for fact in other.evidence)
        # the first call agrees, or is listed: what a module keeps from call to call may follow from the rest
        stands = stands and not (site.call and other.reason in {"module", "own_code"})
        stands = stands and (other.reason != "rng" or is_drawn_from(step, position))
        if stands and (other.reason != "optimizer" or hyperparameter_changes(step.table, step.last_text)):
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
        classes = [tree[name].module_class for tree in step.modules if name in tree]
        return "module", classes[0] if classes else name
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
    for (reader, _), floor in zip(comparison.noise, comparison.floors, strict=True):
        if step in reader and reader.entry(reader.row_of(step)).digest != entry_a.digest:
            batches, compared = (comparison.a.read(step), reader.read(step)), ~floor.alignment.are(*SETTING_KINDS)
            layouts = comparison.layouts[0], Layouts(reader.layouts)
            floor.learn(table_of(floor.alignment, compared, (step, step), batches, layouts))


class Account:
    """Fills the `RankOutcome` of all records of a rank, or of those of training or of evaluation alone.

    Attributes:
        counted: bool per union number, whether records of the site are counted.
        structure: what differs in structure so far.
        begins: what is known of what the step after `last` begins with.
        learned: what the steps so far have shown.
        last: number of the last step that was listed; None for none.
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
        self.outcome = RankOutcome(comparison.rank, paired, comparison.match, comparison.offset, which)
        self.counted = alignment.selected(options.kinds, options.modules)
        if which is not None:  # its first divergence alone is asked for
            self.counted = self.counted & (alignment.evaluating == which)
            options = replace(options, limit=0, whole_step=False, want_map=False, later=0)
        self.options, self.structure = options, Structure(comparison)
        if begins.resumed:  # what a checkpoint did not restore
            self.outcome.results_known = Known.DIFFERS
        self.last: int | None = None
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
        if outcome.evaluation is not None:
            table = replace(table, chosen=table.chosen & self.counted[table.site])
        self._count_passed(table)
        outcome.see_results(table)
        if (table.diverging & table.chosen).any():
            self._list_step(place, table)
        if outcome.first is not None and not (options.want_map or options.limit is None):
            records = len(table.a) * len(self.comparison.a.readers) + len(table.b) * len(self.comparison.b.readers)
            self.later += max(records, options.least)
            if self.later > options.later:
                paired, places = outcome.paired, slice(place + 1)
                outcome.unopened, self.closed = len(paired) - place - 1, True
                outcome.paired = replace(paired, rows_a=paired.rows_a[places], rows_b=paired.rows_b[places])

    def end(self) -> RankOutcome:
        """The outcome, with its `changes` and the records of steps that were not opened.

        Where nothing else differed, and no result agreed there, the first step in which only causes did is listed.
        """
        if self.outcome.first is None and self.one_sided is not None:
            self._list_step(*self.one_sided, structure=True)
        self.outcome.changes = changes_of(self.structure)
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
        outcome.unused_note = outcome.unused_note or unused_note(table, chosen & (state == UNUSED))
        if outcome.first is None and not outcome.tolerated and (site := table.first_of(masks["within"])):
            outcome.tolerated = f"{what(site)} in step {table.step}"
        if not outcome.blind_site and (site := table.first_of(blind)):
            outcome.blind_site = f"{what(site)} in {'the evaluation of ' * site.evaluates}step {table.step}"

    def _count_unopened(self) -> None:
        """Add the records of steps with equal digests to the tally.

        As much as of the last common step is taken not to have been seen by run a. That step is blank if it has outputs
        but none that was observed, and neither a loss nor a parameter's gradient.
        """
        reader, counted, are = self.comparison.a, self.counted, self.comparison.alignment.are
        paired, tally = self.outcome.paired, self.outcome.tally  # as far as it was walked
        if not len(paired):
            return
        first, last = (reader.read(paired[place][0].step) for place in (0, -1))
        records = paired.records or len(first) + len(last) * (len(paired) - 1)
        if not counted.all():
            records = sum(int(counted[reader.read(entry.step).site].sum()) for entry, _ in paired)
        unopened, of_last, missing = records - tally["opened"], counted[last.site], unseen(last)
        blind = round(unopened * (missing & of_last).sum() / max(of_last.sum(), 1))
        outputs, shows = of_last & are(Kind.OUTPUT)[last.site], are(Kind.LOSS, Kind.GRAD)[last.site]
        blank = outputs.any() and not (shows | (outputs & ~missing)).any()
        tally.update(records=records, blind_both=blind, equal=unopened - blind, blank=int(blank))

    # --- divergences

    def _list_step(self, place: int, table: Table, *, structure: bool = False) -> None:
        """Count a diverging step, and list its divergences as far as the limit goes.

        Of the first such step also the divergence that leads, and the other origins; in it, saved files come last. A
        step in which only causes differ is added to the structure alone. Sets `begins` and `last`, unless the limit was
        reached before.

        Args:
            place: index of the step among the common ones.
            table: the step after all passes.
            structure: whether to list causes too.
        """
        comparison, outcome, limit = self.comparison, self.outcome, self.options.limit
        chosen, begins = table.keeping(table.chosen), outcome.first is None
        if not structure and self._add_causes(place, chosen):  # else no result says that it changed nothing
            return
        diverged, alone = len(chosen.in_order), [len(half.only) for half in chosen.halves]
        self.outcome.tally.update(steps_diverged=1, diverged=diverged, only_a=alone[0], only_b=alone[1])
        if self.options.want_map:
            if outcome.heat is None:
                outcome.heat = Heat(comparison.alignment, outcome.paired.steps.tolist())
            outcome.heat.add(place, chosen)
        if not begins and limit is not None and len(outcome.listed) >= limit:
            return
        step = Step(comparison, table, self._beginning_of(table), self.learned)
        place_of = {row: position for position, row in enumerate(table.in_order.tolist())}
        positions = [place_of[row] for row in chosen.in_order.tolist()]  # ordered by what was selected
        if begins:  # a file that is saved shows what was there before: it leads where nothing else differs
            positions.sort(key=lambda position: step.sites[position].kind is Kind.PRODUCT)
            lead = choose_lead(step, positions, self.structure, self.began, new_values=self.new_values)
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
        self.begins, self.last = step.begins.after(comparison.recorded_after_steps, table), table.step

    def _beginning_of(self, table: Table) -> Beginning:
        """What a step begins with; reads the step before, where both runs recorded it."""
        comparison, begins, before = self.comparison, self.begins, None
        if table.step - 1 in comparison.a and table.step_b - 1 in comparison.b:
            before, _ = table_at(comparison, self.learned, table.step - 1, table.step_b - 1)
            if self.last != table.step - 1:
                begins = begins.after(comparison.recorded_after_steps, before)
        elif self.last is not None:
            begins = begins.after(comparison.recorded_after_steps)
        return replace(begins, before=before, gap=lacks_start(comparison, table))

    def _add_causes(self, place: int, table: Table) -> bool:
        """Add the step's causes to the structure; returns whether it has any and nothing but causes differs.

        In that case also sets, as far as unset, `began` and `new_values`. Before the first divergence, where results do
        not show that nothing changed, it sets `one_sided`, or without any results on record `unrecorded` of the
        outcome.

        Args:
            place: index of the step among the common ones.
            table: its table, with only what was selected diverging.
        """
        causes = table.keeping(table.cause)
        if not causes.diverging.any():
            return False
        self.structure.add_causes(causes)
        if causes.diverging.sum() < table.diverging.sum():
            return False
        outcome = self.outcome
        self.began = self.began or table
        self.new_values = self.new_values or has_new_values(causes)
        undecided = outcome.first is None and not outcome.evaluation
        agree = results_agree(table)
        if undecided and (outcome.hidden or not agree):
            if agree is not None:
                self.one_sided = self.one_sided or (place, table)
            elif not all(TRAINED & observed_kinds(manifest) for manifest in self.comparison.manifests):
                outcome.unrecorded = True
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
    begins = beginning_at_resume(comparison.resume_point) if opened else Beginning()
    parts = (None, False, True) if evaluates else (None,)
    accounts = [Account(comparison, paired, begins, which) for which in parts]
    for place in range(len(paired) * bool(opened)) if comparison.floors else opened:  # all steps raise the floors
        entry_a, entry_b = paired[place]
        raise_floors(comparison, entry_a)
        if place in opened:
            table, learned = table_at(comparison, learned, entry_a.step, entry_b.step)
            for account in accounts:
                if not account.closed:
                    account.see(place, table, learned)
        if all(account.closed for account in accounts):
            break
    whole, *separate = [account.end() for account in accounts]
    whole.learned, whole.parts = learned, {bool(part.evaluation): part for part in separate}
    whole.resumption = None if comparison.options.narrowed else comparison.resumption
    return whole
