"""The records of one step as one block of columns: the writer takes it, the reader gives it, comparisons compute on it.

A step has tens of thousands of records, a store may keep statistics that this version does not know, or lack some that
it does. So each has a column, by name; what is absent is -1 in a count and NaN in a number, never 0; and statistics
that follow from others need no bytes of their own.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from introspect_cli.derived import derived_stats
from introspect_cli.records import Given
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.columns import LIMIT_NAMES, SKETCH, VALUE, absent_column
from introspect_cli.store.files import DamageError
from introspect_cli.store.names import encode
from introspect_cli.texts import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.records import Layout
    from introspect_cli.store.columns import Schema


Array = NDArray[Any]


LIMIT_TEXT = 4096
"""Characters of a record's text."""


class Texts(dict[int, str]):
    """Texts of the rows of a step, by row; "" for any other row."""

    def __missing__(self, row: int) -> str:
        return ""


# --- what only some rows have


def text_line(text: Mapping[int, str]) -> bytes:
    """The line of texts, each cut to LIMIT_TEXT characters; empty where no row has one."""
    texts = {row: each[:LIMIT_TEXT] for row, each in text.items() if each}
    return _line({"row": [*texts], "text": [*texts.values()]})


def given_line(given: Mapping[int, Given]) -> bytes:
    """The line of what operators were given, by row; empty where there are none."""
    columns = {word: [getattr(each, word) for each in given.values()] for word in Given._fields}
    return _line({"row": [*given], **columns})


def _line(table: dict[str, list[Any]]) -> bytes:
    """A table, each column a list, as a line of JSON; empty without rows."""
    return encode(table) + b"\n" if table["row"] else b""


def decode_lines(data: bytes, rows: int, sites: int, path: str) -> tuple[Texts, dict[int, Given]]:
    """Texts, bounded and cleaned, and inputs of operators, of a step of so many rows in a rank of so many sites.

    Raises:
        DamageError: no writer writes such lines.
    """
    text, given = Texts(), dict[int, Given]()
    if len(data) > LIMIT_NAMES:
        raise DamageError(path, "what follows its columns is too long")
    try:
        for line in filter(None, map(bytes.strip, data.split(b"\n"))):
            table = json.loads(line)
            every = table.pop("row")
            if not all(type(row) is int and 0 <= row < rows for row in every):
                raise ValueError("a row that is not there")  # noqa: TRY301 - told as all damage is
            if "text" in table:
                text.update(zip(every, (bounded(each, LIMIT_TEXT) for each in table["text"]), strict=True))
            else:
                columns = (table[word] for word in Given._fields)
                given.update(zip(every, (_given(each, sites) for each in zip(*columns, strict=True)), strict=True))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise DamageError(path, "what follows its columns cannot be read") from None
    return text, given


def _given(fields: tuple[Any, ...], sites: int) -> Given:
    """What an operator was given; ValueError or TypeError where a number is not that of a site, nor -1."""
    inputs, forward, node = fields
    if not all(type(number) is int and -1 <= number < sites for number in (*inputs, forward)):
        raise ValueError("a site that is not there")
    return Given(tuple(inputs), forward, bounded(node, LIMIT_TEXT))


_PLAIN = ("site", "sequence", "layout", "status", "checksum", "sketch", "how", "ranks", "calls", "elements")
"""Fields of `StepBatch` that are an array, or None."""


@dataclass(frozen=True, eq=False)
class StepBatch:
    """Columns of n records; one row is one record.

    Attributes:
        site: uint32 (n,), ids of sites.
        sequence: uint32 (n,), the order in which things were recorded.
        layout: uint32 (n,), ids of layouts.
        status: uint8 (n,), values of `records.Status`.
        checksum: uint64 (n,), 0 where not observed.
        counts: int64 (n,) by name; -1 where absent. Empty where no statistics are kept.
        floats: float64 or float32 (n,) by name; NaN where absent.
        sketch: float32 (n, 16), or None where no sketches are kept.
        text: texts of the rows that have one.
        given: what operators were given, by row.
        how: uint8 (n,), how the ranks' records were put together, `records.Joined`; None for the records of one rank.
        ranks: uint32 (n,), how many ranks have the one value that stands for theirs; 0 where that is not so.
        calls: int64 (n,), how many calls of one rank were put together, at most; None for the records of one rank.
        elements: int64 (n,), elements of different values that were put together, else -1; None as above.
    """

    site: NDArray[np.uint32]
    sequence: NDArray[np.uint32]
    layout: NDArray[np.uint32]
    status: NDArray[np.uint8]
    checksum: NDArray[np.uint64]
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    floats: dict[str, Array] = field(default_factory=dict)
    sketch: NDArray[np.float32] | None = None
    text: Texts = field(default_factory=Texts)
    given: Mapping[int, Given] = field(default_factory=dict)
    how: NDArray[np.uint8] | None = None
    ranks: NDArray[np.uint32] | None = None
    calls: NDArray[np.int64] | None = None
    elements: NDArray[np.int64] | None = None
    derived: dict[str, Array] = field(default_factory=dict, init=False, repr=False)
    """The statistics that follow from others, once they were asked for; see `record_stats`."""

    def __len__(self) -> int:
        return len(self.site)

    @classmethod
    def from_columns(
        cls, columns: Mapping[str, Any], schema: Schema, text: Texts, given: Mapping[int, Given]
    ) -> StepBatch:
        """Make the batch of a step that was read.

        Impossible statistics and infinite numbers of sketches become NaN.
        """
        kept = [column for column in schema if column.name in STATISTICS]
        counts = {column.name: columns[column.name] for column in kept if column.type == "<i8"}
        floats = {column.name: columns[column.name] for column in kept if column.type != "<i8"}
        with np.errstate(invalid="ignore"):  # a stranger's NaN may be one that signals
            floats = {name: _possible(name, each) for name, each in floats.items()}
        sketch = columns.get(SKETCH.name)
        sketch = None if sketch is None else _possible(SKETCH.name, sketch)
        same: dict[str, Any] = {name: columns.get(name) for name in _PLAIN if name not in ("sketch", "how")}
        how = columns.get("joined")
        return cls(**same, counts=counts, floats=floats, sketch=sketch, how=how, text=text, given=given)

    def columns(self, schema: Schema) -> dict[str, Array]:
        """The columns to write, by name, for those of `schema`.

        Where the batch has none of that name, VALUE counts the rows, `calls` is 1 and any other an `absent_column`.
        Columns of the batch that `schema` does not have are not written.
        """
        rows = len(self)
        columns: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN} | self.counts | self.floats
        columns["joined"], columns[VALUE] = self.how, np.arange(rows)
        if self.calls is None:
            columns["calls"] = np.ones(rows, np.int64)
        every = [(column, columns.get(column.name)) for column in schema]
        return {column.name: absent_column(column, rows) if data is None else data for column, data in every}


def rows_of(batches: Sequence[StepBatch], which: Sequence[Array]) -> StepBatch:
    """Copy some rows of several batches into one batch, without the inputs of operators (`given`).

    A column or statistic that any of the batches lacks is left out.

    Args:
        batches: at least one.
        which: for each batch, int64, numbers of its rows.
    """
    ends = np.cumsum([0, *map(len, which)])

    def column(values: Sequence[Array | None]) -> Any:
        """One column of the chosen rows of all batches; None where any batch lacks it."""
        kept = [column[rows] for column, rows in zip(values, which, strict=True) if column is not None]
        if len(kept) < len(values):
            return None
        return kept[0] if len(kept) == 1 else np.concatenate(kept)

    def by_name(columns: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        shared = [name for name in columns[0] if all(name in each for each in columns)]
        return {name: column([each[name] for each in columns]) for name in shared}

    texts = Texts()
    for batch, rows, start in zip(batches, which, ends.tolist(), strict=False):
        for at in np.flatnonzero(np.isin(rows, [*batch.text])).tolist() if batch.text else ():
            texts[start + at] = batch.text[int(rows[at])]
    return StepBatch(
        **{name: column([getattr(batch, name) for batch in batches]) for name in _PLAIN},
        counts=by_name([batch.counts for batch in batches]),
        floats=by_name([batch.floats for batch in batches]),
        text=texts,
    )


def prepend_rows(batch: StepBatch, other: StepBatch, rows: NDArray[np.int64], sites: NDArray[np.int64]) -> StepBatch:
    """`batch` with rows of `other` put before its own, under other site numbers and without their inputs (`given`).

    They are recorded first: `sequence` counts them from 0, and goes on with the batch's own. A column or statistic that
    either batch lacks is left out.

    Args:
        batch: records of a step.
        other: a batch of the same rank.
        rows: int64 (k,), the rows of `other` to put first.
        sites: int64 (k,), the site numbers they get.
    """
    return replace(
        rows_of([other, batch], [rows, np.arange(len(batch))]),
        site=np.concatenate([sites.astype(np.uint32), np.asarray(batch.site)]),
        sequence=np.concatenate([np.arange(len(rows), dtype=np.uint32), np.asarray(batch.sequence) + len(rows)]),
        given={row + len(rows): given for row, given in batch.given.items()},
    )


_NOT_NEGATIVE = frozenset({"absmin", "amean", "var", "kurt"})


def _possible(name: str, column: Array) -> Array:
    """The column with infinite values, and negative ones of `_NOT_NEGATIVE`, replaced by NaN."""
    wrong = np.isinf(column)
    if name in _NOT_NEGATIVE:
        wrong |= column < 0
    return np.where(wrong, column.dtype.type(np.nan), column) if wrong.any() else column


_MOST_ELEMENTS = (1 << 63) - 1


def record_stats(batch: StepBatch, row: int, layouts: Sequence[Layout]) -> dict[str, float]:
    """All statistics of one row, stored and derived; counts are ints, absent ones are left out.

    Args:
        batch: the step's; what is derived for all its rows is kept in `derived`.
        row: which row.
        layouts: of the rank, by number.
    """
    if not batch.derived:
        numel = np.array([min(layouts[number].numel, _MOST_ELEMENTS) for number in batch.layout.tolist()], np.int64)
        batch.derived.update(derived_stats(batch.counts, batch.floats, numel))
    out: dict[str, float] = {name: int(column[row]) for name, column in batch.counts.items() if column[row] >= 0}
    for name, column in (*batch.floats.items(), *batch.derived.items()):
        if not math.isnan(value := float(column[row])):
            out[name] = int(value) if name == "infs" else value
    return out
