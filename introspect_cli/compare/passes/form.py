"""The fifth pass: a value that is given to a module in another form, where what the module gives is not another one.

An attention mask is a tensor of numbers for one implementation, one of truths for another, and for a third there is
none: it says by a flag that the mask is causal. Only what comes of it says whether that is the same mask. So an input
whose form is another (a dtype of another family, a shape, or that one run gives it alone) is representation where each
output of that call agrees, or differs by no more than rounding: it is told, and is no divergence. Where an output
differs by more, or none is on record, the form is what differs first. Two floating point dtypes are no two forms of
one value: one of them was rounded.

So is a gradient that is sparse in one run alone: its entries say nothing beside a dense one. What the optimizer leaves
of the parameter and of its state tells whether it was another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.step.size import LEAST_BOUND
from introspect_cli.compare.terms.distance import distances, relative
from introspect_cli.compare.terms.sites import Ids, Mask, kind_code, of_kinds, phase_code
from introspect_cli.compare.terms.table import DIFFERENT, EQUAL, FORM, ONLY_A, ONLY_B, WITHIN, Because, Table
from introspect_cli.compare.terms.words import what
from introspect_cli.records import Kind, Phase, Status
from introspect_cli.texts import count

if TYPE_CHECKING:
    from introspect_cli.compare.step.comparison import Comparison
    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.ranks.whole_reader import Reader


_EQUAL, _ROUNDED = 0, 1
_AGREE = (EQUAL, WITHIN)

Call = tuple[str, int, int]
"""A module's FQN, its call and the phase."""


def form(table: Table, comparison: Comparison) -> Table:
    """The table in which inputs of another form are representation, where the modules that take them say so."""
    if comparison.options.strict:
        return table
    table = table.marked(_gradients(table, comparison), FORM, Because.FORM)
    inputs = np.flatnonzero((table.alignment.kind[table.site] == kind_code(Kind.INPUT)) & table.diverging)
    inputs = inputs[_reformed(table, inputs, comparison)] if len(inputs) else inputs
    if not len(inputs):
        return table
    calls = [_call(table, row) for row in inputs.tolist()]
    given = _outputs(table, set(calls), comparison)
    # what one run alone gives, to no effect at all, is told as structure
    least = [_EQUAL if state == DIFFERENT else _ROUNDED for state in table.state[inputs].tolist()]
    kept = [given.get(call, -1) >= enough for call, enough in zip(calls, least, strict=True)]
    return table.marked(inputs[np.array(kept, dtype=np.bool_)], FORM, Because.FORM)


def _gradients(table: Table, comparison: Comparison) -> Ids:
    """Gradients that one run alone has as sparse tensors, and of which both optimizers make the same."""
    alignment, sites = table.alignment, table.site
    left = alignment.phase[sites] == phase_code(Phase.OPTIMIZER)
    rows = np.flatnonzero(left & (alignment.kind[sites] == kind_code(Kind.GRAD)) & (table.state == DIFFERENT))
    if not len(rows):
        return rows
    (one, two), row_a, row_b = comparison.layouts, table.row_a[rows], table.row_b[rows]
    layout_a, layout_b = table.a.layout[row_a], table.b.layout[row_b]
    rows = rows[(one.stored[layout_a] != two.stored[layout_b]) & (one.shape[layout_a] == two.shape[layout_b])]
    after = np.flatnonzero(left & of_kinds(alignment.kind[sites], (Kind.PARAM, Kind.OPTIMIZER_STATE)))
    params = after[alignment.kind[sites[after]] == kind_code(Kind.PARAM)]
    same = {alignment.fqn[site] for site in sites[params].tolist()}
    same -= {alignment.fqn[site] for site in sites[after[~np.isin(table.state[after], _AGREE)]].tolist()}
    return np.asarray(rows[[alignment.fqn[site] in same for site in sites[rows].tolist()]])


def _call(table: Table, row: int) -> Call:
    alignment, site = table.alignment, int(table.site[row])
    return alignment.fqn[site], int(alignment.call[site]), int(alignment.phase[site])


def _reformed(table: Table, rows: Ids, comparison: Comparison) -> Mask:
    """Which inputs have another form in b, or are given in one run alone."""
    reformed = np.isin(table.state[rows], (ONLY_A, ONLY_B))
    both = np.flatnonzero(~reformed)
    row_a, row_b = table.row_a[rows[both]], table.row_b[rows[both]]
    layout_a, layout_b = table.a.layout[row_a], table.b.layout[row_b]
    shapes_a, shapes_b = comparison.layouts
    seen = [batch.status[at] == int(Status.OBSERVED) for batch, at in ((table.a, row_a), (table.b, row_b))]
    another = shapes_a.shape[layout_a] != shapes_b.shape[layout_b]
    another |= shapes_a.floating[layout_a] != shapes_b.floating[layout_b]
    reformed[both] = another & seen[0] & seen[1]
    return np.asarray(reformed)


def _outputs(table: Table, calls: set[Call], comparison: Comparison) -> dict[Call, int]:
    """Of these calls, what is known of the outputs that both runs have: equal, or apart by tolerance or rounding.

    A call of which an output differs by more, or of which there is none in both runs, is not among them.
    """
    names = {call[0] for call in calls}
    alignment = table.alignment
    outputs = np.flatnonzero((alignment.kind[table.site] == kind_code(Kind.OUTPUT)) & ~table.one_sided)
    outputs = outputs[[alignment.fqn[site] in names for site in table.site[outputs].tolist()]]
    differ = outputs[table.state[outputs] == DIFFERENT]
    far = dict.fromkeys(differ.tolist(), True)
    if len(differ):
        row_a, row_b = table.row_a[differ], table.row_b[differ]
        layout_a, layout_b = table.a.layout[row_a], table.b.layout[row_b]
        rel = relative(*distances(table.a, table.b, row_a, row_b, *comparison.layouts))
        units, other = comparison.layouts[0].unit[layout_a], comparison.layouts[1].unit[layout_b]
        with np.errstate(invalid="ignore"):
            far = dict(zip(differ.tolist(), ~((rel <= LEAST_BOUND * units) & (units == other)), strict=True))
    by_call: dict[Call, int] = {}
    beyond: set[Call] = set()
    for row in outputs.tolist():
        call = _call(table, row)
        if call not in calls:
            continue
        if far.get(row, table.state[row] not in _AGREE):
            beyond.add(call)
        rounded = row in far or table.state[row] == WITHIN
        by_call[call] = max(by_call.get(call, _EQUAL), _ROUNDED if rounded else _EQUAL)
    return {call: level for call, level in by_call.items() if call not in beyond}


def forms_note(table: Table, rows: Ids, comparison: Comparison) -> str:
    """The sentence on the inputs of some rows, the earliest in words; "" for none."""
    if not len(rows):
        return ""
    first = int(rows[np.argmin(table.order[rows])])
    site = table.named(first)
    one, two = _form(comparison.a, table.a, table.row_a[first]), _form(comparison.b, table.b, table.row_b[first])
    clause = f"in step {table.step} {what(site)} is {one} in a and {two} in b"
    others = sum(table.named(row).kind is site.kind for row in rows.tolist()) - 1
    word = "other gradient" if site.kind is Kind.GRAD else "other input"
    more = f", as {count(others, word)} of that step" if others else ""
    after = f"what {'those modules' if others else 'that module'} returned agrees, or differs by rounding"
    if site.kind is Kind.GRAD:
        after = "what the optimizer made of it agrees"
    return f"Another form, no divergence: {clause}{more}; {after}."


def _form(reader: Reader, batch: StepBatch, row: int) -> str:
    if row < 0:
        return "not given"
    layout = reader.layouts[int(batch.layout[row])]
    sparse = " (sparse)" if layout.is_sparse else ""
    return f"{'x'.join(map(str, layout.shape)) or 'scalar'} {layout.dtype}{sparse}"
