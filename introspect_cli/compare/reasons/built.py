"""What loaders, schedulers and gradient scalers of two runs were built with, and differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


def built_changes(
    a: Any, b: Any, differing: Callable[[Any, Any], Iterable[tuple[str, Any, Any]]]
) -> Iterator[tuple[str, str, Any, Any]]:
    """(kind, name, value in a, value in b) of what differs between things that both runs built, with where that was."""
    for kind in _shared(a, b):
        one_side, other_side = a[kind], b[kind]
        for thing in _shared(one_side, other_side):
            one, two = one_side[thing], other_side[thing]
            if not (isinstance(one, Mapping) and isinstance(two, Mapping)):
                continue
            lines = list(dict.fromkeys(str(own["line"]) for own in (one, two) if "line" in own))
            where = f"{thing} ({' and '.join(lines)})" if lines else str(thing)
            changes = [change for change in differing(one, two) if change[0] != "line"]
            # a sampler of another class has other attributes
            others = tuple(f"{name}{sign}" for name, _, _ in changes for sign in ".[")
            for name, x, y in changes:
                if not name.startswith(others):
                    yield kind, f"{where}: {name}", x, y


def _shared(a: Any, b: Any) -> list[Any]:
    """The keys of two mappings that both have, in the first one's order."""
    return [key for key in a if key in b] if isinstance(a, Mapping) and isinstance(b, Mapping) else []
