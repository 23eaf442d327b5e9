"""What a step began with: which tensors are known to differ before it, and whether that is known at all.

Parameters are recorded after each optimizer step, so what step k computes with was recorded at the end of step k - 1,
or at the start of the first captured step. Where step k - 1 was not recorded, nothing is known, and a module whose
output differs is no proven origin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.join.coverage import STATE_KINDS
from introspect_cli.compare.join.offset import end_values, start_values
from introspect_cli.compare.join.sites import kind_code
from introspect_cli.compare.reasons.facts import Carried
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.join.sides import Sides
    from introspect_cli.compare.join.sites import Alignment


def kept(carried: Carried, recorded: frozenset[str]) -> Carried:
    """What is left of it after a step that agrees: tensors that no step records anew."""
    return Carried(
        params={name for name in carried.params if name not in recorded},
        buffers={name for name in carried.buffers if name not in recorded},
        diverged=carried.diverged,
    )


def is_gap(sides: Sides, pair: StepPair) -> bool:
    """Whether what a step began with was recorded by neither the step before nor its own start."""
    before_a, before_b = pair.step - 1 in sides.a, pair.step_b - 1 in sides.b
    first_a, first_b = sides.a.entry(0).step == pair.step, sides.b.entry(0).step == pair.step_b
    return not ((before_a or first_a) and (before_b or first_b))


def resumed(sides: Sides, alignment: Alignment, offset: int) -> Carried:
    """Tensors that the later of two captures began with and that differ from what the other had then."""
    first_a, first_b = sides.a.entry(0).step, sides.b.entry(0).step + offset
    if first_a == first_b:
        return Carried()
    late, whole, sites_late, sites_whole, first = (
        (sides.b, sides.a, alignment.b, alignment.a, first_b)
        if first_b > first_a
        else (sides.a, sides.b, alignment.a, alignment.b, first_a - offset)
    )
    if first - 1 not in whole:
        return Carried()
    entry = whole.entry(whole.row_of(first - 1))
    began, ended = start_values(late, sites_late, STATE_KINDS), end_values(whole, sites_whole, entry, STATE_KINDS)
    unequal = {key for key in began.keys() & ended.keys() if began[key] != ended[key]}
    codes = {kind: str(kind_code(kind)) for kind in STATE_KINDS}
    return Carried(
        params={fqn for kind, fqn, _ in unequal if kind == codes[Kind.PARAM]},
        buffers={fqn for kind, fqn, _ in unequal if kind == codes[Kind.BUFFER]},
        states={(fqn, path) for kind, fqn, path in unequal if kind == codes[Kind.OPTIMIZER_STATE]},
    )
