"""The pass of a loss that is scaled on its way: its backward pass in another unit, where the optimizer sees the same.

`GradScaler` multiplies the loss by a scale and divides the gradients by it before the optimizer takes them. By a power
of two, that rounds nothing. So where the loss of a step, and each gradient inside its backward pass, is one multiple in
b of what it is in a, and all that the optimizer takes and leaves agrees, that is representation. Of a multiple that is
no power of two, the gradients are rounded otherwise; there it is one as far as a tolerance lets that pass, and the
gradients inside the backward pass are on record.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.terms.sites import Ids, kind_code, of_kinds, phase_code
from introspect_cli.compare.terms.table import EQUAL, FORM, WITHIN, Because, Table
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.step.comparison import Comparison


def scale(table: Table, comparison: Comparison) -> Table:
    """The table in which a backward pass that is scaled, and unscaled again, is another form of the same."""
    rows = np.flatnonzero(of_kinds(table.kinds, (Kind.LOSS, Kind.GRAD_OUTPUT, Kind.GRAD_INPUT)))
    losses = rows[table.kinds[rows] == kind_code(Kind.LOSS)]
    if comparison.options.strict or not len(losses) or "mean" not in table.a.floats or "mean" not in table.b.floats:
        return table
    one, two = (np.asarray(batch.floats["mean"], np.float64)[of_run[losses]] for batch, of_run in table.pairs)
    with np.errstate(all="ignore"):
        times = float(two[0] / one[0])
    if not (math.isfinite(times) and times > 0) or not _agrees_after(table):
        return table
    rounds = math.frexp(times)[0] != _POWER
    if times == 1 or (rounds and not (comparison.options.rtol and len(rows) > len(losses))):
        return table  # one loss is some multiple of any other
    if _is_multiple(table, rows, times, comparison.options.rtol * rounds):
        comparison.scales.setdefault(table.step, times)
        return table.marked(table.differing[rows], FORM, Because.SCALED)
    return table


_POWER = 0.5
"""What `frexp` leaves of a power of two."""


def _agrees_after(table: Table) -> bool:
    """Whether the optimizer takes the same gradients in both runs, and leaves the same."""
    kinds, phases = table.alignment.kind[table.site], table.alignment.phase[table.site]
    after = (phases == phase_code(Phase.OPTIMIZER)) & of_kinds(kinds, (Kind.GRAD, Kind.PARAM, Kind.OPTIMIZER_STATE))
    taken = after & (kinds == kind_code(Kind.GRAD)) & np.isin(table.state, (EQUAL, WITHIN))
    return bool(taken.any() and not (table.diverging & after).any())


def _is_multiple(table: Table, rows: Ids, times: float, close: float) -> bool:
    """Whether each row of b is a multiple of that of a, and nothing else of the backward pass differs."""
    alignment = table.alignment
    inside = alignment.phase[table.site] == phase_code(Phase.BACKWARD)
    scaled = (alignment.phase[table.unions[rows]] == phase_code(Phase.BACKWARD)).sum()
    if (table.diverging & inside).sum() != scaled or (inside.any() and not scaled):
        return False
    for name in ("mean", "min", "max"):
        if name not in table.a.floats or name not in table.b.floats:
            return False
        one, two = (np.asarray(batch.floats[name], np.float64)[of_run[rows]] for batch, of_run in table.pairs)
        if not np.allclose(two, one * times, rtol=close, atol=0, equal_nan=True):
            return False
    sketches = [None if batch.sketch is None else np.asarray(batch.sketch, np.float64) for batch, _ in table.pairs]
    if sketches[0] is None or sketches[1] is None:
        return True
    one, two = sketches[0][table.rows_a[rows]], sketches[1][table.rows_b[rows]]
    return bool((np.linalg.norm(two - one * times, axis=1) <= close * np.linalg.norm(two, axis=1)).all())


def scaled_notes(comparison: Comparison) -> list[str]:
    """What to say of it."""
    if not comparison.scales:
        return []
    step, times = next(iter(comparison.scales.items()))
    large, small = ("b", "a") if times > 1 else ("a", "b")
    later = " (later ones by another factor)" if len({*comparison.scales.values()}) > 1 else ""
    seen = comparison.kinds & {Kind.GRAD_OUTPUT, Kind.GRAD_INPUT}
    inside = (
        "so are the gradients inside its backward pass" if seen else "no gradient inside its backward pass was recorded"
    )
    note = (
        f"Another scale, no divergence: the loss of run {large} is {max(times, 1 / times):g} x that of run {small} in "
        f"step {step}{later}, and {inside}. Those that the optimizer takes agree, and so do the parameters after it."
    )
    return [note]
