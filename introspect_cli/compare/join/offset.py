"""Which step of a whole run a resumed one begins at.

A resumed run counts its steps from 0 again. The parameters it starts with are those the whole run had after some
step, and parameters hardly ever return, so equal checksums give the offset away: of all of them, or of most, where the
checkpoint did not restore the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from introspect_cli.compare.join.sites import Columns, kind_code, phase_code
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from introspect_cli.labels import Labels
    from introspect_cli.store.index import StepEntry
    from introspect_cli.store.whole import Reader

_TENSORS = (Kind.PARAM, Kind.BUFFER)
Checksums = dict[tuple[str, str, str], int]


def _values(reader: Reader, sites: Columns, entry: StepEntry, kinds: tuple[Kind, ...], phase: Phase) -> Checksums:
    """Checksums of tensors by kind, FQN and path at a phase: of several calls the first at the start, else the last."""
    batch = reader.read(entry.step)
    wanted = np.isin(sites.kind, [kind_code(kind) for kind in kinds]) & (sites.phase == phase_code(phase))
    numbers = np.asarray(batch.site)
    rows = np.flatnonzero(wanted[numbers])
    rows = rows[np.argsort(np.asarray(batch.sequence)[rows], kind="stable")]
    if phase is Phase.START:
        rows = rows[::-1]
    found: Checksums = {}
    for row in rows:
        number = int(numbers[row])
        found[str(sites.kind[number]), sites.fqn[number], sites.path[number]] = int(batch.checksum[row])
    return found


def start_values(reader: Reader, sites: Columns, kinds: tuple[Kind, ...] = _TENSORS) -> Checksums:
    """Checksums of what a run's first captured step began with."""
    if not len(reader):
        return {}
    return _values(reader, sites, reader.entry(0), kinds, Phase.START)


def end_values(reader: Reader, sites: Columns, entry: StepEntry, kinds: tuple[Kind, ...] = _TENSORS) -> Checksums:
    """Checksums of what a step left."""
    return _values(reader, sites, entry, kinds, Phase.OPTIMIZER)


def _found_in(whole: Reader, sites: Columns, start: Checksums) -> int | None:
    """The step of `whole` after which its parameters are those of `start`, as (step + 1); None for none."""
    param = str(kind_code(Kind.PARAM))
    target = {fqn: value for (kind, fqn, _), value in start.items() if kind == param}
    if not target:
        return None
    last: dict[str, int] = {}
    after = (sites.phase == phase_code(Phase.OPTIMIZER)) & (sites.call == 0)  # later calls are within the step
    codes = np.flatnonzero((sites.kind == kind_code(Kind.PARAM)) & after)
    for number in codes:
        last[sites.fqn[number]] = int(number)
    shared = [fqn for fqn in target if fqn in last]
    if not shared or len(shared) < len(last):
        return None
    goal: npt.NDArray[np.uint64] = np.array([target[fqn] for fqn in shared], dtype=np.uint64)
    numbers = np.array([last[fqn] for fqn in shared])
    equal = np.zeros(len(whole), dtype=np.int64)
    for row in range(len(whole)):
        batch = whole.read_row(row)
        values = np.zeros(len(sites), dtype=np.uint64)
        values[np.asarray(batch.site)] = np.asarray(batch.checksum)
        equal[row] = int((values[numbers] == goal).sum())
        if equal[row] == len(goal):
            break
    best = int(np.argmax(equal)) if len(equal) else 0
    standing_out = len(equal) == 1 or (equal == equal[best]).sum() == 1 if len(equal) else False
    if not standing_out or 2 * equal[best] < len(goal):
        return None
    return int(whole.entries["step"][best]) + 1


def detect(reader_a: Reader, sites_a: Columns, reader_b: Reader, sites_b: Columns) -> int | None:
    """The offset that makes one run the continuation of the other.

    Returns:
        k where step s of b is step s + k of a (negative where a is the resumed one), 0 where both begin with the
        same parameters, None where neither begins where the other has been.
    """
    start_a, start_b = start_values(reader_a, sites_a), start_values(reader_b, sites_b)
    shared = start_a.keys() & start_b.keys()
    if not shared or all(start_a[key] == start_b[key] for key in shared):
        return 0
    found = _found_in(reader_a, sites_a, start_b)
    if found is not None:
        return found - int(reader_b.entry(0).step)
    found = _found_in(reader_b, sites_b, start_a)
    return None if found is None else int(reader_a.entry(0).step) - found


def named_apart(a: Mapping[int, Labels], b: Mapping[int, Labels]) -> int:
    """By how much a's number of a step is larger than b's of the step with the same `global_step`; 0 where unknown."""
    apart: list[int] = []
    for labels in (a, b):
        counted = {count - step for step, own in labels.items() if isinstance(count := own.get("global_step"), int)}
        if len(counted) != 1:  # nobody counts, or a training was begun anew within the run
            return 0
        apart.append(counted.pop())
    return apart[1] - apart[0]
