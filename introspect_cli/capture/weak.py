"""Facts about the script's objects, kept no longer than the objects are.

Modules and tensors are told apart by identity (a script may give them any `__eq__` and `__hash__`), and an identity is
free for another object once its owner is gone. So every entry holds a weak reference, answers only for the very object
it was made for, and goes when that object goes.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class ById(Generic[Value]):
    """A dictionary keyed by the identity of live objects."""

    def __init__(self) -> None:
        """Start empty."""
        self._entries: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def get(self, thing: object) -> Value | None:
        """What is kept of the object, None if nothing is."""
        entry = self._entries.get(id(thing))
        return entry[1] if entry is not None and entry[0]() is thing else None

    def set(self, thing: object, value: Value) -> None:
        """Keep something of the object until it goes."""
        key, entries = id(thing), self._entries

        def forget(reference: weakref.ref[Any]) -> None:
            entry = entries.get(key)
            if entry is not None and entry[0] is reference:
                del entries[key]

        entries[key] = (weakref.ref(thing, forget), value)

    def discard(self, thing: object) -> None:
        """Forget the object."""
        if self.get(thing) is not None:
            del self._entries[id(thing)]

    def clear(self) -> None:
        """Forget all objects."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
