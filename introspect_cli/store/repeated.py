"""A step that is read into the memory in which the one before it lies, and is like it but for its values.

Most steps of a rank have the same sites, layouts and statuses, and texts of the same lengths. What was decoded and
checked of one holds for the next if its bytes are the same there and its numbers are possible ones: the columns are
views, and show the new values. That is found out in the one call that reads the bytes and takes their CRC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.store.batch import NOT_NEGATIVE
from introspect_cli.store.columns import Lists, Texts
from introspect_cli.store.compiled import BE_DOUBLES, BE_FLOATS, BE_THE_SAME, NEVER_NEGATIVE, UNREAD, address, compiled

if TYPE_CHECKING:
    from types import ModuleType

    from introspect_cli.store.arrow import Batch
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.columns import ColumnData

_ANYTHING = frozenset({"sequence", "checksum", "samples"})
_NUMBERS = {"<f8": BE_DOUBLES, "<f4": BE_FLOATS}


def repeated(data: bytes | memoryview, batch: Batch, step: StepBatch, entry: Any) -> Repeated | None:
    """What reads steps that are like one in a room; None where nothing is compiled, or there are no records."""
    extension = compiled() if batch.rows else None
    return None if extension is None else Repeated(extension, data, batch, step, entry)


class Repeated:
    """Reads steps that are like one that lies in a room."""

    def __init__(
        self, extension: ModuleType, data: bytes | memoryview, batch: Batch, step: StepBatch, entry: Any
    ) -> None:
        """Keep what must be the same.

        Args:
            extension: what was compiled.
            data: the step's bytes, in the room.
            batch: what they were decoded to.
            step: its columns, all of which are views of the bytes.
            entry: its entry in the index.
        """
        self._read = extension.read_again
        self._room = np.frombuffer(data, np.uint8)
        self._rows, self._sites, self._layouts = (int(entry[name]) for name in ("rows", "n_sites", "n_layouts"))
        self._same: list[np.ndarray[Any, Any]] = []
        self._pieces: list[tuple[int, int, int, int]] = []
        self._piece(self._room[: len(batch.header)], BE_THE_SAME)
        for name, column in batch.columns.items():
            self._column(name, column, step)
        self._table = np.array(self._pieces, np.int64)
        self._at = address(self._room), address(self._table), len(self._table)

    def read(self, file: int, entry: Any) -> int:
        """Read another step into the room; what came of it, as `compiled` has it.

        Args:
            file: a descriptor.
            entry: the step's entry in the index.
        """
        if (
            entry["length"] != len(self._room)
            or entry["rows"] != self._rows
            or entry["n_sites"] < self._sites
            or entry["n_layouts"] < self._layouts
        ):
            return UNREAD
        found: int = self._read(file, int(entry["offset"]), len(self._room), int(entry["batch_crc"]), *self._at)
        return found

    def _column(self, name: str, column: ColumnData, step: StepBatch) -> None:
        if isinstance(column, Texts):
            self._piece(column.offsets, BE_THE_SAME)
            if name != "text":
                self._piece(np.frombuffer(column.data, np.uint8), BE_THE_SAME)
        elif isinstance(column, Lists):
            self._piece(column.offsets, BE_THE_SAME)
            self._column(name, column.values, step)
        elif name == "sketch":
            self._piece(column, BE_FLOATS)
        elif name in step.floats:
            negative = NEVER_NEGATIVE if name in NOT_NEGATIVE else 0
            self._piece(column, _NUMBERS[column.dtype.str] + negative)
        elif name not in _ANYTHING and name not in step.counts:
            self._piece(column, BE_THE_SAME)

    def _piece(self, column: np.ndarray[Any, Any], must: int) -> None:
        if column.nbytes:
            start, same = address(column) - address(self._room), 0
            if must == BE_THE_SAME:
                self._same.append(np.array(column))
                same = address(self._same[-1])
            self._pieces.append((start, start + column.nbytes, must, same))
