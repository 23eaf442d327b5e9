"""Columns of rows: how they lie in a body, written so that numpy alone reads them.

A body is its columns, one after the other, each a run of little-endian numbers, filled up to 8 bytes with zeros. Equal
records, such as one module's output and the next one's input, are there once, by a number each. So the number of
records and the largest of these numbers fix where everything lies. What only some records have, their texts and what
operators were given, follows as lines of JSON.

The writer, the reader and `verify` must agree to the byte. So every column and limit is here
(`docs/reference/store-format.md` says the same in words), and a log names the columns of its rank's records, for
readers that are not this one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from introspect_cli.records import SKETCH_SIZE
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.files import DamageError

if TYPE_CHECKING:
    from introspect_cli.store.files import Pieces


@dataclass(frozen=True)
class Column:
    """A column of numbers.

    Attributes:
        name: the column's name.
        type: a numpy type (`<u4`).
        width: values in a row of a column of vectors; 0 where a row is a number.
    """

    name: str
    type: str
    width: int = 0

    def size(self, rows: int) -> int:
        """Bytes of so many rows."""
        return rows * (self.width or 1) * np.dtype(self.type).itemsize

    def shaped(self, array: Array) -> Array:
        """An array of all values of the column, with a row for each record."""
        return array.reshape(-1, self.width) if self.width else array


Schema = tuple[Column, ...]
Array = NDArray[Any]


def absent_column(column: Column, rows: int) -> Array:
    """A column that says nothing: -1 in signed integers, 0 in unsigned ones and in vectors, NaN in other floats."""
    if column.width:
        return np.zeros((rows, column.width), column.type)
    return np.full(rows, {"i": -1, "f": np.nan}.get(np.dtype(column.type).kind, 0), column.type)


# --- bodies


def padded(length: int) -> int:
    """`length` rounded up to a multiple of 8."""
    return -(-length // 8) * 8


class Message:
    """The body of a step that is being written, in memory.

    A step must cost the training little, and most steps have as many records as the one before, of the same sites: then
    all of the body is right already but for the numbers. So columns are arrays in one memory, for whoever computes
    them to fill, and what is put in stays until something else is.

    Attributes:
        rows: how many records.
        values: how many rows of the columns behind VALUE count.
        columns: by name, with as many rows as there are records.
        lines: what follows the columns, each with a line end; see `batch.encode_lines`.
    """

    def __init__(self, schema: Schema, rows: int) -> None:
        """A body of zeros, without lines."""
        self.rows = self.values = rows
        self.columns: dict[str, Array] = {}
        self.lines: list[bytes] = []
        self._schema = schema
        self._memory: list[Array] = []  # of each column
        self._pieces: Pieces = []
        self._ends: list[Array] = []  # what fills columns up
        self._cut_to = -1  # how many values they have
        memory, at = np.zeros(sum(padded(column.size(rows)) for column in schema), np.uint8), 0
        for column in schema:
            size = column.size(rows)
            self._memory.append(memory[at : at + padded(size)])
            self.columns[column.name] = column.shaped(memory[at : at + size].view(column.type))
            at += padded(size)

    def put(self, name: str, data: Array) -> None:
        """Fill in a column from an array of as many rows (of vectors: shape (rows, width))."""
        self.columns[name][:] = data

    def largest(self, name: str) -> int:
        """The largest number of an integer column; -1 where there are no rows."""
        return int(self.columns[name][: self._count(name)].max()) if self.rows else -1

    def _count(self, name: str) -> int:
        return self.rows if name in OF_RECORDS else self.values

    def pieces(self) -> Pieces:
        """The memory of the columns itself, not a copy, and the lines, filled up with spaces."""
        lines = b"".join(self.lines)
        if self._cut_to != self.values:
            sizes = [column.size(self._count(column.name)) for column in self._schema]
            every = [*zip(self._memory, sizes, map(padded, sizes), strict=True)]
            self._pieces = [memory[:end].data for memory, _, end in every]
            self._ends = [memory[size:end] for memory, size, end in every if size < end]
            self._cut_to = self.values
        for end in self._ends:
            end[:] = 0
        return [*self._pieces, lines.ljust(padded(len(lines)))]


def decode_rows(schema: Schema, data: memoryview, rows: int, path: str) -> tuple[dict[str, Array], bytes]:
    """The columns of a body of so many records, and what follows them; `path` is for messages.

    Raises:
        DamageError: the rows need more bytes, or a record has no row.
    """
    columns, at, count, values = {}, 0, rows, None
    for column in schema:
        size = column.size(count)
        if at + size > len(data):
            raise DamageError(path, f"column {column.name} is cut short")
        numbers = column.shaped(np.frombuffer(data[at : at + size], column.type))
        columns[column.name] = numbers if values is None else numbers[values]
        at += padded(size)
        if column.name == VALUE:
            values = columns.pop(VALUE)
            count = int(values.max()) + 1 if rows else 0
    return columns, bytes(data[at:])


# --- schemas


LIMIT_BATCH = 128 << 20
"""Bytes of one step's batch: a million records."""

LIMIT_NAMES = 64 << 20
"""Bytes of a table of sites, layouts or modules: half a million sites, and little memory when read."""

_NUMBERS = ("uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")
_TYPES = {word: (np.dtype(word).newbyteorder("<").str, 0) for word in _NUMBERS}
_TYPES[f"float32[{SKETCH_SIZE}]"] = "<f4", SKETCH_SIZE
"""Type and width of a column by the word for them in a log."""

_WORDS = {kind: word for word, kind in _TYPES.items()}


def _schema(described: str) -> Schema:
    """Columns from their names and types, `name type, ...`."""
    pairs = [column.split() for column in described.split(",")]
    return tuple(Column(name, *_TYPES[word]) for name, word in pairs)


VALUE = "value"
"""The column with the row of each record in the columns behind it, where equal records are once."""

OF_RECORDS = ("site", "sequence", VALUE)
"""Columns that have a row for each record."""

RECORD_COLUMNS = _schema(f"site uint32, sequence uint32, {VALUE} uint32, layout uint32, status uint8, checksum uint64")
[SKETCH] = _schema(f"sketch float32[{SKETCH_SIZE}]")
WHOLE_COLUMNS = _schema("joined uint8, ranks uint32, calls int64, elements int64")
"""How the records of several ranks became one, in a run that they were put together in; see `batch.StepBatch`."""


def described(records: Schema) -> bytes:
    """The description of the columns of records, in JSON: of each its name and type."""
    every = [[column.name, _WORDS[column.type, column.width]] for column in records]
    return json.dumps(every, separators=(",", ":")).encode()


def parse_columns(description: bytes, path: str) -> Schema:
    """The columns of records that a log describes; `path` is for messages.

    Raises:
        DamageError: it is no description that this version would write.
    """
    try:
        names = [name for name, _ in json.loads(description)]
        schema = record_columns(
            values=VALUE in names,
            stats="mean" in names,
            sketch="sketch" in names,
            sorted_stats=tuple(name for name in names if name in STATISTICS),
            whole="joined" in names,
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        schema = ()
    if described(schema) != description.rstrip(b" "):
        raise DamageError(path, "its columns are not those that this version writes: install the newest introspect-cli")
    return schema


def record_columns(
    *,
    values: bool = True,
    stats: bool = True,
    sketch: bool = True,
    sorted_stats: tuple[str, ...] = (),
    whole: bool = False,
) -> Schema:
    """The schema of records.

    Args:
        values: with equal records once; not so in runs of earlier versions.
        stats: with the statistics that are always kept.
        sketch: with sketches.
        sorted_stats: names of statistics on request.
        whole: with the columns of records put together from several ranks.
    """
    kept = [
        Column(name, statistic.type)
        for name, statistic in STATISTICS.items()
        if (name in sorted_stats if statistic.on_request else stats)
    ]
    always = [column for column in RECORD_COLUMNS if values or column.name != VALUE]
    return (*always, *kept, *([SKETCH] if sketch else []), *(WHOLE_COLUMNS if whole else ()))
