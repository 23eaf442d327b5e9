"""What the names of a run hold in a few steps, as far as that can prove anything.

Zeros, ones and other constants are equal everywhere, so they prove nothing, and are left out. So are evaluation and
recomputation, which a run may do more often than another without another name.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from itertools import compress, repeat
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.sites import Columns, kind_code, phase_code
from introspect_cli.records import Kind, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.join.sites import Ids, Mask
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.rank_reader import RankReader

TENSORS = (Kind.PARAM, Kind.BUFFER)
MODULES = (Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
NAMED = (*TENSORS, Kind.GRAD, *MODULES)
"""Kinds whose FQN names a module, or a tensor of one."""

Feature = tuple[int, ...]
"""The place of a step among those looked at, kind, phase, call and checksum of a record."""

Features = dict[str, set[Feature]]


class Side:
    """One run's records of a few steps, as far as they name modules and tensors and their values can prove anything."""

    def __init__(self, sites: Columns, reader: RankReader, steps: Sequence[int]) -> None:
        """Take a run's sites, as they are compared, and steps, of which the first has to be told from the others."""
        self.sites, self.reader, self._steps = sites, reader, steps
        named = np.isin(sites.kind, [kind_code(kind) for kind in NAMED])
        named &= ~np.isin(sites.phase, [phase_code(phase) for phase in (Phase.EVAL, Phase.RECOMPUTE)])
        self._named = named

    @property
    def steps(self) -> int:
        """How many steps are looked at."""
        return len(self._steps)

    def renamed(self, sites: Columns) -> Side:
        """The same with its sites under other names."""
        return Side(sites, self.reader, self._steps)

    @cached_property
    def names(self) -> set[str]:
        """Names of modules and tensors."""
        return set(compress(self.sites.fqn, self._named.tolist()))

    @cached_property
    def tensors(self) -> set[str]:
        """Names of parameters and buffers."""
        own = np.isin(self.sites.kind, [kind_code(kind) for kind in TENSORS])
        return set(compress(self.sites.fqn, own.tolist()))

    @cached_property
    def heads(self) -> set[str]:
        """All names, and what is above them."""
        return heads(self.names)

    def rows(self, names: AbstractSet[str]) -> Iterator[tuple[int, StepBatch, Ids, Ids]]:
        """For each step: its place, its records, those of the names that can prove something, and their sites."""
        wanted = np.fromiter(map(names.__contains__, self.sites.fqn), np.bool_, len(self.sites.fqn)) & self._named
        for place, step in enumerate(self._steps):
            batch = self.reader.read(step)
            numbers = np.asarray(batch.site).astype(np.int64)
            rows = np.flatnonzero(wanted[numbers] & telling(batch))
            yield place, batch, rows, numbers[rows]

    def features(self, names: AbstractSet[str]) -> Features:
        """What each of the names holds, where that can prove something."""
        sites, found = self.sites, defaultdict[str, set[Feature]](set)
        for place, batch, rows, numbers in self.rows(names):
            kinds, phases, calls = (own[numbers].tolist() for own in (sites.kind, sites.phase, sites.call))
            sums = np.asarray(batch.checksum)[rows].tolist()
            held = zip(repeat(place), kinds, phases, calls, sums)
            for name, feature in zip(map(sites.fqn.__getitem__, numbers.tolist()), held, strict=True):
                found[name].add(feature)
        return dict(found)


def telling(batch: StepBatch) -> Mask:
    """Rows whose value can prove anything: seen, and not the same number all over, as far as statistics tell."""
    mask: Mask = np.asarray(batch.status) == int(Status.OBSERVED)
    low, high = batch.floats.get("min"), batch.floats.get("max")
    if low is not None and high is not None:
        low, high = np.asarray(low), np.asarray(high)
        with np.errstate(invalid="ignore"):
            mask &= ~(low == high)
    return mask


def heads(names: Iterable[str]) -> set[str]:
    """Names, and all that is above them."""
    found = set(names)
    level = found
    while level:
        level = {name.rpartition(".")[0] for name in level} - found
        found |= level
    found.discard("")
    return found


def below(names: Iterable[str], tops: Iterable[str]) -> list[str]:
    """Those of the names that are among the tops, or below one."""
    known = dict.fromkeys(tops, True)
    known[""] = False
    found = []
    for name in names:
        head, passed = name, []
        while (inside := known.get(head)) is None:
            passed.append(head)
            head = head.rpartition(".")[0]
        for own in passed[1:]:
            known[own] = inside
        if inside:
            found.append(name)
    return found
