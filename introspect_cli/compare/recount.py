"""Before rows stand beside each other: calls of a module by what it is given, where one run calls it more often.

Calls are counted within a step. Where a run calls a network once more, at first, the second call of one is the third
of the other, and every call after it would be compared with another. So where the numbers of calls differ, the run that
has more counts those that are given the same as the other run's calls; the rest come last. Where inputs are on record
of one run or of none, those that give the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.terms.sites import kind_code, of_kinds, phase_code
from introspect_cli.compare.terms.watched import MODULE_KINDS
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.terms.sites import Columns
    from introspect_cli.store.format.batch import StepBatch

_MOST_CALLS = 2000

Given = dict[int, tuple[tuple[str, int], ...]]
"""By call, the paths and checksums of what goes in, or of what comes out."""


def recounted(columns: tuple[Columns, Columns], batches: tuple[StepBatch, StepBatch]) -> tuple[StepBatch, StepBatch]:
    """The records of a step, in which the calls of the run that has more of a module are counted as the other's."""
    given = [_given(*side, Kind.INPUT) for side in zip(columns, batches, strict=True)]
    if not all(given):
        given = [_given(*side, Kind.OUTPUT) for side in zip(columns, batches, strict=True)]
    made = list(batches)
    for fqn in given[0].keys() & given[1].keys():
        calls = given[0][fqn], given[1][fqn]
        longer = int(len(calls[1]) > len(calls[0]))
        if len(calls[0]) != len(calls[1]) and (numbers := _numbers(calls[longer], calls[1 - longer])):
            made[longer] = _counted_as(columns[longer], made[longer], fqn, numbers)
    return made[0], made[1]


def _given(columns: Columns, batch: StepBatch, kind: Kind) -> dict[str, Given]:
    """What modules are given in a forward pass, or give, by name and call."""
    sites = np.asarray(batch.site, np.int64)
    rows = np.flatnonzero(
        (columns.kind[sites] == kind_code(kind)) & (columns.phase[sites] == phase_code(Phase.FORWARD))
    )
    found: dict[str, dict[int, list[tuple[str, int]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows.tolist():
        site = int(sites[row])
        found[columns.fqn[site]][int(columns.call[site])].append((columns.path[site], int(batch.checksum[row])))
    return {fqn: {call: tuple(sorted(of[call])) for call in sorted(of)} for fqn, of in found.items()}


def _numbers(longer: Given, shorter: Given) -> dict[int, int]:
    """The other run's number for each call of the run that has more; empty where those of one number fit as well."""
    if len(longer) > _MOST_CALLS:
        return {}
    one, two = list(longer), list(shorter)
    matcher = SequenceMatcher(None, list(longer.values()), list(shorter.values()), autojunk=False)
    pairs = {one[i + k]: two[j + k] for i, j, size in matcher.get_matching_blocks() for k in range(size)}
    if len(pairs) <= sum(longer[call] == shorter[call] for call in longer.keys() & shorter.keys()):
        return {}
    rest = iter(sorted(longer.keys() - set(pairs.values())))
    return {call: pairs[call] if call in pairs else next(rest) for call in one}


def _counted_as(columns: Columns, batch: StepBatch, fqn: str, numbers: dict[int, int]) -> StepBatch:
    """The records of a step with the calls of a module, and their gradients, under other numbers."""
    sites = np.asarray(batch.site, np.int64).copy()
    of_module = np.fromiter((columns.fqn[site] == fqn for site in sites.tolist()), np.bool_, len(sites))
    phases = np.isin(columns.phase[sites], [phase_code(Phase.FORWARD), phase_code(Phase.BACKWARD)])
    rows = np.flatnonzero(of_module & phases & of_kinds(columns.kind[sites], MODULE_KINDS))
    every = columns.of({fqn})
    at = {(columns.phase[site], columns.kind[site], columns.call[site], columns.path[site]): site for site in every}
    for row in rows.tolist():
        site = int(sites[row])
        call = numbers.get(int(columns.call[site]), int(columns.call[site]))
        new = at.get((columns.phase[site], columns.kind[site], call, columns.path[site]))
        if new is None:
            return batch  # that call has other values
        sites[row] = new
    return replace(batch, site=sites.astype(batch.site.dtype))
