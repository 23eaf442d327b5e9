"""Running somebody's script exactly as python would.

Under capture a script must not be able to tell that it is watched: its output, exit code and tracebacks, what
`__main__` holds, how it pickles its classes and starts its workers have to be what `python script.py` gives,
to the byte. So the script gets a fresh `__main__` that stays installed until the interpreter ends, python's
own `runpy` runs modules, directories and zip files, and what the interpreter does in C when a script ends
(flushing, `sys.excepthook`, `SystemExit` messages) is done here in the same order, on tracebacks without our
frames.

What remains visible: the frames below the script's first one, to those who walk the stack past it
(`inspect.stack()`, a warning whose `stacklevel` points beyond the script). Python counts them, too: so the recursion
limit is raised by what our frames take, which a script that asks for the limit is told.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from introspect_cli.script.ending import (
    Ending,
    HeldHandlers,
    ending_of,
    leave,
    report,
    strip_frames,
    strip_thread_tracebacks,
    summary,
)
from introspect_cli.script.target import fresh_main, is_container, load, prepare

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.script.target import Target


def run(target: Target, *, started: Callable[[], None], ended: Callable[[Ending], None]) -> Ending:
    """Run a script or module as `__main__`, and report an uncaught exception as python would.

    The caller ends the process with `leave(ending.exit_code)`, as the script would have. In a child that the script
    forked and that comes back here `ended` is not called, and `leave` is: its exception passes through the caller.
    `__main__`, `sys.argv`, `sys.path[0]` and `threading.excepthook` stay as they are set for the script.

    Args:
        target: what to run, checked before.
        started: called just before the first line of the script; not for one that does not compile.
        ended: called once when the main part of the script is over, before its traceback is printed, before threads are
            waited for and `atexit` handlers run; called, too, for a script that does not compile. An exception in
            `started` or `ended` is printed on stderr and does not reach the script.

    Returns:
        How it ended.
    """
    process = os.getpid()
    main = sys.modules["__main__"] = fresh_main()
    contained = target.script is not None and is_container(target.script)
    module = "__main__" if contained else target.module
    prepare(target, contained=contained)
    strip_thread_tracebacks()
    _raise_recursion_limit(executed=module is None)
    limit = sys.getrecursionlimit()
    raised: BaseException | None = None
    held: HeldHandlers | None = None
    try:
        if module is not None:
            import runpy

            _call_guarded(started)
            # python's own way into `-m`, so that its frames in a traceback are the same
            runpy._run_module_as_main(module, not contained)  # type: ignore[attr-defined]  # noqa: SLF001 - see above
        else:
            code = load(str(target.script), main)
            _call_guarded(started)
            exec(code, vars(main))  # noqa: S102 - running the script is what we are for
    except BaseException as error:  # whatever ends a script ends it
        raised = error
    while held is None:
        try:
            held = _hold_handlers()
        except BaseException as error:  # noqa: PERF203 - a signal's handler may raise after the script's last line
            raised = raised or error
    asked = sys.getrecursionlimit()
    sys.setrecursionlimit(max(asked, limit))  # room for introspect's own work, however low the script has set it
    if module is None:
        _flush_streams()
    ending = ending_of(raised)
    if os.getpid() == process:
        _call_guarded(ended, ending)
    with contextlib.suppress(RecursionError):
        sys.setrecursionlimit(asked)
    try:
        held.release()
    except (KeyboardInterrupt, SystemExit) as error:  # somebody wants an end while we finish
        if raised is None or isinstance(raised, SystemExit):
            raised, ending = error, ending_of(error)
    except BaseException:  # noqa: S110 - a timeout, say: the script had ended in time
        pass
    if raised is not None:
        strip_frames(raised)
        ending = replace(ending, exit_code=report(raised, ending))
    if module is None and (ending.how != "exit" or sys.version_info >= (3, 14)):
        for name in ("__file__", "__cached__"):  # python takes them away before the atexit handlers
            vars(main).pop(name, None)
    if os.getpid() != process:
        leave(ending.exit_code)
    return ending


def _hold_handlers() -> HeldHandlers:
    """Defer signal handlers until `release` of what is returned.

    Raises:
        BaseException: what a handler raised meanwhile; all handlers are restored then.
    """
    held = HeldHandlers()
    try:
        held.hold()
    except BaseException:
        held.release()
        raise
    return held


def _call_guarded(callback: Callable[..., None], *args: Any) -> None:
    """Call a callback; print an exception on stderr instead of raising it."""
    try:
        callback(*args)
    except BaseException as error:  # the script must not pay for our mistakes
        with contextlib.suppress(BaseException):
            print(f"introspect: {summary(error)}; the script goes on unrecorded", file=sys.stderr)  # noqa: T201 - see above


def _flush_streams() -> None:
    """Flush stderr and stdout; errors are ignored."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(BaseException):
            stream.flush()


def _raise_recursion_limit(*, executed: bool) -> None:
    """Raise the recursion limit by the levels that introspect's frames take, so that the script has as many as alone.

    How many these are differs from one version of python to the next, so it is measured by recursing to the limit.

    Args:
        executed: whether the script will be run by `exec`, which took a level before python 3.12.
    """
    limit, deepest = sys.getrecursionlimit(), 0

    def descend() -> None:
        """Call itself until RecursionError, counting levels in `deepest`."""
        nonlocal deepest
        deepest += 1
        descend()

    with contextlib.suppress(RecursionError):
        descend()
    # one level is this function's
    sys.setrecursionlimit(2 * limit - deepest - 1 + (executed and sys.version_info < (3, 12)))
