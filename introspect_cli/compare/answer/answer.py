"""The answer from all ranks' outcomes: the earliest divergence explained, with settings, findings and notes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.compare.answer.between import code_changes
from introspect_cli.compare.answer.causes import likely_words, ranked_candidates, weighed_by_code, with_only_change
from introspect_cli.compare.answer.compared import notes_on
from introspect_cli.compare.answer.endings import cut_short
from introspect_cli.compare.answer.restored import head_of, origins_of, resumed_rightly, with_parts
from introspect_cli.compare.answer.verdict import agreement, diverges_words, separately, subject_of
from introspect_cli.compare.reasons import ranks
from introspect_cli.compare.reasons.draws import unseeded_names
from introspect_cli.compare.reasons.explain import before_it, evidence_lines, explained
from introspect_cli.compare.reasons.judge import reason_named
from introspect_cli.compare.reasons.update import hyperparameter_changes_of
from introspect_cli.compare.reasons.view import View
from introspect_cli.compare.say import sentence, told
from introspect_cli.compare.settings.beginning import find_first_event
from introspect_cli.compare.settings.documents import on_some_ranks
from introspect_cli.compare.settings.settings import SAYS_NOTHING, Blame, setting_changes
from introspect_cli.compare.step.overview import strip_of
from introspect_cli.compare.terms.evidence import RANDOM, Known, Thing
from introspect_cli.compare.terms.names import owner_of, suggest_renames
from introspect_cli.compare.terms.reach import leaves_words, measured_by_one
from introspect_cli.compare.terms.result import DiffResult, Divergence, Fact, Separate, SettingChange, Size, Verdict
from introspect_cli.compare.terms.table import EQUAL, OTHER, WITHIN
from introspect_cli.compare.terms.words import how_far, thing, what
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.answer.compared import Compared
    from introspect_cli.compare.changes.clues import CodeChanges
    from introspect_cli.compare.step.outcome import RankOutcome
    from introspect_cli.compare.terms.findings import Resumption
    from introspect_cli.compare.terms.result import Beside


def answer_for(compared: Compared, *, bitwise: bool) -> DiffResult:
    """The whole answer from all ranks' outcomes: verdict and sentence, settings, findings, notes and counts.

    `bitwise` says that all of both runs was compared without tolerance, so that results that agree are unchanged.
    """
    best, by_rank = compared.best, compared.splits is None
    at = View(best, compared.outcomes) if best is not None and compared.diverges else None
    resumed = next((outcome.resumption for outcome in compared.outcomes if outcome.resumption is not None), None)
    code, settings = _code_and_settings(compared, at)
    # where no value differs, what differs in structure has changed nothing
    findings: list[Beside] = [one for one in (code, compared.reach, resumed) if one is not None]
    notes = notes_on(compared, on_some_ranks(compared.a, compared.b) if len(compared.outcomes) > 1 else [])
    if at is not None:
        findings += compared.structure if by_rank else ()
        unchanged = compared.unchanged if by_rank and bitwise else ""
        return _diverging(compared, at, code, settings, findings, notes, unchanged)
    agree = agreement(compared)
    harmless = best is None and agree.verdict is Verdict.SAME
    findings += (compared.harmless_structure if harmless else compared.structure) if by_rank else ()
    return DiffResult(
        a=str(compared.a.path),
        b=str(compared.b.path),
        verdict=agree.verdict,
        sentence=_agreed_since(resumed, agree.verdict, agree.sentence) if resumed is not None else agree.sentence,
        settings=settings,
        findings=tuple(findings),
        notes=tuple(dict.fromkeys(notes)),
        counts=compared.counts,
        training=agree.training,
        evaluation=agree.evaluation,
    )


def _agreed_since(resumed: Resumption, verdict: Verdict, agreed: str) -> str:
    """The sentence of runs that agree, with what the resumed one restored before it, or after an undecided one."""
    if verdict is Verdict.UNDECIDED:
        return f"{agreed} {head_of(resumed)}"
    return f"{head_of(resumed) if resumed.lost else resumed_rightly(resumed)} {agreed}"


def _code_and_settings(compared: Compared, at: View | None) -> tuple[CodeChanges | None, tuple[SettingChange, ...]]:
    """How the source differs (None as in `code_changes`), and differing settings, the heaviest first.

    Sets `at.settings`.
    """
    a, b = compared.a, compared.b
    code, offset = code_changes(a, b, at, compared.ending), any(outcome.offset for outcome in compared.outcomes)
    if at is None:
        return code, weighed_by_code(setting_changes(a, b, Blame(offset=offset)), code)
    tuned = hyperparameter_changes_of(at) if at.cause.reason == "optimizer" else at.hyperparameters
    scheduled = any(change.about in _SCHEDULED for change in tuned)  # of the rest, no scheduler makes anything
    blame = Blame(
        reason_named(at.cause.reason),
        tuned,
        at.rounding,
        at.blamed,
        at.fed,
        scheduled or at.no_rates,
        offset,
        stepped=_stepped(at),
        more=at.first.size is Size.MORE,
    )
    differ = setting_changes(a, b, blame)
    if not (at.rounding or _by_chance(at)):
        code = with_only_change(code, differ)
    at.settings = weighed_by_code(differ, code, rounding=at.rounding and not tuned)
    return code, at.settings


_SCHEDULED = frozenset({"lr", "momentum", "betas"})
"""Hyper-parameters that schedulers change."""


def _by_chance(at: View) -> bool:
    """Whether randomness alone explains the divergence: unseeded, or random states not proved equal at the start."""
    if unseeded_names(at):
        return True
    if at.cause.reason == "rng" and at.is_first_step:
        return not any(find_first_event(at.runs, at.first.rank, at.site.fqn))
    at_start = at.cause.rests_on(Thing.RANDOM_AT_START) if at.cause.reason == "initial" else ()
    return any(fact.known is not Known.EQUAL for fact in at_start)


def _stepped(at: View) -> bool:
    """Whether an optimizer step may precede the first divergence, also one in an unrecorded earlier process."""
    site = at.site
    after = site.phase in {Phase.START, Phase.OPTIMIZER, Phase.EVAL} and site.kind is not Kind.GRAD
    return after or site.call > 0 or not at.is_first_step or at.first.step > 0


def _diverging(
    compared: Compared,
    at: View,
    code: CodeChanges | None,
    settings: tuple[SettingChange, ...],
    findings: Sequence[Beside],
    notes: Sequence[str],
    unchanged: str,
) -> DiffResult:
    """The answer where the runs diverge: sentence, evidence, causes, listed divergences and overviews."""
    options, reach, first, best = compared.options, compared.reach, at.first, at.outcome
    training, evaluation = separately(compared)
    story = explained(at)
    causes = ranked_candidates(story.findings, code, settings)
    place, beside = _place_of_both(at, training, evaluation)
    place = (leaves_words(reach, first) if reach is not None else "") + place
    resumed = next((one.resumption for one in compared.outcomes if one.resumption is not None), None)
    likely = likely_words(story.findings, () if resumed is not None and resumed.lost else causes)
    why = sentence(story.head, story.findings, [text for text, _ in likely], (*story.more, *filter(None, [beside])))
    ended = _at_the_end(compared, at, place, why)
    begins = f"{head_of(resumed)} " if resumed is not None else ""
    origins = origins_of(best, compared.outcomes) if compared.splits is None or resumed is not None else ()
    origins = with_parts(resumed, first, best.lost, origins) if resumed is not None else origins
    before, nothing = before_it(at), _nothing_changed(at, code)
    notes = [*notes, measured_by_one(reach) if reach is not None else "", ended.note]
    return DiffResult(
        a=str(compared.a.path),
        b=str(compared.b.path),
        verdict=Verdict.DIVERGED,
        sentence=begins + ended.sentence,
        head=begins + (ended.sentence if ended.leads else f"{place}: {story.head}"),
        also=tuple(filter(None, (*story.more, _first_more(at), beside, *nothing))),
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
        divergences=_listed(compared.outcomes, first, None if options.whole_step else options.limit),
        settings=settings,
        findings=(*findings, *origins),
        notes=tuple(dict.fromkeys(filter(None, notes))),
        suggestions=suggest_renames(best.paired.a, best.paired.b, best.match.asked)
        if at.cause.reason in {"structure", "initial"}
        else (),
        counts=compared.counts,
        map=best.heat.result() if best.heat is not None else None,
        defined_in=_defined_in(at),
        strip=strip_of(at.step, first.site),
        training=training or Separate(Verdict.DIVERGED, ended.sentence, first),
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
    return told("first-more", name=what(more.site, more.module_class), far=how_far(more)) if more else ""


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
    quiet = "comments, names" if code.in_comments or code.in_names else ""
    if at.cause.reason == "rng":
        return (told("nothing-changed-seed", quiet=quiet),)
    random = [evidence.known for evidence in at.cause.rests_on(*RANDOM)]
    seen = bool(random) and all(known is Known.EQUAL for known in random)
    return (told("nothing-changed" if seen else "nothing-changed-unseen", quiet=quiet),)


def _listed(outcomes: Sequence[RankOutcome], first: Divergence, limit: int | None) -> tuple[Divergence, ...]:
    """Divergences of all ranks: `first`, then sorted by step, rank and sequence; at most `limit`.

    No order between ranks within a step is meant.
    """
    everything = [divergence for outcome in outcomes for divergence in outcome.listed]
    everything.sort(key=lambda d: (d is not first, d.step, d.rank, d.sequence))
    return tuple(everything if limit is None else everything[:limit])


# --- training and evaluation


def _place_of_both(at: View, training: Separate | None, evaluation: Separate | None) -> tuple[str, str]:
    """The place of the first divergence, and a sentence on the other part (training or evaluation); "" for none."""
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
        return place, _beside(evaluation, "Evaluation")
    if training.verdict is not Verdict.SAME:
        return place, _beside(training, "Training")
    subject = subject_of("Training", narrowed=at.narrowed)
    return told("place-evaluation", subject=subject, extent=training.extent, **where), ""


def _beside(separate: Separate, name: str) -> str:
    """The sentence on training or evaluation (`name`) that follows the sentence on the first divergence."""
    if separate.verdict is Verdict.UNDECIDED:
        return f"{name}: {separate.sentence[0].lower()}{separate.sentence[1:]}"
    if separate.first is not None:
        return diverges_words(name, separate.first, too=True)
    return separate.sentence


# --- a run that ended by an exception


class _Ended(NamedTuple):
    """The sentence with the exception that ended a run.

    Attributes:
        sentence: the whole answer.
        leads: whether the exception comes first, as it cut off the step of the first divergence.
        note: the exception, where it came later; "" otherwise.
    """

    sentence: str
    leads: bool = False
    note: str = ""


def _at_the_end(compared: Compared, at: View, place: str, why: str) -> _Ended:
    """The sentence, reworded where one run ended by an exception.

    If it cut off the step of the first divergence, the exception comes first; if the divergence is only a record
    missing since, it is all.
    """
    end, cut, whole = compared.ending, cut_short(at), f"{place}: {why}"
    if end is None or cut is None:
        return _Ended(whole, note="" if end is None else told("raised-later", run=end.side, words=end.words))
    cut_off = told(
        "raised-within",
        run=cut.side,
        step=at.first.step_words,
        other=OTHER[cut.side],
        words=cut.words,
        last=_last_agreed(at),
    )
    return _Ended(cut_off if at.lacks == cut.side else f"{cut_off} {whole}", leads=True)


def _last_agreed(at: View) -> str:
    """The last record of the step before the first divergence that agrees, in words; "" where none does."""
    step = at.step
    agree = np.isin(step.state, (EQUAL, WITHIN)) & (step.table.order_of < at.first.sequence)
    numbers = np.flatnonzero(agree)
    if not len(numbers):
        return ""
    last = int(numbers[np.argmax(step.table.order_of[numbers])])
    return what(step.alignment.site(last))
