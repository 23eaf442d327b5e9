"""The ranks' outcomes as one answer: the earliest divergence with its sentence, settings beside it, notes below."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.answer.between import code_changes
from introspect_cli.compare.answer.compared import notes_on
from introspect_cli.compare.answer.endings import Raised, cut_short
from introspect_cli.compare.answer.verdict import agreeing, diverges_words, separately, subject_of
from introspect_cli.compare.reasons import ranks
from introspect_cli.compare.reasons.base import reason_named
from introspect_cli.compare.reasons.copies import copies_words
from introspect_cli.compare.reasons.random_state import draws_before, unseeded, unseeded_sentence
from introspect_cli.compare.reasons.ranks import together, upstream
from introspect_cli.compare.reasons.scene import Scene
from introspect_cli.compare.reasons.split import Split
from introspect_cli.compare.reasons.update import changes, tuned
from introspect_cli.compare.settings.beginning import MAY_REST_ON_THEM, first_draw, script_generators
from introspect_cli.compare.settings.changed_files import by_exclusion, with_code
from introspect_cli.compare.settings.differences import describe
from introspect_cli.compare.settings.documents import on_some_ranks
from introspect_cli.compare.settings.settings import SAYS_NOTHING, Blame, setting_changes
from introspect_cli.compare.step.overview import strip_of, tree_of
from introspect_cli.compare.terms.evidence import RANDOM, Known, Thing
from introspect_cli.compare.terms.names import suggest_renames
from introspect_cli.compare.terms.reach import leaves_words, measured_by_one
from introspect_cli.compare.terms.result import DiffResult, Divergence, Separate, SettingChange, Verdict
from introspect_cli.compare.terms.table import EQUAL, OTHER, WITHIN
from introspect_cli.compare.terms.words import lines, often, what
from introspect_cli.records import Kind, Phase
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.answer.compared import Compared
    from introspect_cli.compare.changes.clues import CodeChanges
    from introspect_cli.compare.step.outcome import RankOutcome


def answer_for(compared: Compared) -> DiffResult:
    """Put the ranks' outcomes together."""
    best = compared.best
    scene = Scene(best, compared.outcomes) if best is not None and compared.diverges else None
    some_ranks = on_some_ranks(compared.a, compared.b) if len(compared.outcomes) > 1 else []
    code, settings = _code_and_settings(compared, scene)
    answer = agreeing(compared) if scene is None else _diverging(compared, scene, code, separately(compared))
    # where no value differs, what differs in structure has changed nothing
    harmless = best is None and answer.verdict is Verdict.SAME
    structure = compared.harmless_structure if harmless else compared.structure
    findings = (code, compared.reach, *(structure if compared.splits is None else ()))
    return replace(
        answer,
        settings=settings,
        findings=tuple(one for one in findings if one is not None),
        notes=(*notes_on(compared, some_ranks), *answer.notes),
        counts=compared.counts,
    )


def _code_and_settings(compared: Compared, scene: Scene | None) -> tuple[CodeChanges | None, tuple[SettingChange, ...]]:
    """How the source differs, and the settings that do, the strongest explanation first; sentences may name these."""
    a, b = compared.a, compared.b
    code, offset = code_changes(a, b, scene, compared.ending), any(outcome.offset for outcome in compared.outcomes)
    if scene is None:
        return code, with_code(setting_changes(a, b, Blame(offset=offset)), code)
    tuned = changes(scene) if scene.cause.reason == "optimizer" else scene.hyperparameters
    reason, rates = reason_named(scene.cause.reason), bool(tuned) or scene.no_rates
    blame = Blame(reason, tuned, scene.rounding, scene.blamed, scene.fed, rates, offset, stepped=_stepped(scene))
    differ = setting_changes(a, b, blame)
    if not (scene.rounding or _by_chance(scene)):
        code = by_exclusion(code, differ)
    scene.settings = with_code(differ, code, rounding=scene.rounding and not tuned)
    return code, scene.settings


def _by_chance(scene: Scene) -> bool:
    """Whether two runs of one script may differ so, as far as is known of their random states."""
    if unseeded(scene):
        return True
    if scene.cause.reason == "rng" and scene.is_first_step:
        return not first_draw(scene.runs, scene.first.rank, scene.site.fqn)
    at_start = scene.cause.rests_on(Thing.RANDOM_AT_START) if scene.cause.reason == "initial" else ()
    return any(fact.known is not Known.EQUAL for fact in at_start)


def _diverging(
    compared: Compared, scene: Scene, code: CodeChanges | None, separate: tuple[Separate | None, Separate | None]
) -> DiffResult:
    """The answer where something diverged: why, and what else a reader needs to check it."""
    options, reach, first, best = compared.options, compared.reach, scene.first, scene.outcome
    training, evaluation = separate
    place, why = _answer_of_both(scene, training, evaluation)
    if reach is not None:
        place = leaves_words(reach, first) + place
    place, why, later = _at_the_end(scene, compared.ending, place, why)
    sentence = f"{place}: {why}"
    before = _agreeing_lines(scene)
    renamed = scene.cause.reason in {"structure", "initial"}
    return DiffResult(
        a=str(compared.a.path),
        b=str(compared.b.path),
        verdict=Verdict.DIVERGED,
        sentence=sentence,
        why=why,
        evidence=(*before, *_lines_of(scene), *together(scene), *_nothing_changed(scene, code)),
        before=before,
        first=first,
        candidates=tuple(sorted(scene.peers, key=upstream)),
        divergences=_listed(compared.outcomes, first, None if options.whole_step else options.limit),
        notes=tuple(note for note in (measured_by_one(reach) if reach is not None else "", later) if note),
        suggestions=suggest_renames(best.paired.a, best.paired.b, best.match.asked) if renamed else (),
        map=best.heat.result() if best.heat is not None else None,
        tree=tree_of(scene.step, first, scene.cause) if options.want_map else (),
        strip=strip_of(scene.step, first.site),
        training=training or Separate(Verdict.DIVERGED, sentence, first),
        evaluation=evaluation,
    )


def _nothing_changed(scene: Scene, code: CodeChanges | None) -> tuple[str, ...]:
    """A sentence that nothing on record differs that could explain it, and what the evidence leaves; none else."""
    kept = [run.settings for run in scene.runs]
    if code is None or any(name not in settings for settings in kept for name in ("sources", "packages", "command")):
        return ()
    differ = [change for change in scene.settings if change.weight > SAYS_NOTHING]
    if code.ranked or code.unread or any(change.source != "hardware" for change in differ):
        return ()
    unseen = "" if all("environment" in settings for settings in kept) else "; environment variables were not recorded"
    comments = ", but for comments" if code.in_comments else ""
    comments = ", but for comments and the names of variables" if code.in_names else comments
    comments += ", but the hardware does" if differ else ""
    equal = f"No source file, setting or package on record differs{comments}"
    machine = next((change for change in scene.settings if change.source == "hardware"), None)
    recorded = all("hardware" in settings for settings in kept)
    hardware = f"the hardware ({'the same as far as recorded' if recorded else 'not on record'})"
    if machine is not None:
        hardware = f"the hardware ({machine.name} {machine.a} -> {machine.b})"
    return (f"{equal}{unseen}. What is left: {_left(scene, hardware)}.",)


def _left(scene: Scene, hardware: str) -> str:
    if scene.cause.reason == "rng":
        text = "randomness, from a generator that nothing on record seeded"
        return f"{text}, or {hardware}" if "->" in hardware else text
    random = [evidence.known for evidence in scene.cause.rests_on(*RANDOM)]
    race = "a race (threads, workers, memory that was never written)"
    if scene.rounding:
        race = "sums in another order (threads, atomics, kernels chosen by timing)"
    rest = f"{race}, {hardware}, or a file that the script reads"
    if random and all(known is Known.EQUAL for known in random):
        return f"{rest}; the random states are equal, so randomness only from a generator of the script"
    return f"randomness (no random state is on record there), {rest}"


def _stepped(scene: Scene) -> bool:
    """Whether an optimizer may have stepped before the first divergence, in a process that was not recorded as well."""
    site = scene.site
    after = site.phase in {Phase.START, Phase.OPTIMIZER, Phase.EVAL} and site.kind is not Kind.GRAD
    return after or site.call > 0 or not scene.is_first_step or scene.first.step > 0


def _listed(outcomes: Sequence[RankOutcome], first: Divergence, limit: int | None) -> tuple[Divergence, ...]:
    """Divergences of all ranks, the first of all before the others: each rank in its own order, by step.

    No order between ranks within a step is meant.
    """
    everything = [divergence for outcome in outcomes for divergence in outcome.listed]
    everything.sort(key=lambda d: (d is not first, d.step, d.rank, d.sequence))
    return tuple(everything if limit is None else everything[:limit])


# --- the sentence, and what it rests on


_ROOM = 240
"""Characters that the likely causes may take in the first sentence."""


def _place_and_why(scene: Scene, head: str = "First divergence at") -> tuple[str, str]:
    """The answer: the place, and what differs there and why; `head` is what stands before the place."""
    first, cause = scene.first, scene.cause
    where = first.step_words
    reduced = ranks.summed(scene)
    where += ", backward" if reduced else ranks.where(scene)
    if first.site.phase is Phase.RECOMPUTE:
        where += ", recomputed"
    elif first.site.evaluates and "evaluation" not in head:
        where += ", in evaluation"
    why = reason_named(scene.tells).sentence(scene) + copies_words(scene)
    if cause.grown and not reduced and cause.reason != Split.word:
        why += f" It may also have grown from differences within the tolerance, the first in {scene.tolerated}."
    why += unseeded_sentence(scene)
    settled = {"hyperparameter", "optimizers"} if cause.reason == "optimizer" else set()
    blamed = [
        change for change in scene.settings if change.explains and change.weight >= 0.8 and change.source not in settled
    ]
    resumed = scene.outcome.resumption
    if blamed and not (resumed is not None and resumed.lost):
        lead = " It likely comes from" if tuned(scene) else " Likely cause:"
        causes = [describe(change) for change in blamed[:3]]
        fitting = sum(total <= _ROOM for total in accumulate(map(len, causes)))
        why += f"{lead} {'; '.join(causes[: max(1, fitting)])}."
    return f"{head} {where}", why


def _agreeing_lines(scene: Scene) -> tuple[str, ...]:
    """What agrees before the first divergence: steps, and records of its step, one sentence each."""
    clauses = []
    if scene.steps_before:
        last = "all steps before agree" if scene.steps_before > 1 else "the step before agrees"
        how = " within tolerance" if scene.tolerated else " in what was selected" if scene.narrowed else " entirely"
        clauses.append(f"{scene.steps_before} compared step{'s' * (scene.steps_before > 1)}: {last}{how}.")
    equal, within, unseen, formed, other = scene.agreeing_before.values()
    if equal or within:
        every = equal + within + unseen + formed + other
        verb = "is" if equal == 1 else "are"
        much = count(equal, "record") if equal == every else f"{equal:,} of {count(every, 'record')}"
        rest = [f"{within:,} within tolerance"] if within else []
        rest += [f"{unseen:,} not observed in both runs"] if unseen else []
        rest += [f"{formed:,} in another form"] if formed else []
        rest += [f"{other:,} different"] if other else []
        also = f"; {', '.join(rest)}" if rest else ""
        clauses.append(f"{much} before it in step {scene.first.step} {verb} equal{also}.")
    return tuple(clauses)


def _lines_of(scene: Scene) -> tuple[str, ...]:
    """What else the conclusion rests on, one sentence each: a reader can check it instead of believing it."""
    clauses = []
    if scene.tolerated:
        clauses.append(f"The first difference within the tolerance is {scene.tolerated}.")
    clauses += lines(scene.cause.evidence)
    if scene.calls and scene.cause.reason != "structure":
        name, one, two = scene.calls
        clauses.append(f"{name} runs {often(one)} in this step of a and {often(two)} in b.")
    if scene.cause.reason != "rng":
        draws = (str(draw) for draw in draws_before(scene)[:1])  # a module's name stays as it is
        clauses += [f"{draw.replace('random', 'Random', draw.startswith('random '))}." for draw in draws]
    if scene.is_first_step and scene.tells in MAY_REST_ON_THEM:
        made = script_generators(scene.runs, scene.first.rank)
        clauses += [f"A generator that the script made differs: {made}."] * bool(made)
    return tuple(clauses + reason_named(scene.tells).evidence(scene))


# --- training and evaluation


def _answer_of_both(scene: Scene, training: Separate | None, evaluation: Separate | None) -> tuple[str, str]:
    """The place, and what differs there and why, with what is known of the other of the two."""
    if training is None or evaluation is None:
        return _place_and_why(scene)
    if scene.site.evaluates and training.verdict is Verdict.SAME:
        subject = subject_of("Training", narrowed=scene.narrowed)
        return _place_and_why(scene, f"{subject} the same ({training.extent}); evaluation diverges at")
    place, why = _place_and_why(scene)
    other = _beside(training, "Training") if scene.site.evaluates else _beside(evaluation, "Evaluation")
    return place, f"{why} {other}"


def _beside(separate: Separate, name: str) -> str:
    """The answer for one of the two, after that for the other."""
    if separate.verdict is Verdict.UNDECIDED:
        return f"{name}: {separate.sentence[0].lower()}{separate.sentence[1:]}"
    if separate.first is not None:
        return diverges_words(name, separate.first, too=True)
    return separate.sentence


# --- a run that ended by an exception


def _at_the_end(scene: Scene, end: Raised | None, place: str, why: str) -> tuple[str, str, str]:
    """Place and why where a run ended by an exception, and a note of that; "" where there is no note.

    The exception comes first where the first divergence is in the step that it cut off. Where that is only what the
    run did not come to any more, the exception is the whole answer.
    """
    if end is None:
        return place, why, ""
    cut = cut_short(scene)
    if cut is None:
        return place, why, f"Run {end.side} ended by an exception, after the first divergence: {end.words}."
    end = cut
    agreed = _last_agreed(scene)
    until = f"The last record that agrees is {agreed}."
    if not agreed:
        until = f"In this step nothing agrees before; {scene.all_before}."
    where = f"Run {end.side} ended by an exception in {scene.first.step_words} where run {OTHER[end.side]} goes on"
    how = f"{end.words}. {until}"
    return (where, how, "") if scene.lacks == end.side else (f"{where}: {how} {place}", why, "")


def _last_agreed(scene: Scene) -> str:
    """What the last record of the step is that agrees before the first divergence; "" where none does."""
    step = scene.step
    agree = np.isin(step.state, (EQUAL, WITHIN)) & (step.table.order_of < scene.first.sequence)
    numbers = np.flatnonzero(agree)
    if not len(numbers):
        return ""
    last = int(numbers[np.argmax(step.table.order_of[numbers])])
    return what(step.alignment.site(last))
