"""Running somebody's script exactly as python would.

Under capture a script must not be able to tell that it is watched: its output, exit code and tracebacks, what
`__main__` holds, how it pickles its classes and starts its workers have to be what `python script.py` gives,
to the byte. So the script gets a fresh `__main__` that stays installed until the interpreter ends, python's own
`runpy` runs modules, directories and zip files, and what the interpreter does in C when a script ends
(flushing, `sys.excepthook`, `SystemExit` messages) it does here in the same order, on tracebacks without our
frames.

What remains visible: the frames below the script's first one, to those who walk the stack past it
(`inspect.stack()`, a warning whose `stacklevel` points beyond the script). Python counts them, too: so the recursion
limit is raised by what our frames take, which a script that asks for the limit is told.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from introspect_cli.script.ending import (
    Ending,
    ending_of,
    hook_exceptions,
    strip_frames,
    strip_thread_tracebacks,
    summary,
    tell,
)
from introspect_cli.script.target import fresh_main, is_container, load, prepare

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType

    from introspect_cli.script.target import Target


_REPLACED: list[ModuleType] = []
"""The `__main__` that python began with: it uses the names of that once more as it ends, without counting that use."""


def run(target: Target, *, started: Callable[[], None], ended: Callable[[Ending], None]) -> Ending:
    """Run a script or module as `__main__`, and report an uncaught exception as python would.

    The caller ends the process as the script would have, by raising what the script has raised: the interpreter prints
    it, its traceback without introspect's frames. `__main__`, `sys.argv`, `sys.path[0]` and
    `threading.excepthook` stay as they are set for the script.

    Args:
        target: what to run, checked before.
        started: called just before the first line of the script; not for one that does not compile.
        ended: called when the main part of the script is over, before its traceback is printed, before threads are
            waited for and `atexit` handlers run; not in a child that the script forked. Called, too, for a script that
            does not compile, and a second time where the first call raises: a signal's handler may have raised before
            it could begin, or have waited for its end. An exception in `started`, or in both calls of `ended`, is
            printed on stderr and does not reach the script.

    Returns:
        How it ended.
    """
    process = os.getpid()
    _REPLACED.append(sys.modules["__main__"])
    main = sys.modules["__main__"] = fresh_main()
    contained = target.script is not None and is_container(target.script)
    module = "__main__" if contained else target.module
    prepare(target, contained=contained)
    strip_thread_tracebacks()
    _raise_recursion_limit(executed=module is None)
    limit = sys.getrecursionlimit()
    raised: BaseException | None = None
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
    of_script, asked = raised, 0
    ending: Ending | None = None
    for again in (False, True):
        try:
            asked = asked or sys.getrecursionlimit()
            sys.setrecursionlimit(max(asked, limit))  # room for our own work, however low the script has set it
            if module is None:
                _flush_streams()
            if ending is None or ending.raised is not raised:
                ending = ending_of(raised)
            if os.getpid() == process:
                ended(ending)
            _prepare_end(ending, asked, main if module is None else None)
        except BaseException as error:  # noqa: PERF203 - of a signal's handler, or ours
            if again:
                raised = of_script
                tell(_failed(error))
            # somebody wants an end while we finish; of a timeout, say, the script had ended in time
            elif isinstance(error, (KeyboardInterrupt, SystemExit)) and isinstance(raised, SystemExit | None):
                raised = error
        else:
            return ending
    ending = ending_of(raised)
    _prepare_end(ending, asked or limit, main if module is None else None)
    return ending


def _prepare_end(ending: Ending, limit: int, main: ModuleType | None) -> None:
    """Have the interpreter end by what the script has raised as it would alone, when that is raised again.

    Args:
        ending: how the script ended.
        limit: the recursion limit that the script has set.
        main: the script's `__main__`, from which python takes `__file__` before the `atexit` handlers; None for a
            module's, which keeps it.
    """

    def forget_file() -> None:
        """Take `__file__` from the script."""
        for name in ("__file__", "__cached__") if main is not None else ():
            vars(main).pop(name, None)

    raised = ending.raised
    if raised is not None and not isinstance(raised, SystemExit):
        strip_frames(raised)
        trace = raised.__traceback__
        hook_exceptions(lambda error: error.with_traceback(trace) if error is raised else None, forget_file)
    elif raised is None or sys.version_info >= (3, 14):
        forget_file()
    with contextlib.suppress(RecursionError):
        sys.setrecursionlimit(limit)


def _call_guarded(callback: Callable[[], None]) -> None:
    """Call a callback; print an exception on stderr instead of raising it."""
    try:
        callback()
    except BaseException as error:  # the script must not pay for our mistakes
        tell(_failed(error))


def _failed(error: BaseException) -> str:
    """Sentence on a callback that has failed."""
    return f"{summary(error)}; the script goes on unrecorded"


def _flush_streams() -> None:
    """Flush stderr and stdout; errors are ignored, interrupts are not."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(Exception):
            stream.flush()


def _raise_recursion_limit(*, executed: bool) -> None:
    """Raise the recursion limit by the levels that introspect's frames take, so that the script has as many as alone.

    Args:
        executed: whether the script will be run by `exec`, which takes a level before python 3.12; so does the one of
            `python -m`.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to a frame
    limit, before = sys.getrecursionlimit(), sys.version_info < (3, 12)
    limit += before and executed
    while frame is not None:
        limit += 1 + (before and frame.f_code.co_name == "_run_code")
        frame = frame.f_back
    sys.setrecursionlimit(limit)
