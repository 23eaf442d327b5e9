"""A step's rows as columns: checksums, statistics, sketches.

numpy computes a column after the other, each in several passes; that is half a millisecond a step whatever there is to
compute, since nothing of it is in the processor's caches after a training step. So one call of the compiled kernels
does it where there are no other statistics than it knows. Both give the same bits.

Most steps have the same records as the one before, of the same slots. So where the store can take them as they are, the
columns have their place in arrays that stay (`Target`): one call of the kernels fills them all, and nothing else of the
step is looked at. Else a step is a `SummaryTable`, whose rows are given away before devices have computed them all, so
that the script goes on meanwhile (`Handover`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from introspect_cli.records import SKETCH_SIZE, STATISTICS
from introspect_cli.tensors import checksum, kernels, sketch, statistics
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.row_notes import NOTHING
from introspect_cli.tensors.rows import ROWS
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from introspect_cli.records import Layout
    from introspect_cli.tensors.gpu.buffers import Pending
    from introspect_cli.tensors.row_notes import Facts, RowNotes
    from introspect_cli.tensors.rows import Arena

    Array = npt.NDArray[Any]


COMPILED: Final = (
    *("nans", "posinfs", "neginfs", "zeros", "min", "max", "absmin", "mean", "amean", "var", "skew", "kurt"),
)
"""Statistics that the compiled kernels know, in their order: after the checksum, before the sketch."""


@dataclass(frozen=True)
class Columns:
    """What follows from rows, in their order; see `SummaryTable` for what stands where nothing counts."""

    checksum: npt.NDArray[np.uint64]
    statistics: dict[str, npt.NDArray[Any]]
    sketch: npt.NDArray[np.float32] | None


def of_rows(rows: r.Rows, facts: Facts, names: Sequence[str], *, with_sketch: bool) -> Columns:
    """The columns of rows, by numpy."""
    seen = facts.seen
    sums, columns = checksum.finalise(rows[:, r.RAW], facts.headers), statistics.finalise(rows, names)
    sketches = sketch.finalise(rows) if with_sketch else None
    sums[seen == NOTHING] = 0
    absent = np.flatnonzero(seen)  # few, as a rule
    for column in columns.values():
        column[absent] = -1 if column.dtype.kind == "i" else np.nan
    if sketches is not None:
        sketches[absent] = np.nan
    return Columns(sums, columns, sketches)


def of_blocks(arena: Arena, facts: Facts, names: Sequence[str], *, with_sketch: bool) -> Columns | None:
    """The same of the first rows of an arena; None where numpy has to compute it."""
    if kernels.KERNELS is None or not set(names).issubset(COMPILED):
        return None
    count = len(facts.headers)
    # Few arrays, and the columns are rows of them: asking one for its address takes longer than filling a column.
    sums = np.empty(count, np.uint64)
    sketches = np.empty((count, SKETCH_SIZE), np.float32) if with_sketch else None
    columns: dict[str, npt.NDArray[Any]] = {}
    addresses: dict[str, int] = {}
    for kind, together in _by_type(names).items():
        array = np.empty((len(together), count), kind)
        base, step = array.ctypes.data, array.strides[0]
        for place, name in enumerate(together):
            columns[name], addresses[name] = array[place], base + place * step
    last = 0 if sketches is None else sketches.ctypes.data
    targets = column_addresses({"checksum": sums.ctypes.data, **addresses, "sketch": last})
    of, how = facts.headers.ctypes.data, facts.seen.ctypes.data
    kernels.KERNELS.columns(arena.place, ROWS, 0, of, how, count, targets.ctypes.data)
    return Columns(sums, {name: columns[name] for name in names}, sketches)


def column_addresses(addresses: Mapping[str, int]) -> npt.NDArray[np.uint64]:
    """Where columns lie, by name, in the order in which the kernels take them; 0 for those that are not wanted."""
    return np.array([addresses.get(name, 0) for name in ("checksum", *COMPILED, "sketch")], np.uint64)


def _by_type(names: Sequence[str]) -> dict[str, list[str]]:
    """Statistics by the type of their columns."""
    by_type: dict[str, list[str]] = {}
    for name in names:
        by_type.setdefault(STATISTICS[name].type, []).append(name)
    return by_type


_OTHERS = {"site", "sequence", "layout"}
"""Columns that do not follow from rows."""


class Target:
    """Arrays of n records, each record of one slot.

    Attributes:
        slots: the slot of each record; another list when it has changed.
        layout_index: the layout of each record as the summarizer numbers them, uint32 (n,); another array when it
            has changed.
        texts: of records that have one, by record.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        """Take over arrays by name; see `over`."""
        self.layout_index: npt.NDArray[np.uint32] | None = None
        self.texts: dict[int, str] = {}
        self._status, self._checksum = arrays["status"], arrays["checksum"]
        self._columns = column_addresses({name: array.ctypes.data for name, array in arrays.items()})
        self._to = self._columns.ctypes.data
        self._facts: Facts | None = None  # that the arrays of the next line follow from
        self.slots: list[int] = []
        self._noted: list[tuple[int, int]] = []
        self._picked: tuple[Array, ...] = ()
        self._of: tuple[int, ...] = ()

    @classmethod
    def over(cls, arrays: Mapping[str, Array], kept: Sequence[str], *, with_sketch: bool) -> Target | None:
        """A target over arrays of n records by name: "status", "checksum", statistics, "sketch".

        Args:
            arrays: each contiguous, of the type that the store keeps; they stay where they are.
            kept: the statistics that are computed.
            with_sketch: whether sketches are.

        Returns:
            None where numpy has to compute a column, or the arrays are of other columns than are computed.
        """
        wanted = {"status", "checksum", *kept, *(["sketch"] if with_sketch else [])}
        if kernels.KERNELS is None or arrays.keys() - _OTHERS != wanted or not set(kept).issubset(COMPILED):
            return None
        if not all(array.dtype.isnative and array.flags.c_contiguous for array in arrays.values()):
            return None
        return cls(arrays)

    def fill(self, arena: Arena, facts: Facts, notes: RowNotes, slots: list[int]) -> None:
        """Fill all arrays."""
        if facts is not self._facts or slots != self.slots:
            self._follow(facts, slots)
        assert kernels.KERNELS is not None
        kernels.KERNELS.columns(arena.place, ROWS, *self._of, len(slots), self._to)
        fixed, texts = notes.fixed, notes.texts
        for record, slot in self._noted:
            if slot in fixed:
                self._checksum[record] = fixed[slot]
        self.texts = {record: texts[slot] for record, slot in self._noted if texts[slot]}

    def _follow(self, facts: Facts, slots: list[int]) -> None:
        """Put down what is the same in every step that has these facts and slots."""
        self._facts = None
        pick = kernels.numbers(slots)
        self.layout_index = facts.layout_index[pick]
        self._status[:] = facts.status[pick]
        self._picked = picked = (pick, facts.headers[pick], facts.seen[pick])
        self._of = tuple(array.ctypes.data for array in picked)
        self._noted = [(record, slot) for record, slot in enumerate(slots) if slot in facts.kinds]
        self.slots = slots
        self._facts = facts


@dataclass(frozen=True)
class SummaryTable:
    """Summaries of a step, in slot order.

    Attributes:
        layouts: distinct layouts; a summarizer only ever appends to them, so positions stay valid from one take
            to the next.
        layout_index: position in `layouts` of each row, uint32, shape (n,).
        checksum: uint64, shape (n,); 0 where nothing was observed.
        status: `records.Status` as uint8, shape (n,).
        counts: int64 columns by name, shape (n,); -1 where absent.
        floats: columns by name, shape (n,), float64, or float32 for `skew` and `kurt`; NaN where absent.
        sketch: float32, shape (n, 16), or None; NaN where absent.
        texts: a plain value's repr, or why something was not observed, by row; of few rows, as a rule.
    """

    layouts: list[Layout]
    layout_index: npt.NDArray[np.uint32]
    checksum: npt.NDArray[np.uint64]
    status: npt.NDArray[np.uint8]
    counts: dict[str, npt.NDArray[np.int64]]
    floats: dict[str, npt.NDArray[np.float64] | npt.NDArray[np.float32]]
    sketch: npt.NDArray[np.float32] | None
    texts: dict[int, str]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.layout_index)

    @property
    def text(self) -> list[str]:
        """The text of each row, "" where there is none."""
        return [self.texts.get(row, "") for row in range(len(self))]


def finalise(
    columns: Columns, *, layouts: list[Layout], facts: Facts, fixed: dict[int, int], texts: dict[int, str]
) -> SummaryTable:
    """A step's table, out of what follows from its rows."""
    for slot, value in fixed.items():
        columns.checksum[slot] = value
    counts: dict[str, npt.NDArray[np.int64]] = {}
    floats: dict[str, npt.NDArray[np.float64] | npt.NDArray[np.float32]] = {}
    for name, column in columns.statistics.items():
        (counts if column.dtype.kind == "i" else floats)[name] = column
    index, status = facts.layout_index, facts.status
    return SummaryTable(layouts, index, columns.checksum, status, counts, floats, columns.sketch, texts)


class Handover:
    """The rows of a step, of which devices may still compute some; or their table, where none do."""

    def __init__(self, rows: r.Rows, pending: list[Pending], finish: Callable[[], SummaryTable]) -> None:
        self._rows = rows
        self._pending = pending
        self._finish = finish
        self._table: SummaryTable | None = None

    @property
    def waits(self) -> bool:
        """Whether the table has to be waited for, so that it should be asked for later."""
        return bool(self._pending)

    def ready(self) -> bool:
        """Whether it may be waited for now: not while a CUDA graph is being captured."""
        for pending in self._pending:
            pending.send()
        return all(pending.ready() for pending in self._pending)

    def table(self) -> SummaryTable:
        """The table, waited for."""
        if self._table is None:
            if self._pending:
                with unobserved():
                    for pending in self._pending:
                        self._rows[pending.slots] = pending.rows()
            self._table = self._finish()
        return self._table
