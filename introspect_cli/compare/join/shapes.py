"""Whether two values are of different shapes, where of one it is only known how much of it each rank holds.

What several ranks hold without a known place has no shape: it may be cut along any dimension. What is equal on all of
them may be copies, or parts that happen to be equal, as the zeros that a layer begins with. Two such values can only be
of different sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.store.together import EQUAL_ON, VALUES_OF

if TYPE_CHECKING:
    from introspect_cli.records import Layout, Summary


def shapes_differ(a: Summary, b: Summary) -> bool:
    """Whether two values are of different shapes."""
    return other_shapes((a.layout, b.layout), (a.text, b.text))


def shapeless(summary: Summary) -> bool:
    """Whether a value is what several ranks hold, each its own, without a known place."""
    return summary.text.startswith(VALUES_OF)


def other_shapes(layouts: tuple[Layout, Layout], texts: tuple[str, str]) -> bool:
    """Whether values with these layouts and texts are of different shapes."""
    one, two = layouts
    if one.shape == two.shape:
        return False
    if any(text.startswith(VALUES_OF) for text in texts):
        return one.numel != two.numel
    return not (_parts_of(one, texts[0], two) or _parts_of(two, texts[1], one))


def _parts_of(part: Layout, text: str, whole: Layout) -> bool:
    """Whether ranks that all hold an equal value may have another one between them, perhaps several times."""
    ranks = text.removeprefix(f"{EQUAL_ON} ").partition(" ")[0] if text.startswith(EQUAL_ON) else ""
    times, rest = divmod(whole.numel, max(part.numel, 1))
    return ranks.isdigit() and rest == 0 < times and int(ranks) % times == 0
