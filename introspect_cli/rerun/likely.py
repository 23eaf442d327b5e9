"""Which changes are tried first: those that the comparison calls the likeliest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.changes.statements import Change
from introspect_cli.rerun.element import Difference, OtherPython

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.result import DiffResult
    from introspect_cli.rerun.element import Element

_LAST = 1 << 30


def likely_first(elements: Sequence[Element], recorded: DiffResult) -> tuple[tuple[Element, ...], int]:
    """The elements in the order in which the comparison weighs settings and statements; how many it calls likely.

    Args:
        elements: what differs.
        recorded: how the runs diverge.
    """
    settings = {change.name: place for place, change in reversed([*enumerate(recorded.settings)])}
    code = recorded.code.ranked if recorded.code is not None else ()
    statements = {_lines(one.change): (place, one.likely) for place, one in enumerate(code)}

    def order(element: Element) -> tuple[int, int]:
        if isinstance(element, Change) and element.unit != "value":
            place, likely = statements.get(_lines(element), (_LAST, False))
            return (settings.get(element.file, _LAST) if likely else _LAST, place)
        return (settings.get(_name(element), _LAST + isinstance(element, Difference)), 0)

    ordered = tuple(sorted(elements, key=order))
    explaining = {change.name for change in recorded.settings if change.explains}
    likely = [order(element)[0] < _LAST and _name(element) in explaining for element in ordered]
    return ordered, [*likely, False].index(False)


def _name(element: Element) -> str:
    """What the comparison calls it among the settings."""
    if isinstance(element, Change):
        return element.place if element.unit == "value" else element.file
    return "" if isinstance(element, OtherPython) else element.name


def _lines(change: Change) -> tuple[object, ...]:
    """What tells changes from one another, whatever the names of variables in them."""
    a, b = (None if side is None else (side.first, side.last) for side in (change.a, change.b))
    return change.file, change.unit, a, b
