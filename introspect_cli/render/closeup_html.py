"""The first divergence element by element, for a page: a picture, the largest differences, a histogram of ULPs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.words import what
from introspect_cli.compare.ulps import ulp_words
from introspect_cli.render.html_parts import table, text
from introspect_cli.render.values_text import elements_words
from introspect_cli.render.zoom_text import axes_words, cell_words, largest_rows, scale_of, scale_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.closeup import Closeup
    from introspect_cli.compare.picture import Picture

_CELL = 8
_SHADES = 12


def closeups_html(closeups: Sequence[Closeup]) -> str:
    """The divergences that whole tensors were stored of; nothing where there are none."""
    return "".join(
        _closeup(own) for own in closeups if own.difference is not None and own.difference.elements.differing
    )


def _closeup(own: Closeup) -> str:
    found = own.difference
    assert found is not None, "only what has elements is drawn"
    clauses = [f"{elements_words(found.elements)}."]
    clauses += [f"Which: {'; '.join(found.where)}."] * bool(found.where)
    clauses += [f"How: {'; '.join(found.relation)}."] * bool(found.relation)
    rows = [tuple(map(text, cells)) for cells in largest_rows(found)]
    parts = [
        f"<h3>{text(what(own.divergence.site)[:1].upper() + what(own.divergence.site)[1:])}, element by element</h3>",
        *(f"<p>{text(clause, 1000)}</p>" for clause in clauses),
        picture_svg(found.picture),
        table("The largest differences", ("element", "a", "b", "|a-b|"), rows),
    ]
    if found.ulps:
        bins = [(text(ulp_words(low)), text(f"{times:,}")) for low, times in found.ulps]
        parts.append(table(f"Elements by distance in ULPs of {text(found.unit)}", ("ULPs", "elements"), bins))
    return "".join(parts)


def picture_svg(picture: Picture) -> str:
    """The grid as squares, darker where the difference is larger, on a scale of powers."""
    low, high = scale_of(picture)
    tall, wide = len(picture.cells), len(picture.cells[0])
    squares = []
    for y, row in enumerate(picture.cells):
        for x, cell in enumerate(row):
            if cell:
                shade = f"{_opacity(cell, low, high):.2f}"
                squares.append(f'<rect x="{x}" y="{y}" width="1.02" height="1.02" fill-opacity="{shade}"/>')
    scale = f"{scale_words(low, high)}, " if high else ""
    label = f"{scale}blank where equal; {axes_words(picture)}; a square is {cell_words(picture)}."
    return (
        f'<figure class="closeup"><svg viewBox="0 0 {wide} {tall}" width="{wide * _CELL}" height="{tall * _CELL}" '
        f'preserveAspectRatio="none" role="img" aria-label="{text(label)}">{"".join(squares)}</svg>'
        f"<figcaption>{text(label)}</figcaption></figure>"
    )


def _opacity(cell: float, low: float, high: float) -> float:
    """From a sixth to 1, in a few shades; 1 where not finite."""
    if cell == math.inf or low >= high:
        return 1.0
    shade = round(math.log(cell / low) / math.log(high / low) * _SHADES) / _SHADES
    return 1 / 6 + 5 / 6 * shade
