"""Parameters that do not learn, or learn too fast, and the optimizer that should teach them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.health.findings import Hit, Level, NotObservedError, observed, rule
from introspect_cli.health.table import Table, lasting
from introspect_cli.records import SCALER, Kind, Layout, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


LEAST = 5
"""Steps that must have been seen before a parameter is said to rest or to race."""

TINY = 2e-8
"""Update relative to the parameter below which float32 (24 bits, 6e-8) rounds most of it away."""

HUGE = 0.3
"""Update relative to the parameter above which it is replaced rather than trained; 1e-3 is usual."""

ROUNDING = 1e-5
"""A gradient this much smaller than the median parameter's is rounding, not a gradient."""

LATE = 10
"""Steps after which optimizer state that is still zero is idle."""


def _layouts(table: Table) -> dict[str, Layout]:
    """The layout of each parameter."""
    layouts = {site: table.layout(site) for site in table.pick(Kind.PARAM)}
    return {table.fqn[site]: layout for site, layout in layouts.items() if layout is not None}


def _gradients(table: Table) -> dict[str, float]:
    """For each parameter with recorded gradients, the largest mean absolute value; infinite where not finite."""
    sizes: dict[str, float] = {}
    for site in table.pick(Kind.GRAD):
        _, size = table.stat(site, "amean")
        if not len(size):
            continue  # its optimizer holds it, and never found one
        _, bad = table.stat(site, "bad")
        largest = np.inf if (bad > 0).any() else float(size.max(initial=0.0))
        sizes[table.fqn[site]] = max(sizes.get(table.fqn[site], 0.0), largest)
    return sizes


def _has_gradient(table: Table) -> dict[str, bool]:
    """For each parameter with recorded gradients, whether any was not all zero."""
    return {name: size > 0 for name, size in _gradients(table).items()}


@rule(
    "never-changes",
    Level.WARNING,
    "parameters with a gradient that never change",
    f"a parameter has a gradient, above {ROUNDING:g} of the median parameter's, and the same bits after each of "
    f"{LEAST} steps or more",
    "a learning rate of zero, an optimizer over copies of the parameters, or updates too small for the dtype",
)
def never_changes(table: Table) -> Iterator[Hit]:
    moves = table.moves
    observed(moves.names, "parameters after optimizer steps")
    observed(table.pick(Kind.GRAD), "gradients of parameters")
    sizes, layouts = _gradients(table), _layouts(table)
    # A bias in front of a normalisation gets a gradient that is nothing but rounding.
    noise = ROUNDING * float(np.median(list(sizes.values()))) if sizes else np.inf
    for place, name in enumerate(moves.names):
        seen = np.flatnonzero(moves.changed[:, place] >= 0)
        if len(seen) >= LEAST and sizes.get(name, 0.0) > noise and not (moves.changed[seen, place] == 1).any():
            dtype = layouts[name].dtype if name in layouts else "?"
            text = f"has a gradient and the same bits ({dtype}) after each of {len(seen)} steps"
            yield Hit(int(moves.steps[seen[0]]), f"param {name}", text)


@rule(
    "no-gradient",
    Level.WARNING,
    "parameters in an optimizer that never get a gradient",
    f"a parameter in an optimizer has no gradient, or one of zero, at each of {LEAST} steps or more",
    "a layer that is frozen, not used or detached from the loss",
)
def no_gradient(table: Table) -> Iterator[Hit]:
    moves = table.moves
    observed(moves.names and table.pick(Kind.GRAD), "gradients of parameters, and parameters after optimizer steps")
    learns = _has_gradient(table)
    for place, name in enumerate(moves.names):
        seen = np.flatnonzero(moves.changed[:, place] >= 0)
        if len(seen) < LEAST or learns.get(name):
            continue
        what = "its gradient is zero" if name in learns else "it has no gradient"
        step = int(moves.steps[seen[0]])
        yield Hit(step, f"param {name}", f"{what} at each of {len(seen)} steps, though an optimizer holds it")


@rule(
    "not-in-optimizer",
    Level.INFO,
    "parameters that no optimizer holds, beside others that one does",
    "no optimizer was seen to hold a parameter of a model that is trained",
    "frozen on purpose, or added after the optimizer was built",
)
def not_in_optimizer(table: Table) -> Iterator[Hit]:
    trained = set(observed(table.moves.names, "parameters after optimizer steps"))
    roots = {name.partition(".")[0] for name in trained}
    aliases = {alias for module in table.modules for text in module.aliases for alias in text.split("=")}
    for site in table.pick(Kind.PARAM, phase=Phase.START):
        name = table.fqn[site]
        if name not in trained and name not in aliases and name.partition(".")[0] in roots:
            yield Hit(int(table.many.steps[0]), f"param {name}", "no optimizer step was seen to hold it")


class _Updates(NamedTuple):
    """The updates of a weight.

    Attributes:
        name: of the weight.
        steps: int64 (T,), without those that were skipped.
        relative: float64 (T,), length of the update over that of the weight.
    """

    name: str
    steps: NDArray[np.int64]
    relative: NDArray[np.float64]


def _updates(table: Table) -> list[_Updates]:
    """The updates of each weight of two or more dimensions."""
    moves = table.moves
    observed(moves.names, "parameters after optimizer steps")
    optimizers = {table.fqn[site] for site in table.pick(Kind.HYPERPARAMETER)} - {SCALER}
    if optimizers and all(name.startswith("LBFGS") for name in optimizers):
        raise NotObservedError("an optimizer that takes small steps (L-BFGS searches along a line)")
    if np.isnan(moves.relative).all():
        raise NotObservedError("sketches and statistics of parameters")
    layouts, learns = _layouts(table), _has_gradient(table)
    taken = ~np.isin(moves.steps, list(moves.skipped))
    updates = []
    for place, name in enumerate(moves.names):
        if name not in layouts or len(layouts[name].shape) < 2 or learns.get(name) is False:
            continue
        rows = np.flatnonzero(~np.isnan(moves.relative[:, place]) & taken)
        if len(rows) >= LEAST:
            updates.append(_Updates(name, moves.steps[rows], moves.relative[rows, place].astype(np.float64)))
    return observed(updates, f"{LEAST} or more updates of a weight of two dimensions")


@rule(
    "tiny-updates",
    Level.WARNING,
    "weights whose updates are lost in rounding",
    f"the median update of a weight of two dimensions or more, over {LEAST} steps or more, is below {TINY:g} of "
    "its norm, which float32 rounds away; L-BFGS does not count",
    "a learning rate that is far too low, or decayed to nothing",
)
def tiny_updates(table: Table) -> Iterator[Hit]:
    learns = _has_gradient(table)
    for name, steps, relative in _updates(table):
        if learns.get(name) and (relative > 0).any() and float(np.median(relative)) < TINY:
            text = f"an update is {np.median(relative):.1e} of its size (median), less than float32 can tell apart"
            yield Hit(int(steps[0]), f"param {name}", text)


@rule(
    "huge-updates",
    Level.WARNING,
    "weights that are mostly replaced at each step",
    f"the median update of a weight of two dimensions or more, over {LEAST} steps or more, is above {HUGE:.0%} "
    "of its norm; a thousandth is usual. L-BFGS does not count",
    "a learning rate that is too high, or no warm-up",
)
def huge_updates(table: Table) -> Iterator[Hit]:
    for name, steps, relative in _updates(table):
        if float(np.median(relative)) > HUGE:
            first = steps[np.argmax(relative > HUGE)]
            text = f"an update is {np.median(relative):.0%} of its size (median over {len(steps)} steps)"
            yield Hit(int(first), f"param {name}", text)


@rule(
    "idle-optimizer-state",
    Level.WARNING,
    "optimizer state that is all zero late in training",
    f"a tensor of it is all zero at the last {LATE} steps or more",
    "gradients that are zero: a layer that is not used, is dead or is detached",
)
def idle_optimizer_state(table: Table) -> Iterator[Hit]:
    sites = table.tensors(Kind.OPTIMIZER_STATE, phase=Phase.OPTIMIZER, floats=False)
    observed(sites, "optimizer state")
    for site in sites:
        steps, zeros = table.stat(site, "zeros")
        start = lasting(zeros == 1, LATE)
        if start is not None:
            text = f"all zero since step {steps[start]}, after {len(steps)} steps"
            yield table.hit(site, steps[start], text)


@rule(
    "zero-learning-rate",
    Level.WARNING,
    "a learning rate of zero",
    f"a learning rate is zero at {LEAST} steps or more",
    "a schedule that has ended, or one that is stepped too often",
)
def zero_learning_rate(table: Table) -> Iterator[Hit]:
    sites = observed(
        [site for site in table.pick(Kind.HYPERPARAMETER) if table.path[site].endswith("['lr']")], "learning rates"
    )
    for site in sites:
        steps, rate = table.stat(site, "mean")
        zero = np.flatnonzero(rate == 0)
        if len(zero) >= LEAST:
            text = f"the learning rate is 0 at {len(zero)} of {len(steps)} steps"
            yield Hit(int(steps[zero[0]]), f"{table.fqn[site]}{table.path[site]}", text)


RULES = (
    never_changes,
    no_gradient,
    not_in_optimizer,
    tiny_updates,
    huge_updates,
    idle_optimizer_state,
    zero_learning_rate,
)
