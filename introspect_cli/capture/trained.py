"""Which modules a script trains: those whose parameters an optimizer holds, or that it trains by hand.

It tells a forward pass without gradients that evaluates the model in training from one that is part of training (a
teacher, a frozen encoder).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from introspect_cli.capture.contents import parameters_in
from introspect_cli.capture.identity import ById
from introspect_cli.capture.ranks import zero

if TYPE_CHECKING:
    import torch
    from torch import nn


class Trained:
    """The optimizers that have been met, and the modules that are trained."""

    def __init__(self) -> None:
        """Start without optimizers."""
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._parameters: set[int] | None = None
        self._roots: ById[bool] = ById()
        self._by_hand: ById[bool] = ById()
        self._versions: ById[tuple[int, int]] = ById()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear of an optimizer that has been made."""
        self._optimizers = [reference for reference in self._optimizers if reference() is not None]
        self._optimizers.append(weakref.ref(optimizer))
        self.ask_again()

    def ask_again(self) -> None:
        """An optimizer may hold other parameters than it did."""
        self._parameters = None
        self._roots.clear()

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has been met."""
        return any(reference() is optimizer for reference in self._optimizers)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are alive."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def by_hand(self, module: nn.Module) -> None:
        """A backward pass has begun for a module that ran where no optimizer is."""
        self._by_hand.set(module, True)

    def is_trained(self, module: nn.Module) -> bool:
        """Whether an optimizer holds any of a module's parameters and may change it, or the script trains it by hand.

        An optimizer may be given all parameters of a model, those of a frozen teacher in it too.
        """
        known = self._roots.get(module) or self._by_hand.get(module)
        if known is None:
            held = [
                parameter
                for parameter in parameters_in(module)
                if id(parameter) in self._held() or (zero.is_loaded() and zero.is_stepped(parameter))
            ]
            known = any(parameter.requires_grad for parameter in held)
            if known or not held:  # what is frozen may be set free later
                self._roots.set(module, known)
        return known

    def _held(self) -> set[int]:
        """`id` of all parameters that live optimizers hold, and so keep alive."""
        if self._parameters is None:
            groups = [group for optimizer in self.optimizers() for group in optimizer.param_groups]
            self._parameters = {id(parameter) for group in groups for parameter in group["params"]}
        return self._parameters

    def written(self) -> bool:
        """Whether the first parameter of any optimizer was written to since this was last asked."""
        written = False
        for optimizer in self.optimizers():
            if not optimizer.param_groups or not optimizer.param_groups[0]["params"]:
                continue
            parameter = optimizer.param_groups[0]["params"][0]
            before, now = self._versions.get(optimizer), (id(parameter), parameter._version)  # noqa: SLF001 - counts in-place writes
            self._versions.set(optimizer, now)
            written |= before is not None and before[0] == now[0] and before != now
        return written
