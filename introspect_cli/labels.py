"""What a training framework calls a step, beside the number that we give it.

People know "epoch 3, batch 12" and their framework's `global_step`, not how many optimizer steps a capture has seen;
after a resume the two differ. A framework's own numbers are kept with each step as labels. They name a step and are
never compared: two runs do not diverge because one counts from a checkpoint on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Label: TypeAlias = "int | float | str | tuple[int, int]"
"""A number, a word, or the first and last of a range (the batches of an accumulated step)."""

Labels = Mapping[str, Label]

NAMES: tuple[str, ...] = ("framework", "stage", "global_step", "epoch", "batch", "accumulation")
"""All labels there are, in the order in which they are shown."""

NUMBERED: tuple[str, ...] = ("global_step", "epoch", "batch", "accumulation")
"""Those that are numbers."""


def step_words(step: int, labels: Labels) -> str:
    """A step with what its framework calls it: `step 412 (epoch 3, batch 12)`."""
    told = label_words(step, labels)
    return f"step {step} ({told})" if told else f"step {step}"


def both_words(step: int, labels: Labels, step_b: int, labels_b: Labels) -> str:
    """The step of a and that of b which it is compared with: `step 412 of a (epoch 3, batch 12) (step 0 of b)`."""
    if step != step_b:
        told, told_b = label_words(step, labels), label_words(step_b, labels_b)
        own = f"step {step} of a ({told}; step {step_b} of b" if told else f"step {step} of a (step {step_b} of b"
        return f"{own}: {told_b})" if told_b and told_b != told else f"{own})"
    told, told_b = label_words(step, labels), label_words(step, labels_b)
    if not told or not told_b or told == told_b:
        return step_words(step, labels or labels_b)
    return f"step {step} ({told}; in b {told_b})"


def label_words(step: int, labels: Labels) -> str:
    """What a framework calls a step, `epoch 3, batch 12`; its `global_step` only where that is not our number."""
    words = []
    if labels.get("stage", "train") != "train":
        words.append(f"stage {labels['stage']}")
    if labels.get("global_step", step) != step:
        words.append(f"global_step {shown(labels['global_step'])}")
    if "epoch" in labels:
        words.append(f"epoch {shown(labels['epoch'])}")
    if "batch" in labels:
        several = isinstance(labels["batch"], tuple)
        words.append(f"{'batches' if several else 'batch'} {shown(labels['batch'])}")
    return ", ".join(words)


def shown(label: Label) -> str:
    """A label as text; of a range both ends, of a fraction four digits."""
    if isinstance(label, tuple):
        return f"{label[0]}-{label[1]}"
    return f"{label:.4g}" if isinstance(label, float) else str(label)
