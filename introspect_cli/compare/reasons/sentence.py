"""The first divergence in plain words, and under it what makes it so.

The sentence says where (step, record), what (it differs, and how far), and what follows from that; the evidence lists
the equalities that the conclusion rests on, so that a reader can check it instead of believing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.settings import describe
from introspect_cli.compare.reasons.start import initial_sentence, outside_sentence, resumed_sentence
from introspect_cli.compare.reasons.structure import structure_sentence
from introspect_cli.compare.reasons.words import apart, both_values, named, often, path_of, scaled, what
from introspect_cli.compare.result import Reason, Role
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from introspect_cli.compare.reasons.diagnosis import Story

_GENERATORS = {"python": "python's random", "numpy": "numpy.random"}


def sentence(story: Story) -> str:
    """The answer in one to three plain sentences."""
    first = story.first
    where = f"step {first.step}"
    if first.step_b != first.step:
        where += f" of a (step {first.step_b} of b)"
    if story.ranks > 1:
        where += f", rank {first.rank}"
    if first.site.phase in {Phase.EVAL, Phase.RECOMPUTE}:
        where += f", {first.site.phase.value}"
    known = story.cause.role is Role.ORIGIN or story.cause.reason in (Reason.RESUMED, Reason.GAP)
    tell = _TELL[story.cause.reason] if known else _propagated
    text = f"The runs first part at {where}: {tell(story)}"
    text += _unseeded(story)
    told = {"hyperparameter", "optimizers"} if story.cause.reason is Reason.OPTIMIZER else set()
    blamed = [
        change for change in story.settings if change.explains and change.weight >= 0.8 and change.source not in told
    ][:3]
    if blamed:
        text += f" Likely: {', '.join(describe(change) for change in blamed)}."
    return text


def _unseeded(story: Story) -> str:
    """That a generator was drawn from without a seed, where that is so; it differs between any two processes then."""
    names = [_GENERATORS.get(name, name) for name in story.clues.unseeded]
    if not names:
        return ""
    step = story.first.step - (story.cause.reason is Reason.RNG)
    verb = "is" if len(names) == 1 else "are"
    return (
        f" {' and '.join(names)} {verb} drawn from in step {step} without ever having been seeded, so every process "
        "gets other numbers (capture --seed seeds all generators)."
    )


def _batch(story: Story) -> str:
    clues = story.clues
    text = f"{what(story.first.site)} differs{apart(story.first)}."
    if clues.same_values:
        text += " It holds the same values in another order: the data was shuffled differently."
    elif story.first.step == clues.first_step or clues.batches_before == 0:
        text += " The data itself is other from the first batch on: order, seed, files or augmentation."
    else:
        text += " Earlier batches are equal: look at the data pipeline (order, workers, augmentation, files)."
    return text


def _rng(story: Story) -> str:
    site = story.first.site
    if story.first.step == story.clues.first_step:
        return (
            f"{what(site)} differs already when the first captured step begins: another seed (or none), or another "
            "number of random draws before it."
        )
    if site.fqn in story.clues.unseeded:
        return f"{what(site)} differs when the step begins, while all values recorded before are equal."
    since = "since the last recorded step" if story.clues.gap else f"during step {story.first.step - 1}"
    return (
        f"{what(site)} differs when the step begins, while all values recorded before are equal: {since}, "
        f"one run drew random numbers that the other did not (an extra random draw)."
    )


def _script(story: Story) -> str:
    site, clues = story.first.site, story.clues
    text = f"{what(site)} differs{apart(story.first)}"
    if clues.batches_seen:
        return (
            f"{text} while the batch is equal: the script changes something between the data loader and "
            f"{site.fqn} (preprocessing, noise, masks, positions)."
        )
    return (
        f"{text} and it is the first thing recorded in the step that does; no data loader was seen, so "
        "the data pipeline "
        "or the script's own preparation of the batch gave something else."
    )


def _module(story: Story) -> str:
    site = story.first.site
    call = f" in call {site.call}" if site.call else ""
    text = (
        f"{named(site, story.first.module_class)} gives another output{path_of(site)}{call}{apart(story.first)} from "
    )
    text += f"equal {story.clues.fed}{scaled(story.first)}"
    if story.clues.line_search:
        return (
            f"{text}: {story.clues.line_search} changes the parameters between calls within a step, and did so "
            f"differently{_told(story.clues.hyperparameters)}."
        )
    text += ": it is this module's own computation"
    if story.clues.identity:
        side = story.clues.identity
        return f"{text}. In {side} it hands its input on unchanged: switched off there, or in eval mode."
    if story.clues.frozen_buffers:
        return f"{text}. Its buffers do not change in {story.clues.frozen_buffers}: it is in eval mode there."
    if story.clues.class_b:
        return f"{text}; its class is {story.first.module_class} in a and {story.clues.class_b} in b."
    if story.clues.rounding:
        return f"{text}, off by rounding only: another kernel, thread count, device or library, hardly other code."
    if story.clues.dtype_changed:
        return f"{text}, done in another precision."
    causes = "its code, its options, its train or eval mode, the kernel behind it"
    if "parameters" in story.clues.fed and story.clues.batches_before:
        causes += ", or a change to its parameters since they were recorded"
    return f"{text} ({causes})."


def _own_code(story: Story) -> str:
    cause, site = story.cause, story.first.site
    if cause.before:
        where = f"before {cause.before}" + (f" and after {cause.after}" if cause.after else "")
        text = f"{what(site)} differs{apart(story.first)} while everything recorded before it is equal"
        text += scaled(story.first)
        text += f": it is the own forward code of {cause.module}, {where}"
        if story.clues.rounding:
            text += (
                ", and by rounding only: another kernel (another attention, say), library or device, or another order"
            )
        return f"{text}."
    return (
        f"{named(site, story.first.module_class)} gives another output{path_of(site)}{apart(story.first)} "
        "though its inputs and "
        f"the outputs of all modules inside it are equal{scaled(story.first)}: it is its own forward code, "
        f"after {cause.after}."
    )


def _loss(story: Story) -> str:
    first = story.first
    values = both_values(first)
    text = f"{what(first.site)} differs{values or apart(story.first)} while every module output before it is equal"
    text += ", and so are the batches" if story.clues.batches_seen else ""
    text += scaled(first)
    if story.clues.calls:
        name, one, two = story.clues.calls
        text += f"; {name} runs {often(one)} in this step of a and {often(two)} in b"
    end = "the loss code (reduction, mask, weighting)" + ("." if story.clues.batches_seen else " or the targets.")
    return f"{text}: it is {end}"


def _backward(story: Story) -> str:
    first = story.first
    text = (
        f"{what(first.site)} differs{apart(story.first)} while the forward pass, the loss and all gradients before it "
    )
    text += "are equal"
    if first.scale is not None:
        text += f"; b is {first.scale:.6g} times a"
    if story.clues.recomputed:
        return (
            f"{text}: it is the backward pass through {named(first.site, first.module_class)}, which was recomputed "
            "under activation checkpointing: look at what that draws or computes differently (preserve_rng_state)."
        )
    if first.site.kind is Kind.GRAD_INPUT:
        return f"{text}: it is the backward pass through {named(first.site, first.module_class)}."
    return f"{text}: it is the backward pass of what uses that output."


def _gradient(story: Story) -> str:
    first, clues = story.first, story.clues
    text = (
        f"the gradient of {first.site.fqn}, as the optimizer sees it, differs{apart(first)} while forward, loss and "
        "backward are equal"
    )
    if clues.stale:
        return (
            f"{text}: in {clues.stale} it is the other's gradient with that of the step before added. zero_grad is "
            f"missing or late in {clues.stale}."
        )
    if first.scale is not None:
        text += f"; b is {first.scale:.6g} times a"
        return f"{text}: clipping, unscaling, averaging over accumulated batches, or the order of these."
    if clues.rounding:
        return f"{text}, by rounding only: another kernel or order of summation, or a tiny stale part."
    return f"{text}: clipping, unscaling, accumulation or zero_grad, or a change of the gradient by hand."


def _optimizer(story: Story) -> str:
    first, clues = story.first, story.clues
    when = f"within the optimizer step, before its forward pass {first.site.call}" if first.site.call else ""
    where = f"{what(first.site)} differs {when or 'after the optimizer step'}{apart(story.first)}"
    known = [
        word for word, ok in (("gradient", clues.grad_equal), ("value before", clues.value_before_equal)) if ok
    ] or ["all that is known of what went in"]
    if first.site.call:
        known = ["its value before", "everything computed before"]
    text = f"{where} though {' and '.join(known)} {'are' if len(known) > 1 else 'is'} equal"
    name = clues.optimizers or "the optimizer"
    if clues.optimizer_classes:
        one, two = clues.optimizer_classes
        return f"{text}: it is the optimizer, {one} in a and {two} in b."
    if clues.untouched:
        return (
            f"{text}: {name} leaves this parameter as it was in {clues.untouched} (not among its parameters, or lr 0)."
        )
    if clues.fresh:
        return f"{text}: the optimizer state of {clues.fresh} started afresh ({clues.fresh_text})."
    return f"{text}: it is {name} or what it was told{_told(clues.hyperparameters)}."


def _told(hyperparameters: Mapping[str, tuple[str | None, str | None]]) -> str:
    """Differing hyper-parameters, for the middle of a sentence."""
    if not hyperparameters:
        return " (its hyper-parameters are equal where recorded)"
    shown = [f"{name} {a} -> {b}" for name, (a, b) in list(hyperparameters.items())[:3]]
    return f" ({', '.join(shown)})"


def _buffer(story: Story) -> str:
    first = story.first
    owner = story.cause.module
    text = (
        f"{what(first.site)} differs at the end of the step{apart(story.first)} though the inputs of {owner} are equal"
    )
    if story.clues.untouched:
        return f"{text}: it does not change in {story.clues.untouched} (eval mode or frozen there)."
    return f"{text}: it is updated differently (momentum, mode, or a different number of times)."


def _op(story: Story) -> str:
    first = story.first
    line = f", run at {first.source}," if first.source else ""
    text = f"{what(first.site)}{line} differs{apart(story.first)} though all that went into it is equal{scaled(first)}"
    if story.clues.rounding:
        return f"{text}: off by rounding only, so another kernel, thread count, device or library."
    if first.site.phase is Phase.BACKWARD:
        return f"{text}: another way to compute this gradient, or other options of its forward operator."
    return f"{text}: other options, or another kernel behind it."


def _gap(story: Story) -> str:
    first = story.first
    return (
        f"{what(first.site)} differs{apart(first)} and nothing recorded before it does, but step {first.step - 1} was "
        "not recorded, so what went into it is not known: the runs parted here or in the steps left out."
    )


def _propagated(story: Story) -> str:
    first = story.first
    text = f"{what(first.site)} differs{apart(story.first)}, but what went into it differs too or was not compared"
    if story.clues.earliest:
        return f"{text}. The first of all records that differ in this step is {story.clues.earliest}."
    return f"{text}, so the origin lies elsewhere (earlier, or outside of what was selected)."


_TELL = {
    Reason.BATCH: _batch,
    Reason.RNG: _rng,
    Reason.INITIAL: initial_sentence,
    Reason.OUTSIDE: outside_sentence,
    Reason.RESUMED: resumed_sentence,
    Reason.SCRIPT: _script,
    Reason.MODULE: _module,
    Reason.OWN_CODE: _own_code,
    Reason.LOSS: _loss,
    Reason.BACKWARD: _backward,
    Reason.GRADIENT: _gradient,
    Reason.OPTIMIZER: _optimizer,
    Reason.BUFFER: _buffer,
    Reason.STRUCTURE: structure_sentence,
    Reason.OP: _op,
    Reason.GAP: _gap,
    Reason.PROPAGATED: _propagated,
}
