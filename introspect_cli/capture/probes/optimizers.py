"""Optimizer steps: gradients as the optimizer sees them, parameters and state as it leaves them, and the clock.

Torch's global step hooks run around `step` of every optimizer there is. Only the outermost step counts (an optimizer
that wraps another calls its step inside its own). An optimizer that is given a closure computes its gradients inside
`step`, once or many times; there they are recorded each time that the closure returns.
"""

from __future__ import annotations

import functools
import sys
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture import private_api
from introspect_cli.capture.frames import outward
from introspect_cli.capture.naming import ById, FreeNames, parameters_in, parameters_of
from introspect_cli.capture.probes.base import GuardedProbe, has_closure
from introspect_cli.capture.probes.optimizer_values import PLAIN, ParameterSites, Plan, setting
from introspect_cli.capture.probes.state import StateProbe
from introspect_cli.capture.ranks.flat import ZERO, is_stepped
from introspect_cli.records import SCALER, Kind, Phase, SiteInfo
from introspect_cli.tensors import parallel
from introspect_cli.tensors.flatten import flatten
from introspect_cli.tensors.kernels import KERNELS, numbers_of
from introspect_cli.tensors.places import Placed
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch.optim.optimizer import Optimizer

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call
    from introspect_cli.capture.naming import ParameterName
    from introspect_cli.capture.probes.base import Args, Kwargs


class OptimizerProbe(GuardedProbe):
    """Watches optimizer steps and drives the step clock."""

    name = "optimizers"
    lost = "optimizer steps (and so the ends of steps) are"

    def __init__(self, context: Context) -> None:
        """Watch nothing before `install`; a failure leaves the clock without optimizers' steps."""
        super().__init__(context, then=context.clock.give_up_on_optimizers)
        self._state = context.probe(StateProbe)
        self._names = FreeNames()
        self._parameters: ById[ParameterSites] = ById()
        self._state_seen: set[str] = set()
        self._hyperparameters: dict[tuple[str, int, str], Any] = {}
        """By optimizer, group and key, what each was when it was recorded last."""
        self._settings: dict[str, dict[str, Any]] = {}
        self._stepped = 0
        self._closures = 0
        self._aside = 0
        """Identity of the optimizer whose step under way trains nothing; 0 for none."""
        self._groups: frozenset[int] = frozenset()
        """Identities of the groups of the outermost optimizer that steps."""
        self._in_engine = False

    def _note_new_optimizer(self, call: Call, _result: object) -> None:
        """Tell the clock of an optimizer that was made."""
        self._context.clock.add_optimizer(call.first)

    def _watch_scaler_step(self, call: Call) -> Callable[[object], None]:
        """Called before a gradient scaler steps: records its scale; returns what ends the step if that was skipped."""
        stepped = self._stepped
        scale = private_api.scale_of(call.first)
        if Kind.HYPERPARAMETER in self._context.kinds and scale is not None and self._recorder.wanted:
            with unobserved():
                self._emit_hyperparameter(SCALER, call.first, "['scale']", scale)

        def left(_: object) -> None:
            """Record a skipped step as if it had been made, and end the step, if no optimizer has stepped meanwhile."""
            if self._stepped == stepped:
                optimizer = call.given(1, "optimizer")
                self._before_step(optimizer, (), {})
                self._after_step(optimizer, (), {})

        return left

    def _watch_engine_step(self, call: Call) -> Callable[[object], None] | None:
        """Called before a DeepSpeed engine steps: records its hyper-parameters, once in a step.

        Returns:
            what records the parameters and ends the step, if any group has been stepped: each is a step of torch's
            optimizer, which has flat tensors. None for an engine without one inside an optimizer of DeepSpeed's.
        """
        engine, context, stepped = call.first, self._context, self._stepped
        optimizer = getattr(engine.optimizer, "optimizer", None)
        if not isinstance(optimizer, torch.optim.Optimizer):
            return None
        context.guard.note(ZERO)
        self._in_engine = True
        if self._recorder.wanted and not context.count(self):
            with unobserved():
                self._note_settings(optimizer, [])
                context.clock.begin()
                self._record_hyperparameters(optimizer)

        def left(_: object) -> None:
            """Record the parameters and end the step, if any group has been stepped."""
            self._in_engine = False
            if self._stepped != stepped:
                with unobserved():
                    if self._recorder.wanted:
                        held = {id(each): each for each in parameters_in(engine) if is_stepped(each)}
                        self._state.parameters_after(engine, list(held.values()))
                        context.clock.tell("on_after_optimizer")
                    context.clock.auto_tick()

        return left

    def _before_step(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """Before each `step`, record what an outermost one finds: hyper-parameters, state, gradients but a closure's.

        Before that, the optimizer is named, unless it has a closure, which may call a model first, and a parameter
        without a name; and a step of the run begins. From the first one on, roots keep their names. Of a step inside
        another, hyper-parameters alone, and none where the outer one has its groups. A step that
        `torch.distributed.checkpoint` makes to create state is ignored.

        Returns:
            arguments for `step` with a wrapped closure, whose gradients are recorded each time; None to change none.
        """
        context = self._context
        if not optimizer.state and _is_of_checkpointing(sys._getframe(2)):  # noqa: SLF001 - as below
            self._aside = id(optimizer)
            return None
        # From the first step on, names stay as they are, and steps need not be guessed at.
        context.clock.stepped = context.names.settled = True
        context.clock.unseen_steps = False
        context.clock.evaluation.note_training()
        running = context.stack.optimizers
        if running and not _is_inside_step(sys._getframe(2)):  # noqa: SLF001 - the frame of torch's wrapper of `step`
            running.clear()  # the last step never returned: a closure raised and the script caught it
        running.append(id(optimizer))
        groups = frozenset(map(id, optimizer.param_groups))
        if len(running) > 1 or self._in_engine:
            # an outer one may have groups of its own that nothing reads
            if self._recorder.wanted and not (self._in_engine or groups <= self._groups):
                with unobserved():
                    self._record_hyperparameters(optimizer)
            return None
        self._closures, self._groups = 0, groups
        with unobserved():
            with_closure = has_closure(args, kwargs)
            names = map(context.names.parameters.name_of, parameters_of(optimizer))
            # With a closure it may step before any model that holds its parameters was called.
            if not with_closure or self._parameters.get(optimizer) is not None or None not in names:
                self._name_optimizer(optimizer)
            context.clock.begin()
            if self._recorder.wanted:
                self._record_hyperparameters(optimizer)
                self._record_state_before(optimizer)
                if not with_closure:
                    self._record_gradients(optimizer)
            if with_closure:
                return _with_closure(args, kwargs, functools.partial(self._record_closure_gradients, optimizer))
        return None

    def _record_closure_gradients(self, optimizer: Optimizer) -> None:
        """Record the gradients that a closure has just computed.

        At its first call also the state, if names are known only now.
        """
        if not (self._guarded.on and self._recorder.wanted):
            return
        with self._guarded, unobserved():
            if self._parameters.get(optimizer) is None:
                self._name_optimizer(optimizer)
                if not self._closures:
                    self._record_state_before(optimizer)
            self._record_gradients(optimizer, self._closures)
            self._closures += 1

    def _after_step(self, optimizer: Optimizer, _args: Args, _kwargs: Kwargs) -> None:
        """After each `step`, record what an outermost one leaves, parameters and state, then end the clock's step.

        Nothing for a step inside another or a DeepSpeed engine's, or one of checkpointing.
        """
        if self._aside == id(optimizer):
            self._aside = 0
            return
        running = self._context.stack.optimizers
        if id(optimizer) in running:
            del running[running.index(id(optimizer)) :]
        self._stepped += not running
        if running or self._in_engine:
            return
        with unobserved():
            if self._parameters.get(optimizer) is None:
                self._name_optimizer(optimizer)
            if self._recorder.wanted:
                self._record_after(optimizer)
            self._context.clock.auto_tick()

    def _name_optimizer(self, optimizer: Optimizer) -> None:
        """Name an optimizer and its parameters, tell the clock, and have its settings written.

        Nothing while it has as many parameters as names, none of which was replaced since. A parameter that no module
        holds is named by the script's variable, else `OPTIMIZER.groupN.POSITION`.
        """
        parameters, held, all_names = parameters_of(optimizer), self._parameters.get(optimizer), self._context.names
        if held is not None and len(held.names) == len(parameters) and held.replaced == all_names.parameters.replaced:
            return
        self._context.clock.note_step_of(optimizer)
        variables = self._context.leaf_names  # the script's, of tensors that no module holds
        known = all_names.parameters.name_of
        if unnamed := [each for each in parameters if known(each) is None and id(each) not in variables]:
            all_names.name_holders_of(unnamed)
        names: list[ParameterName] = []
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if (name := known(parameter)) is None:
                    alone = variables.get(id(parameter)) or f"{self._name(optimizer)}.group{number}.{position}"
                    name = all_names.parameters.name_alone(parameter, alone, type(optimizer).__name__)
                name.add_holder(optimizer, (number, position))
                names.append(name)
        self._parameters.set(optimizer, ParameterSites(names, parameters, all_names.parameters.replaced))
        self._note_settings(optimizer, [each.fqn for each in names])

    def _name(self, optimizer: Optimizer) -> str:
        """Name of an optimizer, given at the first call."""
        return self._names.name(optimizer, type(optimizer).__name__)

    def _record_state_before(self, optimizer: Optimizer) -> None:
        """Record the state that an optimizer finds at its first step, and at its first after unrecorded steps.

        Else nothing.
        """
        name, known = self._name(optimizer), self._parameters.get(optimizer)
        if known is not None and known.names and (self._recorder.resumed or name not in self._state_seen):
            self._state_seen.add(name)
            self._record_state(optimizer, Phase.START)

    def _record_after(self, optimizer: Optimizer) -> None:
        """Record parameters and state after a step, and tell `on_after_optimizer`."""
        parameters, known = parameters_of(optimizer), self._parameters.get(optimizer)
        large = [] if known is None else [parameters[at].grad for at in known.large]
        parallel.note_computation(gradient for gradient in large if gradient is not None)
        self._state.parameters_after(optimizer, parameters)
        self._record_state(optimizer, Phase.OPTIMIZER)
        self._context.clock.tell("on_after_optimizer")

    def _record_gradients(self, optimizer: Optimizer, call: int = 0) -> None:
        """Record `.grad` of each parameter that has one; nothing where gradients are not recorded.

        Args:
            optimizer: whose parameters have names; nothing where they have not.
            call: how often a closure has computed gradients in this step before.
        """
        context, held = self._context, self._parameters.get(optimizer)
        if held is None or Kind.GRAD not in context.kinds:
            return
        sites, parameters, parts = held.gradient_sites(context, call), parameters_of(optimizer), context.parts
        at_once = held.all_watched and not parts.is_active
        if at_once and self._recorder.record_compiled(KERNELS.record_gradients, sites, parameters):
            return
        have = [at for at, each in enumerate(parameters) if sites[at] >= 0 and each.grad is not None]
        values = [parts.placed(parameters[at], parameters[at].grad) for at in have]
        self._recorder.emit_many([sites[at] for at in have], values)

    def _record_state(self, optimizer: Optimizer, phase: Phase) -> None:
        """Record the state of each watched parameter: by the plan of this phase while that fits, else one by one.

        Tensors, numbers and texts in it are recorded. A new plan is made where all of the state was tensors of whole
        parameters. Nothing where state is not recorded.
        """
        if (held := self._parameters.get(optimizer)) is None or Kind.OPTIMIZER_STATE not in self._context.kinds:
            return
        parameters, plan, parts = parameters_of(optimizer), held.plans.get(phase), self._context.parts
        at_once = held.all_watched and not parts.is_active
        if at_once and plan is not None and plan.is_recorded(self._recorder, optimizer, parameters):
            return
        positions, states = held.states(optimizer)
        if parts.is_active:
            both = zip(positions, states, strict=True)
            states = [{key: parts.placed(parameters[at], value) for key, value in of.items()} for at, of in both]
        sites, values = list[int](), list[Any]()
        for at, state in zip(positions, states, strict=True):
            for key, value in state.items():
                for path, leaf in [("", value)] if isinstance(value, Placed) else flatten(value):
                    if isinstance(leaf, (torch.Tensor, Placed, *PLAIN)):
                        place = f"[{key!r}]{path}"
                        sites.append(self._context.site(held.names[at], phase, Kind.OPTIMIZER_STATE, place))
                        values.append(leaf)
        self._recorder.emit_many(sites, values)
        are_tensors = all(issubclass(kind, torch.Tensor) for kind in set(map(type, values)))
        if are_tensors and len(sites) == sum(map(len, states)) and len(states) == len(held.names):  # else it would fail
            keys = list(chain.from_iterable(states))
            held.plans[phase] = Plan(numbers_of(sites), numbers_of(map(len, states)), keys)

    def _record_hyperparameters(self, optimizer: Optimizer) -> None:
        """Record `lr` of each group; other entries, but `params`, if new, changed, or after an unrecorded step.

        Of a tensor that is not on the CPU the tensor itself is recorded, of any other value what `setting` gives.
        Nothing where hyper-parameters are not recorded.
        """
        name, resumed = self._name(optimizer), self._recorder.resumed
        for number, group in enumerate(optimizer.param_groups if Kind.HYPERPARAMETER in self._context.kinds else ()):
            for key, value in group.items():
                plain = None if key == "params" else setting(value)
                is_known = self._hyperparameters.get((name, number, key), ()) == plain
                if key != "params" and (key == "lr" or resumed or not is_known):
                    self._hyperparameters[name, number, key] = plain
                    is_elsewhere = isinstance(value, torch.Tensor) and value.device.type != "cpu"
                    self._emit_hyperparameter(name, optimizer, f"[{number}][{key!r}]", value if is_elsewhere else plain)

    def _emit_hyperparameter(self, name: str, owner: object, path: str, value: Any) -> None:
        """Record a hyper-parameter of an optimizer or a gradient scaler."""
        info = SiteInfo(type(owner).__name__)
        self._emit(Phase.OPTIMIZER, Kind.HYPERPARAMETER, name, [(path, value)], info=info)

    def _note_settings(self, optimizer: Optimizer, fqns: list[str]) -> None:
        """Set the entry of an optimizer in the document `settings/optimizers`, and have that written.

        Args:
            optimizer: whose groups they are.
            fqns: names of its parameters, in order; [] where they have none.
        """
        name, remaining = self._name(optimizer), iter(fqns)
        groups = [
            {key: setting(value) for key, value in group.items() if key != "params"}
            | {"params": [*islice(remaining, len(group["params"]))]}
            for group in optimizer.param_groups
        ]
        self._settings[name] = {"name": name, "class": type(optimizer).__name__, "groups": groups}
        self._context.facts["optimizers"] = lambda: list(self._settings.values())


def _is_inside_step(frame: FrameType) -> bool:
    """Whether a frame, of torch's wrapper of `step`, has any caller with the same code: this step is inside another."""
    return any(below.f_code is frame.f_code for below in outward(frame.f_back))


def _is_of_checkpointing(frame: FrameType) -> bool:
    """Whether a frame or any caller is of `torch.distributed.checkpoint`, whose steps train nothing."""
    names = (below.f_globals.get("__name__", "") for below in outward(frame))
    return any(name.startswith("torch.distributed.checkpoint") for name in names)


def _with_closure(args: Args, kwargs: Kwargs, then: Callable[[], None]) -> tuple[Args, Kwargs]:
    """Positional and keyword arguments of a step, with a closure that calls `then()` after each evaluation."""
    named = kwargs.get("closure")
    closure = named or args[1]

    @functools.wraps(closure)
    def evaluate() -> Any:
        """Call the closure, then `then()`; returns what the closure returned."""
        result = closure()
        then()
        return result

    return (args, {**kwargs, "closure": evaluate}) if named else ((args[0], evaluate, *args[2:]), kwargs)
