"""Gradients in which those of the step before are left over, since nothing set them to zero.

The gradient of a bias is the sum of the gradients at its module's outputs, over all calls of a step. Its mean times its
elements is on record, and so is that of the outputs, so both sums are. What an optimizer takes is a multiple of them
(clipped, or unscaled), the same of all biases of a step; where the step before is left over, it is a multiple of theirs
and of what the optimizer took then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.findings import Hit, Level, NotObservedError, rule
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from introspect_cli.health.table import Table

BIASES = 3
"""Biases that it takes: two factors are fitted to them."""

STEPS = 3
"""Steps in which it must be so."""

MOST = 64
"""Steps that are asked, the first ones: what is missing is missing from the start."""

OFTEN = 0.8
"""Share of the steps in which it must be so."""

REST = 0.02
"""Of the gradients, what the two factors may leave unexplained; without the step before it must be ten times that."""

EVEN = 0.05
"""How far the factor of what is left over may be from that of the step's gradients: clipping comes after adding up."""

_SUMMED = ("Linear", "Conv", "LayerNorm", "BatchNorm", "GroupNorm")
"""Modules whose bias is added to all of the output."""


def _total(table: Table, site: int) -> NDArray[np.float64]:
    """The sum of a site's elements in each step; NaN where it was not observed."""
    column = table.many.column(site)
    return column.floats["mean"].astype(np.float64) * table.numel[column.layout]


def _sums(table: Table) -> tuple[list[str], NDArray[np.float64], NDArray[np.float64]]:
    """Names of biases; sums of their gradients, and of their modules' output gradients over all calls.

    float64 (T, biases) each, NaN where not observed.
    """
    outputs: dict[str, list[int]] = {}
    for site in table.pick(Kind.GRAD_OUTPUT, phase=Phase.BACKWARD):
        if not table.path[site]:
            outputs.setdefault(table.fqn[site], []).append(site)
    names, taken, given = [], [], []
    for site in table.pick(Kind.GRAD):
        owner, _, name = table.fqn[site].rpartition(".")
        calls = outputs.get(owner, [])
        if name == "bias" and not table.call[site] and calls and table.module_class[calls[0]].startswith(_SUMMED):
            sums = np.array([_total(table, call) for call in calls])
            names.append(table.fqn[site])
            taken.append(_total(table, site))
            given.append(np.where(np.isnan(sums).all(axis=0), np.nan, np.nansum(sums, axis=0)))
    return names, np.array(taken).T, np.array(given).T


def _is_left_over(taken: NDArray[np.float64], given: NDArray[np.float64], before: NDArray[np.float64]) -> bool:
    """Whether `taken` is about `given` + `before` times one positive factor, and no multiple of `given` alone.

    Args:
        taken: sums of the gradients that the optimizer takes, float64 (biases,).
        given: sums of what the backward pass of the step gave.
        before: what the optimizer took in the step before.
    """
    size = float(np.linalg.norm(taken))
    both = np.stack([given, before], axis=1)
    if not size or np.linalg.matrix_rank(both, tol=1e-3 * float(np.linalg.norm(both))) < 2:
        return False
    weights = np.linalg.lstsq(both, taken, rcond=None)[0]
    alone = np.linalg.lstsq(given[:, None], taken, rcond=None)[0]
    rest = float(np.linalg.norm(both @ weights - taken)) / size
    plain = float(np.linalg.norm(given * alone[0] - taken)) / size
    even = min(weights) > 0 and abs(weights[1] / weights[0] - 1) < EVEN
    return bool(even and rest < REST and plain > 10 * max(rest, REST / 2))


@rule(Level.ERROR)
def gradients_left_over(table: Table) -> Iterator[Hit]:
    """Gradients to which those of the step before are added.

    When: in {STEPS} steps or more, and {OFTEN:.0%} of those that can be asked, the sums of the gradients of
        {BIASES} biases or more are those of the gradients at their modules' outputs plus those that the optimizer
        took in the step before
    Cause: zero_grad is missing, or is called for another optimizer or model
    """
    names, taken, given = _sums(table)
    steps = table.many.steps
    if len(names) < BIASES:
        raise NotObservedError(f"gradients of {BIASES} biases and those at their modules' outputs")
    hits, asked = [], 0
    for row in (np.flatnonzero(np.diff(steps) == 1) + 1)[:MOST]:
        there = np.isfinite(taken[row]) & np.isfinite(given[row]) & np.isfinite(taken[row - 1])
        if there.sum() >= BIASES and taken[row][there].any():
            asked += 1
            if _is_left_over(taken[row][there], given[row][there], taken[row - 1][there]):
                hits.append(int(steps[row]))
    if not asked:
        raise NotObservedError("gradients of two steps in a row")
    if len(hits) >= STEPS and len(hits) >= OFTEN * asked:
        evidence = (
            f"in {len(hits)} of {asked} steps, the sums of the gradients of {len(names)} biases are those at their "
            "modules' outputs plus the gradients of the step before"
        )
        yield Hit(hits[0], names[0].partition(".")[0], evidence)
