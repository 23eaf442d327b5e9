"""Names of two runs put together by how many values they share.

Most names have one partner and no other, so these are told by arrays. What is left is scored, pair by pair: of several
partners the one with the most in common is taken, and a tie proves nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from introspect_cli.compare.join.holdings import Held
    from introspect_cli.compare.join.sites import Ids

AMBIGUOUS = 8
"""More pairs of names with one value than this, and nobody can say which is which."""


def shared(one: Held, two: Held, most: int | None = None) -> tuple[Ids, Ids, Ids]:
    """Pairs of names, as numbers of a and of b, and how many values they share.

    Args:
        one: what the names of a hold.
        two: what those of b hold.
        most: values that more pairs of names have in common do not count.
    """
    owners, codes = zip(*(_distinct(held) for held in (one, two)), strict=True)
    ends = [np.searchsorted(codes[1], codes[0], side=side) for side in ("left", "right")]
    first, times = ends[0], ends[1] - ends[0]
    if most is not None:
        own = np.searchsorted(codes[0], codes[0], side="right") - np.searchsorted(codes[0], codes[0], side="left")
        times = np.where(own * times <= most, times, 0)
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


def paired(one: Held, two: Held) -> dict[str, str]:
    """Names that share a value which no other name has; of several, those with the most values in common."""
    old, new, votes = shared(one, two, AMBIGUOUS)
    alone = (np.bincount(old, minlength=1)[old] == 1) & (np.bincount(new, minlength=1)[new] == 1)
    found = {one.names[i]: two.names[j] for i, j in zip(old[alone].tolist(), new[alone].tolist(), strict=True)}
    rest = zip(old[~alone].tolist(), new[~alone].tolist(), votes[~alone].tolist(), strict=True)
    return found | best({(one.names[i], two.names[j]): count for i, j, count in rest})


def best(scores: Mapping[tuple[str, str], float]) -> dict[str, str]:
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


def modules(
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
    return best(scores)
