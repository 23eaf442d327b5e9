"""What `Summarizer.take` hands over: a step's summaries as columns.

Columns, not objects, since a step may have tens of thousands of rows and the store keeps columns too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from introspect_cli.records import Layout
    from introspect_cli.tensors.columns import Columns
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
    """A step's table, out of what follows from its rows.

    Args:
        columns: taken over, and written to.
        layouts: distinct layouts.
        facts: what is known of the rows beside.
        fixed: checksums that are not sums (plain values), by row.
        texts: of rows that have one.
    """
    for slot, value in fixed.items():
        columns.checksum[slot] = value
    counts: dict[str, npt.NDArray[np.int64]] = {}
    floats: dict[str, npt.NDArray[np.float64] | npt.NDArray[np.float32]] = {}
    for name, column in columns.statistics.items():
        (counts if column.dtype.kind == "i" else floats)[name] = column
    index, status = facts.layout_index, facts.status
    return SummaryTable(layouts, index, columns.checksum, status, counts, floats, columns.sketch, texts)
