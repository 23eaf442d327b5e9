"""The divergence map, modules by steps, and the module tree at the first diverging step.

A cell of the map is the largest relative distance of its module and step.

A step that goes wrong in one module sends other gradients to all of them, and a map of everything would be dark from
its first column on. So a module whose forward pass differs at any step is shaded by its forward pass alone; only one
that never differs there is shaded by its tensors and gradients. Where the forward pass of a module agrees and something
else of it does not, the cell says so: it is not equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.distance import Floats, Layouts, distances, relative
from introspect_cli.compare.join.sites import KINDS, Alignment, Ids, phase_code
from introspect_cli.compare.reasons.facts import FORWARD, Facts, ancestors, owner_of
from introspect_cli.compare.result import Divergence, DivergenceMap, TreeNode
from introspect_cli.records import SETTING_KINDS, Kind, ModuleInfo, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.reasons.base import Cause

_OF_TENSORS = frozenset({Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER_STATE})
_FORWARD = (Phase.DATA, Phase.FORWARD, Phase.EVAL, Phase.LOSS)
_ORDER = {phase_code(phase): place for place, phase in enumerate(_FORWARD)}
_MOST_COLUMNS = 400
_OF_MODULE = (Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
_UNMEASURED = 1.0  # differs, by how much is not known


class Heat:
    """The map in the making; neighbouring steps share a column where there are very many."""

    def __init__(self, alignment: Alignment, steps: Sequence[int]) -> None:
        self.alignment = alignment
        self.fold = max(1, -(-len(steps) // _MOST_COLUMNS))
        self.steps = list(steps)[:: self.fold]
        rows: dict[str, int] = {}
        self.row_of = np.full(alignment.size, -1, dtype=np.int64)
        for union in sorted(
            range(alignment.size), key=lambda union: (_ORDER.get(int(alignment.phase[union]), 9), union)
        ):
            kind = KINDS[alignment.kind[union]]
            if kind in SETTING_KINDS:
                continue
            name = alignment.fqn[union]
            if kind in _OF_TENSORS:
                name = owner_of(name) or name
            elif kind is Kind.RNG:
                name = f"random state: {name}"
            self.row_of[union] = rows.setdefault(name, len(rows))
        self.modules = tuple(rows)
        self.values = np.zeros((len(rows), len(self.steps)))
        self.forward = np.zeros((len(rows), len(self.steps)))
        self.unknown = np.zeros((2, len(rows), len(self.steps)), dtype=np.bool_)  # of all, of the forward pass
        self.is_forward = np.isin(alignment.phase, [phase_code(phase) for phase in _FORWARD])

    def add(self, place: int, pair: StepPair, layouts_a: Layouts, layouts_b: Layouts) -> None:
        """Take in a step, given its place among the compared ones."""
        rel = relative(*distances(pair.a, pair.b, pair.rows_a, pair.rows_b, layouts_a, layouts_b))
        unions = np.asarray(pair.a.site)[pair.rows_a].astype(np.int64)
        unknown = unions[~np.isfinite(rel)]
        rel = np.where(np.isfinite(rel), np.maximum(rel, 1e-12), _UNMEASURED)
        self._raise(unions, rel, place // self.fold)
        for marks, chosen in zip(self.unknown, (unknown, unknown[self.is_forward[unknown]]), strict=True):
            marks[self.row_of[chosen][self.row_of[chosen] >= 0], place // self.fold] = True
        lonely = np.concatenate(
            [
                np.asarray(pair.a.site).astype(np.int64)[pair.only_a],
                self.alignment.b_ids[np.asarray(pair.b.site)[pair.only_b]],
            ]
        )
        self._raise(lonely, np.full(len(lonely), np.inf), place // self.fold)

    def _raise(self, unions: Ids, rel: Floats, column: int) -> None:
        """Raise cells of a column to the distances of some sites."""
        rows = self.row_of[unions]
        for values, chosen in ((self.values, rows >= 0), (self.forward, (rows >= 0) & self.is_forward[unions])):
            np.maximum.at(values[:, column], rows[chosen], rel[chosen])

    def result(self) -> DivergenceMap:
        """The map: every module, and of random states only those that ever differ."""
        shown = [
            row
            for row, name in enumerate(self.modules)
            if not name.startswith("random state: ") or self.values[row].any()
        ]
        own_forward = self.forward.any(axis=1, keepdims=True)
        values = np.where(own_forward, self.forward, self.values)
        unmeasured = np.where(own_forward, self.unknown[1], self.unknown[0]) & (values == _UNMEASURED)
        return DivergenceMap(
            modules=tuple(self.modules[row] for row in shown),
            steps=tuple(self.steps),
            values=tuple(tuple(float(value) for value in values[row]) for row in shown),
            behind=tuple(tuple(bool(own) for own in (values[row] == 0) & (self.values[row] != 0)) for row in shown),
            unmeasured=tuple(tuple(map(bool, unmeasured[row])) for row in shown),
        )


def tree_of(
    facts: Facts, modules_a: Sequence[ModuleInfo], modules_b: Sequence[ModuleInfo], first: Divergence, cause: Cause
) -> tuple[TreeNode, ...]:
    """All modules of both runs, in a's order, those of b alone after their neighbours."""
    origin = cause.module or first.site.fqn
    if first.site.kind not in _OF_MODULE and not cause.module:
        origin = first.site.fqn.rpartition(".")[0]
    diverged: set[str] = set()
    lonely_a: set[str] = set()
    lonely_b: set[str] = set()
    forward_only = first.site.phase in FORWARD  # gradients of everything differ then, and say nothing
    for index, site in enumerate(facts.sites):
        if forward_only and site.phase not in FORWARD:
            continue
        owner = site.fqn if site.kind in _OF_MODULE else site.fqn.rpartition(".")[0]
        diverged.add(owner)
        if facts.items.row_b[index] < 0:
            lonely_a.add(owner)
        elif facts.items.row_a[index] < 0:
            lonely_b.add(owner)
    known_a, known_b = {m.fqn for m in modules_a}, {m.fqn for m in modules_b}
    for name in list(diverged):
        diverged.update(ancestors(name))
    nodes = []
    for module in _merged(modules_a, modules_b):
        fqn = module.fqn
        state = "diverged" if fqn in diverged else "equal"
        if fqn == origin:
            state = "origin"
        elif fqn not in known_b and fqn in lonely_a:
            state = "only a"
        elif fqn not in known_a:
            state = "only b"
        nodes.append(TreeNode(fqn, module.module_class, state, source=module.source))
    return tuple(nodes)


def _merged(modules_a: Sequence[ModuleInfo], modules_b: Sequence[ModuleInfo]) -> list[ModuleInfo]:
    """Both trees in one order: a's, and what only b has after what precedes it there."""
    merged = list(modules_a)
    place = {module.fqn: index for index, module in enumerate(merged)}
    inserted: dict[int, list[ModuleInfo]] = {}
    last = -1
    for module in modules_b:
        if module.fqn in place:
            last = place[module.fqn]
        else:
            inserted.setdefault(last, []).append(module)
    out = list(inserted.get(-1, []))
    for index, module in enumerate(merged):
        out += [module, *inserted.get(index, [])]
    return out
