"""Numbers out of range: the first NaN or infinity and who made it, losses that are stuck or spike, raw inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.findings import Hit, Level, require, rule
from introspect_cli.health.table import first_rise
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from introspect_cli.health.table import NonFinite, Table

LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}
"""Largest finite value of each dtype (IEEE 754-2019; bfloat16: 8 bits of significand)."""

HEADROOM = 4.0
"""A value within this factor of the largest overflows after two more doublings."""

MASKED = 1e38
"""From here on a bfloat16 or float32 is a mask filled with the lowest value, not something that grew."""

LOST = 0.9
"""Share of zeros above which a gradient has underflowed, where the one it was computed from has few."""

KEPT = 0.5
"""Share of zeros that the gradient it was computed from stays below."""

UNDERFLOWS = 3
"""Steps at which it must be seen."""

_MASKS = frozenset({Kind.INPUT.value, Kind.OUTPUT.value, Kind.BUFFER.value, Kind.BATCH.value})
_BACKWARD = frozenset({Kind.GRAD.value, Kind.GRAD_INPUT.value, Kind.GRAD_OUTPUT.value})


_MADE = {
    **dict.fromkeys(_BACKWARD, "the forward pass of that step is finite, so backward made them"),
    Kind.OP_OUTPUT.value: "no operator and no module before it has any",
    Kind.BATCH.value: "they came with the data",
    Kind.INPUT.value: "no module before it has any, so they came with the data or from code between modules",
    Kind.LOSS.value: "every module's output is finite, so the loss function made them",
}


def _is_mask(table: Table, event: NonFinite) -> bool:
    """Whether non-finite values are intended: -Inf alone in `_MASKS` or a forward operator, or bounds in a buffer."""
    (nans, posinfs, _), kind = event.counts, table.sites.kind[event.site]
    if nans or posinfs:
        return not nans and kind == Kind.BUFFER.value and table.fqn[event.site] in _bound_buffers(table)
    forward = table.sites.phase[event.site] == Phase.FORWARD.value
    return kind in _MASKS or (forward and kind == Kind.OP_OUTPUT.value)


def _bound_buffers(table: Table) -> set[str]:
    """FQNs of start values, of buffers or others, with infinities and no NaN in the first step."""
    began = (event.site for event in table.nonfinite if event.step == table.many.steps[0] and not event.counts[0])
    return {table.fqn[site] for site in began if table.sites.phase[site] == Phase.START.value}


@rule(Level.ERROR)
def nonfinite(table: Table) -> Iterator[Hit]:
    """The first NaN or Inf, and the site that made it.

    When: a recorded value is NaN or infinite; says whether what went into the module was finite. -Inf alone in an
        input, output, buffer, batch or result of a forward operator counts as a mask, an infinity that a buffer
        holds when the first step begins as a bound, and gradients of a step that changed no parameter as
        skipped-steps
    Cause: a division by zero, the log or root of something not positive, an overflow, or bad data
    """
    require(len(table.many.steps), "a step with records")
    counted = not all(np.isnan(columns.floats["bad"]).all() for columns in (table.many, table.few))
    require(counted, "statistics (`--stats`)")
    skipped = table.moves.skipped
    events = [
        event
        for event in table.nonfinite
        if not _is_mask(table, event) and not (event.step in skipped and table.sites.kind[event.site] in _BACKWARD)
    ]
    if events:
        yield Hit(events[0].step, table.name(events[0].site), _maker_sentence(table, events[0], events))


def _maker_sentence(table: Table, event: NonFinite, events: list[NonFinite]) -> str:
    """A sentence: what the first non-finite record holds, and what is known of who made it.

    Of an output, that the module did if its recorded inputs are finite; else a clause by the kind of the record.
    """
    counts = zip(("NaN", "+Inf", "-Inf"), event.counts, strict=True)
    parts = " and ".join(f"{count:,} {name}" for name, count in counts if count)
    what = f"{parts} among {event.numel:,} values of {table.name(event.site)} at step {event.step}"
    kind, call = table.sites.kind[event.site], (table.fqn[event.site], table.call[event.site])
    why = _MADE.get(kind, "nothing earlier has any")
    if kind == Kind.OUTPUT:
        bad = {other.site for other in events if other.step <= event.step}
        inputs = {site for site in table.pick(Kind.INPUT) if (table.fqn[site], table.call[site]) == call}
        if inputs and not inputs & bad:
            why = f"its inputs are finite, so {table.sites.module_class[event.site]} {call[0]} made them"
    return f"{what}; {why}"


@rule(Level.WARNING)
def overflow_ahead(table: Table) -> Iterator[Hit]:
    """Values near the largest that their dtype holds.

    When: an input, output, parameter or its gradient exceeds 1/{HEADROOM:g} of the largest value of its dtype
        ({LARGEST[float16]:g} for float16); bfloat16 and float32 count up to {MASKED:g}, where masks are filled
    Cause: activations or a loss scale that grow; use bfloat16, normalise, or lower the scale
    """
    require(any(layout.dtype in LARGEST for layout in table.reader.layouts), "a tensor of float16, bfloat16 or float32")
    # Not the gradients on their way: a scaler makes them as large as they can be, on purpose.
    for site in table.pick(Kind.INPUT, Kind.OUTPUT, Kind.GRAD, Kind.PARAM):
        dtype = table.layout(site).dtype
        limit = LARGEST.get(dtype, np.inf)
        steps, low, high = table.stat(site, "min", "max")
        largest = np.maximum(np.abs(low), np.abs(high))
        # So far out that only something explosive gets there; float16 ends below it.
        near = np.flatnonzero((largest > limit / HEADROOM) & (largest < MASKED))
        if len(near):
            at = int(near[0])
            yield table.hit(site, steps[at], f"is {largest[at]:.3g} at step {steps[at]}; {dtype} ends at {limit:.5g}")


@rule(Level.INFO)
def skipped_steps(table: Table) -> Iterator[Hit]:
    """Steps skipped because gradients overflowed.

    When: gradients are not finite and no parameter changes in that step, as with a gradient scaler
    Cause: a gradient scaler that looks for its scale; usual in the first steps
    """
    require(table.moves.names, "parameters after optimizer steps")
    backward = {event.step for event in table.nonfinite if table.sites.kind[event.site] in _BACKWARD}
    for step in sorted(backward & table.moves.skipped)[:1]:
        yield Hit(step, "gradients", f"not finite at step {step}, and no parameter was changed by that step")


@rule(Level.WARNING)
def underflow(table: Table) -> Iterator[Hit]:
    """Float16 gradients that have become zero.

    When: at {UNDERFLOWS} steps or more, over {LOST:.0%} of a float16 gradient at a module's input is zero, and
        less than {KEPT:.0%} of the one at its output
    Cause: no gradient scaler, or a scale that is too low
    """
    gradients = table.pick(Kind.GRAD_INPUT, phase=Phase.BACKWARD)
    halves = [site for site in gradients if table.layout(site).dtype == "float16"]
    for site in require(halves, "float16 gradients"):
        if (above := table.of_call(site, Kind.GRAD_OUTPUT)) is None:
            continue
        (own, zeros), (others, source) = table.stat(site, "zeros"), table.stat(above, "zeros")
        steps, at, there = np.intersect1d(own, others, return_indices=True)
        lost = np.flatnonzero((zeros[at] > LOST) & (source[there] < KEPT))
        if len(lost) >= UNDERFLOWS:
            first = int(lost[0])
            parts = f"{zeros[at[first]]:.0%} of it is zero at step {steps[first]}, {source[there[first]]:.0%}"
            yield table.hit(site, steps[first], f"{parts} of the one it is from")


STUCK_STEPS = 20
"""Fewest steps over which a loss can be called stuck."""

STUCK = 0.002
"""Span of the loss over the whole run, relative to its median, below which it is stuck."""

SPIKE_DEVIATIONS = 20.0
"""Robust standard deviations that make a spike."""

SPIKE_TIMES = 2.0
"""Times the usual loss that a spike exceeds it by at least."""

SPIKE_HISTORY = 10
"""Steps before a spike that say what is usual."""

RECENT = 50
"""Steps before it that count at most."""

ROBUST = 1.4826
"""Times the median absolute deviation that make a standard deviation, where values are normally distributed."""


def _losses(table: Table, name: str) -> list[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
    """(site, steps, values) of a statistic of each loss; NotObservedError where there are none."""
    sites = require(table.pick(Kind.LOSS), "a loss (a backward pass that was recorded)")
    return [(site, steps, values) for site in sites for steps, values in [table.stat(site, name)]]


@rule(Level.ERROR)
def loss_nonfinite(table: Table) -> Iterator[Hit]:
    """A loss that is NaN or Inf.

    When: a loss is NaN or infinite at any step
    Cause: what made the first NaN or Inf (see `nonfinite`), or a loss function outside its domain
    """
    for site, steps, bad in _losses(table, "bad"):
        rows = np.flatnonzero(bad > 0)
        if len(rows):
            text = f"not a finite number at {len(rows)} of {len(steps)} steps, the first being step {steps[rows[0]]}"
            yield table.hit(site, steps[rows[0]], text)


@rule(Level.WARNING)
def loss_stuck(table: Table) -> Iterator[Hit]:
    """A loss that does not move.

    When: over {STUCK_STEPS} steps or more, the loss spans less than {STUCK:.1%} of its median
    Cause: a learning rate far too low, parameters outside the optimizer, a detached graph, shuffled labels
    """
    curves = [curve for curve in _losses(table, "mean") if len(curve[1]) >= STUCK_STEPS]
    for site, steps, value in require(curves, f"{STUCK_STEPS} or more steps with a finite loss"):
        if np.ptp(value) < STUCK * abs(np.median(value)):
            text = f"stays between {value.min():.6g} and {value.max():.6g} over {len(value)} steps"
            yield table.hit(site, steps[0], text)


@rule(Level.WARNING)
def loss_spike(table: Table) -> Iterator[Hit]:
    """A loss that spikes.

    When: a loss exceeds the median of those before it ({SPIKE_HISTORY} at least, {RECENT} at most) by
        {SPIKE_TIMES:g} times that median and by {SPIKE_DEVIATIONS:g} robust standard deviations ({ROBUST}
        times the median absolute deviation)
    Cause: a bad batch, a learning rate that is too high, or an overflow
    """

    def limit(before: NDArray[np.float64]) -> float:
        """What a loss must exceed to be a spike: the median of the losses before it, and more.

        That is the largest of `SPIKE_DEVIATIONS` robust standard deviations, `SPIKE_TIMES` the median's magnitude, and
        1e-6.
        """
        usual = float(np.median(before))
        spread = ROBUST * float(np.median(np.abs(before - usual)))
        return usual + max(SPIKE_DEVIATIONS * spread, SPIKE_TIMES * abs(usual), 1e-6)

    curves = _losses(table, "mean")
    long = any(len(steps) > SPIKE_HISTORY for _, steps, _ in curves)
    require(long, f"more than {SPIKE_HISTORY} steps with a finite loss")
    for site, steps, value in curves:
        at = first_rise(value, limit, SPIKE_HISTORY, RECENT)
        if at is not None:
            text = f"{value[at]:.4g} at step {steps[at]}, where less than {limit(value[max(0, at - RECENT) : at]):.4g}"
            yield table.hit(site, steps[at], f"{text} was usual")
