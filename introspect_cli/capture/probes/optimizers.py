"""Optimizer steps: gradients as the optimizer sees them, parameters and state as it leaves them, and the clock.

Torch's global step hooks run around `step` of every optimizer there is. Only the outermost step counts (an optimizer
that wraps another calls its step inside its own). An optimizer that is given a closure computes its gradients inside
`step`, once or many times; there they are recorded each time that the closure returns.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture import private_api
from introspect_cli.capture.frames import outward
from introspect_cli.capture.naming import ById, FreeNames, parameters_of
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.capture.probes.optimizer_values import (
    PLAIN,
    ParameterSites,
    Plan,
    Stepping,
    setting,
)
from introspect_cli.capture.probes.state import StateProbe
from introspect_cli.capture.ranks.flat import ALL
from introspect_cli.records import SCALER, Kind, Phase, Site, SiteInfo
from introspect_cli.tensors import parallel
from introspect_cli.tensors.flatten import flatten
from introspect_cli.tensors.kernels import KERNELS
from introspect_cli.tensors.places import Placed
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from torch.optim.optimizer import Optimizer

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call
    from introspect_cli.capture.naming import ParameterName


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
        self._state_seen: set[tuple[str, int]] = set()
        self._hyperparameters: dict[tuple[str, int], dict[str, tuple[Any, int]]] = {}
        """By optimizer and group, what each entry was when it was recorded last, and its site."""
        self._settings: list[dict[str, Any]] = []
        self._stepped = 0
        self._closures = 0
        self._aside = 0
        """Identity of the optimizer whose step under way trains nothing; 0 for none."""
        self._groups: frozenset[int] = frozenset()
        """Identities of the groups of the outermost optimizer that steps."""

    def _note_new_optimizer(self, call: Call) -> Callable[[object], None]:
        """Called before an optimizer is made; returns what tells the clock of it."""
        return lambda _: self._context.clock.add_optimizer(call.first)

    def _watch_scaler_step(self, call: Call) -> Callable[[object], None]:
        """Called before a gradient scaler steps: records its scale; returns what ends the step if that was skipped."""
        stepped = self._stepped
        scale = private_api.scale_of(call.first)
        if Kind.HYPERPARAMETER in self._context.kinds and scale is not None and self._recorder.wanted:
            place = Site(Phase.OPTIMIZER, Kind.HYPERPARAMETER, SCALER, 0, "['scale']")
            with unobserved():
                self._recorder.emit(self._recorder.site(place, SiteInfo(type(call.first).__name__)), scale)

        def left(_: object) -> None:
            """Record a skipped step, and end the step, if no optimizer has stepped meanwhile."""
            if self._stepped == stepped:
                with unobserved():
                    self._record_skipped_step(call.given(1, "optimizer"))

        return left

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before each `step`, record what an outermost one finds: hyper-parameters, state, gradients but a closure's.

        Before that, the optimizer is named, unless it has a closure, which may call a model first, and a parameter
        without a name; and a step of the run begins. From the first one on, roots keep their names. Of a step inside
        another, `_record_inner_step` alone. A step that `torch.distributed.checkpoint` makes to create state is
        ignored.

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
        if len(running) > 1:
            self._record_inner_step(optimizer)
            return None
        self._closures = 0
        with unobserved():
            self._groups = frozenset(map(id, optimizer.param_groups))
            has_closure = _has_closure(args, kwargs)
            stepping = self._new_stepping(optimizer)
            names = context.names.parameters
            # With a closure it may step before any model that holds its parameters was called.
            if not has_closure or stepping.known is not None or None not in map(names.name_of, stepping.parameters):
                self._name_optimizer(stepping)
            context.clock.begin()
            if self._recorder.wanted:
                self._record_before(stepping, has_closure=has_closure)
            if has_closure:
                return _with_closure(args, kwargs, functools.partial(self._record_closure_gradients, optimizer))
        return None

    def _record_inner_step(self, optimizer: Optimizer) -> None:
        """Record hyper-parameters of an optimizer that steps inside another's; nothing if that has all its groups.

        The outer one may have groups of its own that nothing reads.
        """
        with unobserved():
            groups = set(map(id, optimizer.param_groups))
            if groups <= self._groups or Kind.HYPERPARAMETER not in self._context.kinds or not self._recorder.wanted:
                return
            name = self._names.name(optimizer, type(optimizer).__name__)
            self._record_hyperparameters(optimizer, name, self._new_stepping(optimizer).turn.first)

    def _record_closure_gradients(self, optimizer: Optimizer) -> None:
        """Record the gradients that a closure has just computed.

        At its first call also the state, if names are known only now.
        """
        if not (self._guarded.on and self._recorder.wanted):
            return
        with self._guarded, unobserved():
            stepping = self._new_stepping(optimizer)
            if stepping.known is None:
                self._name_optimizer(stepping)
                if not self._closures:
                    self._record_state_before(stepping)
            self._record_gradients(stepping, self._closures)
            self._closures += 1

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After each `step`, record what an outermost one leaves, parameters and state, then end the clock's step.

        Where the optimizer's groups step one after the other, only the last of them ends it. Nothing for a step inside
        another, or one of checkpointing.
        """
        if self._aside == id(optimizer):
            self._aside = 0
            return
        running = self._context.stack.optimizers
        if id(optimizer) in running:
            del running[running.index(id(optimizer)) :]
        if running:
            return
        self._stepped += 1
        with unobserved():
            stepping = self._new_stepping(optimizer)
            if stepping.known is None:
                self._name_optimizer(stepping)
            if self._recorder.wanted:
                self._record_after(stepping, has_closure=_has_closure(args, kwargs))
            if stepping.turn.is_last:
                self._context.clock.auto_tick()

    def _new_stepping(self, optimizer: Optimizer) -> Stepping:
        """A new `Stepping` of an optimizer: its parameters now, which groups these are, and their sites.

        `known` is None before `_name_optimizer` has named them.
        """
        parameters, parts = parameters_of(optimizer), self._context.parts
        turn = parts.turn_of(parameters) if parts.is_active else ALL
        # What is known of all that it steps is kept by itself, or by one of the tensors that it steps in turn.
        key = optimizer if turn == ALL else parameters[0]
        return Stepping(optimizer, parameters, turn, key, self._parameters.get(key))

    def _record_skipped_step(self, optimizer: Optimizer) -> None:
        """Record an optimizer step that a gradient scaler skipped, as if it had been made, and end the clock's step."""
        stepping = self._new_stepping(optimizer)
        self._name_optimizer(stepping)
        if self._recorder.wanted:
            self._record_before(stepping, has_closure=False)
            self._record_after(stepping, has_closure=True, gradients=False)
        self._context.clock.auto_tick()

    def _name_optimizer(self, stepping: Stepping) -> None:
        """Name the optimizer and its parameters, set `stepping.known`, tell the clock, and have its settings written.

        Nothing while `known` has as many names, none of which was replaced since. A parameter that no module holds is
        named by the script's variable, else `OPTIMIZER.groupN.POSITION`, N counted from `stepping.turn.first`.
        """
        optimizer, parameters, turn, held = stepping.optimizer, stepping.parameters, stepping.turn, stepping.known
        parts, all_names = self._context.parts, self._context.names
        if held is not None and len(held.names) == len(parameters) and held.replaced == all_names.parameters.replaced:
            return
        self._context.clock.note_step_of(optimizer)
        unnamed = [
            tensor
            for tensor in parameters
            if all_names.parameters.name_of(tensor) is None and not self._script_name(tensor)
        ]
        if unnamed:
            all_names.name_holders_of(unnamed)
        name = self._names.name(optimizer, type(optimizer).__name__)
        names: list[ParameterName] = []
        fqns: list[list[str]] = []
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                parameter_name = all_names.parameters.name_of(parameter)
                if parameter_name is None:
                    parameter_name = all_names.parameters.name_alone(
                        parameter,
                        self._script_name(parameter) or f"{name}.group{turn.first + number}.{position}",
                        type(optimizer).__name__,
                    )
                parameter_name.add_holder(optimizer, (number, position))
                inside = parts.names_inside(parameter)
                parameter_name.watched |= any(named.watched for named in inside or ())
                names.append(parameter_name)
                fqns.append([named.fqn for named in ([parameter_name] if inside is None else inside)])
        stepping.known = ParameterSites(names, all_names.parameters.replaced)
        self._parameters.set(stepping.key, stepping.known)
        self._note_settings(name, optimizer, fqns, turn.first)

    def _script_name(self, parameter: torch.Tensor) -> str:
        """The script's variable for a tensor that no module holds; "" where unknown."""
        return self._context.leaf_names.get(id(parameter), "")

    def _record_before(self, stepping: Stepping, *, has_closure: bool) -> None:
        """Record hyper-parameters, state where it is wanted at the start, and gradients.

        Args:
            stepping: what steps.
            has_closure: whether a closure computes the gradients in the step; then they are not recorded here.
        """
        name = self._names.name(stepping.optimizer, type(stepping.optimizer).__name__)
        kinds = self._context.kinds
        if Kind.HYPERPARAMETER in kinds:
            self._record_hyperparameters(stepping.optimizer, name, stepping.turn.first)
        self._record_state_before(stepping)
        if not has_closure:
            self._record_gradients(stepping)

    def _record_state_before(self, stepping: Stepping) -> None:
        """Record the state that an optimizer finds at its first step, and at its first after unrecorded steps.

        Else nothing.
        """
        name = self._names.name(stepping.optimizer, type(stepping.optimizer).__name__)
        if stepping.known is not None and stepping.known.names and Kind.OPTIMIZER_STATE in self._context.kinds:
            place = name, stepping.turn.first
            if self._recorder.resumed or place not in self._state_seen:
                self._state_seen.add(place)
                self._record_state(stepping, Phase.START)

    def _record_after(self, stepping: Stepping, *, has_closure: bool, gradients: bool = True) -> None:
        """Record parameters and state after a step; at the last group, tell `on_after_optimizer`.

        Args:
            stepping: what has stepped.
            has_closure: whether it was given a closure; if that was never called, gradients are recorded now.
            gradients: False for a step that was skipped, whose gradients are recorded before.
        """
        if has_closure and gradients and not self._closures:
            self._record_gradients(stepping)
        if gradients:
            large = stepping.known.large(stepping.parameters) if stepping.known is not None else []
            parallel.note_computation(tensor.grad for tensor in large if tensor.grad is not None)
        self._state.parameters_after(stepping)
        if Kind.OPTIMIZER_STATE in self._context.kinds:
            self._record_state(stepping, Phase.OPTIMIZER)
        if stepping.turn.is_last:
            clock = self._context.clock
            clock.tell("on_after_optimizer")

    def _record_gradients(self, stepping: Stepping, call: int = 0) -> None:
        """Record `.grad` of each parameter that has one; nothing where gradients are not recorded.

        Args:
            stepping: whose names are known; nothing where they are not.
            call: how often a closure has computed gradients in this step before.
        """
        context, held = self._context, stepping.known
        if held is None or Kind.GRAD not in context.kinds:
            return
        sites, parameters = held.gradient_sites(context, call), stepping.parameters
        at_once = held.all_watched and not context.parts.is_active
        if at_once and self._recorder.record_compiled(KERNELS.record_gradients, sites, parameters):
            return
        found = {
            at: gradient for at, each in enumerate(parameters) if sites[at] >= 0 and (gradient := each.grad) is not None
        }
        of = [sites[at] for at in found], [parameters[at] for at in found], list(found.values())
        placed = context.parts.placed_values(
            *of, lambda name: context.site(name, Phase.OPTIMIZER, Kind.GRAD, call=call)
        )
        self._recorder.emit_many(*placed)

    def _record_state(self, stepping: Stepping, phase: Phase) -> None:
        """Record the state of each watched parameter: by the plan of this phase while that fits, else one by one.

        A new plan is made where all of the state was tensors of whole parameters.
        """
        if (held := stepping.known) is None:
            return
        plan, is_placed = held.plans.get(phase), self._context.parts.is_active
        if plan is not None and not is_placed and held.all_watched and plan.is_recorded(self._recorder, stepping):
            return
        positions, states = held.states(stepping.optimizer)
        if is_placed:
            positions, states = self._place_states(stepping, positions, states, phase)
        kept = [self._state_of(held.names[at], state, phase) for at, state in zip(positions, states, strict=True)]
        sites = [site for of, _ in kept for site in of]
        tensors = [tensor for _, inside in kept for tensor in inside]
        self._recorder.emit_many(sites, tensors)
        if len(sites) == sum(map(len, states)) and Placed not in set(map(type, tensors)):  # else no plan would hold
            held.plans[phase] = Plan(sites, positions, states)

    def _place_states(
        self, stepping: Stepping, positions: Sequence[int], states: list[Any], phase: Phase
    ) -> tuple[list[int], list[dict[str, Any]]]:
        """Positions in `stepping.parameters`, and the state of each there with its tensors placed in their wholes.

        State of a flat tensor is recorded here, split among its parameters, and not returned.
        """
        parts, kept = self._context.parts, {}
        for at, state in zip(positions, states, strict=True):
            parameter = stepping.parameters[at]
            pieces = parts.split_state(parameter, state)
            if pieces is None:
                kept[at] = {key: parts.placed(parameter, value) for key, value in state.items()}
            for name, inside in pieces or ():
                self._recorder.emit_many(*self._state_of(name, inside, phase))
        return list(kept), list(kept.values())

    def _state_of(self, name: ParameterName, state: dict[str, Any], phase: Phase) -> tuple[list[int], list[Any]]:
        """Sites and tensors of one parameter's state, which the caller records.

        Numbers and texts in it are recorded here; leaves of other types are left out.
        """
        sites: list[int] = []
        tensors: list[Any] = []
        for key, value in state.items():
            prefix = f"[{key!r}]"
            if isinstance(value, (torch.Tensor, Placed)):
                sites.append(self._context.site(name, phase, Kind.OPTIMIZER_STATE, prefix))
                tensors.append(value)
                continue
            for path, leaf in flatten(value):
                site = self._context.site(name, phase, Kind.OPTIMIZER_STATE, prefix + path)
                if isinstance(leaf, torch.Tensor):
                    sites.append(site)
                    tensors.append(leaf)
                elif isinstance(leaf, PLAIN):
                    self._recorder.emit(site, leaf)
        return sites, tensors

    def _record_hyperparameters(self, optimizer: Optimizer, name: str, first: int) -> None:
        """Record `lr` of each group; other entries, but `params`, if new, changed, or after an unrecorded step.

        Of a tensor that is not on the CPU the tensor itself is recorded, of any other value what `setting` gives.

        Args:
            optimizer: whose groups.
            name: its name.
            first: number of its first group.
        """
        resumed = self._recorder.resumed
        for number, group in enumerate(optimizer.param_groups, first):
            recorded = self._hyperparameters.setdefault((name, number), {})
            for key, value in group.items():
                if key == "params":
                    continue
                plain, before = setting(value), recorded.get(key)
                if key != "lr" and not resumed and before is not None and before[0] == plain:
                    continue
                if before is None:
                    place = Site(Phase.OPTIMIZER, Kind.HYPERPARAMETER, name, 0, f"[{number}][{key!r}]")
                    site = self._recorder.site(place, SiteInfo(type(optimizer).__name__))
                else:
                    site = before[1]
                recorded[key] = plain, site
                is_elsewhere = isinstance(value, torch.Tensor) and value.device.type != "cpu"
                self._recorder.emit(site, value if is_elsewhere else plain)

    def _note_settings(self, name: str, optimizer: Optimizer, fqns: list[list[str]], first: int) -> None:
        """Set the entry of an optimizer in the document `settings/optimizers`, and have that written.

        Args:
            name: its name.
            optimizer: whose groups they are.
            fqns: for each of its parameters its name, or the names of those that lie in it if it is flat.
            first: number of the first of these groups; those before stay as they were.
        """
        remaining = iter(fqns)
        groups = [
            {
                **{key: setting(value) for key, value in group.items() if key != "params"},
                "params": [fqn for _ in group["params"] for fqn in next(remaining)],
            }
            for group in optimizer.param_groups
        ]
        before = [group for entry in self._settings if entry["name"] == name for group in entry["groups"]]
        groups = [*before[:first], *groups]
        if self._context.parts.is_active:  # stepped one after the other: the others may have no parameters now
            groups = [group if group["params"] else [*before[at : at + 1], group][0] for at, group in enumerate(groups)]
        self._settings = [entry for entry in self._settings if entry["name"] != name]
        self._settings.append({"name": name, "class": type(optimizer).__name__, "groups": groups})
        self._context.facts["optimizers"] = lambda: self._settings


def _is_inside_step(frame: FrameType) -> bool:
    """Whether a frame, of torch's wrapper of `step`, has any caller with the same code: this step is inside another."""
    return any(below.f_code is frame.f_code for below in outward(frame.f_back))


def _is_of_checkpointing(frame: FrameType) -> bool:
    """Whether a frame or any caller is of `torch.distributed.checkpoint`, whose steps train nothing."""
    return any(
        below.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint") for below in outward(frame)
    )


def _with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a step, with a closure that calls `then()` after each evaluation."""
    named = kwargs.get("closure") is not None
    closure = kwargs["closure"] if named else args[1]

    @functools.wraps(closure)
    def evaluate() -> Any:
        """Call the closure, then `then()`; returns what the closure returned."""
        result = closure()
        then()
        return result

    return (args, {**kwargs, "closure": evaluate}) if named else ((args[0], evaluate, *args[2:]), kwargs)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `step` was given a closure, by name or as the first argument after the optimizer (`args[0]`)."""
    return kwargs.get("closure") is not None or (len(args) > 1 and callable(args[1]))
