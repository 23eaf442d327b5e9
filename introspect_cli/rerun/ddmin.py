"""Delta debugging: the smallest part of a list that still does something.

The algorithm `ddmin` of Zeller and Hildebrandt ("Simplifying and isolating failure-inducing input", 2002): halves are
tried, then what is left without each, then finer parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Item = TypeVar("Item")


def ddmin(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> Sequence[Item]:
    """A smallest set, in that no single item can be left out, on which `fails` is still true.

    Args:
        items: a set on which `fails` is true; the likeliest first, since these are asked about first.
        fails: the question; asked of subsets, in order, and never of the empty one.
    """
    parts = 2
    while len(items) > 1:
        size = max(len(items) // parts, 1)
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        rests = [[item for item in items if item not in chunk] for chunk in chunks]
        smaller = next((chunk for chunk in chunks if len(chunk) < len(items) and fails(chunk)), None)
        if smaller is not None:
            items, parts = smaller, 2
            continue
        smaller = next((rest for rest in rests if 0 < len(rest) < len(items) and len(chunks) > 2 and fails(rest)), None)
        if smaller is not None:
            items, parts = smaller, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(parts * 2, len(items))
    return items
