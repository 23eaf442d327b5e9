"""Sites of two runs over their steps: a plot and a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from introspect_cli.records import count
from introspect_cli.render.blocks import Block, Column, Line, Table, line
from introspect_cli.render.text import clean, number, two_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.inspect.history import History

_HIGH = 8
_PLOTS = 4
_ROWS = 12
_AROUND = 3


def pair_blocks(
    found: Sequence[tuple[History | None, History | None]], stat: str, width: int, *, ascii_only: bool
) -> list[Block]:
    """Each site of two runs: a plot of the first few, and a table of all at the steps that tell most."""
    blocks: list[Block] = []
    for place, (a, b) in enumerate(found):
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
    if len(found) > _PLOTS:
        blocks.append(line(f"Plots of the first {_PLOTS} of {count(len(found), 'site')}; narrow the name for others."))
    return blocks


def _points(own: History) -> dict[int, float]:
    return {s: v for s, v in zip(own.steps, own.values, strict=True) if v is not None and math.isfinite(v)}


def _half(value: float) -> float:
    """Of numbers as large as there are, the halves are a finite way apart."""
    return value / 2


def _plot(a: History, b: History, width: int, *, ascii_only: bool) -> list[Block]:
    """Both runs as marks over the steps: `a`, `b`, and one mark where they fall together."""
    one, two = _points(a), _points(b)
    values = [*one.values(), *two.values()]
    if not values:
        return [line("no finite number to plot", "dim", 2)]
    low, high = min(values), max(values)
    log = low > 0 and high > 100 * low
    scale = math.log10 if log else _half
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
            own = cells.get((row, column), set())
            mark = both if len(own) == 2 else next(iter(own), " ")
            spans.append((mark, {"a": "name", "b": "warm"}.get(mark, "")))
        lines.append(Line(tuple(spans), 2, wrap=False))
    foot = f"step {first}".ljust(max(room - len(str(steps[-1])), 0)) + str(steps[-1])
    lines.append(line(" " * (left + 2) + foot + ("  (log scale)" if log else ""), "dim", 2, wrap=False))
    return lines


def _table(a: History, b: History) -> list[Block]:
    """The numbers: the ends, and the steps around the first that differs."""
    one, two = dict(zip(a.steps, a.values, strict=True)), dict(zip(b.steps, b.values, strict=True))
    steps = sorted({*one, *two})
    apart = [step for step in steps if not _same(one.get(step), two.get(step))]
    at = steps.index(apart[0]) if apart else 0
    spread = {round(place * (len(steps) - 1) / max(_ROWS - 1, 1)) for place in range(_ROWS)}
    near = set(range(max(0, at - 1), min(len(steps), at + _AROUND))) if apart else set()
    rows, styles = [], []
    for place in sorted((spread if len(steps) > _ROWS else set(range(len(steps)))) | near):
        step = steps[place]
        x, y = one.get(step), two.get(step)
        texts = (number(x, 5), number(y, 5))
        if x is not None and y is not None and not _same(x, y):
            texts = two_numbers(x, y, 5, 17)
        rel = ""
        if x is not None and y is not None and not _same(x, y) and math.isfinite(x) and math.isfinite(y):
            rel = number(abs(x - y) / max(abs(x), abs(y)), 2)
        first = bool(apart) and step == apart[0]
        rows.append((str(step), *texts, rel, "first that differs" if first else ""))
        styles.append("origin" if first else "")
    columns = (
        Column("step", right=True), Column("a", right=True), Column("b", right=True),
        Column("|a-b| relative", right=True), Column(""),
    )  # fmt: skip
    told = (
        f"differs at {len(apart):,} of {count(len(steps), 'step')}"
        if apart
        else f"equal numbers at all {len(steps):,} steps"
    )
    return [Table(columns, tuple(rows), tuple(styles)), line(f"{told}.", "dim")]


def _same(x: float | None, y: float | None) -> bool:
    return x == y or (x is not None and y is not None and math.isnan(x) and math.isnan(y))
