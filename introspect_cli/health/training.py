"""What a step trains with: parameters that do not learn or learn too fast, their optimizer, batches, BatchNorm."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.findings import Hit, Level, require, rule
from introspect_cli.health.table import UNMEASURED
from introspect_cli.records import SCALER, Kind, Layout, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from introspect_cli.health.table import Table

LEAST = 5
"""Steps that must have been seen before a parameter is said to rest or to race."""

TINY = 2e-8
"""Update relative to the parameter below which float32 (24 bits, 6e-8) rounds most of it away."""

HUGE = 0.3
"""Update relative to the parameter above which it is replaced rather than trained; 1e-3 is usual."""

ROUNDING = 1e-5
"""A gradient this much smaller than the median parameter's is rounding, not a gradient."""


def _layouts(table: Table) -> dict[str, Layout]:
    """Layout of each parameter by FQN, where it was measured."""
    layouts = {site: table.layout(site) for site in table.pick(Kind.PARAM)}
    return {table.fqn[site]: layout for site, layout in layouts.items() if layout is not UNMEASURED}


def _gradient_sizes(table: Table) -> dict[str, float]:
    """For each parameter with recorded gradients, the largest mean of absolutes; infinite if any was not finite."""
    sizes: dict[str, float] = {}
    for site in table.pick(Kind.GRAD):
        (_, size), (_, bad) = table.stat(site, "amean"), table.stat(site, "bad")
        if len(size):  # else its optimizer holds it, and never had one
            largest = np.inf if (bad > 0).any() else float(size.max(initial=0.0))
            sizes[table.fqn[site]] = max(sizes.get(table.fqn[site], 0.0), largest)
    return sizes


def _seen_parameters(table: Table) -> Iterator[tuple[str, int, int, bool]]:
    """(name, first step, number of steps, whether it ever changed) of each parameter seen in `LEAST` steps or more.

    Seen means that its bits were compared with the value before; all of them are trained.
    """
    for place, name in enumerate(table.moves.names):
        changed = table.moves.changed[:, place]
        seen = np.flatnonzero(changed >= 0)
        if len(seen) >= LEAST:
            yield name, int(table.moves.steps[seen[0]]), len(seen), bool((changed[seen] == 1).any())


@rule(Level.WARNING)
def never_changes(table: Table) -> Iterator[Hit]:
    """Parameters with a gradient that never change.

    When: a parameter has a gradient, above {ROUNDING:g} of the median parameter's, and the same bits after each of
        {LEAST} steps or more
    Cause: a learning rate of zero, an optimizer over copies of the parameters, or updates too small for the dtype
    """
    require(table.moves.names, "parameters after optimizer steps")
    require(table.pick(Kind.GRAD), "gradients of parameters")
    sizes, layouts = _gradient_sizes(table), _layouts(table)
    # A bias in front of a normalisation gets a gradient that is nothing but rounding.
    noise = ROUNDING * float(np.median(list(sizes.values()))) if sizes else np.inf
    for name, first, times, changed in _seen_parameters(table):
        if sizes.get(name, 0.0) > noise and not changed:
            dtype = layouts[name].dtype if name in layouts else "?"
            yield Hit(first, f"param {name}", f"has a gradient and the same bits ({dtype}) after each of {times} steps")


@rule(Level.WARNING)
def no_gradient(table: Table) -> Iterator[Hit]:
    """Parameters in an optimizer that never get a gradient.

    When: a parameter in an optimizer has no gradient, or one of zero, at each of {LEAST} steps or more
    Cause: a layer that is frozen, not used or detached from the loss
    """
    require(table.moves.names and table.pick(Kind.GRAD), "gradients, and parameters after optimizer steps")
    sizes, layouts = _gradient_sizes(table), _layouts(table)
    # where it is cut over ranks, others may have all of its elements
    elsewhere = {name for name, layout in layouts.items() if layout.part is not None and not layout.part.numel}
    for name, first, times, _ in _seen_parameters(table):
        if not sizes.get(name, 0.0) > 0 and name not in elsewhere:
            what = "its gradient is zero" if name in sizes else "it has no gradient"
            yield Hit(first, f"param {name}", f"{what} at each of {times} steps, though an optimizer holds it")


@rule(Level.INFO)
def not_in_optimizer(table: Table) -> Iterator[Hit]:
    """Parameters that no optimizer holds, beside others that one does.

    When: no optimizer was seen to hold a parameter of a model that is trained; a module that begins with the
        values of one that is trained is a copy of it and does not count
    Cause: frozen on purpose, or added after the optimizer was built
    """
    trained = set(require(table.moves.names, "parameters after optimizer steps"))
    roots = {name.partition(".")[0] for name in trained}
    aliases = {alias for module in table.reader.modules for text in module.aliases for alias in text.split("=")}
    copied = _copied_modules(table, trained)
    for site in table.pick(Kind.PARAM, phase=Phase.START):
        name = table.fqn[site]
        is_apart = name not in trained and name not in aliases and name.rpartition(".")[0] not in copied
        if is_apart and name.partition(".")[0] in roots:
            yield Hit(int(table.many.steps[0]), f"param {name}", "no optimizer step was seen to hold it")


def _copied_modules(table: Table, trained: set[str]) -> set[str]:
    """Untrained modules whose parameters all start equal to trained ones, such as moving averages.

    One parameter at least must be random: constants are equal by chance.
    """
    started = {table.fqn[site]: site for site in table.pick(Kind.PARAM, phase=Phase.START)}
    values = {name: tuple(table.column(site).checksum[:1].tolist()) for name, site in started.items()}
    originals = {values[name] for name in trained & values.keys()}
    new = {name.rpartition(".")[0] for name in started if name in trained or values[name] not in originals}
    ranges = {name: table.stat(site, "min", "max")[1:] for name, site in started.items()}
    return {name.rpartition(".")[0] for name, (low, high) in ranges.items() if (low[:1] < high[:1]).any()} - new


def _updates(table: Table) -> list[tuple[str, NDArray[np.int64], NDArray[np.float64]]]:
    """For each weight of two or more dimensions: name, steps not skipped, L2 of the update over that of the weight.

    Only weights with a gradient other than zero and `LEAST` such steps or more.

    Raises:
        NotObservedError: there are no updates, or L-BFGS optimizers made all of them.
    """
    moves = table.moves
    require(moves.names, "parameters after optimizer steps")
    optimizers = {table.fqn[site] for site in table.pick(Kind.HYPERPARAMETER)} - {SCALER}
    small = not optimizers or any(not name.startswith("LBFGS") for name in optimizers)
    require(small, "an optimizer that takes small steps (L-BFGS searches along a line)")
    require(not np.isnan(moves.relative).all(), "sketches and statistics of parameters")
    layouts, sizes = _layouts(table), _gradient_sizes(table)
    taken = ~np.isin(moves.steps, list(moves.skipped))
    updates = []
    for place, name in enumerate(moves.names):
        rows = np.flatnonzero(~np.isnan(moves.relative[:, place]) & taken)
        if name in layouts and len(layouts[name].shape) > 1 and sizes.get(name) != 0 and len(rows) >= LEAST:
            updates.append((name, moves.steps[rows], moves.relative[rows, place].astype(np.float64)))
    return require(updates, f"{LEAST} or more updates of a weight of two dimensions")


@rule(Level.WARNING)
def tiny_updates(table: Table) -> Iterator[Hit]:
    """Weights whose updates are lost in rounding.

    When: the median update of a weight of two dimensions or more, over {LEAST} steps or more, is below {TINY:g} of
        its norm, which float32 rounds away; L-BFGS does not count
    Cause: a learning rate that is far too low, or decayed to nothing
    """
    sizes = _gradient_sizes(table)
    for name, steps, relative in _updates(table):
        if sizes.get(name, 0.0) > 0 and (relative > 0).any() and float(np.median(relative)) < TINY:
            text = f"an update is {np.median(relative):.1e} of its size (median), less than float32 can tell apart"
            yield Hit(int(steps[0]), f"param {name}", text)


@rule(Level.WARNING)
def huge_updates(table: Table) -> Iterator[Hit]:
    """Weights that are mostly replaced at each step.

    When: the median update of a weight of two dimensions or more, over {LEAST} steps or more, is above {HUGE:.0%}
        of its norm; a thousandth is usual. L-BFGS does not count
    Cause: a learning rate that is too high, or no warm-up
    """
    for name, steps, relative in _updates(table):
        if float(np.median(relative)) > HUGE:
            first = steps[np.argmax(relative > HUGE)]
            text = f"an update is {np.median(relative):.0%} of its size (median over {len(steps)} steps)"
            yield Hit(int(first), f"param {name}", text)


@rule(Level.WARNING)
def zero_learning_rate(table: Table) -> Iterator[Hit]:
    """A learning rate of zero.

    When: a learning rate is zero at {LEAST} steps or more
    Cause: a schedule that has ended, or one that is stepped too often
    """
    for site in require(table.rates(), "learning rates"):
        steps, rate = table.stat(site, "mean")
        zero = np.flatnonzero(rate == 0)
        if len(zero) >= LEAST:
            text = f"the learning rate is 0 at {len(zero)} of {len(steps)} steps"
            yield Hit(int(steps[zero[0]]), f"{table.fqn[site]}{table.path[site]}", text)


# --- batches, and running statistics

REST = 5
"""Steps over which running statistics must move."""


def _batches(table: Table) -> dict[str, list[tuple[int, tuple[int, ...], int]]]:
    """By loader, (step, checksums, samples) of each batch, by step and call; samples is a first dimension.

    It is that of the tensor with most elements, 1 for a scalar. A batch without a measured tensor is left out.

    Raises:
        NotObservedError: no batch of a loader was observed.
    """
    columns = table.few
    groups: dict[tuple[str, int], list[int]] = {}
    for site in table.pick(Kind.BATCH, phase=Phase.DATA):
        groups.setdefault((table.fqn[site], table.call[site]), []).append(int(columns.place[site]))
    batches: dict[str, list[tuple[int, tuple[int, ...], int]]] = {}
    for row, step in enumerate(columns.steps.tolist()):
        for (loader, _), places in sorted(groups.items()):
            seen = [place for place in places if columns.layout[row, place] >= 0]
            if seen:
                layouts = [table.reader.layouts[int(columns.layout[row, place])] for place in seen]
                samples, *_ = (*max(layouts, key=lambda layout: layout.numel).shape, 1)
                batches.setdefault(loader, []).append((step, tuple(columns.checksum[row, seen].tolist()), samples))
    return require(batches, "batches of a DataLoader")


@rule(Level.WARNING)
def repeated_batch(table: Table) -> Iterator[Hit]:
    """The same batch twice in a row.

    When: a loader yields a batch twice in a row, and other batches too; batches of one sample do not count
    Cause: an iterator that is not advanced, workers with one seed, or a sampler that repeats itself
    """
    for loader, batches in _batches(table).items():
        twice = [(one[0], two[0]) for one, two in pairwise(batches) if one[1] == two[1] and one[2] > 1]
        if twice and len({checksums for _, checksums, _ in batches}) > 1:
            before, after = twice[0]
            times = f", and {len(twice) - 1} more times" if len(twice) > 1 else ""
            yield Hit(after, loader, f"the batch of step {after} is that of step {before} again, bit for bit{times}")


@rule(Level.INFO)
def one_batch(table: Table) -> Iterator[Hit]:
    """A loader that yields one batch only.

    When: a loader yields one and the same batch {REST} times or more and no other
    Cause: full-batch training, or a data set cut down to try something
    """
    for loader, batches in _batches(table).items():
        if len(batches) >= REST and len({checksums for _, checksums, _ in batches}) == 1:
            yield Hit(batches[0][0], loader, f"all {len(batches)} batches are the same, bit for bit")


@rule(Level.WARNING)
def batchnorm_frozen(table: Table) -> Iterator[Hit]:
    """BatchNorm statistics that never change in training.

    When: running statistics keep their bits over more than {REST} steps in which the module ran in training
    Cause: a model left in eval mode, a momentum of 0, or statistics frozen on purpose
    """
    called = {table.fqn[site] for site in table.pick(Kind.OUTPUT, phase=Phase.FORWARD)}
    buffers, of = table.pick(Kind.BUFFER, phase=Phase.OPTIMIZER), table.sites.module_class
    running = [site for site in buffers if "Norm" in of[site] and table.fqn[site].endswith(".running_mean")]
    for site in require(running, "running statistics of a BatchNorm"):
        column = table.column(site)
        rows = np.flatnonzero(column.layout >= 0)
        ran = table.fqn[site].removesuffix(".running_mean") in called
        if ran and len(rows) > REST and len(np.unique(column.checksum[rows])) == 1:
            yield table.hit(site, column.steps[rows[0]], f"the same bits after each of {len(rows)} steps")
