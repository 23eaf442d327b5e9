"""How the ranks of a launch hear that the run diverges: a file of the first rank's, which the others open at each step.

One rank alone has the comparison. Ranks that end at different steps wait for each other in a collective, so it says
after which step all of them end: the one that it is about to begin. Whoever takes part in a collective of that step
does so after the file was written, and looks at it when the step is over. The file is there from the beginning, since a
file system over a network answers for a while that what was not there is not there.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.store.files import DIVERGENCE

if TYPE_CHECKING:
    from pathlib import Path


class Announced(NamedTuple):
    """What the first rank says.

    Attributes:
        first: the step at which the runs diverge; None where it is not one step's.
        after: the step after which all ranks end, where they are to.
    """

    first: int | None
    after: int


class Announcement:
    """What the ranks of a launch hear of the comparison."""

    def __init__(self, store: Path, rank: int) -> None:
        self._path = store.parent / "rank0" / DIVERGENCE
        self._heard: Announced | None = None
        if not rank:
            with suppress(OSError):
                self._path.touch()

    def say(self, first: int | None, after: int) -> Announced:
        """Say it to all ranks, once; what was said."""
        if self._heard is None:
            self._heard = Announced(first, after)
            with suppress(OSError):
                fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    os.write(fd, json.dumps(self._heard._asdict()).encode() + b"\n")
                finally:
                    os.close(fd)
        return self._heard

    def hear(self) -> Announced | None:
        """What was said; None so far."""
        if self._heard is None:
            with suppress(OSError, ValueError, TypeError):
                fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    data = os.read(fd, 1 << 10)
                finally:
                    os.close(fd)
                self._heard = Announced(**json.loads(data)) if data else None
        return self._heard

    def close(self) -> None:
        """Leave no empty file behind; what was said stays, since another rank may not have heard it yet."""
        if self._heard is None:
            with suppress(OSError):
                self._path.unlink()
