"""What a step began with: which tensors are known to differ before it, and whether that is known at all.

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

from introspect_cli.compare.join.coverage import STATE_KINDS
from introspect_cli.compare.join.offset import end_values, start_values
from introspect_cli.compare.join.sites import Alignment, Ids, Mask, kind_code, phase_code
from introspect_cli.records import Kind, Phase
from introspect_cli.store.batch import preceded

if TYPE_CHECKING:
    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.join.steps import Sides
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.whole import Reader

Held = dict[tuple[int, str, str], int]


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
    return Carried(
        params={name for name in carried.params if name not in recorded},
        buffers={name for name in carried.buffers if name not in recorded},
        within={name for name in carried.within if name not in recorded},
        diverged=carried.diverged,
    )


def is_gap(sides: Sides, pair: StepPair) -> bool:
    """Whether what a step began with was recorded by neither the step before nor its own start."""
    before_a, before_b = pair.step - 1 in sides.a, pair.step_b - 1 in sides.b
    first_a = sides.a.entry(0).step == pair.step and _began(sides.a, pair.a, sides.manifest_a)
    first_b = sides.b.entry(0).step == pair.step_b and _began(sides.b, pair.b, sides.manifest_b)
    return not ((before_a or first_a) and (before_b or first_b))


def _began(reader: Reader, batch: StepBatch, manifest: dict[str, Any]) -> bool:
    """Whether the first step on record says how it began; one before which others were dropped need not."""
    options = manifest.get("options")
    told = options if isinstance(options, dict) else {}
    if not reader.thinned and not any(told.get(name) for name in ("when", "epochs", "schedule")):
        return True
    sites, numbers = reader.sites, np.asarray(batch.site).tolist()
    kinds = {(sites.phase[number], sites.kind[number]) for number in numbers}
    tensors = {kind.value for kind in STATE_KINDS}
    starts = any(phase == Phase.START.value and kind in tensors for phase, kind in kinds)
    return starts or not any(phase == Phase.OPTIMIZER.value and kind in tensors for phase, kind in kinds)


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


def redundant_starts(sides: Sides, alignment: Alignment, pair: StepPair) -> tuple[Mask, Mask]:
    """Of the rows of `pair.only_a` and of `pair.only_b`, those that hold what the step before left."""
    ends = (_ends(alignment, sides.a, pair.step - 1, None), _ends(alignment, sides.b, pair.step_b - 1, alignment.b_ids))
    return (
        _repeats(alignment, pair.a, pair.only_a, None, ends),
        _repeats(alignment, pair.b, pair.only_b, alignment.b_ids, ends[::-1]),
    )


def with_starts(
    alignment: Alignment, reader: Reader, step: int, own: StepBatch, ids: Ids | None, other_union: Ids
) -> tuple[StepBatch, Ids]:
    """A step's records, and before them tensors as the step before left them; and the union numbers of these.

    Args:
        alignment: the runs' sites.
        reader: the run of the records.
        step: the step, as that run numbers it.
        own: the records.
        ids: the run's site numbers to union numbers; None where they are the same.
        other_union: sites of the other run's records of the step. Those of them that are tensors at its start, and that
            the run has not recorded there, are wanted.
    """
    none = np.empty(0, dtype=np.int64)
    wanted = other_union[starts(alignment, other_union)]
    wanted = wanted[~np.isin(wanted, _unions(own, ids))]
    if not len(wanted) or step - 1 not in reader:
        return own, none
    numbers = np.full(alignment.size, -1, dtype=np.int64)
    known = np.arange(len(alignment.a), dtype=np.int64) if ids is None else ids
    numbers[known] = np.arange(len(known))
    before = reader.read(step - 1)
    rows_of = {}
    unions = _unions(before, ids)
    tensors = np.flatnonzero(_tensors(alignment, unions))
    for row in tensors[np.argsort(np.asarray(before.sequence)[tensors], kind="stable")].tolist():
        rows_of[_key(alignment, int(unions[row]))] = row
    found = [union for union in wanted.tolist() if numbers[union] >= 0 and _key(alignment, union) in rows_of]
    if not found:
        return own, none
    rows = np.array([rows_of[_key(alignment, union)] for union in found], dtype=np.int64)
    return preceded(own, before, rows, numbers[found]), np.array(found, dtype=np.int64)


def _unions(batch: StepBatch, ids: Ids | None) -> Ids:
    sites = np.asarray(batch.site).astype(np.int64)
    return sites if ids is None else ids[sites]


def _tensors(alignment: Alignment, unions: Ids) -> Mask:
    return np.isin(alignment.kind[unions], [kind_code(kind) for kind in STATE_KINDS])


def starts(alignment: Alignment, unions: Ids) -> Mask:
    """Which of these sites are tensors, or an optimizer's state, at the start of a step."""
    started = (alignment.phase[unions] == phase_code(Phase.START)) & (alignment.call[unions] == 0)
    return np.asarray(_tensors(alignment, unions) & started)


def _ends(alignment: Alignment, reader: Reader, step: int, ids: Ids | None) -> Held | None:
    """Checksums of what a step left, by kind, FQN and path; None where it was not recorded."""
    if step not in reader:
        return None
    batch = reader.read(step)
    unions = _unions(batch, ids)
    rows = np.flatnonzero(_tensors(alignment, unions))
    rows = rows[np.argsort(np.asarray(batch.sequence)[rows], kind="stable")]
    return {_key(alignment, int(unions[row])): int(batch.checksum[row]) for row in rows}


def _key(alignment: Alignment, union: int) -> tuple[int, str, str]:
    return int(alignment.kind[union]), alignment.fqn[union], alignment.path[union]


def _repeats(
    alignment: Alignment, batch: StepBatch, rows: Ids, ids: Ids | None, ends: tuple[Held | None, Held | None]
) -> Mask:
    """Rows of one side that repeat the end of its own step before, or of the other's where its own is not known."""
    unions = _unions(batch, ids)[rows]
    repeats = np.zeros(len(rows), dtype=np.bool_)
    held = ends[0] if ends[0] is not None else ends[1]
    if held is None:
        return repeats
    for place in np.flatnonzero(starts(alignment, unions)):
        repeats[place] = held.get(_key(alignment, int(unions[place]))) == int(batch.checksum[rows[place]])
    return repeats
