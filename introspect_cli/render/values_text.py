"""Whole tensors as text: stored values, and how those of two runs differ, element by element."""

from __future__ import annotations

import math
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.elements import SIGN, Picture, ulp_words
from introspect_cli.compare.terms.words import what
from introspect_cli.render.blocks import Block, Column, Figure, Line, Table, line, number, shape, site_text, two_numbers
from introspect_cli.render.divergence_text import elements_words, statistics_words
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from introspect_cli.compare.closeup import Closeup
    from introspect_cli.compare.elements import TensorDifference
    from introspect_cli.inspect.overview import Stored
    from introspect_cli.rerun.zoom import SourceLine

_BAR = 24
_CELL, _STEPS = 8, 12


def values_blocks(records: Sequence[Stored]) -> list[Block]:
    """The tensors of some records, large ones with their middle left out."""
    blocks: list[Block] = []
    for stored in records:
        record, layout = stored.record, stored.record.summary.layout
        title = f"step {record.step}: {site_text(record.site)} of {clean(record.site.fqn)} ({record.site.phase.value})"
        blocks.append(Line(((title, "heading"), (f"  {shape(layout.shape)} {layout.dtype}", "dim"))))
        if stored.values is None:
            blocks.append(line(clean(record.summary.text, 400) or "not stored whole", "", 2))
        else:
            blocks.append(Figure(partial(_array, stored.values)))
    return blocks


def _array(values: NDArray[Any], width: int) -> list[Block]:
    wide = max(min(width, 120) - 2, 20)
    text = np.array2string(values, max_line_width=wide, threshold=200, edgeitems=3, precision=6, separator=" ")
    return [line(clean(row), "", 2, wrap=False) for row in text.splitlines()]


def _listed(elements: Sequence[tuple[Sequence[int], Any, Any]], differing: int) -> list[Block]:
    """A table of elements that differ, the largest differences first, and how many more there are."""
    heads = (Column("element"), *(Column(name, right=True) for name in ("a", "b", "|a-b|")))
    rows = []
    for index, one, two in elements:
        far = abs(one - two)
        rows.append((str(list(index)), *pair_words(one, two), number(far, 3) if math.isfinite(far) else "-"))
    more = [line(f"{differing - len(rows):,} more differ, by no more.", "dim")] if differing > len(rows) else []
    return [line(), Table(heads, tuple(rows)), *more]


def pair_words(one: Any, two: Any) -> tuple[str, str]:
    """Two elements with as many digits as it takes to tell them apart, and about how far.

    2.9003549 and 2.9003551 are 2.90035 and 2.90036 in six digits: told apart, and fifty times too far.
    """
    if isinstance(one, complex):
        return f"{one:.6g}", f"{two:.6g}"
    distance = abs(one - two)
    for digits in range(4, 18):
        texts = two_numbers(one, two, digits, 17)
        shown = abs(float(f"{one:.{digits}g}") - float(f"{two:.{digits}g}"))
        if texts[0] != texts[1] and not abs(shown - distance) > distance / 5:
            break
    return texts


# One divergence looked at closely.


def closeup_blocks(closeup: Closeup, source: Sequence[SourceLine] = ()) -> list[Block]:
    """One divergence: how many elements, which, how far, where."""
    site = closeup.divergence.site
    one, two = closeup.divergence.a, closeup.divergence.b
    layout = one.layout if one is not None else two.layout if two is not None else None
    title = f"step {closeup.divergence.step}: {what(site)}"
    dtype = layout.dtype if layout is not None else ""
    if one is not None and two is not None and one.layout.dtype != two.layout.dtype:
        dtype = f"{one.layout.dtype} in a, {two.layout.dtype} in b"
    sizes = f"  {shape(layout.shape)} {dtype}" if layout is not None else ""
    blocks: list[Block] = [Line(((clean(title), "heading"), (clean(sizes), "dim"))), *_inputs_of(closeup, source)]
    difference = closeup.difference
    if difference is None:
        blocks.append(line(f"No elements to show: {clean(closeup.missing, 400)}.", "", 2))
        stats = statistics_words(closeup.divergence)
        return [*blocks, line(f"Its recorded statistics: {stats}.", "", 2)] if stats else blocks
    blocks.append(line(f"{elements_words(difference.elements)}.", "", 2))
    if difference.where:
        blocks.append(Line((("which: ", "dim"), (f"{'; '.join(difference.where)}.", "")), 2))
    if difference.relation:
        blocks.append(Line((("how: ", "dim"), (f"{'; '.join(difference.relation)}.", "")), 2))
    if not difference.elements.differing:
        return blocks
    picture = difference.picture
    drawn = Figure(lambda _: (), partial(_picture_svg, picture))
    return [*blocks, drawn, *_tables(difference)]


def _inputs_of(closeup: Closeup, source: Sequence[SourceLine]) -> list[Block]:
    """The lines of code that ran an operator, and what it was given."""
    blocks: list[Block] = []
    for place in source:
        spans = (f"run by {clean(place.place)} in {place.name}", "dim"), (f"  {clean(place.text, 160)}", "name")
        blocks.append(Line(spans if place.text else spans[:1], 2, wrap=False))
    states = {
        state: [clean(given.text) for given in closeup.given if given.state == state]
        for state in ("equal", "differs", "not recorded")
    }
    for state, texts in states.items():
        if texts:
            verb = {"equal": "are equal", "differs": "differ", "not recorded": "were not recorded"}[state]
            label = f"of its inputs {verb if len(texts) > 1 else verb.replace('are', 'is').replace('were', 'was')}: "
            blocks.append(Line(((label, "dim"), ("; ".join(texts), "")), 2))
    return blocks


def _tables(difference: TensorDifference) -> list[Block]:
    """The largest differences, and the histogram of ULPs."""
    blocks = _listed(difference.largest, difference.elements.differing)
    if difference.ulps:
        most = max(times for _, times in difference.ulps)
        bars = [
            (ulp_words(low), f"{times:,}", "█" * max(1, round(times / most * _BAR))) for low, times in difference.ulps
        ]
        heads = (Column(f"ULPs of {difference.unit}", right=True), Column("elements", right=True), Column(""))
        blocks += [line(), Table(heads, tuple(bars))]
    return blocks


def scale_of(picture: Picture) -> tuple[float, float]:
    """The smallest and the largest finite |a - b| that is drawn; one number where they read alike, 0.0 for none."""
    finite = [cell for row in picture.cells for cell in row if 0 < cell < math.inf]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return (high, high) if number(low, 2) == number(high, 2) else (low, high)


def scale_words(low: float, high: float) -> str:
    """What the shades stand for: `|a-b| 0.5`, or `|a-b| 0.1 to 2.1`."""
    if high == SIGN:
        return "the sign of a zero"
    return f"|a-b| {number(high, 2)}" if low == high else f"|a-b| {number(low, 2)} to {number(high, 2)}"


def cell_words(picture: Picture) -> str:
    """What a cell stands for."""
    tall, wide = picture.tile
    if (tall, wide) == (1, 1):
        return "an element"
    return f"the largest of {'' if picture.is_even else 'up to '}{tall}x{wide}"


def axes_words(picture: Picture) -> str:
    """Which dimensions are the rows and the columns."""
    if not picture.rows:
        return count(math.prod(picture.sizes[1]), "element")
    clauses = []
    for name, dimensions, sizes in zip(
        ("rows", "columns"), (picture.rows, picture.columns), picture.sizes, strict=True
    ):
        which = (
            f"dimension {dimensions[0]}" if len(dimensions) == 1 else f"dimensions {dimensions[0]} to {dimensions[-1]}"
        )
        clauses.append(f"{name} are {which} ({'x'.join(map(str, sizes))})")
    return ", ".join(clauses)


def _place(cell: float, low: float, high: float) -> float:
    """Where a cell lies on the scale of powers, 0 to 1; 1 where not finite."""
    return 1.0 if cell == math.inf or low >= high else math.log(cell / low) / math.log(high / low)


def _picture_svg(picture: Picture) -> str:
    """The grid as squares, darker where the difference is larger, from a sixth to 1 in a few shades."""
    low, high = scale_of(picture)
    tall, wide = len(picture.cells), len(picture.cells[0])
    squares = "".join(
        f'<rect x="{x}" y="{y}" width="1.02" height="1.02" '
        f'fill-opacity="{1 / 6 + 5 / 6 * round(_place(cell, low, high) * _STEPS) / _STEPS:.2f}"/>'
        for y, row in enumerate(picture.cells)
        for x, cell in enumerate(row)
        if cell
    )
    scale = f"{scale_words(low, high)}, " if high else ""
    label = escape(f"{scale}blank where equal; {axes_words(picture)}; a square is {cell_words(picture)}.")
    return (
        f'<figure class="closeup"><svg viewBox="0 0 {wide} {tall}" width="{wide * _CELL}" height="{tall * _CELL}" '
        f'preserveAspectRatio="none" role="img" aria-label="{label}">{squares}</svg>'
        f"<figcaption>{label}</figcaption></figure>"
    )
