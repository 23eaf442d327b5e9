"""Processes of introspect beside the script's: one that only answers, and those that publish the run.

The script sees nothing of them. Such a process is no child of the script's (which may wait for its children), has one
descriptor to answer by, and stays when the script is interrupted. What it does costs training a processor at most:
nothing waits for it before the end.

A logger's client imports hundreds of modules, draws from python's random generator, talks to servers that hang. A
thread that did so would share all that with training. So `introspect publish` reads the run as it is written, from
outside, in such a process.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from introspect_cli.capture.processes import VARIABLE
from introspect_cli.store.files import Handle
from introspect_cli.store.remote import is_remote

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from introspect_cli.capture.guard import Guard


MAX_OUTPUT = 1 << 16
_SHELL = "/bin/sh"
_BEGIN = "import sys; sys.path[:] = [path for path in sys.path if path]; from {} import main; main()"
"""Runs a module's `main`; no file in the current directory is imported in a library's place."""


class BackgroundProcess:
    """A process of introspect beside the script, not its child, that reads the run's directory.

    Attributes:
        patience: seconds to wait for it at the end of a script.
    """

    patience = 30.0

    def __init__(self, module: str, words: Sequence[str], name: str, *, errors: bool = True) -> None:
        """Start the process; nothing waits for it, and it outlives an interrupt of the script.

        Its stdin is empty, its stdout is read by `read` and `rest`, and it is not captured itself.

        Args:
            module: of introspect, whose `main` it runs.
            words: its command line.
            name: what messages call it.
            errors: True if what it writes to stderr is read as its answer, too; False if that goes to the script's
                stderr.

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
        """At most 64 KiB of the output that has not been read yet, without waiting.

        Empty where there is none, and where the script has closed the descriptor.
        """
        if not self._answer.is_ours():
            return b""
        with suppress(OSError):  # BlockingIOError: it has nothing to say
            return os.read(self._answer.fd, MAX_OUTPUT)
        return b""

    def rest(self, patience: float) -> tuple[bytes, bool]:
        """Wait at most `patience` seconds for the process to end, then close its descriptor.

        Returns:
            the last 64 KiB of the output not read yet; and whether the process has ended, or reading failed. Empty and
            False where the script had closed the descriptor before.
        """
        said, until, ended = b"", time.monotonic() + patience, False
        try:
            while self._answer.is_ours() and not ended:
                waits = select.poll()  # select() takes no descriptor above 1023, and a script may have opened as many
                waits.register(self._answer.fd, select.POLLIN)
                if not waits.poll(max(until - time.monotonic(), 0) * 1000):
                    break
                piece = os.read(self._answer.fd, MAX_OUTPUT)
                said, ended = (said + piece)[-MAX_OUTPUT:], not piece
        except OSError:  # the script closed what was not its own
            ended = True
        finally:
            self.abandon()
        return said, ended

    def abandon(self) -> None:
        """Close the descriptor that it answers by; the process itself goes on."""
        with suppress(OSError):
            self._answer.close()


UNPUBLISHED = " was not published to "
"""Words in the sentence on a place that failed."""


class Publishers:
    """Processes that publish one run to named places."""

    def __init__(self, path: Path, places: Sequence[str], guard: Guard, rank: int | None = None) -> None:
        """Start to publish to all places.

        Args:
            path: the run's directory.
            places: as given to `--publish`.
            guard: catches failures.
            rank: this process's; above 0 only remote storage is published to. None for a run of one process.
        """
        if rank:
            places = [place for place in places if is_remote(place)]
        self._guard = guard
        self._places = places
        self._process: BackgroundProcess | None = None
        if places:
            of_rank = () if rank is None else ("--rank", str(rank))
            with guard.around("publishing", "the run is"):
                words = ["publish", str(path), *places, *of_rank]
                self._process = BackgroundProcess("introspect_cli.cli", words, "what publishes")

    def finish(self) -> list[str]:
        """Wait at most 30 seconds for the process; returns sentences on what was published and what not."""
        said: list[str] = []
        with self._guard.around("publishing", "the end of the run is"):
            if self._process is not None:
                said = _outcome_sentences(self._places, *self._process.rest(self._process.patience))
        return said

    def abandon(self) -> None:
        """Close the descriptor of the process, in a forked child."""
        if self._process is not None:
            self._process.abandon()


def _outcome_sentences(places: Sequence[str], said: bytes, ended: bool) -> list[str]:
    """Sentences on what one process has published, or one that it still runs.

    Args:
        places: where to.
        said: its output; lines on what was or was not published count, else its last line.
        ended: whether it has.
    """
    if not ended:
        return [f"still publishing to {', '.join(places)}, in the background"]
    lines = [line.removeprefix("introspect: ") for line in said.decode("utf-8", "replace").splitlines()]
    results = [line for line in lines if line.startswith("published ") or UNPUBLISHED in line]
    return results or [f"nothing was published: {lines[-1]}" if lines else "nothing was published"]
