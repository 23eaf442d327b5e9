"""The third and fourth pass: what ranks or microbatches share out as one, and which differences are let pass.

What they share out is compared as the whole that it is. Where the samples of both runs are equal, whichever rank has
which, so are the records; of other values that were gathered from several ranks, extrema and means are compared, and no
more is claimed. Then differences pass that are small enough by a stated tolerance, or by measured noise.

A tolerance is put to the root-mean-square difference of two tensors: RMS(a - b) <= atol + rtol * max(RMS(a), RMS(b)).
Noise is measured: runs that should equal a, compared with it, give each site a floor, the largest relative distance
seen there up to this step, and a divergence counts where it exceeds the floor by a factor. Integers, random states
and shapes tolerate nothing; NaNs and infinities must be as many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.terms.distance import ROUNDING, Floats, relative, same_nonfinite
from introspect_cli.compare.terms.sites import Ids, Mask, kind_code, of_kinds
from introspect_cli.compare.terms.table import EQUAL, WITHIN, Table
from introspect_cli.records import Kind, Status

if TYPE_CHECKING:
    from introspect_cli.compare.passes.learned import Learned
    from introspect_cli.compare.step.comparison import Comparison
    from introspect_cli.compare.terms.options import DiffOptions


_VALUE = int(Status.VALUE)
_COMPUTED = (
    Kind.OUTPUT, Kind.OP_OUTPUT, Kind.LOSS, Kind.GRAD_OUTPUT, Kind.GRAD_INPUT, Kind.GRAD, Kind.PARAM,
    Kind.OPTIMIZER_STATE,
)  # fmt: skip


def combine(table: Table, learned: Learned, comparison: Comparison) -> tuple[Table, Learned]:
    """The table in which what was gathered from several ranks is equal by its samples, or agrees by its extrema."""
    gathered = comparison.gathered
    if gathered is None:
        return table, learned
    same = gathered.same_samples(table)
    exact = table.rows_a[same & table.chosen[table.differing]]
    table = table.marked(table.differing[same], EQUAL)
    learned = gathered.learn(table, learned)
    learned = learned._replace(exact=learned.exact.union((table.step, int(table.a.site[row])) for row in exact))
    if len(table.differing):
        agree = gathered.agree(table, relative_tolerance(table, learned, comparison), learned)
        table = table.marked(table.differing[agree & gathered.of_one_dtype(table)], WITHIN)
    return table, learned


def tolerate(table: Table, learned: Learned, comparison: Comparison) -> tuple[Table, Learned]:
    """The table in which differences that tolerance or noise lets pass are within it."""
    options = comparison.options
    rounded = [floor.of(table, comparison.layouts[0]) for floor in comparison.floors if floor.seed is not None]
    comparison.reached.see(table, comparison.layouts, rounded)
    after = learned
    if options.rtol_fine and (_may_be_coarse(table, comparison) or _first_coarse(table, comparison)[0] < np.inf):
        after = learned._replace(coarse=table.step if learned.coarse is None else min(learned.coarse, table.step))
    if len(table.differing) and options.tolerant:
        near = _within_tolerance(table, learned, comparison)
        if comparison.gathered is not None:
            near &= comparison.gathered.of_one_dtype(table)
        table = table.marked(table.differing[near], WITHIN)
    if len(table.differing) and comparison.floors:
        rel, factor = relative(*table.distances(comparison.layouts)), options.noise_factor
        passes = [floor.within(table, comparison.layouts[0], rel, factor) for floor in comparison.floors]
        table = table.marked(table.differing[np.logical_or.reduce(passes)], WITHIN)
    return table, after


def _close_values(table: Table, rows: Ids, options: DiffOptions) -> Mask:
    """Plain numbers within tolerance, by their text."""
    close = np.zeros(len(rows), dtype=np.bool_)
    for index, place in enumerate(rows):
        try:
            a, b = float(table.a.text[table.rows_a[place]]), float(table.b.text[table.rows_b[place]])
        except (ValueError, OverflowError):
            continue
        close[index] = a == b or abs(a - b) <= options.atol + options.rtol * max(abs(a), abs(b))
    return close


def relative_tolerance(table: Table, learned: Learned, comparison: Comparison) -> Floats:
    """What --rtol is for each differing row.

    The tolerance that layouts get by themselves follows dtypes: what both runs computed in bfloat16 or float16, and all
    that was recorded after that, is rounded so; what came before that is not. Training rests on no evaluation.
    """
    options, rows = comparison.options, table.differing
    out = np.full(len(rows), options.rtol)
    if not options.rtol_fine:
        return out
    trained, evaluated = _first_coarse(table, comparison)
    if _may_be_coarse(table, comparison) or (learned.coarse is not None and learned.coarse < table.step):
        trained = evaluated = -np.inf
    first = np.where(table.alignment.evaluating[table.site[rows]], min(trained, evaluated), trained)
    out[table.order[rows] < first] = options.rtol_fine
    return out


def _may_be_coarse(table: Table, comparison: Comparison) -> bool:
    """Whether a step may begin with what was rounded so, as the step before is not on record."""
    return any(at and at - 1 not in run for at, run in ((table.step, comparison.a), (table.step_b, comparison.b)))


def _first_coarse(table: Table, comparison: Comparison) -> tuple[float, float]:
    """When both runs first compute in bfloat16 or float16 in training, and in evaluation; infinity for never."""
    both = np.flatnonzero((table.row_a >= 0) & (table.row_b >= 0))
    half = of_kinds(table.alignment.kind[table.site[both]], _COMPUTED)
    for batch, rows, layouts in zip((table.a, table.b), (table.row_a, table.row_b), comparison.layouts, strict=True):
        half &= layouts.unit[batch.layout[rows[both]]] >= ROUNDING["float16"]
    coarse = both[half]
    evaluates = table.alignment.evaluating[table.site[coarse]]
    order = table.order[coarse]
    return float(order[~evaluates].min(initial=np.inf)), float(order[evaluates].min(initial=np.inf))


def _within_tolerance(table: Table, learned: Learned, comparison: Comparison) -> Mask:
    """Differing rows that --rtol and --atol let pass."""
    options, (layouts_a, layouts_b) = comparison.options, comparison.layouts
    rows_a, rows_b = table.rows_a, table.rows_b
    distance, scale = table.distances(comparison.layouts)
    layout_a, layout_b = table.a.layout[rows_a], table.b.layout[rows_b]
    root = np.sqrt(np.maximum(layouts_a.numel[layout_a], 1.0))
    with np.errstate(invalid="ignore"):
        passes = distance / root <= options.atol + relative_tolerance(table, learned, comparison) * scale / root
    passes &= layouts_a.floating[layout_a] & layouts_b.floating[layout_b]
    passes &= same_nonfinite(table.a, table.b, rows_a, rows_b)
    passes &= table.kinds != kind_code(Kind.RNG)
    status_a, status_b = table.a.status[rows_a], table.b.status[rows_b]
    plain = (status_a == _VALUE) | (status_b == _VALUE)
    passes &= ~plain
    both = np.flatnonzero((status_a == _VALUE) & (status_b == _VALUE))
    passes[both] = _close_values(table, both, options)
    return np.asarray(passes)
