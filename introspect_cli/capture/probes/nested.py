"""What nested inputs and outputs are made of: the class at each path that holds others.

Records name leaves by path and say nothing of what is in between: `['cache'][0].key` could be a dict of tuples or of
lists. The classes are noted once for each module, when a nested value first goes in or comes out, and stand among the
settings, so that no step grows by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from introspect_cli.tensors.flatten import containers

if TYPE_CHECKING:
    from introspect_cli.records import Kind

_MOST_CONTAINERS = 20_000
"""Containers that are noted of one run, at most."""


class NestedClasses:
    """The class at each path that holds others, by module and kind of value."""

    def __init__(self) -> None:
        """Start with nothing noted."""
        self.found: dict[str, dict[str, dict[str, str]]] = {}
        self.changed = False
        self._seen: set[tuple[str, Kind, str]] = set()
        self._count = 0

    def note(self, fqn: str, kind: Kind, prefix: str, value: Any) -> None:
        """Note what one nested value is made of, the first time it is met."""
        key = (fqn, kind, prefix)
        if key in self._seen or self._count > _MOST_CONTAINERS:
            return
        self._seen.add(key)
        classes = {prefix + path: name for path, name in containers(value)}
        self._count += len(classes)
        self.found.setdefault(fqn, {}).setdefault(kind.value, {}).update(classes)
        self.changed = True
