"""A step's rows as columns: checksums, statistics, sketches, written by position into arrays that stay.

Most steps have the same records as the one before, of the same slots. So the columns have their place in arrays of the
caller's, which are those of the store's message, and what is the same in each step is put there once. The rest is one
call of the compiled kernels.

Rows that devices still compute are waited for later, so that the script goes on meanwhile (`EndedRows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.tensors import kernels
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from introspect_cli.tensors.gpu.buffers import Pending
    from introspect_cli.tensors.row_notes import Facts
    from introspect_cli.tensors.rows import Arena

    Array = npt.NDArray[Any]


class Columns:
    """Arrays of n records, each record of one slot.

    Attributes:
        arrays: "checksum", and those that are wanted of "status", statistics and "sketch", by name.
        slots: the slot of each record; another list when it has changed.
        layout: the number of each record's layout, uint32 (n,); another array when it has changed.
        texts: of records that have one, by record.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        """Note the addresses of these arrays, of the store's types, which must never move; `fill` writes to them."""
        self.arrays = arrays
        self.slots: list[int] = []
        self.layout = np.zeros(0, np.uint32)
        self.texts: dict[int, str] = {}
        self._facts: Facts | None = None  # that what follows is made of
        self._noted: list[tuple[int, int]] = []
        self._picked: tuple[Array, Array, Array] = (np.zeros(0),) * 3
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
        kernels.KERNELS.columns(*rows, *self._addresses, len(slots), self._targets.ctypes.data)
        for record, slot in self._noted:
            if slot in fixed:
                self.arrays["checksum"][record] = fixed[slot]
        self.texts = {record: texts[slot] for record, slot in self._noted if texts[slot]}

    def _set_unchanging(self, facts: Facts, slots: list[int]) -> None:
        """Set what stays the same while `facts` and `slots` do: layouts, status, headers, which records have texts.

        Args:
            facts: of all rows.
            slots: the slot of each record.
        """
        self._facts = None
        pick = np.array(slots, np.uint32)
        self.layout = facts.layout_index[pick]
        if "status" in self.arrays:
            self.arrays["status"][:] = facts.status[pick]
        self._picked = picked = (pick, facts.headers[pick], facts.seen[pick])
        self._addresses = tuple(array.ctypes.data for array in picked)
        self._noted = [(record, slot) for record, slot in enumerate(slots) if slot in facts.kinds]
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
        for pending in self.pending:
            pending.send()
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
