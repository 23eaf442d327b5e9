"""What an optimizer steps with and holds: hyper-parameters, parameters with gradients, and what it keeps for each.

Learning rates are recorded in each step, other hyper-parameters where they are new or have changed. What is held is
asked for twice a step of every parameter, so the sites of it all are looked up once.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from introspect_cli.capture.naming import parameters_of
from introspect_cli.records import Kind, Phase
from introspect_cli.tensors.kernels import KERNELS, numbers_of
from introspect_cli.tensors.parallel import SHARED_OUT
from introspect_cli.tensors.values import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.naming import ParameterName
    from introspect_cli.capture.recording.recorder import Recorder

PLAIN = (bool, int, float, str)
_STATES = (dict, defaultdict)


class ParameterSites:
    """Names of an optimizer's parameters, and sites of their gradients and state."""

    def __init__(self, names: list[ParameterName], parameters: list[torch.Tensor], replaced: int) -> None:
        """Keep the names; sites are looked up later.

        Args:
            names: in the order of the parameters.
            parameters: what they are of.
            replaced: `ParameterNames.replaced` at the time; where that has changed, these names are out of date.
        """
        self.names = names
        self.replaced = replaced
        self.large = [at for at, each in enumerate(parameters) if not is_lazy(each) and each.numel() >= SHARED_OUT]
        """Positions of those whose operations torch shares out among threads; lazy ones are left out."""
        self._gradients: dict[int, Sequence[int]] = {}
        self.all_watched = all(name.watched for name in names)
        self.plans: dict[Phase, Plan] = {}
        """Plan of the last recording in each phase."""

    def gradient_sites(self, context: Context, call: int) -> Sequence[int]:
        """Site of each parameter's gradient, -1 for a parameter that is not recorded; cached for each `call`.

        Args:
            context: gives sites.
            call: how often a closure has computed gradients in this step before.
        """
        if call not in self._gradients:
            at = Phase.OPTIMIZER, Kind.GRAD, "", call
            sites = [context.site(name, *at) if name.watched else -1 for name in self.names]
            self._gradients[call] = numbers_of(sites)
        return self._gradients[call]

    def states(self, optimizer: Optimizer) -> tuple[Sequence[int], list[Any]]:
        """Positions, among the optimizer's parameters, of watched ones that have state, and the state dict of each.

        Adds nothing to the script's optimizer. Where that has no state, the states of the optimizers in it are given.
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


class Plan(NamedTuple):
    """Sites of all state of an optimizer whose every parameter has some, good while the keys stay the same.

    Attributes:
        sites: one for each value in the states, in order.
        lengths: how many values each state has.
        keys: in all states.
    """

    sites: Sequence[int]
    lengths: Sequence[int]
    keys: list[str]

    def is_recorded(self, recorder: Recorder, optimizer: Optimizer, parameters: list[torch.Tensor]) -> bool:
        """Record all state in one compiled call, if its keys are those of the plan; returns whether it was recorded.

        False means that nothing was, and that the caller has to do it one by one.
        """
        known = parameters, optimizer.state, self.lengths, self.keys, torch.Tensor
        is_dict = type(optimizer.state) in _STATES
        return is_dict and recorder.record_compiled(KERNELS.record_state, self.sites, *known)


def _inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers in the attributes of another, or in lists and tuples there (ZeroRedundancyOptimizer); not deeper."""
    optimizers: list[Optimizer] = []
    for value in vars(optimizer).values():
        kept = value if type(value) in (list, tuple) else [value]
        optimizers += [item for item in kept if issubclass(type(item), Optimizer)]
    return optimizers


def setting(value: object) -> Any:
    """A hyper-parameter as plain data: numbers, texts and None as they are, lists and tuples as lists.

    A CPU tensor of up to 16 elements gives its values, any other tensor `tensor on DEVICE`; another object its class's
    name.
    """
    value = plain(value)
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() <= 16 else f"tensor on {value.device}"
    if isinstance(value, (tuple, list)):
        return [setting(item) for item in value]
    return type(value).__name__
