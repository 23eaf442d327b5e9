"""What the names of a run hold in a few steps, as far as that can prove anything.

Zeros, ones and other constants are equal everywhere, so they prove nothing, and are left out. So are evaluation and
recomputation, which a run may do more often than another without another name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import compress, count
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.terms.names import Rename, Tree
from introspect_cli.compare.terms.sites import Columns, Ids, Mask, columns, of_kinds, phase_code
from introspect_cli.records import Kind, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, KeysView, Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.read.rank_reader import RankReader

TENSORS = (Kind.PARAM, Kind.BUFFER)
MODULES = (Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
NAMED = (*TENSORS, Kind.GRAD, *MODULES)
"""Kinds whose FQN names a module, or a tensor of one."""
PROVES_NOTHING = (Phase.EVAL, Phase.RECOMPUTE)
"""Phases that prove nothing."""

_FEW = 4  # last components of names that are looked for before the names are: most often one was renamed everywhere

Feature = tuple[int, ...]
"""The place of a step among those looked at, kind, phase, call and checksum of a record."""


class Side:
    """One run's records of a few steps, as far as they name modules and tensors and their values can prove anything."""

    def __init__(self, reader: RankReader, rename: Rename | None, steps: Sequence[int]) -> None:
        """Take a run, how its names are read, and steps, of which the first has to be told from the others."""
        self.reader, self.steps, self._rename = reader, steps, rename
        self._asked: tuple[AbstractSet[str], Mask] | None = None

    @cached_property
    def sites(self) -> Columns:
        """The run's sites, as they are compared."""
        return columns(self.reader.sites, self._rename)

    @cached_property
    def variables(self) -> dict[str, str]:
        """What the script calls each root, by the root's name as it is compared."""
        change = self._rename or str
        return {change(module.fqn): module.variable for module in self.reader.modules if module.variable}

    @cached_property
    def named(self) -> Mask:
        """Which sites name modules and tensors."""
        return of_kinds(self.sites.kind, NAMED) & ~np.isin(
            self.sites.phase, [phase_code(phase) for phase in PROVES_NOTHING]
        )

    @cached_property
    def first(self) -> StepBatch:
        """The records of the first of the steps."""
        return self.reader.read(self.steps[0])

    @cached_property
    def names(self) -> KeysView[str]:
        """Names of modules and tensors, in the order of recording."""
        fqn = self.sites.fqn
        return dict.fromkeys(fqn if self.named.all() else compress(fqn, self.named.tolist())).keys()

    @cached_property
    def tree(self) -> Tree:
        """Names of modules and tensors, by what is above them."""
        return Tree(self.names)

    @cached_property
    def every_name(self) -> Tree:
        """Names of all that was recorded, by what is above them."""
        return Tree(self.sites.fqn)

    def has_any(self, names: Collection[str]) -> bool:
        """Whether anything was recorded under one of the names, or below it."""
        ends = {name.rpartition(".")[2] for name in names}
        if len(ends) <= _FEW and not any(end in self.sites.text for end in ends):
            return False
        return any(name in self.every_name for name in names)

    @cached_property
    def tensors(self) -> KeysView[str]:
        """Names of parameters and buffers."""
        return dict.fromkeys(self._tensor_names()).keys()

    @cached_property
    def tensor_tree(self) -> Tree:
        """Parameters and buffers, some of them more than once, by what is above them."""
        return Tree(self._tensor_names())

    def _tensor_names(self) -> Iterator[str]:
        return map(self.sites.fqn.__getitem__, np.flatnonzero(self._of_tensors).tolist())

    @cached_property
    def _of_tensors(self) -> Mask:
        """Which sites are a parameter's or a buffer's."""
        return of_kinds(self.sites.kind, TENSORS)

    def tensors_of(self, names: AbstractSet[str]) -> set[str]:
        """Those of the names that are parameters or buffers."""
        return {self.sites.fqn[site] for site in np.flatnonzero(self.sites_of(names) & self._of_tensors).tolist()}

    def owns(self, module: str) -> bool:
        """Whether a module has parameters or buffers that are not those of a module inside it."""
        start = len(module) + 1
        return any("." not in name[start:] and name in self.tensors for name in self.tree.below(module))

    def sites_of(self, names: AbstractSet[str]) -> Mask:
        """Which sites of modules and tensors have one of the names; the answer for the last names is kept."""
        if self._asked is None or self._asked[0] is not names:
            fqn = self.sites.fqn
            self._asked = names, np.fromiter(map(names.__contains__, fqn), np.bool_, len(fqn)) & self.named
        return self._asked[1]

    def know(self, names: AbstractSet[str], sites: Sequence[int]) -> None:
        """Take it that the names are those of these sites and of no others: nobody need look through a million."""
        mask = np.zeros(len(self.sites), np.bool_)
        mask[sites] = True
        self._asked = names, mask & self.named

    def rows(self, names: AbstractSet[str]) -> Iterator[tuple[int, StepBatch, Ids, Ids]]:
        """For each step: its place, its records, those of the names that can prove something, and their sites."""
        wanted = self.sites_of(names)
        for place, step in enumerate(self.steps):
            batch = self.reader.read(step) if place else self.first
            numbers = batch.site.astype(np.int64)
            rows = np.flatnonzero(wanted[numbers] & telling(batch))
            yield place, batch, rows, numbers[rows]

    def held(self, names: AbstractSet[str]) -> Held:
        """What each of the names holds, where that can prove something."""
        sites, steps = self.sites, []
        for place, batch, rows, numbers in self.rows(names):
            where = (sites.kind[numbers], sites.phase[numbers], sites.call[numbers])
            columns = np.array([np.full(len(rows), place), *where], np.int64)
            steps.append((numbers, columns, batch.checksum[rows]))
        every = np.concatenate([numbers for numbers, _, _ in steps])
        numbers_of: dict[str, int] = {}
        met = np.fromiter(
            map(numbers_of.setdefault, map(sites.fqn.__getitem__, every.tolist()), count()), np.int64, len(every)
        )
        owner = (np.cumsum(met == np.arange(len(met))) - 1)[met]  # whose record it is, by where the name was first met
        places = np.concatenate([columns for _, columns, _ in steps], axis=1)
        checksums = np.concatenate([checksum for _, _, checksum in steps]).astype(np.uint64)
        return Held(list(numbers_of), owner, places, checksums)


@dataclass(frozen=True)
class Held:
    """What names hold, as columns: a million records are put together by arrays, and a few are looked at as sets.

    Attributes:
        owner: whose record each is: a number into `names`.
        places: int64 (4, n): the place of its step among those looked at, its kind, phase and call.
        checksum: uint64 (n,).
    """

    names: list[str]
    owner: Ids
    places: Ids
    checksum: Any

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
    def codes(self) -> Any:
        """Place and checksum of each record as one number, uint64 (n,): as sure as a checksum is."""
        step, kind, phase, call = (column.astype(np.uint64) for column in self.places)
        code = ((step * np.uint64(1 << 6) + kind) * np.uint64(1 << 4) + phase) * np.uint64(1 << 40) + call
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            code = (code ^ (code >> np.uint64(shift))) * np.uint64(factor)
        return (code ^ (code >> np.uint64(31))) ^ self.checksum

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def _by_owner(self) -> tuple[Ids, Ids]:
        order = np.argsort(self.owner, kind="stable")
        return order, np.searchsorted(self.owner[order], np.arange(len(self.names) + 1))

    def of(self, name: str) -> set[Feature]:
        """What one of the names holds."""
        number = self._numbers.get(name)
        if number is None:
            return set()
        order, ends = self._by_owner
        rows = order[ends[number] : ends[number + 1]]
        return set(zip(*self.places[:, rows].tolist(), self.checksum[rows].tolist(), strict=True))


def telling(batch: StepBatch) -> Mask:
    """Rows whose value can prove anything: seen, and not the same number all over, as far as statistics tell."""
    mask: Mask = batch.status == int(Status.OBSERVED)
    low, high = batch.floats.get("min"), batch.floats.get("max")
    if low is not None and high is not None:
        with np.errstate(invalid="ignore"):
            mask &= ~(np.asarray(low) == np.asarray(high))
    return mask


def one_sided(a: Side, b: Side) -> tuple[set[str], set[str]]:
    """Names that one run only has, of a and of b.

    Sites that both runs have keep their names, and most have their place too: the names of the few others are all that
    is looked at. One of these may stand for a shared site besides, and then the other run has it too.
    """
    sides = a, b
    rest = _one_sided_sites(a, b)
    lost = [{side.sites.fqn[site] for site in sites} for side, sites in zip(sides, rest, strict=True)]
    only = lost[0] - lost[1], lost[1] - lost[0]
    shared = np.ones(len(a.sites), np.bool_)
    shared[rest[0]] = False
    if not (only[0] | only[1]).isdisjoint(compress(a.sites.fqn, shared.tobytes())):
        only[0].difference_update(b.names)
        only[1].difference_update(a.names)
    for side, sites, names, every in zip(sides, rest, only, lost, strict=True):
        few = sites if len(names) == len(every) else [site for site in sites if side.sites.fqn[site] in names]
        side.know(names, few)
    return only


def _one_sided_sites(a: Side, b: Side) -> tuple[list[int], list[int]]:
    """Sites of modules and tensors that the other run has not."""
    keys = a.sites.keys, b.sites.keys
    shared = min(map(len, keys))
    same = keys[0][:shared] == keys[1][:shared]
    rest = [np.concatenate([np.flatnonzero(~same), np.arange(shared, len(of_run))]) for of_run in keys]
    left = [of_run[rows] for of_run, rows in zip(keys, rest, strict=True)]
    sites = []
    for side, rows, of_run, other in zip((a, b), rest, left, reversed(left), strict=True):
        ordered = np.sort(other)  # `np.isin` imports masked arrays, which take a while
        place = np.minimum(np.searchsorted(ordered, of_run), max(len(ordered) - 1, 0))
        lost = rows[ordered[place] != of_run] if len(ordered) else rows
        sites.append(lost[side.named[lost]].tolist())
    return sites[0], sites[1]
