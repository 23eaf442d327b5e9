"""The dispatch mode that sees operators: at the bottom of the stack of modes for as long as steps are captured."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils._python_dispatch import TorchDispatchMode

from introspect_cli.capture import private_api

if TYPE_CHECKING:
    from collections.abc import Callable


class Watching(Protocol):
    """Interface of `OpProbe` that the mode uses."""

    live: bool

    @property
    def record_results(self) -> Callable[..., None]:
        """Function to call with each operator that has run: operator, arguments, result, frame."""


class OpMode(TorchDispatchMode):
    """Dispatch mode that reports every operator to the probe."""

    supports_higher_order_operators = True

    def __init__(self, probe: Watching) -> None:
        """Set the probe that hears of operators; `enter_stack` puts the mode in place."""
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.probe = probe
        self._pushed = threading.local()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would wrap every call of `__torch_dispatch__`, which costs as much as the call."""
        return False  # the wrapper that would be put around every call costs as much as the call

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: a compiler need not mind this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, then report it to the probe if that is `live`; an error is raised without our frames."""
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException as error:
            # Bare, there are no frames of the dispatcher; this one is left out as other frames of the tool are.
            raise error.with_traceback(None)  # noqa: B904 - the same error, not a new one
        probe = self.probe
        if probe.live:
            probe.record_results(func, args, kwargs, result, sys._getframe().f_back)  # noqa: SLF001 - as python documents it
        return result

    def enter_stack(self) -> None:
        """Push the mode onto this thread's stack of modes; nothing if any mode is on it."""
        if private_api.modes_pushed() == 0:
            private_api.push_mode(self)
            self._pushed.mode = self

    def leave_stack(self) -> None:
        """Pop the mode if this thread pushed it and it is on top; below the script's modes it stays, without effect."""
        if getattr(self._pushed, "mode", None) is None:
            return
        if private_api.top_mode() is self:
            private_api.pop_mode()
            self._pushed.mode = None
