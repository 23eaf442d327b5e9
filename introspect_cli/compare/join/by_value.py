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

import gc
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.boundaries import crossed
from introspect_cli.compare.join.flow import CLOSE
from introspect_cli.compare.join.holdings import Side, Tree, alone, heads, parents
from introspect_cli.compare.join.moved import child_counts
from introspect_cli.compare.join.near import near_pairs
from introspect_cli.compare.join.pairing import best, modules, paired, shared
from introspect_cli.compare.join.renames import renamer
from introspect_cli.compare.join.roots import matched_roots, variables_of
from introspect_cli.compare.join.sites import columns, kind_code
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.join.holdings import Feature, Held
    from introspect_cli.compare.join.roots import Variables
    from introspect_cli.store.rank_reader import RankReader


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


@contextmanager
def _uncollected() -> Iterator[None]:
    """No search for cycles meanwhile: nothing here makes one, and a million names are long looked through for some."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_uncollected()
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
    given = sides[0]
    variables = variables_of(a, rename), variables_of(b, None)
    roots = matched_roots(sides, variables)
    if roots:
        one = columns(a.sites, _after(rename, roots, given))
        sides = sides[0].renamed(one), sides[1]
    found = _Search(*sides, close).run()
    others = crossed(*sides, found.names)
    back = {new: old for old, new in roots.items()}

    def at_first(name: str) -> str:
        head, dot, rest = name.partition(".")
        return back.get(head, head) + dot + rest

    if roots:
        found = replace(
            found,
            names=roots | {at_first(old): new for old, new in found.names.items()},
            votes={at_first(old): votes for old, votes in found.votes.items()},
            near=frozenset(map(at_first, found.near)),
            steps={at_first(old): places for old, places in found.steps.items()},
        )
        others = set(map(at_first, others))
    names = {old: new for old, new in found.names.items() if old != new}
    names |= _evicted(given, names, others)
    numbered = {places: frozenset(chosen[place] for place in places) for places in set(found.steps.values())}
    return replace(
        found,
        names=names,
        votes={old: found.votes.get(old, 0) for old in names},
        close=close,
        steps={old: numbered[places] for old, places in found.steps.items()},
        variables=variables,
    )


def _after(rename: Callable[[str], str] | None, roots: Mapping[str, str], side: Side) -> Callable[[str], str]:
    """The names after the roots have theirs; a root whose name is taken gets one that b does not have."""
    moved = renamer((), {**roots, **_evicted(side, roots)}) or str
    return lambda name: moved(rename(name) if rename else name)


def _evicted(side: Side, moved: Mapping[str, str], others: AbstractSet[str] = frozenset()) -> dict[str, str]:
    """Names of a that are others' in b, each with a name that b does not have: taken, or in `others`."""
    change = renamer((), dict(moved))
    if change is None:
        return {}
    if not others and not side.has_any(moved.values()):
        return {}
    every = side.every_name
    tree = Tree(every)
    taken = {new for old, new in moved.items() if new in every and new not in moved}
    goes = {name: new for name in _at_or_below(tree, moved, every) if (new := change(name)) != name}
    clash = {name for name in (*goes.values(), *taken, *others) if name in every and name not in goes}
    gone = {name: f"{name}(a)" for name in clash if not any(head in clash for head in parents(name))}
    stays = {}
    for name in _at_or_below(tree, gone, every):
        if name in goes:
            continue
        top = next(head for head in (name, *parents(name)) if head in clash)
        if name not in clash:  # what is inside one that goes, and has the same name in b, stays where it is
            child = name[: name.find(".", len(top) + 1)] if "." in name[len(top) + 1 :] else name
            stays[child] = child
    return stays | gone


def _at_or_below(tree: Tree, tops: Iterable[str], names: AbstractSet[str]) -> dict[str, None]:
    """Those of the names that are among the tops, or below one."""
    return dict.fromkeys(name for top in tops for name in (*((top,) if top in names else ()), *tree.below(top)))


class _Search:
    """Names that one run only has, or that are numbers of a sequence with another length, put together by value."""

    def __init__(self, a: Side, b: Side, close: float) -> None:
        """Take both sides, their roots matched already."""
        self.a, self.b, self.close = a, b, close
        self.open_a, self.open_b = alone(a, b)
        self.only_a, self.only_b = self.open_a, self.open_b
        self.shifted = _shifted(a, b, self.open_a, self.open_b)
        if self.shifted:
            self.open_a = self.open_a | {name for name in a.names if self._is_shifted(name)}
            self.open_b = self.open_b | {name for name in b.names if self._is_shifted(name)}
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

    def _in_a(self, name: str) -> bool:
        """Whether a has the name; most that are asked for are in one run only, and that is known."""
        return name in self.only_a or (name not in self.only_b and name in self.a.names)

    def _in_b(self, name: str) -> bool:
        return name in self.only_b or (name not in self.only_a and name in self.b.names)

    def run(self) -> Correspondence:
        """Match tensors, then the tree above them, then modules without tensors; each exactly first, then nearly."""
        if not self.open_a or not self.open_b:
            return Correspondence()
        held = self.a.held(self.open_a), self.b.held(self.open_b)
        tensors = self.a.tensors_of(self.open_a), self.b.tensors_of(self.open_b)
        own = held[0].only(tensors[0]), held[1].only(tensors[1])
        equal = paired(*own)
        pairs = self._not_by_chance(equal, *own)
        left = set(own[0].names) - equal.keys(), set(own[1].names) - set(equal.values())
        alike = near_pairs((self.a, self.b), left, self._kept, self.close, best)
        settled = tuple(own for own in self.shifted if any(name.startswith(own) for name in pairs))
        places = self._places(pairs, *own)
        near = {old: own for (old, _), own in alike.items()}
        self._lift(pairs | dict(alike.keys()), places | near, near.keys(), tensors[0])
        self._without_tensors(*held, tensors)
        self._confirm()
        return Correspondence(self.names, self.votes, frozenset(self.near), steps=self.places, settled=settled)

    def _places(self, pairs: Mapping[str, str], one: Held, two: Held) -> dict[str, frozenset[int]]:
        """The steps, by their places, in which something that a pair holds is equal."""
        if self.a.steps == 1:
            return dict.fromkeys(pairs, frozenset({0}))
        return {old: frozenset(feature[0] for feature in one.of(old) & two.of(new)) for old, new in pairs.items()}

    def _without_tensors(self, held_a: Held, held_b: Held, tensors: tuple[set[str], set[str]]) -> None:
        """Match modules without tensors of their own, by inputs and outputs."""
        bare = [name for name in _owning_nothing(self.a, held_a, tensors[0]) if name not in self.names]
        others = _owning_nothing(self.b, held_b, tensors[1]) if bare else []
        if not others:
            return
        change = renamer((), self.names) or str
        back = renamer((), {new: old for old, new in self.names.items()}) or str
        rest_a = held_a.only({name for name in bare if not self._in_b(change(name)) or self._is_shifted(name)})

        def reached(name: str) -> bool:
            return any(self._in_a(own) and change(own) == name for own in (name, back(name)))

        rest_b = held_b.only({name for name in others if not reached(name) or self._is_shifted(name)})
        if not rest_a.names or not rest_b.names:
            return
        classes, few = self._classes(), 1 / self.a.steps

        def choose(votes: Mapping[tuple[str, str], int]) -> dict[str, str]:
            fit = {
                (old, new): count
                for (old, new), count in votes.items()
                if not _is_given_others(rest_a.of(old), rest_b.of(new))
            }
            return modules(fit, change, classes, few)

        equal = zip(*(own.tolist() for own in shared(rest_a, rest_b)), strict=True)
        for old, new in choose({(rest_a.names[i], rest_b.names[j]): votes for i, j, votes in equal}).items():
            if change(old) != new:
                own = Counter(feature[0] for feature in rest_a.of(old) & rest_b.of(new))
                self.names[old], self.votes[old] = new, max(own.values())
                self.places[old] = frozenset(place for place, votes in own.items() if votes == self.votes[old])
        left = set(rest_a.names) - self.names.keys(), set(rest_b.names) - set(self.names.values())
        for (old, new), places in near_pairs((self.a, self.b), left, self._kept, self.close, choose).items():
            if change(old) != new:
                self.names[old], self.votes[old], self.places[old] = new, 1, places
                self.near.add(old)

    def _not_by_chance(self, pairs: dict[str, str], one: Held, two: Held) -> dict[str, str]:
        """Pairs without those that differ wholly in a later step in which all that has kept its name agrees."""
        if self.a.steps == 1:
            return pairs
        apart = {old: _places_apart(one.of(old), two.of(new)) for old, new in pairs.items()}
        if not any(apart.values()):
            return pairs
        kept = self._kept()
        agree = _places_alike(self.a.held(kept), self.b.held(kept))
        return {old: new for old, new in pairs.items() if not apart[old] & agree}

    def _kept(self) -> AbstractSet[str]:
        """Tensors that have the same name in both."""
        return self.a.tensors & self.b.tensors - self.open_a

    def _classes(self) -> tuple[dict[str, str], dict[str, str]]:
        sides = (self.a.sites, self.open_a), (self.b.sites, self.open_b)
        one, two = (
            {sites.fqn[at]: sites.module_class[at] for at in sites.of(names).tolist()} for sites, names in sides
        )
        return one, two

    def _lift(
        self,
        pairs: dict[str, str],
        places: Mapping[str, frozenset[int]],
        near: AbstractSet[str],
        tensors: AbstractSet[str],
    ) -> None:
        """Take pairs of tensors up the tree, as far as nothing that has another name, or keeps its own, is below."""
        levels = {old: _levels_above(old, new) for old, new in pairs.items()}
        votes = Counter(chain.from_iterable(levels.values()))
        own = self._rather_kept(votes)
        moving = dict[str, int]()

        def together(above: str) -> int:
            """How many pairs are at or below a name; -1 where a tensor below keeps its name."""
            if above not in moving:
                below = set(self.a.tensor_tree.below(above))
                moving[above] = len(pairs.keys() & below) + (above in pairs) if below <= tensors else -1
            return moving[above]

        for old in sorted(pairs):
            new = pairs[old]
            if old == new:
                continue
            best = (old, new)
            for level in levels[old]:
                if votes[level] != together(level[0]) or level in own:
                    break
                best = level
            top, name = best
            if old in near:
                self.near.add(top)
            self.places[top] = self.places[top] & places[old] if top in self.places else places[old]
            if top not in self.names:
                self.names[top], self.votes[top] = name, votes.get(best, 1)

    def _rather_kept(self, levels: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Names above pairs that the module keeps, or whose new name another one keeps, because that suits better."""
        taken = {(one, two) for one, two in levels if self._in_a(two) or self._in_b(one)}
        if not taken:
            return set()
        names = {name for level in taken for name in level}
        held_a, held_b = self.a.held(names), self.b.held(names)

        def alike(old: str, new: str) -> int:
            return len(held_a.of(old) & held_b.of(new))

        return {(one, two) for one, two in taken if max(alike(two, two), alike(one, one)) > alike(one, two)}

    def _confirm(self) -> None:
        """A name that was only said again by a longer prefix is dropped."""
        for old in sorted(self.names, key=len, reverse=True):
            above = next(filter(self.names.__contains__, parents(old)), None)
            if above is not None and self.names[above] + old[len(above) :] == self.names[old]:
                del self.names[old]


def _owning_nothing(side: Side, held: Held, tensors: AbstractSet[str]) -> list[str]:
    """Those of the names that are no tensors, and that no tensor is the own of."""
    owning = {name.rpartition(".")[0] for name in tensors} | tensors
    return [name for name in held.names if name not in owning and not side.owns(name)]


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


def _places_alike(one: Held, two: Held) -> set[int]:
    """Steps, by their places, in which all names hold the same in both."""
    places = set(one.places[0].tolist())
    names = dict.fromkeys((*one.names, *two.names))
    return places - {feature[0] for name in names for feature in one.of(name) ^ two.of(name)}


def _levels_above(old: str, new: str) -> list[tuple[str, str]]:
    """The pairs of names above a pair, as long as what is left out is the same in both; at equal names nothing is."""
    found: list[tuple[str, str]] = []
    while True:
        old, dot, end = old.rpartition(".")
        new, other_dot, other_end = new.rpartition(".")
        if not (dot and other_dot and end == other_end and old != new):
            return found
        found.append((old, new))


def _numbered(names: Iterable[str]) -> list[str]:
    """Those whose last component is a number."""
    return [name for name in names if name[-1].isdecimal() and name.rpartition(".")[2].isdecimal()]


def _shifted(a: Side, b: Side, only_a: AbstractSet[str], only_b: AbstractSet[str]) -> frozenset[str]:
    """Parents, with their dot, whose numbered children are more in one run than in the other."""
    above = heads(only_a), heads(only_b)
    lost = [_numbered(above[0] - above[1]), _numbered(above[1] - above[0])]
    if all(name in b.tree for name in lost[0]) and all(name in a.tree for name in lost[1]):
        return frozenset()
    counts = child_counts(a.names), child_counts(b.names)
    return frozenset(
        f"{parent}." for parent in counts[0].keys() & counts[1].keys() if counts[0][parent] != counts[1][parent]
    )
