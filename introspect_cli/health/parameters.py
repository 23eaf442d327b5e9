"""Parameters that do not learn, or learn too fast, and the optimizer that should teach them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.findings import Level
from introspect_cli.health.nonfinite import skipped_steps
from introspect_cli.health.rule import Answer, Hit, Rule, Unseen, lasting
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.health.table import Table

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


def _shape_of(table: Table) -> dict[str, tuple[int, ...]]:
    found = {}
    for site in table.pick(Kind.PARAM):
        layout = table.layout(site)
        if layout is not None:
            found[table.fqn[site]] = layout.shape
    return found


def _dtype_of(table: Table) -> dict[str, str]:
    return {
        table.fqn[site]: layout.dtype for site in table.pick(Kind.PARAM) if (layout := table.layout(site)) is not None
    }


def _gradients(table: Table) -> dict[str, float]:
    """For each parameter with recorded gradients, the largest mean absolute value; infinite where not finite."""
    found: dict[str, float] = {}
    for site in table.pick(Kind.GRAD):
        _, size = table.stat(site, "amean")
        if not len(size):
            continue  # its optimizer holds it, and never found one
        _, bad = table.stat(site, "bad")
        largest = np.inf if (bad > 0).any() else float(size.max(initial=0.0))
        found[table.fqn[site]] = max(found.get(table.fqn[site], 0.0), largest)
    return found


def _has_gradient(table: Table) -> dict[str, bool]:
    """For each parameter with recorded gradients, whether any was not all zero."""
    return {name: size > 0 for name, size in _gradients(table).items()}


def find_unchanged(table: Table) -> Answer:
    """Parameters that have gradients and never change."""
    moves = table.moves
    if not moves.names:
        return Unseen("parameters after optimizer steps")
    if not table.pick(Kind.GRAD):
        return Unseen("gradients of parameters")
    sizes = _gradients(table)
    if not sizes:
        return []
    # A bias in front of a normalisation gets a gradient that is nothing but rounding.
    noise = ROUNDING * float(np.median(list(sizes.values())))
    dtypes = _dtype_of(table)
    hits = []
    for place, name in enumerate(moves.names):
        seen = np.flatnonzero(moves.changed[:, place] >= 0)
        if len(seen) >= LEAST and sizes.get(name, 0.0) > noise and not (moves.changed[seen, place] == 1).any():
            step = int(moves.steps[seen[0]])
            text = f"has a gradient and the same bits ({dtypes.get(name, '?')}) after each of {len(seen)} steps"
            hits.append(Hit(step, f"param {name}", text))
    return hits


def find_no_gradient(table: Table) -> Answer:
    """Parameters that an optimizer holds and that never get a gradient."""
    moves = table.moves
    if not moves.names or not table.pick(Kind.GRAD):
        return Unseen("gradients of parameters, and parameters after optimizer steps")
    learns = _has_gradient(table)
    hits = []
    for place, name in enumerate(moves.names):
        seen = np.flatnonzero(moves.changed[:, place] >= 0)
        if len(seen) < LEAST or learns.get(name):
            continue
        what = "its gradient is zero" if name in learns else "it has no gradient"
        step = int(moves.steps[seen[0]])
        hits.append(Hit(step, f"param {name}", f"{what} at each of {len(seen)} steps, though an optimizer holds it"))
    return hits


def find_not_in_optimizer(table: Table) -> Answer:
    """Parameters that no optimizer holds, in a model whose others are trained."""
    moves = table.moves
    if not moves.names:
        return Unseen("parameters after optimizer steps")
    trained_roots = {name.partition(".")[0] for name in moves.names}
    trained = set(moves.names)
    aliases = {alias for module in table.modules for text in module.aliases for alias in text.split("=")}
    hits = []
    for site in table.pick(Kind.PARAM, phase=Phase.START):
        name = table.fqn[site]
        if name not in trained and name not in aliases and name.partition(".")[0] in trained_roots:
            first = int(table.many.steps[0])
            hits.append(Hit(first, f"param {name}", "no optimizer step was seen to hold it"))
    return hits


def _speeds(table: Table) -> list[tuple[str, list[int], list[float]]] | Unseen:
    """Steps and relative updates of each weight of two or more dimensions, skipped steps left out."""
    moves = table.moves
    if not moves.names:
        return Unseen("parameters after optimizer steps")
    optimizers = {table.fqn[site] for site in table.pick(Kind.HYPERPARAMETER)}
    if optimizers and all(name.startswith("LBFGS") for name in optimizers):
        return Unseen("an optimizer that takes small steps (L-BFGS searches along a line)")
    if np.isnan(moves.relative).all():
        return Unseen("sketches and statistics of parameters")
    skipped = skipped_steps(table)
    shapes = _shape_of(table)
    learns = _has_gradient(table)
    found = []
    for place, name in enumerate(moves.names):
        if len(shapes.get(name, ())) < 2 or learns.get(name) is False:
            continue
        rows = np.flatnonzero(~np.isnan(moves.relative[:, place]))
        rows = np.array([row for row in rows if int(moves.steps[row]) not in skipped], np.int64)
        if len(rows) >= LEAST:
            found.append((name, moves.steps[rows].tolist(), moves.relative[rows, place].tolist()))
    return found or Unseen(f"{LEAST} or more updates of a weight of two dimensions")


def find_tiny(table: Table) -> Answer:
    """Weights whose updates are lost in rounding."""
    speeds = _speeds(table)
    if isinstance(speeds, Unseen):
        return speeds
    learns = _has_gradient(table)
    hits = []
    for name, steps, relative in speeds:
        moving = [value for value in relative if value > 0]
        if learns.get(name) and moving and float(np.median(relative)) < TINY:
            text = f"an update is {np.median(relative):.1e} of its size (median), less than float32 can tell apart"
            hits.append(Hit(int(steps[0]), f"param {name}", text))
    return hits


def find_huge(table: Table) -> Answer:
    """Weights that are mostly replaced at each step."""
    speeds = _speeds(table)
    if isinstance(speeds, Unseen):
        return speeds
    hits = []
    for name, steps, relative in speeds:
        if float(np.median(relative)) > HUGE:
            at = next(position for position, value in enumerate(relative) if value > HUGE)
            text = f"an update is {np.median(relative):.0%} of its size (median over {len(steps)} steps)"
            hits.append(Hit(int(steps[at]), f"param {name}", text))
    return hits


def find_idle_state(table: Table) -> Answer:
    """Optimizer state that is all zero late in training."""
    sites = [
        site
        for site in table.pick(Kind.OPTIMIZER_STATE, phase=Phase.OPTIMIZER)
        if (layout := table.layout(site)) is not None and layout.numel > 1
    ]
    if not sites:
        return Unseen("optimizer state")
    hits = []
    for site in sites:
        steps, zeros = table.stat(site, "zeros")
        start = lasting((zeros == 1).tolist(), LATE)
        if start is not None:
            text = f"all zero since step {steps[start]}, after {len(steps)} steps"
            hits.append(Hit(int(steps[start]), table.name(site), text))
    return hits


def find_no_rate(table: Table) -> Answer:
    """A learning rate that is zero for longer than a schedule's first or last step."""
    sites = [site for site in table.pick(Kind.HYPERPARAMETER) if table.path[site].endswith("['lr']")]
    if not sites:
        return Unseen("learning rates")
    hits = []
    for site in sites:
        steps, rate = table.stat(site, "mean")
        zero = np.flatnonzero(rate == 0)
        if len(zero) >= LEAST:
            text = f"the learning rate is 0 at {len(zero)} of {len(steps)} steps"
            hits.append(Hit(int(steps[zero[0]]), f"{table.fqn[site]}{table.path[site]}", text))
    return hits


RULES = (
    Rule(
        "never-changes",
        Level.WARNING,
        "parameters with a gradient that never change",
        f"a parameter has a gradient, above {ROUNDING:g} of the median parameter's, and the same bits after each of "
        f"{LEAST} steps or more",
        "a learning rate of zero, an optimizer over copies of the parameters, or updates too small for the dtype",
        find_unchanged,
    ),
    Rule(
        "no-gradient",
        Level.WARNING,
        "parameters in an optimizer that never get a gradient",
        f"a parameter in an optimizer has no gradient, or one of zero, at each of {LEAST} steps or more",
        "a layer that is frozen, not used or detached from the loss",
        find_no_gradient,
    ),
    Rule(
        "not-in-optimizer",
        Level.INFO,
        "parameters that no optimizer holds, beside others that one does",
        "no optimizer was seen to hold a parameter of a model that is trained",
        "frozen on purpose, or added after the optimizer was built",
        find_not_in_optimizer,
    ),
    Rule(
        "tiny-updates",
        Level.WARNING,
        "weights whose updates are lost in rounding",
        f"the median update of a weight of two dimensions or more, over {LEAST} steps or more, is below {TINY:g} of "
        "its norm, which float32 rounds away; L-BFGS does not count",
        "a learning rate that is far too low, or decayed to nothing",
        find_tiny,
    ),
    Rule(
        "huge-updates",
        Level.WARNING,
        "weights that are mostly replaced at each step",
        f"the median update of a weight of two dimensions or more, over {LEAST} steps or more, is above {HUGE:.0%} "
        "of its norm; a thousandth is usual. L-BFGS does not count",
        "a learning rate that is too high, or no warm-up",
        find_huge,
    ),
    Rule(
        "idle-optimizer-state",
        Level.WARNING,
        "optimizer state that is all zero late in training",
        f"a tensor of it is all zero at the last {LATE} steps or more",
        "gradients that are zero: a layer that is not used, is dead or is detached",
        find_idle_state,
    ),
    Rule(
        "zero-learning-rate",
        Level.WARNING,
        "a learning rate of zero",
        f"a learning rate is zero at {LEAST} steps or more",
        "a schedule that has ended, or one that is stepped too often",
        find_no_rate,
    ),
)
