"""The answer: the earliest divergence of all ranks explained, with its causes, origins, settings and notes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.between import code_changes
from introspect_cli.compare.answer.compared import (
    agreement,
    cut_short,
    diverges_words,
    notes_on,
    separate_answers,
    subject_of,
)
from introspect_cli.compare.changes.statements import Nearness
from introspect_cli.compare.reasons import ranks
from introspect_cli.compare.reasons.draws import unseeded_names
from introspect_cli.compare.reasons.explain import evidence_lines, explanation_of, lines_before
from introspect_cli.compare.reasons.rows import reason_named
from introspect_cli.compare.reasons.update import hyperparameter_changes_of
from introspect_cli.compare.reasons.view import View
from introspect_cli.compare.resumed import RATES
from introspect_cli.compare.say import how_far, listed, sentence, some, thing, told, what
from introspect_cli.compare.settings.beginning import find_first_event
from introspect_cli.compare.settings.differences import describe, on_one_line
from introspect_cli.compare.settings.settings import (
    ARGUMENT,
    MADE_BY_CODE,
    SAYS_NOTHING,
    Blame,
    notes_on_some_ranks,
    rounds_differently,
    setting_changes,
)
from introspect_cli.compare.step.overview import strip_of
from introspect_cli.compare.terms.evidence import RANDOM, Known, Thing
from introspect_cli.compare.terms.names import owner_of
from introspect_cli.compare.terms.result import (
    Candidate,
    Certainty,
    DiffResult,
    Divergence,
    Fact,
    Origin,
    Part,
    Restored,
    Resumption,
    Role,
    Separate,
    SettingChange,
    Size,
    Verdict,
)
from introspect_cli.compare.terms.table import OTHER
from introspect_cli.compare.walk import holds_part
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.answer.compared import Compared
    from introspect_cli.compare.changes.statements import CodeChanges
    from introspect_cli.compare.step.outcome import RankOutcome
    from introspect_cli.compare.terms.result import Finding, Resumption


# --- what may have caused it, in one ranked list


_NEAR = dict(zip(Nearness, (0.98, 0.95, 0.85, 0.7, 0.7), strict=False))
_UNLIKELY = 0.45
_IN_COMMENTS = 0.05


def mark_only_change(code: CodeChanges | None, settings: Sequence[SettingChange]) -> CodeChanges | None:
    """Changes with the only changed statement marked `Nearness.ALONE`, if it can matter and nothing else differs.

    That is, every text was read, no statement is near already, and no setting beside hardware and what code makes
    weighs over `SAYS_NOTHING`. Otherwise the changes as they are.
    """
    if code is None or len(code.ranked) != 1 or code.unread or code.likely or not code.ranked[0].can_matter:
        return code
    others = (change for change in settings if change.source not in MADE_BY_CODE | {"nested"})
    if any(change.weight > SAYS_NOTHING and change.source != "hardware" for change in others):
        return code
    return replace(code, ranked=(replace(code.ranked[0], nearness=Nearness.ALONE),))


def weighed_by_code(
    settings: tuple[SettingChange, ...], code: CodeChanges | None, *, rounding: bool = False
) -> tuple[SettingChange, ...]:
    """Settings re-sorted by weight, each changed file weighed by its statement nearest to the divergence.

    A file changed only in comments or names, or without a likely statement, explains nothing. Where all likely
    statements are in one function, and of all settings only what code makes explains anything, they count as near as
    BUILDS at least. Of files that weigh the same, the one with the nearest statement comes first. `settings` as they
    are where `code` is None.

    Args:
        settings: the strongest explanation first.
        code: how the source files differ.
        rounding: whether the distance is of the size of rounding: if any setting that differs rounds otherwise, files
            keep their weight, so that flags and libraries come before code.
    """
    if code is None:
        return settings
    rounding &= any(map(rounds_differently, settings))
    only = len({(one.change.file, one.change.scope) for one in code.likely}) == 1
    only &= not any(change.explains for change in settings if change.source not in MADE_BY_CODE)
    best = {one.change.file: one for one in reversed(code.ranked)}
    places = [one.change.file for one in code.ranked]  # of two files that weigh the same, the nearer one

    def weighed(change: SettingChange) -> SettingChange:
        """The setting with the weight of its file's nearest statement.

        A file without a likely statement explains nothing. Unchanged if it is no source file that explains, or where
        rounding counts.
        """
        nearest = best.get(change.name) if change.source == "sources" else None
        if change.source == "sources" and change.name in (*code.in_comments, *code.in_names):
            return replace(change, explains=False, weight=_IN_COMMENTS)
        if nearest is None or not change.explains:
            return change
        if not nearest.likely:
            return replace(change, explains=False, weight=min(change.weight, _UNLIKELY))
        near = max(_NEAR[nearest.nearness], _NEAR[Nearness.BUILDS] * only)
        return change if rounding else replace(change, weight=near)

    return tuple(
        sorted(
            map(weighed, settings),
            key=lambda one: (-one.weight, places.index(one.name) if one.name in places else 0),
        )
    )


_NO_CAUSE = frozenset({"git", "sources", "nested"})
"""Sources whose changes are told by others: what a commit changed stands in the files."""
_GIVEN = frozenset({"command", "environment", "options", "files"})
"""Sources whose names somebody wrote."""


def ranked_candidates(
    findings: Sequence[Finding], code: CodeChanges | None, settings: Sequence[SettingChange]
) -> tuple[Candidate, ...]:
    """Statements that are likely, then settings that explain, in the order given.

    Settings with the same values in a and b are one candidate, and so is an argument of one run alone with the setting
    that has its value. Left out are the git commit and nested settings; source files too, unless `code` has files that
    it could not read, or no changed statement.

    Args:
        findings: a setting is PROVED, not LIKELY, if a proved one of these has its two values; they add no candidates.
        code: what changed in the code; None where that was not compared.
        settings: the best first.
    """
    statements = [
        Candidate(
            "statement",
            one.change.scope,
            None if one.change.a is None else one.change.a.text,
            None if one.change.b is None else one.change.b.text,
            Certainty.LIKELY,
            one.change.place,
        )
        for one in (code.likely if code is not None else ())
    ]
    proved = [one.fields for one in findings if one.certainty is Certainty.PROVED]
    on_record = {(str(fields.get("a")), str(fields.get("b"))) for fields in proved if "name" in fields}
    merged: dict[tuple[str | None, str | None] | tuple[str, str], list[SettingChange]] = {}
    for change in settings:
        file = change.source == "sources" and code is not None and (code.unread or not code.ranked)
        if change.explains and (change.source not in _NO_CAUSE or file):
            tells = None not in (change.a, change.b) and not file
            merged.setdefault((change.a, change.b) if tells else (change.source, change.name), []).append(change)
    for key in [key for key, members in merged.items() if members[0].source == "command"]:
        flag = merged[key][0]
        value = flag.b if flag.a is None else flag.a if flag.b is None else None
        side = "b" if flag.a is None else "a"
        made = next((one for one, members in merged.items() if getattr(members[0], side) == value), key)
        if value is not None and made != key:  # what was made of it has its value
            merged[made] += merged.pop(key)
    return (*statements, *(_setting_candidate(members, on_record) for members in merged.values()))


def _setting_candidate(members: Sequence[SettingChange], on_record: AbstractSet[tuple[str, str]]) -> Candidate:
    """One cause for settings that were merged, named by one that a person wrote (`_GIVEN`) if there is one.

    Of those, positional arguments do not count. PROVED if a finding has its two values, else LIKELY.

    Args:
        members: the settings.
        on_record: value in a and value in b of proved findings.
    """
    named = min(members, key=lambda change: change.source not in _GIVEN or change.name.startswith(ARGUMENT))
    certainty = Certainty.PROVED if (str(named.a), str(named.b)) in on_record else Certainty.LIKELY
    sources = ", ".join(dict.fromkeys(change.source for change in members))
    return Candidate("setting", named.name, named.a, named.b, certainty, sources)


def likely_words(findings: Sequence[Finding], causes: Sequence[Candidate]) -> list[tuple[str, str]]:
    """The first `_LIKELY` likely causes: each in words, with the sources of a setting ("" for others).

    Findings of certainty LIKELY come first, then candidates that no proved finding names.
    """
    said = " ".join(one.text for one in findings if one.certainty is Certainty.PROVED)
    likely = [(one.text, "") for one in findings if one.certainty is Certainty.LIKELY]
    named = [(candidate_words(one), one.line if one.kind == "setting" else "") for one in causes]
    return [*likely, *(each for each in named if each[0] not in said)][:_LIKELY]


_LIKELY = 3


def candidate_words(one: Candidate) -> str:
    """A cause in a line: `model.py:41 (Block.__init__): x / 2 -> x / 3`, `--lr 0.05 -> 0.06`.

    Statements are shortened around what changed; one that a run lacks is `(nothing)`.
    """
    if one.kind == "statement":
        a, b = on_one_line(*(" ".join((text or "(nothing)").split()) for text in (one.a, one.b)))
        return f"{one.line}{f' ({one.name})' if one.name else ''}: {a} -> {b}"
    return describe(SettingChange(one.line.partition(",")[0], one.name, one.a, one.b))


# --- origins, and what a resumed run restored


_NAMED = 3
"""Parts that the first sentence names."""

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


# --- resumed runs


def head_of(resumed: Resumption) -> str:
    """Sentence on the first `_NAMED` parts that a resumed run lost; or that it restored all that was recorded."""
    run = {"run": resumed.run, "step": resumed.at - 1, "whole": resumed.whole}
    lost = parts_words(resumed.lost, of_one=told("or-drew"))
    return (
        told("resumed-lost", **run, lost=some(lost, _NAMED))
        if lost
        else told("resumed", **run, **_unrestored_words(resumed))
    )


def resumed_rightly(resumed: Resumption) -> str:
    """Sentence, for runs that are the same, that the resumed run lost nothing."""
    run = {"run": resumed.run, "step": resumed.at - 1, "whole": resumed.whole}
    return told("resumed-right", **run, **_unrestored_words(resumed))


def _unrestored_words(resumed: Resumption) -> dict[str, str]:
    """In words, parts that were not restored and do not matter (`idle`), and that were not recorded (`unseen`)."""
    idle = parts_words([part for part in resumed.parts if part.state is Restored.NO and not part.matters])
    unseen = parts_words([replace(part, text="") for part in resumed.unseen])
    return {"idle": some(idle, _NAMED), "unseen": some(unseen, _NAMED)}


def parts_words(parts: Sequence[Part], of_one: str = "") -> list[str]:
    """Parts in words, random states with the same text as one; `of_one` follows a random state that stands alone."""
    by_name: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        names = by_name.setdefault(("" if part.generator else part.part, part.text), [])
        names += [part.generator] if part.generator else []
    return [
        told("part", part=name or told("random-states", names=listed(names)), text=text) + of_one * (len(names) == 1)
        for (name, text), names in by_name.items()
    ]


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


# --- the answer


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
