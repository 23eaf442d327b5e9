"""What an optimizer steps with and holds: hyper-parameters, parameters with gradients, and what it keeps for each.

Learning rates are recorded in each step, other hyper-parameters where they are new or have changed. What is held is
asked for twice a step of every parameter, so the sites of it all are looked up once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from introspect_cli.capture.naming.contents import parameters_of
from introspect_cli.records import Kind, Phase, Site, SiteInfo
from introspect_cli.tensors import parallel
from introspect_cli.tensors.flatten import flatten
from introspect_cli.tensors.kernels import KERNELS, numbers_of
from introspect_cli.tensors.places import Placed
from introspect_cli.tensors.values import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.naming.states import ParameterName
    from introspect_cli.capture.ranks.flat import Turn
    from introspect_cli.capture.recording.recorder import Recorder

PLAIN = (bool, int, float, str)
_KEPT = frozenset({*PLAIN, type(None)})
_OTHER = object()
_STATES = (dict, defaultdict)


class ParameterSites:
    """Names of an optimizer's parameters, and sites of their gradients and state."""

    def __init__(self, names: list[ParameterName], replaced: int = 0) -> None:
        """Keep the names; sites are looked up later.

        Args:
            names: in the order of the parameters.
            replaced: `ParameterNames.replaced` at the time; where that has changed, these names are out of date.
        """
        self.names = names
        self.replaced = replaced
        self._gradients: dict[int, Sequence[int]] = {}
        self._large: list[int] | None = None
        self.all_watched = all(name.watched for name in names)
        self.plans: dict[Phase, Plan] = {}
        """Plan of the last recording in each phase."""

    def large(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those parameters whose operations torch shares out among threads (`parallel.SHARED_OUT` elements or more).

        Found at the first call, by position; later calls look up the same positions.
        """
        if self._large is None:
            self._large = [
                at
                for at, parameter in enumerate(parameters)
                if not is_lazy(parameter) and parameter.numel() >= parallel.SHARED_OUT
            ]
        return [parameters[at] for at in self._large]

    def gradient_sites(self, context: Context, call: int) -> Sequence[int]:
        """Site of each parameter's gradient, -1 for a parameter that is not recorded; cached for each `call`.

        Args:
            context: gives sites.
            call: how often a closure has computed gradients in this step before.
        """
        sites = self._gradients.get(call)
        if sites is None:
            sites = self._gradients[call] = numbers_of(
                context.site(name, Phase.OPTIMIZER, Kind.GRAD, call=call) if name.watched else -1 for name in self.names
            )
        return sites

    def states(self, optimizer: Optimizer) -> tuple[Sequence[int], list[Any]]:
        """Positions of those recorded parameters that have state, and the state dict of each.

        Adds nothing to the script's optimizer. One without state of its own is asked for that of the optimizers in it.
        """
        # `state` is a defaultdict: asking it with [] would put an empty entry into the script's optimizer.
        # Nor by [] nor by get(): a tensor's own hash is python code.
        parameters, kept = list(map(id, parameters_of(optimizer))), optimizer.state
        if list(map(id, kept.keys())) == parameters:
            states = list(kept.values())
        else:
            by_id: dict[int, Any] = {}
            for holder in [optimizer] if kept else [optimizer, *_inner_optimizers(optimizer)]:
                by_id |= zip(map(id, holder.state.keys()), holder.state.values(), strict=True)
            states = list(map(by_id.get, parameters))
        if self.all_watched and all(states):
            return range(len(states)), states
        at = [at for at, (name, state) in enumerate(zip(self.names, states, strict=True)) if state and name.watched]
        return at, [states[position] for position in at]


@dataclass(slots=True)
class Stepping:
    """An optimizer during one step.

    Attributes:
        optimizer: that steps.
        parameters: what it was given, group after group.
        turn: which of its groups these are.
        key: object by which `known` is found again: the optimizer, or its first parameter where groups step one by one.
        known: what is known of them; None before they were looked at.
    """

    optimizer: Optimizer
    parameters: list[torch.Tensor]
    turn: Turn
    key: Any
    known: ParameterSites | None


class Plan:
    """Sites of all optimizer state, valid while the keys and their number stay the same."""

    def __init__(self, sites: list[int], positions: Sequence[int], states: list[dict[str, Any]]) -> None:
        """Remember the keys in the states, not their values.

        Args:
            sites: one for each value in the states, in order.
            positions: of the parameters that have state.
            states: their state dicts.
        """
        self.sites = numbers_of(sites)
        self._are_all = positions == range(len(states))
        self._keys = list(chain.from_iterable(states))
        self._lengths = numbers_of(map(len, states))

    def is_recorded(self, recorder: Recorder, stepping: Stepping) -> bool:
        """Record all state in one compiled call, if the keys are those of the plan; returns whether it was recorded.

        False means that nothing was, and that the caller has to do it one by one.
        """
        state, parameters = stepping.optimizer.state, stepping.parameters
        if type(state) not in _STATES or not self._are_all:
            return False
        known = parameters, state, self._lengths, self._keys, torch.Tensor
        return recorder.record_compiled(KERNELS.record_state, self.sites, *known)


class OptimizerRecords:
    """Records gradients and state of optimizers."""

    def __init__(self, context: Context) -> None:
        """Record nothing yet."""
        self._context = context
        self._recorder = context.recorder

    def gradients(self, stepping: Stepping, call: int = 0) -> None:
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
        sites, parameters, gradients = _with_gradients(sites, parameters)
        placed = context.parts.placed_values(
            sites, parameters, gradients, lambda name: context.site(name, Phase.OPTIMIZER, Kind.GRAD, call=call)
        )
        self._recorder.emit_many(*placed)

    def state(self, stepping: Stepping, phase: Phase) -> None:
        """Record the state of each parameter; by the last step's plan while that fits, else one by one.

        A new plan is made where all of the state was recorded.
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
        """State with the place of each tensor in its whole, by position of the parameter.

        State of parameters that lie inside a flat one is recorded here, and not returned.
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
        """Sites and tensors of one parameter's state, which the caller records; numbers and texts are recorded here."""
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


def _with_gradients(
    sites: Sequence[int], parameters: list[torch.Tensor]
) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
    """Sites, parameters and gradients of those parameters that have a site (not -1) and a gradient."""
    kept_sites: list[int] = []
    kept: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for site, parameter in zip(sites, parameters, strict=True):
        if site >= 0 and (gradient := parameter.grad) is not None:
            kept_sites.append(site)
            kept.append(parameter)
            gradients.append(gradient)
    return kept_sites, kept, gradients


def _inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers in the attributes of another, or in lists and tuples there (ZeroRedundancyOptimizer, torchtitan)."""
    optimizers: list[Optimizer] = []
    for value in vars(optimizer).values():
        kept = value if type(value) in (list, tuple) else [value]
        optimizers += [item for item in kept if issubclass(type(item), Optimizer)]
    return optimizers


class _Recorded(NamedTuple):
    """Last record of a hyper-parameter: the object if immutable and equal to itself, its plain form, its site."""

    value: object
    plain: Any
    site: int


class Hyperparameters:
    """Records the hyper-parameters of optimizer groups."""

    def __init__(self, recorder: Recorder) -> None:
        """Start with no hyper-parameter recorded."""
        self._recorder = recorder
        self._recorded: dict[tuple[str, int], dict[str, _Recorded]] = {}

    def record(self, optimizer: Optimizer, name: str, first: int) -> None:
        """Record `lr` of each group.

        Other entries of it where they are new, changed, or the step before was not recorded.

        Args:
            optimizer: whose groups.
            name: its name.
            first: number of its first group.
        """
        resumed = self._recorder.resumed
        for number, group in enumerate(optimizer.param_groups, first):
            recorded = self._recorded.setdefault((name, number), {})
            for key, value in group.items():
                before = recorded.get(key)
                is_rate = key == "lr"
                if key == "params" or (before is not None and before.value is value and not is_rate and not resumed):
                    continue
                plain = setting(value)
                if is_rate or resumed or before is None or before.plain != plain:
                    if before is None:
                        path = f"[{number}][{key!r}]"
                        place = Site(Phase.OPTIMIZER, Kind.HYPERPARAMETER, name, 0, path)
                        site = self._recorder.site(place, SiteInfo(type(optimizer).__name__))
                    else:
                        site = before.site
                    recorded[key] = _Recorded(value if _is_fixed(value) else _OTHER, plain, site)
                    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                        self._recorder.emit(site, value)
                    else:
                        self._recorder.emit(site, plain)


class OptimizerSettings:
    """Groups of optimizers with parameter names: the document `settings/optimizers`."""

    def __init__(self, facts: dict[str, Callable[[], Any]]) -> None:
        """Start without optimizers; `facts["optimizers"]` is set when one is noted."""
        self._document: list[dict[str, Any]] = []
        self._facts = facts

    def note(self, name: str, optimizer: Optimizer, fqns: list[list[str]], *, first: int, in_turn: bool) -> None:
        """Set the entry of an optimizer in the document, and have that written.

        Args:
            name: its name.
            optimizer: whose groups they are.
            fqns: for each of its parameters its name, or the names of those that lie in it if it is flat.
            first: number of the first of these groups; those before stay as they were.
            in_turn: whether another optimizer may have it step its groups one after the other, so that the others have
                no parameters now; these stay as they were.
        """
        remaining = iter(fqns)
        groups = [
            {
                **{key: setting(value) for key, value in group.items() if key != "params"},
                "params": [fqn for _ in group["params"] for fqn in next(remaining)],
            }
            for group in optimizer.param_groups
        ]
        before = [group for entry in self._document if entry["name"] == name for group in entry["groups"]]
        groups = [*before[:first], *groups]
        if in_turn:  # those that are not stepped now may have no parameters
            groups = [group if group["params"] else [*before[at : at + 1], group][0] for at, group in enumerate(groups)]
        self._document = [entry for entry in self._document if entry["name"] != name]
        self._document.append({"name": name, "class": type(optimizer).__name__, "groups": groups})
        self._facts["optimizers"] = lambda: self._document


def _is_fixed(value: object) -> bool:
    """Whether a value is a number, text, None or a tuple of such, and equal to itself (not NaN)."""
    if type(value) is tuple:
        return all(type(item) in _KEPT for item in value)
    return type(value) in _KEPT and value == value  # noqa: PLR0124 - see above


def setting(value: object) -> Any:
    """A hyper-parameter as plain data: numbers, texts and lists as they are, a small CPU tensor as a list.

    A tensor of more than 16 elements, or elsewhere, is told by its device, another object by its class.
    """
    value = plain(value)
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() <= 16 else f"tensor on {value.device}"
    if isinstance(value, (tuple, list)):
        return [setting(item) for item in value]
    return type(value).__name__
