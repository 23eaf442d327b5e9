"""What `Summarizer.take` hands over: a step's summaries as columns.

Columns, not objects, since a step may have tens of thousands of rows and the store keeps columns too. The rows are
given away before devices have computed them all, so that the script goes on meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from introspect_cli.records import Layout
    from introspect_cli.tensors import rows as r
    from introspect_cli.tensors.columns import Columns
    from introspect_cli.tensors.gpu.buffers import Pending
    from introspect_cli.tensors.row_notes import Facts


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
