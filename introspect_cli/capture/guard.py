"""The guard around all code of a capture that runs inside the script's, and the functions that are replaced meanwhile.

A capture's code runs inside the script's: in its forward passes, its backward passes, its optimizer steps. A mistake
in it must never become the script's, and what is the script's must never be taken for such a mistake: an
interrupt, or the timeout that a signal handler of the script raises wherever the interpreter happens to be. So
everything that a probe does runs inside one context manager. It switches the probe off after a mistake, says once what
is no longer seen, keeps the sentence for the manifest, and lets pass what did not come from us.
"""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from threading import get_ident
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from introspect_cli.capture.frames import PAUSE
from introspect_cli.errors import belongs_to_script
from introspect_cli.script.ending import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

    from torch.utils.hooks import RemovableHandle

    Entering = Callable[[tuple[Any, ...], dict[str, Any]], Callable[[Any], None] | None]


_UNCOUNTED = " (as importlib's _bootstrap)"
_MISSING = object()
RAISED = object()
"""Result of a function that raised."""
Function = TypeVar("Function", bound="Callable[..., Any]")


class Patches:
    """Attributes of torch's that are replaced for as long as a capture lasts.

    Where torch offers a hook, probes use the hook. Where it does not, or where the hook changes what runs (global
    module hooks switch torch.compile to another path and print a warning), a function is replaced on its class or
    module.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, object, object]] = []
        self._hooks: list[RemovableHandle] = []

    def replace(self, owner: Any, name: str, replacement: object) -> None:
        """Put a replacement in place of an attribute; warnings do not count its frames."""
        if isinstance(replacement, FunctionType):
            uncounted(replacement)
        self._replaced.append((owner, name, replacement, vars(owner).get(name, _MISSING)))
        setattr(owner, name, replacement)

    def hold(self, *hooks: RemovableHandle) -> None:
        """Keep handles of torch hooks; `remove` removes them."""
        self._hooks += hooks

    def watch(
        self,
        owner: Any,
        name: str,
        guarded: Guarded,
        entering: Entering,
        *,
        compiling: Callable[[], bool] | None = None,
        raised: bool = False,
    ) -> Callable[..., Any]:
        """Replace a function by one that calls it between two guarded sections, with unchanged arguments.

        Args:
            owner: the class or module that has it.
            name: the attribute.
            guarded: of the probe; where it is off, the original is called and that is all.
            entering: is given the arguments, `sys._getframe(2)` being the caller; what it returns, if anything, is
                given the result.
            compiling: whether a compiler traces the call, which is to see the original alone; None where none does.
            raised: whether what `entering` returns is given `RAISED` where the original raised.

        Returns:
            what stands in for the function.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            """Call the original between `entering` and what that returned."""
            leaving: Callable[[Any], None] | None = None
            if (compiling is None or not compiling()) and guarded.on:
                with guarded:
                    leaving = entering(args, kwargs)
            if leaving is None:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                if raised and guarded.on:
                    with guarded:
                        leaving(RAISED)
                raise
            if guarded.on:
                with guarded:
                    leaving(result)
            return result

        self.replace(owner, name, watched)
        return watched

    def remove(self) -> None:
        """Restore the attributes, the last replaced first, and remove the hooks.

        If the script has replaced an attribute since, its replacement stays: it may call ours, and ours passes
        everything through once its probe is off.
        """
        while self._hooks:
            self._hooks.pop().remove()
        while self._replaced:
            owner, name, replacement, original = self._replaced.pop()
            if vars(owner).get(name) is not replacement:
                continue
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


class Outermost:
    """Filters calls of some functions to those not made inside another of them; watch with `raised=True`."""

    def __init__(self) -> None:
        self.inside = False

    def __call__(self, entering: Entering) -> Entering:
        """Wrap `entering` so that nested calls do not reach it; `sys._getframe(3)` is the caller."""

        def outermost(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
            leaving = None if self.inside else entering(args, kwargs)
            if leaving is None:
                return None
            self.inside = True

            def left(result: object) -> None:
                self.inside = False
                leaving(result)

            return left

        return outermost


def uncounted(function: Function) -> Function:
    """Mark a function of introspect's so that `warnings` skips its frame and Dynamo passes it by.

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


def stands_in(frame: FrameType) -> bool:
    """Whether a frame's function was marked by `uncounted`."""
    return frame.f_code.co_filename.endswith(_UNCOUNTED)


class Guard:
    """Failed probes and the sentences on what is no longer observed."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self.sentences: list[str] = []
        self.failed: set[str] = set()
        self.details: list[str] = []
        self.sections = Sections()
        self.script_is_over = False
        """From then on, nothing that is raised in our code can be meant for the script."""

    def around(self, probe: str, lost: str, then: Callable[[], None] | None = None) -> Guarded:
        """A context manager for the code of one probe.

        Args:
            probe: its name.
            lost: what is no longer seen if it fails, as in "batches are".
            then: called after a failure.
        """
        return Guarded(self, probe, lost, then)

    def failure(self, probe: str, lost: str, error: BaseException) -> None:
        """Record a probe's first failure: sentence, traceback and warning; later ones of the same probe are ignored.

        Raises:
            BaseException: the error itself, where it did not come from our code.
        """
        if self.passes(error):
            raise error
        if probe in self.failed:
            return
        self.failed.add(probe)
        where = traceback.extract_tb(error.__traceback__)
        line = f" at {where[-1].filename.rpartition('/')[2]}:{where[-1].lineno}" if where else ""
        self.details.append("".join(traceback.format_exception(error))[-4000:])
        self.note(f"{lost} not observed from here on: {type(error).__name__}: {error}{line}")

    def passes(self, error: BaseException) -> bool:
        """Whether an error is the script's (interrupt, timeout) and has to reach it; False once the script is over."""
        return not self.script_is_over and belongs_to_script(error)

    def note(self, sentence: str) -> None:
        """Keep a sentence and warn with it, each once."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)
            self._warn(sentence)


class Sections:
    """Depth of guarded sections in the main thread, and the script's signal handlers that wait for their end."""

    __slots__ = ("depth", "main", "waiting")

    def __init__(self) -> None:
        self.depth = 0
        self.waiting: list[Callable[[], None]] = []
        self.main = threading.main_thread().ident


class Guarded:
    """Context manager around the code of one probe: swallows its mistakes and sets `on` to False at the first."""

    # A step has a dozen sections, each after what empties the caches: so what all of them do stands here, and calls
    # little else.
    __slots__ = ("_guard", "_lost", "_probe", "_sections", "_then", "on")

    def __init__(self, guard: Guard, probe: str, lost: str, then: Callable[[], None] | None) -> None:
        self._guard = guard
        self._sections = guard.sections
        self._probe = probe
        self._lost = lost
        self._then = then
        self.on = False

    def __enter__(self) -> None:
        sections = self._sections
        if get_ident() == sections.main:
            sections.depth += 1
        if PAUSE.taken or PAUSE.asked() is not None:
            PAUSE.begin()

    def __exit__(
        self, _class: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> bool:
        if PAUSE.taken:
            PAUSE.end()
        if error is None:
            self._leave()
            return False
        swallowed = not self._guard.passes(error)
        try:
            if swallowed:
                self.on = False
                if self._then is not None:
                    self._then()
                self._guard.failure(self._probe, self._lost, error)
        finally:
            self._leave()
        return swallowed

    def _leave(self) -> None:
        """Leave a section; at depth 0 in the main thread, run the waiting signal handlers."""
        sections = self._sections
        if get_ident() == sections.main:
            sections.depth -= 1
            while sections.waiting and not sections.depth:  # here: another call would let a signal come between
                sections.waiting.pop(0)()
