"""The records of one step as one block of columns: the writer takes it, the reader gives it, comparisons compute on it.

A step has tens of thousands of records, a store may keep statistics that this version does not know, or lack some that
it does. So each has a column, by name; what is absent is -1 in a count and NaN in a number, never 0; and statistics
that follow from others need no bytes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from introspect_cli.records import Given
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.columns import (
    GIVEN_COLUMNS,
    LIMIT_TEXT,
    SKETCH,
    Lists,
    Texts,
    absent_column,
    column_of,
    concatenated,
    nonempty_rows,
    sparse_texts,
    texts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.store.columns import ColumnData, Schema


Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class GivenColumns:
    """Inputs of the operators of a step: columns of n records; see `records.Given`.

    Attributes:
        inputs: n lists of site numbers, -1 where no recorded operator wrote an input. Empty where nothing is known.
        forward: int32 (n,), -1 where there is none.
        node: n texts.
    """

    inputs: Lists
    forward: NDArray[np.int32]
    node: Sequence[str]

    def within(self, sites: int) -> bool:
        """Whether every number in `inputs` and `forward` is -1 or a site number below `sites`."""
        every = (np.asarray(self.inputs.values), self.forward)
        return all(not len(numbers) or (int(numbers.min()) >= -1 and int(numbers.max()) < sites) for numbers in every)

    def row(self, row: int) -> Given | None:
        """What the operator of the record in `row` was given; None where no input, forward or node is known."""
        start, end = self.inputs.offsets[row : row + 2]
        given = Given(tuple(np.asarray(self.inputs.values)[start:end].tolist()), int(self.forward[row]), self.node[row])
        return None if given == _NOTHING else given


_NOTHING = Given()


def given_columns(given: Mapping[int, Given], rows: int) -> GivenColumns:
    """Columns of `rows` records from `given`, which maps a row to its inputs; rows without an entry are empty."""
    if not given:
        return GivenColumns(*(absent_column(column, rows) for column in GIVEN_COLUMNS))
    every = zip(*(given.get(row, _NOTHING) for row in range(rows)), strict=True)
    columns: list[Any] = [column_of(column, values) for column, values in zip(GIVEN_COLUMNS, every, strict=True)]
    return GivenColumns(*columns)


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
        text: n texts, "" where there is none.
        given: what operators were given, or None where that is not kept.
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
    text: Sequence[str] = ()
    given: GivenColumns | None = None
    how: NDArray[np.uint8] | None = None
    ranks: NDArray[np.uint32] | None = None
    calls: NDArray[np.int64] | None = None
    elements: NDArray[np.int64] | None = None
    derived: dict[str, Array] = field(default_factory=dict, init=False, repr=False)
    """The statistics that follow from others, once they were asked for; see `record_stats`."""

    def __len__(self) -> int:
        return len(self.site)

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], schema: Schema) -> StepBatch:
        """Make the batch of a step that was read.

        Impossible statistics and infinite numbers of sketches become NaN; texts are bounded to LIMIT_TEXT characters
        and cleaned when read.
        """
        kept = [column for column in schema if column.name in STATISTICS]
        counts = {column.name: columns[column.name] for column in kept if column.type == "<i8"}
        floats = {column.name: columns[column.name] for column in kept if column.type != "<i8"}
        if not _are_possible(floats):
            floats = {name: _possible(name, each) for name, each in floats.items()}
        sketch, given, joined = columns.get(SKETCH.name), None, columns.get("joined")
        if sketch is not None and np.isinf(sketch).any():
            sketch = np.where(np.isinf(sketch), np.float32(np.nan), sketch)
        if "given" in columns:
            given = GivenColumns(columns["given"], columns["forward"], columns["node"].sanitized(LIMIT_TEXT))
        same: dict[str, Any] = {name: columns.get(name) for name in _PLAIN if name not in ("sketch", "how")}
        text = columns["text"].sanitized(LIMIT_TEXT)
        return cls(**same, counts=counts, floats=floats, sketch=sketch, how=joined, text=text, given=given)

    def columns(self, schema: Schema) -> dict[str, ColumnData]:
        """The columns to write, by name, for those of `schema`; texts are cut to LIMIT_TEXT characters.

        Where the batch has none of that name, `calls` is 1 in each row and any other an `absent_column`. Columns of the
        batch that `schema` does not have are not written.
        """
        rows = len(self)
        columns: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN} | self.counts | self.floats
        columns |= {"joined": self.how, "text": short_texts(self.text, rows)}
        if self.calls is None:
            columns["calls"] = np.ones(rows, np.int64)
        if self.given is not None:
            node = short_texts(self.given.node, rows)
            columns |= {"given": self.given.inputs, "forward": self.given.forward, "node": node}
        every = {column.name: (column, columns.get(column.name)) for column in schema}
        return {name: absent_column(column, rows) if data is None else data for name, (column, data) in every.items()}


def short_texts(values: Sequence[str], rows: int) -> Texts:
    """A column of texts, each cut to LIMIT_TEXT characters; an empty `values` stands for `rows` empty texts.

    A `Texts` without a limit that needs no cut is returned itself.
    """
    if (
        isinstance(values, Texts)
        and not values.limit
        and (not values.data or int(np.diff(values.offsets).max()) <= LIMIT_TEXT)
    ):
        return values  # no text has more characters than bytes
    if not values or not any(values):
        return sparse_texts(rows, {})
    return texts([value and value[:LIMIT_TEXT] for value in values])


def scale_between(a: NDArray[Any], b: NDArray[Any]) -> tuple[float, float]:
    """The least-squares factor c of c * a to b, and |b - c a| / |b|; both NaN where one is zero or not finite.

    Sketches are linear: a residual near 0 means that one tensor is c times the other.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    size_a, size_b = float(a @ a), float(b @ b)
    if not (np.isfinite(size_a) and np.isfinite(size_b)) or size_a == 0 or size_b == 0:
        return np.nan, np.nan
    factor = float(a @ b) / size_a
    return factor, float(np.linalg.norm(b - factor * a)) / size_b**0.5


def rows_of(batches: Sequence[StepBatch], which: Sequence[Array], order: Array | None = None) -> StepBatch:
    """Copy some rows of several batches into one batch, without the inputs of operators (`given`).

    A column or statistic that any of the batches lacks is left out.

    Args:
        batches: at least one.
        which: for each batch, int64, numbers of its rows.
        order: int64, the chosen rows (one batch's after the other's) in the order in which they come; None for that
            order.
    """
    ends = np.cumsum([0, *map(len, which)])
    place = np.arange(ends[-1]) if order is None else np.argsort(order)

    def column(values: Sequence[Array | None]) -> Any:
        """One column of the chosen rows of all batches, in `order`; None where any batch lacks it."""
        kept = [column[rows] for column, rows in zip(values, which, strict=True) if column is not None]
        if len(kept) < len(values):
            return None
        return concatenated(kept) if order is None else concatenated(kept)[order]

    def by_name(columns: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        shared = [name for name in columns[0] if all(name in each for each in columns)]
        return {name: column([each[name] for each in columns]) for name in shared}

    texts: dict[int, str] = {}
    for batch, rows, start in zip(batches, which, ends.tolist(), strict=False):
        with_text = nonempty_rows(batch.text)
        for at in np.flatnonzero(np.isin(rows, with_text)).tolist() if len(with_text) else ():
            texts[int(place[start + at])] = batch.text[int(rows[at])]
    return StepBatch(
        **{name: column([getattr(batch, name) for batch in batches]) for name in _PLAIN},
        counts=by_name([batch.counts for batch in batches]),
        floats=by_name([batch.floats for batch in batches]),
        text=sparse_texts(len(place), texts),
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
    given = batch.given
    if given is not None:
        none = given_columns({}, len(rows))
        inputs, node = concatenated([none.inputs, given.inputs]), [*[""] * len(rows), *given.node]
        given = GivenColumns(inputs, np.concatenate([none.forward, given.forward]), node)
    return replace(
        rows_of([other, batch], [rows, np.arange(len(batch))]),
        site=np.concatenate([sites.astype(np.uint32), np.asarray(batch.site)]),
        sequence=np.concatenate([np.arange(len(rows), dtype=np.uint32), np.asarray(batch.sequence) + len(rows)]),
        given=given,
    )


_NOT_NEGATIVE = frozenset({"absmin", "amean", "var", "kurt"})


def _are_possible(floats: Mapping[str, Array]) -> bool:
    """Whether no column has an infinite value, nor one of `_NOT_NEGATIVE` a negative one; checks all at once."""
    if not floats:
        return True
    bounded = [column for name, column in floats.items() if name in _NOT_NEGATIVE]
    with np.errstate(invalid="ignore"):  # a stranger's NaN may be one that signals
        every = np.concatenate([*bounded, *(column for name, column in floats.items() if name not in _NOT_NEGATIVE)])
    return not np.isinf(every).any() and not (every[: sum(map(len, bounded))] < 0).any()


def _possible(name: str, column: Array) -> Array:
    """The column with infinite values, and negative ones of `_NOT_NEGATIVE`, replaced by NaN."""
    wrong = np.isinf(column)
    if name in _NOT_NEGATIVE:
        wrong |= column < 0
    return np.where(wrong, column.dtype.type(np.nan), column)
