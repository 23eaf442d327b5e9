"""From candidates to an assignment: one partner for each name, and no name twice.

A candidate is a pair of a name of a and a name of b with a rank, the lowest of which is the best. A tie between two
partners proves nothing, and then neither is one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    Pair = tuple[str, str]


def assigned(ranks: Mapping[Pair, Any], *, ties: bool = False) -> dict[str, str]:
    """One partner for each name, by rank.

    Args:
        ranks: candidates, each with what it is sorted by.
        ties: whether of partners that rank alike the first by name is taken, instead of none.
    """
    levels: dict[Any, list[Pair]] = defaultdict(list)
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


def by_votes(votes: Mapping[Pair, float]) -> dict[str, str]:
    """The partner that shares most with each name; of several first the equal name, then the one most alike."""
    return assigned({(old, new): (-count, old != new, -_likeness(old, new)) for (old, new), count in votes.items()})


def _likeness(old: str, new: str) -> int:
    """How many components two names have in common, twice those at their ends and once those at their beginnings."""
    one, two = old.split("."), new.split(".")
    return 2 * _in_common(one[::-1], two[::-1]) + _in_common(one, two)


def _in_common(one: Sequence[str], two: Sequence[str]) -> int:
    return next((place for place, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))


def modules_by_votes(
    votes: Mapping[Pair, int],
    change: Callable[[str], str],
    classes: tuple[Mapping[str, str], Mapping[str, str]],
    weight: float,
) -> dict[str, str]:
    """Modules without tensors of their own, by how many inputs and outputs they share, their class and their parent.

    Args:
        votes: pairs of names, and how many values they share in all steps.
        change: what is known of other names.
        classes: of a and of b, the class of a name.
        weight: of one such value, where sharing a class counts 4 and sharing a parent 2.
    """
    scores: dict[Pair, float] = {}
    for (old, new), count in votes.items():
        same_class = classes[0].get(old) == classes[1].get(new)
        same_parent = change(old.rpartition(".")[0]) == new.rpartition(".")[0]
        if count >= 2 or (same_class and same_parent):
            scores[old, new] = weight * count + 4 * same_class + 2 * same_parent
    return by_votes(scores)


def in_one_order(
    pairs: Iterable[Pair], one: Mapping[str, tuple[int, int]], two: Mapping[str, tuple[int, int]]
) -> list[Pair]:
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


def common_subsequence(one: Sequence[Hashable], two: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Places of a longest common subsequence, of several the one that keeps most of the beginning.

    Layers that look alike are the rule here, so longest runs (as difflib looks for) would pair the wrong ones.
    """
    rows, width = len(one), len(two)
    best = [[0] * (width + 1) for _ in range(rows + 1)]
    for i in reversed(range(rows)):
        for j in reversed(range(width)):
            best[i][j] = best[i + 1][j + 1] + 1 if one[i] == two[j] else max(best[i + 1][j], best[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < rows and j < width:
        if one[i] == two[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j + 1] >= best[i + 1][j]:
            j += 1
        else:
            i += 1
    return pairs
