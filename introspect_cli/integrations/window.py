"""A capture that a training framework's callback opens and closes.

Frameworks tell when training begins and ends, but not always when it dies. The callback holds the capture, ends it with
training, with an error where the framework reports one, and at the end of the process at the latest.
"""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, Any

from introspect_cli.api import capture

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import nn


class Window:
    """Opens a capture and closes it, once.

    Attributes:
        path: directory of the run.
    """

    def __init__(self, path: str | Path, options: dict[str, Any]) -> None:
        self.path = path
        self._options = options
        self._open: AbstractContextManager[Path] | None = None

    def begin(self, model: nn.Module | None) -> None:
        """Begin to record; nothing happens where it has begun.

        Raises:
            UsageError: an option is unknown, or another capture is under way.
            StoreError: the directory exists, or cannot be made.
        """
        if self._open is not None:
            return
        opened = capture(model, self.path, **self._options)
        opened.__enter__()
        self._open = opened
        atexit.register(self.end)

    def end(self, error: BaseException | None = None) -> None:
        """Stop recording, with the error that ended training if one did; nothing happens where it has not begun."""
        opened, self._open = self._open, None
        if opened is None:
            return
        atexit.unregister(self.end)
        try:
            opened.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        except BaseException as raised:
            if raised is not error:
                raise
