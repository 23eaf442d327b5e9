"""What the names of a run hold in a few steps, as far as that can prove anything.

Zeros, ones and other constants are equal everywhere, so they prove nothing, and are left out. So are evaluation and
recomputation, which a run may do more often than another without another name.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, count
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.join.sites import Columns, kind_code, phase_code
from introspect_cli.records import Kind, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, KeysView, Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.join.sites import Ids, Mask
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.rank_reader import RankReader

TENSORS = (Kind.PARAM, Kind.BUFFER)
MODULES = (Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
NAMED = (*TENSORS, Kind.GRAD, *MODULES)
"""Kinds whose FQN names a module, or a tensor of one."""

_FEW = 4  # last components of names that are looked for before the names are: most often one was renamed everywhere

Feature = tuple[int, ...]
"""The place of a step among those looked at, kind, phase, call and checksum of a record."""


class Side:
    """One run's records of a few steps, as far as they name modules and tensors and their values can prove anything."""

    def __init__(self, sites: Columns, reader: RankReader, steps: Sequence[int]) -> None:
        """Take a run's sites, as they are compared, and steps, of which the first has to be told from the others."""
        self.sites, self.reader, self._steps = sites, reader, steps
        named = np.isin(sites.kind, [kind_code(kind) for kind in NAMED])
        named &= ~np.isin(sites.phase, [phase_code(phase) for phase in (Phase.EVAL, Phase.RECOMPUTE)])
        self._named = named
        self._asked: tuple[AbstractSet[str], Mask] | None = None

    @property
    def steps(self) -> int:
        """How many steps are looked at."""
        return len(self._steps)

    def renamed(self, sites: Columns) -> Side:
        """The same with its sites under other names."""
        return Side(sites, self.reader, self._steps)

    @property
    def named(self) -> Mask:
        """Which sites have the name of a module, or of a tensor of one."""
        return self._named

    @cached_property
    def first(self) -> StepBatch:
        """The records of the first of the steps."""
        return self.reader.read(self._steps[0])

    @cached_property
    def names(self) -> KeysView[str]:
        """Names of modules and tensors, in the order of recording."""
        fqn = self.sites.fqn
        return dict.fromkeys(fqn if self._named.all() else compress(fqn, self._named.tolist())).keys()

    @property
    def every_name(self) -> KeysView[str]:
        """Names of all that was recorded."""
        return dict.fromkeys(self.sites.fqn).keys()

    @cached_property
    def _everything(self) -> Tree:
        return Tree(self.sites.fqn)

    def has_any(self, names: Collection[str]) -> bool:
        """Whether anything was recorded under one of the names, or below it."""
        ends = {name.rpartition(".")[2] for name in names}
        if len(ends) <= _FEW and not any(end in self.sites.text for end in ends):
            return False
        return any(name in self._everything for name in names)

    @cached_property
    def tree(self) -> Tree:
        """Names of modules and tensors, by what is above them."""
        return Tree(self.names)

    @cached_property
    def tensors(self) -> KeysView[str]:
        """Names of parameters and buffers."""
        return dict.fromkeys(self._tensor_names()).keys()

    @cached_property
    def tensor_tree(self) -> Tree:
        """Parameters and buffers, some of them more than once, by what is above them."""
        return Tree(self._tensor_names())

    def _tensor_names(self) -> list[str]:
        fqn = self.sites.fqn
        return [fqn[site] for site in np.flatnonzero(self._tensor_sites).tolist()]

    @cached_property
    def _tensor_sites(self) -> Mask:
        """Which sites are a parameter's or a buffer's."""
        return np.isin(self.sites.kind, [kind_code(kind) for kind in TENSORS])

    def tensors_of(self, names: AbstractSet[str]) -> set[str]:
        """Those of the names that are parameters or buffers."""
        return {self.sites.fqn[site] for site in np.flatnonzero(self.sites_of(names) & self._tensor_sites).tolist()}

    def owns(self, module: str) -> bool:
        """Whether parameters or buffers are a module's own."""
        start = len(module) + 1
        return any("." not in name[start:] and name in self.tensors for name in self.tree.below(module))

    def sites_of(self, names: AbstractSet[str]) -> Mask:
        """Which sites of modules and tensors have one of the names; of names asked for twice in a row known at once."""
        if self._asked is None or self._asked[0] is not names:
            fqn = self.sites.fqn
            self._asked = names, np.fromiter(map(names.__contains__, fqn), np.bool_, len(fqn)) & self._named
        return self._asked[1]

    def know(self, names: AbstractSet[str], sites: Sequence[int]) -> None:
        """Take it that the names are those of these sites and of no others: nobody need look through a million."""
        mask = np.zeros(len(self.sites), np.bool_)
        mask[sites] = True
        self._asked = names, mask & self._named

    def rows(self, names: AbstractSet[str]) -> Iterator[tuple[int, StepBatch, Ids, Ids]]:
        """For each step: its place, its records, those of the names that can prove something, and their sites."""
        wanted = self.sites_of(names)
        for place, step in enumerate(self._steps):
            batch = self.reader.read(step) if place else self.first
            numbers = np.asarray(batch.site).astype(np.int64)
            rows = np.flatnonzero(wanted[numbers] & telling(batch))
            yield place, batch, rows, numbers[rows]

    def held(self, names: AbstractSet[str]) -> Held:
        """What each of the names holds, where that can prove something."""
        sites, found = self.sites, []
        for place, batch, rows, numbers in self.rows(names):
            own = (sites.kind[numbers], sites.phase[numbers], sites.call[numbers])
            columns = np.array([np.full(len(rows), place), *own], np.int64)
            found.append((numbers, columns, np.asarray(batch.checksum)[rows]))
        every = np.concatenate([numbers for numbers, _, _ in found])
        known: dict[str, int] = {}
        met = np.fromiter(
            map(known.setdefault, map(sites.fqn.__getitem__, every.tolist()), count()), np.int64, len(every)
        )
        owner = (np.cumsum(met == np.arange(len(met))) - 1)[met]  # whose record it is, by where the name was first met
        places = np.concatenate([own for _, own, _ in found], axis=1)
        sums = np.concatenate([own for _, _, own in found]).astype(np.uint64)
        return Held(list(known), owner, places, sums)


@dataclass(frozen=True)
class Held:
    """What names hold, as columns: a million records are put together by arrays, and a few are looked at as sets.

    Attributes:
        names: the names.
        owner: whose record each is: a number into `names`.
        places: int64 (4, n): the place of its step among those looked at, its kind, phase and call.
        checksum: uint64 (n,).
    """

    names: list[str]
    owner: Ids
    places: Ids
    checksum: Any

    @cached_property
    def codes(self) -> Any:
        """Place and checksum of each record as one number, uint64 (n,): as sure as a checksum is."""
        step, kind, phase, call = (own.astype(np.uint64) for own in self.places)
        code = ((step * np.uint64(1 << 6) + kind) * np.uint64(1 << 4) + phase) * np.uint64(1 << 40) + call
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            code = (code ^ (code >> np.uint64(shift))) * np.uint64(factor)
        return (code ^ (code >> np.uint64(31))) ^ self.checksum

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each name."""
        return {name: number for number, name in enumerate(self.names)}

    def only(self, names: AbstractSet[str]) -> Held:
        """The same of some names alone."""
        kept = np.fromiter(map(names.__contains__, self.names), np.bool_, len(self.names))
        if kept.all():
            return self
        rows, number = kept[self.owner], np.cumsum(kept) - 1
        return Held(
            list(compress(self.names, kept.tolist())),
            number[self.owner[rows]],
            self.places[:, rows],
            self.checksum[rows],
        )

    @cached_property
    def _by_owner(self) -> tuple[Ids, Ids]:
        order = np.argsort(self.owner, kind="stable")
        return order, np.searchsorted(self.owner[order], np.arange(len(self.names) + 1))

    def of(self, name: str) -> set[Feature]:
        """What one of the names holds."""
        number = self.numbers.get(name)
        if number is None:
            return set()
        order, ends = self._by_owner
        rows = order[ends[number] : ends[number + 1]]
        return set(zip(*self.places[:, rows].tolist(), self.checksum[rows].tolist(), strict=True))


class Tree:
    """Names in order, so that what is at or below one of them is a slice."""

    def __init__(self, names: Iterable[str]) -> None:
        """Take the names; in the order of recording they are nearly sorted."""
        self._sorted = sorted(names)

    def _range(self, top: str) -> tuple[int, int]:
        names, start = self._sorted, f"{top}."
        low, step = bisect_left(names, start), 1
        while low + step <= len(names) and names[low + step - 1].startswith(start):  # below most there are few
            step *= 2
        end = bisect_left(names, f"{top}/", low + step // 2, min(low + step, len(names)))  # "/" comes after "."
        return low, end

    def roots(self) -> list[str]:
        """The roots of all names."""
        found, at = dict[str, None](), 0
        while at < len(self._sorted):
            root, dot, _ = self._sorted[at].partition(".")
            found[root] = None
            at = bisect_left(self._sorted, f"{root}/", at) if dot else at + 1
        return list(found)

    def __contains__(self, top: str) -> bool:
        """Whether a name is there, or one below it."""
        at = bisect_left(self._sorted, top)
        if at == len(self._sorted) or not self._sorted[at].startswith(top):
            return False
        if len(self._sorted[at]) == len(top):
            return True
        low = bisect_left(self._sorted, f"{top}.", at)  # before the dot come a few characters that names may have
        return low < len(self._sorted) and self._sorted[low].startswith(f"{top}.")

    def count(self, top: str) -> int:
        """How many names are below a name."""
        low, high = self._range(top)
        return high - low

    def below(self, top: str) -> list[str]:
        """The names below a name."""
        low, high = self._range(top)
        return self._sorted[low:high]


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


def parents(name: str) -> Iterator[str]:
    """What is above a name, the nearest first."""
    above = name.rpartition(".")[0]
    while above:
        yield above
        above = above.rpartition(".")[0]


def alone(a: Side, b: Side) -> tuple[set[str], set[str]]:
    """Names that one run only has, of a and of b.

    Sites that both runs have keep their names, and most have their place too: the names of the few others are all that
    is looked at. One of these may stand for a shared site besides, and then the other run has it too.
    """
    rest = _unshared(a, b)
    lost = [{side.sites.fqn[site] for site in own} for side, own in zip((a, b), rest, strict=True)]
    only = lost[0] - lost[1], lost[1] - lost[0]
    shared = np.ones(len(a.sites), np.bool_)
    shared[rest[0]] = False
    kept = compress(a.sites.fqn, shared.tobytes())
    if not (only[0] | only[1]).isdisjoint(kept):
        for names, other in zip(only, (b, a), strict=True):
            names.difference_update(other.names)
    for side, own, names, known in zip((a, b), rest, only, lost, strict=True):
        side.know(names, own if len(names) == len(known) else [site for site in own if side.sites.fqn[site] in names])
    return only


def _unshared(a: Side, b: Side) -> tuple[list[int], list[int]]:
    """Sites of modules and tensors that the other run has not."""
    keys = a.sites.keys, b.sites.keys
    shared = min(map(len, keys))
    same = keys[0][:shared] == keys[1][:shared]
    rest = [np.concatenate([np.flatnonzero(~same), np.arange(shared, len(own))]) for own in keys]
    left = [own[rows] for own, rows in zip(keys, rest, strict=True)]
    found = []
    for side, rows, own, other in zip((a, b), rest, left, reversed(left), strict=True):
        ordered = np.sort(other)  # `np.isin` imports masked arrays, which take a while
        place = np.minimum(np.searchsorted(ordered, own), max(len(ordered) - 1, 0))
        lost = rows[ordered[place] != own] if len(ordered) else rows
        found.append(lost[side.named[lost]].tolist())
    return found[0], found[1]
