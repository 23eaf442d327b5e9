"""Pairs of names that may be one, since what they hold is equal or differs by no more than rounding; and one for each.

Equal checksums are looked for first. Where two runs round in other places (another machine, other threads, fused
kernels), no checksum says which module is which. A sketch does: values of one shape, at the same place of a module,
that are as near as rounding leaves them, and no third one is. What is matched so has to have run in one order in both.

Names whose values were equal, or near, by chance, or are a copy that training has not changed yet, show in a later
step: there they hold wholly different values although all that has kept its name agrees.

From such pairs each name gets one partner, and no name is taken twice. A candidate has a rank, the lowest of which is
the best. A tie between two partners proves nothing, and then neither is one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.terms.distance import Layouts, sketch_norms
from introspect_cli.texts import begin_alike

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.match.holdings import Feature, Held, Side
    from introspect_cli.compare.terms.sites import Ids, Mask


_AMBIGUOUS = 8  # more pairs of names with one value than this, and nobody can say which is which
_MOST = 1_000  # values of one shape and place that are set against as many others at once
_FEW = 3  # a value that is near to more than this, as that of a module and of its last child is, tells nothing

Slot = tuple[int, ...]
"""The place of a step among those looked at, shape, kind, phase and call."""

_Sketches = dict[Slot, tuple[list[str], Any]]
"""Names and their sketches, by where they stand."""


def plausible(
    pairs: dict[str, str], differing: Mapping[str, AbstractSet[int]], agree: Callable[[], AbstractSet[int]]
) -> dict[str, str]:
    """Pairs without those that were alike by chance.

    They hold wholly different values in steps, `differing` by name of a, in which all that has kept its name agrees.
    """
    if not any(differing.values()):
        return pairs
    sure = agree()
    return {old: new for old, new in pairs.items() if not differing.get(old, frozenset()) & sure}


# --- equal values


def sharing(one: Held, two: Held, most: int | None = None) -> tuple[Ids, Ids, Ids]:
    """Pairs of names, as numbers of a and of b, and how many values they share.

    Values that more than `most` pairs of names have in common do not count.
    """
    owners, codes = zip(*(_distinct(held) for held in (one, two)), strict=True)
    first, times = _positions_in(codes[1], codes[0])
    if most is not None:
        times = np.where(_positions_in(codes[0], codes[0])[1] * times <= most, times, 0)
    old = np.repeat(owners[0], times)
    starts = np.cumsum(times) - times
    new = owners[1][np.arange(len(old)) - np.repeat(starts - first, times)]
    pairs = np.sort(old * (len(two.names) + 1) + new)  # `np.unique` imports masked arrays, which take a while
    starts = np.flatnonzero(np.diff(pairs, prepend=-1))
    return *np.divmod(pairs[starts], len(two.names) + 1), np.diff(starts, append=len(pairs))


def _distinct(held: Held) -> tuple[Ids, Ids]:
    """Owners and codes, each pair of them once, by rising code."""
    order = np.lexsort((held.owner, held.codes))
    owners, codes = held.owner[order], held.codes[order]
    fresh = np.ones(len(order), np.bool_)
    fresh[1:] = (owners[1:] != owners[:-1]) | (codes[1:] != codes[:-1])
    return owners[fresh], codes[fresh]


def _positions_in(ordered: Ids, wanted: Ids) -> tuple[Ids, Ids]:
    """Where each of the wanted numbers begins in a rising list, and how often it is there."""
    first = np.searchsorted(ordered, wanted)
    return first, np.searchsorted(ordered, wanted, side="right") - first


def votes_of(one: Held, two: Held) -> dict[NamePair, int]:
    """Pairs of names, and how many values they share."""
    numbers = zip(*(column.tolist() for column in sharing(one, two)), strict=True)
    return {(one.names[i], two.names[j]): votes for i, j, votes in numbers}


def equal_pairs(one: Held, two: Held) -> dict[str, str]:
    """Names that share a value which no other name has; of several, those with the most values in common.

    Most names have one partner and no other, so these are chosen by arrays.
    """
    old, new, votes = sharing(one, two, _AMBIGUOUS)
    alone = (np.bincount(old, minlength=1)[old] == 1) & (np.bincount(new, minlength=1)[new] == 1)
    sole = {one.names[i]: two.names[j] for i, j in zip(old[alone].tolist(), new[alone].tolist(), strict=True)}
    rest = zip(old[~alone].tolist(), new[~alone].tolist(), votes[~alone].tolist(), strict=True)
    return sole | by_votes({(one.names[i], two.names[j]): number for i, j, number in rest})


def by_place(features: Iterable[Feature]) -> dict[Feature, set[int]]:
    """Checksums by where they stand."""
    checksums: dict[Feature, set[int]] = defaultdict(set)
    for *place, checksum in features:
        checksums[tuple(place)].add(checksum)
    return checksums


def differing_steps(one: set[Feature], two: set[Feature]) -> set[int]:
    """Later steps, by their places, in which nothing that two names hold at one place is equal."""
    mine, others = by_place(one), by_place(two)
    both = [place for place in mine.keys() & others.keys() if place[0]]
    return {place[0] for place in both} - {place[0] for place in both if mine[place] & others[place]}


# --- near values


def near_pairs(
    sides: tuple[Side, Side],
    names: tuple[AbstractSet[str], AbstractSet[str]],
    kept: Callable[[], AbstractSet[str]],
    close: float,
    choose: Callable[[Mapping[NamePair, int]], dict[str, str]],
) -> dict[NamePair, frozenset[int]]:
    """Pairs of names that hold values which differ by no more than rounding, with the places of the steps where.

    Args:
        sides: run a and run b.
        names: names of a and of b that nothing exact tells of.
        kept: names of tensors that are the same in both.
        close: the relative L2 distance that is taken for rounding.
        choose: of pairs of names and of how many values of theirs are near, the partner of each name.
    """
    if not all(names):
        return {}
    (one, began), (two, other_began) = (_sketches(side, those) for side, those in zip(sides, names, strict=True))
    steps_of: dict[NamePair, list[int]] = defaultdict(list)
    for place in one.keys() & two.keys():
        for pair in _nearest(*one[place], *two[place], close):
            steps_of[pair].append(place[0])
    chosen = choose({pair: len(steps) for pair, steps in steps_of.items()})
    met: dict[str, set[int]] = defaultdict(set)
    near: dict[str, set[int]] = defaultdict(set)
    for name, step, is_near in _compared(one, two, chosen, close):
        met[name].add(step)
        if is_near:
            near[name].add(step)

    def agree() -> set[int]:
        names = kept()
        (first, _), (second, _) = (_sketches(side, names) for side in sides)
        records = list(_compared(first, second, dict(zip(names, names, strict=True)), close))
        return {step for _, step, _ in records} - {step for _, step, is_near in records if not is_near}

    chosen = plausible(chosen, {name: steps - near[name] for name, steps in met.items()}, agree)
    return {pair: frozenset(steps_of[pair]) for pair in in_one_order(chosen.items(), began, other_began)}


def _sketches(side: Side, names: AbstractSet[str]) -> tuple[_Sketches, dict[str, tuple[int, int]]]:
    """Names and sketches by where they stand; and when each name was recorded first."""
    shapes, sites = Layouts(side.reader.layouts).shape, side.sites
    standing: dict[Slot, tuple[list[str], list[Any]]] = defaultdict(lambda: ([], []))
    first: dict[str, tuple[int, int]] = {}
    for step, batch, rows, numbers in side.rows(names):
        if batch.sketch is None:
            continue
        sequence, layout = batch.sequence, batch.layout
        order = np.argsort(sequence[rows], kind="stable")
        for row, number in zip(rows[order].tolist(), numbers[order].tolist(), strict=True):
            site = tuple(int(column[number]) for column in (sites.kind, sites.phase, sites.call))
            place = (step, int(shapes[layout[row]]), *site)
            held, sketches = standing[place]
            held.append(sites.fqn[number])
            sketches.append(batch.sketch[row])
            first.setdefault(sites.fqn[number], (step, int(sequence[row])))
    return {place: (held, np.asarray(rows_there, np.float64)) for place, (held, rows_there) in standing.items()}, first


def _nearest(one: list[str], sketches_one: Any, two: list[str], sketches_two: Any, close: float) -> list[NamePair]:
    """Names that are near each other and few others; many are compared in pieces, in the order of recording."""
    pieces = -(-max(len(one), len(two)) // _MOST)
    pairs = []
    splits = (np.array_split(np.arange(len(names)), pieces) for names in (one, two))
    for rows_one, rows_two in zip(*splits, strict=True):
        near = _within(sketches_one[rows_one], sketches_two[rows_two], close)
        near &= (near.sum(1, keepdims=True) <= _FEW) & (near.sum(0, keepdims=True) <= _FEW)
        pairs += [(one[rows_one[i]], two[rows_two[j]]) for i, j in np.argwhere(near).tolist()]
    return pairs


def _within(one: Any, two: Any, close: float) -> Mask:
    """Which sketches are within the distance of each other, relative to the larger."""
    distance = np.array([sketch_norms(sketch - two) for sketch in one]).reshape(len(one), len(two))
    scale = np.maximum(sketch_norms(one)[:, None], sketch_norms(two)[None, :])
    near: Mask = (distance <= close * scale) & (scale > 0)
    return near


def _compared(
    one: _Sketches, two: _Sketches, pairs: Mapping[str, str], close: float
) -> Iterator[tuple[str, int, bool]]:
    """Every record that both names of a pair have: a's name, the place of its step, and whether the two are near."""
    for place in one.keys() & two.keys():
        (mine, sketches_one), (others, sketches_two) = one[place], two[place]
        rows = {name: row for row, name in enumerate(_counted(others))}
        met = [
            (row, rows[pairs[name], number], name)
            for row, (name, number) in enumerate(_counted(mine))
            if (pairs.get(name), number) in rows
        ]
        if not met:
            continue
        left, right = sketches_one[[rows_of[0] for rows_of in met]], sketches_two[[rows_of[1] for rows_of in met]]
        near = sketch_norms(left - right) <= close * np.maximum(sketch_norms(left), sketch_norms(right))
        yield from ((name, place[0], is_near) for (_, _, name), is_near in zip(met, near.tolist(), strict=True))


def _counted(names: list[str]) -> list[tuple[str, int]]:
    """Names, each with how many of the same came before it."""
    before: defaultdict[str, Iterator[int]] = defaultdict(count)
    return [(name, next(before[name])) for name in names]


NamePair = tuple[str, str]
"""A name of a and a name of b."""


def assigned(ranks: Mapping[NamePair, Any], *, ties: bool = False) -> dict[str, str]:
    """One partner for each name, by rank; of partners that rank alike none, or with `ties` the first by name."""
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
    """The partner that shares most with each name; of several first the equal name, then the one most alike."""
    return assigned({(old, new): (-count, old != new, -_likeness(old, new)) for (old, new), count in votes.items()})


def _likeness(old: str, new: str) -> int:
    """How many components two names have in common, twice those at their ends and once those at their beginnings."""
    one, two = old.split("."), new.split(".")
    return 2 * begin_alike(one[::-1], two[::-1]) + begin_alike(one, two)


def modules_by_votes(
    votes: Mapping[NamePair, int],
    change: Callable[[str], str],
    classes: tuple[Mapping[str, str], Mapping[str, str]],
    weight: float,
) -> dict[str, str]:
    """Modules without tensors, by how many inputs and outputs they share, their class and their parent.

    A value that two names share, in any step, has this weight, where sharing a class counts 4 and sharing a parent 2.
    """
    scores: dict[NamePair, float] = {}
    for (old, new), shared in votes.items():
        same_class = classes[0].get(old) == classes[1].get(new)
        same_parent = change(old.rpartition(".")[0]) == new.rpartition(".")[0]
        if shared >= 2 or (same_class and same_parent):
            scores[old, new] = weight * shared + 4 * same_class + 2 * same_parent
    return by_votes(scores)


def in_one_order(
    pairs: Iterable[NamePair], one: Mapping[str, tuple[int, int]], two: Mapping[str, tuple[int, int]]
) -> list[NamePair]:
    """The most pairs whose names come in the same order in both."""
    rising = sorted(pairs, key=lambda pair: one[pair[0]])
    ends: list[tuple[int, int]] = []
    places: list[int] = []
    for pair in rising:
        at = bisect_left(ends, two[pair[1]])
        ends[at : at + 1] = [two[pair[1]]]
        places.append(at)
    kept, wanted = [], len(ends) - 1
    for pair, at in zip(reversed(rising), reversed(places), strict=True):
        if at == wanted:
            kept.append(pair)
            wanted -= 1
    return kept[::-1]
