"""The loss: not a number, stuck, spiking."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.findings import Hit, Level, observed, rule
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.health.table import Table

STUCK_STEPS = 20
"""Steps below which a loss may rest."""

STUCK = 0.002
"""Span of the loss over the whole run, relative to its median, below which it is stuck."""

SPIKE_DEVIATIONS = 20.0
"""Robust standard deviations that make a spike."""

SPIKE_FACTOR = 3.0
"""Times the usual loss that a spike reaches at least."""

SPIKE_HISTORY = 10
"""Steps before a spike that say what is usual."""

RECENT = 50
"""Steps before it that count at most."""

ROBUST = 1.4826
"""Times the median absolute deviation that make a standard deviation, where values are normally distributed."""


def _losses(table: Table) -> list[int]:
    return observed(table.pick(Kind.LOSS), "a loss (a backward pass that was recorded)")


@rule(
    "loss-nonfinite",
    Level.ERROR,
    "a loss that is NaN or Inf",
    "a loss is NaN or infinite at any step",
    "what made the first NaN or Inf (see `nonfinite`), or a loss function outside its domain",
)
def loss_nonfinite(table: Table) -> Iterator[Hit]:
    for site in _losses(table):
        steps, bad = table.stat(site, "bad")
        rows = np.flatnonzero(bad > 0)
        if len(rows):
            text = f"not a finite number at {len(rows)} of {len(steps)} steps, the first being step {steps[rows[0]]}"
            yield table.hit(site, steps[rows[0]], text)


@rule(
    "loss-stuck",
    Level.WARNING,
    "a loss that does not move",
    f"over {STUCK_STEPS} steps or more, the loss spans less than {STUCK:.1%} of its median",
    "a learning rate far too low, parameters outside the optimizer, a detached graph, shuffled labels",
)
def loss_stuck(table: Table) -> Iterator[Hit]:
    long_enough = False
    for site in _losses(table):
        steps, value = table.stat(site, "mean")
        if len(value) < STUCK_STEPS:
            continue
        long_enough = True
        usual = abs(float(np.median(value)))
        span = float(np.ptp(value))
        if usual > 0 and span < STUCK * usual:
            text = f"stays between {value.min():.6g} and {value.max():.6g} over {len(value)} steps"
            yield table.hit(site, steps[0], text)
    observed(long_enough, f"{STUCK_STEPS} or more steps with a finite loss")


@rule(
    "loss-spike",
    Level.WARNING,
    "a loss that spikes",
    f"a loss exceeds the median of those before it ({SPIKE_HISTORY} at least, {RECENT} at most) by "
    f"{SPIKE_FACTOR - 1:g} times that median and by {SPIKE_DEVIATIONS:g} robust standard deviations ({ROBUST} "
    "times the median absolute deviation)",
    "a bad batch, a learning rate that is too high, or an overflow",
)
def loss_spike(table: Table) -> Iterator[Hit]:
    long_enough = False
    for site in _losses(table):
        steps, value = table.stat(site, "mean")
        for position in range(SPIKE_HISTORY, len(value)):
            long_enough = True
            before = value[max(0, position - RECENT) : position]
            usual = float(np.median(before))
            spread = ROBUST * float(np.median(np.abs(before - usual)))
            now = float(value[position])
            if now - usual > max(SPIKE_DEVIATIONS * spread, (SPIKE_FACTOR - 1) * abs(usual), 1e-6):
                text = f"{now:.4g} at step {steps[position]}, where {usual:.4g} was usual"
                yield table.hit(site, steps[position], text)
                break
    observed(long_enough, f"more than {SPIKE_HISTORY} steps with a finite loss")


RULES = (loss_nonfinite, loss_stuck, loss_spike)
