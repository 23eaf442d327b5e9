"""Which name of a is which name of b.

Names are equal, or changed by `--rename`. The others are recognised by what they hold: a refactoring renames, wraps,
moves and inserts; none of it changes a number, and a checksum does not know a name. Parameters, inputs, outputs and
gradients with equal checksums are paired, each name with the one partner that shares most with it. A match of one
tensor is taken for its module, and for as much of the tree above it as nothing contradicts, so that a rename that is
recognised once holds everywhere below and in all steps. A name of a that is another module's in b gets one that b does
not have. Of several models of one class, the one that holds the same is the same, else the one that one variable holds.

Zeros, ones and other constants are equal everywhere, so they prove nothing, and are left out. So are evaluation and
recomputation, which a run may do more often than another without another name. Values that several unmatched modules
share prove nothing, unless the rest of these modules distinguishes them.

The first step that both runs have is looked at, a later one and the last: what was equal by chance, or is a copy that
training has not changed yet, holds other values there although all that has kept its name agrees.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress, count, product
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.terms.names import (
    DISPLACED,
    Rename,
    Renamed,
    Source,
    Tree,
    ambiguous,
    ancestors,
    class_of_root,
    numbered_children,
    renamer,
    renamer_of,
    with_ancestors,
)
from introspect_cli.compare.terms.sites import (
    MODULE_VALUES,
    Columns,
    Ids,
    Mask,
    columns,
    of_kinds,
    phase_code,
)
from introspect_cli.records import Kind, Phase, Status
from introspect_cli.store.read.rank_reader import RankReader
from introspect_cli.texts import begin_alike

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.terms.options import DiffOptions
    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.read.run import Run
    from introspect_cli.store.read.step_reader import Reader

Variables = tuple["Mapping[str, str]", "Mapping[str, str]"]
"""Of a and of b, what the script calls each root."""

NamePair = tuple[str, str]
"""A name of a and a name of b."""

Feature = tuple[int, ...]
"""The place of a step among those looked at, kind, phase, call and checksum of a record."""


@dataclass(frozen=True)
class Correspondence:
    """The mapping of a's names to b's.

    Attributes:
        patterns: regular expressions and replacements that were asked for.
        renamed: names of a, after these, that have another name in b, or none; the longest prefix wins.
        variables: of a and of b, what the script calls each root.
    """

    patterns: Sequence[tuple[str, str]] = ()
    renamed: Mapping[str, Renamed] = field(default_factory=dict)
    variables: Variables = field(default_factory=lambda: ({}, {}))

    @cached_property
    def rename(self) -> Rename | None:
        """Function from a's names to b's, by `patterns` and `renamed`; None where all names are the same."""
        return renamer(self.patterns, {old: new.name for old, new in self.renamed.items()})

    @cached_property
    def asked(self) -> Rename | None:
        """Function that applies only `patterns` to a's names; None where there are none."""
        return renamer(self.patterns, {})

    def root_words(self, name: str) -> str:
        """Sentence with the variable that holds the root of `name` in both scripts.

        "" where no run has several roots of its class, or either run does not know the root's variable.
        """
        root, change = name.partition(".")[0], self.rename or str
        a, b = ({change(root_of_a): variable for root_of_a, variable in self.variables[0].items()}, self.variables[1])
        if class_of_root(root) not in ambiguous(a, b) or root not in a or root not in b:
            return ""
        if a[root] == b[root]:
            return f"{root} is called {a[root]} in the script."
        return f"{root} is called {a[root]} in the script of a, {b[root]} in that of b."


def correspond(a: Reader, b: Reader, options: DiffOptions, offset: int) -> Correspondence:
    """Which name of a rank of a is which of b, matched by value.

    By `--rename` alone if either reader stands for several ranks, `by_value` is off, or all steps are equal.

    Args:
        a: reader of run a's rank.
        b: reader of run b's rank.
        options: what counts.
        offset: step k of b belongs to step k + offset of a.
    """
    if not isinstance(a, RankReader) or not isinstance(b, RankReader) or a.is_whole or b.is_whole:
        return Correspondence(options.rename)
    if not options.by_value or _last_chain(a) == _last_chain(b):
        return Correspondence(options.rename)
    return matched_by_value(a, b, options.rename, offset=offset)


def other_roots(a: Run, b: Run, options: DiffOptions) -> Correspondence | None:
    """`correspond` for two runs of one rank whose root modules have no name in common; None for all other runs.

    None too where either run recorded no parameter.
    """
    if len(a.recorded) != 1 or len(b.recorded) != 1 or a.combined_ranks or b.combined_ranks:
        return None
    one, two = a.rank(a.recorded[0]), b.rank(b.recorded[0])
    roots = [
        {fqn.partition(".")[0] for fqn, kind in zip(reader.sites.fqn, reader.sites.kind, strict=True) if kind == _PARAM}
        for reader in (one, two)
    ]
    return correspond(one, two, options, options.offset or 0) if all(roots) and not roots[0] & roots[1] else None


_PARAM = Kind.PARAM.value


def _last_chain(reader: Reader) -> tuple[int, bytes]:
    """(number of steps, digest chained over all of them): equal for ranks that recorded the same in all steps."""
    return (len(reader), reader.entry(len(reader) - 1).chain) if len(reader) else (0, b"")


@contextmanager
def _without_gc() -> Iterator[None]:
    """Turn garbage collection off inside the block, and on again after it if it was on.

    A pass of the collector over a million names is slow and finds nothing.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_without_gc()
def matched_by_value(
    a: RankReader, b: RankReader, patterns: Sequence[tuple[str, str]] = (), *, offset: int = 0
) -> Correspondence:
    """Which name of a is which of b, by equal checksums in the first, second and last step that both have.

    By `patterns` alone where they have no step in common.

    Args:
        a: reader of run a's rank.
        b: reader of run b's rank.
        patterns: (regular expression, replacement) for a's names, applied first.
        offset: step k of b belongs to step k + offset of a.
    """
    steps = np.asarray(a.entries["step"])
    steps = steps[np.isin(steps - offset, b.entries["step"])]
    if not len(steps):
        return Correspondence(patterns)
    chosen = sorted({int(steps[place]) for place in {0, min(1, len(steps) - 1), len(steps) - 1}})
    rename = Correspondence(patterns).asked
    given, two = Side(a, rename, chosen), Side(b, None, [step - offset for step in chosen])
    roots = matched_roots((given, two))
    one = given
    if roots:  # a root whose name is taken gets one that b does not have
        taken = {old: new.name for old, new in displaced_names(given, roots).items()}
        moved = renamer_of({**roots, **taken})
        one = Side(a, lambda name: moved(rename(name) if rename else name), chosen)
    search = Search(one, two)
    back = {new: old for old, new in roots.items()}

    def in_a(name: str) -> str:
        """A name under which `roots` have been applied, with its root as a calls it."""
        head, dot, rest = name.partition(".")
        return back.get(head, head) + dot + rest

    renamed = {old: Renamed(new, Source.ROOT) for old, new in roots.items()}
    renamed |= {in_a(old): new for old, new in search.renamed.items()}
    renamed = {old: new for old, new in renamed.items() if old != new.name}
    renamed |= displaced_names(given, {old: new.name for old, new in renamed.items()})
    return Correspondence(patterns, renamed, (given.variables, two.variables))


# --- what names hold

TENSORS = (Kind.PARAM, Kind.BUFFER)
NAMED = (*TENSORS, Kind.GRAD, *MODULE_VALUES)
"""Kinds whose FQN names a module, or a tensor of one."""
PROVES_NOTHING = (Phase.EVAL, Phase.RECOMPUTE)
"""Phases that prove nothing."""


class Side:
    """One run's records in a few steps, under the names that are compared; only distinctive values count."""

    def __init__(self, reader: RankReader, rename: Rename | None, steps: Sequence[int]) -> None:
        """Keep the arguments; records and names are read at the first access.

        Args:
            reader: of the run's rank.
            rename: changes its names to those that are compared; None to strip wrappers alone.
            steps: numbers of the steps to read, in the run's own count.
        """
        self.reader, self.steps, self._rename = reader, steps, rename
        self._asked: tuple[AbstractSet[str], Mask] | None = None

    @cached_property
    def sites(self) -> Columns:
        """The run's sites with renamed FQNs."""
        return columns(self.reader.sites, self._rename)

    @cached_property
    def variables(self) -> dict[str, str]:
        """What the script calls each root (`model`), by the root's renamed name.

        Roots without a variable are left out.
        """
        change = self._rename or str
        return {change(module.fqn): module.variable for module in self.reader.modules if module.variable}

    @cached_property
    def named(self) -> Mask:
        """Mask of sites whose kind is in `NAMED`, outside of evaluation and recomputation."""
        return of_kinds(self.sites.kind, NAMED) & ~np.isin(
            self.sites.phase, [phase_code(phase) for phase in PROVES_NOTHING]
        )

    @cached_property
    def first(self) -> StepBatch:
        """The records of the first of `steps`; kept, while those of other steps are read each time."""
        return self.reader.read(self.steps[0])

    @cached_property
    def names(self) -> KeysView[str]:
        """Names of `named` sites, each once, in the order of recording."""
        fqn = self.sites.fqn
        return dict.fromkeys(fqn if self.named.all() else compress(fqn, self.named.tolist())).keys()

    @cached_property
    def tree(self) -> Tree:
        """`names` as a `Tree`."""
        return Tree(self.names)

    @cached_property
    def tensors(self) -> KeysView[str]:
        """Names of parameters and buffers, each once, in the order of recording."""
        return dict.fromkeys(self._tensor_names()).keys()

    @cached_property
    def tensor_tree(self) -> Tree:
        """Names of parameters and buffers as a `Tree`, each as often as it has sites."""
        return Tree(self._tensor_names())

    def _tensor_names(self) -> Iterator[str]:
        return map(self.sites.fqn.__getitem__, np.flatnonzero(self._of_tensors).tolist())

    @cached_property
    def _of_tensors(self) -> Mask:
        """Mask of all sites that are of parameters and buffers."""
        return of_kinds(self.sites.kind, TENSORS)

    def tensors_of(self, names: AbstractSet[str]) -> set[str]:
        """Those of `names` that are names of parameters or buffers; sets the cached answer of `sites_of`."""
        return {self.sites.fqn[site] for site in np.flatnonzero(self.sites_of(names) & self._of_tensors).tolist()}

    def sites_of(self, names: AbstractSet[str]) -> Mask:
        """Mask of `named` sites with one of `names`.

        The last answer is kept for the same set object: one that was changed since must not be asked for again.
        """
        if self._asked is None or self._asked[0] is not names:
            fqn = self.sites.fqn
            self._asked = names, np.fromiter(map(names.__contains__, fqn), np.bool_, len(fqn)) & self.named
        return self._asked[1]

    def set_sites_of(self, names: AbstractSet[str], sites: Sequence[int]) -> None:
        """Store, as the next answer of `sites_of` for this set object, the `named` ones among `sites`."""
        mask = np.zeros(len(self.sites), np.bool_)
        mask[sites] = True
        self._asked = names, mask & self.named

    def rows(self, names: AbstractSet[str]) -> Iterator[tuple[int, StepBatch, Ids, Ids]]:
        """For each of `steps`: (its index, its records, rows of `names` with distinctive values, these rows' sites).

        Sites are the run's own numbers.
        """
        wanted = self.sites_of(names)
        for place, step in enumerate(self.steps):
            batch = self.reader.read(step) if place else self.first
            numbers = batch.site.astype(np.int64)
            rows = np.flatnonzero(wanted[numbers] & distinctive_rows(batch))
            yield place, batch, rows, numbers[rows]

    def held(self, names: AbstractSet[str]) -> Held:
        """Distinctive values (`distinctive_rows`) of `names` in all of `steps`; names without one are left out."""
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
    """Values of names as columns: one entry per record, with the number of its name.

    Attributes:
        owner: whose record each is: a number into `names`.
        places: int64 (4, n): index of the step, kind code, phase code and call of each record.
        checksum: uint64 (n,).
    """

    names: list[str]
    owner: Ids
    places: Ids
    checksum: Any

    @cached_property
    def codes(self) -> Any:
        """Hash of each record's step, kind, phase, call and checksum, uint64 (n,).

        Equal codes are taken for equal features.
        """
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
        """(index of the step, kind, phase, call, checksum) of each record of one name; empty for an unknown name."""
        number = self._numbers.get(name)
        if number is None:
            return set()
        order, ends = self._by_owner
        rows = order[ends[number] : ends[number + 1]]
        return set(zip(*self.places[:, rows].tolist(), self.checksum[rows].tolist(), strict=True))


def distinctive_rows(batch: StepBatch) -> Mask:
    """Mask over all rows of a batch, true for distinctive values.

    That is, OBSERVED ones whose minimum is not their maximum; where these are not on record, all OBSERVED ones.
    """
    mask: Mask = batch.status == int(Status.OBSERVED)
    low, high = batch.floats.get("min"), batch.floats.get("max")
    if low is not None and high is not None:
        with np.errstate(invalid="ignore"):
            mask &= ~(np.asarray(low) == np.asarray(high))
    return mask


def one_sided(a: Side, b: Side) -> tuple[set[str], set[str]]:
    """(names that only a has, names that only b has), by `named` sites.

    Also stores their sites by `Side.set_sites_of`.
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
        side.set_sites_of(names, few)
    return only


def _one_sided_sites(a: Side, b: Side) -> tuple[list[int], list[int]]:
    """Numbers of the `named` sites of a, and of b, whose key the other run lacks."""
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


# --- names that hold the same values

_MAX_PAIRS = 8  # more pairs of names with one value than this, and nobody can say which is which


def shared_values(one: Held, two: Held) -> tuple[Ids, Ids, Ids]:
    """All pairs of a name of a and a name of b that share a code: (index in `one`, index in `two`, shared codes).

    Three arrays, an element per pair. A code that more than `_MAX_PAIRS` pairs share does not count.
    """
    owners, codes = zip(*(_distinct_pairs(held) for held in (one, two)), strict=True)
    first, times = _positions_in(codes[1], codes[0])
    times = np.where(_positions_in(codes[0], codes[0])[1] * times <= _MAX_PAIRS, times, 0)
    old = np.repeat(owners[0], times)
    starts = np.cumsum(times) - times
    new = owners[1][np.arange(len(old)) - np.repeat(starts - first, times)]
    pairs = np.sort(old * (len(two.names) + 1) + new)  # `np.unique` imports masked arrays, which take a while
    starts = np.flatnonzero(np.diff(pairs, prepend=-1))
    return *np.divmod(pairs[starts], len(two.names) + 1), np.diff(starts, append=len(pairs))


def _distinct_pairs(held: Held) -> tuple[Ids, Ids]:
    """(owners, codes): the records' (owner, code) without repetition, sorted by code."""
    order = np.lexsort((held.owner, held.codes))
    owners, codes = held.owner[order], held.codes[order]
    fresh = np.ones(len(order), np.bool_)
    fresh[1:] = (owners[1:] != owners[:-1]) | (codes[1:] != codes[:-1])
    return owners[fresh], codes[fresh]


def _positions_in(ordered: Ids, wanted: Ids) -> tuple[Ids, Ids]:
    """(first position, number of occurrences) of each of `wanted` in `ordered`, which is sorted."""
    first = np.searchsorted(ordered, wanted)
    return first, np.searchsorted(ordered, wanted, side="right") - first


def equal_pairs(one: Held, two: Held) -> dict[str, str]:
    """The partner in b of each name of a, by shared values (`shared_values`).

    Two names that share values with no others are partners; among the rest `by_votes` chooses.
    """
    old, new, votes = shared_values(one, two)
    alone = (np.bincount(old, minlength=1)[old] == 1) & (np.bincount(new, minlength=1)[new] == 1)
    sole = {one.names[i]: two.names[j] for i, j in zip(old[alone].tolist(), new[alone].tolist(), strict=True)}
    rest = zip(old[~alone].tolist(), new[~alone].tolist(), votes[~alone].tolist(), strict=True)
    return sole | by_votes({(one.names[i], two.names[j]): number for i, j, number in rest})


def assigned(ranks: Mapping[NamePair, Any], *, ties: bool = False) -> dict[str, str]:
    """The partner of each old name, where each name gets one at most, the lowest rank first.

    Args:
        ranks: (old name, new name) to its rank, anything that can be sorted.
        ties: whether pairs of one rank that share a name are taken in order of name; else all of these are dropped, and
            their names get no partner.
    """
    levels: dict[Any, list[NamePair]] = defaultdict(list)
    for pair, rank in ranks.items():
        levels[rank].append(pair)
    assigned_names: dict[str, str] = {}
    gone: tuple[set[str], set[str]] = (set(), set())
    for rank in sorted(levels):
        free = [pair for pair in levels[rank] if pair[0] not in gone[0] and pair[1] not in gone[1]]
        times = Counter(old for old, _ in free), Counter(new for _, new in free)
        for old, new in sorted(free) if ties else free:
            if times[0][old] == times[1][new] == 1 or (ties and old not in gone[0] and new not in gone[1]):
                assigned_names[old] = new
            if not ties or assigned_names.get(old) == new:
                gone[0].add(old)
                gone[1].add(new)
    return assigned_names


def by_votes(votes: Mapping[NamePair, float]) -> dict[str, str]:
    """The partner of each old name: the pair with most votes, else the equal name, else the most alike.

    Ties are dropped.

    Args:
        votes: (old name, new name) to the number of values that they share.
    """
    return assigned({(old, new): (-count, old != new, -_likeness(old, new)) for (old, new), count in votes.items()})


def _likeness(old: str, new: str) -> int:
    """How alike two dotted names are: equal components at their beginnings, plus twice those at their ends."""
    one, two = old.split("."), new.split(".")
    return 2 * begin_alike(one[::-1], two[::-1]) + begin_alike(one, two)


# --- the tree above them


def matched_roots(sides: tuple[Side, Side]) -> dict[str, str]:
    """Roots of a that are another root of b, of one class: by most shared values, else by the same variable.

    Only classes of which either run has several roots. Roots are numbered by order of creation, which may differ;
    copies (a target network) share all values, so that the variable in the script decides.
    """
    if not any("#" in side.sites.text for side in sides):
        return {}
    doubtful = ambiguous(*({name.partition(".")[0] for name in side.names} for side in sides))
    if not doubtful:
        return {}
    held = [_of_roots(side, doubtful) for side in sides]
    called = [{root: name.rpartition(".")[2] for root, name in side.variables.items()} for side in sides]
    unique = [{name for name, times in Counter(names.values()).items() if times == 1} for names in called]
    ranks = {}
    for one, two in product(*held):
        if class_of_root(one) != class_of_root(two):
            continue
        shared, variable = len(held[0][one] & held[1][two]), called[0].get(one)
        alike = variable is not None and variable == called[1].get(two) and variable in unique[0] & unique[1]
        if shared or alike:
            ranks[one, two] = (-shared, not alike, one != two)
    return {old: new for old, new in assigned(ranks, ties=True).items() if old != new}


def _of_roots(side: Side, classes: set[str]) -> dict[str, set[tuple[str, Feature]]]:
    """By root of one of these classes, the distinctive values of all inside it: (name below the root, feature)."""
    features: dict[str, set[tuple[str, Feature]]] = defaultdict(set)
    held = side.held({name for name in side.names if class_of_root(name.partition(".")[0]) in classes})
    for name in held.names:
        root, _, rest = name.partition(".")
        features[root] |= {(rest, feature) for feature in held.of(name)}
    return features


class Search:
    """Matches names that one run alone has, and children of numbered lists whose lengths differ, by value.

    Attributes:
        renamed: names of a that are other names of b; of nested ones that follow from one another, only the outermost.
    """

    def __init__(self, a: Side, b: Side) -> None:
        """Do the whole search now, and fill `renamed`; it stays empty where either run has nothing to match."""
        self.renamed: dict[str, Renamed] = {}
        self._a, self._b = a, b
        self._only = self._open = one_sided(a, b)
        self._lists_of_other_length = _lists_of_other_length(a, b, self._only)
        if self._lists_of_other_length:
            self._open = (
                self._only[0].union(filter(self._is_shifted, a.names)),
                self._only[1].union(filter(self._is_shifted, b.names)),
            )
        if all(self._open):
            self._run()

    def _is_shifted(self, name: str) -> bool:
        """Whether a name is in a numbered list (`blocks.3.fc`) that has another length in the other run."""
        parts = (head.rpartition(".") for head in (name, *ancestors(name))) if self._lists_of_other_length else ()
        return any(part.isdecimal() and f"{above}." in self._lists_of_other_length for above, _, part in parts)

    def _has(self, side: int, name: str) -> bool:
        """Whether run `side` (0 for a, 1 for b) has a name."""
        if name in self._only[side] or name in self._only[1 - side]:
            return name in self._only[side]
        return name in (self._a, self._b)[side].names

    def _run(self) -> None:
        """Match tensors, then the modules above them, and fill `renamed`."""
        tensors = [side.tensors_of(names) for side, names in zip((self._a, self._b), self._open, strict=True)]
        one, two = (side.held(names) for side, names in zip((self._a, self._b), tensors, strict=True))
        self._match_parents(equal_pairs(one, two), tensors[0])
        self._drop_repeated()

    # --- tensors, and the tree above them

    def _match_parents(self, pairs: Mapping[str, str], tensors: AbstractSet[str]) -> None:
        """Add to `renamed`, for each pair of unequal names, the outermost pair of parents that holds, else itself.

        A pair of parents holds while all tensors below the old one are paired with those below the new one, and no
        equal name shares more values.

        Args:
            pairs: tensors of a and their partners in b.
            tensors: names of a that could be paired.
        """
        levels = {old: _parent_pairs(old, new) for old, new in pairs.items()}
        votes = Counter(chain.from_iterable(levels.values()))
        better_kept = self._better_unrenamed(votes)
        moving = dict[str, int]()

        def together(above: str) -> int:
            """Number of paired tensors at or below a name; -1 if a tensor below it is not among `tensors`."""
            if above not in moving:
                below = set(self._a.tensor_tree.below(above))
                moving[above] = len(pairs.keys() & below) + (above in pairs) if below <= tensors else -1
            return moving[above]

        for old in sorted(pairs):
            if old == pairs[old]:
                continue
            top = (old, pairs[old])
            for level in levels[old]:
                if votes[level] != together(level[0]) or level in better_kept:
                    break
                top = level
            self.renamed.setdefault(top[0], Renamed(top[1], Source.VALUE, votes.get(top, 1)))

    def _better_unrenamed(self, levels: Iterable[NamePair]) -> set[NamePair]:
        """Pairs of parents (x, y) that share fewer values than x of a and x of b do, or y of a and y of b.

        Only pairs where b has x or a has y are looked at.
        """
        taken = {(one, two) for one, two in levels if self._has(0, two) or self._has(1, one)}
        if not taken:
            return set()
        names = {name for level in taken for name in level}
        held_a, held_b = self._a.held(names), self._b.held(names)

        def alike(old: str, new: str) -> int:
            return len(held_a.of(old) & held_b.of(new))

        return {(one, two) for one, two in taken if max(alike(two, two), alike(one, one)) > alike(one, two)}

    def _drop_repeated(self) -> None:
        """Remove from `renamed` what follows from the renaming of a shorter prefix."""
        for old in sorted(self.renamed, key=len, reverse=True):
            above = next(filter(self.renamed.__contains__, ancestors(old)), None)
            if above is not None and self.renamed[above].name + old[len(above) :] == self.renamed[old].name:
                del self.renamed[old]


def _parent_pairs(old: str, new: str) -> list[NamePair]:
    """Pairs of parents, innermost first, for as long as what is cut off is equal and the names are not.

    (`a.x.w`, `b.x.w`) gives (`a.x`, `b.x`), (`a`, `b`).
    """
    pairs: list[NamePair] = []
    while True:
        old, dot, end = old.rpartition(".")
        new, other_dot, other_end = new.rpartition(".")
        if not (dot and other_dot and end == other_end and old != new):
            return pairs
        pairs.append((old, new))


def _lists_of_other_length(a: Side, b: Side, only: tuple[AbstractSet[str], AbstractSet[str]]) -> frozenset[str]:
    """Prefixes (`blocks.`) of numbered lists that both runs have, with different numbers of children.

    Empty unless a numbered name of one run alone has nothing in the other run, at it or below it.

    Args:
        a: run a.
        b: run b.
        only: names that a alone has, and that b alone has.
    """
    above = with_ancestors(only[0]), with_ancestors(only[1])
    lost = [
        [name for name in names if name[-1].isdecimal() and name.rpartition(".")[2].isdecimal()]
        for names in (above[0] - above[1], above[1] - above[0])
    ]
    if all(name in b.tree for name in lost[0]) and all(name in a.tree for name in lost[1]):
        return frozenset()
    counts = numbered_children(a.names), numbered_children(b.names)
    both = counts[0].keys() & counts[1].keys()
    return frozenset(f"{parent}." for parent in both if counts[0][parent] != counts[1][parent])


def displaced_names(side: Side, names: Mapping[str, str]) -> dict[str, Renamed]:
    """For each name X of a that `names` gives to another name, and that gets no other name by it: a new name `X(a)`.

    Args:
        side: run a.
        names: name in a to name in b.
    """
    taken = [new for new in names.values() if new not in names and new in side.tree]
    return {new: Renamed(new + DISPLACED, Source.DISPLACED) for new in taken}
