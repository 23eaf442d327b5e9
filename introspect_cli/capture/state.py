"""Parameters and buffers: as training finds them, and as each optimizer step leaves them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import nn

    from introspect_cli.capture.context import Context


class StateProbe:
    """Records what a model holds. It patches nothing: other probes tell it when."""

    name = "state"

    def __init__(self, context: Context) -> None:
        """Take what all probes share."""
        self._context = context
        self._recorder = context.recorder
        self._started: dict[str, weakref.ref[nn.Module]] = {}
        self._recorded: set[str] = set()
        self._started_step = -1

    def install(self) -> None:
        """Listen for roots and for optimizer steps."""
        self._context.on_root.append(self._root_called)
        self._context.on_after_optimizer.append(self.buffers_after)

    def remove(self) -> None:
        """Stop listening."""
        self._context.on_root.remove(self._root_called)
        self._context.on_after_optimizer.remove(self.buffers_after)

    def _root_called(self, root: nn.Module) -> None:
        state = self._context.names.find(root)
        if state is None:
            return
        context, step = self._context, self._recorder.step
        if self._started_step != step:
            # What the step before left is on record, unless that step was not captured or nobody recorded it.
            self._started_step = step
            if self._recorder.resumed or context.unseen_steps or not context.has_optimizer:
                self._started.clear()
                self._recorded.clear()
        known = self._started.get(state.fqn)
        if known is not None:
            if known() is root:
                return
            # Another model has taken the name of one that is gone: what it starts with is not on record.
            inside = state.fqn + "."
            self._recorded = {name for name in self._recorded if not name.startswith(inside)}
        self._started[state.fqn] = weakref.ref(root)
        context.names.refresh(root)
        self._record(root, Phase.START, parameters=True)

    def buffers_after(self) -> None:
        """Record every buffer, and parameters no optimizer holds, after an optimizer step."""
        for root in self._context.names.roots():
            self._record(root, Phase.OPTIMIZER, parameters=False)

    def parameters_after(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record the parameters an optimizer has just stepped."""
        if Kind.PARAM not in self._context.kinds:
            return
        self._tensors([(Kind.PARAM, parameter) for parameter in parameters], Phase.OPTIMIZER)

    def _record(self, root: nn.Module, phase: Phase, *, parameters: bool) -> None:
        seen: set[int] = set()
        found: list[tuple[Kind, torch.Tensor]] = []
        for module in root.modules():
            groups: list[tuple[Kind, Mapping[str, torch.Tensor | None]]] = []
            if parameters and Kind.PARAM in self._context.kinds:
                groups.append((Kind.PARAM, module._parameters))  # noqa: SLF001 - the public views build strings
            if Kind.BUFFER in self._context.kinds:
                groups.append((Kind.BUFFER, module._buffers))  # noqa: SLF001 - as above
            for kind, group in groups:
                for tensor in group.values():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        found.append((kind, tensor))
        self._tensors(found, phase)

    def _tensors(self, found: list[tuple[Kind, torch.Tensor]], phase: Phase) -> None:
        sites = [self._site(tensor, phase, kind) for kind, tensor in found]
        pairs = [(site, tensor) for site, (_, tensor) in zip(sites, found, strict=True) if site is not None]
        self._recorder.tensors([site for site, _ in pairs], [tensor for _, tensor in pairs])

    def _site(self, tensor: torch.Tensor, phase: Phase, kind: Kind) -> int | None:
        """Where a tensor is recorded; None if it has no values yet, no name, or is not wanted."""
        if is_lazy(tensor):
            return None
        name = self._context.names.parameter(tensor)
        if name is None:
            # A buffer that the module replaced instead of writing into it: name it again.
            for root in self._context.names.roots():
                self._context.names.refresh(root)
            name = self._context.names.parameter(tensor)
        if name is None or not name.watched:
            return None
        if phase is Phase.START:
            if name.fqn in self._recorded:
                return None  # a part that was called by itself, and then the whole
            self._recorded.add(name.fqn)
        return self._context.state_site(name, phase, kind)
