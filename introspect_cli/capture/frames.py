"""Frames that run code of introspect: told from the script's, and kept from Dynamo.

Where a region of the script's has a graph break, Dynamo goes on looking at every frame that has a tensor or an array in
it, ours, torch's and numpy's below ours included. It would compile them: that takes seconds, changes the numbers of the
script's regions, warns of what it finds, and can fail. So each guarded section takes Dynamo's callback off this thread
and puts it back at the end. Where there is none, that costs one question.

What stands between the script and torch (replaced functions) runs while Dynamo looks at frames, and has to: the frames
of the script and of torch below are to be compiled as they would be alone. So each code object of introspect is marked
as one to pass by. One of its functions that is called inside a region that is being traced is inlined as before.
"""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120 - compared with co_filename text
_NAME = __name__.partition(".")[0]
_passed: set[str] = set()


def is_ours(frame: FrameType) -> bool:
    """Whether a frame runs code of this package."""
    return frame.f_code.co_filename.startswith(PACKAGE)


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


class Pause:
    """Switches Dynamo off for the sections of each thread."""

    __slots__ = ("_set", "asked", "taken")

    def __init__(self) -> None:
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
        taken = self.taken.get(threading.get_ident())
        if taken is not None:
            taken.append(self._set(None))
        elif self.asked() is not None:
            self.taken[threading.get_ident()] = [self._set(None)]

    def end(self) -> None:
        """The section ends; to be called where any thread has one taken."""
        taken = self.taken.get(threading.get_ident())
        if taken is not None:
            self._set(taken.pop())
            if not taken:
                del self.taken[threading.get_ident()]


PAUSE = Pause()
"""The one of this process: the callback is torch's, of a thread."""


def pass_by() -> None:
    """Mark the code of all modules of introspect that are loaded, and have Dynamo pause in guarded sections."""
    from introspect_cli.capture import private_api  # it imports torch, as the script has by now

    if private_api.compiler_callback is not None and private_api.set_compiler_callback is not None:
        PAUSE.learn(private_api.compiler_callback, private_api.set_compiler_callback)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _NAME and name not in _passed:
            _passed.add(name)
            for code in _codes(list(vars(module).values()), name):
                private_api.pass_by(code)


def _codes(values: list[object], module: str) -> Iterator[CodeType]:
    while values:
        value = values.pop()
        if isinstance(value, CodeType):
            if value.co_filename.startswith(PACKAGE):
                yield value
                values.extend(value.co_consts)
        elif isinstance(value, (staticmethod, classmethod)):
            values.append(value.__func__)
        elif isinstance(value, property):
            values.extend((value.fget, value.fset))
        elif isinstance(value, FunctionType):
            values.append(value.__code__)
        elif isinstance(value, type) and value.__module__ == module:
            values.extend(vars(value).values())
