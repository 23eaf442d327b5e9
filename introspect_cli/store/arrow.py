"""Arrow IPC streams in one canonical encoding: written so that any Arrow library reads them, read without one.

A store is read while it is written, by other people's tools, and may come from a stranger. A general Arrow reader
trusts lengths inside a message, knows compression and dictionaries, and costs 30 MB of memory in the training
process. So for a given schema, number of rows and lengths of its buffers, the bytes of a message are fixed. The writer
fills in numbers; the reader takes the lengths out, writes the message again and refuses whatever is not the same:
nothing is ever interpreted that this module would not have written, and nothing here reads a flatbuffer.

The layout (Arrow columnar format, "Serialization and interprocess communication", metadata version 5; FlatBuffers
"internals"):

- A message is `ff ff ff ff`, the length of the flatbuffer as uint32, the flatbuffer, the body, both padded to 8 with
  zeros.
- Flatbuffers are laid out front to back: the uint32 offset of the root, then tables in the order of visits. A table's
  vtable lies directly before it, with as many slots as the field list below, zero-padded so that the first field after
  the table's 4-byte vtable offset is aligned to 8. Fields come by falling size, then by slot; then what their
  references lead to, in order of slots. Vectors of references and strings are aligned to 4, vectors of structs to 8.
  No vtable or string is shared.
- `Message`: version 4 (V5), header type, header, body length. `Schema`: endianness 0, fields. `Field`: name, nullable
  0, type type, type, (dictionary absent), children. `RecordBatch`: length, nodes, buffers.
- Integer types write both bit width and sign. The child of a list is called `item`.
- A column has an empty validity buffer, then offsets (int32, from 0) if it is a text or a list, then data or the
  child's buffers. A buffer starts where the one before ends, rounded up to 8.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.store.columns import ColumnData, Lists, Texts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

_CONTINUATION = 0xFFFFFFFF
_METADATA_V5 = 4
_SCHEMA, _RECORD_BATCH = 1, 3
_INT, _FLOAT, _UTF8, _LIST, _FIXED_SIZE_LIST = 2, 3, 5, 12, 16
_FLOAT_PRECISION = {4: 1, 8: 2}
_MARK = 0x5A5A_0000_0000_0000  # finds the numbers to fill in within an encoded message


class Malformed(Exception):  # noqa: N818 -- caught by the reader, which knows the file and says so
    """Bytes that the canonical encoding would not have produced; the message says what is wrong."""


@dataclass(frozen=True)
class Column:
    """A column of a stream.

    Attributes:
        name: the column's name.
        type: a numpy type (`<u4`), `utf8`, `list<i8>`, `list<i4>`, `list<utf8>`, or `vector` (float32, `width` a row).
        width: values in a row of a `vector`.
        role: what the column is to a reader that does not know it; not in the stream. See `format`.
    """

    name: str
    type: str
    width: int = 0
    role: str = ""


Schema = tuple[Column, ...]


# --- flatbuffers: the few shapes that messages are made of

_SIZES = {"q": 8, "i": 4, "h": 2, "B": 1, "?": 1}
_REFERENCE = 4  # bytes of an unsigned offset


@dataclass(frozen=True)
class Scalar:
    """One number inside a table; `code` is struct's letter for it."""

    code: str
    value: int


@dataclass(frozen=True)
class Table:
    """A table: one field per slot, None where the slot is left at its default."""

    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Tables:
    """A vector of tables."""

    items: tuple[Table, ...]


@dataclass(frozen=True)
class Pairs:
    """A vector of structs, each two 64-bit integers (Arrow's FieldNode and Buffer)."""

    items: tuple[tuple[int, int], ...]


Field = Scalar | Table | Tables | Pairs | str | None


def build(root: Table) -> bytes:
    """The bytes of a buffer whose root is `root`, padded to a multiple of 8."""
    out = bytearray(struct.pack("<I", 0))
    struct.pack_into("<I", out, 0, _table(out, root))
    _pad(out, 8)
    return bytes(out)


def _pad(out: bytearray, alignment: int, phase: int = 0) -> None:
    """Append zeros until the length is `phase` modulo `alignment`."""
    out.extend(bytes((phase - len(out)) % alignment))


def _table(out: bytearray, table: Table) -> int:
    """Append a table with all that hangs from it; its position."""
    vtable_size = 4 + 2 * len(table.fields)
    # The offset to the vtable takes 4 bytes, so that what follows it is aligned to 8.
    _pad(out, 8, (4 - vtable_size) % 8)
    vtable = len(out)
    start = vtable + vtable_size
    slots = [0] * len(table.fields)
    position = 4
    for index in sorted(range(len(slots)), key=lambda slot: (-_size(table.fields[slot]), slot)):
        if table.fields[index] is not None:
            slots[index] = position
            position += _size(table.fields[index])
    out.extend(struct.pack(f"<HH{len(slots)}H", vtable_size, position, *slots))
    out.extend(struct.pack("<i", start - vtable))
    out.extend(bytes(position - 4))
    for value, slot in zip(table.fields, slots, strict=True):
        if isinstance(value, Scalar):
            struct.pack_into("<" + value.code, out, start + slot, value.value)
        elif value is not None:
            child = _child(out, value)
            struct.pack_into("<I", out, start + slot, child - (start + slot))
    return start


def _size(value: Field) -> int:
    if value is None:
        return 0
    return _SIZES[value.code] if isinstance(value, Scalar) else _REFERENCE


def _child(out: bytearray, value: Table | Tables | Pairs | str) -> int:
    if isinstance(value, Table):
        return _table(out, value)
    if isinstance(value, Tables):
        return _tables(out, value)
    if isinstance(value, Pairs):
        return _pairs(out, value)
    _pad(out, 4)
    start = len(out)
    text = value.encode()
    out.extend(struct.pack("<I", len(text)) + text + b"\0")
    return start


def _tables(out: bytearray, vector: Tables) -> int:
    _pad(out, 4)
    start = len(out)
    out.extend(struct.pack("<I", len(vector.items)) + bytes(_REFERENCE * len(vector.items)))
    for index, item in enumerate(vector.items):
        slot = start + 4 + _REFERENCE * index
        struct.pack_into("<I", out, slot, _table(out, item) - slot)
    return start


def _pairs(out: bytearray, vector: Pairs) -> int:
    _pad(out, 8, 4)  # the count takes 4 bytes, the structs are aligned to 8
    start = len(out)
    out.extend(struct.pack("<I", len(vector.items)))
    for pair in vector.items:
        out.extend(struct.pack("<qq", *pair))
    return start


# --- schema message


def _field(name: str, kind: int, body: Table, children: tuple[Table, ...] = ()) -> Table:
    return Table((name, Scalar("?", 0), Scalar("B", kind), body, None, Tables(children)))


def _number(name: str, dtype: np.dtype[Any]) -> Table:
    if dtype.kind == "f":
        return _field(name, _FLOAT, Table((Scalar("h", _FLOAT_PRECISION[dtype.itemsize]),)))
    return _field(name, _INT, Table((Scalar("i", dtype.itemsize * 8), Scalar("?", int(dtype.kind == "i")))))


def _schema_field(column: Column) -> Table:
    if column.type == "utf8":
        return _field(column.name, _UTF8, Table(()))
    if column.type == "vector":
        item = _number("item", np.dtype("<f4"))
        return _field(column.name, _FIXED_SIZE_LIST, Table((Scalar("i", column.width),)), (item,))
    if column.type.startswith("list<"):
        return _field(column.name, _LIST, Table(()), (_schema_field(Column("item", column.type[5:-1])),))
    return _number(column.name, np.dtype(column.type))


def _message(kind: int, header: Table, body_length: int) -> bytes:
    metadata = build(Table((Scalar("h", _METADATA_V5), Scalar("B", kind), header, Scalar("q", body_length))))
    return struct.pack("<II", _CONTINUATION, len(metadata)) + metadata


@lru_cache(maxsize=64)
def schema_message(schema: Schema) -> bytes:
    """The bytes a stream of `schema` begins with."""
    fields = Tables(tuple(_schema_field(column) for column in schema))
    return _message(_SCHEMA, Table((Scalar("h", 0), fields)), 0)


# --- record batches


@dataclass(frozen=True)
class Frame:
    """A record batch's message with the numbers left out: where each goes, and how many there are."""

    template: bytes
    body_length: int
    rows: int
    nodes: int
    node_count: int
    buffers: int
    buffer_count: int

    def filled(self, rows: int, nodes: Sequence[int], lengths: Sequence[int]) -> tuple[bytes, int]:
        """The message for these rows, rows per node and bytes per buffer; and the length of its body."""
        out = bytearray(self.template)
        offset = 0
        pairs: list[int] = []
        for length in lengths:
            pairs += (offset, length)
            offset += -(-length // 8) * 8
        struct.pack_into("<q", out, self.rows, rows)
        struct.pack_into("<q", out, self.body_length, offset)
        struct.pack_into(f"<{2 * len(nodes)}q", out, self.nodes, *(number for node in nodes for number in (node, 0)))
        struct.pack_into(f"<{len(pairs)}q", out, self.buffers, *pairs)
        return bytes(out), offset


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
def frame(schema: Schema) -> Frame:
    """The message of a batch of `schema` without its numbers."""
    shapes = [_shape(column.type) for column in schema]
    node_count, buffer_count = (sum(part) for part in zip(*shapes, strict=True))
    marks = iter(range(_MARK, _MARK + 4))
    body_length, rows, node, buffer = next(marks), next(marks), next(marks), next(marks)
    nodes = Pairs(((node, 0),) + ((0, 0),) * (node_count - 1))
    buffers = Pairs(((buffer, 0),) + ((0, 0),) * (buffer_count - 1))
    message = _message(_RECORD_BATCH, Table((Scalar("q", rows), nodes, buffers)), body_length)
    where = [message.index(struct.pack("<q", mark)) for mark in (body_length, rows, node, buffer)]
    return Frame(message, where[0], where[1], where[2], node_count, where[3], buffer_count)


def encode_batch(schema: Schema, columns: Mapping[str, ColumnData], rows: int) -> list[bytes | memoryview]:
    """The pieces of one record batch message, to be written one after another.

    `columns` holds, for each column of `schema`, an array of its numpy type and length `rows` (`vector`: shape
    (rows, width)), `Texts`, or `Lists`.
    """
    nodes: list[int] = []
    body: list[Piece] = []
    for column in schema:
        encode_column(column, columns[column.name], rows, nodes, body)
    lengths = [piece.nbytes if isinstance(piece, np.ndarray) else len(piece) for piece in body]
    message, _ = frame(schema).filled(rows, nodes, lengths)
    pieces: list[bytes | memoryview] = [message]
    for piece, length in zip(body, lengths, strict=True):
        if length:
            pieces.append(piece.data.cast("B") if isinstance(piece, np.ndarray) else piece)
            if length % 8:
                pieces.append(bytes(-length % 8))
    return pieces


Piece = bytes | memoryview | np.ndarray[Any, Any]
"""A buffer."""


def encode_column(column: Column, data: ColumnData, rows: int, nodes: list[int], body: list[Piece]) -> None:
    """Append a column's rows by node, and its buffers."""
    nodes.append(rows)
    body.append(b"")  # no validity bitmap: nothing is null
    if isinstance(data, Texts):
        body += (data.offsets, data.data)
    elif isinstance(data, Lists):
        body.append(data.offsets)
        encode_column(Column("item", column.type[5:-1]), data.values, len(data.values), nodes, body)
    else:
        if column.type == "vector":
            nodes.append(rows * column.width)
            body.append(b"")
        body.append(np.ascontiguousarray(data, "<f4" if column.type == "vector" else column.type))


@dataclass(frozen=True)
class Batch:
    """A decoded batch: rows, columns that view the bytes given, the bytes it took, and the header these begin with."""

    rows: int
    columns: dict[str, ColumnData]
    length: int
    header: bytes

    def fits(self, data: memoryview) -> bool:
        """Whether what now lies where its bytes lay has the same header: then its columns are those of a new batch.

        Raises:
            Malformed: the columns would not be what `encode_batch` would have written.
        """
        if len(data) != self.length or bytes(data[: len(self.header)]) != self.header:
            return False
        for name, column in self.columns.items():
            _check_all(name, column)
        return True


def decode_batch(schema: Schema, data: memoryview) -> Batch:
    """The batch that `data` begins with.

    Raises:
        Malformed: the bytes are not what `encode_batch` would have written, or are too few.
    """
    own = frame(schema)
    size = len(own.template)
    if len(data) < size:
        raise Malformed("a batch is cut short")
    (rows,) = struct.unpack_from("<q", data, own.rows)
    nodes = struct.unpack_from(f"<{2 * own.node_count}q", data, own.nodes)[::2]
    buffers = struct.unpack_from(f"<{2 * own.buffer_count}q", data, own.buffers)
    offsets, lengths = buffers[::2], buffers[1::2]
    if min(rows, *nodes, *lengths) < 0 or max(rows, *nodes, *lengths) > len(data):
        raise Malformed("a batch claims more than its bytes hold")
    message, body_length = own.filled(rows, nodes, lengths)
    if bytes(data[:size]) != message:
        raise Malformed("a batch's header is not in the canonical form")
    if len(data) < size + body_length:
        raise Malformed("a batch is cut short")
    pieces = [data[size + offset : size + offset + length] for offset, length in zip(offsets, lengths, strict=True)]
    walk = _Walk(list(nodes), pieces)
    columns = {column.name: walk.take(column, rows) for column in schema}
    return Batch(rows, columns, size + body_length, message)


class _Walk:
    """Hands out a batch's nodes and buffers to its columns, in the order of the schema."""

    def __init__(self, nodes: list[int], buffers: list[memoryview]) -> None:
        self._nodes = iter(nodes)
        self._buffers = iter(buffers)

    def take(self, column: Column, rows: int) -> ColumnData:
        """The data of `column`, which must have `rows` rows."""
        if next(self._nodes) != rows or len(next(self._buffers)):
            raise Malformed(f"column {column.name} has another number of rows, or nulls")
        if column.type == "vector":
            if next(self._nodes) != rows * column.width or len(next(self._buffers)):
                raise Malformed(f"column {column.name} has another number of values, or nulls")
            return self._array(column, "<f4", rows * column.width).reshape(rows, column.width)
        if column.type == "utf8":
            offsets = self._array(column, "<i4", rows + 1)
            data = next(self._buffers)
            _check(column.name, offsets, len(data))
            return Texts(offsets, data)
        if column.type.startswith("list<"):
            offsets = self._array(column, "<i4", rows + 1)
            inside = int(offsets[-1])
            _check(column.name, offsets, inside)
            values = self.take(Column(column.name, column.type[5:-1]), inside)
            assert not isinstance(values, Lists)
            return Lists(offsets, values)
        return self._array(column, column.type, rows)

    def _array(self, column: Column, dtype: str, count: int) -> np.ndarray[Any, Any]:
        data = next(self._buffers)
        if len(data) != count * np.dtype(dtype).itemsize:
            raise Malformed(f"column {column.name} has another length than its rows need")
        return np.frombuffer(data, dtype, count)


def _check(name: str, offsets: np.ndarray[Any, Any], end: int) -> None:
    falls = end > 0 and len(offsets) > 1 and bool((offsets[1:] < offsets[:-1]).any())
    if offsets[0] != 0 or offsets[-1] != end or falls or (end == 0 and offsets.any()):
        raise Malformed(f"column {name} has offsets out of order")


def _check_all(name: str, column: ColumnData) -> None:
    """The same of a column that was decoded, down to the texts of a list."""
    if isinstance(column, Texts):
        _check(name, column.offsets, len(column.data))
    elif isinstance(column, Lists):
        _check(name, column.offsets, len(column.values))
        _check_all(name, column.values)
