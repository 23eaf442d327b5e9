"""Signals that wait until something of ours is finished.

When the script's last line has run, its records are put in order and the store is closed. An interrupt or a timeout
that comes just then would stop that half way, in code that the script does not know of. So handlers that may raise wait
until it is done, and then run; one that comes again while it waits is meant, and runs at once.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

_SET, _GET = signal.signal, signal.getsignal  # a capture replaces them while the script runs


class Later:
    """What stands in for a handler; `handler` is the one that it stands for."""

    def __init__(self, handler: Any, waiting: list[Later]) -> None:
        self.handler = handler
        self.number = 0
        self._waiting = waiting

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        """Wait, or be called where one waits already."""
        if self in self._waiting:
            return self.handler(number, frame)
        self.number = number
        self._waiting.append(self)
        return None


class Held:
    """Has handlers wait from `hold` until `release`; does nothing in threads in which none runs."""

    def __init__(self) -> None:
        """Nothing waits before `hold`."""
        self._later: dict[int, Later] = {}
        self._waiting: list[Later] = []

    def hold(self) -> None:
        """Replace what may raise. Once more after an exception in the middle goes on where that one stopped."""
        if threading.current_thread() is not threading.main_thread():
            return  # python lets no other thread set handlers
        for number in _in_turn():
            handler = _GET(number)
            if callable(handler) and not isinstance(handler, (signal.Handlers, Later)):
                self._later[number] = Later(handler, self._waiting)
                _SET(number, self._later[number])

    def release(self) -> None:
        """Give the handlers back, and run those that waited.

        Raises:
            BaseException: what the first of them raises.
        """
        for number in reversed(_in_turn() if self._later else []):
            later = self._later.pop(number, None)
            if later is not None and _GET(number) is later:
                _SET(number, later.handler)
        first: BaseException | None = None
        while self._waiting:
            later = self._waiting.pop(0)
            try:
                later.handler(later.number, sys._getframe(1))  # noqa: SLF001 - the documented way to a frame
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first


def _in_turn() -> list[int]:
    """All signals, the one that people send first."""
    return sorted(signal.valid_signals(), key=lambda number: (number != signal.SIGINT, number))
