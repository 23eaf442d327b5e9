"""The same modules and parameters under other names, recognised by what they hold.

A refactoring renames, wraps, moves and inserts; none of it changes a number, and a checksum does not know a name. Names
are matched first. What is left is matched by equal checksums of parameters, inputs, outputs and gradients, then by
sketches that are as near as rounding leaves them. A match of one tensor is taken for its module, and for as much of the
tree above it as nothing contradicts, so that a rename that is recognised once holds everywhere below and in all steps.

Values that several unmatched modules share prove nothing, unless the rest of these modules distinguishes them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain, product
from typing import TYPE_CHECKING

from introspect_cli.compare.match.candidates import (
    assigned,
    by_place,
    by_votes,
    differing_steps,
    equal_pairs,
    modules_by_votes,
    near_pairs,
    plausible,
    votes_of,
)
from introspect_cli.compare.match.holdings import Feature, Held, Side, one_sided
from introspect_cli.compare.terms.names import (
    Renamed,
    Source,
    ambiguous,
    ancestors,
    class_of_root,
    numbered_children,
    renamer_of,
    with_ancestors,
)
from introspect_cli.compare.terms.sites import kind_code
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.match.candidates import NamePair


def matched_roots(sides: tuple[Side, Side]) -> dict[str, str]:
    """Roots of a that hold what another root of the same class holds in b; else those that one variable holds.

    A root is named by its class, and numbered where there are more: the order in which they came says nothing of which
    is which. Where values tell nothing, or tell the same of two (a target network is a copy at first), the variable
    does that holds them in the script.
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
    features: dict[str, set[tuple[str, Feature]]] = defaultdict(set)
    held = side.held({name for name in side.names if class_of_root(name.partition(".")[0]) in classes})
    for name in held.names:
        root, _, rest = name.partition(".")
        features[root] |= {(rest, feature) for feature in held.of(name)}
    return features


class Search:
    """Names that one run only has, or that are numbers of a sequence with another length, put together by value.

    Attributes:
        renamed: names of a that are other names of b.
        settled: parents of numbered children, with their dot, of which values showed where some are.
    """

    def __init__(self, a: Side, b: Side, close: float) -> None:
        self.renamed: dict[str, Renamed] = {}
        self.settled: tuple[str, ...] = ()
        self._a, self._b, self._close = a, b, close
        self._only = self._open = one_sided(a, b)
        self._shifted = _shifted(a, b, self._only)
        if self._shifted:
            self._open = (
                self._only[0].union(filter(self._is_shifted, a.names)),
                self._only[1].union(filter(self._is_shifted, b.names)),
            )
        if all(self._open):
            self._run()

    def _is_shifted(self, name: str) -> bool:
        """Whether it is, or is inside of, a numbered child of a parent that has more of them in one run."""
        parts = (head.rpartition(".") for head in (name, *ancestors(name))) if self._shifted else ()
        return any(part.isdecimal() and f"{above}." in self._shifted for above, _, part in parts)

    def _has(self, side: int, name: str) -> bool:
        """Whether a run has the name; most that are asked for are in one run only, and that is known."""
        if name in self._only[side] or name in self._only[1 - side]:
            return name in self._only[side]
        return name in (self._a, self._b)[side].names

    def _run(self) -> None:
        """Match tensors, then the tree above them, then modules without tensors; each exactly first, then nearly."""
        held = self._a.held(self._open[0]), self._b.held(self._open[1])
        tensors = self._a.tensors_of(self._open[0]), self._b.tensors_of(self._open[1])
        one, two = held[0].only(tensors[0]), held[1].only(tensors[1])
        equal = equal_pairs(one, two)
        pairs = self._without_chance(equal, one, two)
        left = set(one.names) - equal.keys(), set(two.names) - set(equal.values())
        near = near_pairs((self._a, self._b), left, self._kept, self._close, by_votes)
        self.settled = tuple(parent for parent in self._shifted if any(name.startswith(parent) for name in pairs))
        steps = self._steps(pairs, one, two) | {old: self._numbers(places) for (old, _), places in near.items()}
        self._lift(pairs | dict(near.keys()), steps, {old for old, _ in near}, tensors[0])
        self._match_modules(held, tensors)
        self._drop_repeated()

    def _steps(self, pairs: Mapping[str, str], one: Held, two: Held) -> dict[str, frozenset[int]]:
        """The steps in which something that a pair holds is equal."""
        if len(self._a.steps) == 1:
            return dict.fromkeys(pairs, frozenset(self._a.steps))
        return {old: self._numbers(feature[0] for feature in one.of(old) & two.of(new)) for old, new in pairs.items()}

    def _numbers(self, places: Iterable[int]) -> frozenset[int]:
        return frozenset(self._a.steps[place] for place in places)

    def _without_chance(self, pairs: dict[str, str], one: Held, two: Held) -> dict[str, str]:
        if len(self._a.steps) == 1:
            return pairs

        def agree() -> set[int]:
            kept = self._kept()
            one, two = self._a.held(kept), self._b.held(kept)
            names = dict.fromkeys((*one.names, *two.names))
            differing = {feature[0] for name in names for feature in one.of(name) ^ two.of(name)}
            return set(one.places[0].tolist()) - differing

        return plausible(pairs, {old: differing_steps(one.of(old), two.of(new)) for old, new in pairs.items()}, agree)

    def _kept(self) -> AbstractSet[str]:
        """Tensors that have the same name in both."""
        return self._a.tensors & self._b.tensors - self._open[0]

    # --- tensors, and the tree above them

    def _lift(
        self,
        pairs: Mapping[str, str],
        steps: Mapping[str, frozenset[int]],
        near: AbstractSet[str],
        tensors: AbstractSet[str],
    ) -> None:
        """Take pairs of tensors up the tree, as far as nothing that has another name, or keeps its name, is below."""
        levels = {old: _levels_above(old, new) for old, new in pairs.items()}
        votes = Counter(chain.from_iterable(levels.values()))
        better_kept = self._better_kept(votes)
        moving = dict[str, int]()

        def together(above: str) -> int:
            """How many pairs are at or below a name; -1 where a tensor below keeps its name."""
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
            source = Source.NEAR if old in near else Source.VALUE
            self._add(*top, source, votes.get(top, 1), steps[old])

    def _add(self, old: str, new: str, source: Source, votes: int, steps: frozenset[int]) -> None:
        """Take in a pair; one of several below a name holds in the steps of all, and is near where one of them is."""
        earlier = self.renamed.get(old)
        if earlier is not None:
            new, votes, steps = earlier.name, earlier.votes, earlier.steps & steps
            source = Source.NEAR if Source.NEAR in (source, earlier.source) else source
        self.renamed[old] = Renamed(new, source, votes, steps)

    def _better_kept(self, levels: Iterable[NamePair]) -> set[NamePair]:
        """Names above pairs that the module keeps, or whose new name another one keeps, because that suits better."""
        taken = {(one, two) for one, two in levels if self._has(0, two) or self._has(1, one)}
        if not taken:
            return set()
        names = {name for level in taken for name in level}
        held_a, held_b = self._a.held(names), self._b.held(names)

        def alike(old: str, new: str) -> int:
            return len(held_a.of(old) & held_b.of(new))

        return {(one, two) for one, two in taken if max(alike(two, two), alike(one, one)) > alike(one, two)}

    # --- modules without tensors

    def _match_modules(self, held: tuple[Held, Held], tensors: tuple[set[str], set[str]]) -> None:
        """Match modules without tensors, by inputs and outputs."""
        bare = [name for name in _without_tensors(self._a, held[0], tensors[0]) if name not in self.renamed]
        others = _without_tensors(self._b, held[1], tensors[1]) if bare else []
        if not others:
            return
        names = {
            old: each.name for old, each in self.renamed.items()
        }  # what is found here is known to `change` at once
        change, back = renamer_of(names), renamer_of({new: old for old, new in names.items()})

        def reached(name: str) -> bool:
            return any(self._has(0, each) and change(each) == name for each in (name, back(name)))

        one = held[0].only({name for name in bare if not self._has(1, change(name)) or self._is_shifted(name)})
        two = held[1].only({name for name in others if not reached(name) or self._is_shifted(name)})
        if not one.names or not two.names:
            return
        classes = _classes(self._a, self._open[0]), _classes(self._b, self._open[1])

        def choose(votes: Mapping[NamePair, int]) -> dict[str, str]:
            fit = {pair: n for pair, n in votes.items() if not _is_given_others(one.of(pair[0]), two.of(pair[1]))}
            return modules_by_votes(fit, change, classes, 1 / len(self._a.steps))

        for old, new in choose(votes_of(one, two)).items():
            if change(old) != new:
                votes = Counter(feature[0] for feature in one.of(old) & two.of(new))
                most = max(votes.values())
                steps = self._numbers(place for place, number in votes.items() if number == most)
                names[old], self.renamed[old] = new, Renamed(new, Source.VALUE, most, steps)
        left = set(one.names) - names.keys(), set(two.names) - set(names.values())
        for (old, new), places in near_pairs((self._a, self._b), left, self._kept, self._close, choose).items():
            if change(old) != new:
                names[old], self.renamed[old] = new, Renamed(new, Source.NEAR, 1, self._numbers(places))

    def _drop_repeated(self) -> None:
        """Drop names that a shorter prefix tells already."""
        for old in sorted(self.renamed, key=len, reverse=True):
            above = next(filter(self.renamed.__contains__, ancestors(old)), None)
            if above is not None and self.renamed[above].name + old[len(above) :] == self.renamed[old].name:
                del self.renamed[old]


def _levels_above(old: str, new: str) -> list[NamePair]:
    """The pairs of names above a pair, as long as what is left out is the same in both; at equal names nothing is."""
    pairs: list[NamePair] = []
    while True:
        old, dot, end = old.rpartition(".")
        new, other_dot, other_end = new.rpartition(".")
        if not (dot and other_dot and end == other_end and old != new):
            return pairs
        pairs.append((old, new))


def _without_tensors(side: Side, held: Held, tensors: AbstractSet[str]) -> list[str]:
    """Those of the names that are no tensors, and have none."""
    owning = {name.rpartition(".")[0] for name in tensors} | tensors
    return [name for name in held.names if name not in owning and not side.owns(name)]


def _classes(side: Side, names: AbstractSet[str]) -> dict[str, str]:
    return {side.sites.fqn[at]: side.sites.module_class[at] for at in side.sites.of(names).tolist()}


def _is_given_others(one: set[Feature], two: set[Feature]) -> bool:
    """Whether two modules are given other inputs in a step in which something else of them is equal.

    One has inside it what comes before the other, or both are branches of one sum, which share a gradient.
    """
    mine, others = by_place(one), by_place(two)
    equal = {feature[0] for feature in one & two}
    given = kind_code(Kind.INPUT)
    return any(
        place[0] in equal and place[1] == given and not mine[place] & others[place]
        for place in mine.keys() & others.keys()
    )


def _shifted(a: Side, b: Side, only: tuple[AbstractSet[str], AbstractSet[str]]) -> frozenset[str]:
    """Parents, with their dot, whose numbered children are more in one run than in the other."""
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
