"""Every operator's results, under the module that ran it, forward and backward.

A bug is often inside a module, where no hook reaches, and the backward pass runs operators that no line of the script
names. A dispatch mode sees each operator after autograd has done its part and before its kernel runs, in the thread
that runs it (autograd hands the mode on to its own threads). It calls the operator with what it was given and returns
what it got. A backward operator is named by the forward one whose autograd node is running: nodes carry the sequence
number that was current when the forward operator was seen.

The mode lies at the bottom of the stack of modes for as long as steps are captured, so that modes of the script's own
are pushed and popped above it as ever.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from introspect_cli.capture import private_api
from introspect_cli.capture.frames import Places
from introspect_cli.capture.ops.calls import Calls, OpCall
from introspect_cli.capture.ops.schema import OperatorArguments, Operators
from introspect_cli.capture.ops.values import FLOATS, Writers, arguments_of_element, is_parameter, outputs, tensors
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.records import Given, Kind, Phase, Site, SiteInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

    from introspect_cli.capture.context import Context


class OpMode(TorchDispatchMode):
    """Dispatch mode that reports every operator to the probe."""

    supports_higher_order_operators = True

    def __init__(self, probe: OpProbe) -> None:
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


class OpProbe(GuardedProbe):
    """Records results of operators."""

    name = "operators"
    lost = "operators are"

    def __init__(
        self,
        context: Context,
        *,
        globs: tuple[str, ...] = (),
        views: bool = False,
        into_compiled: bool = False,
    ) -> None:
        """Watch nothing yet.

        Args:
            context: the recorder and the step clock.
            globs: globs over operator names; all where empty.
            views: whether results that share their input's memory are recorded too.
            into_compiled: whether compiled regions run as python, so that what they run is recorded too.
        """
        self.live = False
        super().__init__(context, then=self._switch_off)
        self.facts = Operators(globs, views=views)
        self._places = Places()
        self.calls = Calls(context, self._places, into_compiled=into_compiled)
        self._writers = Writers(context)
        self.arguments = OperatorArguments(context.facts)
        self._mode = OpMode(self)

    def remove(self) -> None:
        """Stop listening and recording, and pop the mode from this thread's stack."""
        super().remove()
        self.live = False
        self._mode.leave_stack()

    def _switch_off(self) -> None:
        """Record nothing from now on: called after a failure."""
        self.live = False

    def on_begin(self) -> None:
        """Push the mode and start to record, as a step begins; a mode of the script's on the stack keeps it off."""
        self.calls.between = Phase.DATA
        self.live = True
        self._mode.enter_stack()

    def _leave_for_optimizer(self, _optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pop the mode before an optimizer step without a closure, whose operators are not recorded."""
        if len(args) < 2 and kwargs.get("closure") is None:
            self._mode.leave_stack()

    def _return_after_optimizer(self, _optimizer: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Push the mode again after an optimizer step, while the step of the capture goes on."""
        if self.live:
            self._mode.enter_stack()

    def on_root(self, _module: object) -> None:
        """Record operators outside of modules in the loss phase from now on, since a root has been called."""
        self.calls.between = Phase.LOSS

    def on_tick(self) -> None:
        """Stop recording until the next step begins, and forget the step's nodes and writers.

        Pops the mode too if the recorder does not want what comes next.
        """
        self.calls.clear()
        self._writers.clear()
        self.live = False  # until the next step begins
        if not self._recorder.wanted:
            self._mode.leave_stack()

    def record_results(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        result: Any,
        frame: FrameType | None,
    ) -> None:
        """Record the results of an operator that has run, where `Calls.find_call` finds it; none of introspect's own.

        Args:
            func: the operator.
            args: its positional arguments.
            kwargs: its keyword arguments.
            result: what it returned.
            frame: the innermost python frame that called it; None in a thread of autograd's own.
        """
        with self._guarded:
            if not self._recorder.wanted or (frame is not None and self._places.is_introspects(frame)):
                return
            node = private_api.running_node()
            call = self.calls.find_call(self.facts(func), node, frame)
            if call is None:
                return
            if call.facts.recorded:
                self._write_results(func, call, node, args, kwargs, result)
            elif call.facts.unwritten:
                for _, value in tensors("", result):
                    self._writers.forget(value)
            elif args and is_parameter(args[0]):
                self._writers.writer_of(args[0])  # a view of a parameter is known by its memory from here on

    def _write_results(
        self,
        func: Callable[..., Any],
        call: OpCall,
        node: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        result: Any,
    ) -> None:
        """Emit a record for each result of a recorded dtype, with the sites that wrote the inputs; note its memory.

        A fake tensor ends it: a compiler is tracing then.

        Args:
            func: the operator.
            call: its call.
            node: the autograd node that is running; None outside a backward pass.
            args: its positional arguments.
            kwargs: its keyword arguments.
            result: what it returned.
        """
        facts, writers = call.facts, self._writers
        found: Iterable[tuple[str, torch.Tensor]]
        found = (
            (("", result),)
            if type(result) is torch.Tensor and not facts.written
            else outputs(facts, args, kwargs, result)
        )
        given: Given | None = None
        for path, value in found:
            if type(value) is not torch.Tensor and isinstance(value, private_api.FAKE_TENSOR):
                return
            if value.dtype not in FLOATS:
                writers.forget(value)
                continue
            site = call.sites.get(path)
            if site is None:
                site = self._new_site(call, path)
                self.arguments.note(func, _site(call, path), facts.name, args, kwargs)
            if facts.each:
                given = self._given_of(call, node, arguments_of_element(args, path), kwargs)
            elif given is None:
                given = self._given_of(call, node, args, kwargs)
            self._recorder.emit(site, value, given)
            writers.set_writer(site, value)

    def _new_site(self, call: OpCall, path: str) -> int:
        """Register the site of the result at `path` of a call, keep it in the call, and return its number."""
        facts = call.facts
        site = _site(call, path)
        number = self._recorder.site(site, SiteInfo(call.module_class, facts.name, call.source))
        call.sites[path] = number
        return number

    def _given_of(self, call: OpCall, node: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Given:
        """Sites that wrote the inputs, and the forward operator of a backward one; the last object while all is equal.

        Args:
            call: the operator's call.
            node: the autograd node that is running; None outside a backward pass.
            args: the inputs.
            kwargs: the inputs by name.
        """
        sites = self._writers.writers_of(args if not kwargs else (*args, *kwargs.values()))
        origin = None if node is None else self.calls.known_forward_call(node) or node.name()
        if call.known != (sites, origin):
            call.known = (sites, origin)
            call.given = Given(tuple(sites), *_forward_operator(origin))
        return call.given


def _site(call: OpCall, path: str) -> Site:
    return Site(call.phase, Kind.OP_OUTPUT, call.fqn, call.number, call.facts.name + path)


def _forward_operator(origin: OpCall | str | None) -> tuple[int, str]:
    """What `Given` says of a forward operator: the number of its first site and "", else -1 and its name.

    Args:
        origin: the forward call, or the name of an autograd node whose call is not known; None outside a backward pass.
    """
    if origin is None or isinstance(origin, str):
        return -1, origin or ""
    site = next(iter(origin.sites.values()), -1)
    return site, "" if site >= 0 else origin.facts.name
