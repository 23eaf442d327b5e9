"""All origins in the answer, and, for a resumed run, which parts of the checkpoint it restored."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.endings import cut_short
from introspect_cli.compare.reasons.explain import explained
from introspect_cli.compare.reasons.view import View
from introspect_cli.compare.resumed import RATES
from introspect_cli.compare.terms.findings import Part, Restored, Resumption
from introspect_cli.compare.terms.result import DiffResult, Divergence, Origin, Role, Verdict
from introspect_cli.compare.terms.words import listed
from introspect_cli.compare.walk import holds_part
from introspect_cli.records import Kind
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.answer.compared import Compared
    from introspect_cli.compare.step.outcome import RankOutcome


_NAMED = 3
"""Parts that the first sentence names."""

_OF_THE_UPDATE = frozenset({Kind.OPTIMIZER_STATE.several, RATES})


def with_origins(answer: DiffResult, compared: Compared) -> DiffResult:
    """The answer with all origins of the first divergence's step, and, if a run was resumed, the parts it lost."""
    outcomes, best = compared.outcomes, compared.best if answer.first is not None else None
    first, causes = answer.first, tuple[Origin, ...]()
    if best is not None and best.first is not None and first is not None and best.first.site == first.site:
        causes = _origins(best, outcomes)  # of a port, another one leads
    resumed = next((outcome.resumption for outcome in outcomes if outcome.resumption is not None), None)
    if resumed is None:
        return answer.with_findings(Origin, causes)
    sentence, lost = with_head(answer, resumed), best.lost if best is not None else []
    origins = _with_parts(resumed, answer.first, lost, causes)
    head = f"{head_of(resumed)} {answer.head}" if answer.head else ""
    answer = replace(answer, sentence=sentence, head=head, findings=(*answer.findings, resumed))
    return answer.with_findings(Origin, origins)


def _origins(best: RankOutcome, outcomes: Sequence[RankOutcome]) -> tuple[Origin, ...]:
    """The first divergence, if an origin, and the other origins of its step.

    Records missing after an exception are left out.
    """
    assert best.first is not None and best.cause is not None  # noqa: PT018 - they are set together
    if best.first.role is not Role.ORIGIN:
        return ()
    every, ending = [], cut_short(View(best, outcomes))
    for divergence, cause in ((best.first, best.cause), *best.origins):
        scene = View(replace(best, first=divergence, cause=cause), outcomes)
        if ending is not None and scene.lacks == ending.side:
            continue
        every.append(Origin(explained(scene).sentence(), divergence))
    return tuple(every)


# --- resumed runs


def with_head(answer: DiffResult, resumed: Resumption) -> str:
    """The answer's sentence preceded by `head_of`; UNDECIDED: followed by it."""
    head = head_of(resumed)
    if answer.verdict is Verdict.UNDECIDED:
        return f"{answer.sentence} {head}"
    if answer.verdict is Verdict.SAME and not resumed.lost:
        right = f"run {resumed.run} restored all that is on record of step {resumed.at - 1} of {resumed.whole}"
        head = f"Resumed correctly: {right}{_but(resumed)}{_unseen(resumed)}."
    return f"{head} {answer.sentence}"


def head_of(resumed: Resumption) -> str:
    """Sentence naming up to `_NAMED` parts that a resumed run lost, or that it restored all on record."""
    run = f"Run {resumed.run}, resumed after step {resumed.at - 1} of {resumed.whole},"
    if not resumed.lost:
        return f"{run} restored all that is on record{_but(resumed)}{_unseen(resumed)}."
    lost = together(resumed.lost, of_one=" (or drew from it before its first step)")
    names = [f"the {name}" for name in lost[:_NAMED]]
    if len(lost) > _NAMED:
        names.append(count(len(lost) - _NAMED, "more part"))
    return f"{run} did not restore {listed(names)}."


def _but(resumed: Resumption) -> str:
    """Clause on parts that were not restored but do not matter; "" for none."""
    left = [part for part in resumed.parts if part.state is Restored.NO and not part.matters]
    return f" but the {listed(together(left))}" if left else ""


def _unseen(resumed: Resumption) -> str:
    """Clause on parts that were not recorded and so may be lost, at most `_NAMED` of them; "" for none."""
    names = together([replace(part, text="") for part in resumed.unseen])
    if not names:
        return ""
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    were = "was" if len(names) == 1 and not names[0].partition(" of ")[0].endswith("s") else "were"
    return f"; {listed([*names[:_NAMED], *more])} {were} not recorded"


def together(parts: Sequence[Part], of_one: str = "") -> list[str]:
    """Parts in words; random states with the same text are joined. `of_one` is appended to a part that stands alone."""
    by_name: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        names = by_name.setdefault(("" if part.generator else part.part, part.text), [])
        names += [part.generator] if part.generator else []
    clauses = []
    for (name, text), names in by_name.items():
        words = f"random state{'s' * (len(names) > 1)} of {listed(names)}" if names else name
        clauses.append(f"{words}{f' ({text})' if text else ''}{of_one if len(names) == 1 else ''}")
    return clauses


def _with_parts(
    resumed: Resumption, first: Divergence | None, lost: Sequence[Divergence], causes: tuple[Origin, ...]
) -> tuple[Origin, ...]:
    """The origins where a resumed run lost parts: one per lost part, then those that no lost part explains.

    The part that the first divergence shows leads. `causes` unchanged where nothing was lost.
    """
    if first is None or not resumed.lost:
        return causes
    parts = sorted(resumed.lost, key=lambda part: not _makes(part, first))
    leads = next(iter(parts)) if _makes(parts[0], first) else None
    lost_parts = []
    for part in parts:
        record = first if part is leads else next((shown for shown in lost if holds_part(shown.site, part)), None)
        were = "were" if part.part.partition(" of ")[0].endswith("s") else "was"
        lost_parts.append(Origin(f"the {together([part])[0]} {were} not restored", record, part.part))
    others = [
        origin
        for origin in causes
        if origin.divergence is not None
        and origin.divergence is not first
        and not any(_makes(part, origin.divergence) for part in parts)
    ]
    return (*lost_parts, *others)


def _makes(part: Part, divergence: Divergence) -> bool:
    """Whether the loss of a part explains a divergence: its site holds the part, or its reason rests on it."""
    if holds_part(divergence.site, part):
        return True
    if divergence.reason == "optimizer":
        return part.part in _OF_THE_UPDATE
    states = {Kind.PARAM.several, Kind.BUFFER.several, Kind.OPTIMIZER_STATE.several}
    return divergence.reason == "resumed" and part.part in states
