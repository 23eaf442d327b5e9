"""Whole tensors as text: stored values, and how those of two runs differ, element by element."""

from __future__ import annotations

import math
from functools import partial
from html import escape
from itertools import starmap
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.elements import SIGN, Picture
from introspect_cli.compare.say import what
from introspect_cli.render.blocks import (
    Block,
    Column,
    Figure,
    Line,
    Table,
    line,
    number,
    rest_of,
    shape,
    site_text,
    two_numbers,
)
from introspect_cli.render.diff_text import elements_words, statistics_words
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.closeup import Closeup
    from introspect_cli.compare.elements import TensorDifference
    from introspect_cli.inspect.overview import Stored

_BAR = 24
_CELL, _STEPS = 8, 12


def values_blocks(records: Sequence[Stored]) -> list[Block]:
    """For each record a heading and its tensor, a large one with its middle left out, or why it was not stored."""
    blocks: list[Block] = []
    for stored in records:
        record, layout = stored.record, stored.record.summary.layout
        title = f"step {record.step}: {site_text(record.site)} of {clean(record.site.fqn)} ({record.site.phase.value})"
        blocks.append(Line(((title, "heading"), (f"  {shape(layout.shape)} {layout.dtype}", "dim"))))
        if stored.values is None:
            blocks.append(line(clean(record.summary.text, 400) or "not stored whole", "", 2))
        else:
            options: Any = {"max_line_width": 78, "threshold": 200, "edgeitems": 3, "precision": 6}
            text = np.array2string(stored.values, separator=" ", **options)
            blocks += [line(clean(row), "", 2, wrap=False) for row in text.splitlines()]
    return blocks


# One divergence looked at closely.


def closeup_blocks(closeup: Closeup) -> list[Block]:
    """A divergence element by element: source line, counts, picture, largest differences, histogram of ULPs.

    Where elements are not known, why, and the recorded statistics; where none differs, no picture and tables.
    """
    site = closeup.divergence.site
    layouts = [side.layout for side in (closeup.divergence.a, closeup.divergence.b) if side is not None]
    title = f"step {closeup.divergence.step}: {what(site)}"
    sizes = f"  {shape(layouts[0].shape)} {' in a, '.join(dict.fromkeys(layout.dtype for layout in layouts))}"
    sizes += " in b" * (len({layout.dtype for layout in layouts}) > 1)
    blocks: list[Block] = [Line(((clean(title), "heading"), (clean(sizes), "dim")))]
    blocks += [line(f"run by {clean(closeup.divergence.source)}", "dim", 2)] if closeup.divergence.source else []
    difference = closeup.difference
    if difference is None:
        blocks.append(line(f"No elements to show: {clean(closeup.missing, 400)}.", "", 2))
        stats = statistics_words(closeup.divergence)
        return [*blocks, line(f"Its recorded statistics: {stats}.", "", 2)] if stats else blocks
    blocks.append(line(f"{elements_words(difference.elements)}.", "", 2))
    for label, clauses in (("which", difference.where), ("how", difference.relation)):
        blocks += [Line(((f"{label}: ", "dim"), (f"{'; '.join(clauses)}.", "")), 2)] if clauses else []
    if difference.picture is None:
        return blocks
    return [*blocks, Figure(partial(_picture_svg, difference.picture)), *_tables(difference)]


def _tables(difference: TensorDifference) -> list[Block]:
    """A table of the largest differences, and one of how many elements differ by how many ULPs, where that is known."""
    heads: tuple[Column, ...] = (Column("element"), *(Column(name, right=True) for name in ("a", "b", "|a-b|")))
    rows = []
    for index, one, two in difference.largest:
        far = abs(one - two)
        both = (f"{one:.6g}", f"{two:.6g}") if isinstance(one, complex) else two_numbers(one, two, 6, 17)
        rows.append((str(list(index)), *both, number(far, 3) if math.isfinite(far) else "-"))
    blocks: list[Block] = [line(), Table(heads, tuple(rows))]
    blocks += rest_of(difference.elements.differing, len(rows), what="more differ, by no more")
    if difference.ulps:
        most = max(times for _, times in difference.ulps)
        bars = [(far, f"{times:,}", "█" * max(1, round(times / most * _BAR))) for far, times in difference.ulps]
        heads = (Column(f"ULPs of {difference.unit}", right=True), Column("elements", right=True), Column(""))
        blocks += [line(), Table(heads, tuple(bars))]
    return blocks


def _picture_svg(picture: Picture) -> str:
    """The grid as squares, more opaque where the difference is larger, blank where equal.

    Opacity goes from a sixth for the smallest difference to 1 for the largest, by its logarithm, in `_STEPS` steps.
    """
    finite = [cell for row in picture.cells for cell in row if 0 < cell < math.inf]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    told = f"|a-b| {number(low, 2)} to {number(high, 2)}, " if high > SIGN else ""

    def square(x: int, y: int, cell: float) -> str:
        """One cell as a square at column `x`, row `y`."""
        place = 1.0 if cell == math.inf or low >= high else math.log(cell / low) / math.log(high / low)
        shade = 1 / 6 + 5 / 6 * round(place * _STEPS) / _STEPS
        return f'<rect x="{x}" y="{y}" width="1.02" height="1.02" fill-opacity="{shade:.2f}"/>'

    cells = [(x, y, cell) for y, row in enumerate(picture.cells) for x, cell in enumerate(row) if cell]
    tile = "an element" if picture.tile == (1, 1) else f"the largest of up to {'x'.join(map(str, picture.tile))}"
    label = escape(f"{told}blank where equal; {_axes(picture)}; a square is {tile}.")
    tall, wide = len(picture.cells), len(picture.cells[0])
    return (
        f'<figure class="closeup"><svg viewBox="0 0 {wide} {tall}" width="{wide * _CELL}" height="{tall * _CELL}" '
        f'preserveAspectRatio="none" role="img" aria-label="{label}">{"".join(starmap(square, cells))}</svg>'
        f"<figcaption>{label}</figcaption></figure>"
    )


def _axes(picture: Picture) -> str:
    """A clause on the dimensions that the picture's rows and columns count through; the elements for a single row."""
    rows, columns = ("x".join(map(str, sizes)) for sizes in (picture.rows, picture.columns))
    single = picture.rows == (1,)
    return count(math.prod(picture.columns), "element") if single else f"rows are {rows}, columns {columns} of it"
