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
"""Labels that are numbers."""


def step_words(step: int, labels: Labels) -> str:
    """A step with its labels, `step 412 (epoch 3, batch 12)`; `step 412` where no label is worth a word."""
    words = label_words(step, labels)
    return f"step {step} ({words})" if words else f"step {step}"


def both_words(step: int, labels: Labels, step_b: int, labels_b: Labels) -> str:
    """A pair of compared steps in words: `step 412 of a (epoch 3, batch 12; step 0 of b)`, or `step 412 (epoch 3)`.

    The number is given once where it is one for both; labels of b (`; in b epoch 4`) only where they differ from a's.
    Of two steps with one number, where one has no labels the other's are said of both.
    """
    if step != step_b:
        words, words_b = label_words(step, labels), label_words(step_b, labels_b)
        start = f"step {step} of a ({words}; step {step_b} of b" if words else f"step {step} of a (step {step_b} of b"
        return f"{start}: {words_b})" if words_b and words_b != words else f"{start})"
    words, words_b = label_words(step, labels), label_words(step, labels_b)
    if not words or not words_b or words == words_b:
        return step_words(step, labels or labels_b)
    return f"step {step} ({words}; in b {words_b})"


def label_words(step: int, labels: Labels) -> str:
    """Labels as words, `epoch 3, batch 12`; "" where there is nothing to say.

    In the order stage, `global_step`, epoch, batch. The stage is left out where it is `train`, `global_step` where it
    equals `step`; framework and accumulation always.
    """
    words = []
    if labels.get("stage", "train") != "train":
        words.append(f"stage {labels['stage']}")
    if labels.get("global_step", step) != step:
        words.append(f"global_step {label_text(labels['global_step'])}")
    if "epoch" in labels:
        words.append(f"epoch {label_text(labels['epoch'])}")
    if "batch" in labels:
        several = isinstance(labels["batch"], tuple)
        words.append(f"{'batches' if several else 'batch'} {label_text(labels['batch'])}")
    return ", ".join(words)


def label_text(label: Label) -> str:
    """A label as text: `3-5` for a range, 4 significant digits of a float, anything else as it is."""
    if isinstance(label, tuple):
        return f"{label[0]}-{label[1]}"
    return f"{label:.4g}" if isinstance(label, float) else str(label)
