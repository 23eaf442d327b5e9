"""Recorded values that differ between two runs, and their wording.

Flat mappings are compared directly, nested ones by deepdiff, imported only then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from introspect_cli.texts import begin_alike

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from introspect_cli.compare.result import SettingChange


T = TypeVar("T")


READ = "read"
"""The value of a file that one run alone read."""

_DIGEST = re.compile(r"[0-9a-f]{16,} [0-9a-f]{16,}")
_LONGEST = 80
_AROUND = 20


def on_one_line(one: Any, two: Any, before: tuple[int, int] = (0, 0)) -> tuple[str | None, str | None]:
    """Both values as text; None stays None.

    If either is over `_LONGEST` characters, both begin a little before their first difference, or before what stands
    after so many characters of each, and end after `_LONGEST`.
    """
    a, b = (None if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in (one, two))
    if a is None or b is None or max(len(a), len(b)) <= _LONGEST:
        return _shortened(a, 0), _shortened(b, 0)
    alike = begin_alike(a, b)
    one, two = (max(max(each, alike) - _AROUND, 0) for each in before)
    return _shortened(a, one), _shortened(b, two)


def _shortened(text: str | None, start: int) -> str | None:
    """A text from `start` on, at most `_LONGEST` characters, with `...` where cut; None for None."""
    if text is None:
        return None
    rest = f"...{text[start:]}" if start else text
    return rest if len(rest) <= _LONGEST else rest[: _LONGEST - 3] + "..."


def paired(a: Iterable[T], b: Iterable[T], *keys: Callable[[T], object]) -> tuple[list[tuple[T, T]], list[list[T]]]:
    """(pairs of things of a and of b, the rest of each), by one key after the other.

    A key pairs things where just one that is left on each side has it.
    """
    pairs, left = list[tuple[T, T]](), [[*a], [*b]]
    for key in keys:
        one, two = (Counter(map(key, things)) for things in left)
        both = {each for each in one if one[each] == two[each] == 1}
        partner = {key(thing): thing for thing in left[1]}
        pairs += [(thing, partner[key(thing)]) for thing in left[0] if key(thing) in both]
        left = [[thing for thing in things if key(thing) not in both] for things in left]
    return pairs, left


def unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name, value in a, value in b) of entries that differ, those of a first; None where the entry is missing."""
    return ((name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name))


def unequal_values(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, value in a, value in b) of all that differs in two values; None on the side that lacks it.

    Nested values have dotted names (`model.layers[2]`), and `value` where there is no name. None and empty values count
    as empty mappings beside a flat one.
    """
    if a == b:
        return
    if (_is_flat(a) or not a) and (_is_flat(b) or not b):
        a, b = a or {}, b or {}
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from ((str(name), one, two) for name, one, two in unequal(a, b))
            return
    yield from _nested_differences(a, b)


def _is_flat(value: Any) -> bool:
    """Whether a value is a mapping without nested mappings, lists or tuples."""
    return isinstance(value, Mapping) and not any(isinstance(item, (Mapping, list, tuple)) for item in value.values())


def _nested_differences(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, value in a, value in b) of nested values that differ, as deepdiff finds them; imports it.

    The order of lists counts. What is nested too deeply differs as a whole.
    """
    from deepdiff import DeepDiff

    try:
        delta = DeepDiff(a, b, view="tree", verbose_level=2, ignore_order=False)
    except RecursionError:  # nested some 300 times
        yield "value", a, b
        return
    for kind in delta:
        for level in delta[kind]:
            name = re.sub(r"^root", "", level.path() or "")
            name = re.sub(r"\['([^'\]]*)'\]", r".\1", name).lstrip(".")
            values = None if "added" in kind else level.t1, None if "removed" in kind else level.t2
            yield name or "value", *values


def describe(change: SettingChange) -> str:
    """A change in words, like a diff: `lr 0.0003 -> 0.001`, `model.py changed`, `--amp, only in b`.

    Source files and other files compared by digest have no values in it; nor has what one run alone was given, imported
    or read.
    """
    a, b, name = change.a, change.b, change.name
    if None not in (a, b):
        if change.source == "sources":
            return f"{name} changed"
        if change.source == "files" and _DIGEST.fullmatch(f"{a} {b}"):
            return f"{name}: another file"
        return f"{name}{':' * name[-1:].isdigit()} {a} -> {b}"  # `argument 1: 1 -> 4`
    value = a if b is None else b
    shown = "" if value in {"given", "imported", READ, None} else f" {value}"
    return f"{name}{shown}, only in {'a' if b is None else 'b'}"
