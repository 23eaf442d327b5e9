"""The answer where runs diverge: the earliest divergence explained, with settings, origins and changed code."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.answer.causes import code_changes, likely_words, ranked_candidates, weighed_by_code
from introspect_cli.compare.answer.compared import (
    cut_short,
    diverges_words,
    order_of_ranks,
    separate_answers,
)
from introspect_cli.compare.answer.weights import MADE_BY_CODE, SAYS_NOTHING, Blame, setting_changes
from introspect_cli.compare.changes.statements import Clues, CodeChanges, Nearness
from introspect_cli.compare.evidence import RANDOM, Known, Thing
from introspect_cli.compare.names import ancestors, owner_of
from introspect_cli.compare.outcome import strip_of
from introspect_cli.compare.reasons import ranks
from introspect_cli.compare.reasons.draws import unseeded_names
from introspect_cli.compare.reasons.explain import evidence_lines, explanation_of, lines_before
from introspect_cli.compare.reasons.rows import judge, reason_named
from introspect_cli.compare.reasons.update import hyperparameter_changes_of
from introspect_cli.compare.reasons.view import View
from introspect_cli.compare.result import (
    DiffResult,
    Divergence,
    Fact,
    Origin,
    Part,
    Resumption,
    Role,
    Separate,
    SettingChange,
    Size,
    Verdict,
)
from introspect_cli.compare.resumed import RATES
from introspect_cli.compare.say import head_of, how_far, parts_words, sentence, some, thing, told, what
from introspect_cli.compare.settings.beginning import (
    MAY_REST_ON_THEM,
    MODES,
    SCRIPT,
    differing_calls,
    find_first_event,
    first_difference,
    last_fillings,
    variables_that_differ,
)
from introspect_cli.compare.step import Step
from introspect_cli.compare.table import OTHER, WITHIN
from introspect_cli.compare.walk import holds_part
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.compare.answer.compared import Compared
    from introspect_cli.compare.changes.statements import CodeChanges
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.compare.result import Resumption
    from introspect_cli.compare.settings.beginning import Event


def mark_only_change(code: CodeChanges | None, settings: Sequence[SettingChange]) -> CodeChanges | None:
    """Changes with the only changed statement marked `Nearness.ALONE`, if it can matter and nothing else differs.

    That is, every text was read, no statement is near already, and no setting beside hardware and what code makes
    weighs over `SAYS_NOTHING`. Otherwise the changes as they are.
    """
    if code is None or len(code.ranked) != 1 or code.unread or code.likely or not code.ranked[0].can_matter:
        return code
    others = (change for change in settings if change.source not in MADE_BY_CODE)
    if any(change.weight > SAYS_NOTHING and change.source != "hardware" for change in others):
        return code
    return replace(code, ranked=(replace(code.ranked[0], nearness=Nearness.ALONE),))


_OF_THE_UPDATE = frozenset({Kind.OPTIMIZER_STATE.several, RATES})


def origins_of(best: RankOutcome, outcomes: Sequence[RankOutcome]) -> tuple[Origin, ...]:
    """Sentences on the first divergence and the other origins of its step; () where the first is no origin.

    Records that a run lacks since an exception cut it off are left out.
    """
    assert best.first is not None and best.cause is not None  # noqa: PT018 - they are set together
    if best.first.role is not Role.ORIGIN:
        return ()
    every, ending = [], cut_short(View(best, outcomes))
    for divergence, cause in ((best.first, best.cause), *best.origins):
        at = View(replace(best, first=divergence, cause=cause), outcomes)
        if ending is None or at.side_without != ending.side:
            story = explanation_of(at)
            every.append(Origin(sentence(story.head, story.findings, (), story.more), divergence))
    return tuple(every)


def with_parts(
    resumed: Resumption, first: Divergence, lost: Sequence[Divergence], origins: tuple[Origin, ...]
) -> tuple[Origin, ...]:
    """Origins where a resumed run lost parts: one for each lost part, then those that no lost part explains.

    The part that explains the first divergence comes first; the origin of the first divergence, and those without a
    divergence, are left out in any case. `origins` as they are where nothing was lost.

    Args:
        resumed: what the run restored.
        first: the first divergence.
        lost: divergences of which each may show a lost part.
        origins: origins of the step.
    """
    if not resumed.lost:
        return origins
    parts = sorted(resumed.lost, key=lambda part: not _loss_explains(part, first))
    leads = next(iter(parts)) if _loss_explains(parts[0], first) else None
    lost_parts = []
    for part in parts:
        record = first if part is leads else next((shown for shown in lost if holds_part(shown.site, part)), None)
        lost_parts.append(Origin(told("part-lost", part=parts_words([part])[0]), record, part.part))
    others = [
        origin
        for origin in origins
        if origin.divergence is not None
        and origin.divergence is not first
        and not any(_loss_explains(part, origin.divergence) for part in parts)
    ]
    return (*lost_parts, *others)


def _loss_explains(part: Part, divergence: Divergence) -> bool:
    """Whether the loss of a part explains a divergence: its site holds the part, or its reason rests on the part."""
    if holds_part(divergence.site, part):
        return True
    if divergence.reason == "optimizer":
        return part.part in _OF_THE_UPDATE
    states = {Kind.PARAM.several, Kind.BUFFER.several, Kind.OPTIMIZER_STATE.several}
    return divergence.reason == "resumed" and part.part in states


def _code_and_settings(compared: Compared, at: View) -> tuple[CodeChanges | None, tuple[SettingChange, ...]]:
    """How the source differs, and the settings that differ, the heaviest first.

    The first is None where a run has no digests of its files. Also sets `at.settings`.
    """
    a, b, offset = compared.a, compared.b, any(outcome.offset for outcome in compared.outcomes)
    code = code_changes(a, b, lambda: clues_of(at))
    tuned = hyperparameter_changes_of(at)
    differ = setting_changes(a, b, Blame(at, reason_named(at.cause.reason), tuned, offset))
    if not (at.rounding or _is_by_chance(at)):
        code = mark_only_change(code, differ)
    at.settings = weighed_by_code(differ, code, rounding=at.rounding and not tuned)
    return code, at.settings


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


def diverged_answer(answer: DiffResult, compared: Compared, unchanged: str) -> DiffResult:
    """The answer where the runs diverge: sentence, evidence, causes, listed divergences and overviews.

    Args:
        answer: what is known whatever the verdict.
        compared: both runs and what came of each rank.
        unchanged: sentence on results that agree all the same; "" for none.
    """
    options, best, resumed = compared.options, compared.best, answer.resumed
    assert best is not None
    at = View(best, compared.outcomes)
    first, (code, settings) = at.first, _code_and_settings(compared, at)
    training, evaluation = separate_answers(compared)
    story = explanation_of(at)
    causes = ranked_candidates(story.findings, code, settings)
    place = told(
        "place",
        step=first.step_words,
        ranks=ranks.ranks_words(at),
        recomputed=first.site.phase is Phase.RECOMPUTE,
        evaluation=first.site.evaluates,
    )
    beside = _other_part_words(at, training, evaluation)
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
        also=tuple(filter(None, (*story.more, _beyond_rounding_words(compared, at, code), beside, *nothing))),
        rests_on=tuple(
            Fact(fact.thing.name.lower(), fact.known.name.lower(), fact.of, fact.inside, thing(fact))
            for fact in story.evidence
        ),
        explains=story.findings,
        causes=causes,
        evidence=(*before, *evidence_lines(at, story), *nothing, *([unchanged] if unchanged else ())),
        before=before,
        first=first,
        candidates=tuple(sorted(at.peers, key=order_of_ranks)),
        divergences=_listed_divergences(compared.outcomes, first, None if options.whole_step else options.limit),
        settings=settings,
        findings=(*(() if code is None else (code,)), *answer.findings, *origins),
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


def _beyond_rounding_words(compared: Compared, at: View, code: CodeChanges | None) -> str:
    """Sentence on the step's first listed divergence that is more than rounding, where the first one is rounding.

    With the changed statements that are near it, as if what is before it agreed, and are not near the first. "" where
    the first one is more than rounding, or none is.
    """
    listed = at.outcome.listed if at.rounding else []
    more = next((one for one in listed if one.step == at.first.step and one.size is Size.MORE), None)
    if more is None:
        return ""
    far_ones = [] if code is None else [one.change.place for one in code.ranked if not one.likely]
    before = np.isin(at.table.site, at.step.divergences.site[: at.step.sites.index(more.site)])
    step = Step(at.step.comparison, at.table.marked(before, WITHIN), at.step.begins, at.step.learned)
    there = View(replace(at.outcome, first=more, step=step, cause=judge(step, step.sites.index(more.site))), ())
    near = code_changes(compared.a, compared.b, lambda: clues_of(there)) if far_ones else None
    lines = [] if near is None else [one.change.place for one in near.likely if one.change.place in far_ones]
    return told("first-more", name=what(more.site, more.module_class), far=how_far(more), lines=some(lines))


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


def _other_part_words(at: View, training: Separate | None, evaluation: Separate | None) -> str:
    """Sentence on training, or evaluation, where the first divergence is of the other; "" where it was not compared.

    That it diverges too, and where; else the sentence of its verdict, after its name where that is UNDECIDED.
    """
    if training is None or evaluation is None:
        return ""
    separate, name = (training, "Training") if at.site.evaluates else (evaluation, "Evaluation")
    if separate.verdict is Verdict.UNDECIDED:
        return f"{name}: {separate.sentence[0].lower()}{separate.sentence[1:]}"
    return separate.sentence if separate.first is None else diverges_words(name, separate.first, too=True)


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


# --- what of it leads to changed code


_LINE = re.compile(r"(.+):(\d+)\Z")
_INDEX = re.compile(r"\d+")


def clues_of(scene: View) -> Clues:
    """The names, classes and lines in a first divergence's records by which a code change can be recognised."""
    cause, site = scene.cause, scene.site
    tree = scene.step.modules[0] | scene.step.modules[1]
    subject = cause.module or cause.subject or site.fqn
    around = owner_of(subject) if cause.reason == "structure" else subject
    replaced = scene.classes_of(around) if cause.reason in {"structure", "own_code", "module"} else ()
    subject = scene.parameter_user if cause.reason == "gradient" else around if replaced else subject
    names = [name for name in (subject, *ancestors(subject)) if name in tree]
    words = {
        word for change in hyperparameter_changes_of(scene) for word in (change.name.rpartition(".")[2], change.about)
    }
    for name in (*names[:1], *scene.unseen_inside):
        keys = {key for key, _, _ in scene.attributes(name, every=True)}
        words |= keys | {"train", "eval"} if "training" in keys else keys
    if cause.reason in {"initial", "outside"}:
        words.add(site.fqn.rpartition(".")[2])
    words |= {*replaced} | ({_last_part(cause.subject)} if cause.subject else set())
    if scene.first.a is not None and scene.first.b is not None:
        dtypes = scene.first.a.layout.dtype, scene.first.b.layout.dtype
        words |= set(dtypes) | {"autocast", "to", "half", "float", "dtype"} if dtypes[0] != dtypes[1] else set()
    lines = _recorded_lines(scene)
    begins = cause.reason in {"rng", "initial", "structure", "batch"} and scene.is_first_step
    for events, place in zip(_suspect_events(scene) if begins else (), lines, strict=False):
        # what a module draws tells nothing of why one run has no such module
        events_there = [event for event in events if cause.reason != "structure" or event.name == subject]
        place.extend(event.line for event in events_there)
        words |= {word for event in events_there for word in event.name.split(".")[-2:]}
        words |= {*MODES} if any(event.by in MODES for event in events_there) else set()
    if scene.is_first_step and scene.explained_reason in MAY_REST_ON_THEM:
        words |= {*variables_that_differ(scene.runs, scene.first.rank)}
    reason = "structure" if replaced else cause.instead or cause.reason
    return Clues(
        reason="by_hand" if cause.rests_on(Thing.REWRITTEN) else reason,
        gap=cause.reason == "gap",
        classes=tuple(tree[name].module_class for name in names),
        inside=tuple({tree[name].module_class: 0 for name in scene.unseen_inside}),
        models=frozenset(_last_part(module.variable) for module in tree.values() if module.variable),
        optimizers=tuple(dict.fromkeys(name.partition("#")[0] for side in scene.steppers for name in side)),
        words=frozenset(word for word in words if len(word) > 1 and not _INDEX.fullmatch(word)),
        lines=(_parsed_lines(lines[0]), _parsed_lines(lines[1])),
        tensor=site.fqn.rpartition(".")[2],
        roots=tuple({module.module_class: 0 for name, module in tree.items() if "." not in name}),
        evaluates=site.evaluates,
        ran=frozenset(module.module_class for module in tree.values()),
        batch_is_equal=any(places.known is Known.EQUAL for places in cause.rests_on(Thing.BATCHES)),
    )


def _recorded_lines(scene: View) -> tuple[list[str], list[str]]:
    """Lines of the user's code (`file:line`) on record that may be to blame: of a, of b.

    That of the first divergence (a alone), of an exception that cut the step off, of calls that set a random state,
    and, in the first step, of the first seeding that differs.
    """
    lines: tuple[list[str], list[str]] = [scene.first.source if scene.first.a is not None else ""], []
    if (ended := cut_short(scene)) is not None and ended.file:
        lines[ended.side == "b"].append(f"{ended.file}:{ended.line}")
    if scene.cause.reason == "rng" and not scene.is_first_step:
        for places, settings in zip(lines, differing_calls(scene.runs, scene.first)[:2], strict=True):
            places.extend(setting.line for setting in settings)
    if scene.is_first_step and scene.explained_reason in MAY_REST_ON_THEM:
        for places, event in zip(lines, first_difference(scene.runs, scene.first.rank, SCRIPT).first, strict=True):
            places.extend([event.line] if event is not None else [])
    return lines


def _suspect_events(scene: View) -> tuple[list[Event], list[Event]]:
    """The first seedings and draws before the first step that differ: of a, of b.

    Of an initial value also its last filling, where function or arguments differ; none where it was filled alike.
    """
    pairs = [first_difference(scene.runs, scene.first.rank, name).first for name in ("torch", "python", "numpy")]
    if scene.cause.reason == "initial":
        filled = last_fillings(scene.runs, scene.first.rank, scene.site.fqn)
        one, two = (event and ((event.by, event.arguments), event.state) for event in filled)
        if one is not None and one == two:
            return [], []
        pairs += [filled] if (one and one[0]) != (two and two[0]) else []
    return [one for one, _ in pairs if one is not None], [two for _, two in pairs if two is not None]


def _parsed_lines(lines: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """`model.py:41` as `("model.py", 41)`; lines of another form are left out."""
    return tuple((match[1], int(match[2])) for line in lines if (match := _LINE.fullmatch(line)))


def _last_part(name: str) -> str:
    """The last part of a dotted name that is no number: `blocks` of `blocks.3`; "" for none."""
    return next((part for part in reversed(name.split(".")) if not _INDEX.fullmatch(part)), "")
