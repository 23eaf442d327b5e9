"""Every module's inputs and outputs, as they go in and come out.

`nn.Module.__call__` is replaced, not hooked: global module hooks leave out keyword arguments, make torch.compile warn
on stderr, and send every call through a slower path whose extra frames show in the script's own tracebacks. The
replacement calls the original with what it was given and returns what it got. What is nothing but a call goes through
`modules.cpp`, without a frame of ours.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from introspect_cli.capture import private_api
from introspect_cli.capture.inside import modules_in, parameters_in, wrapped
from introspect_cli.capture.probes.base import Patches, uncounted
from introspect_cli.capture.probes.module_values import ModuleValues, may_be_shares
from introspect_cli.capture.probes.opaque import (
    hides,
    how_hidden,
    is_plain_call,
    is_traced,
    is_unfinished,
    sequence_code,
)
from introspect_cli.capture.ranks import tags, torch_distributed
from introspect_cli.records import EVALUATED, Kind, Phase
from introspect_cli.tensors.kernels import KERNELS
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.named import ModuleState
    from introspect_cli.capture.probes.gradients import GradientProbe


class _Stack(threading.local):
    """The module calls under way in one thread. `None` stands for a call that is not recorded, nor what is in it."""

    def __init__(self) -> None:
        """Start outside every module."""
        self.calls: list[ModuleState | None] = []
        self.phase = Phase.FORWARD
        self.outer = Phase.FORWARD
        self.in_graph = False


class ModuleProbe:
    """Watches calls of modules."""

    name = "modules"

    def __init__(self, context: Context, gradients: GradientProbe) -> None:
        """Start outside every module; `gradients` watches the gradients of inputs and outputs."""
        self._context = context
        self._guarded = context.guard.around(self.name, "module inputs and outputs are")
        self._recorder = context.recorder
        self._names = context.names
        self._gradients = gradients
        self.values = ModuleValues(context, gradients)
        """What goes in and comes out."""
        self._stack = _Stack()
        self._patches = Patches()
        self._registrations: list[RemovableHandle] = []
        self.entry: Callable[..., Any] | None = None
        """What stands in for `nn.Module.__call__`."""

    @property
    def stack(self) -> _Stack:
        """The module calls under way in this thread."""
        return self._stack

    def install(self) -> None:
        """Replace `nn.Module.__call__`."""
        original = nn.Module.__call__
        guarded, called = self._guarded, self._calls_of(original)

        # Dynamo traces into this; the first line is constant there, so nothing of ours enters a graph.
        @functools.wraps(original)
        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - stands in for Module.__call__
            if torch.compiler.is_compiling() or not guarded.on:
                return original(self, *args, **kwargs)
            return called(self, args, kwargs)

        self.entry = __call__
        self._patches.replace(nn.Module, "__call__", __call__)
        self._registrations = [
            nn.modules.module.register_module_module_registration_hook(self._registered),
            nn.modules.module.register_module_parameter_registration_hook(self._holds),
        ]
        self._guarded.on = True

    def remove(self) -> None:
        """Put `nn.Module.__call__` back."""
        self._guarded.on = False
        for registration in self._registrations:
            registration.remove()
        self._patches.remove()

    def _calls_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in place of the original with a module, its positional arguments and the others."""
        intake, gradients = self._recorder.intake, self._gradients.compiled
        if KERNELS is None or intake is None or gradients is None:
            return functools.partial(self._called, original)
        made: Any = KERNELS.modules(
            self,
            self.values,
            self._called,
            self._left,
            self._learn,
            self._by_hand,
            original,
            self._guarded,
            self._stack,
            self._names.states,
            self._recorder,
            self._context.draws,
            Phase.FORWARD,
            torch.Tensor,
            private_api.graph_task,
            private_api.tracing_state,
            private_api.functions_watched,
            torch.is_grad_enabled,
            private_api.MODULE_WRAPPED_CALL,
            nn.Sequential,
            *sequence_code(),
            intake,
            gradients,
        )
        called: Callable[..., Any] = made.called
        return called

    @uncounted
    def _called(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        stack = self._stack
        calls = stack.calls
        in_backward = private_api.graph_task() != -1
        if not calls and not in_backward:
            if is_unfinished(module):
                return original(module, *args, **kwargs)
            stage = torch_distributed.in_stage()
            if stage is not None and stage.what == "inference":
                self._context.pipelines.meets(stage.stage, module)
                return self._passed(original, module, args, kwargs)
            with self._guarded:
                self._outermost(module, args, kwargs)
                if stage is not None and stage.what == "forward" and stage.chunk >= 0:
                    self._of_microbatch(stage, module)
        if calls and (calls[-1] is None or not self._recorder.wanted):
            return original(module, *args, **kwargs)
        if not self._recorder.wanted:
            return self._passed(original, module, args, kwargs)
        if not in_backward:
            result = self._recorded(original, module, args, kwargs)
            if not calls and self._context.awaits_training:
                with self._guarded, unobserved():
                    self._context.forward_left(result)
            return result
        phase, stack.phase = stack.phase, Phase.RECOMPUTE  # the forward around a backward pass goes on after it
        try:
            return self._recorded(original, module, args, kwargs)
        finally:
            stack.phase = phase

    @uncounted
    def _passed(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an outermost call of a step that is not recorded; name it, so that a schedule changes no names."""
        calls = self._stack.calls
        evaluates = self._stack.outer is Phase.EVAL and not self._context.is_trained(module)
        if self._names.find(module) is None and private_api.tracing_state() is None and not evaluates:
            with self._guarded:
                self._names.state(module, None)
        depth = len(calls)
        try:
            calls.append(None)
            return original(module, *args, **kwargs)
        finally:
            del calls[depth:]

    @uncounted
    def _recorded(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        calls = self._stack.calls
        state: ModuleState | None = None
        call = -1
        with self._guarded:
            state = self._plain_state(calls, module, args, kwargs)
            if state is not None:
                call = state.next_call(self._recorder.step, Phase.FORWARD)
                if self._context.draws.moved():
                    self._drew(state, call, before=True)
                if self.values.inputs and state.watched:
                    self.values.plain_inputs(state, call, args)
            else:
                # The script may watch torch's functions itself; it must see its own calls only.
                with private_api.no_torch_function():
                    state, call = self._enter(module, args, kwargs)
        depth = len(calls)
        try:
            calls.append(state)  # in here: a signal handler may raise as soon as it is done
            result = original(module, *args, **kwargs)
        finally:
            del calls[depth:]
        if state is not None and call >= 0 and self._guarded.on:
            self._left(module, state, call, result)
        return result

    def _left(self, module: nn.Module, state: ModuleState, call: int, result: Any) -> None:
        """Record what has come out of a module."""
        with self._guarded:
            if self._context.parts.is_grouped and tags.from_call(result) is not None:
                state.tagged, state.plain = True, None
            if not self._plain_output(module, state, call, result):
                with private_api.no_torch_function():
                    self._leave(module, state, call, result)

    def _learn(self, module: nn.Module, state: ModuleState, args: tuple[torch.Tensor, ...]) -> bool:
        """Look at the first call of a module, or its first so often in a step, for the extension, which takes it then.

        It is called by another in an ordinary forward pass and given tensors; True if a call of it is nothing but that.
        """
        with self._guarded:
            if state.plain is not type(module):
                if private_api.DYNAMO_GRAPH_MARK in module.__dict__ or not is_plain_call(module):
                    return False
                state.plain = None if may_be_shares(state, module, args) else type(module)
            if state.plain is not None and self.values.inputs and state.watched:
                self.values.input_sites(state, state.counted(self._recorder.step, Phase.FORWARD), len(args))
            return state.plain is not None
        return False

    def _by_hand(self, value: torch.Tensor, site: int, gradient: int) -> int | None:
        """Record a tensor that the extension leaves to us: too large for it, or met before, or of a new shape.

        Returns:
            the slot of its summary; None where only its gradient is to be watched, or something failed.
        """
        with self._guarded:
            return self.values.plain_tensor(value, site, gradient)
        return None

    def _plain_state(
        self, calls: list[ModuleState | None], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ModuleState | None:
        """The state of a module that is known, is called by another in an ordinary forward pass and given tensors.

        Most calls are such, and are spared the questions of `_enter`. None for any other.
        """
        state = self._names.find(module)
        if (
            state is None
            or state.plain is not type(module)
            or state.compiled
            or kwargs
            or not calls
            or self._stack.phase is not Phase.FORWARD
            or self.values.on_value is not None
            or private_api.functions_watched()
            or private_api.tracing_state() is not None
        ):
            return None
        for value in args:
            if type(value) is not torch.Tensor:
                return None
        return state

    def _plain_output(self, module: nn.Module, state: ModuleState, call: int, result: Any) -> bool:
        """Record the tensor that comes out of a module; False, and nothing is done, if it is anything else."""
        if (
            state.plain is not type(module)
            or type(result) is not torch.Tensor
            or self._stack.phase is not Phase.FORWARD
            or self.values.on_value is not None
            or module.__dict__.get(private_api.MODULE_WRAPPED_CALL) is not None
            or private_api.functions_watched()
        ):
            return False
        if self._context.draws.moved():
            self._drew(state, call, before=False)
        if self.values.outputs and state.watched:
            self.values.plain_output(state, call, result)
        return True

    def _registered(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        with self._guarded:
            self._names.registered(parent, name, child)

    def _holds(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        with self._guarded:
            self._names.holds(module, name, parameter)

    def _outermost(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the step begin, or end, where that hangs on forward passes."""
        if (
            isinstance(module, ParametrizationList)
            or private_api.tracing_state() is not None
            or is_traced(args, kwargs)
        ):
            return  # what we read now would become part of the traced graph
        with unobserved():
            self._stack.outer = self._context.outermost_forward(module)

    def _of_microbatch(self, found: torch_distributed.InStage, module: nn.Module) -> None:
        """Have the calls in a stage of a pipeline numbered by the schedule's own microbatches."""
        pipelines, trains = self._context.pipelines, self._stack.outer is not Phase.EVAL
        if trains and self._recorder.wanted:
            pipelines.forward(found.stage, found.chunk, module, self._recorder.step)
        else:
            pipelines.meets(found.stage, module)

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ModuleState | None, int]:
        """Decide whether a call is recorded, and record its inputs.

        Returns:
            the module's state, None where the call and all in it stay unrecorded; and the index of the call, -1
            where only what is inside is recorded (wrappers).
        """
        if private_api.tracing_state() is not None or is_traced(args, kwargs):
            return None, -1
        if is_unfinished(module):
            return None, -1
        stack = self._stack
        caller = stack.calls[-1] if stack.calls else None
        if caller is None and isinstance(module, ParametrizationList):
            return None, -1  # somebody looks at a parametrised weight; that is no forward pass
        stack.in_graph = isinstance(module, private_api.COMPILERS_GRAPH) and self._names.find(module) is None
        if stack.in_graph:
            return None, -1
        if caller is None:
            phase = self._phase()
            if phase is Phase.EVAL and not self._context.wants_eval:
                if self._context.is_trained(module):
                    self._names.state(module, None)
                return None, -1
            # A copy that is only evaluated takes no name from what is trained.
            is_copy = (
                phase is Phase.EVAL
                and not self._context.is_trained(module)
                and next(parameters_in(module), None) is not None
            )
            state = self._names.state(module, None, EVALUATED if is_copy else "")
            stack.phase = phase
            if phase is not Phase.RECOMPUTE:
                self._context.root_called(module)
        else:
            if private_api.DYNAMO_GRAPH_MARK in module.__dict__:
                return None, -1
            state = self._names.find(module) or self._names.state(module, caller)
        is_compiled = type(module).__name__ == "OptimizedModule"
        if wrapped(module) is not None and not is_compiled:
            return state, -1
        if is_compiled and state.inner is not None:
            # The region is recorded at its boundary, under the name of what was compiled.
            state = state.inner
            state.compiled = True
        elif caller is state and state.compiled:
            return state, -1  # the compiler gave up and runs the module that its wrapper stands for
        if type(module) is not state.plain and is_plain_call(module) and not is_compiled and not state.compiled:
            state.plain = None if may_be_shares(state, module, args) else type(module)
        call = state.next_call(self._recorder.step, stack.phase)
        if self._context.draws.moved():
            self._drew(state, call, before=True)
        if self.values.inputs and state.watched:
            self.values.arguments(state, stack.phase, call, args, kwargs)
        return state, call

    def _phase(self) -> Phase:
        return Phase.RECOMPUTE if private_api.graph_task() != -1 else self._stack.outer

    def _drew(self, state: ModuleState, call: int, *, before: bool) -> None:
        """Say from which random state the module drew, or what ran before it.

        A recomputed forward draws from a state that is put back afterwards.
        """
        if state.watched and self._stack.phase is not Phase.RECOMPUTE:
            self._context.draws.note(self._stack.phase, state.fqn, call, before=before)

    def _leave(self, module: nn.Module, state: ModuleState, call: int, result: Any) -> None:
        if self._context.draws.moved():
            self._drew(state, call, before=False)
        if self.values.outputs and state.watched:
            self.values.value(state, self._stack.phase, Kind.OUTPUT, call, "", result)
        if hides(module) or (isinstance(module, nn.TransformerEncoderLayer) and self._was_fused(module)):
            self._hidden(module, state, call)

    def _was_fused(self, layer: nn.TransformerEncoderLayer) -> bool:
        """Whether torch has run a layer as one operation, as it does in evaluation; its parts are not called then."""
        attention = self._names.find(layer.self_attn)
        return attention is not None and not attention.called(self._recorder.step)

    def _hidden(self, module: nn.Module, state: ModuleState, call: int) -> None:
        """Say of every module inside a compiled or scripted one that it was not seen."""
        if call or Kind.OUTPUT not in self.values.kinds:
            return
        for child in modules_in(module):
            inner = self._names.find(child)
            if inner is None or inner is state or inner.called(self._recorder.step) or not inner.watched:
                continue
            if wrapped(child) is None:
                site = self._context.site(inner, self._stack.phase, Kind.OUTPUT)
                self._recorder.missing(site, f"inside {how_hidden(module)} {state.fqn}")
