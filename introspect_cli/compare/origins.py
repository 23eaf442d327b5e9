"""Beside the first divergence: all origins with their causes, and what a resumed run did not restore."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.base import reason_named
from introspect_cli.compare.reasons.scene import Scene
from introspect_cli.compare.reasons.words import listed
from introspect_cli.compare.result import DiffResult, Divergence, Origin, Part, Restored, Resumption, Role, Verdict
from introspect_cli.compare.verdict import first_of
from introspect_cli.records import Kind, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.store.reader import Run

_NAMED = 3
"""Parts that the first sentence names."""

_OF_THE_UPDATE = frozenset({Kind.OPTIMIZER_STATE.several, "learning rates and schedulers"})


def with_origins(
    answer: DiffResult, runs: tuple[Run, Run], outcomes: Sequence[RankOutcome], *, narrowed: bool
) -> DiffResult:
    """The answer with every origin, and with what became of the parts of a checkpoint."""
    best = first_of(outcomes) if answer.first is not None else None
    told = _origins(best, runs, outcomes, narrowed=narrowed) if best is not None else ()
    resumed = next((outcome.resumption for outcome in outcomes if outcome.resumption is not None), None)
    if resumed is None:
        return replace(answer, origins=told)
    notes = (*answer.notes, *_notes(resumed))
    sentence = with_head(answer, resumed)
    return replace(
        answer, sentence=sentence, notes=notes, resumed=resumed, origins=_with_parts(resumed, answer.first, told)
    )


def _origins(
    best: RankOutcome, runs: tuple[Run, Run], outcomes: Sequence[RankOutcome], *, narrowed: bool
) -> tuple[Origin, ...]:
    """The first divergence and the other origins of its step; nothing where the first one follows from others."""
    assert best.first is not None and best.cause is not None  # noqa: PT018 - they are set together
    if best.first.role is not Role.ORIGIN:
        return ()
    found = []
    for divergence, cause in ((best.first, best.cause), *best.origins):
        scene = Scene(replace(best, first=divergence, cause=cause), runs, outcomes, narrowed=narrowed)
        found.append(Origin(reason_named(scene.tells).sentence(scene), divergence))
    return tuple(found)


# --- resumed runs


def with_head(answer: DiffResult, resumed: Resumption) -> str:
    """The sentence, and before it what a resumed run did not restore, or that it restored all."""
    head, whole = head_of(resumed), "ba"["ab".index(resumed.run)]
    if answer.verdict is Verdict.UNDECIDED:
        return f"{answer.sentence} {head}"
    if answer.verdict is Verdict.SAME and not resumed.lost:
        head = f"Resumed right: run {resumed.run} restored all that is on record of step {resumed.at - 1} of {whole}."
    return f"{head} {answer.sentence}"


def head_of(resumed: Resumption) -> str:
    """What a resumed run did not restore, or that it restored all, in one sentence."""
    whole = "ba"["ab".index(resumed.run)]
    run = f"Run {resumed.run}, resumed after step {resumed.at - 1} of {whole},"
    if not resumed.lost:
        return f"{run} restored all that is on record."
    names = [_named(part) for part in resumed.lost[:_NAMED]]
    if len(resumed.lost) > _NAMED:
        names.append(f"{count(len(resumed.lost) - _NAMED, 'more part')}")
    return f"{run} did not restore {listed(names)}."


def _named(part: Part) -> str:
    return f"the {part.part} ({part.text})" if part.text else f"the {part.part}"


def _notes(resumed: Resumption) -> list[str]:
    """What a resumed run read and drew only to get to where it goes on."""
    notes = []
    if resumed.thrown_away:
        much = count(resumed.thrown_away, "batch", "batches")
        them = "it" if resumed.thrown_away == 1 else "them"
        notes.append(f"Run {resumed.run} read {much} in its first step and threw {them} away, to get to its place.")
    late = [part.part for part in resumed.parts if part.state is Restored.YES and part.text == "within the first step"]
    if late:
        notes.append(
            f"When run {resumed.run} begins, the {listed(late)} differs; it is restored before it is drawn from."
        )
    return notes


def _with_parts(resumed: Resumption, first: Divergence | None, told: tuple[Origin, ...]) -> tuple[Origin, ...]:
    """The origins, where a checkpoint that was not restored explains them: each part that was lost is one.

    The first divergence belongs to the part that it shows, which leads.
    """
    if first is None or not resumed.lost:
        return told
    parts = [(part, _shows(first, part)) for part in resumed.lost]
    parts.sort(key=lambda own: not own[1])
    lost = [
        Origin(f"{_named(part)} was not restored", first if shows and place == 0 else None, part.part)
        for place, (part, shows) in enumerate(parts)
    ]
    others = [
        origin
        for origin in told
        if origin.divergence is not None
        and origin.divergence is not first
        and not any(_shows(origin.divergence, part) for part in resumed.lost)
    ]
    return (*lost, *others)


def _shows(divergence: Divergence, part: Part) -> bool:
    """Whether a divergence is what a lost part makes."""
    kind = divergence.site.kind
    if kind is Kind.RNG:
        return part.part.startswith("random state")
    if kind is Kind.BATCH:
        return part.part == "place in the data"
    if divergence.reason == "optimizer":
        return part.part in _OF_THE_UPDATE
    if divergence.reason == "resumed":
        return part.part in {Kind.PARAM.several, Kind.BUFFER.several, Kind.OPTIMIZER_STATE.several}
    return False
