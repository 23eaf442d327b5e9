"""The answer in one to three plain sentences: where, what, why, and which setting explains it."""

from __future__ import annotations

from introspect_cli.compare.reasons.base import Scene, reason_named
from introspect_cli.compare.reasons.random_state import unseeded_sentence
from introspect_cli.compare.reasons.settings import describe
from introspect_cli.records import Phase


def sentence(scene: Scene) -> str:
    """The answer."""
    first, cause = scene.first, scene.cause
    where = f"step {first.step}"
    if first.step_b != first.step:
        where += f" of a (step {first.step_b} of b)"
    if scene.ranks > 1:
        where += f", rank {first.rank}"
    if first.site.phase in {Phase.EVAL, Phase.RECOMPUTE}:
        where += f", {first.site.phase.value}"
    text = f"First divergence at {where}: {reason_named(scene.tells).sentence(scene)}{unseeded_sentence(scene)}"
    told = {"hyperparameter", "optimizers"} if cause.reason == "optimizer" else set()
    blamed = [
        change for change in scene.settings if change.explains and change.weight >= 0.8 and change.source not in told
    ]
    if blamed:
        text += f" Likely cause: {'; '.join(describe(change) for change in blamed[:3])}."
    return text
