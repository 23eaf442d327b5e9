"""Names whose values differ by rounding: too far apart for checksums, and still nearer to each other than to all else.

Where two runs round in other places (another machine, other threads, fused kernels), no checksum says which module is
which. A sketch does: values of one shape, at the same place of a module, that are as near as rounding leaves them, and
no third one is. What is matched so has to have run in one order in both, and to be near in every step looked at in
which all that has kept its name is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.join.distance import Layouts, sketch_norms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.join.holdings import Side
    from introspect_cli.compare.join.sites import Mask

_MOST = 1_000  # values of one shape and place that are set against as many others at once
_FEW = 3  # a value that is near to more than this, as that of a module and of its last child is, tells nothing

Key = tuple[int, ...]
"""The place of a step among those looked at, shape, kind, phase and call."""

_Sketches = dict[Key, tuple[list[str], Any]]
"""Names and their sketches, by where they stand."""


def near_pairs(
    sides: tuple[Side, Side],
    names: tuple[AbstractSet[str], AbstractSet[str]],
    kept: Callable[[], AbstractSet[str]],
    close: float,
    choose: Callable[[Mapping[tuple[str, str], int]], dict[str, str]],
) -> dict[tuple[str, str], frozenset[int]]:
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
    (one, began), (two, other_began) = (_sketches(side, own) for side, own in zip(sides, names, strict=True))
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for key in one.keys() & two.keys():
        for pair in _nearest(*one[key], *two[key], close):
            found[pair].append(key[0])
    chosen = choose({pair: len(places) for pair, places in found.items()})
    parted = {old: _places(own, any) for old, own in _nearness(one, two, chosen, close).items()}
    if any(False in places.values() for places in parted.values()):
        agree = _places_near(sides, kept(), close)
        chosen = {
            old: new
            for old, new in chosen.items()
            if not any(place in agree and not near for place, near in parted.get(old, {}).items())
        }
    return {pair: frozenset(found[pair]) for pair in in_one_order(chosen.items(), began, other_began)}


def _sketches(side: Side, names: AbstractSet[str]) -> tuple[_Sketches, dict[str, tuple[int, int]]]:
    """Names and sketches by step, shape, kind, phase and call; and when each name was recorded first."""
    shapes, sites = Layouts(side.reader.layouts).shape, side.sites
    rows_of: dict[Key, tuple[list[str], list[Any]]] = defaultdict(lambda: ([], []))
    first: dict[str, tuple[int, int]] = {}
    for place, batch, rows, numbers in side.rows(names):
        if batch.sketch is None:
            continue
        sequence, layout = np.asarray(batch.sequence), np.asarray(batch.layout)
        order = np.argsort(sequence[rows], kind="stable")
        for row, number in zip(rows[order].tolist(), numbers[order].tolist(), strict=True):
            site = tuple(int(own[number]) for own in (sites.kind, sites.phase, sites.call))
            key = (place, int(shapes[layout[row]]), *site)
            own, kept = rows_of[key]
            own.append(sites.fqn[number])
            kept.append(batch.sketch[row])
            first.setdefault(sites.fqn[number], (place, int(sequence[row])))
    return {key: (own, np.asarray(kept, np.float64)) for key, (own, kept) in rows_of.items()}, first


def _nearest(one: list[str], kept_one: Any, two: list[str], kept_two: Any, close: float) -> list[tuple[str, str]]:
    """Names that are near each other and few others; many are compared in pieces, in the order of recording."""
    pieces = -(-max(len(one), len(two)) // _MOST)
    found = []
    splits = (np.array_split(np.arange(len(own)), pieces) for own in (one, two))
    for rows_one, rows_two in zip(*splits, strict=True):
        near = _within(kept_one[rows_one], kept_two[rows_two], close)
        near &= (near.sum(1, keepdims=True) <= _FEW) & (near.sum(0, keepdims=True) <= _FEW)
        found += [(one[rows_one[i]], two[rows_two[j]]) for i, j in np.argwhere(near).tolist()]
    return found


def _within(one: Any, two: Any, close: float) -> Mask:
    """Which sketches are within the distance of each other, relative to the larger."""
    sizes = sketch_norms(one), sketch_norms(two)
    apart = np.array([sketch_norms(own - two) for own in one]).reshape(len(one), len(two))
    scale = np.maximum(sizes[0][:, None], sizes[1][None, :])
    near: Mask = (apart <= close * scale) & (scale > 0)
    return near


def _nearness(
    one: _Sketches, two: _Sketches, pairs: Mapping[str, str], close: float
) -> dict[str, list[tuple[int, bool]]]:
    """Of each pair of names, every record that both have: the place of its step, and whether the two are near."""
    found: dict[str, list[tuple[int, bool]]] = defaultdict(list)
    for key in one.keys() & two.keys():
        (own, kept_one), (other, kept_two) = one[key], two[key]
        rows = {name: row for row, name in enumerate(_counted(other))}
        met = [
            (at, rows[pairs[name], number], name)
            for at, (name, number) in enumerate(_counted(own))
            if (pairs.get(name), number) in rows
        ]
        if not met:
            continue
        left, right = (kept[[ends[side] for ends in met]] for side, kept in enumerate((kept_one, kept_two)))
        near = sketch_norms(left - right) <= close * np.maximum(sketch_norms(left), sketch_norms(right))
        for (_, _, name), is_near in zip(met, near.tolist(), strict=True):
            found[name].append((key[0], is_near))
    return found


def _counted(names: list[str]) -> list[tuple[str, int]]:
    """Names, each with how many of the same came before it."""
    seen: Counter[str] = Counter()
    counted = []
    for name in names:
        counted.append((name, seen[name]))
        seen[name] += 1
    return counted


def _places(records: list[tuple[int, bool]], judge: Callable[[list[bool]], bool]) -> dict[int, bool]:
    """Steps, by their places, each judged by its records."""
    by_place: dict[int, list[bool]] = defaultdict(list)
    for place, near in records:
        by_place[place].append(near)
    return {place: judge(near) for place, near in by_place.items()}


def _places_near(sides: tuple[Side, Side], kept: AbstractSet[str], close: float) -> set[int]:
    """Steps, by their places, in which all tensors that have kept their names are near."""
    one, two = (_sketches(side, kept)[0] for side in sides)
    records = _nearness(one, two, dict(zip(kept, kept, strict=True)), close)
    return {place for place, near in _places([own for held in records.values() for own in held], all).items() if near}


def in_one_order(
    pairs: Iterable[tuple[str, str]], one: dict[str, tuple[int, int]], two: dict[str, tuple[int, int]]
) -> list[tuple[str, str]]:
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
