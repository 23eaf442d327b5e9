"""Processes that the script starts: what they compute is not recorded, so that it is said.

Training may happen in children (`torch.multiprocessing.spawn`, Hogwild) on parameters that the parent shares with
them; to the parent's capture these parameters change by themselves. A data loader's workers, pools and the compiler's
helpers compute no training step and are not told of.

Where such processes are recorded, those of one `torch.multiprocessing.spawn` are ranks of one launch: the environment
tells them how many they are, as a launcher would; its number each knows by its arguments (`follow.child`).
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.ranks.launchers import SPAWNED, forget_spawned

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call

_HELPERS = ("torch.", "concurrent.", "multiprocessing.", "joblib.")
SPAWN = "torch.multiprocessing.spawn"
"""Module of the function that runs first in a process of `mp.spawn`; its second argument is the number of that."""


class ChildrenProbe(GuardedProbe):
    """Watches `multiprocessing.Process.start`, and `spawn` with `--children all`."""

    name = "children"
    lost = "processes that the script starts are"

    def __init__(self, context: Context) -> None:
        """Watch nothing before `install`."""
        super().__init__(context)
        self._followed = context.options.children == "all"

    def install(self) -> None:
        """Watch `Process.start`; and `start_processes` of `mp.spawn`, if child processes are recorded."""
        if self._followed:
            self._put("spawned")
        super().install()

    def _watch_start(self, call: Call) -> Callable[[None], None]:
        """Called before a process starts; returns what notes it afterwards, if it will not be recorded."""
        process = call.first
        work = work_of(process)  # starting a process forgets what it runs

        def started(_: None) -> None:
            """Note the process's function, once, unless it is a helper's or is recorded; forks never are."""
            is_fork = getattr(getattr(process, "_popen", None), "method", "fork") == "fork"
            known, remedy = self._context.started, "" if is_fork else " (--children all records it)"
            if work and (is_fork or not self._followed) and work not in known:
                known.append(work)
                self._context.guard.note(
                    f"the script runs {work} in a process of its own, and what that computes is not recorded{remedy}"
                )

        return started

    def _watch_spawn(self, call: Call) -> Callable[[object], None]:
        """Called before `start_processes`: the environment has the number of its processes until it returns.

        Only for the start method `spawn`, and if the number is an int.
        """
        number = call.given(2, "nprocs")
        if call.given(5, "start_method") in (None, "spawn") and type(number) is int:
            os.environ.update({SPAWNED.world_size: str(number), SPAWNED.job[0]: uuid.uuid4().hex})
        return lambda _: forget_spawned()


def work_of(process: BaseProcess) -> str:
    """Qualified name of the function that a process runs, of the script's own under `mp.spawn`, or of its class.

    "" for helpers of torch, joblib and python itself, such as data loader workers and pools.
    """
    target, args = getattr(process, "_target", None), getattr(process, "_args", ())
    if target is None:
        cls = type(process)
        return "" if cls.__module__.startswith(_HELPERS) else cls.__qualname__
    module = str(getattr(target, "__module__", ""))
    if module == SPAWN and args:
        target = args[0]
    elif module.startswith(_HELPERS):
        return ""
    return str(getattr(target, "__qualname__", type(target).__qualname__))
