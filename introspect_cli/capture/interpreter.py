"""What of python itself is replaced while a capture lasts: how signal handlers are set, and how tracebacks are walked.

Python runs a handler wherever the main thread happens to be, and a handler often raises: that is how timeouts are made.
Raised inside a capture's code, a timeout would be taken for a bug in it, or for a failing disk, and a step would be
half written. So while a guarded section runs, a handler waits; it runs when the section ends, a moment later, and
what it raises goes straight to the script. The script sees its own handlers only.

A script that catches an exception and prints or logs it would show the functions that stand between its modules and
torch's, and bare python would not. So what `traceback` (and with it `logging`) walks leaves them out. An exception of
our own, whose last frame is ours, is shown whole, unless that frame stands in for a function written in C, which raised
it.
"""

from __future__ import annotations

import functools
import itertools
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.events import Patches
from introspect_cli.capture.frames import is_introspects, outward
from introspect_cli.capture.guard import WAITING, in_section, is_stand_in
from introspect_cli.script.ending import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from introspect_cli.capture.guard import Guard


class _Waiting:
    """Signal handler of the script, called at once, or at the end of the guarded section that it would interrupt."""

    def __init__(self, handler: Any) -> None:
        """Wrap a handler of the script's; it is not installed here."""
        self.handler = handler
        self._waits = False

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        """Call the script's handler now; inside a guarded section, once at its end, however often the signal comes.

        Returns what the handler returned; None where it was not called.
        """
        if not in_section():
            return self.handler(number, frame)
        if not self._waits:
            self._waits = True
            WAITING.append(functools.partial(self._run, number))
        return None

    def _run(self, number: int) -> None:
        """Call the script's handler for a signal that has waited, with the innermost frame not introspect's."""
        self._waits = False
        frames = outward(sys._getframe(1))  # noqa: SLF001 - the documented way to a frame
        self.handler(number, next((frame for frame in frames if not is_introspects(frame)), None))


class Interpreter:
    """Defers the script's signal handlers in guarded sections, and removes introspect's frames from tracebacks."""

    def __init__(self, guard: Guard) -> None:
        """Change nothing yet; `install` does."""
        self._guarded = guard.around("interpreter", "signals are")
        self._patches = Patches()
        self._set = signal.signal

    def install(self) -> None:
        """Wrap the handlers set now; replace `signal.signal`, `signal.getsignal` and walkers of `traceback`."""
        self._exchange_handlers(_that_waits)
        self._patches.put("interpreter", self, self._guarded)

    @staticmethod
    def of_handlers(original: Callable[..., Any]) -> Callable[..., Any]:
        """A replacement of `signal.signal` or `getsignal`: handlers that are set wait, and the script sees its own."""

        @functools.wraps(original)
        def asked(*given: Any, **named: Any) -> Any:
            waiting = {name: _that_waits(value) for name, value in named.items()}
            return _handler_of(original(*map(_that_waits, given), **waiting))

        return asked

    def walker_of_tracebacks(self, walk: Callable[[Any], Iterator[tuple[FrameType, Any]]]) -> Callable[[Any], Any]:
        """A replacement of a traceback walker that leaves out introspect's frames.

        It leaves out none where the last frame is introspect's and no stand-in for a function of torch's: then the
        exception is a bug in introspect.
        """

        def walked(tb: Any) -> Iterator[tuple[FrameType, Any]]:
            """Frames and lines of a traceback without introspect's; all of them where a bug in introspect raised."""
            entries = list(walk(tb))
            with self._guarded:
                is_bug = bool(entries) and is_introspects(entries[-1][0]) and not is_stand_in(entries[-1][0])
                entries = [entry for entry in entries if is_bug or not is_introspects(entry[0])]
            return iter(entries)

        return walked

    def walker_of_stacks(
        self, walk: Callable[[FrameType | None], Iterator[tuple[FrameType, int]]]
    ) -> Callable[..., Any]:
        """A replacement of a stack walker without introspect's frames and the callers of the script's first frame."""

        def walked(f: FrameType | None) -> Iterator[tuple[FrameType, int]]:
            """Frames and lines of a stack without introspect's, as far as the script's first frame.

            For None, those of the calling thread as `walk` gives them, introspect's among them.
            """
            if f is None:
                return walk(None)  # it counts frames to find its caller
            entries = list(itertools.takewhile(lambda entry: entry[0].f_code.co_filename != _RUNNER, walk(f)))
            with self._guarded:
                entries = [entry for entry in entries if not is_introspects(entry[0])]
            return iter(entries)

        return walked

    def remove(self) -> None:
        """Put the functions back, and, in the main thread, the script's own handlers, that of an interrupt last.

        One that raises meanwhile leaves those before it wrapped, in which nothing waits any more.
        """
        self._patches.remove()
        self._exchange_handlers(_handler_of)

    def _exchange_handlers(self, exchange: Callable[[Any], Any]) -> None:
        """Set each signal's handler to `exchange(handler)`; nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return  # python lets no other thread set handlers
        for number in sorted(signal.valid_signals(), key=signal.SIGINT.__eq__):
            handler = signal.getsignal(number)
            if (new := exchange(handler)) is not handler:
                self._set(number, new)


def _that_waits(handler: Any) -> Any:
    """A handler that waits for the end of guarded sections, of python code, which may raise; all else as it is."""
    return _Waiting(handler) if callable(handler) and not isinstance(handler, signal.Handlers) else handler


def _handler_of(handler: Any) -> Any:
    """The script's own handler inside a wrapper; any other handler as it is."""
    return handler.handler if isinstance(handler, _Waiting) else handler


_RUNNER = PACKAGE + "script/run.py"
"""File whose frame calls the script's first one; python alone has none below that."""
