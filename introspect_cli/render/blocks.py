"""What a screen is made of, before it is known what screen: harmless and short texts, lines of them, and tables.

Layout is decided here and in the modules that build blocks, as plain data, so that a test needs no terminal; only the
console knows about colours and widths of real ones.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from introspect_cli.records import Site, Summary

_SPARKS = "▁▂▃▄▅▆▇█"
_PLAIN_SPARKS = "_.-:=+*#"


def shorten(text: str, width: int) -> str:
    """A name cut at its front, where names differ least, at a dot if there is one near."""
    if len(text) <= width:
        return text
    kept = text[-(width - 1) :] if width > 1 else ""
    dot = kept.find(".")
    return "…" + (kept[dot:] if 0 < dot <= width // 3 else kept)


def cut(text: str, length: int, *, front: bool = False) -> str:
    """A text that is no longer than that, cut at its end or at its front."""
    if len(text) <= length:
        return text
    return "…" + text[len(text) - length + 1 :] if front else text[: length - 1] + "…"


def number(value: float | None, digits: int = 4) -> str:
    """A number in a few significant digits; whole numbers whole."""
    if value is None:
        return "-"
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 10**6):
        return str(int(value))
    return f"{value:.{digits}g}"


def statistic(summary: Summary | None, name: str, digits: int = 4) -> str:
    """A statistic of a record; "" where it has none."""
    return "" if summary is None or name not in summary.stats else number(summary.stats[name], digits)


def two_numbers(a: float, b: float, least: int = 4, most: int = 9) -> tuple[str, str]:
    """Two numbers with as many digits as it takes to tell them apart, `least` to `most`."""
    for digits in range(least, most + 1):
        one, two = number(a, digits), number(b, digits)
        if one != two:
            return one, two
    return number(a, most), number(b, most)


def distance(rel: float | None) -> str:
    """A relative distance in at most seven characters."""
    if rel is None or math.isnan(rel):
        return "-"
    if rel < 1e-7:
        return "<1e-07"
    return f"{rel:.1e}" if rel < 1e-3 or rel >= 1000 else f"{rel:.3g}"


def shape(sizes: Sequence[int]) -> str:
    """`2x3`, or `scalar`."""
    return "x".join(map(str, sizes)) if sizes else "scalar"


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """Values as a row of little bars, folded by their mean to the width; `!` where not finite, a blank where absent."""
    marks = _PLAIN_SPARKS if ascii_only else _SPARKS
    fold = max(1, -(-len(values) // max(width, 1)))
    folded: list[float | None] = []
    for start in range(0, len(values), fold):
        part = [value for value in values[start : start + fold] if value is not None]
        if part and any(not math.isfinite(value) for value in part):
            folded.append(math.nan)
        else:
            folded.append(sum(value / len(part) for value in part) / 2 if part else None)  # sums of halves are finite
    finite = [value for value in folded if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low
    line = ""
    for value in folded:
        if value is None:
            line += " "
        elif math.isnan(value):
            line += "!"
        else:
            line += marks[len(marks) // 2 if span == 0 else min(int((value - low) / span * len(marks)), len(marks) - 1)]
    return line


_BRIEF = {"optimizer_state": "state", "hyperparameter": "hyper"}


def site_text(site: Site) -> str:
    """Kind, path, and the call where it is not the first: `output [0] #2`."""
    path = f" {clean(site.path)}" if site.path else ""
    return f"{site.kind.value}{path}{f' #{site.call}' if site.call else ''}"


def brief_what(site: Site) -> str:
    """The same with shorter words and no quotes: `state exp_avg`."""
    path = re.sub(r"^\['(\w+)'\]$", r"\1", clean(site.path))
    kind = _BRIEF.get(site.kind.value, site.kind.value)
    return f"{kind}{f' {path}' if path else ''}{f' #{site.call}' if site.call else ''}"


def write_whole(path: Path, text: str) -> None:
    """Write a file, or none: what a full disk cut short is removed.

    Raises:
        OSError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError:
        if path.is_file():
            path.unlink(missing_ok=True)
        raise


Item = TypeVar("Item")

WIDEST = 100_000
"""A width that nothing reaches: a pipe has no edge."""

Span = tuple[str, str]
"""Text and the name of its style; "" for none."""


@dataclass(frozen=True)
class Line:
    """One paragraph, wrapped by the console at its width, continuation lines indented.

    Attributes:
        spans: its text.
        indent: blanks in front of it.
        wrap: whether it is wrapped.
        hang: blanks in front of its continuation lines; 0 for two more than in front of it, where it has any.
    """

    spans: tuple[Span, ...] = ()
    indent: int = 0
    wrap: bool = True
    hang: int = 0

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
        least: width down to which its texts may be cut; 0 for never.
        brief: shorter texts, one a row, for where there is no room; empty for none.
        brief_at: when these are used: the lower, the sooner.
        drop_at: when the column is left out: the lower, the sooner; 0 for never.
    """

    title: str
    right: bool = False
    least: int = 0
    brief: tuple[str, ...] = ()
    brief_at: int = 0
    drop_at: int = 0


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


def rest_of(total: int, shown: int, where: str = "", indent: int = 0, *, what: str = "more") -> list[Block]:
    """`and 3 more (--all lists them)`, where not all is shown."""
    named = f" ({where})" if where else ""
    return [line(f"and {total - shown:,} {what}{named}", "dim", indent)] if total > shown else []


def table_of(
    items: Iterable[Item],
    columns: Sequence[tuple[Column, Callable[[Item], str]]],
    style: Callable[[Item], str] | None = None,
) -> Table:
    """A row for each item: every column with what it says of one, and the style of a row."""
    items = tuple(items)
    rows = tuple(tuple(words(item) for _, words in columns) for item in items)
    return Table(tuple(column for column, _ in columns), rows, tuple(map(style, items)) if style is not None else ())


def _gap(width: int) -> int:
    return 2 if width >= 100 else 1


def _widths(columns: Sequence[Column], texts: Sequence[Sequence[str]]) -> list[int]:
    return [max([len(column.title), *map(len, cells)]) for column, cells in zip(columns, texts, strict=True)]


def fit(table: Table, width: int) -> tuple[Table, list[int]]:
    """The table as it fits into a width, and the width of each column.

    What is said twice goes first: briefer texts and dropped columns, in the order their columns ask for; only then are
    texts cut, the widest column first, down to its least width.
    """
    columns = list(table.columns)
    texts = [[row[place] for row in table.rows] for place in range(len(columns))]
    actions = sorted(
        {(column.brief_at, False, column.title) for column in columns if column.brief}
        | {(column.drop_at, True, column.title) for column in columns if column.drop_at}
    )
    gap = _gap(width)

    def over() -> int:
        return sum(_widths(columns, texts)) + gap * (len(columns) - 1) - width

    for _, drop, title in actions:
        if over() <= 0:
            break
        place = next((p for p, column in enumerate(columns) if column.title == title), None)
        if place is None:
            continue
        if drop:
            del columns[place], texts[place]
        else:
            texts[place] = list(columns[place].brief)
    widths = _widths(columns, texts)
    excess = over()
    while excess > 0:
        free = [p for p, c in enumerate(columns) if c.least and widths[p] > max(c.least, len(c.title))]
        if not free:
            break
        widths[max(free, key=lambda p: widths[p])] -= 1
        excess -= 1
    fitted = tuple(
        tuple(shorten(cells[row], widths[p]) for p, cells in enumerate(texts)) for row in range(len(table.rows))
    )
    return Table(tuple(columns), fitted, table.styles), widths


def lines_of(blocks: Iterable[Block], width: int) -> Iterator[Line]:
    """The blocks, tables laid out as lines of text."""
    for block in blocks:
        yield from table_lines(block, width) if isinstance(block, Table) else (block,)


def table_lines(table: Table, width: int) -> list[Line]:
    """The table as lines of text."""
    fitted, widths = fit(table, width)
    gap = " " * _gap(width)
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
