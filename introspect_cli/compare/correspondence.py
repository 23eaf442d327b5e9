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
from itertools import chain, compress, product
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.terms.names import (
    DISPLACED,
    Rename,
    Renamed,
    Source,
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

Held = dict[str, set[Feature]]
"""The values of each name."""


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

    By `patterns` alone where they have no step in common. Roots of one class are matched first (`matched_roots`), then
    what is inside them; a name of a that is another module's in b gets one that b does not have.

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
    back = {new: old for old, new in roots.items()}

    def in_a(name: str) -> str:
        """A name under which `roots` have been applied, with its root as a calls it."""
        head, dot, rest = name.partition(".")
        return back.get(head, head) + dot + rest

    renamed = {old: Renamed(new, Source.ROOT) for old, new in roots.items()}
    renamed |= {in_a(old): new for old, new in renamed_by_value(one, two).items()}
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
    def around(self) -> set[str]:
        """`names` with all their ancestors."""
        return with_ancestors(self.names)

    @cached_property
    def tensors(self) -> set[str]:
        """Names of parameters and buffers."""
        return {self.sites.fqn[site] for site in np.flatnonzero(of_kinds(self.sites.kind, TENSORS)).tolist()}

    def held(self, names: AbstractSet[str]) -> Held:
        """Distinctive values (`distinctive_rows`) of `names` in all of `steps`; names without one are left out.

        Each is (index in `steps`, kind, phase, call, checksum).
        """
        sites, features = self.sites, Held()
        fqn = sites.fqn
        wanted = np.fromiter(map(names.__contains__, fqn), np.bool_, len(fqn)) & self.named
        for place, step in enumerate(self.steps):
            batch = self.reader.read(step) if place else self.first
            rows = np.flatnonzero(wanted[batch.site] & distinctive_rows(batch))
            numbers = batch.site[rows]
            columns = sites.kind[numbers], sites.phase[numbers], sites.call[numbers], batch.checksum[rows]
            for number, *feature in zip(numbers.tolist(), *(column.tolist() for column in columns), strict=True):
                features.setdefault(fqn[number], set()).add((place, *feature))
        return features


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


# --- names that hold the same values

_MAX_PAIRS = 8  # more pairs of names with one value than this, and nobody can say which is which


def equal_pairs(one: Held, two: Held) -> dict[str, str]:
    """The partner in b of each name of a: by most shared values (`by_votes`).

    A value that more than `_MAX_PAIRS` pairs of names share does not count.
    """
    holders: dict[Feature, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, held in enumerate((one, two)):
        for name, features in held.items():
            for feature in features:
                holders[feature][side].append(name)
    few = (product(*names) for names in holders.values() if len(names[0]) * len(names[1]) <= _MAX_PAIRS)
    return by_votes(Counter(chain.from_iterable(few)))


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
    for name, values in held.items():
        root, _, rest = name.partition(".")
        features[root] |= {(rest, feature) for feature in values}
    return features


def renamed_by_value(a: Side, b: Side) -> dict[str, Renamed]:
    """Names of a that are other names of b, by equal values of tensors; of nested ones the outermost that holds.

    Tensors that one run alone has are matched, and those in numbered lists whose lengths differ. A pair of parents
    holds while all tensors below the old one are paired with those below the new one, and no equal name shares more
    values.
    """
    if a.names == b.names:
        return {}
    lists = _lists_of_other_length(a, b)
    one, two = (
        {name for name in side.tensors if name not in other.names or _is_in_any(name, lists)}
        for side, other in ((a, b), (b, a))
    )
    pairs = equal_pairs(a.held(one), b.held(two))
    levels = {old: _parent_pairs(old, new) for old, new in pairs.items()}
    votes = Counter(chain.from_iterable(levels.values()))
    better_kept = _better_unrenamed(a, b, votes)
    paired = Counter(head for name in pairs for head in (name, *ancestors(name)))
    held_by_others = with_ancestors(a.tensors - one)
    renamed: dict[str, Renamed] = {}
    for old in sorted(old for old, new in pairs.items() if old != new):
        top = (old, pairs[old])
        for level in levels[old]:
            if votes[level] != paired[level[0]] or level[0] in held_by_others or level in better_kept:
                break
            top = level
        renamed.setdefault(top[0], Renamed(top[1], Source.VALUE, votes.get(top, 1)))
    return renamed


def _is_in_any(name: str, lists: AbstractSet[str]) -> bool:
    """Whether a name is in any of these numbered lists: `blocks.3.fc` in `blocks.`."""
    parts = (head.rpartition(".") for head in (name, *ancestors(name))) if lists else ()
    return any(part.isdecimal() and f"{above}." in lists for above, _, part in parts)


def _better_unrenamed(a: Side, b: Side, levels: Iterable[NamePair]) -> set[NamePair]:
    """Pairs of parents (x, y) that share fewer values than x of a and x of b do, or y of a and y of b.

    Only pairs where b has x or a has y are looked at.
    """
    taken = {(one, two) for one, two in levels if two in a.names or one in b.names}
    names = {name for level in taken for name in level}
    held_a, held_b = (a.held(names), b.held(names)) if taken else ({}, {})

    def alike(old: str, new: str) -> int:
        return len(held_a.get(old, set()) & held_b.get(new, set()))

    return {(one, two) for one, two in taken if max(alike(two, two), alike(one, one)) > alike(one, two)}


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


def _lists_of_other_length(a: Side, b: Side) -> frozenset[str]:
    """Prefixes (`blocks.`) of numbered lists that both runs have, with different numbers of children."""
    counts = numbered_children(a.names), numbered_children(b.names)
    both = counts[0].keys() & counts[1].keys()
    return frozenset(f"{parent}." for parent in both if counts[0][parent] != counts[1][parent])


def displaced_names(side: Side, names: Mapping[str, str]) -> dict[str, Renamed]:
    """For each name X of a that `names` gives to another name, and that gets no other name by it: a new name `X(a)`.

    Args:
        side: run a.
        names: name in a to name in b.
    """
    taken = [new for new in names.values() if new not in names and new in side.around]
    return {new: Renamed(new + DISPLACED, Source.DISPLACED) for new in taken}
