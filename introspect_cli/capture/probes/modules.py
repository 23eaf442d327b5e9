"""Every module's inputs and outputs, as they go in and come out.

`nn.Module.__call__` is replaced, not hooked: global module hooks leave out keyword arguments, make torch.compile warn
on stderr, and send every call through a slower path whose extra frames show in the script's own tracebacks. The
replacement calls the original with what it was given and returns what it got.

A library may give its modules a `__call__` of its own, which runs `forward` itself and returns what it makes of that
(a Gaussian process returns a distribution). So the `__call__` and the `forward` of each such class are replaced for as
long as the capture lasts: the outermost of the two that runs is the call. One that is handed on to the next with the
same tensors is the same call.

A script may also call the `forward` of an ordinary module by its name. It is replaced where the script, or the file
that defines the class, names one; and of other classes as soon as one was found to have run so.

What is left is said: a method that is not `forward` runs the modules of a model one after the other, or a parameter
gets a gradient though neither its module nor one that holds it was called. What such a method makes of what the modules
return is on no record, so that nothing of it differs says nothing.
"""

from __future__ import annotations

import functools
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from introspect_cli.capture import private_api, torch_distributed
from introspect_cli.capture.environment.sources import file_of, has_forward_call
from introspect_cli.capture.frames import is_introspects, outward
from introspect_cli.capture.guard import uncounted
from introspect_cli.capture.naming import (
    ById,
    has_own_call,
    hides,
    is_plain_call,
    is_traced,
    is_unfinished,
    modules_in,
    parameters_in,
    parameters_of,
    wrapped,
)
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.probes.gradients import GradientProbe
from introspect_cli.capture.probes.module_values import WHOLE, ModuleValues, may_be_shares
from introspect_cli.capture.probes.state import StateProbe
from introspect_cli.records import EVALUATED, Kind, Phase
from introspect_cli.tensors.flatten import flatten
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.context import Context, Stack
    from introspect_cli.capture.naming import ModuleState
    from introspect_cli.capture.probes.base import Args, Kwargs

    Forward = Callable[..., Any]

MAX_FRAMES = 40
MAX_UNSEEN = 1000
_IN_MODULES = "torch.distributions."
"""torch package whose classes libraries combine with `nn.Module` in one class."""
_INPUT, _OUTPUT = Kind.INPUT, Kind.OUTPUT  # an attribute of an enumeration takes as long as a call


class ModuleProbe(GuardedProbe):
    """Watches calls of modules."""

    name = "modules"
    lost = "module inputs and outputs are"

    def __init__(self, context: Context) -> None:
        """Watch nothing before `install`."""
        super().__init__(context)
        self._stacks = context.stacks
        self.values = ModuleValues(context, context.probe(GradientProbe))
        """Recorder of inputs and outputs."""
        self._names, self._draws, self._parts = context.names, context.draws, context.parts
        self._state = context.probe(StateProbe)
        # with several ranks, what shares the data hands buffers around
        self._sees_buffers = Kind.BUFFER in context.kinds and not context.has_ranks
        self._looked: ById[set[tuple[int, Phase]]] = ById()

    def stand_in_for_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A replacement of `nn.Module.__call__` that records the call.

        While torch compiles or exports, and when the guard is off, it only calls the original.
        """
        guarded, called = self._guarded, self._record_or_pass
        is_traced, flags = torch.compiler.is_dynamo_compiling, private_api.compile_flags

        # Dynamo traces into this; the first question is constant there, so nothing of introspect enters a graph.
        @functools.wraps(original)
        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - stands in for Module.__call__
            """Run and record the call; only run it while torch compiles or exports, or with the guard off."""
            if is_traced() or flags._is_compiling_flag or not guarded.on:  # noqa: SLF001 - see `private_api`
                return original(self, *args, **kwargs)
            return called(original, self, args, kwargs)

        return __call__

    def subclassing(self, _original: object) -> Any:
        """A replacement of `nn.Module.__init_subclass__` that passes each new class to `_watch`.

        All existing subclasses are passed to it now.
        """
        watch = self._watch

        def __init_subclass__(cls: type[nn.Module], /, **kwargs: Any) -> None:  # noqa: N807 - stands in for Module's
            """Do what a class does without it, then `_watch` the new class."""
            super(nn.Module, cls).__init_subclass__(**kwargs)
            watch(cls)

        waiting, seen = nn.Module.__subclasses__(), set[type]()
        while waiting:
            cls = waiting.pop()
            if cls not in seen:
                seen.add(cls)
                waiting += type.__subclasses__(cls)
                watch(cls)
        return classmethod(__init_subclass__)

    def _watch(self, cls: type[nn.Module]) -> None:
        """Replace `__call__` and `forward` of a class that has its own `__call__`.

        Of another class, `forward` alone, and only if the script's file or the one that defines the class calls any
        `forward` by its name.
        """
        with self._guarded:
            if has_own_call(cls):
                for name in ("__call__", "forward"):
                    self._replace(cls, name, self._record_or_pass)
            elif any(has_forward_call(file_of(sys.modules.get(name))) for name in ("__main__", cls.__module__)):
                self.see_forward(cls)

    def see_forward(self, cls: type[nn.Module]) -> None:
        """Replace `forward` of a class, so that calls of it by name are seen.

        Nothing for a class with its own `__call__`, or whose `forward` is torch's.
        """
        if not has_own_call(cls):
            self._replace(cls, "forward", self._record_by_name)

    def _replace(self, cls: type, name: str, called: Callable[..., Any]) -> None:
        """Replace a method in the class that defines it, so that its other subclasses have the replacement too.

        Nothing for torch's own methods (but `torch.distributions`), what is no python function, and replacements.

        Args:
            cls: has or inherits the method.
            name: `__call__` or `forward`.
            called: `_record_or_pass` or `_record_by_name`.
        """
        home = next((base for base in cls.__mro__ if name in vars(base)), nn.Module)
        original = vars(home)[name]
        is_torchs = home.__module__.startswith("torch.") and not home.__module__.startswith(_IN_MODULES)
        if is_torchs or type(original) is not FunctionType or original.__code__.co_filename == __file__:
            return
        is_traced, flags = torch.compiler.is_dynamo_compiling, private_api.compile_flags
        guarded, kind = self._guarded, nn.Module

        def standing(self: Any, *args: Any, **kwargs: Any) -> Any:
            """Call `called` with the original, the module and its arguments.

            Only the original while compiling, when the guard is off, or where a subclass calls it by `super()`.
            """
            if (
                is_traced()
                or flags._is_compiling_flag  # noqa: SLF001 - see `private_api`
                or not guarded.on
                or getattr(type(self), name, None) is not own  # a class below it has called it: `super().forward`
                or not isinstance(self, kind)
            ):
                return original(self, *args, **kwargs)
            return called(original, self, args, kwargs)

        # TorchScript looks names of the original's source up among the globals of what stands in for it.
        own = FunctionType(standing.__code__, original.__globals__, closure=standing.__closure__)
        functools.update_wrapper(own, original)
        self._patches.replace(home, name, own)

    @uncounted
    def _note_callers(self, module: nn.Module, phase: Phase) -> None:
        """Note in `unseen` each method on the stack, such as `generate`, of a module that holds this one.

        40 frames at most are looked at; nothing where the same code has called this module in this phase before.

        Args:
            module: whose outermost call has just been recorded.
            phase: of that call.
        """
        above = {id(holder): holder for holder in self._names.holders_of(module)}
        if not above:
            return
        # by `filter`: while a generator that is not exhausted is closed, python drops what another thread sends
        ours, frames = nn.Module.__module__, outward(sys._getframe(1))  # noqa: SLF001 - the only way to a frame
        callers = filter(lambda each: not is_introspects(each) and each.f_globals.get("__name__") != ours, frames)
        frame = next(callers, None)
        looked = self._looked.get(module) or set()
        if frame is None or (key := (id(frame.f_code), phase)) in looked:
            return
        self._looked.set(module, looked | {key})
        for caller, _ in zip(outward(frame), range(MAX_FRAMES), strict=False):
            is_method = caller.f_code.co_argcount and caller.f_code.co_varnames[0] == "self"
            holder = above.get(id(caller.f_locals.get("self"))) if is_method else None
            if holder is not None:
                self._add_unseen(holder, caller.f_code.co_name, phase)

    def on_after_optimizer(self) -> None:
        """Note in `unseen` modules with a parameter that has a gradient, but neither they nor any holder were called.

        Looks at parameters of optimizers, after 1, 2, 3, 5, 9, ... steps, if that step is recorded.
        """
        names, clock, step = self._context.names, self._context.clock, self._context.recorder.step
        if step & (step - 1) or not self._context.recorder.wanted or not names.any_module:
            return  # after 1, 2, 3, 5, 9... steps
        stepped = {id(each): each for one in clock.trained.of_this_thread() for each in parameters_of(one)}
        uncalled = [reference for reference, state in list(names.states.entries.values()) if state.step < 0]
        for module in [each for reference in uncalled if isinstance(each := reference(), nn.Module)]:
            own = map(stepped.get, map(id, module._parameters.values()))  # noqa: SLF001 - the public view may be the script's
            for parameter in [each for each in own if each is not None and each.grad is not None]:
                name = names.parameters.name_of(parameter)
                if name and name.module_of(parameter) is module and not self._was_called(module):
                    self._add_unseen(module, "", Phase.FORWARD)

    def _was_called(self, module: nn.Module) -> bool:
        """Whether the module or any that holds it was ever called, or is left out by the options."""
        names = self._context.names
        states = (names.find(one) for one in (module, *names.holders_of(module)))
        return any(state is not None and (state.step >= 0 or not state.watched) for state in states)

    def _add_unseen(self, module: nn.Module, how: str, phase: Phase) -> None:
        """Add a method to a module's entry in `unseen`, and for `forward` or "" have the class's `forward` watched.

        Nothing for a module without a name, and for all once 1000 modules have entries.

        Args:
            module: whose method ran.
            how: the method's name; "" where a gradient alone says that something ran.
            phase: in which.
        """
        state, unseen = self._context.names.find(module), self._context.unseen
        if state is None or len(unseen) >= MAX_UNSEEN:
            return
        methods = unseen.setdefault(state.fqn, {}).setdefault(phase.value, [])
        methods += [] if how in methods else [how]
        if how in {"", "forward"}:
            self.see_forward(type(module))

    @uncounted
    def _record_by_name(self, original: Forward, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Run a call of `forward`, and record it as a call of its module.

        Only run it where the innermost call is of this very module, which calls it, or is not recorded.
        """
        calls = self._stacks.now.calls
        if calls and (calls[-1] is None or calls[-1] is self._names.find(module)):
            return original(module, *args, **kwargs)
        return self._record_or_pass(original, module, args, kwargs)

    @uncounted
    def _record_or_pass(self, original: Forward, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Run a call of a module, and record it in a recorded step.

        In a backward pass it is recorded in phase `recompute`. Calls inside unrecorded ones are not recorded.
        """
        stack = self._stacks.now
        calls, in_backward = stack.calls, private_api.graph_task() != -1
        if not calls and not in_backward:
            return self._record_outermost(stack, original, module, args, kwargs)
        if (calls and calls[-1] is None) or not self._recorder.wanted:
            return original(module, *args, **kwargs)
        if not in_backward:
            return self._record_call(stack, original, module, args, kwargs)
        phase, stack.phase = stack.phase, Phase.RECOMPUTE  # the forward around a backward pass goes on after it
        try:
            return self._record_call(stack, original, module, args, kwargs)
        finally:
            stack.phase = phase

    @uncounted
    def _record_outermost(self, stack: Stack, original: Forward, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Run a call outside of any other and of a backward pass: tell the clock, and record it in a wanted step.

        The clock may end a step before the call, and begin one. Not recorded, and not told: what a graph is traced
        with, a parametrisation that is called to look at a weight, shape inference of pipeline stages, modules that are
        not initialised, and all after a failure. A module that is not recorded is named as if it were, unless it is
        only evaluated.
        """
        clock, bare, passes = self._context.clock, False, False
        with self._guarded:
            bare = is_unfinished(module)
            stage = None if bare else torch_distributed.in_stage()
            if stage is not None and stage.what in {"inference", "forward"}:
                self._context.pipelines.note_stage(stage.stage, module)
            infers = stage is not None and stage.what == "inference"
            looks = issubclass(type(module), ParametrizationList)  # no code of the script's is asked
            passes = infers or looks or private_api.tracing_state() is not None or is_traced(args, kwargs)
        if bare:
            return original(module, *args, **kwargs)
        if passes:
            return self._run_unrecorded(original, module, args, kwargs)
        with self._guarded:
            with unobserved():
                stack.outer = clock.outermost_forward(module)
            evaluates = stack.outer is Phase.EVAL and not clock.trained.is_trained(module)
            if not self._recorder.wanted and not evaluates and self._names.find(module) is None:
                self._names.ensure_named(module, None)
        if not self._guarded.on:  # that failed: what the call is for is not known
            return original(module, *args, **kwargs)
        if not self._recorder.wanted:
            return self._run_unrecorded(original, module, args, kwargs)
        result = self._record_call(stack, original, module, args, kwargs)
        with self._guarded:
            self._note_callers(module, stack.outer)
            with unobserved():
                clock.mark_graph(result)
        return result

    @uncounted
    def _run_unrecorded(self, original: Forward, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Run an outermost call without recording it or anything inside."""
        calls = self._stacks.now.calls
        depth = len(calls)
        try:
            calls.append(None)
            return original(module, *args, **kwargs)
        finally:
            del calls[depth:]

    @uncounted
    def _record_call(self, stack: Stack, original: Forward, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Call `original(module, *args, **kwargs)`, and record inputs before and outputs after; returns its result."""
        calls, own = stack.calls, stack.own
        state: ModuleState | None = None
        call = -1
        with self._guarded:
            state, call = self._enter(stack, module, args, kwargs)
        depth = len(calls)
        try:
            calls.append(state)  # in here: a signal handler may raise as soon as it is done
            result = original(module, *args, **kwargs)
        finally:
            del calls[depth:]
            stack.own = own
            if call >= 0 and module._buffers and self._sees_buffers:  # noqa: SLF001 - the public view may be the script's
                with self._guarded:  # a call that raises has written to them as well
                    self._state.look_at_buffers(module, after=True)
        if call >= 0 and self._guarded.on:
            assert state is not None
            with self._guarded:
                self._leave(stack, module, state, call, result)
        return result

    def _enter(self, stack: Stack, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[ModuleState | None, int]:
        """Decide whether a call is recorded, and if so count it and record its inputs.

        Returns:
            the module's state and the number of the call. The state is None where neither the call nor anything inside
            it is recorded; the number is -1 where the call is not, as for wrappers.
        """
        if private_api.tracing_state() is not None or is_traced(args, kwargs):
            return None, -1
        caller = stack.calls[-1] if stack.calls else None
        known = self._names.states.entries.get(id(module))  # as `find`, without its frame
        state = known[1] if known is not None and known[0]() is module else None
        is_plain = state is not None and state.plain is type(module)
        if not is_plain or caller is None or caller is state:
            with private_api.no_torch_function():  # the script may watch functions; it is to see its own calls only
                state, is_recorded = self._enter_special(stack, module, caller, args, kwargs)
            if not is_recorded:
                return state, -1
        assert state is not None
        calls = state.calls_in(self._recorder.step)
        calls[stack.phase] = (call := calls.get(stack.phase, 0)) + 1
        if self._draws.moved():
            self._note_draws(state, call, before=True)
        if module._buffers and self._sees_buffers and state.plain is type(module) and stack.phase is Phase.FORWARD:  # noqa: SLF001 - the public view may be the script's
            self._state.look_at_buffers(module)
        if self.values.inputs and state.watched:
            self.values.record(state, stack.phase, _INPUT, call, args, named=kwargs)
        return state, call

    def _enter_special(
        self, stack: Stack, module: nn.Module, caller: ModuleState | None, args: Args, kwargs: Kwargs
    ) -> tuple[ModuleState | None, bool]:
        """Decide whether a call is recorded that may be outermost, of a wrapper, compiled or of an own `__call__`.

        Names the module where it has no name, and for an outermost call sets the phase and tells the clock. Sets `own`
        and `in_graph` of the stack, and `plain` and `compiled` of the module's state.

        Args:
            stack: this thread's.
            module: what is called.
            caller: the module in whose call this is; None for an outermost call.
            args: its arguments.
            kwargs: those by name.

        Returns:
            the state under which calls inside this one are made, None where they are not recorded;
            and whether this call is recorded.
        """
        if is_unfinished(module):
            return None, False
        stack.in_graph = isinstance(module, private_api.COMPILERS_GRAPH) and self._names.find(module) is None
        if stack.in_graph:
            return None, False
        clock = self._context.clock
        if caller is None:
            phase = Phase.RECOMPUTE if private_api.graph_task() != -1 else stack.outer
            is_other = phase is Phase.EVAL and not clock.trained.is_trained(module)
            if phase is Phase.EVAL and not clock.evaluation.wanted:
                if not is_other:
                    self._names.ensure_named(module, None)
                return None, False
            # A copy that is only evaluated takes no name from what is trained.
            is_copy = is_other and next(parameters_in(module), None) is not None
            state = self._names.ensure_named(module, None, EVALUATED if is_copy else "")
            stack.phase = phase
            if phase is not Phase.RECOMPUTE:
                clock.tell_root(module)
        else:
            if private_api.DYNAMO_GRAPH_MARK in module.__dict__:
                return None, False
            state = self._names.find(module) or self._names.ensure_named(module, caller)
        is_compiled = type(module).__name__ == "OptimizedModule"
        inner = wrapped(module)
        if inner is not None and not is_compiled:
            return state, False
        if is_compiled and (held := self._names.find(inner)) is not None:
            # The region is recorded at its boundary, under the name of what was compiled.
            state = held
            state.compiled = True
        elif caller is state and state.compiled:
            return state, False  # the compiler gave up and runs the module that its wrapper stands for
        if type(module) is not state.plain and has_own_call(type(module)):
            given = tensors_given(args, kwargs)
            if caller is state and stack.own == (state, given):
                return state, False  # handed on: `__call__` to `forward`, or to the one of the class above
            stack.own = state, given
        if type(module) is not state.plain and is_plain_call(module) and not is_compiled and not state.compiled:
            state.plain = None if may_be_shares(state, module, args) else type(module)
        return state, True

    def _leave(self, stack: Stack, module: nn.Module, state: ModuleState, call: int, result: Any) -> None:
        """Record a call's outputs, tell the clock of an outermost one of training, and record gaps for hidden modules.

        Hidden are those in a compiled or scripted module, and in an encoder layer whose attention was not called.
        """
        if self._parts.is_grouped and torch_distributed.from_call(result) is not None:
            state.tagged, state.plain = True, None
        if self._draws.moved():
            self._note_draws(state, call, before=False)
        if self.values.outputs and state.watched:
            self.values.record(state, stack.phase, _OUTPUT, call, (result,), WHOLE)
        if not stack.calls and stack.phase is Phase.FORWARD:
            with private_api.no_torch_function():
                self._context.clock.tell("on_root_left", module)
        if state.plain is type(module) and module.__dict__.get(private_api.MODULE_WRAPPED_CALL) is None:
            return
        is_fused = False
        if isinstance(module, nn.TransformerEncoderLayer):  # which torch may run as one, without calling its attention
            attention = self._names.find(module.self_attn)
            is_fused = attention is not None and attention.step != self._recorder.step
        if is_fused or hides(module):
            self._record_hidden(module, state, call)

    def _note_draws(self, state: ModuleState, call: int, *, before: bool) -> None:
        """Record the states of generators that have moved since the last look, under this call.

        Nothing in a recomputed forward, which draws from a state that is put back afterwards.

        Args:
            state: of the module.
            call: number of its call.
            before: True as the call begins, for draws of what ran before it; False at its end, for its own.
        """
        if state.watched and self._stacks.now.phase is not Phase.RECOMPUTE:
            self._context.draws.note(self._stacks.now.phase, state.fqn, call, before=before)

    def _record_hidden(self, module: nn.Module, state: ModuleState, call: int) -> None:
        """At a step's first call of a compiled, scripted or fused module, record a gap for each output inside it.

        Not for those that were called in this step, wrappers, and unwatched or unnamed ones.
        """
        if call or Kind.OUTPUT not in self._context.kinds:
            return
        for child in modules_in(module):
            inner = None if wrapped(child) is not None else self._names.find(child)
            if inner is not None and inner is not state and inner.step != self._recorder.step and inner.watched:
                site = self._context.site(inner, self._stacks.now.phase, Kind.OUTPUT)
                self._recorder.gap(site, f"inside {state.fqn}: compiled, scripted or fused")


def tensors_given(args: Args, kwargs: Kwargs) -> frozenset[int]:
    """`id` of each tensor in a call's arguments, nested ones included."""
    return frozenset(id(leaf) for _, leaf in flatten([args, kwargs]) if isinstance(leaf, torch.Tensor))
