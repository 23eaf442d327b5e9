"""A divergence looked at element by element, as lines, tables and a small picture for the screen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from introspect_cli.compare.picture import SIGN, smaller
from introspect_cli.compare.reasons.words import what
from introspect_cli.compare.result import Verdict
from introspect_cli.compare.ulps import ulp_words
from introspect_cli.records import count
from introspect_cli.render.blocks import Block, Column, Line, Table, line
from introspect_cli.render.diff_text import diff_blocks, statistics_words
from introspect_cli.render.text import clean, number, shape
from introspect_cli.render.values_text import elements_words, pair_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.closeup import Closeup
    from introspect_cli.compare.pattern import Difference
    from introspect_cli.compare.picture import Picture
    from introspect_cli.rerun.zoom import SourceLine, Zoomed

_SHADES = "░▒▓█"
_EQUAL = "·"
_HEIGHT = 16
_WIDTH = 64
_BAR = 24


def zoom_blocks(zoomed: Zoomed, width: int) -> list[Block]:
    """The whole answer of a zoom."""
    blocks: list[Block] = []
    if zoomed.before.verdict is not Verdict.DIVERGED:
        return diff_blocks(zoomed.before)
    shown = zoomed.after if zoomed.closeups and zoomed.after is not None else zoomed.before
    blocks.append(Line(((clean(shown.sentence), "bad"),)))
    blocks += [line(clean(side.told, 1200), "" if side.repeats else "unsure") for side in zoomed.sides]
    if zoomed.after is not None and not zoomed.after.first:
        blocks.append(line(f"Run again, they do not diverge: {clean(zoomed.after.sentence)}", "unsure"))
    if zoomed.after is None or not zoomed.after.first:
        blocks.append(line("What follows is what the stores hold.", "unsure"))
    for place, own in enumerate(zoomed.closeups):
        blocks += [line(), *closeup_blocks(own, width, zoomed.source if not place else ())]
    if zoomed.directory is not None:
        runs = " ".join(clean(str(side.run)) for side in zoomed.sides if side.run is not None)
        blocks += [line(), line(f"The new captures: {runs}", "dim", wrap=False)]
    return blocks


def _origin(own: Closeup, source: Sequence[SourceLine]) -> list[Block]:
    """The lines of code that ran an operator, and what it was given."""
    blocks: list[Block] = []
    for place in source:
        spans = (f"run by {clean(place.place)} in {place.name}", "dim"), (f"  {clean(place.text, 160)}", "name")
        blocks.append(Line(spans if place.text else spans[:1], 2, wrap=False))
    states = {
        state: [clean(given.text) for given in own.given if given.state == state]
        for state in ("equal", "differs", "not recorded")
    }
    for state, texts in states.items():
        if texts:
            verb = {"equal": "are equal", "differs": "differ", "not recorded": "were not recorded"}[state]
            told = f"of its inputs {verb if len(texts) > 1 else verb.replace('are', 'is').replace('were', 'was')}: "
            blocks.append(Line(((told, "dim"), ("; ".join(texts), "")), 2))
    return blocks


def closeup_blocks(own: Closeup, width: int, source: Sequence[SourceLine] = ()) -> list[Block]:
    """One divergence: how many elements, which, how far, where."""
    site = own.divergence.site
    one, two = own.divergence.a, own.divergence.b
    layout = one.layout if one is not None else two.layout if two is not None else None
    title = f"step {own.divergence.step}: {what(site)}"
    dtype = layout.dtype if layout is not None else ""
    if one is not None and two is not None and one.layout.dtype != two.layout.dtype:
        dtype = f"{one.layout.dtype} in a, {two.layout.dtype} in b"
    sizes = f"  {shape(layout.shape)} {dtype}" if layout is not None else ""
    blocks: list[Block] = [Line(((clean(title), "heading"), (clean(sizes), "dim"))), *_origin(own, source)]
    found = own.difference
    if found is None:
        blocks.append(line(f"No elements to show: {clean(own.missing, 400)}.", "", 2))
        stats = statistics_words(own.divergence)
        return [*blocks, line(f"What its records tell: {stats}.", "", 2)] if stats else blocks
    blocks.append(line(f"{elements_words(found.elements)}.", "", 2))
    if found.where:
        blocks.append(Line((("which: ", "dim"), (f"{'; '.join(found.where)}.", "")), 2))
    if found.relation:
        blocks.append(Line((("how: ", "dim"), (f"{'; '.join(found.relation)}.", "")), 2))
    if not found.elements.differing:
        return blocks
    return [*blocks, *picture_blocks(found.picture, width), *_tables(found)]


def largest_rows(found: Difference) -> list[tuple[str, str, str, str]]:
    """The largest differences: index, value in a, value in b, how far apart."""
    rows = []
    for index, one, two in found.largest:
        apart = abs(one - two)
        rows.append((str(list(index)), *pair_words(one, two), number(apart, 3) if math.isfinite(apart) else "-"))
    return rows


def _tables(found: Difference) -> list[Block]:
    """The largest differences, and the histogram of ULPs."""
    rows = largest_rows(found)
    columns = (Column("element"), Column("a", right=True), Column("b", right=True), Column("|a-b|", right=True))
    blocks: list[Block] = [line(), Table(columns, tuple(rows))]
    if found.elements.differing > len(rows):
        blocks.append(line(f"{found.elements.differing - len(rows):,} more differ, by no more.", "dim"))
    if found.ulps:
        most = max(own for _, own in found.ulps)
        bars = []
        for low, own in found.ulps:
            bars.append((ulp_words(low), f"{own:,}", "█" * max(1, round(own / most * _BAR))))
        heads = (Column(f"ULPs of {found.unit}", right=True), Column("elements", right=True), Column(""))
        blocks += [line(), Table(heads, tuple(bars))]
    return blocks


def picture_blocks(picture: Picture, width: int) -> list[Block]:
    """A grid of cells, darker where the difference is larger, on a scale of powers."""
    room = max(8, min(_WIDTH, width - 6))
    picture = smaller(picture, (_HEIGHT, room))
    cells = picture.cells
    low, high = scale_of(picture)
    blocks: list[Block] = [line()]
    shaded = ("".join(_shade(cell, low, high) for cell in row) for row in cells)
    blocks += [line(text, "", 4, wrap=False) for text in shaded]
    told = f"{_EQUAL} equal"
    if high:
        told += f", {_SHADES[-1] if low == high else _SHADES} {scale_words(low, high)}"
    if any(cell == math.inf for row in cells for cell in row):
        told += ", ! not finite in one of them"
    blocks.append(line(f"{told}; {axes_words(picture)}; a cell is {cell_words(picture)}", "dim", 4))
    return blocks


def scale_of(picture: Picture) -> tuple[float, float]:
    """The smallest and the largest finite |a - b| that is drawn; one number where they read alike, 0.0 for none."""
    known = [cell for row in picture.cells for cell in row if 0 < cell < math.inf]
    low, high = min(known, default=0.0), max(known, default=0.0)
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
    told = []
    for name, own, sizes in zip(("rows", "columns"), (picture.rows, picture.columns), picture.sizes, strict=True):
        which = f"dimension {own[0]}" if len(own) == 1 else f"dimensions {own[0]} to {own[-1]}"
        told.append(f"{name} are {which} ({'x'.join(map(str, sizes))})")
    return ", ".join(told)


def _shade(cell: float, low: float, high: float) -> str:
    if cell == 0:
        return _EQUAL
    if cell == math.inf:
        return "!"
    if low >= high:
        return _SHADES[-1]
    return _SHADES[min(int(math.log(cell / low) / math.log(high / low) * len(_SHADES)), len(_SHADES) - 1)]
