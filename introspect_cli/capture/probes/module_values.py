"""What goes into modules and what comes out of them, at its sites, with the gradients that come back there.

A value may be a tensor, or nested: every tensor in it has a site of its own. A tensor may be one rank's share of a
larger one, as tensor parallelism hands them around, and is then recorded as such a part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture import torch_distributed
from introspect_cli.capture.ranks import launchers
from introspect_cli.records import GRADIENT_OF, Kind, Phase
from introspect_cli.tensors.flatten import flatten, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.naming import ModuleState
    from introspect_cli.capture.probes.gradients import GradientProbe
    from introspect_cli.capture.torch_distributed import Style
    from introspect_cli.tensors.places import Placed


_POSITIONS = tuple(f"[{number}]" for number in range(32))


class ModuleValues:
    """Records inputs and outputs of modules.

    Attributes:
        kinds: of inputs and outputs, those that are recorded.
        inputs: whether anybody wants to know of inputs.
        outputs: and of outputs.
        on_value: hears of every tensor that goes in or comes out; None where nobody does.
    """

    def __init__(self, context: Context, gradients: GradientProbe) -> None:
        """Start empty; `gradients` records the gradients of inputs and outputs."""
        self._context = context
        self._recorder = context.recorder
        self._gradients = gradients
        kinds = context.kinds
        self._gradient_of = {of: gradient for of, gradient in GRADIENT_OF.items() if gradient in kinds}
        self.kinds = frozenset(kind for kind in GRADIENT_OF if kind in kinds)
        self.inputs = Kind.INPUT in {*self.kinds, *self._gradient_of}
        self.outputs = Kind.OUTPUT in {*self.kinds, *self._gradient_of}
        self.on_value: Callable[[ModuleState, Kind, str, torch.Tensor], None] | None = None

    def listen(self, listener: Callable[[ModuleState, Kind, str, torch.Tensor], None]) -> None:
        """Call the listener with state, kind, path and value of every tensor that is a module's input or output.

        Also of kinds that are not recorded. There is one listener: a second replaces it.
        """
        self.on_value = listener
        self.inputs = self.outputs = True

    def record_arguments(
        self, state: ModuleState, phase: Phase, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record a call's arguments, positional ones at `[0]`, `[1]`, ..., those by name at `['name']`.

        Args:
            state: of the module.
            phase: of the call.
            call: its number.
            args: positional arguments.
            kwargs: those by name.
        """
        for path, value in zip(_POSITIONS, args, strict=False):
            self.record_value(state, phase, Kind.INPUT, call, path, value)
        for position in range(len(_POSITIONS), len(args)):
            self.record_value(state, phase, Kind.INPUT, call, f"[{position}]", args[position])
        for name, value in kwargs.items():
            self.record_value(state, phase, Kind.INPUT, call, f"[{name!r}]", value)

    def record_value(self, state: ModuleState, phase: Phase, kind: Kind, call: int, prefix: str, value: Any) -> None:
        """Record one input or output, if its kind is recorded; have its tensors' gradients recorded, if theirs is.

        A tensor or plain value is recorded at `prefix`, each leaf of a nested one at `prefix` and its path; leaves of
        other types are left out. A gap where looking into the value fails.

        Args:
            state: of the module.
            phase: of the call.
            kind: INPUT or OUTPUT.
            call: number of the call.
            prefix: where among inputs or outputs the value is; "" for the output itself.
            value: None is not recorded.
        """
        cls = type(value)
        if cls is torch.Tensor or issubclass(cls, torch.Tensor):
            placed = torch_distributed.share(value, prefix, self._styles(state, kind, value)) if state.tagged else None
            if kind in self.kinds:
                site = state.sites.get((phase, kind, prefix, call))
                if site is None:
                    site = self._context.site(state, phase, kind, prefix, call)
                if placed is not None or self._recorder.record_small(site, value) < 0:
                    self._recorder.emit(site, value if placed is None else placed)
            self._follow(state, phase, kind, call, prefix, value, placed)
            return
        if value is None:
            return
        if is_plain(cls):
            if kind in self.kinds:
                self._recorder.emit(self._context.site(state, phase, kind, prefix, call), value)
            return
        try:
            leaves = flatten(value)
        except Exception as error:  # looking into an object of the script's runs code of the script's
            site = self._context.site(state, phase, kind, prefix, call)
            self._recorder.gap(site, f"{type(value).__name__} cannot be looked into: {type(error).__name__}")
            return
        if kind in self.kinds:
            shown = [leaf for leaf in leaves if issubclass(type(leaf[1]), torch.Tensor) or is_plain(type(leaf[1]))]
            sites = [self._context.site(state, phase, kind, prefix + path, call) for path, _ in shown]
            self._recorder.emit_many(sites, [value for _, value in shown])
        for path, leaf in leaves:
            if issubclass(type(leaf), torch.Tensor):
                self._follow(state, phase, kind, call, prefix + path, leaf)

    @staticmethod
    def _styles(state: ModuleState, kind: Kind, value: torch.Tensor) -> Sequence[Style]:
        """Tensor parallel styles that place a value: the module's for its inputs, or for its outputs.

        () for an output that requires gradients.
        """
        if kind is Kind.INPUT:
            return state.styles or ()
        return state.gives if not value.requires_grad else ()

    def _follow(
        self,
        state: ModuleState,
        phase: Phase,
        kind: Kind,
        call: int,
        path: str,
        value: torch.Tensor,
        placed: Placed | None = None,
    ) -> None:
        """Have a tensor's gradient recorded when it comes, and call the listener, if there is one, with the tensor.

        The gradient only if its kind is recorded, the tensor requires one, and gradients are on.

        Args:
            state: of the module.
            phase: of the call.
            kind: INPUT or OUTPUT.
            call: number of the call.
            path: where among inputs or outputs the tensor is.
            value: the tensor.
            placed: the same as one rank's share of a whole; None for a whole tensor.
        """
        gradient = self._gradient_of.get(kind)
        if gradient is not None and value.requires_grad and torch.is_grad_enabled():
            site = state.sites.get((Phase.BACKWARD, gradient, path, call))
            if site is None:
                site = self._context.site(state, Phase.BACKWARD, gradient, path, call)
            recomputed = phase is Phase.RECOMPUTE
            if placed is not None and placed.part.source == "tag" and not placed.part.reduction and not recomputed:
                self._gradients.watch_share(value, site, placed.shape, placed.part)
            else:
                self._gradients.watch(value, site, recomputed=recomputed)
        if self.on_value is not None:
            self.on_value(state, kind, path, value)


def may_be_shares(state: ModuleState, module: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether inputs or outputs of a module may be one rank's share of a DTensor.

    Decided at the first call, which sets `styles`, `gives` and `tagged` of the state; later calls return `tagged`.

    Args:
        state: of the module.
        module: that is called.
        args: of the call, looked at for tensors from `to_local`.
    """
    if state.styles is None:
        state.styles = []
        if launchers.is_grouped():  # else there can be no DTensor
            state.styles, state.gives = torch_distributed.styles_of(module), torch_distributed.styles_of_outputs(module)
            styled = bool(state.styles or state.gives)
            state.tagged |= styled or any(torch_distributed.from_call(value) is not None for value in args)
    return state.tagged
