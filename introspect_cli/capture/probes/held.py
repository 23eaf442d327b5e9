"""What an optimizer holds: its parameters with their names, their gradients, and what it keeps for each.

That is asked for twice a step of every parameter, so the sites of it all are looked up once.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from introspect_cli.records import Kind, Phase
from introspect_cli.tensors import parallel

if TYPE_CHECKING:
    from introspect_cli.capture.context import Context
    from introspect_cli.capture.named import ParameterName
    from introspect_cli.capture.ranks.flat import Turn


class Held:
    """The names of an optimizer's parameters, and the sites of what it keeps for each, looked up once."""

    def __init__(self, names: list[ParameterName], replaced: int = 0) -> None:
        """Take the names, in the order of the parameters, and how many of all had been replaced by then."""
        self.names = names
        self.replaced = replaced
        self._gradients: dict[int, list[int]] = {}
        self._state: dict[Phase, dict[int, tuple[tuple[str, ...], list[int]]]] = {}
        self._large: list[int] | None = None
        self.all_watched = all(name.watched for name in names)
        self.plans: dict[Phase, Plan] = {}
        """Where everything of every parameter is recorded, as it was the last time."""

    def large(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those large enough for torch to share an operation on them out among its threads: looked for once."""
        if self._large is None:
            self._large = [
                at for at, own in enumerate(parameters) if not is_lazy(own) and own.numel() >= parallel.SHARED_OUT
            ]
        return [parameters[at] for at in self._large]

    def gradient_sites(self, context: Context, call: int) -> list[int]:
        """The site of each parameter's gradient, -1 for what is not watched."""
        sites = self._gradients.get(call)
        if sites is None:
            sites = self._gradients[call] = [
                context.site(name, Phase.OPTIMIZER, Kind.GRAD, call=call) if name.watched else -1 for name in self.names
            ]
        return sites

    def all_states(self, optimizer: Optimizer) -> list[Any]:
        """What the optimizer keeps for each of its parameters, None where that is nothing."""
        # `state` is a defaultdict: asking it with [] would put an empty entry into the script's optimizer.
        # Nor by [] nor by get(): a tensor's own hash is python code.
        by_id: dict[int, Any] = {}
        for holder in [optimizer] if optimizer.state else [optimizer, *_made_of(optimizer)]:
            by_id |= zip(map(id, holder.state.keys()), holder.state.values(), strict=True)
        return list(map(by_id.get, map(id, parameters_of(optimizer))))

    def states(self, optimizer: Optimizer) -> list[tuple[int, dict[str, Any]]]:
        """What the optimizer keeps for parameters that are watched, by the parameter's position."""
        kept = zip(self.names, self.all_states(optimizer), strict=True)
        return [(position, state) for position, (name, state) in enumerate(kept) if state and name.watched]

    def known_state(self, phase: Phase) -> dict[int, tuple[tuple[str, ...], list[int]]]:
        """By position the keys of a parameter's state, where all are of tensors, and their sites."""
        return self._state.setdefault(phase, {})


class Stepping:
    """An optimizer as it steps now.

    Attributes:
        optimizer: it.
        parameters: what it was given, group after group.
        turn: which of its groups these are.
        stands: what stands for them all: the optimizer, or one of the tensors that it steps in turn.
        held: what is known of them; None before they were looked at.
    """

    __slots__ = ("held", "optimizer", "parameters", "stands", "turn")

    def __init__(
        self, optimizer: Optimizer, parameters: list[torch.Tensor], turn: Turn, stands: Any, held: Held | None
    ) -> None:
        """Take what was found."""
        self.optimizer = optimizer
        self.parameters = parameters
        self.turn = turn
        self.stands = stands
        self.held = held


class Plan:
    """The sites of all that an optimizer keeps for its parameters, while it keeps the same things for each."""

    def __init__(self, sites: list[int], states: list[dict[str, Any]]) -> None:
        """Remember the keys, not what is kept under them."""
        self.sites = sites
        self._keys = list(chain.from_iterable(states))
        self._lengths = list(map(len, states))

    def values(self, states: list[Any]) -> list[torch.Tensor] | None:
        """The tensors kept now, in the order of the sites; None where anything else is kept than was."""
        if set(map(type, states)) != {dict} or list(map(len, states)) != self._lengths:
            return None
        if list(chain.from_iterable(states)) != self._keys:
            return None
        values = list(chain.from_iterable(map(dict.values, states)))
        return values if all(issubclass(cls, torch.Tensor) for cls in set(map(type, values))) else None


def with_gradients(
    sites: list[int], parameters: list[torch.Tensor]
) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
    """Those of the parameters that are watched and have a gradient, with their sites and gradients."""
    own_sites: list[int] = []
    own: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for site, parameter in zip(sites, parameters, strict=True):
        if site >= 0 and (gradient := parameter.grad) is not None:
            own_sites.append(site)
            own.append(parameter)
            gradients.append(gradient)
    return own_sites, own, gradients


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All that an optimizer was given, group after group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _made_of(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers that one keeps, in an attribute (ZeroRedundancyOptimizer) or in a list (torchtitan)."""
    found: list[Optimizer] = []
    for value in vars(optimizer).values():
        kept = value if type(value) in (list, tuple) else [value]
        found += [own for own in kept if issubclass(type(own), Optimizer)]
    return found
