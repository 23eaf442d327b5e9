"""Where a step's columns are put once and for all: arrays that the store writes as they are.

Most steps have the same records as the one before, of the same slots: then one call of the kernels fills all arrays,
and nothing else of the step is looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.tensors import kernels
from introspect_cli.tensors.arena import ROWS
from introspect_cli.tensors.columns import COMPILED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from introspect_cli.tensors.arena import Arena
    from introspect_cli.tensors.row_notes import Facts, RowNotes

    Array = NDArray[Any]

_OTHERS = {"site", "sequence", "layout"}
"""Columns that do not follow from rows."""


class Target:
    """Arrays of n records, each record of one slot.

    Attributes:
        slots: the slot of each record; another list when it has changed.
        layout_index: the layout of each record as the summarizer numbers them, uint32 (n,); another array when it
            has changed.
        texts: of records that have one, by record.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        """Take over arrays by name; see `over`."""
        self.layout_index: NDArray[np.uint32] | None = None
        self.texts: dict[int, str] = {}
        self._status, self._checksum = arrays["status"], arrays["checksum"]
        addresses = [arrays[name].ctypes.data if name in arrays else 0 for name in ("checksum", *COMPILED, "sketch")]
        self._columns = np.array(addresses, np.uint64)
        self._to = self._columns.ctypes.data
        self._facts: Facts | None = None  # that the arrays of the next line follow from
        self.slots: list[int] = []
        self._noted: list[tuple[int, int]] = []
        self._picked: tuple[Array, ...] = ()
        self._of: tuple[int, ...] = ()

    @classmethod
    def over(cls, arrays: Mapping[str, Array], kept: Sequence[str], *, with_sketch: bool) -> Target | None:
        """A target over arrays of n records by name: "status", "checksum", statistics, "sketch".

        Args:
            arrays: each contiguous, of the type that the store keeps; they stay where they are.
            kept: the statistics that are computed.
            with_sketch: whether sketches are.

        Returns:
            None where numpy has to compute a column, or the arrays are of other columns than are computed.
        """
        wanted = {"status", "checksum", *kept, *(["sketch"] if with_sketch else [])}
        if kernels.KERNELS is None or arrays.keys() - _OTHERS != wanted or not set(kept).issubset(COMPILED):
            return None
        if not all(array.dtype.isnative and array.flags.c_contiguous for array in arrays.values()):
            return None
        return cls(arrays)

    def fill(self, arena: Arena, facts: Facts, notes: RowNotes, slots: list[int]) -> None:
        """Fill all arrays.

        Args:
            arena: holds the rows.
            facts: what is known of them beside.
            notes: the step's.
            slots: the slot of each record.
        """
        if facts is not self._facts or slots != self.slots:
            self._follow(facts, slots)
        assert kernels.KERNELS is not None
        kernels.KERNELS.columns(arena.place, ROWS, *self._of, len(slots), self._to)
        fixed, texts = notes.fixed, notes.texts
        for record, slot in self._noted:
            if slot in fixed:
                self._checksum[record] = fixed[slot]
        self.texts = {record: texts[slot] for record, slot in self._noted if texts[slot]}

    def _follow(self, facts: Facts, slots: list[int]) -> None:
        """Put down what is the same in every step that has these facts and slots."""
        self._facts = None
        pick = kernels.numbers(slots)
        self.layout_index = facts.layout_index[pick]
        self._status[:] = facts.status[pick]
        self._picked = picked = (pick, facts.headers[pick], facts.seen[pick])
        self._of = tuple(array.ctypes.data for array in picked)
        self._noted = [(record, slot) for record, slot in enumerate(slots) if slot in facts.kinds]
        self.slots = slots
        self._facts = facts
