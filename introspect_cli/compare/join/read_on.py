"""What a resumed run reads and draws before its first step only to get to where it goes on.

A loader cannot begin in the middle of an epoch: it reads the batches before the checkpoint, and the script throws them
away; the random state is restored after that. So the first step of a resumed run begins with batches and a random state
that the other run does not have there, and computes with the right ones. Whether it does is on record: the last batches
that it read are those of the other run, and a generator is in the same state when something first draws from it, or
when the next step begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.sites import Columns, kind_code, phase_code
from introspect_cli.compare.match.names import generator_of
from introspect_cli.compare.table import ABSENT, NOT_SEEN, Because, Table
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.join.at import At, Batch, State, States
    from introspect_cli.compare.join.resume import Goes
    from introspect_cli.store.batch import StepBatch

_BACK = 8
"""Steps in which the other run may have read a batch ahead."""


@dataclass(frozen=True)
class ReadOn:
    """What the first step of a resumed run has before what the other run has there.

    Attributes:
        batches: by loader, how many batches were read and thrown away.
        generators: random generators that were in another state when the step began, and in the same one when
            something first drew from them, or when the next step began.
    """

    batches: dict[str, int] = field(default_factory=dict)
    generators: frozenset[str] = frozenset()


def read_on(goes: Goes) -> ReadOn:
    """What the later run read and drew to get to where it goes on."""
    batches, theirs = {}, goes.there.batches()
    for loader, read in goes.begins.batches().items():
        there = theirs.get(loader, [])
        ended = there or _read_before(goes.there, loader)
        if len(read) > len(there) and ended and read[-len(ended) :] == ended:
            batches[loader] = len(read) - len(there)
    return ReadOn(batches, _restored_within(goes))


def _read_before(there: At, loader: str) -> list[Batch]:
    """The last batch that the whole run had read of a loader before a step, where it read ahead."""
    for back in range(1, min(_BACK, there.step) + 1):
        batches = there.to(there.step - back).batches().get(loader)
        if batches:
            return batches[-1:]
    return []


# --- random states


def _restored_within(goes: Goes) -> frozenset[str]:
    late, whole = _states(goes, 0)
    restored = set()
    for key in late.keys() & whole.keys():
        generator, phase = key[0], key[1]
        if phase is Phase.START and late[key][0] != whole[key][0]:
            later = _later(goes, generator)
            if later and all(one == other for one, other in later):
                restored.add(generator)
    return frozenset(restored)


def looked_later(goes: Goes, generator: str) -> bool:
    """Whether both runs have a generator's state on record after that step has begun."""
    return bool(_later(goes, generator))


def _later(goes: Goes, generator: str) -> list[tuple[State, State]]:
    """A generator's states in both runs when something draws from it in that step; else when a later step begins."""
    late, whole = _states(goes, 0)
    within = [key for key in late.keys() & whole.keys() if key[0] == generator and key[1] is not Phase.START]
    if within:
        return [(late[key], whole[key]) for key in within]
    start = (generator, Phase.START, generator, 0)
    for after in range(1, _BACK + 1):
        late, whole = _states(goes, after)
        if start in late and start in whole:
            return [(late[start], whole[start])]
    return []


def _states(goes: Goes, after: int) -> tuple[States, States]:
    """The random states of the later and the whole run, so many steps after the first."""
    return goes.begins.to(goes.first + after).random_states(), goes.there.to(goes.at + after).random_states()


# --- the step without it


def as_if_begun(batch: StepBatch, sites: Columns, read: ReadOn) -> StepBatch:
    """The records of that step, its last batches under the numbers that they have in the other run."""
    numbers = batch.site
    read_in_training = (sites.kind == kind_code(Kind.BATCH)) & (sites.phase == phase_code(Phase.DATA))
    rows = np.flatnonzero(read_in_training[numbers])
    by_place = {(sites.fqn[n], int(sites.call[n]), sites.path[n]): n for n in np.flatnonzero(read_in_training).tolist()}
    last = {
        loader: 1 + max(int(sites.call[n]) for n in numbers[rows] if sites.fqn[n] == loader) for loader in read.batches
    }
    renumbered = numbers.copy()
    for row in rows.tolist():
        number = int(numbers[row])
        loader = sites.fqn[number]
        if loader in last:
            call = (int(sites.call[number]) - read.batches[loader]) % last[loader]
            renumbered[row] = by_place.get((loader, call, sites.path[number]), number)
    return replace(batch, site=renumbered)


def without_read_on(table: Table, read: ReadOn, late: str) -> Table:
    """The table of that step, in which what the later run read and drew before is no divergence."""
    alignment = table.alignment
    missing = table.row_a if late == "b" else table.row_b
    named = [alignment.site(site) for site in table.site.tolist()]
    batches = [
        called.kind is Kind.BATCH and called.phase is Phase.DATA and called.fqn in read.batches for called in named
    ]
    table = table.marked(np.array(batches, bool) & (missing < 0), ABSENT, Because.READ_ON)
    states = [
        called.kind is Kind.RNG and called.phase is Phase.START and generator_of(called) in read.generators
        for called in named
    ]
    return table.marked(np.array(states, bool) & ~table.one_sided, NOT_SEEN, Because.READ_ON)
