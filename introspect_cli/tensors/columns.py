"""What is known of a step's rows beside their numbers, and the rows as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from introspect_cli.records import Layout, Status
from introspect_cli.tensors import checksum, kernels
from introspect_cli.tensors.views import strides_kind, unobserved

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    import torch

    from introspect_cli.tensors.gpu.engine import Pending
    from introspect_cli.tensors.rows import Arena

    Array = npt.NDArray[Any]


# ---
# What is noted of a step's rows beside their numbers: layouts, what was not seen of them, texts.
#
# In a steady training all but the texts is the same in each step. So what follows from it is computed once and kept
# until it changes: an equal step gets the same object, and whoever has that object knows that nothing has changed.
#
# A run has few layouts, and records many: so a row names its layout by number, and what a checksum begins with (dtype
# and shape mixed) is computed once a layout. Layouts are only ever added, so that a number means the same for the
# whole run.

ALL_OF_IT, BITS_ALONE, NOTHING = range(3)
"""Valid part of a row: checksum and values, the checksum alone, or neither."""

_WITHOUT_ROW: Final = frozenset({Status.NOT_OBSERVED, Status.VALUE})
"""Statuses without a row."""


class Facts(NamedTuple):
    """What is known of n rows before they are computed; read-only.

    Attributes:
        made_of: the numbers of the rows' layouts, the status of rows that were not seen as usual, by slot, what
            checksums begin with where their layout does not tell, and rows of which the checksum alone counts.
        layout_index: the number of each row's layout, uint32 (n,).
        headers: what the checksum of each begins with, uint64 (n,).
        status: `records.Status` of each, uint8 (n,).
        seen: how much of each row counts, uint8 (n,).
    """

    made_of: tuple[list[int], dict[int, Status], dict[int, int], list[int]]
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
        made_of = (layout_of, self._kinds, self.header_of, self.unmeasured)
        if self._facts is None or self._facts.made_of != made_of:
            count, layout_index = len(layout_of), np.array(layout_of, np.uint32)
            headers = np.array(layouts.headers, np.uint64)[layout_index]
            for slot, own in self.header_of.items():
                headers[slot] = own
            status, seen = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
            seen[self.unmeasured] = BITS_ALONE
            for slot, kind in self._kinds.items():
                status[slot] = kind
                if kind in _WITHOUT_ROW:
                    seen[slot] = NOTHING
            self._facts = Facts((layout_of.copy(), *made_of[1:]), layout_index, headers, status, seen)
        return self._facts


class LayoutNumbers:
    """Layouts of one summarizer by number; its lock is held.

    Attributes:
        layouts: them, by number.
        headers: what the checksum of each begins with.
    """

    def __init__(self) -> None:
        """Start without layouts."""
        self.layouts: list[Layout] = []
        self.headers: list[int] = []
        self._numbers: dict[Layout, int] = {}
        self._on_cpu: dict[tuple[torch.dtype, torch.Size, tuple[int, ...]], int] = {}

    def number_of(self, layout: Layout) -> int:
        """Number of a layout; at its first call the layout is appended to `layouts` and gets the next number."""
        index = self._numbers.get(layout)
        if index is None:
            index = len(self._numbers)
            self.headers[index:] = [checksum.header(layout.dtype, layout.shape)]
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


# ---
# A step's rows as columns: checksums, statistics, sketches, written by position into arrays that stay.
#
# Most steps have the same records as the one before, of the same slots. So the columns have their place in arrays of
# the caller's, which are those of the store's message, and what is the same in each step is put there once. The rest
# is one call of the compiled kernels.
#
# Rows that devices still compute are waited for later, so that the script goes on meanwhile (`EndedRows`).


class Columns:
    """Arrays of n records, each record of one slot.

    Attributes:
        arrays: "checksum", and those that are wanted of "layout", "status", statistics and "sketch", by name. With
            "value", equal records are there once, and it has the row of each.
        rows: how many rows of the others count.
        slots: the slot of each record; another list when it has changed.
        layout: the number of each record's layout, uint32 (n,); another array when it has changed.
        texts: of records that have one, by record.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        """Note the addresses of these arrays, of the store's types, which must never move; `fill` writes to them."""
        self.arrays, self.rows = arrays, 0
        self.slots: list[int] = []
        self.layout = np.zeros(0, np.uint32)
        self.texts: dict[int, str] = {}
        self._facts: Facts | None = None  # that what follows is made of
        self._noted: list[tuple[int, int]] = []
        self._picked: tuple[Array, ...] = ()
        self._addresses: tuple[int, ...] = ()
        order = (arrays.get(name) for name in kernels.COLUMNS)
        # where the kernels put each column, 0 for those not wanted
        self._targets = np.array([0 if array is None else array.ctypes.data for array in order], np.uint64)

    def fill(self, arena: Arena, facts: Facts, slots: list[int], fixed: dict[int, int], texts: dict[int, str]) -> None:
        """Write the records' rows to `arrays`, and set `slots`, `layout` and `texts`.

        `layout` has the records' order, and stays the same object while facts and slots are those of the last call.
        `texts` has each text that is not empty, by its record's place in that order.

        Args:
            arena: the rows.
            facts: layout and status of all rows.
            slots: the slot of each record, in the records' order.
            fixed: checksums that are not sums, by slot.
            texts: texts by slot, of all slots with a status.
        """
        if facts is not self._facts or slots != self.slots:
            self._set_unchanging(facts, slots)
        rows = arena.block_addresses, arena.rows_per_block
        places = self.arrays.get("value")
        placed = 0 if places is None else places.ctypes.data
        self.rows = kernels.KERNELS.columns(*rows, *self._addresses, len(slots), placed, self._targets.ctypes.data)
        for record, slot in self._noted:
            if slot in fixed:
                self.arrays["checksum"][record if places is None else places[record]] = fixed[slot]
        self.texts = {record: texts[slot] for record, slot in self._noted if texts[slot]}

    def _set_unchanging(self, facts: Facts, slots: list[int]) -> None:
        """Set what stays the same while `facts` and `slots` do: layouts, headers, which records have texts.

        Args:
            facts: of all rows.
            slots: the slot of each record.
        """
        self._facts = None
        pick = np.array(slots, np.uint32)
        self.layout = facts.layout_index[pick]
        self._picked = picked = (pick, facts.headers[pick], facts.seen[pick], facts.status[pick], self.layout)
        self._addresses = tuple(array.ctypes.data for array in picked)
        self._noted = [(record, slot) for record, slot in enumerate(slots) if slot in facts.made_of[1]]
        self.slots = slots
        self._facts = facts


@dataclass
class EndedRows:
    """The rows of a step that has ended, of which devices may still compute some.

    Without rows on devices the columns are filled at once, else when `finish` is called.

    Attributes:
        wanted: columns, and the slots of their records.
        arena: all rows; where devices compute some, a copy of those in host memory.
        facts: what is known of them before their numbers are.
        notes: checksums that are not sums, and texts, by slot.
        pending: the rows on devices.
    """

    wanted: Sequence[tuple[Columns, list[int]]]
    arena: Arena
    facts: Facts
    notes: tuple[dict[int, int], dict[int, str]]
    pending: list[Pending]

    def __post_init__(self) -> None:
        """Fill the columns where no device computes rows."""
        if not self.pending:
            self.finish()

    @property
    def is_waiting(self) -> bool:
        """Whether a device computes some rows and `finish` was not called: the columns are not filled then."""
        return bool(self.pending)

    def is_ready(self) -> bool:
        """Whether `finish` may be called now, waiting or not: it may not while a CUDA graph is being captured.

        Queues the copies to the host that have not been queued yet.
        """
        return all(pending.is_ready() for pending in self.pending)

    def finish(self) -> None:
        """Wait for the devices and fill all columns, where that has not been done; later calls do nothing."""
        if self.pending:
            with unobserved():
                for pending in self.pending:
                    pending.fill(self.arena.blocks[0])
        for columns, slots in self.wanted:
            columns.fill(self.arena, self.facts, slots, *self.notes)
        self.pending, self.wanted = [], ()
