"""Sites and modules over all steps, and tables of where two runs differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from introspect_cli.render.blocks import (
    Block,
    Column,
    Line,
    distance,
    line,
    number,
    rest_of,
    table_of,
    two_numbers,
)
from introspect_cli.texts import clean, count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from introspect_cli.compare.result import DiffResult
    from introspect_cli.inspect.overview import History

_MOST_ROWS = 40


def map_blocks(result: DiffResult, most: int = _MOST_ROWS) -> list[Block]:
    """The divergence map as a table: the first `most` modules that differ, by step; [] where the result has no map.

    Of each module the first step in which its forward or backward pass differs, and the largest distance in the forward
    pass of any step. Then how many more differ, and how many are equal.
    """
    found = result.map
    if found is None:
        return []
    modules: list[tuple[int, str, float]] = []
    for name, values, behind in zip(found.modules, found.values, found.behind, strict=True):
        differs = [place for place, value in enumerate(values) if value > 0 or behind[place]]
        if differs:
            modules.append((found.steps[differs[0]], clean(name), max(values[place] for place in differs)))
    modules.sort(key=lambda row: row[0])
    columns: list[tuple[Column, Callable[[tuple[int, str, float]], str]]] = [
        (Column("module", least=18), lambda row: row[1]),
        (Column("from step", right=True), lambda row: str(row[0])),
        (Column("up to rel. L2", right=True), lambda row: _farthest(row[2])),
    ]
    span = f" (steps {found.steps[0]} to {found.steps[-1]})" if found.steps else ""
    table = table_of(modules[:most], columns, caption=f"Divergence map{span}")
    equal = rest_of(len(found.modules), len(modules), what="more that are equal in all of them")
    return [line(), table, *rest_of(len(modules), most), *equal]


def _farthest(value: float) -> str:
    """The largest distance of a module, for a cell: `one run only` for infinity, `backward pass` for 0."""
    return "one run only" if math.isinf(value) else distance(value) if value > 0 else "backward pass"


_ENDS = 20


def history_blocks(histories: Sequence[History], stat: str) -> list[Block]:
    """For each site a heading and one paragraph of its values, or texts: all, or the first and the last `_ENDS`."""
    blocks: list[Block] = []
    for history in histories:
        numbers = [value for value in history.values if value is not None]
        span = f"{number(min(numbers))} to {number(max(numbers))}" if numbers else "no number"
        title = f"{'' if history.texts else f' {stat}: {span}'} over {count(len(history.steps), 'step')}"
        blocks.append(Line(((clean(history.site), "heading"), (title, ""))))
        texts = history.texts or tuple(number(value, 5) for value in history.values)
        pairs = [f"{step}: {clean(text, 40)}" for step, text in zip(history.steps, texts, strict=True)]
        if len(pairs) > 2 * _ENDS:
            pairs = [*pairs[:_ENDS], f"... {len(pairs) - 2 * _ENDS} more ...", *pairs[-_ENDS:]]
        blocks.append(line("  ".join(pairs), "", 2))
    return blocks


def pair_blocks(pairs: Sequence[tuple[History | None, History | None]], stat: str) -> list[Block]:
    """For each site of two runs a table of values that differ, or a line: equal at all steps, or in one run alone."""
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
    """Both runs' values at the first `_ENDS` steps at which they differ, and a line on how many there are.

    `-` for a step that one run lacks, which differs; only a line where all values are equal.
    """
    one, two = dict(zip(a.steps, a.values, strict=True)), dict(zip(b.steps, b.values, strict=True))
    steps = sorted({*one, *two})
    differing = [step for step in steps if not _is_same(one.get(step), two.get(step))]
    if not differing:
        return [line(f"equal numbers at all {len(steps):,} steps.", "dim")]

    def sides(step: int) -> tuple[str, str]:
        """Both values at a step, in as many digits as tell them apart."""
        x, y = one.get(step), two.get(step)
        return (number(x, 5), number(y, 5)) if x is None or y is None else two_numbers(x, y, 5, 17)

    columns: list[tuple[Column, Callable[[int], str]]] = [
        (Column("step", right=True), str),
        (Column("a", right=True), lambda step: sides(step)[0]),
        (Column("b", right=True), lambda step: sides(step)[1]),
    ]
    summary = f"differs at {len(differing):,} of {count(len(steps), 'step')}"
    return [table_of(differing[:_ENDS], columns), line(f"{summary}.", "dim"), *rest_of(len(differing), _ENDS)]


def _is_same(x: float | None, y: float | None) -> bool:
    """Whether two values are equal, or both NaN, or both None."""
    return x == y or (x is not None and y is not None and math.isnan(x) and math.isnan(y))
