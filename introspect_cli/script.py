"""Running somebody's script exactly as python would.

Under capture a script must not be able to tell that it is watched: its output, exit code and tracebacks, what
`__main__` holds, how it pickles its classes and starts its workers have to be what `python script.py` gives,
to the byte. So the script gets a fresh `__main__` that stays installed until the interpreter ends, python's
own `runpy` runs modules, directories and zip files, and what the interpreter does in C when a script ends
(flushing, `sys.excepthook`, `SystemExit` messages) is done here in the same order, on tracebacks without our
frames.

What remains visible: the frames below the script's first one, to those who walk the stack past it
(`inspect.stack()`, a warning whose `stacklevel` points beyond the script).
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import os
import re
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from introspect_cli.errors import UsageError
from introspect_cli.holding import Held
from introspect_cli.recursion import make_room

if TYPE_CHECKING:
    from collections.abc import Callable

_INTERPRETER = re.compile(r"(python|pypy)[\d.]*(\.exe)?")
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep  # noqa: PTH100, PTH120 - compared with co_filename text


@dataclass(frozen=True)
class Target:
    """What to run: a script (a file, directory or zip file) or a module, and its arguments.

    Attributes:
        script: the script; None for a module.
        module: the module.
        args: its arguments.
        launcher: the command that started it, after `-m` where that is a module; empty where none was followed.
        launched_in: the directory where that command ran.
    """

    script: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    launched_in: str = ""


@dataclass(frozen=True)
class Ending:
    """How the main part of a script ended.

    Attributes:
        exit_code: what a shell will see; -SIGINT where the process is to die of that signal, as python does; None
            where that was not seen.
        how: what ended it; `ended` where that was not seen.
        exception: `Class: message` of an uncaught exception, "" otherwise.
    """

    exit_code: int | None
    how: Literal["returned", "exit", "exception", "interrupt", "ended"]
    exception: str = ""


def check(target: Target) -> None:
    """Find out, without running anything, whether there is something to run.

    Raises:
        UsageError: no such script or module, a directory without `__main__.py`, a file that is not text.
    """
    if target.module is not None:
        _check_module(target.module)
        return
    script = target.script
    if not script:
        raise UsageError("nothing to run: give a script, or a module after -m")
    path = Path(script)
    if not os.path.exists(script):  # noqa: PTH110 - pathlib raises an error for a name that is too long
        if _INTERPRETER.fullmatch(path.name):
            raise UsageError(f"leave out {script!r}: capture runs the script itself (`introspect capture train.py`)")
        raise UsageError(f"no such script: {script!r}; our own options go before the script")
    if _is_container(script):
        return
    if path.is_dir():
        raise UsageError(f"{script!r} is a directory without __main__.py: name the script in it")
    try:
        data = path.read_bytes() if path.is_file() else b""  # reading a pipe would empty it
    except OSError as error:
        raise UsageError(f"{script!r} cannot be read: {error.strerror}") from error
    if path.suffix != ".pyc" and not _is_text(data):
        raise UsageError(f"{script!r} is not a Python script: it is not text in UTF-8 or the encoding it declares")


def run(target: Target, *, started: Callable[[], None], ended: Callable[[Ending], None]) -> Ending:
    """Run a script or module as `__main__`, and report an uncaught exception as python would.

    The caller ends the process with `leave(ending.exit_code)`, as the script would have. In a child that the
    script forked and that comes back here `ended` is not called, and `SystemExit` passes through the caller.

    Args:
        target: what to run, checked before.
        started: called just before the first line of the script.
        ended: called once when the main part of the script is over, before its traceback is printed, before
            threads are waited for and `atexit` handlers run; called, too, for a script that does not compile
            and so never started. An exception in either is told on stderr and does not reach the script.

    Returns:
        How it ended.
    """
    process = os.getpid()
    main = sys.modules["__main__"] = _fresh_main()
    contained = target.script is not None and _is_container(target.script)
    module = "__main__" if contained else target.module
    _prepare(target, contained=contained)
    _strip_thread_tracebacks()
    room, put_back_limit = make_room(module is None)
    raised: BaseException | None = None
    held: Held | None = None
    try:
        if module is not None:
            import runpy

            _guard(started)
            # python's own way into `-m`, so that its frames in a traceback are the same
            runpy._run_module_as_main(module, not contained)  # type: ignore[attr-defined]  # noqa: SLF001 - see above
        else:
            code = _load(str(target.script), main)
            _guard(started)
            exec(code, vars(main))  # noqa: S102 - running the script is what we are for
    except BaseException as error:  # whatever ends a script ends it
        raised = error
    while held is None:
        try:
            held = _hold()
        except BaseException as error:  # noqa: PERF203 - a signal's handler may raise after the script's last line
            raised = raised or error
    room()
    if module is None:
        _flush()
    ending = _ending(raised)
    if os.getpid() == process:
        _guard(ended, ending)
    put_back_limit()
    try:
        held.release()
    except (KeyboardInterrupt, SystemExit) as error:  # somebody wants an end while we finish
        if raised is None or isinstance(raised, SystemExit):
            raised, ending = error, _ending(error)
    except BaseException:  # noqa: S110 - a timeout, say: the script had ended in time
        pass
    if raised is not None:
        strip_frames(raised)
        ending = Ending(_report(raised, ending), ending.how, ending.exception)
    if module is None and (ending.how != "exit" or sys.version_info >= (3, 14)):
        for name in ("__file__", "__cached__"):  # python takes them away before the atexit handlers
            vars(main).pop(name, None)
    if os.getpid() != process:
        leave(ending.exit_code)
    return ending


def leave(exit_code: int | None) -> NoReturn:
    """End the process as the script would have ended it.

    Args:
        exit_code: as in `Ending`.

    Raises:
        SystemExit: for an exit code.
        KeyboardInterrupt: for an interrupt, so that the interpreter dies of SIGINT once it has cleaned up.
    """
    if exit_code == -signal.SIGINT:
        sys.excepthook = _say_nothing  # its traceback is printed already
        raise KeyboardInterrupt
    raise SystemExit(exit_code)


def strip_frames(error: BaseException) -> None:
    """Take the frames of this package out of an exception's traceback.

    The runner's frames sit at its head, those of patched torch functions in the middle; causes, contexts and
    the members of exception groups have theirs too. The exception is changed in place.
    """
    seen: set[int] = set()
    pending = [error]
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        stripped = _without_ours(current.__traceback__)
        if stripped is not current.__traceback__:
            current.__traceback__ = stripped
        pending.extend(
            linked for linked in (current.__cause__, current.__context__) if isinstance(linked, BaseException)
        )
        members = getattr(current, "exceptions", ())
        if isinstance(members, (tuple, list)):
            pending.extend(member for member in members if isinstance(member, BaseException))


def _without_ours(head: TracebackType | None) -> TracebackType | None:
    entries: list[TracebackType] = []
    entry = head
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    kept = [entry for entry in entries if not entry.tb_frame.f_code.co_filename.startswith(_PACKAGE)]
    if len(kept) == len(entries):
        return head
    rest: TracebackType | None = None
    for entry in reversed(kept):
        rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


def _is_container(script: str) -> bool:
    """Whether python would import `__main__` from it: a directory or zip file that has one."""
    if not (os.path.isdir(script) or os.path.isfile(script)):  # noqa: PTH112, PTH113 - a script of its own name
        return False
    import pkgutil

    finder = pkgutil.get_importer(_absolute(script))
    return finder is not None and finder.find_spec("__main__") is not None


def _is_text(data: bytes) -> bool:
    import importlib.util

    try:
        return "\0" not in importlib.util.decode_source(data)
    except (UnicodeDecodeError, SyntaxError):  # the latter for a declaration it cannot follow
        return False


def _check_module(module: str) -> None:
    import importlib.util

    top = module.partition(".")[0]  # finding a submodule would run its package
    found = None
    saved = sys.path[:]
    if not _safe_path():
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - an entry of sys.path is text
    try:
        found = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path[:] = saved
    if found is None:
        raise UsageError(f"no module named {module!r}: -m looks in this directory and among installed packages")


def _safe_path() -> bool:
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


def _absolute(script: str) -> str:
    return os.path.join(os.getcwd(), script)  # noqa: PTH109, PTH118 - python does not normalise either


def _fresh_main() -> ModuleType:
    """A `__main__` as the interpreter makes it, its names in the same order."""
    main = ModuleType("__main__")
    main.__loader__ = None
    if sys.version_info < (3, 14):
        vars(main)["__annotations__"] = {}
    vars(main)["__builtins__"] = builtins
    return main


def _prepare(target: Target, *, contained: bool) -> None:
    """Set `sys.argv`, `sys.orig_argv` and `sys.path[0]`."""
    if target.module is not None:
        sys.argv = ["-m", *target.args]
        sys.orig_argv = [*_interpreter(), "-m", target.module, *target.args]
        first = os.getcwd()  # noqa: PTH109 - an entry of sys.path is text
    else:
        script = str(target.script)
        sys.argv = [script, *target.args]
        sys.orig_argv = [*_interpreter(), *sys.argv]
        first = _absolute(script) if contained else os.path.dirname(os.path.realpath(script))  # noqa: PTH120 - as above
    if not _safe_path():
        sys.path[0] = first
    elif contained:
        sys.path.insert(0, first)


def _interpreter() -> list[str]:
    """The interpreter and its own options, as this process was started with them."""
    words = sys.orig_argv
    count = 1
    while count < len(words) and words[count].startswith("-"):
        word = words[count]
        valued = word in ("-X", "-W", "--check-hash-based-pycs")
        if not valued and not word.startswith(("-X", "-W", "--")) and ("m" in word or "c" in word):
            kept = word[: min(word.index(letter) for letter in "mc" if letter in word)]
            return [*words[:count], *([kept] if len(kept) > 1 else [])]
        count += 2 if valued else 1
    return words[:count]


def _load(script: str, main: ModuleType) -> CodeType:
    """The script's code, and what `__main__` says of where it comes from."""
    path = _absolute(script)
    if path.endswith(".pyc"):
        sourceless = importlib.machinery.SourcelessFileLoader("__main__", path)
        main.__loader__ = sourceless
        code = sourceless.get_code("__main__")
        assert code is not None
    else:
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    vars(main)["__file__"] = path
    vars(main)["__cached__"] = None
    return code


def _hold() -> Held:
    held = Held()
    try:
        held.hold()
    except BaseException:
        held.release()
        raise
    return held


def _guard(callback: Callable[..., None], *args: Any) -> None:
    try:
        callback(*args)
    except BaseException as error:  # the script must not pay for our mistakes
        with contextlib.suppress(BaseException):
            print(f"introspect: {_summary(error)}; the script goes on unrecorded", file=sys.stderr)  # noqa: T201 - see above


def _flush() -> None:
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(BaseException):
            stream.flush()


def _summary(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # the script's own exception class may fail
        text = ""
    name = type(error).__qualname__
    return f"{name}: {text}"[:500] if text else name


def _ending(raised: BaseException | None) -> Ending:
    if raised is None:
        return Ending(0, "returned")
    if isinstance(raised, SystemExit):
        return Ending(_status(raised)[0], "exit")
    # To python up to 3.13, a subclass of it is an exception like any other.
    if type(raised) is KeyboardInterrupt or (sys.version_info >= (3, 14) and isinstance(raised, KeyboardInterrupt)):
        return Ending(-signal.SIGINT, "interrupt", _summary(raised))
    return Ending(1, "exception", _summary(raised))


def _status(error: SystemExit) -> tuple[int, Any]:
    """The exit code of a `SystemExit`, and what to print, None for nothing."""
    code: Any = error
    with contextlib.suppress(BaseException):
        code = error.code
    if code is None:
        return 0, None
    if isinstance(code, int):
        return (int(code) & 0xFF if -(2**63) <= code < 2**63 else 0xFF), None
    return 1, code


def _report(error: BaseException, ending: Ending) -> int | None:
    """Do what the interpreter does with an exception that nobody caught; returns the exit code."""
    if isinstance(error, SystemExit):
        return _exit(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        _write("sys.excepthook is missing\n")
        _display(error)
        return ending.exit_code
    failure: BaseException | None = None
    try:
        sys.audit("sys.excepthook", hook, type(error), error, error.__traceback__)
        hook(type(error), error, error.__traceback__)
    except SystemExit as leaving:
        return _exit(leaving)
    except BaseException as mistake:  # told below, as python does
        failure = mistake
    if failure is not None:
        strip_frames(failure)
        _write("Error in sys.excepthook:\n")
        _display(failure)
        _write("\nOriginal exception was:\n")
        _display(error)
    return ending.exit_code


def _exit(error: SystemExit) -> int:
    code, message = _status(error)
    if message is not None:
        with contextlib.suppress(BaseException):
            _write(str(message))
        _write("\n")
    return code


def _display(error: BaseException) -> None:
    sys.__excepthook__(type(error), error, error.__traceback__)


def _write(text: str) -> None:
    with contextlib.suppress(BaseException):
        if sys.stderr is None:
            os.write(2, text.encode(errors="backslashreplace"))
        else:
            sys.stderr.write(text)
            sys.stderr.flush()


def _say_nothing(*_: object) -> None:
    pass


def _strip_thread_tracebacks() -> None:
    """Keep our frames out of what `threading` prints of an exception in one of the script's threads."""
    shown = threading.excepthook

    def stripped(args: Any) -> None:
        if args.exc_value is not None:
            strip_frames(args.exc_value)
            args = threading.ExceptHookArgs((args.exc_type, args.exc_value, args.exc_value.__traceback__, args.thread))
        shown(args)

    threading.excepthook = stripped
