"""What goes into modules and what comes out of them, at its sites, with the gradients that come back there.

A value may be a tensor, or nested: every tensor in it has a site of its own. A tensor may be one rank's share of a
larger one, as tensor parallelism hands them around, and is then recorded as such a part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from introspect_cli.capture import private_api, torch_distributed
from introspect_cli.capture.ranks import launchers
from introspect_cli.records import GRADIENT_OF, Kind, Phase
from introspect_cli.tensors.flatten import flatten, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.naming import ModuleState
    from introspect_cli.capture.probes.gradients import GradientProbe
    from introspect_cli.tensors.places import Placed


POSITIONS = tuple(f"[{number}]" for number in range(32))
WHOLE = ("",)
NONE: dict[str, Any] = {}


class At(NamedTuple):
    """Of which call of a module values are, and which of them: inputs or outputs."""

    state: ModuleState
    phase: Phase
    kind: Kind
    call: int


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
        self._gradients, self._take = gradients, gradients.take
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

    def record(
        self,
        state: ModuleState,
        phase: Phase,
        kind: Kind,
        call: int,
        values: tuple[Any, ...],
        paths: tuple[str, ...] = POSITIONS,
        named: dict[str, Any] = NONE,
    ) -> None:
        """Record inputs or outputs of a call, if their kind is recorded; have their gradients recorded, if theirs is.

        A tensor or plain value is recorded at its path, each leaf of a nested one at that and its own; leaves of other
        types are left out.

        Args:
            state: of the module.
            phase: of the call.
            kind: INPUT or OUTPUT.
            call: number of the call.
            values: None is not recorded.
            paths: where each is; positions for further ones.
            named: further ones, at `['name']`.
        """
        done = 0
        if not state.tagged and self.on_value is None:
            done = self._take(values, paths, state.sites, phase, self._kinds_of[kind], call)
        if done == len(values) and not named:
            return
        rest = [(paths[at] if at < len(paths) else f"[{at}]", values[at]) for at in range(done, len(values))]
        rest += [(f"[{name!r}]", value) for name, value in named.items()]
        with private_api.no_torch_function():  # the script's modes and classes are to see its own calls only
            for path, value in rest:
                if value is not None:
                    self._record_other(At(state, phase, kind, call), path, value)

    def _site(self, at: At, path: str) -> int:
        """Number of the site of a value at a path."""
        return self._context.site(at.state, at.phase, at.kind, path, at.call)

    def _record_other(self, at: At, prefix: str, value: Any) -> None:
        """`record` of what may be more than a plain tensor, hidden from what the script watches calls with."""
        cls = type(value)
        if issubclass(cls, torch.Tensor):
            styles = at.state.styles or () if at.kind is Kind.INPUT else ()
            placed = torch_distributed.share(value, prefix, styles) if at.state.tagged else None
            if at.kind in self.kinds:
                self._recorder.emit(self._site(at, prefix), value if placed is None else placed)
            self._note_tensor(at, prefix, value, placed)
            return
        if is_plain(cls):
            if at.kind in self.kinds:
                self._recorder.emit(self._site(at, prefix), value)
            return
        leaves = flatten(value)
        if at.kind in self.kinds:
            shown = [leaf for leaf in leaves if issubclass(type(leaf[1]), torch.Tensor) or is_plain(type(leaf[1]))]
            self._recorder.emit_many([self._site(at, prefix + path) for path, _ in shown], [leaf for _, leaf in shown])
        for path, leaf in leaves:
            if issubclass(type(leaf), torch.Tensor):
                self._note_tensor(at, prefix + path, leaf)

    def _note_tensor(self, at: At, path: str, value: torch.Tensor, placed: Placed | None = None) -> None:
        """Have a tensor's gradient recorded when it comes, and call the listener, if there is one, with the tensor.

        The gradient only if its kind is recorded, the tensor requires one, and gradients are on.

        Args:
            at: which call, and which of its values.
            path: where among these the tensor is.
            value: the tensor.
            placed: the same as one rank's share of a whole; None for a whole tensor.
        """
        gradient = self._gradient_of.get(at.kind)
        if gradient is not None and value.requires_grad and torch.is_grad_enabled():
            site = self._site(at._replace(phase=Phase.BACKWARD, kind=gradient), path)
            if placed is None:
                self._gradients.watch(value, site, at.phase is Phase.RECOMPUTE)
            else:
                self._gradients.watch_share(value, site, placed, at.phase is Phase.RECOMPUTE)
        if self.on_value is not None:
            self.on_value(at.state, at.kind, path, value)


def may_be_shares(state: ModuleState, module: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether inputs or outputs of a module may be one rank's share of a DTensor.

    Decided at the first call, which sets `styles` and `tagged` of the state; later calls return `tagged`.

    Args:
        state: of the module.
        module: that is called.
        args: of the call, looked at for tensors from `to_local`.
    """
    if state.styles is None:
        state.styles = []
        if launchers.is_grouped():  # else there can be no DTensor
            state.styles = torch_distributed.styles_of(module)
            state.tagged |= bool(state.styles) or any(torch_distributed.from_call(one) is not None for one in args)
    return state.tagged
