"""The sentences for a parameter or buffer that a step finds changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.words import apart, what

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.diagnosis import Story


def initial_sentence(story: Story) -> str:
    """A tensor that differs before any training."""
    site, clues = story.first.site, story.clues
    text = f"{what(site)} differs before any training{apart(story.first)}"
    if clues.initial_differ > 1:
        text += f", as do {clues.initial_differ - 1} more of {clues.initial_total} initial tensors"
    elif clues.initial_total > 1:
        text += f", alone of {clues.initial_total} initial tensors"
    if clues.children:
        return (
            f"{text}: the script runs {clues.children} in a process of its own, which is not recorded and may have "
            "changed them; or other initialisation, seed or checkpoint."
        )
    return f"{text}: other initialisation or seed, or another checkpoint was loaded."


def outside_sentence(story: Story) -> str:
    """A tensor that something other than an optimizer changed."""
    first, clues = story.first, story.clues
    more = f"{clues.initial_differ - 1} more tensors" if clues.initial_differ > 1 else ""
    step = f"step {first.step - 1}"
    if first.a is None or first.b is None:
        side = "a" if first.b is None else "b"
        were = f", as were {more}" if more else ""
        return (
            f"{what(first.site)} was changed outside of an optimizer step in {side} only{were}: when the step "
            f"begins it is not what {step} left (loading a checkpoint, copying, a moving average, in-place code)."
        )
    do = f", as do {more}" if more else ""
    text = f"{what(first.site)} differs when the step begins{apart(story.first)}{do}, while everything recorded before "
    if clues.by_hand:
        return (
            f"{text}agrees: no optimizer steps in these runs, so the script updates its parameters by hand after the "
            f"backward pass of {step}, with another gradient (clipping, scaling), learning rate or rule."
        )
    return (
        f"{text}agrees: it was changed outside of an optimizer step (loading a checkpoint, a moving average, copying, "
        f"in-place code) after {step} was recorded."
    )


def resumed_sentence(story: Story) -> str:
    """A tensor that a resumed run did not get back."""
    return (
        f"{what(story.first.site)} differs{apart(story.first)}, because the later run began with other values than the "
        f"earlier run had then ({', '.join(story.clues.unequal_tensors[:3])}): the checkpoint did not restore them."
    )
