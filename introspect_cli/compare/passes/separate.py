"""The sixth pass: of what diverges, values decide the verdict, and causes only explain it.

A random state that differs moves no number until somebody draws from it, and a module that only one run has may change
nothing. So records are told apart: values that both runs have are effects, and decide whether the runs diverge. Random
states, and what one run only has because the other has nothing of that name, are causes: they are blamed where an
effect differs and does not explain itself, and told as structure where none does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from introspect_cli.compare.comparison import Comparison
    from introspect_cli.compare.table import Table


def separate(table: Table, comparison: Comparison) -> Table:
    """The table with a mark on random states, and on what one run alone has since the other has no such thing."""
    if comparison.causes is None:
        return table
    random, alone = (mask[table.site] for mask in comparison.causes)
    return replace(table, cause=table.diverging & (random | (table.one_sided & alone)))
