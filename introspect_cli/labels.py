"""What a training framework calls a step, beside the number that we give it.

People know "epoch 3, batch 12" and their framework's `global_step`, not how many optimizer steps a capture has seen;
after a resume the two differ. A framework's own numbers are kept with each step as labels. They name a step and are
never compared: two runs do not diverge because one counts from a checkpoint on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from introspect_cli.errors import UsageError, did_you_mean
from introspect_cli.schedule.rules import span_of

if TYPE_CHECKING:
    from introspect_cli.schedule.rules import Span

Label: TypeAlias = "int | float | str | tuple[int, int]"
"""A number, a word, or the first and last of a range (the batches of an accumulated step)."""

Labels = Mapping[str, Label]

NAMES: tuple[str, ...] = ("framework", "stage", "global_step", "epoch", "batch", "accumulation")
"""All labels there are, in the order in which they are shown."""

NUMBERED: tuple[str, ...] = ("global_step", "epoch", "batch", "accumulation")
"""Labels that are numbers."""

LABELS_HELP = "give names of a framework for steps, such as epoch=3,batch=12 or epoch=2:5"


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


# Steps asked for by their labels.


@dataclass(frozen=True)
class Labelled:
    """Steps selected by labels (`epoch=3,batch=12`), to be looked up in a run.

    Attributes:
        text: as it was written.
        spans: by label, the numbers that count; a range of batches is meant by each number in it.
        words: by label, the word that counts.
    """

    text: str
    spans: tuple[tuple[str, Span], ...] = ()
    words: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Labelled:
        """Parse conditions separated by commas, all of which must hold: `epoch=3,batch=10:20,stage=train`.

        Raises:
            UsageError: a condition is not `name=value`, or its label or number is unknown.
        """
        spans, named = [], []
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or not value:
                raise UsageError(f"{part.strip()!r} names no step: {LABELS_HELP}")
            if name not in NAMES:
                hint = did_you_mean(name, NAMES) or f"; choose from {', '.join(NAMES)}"
                raise UsageError(f"steps have no label {name!r}{hint}: {LABELS_HELP}")
            if name in NUMBERED:
                spans.append((name, span_of(value, text)))
            else:
                named.append((name, value))
        return cls(text, tuple(spans), tuple(named))

    def means(self, labels: Labels) -> bool:
        """Whether a step with these labels fulfils all conditions; a missing label does not fulfil its condition."""
        return all(_is_within(labels.get(name), span) for name, span in self.spans) and all(
            labels.get(name) == word for name, word in self.words
        )

    def __str__(self) -> str:
        return self.text


def _is_within(label: Label | None, span: Span) -> bool:
    """Whether a number (a fraction rounded down), or any number of an inclusive range, is in the span.

    False for a text, for None, and for a range of more than 2**20 numbers.
    """
    if isinstance(label, tuple):
        return label[1] - label[0] < 1 << 20 and any(map(span.wants, range(label[0], label[1] + 1)))
    return isinstance(label, (int, float)) and span.wants(math.floor(label))
