"""The samples of a batch summarised one by one, on request: so that a comparison can say which of them differs.

A batch of 512 in which one sample is wrong has one checksum that differs. With `--per-sample` each index of the first
dimension of a batch, an activation or its gradient gets a checksum and a sketch of its own, kept beside the record
under a number that follows from its checksum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Kind
from introspect_cli.sums import samples_key
from introspect_cli.tensors.special import PLAIN, is_wrapped

if TYPE_CHECKING:
    import torch

    from introspect_cli.store.writer import StoreWriter
    from introspect_cli.tensors.summarizer import Summarizer
    from introspect_cli.tensors.table import SummaryTable

KINDS = frozenset({Kind.BATCH, Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT})
"""What may hold a batch."""

MOST = 1024
"""Samples of a tensor, at most."""


@dataclass(frozen=True)
class Samples:
    """A tensor and its samples, until their summaries are known.

    Attributes:
        slot: the summarizer's slot of the tensor.
        parts: those of its samples.
    """

    slot: int
    parts: list[int]

    def key(self, table: SummaryTable) -> int:
        """The number they are stored under."""
        return samples_key(int(table.checksum[self.slot]))

    def save(self, store: StoreWriter, table: SummaryTable) -> None:
        """Store checksum and, where there are any, sketch of each: rows of 8 or 72 bytes.

        Raises:
            StoreError: they cannot be written.
        """
        columns = [table.checksum[self.parts].astype("<u8").view(np.uint8).reshape(len(self.parts), 8)]
        if table.sketch is not None:
            columns.append(table.sketch[self.parts].astype("<f4").view(np.uint8).reshape(len(self.parts), 64))
        data = np.concatenate(columns, axis=1)
        store.save_tensor(self.key(table), np.ascontiguousarray(data).data, "uint8", data.shape)


def sampled(summarizer: Summarizer, slot: int, value: torch.Tensor) -> Samples | None:
    """Summarise the samples of a tensor; None of what has no batch dimension, or is no plain tensor."""
    if type(value) not in PLAIN or is_wrapped(value) or not value.dim() or not 1 < len(value) <= MOST:
        return None
    return Samples(slot, [summarizer.add(part) for part in summarizer.parts(value)])
