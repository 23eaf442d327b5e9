"""One tensor's raw result as a row of 32 eight-byte words.

Kernels in two languages (C++ on CPUs, Triton on GPUs) fill results that must be merged over chunks, threads and
shards, and finalised for a whole step at once. So there is one fixed row layout. Words 0 to 5 are integers, the rest
float64; a step is an array of rows, read as either type through a view.

Kernels, and what is known of memory, hold addresses of rows. So a step's rows lie in blocks that never move, which are
used again in every step and grow with the largest one.

Identities of an empty row (no finite element): minima +inf, maximum -inf, everything else 0.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

RAW, FINITE, NANS, POSINFS, NEGINFS, ZEROS, MIN, MAX, ABSMIN, MEAN, M2, M3, M4, ABSSUM, MEDIAN, MODE = range(16)
"""Words: the position-keyed sum modulo 2**64, before the finaliser (uint64); numbers of elements (int64); then float64.
M2 is the sum of squared deviations from the mean, M3 and M4 of cubes and fourth powers, ABSSUM that of sizes."""
SAMPLE: Final = MEDIAN
"""Eight bytes from the middle of a large tensor, by which the intake tells whether a second look is worth it. Whoever
wants medians does not look a second time."""
SKETCH: Final = 16
"""First of 16 sketch values."""

WORDS: Final = 32
"""Words in a row."""
ROW_BYTES: Final = 8 * WORDS

Rows = npt.NDArray[np.uint64]
"""Rows, shape (n, 32)."""


def empty(count: int) -> Rows:
    """New rows as of tensors without elements, shape (count, 32): what merging starts from."""
    rows = np.zeros((count, WORDS), dtype=np.uint64)
    floats = rows.view(np.float64)
    floats[:, [MIN, ABSMIN]] = np.inf
    floats[:, MAX] = -np.inf
    floats[:, [MEDIAN, MODE]] = np.nan
    return rows


ROWS: Final = 1024
"""Rows in one block; the compiled intake knows it, too."""


class Arena:
    """Rows by slot.

    Attributes:
        blocks: memory of rows, shape (rows_per_block, 32) each.
        rows_per_block: how many.
        addresses: of each row; the compiled intake has the list too.
    """

    def __init__(self) -> None:
        """Start without rows; `reserve` and `address` allocate them."""
        self.blocks: list[Rows] = []
        self.rows_per_block = ROWS
        self.addresses: list[int] = []
        self._starts = np.zeros(0, np.uint64)
        self._block_addresses = 0

    def reserve(self, count: int) -> None:
        """Allocate whole blocks until there are at least `count` rows; rows that are there stay where they are."""
        while len(self.addresses) < count:
            self.blocks.append(empty(ROWS))
            first = self.blocks[-1].ctypes.data
            self.addresses.extend(range(first, first + ROWS * ROW_BYTES, ROW_BYTES))

    def address(self, slot: int) -> int:
        """Address of a slot's row; allocates all rows up to it where it is missing."""
        if slot >= len(self.addresses):
            self.reserve(slot + 1)
        return self.addresses[slot]

    @property
    def block_addresses(self) -> int:
        """Address of an array of the blocks' addresses, uint64 each; it may change when a block is added."""
        if len(self._starts) != len(self.blocks):
            self._starts = np.array([block.ctypes.data for block in self.blocks], np.uint64)
            self._block_addresses = self._starts.ctypes.data
        return self._block_addresses

    def row(self, slot: int) -> Rows:
        """View of the row of a slot that was allocated before, shape (32,)."""
        block, place = divmod(slot, ROWS)
        row: Rows = self.blocks[block][place]
        return row

    def copy(self, count: int) -> Arena:
        """An arena with a copy of the first `count` rows in one block; it has no `addresses` and must not grow."""
        made = Arena()
        made.blocks, made.rows_per_block = [np.concatenate([empty(0), *self.blocks])[:count]], max(count, 1)
        return made

    def clear(self) -> None:
        """Free all rows; their addresses must not be used any more."""
        self.blocks.clear()
        self.addresses.clear()
