"""Pictures made of letters, the divergence map and sparklines; tables of sites over all steps."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from introspect_cli.render.blocks import (
    Block,
    Column,
    Figure,
    Line,
    line,
    number,
    shorten,
    sparkline,
    table_of,
    two_numbers,
)
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from introspect_cli.compare.terms.result import DiffResult, DivergenceMap
    from introspect_cli.inspect.overview import History

_SHADES = ((0.0, "·", "dim"), (1e-6, "░", "warm"), (1e-3, "▒", "warm"), (1e-1, "▓", "hot"), (math.inf, "█", "hot"))
_MOST_ROWS = 40


def map_blocks(result: DiffResult, most: int = _MOST_ROWS, widest: int = 160) -> list[Block]:
    """The divergence map as text, no more than `most` rows and `widest` columns; [] where the result has none."""
    found = result.map
    return [] if found is None else [line(), Figure(lambda width: _map(found, min(width, widest), most))]


def _map(divergence_map: DivergenceMap, width: int, most: int) -> list[Block]:
    """The map as a heading, a row per module and a legend.

    Args:
        divergence_map: what is drawn.
        width: columns; several steps share one, which shows the largest distance, where there are too many.
        most: how many rows are shown: those that differ first.
    """
    names, steps, values = list(map(clean, divergence_map.modules)), divergence_map.steps, divergence_map.values
    label = min(max((len(name) for name in names), default=6), 34)
    room = max(width - label - 2, 10)
    fold = max(1, -(-len(steps) // room))
    wide = 2 if len(steps) * 2 <= room else 1
    rows = list(range(len(names)))
    if len(rows) > most:  # those that differ first
        first = {row: next(i for i, value in enumerate(values[row]) if value) for row in rows if any(values[row])}
        rows = sorted(sorted(first, key=lambda row: (first[row], row))[:most])
    span = f" (steps {steps[0]} to {steps[-1]}{f', {fold} a column' * (fold > 1)})" if steps else ""
    blocks: list[Block] = [Line((("Divergence map", "heading"), (span, "dim")))]
    for row in rows:
        columns = [slice(start, start + fold) for start in range(0, len(steps), fold)]
        cells = [(max(values[row][part]), max(divergence_map.behind[row][part])) for part in columns]
        shades = [(mark * wide, style) for mark, style in (_shade(*cell) for cell in cells)]
        blocks.append(Line(((shorten(names[row], label).ljust(label) + "  ", ""), *shades), wrap=False))
    if len(rows) < len(names):
        blocks.append(line(f"{len(names) - len(rows)} more rows are not shown", "dim"))
    legend = "· equal  - only forward equal  ░ <1e-6  ▒ <1e-3  ▓ <0.1  █ more, or one run only"
    return [*blocks, line(legend, "dim")]


def _shade(value: float, behind: float) -> tuple[str, str]:
    """(character, style) of a cell of the map.

    Args:
        value: largest distance in the forward pass; NaN where nothing was compared.
        behind: not 0 where the backward pass differs; gives `-` where `value` is 0.
    """
    if math.isnan(value):
        return " ", ""
    if value == 0 and behind:
        return "-", "warm"
    return next((mark, style) for limit, mark, style in _SHADES if value <= limit)


_ROWS = 12
_ENDS = 20
_AROUND = 3


def history_blocks(histories: Sequence[History], stat: str) -> list[Block]:
    """For each site a heading, a sparkline and its values: all, or the first and the last `_ENDS`."""
    blocks: list[Block] = []
    for history in histories:
        numbers = [value for value in history.values if value is not None]
        span = f"{number(min(numbers))} to {number(max(numbers))}" if numbers else "no number"
        title = f"{'' if history.texts else f' {stat}: {span}'} over {count(len(history.steps), 'step')}"
        blocks.append(Line(((clean(history.site), "heading"), (title, ""))))
        if numbers:
            blocks.append(spark(history.values, 116, 2))
        texts = history.texts or tuple(number(value, 5) for value in history.values)
        pairs = [f"{step}: {clean(text, 40)}" for step, text in zip(history.steps, texts, strict=True)]
        if len(pairs) > 2 * _ENDS:
            pairs = [*pairs[:_ENDS], f"... {len(pairs) - 2 * _ENDS} more ...", *pairs[-_ENDS:]]
        blocks.append(line("  ".join(pairs), "", 2))
    return blocks


def spark(values: Sequence[float | None], widest: int, indent: int = 0) -> Figure:
    """A sparkline as wide as the terminal allows: 10 to `widest` columns."""
    drawn = partial(sparkline, values)
    return Figure(lambda width: [line(drawn(max(min(width - 2 * indent, widest), 10)), "name", indent, wrap=False)])


def pair_blocks(pairs: Sequence[tuple[History | None, History | None]], stat: str) -> list[Block]:
    """For each site of two runs a table of values, or a line where one run lacks it."""
    blocks: list[Block] = []
    for place, (a, b) in enumerate(pairs):
        one = a or b
        if one is None:
            continue
        blocks += [line()] * bool(place)
        blocks.append(Line(((clean(one.site), "heading"), (f"  {stat}", ""))))
        if a is None or b is None:
            blocks.append(line(f"only in {'b' if a is None else 'a'}, {count(len(one.steps), 'step')}", "unsure", 2))
            continue
        blocks += _table(a, b)
    return blocks


def _table(a: History, b: History) -> list[Block]:
    """Both runs' values at some steps (`_ROWS` evenly spaced ones, and around the first that differs), and a summary.

    All steps where there are no more than `_ENDS`.
    """
    one, two = dict(zip(a.steps, a.values, strict=True)), dict(zip(b.steps, b.values, strict=True))
    steps = sorted({*one, *two})
    differing = [step for step in steps if not _is_same(one.get(step), two.get(step))]
    shown = set(range(len(steps)))
    if len(steps) > _ENDS:
        shown = {round(place * (len(steps) - 1) / (_ROWS - 1)) for place in range(_ROWS)}
    if differing:
        at = steps.index(differing[0])
        shown |= set(range(max(0, at - 1), min(len(steps), at + _AROUND)))

    def sides(step: int) -> tuple[str, str, str]:
        """Both values at a step, and how far they are apart relative to the larger; "" where equal or not known."""
        x, y = one.get(step), two.get(step)
        if x is None or y is None or _is_same(x, y):
            return number(x, 5), number(y, 5), ""
        finite = math.isfinite(x) and math.isfinite(y)
        return *two_numbers(x, y, 5, 17), number(abs(x - y) / max(abs(x), abs(y)), 2) if finite else ""

    def is_first(step: int) -> bool:
        return step in differing[:1]

    columns: list[tuple[Column, Callable[[int], str]]] = [
        (Column("step", right=True), str),
        (Column("a", right=True), lambda step: sides(step)[0]),
        (Column("b", right=True), lambda step: sides(step)[1]),
        (Column("|a-b| relative", right=True), lambda step: sides(step)[2]),
        (Column(""), lambda step: "first that differs" * is_first(step)),
    ]
    summary = f"differs at {len(differing):,} of {count(len(steps), 'step')}"
    summary = summary if differing else f"equal numbers at all {len(steps):,} steps"
    listed = f"; {len(shown)} of them are listed" if len(shown) < len(steps) else ""
    table = table_of([steps[place] for place in sorted(shown)], columns, lambda step: "origin" * is_first(step))
    return [table, line(f"{summary}{listed}.", "dim")]


def _is_same(x: float | None, y: float | None) -> bool:
    """Whether two values are equal, or both NaN, or both None."""
    return x == y or (x is not None and y is not None and math.isnan(x) and math.isnan(y))
