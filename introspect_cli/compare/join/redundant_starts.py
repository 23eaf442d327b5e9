"""Tensors that one run recorded anew at the start of a step, though nothing had changed them.

A run that rebuilds its model from a checkpoint, or whose capture left out the step before, records at the start of a
step what the other run did not need to: it is on record there as the end of the step before. Where both are equal,
nothing differs; where they are not, something other than the optimizer has changed the tensor in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.join.coverage import STATE_KINDS
from introspect_cli.compare.join.sites import Alignment, Ids, Mask, kind_code, phase_code
from introspect_cli.records import Phase

if TYPE_CHECKING:
    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.join.sides import Sides

Held = dict[tuple[int, str, str], int]


def restated(sides: Sides, alignment: Alignment, pair: StepPair) -> tuple[Mask, Mask]:
    """Of the rows of `pair.only_a` and of `pair.only_b`, those that hold what the step before left."""
    ends = (_ends(alignment, sides.a, pair.step - 1, None), _ends(alignment, sides.b, pair.step_b - 1, alignment.b_ids))
    return (
        _repeats(alignment, pair.a, pair.only_a, None, ends),
        _repeats(alignment, pair.b, pair.only_b, alignment.b_ids, ends[::-1]),
    )


def _unions(batch: Any, ids: Ids | None) -> Ids:
    sites = np.asarray(batch.site).astype(np.int64)
    return sites if ids is None else ids[sites]


def _tensors(alignment: Alignment, unions: Ids) -> Mask:
    return np.isin(alignment.kind[unions], [kind_code(kind) for kind in STATE_KINDS])


def starts(alignment: Alignment, unions: Ids) -> Mask:
    """Which of these sites are tensors, or an optimizer's state, at the start of a step."""
    started = (alignment.phase[unions] == phase_code(Phase.START)) & (alignment.call[unions] == 0)
    return np.asarray(_tensors(alignment, unions) & started)


def _ends(alignment: Alignment, reader: Any, step: int, ids: Ids | None) -> Held | None:
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
    alignment: Alignment, batch: Any, rows: Ids, ids: Ids | None, ends: tuple[Held | None, Held | None]
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
