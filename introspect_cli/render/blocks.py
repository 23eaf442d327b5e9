"""What a screen is made of, before it is known what screen: harmless and short texts, lines of them, and tables.

Layout is decided here and in the modules that build blocks, as plain data, so that a test needs no terminal; only the
console knows about colours and widths of real ones.
"""

from __future__ import annotations

import math
from itertools import chain, repeat
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from introspect_cli.errors import UsageError
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from introspect_cli.records import Site, Summary


def cut(text: str, length: int, *, front: bool = False) -> str:
    """A text of at most `length` characters, `…` in place of its end; with `front`, in place of its beginning."""
    if len(text) <= length:
        return text
    return "…" + text[len(text) - length + 1 :] if front else text[: length - 1] + "…"


def number(value: float | None, digits: int = 4) -> str:
    """A number in `digits` significant digits; `-` for None.

    An int, and a float below a million without a fraction, is written out as an integer.
    """
    if value is None:
        return "-"
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 10**6):
        return str(int(value))
    return f"{value:.{digits}g}"


def statistic(summary: Summary | None, name: str, digits: int = 4) -> str:
    """The statistic `name` of a record in `digits` significant digits; "" without a record or statistic."""
    return "" if summary is None or name not in summary.stats else number(summary.stats[name], digits)


def two_numbers(a: float, b: float, least: int = 4, most: int = 9) -> tuple[str, str]:
    """Two numbers in the fewest digits (`least` to `most`) that tell them apart; in `most` where none does."""
    pairs = [(number(a, digits), number(b, digits)) for digits in range(least, most + 1)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])


def distance(rel: float | None) -> str:
    """A relative distance in at most seven characters; `-` for None and NaN, `<1e-07` below that, for zero too."""
    if rel is None or math.isnan(rel):
        return "-"
    if rel < 1e-7:
        return "<1e-07"
    return f"{rel:.1e}" if rel < 1e-3 or rel >= 1000 else f"{rel:.3g}"


def shape(sizes: Sequence[int]) -> str:
    """The sizes of a tensor as `2x3`; `scalar` where there are none."""
    return "x".join(map(str, sizes)) if sizes else "scalar"


def site_text(site: Site) -> str:
    """Kind, path, and the call where it is not the first: `output [0] #2`."""
    path = f" {clean(site.path)}" if site.path else ""
    return f"{site.kind.value}{path}{f' #{site.call}' if site.call else ''}"


def write_whole(path: Path, text: str) -> None:
    """Write a text as UTF-8 over what is at the path; where that fails, remove the file there, old or cut short.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if path.is_file():
            path.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another name with -o") from None


Item = TypeVar("Item")

WIDEST = 100_000
"""A width that nothing reaches: a pipe has no edge."""

Span = tuple[str, str]
"""Text and the name of its style; "" for none."""


class Line(NamedTuple):
    """A paragraph, wrapped at the console's width.

    Attributes:
        spans: its text.
        indent: blanks in front of it.
        wrap: whether it is wrapped.
        hang: blanks in front of its continuation lines; 0 for two more than `indent`, where that is not 0.
    """

    spans: tuple[Span, ...] = ()
    indent: int = 0
    wrap: bool = True
    hang: int = 0

    @property
    def text(self) -> str:
        """The paragraph without styles."""
        return "".join(text for text, _ in self.spans)


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        title: its heading.
        right: whether it is set flush right.
        least: width down to which its texts may be cut; 0 for never.
        drop_at: when the column is left out: the lower, the sooner; 0 for never.
    """

    title: str
    right: bool = False
    least: int = 0
    drop_at: int = 0


class Table(NamedTuple):
    """Rows under headings.

    Attributes:
        columns: what is shown.
        rows: one text per column.
        styles: the style of each row; rows beyond them have none.
        caption: what it shows; above it on a page, and in a terminal.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    styles: tuple[str, ...] = ()
    caption: str = ""


class Figure(NamedTuple):
    """A picture on a page, which a terminal does not show.

    Attributes:
        drawing: makes its markup.
    """

    drawing: Callable[[], str]


class Fold(NamedTuple):
    """Blocks that a page shows when their title is clicked."""

    title: str
    blocks: tuple[Block, ...]


Block: TypeAlias = "Line | Table | Figure | Fold"


def line(text: str = "", style: str = "", indent: int = 0, *, wrap: bool = True) -> Line:
    """A paragraph of one style, with `indent` blanks in front; an empty line for ""."""
    return Line(((text, style),) if text else (), indent, wrap)


def section(title: str, blocks: Iterable[Block]) -> list[Block]:
    """A blank line, a heading and the blocks; [] where there are no blocks."""
    inside = list(blocks)
    return [line(), line(title, "heading"), *inside] if inside else []


def rest_of(total: int, shown: int, where: str = "", indent: int = 0, *, what: str = "more") -> list[Block]:
    """A line such as `and 3 more (--all lists them)` where `total` is larger than `shown`; [] otherwise.

    Args:
        total: how many things there are.
        shown: how many of them are listed.
        where: what lists the others; "" for nothing.
        indent: of the line.
        what: what the others are called.
    """
    named = f" ({where})" if where else ""
    return [line(f"and {total - shown:,} {what}{named}", "dim", indent)] if total > shown else []


def first_of(blocks: Sequence[Block], most: int | None, where: str) -> list[Block]:
    """The first `most` blocks, all for None; then a line on how many more there are, and what lists them."""
    shown = blocks[:most]
    return [*shown, *rest_of(len(blocks), len(shown), where, 2)]


def table_of(
    items: Iterable[Item],
    columns: Sequence[tuple[Column, Callable[[Item], str]]],
    style: Callable[[Item], str] = lambda _: "",
    caption: str = "",
) -> Table:
    """A table with a row per item; columns whose texts are all "" are left out, so without items there is none.

    Args:
        items: what the rows are about.
        columns: each column with a function that gives its text for an item.
        style: gives the style of an item's row.
        caption: what the table shows.
    """
    items = tuple(items)
    cells = [(column, [words(item) for item in items]) for column, words in columns]
    kept = [(column, texts) for column, texts in cells if any(texts)]
    rows = zip(*(texts for _, texts in kept), strict=True)
    return Table(tuple(column for column, _ in kept), tuple(rows), tuple(map(style, items)), caption)


def lines_of(blocks: Iterable[Block], width: int) -> Iterator[Line]:
    """All blocks as lines of text, tables laid out for `width` and folds opened; figures are left out."""
    for block in blocks:
        if isinstance(block, Line):
            yield block
        elif isinstance(block, Table):
            yield from table_lines(block, width)
        elif isinstance(block, Fold):
            yield from (line(), line(block.title, "heading"), *lines_of(block.blocks, width))


def table_lines(table: Table, width: int) -> list[Line]:
    """The table as lines of text: its caption if it has one, headings, rows; gaps of 2 from 100 columns on, else of 1.

    First, columns are dropped, the one with the lowest `drop_at` first, while their least widths together are too wide.
    Then the widest column that is above its least width loses a character, again and again. It may still be too wide
    where no column can be dropped or cut. Texts are cut at their beginning.
    """
    columns, gap = table.columns, " " * (2 if width >= 100 else 1)
    wide = [max(map(len, (column.title, *(row[at] for row in table.rows)))) for at, column in enumerate(columns)]
    least = [max(min(each.least or room, room), len(each.title)) for each, room in zip(columns, wide, strict=True)]
    kept = list(range(len(columns)))

    def is_too_wide(sizes: Sequence[int]) -> bool:
        return sum(sizes[at] for at in kept) + len(gap) * (len(kept) - 1) > width

    def row(texts: Sequence[str], style: str) -> Line:
        cells = ((cut(texts[at], wide[at], front=True), wide[at], columns[at].right) for at in kept)
        padded = (text.rjust(size) if right else text.ljust(size) for text, size, right in cells)
        return Line(((gap.join(padded).rstrip(), style),), wrap=False)

    for at in sorted(kept, key=lambda at: columns[at].drop_at):
        if columns[at].drop_at and is_too_wide(least):
            kept.remove(at)
    while is_too_wide(wide) and (cuttable := [at for at in kept if wide[at] > least[at]]):
        wide[max(cuttable, key=wide.__getitem__)] -= 1
    caption = [line(table.caption, "heading")] if table.caption else []
    rows = map(row, table.rows, chain(table.styles, repeat("")))
    return [*caption, row([column.title for column in columns], "heading"), *rows]
