"""The noise of runs that should be equal; how far rounding alone carries a training, and whether b stays within that.

A run that begins one rounding beside a (`capture --perturb`) differs from it, at each site and in each step, by what
this training makes of a rounding. A small fault shows against that measure where no fixed tolerance would fit both the
first layer and the last step. It is the method of TTrace, which perturbs by the machine's epsilon, with nothing of the
model modelled. A result is rounded itself, so less than one rounding of its dtype is no measure: where a loss came out
equal by luck, b may still be a rounding beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.terms.distance import Floats, Layouts, relative
from introspect_cli.compare.terms.findings import StepReach
from introspect_cli.compare.terms.sites import Alignment, Mask, kind_code, of_kinds, phase_code
from introspect_cli.compare.terms.words import what
from introspect_cli.records import Kind, Phase, perturbed_by
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.compare.terms.findings import Reach
    from introspect_cli.compare.terms.result import Divergence
    from introspect_cli.compare.terms.table import Learned, Table

ROUNDING_FACTOR = 6.0
"""How many times what a rounding does is let pass: two perturbed runs of one training are up to 4.3 times as far apart
at some site as a third is from them, and the faults of `benchmarks/perturb.py` that show at all begin at 9."""

_MAX_BEGIN = 4.0
"""Roundings; parameters that begin further from a's than this were not moved by one."""

_SUM_KINDS = (Kind.LOSS, Kind.GRAD, Kind.OPTIMIZER_STATE)
_SUM_ROUNDINGS = 256**0.5 / ROUNDING_FACTOR
"""Roundings; with the factor by which a divergence must exceed the floor, those of a sum over 256: sqrt(n) u."""


def with_reach(learned: Learned, table: Table, layouts: tuple[Layouts, Layouts], rounded: Sequence[Floats]) -> Learned:
    """`learned`, with `furthest` and `left` brought up to this step.

    By the site that is farthest relative to the noise of perturbed runs, among chosen DIFFERENT rows. `furthest` is
    replaced by a larger ratio; `left` is set once, by the first step with a ratio above ROUNDING_FACTOR. Unchanged
    without perturbed runs.

    Args:
        learned: what earlier steps have shown.
        table: the step.
        layouts: of a and of b.
        rounded: the floor of each DIFFERENT row, an array per perturbed run.
    """
    if not rounded or not len(table.differing):
        return learned
    with np.errstate(divide="ignore", invalid="ignore"):
        times = relative(*table.distances(layouts)) / np.maximum.reduce(list(rounded))
    times[~(np.isfinite(times) & table.chosen[table.differing])] = 0.0
    worst = int(np.argmax(times))
    site = table.named(int(table.differing[worst]))
    here = StepReach(table.step, float(times[worst]), site.fqn, what(site))
    left, furthest = learned.left, learned.furthest
    left = left or (here if here.times > ROUNDING_FACTOR else None)
    return learned._replace(left=left, furthest=here if furthest is None or here.times > furthest.times else furthest)


class NoiseFloor:
    """Largest relative distance of a noise run from a so far, per site of a.

    Attributes:
        alignment: the sites of a and of that run.
        seed: of its `--perturb`; None if it has none, or was found not to begin a rounding beside a.
        floor: float64 (sites of a,), the distances.
        unmeasured: bool (sites of a,), whether the run differed by an unknown distance, or lacked the site.
    """

    def __init__(self, alignment: Alignment, sites: int, seed: int | None = None) -> None:
        """Begin with a floor of 0 everywhere; `learn` raises it.

        Args:
            alignment: the sites of a and of the noise run.
            sites: number of sites of a.
            seed: of the run's `--perturb`; None where it is not perturbed.
        """
        self.alignment = alignment
        self.seed = seed
        self.floor: Floats = np.zeros(sites)
        self.unmeasured: Mask = np.zeros(sites, dtype=np.bool_)

    def learn(self, table: Table, layouts_a: Layouts, layouts_n: Layouts) -> None:
        """Raise the floor by one step, to at least float32's epsilon for each differing site.

        Sets `seed` to None if the parameters at the start are too far apart for a run perturbed by a rounding.

        Args:
            table: the step of a and of the noise run.
            layouts_a: of a.
            layouts_n: of the noise run.
        """
        rel, union = relative(*table.distances((layouts_a, layouts_n))), table.differing_sites
        if self.seed is not None and not _begins_beside(table, rel, _rounding_units(table, layouts_a)):
            self.seed = None  # it is no run that begins a rounding beside a
        finite = np.isfinite(rel)
        np.maximum.at(self.floor, union[finite], np.maximum(rel[finite], np.finfo(np.float32).eps))
        self.unmeasured[union[~finite]] = True
        self.unmeasured[table.sites_a[table.only_a]] = True

    def of(self, table: Table, layouts_a: Layouts) -> Floats:
        """Floor of each DIFFERENT row of a step of a and b, float64 (rows,).

        For a perturbed run at least one rounding of a's dtype; of losses, gradients and states, that of a sum of 256
        terms.
        """
        floor = np.asarray(self.floor[table.differing_sites])
        if self.seed is None:
            return floor
        least = np.where(of_kinds(table.kinds, _SUM_KINDS), _SUM_ROUNDINGS, 1.0) * _rounding_units(table, layouts_a)
        return np.asarray(np.maximum(floor, least))

    def within(self, table: Table, layouts_a: Layouts, rel: Floats, factor: float) -> Mask:
        """Mask of DIFFERENT rows that this noise explains.

        Those with a floor above 0 and a distance of at most `factor` times it; and those of unknown distance whose site
        the noise run could not be measured at.

        Args:
            table: a step of a and b.
            layouts_a: of a.
            rel: relative distance of each DIFFERENT row; NaN where unknown.
            factor: replaced by ROUNDING_FACTOR for a perturbed run.
        """
        factor = factor if self.seed is None else ROUNDING_FACTOR
        floor = self.of(table, layouts_a)
        with np.errstate(invalid="ignore"):
            small = (floor > 0) & (rel <= factor * floor)
        return np.asarray(small | (self.unmeasured[table.differing_sites] & ~np.isfinite(rel)))


def _rounding_units(table: Table, layouts: Layouts) -> Floats:
    """Unit roundoff of a's dtype for each DIFFERENT row, float64 (rows,); 0 for dtypes without rounding."""
    return np.asarray(layouts.unit[table.a.layout[table.rows_a]])


def _begins_beside(table: Table, rel: Floats, units: Floats) -> bool:
    """Whether every differing parameter at the start is at most `_MAX_BEGIN` roundings away from a's.

    Args:
        table: a step of a and the noise run.
        rel: relative distance of each DIFFERENT row.
        units: rounding unit of each DIFFERENT row.
    """
    alignment, sites = table.alignment, table.differing_sites
    start = (table.kinds == kind_code(Kind.PARAM)) & (alignment.phase[sites] == phase_code(Phase.START))
    return bool((rel[start] <= _MAX_BEGIN * units[start]).all())


def within_words(reach: Reach) -> str:
    """Clause that b stays within the noise of perturbed runs, over how many steps, and its largest ratio to that."""
    far, over = reach.furthest, f"over {count(reach.measured, 'step')}"
    if reach.measured < reach.compared:
        over = f"over the {reach.measured:,} of {reach.compared:,} steps that are on record of the perturbed run"
    near = f" (at most {far.times:.2g} x as far, at step {far.step})" if far is not None else ""
    return f"b stays within what one rounding of the parameters does to a, {over}{near}"


def leaves_words(reach: Reach, first: Divergence) -> str:
    """Sentence, with a blank after it, on the step and module at which b exceeds the noise of perturbed runs.

    It has the ratio too. Module and ratio are those of `first`, the first divergence, if it lies in that step. "" where
    b never exceeds the noise.
    """
    at = reach.left
    if at is None:
        return ""
    fqn, times = at.fqn, at.times
    if first.step == at.step and first.rel_l2 and first.floor:
        fqn, times = first.site.fqn, first.rel_l2 / first.floor
    where = f" in {fqn}" if fqn else ""
    return f"b leaves what one rounding of the parameters does to a at step {at.step}{where}, {times:.2g} x as far. "


def measured_by_one(reach: Reach) -> str:
    """Note that a single perturbed run measured the noise that b exceeds.

    "" if several did, or b does not exceed it.
    """
    if len(reach.seeds) > 1 or reach.left is None:
        return ""
    return (
        "One perturbed run measured what a rounding does. Where units switch (ReLU, a maximum) or sums cancel (a "
        "convolution before a BatchNorm), other seeds may go further: give three or four of them as --noise."
    )


def perturbed_notes(manifest_a: dict[str, Any], manifest_b: dict[str, Any], *, foreign: bool) -> list[str]:
    """Notes on perturbed runs: one for each of a and b that is one, and one if `foreign`.

    Args:
        manifest_a: of run a.
        manifest_b: of run b.
        foreign: whether any perturbed run given as noise does not begin a rounding beside a.
    """
    seeds = (("a", perturbed_by(manifest_a)), ("b", perturbed_by(manifest_b)))
    notes = [
        f"Run {name} is not an ordinary run: its initial parameters were moved by one rounding (--perturb {seed})."
        for name, seed in seeds
        if seed is not None
    ]
    if foreign:
        notes.append(
            "A perturbed run given as --noise does not begin one rounding away from a: it counts as ordinary noise and "
            "does not show what rounding alone does to a."
        )
    return notes


def furthest_of(reaches: Iterable[Reach | None]) -> Reach | None:
    """The reach whose `furthest` has the largest ratio, the first of equals; None if there is no reach."""
    every = [reach for reach in reaches if reach is not None]
    return max(every, key=lambda reach: reach.furthest.times if reach.furthest is not None else 0.0, default=None)
