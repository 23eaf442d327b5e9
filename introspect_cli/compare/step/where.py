"""Between which lines the runs parted: the one that the last equal record comes from, and that of the first other one.

Each record's site has the line of the user's code that ran it. What a step ran between two records ran between their
lines, as far as both are in one function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.terms.table import EQUAL

if TYPE_CHECKING:
    from introspect_cli.compare.step.step import Step
    from introspect_cli.store.read.step_reader import StepReader

_LOOKED_AT = 200


def lines_around(step: Step, position: int) -> tuple[tuple[str, str], tuple[str, str]]:
    """Of each run, `file:line` of the last record before a divergence that agrees, and of that; "" where unknown."""
    table, divergences = step.table, step.divergences
    equal = table.state == EQUAL
    found = []
    for reader, batch, rows, row in (
        (step.comparison.a, table.a, table.row_a, int(divergences.row_a[position])),
        (step.comparison.b, table.b, table.row_b, int(divergences.row_b[position])),
    ):
        if row < 0:
            found.append(("", ""))
            continue
        before = rows[equal & (rows >= 0)]
        before = before[batch.sequence[before] < batch.sequence[row]]
        nearest = before[np.argsort(batch.sequence[before])][::-1][:_LOOKED_AT].tolist()
        lines = (_line(reader, int(batch.site[one])) for one in nearest)
        found.append((next(filter(None, lines), ""), _line(reader, int(batch.site[row]))))
    return found[0], found[1]


def _line(reader: StepReader, site: int) -> str:
    return reader.sites[site][1].source
