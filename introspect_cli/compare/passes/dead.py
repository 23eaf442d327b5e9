"""The pass of differences on which nothing recorded rests: they are told, and are no divergence.

A mask is a tensor of numbers for one implementation and one of truths for another; a scaler multiplies a loss and
divides the gradients again; a loader reads a batch before it is needed; samples are padded to another length; a
gradient is sparse in one run alone. Only what comes of such a value says whether it is another one. So a record that
differs is *dead* where all that rests on it is on record in both runs, and agrees:

- on a batch, what outermost modules are given, and the losses, unless one run alone read it, or more of it;
- on an input of another form, the outputs of its call, which may be rounded otherwise;
- on a gradient that is sparse in one run alone, what the optimizer leaves of its parameter;
- on gradients on their way back, the gradients that the optimizer takes, and what it leaves; so on a loss that is one
  multiple of the other's, as each gradient on its way back is;
- on what has another shape on its way, where a batch is cut differently: the same, and the losses.

What was not recorded is never taken to agree.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.step.size import LEAST_BOUND
from introspect_cli.compare.terms.distance import distances, relative
from introspect_cli.compare.terms.sites import of_kinds, phase_code
from introspect_cli.compare.terms.table import ABSENT, DEAD, DIFFERENT, EQUAL, WITHIN, Because, Table
from introspect_cli.compare.terms.words import what
from introspect_cli.records import Kind, Phase
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.step.comparison import Comparison
    from introspect_cli.compare.terms.sites import Ids, Mask
    from introspect_cli.records import Layout

_BACK = (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT)


def dead(table: Table, comparison: Comparison) -> Table:
    """The table in which differences on which nothing recorded rests are dead."""
    if comparison.options.strict or not table.diverging.any():
        return table
    for edge in (_sparse, _back, _inputs, _batches):
        rows = edge(table, comparison)
        alone = table.one_sided[rows]
        table = table.marked(rows[~alone], DEAD, Because.DEAD).marked(rows[alone], ABSENT, Because.DEAD)
    return table


def _of(table: Table, *kinds: Kind, phase: Phase | None = None) -> Mask:
    """The rows of some kinds, in a phase or in all."""
    alignment, sites = table.alignment, table.site
    mask = of_kinds(alignment.kind[sites], kinds)
    return mask if phase is None else mask & (alignment.phase[sites] == phase_code(phase))


def _agree(table: Table, rows: Ids | Mask) -> bool:
    """Whether there are rows, each on record in both runs, and none differs."""
    states = table.state[rows]
    return bool(len(states) and np.isin(states, (EQUAL, WITHIN, DEAD)).all())


def _names(table: Table, rows: Ids) -> list[str]:
    return [table.alignment.fqn[site] for site in table.site[rows].tolist()]


def _layouts(table: Table, rows: Ids, comparison: Comparison, name: str) -> tuple[Ids, Ids]:
    """What a lookup table over layouts says of rows that both runs have."""
    one, two = (getattr(layouts, name) for layouts in comparison.layouts)
    return one[table.a.layout[table.row_a[rows]]], two[table.b.layout[table.row_b[rows]]]


# --- what rests on what


def _sparse(table: Table, comparison: Comparison) -> Ids:
    """Gradients that are sparse in one run alone, and of which both optimizers make the same."""
    rows = np.flatnonzero(_of(table, Kind.GRAD, phase=Phase.OPTIMIZER) & (table.state == DIFFERENT))
    rows = rows[np.not_equal(*_layouts(table, rows, comparison, "stored"))]
    after: dict[str, list[int]] = defaultdict(list)
    left = np.flatnonzero(_of(table, Kind.PARAM, Kind.OPTIMIZER_STATE, phase=Phase.OPTIMIZER)) if len(rows) else rows
    for row, name in zip(left.tolist(), _names(table, left), strict=True):
        after[name].append(row)
    same = [_agree(table, np.array(after[name], np.int64)) for name in _names(table, rows)]
    return rows[np.array(same, np.bool_)]


def _back(table: Table, comparison: Comparison) -> Ids:
    """The backward pass, where the optimizer takes the same gradients in both runs and leaves the same."""
    differ = table.state == DIFFERENT
    taken = _of(table, Kind.GRAD, phase=Phase.OPTIMIZER)
    left = _of(table, Kind.PARAM, Kind.OPTIMIZER_STATE, Kind.GRAD, phase=Phase.OPTIMIZER)
    if not _agree(table, taken) or (table.diverging & left).any():
        return np.empty(0, np.int64)
    back, losses = differ & _of(table, *_BACK, phase=Phase.BACKWARD), _of(table, Kind.LOSS)
    scaled = np.flatnonzero(differ & (losses | back))
    if (differ & losses).any():
        times = factor_of(table, scaled, comparison.options.rtol * bool(back.any()))
        if not np.isfinite(times) or (_of(table, *_BACK).any() and not back.any()):
            return np.empty(0, np.int64)
    if comparison.splits is None or not comparison.splits.differ:
        return scaled
    flowing = np.flatnonzero(differ & _of(table, Kind.BATCH, Kind.INPUT, Kind.OUTPUT, *_BACK))
    other = np.not_equal(*_amounts(table, flowing, comparison))
    return np.union1d(scaled, flowing[other] if (losses & ~differ).any() else flowing[:0])


def _amounts(table: Table, rows: Ids, comparison: Comparison) -> tuple[Ids, Ids]:
    """How many elements both runs have of some rows; all calls together, where these were put together."""
    one, two = _layouts(table, rows, comparison, "numel")
    for numel, batch, of_run in ((one, table.a, table.row_a), (two, table.b, table.row_b)):
        if batch.elements is not None:
            known = np.asarray(batch.elements)[of_run[rows]]
            np.copyto(numel, known, where=known >= 0)
    return one, two


def _inputs(table: Table, comparison: Comparison) -> Ids:
    """Inputs of another dtype or shape whose call gives the same."""
    rows = np.flatnonzero(_of(table, Kind.INPUT) & (table.state == DIFFERENT))
    form = np.not_equal(*_layouts(table, rows, comparison, "shape"))
    form |= np.not_equal(*_layouts(table, rows, comparison, "floating"))
    rows, alignment = rows[form], table.alignment

    def rests(row: int) -> Ids:
        site = int(table.site[row])
        call = (alignment.call == alignment.call[site]) & (alignment.phase == alignment.phase[site])
        names = np.isin(table.site, alignment.by_fqn[alignment.fqn[site]])
        return np.flatnonzero(names & call[table.site] & _of(table, Kind.OUTPUT) & ~table.one_sided)

    same = [_agree(table, outputs) or _rounded(table, outputs, comparison) for outputs in map(rests, rows.tolist())]
    return rows[np.array(same, np.bool_)]


def _rounded(table: Table, rows: Ids, comparison: Comparison) -> bool:
    """Whether both runs have all of these rows, which agree or differ by no more than rounding."""
    if not len(rows) or not np.isin(table.state[rows], (EQUAL, WITHIN, DIFFERENT)).all():
        return False
    rows = rows[table.state[rows] == DIFFERENT]
    rel = relative(*distances(table.a, table.b, table.row_a[rows], table.row_b[rows], *comparison.layouts))
    one, two = _layouts(table, rows, comparison, "unit")
    return bool((one == two).all() and (rel <= LEAST_BOUND * one).all())


def _batches(table: Table, comparison: Comparison) -> Ids:
    """Batches of which the models are given the same, and whose losses agree."""
    rows = np.flatnonzero(_of(table, Kind.BATCH, phase=Phase.DATA) & table.diverging)
    given = np.flatnonzero(_of(table, Kind.INPUT, phase=Phase.FORWARD)) if len(rows) else rows
    given = given[["." not in name for name in _names(table, given)]] if len(given) else given
    losses = np.flatnonzero(_of(table, Kind.LOSS))
    if not _agree(table, given):
        return rows[:0]
    if Kind.LOSS in comparison.kinds and _agree(table, losses):
        return rows
    more = table.one_sided[rows]
    both = rows[~more]
    more[~more] = np.not_equal(*_amounts(table, both, comparison))
    return rows if more.all() else rows[:0]


# --- factors


def factor_of(table: Table, rows: Ids, close: float) -> float:
    """C where b is c times a in each of some differing rows, by means, extrema and sketches; NaN where it is none.

    A power of two rounds nothing, so it has to fit in bits; another factor has to fit up to `close`, and not at all
    where that is 0.
    """
    one, two = ((batch, of_run[rows]) for batch, of_run in ((table.a, table.row_a), (table.b, table.row_b)))
    factor = np.nan
    for name in ("mean", "min", "max"):
        if name not in table.a.floats or name not in table.b.floats:
            return np.nan
        first, second = (np.asarray(batch.floats[name], np.float64)[at] for batch, at in (one, two))
        with np.errstate(all="ignore"):
            factor = float(second[0] / first[0]) if name == "mean" else factor
        bits = math.isfinite(factor) and factor > 0 and math.frexp(factor)[0] == _POWER_OF_TWO
        close = 0.0 if bits else close
        if not (math.isfinite(factor) and factor > 0) or factor == 1 or not (bits or close):
            return np.nan
        if not np.allclose(second, first * factor, rtol=close, atol=0, equal_nan=True):
            return np.nan
    if table.a.sketch is None or table.b.sketch is None:
        return factor
    mine, others = (np.asarray(batch.sketch[at], np.float64) for batch, at in (one, two) if batch.sketch is not None)
    far = np.linalg.norm(others - mine * factor, axis=1) > close * np.linalg.norm(others, axis=1)
    return np.nan if far.any() else factor


_POWER_OF_TWO = 0.5
"""What `frexp` leaves of a power of two."""


# --- words


def dead_note(table: Table, rows: Iterable[int], comparison: Comparison) -> str:
    """The sentence on dead differences of a step, the first of them by name; "" for none."""
    by_order = sorted(rows, key=lambda row: float(table.order[row]))
    if not by_order:
        return ""
    row, much = by_order[0], count(len(by_order), "difference")
    sides = (comparison.a, table.a, table.row_a), (comparison.b, table.b, table.row_b)
    one, two = (_form(reader.layouts[int(batch.layout[of_run[row]])]) for reader, batch, of_run in sides)
    form = f" ({one} in a, {two} in b)" if one != two else ""
    first = f"{what(table.named(row))}{form}"
    return f"Nothing recorded rests on {much} in step {table.step}, first {first}: what comes of it agrees."


def _form(layout: Layout) -> str:
    return f"{'x'.join(map(str, layout.shape)) or 'scalar'} {layout.dtype}{' (sparse)' * layout.is_sparse}"
