"""The answer in one to three plain sentences: where, what, why, and which setting explains it; and what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons import ranks
from introspect_cli.compare.reasons.base import reason_named
from introspect_cli.compare.reasons.copies import copies_words
from introspect_cli.compare.reasons.random_state import unseeded_sentence
from introspect_cli.compare.reasons.settings import describe
from introspect_cli.compare.reasons.split import Split
from introspect_cli.compare.reasons.update import tuned
from introspect_cli.compare.reasons.words import lines, often
from introspect_cli.records import Phase, count

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene


def sentence(scene: Scene, head: str = "First divergence at") -> str:
    """The answer; `head` is what stands before the place."""
    first, cause = scene.first, scene.cause
    where = first.step_words
    reduced = ranks.summed(scene)
    where += ", backward" if reduced else ranks.where(scene)
    if first.site.phase is Phase.RECOMPUTE:
        where += ", recomputed"
    elif first.site.evaluates and "evaluation" not in head:
        where += ", in evaluation"
    told_by_reason = reason_named(scene.tells).sentence(scene) + copies_words(scene)
    if cause.grown and not reduced and cause.reason != Split.word:
        told_by_reason += f" It may also have grown from what tolerance let pass, from {scene.tolerated} on."
    text = f"{head} {where}: {told_by_reason}{unseeded_sentence(scene)}"
    told = {"hyperparameter", "optimizers"} if cause.reason == "optimizer" else set()
    blamed = [
        change for change in scene.settings if change.explains and change.weight >= 0.8 and change.source not in told
    ]
    if blamed and not scene.lost:
        lead = " It likely comes from" if tuned(scene) else " Likely cause:"
        text += f"{lead} {'; '.join(describe(change) for change in blamed[:3])}."
    return text


def lines_of(scene: Scene) -> tuple[str, ...]:
    """What the conclusion rests on, one sentence each: a reader can check it instead of believing it."""
    found = []
    if scene.steps_before:
        last = "all steps before agree" if scene.steps_before > 1 else "the step before agrees"
        how = " within tolerance" if scene.tolerated else " in what was selected" if scene.narrowed else " entirely"
        found.append(f"{scene.steps_before} compared step{'s' * (scene.steps_before > 1)}: {last}{how}.")
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
        found.append(f"{much} before it in step {scene.first.step} {verb} equal{also}.")
    if scene.tolerated:
        found.append(f"The first difference that was let pass is {scene.tolerated}.")
    found += lines(scene.cause.evidence)
    if scene.calls and scene.cause.reason != "structure":
        name, one, two = scene.calls
        found.append(f"{name} runs {often(one)} in this step of a and {often(two)} in b.")
    if scene.cause.reason != "rng":
        found += [f"{one[0].upper()}{one[1:]}." for one in map(str, scene.draws[:1])]
    return tuple(found + reason_named(scene.tells).evidence(scene))
