"""What a step began with: tensors that differ before it.

Parameters are recorded after each optimizer step, so what step k computes with was recorded at the end of step k - 1,
or at the start of the first captured step. Where step k - 1 was not recorded, nothing is known, and a module whose
output differs is no proven origin.

A run that rebuilds its model from a checkpoint, or whose capture left out the step before, records at the start of a
step what the other run did not need to: it is on record there as the end of the step before. Where both are equal,
nothing differs; where they are not, something other than the optimizer has changed the tensor in between.

A run that lists what was written elsewhere may have the parameters at the start of every step. What the step before
left stands for them in a capture, which would have recorded them anew had anything else changed them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.terms.at import At, Tensor, tensor_of
from introspect_cli.compare.terms.sites import Alignment, Ids, Mask, kind_code, of_kinds, phase_code
from introspect_cli.compare.terms.watched import STATE_KINDS
from introspect_cli.records import Kind, Phase
from introspect_cli.store.format.batch import StepBatch, preceded

if TYPE_CHECKING:
    from introspect_cli.compare.join.steps import Sides
    from introspect_cli.compare.terms.table import Table
    from introspect_cli.store.ranks.whole_reader import Reader


@dataclass
class Carried:
    """Tensors that the step began with and that are known to differ, by FQN (and path for optimizer state).

    Attributes:
        within: those that differ by no more than the tolerance or the noise.
        diverged: whether anything has diverged before.
    """

    params: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    states: set[tuple[str, str]] = field(default_factory=set)
    rng: set[str] = field(default_factory=set)
    loaders: set[tuple[Phase, str]] = field(default_factory=set)
    within: set[str] = field(default_factory=set)
    diverged: bool = False


def kept(carried: Carried, recorded: frozenset[str]) -> Carried:
    """What is left of it after a step that agrees: tensors that no step records anew."""
    params, buffers, within = (names - recorded for names in (carried.params, carried.buffers, carried.within))
    return Carried(params, buffers, within=within, diverged=carried.diverged)


def is_gap(sides: Sides, pair: Table) -> bool:
    """Whether what a step began with was recorded by neither the step before nor its own start."""
    before_a, before_b = pair.step - 1 in sides.a, pair.step_b - 1 in sides.b
    first_a = sides.a.entry(0).step == pair.step and _began(sides.a, pair.a, sides.manifests[0])
    first_b = sides.b.entry(0).step == pair.step_b and _began(sides.b, pair.b, sides.manifests[1])
    return not ((before_a or first_a) and (before_b or first_b))


def _began(reader: Reader, batch: StepBatch, manifest: dict[str, Any]) -> bool:
    """Whether the first step on record says how it began; one before which others were dropped need not."""
    options = manifest.get("options", {})
    if not reader.thinned and not any(options.get(name) for name in ("when", "epochs", "schedule")):
        return True
    sites, numbers = reader.sites, batch.site.tolist()
    tensors = {kind.value for kind in STATE_KINDS}
    phases = {sites.phase[number] for number in numbers if sites.kind[number] in tensors}
    return Phase.START.value in phases or Phase.OPTIMIZER.value not in phases


# --- the tensors of a step


def redundant_starts(sides: Sides, table: Table) -> tuple[Mask, Mask]:
    """Of the rows of `table.only_a` and of `table.only_b`, those that hold what the tensor had before.

    That is what the step before left or, after an update, what the step began with: an optimizer that has a frozen
    parameter does not change it. Where a run has not recorded the step before, the other one tells.
    """
    alignment = table.alignment
    before = At(sides.a, alignment.a, table.step - 1), At(sides.b, alignment.b, table.step_b - 1)
    left_a, left_b = (at.tensors() if at.recorded else None for at in before)

    def of_once(union: int) -> Tensor:  # a model that is called compiled, and as it is, has its tensors twice
        kind, fqn, path = tensor_of(alignment, union)
        return kind, fqn, path.partition("@")[0]

    def repeats(batch: StepBatch, rows: Ids, sites: Ids, left: dict[Tensor, int]) -> Mask:
        unions, repeated = sites[rows], np.zeros(len(rows), dtype=np.bool_)
        known = dict(left)
        for of in (starts, written, updated):  # in the order in which they come in a step
            for place in np.flatnonzero(of(alignment, unions)):
                repeated[place] = known.get(of_once(int(unions[place]))) == batch.checksum[rows[place]]
            there = np.flatnonzero(of(alignment, sites)).tolist()
            known |= {tensor_of(alignment, int(sites[row])): int(batch.checksum[row]) for row in there}
        return repeated

    return (
        repeats(table.a, table.only_a, table.sites_a, (left_b if left_a is None else left_a) or {}),
        repeats(table.b, table.only_b, table.sites_b, (left_a if left_b is None else left_b) or {}),
    )


def with_starts(
    alignment: Alignment, side: int, before: At, batch: StepBatch, other_union: Ids
) -> tuple[StepBatch, Ids]:
    """A step's records, and before them tensors as the step before left them; and the union numbers of these.

    Args:
        alignment: the runs' sites.
        side: 0 for a, 1 for b.
        before: the step before.
        batch: the records.
        other_union: sites of the other run's records of the step. Those of them that are tensors at its start, and that
            the run has not recorded there, are wanted.
    """
    ids, none = alignment.ids[side], np.empty(0, dtype=np.int64)
    wanted = other_union[starts(alignment, other_union)]
    wanted = wanted[~np.isin(wanted, ids[batch.site])]
    if not len(wanted) or not before.recorded:
        return batch, none
    numbers = np.full(alignment.size, -1, dtype=np.int64)
    numbers[ids] = np.arange(len(ids))
    rows_of = before.tensor_rows()
    unions = [union for union in wanted.tolist() if numbers[union] >= 0 and tensor_of(alignment, union) in rows_of]
    if not unions:
        return batch, none
    rows = np.array([rows_of[tensor_of(alignment, union)] for union in unions], dtype=np.int64)
    return preceded(batch, before.batch, rows, numbers[unions]), np.array(unions, dtype=np.int64)


def starts(alignment: Alignment, unions: Ids) -> Mask:
    """Which of these sites are tensors, or an optimizer's state, at the start of a step."""
    started = (alignment.phase[unions] == phase_code(Phase.START)) & (alignment.call[unions] == 0)
    return np.asarray(of_kinds(alignment.kind[unions], STATE_KINDS) & started)


def updated(alignment: Alignment, unions: Ids) -> Mask:
    """Which of these sites are parameters after an optimizer step."""
    after = alignment.phase[unions] == phase_code(Phase.OPTIMIZER)
    return np.asarray((alignment.kind[unions] == kind_code(Kind.PARAM)) & after)


def written(alignment: Alignment, unions: Ids) -> Mask:
    """Which of these sites are parameters that a forward pass has written to, as it left them."""
    forward = alignment.phase[unions] == phase_code(Phase.FORWARD)
    return np.asarray((alignment.kind[unions] == kind_code(Kind.PARAM)) & forward)


# --- resumed runs


def resumed(sides: Sides, offset: int) -> Carried:
    """Tensors that the later of two captures began with and that differ from what the other had then."""
    a, b = At.first(sides.a, sides.sites[0]), At.first(sides.b, sides.sites[1])
    if a.step == b.step + offset:
        return Carried()
    late, whole, first = (b, a, b.step + offset) if b.step + offset > a.step else (a, b, a.step - offset)
    began, ended = late.tensors(Phase.START), whole.to(first - 1).tensors(Phase.OPTIMIZER)
    unequal = {tensor for tensor in began.keys() & ended.keys() if began[tensor] != ended[tensor]}
    return Carried(
        params={fqn for kind, fqn, _ in unequal if kind == kind_code(Kind.PARAM)},
        buffers={fqn for kind, fqn, _ in unequal if kind == kind_code(Kind.BUFFER)},
        states={(fqn, path) for kind, fqn, path in unequal if kind == kind_code(Kind.OPTIMIZER_STATE)},
    )
