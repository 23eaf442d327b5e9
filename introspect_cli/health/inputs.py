"""What goes in: inputs that are not normalised, batches that come twice, and BatchNorm's idea of both."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.health.findings import Level
from introspect_cli.health.rule import Answer, Hit, Rule, Unseen
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
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


def find_raw_inputs(table: Table) -> Answer:
    """Float inputs of a model that are far from mean 0 and variance 1."""
    with_parameters = {module.fqn.partition(".")[0] for module in table.modules if module.parameters}
    sites = [
        site
        for site in table.pick(Kind.INPUT, phase=Phase.FORWARD)
        if "." not in table.fqn[site]
        and table.fqn[site] in with_parameters
        and (layout := table.layout(site)) is not None
        and layout.dtype.startswith(("float", "bfloat"))
        and layout.numel > 1
    ]
    if not sites:
        return Unseen("a float input of a model")
    hits = []
    for site in sites:
        steps, (mean, var) = table.stats(site, "mean", "var")
        rms = np.sqrt(var + mean * mean)
        raw = (rms > LARGE) | ((np.abs(mean) > OFFSET * np.sqrt(var)) & (var > 0) & (np.abs(mean) > 1))
        if len(raw) and raw.mean() >= OFTEN:
            at = int(np.argmax(raw))
            text = f"mean {mean[at]:.4g} and standard deviation {np.sqrt(var[at]):.4g} at step {steps[at]}"
            hits.append(Hit(int(steps[at]), table.name(site), text))
    return hits


class _Batch(NamedTuple):
    """One batch.

    Attributes:
        step: that it was drawn in.
        marks: checksums of all its tensors.
        samples: how many, by its largest tensor.
    """

    step: int
    marks: tuple[int, ...]
    samples: int


def _batches(table: Table) -> dict[str, list[_Batch]]:
    """Every loader's batches, in order."""
    columns = table.few
    groups: dict[tuple[str, int], list[int]] = {}
    for site in table.pick(Kind.BATCH, phase=Phase.DATA):
        groups.setdefault((table.fqn[site], table.call[site]), []).append(site)
    found: dict[str, list[_Batch]] = {}
    for row, step in enumerate(columns.steps):
        for (loader, _), sites in sorted(groups.items()):
            places = [columns.place[site] for site in sites]
            own = [place for place in places if columns.layout[row, place] >= 0]
            if not own:
                continue
            layouts = [table.layouts[int(columns.layout[row, place])] for place in own]
            largest = max(layouts, key=lambda layout: layout.numel)
            marks = tuple(int(columns.checksum[row, place]) for place in own)
            samples = largest.shape[0] if largest.shape else 1
            found.setdefault(loader, []).append(_Batch(int(step), marks, samples))
    return found


def find_repeated_batch(table: Table) -> Answer:
    """A loader that yields the very same batch twice in a row, and other batches too."""
    batches = _batches(table)
    if not batches:
        return Unseen("batches of a DataLoader")
    hits = []
    for loader, own in batches.items():
        if len({batch.marks for batch in own}) < 2:
            continue
        twice = [(one, two) for one, two in pairwise(own) if one.marks == two.marks and one.samples > 1]
        if twice:
            before, after = twice[0]
            times = f", and {len(twice) - 1} more times" if len(twice) > 1 else ""
            text = f"the batch of step {after.step} is the one of step {before.step} again, bit for bit{times}"
            hits.append(Hit(after.step, loader, text))
    return hits


def find_one_batch(table: Table) -> Answer:
    """A loader that only ever yields one batch."""
    batches = _batches(table)
    if not batches:
        return Unseen("batches of a DataLoader")
    hits = []
    for loader, own in batches.items():
        if len(own) >= REST and len({batch.marks for batch in own}) == 1:
            hits.append(Hit(own[0].step, loader, f"all {len(own)} batches are the same, bit for bit"))
    return hits


def _running(table: Table, name: str) -> list[int]:
    return [
        site
        for site in table.pick(Kind.BUFFER, phase=Phase.OPTIMIZER)
        if table.fqn[site].endswith(f".{name}") and "Norm" in table.module_class[site]
    ]


def find_frozen_statistics(table: Table) -> Answer:
    """BatchNorm statistics that stay as they are while the model trains."""
    sites = _running(table, "running_mean")
    if not sites:
        return Unseen("running statistics of a BatchNorm")
    called = {table.fqn[site] for site in table.pick(Kind.OUTPUT, phase=Phase.FORWARD)}
    hits = []
    for site in sites:
        if table.fqn[site].rpartition(".")[0] not in called:
            continue
        columns, place = table.columns(site)
        rows = np.flatnonzero(columns.layout[:, place] >= 0)
        if len(rows) > REST and len(set(columns.checksum[rows, place].tolist())) == 1:
            text = f"the same bits after each of {len(rows)} steps"
            hits.append(Hit(int(columns.steps[rows[0]]), table.name(site), text))
    return hits


def find_drifting_statistics(table: Table) -> Answer:
    """BatchNorm statistics that have not settled long after they should have."""
    sites = _running(table, "running_var")
    if not sites:
        return Unseen("running statistics of a BatchNorm")
    hits = []
    long_enough = False
    for site in sites:
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
            hits.append(Hit(int(steps[after]), f"buffer {owner}.running_var", text))
        elif moved > DRIFT_MEAN:
            text = (
                f"the running mean moves by {moved:.1f} running deviations between steps {steps[after]} and {steps[-1]}"
            )
            hits.append(Hit(int(steps[after]), f"buffer {owner}.running_mean", text))
    return hits if long_enough else Unseen(f"more than {BURN_IN + REST} steps of a BatchNorm")


RULES = (
    Rule(
        "raw-inputs",
        Level.WARNING,
        "inputs far from mean 0 and variance 1",
        f"in {OFTEN:.0%} of the steps or more, a model's float input has a root mean square above {LARGE:g}, or a "
        f"mean over one and more than {OFFSET:g} standard deviations from zero (LeCun and others, Efficient "
        "BackProp, 1998)",
        "a missing normalisation of the data",
        find_raw_inputs,
    ),
    Rule(
        "repeated-batch",
        Level.WARNING,
        "the same batch twice in a row",
        "a loader yields a batch twice in a row, and other batches too; batches of one sample do not count",
        "an iterator that is not advanced, workers with one seed, or a sampler that repeats itself",
        find_repeated_batch,
    ),
    Rule(
        "one-batch",
        Level.INFO,
        "a loader that yields one batch only",
        f"a loader yields one and the same batch {REST} times or more and no other",
        "full-batch training, or a data set cut down to try something",
        find_one_batch,
    ),
    Rule(
        "batchnorm-frozen",
        Level.WARNING,
        "BatchNorm statistics that never change in training",
        f"running statistics keep their bits over more than {REST} steps in which the module ran in training",
        "a model left in eval mode, a momentum of 0, or statistics frozen on purpose",
        find_frozen_statistics,
    ),
    Rule(
        "batchnorm-drift",
        Level.WARNING,
        "BatchNorm statistics that do not settle",
        f"after {BURN_IN} steps, by the end, a running variance changes by a factor of {DRIFT_VARIANCE:g}, or a "
        f"running mean moves by {DRIFT_MEAN:g} running standard deviations",
        "activations that grow, data whose distribution changes, or a learning rate that is too high",
        find_drifting_statistics,
    ),
)
