"""What flows: gradients along the depth of a model and along time, and activations that carry nothing.

Gradients in which those of the step before are left over show in biases. The gradient of a bias is the sum of the
gradients at its module's outputs, over all calls of a step. Its mean times its elements is on record, and so is that of
the outputs, so both sums are. What an optimizer takes is a multiple of them (clipped, or unscaled), the same of all
biases of a step; where the step before is left over, it is a multiple of theirs and of what the optimizer took then.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from introspect_cli.health.findings import Hit, Level, require, rule
from introspect_cli.health.table import Table, adding_up, first_rise, lasting
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

RATIO = 1e3
"""Norms of gradients at the first and at the last third of the layers that differ by more than this are out of hand."""

LAYERS = 4
"""Layers with weights below which depth says nothing."""

GROWTH = 100.0
"""Times its earlier median that the norm of all gradients may reach."""

HISTORY = 8
"""Steps of history that growth is measured against, at least."""

RECENT = 50
"""Steps of history that it is measured against at most."""

OFTEN = 0.5
"""Share of the steps in which gradients must be so."""

_LOOKUPS = ("Embedding", "Norm")


_Depth: TypeAlias = "tuple[str, NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]"
"""A model; steps in which all of its layers have a gradient; median norms at the first and the last third of these."""


def _first_hit(depth: _Depth, flags: NDArray[np.bool_]) -> Hit:
    """The hit at the first step of a model whose flag is true."""
    root, *columns = depth
    step, early, late = (column[np.argmax(flags)] for column in columns)
    norms = f"{early / late:.1e} times those of its last at step {step} (norms {early:.1e} and {late:.1e})"
    return Hit(int(step), root, f"gradients at its first layers' outputs are {norms}")


def _layers(table: Table) -> list[int]:
    """Sites of output gradients of layers: modules with weights of two or more dimensions, in the order they ran.

    First calls alone; embeddings and normalisations are none.
    """
    weights = (site for site in table.pick(Kind.GRAD) if len(table.layout(site).shape) > 1)
    owners = {table.fqn[site].rpartition(".")[0] for site in weights}
    layers = []
    for site in table.pick(Kind.GRAD_OUTPUT, phase=Phase.BACKWARD):
        made = table.of_call(site, Kind.OUTPUT, table.path[site])
        lookup = any(word in table.sites.module_class[site] for word in _LOOKUPS)
        if made is not None and table.fqn[site] in owners and not table.call[site] and not lookup:
            layers.append((int(table.order[made]), site))
    return [site for _, site in sorted(layers)]


def _roots(table: Table, sites: list[int]) -> dict[str, list[int]]:
    """Sites by the root module they belong to."""
    groups: dict[str, list[int]] = {}
    for site in sites:
        groups.setdefault(table.fqn[site].partition(".")[0], []).append(site)
    return groups


def _by_depth(table: Table) -> list[_Depth]:
    """For each root with `LAYERS` layers or more: median gradient norms of its first and of its last third of layers.

    They cover the steps in which the norms of all layers are finite and any is above 0; a root without such a step is
    left out.
    """
    depths = []
    for root, sites in _roots(table, _layers(table)).items():
        norms = table.norms(sites)
        rows = np.flatnonzero(np.isfinite(norms).all(axis=1) & (norms > 0).any(axis=1))
        if len(rows) and len(sites) >= LAYERS:
            third = len(sites) // 3
            early, late = np.median(norms[rows][:, :third], axis=1), np.median(norms[rows][:, -third:], axis=1)
            depths.append((root, table.many.steps[rows], early, late))
    return depths


@rule(Level.WARNING)
def vanishing_gradients(table: Table) -> Iterator[Hit]:
    """Gradients that vanish towards the first layers.

    When: in {OFTEN:.0%} of the steps or more, and in the last, gradients at the outputs of the first third of the
        layers have less than 1/{RATIO:g} of the last third's norm. Needs {LAYERS} layers with weights of two
        dimensions or more; lookups and normalisations do not count (Glorot and Bengio, 2010)
    Cause: a deep stack of squashing activations, a small initial scale, no residual connections or normalisation
    """
    for depth in require(_by_depth(table), f"gradients at the outputs of {LAYERS} or more layers of one model"):
        _, _, early, late = depth
        low = (early * RATIO < late) & (early > 0)
        if low.mean() >= OFTEN and low[-1]:
            yield _first_hit(depth, low)


@rule(Level.WARNING)
def exploding_gradients(table: Table) -> Iterator[Hit]:
    """Gradients that grow towards the first layers or from step to step.

    When: in {OFTEN:.0%} of the steps or more, gradients at the outputs of the first third of the layers have more
        than {RATIO:g} times the last third's norm; or the norm of all gradients exceeds {GROWTH:g} times its
        median in the steps before ({HISTORY} at least, {RECENT} at most; Pascanu, Mikolov and Bengio, 2013)
    Cause: a large initial scale, a large learning rate, long recurrences; clip, normalise or warm up
    """
    depths, gradients = _by_depth(table), table.pick(Kind.GRAD)
    require(depths or gradients, "gradients of parameters")
    for depth in depths:
        _, _, early, late = depth
        high = (early > late * RATIO) & (late > 0)
        if high.mean() >= OFTEN:
            yield _first_hit(depth, high)
    for root, sites in _roots(table, gradients).items():
        norm = table.total_norm(sites)
        seen = np.flatnonzero((norm > 0) & np.isfinite(norm))
        at = first_rise(norm[seen], lambda before: GROWTH * float(np.median(before)), HISTORY, RECENT)
        if at is not None:
            step = int(table.many.steps[seen[at]])
            text = f"the norm of all gradients is {norm[seen[at]]:.3g}, over {GROWTH:g} times its median before"
            yield Hit(step, root, text)


DEAD = 0.9
"""Share of zeros from which a rectified layer counts as dead; about half are zero in a healthy one."""

LASTING = 5
"""Steps, up to the last, that a state must last before it counts."""

SATURATED = 0.05
"""Mean derivative of a squashing function, relative to its largest, below which it counts as saturated."""

_NO_ZEROS = ("Dropout", "Embedding", "Pad", "Mask")


@rule(Level.WARNING)
def dead_units(table: Table) -> Iterator[Hit]:
    """Activations nearly all of which stay zero.

    When: at the last {LASTING} steps or more, {DEAD:.0%} of an output, or of an input that a gradient flows to,
        are exactly zero; vectors (log-determinants, fast weights), dropout, lookups, padding and masks do not
        count, nor an output whose input has as many zeros
    Cause: a rectifier pushed below zero by a large step, a bad initialisation or a large negative bias
    """
    for site in require(_activations(table), "outputs of modules with statistics"):
        steps, zeros = table.stat(site, "zeros")
        start = lasting(zeros >= DEAD, LASTING)
        if start is not None and not (table.sites.kind[site] == Kind.OUTPUT.value and _is_from_input(table, site)):
            text = f"{zeros[-1]:.0%} of its values are zero, {DEAD:.0%} or more since step {steps[start]}"
            yield table.hit(site, steps[start], text)


def _activations(table: Table) -> list[int]:
    """Sites of floating point outputs, and of inputs with a gradient, of two or more dimensions; no `_NO_ZEROS`."""
    sites = []
    for site in table.tensors(Kind.OUTPUT, Kind.INPUT, phase=Phase.FORWARD):
        gradient = table.of_call(site, Kind.GRAD_INPUT, table.path[site])
        flows = table.sites.kind[site] == Kind.OUTPUT or gradient is not None
        counts = not any(word in table.sites.module_class[site] for word in _NO_ZEROS)
        if flows and counts and len(table.layout(site).shape) > 1:
            sites.append(site)
    return sites


def _is_from_input(table: Table, site: int) -> bool:
    """Whether the module's first input has as large a median share of zeros as its output, or `DEAD` or more.

    False where zeros of that input were not counted.
    """
    given = table.of_call(site, Kind.INPUT, "[0]")
    before = np.zeros(0) if given is None else table.stat(given, "zeros")[1]
    return len(before) > 0 and bool(np.median(before) >= min(DEAD, float(np.median(table.stat(site, "zeros")[1]))))


@rule(Level.WARNING)
def saturated(table: Table) -> Iterator[Hit]:
    """Sigmoid or tanh outputs at their ends, where the gradient is gone.

    When: at the last {LASTING} steps or more, the mean derivative of a Tanh or Sigmoid (from mean and variance of
        its output) is below {SATURATED:.0%} of its largest
    Cause: weights or inputs that are too large; normalise them or lower the initial scale
    """
    outputs = table.tensors(Kind.OUTPUT)
    squashing = [site for site in outputs if table.sites.module_class[site] in ("Tanh", "Sigmoid")]
    for site in require(squashing, "a Tanh or Sigmoid module"):
        steps, mean, var = table.stat(site, "mean", "var")
        square = var + mean * mean
        # E[1 - t^2] for tanh, E[s (1 - s)] of at most 1/4 for the sigmoid: the derivative, averaged.
        slope = 1 - square if table.sites.module_class[site] == "Tanh" else 4 * (mean - square)
        start = lasting(slope < SATURATED, LASTING)
        if start is not None:
            under = f"{max(slope[-1], 0):.1%} of the largest, under {SATURATED:.0%} since step {steps[start]}"
            yield table.hit(site, steps[start], f"its mean derivative is {under}")


# --- gradients in which those of the step before are left over, since nothing set them to zero

BIASES = 3
"""Biases that it takes: two factors are fitted to them."""

LEFT_OVER = 3
"""Steps in which it must be so."""

MOST = 64
"""Steps that are asked, the first ones: what is missing is missing from the start."""

MOSTLY = 0.8
"""Share of the steps in which it must be so."""

REST = 0.02
"""Of the gradients, what the two factors may leave unexplained; without the step before it must be ten times that."""

EVEN = 0.05
"""How far the factor of what is left over may be from that of the step's gradients: clipping comes after adding up."""

_SUMMED = re.compile("bias of (Linear|Conv|LayerNorm|BatchNorm|GroupNorm)")
"""Biases that are added to all of the output."""


def _total(table: Table, site: int) -> NDArray[np.float64]:
    """The sum of a site's elements in each step; NaN where it was not observed.

    It is the recorded mean, which is over finite elements only, times the number of all elements.
    """
    column = table.many.column(site)
    return column.floats["mean"].astype(np.float64) * table.numel[column.layout]


def _sums(table: Table) -> tuple[list[str], NDArray[np.float64], NDArray[np.float64]]:
    """Names of biases; sums of their gradients, and of their modules' output gradients over all calls.

    float64 (T, biases) each, NaN where not observed.
    """
    adding = adding_up(table.sites, _SUMMED)
    names, taken, given = [], [], []
    for site in table.pick(Kind.GRAD):
        if site in adding and not table.call[site]:
            sums = np.array([_total(table, call) for call in adding[site]])
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

    When: in {LEFT_OVER} steps or more, and {MOSTLY:.0%} of those that can be asked, the sums of the gradients of
        {BIASES} biases or more are those of the gradients at their modules' outputs plus those that the optimizer
        took in the step before
    Cause: zero_grad is missing, or is called for another optimizer or model
    """
    names, taken, given = _sums(table)
    steps = table.many.steps
    require(len(names) >= BIASES, f"gradients of {BIASES} biases and those at their modules' outputs")
    hits, asked = [], 0
    for row in (np.flatnonzero(np.diff(steps) == 1) + 1)[:MOST]:
        there = np.isfinite(taken[row]) & np.isfinite(given[row]) & np.isfinite(taken[row - 1])
        if there.sum() >= BIASES and taken[row][there].any():
            asked += 1
            if _is_left_over(taken[row][there], given[row][there], taken[row - 1][there]):
                hits.append(int(steps[row]))
    require(asked, "gradients of two steps in a row")
    if len(hits) >= max(LEFT_OVER, MOSTLY * asked):
        evidence = f"in {len(hits)} of {asked} steps, {len(names)} gradients of biases include those of the step before"
        yield Hit(hits[0], names[0].partition(".")[0], evidence)
