"""The first diverging step laid out in the order it ran: what agreed, where it began, what followed.

The map tells one number a module and step; a reader of one step wants to see it happen. So every module's output, the
losses, the gradients and the updated parameters of that step stand in a row, each as its checksums compare.
"""

from __future__ import annotations

import numpy as np

from introspect_cli.compare.join.distance import Layouts, distances, relative
from introspect_cli.compare.join.sites import KINDS, PHASES
from introspect_cli.compare.reasons.facts import ABSENT, BLIND, DIFFERS, EQUAL, WITHIN, Facts
from introspect_cli.compare.result import StripCell
from introspect_cli.records import Kind, Phase, Site

_ROW = {
    (Phase.DATA, Kind.BATCH): "forward",
    (Phase.FORWARD, Kind.OUTPUT): "forward",
    (Phase.LOSS, Kind.LOSS): "forward",
    (Phase.BACKWARD, Kind.GRAD_OUTPUT): "backward",
    (Phase.BACKWARD, Kind.GRAD): "backward",
    (Phase.OPTIMIZER, Kind.PARAM): "update",
}
_STATE = {EQUAL: "equal", WITHIN: "within", BLIND: "not seen"}


def strip_of(facts: Facts, first: Site) -> tuple[StripCell, ...]:
    """Every record of the step that has a row in the strip, and the first divergence, as run a recorded them."""
    alignment, pair, items = facts.alignment, facts.pair, facts.items
    layouts = Layouts(facts.sides.a.layouts), Layouts(facts.sides.b.layouts)
    rel = relative(*distances(pair.a, pair.b, pair.rows_a, pair.rows_b, *layouts))
    apart = dict(zip(np.asarray(pair.a.site)[pair.rows_a].tolist(), rel.tolist(), strict=True))
    only = {int(union): "only a" for union, row in zip(items.union, items.row_b, strict=True) if row < 0}
    only |= {int(union): "only b" for union, row in zip(items.union, items.row_a, strict=True) if row < 0}
    order = facts.order.copy()
    order[items.union] = items.order
    cells = []
    for union in np.argsort(order, kind="stable").tolist():
        state = int(facts.state[union])
        phase = PHASES[alignment.phase[union]]
        row = _ROW.get((phase, KINDS[alignment.kind[union]]))
        if row is None and facts.state[union] == DIFFERS and alignment.site(union) == first:
            row = {Phase.BACKWARD: "backward", Phase.OPTIMIZER: "update"}.get(phase, "forward")
        if row is None or (state == ABSENT and union not in only) or not np.isfinite(order[union]):
            continue
        distance = apart.get(union, np.nan)
        word = only.get(union) or _STATE.get(state, "differs")
        known = word == "differs" and np.isfinite(distance)
        cells.append(StripCell(row, alignment.site(union), word, float(distance) if known else None))
    return tuple(cells)
