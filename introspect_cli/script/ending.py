"""How a script ends: its exit code, and what the interpreter does in C with an exception that nobody caught.

That is `sys.excepthook`, the messages of `SystemExit`, and the tracebacks, which have none of our frames.

When the script's last line has run, its records are put in order and the store is closed. An interrupt or a timeout
that comes just then would stop that half way, in code that the script does not know of. So handlers that may raise wait
until it is done, and then run (`HeldHandlers`); one that comes again while it waits is meant, and runs at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

if TYPE_CHECKING:
    from types import FrameType

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120 - compared with co_filename text
"""The directory of this package, as the names of its code's files begin."""


@dataclass(frozen=True)
class Ending:
    """How the main part of a script ended.

    Attributes:
        exit_code: what a shell will see; -SIGINT where the process is to die of that signal, as python does; None
            where that was not seen.
        how: what ended it; `ended` where that was not seen.
        exception: `Class: message` of an uncaught exception, "" otherwise.
        frames: of that exception, the outermost first, none of this package: path, line, function.
    """

    exit_code: int | None
    how: Literal["returned", "exit", "exception", "interrupt", "ended"]
    exception: str = ""
    frames: tuple[tuple[str, int, str], ...] = field(default=(), repr=False, compare=False)


_MOST_FRAMES = 500


def frames_of(error: BaseException) -> tuple[tuple[str, int, str], ...]:
    """Path, line and function of an exception's frames outside this package: the outermost 500, outermost first.

    A syntax error has its own file and line as the last one, with the function "".
    """
    frames: list[tuple[str, int, str]] = []
    entry = error.__traceback__
    while entry is not None and len(frames) < _MOST_FRAMES:
        code = entry.tb_frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            frames.append((code.co_filename, entry.tb_lineno, code.co_name))
        entry = entry.tb_next
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and isinstance(error.lineno, int):
        frames.append((error.filename, error.lineno, ""))
    return tuple(frames)


def raised_ending(error: BaseException) -> Ending:
    """The ending by an uncaught exception: exit code 1."""
    return Ending(1, "exception", summary(error), frames_of(error))


def leave(exit_code: int | None) -> NoReturn:
    """End the process as the script would have ended it; it never returns.

    Args:
        exit_code: as in `Ending`; None ends with 0.

    Raises:
        SystemExit: for an exit code.
        KeyboardInterrupt: for an interrupt, so that the interpreter dies of SIGINT once it has cleaned up.
    """
    if exit_code == -signal.SIGINT:
        sys.excepthook = lambda *_: None  # its traceback is printed already
        raise KeyboardInterrupt
    raise SystemExit(exit_code)


def strip_frames(error: BaseException) -> None:
    """Remove this package's frames from an exception's traceback, in place.

    The runner's frames sit at its head, those of patched torch functions in the middle; tracebacks of causes, contexts
    and members of exception groups are treated the same.
    """
    seen: set[int] = set()
    pending = [error]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        stripped = _without_package_frames(current.__traceback__)
        if stripped is not current.__traceback__:
            current.__traceback__ = stripped
        pending.extend(
            linked for linked in (current.__cause__, current.__context__) if isinstance(linked, BaseException)
        )
        members = getattr(current, "exceptions", ())
        if isinstance(members, (tuple, list)):
            pending.extend(member for member in members if isinstance(member, BaseException))


def _without_package_frames(head: TracebackType | None) -> TracebackType | None:
    """A new traceback without this package's frames; the same object if it has none, None if nothing is left."""
    entries: list[TracebackType] = []
    entry = head
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    kept = [entry for entry in entries if not entry.tb_frame.f_code.co_filename.startswith(PACKAGE)]
    if len(kept) == len(entries):
        return head
    rest: TracebackType | None = None
    for entry in reversed(kept):
        rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


def summary(error: BaseException) -> str:
    """`Class: message`, cut to 500 characters; the class alone where the message is empty or fails."""
    try:
        text = str(error)
    except BaseException:  # the script's own exception class may fail
        text = ""
    name = type(error).__qualname__
    return f"{name}: {text}"[:500] if text else name


def ending_of(raised: BaseException | None) -> Ending:
    """How the main part of a script ended: returned, by SystemExit, by KeyboardInterrupt, or by any other exception.

    Args:
        raised: what it raised; None if it returned.
    """
    if raised is None:
        return Ending(0, "returned")
    if isinstance(raised, SystemExit):
        return Ending(_exit_status(raised)[0], "exit")
    # To python up to 3.13, a subclass of it is an exception like any other.
    if type(raised) is KeyboardInterrupt or (sys.version_info >= (3, 14) and isinstance(raised, KeyboardInterrupt)):
        return Ending(-signal.SIGINT, "interrupt", summary(raised))
    return raised_ending(raised)


def _exit_status(error: SystemExit) -> tuple[int, Any]:
    """Exit code of a `SystemExit` as a shell sees it, and the message to print, None for nothing.

    0 without a code, the lowest 8 bits of an integer, 1 for anything else, which is the message.
    """
    code: Any = error
    with contextlib.suppress(BaseException):
        code = error.code
    if code is None:
        return 0, None
    if isinstance(code, int):
        return (int(code) & 0xFF if -(2**63) <= code < 2**63 else 0xFF), None
    return 1, code


def report(error: BaseException, ending: Ending) -> int | None:
    """Print an uncaught exception as the interpreter does: by `sys.excepthook`, or the message of a `SystemExit`.

    Sets `sys.last_type`, `last_value`, `last_traceback` and `last_exc`, but for a `SystemExit`.

    Args:
        error: the exception, without our frames.
        ending: the ending by it.

    Returns:
        The exit code: the ending's, or that of a `SystemExit` that the hook raises.
    """
    if isinstance(error, SystemExit):
        return _report_exit(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        _write("sys.excepthook is missing\n")
        _print_traceback(error)
        return ending.exit_code
    failure: BaseException | None = None
    try:
        sys.audit("sys.excepthook", hook, type(error), error, error.__traceback__)
        hook(type(error), error, error.__traceback__)
    except SystemExit as leaving:
        return _report_exit(leaving)
    except BaseException as mistake:  # told below, as python does
        failure = mistake
    if failure is not None:
        strip_frames(failure)
        _write("Error in sys.excepthook:\n")
        _print_traceback(failure)
        _write("\nOriginal exception was:\n")
        _print_traceback(error)
    return ending.exit_code


def _report_exit(error: SystemExit) -> int:
    """Print the message of a `SystemExit`, if any, on stderr, and return its exit code."""
    code, message = _exit_status(error)
    if message is not None:
        with contextlib.suppress(BaseException):
            _write(str(message))
        _write("\n")
    return code


def _print_traceback(error: BaseException) -> None:
    """Print an exception with its traceback by python's own hook."""
    sys.__excepthook__(type(error), error, error.__traceback__)


def _write(text: str) -> None:
    """Write to stderr and flush it, or to descriptor 2 where the script has removed it; errors are ignored."""
    with contextlib.suppress(BaseException):
        if sys.stderr is None:
            os.write(2, text.encode(errors="backslashreplace"))
        else:
            sys.stderr.write(text)
            sys.stderr.flush()


def strip_thread_tracebacks() -> None:
    """Replace `threading.excepthook` by one that removes introspect's frames first, for good."""
    shown = threading.excepthook

    def stripped(args: Any) -> None:
        """Show an exception in a thread as the hook before did, without introspect's frames."""
        if args.exc_value is not None:
            strip_frames(args.exc_value)
            args = threading.ExceptHookArgs((args.exc_type, args.exc_value, args.exc_value.__traceback__, args.thread))
        shown(args)

    threading.excepthook = stripped


# --- signals that wait


_SET, _GET = signal.signal, signal.getsignal  # a capture replaces them while the script runs


class DeferredHandler:
    """Deferring stand-in for a signal handler, which is `handler`."""

    def __init__(self, handler: Any, waiting: list[DeferredHandler]) -> None:
        """Stand for `handler`; `waiting` is the list, shared by all, of those with a signal that was deferred."""
        self.handler = handler
        self.number = 0
        self._waiting = waiting

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        """Defer the signal: add itself to the list of those that wait. If it is there already, call the handler now.

        Returns:
            What the handler returned; None for a signal that was deferred.
        """
        if self in self._waiting:
            return self.handler(number, frame)
        self.number = number
        self._waiting.append(self)
        return None


class HeldHandlers:
    """Defers signal handlers between `hold` and `release`, in the main thread only."""

    def __init__(self) -> None:
        """Start with no handler replaced."""
        self._later: dict[int, DeferredHandler] = {}
        self._waiting: list[DeferredHandler] = []

    def hold(self) -> None:
        """Replace all signal handlers written in python by deferring ones; nothing outside the main thread.

        An exception, which a handler may raise meanwhile, leaves some unreplaced: a second call continues.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # python lets no other thread set handlers
        for number in _signals_in_order():
            handler = _GET(number)
            if callable(handler) and not isinstance(handler, (signal.Handlers, DeferredHandler)):
                self._later[number] = DeferredHandler(handler, self._waiting)
                _SET(number, self._later[number])

    def release(self) -> None:
        """Restore the handlers, but where the script has set others, and run those that were deferred, in their order.

        Raises:
            BaseException: the first one that any of them raises; the others still run.
        """
        for number in reversed(_signals_in_order() if self._later else []):
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


def _signals_in_order() -> list[int]:
    """All signals, SIGINT first, then by number."""
    return sorted(signal.valid_signals(), key=lambda number: (number != signal.SIGINT, number))
