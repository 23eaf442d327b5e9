"""Pictures made of letters: the divergence map, sparklines and plots of sites over all steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from introspect_cli.render.blocks import Block, Column, Line, Span, Table, line, number, shorten, sparkline, two_numbers
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.terms.result import DiffResult, DivergenceMap
    from introspect_cli.inspect.overview import History

_SHADES = ((0.0, "·", "dim"), (1e-6, "░", "warm"), (1e-3, "▒", "warm"), (1e-1, "▓", "hot"), (math.inf, "█", "hot"))
_BEHIND = ("-", "warm")
_MOST_ROWS = 40


def map_blocks(result: DiffResult, width: int, most: int = _MOST_ROWS) -> list[Block]:
    """The divergence map, where there is one."""
    return [] if result.map is None else [line(), *_map(result.map, min(width, 160), most)]


def _fold(row: Sequence[float], fold: int) -> list[float]:
    return [max(row[start : start + fold]) for start in range(0, len(row), fold)]


def _map(divergence_map: DivergenceMap, width: int, most: int) -> list[Block]:
    names = [clean(name) for name in divergence_map.modules]
    label = min(max((len(name) for name in names), default=6), 34)
    room = max(width - label - 2, 10)
    fold = max(1, -(-len(divergence_map.steps) // room))
    wide = 2 if len(divergence_map.steps) * 2 <= room and fold == 1 else 1
    rows = list(range(len(names)))
    left_out = 0
    if len(rows) > most:
        hot = [row for row in rows if any(value != 0 for value in divergence_map.values[row])]
        first = {row: next(i for i, value in enumerate(divergence_map.values[row]) if value != 0) for row in hot}
        kept = sorted(sorted(hot, key=lambda row: (first[row], row))[:most])
        left_out = len(rows) - len(kept)
        rows = kept
    last = divergence_map.steps[-1] if divergence_map.steps else 0
    span = (
        f"steps {divergence_map.steps[0]} to {last}" + (f", {fold} a column" if fold > 1 else "")
        if divergence_map.steps
        else ""
    )
    blocks: list[Block] = [Line((("Divergence map", "heading"), (f" ({span})", "dim")))]
    for row in rows:
        spans: list[Span] = [(shorten(names[row], label).ljust(label) + "  ", "")]
        behind = _fold(divergence_map.behind[row], fold)
        shades = [
            _BEHIND if value == 0 and other else _shade(value)
            for value, other in zip(_fold(divergence_map.values[row], fold), behind, strict=True)
        ]
        spans += [(mark * wide, style) for mark, style in shades]
        blocks.append(Line(tuple(spans), wrap=False))
    if left_out:
        blocks.append(line(f"{left_out} more rows are not shown", "dim"))
    legend = "· equal  - only forward equal  ░ <1e-6  ▒ <1e-3  ▓ <0.1  █ more, or one run only"
    blocks.append(line(legend, "dim"))
    return blocks


def _shade(value: float) -> tuple[str, str]:
    if math.isnan(value):
        return " ", ""
    for limit, mark, style in _SHADES:
        if value <= limit:
            return mark, style
    return _SHADES[-1][1:]


_HIGH = 8
_PLOTS = 4
_ROWS = 12
_ENDS = 20
_AROUND = 3


def history_blocks(histories: Sequence[History], stat: str, width: int, *, ascii_only: bool) -> list[Block]:
    """Sites over all steps: a sparkline and the numbers."""
    blocks: list[Block] = []
    for history in histories:
        numbers = [value for value in history.values if value is not None]
        span = f"{number(min(numbers))} to {number(max(numbers))}" if numbers else "no number"
        title = (
            f" {stat}: {span} over {count(len(history.steps), 'step')}"
            if not history.texts
            else f" over {count(len(history.steps), 'step')}"
        )
        blocks.append(Line(((clean(history.site), "heading"), (title, ""))))
        if numbers:
            room = max(min(width, 120) - 4, 10)
            blocks.append(line(sparkline(history.values, room, ascii_only=ascii_only), "name", 2, wrap=False))
        texts = history.texts or tuple(number(value, 5) for value in history.values)
        pairs = [f"{step}: {clean(text, 40)}" for step, text in zip(history.steps, texts, strict=True)]
        if len(pairs) > 2 * _ENDS:
            pairs = [*pairs[:_ENDS], f"... {len(pairs) - 2 * _ENDS} more ...", *pairs[-_ENDS:]]
        blocks.append(line("  ".join(pairs), "", 2))
    return blocks


def pair_blocks(
    pairs: Sequence[tuple[History | None, History | None]], stat: str, width: int, *, ascii_only: bool
) -> list[Block]:
    """Each site of two runs: a plot of the first few, and a table of all at the steps that tell most."""
    blocks: list[Block] = []
    for place, (a, b) in enumerate(pairs):
        one = a or b
        if one is None:
            continue
        if place:
            blocks.append(line())
        blocks.append(Line(((clean(one.site), "heading"), (f"  {stat}", ""))))
        if a is None or b is None:
            blocks.append(line(f"only in {'b' if a is None else 'a'}, {count(len(one.steps), 'step')}", "unsure", 2))
            continue
        if place < _PLOTS:
            blocks += _plot(a, b, min(width, 100), ascii_only=ascii_only)
        blocks += _table(a, b)
    if len(pairs) > _PLOTS:
        blocks.append(line(f"Plots of the first {_PLOTS} of {count(len(pairs), 'site')}; narrow the name for others."))
    return blocks


def _points(history: History) -> dict[int, float]:
    return {s: v for s, v in zip(history.steps, history.values, strict=True) if v is not None and math.isfinite(v)}


def _plot(a: History, b: History, width: int, *, ascii_only: bool) -> list[Block]:
    """Both runs as marks over the steps: `a`, `b`, and one mark where they fall together."""
    one, two = _points(a), _points(b)
    values = [*one.values(), *two.values()]
    if not values:
        return [line("no finite number to plot", "dim", 2)]
    low, high = min(values), max(values)
    log = low > 0 and high > 100 * low
    scale = math.log10 if log else lambda value: value / 2  # halves of the largest numbers are a finite way apart
    bottom, span = scale(low), (scale(high) - scale(low)) or 1.0
    names = [number(high, 4), number(low, 4)]
    left = max(map(len, names)) + 1
    steps = sorted({*one, *two})
    room = max(min(width - left - 4, max(len(steps), 60)), 1)
    first, reach = steps[0], max(steps[-1] - steps[0], 1)
    cells: dict[tuple[int, int], set[str]] = {}
    for name, points in (("a", one), ("b", two)):
        for step, value in points.items():
            column = round((step - first) / reach * (room - 1))
            cells.setdefault((round((scale(value) - bottom) / span * (_HIGH - 1)), column), set()).add(name)
    both = "*" if ascii_only else "•"
    lines: list[Block] = []
    for row in range(_HIGH - 1, -1, -1):
        label = names[0] if row == _HIGH - 1 else names[1] if row == 0 else ""
        spans = [(f"{label.rjust(left)} {'|' if ascii_only else '│'}", "dim")]
        for column in range(room):
            marks = cells.get((row, column), set())
            mark = both if len(marks) == 2 else next(iter(marks), " ")
            spans.append((mark, {"a": "name", "b": "warm"}.get(mark, "")))
        lines.append(Line(tuple(spans), 2, wrap=False))
    foot = f"step {first}".ljust(max(room - len(str(steps[-1])), 0)) + str(steps[-1])
    lines.append(line(" " * (left + 2) + foot + ("  (log scale)" if log else ""), "dim", 2, wrap=False))
    return lines


def _table(a: History, b: History) -> list[Block]:
    """The numbers: the ends, and the steps around the first that differs."""
    one, two = dict(zip(a.steps, a.values, strict=True)), dict(zip(b.steps, b.values, strict=True))
    steps = sorted({*one, *two})
    differing = [step for step in steps if not _same(one.get(step), two.get(step))]
    at = steps.index(differing[0]) if differing else 0
    spread = {round(place * (len(steps) - 1) / max(_ROWS - 1, 1)) for place in range(_ROWS)}
    near = set(range(max(0, at - 1), min(len(steps), at + _AROUND))) if differing else set()
    rows, styles = [], []
    for place in sorted((spread if len(steps) > _ENDS else set(range(len(steps)))) | near):
        step = steps[place]
        x, y = one.get(step), two.get(step)
        texts = (number(x, 5), number(y, 5))
        if x is not None and y is not None and not _same(x, y):
            texts = two_numbers(x, y, 5, 17)
        rel = ""
        if x is not None and y is not None and not _same(x, y) and math.isfinite(x) and math.isfinite(y):
            rel = number(abs(x - y) / max(abs(x), abs(y)), 2)
        first = bool(differing) and step == differing[0]
        rows.append((str(step), *texts, rel, "first that differs" if first else ""))
        styles.append("origin" if first else "")
    columns = (
        Column("step", right=True), Column("a", right=True), Column("b", right=True),
        Column("|a-b| relative", right=True), Column(""),
    )  # fmt: skip
    summary = (
        f"differs at {len(differing):,} of {count(len(steps), 'step')}"
        if differing
        else f"equal numbers at all {len(steps):,} steps"
    )
    listed = f"; {len(rows)} of them are listed" if len(rows) < len(steps) else ""
    return [Table(columns, tuple(rows), tuple(styles)), line(f"{summary}{listed}.", "dim")]


def _same(x: float | None, y: float | None) -> bool:
    return x == y or (x is not None and y is not None and math.isnan(x) and math.isnan(y))
