"""A stand-in for a class that cannot be subclassed and opens a file past python's `open`: `safetensors.safe_open`.

It stays a class for `isinstance`, and what is asked of it (its name, whether it is in a set) is answered as the
original would.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.guard import uncounted

if TYPE_CHECKING:
    from types import FrameType
    from typing import Protocol

    from introspect_cli.capture.guard import Guarded

    class ReadFiles(Protocol):
        """Interface that is told of files read by libraries."""

        guarded: Guarded

        @property
        def is_on(self) -> bool:
            """Whether a file that is opened now is the script's doing, and watched."""

        def note_path(self, frame: FrameType, path: object) -> None:
            """Note a file that a library has opened by path."""


class _StandIn(type):
    """Metaclass of `stand_in_for`: `isinstance`, `==`, `hash` and attributes answer as the original class."""

    _original: Any
    reader: Any

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls._original

    def __hash__(cls) -> int:
        return hash(cls._original)

    def __repr__(cls) -> str:
        return repr(cls._original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._original, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original, and report the file that it opens if the script is running."""
        handle = cls._original(*args, **kwargs)
        if cls.reader.is_on:
            with cls.reader.guarded:
                cls.reader.note_path(sys._getframe(1), args[0] if args else kwargs.get("filename"))  # noqa: SLF001 - as python documents it
        return handle

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, cls._original)


def stand_in_for(original: type, files: ReadFiles) -> type:
    """A class in place of `original`, which cannot be subclassed: it makes the original's instances.

    Args:
        original: the library's class; `isinstance`, `==` and attributes of the stand-in answer as it would.
        files: is told the path that each instance opens, while the script is running.
    """
    named = {"__module__": original.__module__, "__doc__": original.__doc__, "__qualname__": original.__qualname__}
    uncounted(_StandIn.__call__)
    return _StandIn(original.__name__, (), {**named, "_original": original, "reader": files})
