"""FlatBuffers, as far as Arrow's messages need them: tables, vectors of tables, vectors of structs, strings.

A buffer is laid out front to back: the uint32 offset of the root, then tables in the order of visits. A table's vtable
lies directly before it, with as many slots as its field list, zero-padded so that the first field after the table's
4-byte vtable offset is aligned to 8. Fields come by falling size, then by slot; then what their references lead to, in
order of slots. Vectors of references and strings are aligned to 4, vectors of structs to 8. No vtable or string is
shared. So the same tables give the same bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

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
