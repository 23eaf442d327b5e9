"""Facts about the script's objects, kept no longer than the objects are.

Modules, loaders and optimizers are told apart by identity (a script may give them any `__eq__` and `__hash__`), and an
identity is free for another object once its owner is gone. So every entry holds a weak reference, answers only for the
very object it was made for, and goes when that object goes. It is not for tensors: `torch.utils.swap_tensors` refuses
a tensor that has weak references.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

Thing = TypeVar("Thing")
Value = TypeVar("Value")


class Keyed(weakref.ref[Thing]):
    """A weak reference that carries its key in a dictionary."""

    __slots__ = ("key",)

    key: int


def keyed(thing: Thing, forget: Callable[[Keyed[Thing]], None]) -> Keyed[Thing]:
    """A weak reference to a thing with `key` set to its `id`; `forget(reference)` is called when the thing goes."""
    reference = Keyed(thing, cast("Callable[[weakref.ref[Thing]], None]", forget))
    reference.key = id(thing)
    return reference


class ById(Generic[Value]):
    """A dictionary keyed by the identity of live objects."""

    def __init__(self) -> None:
        """Start with no object."""
        self.entries: dict[int, tuple[weakref.ref[Any], Value]] = {}
        """Reference and value by `id`; the dict object stays the same."""
        entries = self.entries

        def forget(reference: Keyed[Any]) -> None:
            entry = entries.get(reference.key)
            if entry is not None and entry[0] is reference:
                del entries[reference.key]

        self._forget = forget  # one for all: thousands of functions are work for the garbage collector

    def get(self, thing: object) -> Value | None:
        """The object's value; None where it has none."""
        entry = self.entries.get(id(thing))
        return entry[1] if entry is not None and entry[0]() is thing else None

    def set(self, thing: object, value: Value) -> None:
        """Set the object's value; it is forgotten when the object goes."""
        self.entries[id(thing)] = (keyed(thing, self._forget), value)

    def made(self, thing: object, make: Callable[[], Value]) -> Value:
        """The object's value; where it has none or None, `make()` gives it, which is set."""
        value = self.get(thing)
        if value is None:
            value = make()
            self.set(thing, value)
        return value

    def discard(self, thing: object) -> None:
        """Forget the object; nothing where it has no value."""
        if self.get(thing) is not None:
            del self.entries[id(thing)]

    def objects(self) -> list[Any]:
        """Live objects that have a value, in the order in which they first got one."""
        return [thing for reference, _ in list(self.entries.values()) if (thing := reference()) is not None]

    def clear(self) -> None:
        """Forget all objects."""
        self.entries.clear()

    def __len__(self) -> int:
        return len(self.entries)


class FreeNames:
    """Names by class and number: `Adam`, `Adam#2`; the number of an object that is gone is free again.

    A name may have to rest: two models of one class that live one after the other within a step are two, and their
    values are not to be told apart by the order in which they came.
    """

    def __init__(self) -> None:
        """Start with all names free."""
        self._fresh: set[str] = set()
        self._taken: dict[str, weakref.ref[Any]] = {}
        self._names: ById[str] = ById()

    def find(self, thing: object) -> str | None:
        """The name given to this object, None if it has none."""
        return self._names.get(thing)

    def release(self, thing: object) -> None:
        """Free the object's name; nothing where it has none."""
        name = self.find(thing)
        if name is not None:
            self._names.discard(thing)
            del self._taken[name]

    def free_resting(self) -> None:
        """Free the names given by `name(rests=True)` whose objects are gone; the caller does so as a step ends."""
        self._fresh.clear()

    def name(self, thing: object, base: str, *, rests: bool = False) -> str:
        """The object's name: the one it has, else the first free one of `base`, `base#2`, `base#3`, ...

        Args:
            thing: the object.
            base: its class.
            rests: True if the name is not free before `free_resting`, even if the object goes.
        """
        existing = self.find(thing)
        if existing is not None:
            return existing
        number, name = 1, base
        while (taken := self._taken.get(name)) is not None and (name in self._fresh or taken() is not None):
            number += 1
            name = f"{base}#{number}"
        if rests:
            self._fresh.add(name)
        self._names.set(thing, name)
        self._taken[name] = weakref.ref(thing)
        return name
