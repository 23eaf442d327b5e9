"""How much of a whole its parts cover, and how much of it more than one of them holds.

Counting the elements of parts does not tell: a shard written at a wrong offset leaves a hole and overlaps its
neighbour, and the numbers add up. So the parts are painted on a grid whose lines are the ends of their ranges: as many
cells as there are parts, however large the tensor is.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import starmap
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.store.launched import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.records import Part

_MOST_CELLS = 1 << 24
_SIMPLE = 64


class Covering(NamedTuple):
    """What parts have of a whole.

    Attributes:
        covered: elements that a part has at least.
        doubled: elements that more than one part has.
        first: positions of two parts that overlap; None where none do.
    """

    covered: int
    doubled: int
    first: tuple[int, int] | None = None


def covering(parts: Sequence[Part]) -> Covering | None:
    """What different parts of one tensor have of it; None where that cannot be told."""
    filled = [number for number, part in enumerate(parts) if part.numel]
    if not filled:
        return Covering(0, 0)
    dims = {len(parts[number].ranges) for number in filled}
    if len(dims) != 1:
        return None
    lines = []
    for dim in range(dims.pop()):
        ends = {end for n in filled for start, size in parts[n].ranges[dim] for end in (start, start + size)}
        lines.append(np.array(sorted(ends), np.int64))
    cells = tuple(len(own) - 1 for own in lines)
    if float(np.prod(cells, dtype=np.float64)) > _MOST_CELLS:
        return None
    painted = np.zeros(cells, np.int32)
    holder = np.full(cells, -1, np.int32)
    first = None
    for number in filled:
        inside = np.ix_(*starmap(_cells, zip(lines, parts[number].ranges, strict=True)))
        if first is None and (painted[inside] > 0).any():
            first = int(holder[inside].max()), number
        painted[inside] += 1
        holder[inside] = number
    sizes = np.ones((), np.float64)
    for own in lines:
        sizes = np.multiply.outer(sizes, np.diff(own))
    return Covering(int(sizes[painted > 0].sum()), int(sizes[painted > 1].sum()), first)


def _cells(lines: np.ndarray[tuple[int, ...], np.dtype[np.int64]], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of the cells between lines that ranges take in."""
    return [
        cell
        for start, size in ranges
        for cell in range(int(np.searchsorted(lines, start)), int(np.searchsorted(lines, start + size)))
    ]


def same_parts(holders: Iterable[tuple[int, Part | None]]) -> str:
    """`: ranks 0, 1 hold the same part` of ranks with what each holds; "" where no two hold the same."""
    found: dict[Part, list[int]] = {}
    for rank, part in holders:
        if part is not None and part.numel:
            found.setdefault(part, []).append(rank)
    told = [f"{rank_list(ranks)} hold the same part" for ranks in found.values() if len(ranks) > 1]
    return f": {' and '.join(told)}" if told else ""


def share(of: int, whole: int) -> str:
    """A share of a whole as people say it: `3/4`, or `1,234 of 5,678 elements` where that is no simple fraction."""
    found = Fraction(of, whole) if whole else Fraction(0)
    if found.denominator <= _SIMPLE:
        return f"{found.numerator}/{found.denominator} of it"
    return f"{of:,} of its {whole:,} elements"
