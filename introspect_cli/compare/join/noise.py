"""Which differences are small enough to let pass, by a stated tolerance or by measured noise.

A tolerance is put to the root-mean-square difference of two tensors: RMS(a - b) <= atol + rtol * max(RMS(a), RMS(b)).
Noise is measured: runs that should equal a, compared with it, give each site a floor, the largest relative distance
seen there up to this step, and a divergence counts where it exceeds the floor by a factor. Integers, random states
and shapes tolerate nothing; NaNs and infinities must be as many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from introspect_cli.compare.join.distance import Layouts, distances, relative, same_nonfinite
from introspect_cli.compare.join.sites import Alignment, Ids, Mask, kind_code
from introspect_cli.records import Kind, Status

if TYPE_CHECKING:
    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.options import DiffOptions

_VALUE = int(Status.VALUE)


def keep_rows(pair: StepPair, keep: Mask) -> StepPair:
    """The step with only some of its differing rows; the others count as within tolerance."""
    within = np.concatenate([pair.within_a, pair.rows_a[~keep]])
    return replace(pair, rows_a=pair.rows_a[keep], rows_b=pair.rows_b[keep], within_a=within)


def _close_values(pair: StepPair, rows: Ids, options: DiffOptions) -> Mask:
    """Plain numbers within tolerance, by their text."""
    close = np.zeros(len(rows), dtype=np.bool_)
    for index, place in enumerate(rows):
        try:
            a, b = float(pair.a.text[pair.rows_a[place]]), float(pair.b.text[pair.rows_b[place]])
        except (ValueError, OverflowError):
            continue
        close[index] = a == b or abs(a - b) <= options.atol + options.rtol * max(abs(a), abs(b))
    return close


def within_tolerance(
    alignment: Alignment, pair: StepPair, options: DiffOptions, layouts_a: Layouts, layouts_b: Layouts
) -> Mask:
    """Differing rows that --rtol and --atol let pass."""
    rows_a, rows_b = pair.rows_a, pair.rows_b
    apart, scale = distances(pair.a, pair.b, rows_a, rows_b, layouts_a, layouts_b)
    layout_a, layout_b = np.asarray(pair.a.layout)[rows_a], np.asarray(pair.b.layout)[rows_b]
    root = np.sqrt(np.maximum(layouts_a.numel[layout_a], 1.0))
    with np.errstate(invalid="ignore"):
        passes = apart / root <= options.atol + options.rtol * scale / root
    passes &= layouts_a.floating[layout_a] & layouts_b.floating[layout_b]
    passes &= same_nonfinite(pair.a, pair.b, rows_a, rows_b)
    passes &= alignment.kind[np.asarray(pair.a.site)[rows_a]] != kind_code(Kind.RNG)
    status_a, status_b = np.asarray(pair.a.status)[rows_a], np.asarray(pair.b.status)[rows_b]
    plain = (status_a == _VALUE) | (status_b == _VALUE)
    passes &= ~plain
    both = np.flatnonzero((status_a == _VALUE) & (status_b == _VALUE))
    passes[both] = _close_values(pair, both, options)
    return np.asarray(passes)


class NoiseFloor:
    """What repeated runs of a differ by, per site of a, growing from step to step."""

    def __init__(self, alignment: Alignment, sites: int) -> None:
        self.alignment = alignment
        self.floor: npt.NDArray[np.float64] = np.zeros(sites)
        self.unmeasured: Mask = np.zeros(sites, dtype=np.bool_)

    def learn(self, pair: StepPair, layouts_a: Layouts, layouts_n: Layouts) -> None:
        """Take in one step of a noise run: `pair` is run a against it."""
        apart, scale = distances(pair.a, pair.b, pair.rows_a, pair.rows_b, layouts_a, layouts_n)
        rel = relative(apart, scale)
        union = np.asarray(pair.a.site)[pair.rows_a]
        known = np.isfinite(rel)
        np.maximum.at(self.floor, union[known], np.maximum(rel[known], np.finfo(np.float32).eps))
        self.unmeasured[union[~known]] = True
        self.unmeasured[np.asarray(pair.a.site)[pair.only_a]] = True

    def within(self, pair: StepPair, rel: npt.NDArray[np.float64], factor: float) -> Mask:
        """Differing rows that do not stand out of the noise."""
        union = np.asarray(pair.a.site)[pair.rows_a]
        floor = self.floor[union]
        with np.errstate(invalid="ignore"):
            small = (floor > 0) & (rel <= factor * floor)
        return np.asarray(small | (self.unmeasured[union] & ~np.isfinite(rel)))


def relative_rows(pair: StepPair, layouts_a: Layouts, layouts_b: Layouts) -> npt.NDArray[np.float64]:
    """Relative distance of every differing row."""
    apart, scale = distances(pair.a, pair.b, pair.rows_a, pair.rows_b, layouts_a, layouts_b)
    return relative(apart, scale)
