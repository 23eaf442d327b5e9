"""What a process starts from: the states of its random generators, and the seed and flags it was asked to begin with.

A script may set `OMP_NUM_THREADS` or `CUBLAS_WORKSPACE_CONFIG` and then import torch; had a capture imported torch
first, the setting would come too late and the run would not be the one it asked for. So a capture starts without torch
and numpy. It notes the state of each library's generator, and applies `--seed` and `--deterministic` to it, when the
script's own import of that library has just finished, so that the script may still override them.

The states of the generators that live in the interpreter are had as bytes; nothing is drawn and torch is not needed.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import importlib.machinery
    from collections.abc import Callable, Sequence
    from types import ModuleType

_getstate = random.getstate  # a script may put its own generator in the place of python's, with code of its own


def python_state() -> bytes:
    """State of python's global generator as bytes; nothing is drawn."""
    version, words, gauss = _getstate()
    return array("Q", words).tobytes() + repr((version, gauss)).encode()


def python_spare() -> object:
    """Number that python's global generator has to spare, all of its state but its words; an object where not known."""
    return getattr(getattr(_getstate, "__self__", None), "gauss_next", object())


def numpy_state() -> bytes | None:
    """State of numpy's global generator as bytes.

    None while numpy is not loaded, and then it is not loaded here either.
    """
    if "numpy" not in sys.modules:
        return None
    import numpy.random as numpy_random

    state = numpy_random.get_state(legacy=False)  # noqa: NPY002 - the global generator is what scripts seed
    inner = state["state"]
    rest = (state["bit_generator"], inner.get("pos"), state.get("has_gauss"), state.get("gauss"))
    return bytes(inner["key"].tobytes()) + repr(rest).encode()


def prepare_torch(seed: int | None, *, deterministic: bool) -> None:
    """Seed torch, unless `seed` is None, and, if `deterministic`, set its global flags; for after the script's import.

    The flags ask for deterministic algorithms, with a warning where there is none, and switch off TF32 and cuDNN's
    benchmark.
    """
    import torch

    if seed is not None:
        torch.manual_seed(seed)  # DataLoader workers and generators draw their seeds from torch's generator
    if deterministic:
        # Warn instead of raising: an operator without a deterministic form should not end the run.
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False


class Start:
    """Notes initial generator states, seeds python and numpy, and calls back when torch is imported.

    Attributes:
        states: of the generators of python and numpy before the script could seed them, by library.
    """

    def __init__(
        self,
        torch_imported: Callable[[], None],
        *,
        seed: int | None = None,
        deterministic: bool = False,
        guarded: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        """Note nothing before `install`.

        Args:
            torch_imported: called inside the script's `import torch`.
            seed: for python and numpy; None to leave them alone.
            deterministic: whether to ask cuBLAS for a workspace that makes its results repeatable.
            guarded: around what is done to generators.
        """
        self.states: dict[str, bytes | None] = {}
        self._seed = seed
        self._deterministic = deterministic
        self._guarded = guarded or contextlib.suppress(Exception)
        self._imports = ImportWatch({"numpy": self._numpy_imported, "torch": torch_imported})

    def install(self) -> None:
        """Note python's state, then seed python and set cuBLAS's variable if asked, then watch imports.

        The variable stays as it is where it is set already.
        """
        with self._guarded:
            self.states["python"] = python_state()
            if self._seed is not None:
                random.seed(self._seed)
        if self._deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        self._imports.install()

    def remove(self) -> None:
        """Watch no more imports; seeds and flags that were set stay."""
        self._imports.remove()

    def _numpy_imported(self) -> None:
        """Note numpy's state, then seed it if asked; called inside the script's `import numpy`."""
        with self._guarded:
            self.states["numpy"] = numpy_state()
            if self._seed is not None:
                sys.modules["numpy"].random.seed(self._seed % 2**32)  # it takes 32 bits


def _call_back(loader: Any, done: Callable[[], None]) -> None:
    """Have a module's loader, which stays the same object, call `done` once it has run the next module."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        """Run the module, then call back."""
        vars(loader).pop("exec_module", None)  # gone already where another watch has done so
        run(module)
        done()

    loader.exec_module = exec_module


class ImportWatch:
    """A finder that calls back once after each of the named modules has been imported."""

    def __init__(self, callbacks: dict[str, Callable[[], None]]) -> None:
        """Watch nothing before `install`; `callbacks` by name of the module, each called once."""
        self._callbacks = dict(callbacks)

    def install(self) -> None:
        """Watch imports from now on; of modules imported already the callback is called now."""
        sys.meta_path.insert(0, self)
        for name in list(self._callbacks):
            if name in sys.modules:
                self._callbacks.pop(name)()

    def remove(self) -> None:
        """Watch no more imports; callbacks not called yet never are."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a watched module as the other finders give it, its loader made to call back.

        None for every other module, and for one that no other finder has, which stays watched.
        """
        if name not in self._callbacks or (path is not None and "." not in name):
            return None
        callback = self._callbacks.pop(name)
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _call_back(spec.loader, callback)
                return spec
        self._callbacks[name] = callback
        return None
