"""The answer where runs diverge: the earliest divergence explained, with settings, origins and changed code."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.answer.causes import code_changes, likely_words, ranked_candidates, ranked_code
from introspect_cli.compare.answer.compared import (
    cut_short,
    exceptions_of,
    order_of_ranks,
    raised_words,
    separate_answers,
)
from introspect_cli.compare.answer.weights import MADE_BY_CODE, SAYS_NOTHING, setting_changes, weighed_by_code
from introspect_cli.compare.changes.statements import CodeChanges, Nearness
from introspect_cli.compare.evidence import RANDOM, Cause, Known, Thing
from introspect_cli.compare.names import owner_of
from introspect_cli.compare.outcome import strip_of
from introspect_cli.compare.passes import rounding_gradients
from introspect_cli.compare.reasons import ranks
from introspect_cli.compare.reasons.draws import unseeded_names
from introspect_cli.compare.reasons.explain import evidence_lines, explanation_of
from introspect_cli.compare.reasons.rows import judge, reason_named
from introspect_cli.compare.reasons.view import View
from introspect_cli.compare.result import (
    DiffResult,
    Divergence,
    Origin,
    Part,
    Role,
    Separate,
    SettingChange,
    Size,
    Verdict,
)
from introspect_cli.compare.resumed import RATES, holds_part
from introspect_cli.compare.say import fact_of, parts_words, sentence, some, told, what_diverges
from introspect_cli.compare.settings.beginning import find_first_event
from introspect_cli.compare.step import Step, divergence_at
from introspect_cli.compare.table import OTHER, WITHIN
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.compare.answer.compared import Compared
    from introspect_cli.compare.changes.statements import CodeChanges
    from introspect_cli.compare.outcome import RankOutcome


def mark_only_change(code: CodeChanges | None, settings: Sequence[SettingChange]) -> CodeChanges | None:
    """Changes with the only changed statement marked `Nearness.ALONE`, if it can matter and nothing else differs.

    That is, every text was read, no statement is near already, and no setting beside hardware and what code makes
    weighs over `SAYS_NOTHING`. Otherwise the changes as they are.
    """
    if code is None or len(code.ranked) != 1 or code.unread or code.likely or not code.ranked[0].can_matter:
        return code
    alone = all(one.weight <= SAYS_NOTHING for one in settings if one.source not in {*MADE_BY_CODE, "hardware"})
    return code._replace(ranked=(code.ranked[0]._replace(nearness=Nearness.ALONE),)) if alone else code


_LOST_WITH: dict[str, frozenset[str]] = {
    "optimizer": frozenset({Kind.OPTIMIZER_STATE.several, RATES}),
    "resumed": frozenset({Kind.PARAM.several, Kind.BUFFER.several, Kind.OPTIMIZER_STATE.several}),
}
"""By the reason of a divergence, parts of a checkpoint of which any, where it was not restored, explains it."""


def _loss_explains(part: Part, divergence: Divergence) -> bool:
    """Whether the loss of a part explains a divergence: its site holds the part, or its reason rests on the part."""
    return holds_part(divergence.site, part) or part.part in _LOST_WITH.get(divergence.reason, ())


def origins_of(at: View, outcomes: Sequence[RankOutcome], lost: Sequence[Part]) -> Iterator[Origin]:
    """The origins of the first diverging step: parts that a resumed run lost, then origins that no lost part explains.

    Without lost parts, the first divergence, if it is an origin, and the others. The part that explains the first
    divergence comes first. Records that a run lacks since an exception cut it off are left out.

    Args:
        at: the first divergence.
        outcomes: of all ranks.
        lost: parts of the checkpoint that were not restored.
    """
    best, first, ending = at.outcome, at.first, cut_short(at)
    sites = at.step.sites if at.step.comparison.is_resume_step(at.step.number) else ()
    for place, part in enumerate(sorted(lost, key=lambda part: not _loss_explains(part, first))):
        held = [position for position, site in enumerate(sites) if holds_part(site, part)]
        shown = divergence_at(at.step, held[0], Cause(Role.ORIGIN, "resumed")) if held else None
        leads = place == 0 and _loss_explains(part, first)
        yield Origin(f"{part.state.value}: {parts_words([part])[0]}", first if leads else shown, part.part)
    every = [(first, at.cause), *best.origins] if first.role is Role.ORIGIN else []
    for divergence, cause in every[bool(lost) :]:
        view = View(replace(best, first=divergence, cause=cause), outcomes, at.renamed)
        unexplained = not any(_loss_explains(part, divergence) for part in lost)
        if unexplained and (ending is None or view.side_without != ending.side):
            story = explanation_of(view)
            yield Origin(sentence(story.head, story.findings, (), story.more), divergence)


def _is_by_chance(at: View) -> bool:
    """Whether randomness alone may explain the divergence.

    That is an unseeded generator; a random state in the first step without a seeding or draw that differs before it; or
    an initial value where the random state at the start is not known to be equal.
    """
    if at.cause.reason == "rng" and at.is_first_step and not any(find_first_event(at.runs, at.first.rank, at.site.fqn)):
        return True
    at_start = at.cause.rests_on(Thing.RANDOM_AT_START) if at.cause.reason == "initial" else ()
    return bool(unseeded_names(at)) or any(fact.known is not Known.EQUAL for fact in at_start)


def diverged_answer(answer: DiffResult, compared: Compared, hidden: str) -> DiffResult:
    """The answer where the runs diverge: sentence, evidence, causes, listed divergences and overviews.

    An exception that cut off the step of the first divergence leads the sentence; it stands alone if the divergence is
    a record that this run lacks since. One that came later is a note.

    Args:
        answer: what is known whatever the verdict; its sentence is what comes first.
        compared: both runs and what came of each rank.
        hidden: sentence on results that prove nothing; "" for none.
    """
    options, best, resumed = compared.options, compared.best, answer.resumed
    assert best is not None
    changed = code_changes(compared.a, compared.b)
    at = View(best, compared.outcomes, frozenset() if changed is None else changed.renamed)
    first, cut, lost = at.first, cut_short(at), () if resumed is None else resumed.lost
    code = ranked_code(changed, at, cut)
    offset = any(outcome.offset for outcome in compared.outcomes)
    differ = setting_changes(compared.a, compared.b, at, reason_named(at.cause.reason), offset=offset)
    if not (at.rounding or _is_by_chance(at)):
        code = mark_only_change(code, differ)
    at.settings = weighed_by_code(differ, code, rounding=at.rounding and not at.tuned)
    training, evaluation = separate_answers(compared)
    story, nothing = explanation_of(at), _nothing_changed_words(at, code)
    causes = ranked_candidates(story.findings, code, at.settings)
    listed = [one for one in best.listed if at.rounding and one.step == first.step and one.site in at.step.sites]
    noise = rounding_gradients(at.table, at.step.comparison) if listed else {}
    larger = [one for one in listed if one.size is Size.MORE and noise.get(one.site.fqn) is not False][:1]
    more = [told("first-more", what=what_diverges(one), lines=_lines_near(one, at, code, changed)) for one in larger]
    beside = training if at.site.evaluates else evaluation
    also = (*story.more, *more, *([] if beside is None else [beside.sentence]), *nothing)
    likely = [text for text, _ in likely_words(story.findings, () if lost else causes)]
    where = {"recomputed": first.site.phase is Phase.RECOMPUTE, "evaluation": first.site.evaluates}
    place = told("place", step=first.step_words, **ranks.ranks_of(at), **where)
    head, whole = f"{place}: {story.head}", f"{place}: {sentence(story.head, story.findings, likely, also)}"
    later = raised_words([each for each in exceptions_of(at.runs) if each.side])
    if cut is not None:
        ended, later = raised_words([cut], step=first.step_words, other=OTHER[cut.side]), ""
        head, whole = (ended, ended) if at.side_without == cut.side else (f"{ended} {head}", f"{ended} {whole}")
    listed = [divergence for outcome in compared.outcomes for divergence in outcome.listed]
    listed.sort(key=lambda one: (one is not first, one.step, one.rank, one.sequence))
    several = compared.splits is not None and resumed is None
    origins = () if several else origins_of(at, compared.outcomes, lost)
    names = at.site.fqn, owner_of(at.site.fqn), at.cause.module
    return replace(
        answer,
        sentence=answer.sentence + whole,
        head=answer.sentence + head,
        also=also,
        rests_on=tuple(map(fact_of, story.evidence)),
        explains=story.findings,
        causes=causes,
        evidence=(*evidence_lines(at, story), *nothing, *([hidden] if hidden else ())),
        first=first,
        candidates=tuple(sorted(at.peers, key=order_of_ranks)),
        divergences=tuple(listed[: None if options.whole_step else options.limit]),
        settings=at.settings,
        code=code,
        origins=tuple(origins),
        notes=tuple(dict.fromkeys((*answer.notes, *([later] if later else ())))),
        map=best.heat.result() if best.heat is not None else None,
        defined_in=next((tree[name].source for name in names for tree in at.step.modules if name in tree), ""),
        strip=strip_of(at.step, first.site),
        training=training or Separate(Verdict.DIVERGED, whole, first),
        evaluation=evaluation,
    )


def _nothing_changed_words(at: View, code: CodeChanges | None) -> tuple[str, ...]:
    """One sentence that no recorded source, setting or package differs, and on the causes that remain; () otherwise.

    () where either run is resumed: what it did not restore is left, too. () where a setting other than hardware weighs
    over `SAYS_NOTHING`, a source file differs or could not be read, or a run lacks one of the documents.
    """
    lacks = any(name not in run.settings for run in at.runs for name in ("sources", "packages", "command"))
    differ = any(change.weight > SAYS_NOTHING and change.source != "hardware" for change in at.settings)
    if code is None or at.step.comparison.resumption or lacks or differ or code.ranked or code.unread:
        return ()
    random = {evidence.known for evidence in at.cause.rests_on(*RANDOM)}
    is_random = at.cause.reason == "rng" or random != {Known.EQUAL}
    return (told("nothing-changed", quiet=bool(code.unchanged), random=is_random),)


# --- what of it leads to changed code


def _lines_near(later: Divergence, at: View, code: CodeChanges | None, changed: CodeChanges | None) -> str:
    """Lines of changed statements that are near a later divergence of the step, as if all before it agreed.

    Those that are near the first are left out; "" for none.
    """
    others = [] if code is None else [one.change.place for one in code.ranked if not one.likely]
    if changed is None or not others:
        return ""
    before = np.isin(at.table.site, at.step.divergences.site[: at.step.sites.index(later.site)]) & ~at.table.one_sided
    step = Step(at.step.comparison, at.table.marked(before, WITHIN), at.step.begins, at.step.learned)
    cause = judge(step, step.sites.index(later.site))
    there = View(replace(at.outcome, first=later, step=step, cause=cause), (), at.renamed)
    near = ranked_code(changed, there, cut_short(there)) or changed
    return some([one.change.place for one in near.likely if one.change.place in others])
