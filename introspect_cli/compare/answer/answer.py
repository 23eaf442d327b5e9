"""The answer from all ranks' outcomes: the earliest divergence explanation_of, with settings, findings and notes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.between import code_changes
from introspect_cli.compare.answer.causes import likely_words, mark_only_change, ranked_candidates, weighed_by_code
from introspect_cli.compare.answer.compared import notes_on
from introspect_cli.compare.answer.endings import cut_short
from introspect_cli.compare.answer.restored import head_of, origins_of, resumed_rightly, with_parts
from introspect_cli.compare.answer.verdict import agreement, diverges_words, separate_answers, subject_of
from introspect_cli.compare.reasons import ranks
from introspect_cli.compare.reasons.draws import unseeded_names
from introspect_cli.compare.reasons.explain import evidence_lines, explanation_of, lines_before
from introspect_cli.compare.reasons.judge import reason_named
from introspect_cli.compare.reasons.update import hyperparameter_changes_of
from introspect_cli.compare.reasons.view import View
from introspect_cli.compare.say import how_far, sentence, thing, told, what
from introspect_cli.compare.settings.beginning import find_first_event
from introspect_cli.compare.settings.documents import notes_on_some_ranks
from introspect_cli.compare.settings.settings import SAYS_NOTHING, Blame, setting_changes
from introspect_cli.compare.step.overview import strip_of
from introspect_cli.compare.terms.evidence import RANDOM, Known, Thing
from introspect_cli.compare.terms.names import owner_of
from introspect_cli.compare.terms.result import DiffResult, Divergence, Fact, Separate, SettingChange, Size, Verdict
from introspect_cli.compare.terms.table import OTHER
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.answer.compared import Compared
    from introspect_cli.compare.changes.statements import CodeChanges
    from introspect_cli.compare.step.outcome import RankOutcome
    from introspect_cli.compare.terms.result import Resumption


def answer_for(compared: Compared, *, bitwise: bool) -> DiffResult:
    """The whole answer from all ranks' outcomes: verdict and sentence, settings, findings, notes and counts.

    Args:
        compared: both runs and what came of each rank.
        bitwise: whether all of both runs was compared without tolerance, so that results that agree are unchanged.
    """
    best, by_rank = compared.best, compared.splits is None
    at = View(best, compared.outcomes) if best is not None and compared.diverges else None
    resumed = next((outcome.resumption for outcome in compared.outcomes if outcome.resumption is not None), None)
    code, settings = _code_and_settings(compared, at)
    agree = agreement(compared) if at is None else None
    # where no value differs, what differs in structure has changed nothing
    harmless = agree is not None and best is None and agree.verdict is Verdict.SAME
    structure = (compared.structure_if_same if harmless else compared.structure) if by_rank else ()
    notes = notes_on(compared, notes_on_some_ranks(compared.a, compared.b) if len(compared.outcomes) > 1 else [])
    answer = DiffResult(
        a=str(compared.a.path),
        b=str(compared.b.path),
        verdict=Verdict.DIVERGED,
        sentence="",
        settings=settings,
        findings=(*(one for one in (code, resumed) if one is not None), *structure),
        notes=tuple(dict.fromkeys(notes)),
        counts=compared.counts,
    )
    if agree is None:
        assert at is not None
        return _diverged_answer(answer, compared, at, resumed, compared.unchanged if by_rank and bitwise else "")
    return replace(
        answer,
        verdict=agree.verdict,
        sentence=_with_resumption(resumed, agree.verdict, agree.sentence) if resumed is not None else agree.sentence,
        training=agree.training,
        evaluation=agree.evaluation,
    )


def _with_resumption(resumed: Resumption, verdict: Verdict, agreed: str) -> str:
    """The sentence `agreed` of runs that agree, with one on what the resumed run restored.

    That one comes first, or after `agreed` where the verdict is UNDECIDED.
    """
    if verdict is Verdict.UNDECIDED:
        return f"{agreed} {head_of(resumed)}"
    return f"{head_of(resumed) if resumed.lost else resumed_rightly(resumed)} {agreed}"


def _code_and_settings(compared: Compared, at: View | None) -> tuple[CodeChanges | None, tuple[SettingChange, ...]]:
    """How the source differs, and the settings that differ, the heaviest first.

    The first is None where a run has no digests of its files. Also sets `at.settings`; `at` is None where nothing
    diverges. May run git to read texts.
    """
    a, b = compared.a, compared.b
    code, offset = code_changes(a, b, at, compared.ending), any(outcome.offset for outcome in compared.outcomes)
    if at is None:
        return code, weighed_by_code(setting_changes(a, b, Blame(offset=offset)), code)
    tuned = hyperparameter_changes_of(at) if at.cause.reason == "optimizer" else at.hyperparameters
    scheduled = any(change.about in _SCHEDULED for change in tuned)  # of the rest, no scheduler makes anything
    reason = reason_named(at.cause.reason)
    blame = Blame(
        reason.weights,
        reason.names,
        tuned,
        at.rounding,
        at.blamed,
        at.fed,
        scheduled or at.no_rates,
        offset,
        stepped=_may_have_stepped(at),
        more=at.first.size is Size.MORE,
    )
    differ = setting_changes(a, b, blame)
    if not (at.rounding or _is_by_chance(at)):
        code = mark_only_change(code, differ)
    at.settings = weighed_by_code(differ, code, rounding=at.rounding and not tuned)
    return code, at.settings


_SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""Hyper-parameters that schedulers change."""


def _is_by_chance(at: View) -> bool:
    """Whether randomness alone may explain the divergence.

    That is an unseeded generator; a random state in the first step without a seeding or draw that differs before it; or
    an initial value where the random state at the start is not known to be equal.
    """
    if unseeded_names(at):
        return True
    if at.cause.reason == "rng" and at.is_first_step:
        return not any(find_first_event(at.runs, at.first.rank, at.site.fqn))
    at_start = at.cause.rests_on(Thing.RANDOM_AT_START) if at.cause.reason == "initial" else ()
    return any(fact.known is not Known.EQUAL for fact in at_start)


def _may_have_stepped(at: View) -> bool:
    """Whether an optimizer may have stepped before the first divergence, also in a process that was not recorded.

    False only in the first compared step, if that is step 0, for the first call of a record that is a gradient or of a
    phase other than start, optimizer and evaluation.
    """
    site = at.site
    after = site.phase in {Phase.START, Phase.OPTIMIZER, Phase.EVAL} and site.kind is not Kind.GRAD
    return after or site.call > 0 or not at.is_first_step or at.first.step > 0


def _diverged_answer(
    answer: DiffResult, compared: Compared, at: View, resumed: Resumption | None, unchanged: str
) -> DiffResult:
    """The answer where the runs diverge: sentence, evidence, causes, listed divergences and overviews.

    Args:
        answer: what is known whatever the verdict.
        compared: both runs and what came of each rank.
        at: the first divergence.
        resumed: what a resumed run restored; None where neither is.
        unchanged: sentence on results that agree all the same; "" for none.
    """
    options, first, best, code = compared.options, at.first, at.outcome, answer.code
    training, evaluation = separate_answers(compared)
    story = explanation_of(at)
    causes = ranked_candidates(story.findings, code, answer.settings)
    place, beside = _place_of_both(at, training, evaluation)
    likely = likely_words(story.findings, () if resumed is not None and resumed.lost else causes)
    why = sentence(story.head, story.findings, [text for text, _ in likely], (*story.more, *filter(None, [beside])))
    whole, leads, note = _with_ending(compared, at, place, why)
    begins = f"{head_of(resumed)} " if resumed is not None else ""
    origins = origins_of(best, compared.outcomes) if compared.splits is None or resumed is not None else ()
    origins = with_parts(resumed, first, best.lost, origins) if resumed is not None else origins
    before, nothing = lines_before(at), _nothing_changed_words(at, code)
    return replace(
        answer,
        sentence=begins + whole,
        head=begins + (whole if leads else f"{place}: {story.head}"),
        also=tuple(filter(None, (*story.more, _beyond_rounding_words(at), beside, *nothing))),
        rests_on=tuple(
            Fact(fact.thing.name.lower(), fact.known.name.lower(), fact.of, fact.inside, thing(fact))
            for fact in story.evidence
        ),
        explains=story.findings,
        causes=causes,
        evidence=(*before, *evidence_lines(at, story), *nothing, *([unchanged] if unchanged else ())),
        before=before,
        first=first,
        candidates=tuple(sorted(at.peers, key=ranks.order_of_ranks)),
        divergences=_listed_divergences(compared.outcomes, first, None if options.whole_step else options.limit),
        findings=(*answer.findings, *origins),
        notes=tuple(dict.fromkeys(filter(None, (*answer.notes, note)))),
        map=best.heat.result() if best.heat is not None else None,
        defined_in=_defined_in(at),
        strip=strip_of(at.step, first.site),
        training=training or Separate(Verdict.DIVERGED, whole, first),
        evaluation=evaluation,
    )


def _defined_in(at: View) -> str:
    """`file:line` of the class of the first of these modules on record: the site's, its tensor's owner, the cause's.

    a's module tree is asked before b's; "" where neither has any of them.
    """
    names = at.site.fqn, owner_of(at.site.fqn), at.cause.module
    found = (tree[name] for name in names for tree in at.step.modules if name in tree)
    return next((module.source for module in found), "")


def _beyond_rounding_words(at: View) -> str:
    """Sentence on the step's first listed divergence that is more than rounding, where the first one is rounding.

    "" otherwise.
    """
    listed = at.outcome.listed if at.rounding else []
    more = next((one for one in listed if one.step == at.first.step and one.size is Size.MORE), None)
    return told("first-more", name=what(more.site, more.module_class), far=how_far(more)) if more else ""


def _nothing_changed_words(at: View, code: CodeChanges | None) -> tuple[str, ...]:
    """One sentence that no recorded source, setting or package differs, and on the causes that remain; () otherwise.

    () where a setting other than hardware weighs over `SAYS_NOTHING`, a source file differs or could not be read, or a
    run lacks one of the documents.
    """
    kept = [run.settings for run in at.runs]
    if code is None or any(name not in settings for settings in kept for name in ("sources", "packages", "command")):
        return ()
    differ = [change for change in at.settings if change.weight > SAYS_NOTHING]
    if code.ranked or code.unread or any(change.source != "hardware" for change in differ):
        return ()
    random = [evidence.known for evidence in at.cause.rests_on(*RANDOM)]
    seen = bool(random) and all(known is Known.EQUAL for known in random)
    quiet = "comments, names" if code.in_comments or code.in_names else ""
    return (told("nothing-changed", quiet=quiet, random=at.cause.reason == "rng" or not seen),)


def _listed_divergences(
    outcomes: Sequence[RankOutcome], first: Divergence, limit: int | None
) -> tuple[Divergence, ...]:
    """Divergences of all ranks, `first` first, the rest by step, rank and sequence; the first `limit`, all for None."""
    everything = [divergence for outcome in outcomes for divergence in outcome.listed]
    everything.sort(key=lambda d: (d is not first, d.step, d.rank, d.sequence))
    return tuple(everything if limit is None else everything[:limit])


# --- training and evaluation


def _place_of_both(at: View, training: Separate | None, evaluation: Separate | None) -> tuple[str, str]:
    """The place of the first divergence (step and ranks), and a sentence on the other of training and evaluation.

    The sentence is "" where evaluation was not compared alone, and where only evaluation diverges: the place says that.

    Args:
        at: the first divergence.
        training: the answer for training alone; None where it was not compared alone.
        evaluation: the answer for evaluation alone; None likewise.
    """
    first = at.first
    where = {
        "step": first.step_words,
        "ranks": ranks.ranks_words(at),
        "recomputed": first.site.phase is Phase.RECOMPUTE,
    }
    place = told("place", **where, evaluation=first.site.evaluates)
    if training is None or evaluation is None:
        return place, ""
    if not at.site.evaluates:
        return place, _other_part_words(evaluation, "Evaluation")
    if training.verdict is not Verdict.SAME:
        return place, _other_part_words(training, "Training")
    subject = subject_of("Training", narrowed=at.narrowed)
    return told("place-evaluation", subject=subject, extent=training.extent, **where), ""


def _other_part_words(separate: Separate, name: str) -> str:
    """Sentence on training or evaluation (`name`), to follow the one on the first divergence.

    That it diverges too, and where; else the sentence of its verdict, after `name:` where that is UNDECIDED.
    """
    if separate.verdict is Verdict.UNDECIDED:
        return f"{name}: {separate.sentence[0].lower()}{separate.sentence[1:]}"
    if separate.first is not None:
        return diverges_words(name, separate.first, too=True)
    return separate.sentence


# --- a run that ended by an exception


def _with_ending(compared: Compared, at: View, place: str, why: str) -> tuple[str, bool, str]:
    """The whole sentence, whether an exception that ended a run leads it, and a note on one that came later, or "".

    An exception leads where it cut off the step of the first divergence; it stands alone if the divergence is a record
    that this run lacks since.

    Args:
        compared: both runs and what came of each rank.
        at: the first divergence.
        place: the clause on its place.
        why: the sentence that explains it.
    """
    end, cut, whole = compared.ending, cut_short(at), f"{place}: {why}"
    if end is None or cut is None:
        return whole, False, "" if end is None else told("raised-later", run=end.side, words=end.words)
    step = at.first.step_words
    cut_off = told("raised-within", run=cut.side, step=step, other=OTHER[cut.side], words=cut.words)
    return cut_off if at.side_without == cut.side else f"{cut_off} {whole}", True, ""
