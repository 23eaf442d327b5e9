"""What a screen is made of, before it is known what screen: lines of styled text and tables.

Layout is decided here and in the modules that build blocks, as plain data, so that a test needs no terminal; only the
console knows about colours and widths of real ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from introspect_cli.render.text import shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDEST = 100_000
"""A width that nothing reaches: a pipe has no edge."""

Span = tuple[str, str]
"""Text and the name of its style; "" for none."""


@dataclass(frozen=True)
class Line:
    """One paragraph, wrapped by the console at its width, continuation lines indented."""

    spans: tuple[Span, ...] = ()
    indent: int = 0
    wrap: bool = True

    @property
    def text(self) -> str:
        """The paragraph without styles."""
        return "".join(text for text, _ in self.spans)


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title: its heading.
        right: whether it is set flush right.
        least: width below which it is not cut; 0 for never cut.
        rank: columns with a rank above 0 are dropped where there is no room, the highest first.
    """

    title: str
    right: bool = False
    least: int = 0
    rank: int = 0


@dataclass(frozen=True)
class Table:
    """Rows under headings.

    Attributes:
        columns: what is shown.
        rows: one text per column.
        styles: the style of each row.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    styles: tuple[str, ...] = field(default=())


Block = Line | Table


def line(text: str = "", style: str = "", indent: int = 0, *, wrap: bool = True) -> Line:
    """A paragraph of one style."""
    return Line(((text, style),) if text else (), indent, wrap)


def fit(table: Table, width: int) -> tuple[Table, list[int]]:
    """The table as it fits into a width, and the width of each column.

    Columns are first made narrower in the middle of their texts, the widest first, down to their least width; then
    the least important is dropped and it is tried again.
    """
    columns, rows = list(table.columns), [list(row) for row in table.rows]
    gap = 2 if width >= 100 else 1
    while True:
        widths = [max([len(column.title), *(len(row[place]) for row in rows)]) for place, column in enumerate(columns)]
        over = sum(widths) + gap * (len(widths) - 1) - width
        while over > 0:
            free = [p for p, c in enumerate(columns) if c.least and widths[p] > max(c.least, len(c.title))]
            if not free:
                break
            widest = max(free, key=lambda p: widths[p])
            widths[widest] -= 1
            over -= 1
        droppable = [p for p, column in enumerate(columns) if column.rank]
        if over <= 0 or not droppable:
            break
        dropped = max(droppable, key=lambda p: columns[p].rank)
        del columns[dropped]
        for row in rows:
            del row[dropped]
    fitted = tuple(tuple(shorten(text, widths[p]) for p, text in enumerate(row)) for row in rows)
    return Table(tuple(columns), fitted, table.styles), widths


def table_lines(table: Table, width: int) -> list[Line]:
    """The table as lines of text."""
    fitted, widths = fit(table, width)
    gap = "  " if width >= 100 else " "
    lines = [_row([column.title for column in fitted.columns], fitted.columns, widths, gap, "heading")]
    for place, row in enumerate(fitted.rows):
        style = fitted.styles[place] if place < len(fitted.styles) else ""
        lines.append(_row(row, fitted.columns, widths, gap, style))
    return lines


def _row(texts: Sequence[str], columns: Sequence[Column], widths: Sequence[int], gap: str, style: str) -> Line:
    cells = [
        text.rjust(width) if column.right else text.ljust(width)
        for text, column, width in zip(texts, columns, widths, strict=True)
    ]
    return Line(((gap.join(cells).rstrip(), style),), wrap=False)
