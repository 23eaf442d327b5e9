"""What goes in: inputs that are not normalised, batches that come twice, and BatchNorm's idea of both."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.health.findings import Hit, Level, observed, rule
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.health.table import Table

LARGE = 10.0
"""Root-mean-square of an input above which it is not normalised; mean 0 and variance 1 are advised."""

OFFSET = 10.0
"""Standard deviations that an input's mean may be away from zero."""

OFTEN = 0.5
"""Share of the steps in which an input must be so."""

REST = 5
"""Steps over which running statistics must move."""

BURN_IN = 30
"""Steps after which running statistics have forgotten where they began (momentum 0.1: 0.9**30 is 4%)."""

DRIFT_VARIANCE = 10.0
"""Times by which a running variance may change after that."""

DRIFT_MEAN = 3.0
"""Running standard deviations by which a running mean may move after that."""


@rule(
    "raw-inputs",
    Level.WARNING,
    "inputs far from mean 0 and variance 1",
    f"in {OFTEN:.0%} of the steps or more, a model's float input has a root mean square above {LARGE:g}, or a "
    f"mean over one and more than {OFFSET:g} standard deviations from zero (LeCun and others, Efficient "
    "BackProp, 1998)",
    "a missing normalisation of the data",
)
def raw_inputs(table: Table) -> Iterator[Hit]:
    with_parameters = {module.fqn.partition(".")[0] for module in table.modules if module.parameters}
    inputs = table.tensors(Kind.INPUT, phase=Phase.FORWARD)
    sites = [site for site in inputs if "." not in table.fqn[site] and table.fqn[site] in with_parameters]
    observed(sites, "a float input of a model")
    for site in sites:
        steps, (mean, var) = table.stats(site, "mean", "var")
        rms = np.sqrt(var + mean * mean)
        raw = (rms > LARGE) | ((np.abs(mean) > OFFSET * np.sqrt(var)) & (var > 0) & (np.abs(mean) > 1))
        if len(raw) and raw.mean() >= OFTEN:
            at = int(np.argmax(raw))
            text = f"mean {mean[at]:.4g} and standard deviation {np.sqrt(var[at]):.4g} at step {steps[at]}"
            yield table.hit(site, steps[at], text)


class _Batch(NamedTuple):
    """One batch.

    Attributes:
        step: that it was drawn in.
        checksums: of all its tensors.
        samples: how many, by its largest tensor.
    """

    step: int
    checksums: tuple[int, ...]
    samples: int


def _batches(table: Table) -> dict[str, list[_Batch]]:
    """Every loader's batches, in order."""
    columns = table.few
    groups: dict[tuple[str, int], list[int]] = {}
    for site in table.pick(Kind.BATCH, phase=Phase.DATA):
        groups.setdefault((table.fqn[site], table.call[site]), []).append(site)
    batches: dict[str, list[_Batch]] = {}
    for row, step in enumerate(columns.steps):
        for (loader, _), sites in sorted(groups.items()):
            places = [columns.place[site] for site in sites]
            places = [place for place in places if columns.layout[row, place] >= 0]
            if places:
                layouts = [table.layouts[int(columns.layout[row, place])] for place in places]
                largest = max(layouts, key=lambda layout: layout.numel)
                checksums = tuple(int(columns.checksum[row, place]) for place in places)
                samples = largest.shape[0] if largest.shape else 1
                batches.setdefault(loader, []).append(_Batch(int(step), checksums, samples))
    return observed(batches, "batches of a DataLoader")


@rule(
    "repeated-batch",
    Level.WARNING,
    "the same batch twice in a row",
    "a loader yields a batch twice in a row, and other batches too; batches of one sample do not count",
    "an iterator that is not advanced, workers with one seed, or a sampler that repeats itself",
)
def repeated_batch(table: Table) -> Iterator[Hit]:
    for loader, batches in _batches(table).items():
        if len({batch.checksums for batch in batches}) < 2:
            continue
        twice = [(one, two) for one, two in pairwise(batches) if one.checksums == two.checksums and one.samples > 1]
        if twice:
            before, after = twice[0]
            times = f", and {len(twice) - 1} more times" if len(twice) > 1 else ""
            text = f"the batch of step {after.step} is the one of step {before.step} again, bit for bit{times}"
            yield Hit(after.step, loader, text)


@rule(
    "one-batch",
    Level.INFO,
    "a loader that yields one batch only",
    f"a loader yields one and the same batch {REST} times or more and no other",
    "full-batch training, or a data set cut down to try something",
)
def one_batch(table: Table) -> Iterator[Hit]:
    for loader, batches in _batches(table).items():
        if len(batches) >= REST and len({batch.checksums for batch in batches}) == 1:
            yield Hit(batches[0].step, loader, f"all {len(batches)} batches are the same, bit for bit")


def _running(table: Table, name: str) -> list[int]:
    """The running statistics of that name."""
    buffers = table.pick(Kind.BUFFER, phase=Phase.OPTIMIZER)
    sites = [site for site in buffers if table.fqn[site].endswith(f".{name}") and "Norm" in table.module_class[site]]
    return observed(sites, "running statistics of a BatchNorm")


@rule(
    "batchnorm-frozen",
    Level.WARNING,
    "BatchNorm statistics that never change in training",
    f"running statistics keep their bits over more than {REST} steps in which the module ran in training",
    "a model left in eval mode, a momentum of 0, or statistics frozen on purpose",
)
def batchnorm_frozen(table: Table) -> Iterator[Hit]:
    called = {table.fqn[site] for site in table.pick(Kind.OUTPUT, phase=Phase.FORWARD)}
    for site in _running(table, "running_mean"):
        if table.fqn[site].rpartition(".")[0] not in called:
            continue
        column = table.column(site)
        rows = np.flatnonzero(column.layout >= 0)
        if len(rows) > REST and len(set(column.checksum[rows].tolist())) == 1:
            yield table.hit(site, column.steps[rows[0]], f"the same bits after each of {len(rows)} steps")


@rule(
    "batchnorm-drift",
    Level.WARNING,
    "BatchNorm statistics that do not settle",
    f"after {BURN_IN} steps, by the end, a running variance changes by a factor of {DRIFT_VARIANCE:g}, or a "
    f"running mean moves by {DRIFT_MEAN:g} running standard deviations",
    "activations that grow, data whose distribution changes, or a learning rate that is too high",
)
def batchnorm_drift(table: Table) -> Iterator[Hit]:
    long_enough = False
    for site in _running(table, "running_var"):
        steps, var = table.stat(site, "mean")
        owner = table.fqn[site].rpartition(".")[0]
        mean_site = table.site(Phase.OPTIMIZER, Kind.BUFFER, f"{owner}.running_mean")
        mean = table.stat(mean_site, "mean")[1] if mean_site is not None else np.zeros(0)
        after = int(np.searchsorted(steps, steps[0] + BURN_IN)) if len(steps) else 0
        if after >= len(steps) - REST:
            continue
        long_enough = True
        change = var[-1] / var[after] if var[after] > 0 else np.inf
        moved = abs(mean[-1] - mean[after]) / np.sqrt(max(var[after], 1e-12)) if len(mean) == len(var) else 0.0
        if change > DRIFT_VARIANCE or change < 1 / DRIFT_VARIANCE:
            where = f"from {var[after]:.3g} at step {steps[after]} to {var[-1]:.3g} at step {steps[-1]}"
            text = f"the running variance goes {where}"
            yield Hit(int(steps[after]), f"buffer {owner}.running_var", text)
        elif moved > DRIFT_MEAN:
            text = (
                f"the running mean moves by {moved:.1f} running deviations between steps {steps[after]} and {steps[-1]}"
            )
            yield Hit(int(steps[after]), f"buffer {owner}.running_mean", text)
    observed(long_enough, f"more than {BURN_IN + REST} steps of a BatchNorm")


RULES = (raw_inputs, repeated_batch, one_batch, batchnorm_frozen, batchnorm_drift)
