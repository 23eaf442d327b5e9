"""The answer in one to three plain sentences: where, what, why, and which setting explains it."""

from __future__ import annotations

from introspect_cli.compare.reasons import ranks
from introspect_cli.compare.reasons.base import Scene, reason_named
from introspect_cli.compare.reasons.copies import copies_words
from introspect_cli.compare.reasons.evidence import Known, of
from introspect_cli.compare.reasons.random_state import unseeded_sentence
from introspect_cli.compare.reasons.settings import describe
from introspect_cli.records import Phase


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
    if of(cause.evidence, Known.WITHIN) and not reduced:
        # what it rests on was let pass, not found equal, so that the conclusion is one of two
        told_by_reason = told_by_reason.replace("The cause is", "The cause may be")
        told_by_reason += f" It may also have grown from what tolerance let pass, from {scene.tolerated} on."
    text = f"{head} {where}: {told_by_reason}{unseeded_sentence(scene)}"
    told = {"hyperparameter", "optimizers"} if cause.reason == "optimizer" else set()
    blamed = [
        change for change in scene.settings if change.explains and change.weight >= 0.8 and change.source not in told
    ]
    if blamed:
        text += f" Likely cause: {'; '.join(describe(change) for change in blamed[:3])}."
    return text
