"""Processes that the script starts: what they compute is not recorded, so that it is said.

Training may happen in children (`torch.multiprocessing.spawn`, Hogwild) on parameters that the parent shares with
them; to the parent's capture these parameters change by themselves. A data loader's workers, pools and the compiler's
helpers compute no training step and are not told of.
"""

from __future__ import annotations

import functools
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.probes.base import Patches

if TYPE_CHECKING:
    from introspect_cli.capture.probes.base import Guard

_HELPERS = ("torch.", "concurrent.", "multiprocessing.", "joblib.")
_SPAWN = "torch.multiprocessing.spawn"


class ChildrenProbe:
    """Watches `multiprocessing.Process.start`."""

    name = "children"

    def __init__(self, guard: Guard, *, followed: bool = False) -> None:
        """Start without processes.

        Args:
            guard: keeps the sentences.
            followed: whether processes that are not forks are recorded.
        """
        self._followed = followed
        self._guard = guard
        self._guarded = guard.around(self.name, "processes that the script starts are")
        self._patches = Patches()
        self.started: list[str] = []
        """What the processes run, each function once."""

    def install(self) -> None:
        """Replace the method."""
        original, probe = BaseProcess.start, self

        @functools.wraps(original)
        def start(self: BaseProcess) -> Any:
            work = ""
            if probe._guarded.on:
                with probe._guarded:
                    work = work_of(self)  # starting a process forgets what it runs
            result = original(self)
            if work:
                with probe._guarded:
                    if not (probe._followed and _method(self) != "fork"):
                        probe._started(work)
            return result

        self._patches.replace(BaseProcess, "start", start)
        self._guarded.on = True

    def remove(self) -> None:
        """Put the method back."""
        self._guarded.on = False
        self._patches.remove()

    def _started(self, work: str) -> None:
        if self._guarded.on and work not in self.started:
            self.started.append(work)
            self._guard.note(f"the script runs {work} in a process of its own, and what that computes is not recorded")


def _method(process: BaseProcess) -> str:
    """How a process was started: `fork`, `spawn` or `forkserver`."""
    return str(getattr(getattr(process, "_popen", None), "method", "fork"))


def work_of(process: BaseProcess) -> str:
    """What a process runs, by name; "" for helpers."""
    target, args = getattr(process, "_target", None), getattr(process, "_args", ())
    if target is None:
        cls = type(process)
        return "" if cls.__module__.startswith(_HELPERS) else cls.__qualname__
    module = str(getattr(target, "__module__", ""))
    if module == _SPAWN and args:
        target = args[0]
    elif module.startswith(_HELPERS):
        return ""
    return str(getattr(target, "__qualname__", type(target).__qualname__))
