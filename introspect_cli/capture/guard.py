"""The guard around all code of a capture that runs inside the script's.

A capture's code runs inside the script's: in its forward passes, its backward passes, its optimizer steps. A mistake
in it must never become the script's, and what is the script's must never be taken for such a mistake: an
interrupt, or the timeout that a signal handler of the script raises wherever the interpreter happens to be. So
everything that a probe does runs inside one context manager. It switches the probe off after a mistake, says once what
is no longer seen, keeps the sentence for the manifest, and lets pass what did not come from us.
"""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

from introspect_cli.capture.frames import PAUSE
from introspect_cli.errors import belongs_to_script
from introspect_cli.script.ending import PACKAGE
from introspect_cli.tensors.kernels import KERNELS

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


_UNCOUNTED = " (as importlib's _bootstrap)"
Function = TypeVar("Function", bound="Callable[..., Any]")


def uncounted(function: Function) -> Function:
    """Rename the file in a function's code so that `warnings` skips its frame and Dynamo leaves it alone.

    Returns the same function. One that is not introspect's, or was renamed before, is not changed.

    `warnings.warn(..., stacklevel=5)` counts frames. It leaves out those of python's own import system, which it knows
    by two words in the names of their files: so the file of such a function is named with these words.
    """
    marked: Any = function
    code = marked.__code__
    if code.co_filename.startswith(PACKAGE) and not code.co_filename.endswith(_UNCOUNTED):
        marked.__code__ = code.replace(co_filename=code.co_filename + _UNCOUNTED)
        if "torch" in sys.modules:  # else it is for the script to import, and no compiler comes by
            from introspect_cli.capture import private_api

            private_api.pass_by(marked.__code__)
    return function


def is_stand_in(frame: FrameType) -> bool:
    """Whether `uncounted` has marked the function of a frame."""
    return frame.f_code.co_filename.endswith(_UNCOUNTED)


class Guard:
    """Failed probes and the sentences on what is no longer observed."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """Start with no failure; `warn` is given each new sentence at once."""
        self._warn = warn
        KERNELS.share_sections(threading.main_thread().ident, WAITING, PAUSE)
        self.sentences: list[str] = []
        self.failed: set[str] = set()
        self.details: list[str] = []
        self.inside: set[str] = set()
        """Groups of watched functions (`events`), one of which is running."""
        self.script_is_over = False
        """From then on, nothing that is raised in our code can be meant for the script."""

    def around(self, probe: str, lost: str, then: Callable[[], None] | None = None) -> Guarded:
        """A context manager for the code of one probe, switched off (`on` False) at first.

        Args:
            probe: its name; two failures under one name are noted once.
            lost: what is no longer seen if it fails, as in "batches are".
            then: called after a failure.
        """
        return Guarded(self, probe, lost, then)

    def failure(self, probe: str, lost: str, error: BaseException) -> None:
        """Note a probe's first failure: sentence, traceback and warning; later ones of the same probe are ignored.

        Of the traceback the last 4000 characters are kept.
        """
        if probe in self.failed:
            return
        self.failed.add(probe)
        where = traceback.extract_tb(error.__traceback__)
        line = f" at {where[-1].filename.rpartition('/')[2]}:{where[-1].lineno}" if where else ""
        self.details.append("".join(traceback.format_exception(error))[-4000:])
        self.note(f"{lost} not observed from here on: {type(error).__name__}: {error}{line}")

    def is_scripts(self, error: BaseException) -> bool:
        """Whether an error is the script's own (interrupt, timeout) and has to reach it.

        False once the script is over.
        """
        return not self.script_is_over and belongs_to_script(error)

    def note(self, sentence: str) -> None:
        """Keep a sentence for the manifest and warn with it; nothing for a sentence noted before."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)
            self._warn(sentence)


in_section: Callable[[], int] = KERNELS.section_depth
"""Number of guarded sections that the main thread is in."""
WAITING: list[Callable[[], None]] = []
"""Signal handlers of the script that wait for the end of the outermost section."""


class Guarded(KERNELS.Section):  # type: ignore[misc] # compiled: begins and ends a section
    """Context manager around the code of one probe: swallows its mistakes and sets `on` to False at the first.

    In a section Dynamo looks at no frame, and, in the main thread, signal handlers of the script wait; those that
    waited run at the end of the outermost one.
    """

    __slots__ = ("_guard", "_lost", "_probe", "_then", "inside", "on")

    if TYPE_CHECKING:

        def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool: ...

    def __init__(self, guard: Guard, probe: str, lost: str, then: Callable[[], None] | None) -> None:
        """Start outside, and switched off; see `Guard.around` for what it is given."""
        self._guard = guard
        self.inside = guard.inside
        self._probe = probe
        self._lost = lost
        self._then = then
        self.on = False

    def failed(self, error: BaseException) -> bool:
        """Take an error that ends a section: one of introspect's is noted, sets `on` to False, and has `then` called.

        Returns whether it is swallowed; the script's is raised on.
        """
        swallowed = not self._guard.is_scripts(error)
        if swallowed:
            self.on = False
            if self._then is not None:
                self._then()
            self._guard.failure(self._probe, self._lost, error)
        return swallowed
