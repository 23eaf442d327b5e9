"""What is noted of a step's rows beside their numbers: layouts, what was not seen of them, texts.

In a steady training all but the texts is the same in each step. So what follows from it is computed once and kept
until it changes: an equal step gets the same object, and whoever has that object knows that nothing has changed.

A run has few layouts, and records many: so a row names its layout by number, and what a checksum begins with (dtype and
shape mixed) is computed once a layout. Layouts are only ever added, so that a number means the same for the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from introspect_cli.records import Layout, Status
from introspect_cli.tensors import checksum
from introspect_cli.tensors.views import strides_kind

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from numpy.typing import NDArray


ALL_OF_IT, BITS_ALONE, NOTHING = range(3)
"""Valid part of a row: checksum and values, the checksum alone, or neither."""

_WITHOUT_ROW: Final = frozenset({Status.NOT_OBSERVED, Status.VALUE})
"""Statuses without a row."""


@dataclass(frozen=True, eq=False)
class Facts:
    """What is known of n rows before they are computed; read-only.

    Attributes:
        layout_of: the number of each row's layout.
        kinds: the status of rows that were not seen as usual.
        header_of: what checksums begin with where their layout does not tell.
        unmeasured: rows of which the checksum alone counts.
        layout_index: `layout_of` as uint32 (n,).
        headers: what the checksum of each begins with, uint64 (n,).
        status: `records.Status` of each, uint8 (n,).
        seen: how much of each row counts, uint8 (n,).
    """

    layout_of: list[int]
    kinds: dict[int, Status]
    header_of: dict[int, int]
    unmeasured: list[int]
    layout_index: npt.NDArray[np.uint32]
    headers: npt.NDArray[np.uint64]
    status: npt.NDArray[np.uint8]
    seen: npt.NDArray[np.uint8]


class RowNotes:
    """The notes of the current step, by slot; the summarizer's lock is held.

    Attributes:
        texts: a plain value's repr, or why something was not observed.
        fixed: checksums that are not sums: of plain values.
        header_of: what checksums begin with where their layout does not tell.
        unmeasured: slots of which the checksum alone counts.
    """

    def __init__(self) -> None:
        """Start without notes."""
        self._facts: Facts | None = None
        self.clear()

    def clear(self) -> None:
        """Drop all notes of the step; only its `Facts` object stays, which the next step may get again."""
        self._kinds: dict[int, Status] = {}
        self.texts: dict[int, str] = {}
        self.fixed: dict[int, int] = {}
        self.header_of: dict[int, int] = {}
        self.unmeasured: list[int] = []

    def set_status(self, slot: int, status: Status, text: str) -> None:
        """Set status and text of the row at `slot`, replacing earlier ones; rows that have none set are OBSERVED."""
        self._kinds[slot] = status
        self.texts[slot] = text

    def facts(self, layout_of: list[int], layouts: LayoutNumbers) -> Facts:
        """Facts of the step's rows; the same object as at the last call where all that they are made of is equal.

        Args:
            layout_of: the number of each row's layout, by slot.
            layouts: the layouts by number, which have the checksum headers.
        """
        last = self._facts
        if (
            last is None
            or layout_of != last.layout_of
            or self._kinds != last.kinds
            or self.header_of != last.header_of
            or self.unmeasured != last.unmeasured
        ):
            self._facts = last = self._new_facts(layout_of.copy(), layouts)
        return last

    def _new_facts(self, layout_of: list[int], layouts: LayoutNumbers) -> Facts:
        """Build the facts of the step's rows; `layout_of` becomes part of them, so it must be a copy."""
        count, layout_index = len(layout_of), np.array(layout_of, np.uint32)
        headers = layouts.headers()[layout_index]
        for slot, own in self.header_of.items():
            headers[slot] = own
        status, seen = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
        seen[self.unmeasured] = BITS_ALONE
        for slot, kind in self._kinds.items():
            status[slot] = kind
            if kind in _WITHOUT_ROW:
                seen[slot] = NOTHING
        return Facts(layout_of, self._kinds, self.header_of, self.unmeasured, layout_index, headers, status, seen)


class LayoutNumbers:
    """Layouts of one summarizer by number; its lock is held.

    Attributes:
        layouts: them, by number.
    """

    def __init__(self) -> None:
        """Start without layouts."""
        self.layouts: list[Layout] = []
        self._headers: list[int] = []
        self._array = np.zeros(0, dtype=np.uint64)
        self._numbers: dict[Layout, int] = {}
        self._on_cpu: dict[tuple[torch.dtype, torch.Size, tuple[int, ...]], int] = {}

    def number_of(self, layout: Layout) -> int:
        """Number of a layout; at its first call the layout is appended to `layouts` and gets the next number."""
        index = self._numbers.get(layout)
        if index is None:
            index = len(self._numbers)
            self._array = self._array[:0]
            self._headers[index:] = [checksum.header(layout.dtype, layout.shape)]
            self.layouts[index:] = [layout]  # where an exception left one without its number, that one goes
            self._numbers[layout] = index  # the last: whatever ends this early, no number has another's layout
        return index

    def number_on_cpu(self, tensor: torch.Tensor) -> int:
        """Number of the layout of a strided tensor in CPU memory, see `number_of`; cached by dtype, sizes, strides."""
        key = tensor.dtype, tensor.shape, tensor.stride()
        index = self._on_cpu.get(key)
        if index is None:
            name = str(tensor.dtype).removeprefix("torch.")
            index = self.number_of(Layout(tuple(tensor.shape), name, "cpu", strides_kind(tensor)))
            self._on_cpu[key] = index
        return index

    def headers(self) -> NDArray[np.uint64]:
        """What the checksum of each layout begins with, uint64 (n,), by layout number; rebuilt after a new layout."""
        if len(self._array) != len(self._headers):
            self._array = np.array(self._headers, dtype=np.uint64)
        return self._array
