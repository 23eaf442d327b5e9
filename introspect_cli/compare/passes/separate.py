"""The sixth pass: of what diverges, values decide the verdict, and causes only explain it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from introspect_cli.compare.comparison import Comparison
    from introspect_cli.compare.table import Table


def separate(table: Table, comparison: Comparison) -> Table:
    """The table with a mark on random states, and on what one run alone has since the other has no such thing."""
    return table if comparison.causes is None else replace(table, cause=comparison.causes.among(table))
