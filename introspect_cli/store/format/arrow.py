"""Arrow IPC streams in one canonical encoding: written so that any Arrow library reads them, read without one.

A store is read while it is written, by other people's tools, and may come from a stranger. A general Arrow reader
trusts lengths inside a message, knows compression and dictionaries, and costs 30 MB of memory in the training
process. So for a given schema, number of rows and lengths of its buffers, the bytes of a message are fixed. The writer
fills in numbers; the reader takes the lengths out, writes the message again and refuses whatever is not the same:
nothing is ever interpreted that this module would not have written, and nothing here reads a flatbuffer.

A message's header is laid out as `arrow_schema` says. A column has an empty validity buffer, then offsets (int32, from
0) if it is a text or a list, then data or the child's buffers. A buffer starts where the one before ends, rounded up to
8.
"""

from __future__ import annotations

import itertools
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.store.format.arrow_schema import RECORD_BATCH, Column, Scalar, Schema, message
from introspect_cli.store.format.columns import ColumnData, Lists, Texts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

OFFSETS = np.dtype("<i4")
MOST = 1 << 40  # rows and bytes that no batch reaches
_MARK = 0x5A5A_0000_0000_0000  # finds the numbers to fill in within an encoded message


class Frame(NamedTuple):
    """A record batch's header with the numbers left out, and where they go: the first of so many nodes and buffers."""

    template: bytes
    body_length: int
    rows: int
    nodes: int
    node_count: int
    buffers: int
    buffer_count: int

    def filled(self, rows: int, nodes: Sequence[int], lengths: Sequence[int]) -> bytes:
        """The header for these rows, rows per node and bytes per buffer."""
        out = bytearray(self.template)
        offset = 0
        pairs: list[int] = []
        for length in lengths:
            pairs += (offset, length)
            offset += padded(length)
        struct.pack_into("<q", out, self.rows, rows)
        struct.pack_into("<q", out, self.body_length, offset)
        struct.pack_into(f"<{2 * len(nodes)}q", out, self.nodes, *(number for node in nodes for number in (node, 0)))
        struct.pack_into(f"<{len(pairs)}q", out, self.buffers, *pairs)
        return bytes(out)


def padded(length: int) -> int:
    """A length rounded up to 8."""
    return -(-length // 8) * 8


def _shape(kind: str) -> tuple[int, int]:
    """How many nodes and buffers a column takes."""
    if kind == "utf8":
        return 1, 3
    if kind == "vector":
        return 2, 3
    if kind.startswith("list<"):
        nodes, buffers = _shape(kind[5:-1])
        return nodes + 1, buffers + 2
    return 1, 2


@lru_cache(maxsize=64)
def frame_of(schema: Schema) -> Frame:
    """The header of a batch of `schema` without its numbers."""
    shapes = [_shape(column.type) for column in schema]
    node_count, buffer_count = (sum(part) for part in zip(*shapes, strict=True))
    marks = iter(range(_MARK, _MARK + 4))
    body_length, rows, node, buffer = next(marks), next(marks), next(marks), next(marks)
    nodes = struct.pack("<q", node) + bytes(16 * node_count - 8)
    buffers = struct.pack("<q", buffer) + bytes(16 * buffer_count - 8)
    template = message(RECORD_BATCH, [Scalar("q", rows), nodes, buffers], body_length)
    where = [template.index(struct.pack("<q", mark)) for mark in (body_length, rows, node, buffer)]
    return Frame(template, where[0], where[1], where[2], node_count, where[3], buffer_count)


Piece = bytes | memoryview | np.ndarray[Any, Any]
Pieces = list[bytes | memoryview]
"""Bytes that are written one after the other."""
"""A buffer."""


class _Encoded(NamedTuple):
    """A column as it stands in a message.

    Attributes:
        data: what it was made from.
        nodes: rows by node.
        lengths: bytes by buffer.
        pieces: the buffers, each followed by what fills it up to 8 bytes.
    """

    data: ColumnData
    nodes: list[int]
    lengths: list[int]
    pieces: list[bytes | memoryview]


class Message:
    """A record batch that is being written, in memory.

    A step must cost the training little, and most steps have as many records as the one before, of the same sites: then
    all of the message is right already but for the numbers. So columns of fixed size are arrays within the message, for
    whoever computes them to fill; what is put in and has not changed is not encoded again.

    Attributes:
        rows: how many.
        columns: by name, the columns before the first of variable size: arrays within the message.
        address: where they lie, and the header before them: the first of the pieces.
    """

    def __init__(self, schema: Schema, rows: int) -> None:
        """A message of zeros; columns of variable size, and those after them, have to be put in."""
        self.rows = rows
        self.columns: dict[str, NDArray[Any]] = {}
        self._frame = frame_of(schema)
        self._nodes: list[int] = []
        self._lengths: list[int] = []
        self._largest: dict[str, int] = {}
        self._framed: tuple[list[int], list[int]] | None = None  # what the header says
        fixed = {c.name: c for c in itertools.takewhile(lambda c: not c.is_variable, schema)}
        self._rest: dict[str, tuple[Column, _Encoded | None]]
        self._rest = {c.name: (c, None) for c in schema if c.name not in fixed}
        empty = {name: np.zeros((rows, c.width) if c.width else rows, c.dtype) for name, c in fixed.items()}
        header = end = len(self._frame.template)
        memory = np.zeros(header + sum(padded(zeros.nbytes) for zeros in empty.values()), np.uint8)
        for name, zeros in empty.items():
            encoded = _encoded(fixed[name], zeros, rows)
            self._nodes += encoded.nodes
            self._lengths += encoded.lengths
            self.columns[name] = memory[end : end + zeros.nbytes].view(zeros.dtype).reshape(zeros.shape)
            end += padded(zeros.nbytes)
        self.address = memory.ctypes.data
        self._memory = memory.data
        self._header = self._memory[:header]

    def __contains__(self, name: str) -> bool:
        """Whether there is a column of that name."""
        return name in self.columns or name in self._rest

    def put(self, name: str, data: ColumnData) -> None:
        """Fill in a column.

        Args:
            name: of the column.
            data: an array of the column's type and as many rows (`vector`: shape (rows, width)), `Texts` or `Lists`;
                these are not written to afterwards: those that are there already are not encoded again.
        """
        if name in self.columns:
            self._largest.pop(name, None)
            self.columns[name][:] = data
            return
        column, before = self._rest[name]
        if before is None or before.data is not data or isinstance(data, np.ndarray):
            self._rest[name] = (column, _encoded(column, data, self.rows))

    def largest(self, name: str) -> int:
        """The largest number of a column that nothing but `put` has filled in; -1 where there are no rows."""
        if name not in self._largest:
            self._largest[name] = int(self.columns[name].max()) if self.rows else -1
        return self._largest[name]

    def encoded(self) -> bytes:
        """The bytes of the message as it is filled in; every column must have been."""
        return b"".join(self.pieces())

    def pieces(self) -> Pieces:
        """The same, not joined: the first piece is where the columns lie."""
        nodes, lengths = self._nodes.copy(), self._lengths.copy()
        pieces: Pieces = [self._memory]
        for column, encoded in self._rest.values():
            if encoded is None:
                raise ValueError(f"the column {column.name} was not filled in")
            nodes += encoded.nodes
            lengths += encoded.lengths
            pieces += encoded.pieces
        if self._framed != (nodes, lengths):
            self._framed = None
            self._header[:] = self._frame.filled(self.rows, nodes, lengths)
            self._framed = (nodes, lengths)
        return pieces


def encode_batch(schema: Schema, columns: Mapping[str, ColumnData], rows: int) -> bytes:
    """The bytes of one record batch message; `columns` has, for each column of `schema`, what `Message.put` takes."""
    message = Message(schema, rows)
    for column in schema:
        message.put(column.name, columns[column.name])
    return message.encoded()


def _encoded(column: Column, data: ColumnData, rows: int) -> _Encoded:
    nodes: list[int] = []
    body: list[Piece] = []
    _encode(column, data, rows, nodes, body)
    lengths = [piece.nbytes if isinstance(piece, np.ndarray) else len(piece) for piece in body]
    pieces: list[bytes | memoryview] = []
    for piece, length in zip(body, lengths, strict=True):
        if length:
            pieces.append(piece.data.cast("B") if isinstance(piece, np.ndarray) else piece)
            if length % 8:
                pieces.append(bytes(-length % 8))
    return _Encoded(data, nodes, lengths, pieces)


def _encode(column: Column, data: ColumnData, rows: int, nodes: list[int], body: list[Piece]) -> None:
    """Append a column's rows by node, and its buffers."""
    nodes.append(rows)
    body.append(b"")  # no validity bitmap: nothing is null
    if isinstance(data, Texts):
        body += (data.offsets, data.data)
    elif isinstance(data, Lists):
        body.append(data.offsets)
        _encode(column.item, data.values, len(data.values), nodes, body)
    else:
        if column.type == "vector":
            nodes.append(rows * column.width)
            body.append(b"")
        body.append(np.ascontiguousarray(data, column.dtype))
