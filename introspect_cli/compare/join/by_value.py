"""The same modules and parameters under other names, recognised by what they hold.

A refactoring renames, wraps, moves and inserts; none of it changes a number, and a checksum does not know a name. Names
are matched first. What is left is matched by equal checksums of parameters, inputs, outputs and gradients in the first
step that both runs have. A match of one tensor is taken for its module, and for as much of the tree above it as
nothing contradicts, so that a rename that is found once holds everywhere below and in all steps.

Zeros, ones and other constants are equal everywhere, so they prove nothing. Nor do values that several unmatched
modules share, unless the rest of these modules tells them apart.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.moved import child_counts
from introspect_cli.compare.join.renames import renamer
from introspect_cli.compare.join.sites import Columns, columns, kind_code, phase_code
from introspect_cli.records import Kind, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from introspect_cli.compare.join.sites import Mask
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.rank_reader import RankReader

TENSORS = (Kind.PARAM, Kind.BUFFER)
MODULES = (Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
NAMED = (*TENSORS, Kind.GRAD, *MODULES)
"""Kinds whose FQN names a module, or a tensor of one."""

_NUMBERED = re.compile(r"#\d+$")
_AMBIGUOUS = 8  # more modules with one value than this, and nobody can say which is which

Feature = tuple[int, ...]
Features = dict[str, set[Feature]]


@dataclass(frozen=True)
class Correspondence:
    """Names of a that are other names of b.

    Attributes:
        names: FQN prefix in a to FQN prefix in b; the longest prefix wins.
        votes: for each of them, how many tensors and modules have equal values under the two names.
        step: the step whose values were compared; None where nothing was.
        settled: parents of numbered children, with their dot, of which values told where some are.
        variables: of a and of b, what the script calls each root.
    """

    names: dict[str, str] = field(default_factory=dict)
    votes: dict[str, int] = field(default_factory=dict)
    step: int | None = None
    settled: tuple[str, ...] = ()
    variables: tuple[Mapping[str, str], Mapping[str, str]] = field(default_factory=lambda: ({}, {}))


class Side:
    """One run's records of a step, as far as they name modules and tensors and their values can prove anything."""

    def __init__(self, sites: Columns, batch: StepBatch) -> None:
        """Take a run's sites, as they are compared, and the records of the step."""
        self.sites, self.batch = sites, batch
        self.number = np.asarray(batch.site).astype(np.int64)
        named = np.isin(sites.kind, [kind_code(kind) for kind in NAMED])
        named &= ~np.isin(sites.phase, [phase_code(phase) for phase in (Phase.EVAL, Phase.RECOMPUTE)])
        self.names = {sites.fqn[number] for number in np.flatnonzero(named).tolist()}
        self.rows = np.flatnonzero(named[self.number] & telling(batch))

    def features(self, wanted: Callable[[str], bool]) -> Features:
        """What each name that is wanted holds: (kind, phase, call, checksum) of its telling records."""
        sites, found = self.sites, defaultdict[str, set[Feature]](set)
        chosen = {name for name in self.names if wanted(name)}
        kept = np.fromiter((name in chosen for name in sites.fqn), np.bool_, len(sites.fqn))
        rows = self.rows[kept[self.number[self.rows]]]
        numbers = self.number[rows]
        columns_of = (sites.kind, sites.phase, sites.call)
        details = zip(*(own[numbers].tolist() for own in columns_of), strict=True)
        sums = np.asarray(self.batch.checksum)[rows].tolist()
        for number, detail, checksum in zip(numbers.tolist(), details, sums, strict=True):
            found[sites.fqn[number]].add((*detail, checksum))
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


def correspond(a: RankReader, b: RankReader, rename: Callable[[str], str] | None) -> Correspondence:
    """Which names of a are other names of b, by the first step that both have.

    Args:
        a: run a's rank.
        b: run b's.
        rename: what a's names are changed by already.
    """
    steps = np.asarray(a.entries["step"])
    shared = steps[np.isin(steps, b.entries["step"])]
    if not len(shared):
        return Correspondence()
    step = int(shared[0])
    one, two = columns(a.sites, rename), columns(b.sites)
    sides = Side(one, a.read(step)), Side(two, b.read(step))
    variables = variables_of(a, rename), variables_of(b, None)
    roots = _roots(sides, variables)
    if roots:
        sides = Side(columns(a.sites, _after(rename, roots, one.fqn)), sides[0].batch), sides[1]
    found = _Search(*sides).run()
    back = {new: old for old, new in roots.items()}
    names = dict(roots)
    for old, new in found.names.items():
        head, dot, rest = old.partition(".")
        names[back.get(head, head) + dot + rest] = new
    names = {old: new for old, new in names.items() if old != new}
    names |= _evicted(one.fqn, names)
    votes = {old: found.votes.get(old, 0) for old in names}
    return Correspondence(names, votes, step if names else None, found.settled, variables)


def variables_of(reader: RankReader, rename: Callable[[str], str] | None) -> dict[str, str]:
    """What the script calls each root, by the root's name as it is compared."""
    return {rename(own.fqn) if rename else own.fqn: own.variable for own in reader.modules if own.variable}


def _after(rename: Callable[[str], str] | None, roots: Mapping[str, str], names: Iterable[str]) -> Callable[[str], str]:
    """The names after the roots have theirs; a root whose name is taken gets one that b does not have."""
    moved = renamer((), {**roots, **_evicted(names, roots)}) or str
    return lambda name: moved(rename(name) if rename else name)


def _evicted(names: Iterable[str], moved: Mapping[str, str]) -> dict[str, str]:
    """Names of a that are taken by others which have moved there, each with a name that b does not have."""
    change = renamer((), dict(moved))
    if change is None:
        return {}
    every = set(names)
    taken = {new for old, new in moved.items() if new in every and new not in moved}
    goes = {name: new for name in every if (new := change(name)) != name}
    arrived = set(goes.values())
    every -= goes.keys()
    clash = {name for name in every if name in arrived} | {name for name in taken if name in every}
    return {name: f"{name}(a)" for name in clash if not any(name.startswith(f"{other}.") for other in clash)}


# --- roots, whose names are their class and the order in which they came


def base_of(root: str) -> str:
    """The class that a root is named by: `Net` of `Net#2`."""
    return _NUMBERED.sub("", root)


def ambiguous(*runs: Iterable[str]) -> set[str]:
    """Classes of which a run has more than one root, so that the class says nothing of which is which."""
    counts = [Counter(map(base_of, roots)) for roots in runs]
    return {base for own in counts for base, number in own.items() if number > 1}


def _roots(sides: tuple[Side, Side], variables: tuple[Mapping[str, str], Mapping[str, str]]) -> dict[str, str]:
    """Roots of a that hold what another root of the same class holds in b; else those that one variable holds."""
    own = [{name.partition(".")[0] for name in side.names} for side in sides]
    doubtful = ambiguous(*own)
    if not doubtful:
        return {}
    held = [_of_roots(side, doubtful) for side in sides]
    called = [{root: _last(name) for root, name in names.items()} for names in variables]
    unique = [{name for name, times in Counter(names.values()).items() if times == 1} for names in called]
    scores = []
    for one, features in held[0].items():
        for two, others in held[1].items():
            if base_of(one) != base_of(two):
                continue
            score, name = len(features & others), called[0].get(one)
            alike = name is not None and name == called[1].get(two) and name in unique[0] & unique[1]
            if score or alike:
                scores.append((-score, not alike, one != two, one, two))
    found: dict[str, str] = {}
    for *_, one, two in sorted(scores):
        if one not in found and two not in found.values():
            found[one] = two
    return {old: new for old, new in found.items() if old != new}


def _last(variable: str) -> str:
    """What is left of a variable without the object that it is an attribute of."""
    return variable.rpartition(".")[2]


def _of_roots(side: Side, bases: set[str]) -> dict[str, set[tuple[str, Feature]]]:
    found: dict[str, set[tuple[str, Feature]]] = defaultdict(set)
    for name, features in side.features(lambda name: base_of(name.partition(".")[0]) in bases).items():
        root, _, rest = name.partition(".")
        found[root] |= {(rest, feature) for feature in features}
    return found


# --- everything below


class _Search:
    """Names that one run only has, or that are numbers of a sequence with another length, put together by value."""

    def __init__(self, a: Side, b: Side) -> None:
        """Take both sides, their roots matched already."""
        self.a, self.b = a, b
        self.shifted = _shifted(a.names, b.names)
        self.open_a = {name for name in a.names if name not in b.names or self._is_shifted(name)}
        self.open_b = {name for name in b.names if name not in a.names or self._is_shifted(name)}
        self.names: dict[str, str] = {}
        self.votes: dict[str, int] = {}

    def _is_shifted(self, name: str) -> bool:
        while self.shifted and name:
            above, _, part = name.rpartition(".")
            if part.isdecimal() and f"{above}." in self.shifted:
                return True
            name = above
        return False

    def run(self) -> Correspondence:
        """Match tensors, then the tree above them, then modules without tensors."""
        if not self.open_a or not self.open_b:
            return Correspondence()
        features_a = self.a.features(self.open_a.__contains__)
        features_b = self.b.features(self.open_b.__contains__)
        tensors = (_tensor_names(self.a), _tensor_names(self.b))
        own = [
            {name: held for name, held in features.items() if name in names}
            for features, names in zip((features_a, features_b), tensors, strict=True)
        ]
        pairs = paired(own[0], own[1])
        settled = tuple(own for own in self.shifted if any(name.startswith(own) for name in pairs))
        self._lift(pairs, tensors[0])
        owners = [names | {name.rpartition(".")[0] for name in names} for names in tensors]
        change = renamer((), self.names) or str
        reached = {change(name) for name in self.a.names}
        done = owners[0] | self.names.keys()
        rest_a = {
            name: held
            for name, held in features_a.items()
            if name not in done and (change(name) not in self.b.names or self._is_shifted(name))
        }
        rest_b = {
            name: held
            for name, held in features_b.items()
            if name not in owners[1] and (name not in reached or self._is_shifted(name))
        }
        for old, new in _modules(rest_a, rest_b, change, self._classes()).items():
            if change(old) != new:
                self.names[old], self.votes[old] = new, len(rest_a[old] & rest_b[new])
        self._confirm()
        return Correspondence(self.names, self.votes, settled=settled)

    def _classes(self) -> tuple[dict[str, str], dict[str, str]]:
        sides = (self.a.sites, self.open_a), (self.b.sites, self.open_b)
        one, two = (
            {name: kind for name, kind in zip(sites.fqn, sites.module_class, strict=True) if name in names}
            for sites, names in sides
        )
        return one, two

    def _lift(self, pairs: dict[str, str], tensors: set[str]) -> None:
        """Take pairs of tensors up the tree, as far as nothing that has another name, or keeps its own, is below."""
        kept: set[str] = set()
        for name in tensors:
            if name not in self.open_a and name not in pairs:
                head = name
                while head and head not in kept:
                    kept.add(head)
                    head = head.rpartition(".")[0]
        votes, voters = Counter[tuple[str, str]](), Counter[str]()
        for old, new in pairs.items():
            voters.update(_heads(old))
            votes.update(_levels(old, new))
        for old, new in sorted(pairs.items()):
            if old == new:
                continue
            levels = _levels(old, new)
            best = (old, new)
            for one, two in levels:
                if one in kept or votes[one, two] != voters[one]:
                    break
                best = (one, two)
            if best[0] != best[1] and best[0] not in self.names:
                self.names[best[0]], self.votes[best[0]] = best[1], votes.get(best, 1)

    def _confirm(self) -> None:
        """A name that was only said again by a longer prefix is dropped."""
        for old in sorted(self.names, key=len, reverse=True):
            above = next((head for head in reversed(_heads(old)[:-1]) if head in self.names), None)
            if above is not None and self.names[above] + old[len(above) :] == self.names[old]:
                del self.names[old]


def _tensor_names(side: Side) -> set[str]:
    codes = [kind_code(kind) for kind in TENSORS]
    numbers = np.flatnonzero(np.isin(side.sites.kind, codes)).tolist()
    return {side.sites.fqn[number] for number in numbers}


def _heads(name: str) -> list[str]:
    """A name and all prefixes of it."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _levels(old: str, new: str) -> list[tuple[str, str]]:
    """A pair of names, and the pairs above as long as what is left out is the same in both."""
    one, two = old.split("."), new.split(".")
    found = [(old, new)]
    while len(one) > 1 and len(two) > 1 and one[-1] == two[-1]:
        one, two = one[:-1], two[:-1]
        found.append((".".join(one), ".".join(two)))
    return found


def paired(one: Features, two: Features) -> dict[str, str]:
    """Names that share a value which no other name has; of several, those with the most values in common."""
    index: tuple[dict[Feature, list[str]], dict[Feature, list[str]]] = (defaultdict(list), defaultdict(list))
    for features, own in zip((one, two), index, strict=True):
        for name, held in features.items():
            for feature in held:
                own[feature].append(name)
    scores = Counter[tuple[str, str]]()
    for feature, names in index[0].items():
        others = index[1].get(feature, ())
        if others and len(names) * len(others) <= _AMBIGUOUS:
            for old in names:
                for new in others:
                    scores[old, new] += 1
    return _best(scores)


def _best(scores: Mapping[tuple[str, str], float]) -> dict[str, str]:
    """One partner for each name: the best score first, equal names before others; a tie proves nothing."""
    levels: dict[tuple[float, bool, int], list[tuple[str, str]]] = defaultdict(list)
    for (old, new), score in scores.items():
        levels[-score, old != new, -_alike(old, new)].append((old, new))
    found: dict[str, str] = {}
    gone: tuple[set[str], set[str]] = (set(), set())
    for level in sorted(levels):
        pairs = [pair for pair in levels[level] if pair[0] not in gone[0] and pair[1] not in gone[1]]
        times = Counter(old for old, _ in pairs), Counter(new for _, new in pairs)
        for old, new in pairs:
            if times[0][old] == times[1][new] == 1:
                found[old] = new
            gone[0].add(old)
            gone[1].add(new)
    return found


def _alike(old: str, new: str) -> int:
    """How many components two names have in common from the end, and from the beginning."""
    one, two = old.split("."), new.split(".")
    ends = 0
    for x, y in zip(reversed(one), reversed(two), strict=False):
        if x != y:
            break
        ends += 1
    starts = 0
    for x, y in zip(one, two, strict=False):
        if x != y:
            break
        starts += 1
    return 2 * ends + starts


def _modules(
    one: Features, two: Features, change: Callable[[str], str], classes: tuple[dict[str, str], dict[str, str]]
) -> dict[str, str]:
    """Modules without tensors of their own, in the order in which they ran, by their inputs and outputs."""
    index: dict[Feature, list[str]] = defaultdict(list)
    for name, held in two.items():
        for feature in held:
            index[feature].append(name)
    scores: dict[tuple[str, str], float] = {}
    for old, held in one.items():
        near = Counter(name for feature in held for name in index.get(feature, ()))
        for new, count in near.items():
            same_class = classes[0].get(old) == classes[1].get(new)
            same_parent = change(old.rpartition(".")[0]) == new.rpartition(".")[0]
            if count >= 2 or (same_class and same_parent):
                scores[old, new] = count + 4 * same_class + 2 * same_parent
    return _best(scores)


def _shifted(one: set[str], two: set[str]) -> frozenset[str]:
    """Parents, with their dot, whose numbered children are more in one run than in the other."""
    counts = child_counts(one), child_counts(two)
    return frozenset(
        f"{parent}." for parent in counts[0].keys() & counts[1].keys() if counts[0][parent] != counts[1][parent]
    )
