"""Every module's inputs and outputs, as they go in and come out.

`nn.Module.__call__` is replaced, not hooked: global module hooks leave out keyword arguments, make torch.compile warn
on stderr, and send every call through a slower path whose extra frames show in the script's own tracebacks. The
replacement calls the original with what it was given and returns what it got.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from introspect_cli.capture import private_api, torch_distributed
from introspect_cli.capture.guard import uncounted
from introspect_cli.capture.naming.contents import is_traced, is_unfinished
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.probes.module_calls import ModuleCalls
from introspect_cli.capture.probes.own_calls import OwnCalls, Unseen
from introspect_cli.records import Phase
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.probes.gradients import GradientProbe


class ModuleProbe(GuardedProbe):
    """Watches calls of modules."""

    name = "modules"
    lost = "module inputs and outputs are"

    def __init__(self, context: Context, gradients: GradientProbe) -> None:
        """Watch nothing before `install`; `gradients` records the gradients of inputs and outputs."""
        super().__init__(context)
        self._calls = ModuleCalls(context, gradients, self._guarded)
        self.stack = self._calls.stack
        """The module calls under way in this thread."""
        self.values = self._calls.values
        """Recorder of inputs and outputs."""
        self._names = context.names
        self._own_calls = OwnCalls(self._guarded, self._patches, self._record_or_pass, self._record_by_name)
        self.unseen = Unseen(context, self._own_calls.see_forward)
        """Methods that ran unseen."""

    def phase(self) -> Phase | None:
        """Phase of the innermost running call of this thread.

        None outside of calls, or where that call is not recorded.
        """
        calls = self.stack.calls
        return self.stack.phase if calls and calls[-1] is not None else None

    def stand_in_for_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A replacement of `nn.Module.__call__` that records.

        It calls only the original while compiled, exported or off.
        """
        guarded, called = self._guarded, functools.partial(self._record_or_pass, original)
        is_traced, flags = torch.compiler.is_dynamo_compiling, private_api.compile_flags

        # Dynamo traces into this; the first question is constant there, so nothing of introspect enters a graph.
        @functools.wraps(original)
        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - stands in for Module.__call__
            if is_traced() or flags._is_compiling_flag or not guarded.on:  # noqa: SLF001 - see `private_api`
                return original(self, *args, **kwargs)
            return called(self, args, kwargs)

        return __call__

    @uncounted
    def _record_by_name(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call of `forward` by its name, and record it.

        Not where it belongs to the call of the module under way.
        """
        calls = self.stack.calls
        if calls and (calls[-1] is None or calls[-1] is self._names.find(module)):
            return original(module, *args, **kwargs)
        return self._record_or_pass(original, module, args, kwargs)

    @uncounted
    def _record_or_pass(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call of a module, and record it in a recorded step; tells the clock before an outermost call.

        Not recorded: shape inference of pipeline stages, modules that are not initialised, and calls inside unrecorded
        ones.
        """
        stack = self.stack
        calls = stack.calls
        in_backward = private_api.graph_task() != -1
        if not calls and not in_backward:
            if is_unfinished(module):
                return original(module, *args, **kwargs)
            stage = torch_distributed.in_stage()
            if stage is not None and stage.what == "inference":
                self._context.pipelines.note_stage(stage.stage, module)
                return self._run_unrecorded(original, module, args, kwargs)
            with self._guarded:
                self._tell_clock(module, args, kwargs)
                if stage is not None and stage.what == "forward" and stage.chunk >= 0:
                    self._number_by_microbatch(stage, module)
            if not self._guarded.on:  # that failed: what the call is for is not known
                return original(module, *args, **kwargs)
        if calls and (calls[-1] is None or not self._recorder.wanted):
            return original(module, *args, **kwargs)
        if not self._recorder.wanted:
            return self._run_unrecorded(original, module, args, kwargs)
        if not in_backward:
            result = self._calls.record_call(original, module, args, kwargs)
            if not calls:
                with self._guarded:
                    self.unseen.note_callers(module, stack.outer)
                with self._guarded, unobserved():
                    self._context.clock.mark_graph(result)
            return result
        phase, stack.phase = stack.phase, Phase.RECOMPUTE  # the forward around a backward pass goes on after it
        try:
            return self._calls.record_call(original, module, args, kwargs)
        finally:
            stack.phase = phase

    @uncounted
    def _run_unrecorded(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an outermost call without recording it or anything inside.

        Names its module, so that names are the same as ever.
        """
        calls = self.stack.calls
        evaluates = self.stack.outer is Phase.EVAL and not self._context.clock.trained.is_trained(module)
        if self._names.find(module) is None and private_api.tracing_state() is None and not evaluates:
            with self._guarded:
                self._names.state(module, None)
        depth = len(calls)
        try:
            calls.append(None)
            return original(module, *args, **kwargs)
        finally:
            del calls[depth:]

    def on_after_optimizer(self) -> None:
        """Note trained parameters of modules that no call was seen of; after 1, 2, 3, 5, 9, ... steps."""
        self.unseen.note_uncalled()

    def _tell_clock(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the clock of an outermost call, and keep its phase; nothing for a call that only traces shapes.

        The clock may end a step before the call, and begin one.
        """
        if (
            isinstance(module, ParametrizationList)
            or private_api.tracing_state() is not None
            or is_traced(args, kwargs)
        ):
            return  # what we read now would become part of the traced graph
        with unobserved():
            self.stack.outer = self._context.clock.outermost_forward(module)

    def _number_by_microbatch(self, found: torch_distributed.InStage, module: nn.Module) -> None:
        """Give the calls in a pipeline stage the numbers that its microbatch has, in recorded training.

        Else only note the stage.

        Args:
            found: what the stage is doing.
            module: of the stage.
        """
        pipelines, trains = self._context.pipelines, self.stack.outer is not Phase.EVAL
        if trains and self._recorder.wanted:
            pipelines.number_forward(found.stage, found.chunk, module, self._recorder.step)
        else:
            pipelines.note_stage(found.stage, module)
