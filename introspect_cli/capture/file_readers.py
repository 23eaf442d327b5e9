"""What opens files past python's `open`: libraries with readers written in C.

Each is replaced where scripts call it, once its library is imported, and calls the original first; then the file at
that path is looked at as any other. What is a class stays one for `isinstance`, and what is asked of a stand-in
(its name, whether it is in a set of functions) is answered as the original would.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from introspect_cli.capture.guard import Patches, uncounted
from introspect_cli.capture.start import ImportWatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Protocol

    from introspect_cli.capture.guard import Guarded

    class ReadFiles(Protocol):
        """Interface that is told of files read by libraries."""

        guarded: Guarded

        @property
        def is_on(self) -> bool:
            """Whether the script is running, and no code of introspect."""

        def path(self, frame: FrameType, path: object) -> None:
            """Note a file that a library has opened by path."""


_READERS: Final = (
    ("pyarrow", "", "memory_map", "path"),
    ("pyarrow.parquet", "ParquetFile", "__init__", "source"),
    ("pyarrow.parquet", "ParquetDataset", "__init__", "path_or_paths"),
    ("h5py", "File", "__init__", "name"),
)
"""Module, class, function or method, and the name of its first argument: what is read."""
_MOST_IN_FOLDER = 64


class Readers:
    """Replaces functions of libraries that open files in C: pyarrow, h5py, safetensors."""

    def __init__(self, files: ReadFiles) -> None:
        self._files = files
        self._patches = Patches()
        modules = dict.fromkeys(module for module, *_ in _READERS)
        callbacks = {module: functools.partial(self._imported, module) for module in modules}
        self._imports = ImportWatch({**callbacks, "safetensors": self._safetensors_imported})

    def install(self) -> None:
        """Replace each library's readers once it is imported."""
        self._imports.install()

    def remove(self) -> None:
        """Put the originals back."""
        self._imports.remove()
        self._patches.remove()

    def _imported(self, module: str) -> None:
        """Replace the readers in a module that has just been imported."""
        with self._files.guarded:
            for home, kind, name, first in _READERS:
                owner: Any = sys.modules[module] if home == module else None
                owner = vars(owner).get(kind) if owner is not None and kind else owner
                original = vars(owner).get(name) if owner is not None else None
                if original is not None:
                    self._patches.replace(owner, name, self._reader(original, int(bool(kind)), first))

    def _reader(self, original: Callable[..., Any], at: int, first: str) -> Callable[..., Any]:
        """A function that calls the original, then reports the file in argument `at` (keyword `first`)."""
        watch, look = self._files, self._look

        @functools.wraps(original)
        def read(*args: Any, **kwargs: Any) -> Any:
            """Call the original and report its file while the script runs."""
            result = original(*args, **kwargs)
            if watch.is_on:
                with watch.guarded:
                    look(sys._getframe(1), args[at] if len(args) > at else kwargs.get(first))  # noqa: SLF001 - as python documents it
            return result

        return read

    def _look(self, frame: FrameType, given: object) -> None:
        """Report each file given: a path, a list or tuple of paths; of a directory the first 64 files by name."""
        for path in given if type(given) in {list, tuple} else [given]:  # type: ignore[attr-defined] # a list
            if type(path) is not str and not isinstance(path, Path):
                continue
            if not os.path.isdir(path):  # noqa: PTH112 - text is what is at hand
                self._files.path(frame, path)
                continue
            with os.scandir(path) as entries:
                inside = sorted(entry.path for entry in entries if entry.is_file())
            for name in inside[:_MOST_IN_FOLDER]:
                self._files.path(frame, name)

    def _safetensors_imported(self) -> None:
        """Replace `safetensors.safe_open`."""
        with self._files.guarded:
            module = sys.modules["safetensors"]
            opened = vars(module).get("safe_open")
            if opened is not None:
                self._patches.replace(module, "safe_open", stand_in_for(opened, self._files))


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
        handle = cls._original(*args, **kwargs)
        if cls.reader.is_on:
            with cls.reader.guarded:
                cls.reader.path(sys._getframe(1), args[0] if args else kwargs.get("filename"))  # noqa: SLF001 - as python documents it
        return handle

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls or issubclass(subclass, cls._original)


def stand_in_for(original: type, files: ReadFiles) -> type:
    """A stand-in for a class that cannot be subclassed: makes its instances and reports the file that each opens."""
    named = {"__module__": original.__module__, "__doc__": original.__doc__, "__qualname__": original.__qualname__}
    uncounted(_StandIn.__call__)
    return _StandIn(original.__name__, (), {**named, "_original": original, "reader": files})
