"""Columns of rows: how they lie in a body, written so that numpy alone reads them.

A body is its columns, one after the other, each a run of little-endian numbers, filled up to 8 bytes with zeros. A
column of texts is the int32 offsets of n + 1 places, then the UTF-8 bytes of all; a column of lists is such offsets,
then the column of all items. So the number of rows and the offsets fix where everything lies, and nothing else has to
be believed.

A step has a text for each row, nearly all are empty, and they may come from a stranger. So texts and lists are decoded
one value at a time when asked for.

The writer, the reader and `verify` must agree to the byte. So every column and limit is here
(`docs/reference/store-format.md` says the same in words), and a log names the columns of its rank's records, for
readers that are not this one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from introspect_cli.records import SKETCH_SIZE
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.files import DamageError
from introspect_cli.texts import bounded

if TYPE_CHECKING:
    from introspect_cli.store.files import Pieces


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: the column's name.
        type: a numpy type (`<u4`), `utf8`, `list<i4>`, or `vector` (float32, `width` a row).
        width: values in a row of a `vector`.
    """

    name: str
    type: str
    width: int = 0

    @property
    def dtype(self) -> str:
        """Type of the values of an array or vector (`<f4` for `vector`); of the offsets of texts and lists (`<i4`)."""
        return "<f4" if self.type == "vector" else "<i4" if self.is_variable else self.type

    @property
    def is_variable(self) -> bool:
        """Whether rows differ in size: `utf8` and `list<i4>`."""
        return self.type in ("utf8", "list<i4>")


Schema = tuple[Column, ...]
Offsets = NDArray[np.int32]
Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Texts(Sequence[str]):
    """A column of texts.

    A reader gives them harmless: bounded, and without characters that do something to a terminal. So nobody who shows,
    exports or compares them need remember to.

    Attributes:
        offsets: int32 of length n + 1, from 0, never falling.
        data: UTF-8 bytes of all texts, one after another.
        limit: characters of a text that is given harmless; 0 where texts are given as they are.
    """

    offsets: Offsets
    data: bytes | memoryview
    limit: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        """The text in a row (negative: from the end), or a list of those of a slice; with a `limit` bounded to it."""
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        text = str(self.data[self.offsets[row] : self.offsets[row + 1]], "utf-8", "replace")
        return bounded(text, self.limit) if self.limit else text

    def sanitized(self, limit: int) -> Texts:
        """The same texts, each bounded to `limit` characters and cleaned when read."""
        return Texts(self.offsets, self.data, limit)


@dataclass(frozen=True, eq=False)
class Lists:
    """A column of lists of numbers.

    Attributes:
        offsets: int32 of length n + 1, from 0, never falling.
        values: int32, what all lists hold, one after another.
    """

    offsets: Offsets
    values: Array

    def __len__(self) -> int:
        return len(self.offsets) - 1


ColumnData = Array | Texts | Lists


def texts(values: Sequence[str]) -> Texts:
    """A column of `values`; what UTF-8 cannot hold (lone surrogates) is written as a backslash and its number.

    A `Texts` without a limit is returned itself.
    """
    if isinstance(values, Texts) and not values.limit:
        return values
    if not any(values):
        return Texts(np.zeros(len(values) + 1, np.int32), b"")
    distinct = {value: value.encode("utf-8", "backslashreplace") for value in set(values)}  # mostly few
    encoded = [distinct[value] for value in values]
    return Texts(_offsets(encoded), b"".join(encoded))


def nonempty_rows(column: Sequence[str]) -> Array:
    """int64 row numbers of the non-empty texts of a column; decodes none."""
    if isinstance(column, Texts):
        return np.flatnonzero(np.diff(column.offsets)) if len(column.data) else np.zeros(0, np.int64)
    return np.array([row for row, text in enumerate(column) if text], np.int64)


def sparse_texts(rows: int, values: Mapping[int, str]) -> Texts:
    """A column of `rows` texts, empty but for those in `values`, by row."""
    if not values:
        return Texts(np.zeros(rows + 1, np.int32), b"")
    encoded = {row: values[row].encode("utf-8", "backslashreplace") for row in sorted(values)}
    offsets = np.zeros(rows + 1, np.int32)
    offsets[[row + 1 for row in encoded]] = [len(text) for text in encoded.values()]
    return Texts(np.cumsum(offsets, dtype=np.int32), b"".join(encoded.values()))


def column_of(column: Column, values: Sequence[Any]) -> ColumnData:
    """A column of the type of `column` from plain values: numbers, texts, or sequences of numbers."""
    if column.type == "utf8":
        return texts(values)
    if not column.is_variable:
        return np.array(values, column.type)
    return Lists(_offsets(values), np.array([item for row in values for item in row], np.int32))


def _offsets(items: Sequence[Sequence[Any] | bytes]) -> Offsets:
    return np.fromiter(accumulate(map(len, items), initial=0), np.int32, len(items) + 1)


def concatenated(parts: Sequence[Any]) -> Any:
    """One column from several of the same type, at least one, end to end; a single one itself.

    Joined texts have no limit, whatever limits their parts had.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    lengths = np.concatenate([np.zeros(1, np.int64), *(np.diff(part.offsets) for part in parts)])
    offsets = np.cumsum(lengths).astype(np.int32)
    if isinstance(first, Texts):
        return Texts(offsets, b"".join(part.data for part in parts))
    return Lists(offsets, np.concatenate([part.values for part in parts]))


def absent_column(column: Column, rows: int) -> Any:
    """A column of `rows` rows that say nothing.

    Texts and lists are empty, signed integers -1, unsigned integers 0, floats NaN, but 0 in a vector.
    """
    if column.is_variable:
        none = np.zeros(rows + 1, np.int32)
        return Texts(none, b"") if column.type == "utf8" else Lists(none, none[:0])
    if column.width:
        return np.zeros((rows, column.width), column.dtype)
    return np.full(rows, {"i": -1, "f": np.nan}.get(np.dtype(column.type).kind, 0), column.type)


# --- bodies


def padded(length: int) -> int:
    """`length` rounded up to a multiple of 8."""
    return -(-length // 8) * 8


class Message:
    """The body of a step that is being written, in memory.

    A step must cost the training little, and most steps have as many records as the one before, of the same sites: then
    all of the body is right already but for the numbers. So columns of fixed size are arrays within the body, for
    whoever computes them to fill; what is put in and has not changed is not encoded again.

    Attributes:
        rows: how many.
        columns: by name, the columns before the first of variable size: arrays within the body.
        address: where they lie: the first of the pieces.
    """

    def __init__(self, schema: Schema, rows: int) -> None:
        """A body of zeros; columns of variable size, and those after them, have to be put in."""
        self.rows = rows
        self.columns: dict[str, Array] = {}
        fixed = list(itertools.takewhile(lambda column: not column.is_variable, schema))
        self._rest: dict[str, tuple[Column, ColumnData | None, Pieces]]
        self._rest = {column.name: (column, None, []) for column in schema[len(fixed) :]}
        self._largest: dict[str, int] = {}
        sizes = [rows * (column.width or 1) * np.dtype(column.dtype).itemsize for column in fixed]
        memory, at = np.zeros(sum(map(padded, sizes)), np.uint8), 0
        for column, size in zip(fixed, sizes, strict=True):
            array = memory[at : at + size].view(column.dtype)
            self.columns[column.name] = array.reshape(rows, column.width) if column.width else array
            at += padded(size)
        self.address = memory.ctypes.data
        self._memory = memory.data

    def __contains__(self, name: str) -> bool:
        """Whether there is a column of that name."""
        return name in self.columns or name in self._rest

    def put(self, name: str, data: ColumnData) -> None:
        """Fill in a column.

        Args:
            name: of the column.
            data: an array of the column's type and as many rows (`vector`: shape (rows, width)), `Texts` or `Lists`. Do
                not change `Texts` and `Lists` afterwards: the object that was put last is not encoded again.
        """
        if name in self.columns:
            self._largest.pop(name, None)
            self.columns[name][:] = data
            return
        column, before, _ = self._rest[name]
        if before is not data or isinstance(data, np.ndarray):
            self._rest[name] = (column, data, encoded_column(column, data))

    def largest(self, name: str) -> int:
        """The largest number of an integer column that only `put` fills; -1 where there are no rows.

        Cached until the next `put`.
        """
        if name not in self._largest:
            self._largest[name] = int(self.columns[name].max()) if self.rows else -1
        return self._largest[name]

    def pieces(self) -> Pieces:
        """The bytes of the body; the first piece is the memory of the fixed-size columns itself, not a copy.

        Raises:
            ValueError: a column was not filled in.
        """
        missing = [name for name, (_, data, _) in self._rest.items() if data is None]
        if missing:
            raise ValueError(f"the column {missing[0]} was not filled in")
        return [self._memory, *(piece for _, _, pieces in self._rest.values() for piece in pieces)]


def encoded_column(column: Column, data: ColumnData) -> Pieces:
    """The bytes of a column, padded to 8: offsets before data for texts and lists."""
    if isinstance(data, Texts):
        return [*_padded_pieces(data.offsets), *_padded_pieces(data.data)]
    if isinstance(data, Lists):
        return [*_padded_pieces(data.offsets), *_padded_pieces(data.values)]
    return _padded_pieces(np.ascontiguousarray(data, column.dtype))


def _padded_pieces(data: Array | bytes | memoryview) -> Pieces:
    """The bytes of `data`, then zeros up to a multiple of 8; no piece at all where it is empty."""
    piece: bytes | memoryview = data.data.cast("B") if isinstance(data, np.ndarray) and data.size else bytes(data)
    return [piece, bytes(-len(piece) % 8)] if len(piece) % 8 else [piece] if len(piece) else []


def decode_rows(schema: Schema, data: memoryview, rows: int, path: str) -> dict[str, ColumnData]:
    """The columns of a body of so many rows, as views of its bytes; `path` is for messages.

    Raises:
        DamageError: the rows need more or fewer bytes, or offsets fall or do not begin at 0.
    """
    columns, at = {}, 0
    for column in schema:
        columns[column.name], at = _decoded(column, data, rows, at, path)
    if at != len(data):
        raise DamageError(path, "it has another length than its rows need")
    return columns


def _decoded(column: Column, data: memoryview, rows: int, at: int, path: str) -> tuple[ColumnData, int]:
    """The column that begins at byte `at`, and the byte after it and its padding.

    Raises:
        DamageError: it is cut short, or its offsets fall or do not begin at 0.
    """
    dtype = np.dtype(column.dtype)
    size = rows + 1 if column.is_variable else rows * (column.width or 1)
    end = at + size * dtype.itemsize
    if end > len(data):
        raise DamageError(path, f"column {column.name} is cut short")
    array, after = np.frombuffer(data, dtype, size, at), at + padded(size * dtype.itemsize)
    if not column.is_variable:
        return (array.reshape(-1, column.width) if column.width else array), after
    last = int(array[-1])
    falls = last > 0 and rows > 1 and bool((array[1:] < array[:-1]).any())
    if array[0] != 0 or last < 0 or falls or (not last and array.any()):
        raise DamageError(path, f"column {column.name} has offsets out of order")
    end = after + (last if column.type == "utf8" else 4 * last)
    if end > len(data):
        raise DamageError(path, f"column {column.name} is cut short")
    values = data[after:end]
    filled = Texts(array, values) if column.type == "utf8" else Lists(array, np.frombuffer(values, "<i4"))
    return filled, padded(end)


# --- schemas


LIMIT_COLUMNS = 64 << 10
"""Bytes of the description of columns."""

LIMIT_BATCH = 128 << 20
"""Bytes of one step's batch: a million records."""

LIMIT_NAMES = 64 << 20
"""Bytes of a table of sites, layouts or modules: half a million sites, and little memory when read."""

LIMIT_TEXT = 4096
"""Characters of a record's text."""

_NUMBERS = ("uint8", "int32", "uint32", "int64", "uint64", "float32", "float64")
_TYPES = {
    **{word: np.dtype(word).newbyteorder("<").str for word in _NUMBERS},
    "utf8": "utf8",
    "list<int32>": "list<i4>",
    f"float32[{SKETCH_SIZE}]": "vector",
}
"""The type of a column by the word for it in a log."""

_WORDS = {kind: word for word, kind in _TYPES.items()}


def _schema(described: str) -> Schema:
    """Columns from their names and types, `name type, ...`."""
    pairs = [column.split() for column in described.split(",")]
    return tuple(Column(name, _TYPES[word], SKETCH_SIZE * (_TYPES[word] == "vector")) for name, word in pairs)


RECORD_COLUMNS = _schema("site uint32, sequence uint32, layout uint32, status uint8, checksum uint64")
[TEXT] = _schema("text utf8")
[SKETCH] = _schema(f"sketch float32[{SKETCH_SIZE}]")
GIVEN_COLUMNS = _schema("given list<int32>, forward int32, node utf8")
"""What an operator was given, where operators are recorded."""

WHOLE_COLUMNS = _schema("joined uint8, ranks uint32, calls int64, elements int64")
"""How the records of several ranks became one, in a run that they were put together in; see `batch.StepBatch`."""


def described(records: Schema) -> bytes:
    """The description of the columns of records, in JSON: of each its name and type."""
    every = [[column.name, _WORDS[column.type]] for column in records]
    return json.dumps(every, separators=(",", ":")).encode()


def parse_columns(description: bytes, path: str) -> Schema:
    """The columns of records that a log describes; `path` is for messages.

    Raises:
        DamageError: it is no description that this version would write.
    """
    try:
        names = [name for name, _ in json.loads(description)]
        schema = record_columns(
            stats="mean" in names,
            sketch="sketch" in names,
            sorted_stats=tuple(name for name in names if name in STATISTICS),
            operators="given" in names,
            whole="joined" in names,
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        schema = ()
    if described(schema) != description.rstrip(b" "):
        raise DamageError(path, "its columns are not those that this version writes: install the newest introspect-cli")
    return schema


def record_columns(
    *,
    stats: bool = True,
    sketch: bool = True,
    sorted_stats: tuple[str, ...] = (),
    operators: bool = False,
    whole: bool = False,
) -> Schema:
    """The schema of records.

    Args:
        stats: with the statistics that are always kept.
        sketch: with sketches.
        sorted_stats: names of statistics on request.
        operators: with the inputs of operators.
        whole: with the columns of records put together from several ranks.
    """
    kept = [
        Column(name, statistic.type)
        for name, statistic in STATISTICS.items()
        if (name in sorted_stats if statistic.on_request else stats)
    ]
    return (
        *RECORD_COLUMNS,
        *kept,
        *([SKETCH] if sketch else []),
        *(GIVEN_COLUMNS if operators else ()),
        *(WHOLE_COLUMNS if whole else ()),
        TEXT,
    )
