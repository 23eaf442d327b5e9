"""What goes into modules and what comes out of them, at its sites, with the gradients that come back there.

A value may be a tensor, or nested: every tensor in it has a site of its own. A tensor may be one rank's share of a
larger one, as tensor parallelism hands them around, and is then recorded as such a part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from introspect_cli.capture import private_api, torch_distributed
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
_WHOLE = ("",)
_INPUT = Kind.INPUT  # an attribute of an enumeration takes as long as a call


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
        self._kinds_of = {kind: (kind if kind in kinds else None, self._gradient_of.get(kind)) for kind in GRADIENT_OF}
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
        done = self._take(state, phase, _INPUT, call, args, _POSITIONS)
        if done < len(args):
            for position in range(done, len(args)):
                self.record_value(state, phase, _INPUT, call, f"[{position}]", args[position])
        for name, value in kwargs.items():
            self.record_value(state, phase, _INPUT, call, f"[{name!r}]", value)

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
        if value is not None and not (prefix == "" and self._take(state, phase, kind, call, (value,), _WHOLE)):
            with private_api.no_torch_function():  # the script's modes and classes are to see its own calls only
                self._record_other(state, phase, kind, call, prefix, value)

    def _take(
        self, state: ModuleState, phase: Phase, kind: Kind, call: int, values: tuple[Any, ...], paths: tuple[str, ...]
    ) -> int:
        """Record those first values that the compiled path takes (`GradientProbe.take`); how many these are."""
        if state.tagged or self.on_value is not None:
            return 0
        return self._gradients.take(values, paths, state.sites, phase, self._kinds_of[kind], call)

    def _record_other(self, state: ModuleState, phase: Phase, kind: Kind, call: int, prefix: str, value: Any) -> None:
        """`record_value` of what may be more than a plain tensor, hidden from what the script watches calls with."""
        cls = type(value)
        if issubclass(cls, torch.Tensor):
            placed = torch_distributed.share(value, prefix, self._styles(state, kind, value)) if state.tagged else None
            self._record_tensor(state, phase, kind, call, prefix, value, placed)
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
                self._record_tensor(state, phase, kind, call, prefix + path, leaf, is_recorded=True)

    @staticmethod
    def _styles(state: ModuleState, kind: Kind, value: torch.Tensor) -> Sequence[Style]:
        """Tensor parallel styles that place a value: the module's for its inputs, or for its outputs.

        () for an output that requires gradients.
        """
        if kind is Kind.INPUT:
            return state.styles or ()
        return state.gives if not value.requires_grad else ()

    def _record_tensor(
        self,
        state: ModuleState,
        phase: Phase,
        kind: Kind,
        call: int,
        path: str,
        value: torch.Tensor,
        placed: Placed | None = None,
        *,
        is_recorded: bool = False,
    ) -> None:
        """Record a tensor, have its gradient recorded when it comes, and call the listener, if there is one, with it.

        The gradient only if its kind is recorded, the tensor requires one, and gradients are on.

        Args:
            state: of the module.
            phase: of the call.
            kind: INPUT or OUTPUT.
            call: number of the call.
            path: where among inputs or outputs the tensor is.
            value: the tensor.
            placed: the same as one rank's share of a whole; None for a whole tensor.
            is_recorded: whether it is on record already.
        """
        if kind in self.kinds and not is_recorded:
            site = self._context.site(state, phase, kind, path, call)
            self._recorder.emit(site, value if placed is None else placed)
        gradient = self._gradient_of.get(kind)
        if gradient is not None and value.requires_grad and torch.is_grad_enabled():
            site = self._context.site(state, Phase.BACKWARD, gradient, path, call)
            if placed is None:
                self._gradients.watch(value, site, phase is Phase.RECOMPUTE)
            else:
                self._gradients.watch_share(value, site, placed, phase is Phase.RECOMPUTE)
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
