"""Which changes are tried first: those that stand where the runs diverge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.changes.statements import Change
from introspect_cli.rerun.element import Difference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.result import DiffResult
    from introspect_cli.rerun.element import Element


def likely_first(elements: Sequence[Element], recorded: DiffResult) -> tuple[Element, ...]:
    """The elements, the likeliest to make the runs diverge first.

    Args:
        elements: what differs.
        recorded: how the runs diverge.
    """
    explaining = {change.name.rpartition(" ")[2] for change in recorded.settings if change.explains}
    blamed = recorded.first.module_class if recorded.first is not None else ""

    def rank(element: Element) -> int:
        if isinstance(element, Change):
            return 0 if blamed and blamed in element.scope.split(".") else 2
        if isinstance(element, Difference):
            return 1 if element.name in explaining else 3 if element.axis == "argument" else 4
        return 3

    return tuple(sorted(elements, key=rank))
