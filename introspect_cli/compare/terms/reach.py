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
    """`learned` with the step's largest ratio of distance to perturbed noise, and the first over ROUNDING_FACTOR."""
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
        seed: of its `--perturb`, where that moved its initial parameters by one rounding; else None.
    """

    def __init__(self, alignment: Alignment, sites: int, seed: int | None = None) -> None:
        """Take the sites of a and the noise run, the number of those of a, and the seed of its `--perturb`."""
        self.alignment = alignment
        self.seed = seed
        self.floor: Floats = np.zeros(sites)
        self.unmeasured: Mask = np.zeros(sites, dtype=np.bool_)

    def learn(self, table: Table, layouts_a: Layouts, layouts_n: Layouts) -> None:
        """Raise the floor by one step; `table` compares a with the noise run."""
        rel, union = relative(*table.distances((layouts_a, layouts_n))), table.unions
        if self.seed is not None and not _begins_beside(table, rel, _units(table, layouts_a)):
            self.seed = None  # it is no run that begins a rounding beside a
        finite = np.isfinite(rel)
        np.maximum.at(self.floor, union[finite], np.maximum(rel[finite], np.finfo(np.float32).eps))
        self.unmeasured[union[~finite]] = True
        self.unmeasured[table.sites_a[table.only_a]] = True

    def of(self, table: Table, layouts_a: Layouts) -> Floats:
        """Floor of each differing row; for a perturbed run at least one rounding of the dtype.

        Losses, gradients and states: at least the rounding of a sum over 256 terms.
        """
        floor = np.asarray(self.floor[table.unions])
        if self.seed is None:
            return floor
        least = np.where(of_kinds(table.kinds, _SUM_KINDS), _SUM_ROUNDINGS, 1.0) * _units(table, layouts_a)
        return np.asarray(np.maximum(floor, least))

    def within(self, table: Table, layouts_a: Layouts, rel: Floats, factor: float) -> Mask:
        """Mask of rows with `rel` at most `factor` times the floor; a perturbed run uses ROUNDING_FACTOR."""
        factor = factor if self.seed is None else ROUNDING_FACTOR
        floor = self.of(table, layouts_a)
        with np.errstate(invalid="ignore"):
            small = (floor > 0) & (rel <= factor * floor)
        return np.asarray(small | (self.unmeasured[table.unions] & ~np.isfinite(rel)))


def _units(table: Table, layouts: Layouts) -> Floats:
    """Rounding unit of a's dtype for each DIFFERENT row."""
    return np.asarray(layouts.unit[table.a.layout[table.rows_a]])


def _begins_beside(table: Table, rel: Floats, units: Floats) -> bool:
    """Whether all start parameters are within `_MAX_BEGIN` roundings of a's."""
    alignment, sites = table.alignment, table.unions
    start = (table.kinds == kind_code(Kind.PARAM)) & (alignment.phase[sites] == phase_code(Phase.START))
    return bool((rel[start] <= _MAX_BEGIN * units[start]).all())


def within_words(reach: Reach) -> str:
    """Clause that b stays within the perturbed noise, over how many steps, and the largest ratio."""
    far, over = reach.furthest, f"over {count(reach.measured, 'step')}"
    if reach.measured < reach.compared:
        over = f"over the {reach.measured:,} of {reach.compared:,} steps that are on record of the perturbed run"
    near = f" (at most {far.times:.2g} x as far, at step {far.step})" if far is not None else ""
    return f"b stays within what one rounding of the parameters does to a, {over}{near}"


def leaves_words(reach: Reach, first: Divergence) -> str:
    """Sentence, with a space after it, on the step and module at which b exceeds the perturbed noise, and how far.

    Module and factor are those of `first` where it lies in that step. "" where b never exceeds the noise.
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
    """Note that a single perturbed run measured the noise b exceeded; "" otherwise."""
    if len(reach.seeds) > 1 or reach.left is None:
        return ""
    return (
        "One perturbed run measured what a rounding does. Where units switch (ReLU, a maximum) or sums cancel (a "
        "convolution before a BatchNorm), other seeds may go further: give three or four of them as --noise."
    )


def perturbed_notes(manifest_a: dict[str, Any], manifest_b: dict[str, Any], *, foreign: bool) -> list[str]:
    """Notes on perturbed runs; `foreign`: one given as noise does not start a rounding beside a."""
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
    """The reach with the largest ratio; None without any."""
    every = [reach for reach in reaches if reach is not None]
    return max(every, key=lambda reach: reach.furthest.times if reach.furthest is not None else 0.0, default=None)
