"""A process of introspect beside the script's, which the script sees nothing of, and what it answers.

It is no child of the script's process (which may wait for its children), has one descriptor to answer by, and stays
when the script is interrupted. What it does costs training a processor at most: nothing waits for it before the end.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from introspect_cli.capture.follow.messages import VARIABLE
from introspect_cli.store.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE = 30.0
"""Seconds to wait at the end of a script for what is not done yet."""

_MOST = 1 << 16
_SHELL = "/bin/sh"
_BEGIN = "import sys; sys.path[:] = [own for own in sys.path if own]; from {} import main; main()"
"""As `python -m` does, but that no file beside the script is taken for a module of somebody else's."""


class Beside:
    """A process that looks at a run."""

    def __init__(self, module: str, words: Sequence[str], name: str, *, errors: bool = True) -> None:
        """Start it.

        Args:
            module: of introspect, whose `main` it runs.
            words: its command line.
            name: what it is called.
            errors: whether what it writes to stderr is an answer, too; else it goes where the script's goes.

        Raises:
            OSError: it cannot be started.
        """
        receive, answer = os.pipe()
        self._answer = Handle(receive, name)
        os.set_blocking(self._answer.fd, False)
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, answer, 1)]
        actions += [(os.POSIX_SPAWN_DUP2, answer, 2)] if errors else []
        try:
            # The shell ends at once, and what it has started in the background is nobody's child any more.
            command = [sys.executable, "-c", _BEGIN.format(module), *words]
            shell = [_SHELL, "-c", 'trap "" INT HUP; "$@" &', _SHELL, *command]
            pid = os.posix_spawn(_SHELL, shell, environment, file_actions=actions, setpgroup=0)
            os.waitpid(pid, 0)
        finally:
            os.close(answer)

    def read(self) -> bytes:
        """What it has answered since it was last asked, without waiting; nothing where it is gone."""
        if not self._answer.is_ours():
            return b""
        with suppress(OSError):  # BlockingIOError: it has nothing to say
            return os.read(self._answer.fd, _MOST)
        return b""

    def rest(self, patience: float) -> tuple[bytes, bool]:
        """Wait for its end, for a while: what it says until then, and whether it has ended."""
        said, until, ended = b"", time.monotonic() + patience, False
        try:
            while self._answer.is_ours() and not ended:
                ready, _, _ = select.select([self._answer.fd], [], [], max(until - time.monotonic(), 0))
                if not ready:
                    break
                piece = os.read(self._answer.fd, _MOST)
                said, ended = (said + piece)[-_MOST:], not piece
        except OSError:  # the script closed what was not its own
            ended = True
        finally:
            self.abandon()
        return said, ended

    def abandon(self) -> None:
        """Hear no more of it, as in a forked child."""
        with suppress(OSError):
            self._answer.close()
