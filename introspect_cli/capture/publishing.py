"""Start what publishes a run, in a process of its own, and hear at the end what came of it.

A logger's client imports hundreds of modules, draws from python's random generator, talks to servers that hang. A
thread that did so would share all that with training. `introspect publish` reads the run as it is written, from
outside; here it is started so that the script sees nothing: it is no child of the script's process (which may wait for
its children), has one descriptor to answer by, and stays when the script is interrupted.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from introspect_cli.store.files import Handle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PATIENCE = 30.0
"""Seconds to wait at the end of a script for what is not published yet."""

LOGGER = "logger"
"""Stands for whatever Lightning or transformers' Trainer log to."""

_SHELL = "/bin/sh"
_FOLLOWED = "INTROSPECT_FOLLOW"
_BEGIN = "import sys; sys.path[:] = [own for own in sys.path if own]; from introspect_cli.cli import main; main()"
"""As `python -m introspect_cli` does, but that no file beside the script is taken for a module of a logger's client."""


class Publishing:
    """A process that publishes a run."""

    def __init__(self, path: Path, places: Sequence[str]) -> None:
        """Start it.

        Args:
            path: the run, which is being written.
            places: where to.

        Raises:
            OSError: it cannot be started.
        """
        self.places = tuple(places)
        receive, answer = os.pipe()
        self._answer = Handle(receive, "what publishes")
        command = [sys.executable, "-c", _BEGIN, "publish", str(path), *places]
        environment = {name: value for name, value in os.environ.items() if name != _FOLLOWED}
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, answer, 1),
            (os.POSIX_SPAWN_DUP2, answer, 2),
        ]
        try:
            # The shell ends at once, and what it has started in the background is nobody's child any more.
            shell = [_SHELL, "-c", 'trap "" INT HUP; "$@" &', _SHELL, *command]
            pid = os.posix_spawn(_SHELL, shell, environment, file_actions=actions, setpgroup=0)
            os.waitpid(pid, 0)
        finally:
            os.close(answer)

    def finish(self, patience: float = PATIENCE) -> list[str]:
        """Wait for its end, for a while; what came of it, in sentences."""
        said, until = b"", time.monotonic() + patience
        descriptor = self._answer.fd
        try:
            while True:
                ready, _, _ = select.select([descriptor], [], [], max(until - time.monotonic(), 0))
                if not ready:
                    return [f"still publishing to {', '.join(self.places)}, in the background"]
                piece = os.read(descriptor, 1 << 16)
                if not piece:
                    break
                said = (said + piece)[-(1 << 16) :]
        except OSError:  # the script closed what was not its own
            return []
        finally:
            with suppress(OSError):
                self._answer.close()
        lines = [line.removeprefix("introspect: ") for line in said.decode("utf-8", "replace").splitlines()]
        told = [line for line in lines if line.startswith("published ") or " not published " in line]
        return told or [f"nothing was published: {lines[-1]}" if lines else "nothing was published"]

    def abandon(self) -> None:
        """Forget it, in a forked child."""
        self._answer.close()
