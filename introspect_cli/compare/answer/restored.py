"""All origins of the first divergence's step, and which parts of a checkpoint a resumed run restored."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.endings import cut_short
from introspect_cli.compare.reasons.explain import explanation_of
from introspect_cli.compare.reasons.view import View
from introspect_cli.compare.resumed import RATES
from introspect_cli.compare.say import listed, sentence, some, told
from introspect_cli.compare.terms.result import Divergence, Origin, Part, Restored, Resumption, Role
from introspect_cli.compare.walk import holds_part
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.step.outcome import RankOutcome


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
