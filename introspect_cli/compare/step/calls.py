"""When modules run in a step: which call of which is under way at a place of its sequence."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.terms.names import FORWARD
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.compare.step.comparison import Comparison
    from introspect_cli.compare.terms.table import Table


class Calls:
    """The calls of a step, in order; of several ranks as one, each is known by the name of its module alone."""

    def __init__(self, table: Table, comparison: Comparison) -> None:
        self._table, self._of = table, comparison.of
        self._is_gathered = comparison.gathered is not None
        self._by_name: dict[str, tuple[list[float], list[int], dict[int, float]]] = {}

    def running(self, fqn: str, order: float) -> tuple[float, int] | None:
        """When the call of a module that is running at a place of the sequence began, and which call it is.

        The last whose inputs stand before; None where there is none.
        """
        if fqn not in self._by_name:
            inputs = self._of(Kind.INPUT, FORWARD, fqn)
            inputs = inputs[np.argsort(self._table.order_of[inputs], kind="stable")]
            orders, calls = self._table.order_of[inputs].tolist(), self._table.alignment.call[inputs].tolist()
            self._by_name[fqn] = orders, calls, dict(zip(reversed(calls), reversed(orders), strict=True))
        orders, calls, starts = self._by_name[fqn]
        place = bisect_right(orders, order) - 1
        return None if place < 0 else (starts[calls[place]], calls[place])

    def around(self, fqn: str, order: float) -> tuple[str, float, int] | None:
        """The innermost call of another module that runs at a place: name, when it began, call index; None for none."""
        if self._is_gathered:
            return None
        calls, begun, ended = self._spans
        running = np.flatnonzero((begun < order) & (ended > order))
        others = [at for at in running.tolist() if calls[at][0] != fqn]
        at = max(others, key=begun.__getitem__, default=None)
        return None if at is None else (calls[at][0], float(begun[at]), calls[at][1])

    def spans_of(self, fqn: str) -> list[tuple[float, float]]:
        """When the calls of a module began and ended; the whole step where that is not known."""
        if self._is_gathered:
            return [(-np.inf, np.inf)]
        calls, begun, ended = self._spans
        return [(begun[at], ended[at]) for at, (name, _) in enumerate(calls) if name == fqn]

    @cached_property
    def _spans(self) -> tuple[list[tuple[str, int]], Any, Any]:
        """The calls of modules, when each began, and when the last of what it gave was recorded."""
        begun: dict[tuple[str, int, int], float] = {}
        ended: dict[tuple[str, int, int], float] = {}
        orders, alignment = self._table.order_of, self._table.alignment
        for of, kind, outer in ((begun, Kind.INPUT, min), (ended, Kind.OUTPUT, max)):
            for union in self._of(kind, FORWARD).tolist():
                if np.isfinite(order := float(orders[union])):
                    call = alignment.fqn[union], int(alignment.call[union]), int(alignment.phase[union])
                    of[call] = outer(order, of.get(call, order))
        calls = [call for call in begun if call in ended]
        spans = np.array([(begun[call], ended[call]) for call in calls]).reshape(-1, 2)
        return [call[:2] for call in calls], spans[:, 0], spans[:, 1]
