"""The samples of a batch: the sum of their checksums unasked, and each summarised by itself on request.

Ranks that share out a batch have none of the checksums of one process; the sums of their samples' checksums add up,
whichever rank has which sample.

A batch of 512 in which one sample is wrong has one checksum that differs. With `--per-sample` each index of the first
dimension of a batch, an activation or its gradient gets a checksum and a sketch of its own, kept beside the record
under a number that follows from its checksum: so a comparison can say which of them differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Kind, Phase
from introspect_cli.sums import samples_key
from introspect_cli.tensors.cpu import sum_of_samples
from introspect_cli.tensors.places import Placed
from introspect_cli.tensors.special import PLAIN, is_wrapped
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from numpy.typing import NDArray

    from introspect_cli.records import Site
    from introspect_cli.store.write.run_writer import StoreWriter
    from introspect_cli.tensors.summarizer import Summarizer

KINDS = frozenset({Kind.BATCH, Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT})
"""What may hold a batch."""

MOST = 1024
"""Samples of a tensor, at most."""

MOST_ELEMENTS = 1 << 18
"""Elements of a model's input of which the samples are looked at in each step, at most."""


@dataclass(frozen=True)
class Samples:
    """A tensor and its samples, until their summaries are known.

    Attributes:
        slot: the summarizer's slot of the tensor.
        parts: those of its samples.
    """

    slot: int
    parts: list[int]

    @staticmethod
    def save(
        store: StoreWriter, checksum: int, checksums: NDArray[np.uint64], sketches: NDArray[np.float32] | None
    ) -> int:
        """Store checksum and, where there are any, sketch of each sample: rows of 8 or 72 bytes.

        Args:
            store: where.
            checksum: of the tensor.
            checksums: of its samples.
            sketches: of its samples.

        Returns:
            the number that they are stored under.

        Raises:
            StoreError: they cannot be written.
        """
        columns = [checksums.astype("<u8").view(np.uint8).reshape(len(checksums), 8)]
        if sketches is not None:
            columns.append(sketches.astype("<f4").view(np.uint8).reshape(len(checksums), 64))
        data = np.concatenate(columns, axis=1)
        key = samples_key(checksum)
        store.save_tensor(key, np.ascontiguousarray(data).data, "uint8", data.shape)
        return key


def sampled(summarizer: Summarizer, slot: int, value: torch.Tensor) -> Samples | None:
    """Summarise the samples of a tensor; None of what has no batch dimension, or is no plain tensor."""
    if type(value) not in PLAIN or is_wrapped(value) or not value.dim() or not 1 < len(value) <= MOST:
        return None
    return Samples(slot, [summarizer.add(part) for part in summarizer.parts(value)])


@dataclass(frozen=True)
class StepSamples:
    """What is kept of the samples of a step's tensors.

    Attributes:
        each: tensors whose samples were summarised one by one.
        sums: of some slots of the summarizer, the checksums of the samples added up.
    """

    each: list[Samples] = field(default_factory=list)
    sums: dict[int, int] = field(default_factory=dict)


class SampleKeeper:
    """Decides what is kept of samples, and holds it for the current step.

    Of batches their sum always, and of what goes into the model: a loader may be asked for batches of later steps. Of
    activations in the first step: after that, ranks have added up gradients in another order, and no sample of a
    layer's output has the same bits. On request, each sample by itself.

    Attributes:
        batches: numbers of the sites of batches, and of the model's inputs.
        activations: those of activations, in the first step.
        first: whether this is the first step.
        step: what is kept of the current step so far.
    """

    def __init__(self, summarizer: Summarizer, *, each: bool) -> None:
        self._summarizer = summarizer
        self._each = each
        self.step = StepSamples()
        self.batches: set[int] = set()
        self.activations: set[int] = set()
        self.first = True
        self._model = ""

    def met(self, number: int, site: Site) -> None:
        """Hear of a site and its number."""
        if site.kind is Kind.BATCH or self._goes_into_the_model(site):
            self.batches.add(number)
        elif self.first and site.kind in KINDS:
            self.activations.add(number)

    def _goes_into_the_model(self, site: Site) -> bool:
        """Whether it is an input of the model that ran first."""
        if site.kind is not Kind.INPUT or site.phase is not Phase.FORWARD or "." in site.fqn:
            return False
        self._model = self._model or site.fqn
        return site.fqn == self._model

    def first_is_over(self) -> None:
        """From the next step on, batches alone count."""
        self.first = False
        self.activations.clear()

    def looks_at(self, sites: Iterable[int]) -> bool:
        """Whether anything may be kept of tensors at these sites."""
        return self._each or self.first or not self.batches.isdisjoint(sites)

    def note(self, site: int, kind: Kind, slot: int, value: torch.Tensor | Placed) -> None:
        """Keep what is to be kept of a tensor that has been recorded."""
        if kind not in KINDS:
            return
        if (self.first or site in self.batches) and not isinstance(value, Placed) and self._is_short(kind, value):
            total = sum_of_samples(value)
            if total is not None:
                self.step.sums[slot] = total
        if self._each:
            samples = sampled(self._summarizer, slot, value.local if isinstance(value, Placed) else value)
            if samples is not None:
                self.step.each.append(samples)

    def _is_short(self, kind: Kind, value: torch.Tensor) -> bool:
        """Whether it costs nothing to read a tensor once more: a model's input that is as large as images is not."""
        if self.first or kind is Kind.BATCH:
            return True
        with unobserved():
            return value.numel() <= MOST_ELEMENTS

    def forget_step(self) -> None:
        """Hold nothing of the current step any more; what was handed on stays as it is."""
        self.step = StepSamples()
