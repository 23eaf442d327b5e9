"""The noise of runs that should be equal: how far from run a they are, site by site."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.distance import Layouts, distances, relative
from introspect_cli.compare.join.sites import Alignment, Mask, of_kinds
from introspect_cli.compare.reach import ROUNDING_FACTOR, Reached, begins_beside
from introspect_cli.records import Kind

if TYPE_CHECKING:
    import numpy.typing as npt

    from introspect_cli.compare.table import Table

_SUMS = (Kind.LOSS, Kind.GRAD, Kind.OPTIMIZER_STATE)
_OF_A_SUM = 256**0.5 / ROUNDING_FACTOR
"""Roundings; with the factor by which a divergence must exceed the floor, those of a sum over 256: sqrt(n) u."""


class NoiseFloor:
    """What a run that should equal a differs from it by, per site of a, growing from step to step.

    Attributes:
        alignment: the sites of a and of that run.
        seed: of its `--perturb`, where that moved its initial parameters by one rounding; else None.
    """

    def __init__(self, alignment: Alignment, sites: int, seed: int | None = None) -> None:
        self.alignment = alignment
        self.seed = seed
        self.floor: npt.NDArray[np.float64] = np.zeros(sites)
        self.unmeasured: Mask = np.zeros(sites, dtype=np.bool_)

    def learn(self, table: Table, layouts_a: Layouts, layouts_n: Layouts, reached: Reached) -> None:
        """Take in one step of a noise run: `table` is run a against it."""
        distance, scale = distances(table.a, table.b, table.rows_a, table.rows_b, layouts_a, layouts_n)
        rel = relative(distance, scale)
        units = layouts_a.unit[np.asarray(table.a.layout)[table.rows_a]]
        if self.seed is not None and not begins_beside(table, rel, units):
            self.seed = None  # it is no run that begins a rounding beside a
        if self.seed is not None:
            reached.learn(table, distance, layouts_a)
        union = table.sites_a[table.rows_a]
        finite = np.isfinite(rel)
        np.maximum.at(self.floor, union[finite], np.maximum(rel[finite], np.finfo(np.float32).eps))
        self.unmeasured[union[~finite]] = True
        self.unmeasured[table.sites_a[table.only_a]] = True

    def of(self, table: Table, layouts_a: Layouts) -> npt.NDArray[np.float64]:
        """The floor of each differing row; where rounding is what is measured, no less than one of its dtype.

        A sum over samples is rounded in itself, whatever goes into it: there the least is more.
        """
        union = table.sites_a[table.rows_a]
        if self.seed is None:
            return np.asarray(self.floor[union])
        summed = of_kinds(table.alignment.kind[union], _SUMS)
        units = layouts_a.unit[np.asarray(table.a.layout)[table.rows_a]]
        return np.asarray(np.maximum(self.floor[union], np.where(summed, _OF_A_SUM, 1.0) * units))

    def within(self, table: Table, layouts_a: Layouts, rel: npt.NDArray[np.float64], factor: float) -> Mask:
        """Differing rows that do not stand out of the noise, by a factor; a perturbed run has one of its kind."""
        factor = factor if self.seed is None else ROUNDING_FACTOR
        union = table.sites_a[table.rows_a]
        floor = self.of(table, layouts_a)
        with np.errstate(invalid="ignore"):
            small = (floor > 0) & (rel <= factor * floor)
        return np.asarray(small | (self.unmeasured[union] & ~np.isfinite(rel)))
