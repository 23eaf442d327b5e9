"""Reads record batches in the canonical encoding: nothing is interpreted that `arrow` would not have written."""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.store.format.arrow import MOST, OFFSETS, frame_of, padded
from introspect_cli.store.format.arrow_schema import Column, Malformed, Schema
from introspect_cli.store.format.columns import ColumnData, Lists, Texts

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Batch(NamedTuple):
    """A decoded batch: rows, columns that view the bytes given, and the bytes it took."""

    rows: int
    columns: dict[str, ColumnData]
    length: int


class Decoder:
    """Decodes batches of one schema; what the last header said is kept, since most steps are like the one before.

    Attributes:
        schema: of the stream.
    """

    def __init__(self, schema: Schema) -> None:
        """Take the schema of a stream."""
        self.schema = schema
        self._frame = frame_of(schema)
        self._header: bytes | None = None
        self._rows = self._length = 0
        self._places: tuple[_Place, ...] = ()

    def decode(self, data: memoryview) -> Batch:
        """The batch that `data` begins with.

        Raises:
            Malformed: the bytes are not what `encode_batch` would have written, or are too few.
        """
        header = bytes(data[: len(self._frame.template)])
        if header != self._header:
            self._read(header)
        if len(data) < self._length:
            raise Malformed("a batch is cut short")
        return Batch(self._rows, {place.name: place.column(data) for place in self._places}, self._length)

    def _read(self, header: bytes) -> None:
        """Note what a header says: rows, where each column lies, and the bytes of the whole message."""
        frame, self._header = self._frame, None
        if len(header) < len(frame.template):
            raise Malformed("a batch is cut short")
        (rows,) = struct.unpack_from("<q", header, frame.rows)
        nodes = struct.unpack_from(f"<{2 * frame.node_count}q", header, frame.nodes)[::2]
        buffers = struct.unpack_from(f"<{2 * frame.buffer_count}q", header, frame.buffers)
        offsets, lengths = buffers[::2], buffers[1::2]
        if min(rows, *nodes, *lengths) < 0 or max(rows, *nodes, *lengths) > MOST:
            raise Malformed("a batch claims more than its bytes hold")
        if header != frame.filled(rows, nodes, lengths):
            raise Malformed("a batch's header is not in the canonical form")
        rest = deque(nodes), deque((len(header) + at, length) for at, length in zip(offsets, lengths, strict=True))
        self._places = tuple(_place(column, rows, *rest) for column in self.schema)
        self._rows, self._length = rows, len(header) + sum(map(padded, lengths))
        self._header = header


class _Place(NamedTuple):
    """Where a column lies in a message.

    Attributes:
        name: of the column.
        dtype: of the array that lies there: the values, or the offsets of texts and lists.
        start: where it begins.
        size: numbers in it.
        width: values in a row of a `vector`; 0 for any other column.
        text: where the bytes of texts begin and end.
        items: where what lists hold lies.
    """

    name: str
    dtype: np.dtype[Any]
    start: int
    size: int
    width: int = 0
    text: tuple[int, int] | None = None
    items: _Place | None = None

    def column(self, data: memoryview) -> ColumnData:
        """The column in the bytes of a message."""
        array = np.frombuffer(data, self.dtype, self.size, self.start)
        if self.text is not None:
            start, end = self.text
            self._check(array, end - start)
            return Texts(array, data[start:end])
        if self.items is not None:
            values = self.items.column(data)
            assert not isinstance(values, Lists)
            self._check(array, len(values))
            return Lists(array, values)
        return array.reshape(-1, self.width) if self.width else array

    def _check(self, offsets: NDArray[Any], end: int) -> None:
        falls = end > 0 and len(offsets) > 1 and bool((offsets[1:] < offsets[:-1]).any())
        if offsets[0] != 0 or offsets[-1] != end or falls or (end == 0 and offsets.any()):
            raise Malformed(f"column {self.name} has offsets out of order")


def _place(column: Column, rows: int, nodes: deque[int], buffers: deque[tuple[int, int]]) -> _Place:
    """Where a column of so many rows lies, which takes its nodes and buffers from those that are left."""
    if nodes.popleft() != rows or buffers.popleft()[1]:
        raise Malformed(f"column {column.name} has another number of rows, or nulls")
    if column.width and (nodes.popleft() != rows * column.width or buffers.popleft()[1]):
        raise Malformed(f"column {column.name} has another number of values, or nulls")
    dtype = OFFSETS if column.is_variable else np.dtype(column.dtype)
    size = rows + 1 if column.is_variable else rows * (column.width or 1)
    start, length = buffers.popleft()
    if length != size * dtype.itemsize:
        raise Malformed(f"column {column.name} has another length than its rows need")
    if column.type == "utf8":
        at, length = buffers.popleft()
        return _Place(column.name, dtype, start, size, text=(at, at + length))
    items = _place(column.item, nodes[0], nodes, buffers) if column.is_variable else None
    return _Place(column.name, dtype, start, size, column.width, items=items)
