"""Every operator's results, under the module that ran it, forward and backward.

The problem: a bug is often inside a module, where no hook reaches, and the backward pass runs operators that no line
of the script names. The way: a dispatch mode sees each operator after autograd has done its part and before its
kernel runs, in the thread that runs it (autograd hands the mode on to its own threads). It calls the operator with
what it was given and returns what it got. A backward operator is named by the forward one whose autograd node is
running: nodes carry the sequence number that was current when the forward operator was seen.

The mode lies at the bottom of the stack of modes for as long as steps are captured, so that modes of the script's own
are pushed and popped above it as ever.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from introspect_cli.capture import private_api
from introspect_cli.capture.ops_calls import FLOATS, OpCall, Scope, memory_of, outputs, row_of, tensors
from introspect_cli.capture.ops_places import Places, in_compiled_call
from introspect_cli.capture.ops_schema import Operators, OpFacts
from introspect_cli.records import Kind, Phase, Site, SiteInfo

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.modules import ModuleProbe
    from introspect_cli.capture.optimizers import OptimizerProbe

SCRIPT = "script"
"""FQN of operators that run outside every module."""

_NO_OPERATOR = OpFacts("", recorded=False, unwritten=False, each=False, written=())
"""Stands for the forward operator of nodes that have none: those that accumulate into parameters."""

_MOST = 64
"""Inputs that are named of one operator, at most."""

_LAST = 2**64 - 1
"""Sequence number of the nodes that accumulate into parameters."""


class OpMode(TorchDispatchMode):
    """Tells the probe of every operator, and changes nothing."""

    supports_higher_order_operators = True

    def __init__(self, probe: OpProbe) -> None:
        """Take whom to tell."""
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
            probe.ran(func, args, kwargs, result, sys._getframe().f_back)  # noqa: SLF001 - as python documents it
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
        """Take what all probes share, and which operators and results are wanted.

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
        self._modules = modules
        self._optimizers = optimizers
        self._all_dtypes = all_dtypes
        self._into_compiled = into_compiled
        self._facts = Operators(globs, views=views)
        self._places = Places()
        self._scopes: dict[tuple[str, Phase], Scope] = {}
        self._by_node: dict[int, OpCall | None] = {}
        self._writers: dict[int, int] = {}
        self._between = Phase.DATA
        self._mode = OpMode(self)
        self._pushed = threading.local()
        self._handles: list[Any] = []
        self._on = False

    def install(self) -> None:
        """Listen for the steps that are captured."""
        self._on = True
        self._context.on_begin.append(self._begin)
        self._context.on_root.append(self._root)
        self._context.on_tick.append(self._ticked)
        self._handles = [
            register_optimizer_step_pre_hook(self._stepping),
            register_optimizer_step_post_hook(self._stepped),
        ]

    def remove(self) -> None:
        """Stop, and take the mode off the stack."""
        self._on = self.live = False
        for handle in self._handles:
            handle.remove()
        if self._begin in self._context.on_begin:
            self._context.on_begin.remove(self._begin)
            self._context.on_root.remove(self._root)
            self._context.on_tick.remove(self._ticked)
        self._pop()

    def _failed(self, error: Exception) -> None:
        self._on = self.live = False
        self._context.guard.failure(self.name, "operators are", error)

    def _begin(self) -> None:
        """A step that is captured has begun: see its operators, unless the script's own modes are under way."""
        if not self._on:
            return
        try:
            self._between = Phase.DATA
            self.live = True
            self._push()
        except Exception as error:
            self._failed(error)

    def _push(self) -> None:
        if private_api.modes_pushed() == 0:
            private_api.push_mode(self._mode)
            self._pushed.mode = self._mode

    def _stepping(self, _optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer's own operators are not recorded; without a closure there are no others inside its step."""
        try:
            if self._on and len(args) < 2 and kwargs.get("closure") is None:
                self._pop()
        except Exception as error:
            self._failed(error)

    def _stepped(self, _optimizer: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        try:
            if self._on and self.live:
                self._push()
        except Exception as error:
            self._failed(error)

    def _root(self, _module: object) -> None:
        self._between = Phase.LOSS

    def _ticked(self) -> None:
        self._by_node.clear()
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

    def ran(
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
        try:
            if not self._recorder.wanted or (frame is not None and self._places.is_ours(frame)):
                return
            facts = self._facts(func)
            node = private_api.running_node()
            call = self._called(facts, node, frame)
            if call is not None:
                self._results(call, node, args, kwargs, result)
        except Exception as error:
            self._failed(error)

    def _called(self, facts: OpFacts, node: Any, frame: FrameType | None) -> OpCall | None:
        """Which call this is; None for one that is not looked at."""
        stack = self._modules.stack
        origin: OpCall | None = None
        if stack.calls:
            state = stack.calls[-1]
            if state is None or not state.watched or private_api.tracing_state() is not None:
                self._hidden()
                return None
            scope = self._scope(state.fqn, stack.phase, state.module_class, watched=True)
        elif node is not None:
            self._between = Phase.OPTIMIZER
            origin = self._forward_of(node)
            if origin is None:
                return None
            scope = self._scope(origin.fqn, Phase.BACKWARD, origin.module_class, watched=True)
        else:
            if self._optimizers.stepping:
                return None
            scope = self._scope(SCRIPT, self._between, "", watched=None)
            if not scope.watched or (self._between is Phase.DATA and not torch.is_grad_enabled()):
                self._hidden()
                return None
        if not self._into_compiled and in_compiled_call(frame):
            self._hidden()
            return None
        step = self._recorder.step
        if scope.step != step:
            scope.step = step
            scope.counts.clear()
        number = scope.counts.get(facts, 0)
        scope.counts[facts] = number + 1
        call = scope.known.get((facts, number))
        if call is None:
            source = self._places.line(frame) or (origin.source if origin is not None else "")
            call = OpCall(scope.phase, scope.fqn, scope.module_class, facts, number, source)
            scope.known[facts, number] = call
        # The first operator seen since a node was made is the one it was made for; inside an autograd function of the
        # script's, the first that its forward runs.
        self._by_node.setdefault(private_api.next_node() - 1, call)
        return call

    def _hidden(self) -> None:
        """An operator that is not looked at; nor are those that its autograd node runs."""
        self._by_node.setdefault(private_api.next_node() - 1, None)

    def _forward_of(self, node: Any) -> OpCall | None:
        """The forward operator whose gradient a node computes; None where that operator was not looked at."""
        number = node._sequence_nr()  # noqa: SLF001 - documented in torch's own notes on autograd
        if number == _LAST:
            return self._accumulating(node)
        try:
            return self._by_node[number]
        except KeyError:
            return None if "Compiled" in node.name() else OpCall(Phase.FORWARD, SCRIPT, "", _NO_OPERATOR)

    def _accumulating(self, node: Any) -> OpCall | None:
        name = self._context.names.parameter(node.variable) if hasattr(node, "variable") else None
        if name is None or not name.watched:
            return None
        return OpCall(Phase.FORWARD, name.fqn.rpartition(".")[0], name.module_class, _NO_OPERATOR)

    def _scope(self, fqn: str, phase: Phase, module_class: str, *, watched: bool | None) -> Scope:
        scope = self._scopes.get((fqn, phase))
        if scope is None:
            wanted = self._context.names.wanted(fqn) if watched is None else watched
            scope = self._scopes[fqn, phase] = Scope(phase, fqn, module_class, watched=wanted)
        return scope

    def _results(
        self, call: OpCall, node: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any
    ) -> None:
        facts = call.facts
        if not facts.recorded:
            if facts.unwritten:
                for _, value in tensors("", result):
                    self._writers.pop(memory_of(value), None)
            elif args and isinstance(args[0], torch.nn.Parameter):
                self._writer(args[0])  # a view of a parameter is known by its memory from here on
            return
        text = ""
        for path, value in outputs(facts, args, kwargs, result):
            if type(value) is not torch.Tensor and isinstance(value, private_api.FAKE_TENSOR):
                return
            if value.dtype not in FLOATS and not self._all_dtypes:
                self._writers.pop(memory_of(value), None)
                continue
            site = call.sites.get(facts.name + path)
            if site is None:
                site = self._new_site(call, path)
            if facts.each:
                text = self._origins(row_of(args, path), kwargs) + self._belongs(node)
            elif not text:
                text = self._origins(args, kwargs) + self._belongs(node)
            self._recorder.tensor(site, value, text)
            self._writers[memory_of(value)] = site

    def _new_site(self, call: OpCall, path: str) -> int:
        facts = call.facts
        site = Site(call.phase, Kind.OP_OUTPUT, call.fqn, call.number, facts.name + path)
        number = self._recorder.site(site, SiteInfo(call.module_class, facts.name, call.source))
        call.sites[facts.name + path] = number
        return number

    def _origins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> str:
        """The sites that wrote what the operator was given, by number; `-` for what no recorded operator wrote."""
        found: dict[str, None] = {}
        for _, value in tensors("", args if not kwargs else (*args, *kwargs.values())):
            if value.dtype in FLOATS:
                site = self._writer(value)
                found["-" if site is None else str(site)] = None
                if len(found) == _MOST:
                    break
        return "<" + ",".join(found) if found else ""

    def _writer(self, value: torch.Tensor) -> int | None:
        """The site that wrote a tensor's memory last: an operator's, or the parameter's own."""
        memory = memory_of(value)
        site = self._writers.get(memory)
        if site is None and isinstance(value, torch.nn.Parameter):
            name = self._context.names.parameter(value)
            if name is not None:
                site = self._writers[memory] = self._context.state_site(name, Phase.START, Kind.PARAM)
        return site

    def _belongs(self, node: Any) -> str:
        """The forward operator of a backward one, by the number of its first site, or by name if it has none."""
        if node is None:
            return ""
        origin = self._by_node.get(node._sequence_nr())  # noqa: SLF001 - as above
        if origin is None:
            return f" ^{node.name()}"
        return f" ^{next(iter(origin.sites.values()), origin.facts.name)}"
