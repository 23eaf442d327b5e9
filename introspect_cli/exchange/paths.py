"""Paths inside nested values: `[0]['hidden'].logits` into keys, and values at paths into nested containers."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_KEY = re.compile(r"""\[(\d+)\]|\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]|\.(\w+)|\[([^\[\]]*)\]""")


_DEEPEST = 32
"""Keys after which the rest of a path is one key: nothing that people write is nested deeper."""


def keys(path: str) -> list[str | int]:
    """The keys of a path; what cannot be read is one key."""
    found: list[str | int] = []
    place = 0
    while place < len(path):
        if len(found) == _DEEPEST:
            return [*found, path[place:]]
        match = _KEY.match(path, place)
        if match is None:
            return [*found, path[place:]]
        place = match.end()
        if match[1] is not None:
            found.append(int(match[1]))
        elif match[2] is not None:
            found.append(str(ast.literal_eval(match[2])))
        else:
            found.append(match[3] if match[3] is not None else match[4])
    return found


def nested(items: Iterable[tuple[str, Any]]) -> Any:
    """Values by path as nested dicts and lists; a single value at the empty path is itself."""
    pairs = [(keys(path), value) for path, value in items]
    return _nested(pairs)


def _nested(pairs: list[tuple[list[str | int], Any]]) -> Any:
    if len(pairs) == 1 and not pairs[0][0]:
        return pairs[0][1]
    groups: dict[str | int, list[tuple[list[str | int], Any]]] = {}
    for own, value in pairs:
        groups.setdefault(own[0] if own else "", []).append((own[1:], value))
    inner = {key: _nested(group) for key, group in groups.items()}
    if inner and all(isinstance(key, int) for key in inner) and sorted(map(int, inner)) == list(range(len(inner))):
        return [inner[place] for place in range(len(inner))]
    return inner


def flattened(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Leaves of nested dicts and lists with their paths."""
    if isinstance(value, dict):
        found = []
        for key, item in value.items():
            found += flattened(item, f"{path}[{key!r}]")
        return found
    if isinstance(value, (list, tuple)):
        found = []
        for place, item in enumerate(value):
            found += flattened(item, f"{path}[{place}]")
        return found
    return [(path, value)]
