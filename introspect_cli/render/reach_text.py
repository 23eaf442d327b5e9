"""How far rounding carries run a, and b beside it, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.render.blocks import Block, Column, line, table_of
from introspect_cli.render.text import clean, distance, site_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.result import Reach, StepReach

_ROWS = 8


def reach_blocks(reach: Reach | None) -> list[Block]:
    """A row for the first and the last step, for that in which b goes furthest, and for some between."""
    if reach is None or all(step.site is None for step in reach.steps):
        return []
    columns: list[tuple[Column, Callable[[StepReach], str]]] = [
        (Column("step", right=True), lambda step: str(step.step)),
        (Column("parameters: one rounding", right=True), lambda step: distance(step.rounding)),
        (Column("b", right=True), lambda step: distance(step.b)),
        (Column("most, x rounding", right=True), lambda step: f"{step.times:.2g}"),
        (Column("at", least=18), _place),
    ]
    seeds = ", ".join(map(str, reach.seeds))
    title = f"How far one rounding of the parameters (--perturb {seeds}) carries a, and b beside it:"
    furthest = reach.furthest
    return [
        line(),
        line(title, "heading"),
        table_of(_shown(reach), columns, lambda step: "origin" if step is furthest else ""),
    ]


def _shown(reach: Reach) -> list[StepReach]:
    """The steps of the rows: between first and last as far apart as rounding takes to grow, by a factor each."""
    steps = reach.steps
    last = len(steps) - 1
    places = {0, last, steps.index(reach.furthest)}
    places |= {round((last + 1) ** (place / (_ROWS - 1))) - 1 for place in range(_ROWS)}
    return [steps[place] for place in sorted(places)]


def _place(step: StepReach) -> str:
    return "" if step.site is None else clean(f"{site_text(step.site)} of {step.site.fqn}")
