"""Act right after the script has imported a module, and not before.

A script may set `OMP_NUM_THREADS` or `CUBLAS_WORKSPACE_CONFIG` and then import torch; had we imported torch first,
its setting would come too late and the run would not be the one it asked for. So a capture starts without torch and
numpy, and begins when the script's own `import torch` has finished.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import importlib.machinery
    from collections.abc import Callable, Sequence
    from types import ModuleType


class _Loader:
    """Runs the real loader, then the callback; the module is left with its real loader."""

    def __init__(self, loader: Any, done: Callable[[], None]) -> None:
        self._loader = loader
        self._done = done

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._done()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class ImportWatch:
    """A finder that calls back once after each of the named top-level modules has been imported."""

    def __init__(self, callbacks: dict[str, Callable[[], None]]) -> None:
        self._callbacks = dict(callbacks)

    def install(self) -> None:
        """Begin to watch; what is imported already calls back at once."""
        sys.meta_path.insert(0, self)
        for name in list(self._callbacks):
            if name in sys.modules:
                self._callbacks.pop(name)()

    def remove(self) -> None:
        """Stop watching."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as python would, and have its loader call back."""
        if name not in self._callbacks or path is not None:
            return None
        callback = self._callbacks.pop(name)
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, callback)  # type: ignore[assignment]
                return spec
        self._callbacks[name] = callback
        return None
