"""Overviews: the map of modules by steps, and the strip of the first diverging step.

A cell of the map is the largest relative distance in its module and step. A module whose forward pass differs in any
step is shaded by its forward pass alone, since one fault changes nearly all gradients; others by tensors and gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.terms.distance import Floats, Layouts, relative
from introspect_cli.compare.terms.names import owner_of
from introspect_cli.compare.terms.result import DivergenceMap, StripCell
from introspect_cli.compare.terms.sites import KINDS, PHASES, Alignment, Ids, phase_code
from introspect_cli.compare.terms.table import ABSENT, DIFFERENT, EQUAL, NOT_SEEN, WITHIN, Table
from introspect_cli.records import SETTING_KINDS, Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.step.step import Step

_OF_TENSORS = frozenset({Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER_STATE})
_FORWARD = (Phase.DATA, Phase.FORWARD, Phase.EVAL, Phase.LOSS)
_PHASE_ORDER = {phase_code(phase): place for place, phase in enumerate(_FORWARD)}
_MOST_COLUMNS = 400
_UNMEASURED = 1.0  # differs, by how much is not known


class Heat:
    """Builds the divergence map; with more than `_MOST_COLUMNS` steps, neighbouring ones share a column."""

    def __init__(self, alignment: Alignment, steps: Sequence[int]) -> None:
        """Lay out an empty map: a row per module or generator in forward order, a column per `fold` steps.

        A column is named by its first step. Tensors and gradients are in the row of their module; settings have no row.

        Args:
            alignment: both runs' sites.
            steps: numbers of all compared steps in a, in order.
        """
        self.alignment = alignment
        self.fold = max(1, -(-len(steps) // _MOST_COLUMNS))
        self.steps = list(steps)[:: self.fold]
        rows: dict[str, int] = {}
        self.random: set[int] = set()
        self.row_of = np.full(alignment.size, -1, dtype=np.int64)
        for union in sorted(
            range(alignment.size), key=lambda union: (_PHASE_ORDER.get(int(alignment.phase[union]), 9), union)
        ):
            kind = KINDS[alignment.kind[union]]
            if kind in SETTING_KINDS:
                continue
            name = alignment.fqn[union]
            if kind in _OF_TENSORS:
                name = owner_of(name) or name
            elif kind is Kind.RNG:
                name = f"random state: {name}"
            row = self.row_of[union] = rows.setdefault(name, len(rows))
            if kind is Kind.RNG:
                self.random.add(row)
        self.modules = tuple(rows)
        self.values = np.zeros((len(rows), len(self.steps)))
        self.forward = np.zeros((len(rows), len(self.steps)))
        self.unknown = np.zeros((2, len(rows), len(self.steps)), dtype=np.bool_)  # of all, of the forward pass
        self.is_forward = np.isin(alignment.phase, [phase_code(phase) for phase in _FORWARD])

    def add(self, place: int, table: Table, layouts: tuple[Layouts, Layouts]) -> None:
        """Raise the cells of a diverging step's column, in place.

        Records of one run alone count as infinitely far; unknown distances count as 1, and are marked as unknown. Other
        distances count as 1e-12 at least.

        Args:
            place: index of the step among the compared ones.
            table: the step after all passes.
            layouts: of a and of b.
        """
        rel, unions = relative(*table.distances(layouts)), table.differing_sites
        unknown = unions[~np.isfinite(rel)]
        rel = np.where(np.isfinite(rel), np.maximum(rel, 1e-12), _UNMEASURED)
        self._raise_cells(unions, rel, place // self.fold)
        for marks, chosen in zip(self.unknown, (unknown, unknown[self.is_forward[unknown]]), strict=True):
            marks[self.row_of[chosen][self.row_of[chosen] >= 0], place // self.fold] = True
        one_sided = np.concatenate([table.sites_a[table.only_a], table.sites_b[table.only_b]])
        self._raise_cells(one_sided, np.full(len(one_sided), np.inf), place // self.fold)

    def _raise_cells(self, unions: Ids, rel: Floats, column: int) -> None:
        """Raise the cells of these sites in one column to their distances, where the cells are lower.

        Forward records are put into `forward` too. Sites without a row are skipped.
        """
        rows = self.row_of[unions]
        for values, chosen in ((self.values, rows >= 0), (self.forward, (rows >= 0) & self.is_forward[unions])):
            np.maximum.at(values[:, column], rows[chosen], rel[chosen])

    def result(self) -> DivergenceMap:
        """The finished map; rows of generators that never differ are left out.

        A module whose forward pass differs in any step has the distances of its forward pass alone in every column;
        `behind` is True in columns where that leaves 0, though something else of it differs. `unmeasured` is True where
        the value stands for an unknown distance.
        """
        shown = [row for row in range(len(self.modules)) if row not in self.random or self.values[row].any()]
        in_forward = self.forward.any(axis=1, keepdims=True)
        values = np.where(in_forward, self.forward, self.values)
        unmeasured = np.where(in_forward, self.unknown[1], self.unknown[0]) & (values == _UNMEASURED)
        behind = (values == 0) & (self.values != 0)
        return DivergenceMap(
            modules=tuple(self.modules[row] for row in shown),
            steps=tuple(self.steps),
            values=tuple(tuple(float(value) for value in values[row]) for row in shown),
            behind=tuple(tuple(map(bool, behind[row])) for row in shown),
            unmeasured=tuple(tuple(map(bool, unmeasured[row])) for row in shown),
        )


# --- the first diverging step in a strip

_ROW_OF = {
    (Phase.DATA, Kind.BATCH): "forward",
    (Phase.FORWARD, Kind.OUTPUT): "forward",
    (Phase.LOSS, Kind.LOSS): "forward",
    (Phase.BACKWARD, Kind.GRAD_OUTPUT): "backward",
    (Phase.BACKWARD, Kind.GRAD): "backward",
    (Phase.OPTIMIZER, Kind.PARAM): "update",
}
_STATE = {EQUAL: "equal", WITHIN: "within", NOT_SEEN: "not seen"}


def strip_of(step: Step, first: Site) -> tuple[StripCell, ...]:
    """Cells of the first diverging step, in a's order: records with a row in `_ROW_OF`, and a DIFFERENT one at `first`.

    Records that count for nothing (ABSENT, and not in one run alone) and those without a place in a's order are left
    out. Only cells that differ have a distance, if it is known.
    """
    alignment, table, diverging = step.alignment, step.table, step.divergences
    rel = relative(*table.distances(step.comparison.layouts))
    distance_of = dict(zip(table.differing_sites.tolist(), rel.tolist(), strict=True))
    only = dict.fromkeys(diverging.site[diverging.row_b < 0].tolist(), "only a")
    only |= dict.fromkeys(diverging.site[diverging.row_a < 0].tolist(), "only b")
    order = table.order_of.copy()
    order[diverging.site] = diverging.order
    cells = []
    for union in np.argsort(order, kind="stable").tolist():
        state = int(step.state[union])
        phase = PHASES[alignment.phase[union]]
        row = _ROW_OF.get((phase, KINDS[alignment.kind[union]]))
        if row is None and step.state[union] == DIFFERENT and alignment.site(union) == first:
            row = {Phase.BACKWARD: "backward", Phase.OPTIMIZER: "update"}.get(phase, "forward")
        if row is None or (state == ABSENT and union not in only) or not np.isfinite(order[union]):
            continue
        distance = distance_of.get(union, np.nan)
        word = only.get(union) or _STATE.get(state, "differs")
        measured = word == "differs" and np.isfinite(distance)
        cells.append(StripCell(row, alignment.site(union), word, float(distance) if measured else None))
    return tuple(cells)
