"""The samples of a batch, each summarised by itself on request.

A batch of 512 in which one sample is wrong has one checksum that differs. With `--per-sample` each index of the first
dimension of a batch, an activation or its gradient gets a checksum and a sketch of its own, kept beside the record
under a number that follows from its checksum: so a comparison can say which of them differs.
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
    from numpy.typing import NDArray

    from introspect_cli.store.write.run_writer import StoreWriter
    from introspect_cli.tensors.summarizer import Summarizer

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
