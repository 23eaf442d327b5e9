"""The sentence for what only one run has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.words import often, what
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.diagnosis import Story


def structure_sentence(story: Story) -> str:
    """What only one run has and why, the most telling reason first."""
    first, clues = story.first, story.clues
    side, other = ("a", "b") if first.b is None else ("b", "a")
    site = first.site
    if site.kind is Kind.OP_OUTPUT:
        line = f", at {first.source}" if first.source else ""
        return f"only {side} has {what(site)}{line}: other operators run there in {other}."
    if clues.tied_to:
        return f"the parameter {site.fqn} exists only in {side}; in {other} it is tied to {clues.tied_to}."
    if clues.not_optimized:
        return (
            f"only {side} has {what(site)}, as the optimizer sees it: the optimizer of {clues.not_optimized} does not "
            "have this parameter."
        )
    if clues.losses[0] != clues.losses[1] and site.kind is Kind.LOSS:
        one, two = clues.losses
        return f"only {side} has {what(site)}: backward runs {often(one)} in this step of a and {often(two)} in b."
    if clues.no_forward:
        return (
            f"only {side} has {what(site)}: this step of {clues.no_forward} holds no forward pass, so its optimizer "
            "stepped once more for the same gradients."
        )
    if clues.idle and not clues.subject_missing:
        return f"only {side} has {what(site)}: {site.fqn} does not run in this step of {clues.idle}."
    if clues.subject_missing:
        kind = "parameter" if site.kind in {Kind.PARAM, Kind.BUFFER} and story.cause.subject == site.fqn else "module"
        text = f"the structure differs: the {kind} {story.cause.subject} exists only in {side}"
        return f"{text} ({first.module_class})." if kind == "module" and first.module_class else f"{text}."
    if clues.calls:
        name, one, two = clues.calls
        return (
            f"only {side} has {what(site)}: {name} runs {often(one)} in this step of a and {often(two)} in b "
            f"({'another number of accumulated batches' if clues.accumulation else 'one is called more often'})."
        )
    if site.kind in {Kind.GRAD, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT}:
        ways = "frozen, detached, under no_grad, not part of the loss"
        if site.kind is Kind.GRAD:
            ways += ", or replaced in the model after the optimizer was built"
        return f"only {side} has {what(site)}: in {other} no gradient reaches it ({ways})."
    if site.kind is Kind.OPTIMIZER_STATE:
        return (
            f"only {side} has {what(site)}: the optimizer of {other} does not keep it, or does not step this parameter."
        )
    if clues.paths:
        does = {Kind.INPUT: "it is called with other arguments", Kind.BATCH: "the batch has another structure"}
        told = does.get(site.kind, "it gives another structure")
        return f"only {side} has {what(site)}: {told} ({clues.paths[0]} in a; {clues.paths[1]} in b)."
    if site.kind is Kind.BATCH:
        return f"only {side} draws {what(site)}: another number of batches."
    return f"only {side} has {what(site)}: the structure differs there."
