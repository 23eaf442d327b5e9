"""How what went into a call lies in memory, where the two runs differ in that.

Checksums follow the logical order of elements, so that a tensor in channels-last order equals the same tensor in
contiguous order. The kernel that reads it may be another one, and round otherwise. So where a result differs although
all that went into it is equal, a memory format that differs is worth a clause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.sites import KINDS
from introspect_cli.compare.reasons.facts import owner_of
from introspect_cli.records import Kind, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from introspect_cli.compare.reasons.base import Scene
    from introspect_cli.compare.reasons.step_view import StepRecords

_SEEN = frozenset({Status.OBSERVED, Status.PARTIAL})


def memory_formats(scene: Scene) -> list[str]:
    """Clauses such as `its input [0] is contiguous in a and channels_last in b`, those of inputs first."""
    told = []
    for union in _went_in(scene):
        step = next((step for step in (scene.step, scene.before) if step is not None and _in_both(step, union)), None)
        if step is None:
            continue
        one, two = (_strides(scene, step, union, side) for side in ("a", "b"))
        if one and two and one != two:
            told.append(f"{_name(scene, union)} is {one} in a and {two} in b")
    return told


def _went_in(scene: Scene) -> Iterator[int]:
    """Union numbers of what went into a module's call, or into an operator."""
    facts, site = scene.facts, scene.site
    if site.kind is Kind.OP_OUTPUT:
        yield from _given(scene)
        return
    yield from facts.recorded(site.phase, Kind.INPUT, site.fqn, site.call)
    for fqn in sorted(facts.tensors_in(site.fqn)):
        own = (int(union) for union in facts.alignment.by_fqn[fqn])
        yield from _last(u for u in own if KINDS[facts.alignment.kind[u]] in {Kind.PARAM, Kind.BUFFER})


def _given(scene: Scene) -> Iterator[int]:
    """What an operator was given in run a, as far as that is on record."""
    row, given = scene.step.rows_a.get(scene.union), scene.step.pair.a.given
    if row is not None and given is not None:
        own = given.row(row)
        sites = [] if own is None else [number for number in own.inputs if number >= 0]
        yield from (int(number) for number in sites)  # the sites of run a have the first union numbers


def _last(unions: Iterable[int]) -> list[int]:
    return list(unions)[-1:]


def _in_both(step: StepRecords, union: int) -> bool:
    return union in step.rows_a and union in step.rows_b


def _strides(scene: Scene, step: StepRecords, union: int, side: str) -> str:
    """How a tensor lies in memory; "" for what is no tensor, or was not seen."""
    rows, batch, reader = (
        (step.rows_a, step.pair.a, scene.facts.sides.a)
        if side == "a"
        else (step.rows_b, step.pair.b, scene.facts.sides.b)
    )
    row = rows[union]
    if Status(int(batch.status[row])) not in _SEEN:
        return ""
    return reader.layouts[int(np.asarray(batch.layout)[row])].strides


def _name(scene: Scene, union: int) -> str:
    site = scene.facts.alignment.site(union)
    if site.kind is Kind.INPUT:
        return f"its input {site.path}".rstrip()
    if site.kind is Kind.OP_OUTPUT:
        return f"the result of {site.path}"
    return f"its {site.fqn[len(owner_of(site.fqn)) + 1 :]}"
