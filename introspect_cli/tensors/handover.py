"""A step's rows given away before devices have computed them all, so that the script goes on meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.tensors import rows as r
    from introspect_cli.tensors.gpu.buffers import Pending
    from introspect_cli.tensors.table import SummaryTable


class Handover:
    """The rows of a step, of which devices may still compute some; or their table, where none do."""

    def __init__(self, rows: r.Rows, pending: list[Pending], finish: Callable[[], SummaryTable]) -> None:
        self._rows = rows
        self._pending = pending
        self._finish = finish
        self._table: SummaryTable | None = None

    @property
    def waits(self) -> bool:
        """Whether the table has to be waited for, so that it should be asked for later."""
        return bool(self._pending)

    def ready(self) -> bool:
        """Whether it may be waited for now: not while a CUDA graph is being captured."""
        for pending in self._pending:
            pending.send()
        return all(pending.ready() for pending in self._pending)

    def table(self) -> SummaryTable:
        """The table, waited for."""
        if self._table is None:
            if self._pending:
                with unobserved():
                    for pending in self._pending:
                        self._rows[pending.slots] = pending.rows()
            self._table = self._finish()
        return self._table
