"""The same modules and parameters under other names, recognised by what they hold.

A refactoring renames, wraps, moves and inserts; none of it changes a number, and a checksum does not know a name. Names
are matched first. What is left is matched by equal checksums of parameters, inputs, outputs and gradients, then by
sketches that are as near as rounding leaves them (`near.py`). A match of one tensor is taken for its module, and for as
much of the tree above it as nothing contradicts, so that a rename that is found once holds everywhere below and in all
steps.

The first step that both runs have is looked at, a later one and the last: what was equal by chance, or is a copy that
training has not parted yet, is told apart there. Values that several unmatched modules share prove nothing, unless the
rest of these modules tells them apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.flow import CLOSE
from introspect_cli.compare.join.holdings import Side, below, heads
from introspect_cli.compare.join.moved import child_counts
from introspect_cli.compare.join.near import near_pairs
from introspect_cli.compare.join.renames import renamer
from introspect_cli.compare.join.roots import matched_roots, variables_of
from introspect_cli.compare.join.sites import columns, kind_code
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.join.holdings import Feature, Features
    from introspect_cli.compare.join.roots import Variables
    from introspect_cli.store.rank_reader import RankReader

_AMBIGUOUS = 8  # more modules with one value than this, and nobody can say which is which


@dataclass(frozen=True)
class Correspondence:
    """Names of a that are other names of b.

    Attributes:
        names: FQN prefix in a to FQN prefix in b; the longest prefix wins.
        votes: for each of them, how many tensors and modules have equal values under the two names.
        near: those whose values are not equal and differ by no more than `close`.
        close: the relative L2 distance that is taken for rounding.
        steps: for each of them, the steps in which its values are equal, or near.
        settled: parents of numbered children, with their dot, of which values told where some are.
        variables: of a and of b, what the script calls each root.
    """

    names: dict[str, str] = field(default_factory=dict)
    votes: dict[str, int] = field(default_factory=dict)
    near: frozenset[str] = frozenset()
    close: float = CLOSE
    steps: dict[str, frozenset[int]] = field(default_factory=dict)
    settled: tuple[str, ...] = ()
    variables: Variables = field(default_factory=lambda: ({}, {}))


def correspond(
    a: RankReader, b: RankReader, rename: Callable[[str], str] | None, *, offset: int = 0, close: float = CLOSE
) -> Correspondence:
    """Which names of a are other names of b, by the steps that both have.

    Args:
        a: run a's rank.
        b: run b's.
        rename: what a's names are changed by already.
        offset: step k of b belongs to step k + offset of a.
        close: the relative L2 distance that is taken for rounding.
    """
    own = np.asarray(a.entries["step"])
    shared = own[np.isin(own - offset, b.entries["step"])]
    if not len(shared):
        return Correspondence()
    chosen = sorted({int(shared[place]) for place in {0, min(1, len(shared) - 1), len(shared) - 1}})
    one, two = columns(a.sites, rename), columns(b.sites)
    sides = Side(one, a, chosen), Side(two, b, [step - offset for step in chosen])
    variables = variables_of(a, rename), variables_of(b, None)
    roots = matched_roots(sides, variables)
    if roots:
        one = columns(a.sites, _after(rename, roots, one.fqn))
        sides = sides[0].renamed(one), sides[1]
    found = _Search(*sides, close).run()
    back = {new: old for old, new in roots.items()}

    def at_first(name: str) -> str:
        head, dot, rest = name.partition(".")
        return back.get(head, head) + dot + rest

    names = roots | {at_first(old): new for old, new in found.names.items()}
    names = {old: new for old, new in names.items() if old != new}
    names |= _evicted(columns(a.sites, rename).fqn if roots else one.fqn, names)
    votes = {old: found.votes.get(old, 0) for old in names}
    near = frozenset(map(at_first, found.near))
    steps = {at_first(old): frozenset(chosen[place] for place in places) for old, places in found.steps.items()}
    return Correspondence(names, votes, near, close, steps, found.settled, variables)


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
    goes = {name: new for name in below(every, moved) if (new := change(name)) != name}
    every -= goes.keys()
    clash = (every & set(goes.values())) | (every & taken)
    gone = {name: f"{name}(a)" for name in clash if not any(head in clash for head in _heads_of(name)[:-1])}
    stays = {}
    for name in below(every, gone):
        top = max((head for head in _heads_of(name) if head in clash), key=len)
        if name not in clash:  # what is inside one that goes, and has the same name in b, stays where it is
            child = name[: name.find(".", len(top) + 1)] if "." in name[len(top) + 1 :] else name
            stays[child] = child
    return stays | gone


class _Search:
    """Names that one run only has, or that are numbers of a sequence with another length, put together by value."""

    def __init__(self, a: Side, b: Side, close: float) -> None:
        """Take both sides, their roots matched already."""
        self.a, self.b, self.close = a, b, close
        self.shifted = _shifted(a, b)
        self.open_a, self.open_b = a.names - b.names, b.names - a.names
        if self.shifted:
            self.open_a |= {name for name in a.names if self._is_shifted(name)}
            self.open_b |= {name for name in b.names if self._is_shifted(name)}
        self.names: dict[str, str] = {}
        self.votes: dict[str, int] = {}
        self.near: set[str] = set()
        self.places: dict[str, frozenset[int]] = {}

    def _is_shifted(self, name: str) -> bool:
        while self.shifted and name:
            above, _, part = name.rpartition(".")
            if part.isdecimal() and f"{above}." in self.shifted:
                return True
            name = above
        return False

    def run(self) -> Correspondence:
        """Match tensors, then the tree above them, then modules without tensors; each exactly first, then nearly."""
        if not self.open_a or not self.open_b:
            return Correspondence()
        held = self.a.features(self.open_a), self.b.features(self.open_b)
        own = [
            {name: features for name, features in side.items() if name in tensors}
            for side, tensors in zip(held, (self.a.tensors, self.b.tensors), strict=True)
        ]
        equal = paired(own[0], own[1])
        pairs = self._not_by_chance(equal, own[0], own[1])
        left = own[0].keys() - equal.keys(), own[1].keys() - set(equal.values())
        alike = near_pairs((self.a, self.b), left, self.close, _best)
        settled = tuple(own for own in self.shifted if any(name.startswith(own) for name in pairs))
        places = {old: frozenset(feature[0] for feature in own[0][old] & own[1][new]) for old, new in pairs.items()}
        near = {old: own for (old, _), own in alike.items()}
        self._lift(pairs | dict(alike.keys()), places | near, near.keys())
        self._without_tensors(*held)
        self._confirm()
        return Correspondence(self.names, self.votes, frozenset(self.near), steps=self.places, settled=settled)

    def _without_tensors(self, held_a: Features, held_b: Features) -> None:
        """Match modules without tensors of their own, by inputs and outputs."""
        owners = [names | {name.rpartition(".")[0] for name in names} for names in (self.a.tensors, self.b.tensors)]
        change = renamer((), self.names) or str
        back = renamer((), {new: old for old, new in self.names.items()}) or str
        done = owners[0] | self.names.keys()
        rest_a = {
            name: held
            for name, held in held_a.items()
            if name not in done and (change(name) not in self.b.names or self._is_shifted(name))
        }

        def reached(name: str) -> bool:
            return any(own in self.a.names and change(own) == name for own in (name, back(name)))

        rest_b = {
            name: held
            for name, held in held_b.items()
            if name not in owners[1] and (not reached(name) or self._is_shifted(name))
        }
        classes, few = self._classes(), 1 / self.a.steps

        def choose(shared: Mapping[tuple[str, str], int]) -> dict[str, str]:
            fit = {
                (old, new): votes
                for (old, new), votes in shared.items()
                if not _is_given_others(rest_a[old], rest_b[new])
            }
            return _modules(fit, change, classes, few)

        for old, new in choose(_shared(rest_a, rest_b)).items():
            if change(old) != new:
                own = Counter(feature[0] for feature in rest_a[old] & rest_b[new])
                self.names[old], self.votes[old] = new, max(own.values())
                self.places[old] = frozenset(place for place, votes in own.items() if votes == self.votes[old])
        left = rest_a.keys() - self.names.keys(), rest_b.keys() - set(self.names.values())
        for (old, new), places in near_pairs((self.a, self.b), left, self.close, choose).items():
            if change(old) != new:
                self.names[old], self.votes[old], self.places[old] = new, 1, places
                self.near.add(old)

    def _not_by_chance(self, pairs: dict[str, str], one: Features, two: Features) -> dict[str, str]:
        """Pairs without those that differ wholly in a later step in which all that has kept its name agrees."""
        doubted = {(old, new): places for old, new in pairs.items() if (places := _places_apart(one[old], two[new]))}
        if not doubted:
            return pairs
        kept = self.a.tensors & self.b.tensors - self.open_a
        agree = _places_alike(self.a.features(kept), self.b.features(kept))
        chance = {old for (old, _), places in doubted.items() if places & agree}
        return {old: new for old, new in pairs.items() if old not in chance}

    def _classes(self) -> tuple[dict[str, str], dict[str, str]]:
        sides = (self.a.sites, self.open_a), (self.b.sites, self.open_b)
        one, two = (
            {sites.fqn[at]: sites.module_class[at] for at in sites.of(names).tolist()} for sites, names in sides
        )
        return one, two

    def _lift(self, pairs: dict[str, str], places: Mapping[str, frozenset[int]], near: AbstractSet[str]) -> None:
        """Take pairs of tensors up the tree, as far as nothing that has another name, or keeps its own, is below."""
        kept = heads(self.a.tensors - self.open_a - pairs.keys())
        own = self._rather_kept(pairs)
        votes, voters = Counter[tuple[str, str]](), Counter[str]()
        for old, new in pairs.items():
            voters.update(_heads_of(old))
            votes.update(_levels(old, new))
        for old, new in sorted(pairs.items()):
            if old == new:
                continue
            levels = _levels(old, new)
            best = (old, new)
            for one, two in levels:
                if one in kept or votes[one, two] != voters[one] or (one, two) in own:
                    break
                best = (one, two)
            if best[0] != best[1]:
                self.near |= {best[0]} if old in near else set()
                self.places[best[0]] = self.places.get(best[0], places[old]) & places[old]
                if best[0] not in self.names:
                    self.names[best[0]], self.votes[best[0]] = best[1], votes.get(best, 1)

    def _rather_kept(self, pairs: Mapping[str, str]) -> set[tuple[str, str]]:
        """Names above pairs whose new name another module of a has, and which that one suits better."""
        levels = {level for pair in pairs.items() for level in _levels(*pair)[1:]}
        levels = {(one, two) for one, two in levels if one != two and two in self.a.names}
        held_a = self.a.features({name for level in levels for name in level})
        held_b = self.b.features({two for _, two in levels})
        none: set[Feature] = set()
        return {
            (one, two)
            for one, two in levels
            if len(held_a.get(two, none) & held_b.get(two, none)) > len(held_a.get(one, none) & held_b.get(two, none))
        }

    def _confirm(self) -> None:
        """A name that was only said again by a longer prefix is dropped."""
        for old in sorted(self.names, key=len, reverse=True):
            above = next((head for head in reversed(_heads_of(old)[:-1]) if head in self.names), None)
            if above is not None and self.names[above] + old[len(above) :] == self.names[old]:
                del self.names[old]


def _by_place(features: Iterable[Feature]) -> dict[Feature, set[int]]:
    """Checksums by where they stand."""
    found: dict[Feature, set[int]] = defaultdict(set)
    for *place, checksum in features:
        found[tuple(place)].add(checksum)
    return found


def _places_apart(one: set[Feature], two: set[Feature]) -> set[int]:
    """Later steps, by their places, in which nothing that two names hold at one place is equal."""
    own, others = _by_place(one), _by_place(two)
    apart: dict[int, bool] = {}
    for place in own.keys() & others.keys():
        if place[0]:
            apart[place[0]] = apart.get(place[0], True) and not own[place] & others[place]
    return {place for place, wholly in apart.items() if wholly}


def _is_given_others(one: set[Feature], two: set[Feature]) -> bool:
    """Whether two modules are given other inputs in a step in which something else of them is equal.

    One has inside it what comes before the other, or both are branches of one sum, which share a gradient.
    """
    own, others = _by_place(one), _by_place(two)
    shared = {feature[0] for feature in one & two}
    given = kind_code(Kind.INPUT)
    return any(
        place[0] in shared and place[1] == given and not own[place] & others[place]
        for place in own.keys() & others.keys()
    )


def _places_alike(one: Features, two: Features) -> set[int]:
    """Steps, by their places, in which all names hold the same in both."""
    places = {feature[0] for held in one.values() for feature in held}
    different = {
        feature[0] for name in one.keys() | two.keys() for feature in one.get(name, set()) ^ two.get(name, set())
    }
    return places - different


def _heads_of(name: str) -> list[str]:
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


def _shared(one: Features, two: Features) -> dict[tuple[str, str], int]:
    """How many values two names have in common."""
    index: dict[Feature, list[str]] = defaultdict(list)
    for name, held in two.items():
        for feature in held:
            index[feature].append(name)
    return Counter((old, new) for old, held in one.items() for feature in held for new in index.get(feature, ()))


def _modules(
    shared: Mapping[tuple[str, str], int],
    change: Callable[[str], str],
    classes: tuple[dict[str, str], dict[str, str]],
    weight: float,
) -> dict[str, str]:
    """Modules without tensors of their own, by how many inputs and outputs they share, their class and their parent.

    Args:
        shared: pairs of names, and how many values they share in all steps.
        change: what is known of other names.
        classes: of a and of b, the class of a name.
        weight: of one such value, where sharing a class counts 4 and sharing a parent 2.
    """
    scores: dict[tuple[str, str], float] = {}
    for (old, new), count in shared.items():
        same_class = classes[0].get(old) == classes[1].get(new)
        same_parent = change(old.rpartition(".")[0]) == new.rpartition(".")[0]
        if count >= 2 or (same_class and same_parent):
            scores[old, new] = weight * count + 4 * same_class + 2 * same_parent
    return _best(scores)


def _shifted(a: Side, b: Side) -> frozenset[str]:
    """Parents, with their dot, whose numbered children are more in one run than in the other."""
    alone = [
        {name for name in heads(own - other) - other if name.rpartition(".")[2].isdecimal()}
        for own, other in ((a.names, b.names), (b.names, a.names))
    ]
    if not (alone[0] - b.heads or alone[1] - a.heads):
        return frozenset()
    counts = child_counts(a.names), child_counts(b.names)
    return frozenset(
        f"{parent}." for parent in counts[0].keys() & counts[1].keys() if counts[0][parent] != counts[1][parent]
    )
