"""How a script ends: its exit code, and what the interpreter prints of an exception that nobody caught.

What the script has raised is raised again once all is written, so that the interpreter ends by it as it would alone:
with `sys.excepthook`, messages of `SystemExit` and signals. Its traceback has none of our frames.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

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
        raised: what the script raised; None where it returned.
    """

    exit_code: int | None
    how: Literal["returned", "exit", "exception", "interrupt", "ended"]
    exception: str = ""
    raised: BaseException | None = field(default=None, repr=False, compare=False)


def entries_of(head: TracebackType | None) -> list[TracebackType]:
    """The entries of a traceback, outermost first."""
    entries = []
    while head is not None:
        entries.append(head)
        head = head.tb_next
    return entries


class Raised(NamedTuple):
    """Where an exception came through: module, path of its file, line and function."""

    module: str
    path: str
    line: int
    function: str


def places_of(error: BaseException) -> list[Raised]:
    """Where an exception came through, outermost first; a syntax error has its own file and line, in function ""."""
    frames = [(each.tb_frame, each.tb_lineno) for each in entries_of(error.__traceback__)]
    found = [
        Raised(str(frame.f_globals.get("__name__")), frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in frames
    ]
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and isinstance(error.lineno, int):
        found.append(Raised(Path(error.filename).stem, error.filename, error.lineno, ""))
    return found


def tell(sentence: str, who: str | None = "introspect") -> None:
    """Write `who: sentence` to stderr at once, nothing where nobody says it; a stderr that is closed is ignored."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if who is not None:
            sys.stderr.write(f"{who}: {sentence}\n")
            sys.stderr.flush()


def raised_ending(error: BaseException) -> Ending:
    """The ending by an uncaught exception: exit code 1."""
    return Ending(1, "exception", summary(error), error)


def leave(exit_code: int | None) -> NoReturn:
    """End the process with an exit code as in `Ending`, None for 0; it never returns.

    Raises:
        SystemExit: for an exit code.
        KeyboardInterrupt: for an interrupt, so that the interpreter dies of SIGINT once it has cleaned up.
    """
    if exit_code == -signal.SIGINT:
        sys.excepthook = lambda *_: None  # there is nothing to print
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
        members = getattr(current, "exceptions", ())
        members = members if isinstance(members, (tuple, list)) else ()
        linked = (current.__cause__, current.__context__, *members)
        pending.extend(each for each in linked if isinstance(each, BaseException))


def _without_package_frames(head: TracebackType | None) -> TracebackType | None:
    """A new traceback without this package's frames; the same object if it has none, None if nothing is left."""
    entries = entries_of(head)
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
        return Ending(_exit_code_of(raised), "exit", raised=raised)
    # To python up to 3.13, a subclass of it is an exception like any other.
    if type(raised) is KeyboardInterrupt or (sys.version_info >= (3, 14) and isinstance(raised, KeyboardInterrupt)):
        return Ending(-signal.SIGINT, "interrupt", summary(raised), raised=raised)
    return raised_ending(raised)


def _exit_code_of(error: SystemExit) -> int:
    """Exit code of a `SystemExit` as a shell sees it.

    0 without a code, the lowest 8 bits of an integer, 1 for anything else, which is a message.
    """
    code: Any = error
    with contextlib.suppress(BaseException):
        code = error.code
    if not isinstance(code, int):
        return int(code is not None)
    return int(code) & 0xFF if -(2**63) <= code < 2**63 else 0xFF


def hook_exceptions(seen: Callable[[BaseException], object], then: Callable[[], None] = lambda: None) -> None:
    """Replace `sys.excepthook` until its next call, in which `seen` is given the exception first.

    What `seen` makes of the exception's traceback is what the script's own hook is called with. Where that fails, it is
    told as python does, without introspect's frames. `then` is called at the end; not where the hook ends the process.
    """
    shown = sys.excepthook

    def hook(cls: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
        """Call `seen`, and then the hook before."""
        sys.excepthook = shown
        with contextlib.suppress(Exception):
            seen(value)
        sys.last_traceback = value.__traceback__
        failure: BaseException | None = None
        try:
            shown(cls, value, value.__traceback__)
        except SystemExit:
            raise
        except BaseException as error:  # told below, where no exception is being handled
            failure = error
        if failure is not None:
            strip_frames(failure)
            for words, one in (("Error in sys.excepthook:", failure), ("\nOriginal exception was:", value)):
                with contextlib.suppress(Exception):
                    print(words, file=sys.stderr, flush=True)  # noqa: T201 - as python does
                sys.__excepthook__(type(one), one, one.__traceback__)
        then()

    sys.excepthook = hook


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
