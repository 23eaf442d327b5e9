"""How near a statement of a version is to the place where the runs diverge, by names.

What is known of that place are clues. The code that computes it is known by name (`computes`); what gives that code its
objects and values is followed from there.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.clues import ORDER, Clues, Nearness
from introspect_cli.compare.changes.computes import (
    COMPUTES,
    LOADS,
    LOSS,
    MODES,
    Place,
    gradient,
    loss,
    merged,
    optimizer,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.changes.parsed import Statement
    from introspect_cli.compare.changes.program import Depths, Program


class Version:
    """One version, and how near each of its statements is to the divergence."""

    def __init__(
        self,
        program: Program,
        clues: Clues,
        named: Iterable[tuple[str, int]],
        spans: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        self.program, self.clues = program, clues
        roots = program.calling(clues.roots)
        models = clues.models | {key[1] for root in roots for key in root.defines if key[0] not in {".", "="}}
        models |= program.handed(models)
        recorded = frozenset(statement for file, line in named for statement in program.at(file, line, line))
        self.at = at = Place(program, clues, recorded, models)
        self.computes = COMPUTES[clues.reason](at) if clues.reason in COMPUTES else {}
        leading = self._leading() if clues.reason in {"rng", "initial"} else {}
        self.builds = merged(program.behind([*recorded, *self.computes, *self._built()], models), leading)
        self.between = program.loop() if clues.reason in _OF_STEPS or clues.gap else set()
        if clues.gap or clues.reason == "propagated":
            self.between |= {*loss(at), *gradient(at), *optimizer(at), *program.forwards(), *program.calling(MODES)}
        self.between |= {inside for file, first, last in spans for inside in program.at(file, first + 1, last)}

    def nearness(self, statement: Statement) -> tuple[int, int]:
        """Place in the order of nearness, and depth."""
        if statement.only_tells or isinstance(statement.node, (ast.Import, ast.ImportFrom, ast.Pass)):
            return ORDER.index(Nearness.ELSEWHERE), 0
        if statement in self.at.recorded:
            return ORDER.index(Nearness.RECORDED), 0
        more = self.program.is_conditional(statement.place)
        for nearness, depths in ((Nearness.COMPUTES, self.computes), (Nearness.BUILDS, self.builds)):
            if statement in depths:
                return ORDER.index(nearness), depths[statement] + more
        return ORDER.index(Nearness.BETWEEN if statement in self.between else Nearness.ELSEWHERE), 0

    def _leading(self) -> Depths:
        """What calls the functions in which the lines on record stand, or hands them on to be called."""
        depths: Depths = {}
        edge = {statement.place for statement in self.at.recorded}
        for depth in range(1, _MOST_CALLS):
            callers = [caller for place in edge for caller in self.program.callers_of(place) if caller not in depths]
            depths |= dict.fromkeys(callers, depth)
            edge = {statement.place for statement in callers}
        return depths

    def _built(self) -> set[Statement]:
        """Where the modules that it is about are built and set up."""
        program, clues = self.program, self.clues
        if clues.reason in {"rng", "initial", "structure"}:
            return program.calling(clues.roots) | program.calling(clues.classes)
        if clues.reason == "optimizer":
            return program.calling(LOADS)
        if clues.reason == "loss":
            return program.calling(filter(LOSS.search, clues.roots))
        if clues.reason not in _OF_MODULES:
            return set()
        building: set[Statement] = set()
        for name, attribute in zip(clues.classes[:2], clues.attributes, strict=False):
            calls = program.calling([name])
            building |= calls.intersection(self.at.defining(attribute)) or calls  # `self.drop = nn.Dropout()`
            building |= program.within(program.methods(name, "__init__")).keys()
            building |= {
                statement for place in program.by_place for statement in program.by_place[place] if place[1] == name
            }
            if clues.reason == "module":
                break
        return building | (program.calling(MODES) if clues.words & {"training", "train"} else set())


_MOST_CALLS = 5
_OF_MODULES = words("module own_code op buffer backward")
_OF_STEPS = words("rng structure outside initial script gradient resumed propagated optimizer")
"""Reasons for which all that a step runs is between the last record that agreed and the first that did not."""
