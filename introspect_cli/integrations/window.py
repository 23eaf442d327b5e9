"""A capture that a training framework's callback opens and closes.

Frameworks tell when training begins and ends, but not always when it dies. The callback holds the capture, ends it with
training, with an error where the framework reports one, and at the end of the process at the latest, with the exception
that ended that.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any

from introspect_cli.api import capturing
from introspect_cli.capture.ranks.launchers import find_launch
from introspect_cli.script.processes import Role, described
from introspect_cli.script.target import Target

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import nn


class Window:
    """A capture of one block of training at a time, opened by `begin` and closed by `end`.

    Attributes:
        path: directory of the run.
    """

    def __init__(self, path: str | Path, options: dict[str, Any]) -> None:
        """Keep where and how to record; nothing starts before `begin`."""
        self.path = path
        self._options = options
        self._open: AbstractContextManager[Path] | None = None

    def begin(self, model: nn.Module | None, rank: int = 0, world_size: int = 1) -> None:
        """Start the capture, which ends with the process at the latest; nothing if it is open.

        Args:
            model: what is trained; None where the framework does not say.
            rank: of this process, as the framework numbers it.
            world_size: how many processes train together.

        Raises:
            UsageError: an option is unknown, or another capture is running.
            StoreError: the directory exists, or cannot be made.
        """
        if self._open is not None:
            return
        # The framework's numbers win over those of the environment.
        numbers = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
        launch = find_launch(numbers) if world_size > 1 else None
        opened = capturing(model, self.path, self._options, _this_script(), launch)
        opened.__enter__()
        self._open = opened
        atexit.register(self._end_with_process)

    def end(self, error: BaseException | None = None) -> None:
        """Close the capture; nothing if it is not open.

        `error` is what ended training, for the manifest; it is not raised again. None where training ended by itself.
        What closing itself raises comes out.
        """
        opened, self._open = self._open, None
        if opened is None:
            return
        atexit.unregister(self._end_with_process)
        opened.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _end_with_process(self) -> None:
        """Close the capture as the process ends, with the last exception that python has shown."""
        self.end(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))


def _this_script() -> Target | None:
    """The script or module that this process runs, with its arguments; None in a notebook or interpreter."""
    process = described(sys.orig_argv)
    if process.role is not Role.SCRIPT or (process.script is None and process.module is None):
        return None
    return Target(process.script, process.module, process.args)
