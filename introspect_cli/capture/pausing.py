"""Dynamo, switched off while code of ours runs.

Where a region of the script's has a graph break, Dynamo goes on looking at every frame that has a tensor or an array in
it, our own, torch's and numpy's below our own included. It would compile them: that takes seconds, changes the numbers
of the script's regions, warns of what it finds, and can fail. So each section of ours takes its callback off this
thread and puts it back at the end. Where there is none, that costs one question.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Pause:
    """Switches Dynamo off for the sections of each thread."""

    __slots__ = ("_set", "asked", "taken")

    def __init__(self) -> None:
        """There is no Dynamo before torch has been imported."""
        self.asked: Callable[[], Any] = lambda: None
        """This thread's callback."""
        self._set: Callable[[Any], Any] = lambda _callback: None
        self.taken: dict[int, list[Any]] = {}
        """By thread, callbacks that are to be put back."""

    def learn(self, asked: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        """Take how to ask for this thread's callback, and how to exchange it."""
        self.asked, self._set = asked, put

    def begin(self) -> None:
        """A section begins in this thread; to be called where any thread has one taken, or this one has a callback."""
        own = self.taken.get(threading.get_ident())
        if own is not None:
            own.append(self._set(None))
        elif self.asked() is not None:
            self.taken[threading.get_ident()] = [self._set(None)]

    def end(self) -> None:
        """The section ends; to be called where any thread has one taken."""
        own = self.taken.get(threading.get_ident())
        if own is not None:
            self._set(own.pop())
            if not own:
                del self.taken[threading.get_ident()]


PAUSE = Pause()
"""The one of this process: the callback is torch's, of a thread."""
