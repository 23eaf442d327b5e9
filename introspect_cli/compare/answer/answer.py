"""The answer from all ranks' outcomes: the earliest divergence explained, with settings, findings and notes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.answer.between import code_changes
from introspect_cli.compare.answer.causes import by_exclusion, causes_of, likely_words, with_code
from introspect_cli.compare.answer.compared import notes_on
from introspect_cli.compare.answer.endings import Raised, cut_short
from introspect_cli.compare.answer.verdict import agreeing, diverges_words, separately, subject_of
from introspect_cli.compare.reasons import ranks
from introspect_cli.compare.reasons.draws import unseeded
from introspect_cli.compare.reasons.explain import Explained, before_it, evidence_lines, explained
from introspect_cli.compare.reasons.judge import reason_named
from introspect_cli.compare.reasons.update import changes
from introspect_cli.compare.reasons.view import View
from introspect_cli.compare.settings.beginning import first_difference
from introspect_cli.compare.settings.documents import on_some_ranks
from introspect_cli.compare.settings.settings import SAYS_NOTHING, Blame, setting_changes
from introspect_cli.compare.step.overview import strip_of
from introspect_cli.compare.terms.evidence import RANDOM, Known, Thing
from introspect_cli.compare.terms.names import owner_of, suggest_renames
from introspect_cli.compare.terms.reach import leaves_words, measured_by_one
from introspect_cli.compare.terms.result import (
    Candidate,
    DiffResult,
    Divergence,
    Fact,
    Separate,
    SettingChange,
    Size,
    Verdict,
)
from introspect_cli.compare.terms.table import EQUAL, OTHER, WITHIN
from introspect_cli.compare.terms.words import how_far, thing, what
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.answer.compared import Compared
    from introspect_cli.compare.changes.clues import CodeChanges
    from introspect_cli.compare.step.outcome import RankOutcome


def answer_for(compared: Compared) -> DiffResult:
    """The whole answer from all ranks' outcomes: verdict and sentence, settings, findings, notes and counts."""
    best = compared.best
    at = View(best, compared.outcomes) if best is not None and compared.diverges else None
    some_ranks = on_some_ranks(compared.a, compared.b) if len(compared.outcomes) > 1 else []
    code, settings = _code_and_settings(compared, at)
    answer = agreeing(compared) if at is None else _diverging(compared, at, code, separately(compared))
    # where no value differs, what differs in structure has changed nothing
    harmless = best is None and answer.verdict is Verdict.SAME
    structure = compared.harmless_structure if harmless else compared.structure
    findings = (code, compared.reach, *(structure if compared.splits is None else ()))
    return replace(
        answer,
        settings=settings,
        findings=tuple(one for one in findings if one is not None),
        notes=tuple(dict.fromkeys((*notes_on(compared, some_ranks), *answer.notes))),
        counts=compared.counts,
    )


def _code_and_settings(compared: Compared, at: View | None) -> tuple[CodeChanges | None, tuple[SettingChange, ...]]:
    """How the source differs (None as in `code_changes`), and differing settings, the heaviest first.

    Sets `at.settings`.
    """
    a, b = compared.a, compared.b
    code, offset = code_changes(a, b, at, compared.ending), any(outcome.offset for outcome in compared.outcomes)
    if at is None:
        return code, with_code(setting_changes(a, b, Blame(offset=offset)), code)
    tuned = changes(at) if at.cause.reason == "optimizer" else at.hyperparameters
    scheduled = any(change.about in _SCHEDULED for change in tuned)  # of the rest, no scheduler makes anything
    reason, rates = reason_named(at.cause.reason), scheduled or at.no_rates
    blame = Blame(
        reason,
        tuned,
        at.rounding,
        at.blamed,
        at.fed,
        rates,
        offset,
        stepped=_stepped(at),
        more=at.first.size is Size.MORE,
    )
    differ = setting_changes(a, b, blame)
    if not (at.rounding or _by_chance(at)):
        code = by_exclusion(code, differ)
    at.settings = with_code(differ, code, rounding=at.rounding and not tuned)
    return code, at.settings


def _by_chance(at: View) -> bool:
    """Whether randomness alone explains the divergence: unseeded, or random states not proved equal at the start."""
    if unseeded(at):
        return True
    if at.cause.reason == "rng" and at.is_first_step:
        return not any(first_difference(at.runs, at.first.rank, at.site.fqn))
    at_start = at.cause.rests_on(Thing.RANDOM_AT_START) if at.cause.reason == "initial" else ()
    return any(fact.known is not Known.EQUAL for fact in at_start)


def _diverging(
    compared: Compared, at: View, code: CodeChanges | None, separate: tuple[Separate | None, Separate | None]
) -> DiffResult:
    """The answer where the runs diverge: sentence, evidence, causes, listed divergences and overviews."""
    options, reach, first, best = compared.options, compared.reach, at.first, at.outcome
    training, evaluation = separate
    told = explained(at)
    causes = causes_of(told, code, at.settings)
    place, other = _place_of_both(at, training, evaluation)
    if reach is not None:
        place = leaves_words(reach, first) + place
    why = " ".join(filter(None, (told.sentence(_likely(at, told, causes)), other)))
    head = f"{place}: {told.head}"
    end, why, later = _at_the_end(at, compared.ending, place, why)
    sentence = f"{end}: {why}"
    before, nothing = before_it(at), _nothing_changed(at, code)
    return DiffResult(
        a=str(compared.a.path),
        b=str(compared.b.path),
        verdict=Verdict.DIVERGED,
        sentence=sentence,
        head=head if end == place else sentence,
        also=tuple(filter(None, (*told.more, _first_more(at), other, *nothing))),
        rests_on=tuple(
            Fact(fact.thing.name.lower(), fact.known.name.lower(), fact.of, fact.inside, thing(fact)[0])
            for fact in told.evidence
        ),
        explains=told.findings,
        causes=causes,
        evidence=(*before, *evidence_lines(at, told), *nothing),
        before=before,
        first=first,
        candidates=tuple(sorted(at.peers, key=ranks.upstream)),
        divergences=_listed(compared.outcomes, first, None if options.whole_step else options.limit),
        notes=tuple(note for note in (measured_by_one(reach) if reach is not None else "", later) if note),
        suggestions=suggest_renames(best.paired.a, best.paired.b, best.match.asked)
        if at.cause.reason in {"structure", "initial"}
        else (),
        map=best.heat.result() if best.heat is not None else None,
        defined_in=_defined_in(at),
        strip=strip_of(at.step, first.site),
        training=training or Separate(Verdict.DIVERGED, sentence, first),
        evaluation=evaluation,
    )


def _defined_in(at: View) -> str:
    """`file:line` of the class of the module of the first divergence, of its tensor's module, or of its cause's."""
    names = at.site.fqn, owner_of(at.site.fqn), at.cause.module
    found = (tree[name] for name in names for tree in at.step.modules if name in tree)
    return next((module.source for module in found), "")


def _first_more(at: View) -> str:
    """The first listed divergence of the step beyond rounding, where the first one is rounding; "" for none."""
    listed = at.outcome.listed if at.rounding else []
    more = next((one for one in listed if one.step == at.first.step and one.size is Size.MORE), None)
    return f"First that is more than rounding: {what(more.site, more.module_class)}{how_far(more)}." if more else ""


def _likely(at: View, told: Explained, causes: Sequence[Candidate]) -> list[str]:
    """The likeliest causes in words; [] where a resumed run lost a part that matters."""
    resumed = at.outcome.resumption
    settled = {"hyperparameter", "optimizers"} if at.cause.reason == "optimizer" else set()
    strong = {(one.source, one.name) for one in at.settings if one.explains and one.weight >= _STRONG}
    return [] if resumed is not None and resumed.lost else likely_words(told, causes, strong, settled)


_STRONG = 0.8
_SCHEDULED = frozenset({"lr", "momentum", "betas"})


def _nothing_changed(at: View, code: CodeChanges | None) -> tuple[str, ...]:
    """One sentence that no recorded source, setting or package differs, and the causes that remain.

    () where anything of weight differs, sources are unread, or documents are missing.
    """
    kept = [run.settings for run in at.runs]
    if code is None or any(name not in settings for settings in kept for name in ("sources", "packages", "command")):
        return ()
    differ = [change for change in at.settings if change.weight > SAYS_NOTHING]
    if code.ranked or code.unread or any(change.source != "hardware" for change in differ):
        return ()
    comments = code.in_comments or code.in_names
    text = f"No source file, setting or package on record differs{', but for comments and names' * bool(comments)}"
    random = [evidence.known for evidence in at.cause.rests_on(*RANDOM)]
    left = ["a race of threads or workers", "the hardware", "a file that the script reads"]
    if at.cause.reason == "rng":
        left = ["randomness, from a generator that nothing on record seeded"]
    elif not (random and all(known is Known.EQUAL for known in random)):
        left.insert(0, "randomness (no random state is on record there)")
    return (f"{text}. What is left: {', '.join(left)}.",)


def _stepped(at: View) -> bool:
    """Whether an optimizer step may precede the first divergence, also one in an unrecorded earlier process."""
    site = at.site
    after = site.phase in {Phase.START, Phase.OPTIMIZER, Phase.EVAL} and site.kind is not Kind.GRAD
    return after or site.call > 0 or not at.is_first_step or at.first.step > 0


def _listed(outcomes: Sequence[RankOutcome], first: Divergence, limit: int | None) -> tuple[Divergence, ...]:
    """Divergences of all ranks: `first`, then sorted by step, rank and sequence; at most `limit`.

    No order between ranks within a step is meant.
    """
    everything = [divergence for outcome in outcomes for divergence in outcome.listed]
    everything.sort(key=lambda d: (d is not first, d.step, d.rank, d.sequence))
    return tuple(everything if limit is None else everything[:limit])


def _place(at: View, head: str = "First divergence at") -> str:
    """The place in words: `head`, step, rank, and whether in a recomputation or an evaluation."""
    first = at.first
    which = ranks.where(at)
    where = first.step_words + (f", {which}" if which else "")
    if first.site.phase is Phase.RECOMPUTE:
        where += ", recomputed"
    elif first.site.evaluates and "evaluation" not in head:
        where += ", in evaluation"
    return f"{head} {where}"


# --- training and evaluation


def _place_of_both(at: View, training: Separate | None, evaluation: Separate | None) -> tuple[str, str]:
    """The place of the first divergence, and a sentence on the other part (training or evaluation); "" for none."""
    if training is None or evaluation is None:
        return _place(at), ""
    if at.site.evaluates and training.verdict is Verdict.SAME:
        subject = subject_of("Training", narrowed=at.narrowed)
        return _place(at, f"{subject} the same ({training.extent}); evaluation diverges at"), ""
    other = _beside(training, "Training") if at.site.evaluates else _beside(evaluation, "Evaluation")
    return _place(at), other


def _beside(separate: Separate, name: str) -> str:
    """The sentence on training or evaluation (`name`) that follows the sentence on the first divergence."""
    if separate.verdict is Verdict.UNDECIDED:
        return f"{name}: {separate.sentence[0].lower()}{separate.sentence[1:]}"
    if separate.first is not None:
        return diverges_words(name, separate.first, too=True)
    return separate.sentence


# --- a run that ended by an exception


def _at_the_end(at: View, end: Raised | None, place: str, why: str) -> tuple[str, str, str]:
    """Place, why and a note ("" for none), reworded where one run ended by an exception.

    If it cut off the step of the first divergence, the exception comes first; if the divergence is only a record
    missing since, it is all.
    """
    if end is None:
        return place, why, ""
    cut = cut_short(at)
    if cut is None:
        return place, why, f"Run {end.side} ended by an exception, after the first divergence: {end.words}."
    end = cut
    agreed = _last_agreed(at)
    until = f"The last record that agrees is {agreed}."
    if not agreed:
        until = "In this step nothing agrees before."
    where = f"Run {end.side} ended by an exception in {at.first.step_words} where run {OTHER[end.side]} goes on"
    how = f"{end.words}. {until}"
    return (where, how, "") if at.lacks == end.side else (f"{where}: {how} {place}", why, "")


def _last_agreed(at: View) -> str:
    """The last record of the step before the first divergence that agrees, in words; "" where none does."""
    step = at.step
    agree = np.isin(step.state, (EQUAL, WITHIN)) & (step.table.order_of < at.first.sequence)
    numbers = np.flatnonzero(agree)
    if not len(numbers):
        return ""
    last = int(numbers[np.argmax(step.table.order_of[numbers])])
    return what(step.alignment.site(last))
