"""Where a step's rows lie: blocks that never move, since kernels and what is known of memory hold addresses in them.

They are used again in every step, and grow with the largest one.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from introspect_cli.tensors import rows as r

ROWS: Final = 1024
"""Rows in one block."""


class Arena:
    """Rows by slot.

    Attributes:
        blocks: each of as many rows.
        addresses: of each row; the compiled intake has the list too.
    """

    def __init__(self) -> None:
        self.blocks: list[r.Rows] = []
        self.addresses: list[int] = []
        self._starts = np.zeros(0, np.uint64)
        self._place = 0

    def hold(self, count: int) -> None:
        """Have so many rows, at least."""
        while len(self.addresses) < count:
            self.blocks.append(r.empty(ROWS))
            first = self.blocks[-1].ctypes.data
            self.addresses.extend(range(first, first + ROWS * r.ROW_BYTES, r.ROW_BYTES))

    def address(self, slot: int) -> int:
        """Where a slot's row is, made if there is none yet."""
        if slot >= len(self.addresses):
            self.hold(slot + 1)
        return self.addresses[slot]

    @property
    def place(self) -> int:
        """Where the addresses of the blocks lie, 64 bits each."""
        if len(self._starts) * ROWS != len(self.addresses):
            self._starts = np.array(self.addresses[::ROWS], np.uint64)
            self._place = self._starts.ctypes.data
        return self._place

    def row(self, slot: int) -> r.Rows:
        """The row of a slot that there is, shape (32,)."""
        block, place = divmod(slot, ROWS)
        row: r.Rows = self.blocks[block][place]
        return row

    def clear(self) -> None:
        """Let go of all."""
        self.blocks.clear()
        self.addresses.clear()
