"""Messages of an Arrow IPC stream, and the schema that it begins with: to the byte what `arrow` holds a stream against.

The layout (Arrow columnar format, "Serialization and interprocess communication", metadata version 5):

- A message is `ff ff ff ff`, the length of the flatbuffer as uint32, the flatbuffer, the body, both padded to 8 with
  zeros.
- `Message`: version 4 (V5), header type, header, body length. `Schema`: endianness 0, fields. `Field`: name, nullable
  0, type type, type, (dictionary absent), children. `RecordBatch`: length, nodes, buffers.
- Integer types write both bit width and sign. The child of a list is called `item`.

A flatbuffer is laid out front to back: the uint32 offset of the root, then tables in the order of visits. A table's
vtable lies directly before it, with as many slots as its field list, zero-padded so that the first field after the
table's 4-byte vtable offset is aligned to 8. Fields come by falling size, then by slot; then what their references lead
to, in order of slots. Vectors of references and strings are aligned to 4, vectors of structs to 8. No vtable or string
is shared. So the same tables give the same bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

_CONTINUATION = 0xFFFFFFFF
_METADATA_V5 = 4
SCHEMA, RECORD_BATCH = 1, 3
_INT, _FLOAT, _UTF8, _LIST, _FIXED_SIZE_LIST = 2, 3, 5, 12, 16
_FLOAT_PRECISION = {4: 1, 8: 2}
_SIZES = {"q": 8, "i": 4, "h": 2, "B": 1, "?": 1}
_REFERENCE = 4  # bytes of an unsigned offset


class Scalar(NamedTuple):
    """One number inside a table; `code` is struct's letter for it."""

    code: str
    value: int


Table: TypeAlias = "list[Field]"
"""One field per slot."""

Field: TypeAlias = "Scalar | Table | tuple[Table, ...] | bytes | str | None"
"""None where a slot is left at its default; bytes are a vector of structs, each two 64-bit integers."""


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

    @property
    def dtype(self) -> str:
        """Of an array or a vector, the numpy type of its values."""
        return "<f4" if self.type == "vector" else self.type

    @property
    def is_variable(self) -> bool:
        """Whether rows differ in size."""
        return self.type == "utf8" or self.type.startswith("list<")

    @property
    def item(self) -> Column:
        """What a list holds, as a column."""
        return Column(self.name, self.type[5:-1])


Schema = tuple[Column, ...]


def _field(name: str, kind: int, body: Table, children: tuple[Table, ...] = ()) -> Table:
    return [name, Scalar("?", 0), Scalar("B", kind), body, None, children]


def _number(name: str, dtype: np.dtype[Any]) -> Table:
    if dtype.kind == "f":
        return _field(name, _FLOAT, [Scalar("h", _FLOAT_PRECISION[dtype.itemsize])])
    return _field(name, _INT, [Scalar("i", dtype.itemsize * 8), Scalar("?", int(dtype.kind == "i"))])


def _schema_field(column: Column) -> Table:
    if column.type == "utf8":
        return _field(column.name, _UTF8, [])
    if column.type == "vector":
        item = _number("item", np.dtype("<f4"))
        return _field(column.name, _FIXED_SIZE_LIST, [Scalar("i", column.width)], (item,))
    if column.type.startswith("list<"):
        return _field(column.name, _LIST, [], (_schema_field(Column("item", column.type[5:-1])),))
    return _number(column.name, np.dtype(column.type))


def message(kind: int, header: Table, body_length: int) -> bytes:
    """The bytes of a message before its body."""
    out = bytearray(4)
    struct.pack_into(
        "<I", out, 0, _append(out, [Scalar("h", _METADATA_V5), Scalar("B", kind), header, Scalar("q", body_length)])
    )
    _pad(out, 8)
    return struct.pack("<II", _CONTINUATION, len(out)) + out


@lru_cache(maxsize=64)
def schema_message(schema: Schema) -> bytes:
    """The bytes a stream of `schema` begins with."""
    return message(SCHEMA, [Scalar("h", 0), tuple(_schema_field(column) for column in schema)], 0)


# --- flatbuffers


def _pad(out: bytearray, alignment: int, phase: int = 0) -> None:
    """Append zeros until the length is `phase` modulo `alignment`."""
    out.extend(bytes((phase - len(out)) % alignment))


def _append(out: bytearray, value: Table | tuple[Table, ...] | bytes | str) -> int:
    """Append a table, a vector or a string with all that hangs from it; its position."""
    if isinstance(value, list):
        return _table(out, value)
    _pad(out, *((8, 4) if isinstance(value, bytes) else (4,)))  # behind a count of 4 bytes, structs are aligned to 8
    start = len(out)
    if isinstance(value, str):
        text = value.encode()
        out += struct.pack("<I", len(text)) + text + b"\0"
    elif isinstance(value, bytes):
        out += struct.pack("<I", len(value) // 16) + value
    else:
        out += struct.pack("<I", len(value)) + bytes(_REFERENCE * len(value))
        for index, item in enumerate(value):
            slot = start + 4 + _REFERENCE * index
            struct.pack_into("<I", out, slot, _table(out, item) - slot)
    return start


def _table(out: bytearray, fields: Table) -> int:
    vtable_size = 4 + 2 * len(fields)
    # The offset to the vtable takes 4 bytes, so that what follows it is aligned to 8.
    _pad(out, 8, (4 - vtable_size) % 8)
    start = len(out) + vtable_size
    slots, end = [0] * len(fields), 4
    for index in sorted(range(len(slots)), key=lambda slot: (-_size(fields[slot]), slot)):
        if fields[index] is not None:
            slots[index] = end
            end += _size(fields[index])
    out += struct.pack(f"<HH{len(slots)}Hi", vtable_size, end, *slots, vtable_size) + bytes(end - 4)
    for value, slot in zip(fields, slots, strict=True):
        if isinstance(value, Scalar):
            struct.pack_into(f"<{value.code}", out, start + slot, value.value)
        elif value is not None:
            struct.pack_into("<I", out, start + slot, _append(out, value) - (start + slot))
    return start


def _size(value: Field) -> int:
    return 0 if value is None else _SIZES[value.code] if isinstance(value, Scalar) else _REFERENCE
