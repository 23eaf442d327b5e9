"""Activations that carry nothing: dead, saturated, constant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.findings import Hit, Level, observed, rule
from introspect_cli.health.table import Table, lasting
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


DEAD = 0.9
"""Share of zeros from which a rectified layer counts as dead; about half are zero in a healthy one."""

LASTING = 5
"""Steps, up to the last, that a state must last before it counts."""

SATURATED = 0.05
"""Mean derivative of a squashing function, relative to its largest, below which it counts as saturated."""

FLAT = 22
"""Binary digits by which a spread must be below the mean to be rounding: float32 keeps 24."""

_NO_ZEROS = ("Dropout", "Embedding", "Pad", "Mask")


@rule(
    "dead-units",
    Level.WARNING,
    "activations nearly all of which stay zero",
    f"at the last {LASTING} steps or more, {DEAD:.0%} of an output, or of an input that a gradient flows to, are "
    "exactly zero; dropout, lookups, padding and masks do not count, nor an output whose input has as many zeros",
    "a rectifier pushed below zero by a large step, a bad initialisation or a large negative bias",
)
def dead_units(table: Table) -> Iterator[Hit]:
    sites = observed(
        [site for site in _activations(table) if not any(word in table.module_class[site] for word in _NO_ZEROS)],
        "outputs of modules with statistics",
    )
    for site in sites:
        steps, zeros = table.stat(site, "zeros")
        start = lasting(zeros >= DEAD, LASTING)
        if start is not None and not (table.kind[site] == Kind.OUTPUT.value and _was_given(table, site)):
            text = f"{zeros[-1]:.0%} of its values are zero, {DEAD:.0%} or more since step {steps[start]}"
            yield table.hit(site, steps[start], text)


def _activations(table: Table) -> list[int]:
    """Float outputs, and inputs that a gradient was recorded for (so not the data themselves)."""
    return [
        site
        for site in table.tensors(Kind.OUTPUT, Kind.INPUT, phase=Phase.FORWARD)
        if table.kind[site] == Kind.OUTPUT.value
        or table.site(Phase.BACKWARD, Kind.GRAD_INPUT, table.fqn[site], table.call[site], table.path[site]) is not None
    ]


def _of_input(table: Table, site: int, stat: str) -> NDArray[np.float64]:
    """A statistic of the first input of the call that an output came from, by step; empty where there is none."""
    given = table.site(Phase.FORWARD, Kind.INPUT, table.fqn[site], table.call[site], "[0]")
    return np.zeros(0) if given is None else table.stat(given, stat)[1]


def _was_given(table: Table, site: int) -> bool:
    """Whether an output is no more zero than the module's own input was."""
    before = _of_input(table, site, "zeros")
    _, after = table.stat(site, "zeros")
    return len(before) > 0 and bool(np.median(before) >= min(DEAD, float(np.median(after))))


@rule(
    "saturated",
    Level.WARNING,
    "sigmoid or tanh outputs at their ends, where the gradient is gone",
    f"at the last {LASTING} steps or more, the mean derivative of a Tanh or Sigmoid (from mean and variance of "
    f"its output) is below {SATURATED:.0%} of its largest",
    "weights or inputs that are too large; normalise them or lower the initial scale",
)
def saturated(table: Table) -> Iterator[Hit]:
    squashing = table.tensors(Kind.OUTPUT, floats=False)
    sites = observed(
        [site for site in squashing if table.module_class[site] in ("Tanh", "Sigmoid")], "a Tanh or Sigmoid module"
    )
    for site in sites:
        steps, (mean, var) = table.stats(site, "mean", "var")
        square = var + mean * mean
        # E[1 - t^2] for tanh, E[s (1 - s)] of at most 1/4 for the sigmoid: the derivative, averaged.
        slope = 1 - square if table.module_class[site] == "Tanh" else 4 * (mean - square)
        start = lasting(slope < SATURATED, LASTING)
        if start is not None:
            slope_now = f"{max(slope[-1], 0):.1%} of the largest, under {SATURATED:.0%} since step {steps[start]}"
            text = f"its mean derivative is {slope_now}"
            yield table.hit(site, steps[start], text)


@rule(
    "constant-output",
    Level.WARNING,
    "outputs that are constant, or do not depend on what goes in",
    f"at the last {LASTING} steps or more, an output's standard deviation is below 2^-{FLAT} of its mean while "
    "its input varies; or its bits stay while its input's change",
    "a detached or overwritten input, a collapsed layer, or a normalisation over a single value",
)
def constant_output(table: Table) -> Iterator[Hit]:
    sites = observed(table.tensors(Kind.OUTPUT, phase=Phase.FORWARD), "outputs of modules with statistics")
    for site in sites:
        column = table.column(site)
        rows = np.flatnonzero((column.layout >= 0) & ~(column.floats["bad"] > 0))
        mean, var = (column.floats[name][rows].astype(np.float64) for name in ("mean", "var"))
        with np.errstate(invalid="ignore"):
            flat = (mean != 0) & (np.sqrt(var) <= np.abs(mean) * 2.0**-FLAT)  # all zero is the dead rule's
        start = lasting(flat, LASTING)
        if start is not None and not _inputs_flat(table, site):
            step = int(column.steps[rows[start]])
            yield table.hit(site, step, f"all its values are {mean[-1]:.4g} since step {step}")
            continue
        if (since := _unmoved(table, site)) is not None:
            text = f"the same bits at every step since step {since}, though its inputs differ"
            yield table.hit(site, since, text)


def _inputs_flat(table: Table, site: int) -> bool:
    var = _of_input(table, site, "var")
    return len(var) > 0 and bool(np.median(var) == 0)


def _unmoved(table: Table, site: int) -> int | None:
    """The step since which an output has not changed while an input of the same call has, if so to the end."""
    given = table.site(Phase.FORWARD, Kind.INPUT, table.fqn[site], table.call[site], "[0]")
    if given is None:
        return None
    column, inputs = table.column(site), table.column(given)
    rows = np.flatnonzero((column.layout >= 0) & (inputs.layout >= 0))
    out, into = column.checksum[rows], inputs.checksum[rows]
    if len(rows) <= LASTING or column.floats["zeros"][rows[-1]] == 1 or (column.floats["bad"][rows] > 0).any():
        return None
    start = lasting((out[1:] == out[:-1]) & (into[1:] != into[:-1]), LASTING)
    return None if start is None else int(column.steps[rows[start]])


RULES = (dead_units, saturated, constant_output)
