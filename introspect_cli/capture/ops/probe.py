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
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from introspect_cli.capture import private_api
from introspect_cli.capture.ops.arguments import OperatorArguments
from introspect_cli.capture.ops.calls import Calls, OpCall, Places
from introspect_cli.capture.ops.schema import Operators
from introspect_cli.capture.ops.values import FLOATS, Writers, is_parameter, outputs, row_of, tensors
from introspect_cli.capture.probes.base import drop
from introspect_cli.records import Given, Kind, Phase, Site, SiteInfo
from introspect_cli.tensors.kernels import KERNELS
from introspect_cli.tensors.views import STORAGE_BEGIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.ops.calls import Scope
    from introspect_cli.capture.ops.schema import OpFacts
    from introspect_cli.capture.probes.modules import ModuleProbe
    from introspect_cli.capture.probes.optimizers import OptimizerProbe


OVERLOAD: Any = torch._ops.OpOverload  # noqa: SLF001  # no public one


class OpMode(TorchDispatchMode):
    """Tells the probe of every operator, and changes nothing; `operators.cpp` takes the place of its method."""

    supports_higher_order_operators = True

    def __init__(self, probe: OpProbe) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.probe = probe

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that would be put around every call costs as much as the call

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether a compiler need not mind this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; then look at what it gave."""
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException as error:
            # Frames of the dispatcher are not there when nobody watches; ours goes where frames of ours go.
            raise error.with_traceback(None)  # noqa: B904 - the same error, not a new one
        probe = self.probe
        if probe.live:
            probe.record_results(func, args, kwargs, result, sys._getframe().f_back)  # noqa: SLF001 - as python documents it
        return result


class OpProbe:
    """Watches operators."""

    name = "operators"

    def __init__(
        self,
        context: Context,
        modules: ModuleProbe,
        optimizers: OptimizerProbe,
        *,
        globs: tuple[str, ...] = (),
        views: bool = False,
        all_dtypes: bool = False,
        into_compiled: bool = False,
    ) -> None:
        """Watch nothing yet.

        Args:
            context: the recorder and the step clock.
            modules: knows the module that is running.
            optimizers: knows whether an optimizer step is.
            globs: globs over operator names; all where empty.
            views: whether results that share their input's memory are recorded too.
            into_compiled: whether compiled regions run as python, so that what they run is recorded too.
            all_dtypes: whether results that are no floating point numbers are recorded too.
        """
        self.live = False
        self._context = context
        self._recorder = context.recorder
        self._all_dtypes = all_dtypes
        self.facts = Operators(globs, views=views)
        self._places = Places()
        self._calls = Calls(context, modules, optimizers, self._places, into_compiled=into_compiled)
        self._writers = Writers(context)
        self.arguments = OperatorArguments()
        self._mode = OpMode(self)
        self._pushed = threading.local()
        self._handles: list[Any] = []
        self._guarded = context.guard.around(self.name, "operators are", self._stop)
        if KERNELS is not None and context.recorder.intake is not None and STORAGE_BEGIN is not None:
            self._mode.__torch_dispatch__ = self._compiled(KERNELS, modules)  # type: ignore[method-assign]

    def _compiled(self, kernels: Any, modules: ModuleProbe) -> Callable[..., Any]:
        """What is called in place of the mode's method: torch asks that it be bound to the mode."""
        recorder, calls = self._recorder, self._calls
        made: Any = kernels.operators(
            self,
            self.record_results,
            self.by_hand,
            self.of_parameter,
            OVERLOAD,
            [],
            recorder,
            recorder.step_rows,
            recorder.intake,
            modules.stack,
            calls,
            self._places.ours,
            self.facts.known,
            calls.scopes,
            calls.by_node,
            self._writers.sites,
            FLOATS,
            private_api.compiler,
            private_api.running_node,
            private_api.next_node,
            private_api.tracing_state,
            STORAGE_BEGIN,
            torch.Tensor,
            torch.nn.Parameter,
            Phase.BACKWARD,
            Phase.OPTIMIZER,
        )
        return MethodType(made.dispatch, self._mode)

    def install(self) -> None:
        """Listen for the steps that are captured."""
        self._guarded.on = True
        self._context.clock.on_begin.append(self._begin)
        self._context.on_root.append(self._root)
        self._context.clock.on_tick.append(self._ticked)
        self._handles = [
            register_optimizer_step_pre_hook(self._stepping),
            register_optimizer_step_post_hook(self._stepped),
        ]

    def remove(self) -> None:
        """Stop, and take the mode off the stack."""
        self._stop()
        for handle in self._handles:
            handle.remove()
        drop(self._context.clock.on_begin, self._begin)
        drop(self._context.on_root, self._root)
        drop(self._context.clock.on_tick, self._ticked)
        self._pop()

    def _stop(self) -> None:
        self._guarded.on = self.live = False

    def _begin(self) -> None:
        """A step that is captured has begun: see its operators, unless the script's own modes are under way."""
        if not self._guarded.on:
            return
        with self._guarded:
            self._calls.between = Phase.DATA
            self.live = True
            self._push()

    def _push(self) -> None:
        if private_api.modes_pushed() == 0:
            private_api.push_mode(self._mode)
            self._pushed.mode = self._mode

    def _stepping(self, _optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer's own operators are not recorded; without a closure there are no others inside its step."""
        with self._guarded:
            if self._guarded.on and len(args) < 2 and kwargs.get("closure") is None:
                self._pop()

    def _stepped(self, _optimizer: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        with self._guarded:
            if self._guarded.on and self.live:
                self._push()

    def _root(self, _module: object) -> None:
        self._calls.between = Phase.LOSS

    def _ticked(self) -> None:
        self._calls.clear()
        self._writers.clear()
        self.live = False  # until the next step begins
        if not self._recorder.wanted:
            self._pop()

    def _pop(self) -> None:
        """Take the mode off this thread's stack if it is on top; under the script's modes it stays, doing nothing."""
        if getattr(self._pushed, "mode", None) is None:
            return
        if private_api.top_mode() is self._mode:
            private_api.pop_mode()
            self._pushed.mode = None

    def record_results(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        result: Any,
        frame: FrameType | None,
    ) -> None:
        """An operator has run; record what it gave.

        Args:
            func: the operator.
            args: its positional arguments.
            kwargs: its keyword arguments.
            result: what it returned.
            frame: the innermost python frame that called it; None in a thread of autograd's own.
        """
        with self._guarded:
            if not self._recorder.wanted or (frame is not None and self._places.is_ours(frame)):
                return
            node = private_api.running_node()
            call = self._calls.of(self.facts(func), node, frame)
            if call is None:
                return
            if call.facts.recorded:
                self._write_results(func, call, node, args, kwargs, result)
            elif call.facts.unwritten:
                for _, value in tensors("", result):
                    self._writers.unknown(value)
            elif args and is_parameter(args[0]):
                self._writers.of(args[0])  # a view of a parameter is known by its memory from here on

    def by_hand(self, site: int, value: torch.Tensor, given: Given) -> None:
        """Record a result that the compiled intake leaves to us."""
        with self._guarded:
            self._recorder.tensor(site, value, given)

    def of_parameter(self, value: torch.Tensor) -> int:
        """The site of a parameter that an operator is given; -1 where it has none."""
        with self._guarded:
            return self._writers.of(value)
        return -1

    def _write_results(
        self,
        func: Callable[..., Any],
        call: OpCall,
        node: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        result: Any,
    ) -> None:
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
            if not self.wants(value):
                writers.unknown(value)
                continue
            site = call.sites.get(path)
            if site is None:
                site = self._new_site(call, path)
                self.arguments.note(func, _place(call, path), facts.name, args, kwargs)
            if facts.each:
                given = self._given(call, node, row_of(args, path), kwargs)
            elif given is None:
                given = self._given(call, node, args, kwargs)
            self._recorder.tensor(site, value, given)
            writers.wrote(site, value)

    def wants(self, value: torch.Tensor) -> bool:
        """Whether a result of its type is recorded."""
        return self._all_dtypes or value.dtype in FLOATS

    def scope(self, phase: Phase, fqn: str, module_class: str, *, watched: bool) -> Scope:
        """A module in a phase, in a region that runs as one."""
        return self._calls.scope(fqn, phase, module_class, watched=watched)

    def inside(self, scope: Scope | None, facts: OpFacts, before: int, source: str) -> OpCall | None:
        """The call of an operator in a region that runs as one; None if it is not recorded now.

        Args:
            scope: where it runs.
            facts: the operator.
            before: how many of its sort the region runs there before it.
            source: the user's line.
        """
        if scope is None or not scope.watched or not self.live:
            return None
        return self._calls.ahead(scope, facts, before, source)

    def count(self, scope: Scope | None, facts: OpFacts, times: int) -> None:
        """A region that runs as one has run, and an operator so many times in it."""
        if scope is not None:
            self._calls.count(scope, facts, times)

    def record(self, call: OpCall, path: str, value: torch.Tensor | None, given_by: list[int], reason: str = "") -> int:
        """Record what an operator inside a region gave, or why it was not seen; the number of its site."""
        site = call.sites.get(path)
        if site is None:
            site = self._new_site(call, path)
        if value is None:
            self._recorder.missing(site, reason)
        else:
            self._recorder.tensor(site, value, Given(tuple(given_by)))
            self._writers.wrote(site, value)
        return site

    def _new_site(self, call: OpCall, path: str) -> int:
        facts = call.facts
        site = _place(call, path)
        number = self._recorder.site(site, SiteInfo(call.module_class, facts.name, call.source))
        call.sites[path] = number
        return number

    def _given(self, call: OpCall, node: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Given:
        """What an operator was given, and the forward operator it belongs to; most often what it was a step ago."""
        sites = self._writers.of_all(args if not kwargs else (*args, *kwargs.values()))
        origin = None if node is None else self._calls.origin(node) or node.name()
        if call.known != (sites, origin):
            call.known = (sites, origin)
            call.given = Given(tuple(sites), *_belongs(origin))
        return call.given


def _place(call: OpCall, path: str) -> Site:
    return Site(call.phase, Kind.OP_OUTPUT, call.fqn, call.number, call.facts.name + path)


def _belongs(origin: OpCall | str | None) -> tuple[int, str]:
    """The forward operator of a backward one: the number of its first site, or its name if it has none."""
    if origin is None or isinstance(origin, str):
        return -1, origin or ""
    site = next(iter(origin.sites.values()), -1)
    return site, "" if site >= 0 else origin.facts.name
