"""Layouts met so far, numbered: a run has few, and records many.

A row names its layout by number, and what a checksum begins with (dtype and shape mixed) is computed once a layout.
Layouts are only ever added, so that a number means the same for the whole run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Layout
from introspect_cli.tensors import checksum
from introspect_cli.tensors.views import strides_kind

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


class KnownLayouts:
    """The layouts of one summarizer; its lock is held.

    Attributes:
        known: them, by number.
        sample_headers: of each, what the checksum of one of a tensor's samples begins with.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.known: list[Layout] = []
        self.sample_headers: list[int] = []
        self._headers: list[int] = []
        self._array = np.zeros(0, dtype=np.uint64)
        self._numbers: dict[Layout, int] = {}
        self._contiguous: dict[tuple[torch.dtype, torch.Size], int] = {}
        self._strided: dict[tuple[torch.dtype, torch.Size, tuple[int, ...]], int] = {}

    def number(self, layout: Layout) -> int:
        """The number of a layout, a new one if it has not been met."""
        index = self._numbers.get(layout)
        if index is None:
            index = len(self.known)
            self._headers[index:] = [checksum.header(layout.dtype, layout.shape)]
            self.sample_headers[index:] = [checksum.header(layout.dtype, layout.shape[1:])]
            self.known.append(layout)
            self._numbers[layout] = index  # the last: whatever ends this early, no number has another's layout
        return index

    def contiguous(self, dtype: torch.dtype, shape: torch.Size) -> int:
        """The number of the layout of a contiguous tensor in CPU memory; without words where it has been met."""
        index = self._contiguous.get((dtype, shape))
        if index is None:
            name = str(dtype).removeprefix("torch.")
            index = self._contiguous[dtype, shape] = self.number(Layout(tuple(shape), name, "cpu", "contiguous"))
        return index

    def strided(self, tensor: torch.Tensor) -> int:
        """The number of the layout of a strided tensor in CPU memory."""
        met = tensor.dtype, tensor.shape, tensor.stride()
        index = self._strided.get(met)
        if index is None:
            name = str(tensor.dtype).removeprefix("torch.")
            index = self.number(Layout(tuple(tensor.shape), name, "cpu", strides_kind(tensor)))
            self._strided[met] = index
        return index

    def headers(self) -> NDArray[np.uint64]:
        """Of each layout, what a tensor's checksum begins with, uint64 (n,)."""
        if len(self._array) != len(self._headers):
            self._array = np.array(self._headers, dtype=np.uint64)
        return self._array
