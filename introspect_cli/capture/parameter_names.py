"""The names of parameters and buffers, as long as somebody holds the tensors.

A tensor has the name of the place where a module keeps it. An optimizer may be given one that no module is known to
hold: that one is named by its place in the optimizer, until a module turns up that holds it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from introspect_cli.capture.named import Holder, Keeper, ModuleState, ParameterName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import nn

    from introspect_cli.capture.ranks.torch_distributed import Unsharded


class ParameterNames(dict[int, ParameterName]):
    """Names by the tensor's identity.

    Attributes:
        changes: counts those that were given and taken back.
        replaced: how many tensors that no module was known to hold have got a name from one since.
    """

    __slots__ = ("__dict__", "changes")  # a slot as in `Recorder`

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        """Start with none; `wanted` says whether what has a name is to be recorded."""
        super().__init__()
        self.changes = 0
        self.replaced = 0
        self._wanted = wanted
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}

    def __setitem__(self, tensor: int, name: ParameterName) -> None:
        self.changes += 1
        super().__setitem__(tensor, name)

    def __delitem__(self, tensor: int) -> None:
        self.changes += 1
        super().__delitem__(tensor)

    def of(self, tensor: torch.Tensor) -> ParameterName | None:
        """The name of a parameter or buffer, None if no module seen so far holds it."""
        name = self.get(id(tensor))
        return name if name is not None and name.is_of(tensor) else None

    def name_alone(self, tensor: torch.Tensor, fqn: str, module_class: str) -> ParameterName:
        """Give a name to a tensor that no module holds (an optimizer may be given any); say then who holds it."""
        name = ParameterName(fqn, module_class, watched=self._wanted(fqn), makeshift=True)
        self[id(tensor)] = name
        return name

    def name_in(self, module: nn.Module, state: ModuleState) -> None:
        """Name what a module holds itself, as far as it has no name from another one."""
        for group in (module._parameters, module._buffers):  # noqa: SLF001 - the public views build strings
            for name, tensor in group.items():
                if tensor is not None and self._is_free(tensor):
                    self._name(tensor, state, name, Holder(module, name))

    def name_shards(self, gathered: Iterable[Unsharded], find: Callable[[nn.Module], ModuleState | None]) -> None:
        """Name the shards of what is gathered now, too: they are the optimizer's, and come back."""
        for holder, name, _, keeper in gathered:
            shard, state = keeper.sharded_param, find(holder)
            if state is not None and self._is_free(shard):
                self._name(shard, state, name, Keeper(keeper), Holder(holder, name))  # the last: once it is there again

    def _is_free(self, tensor: torch.Tensor) -> bool:
        name = self.of(tensor)
        return name is None or name.makeshift

    def _name(self, tensor: torch.Tensor, state: ModuleState, attribute: str, *holders: Holder) -> None:
        self.replaced += self.of(tensor) is not None
        name = ParameterName(f"{state.fqn}.{attribute}", state.module_class, watched=state.watched)
        for holder in holders:
            name.held_by(holder)
        self[id(tensor)] = state.tensors[id(tensor)] = name

    def take_back(self, module: nn.Module, fqn: str) -> None:
        """Take back the names that a module of that name has given."""
        for group in (module._parameters, module._buffers):  # noqa: SLF001 - as above
            for attribute, tensor in group.items():
                name = None if tensor is None else self.of(tensor)
                if name is not None and name.fqn == f"{fqn}.{attribute}":
                    del self[id(tensor)]

    def aliases(self, module: nn.Module, fqn: str) -> list[str]:
        """Of the parameters that a module shares with others, the names they have there."""
        aliases = []
        for attribute, tensor in module._parameters.items():  # noqa: SLF001 - as above
            name = None if tensor is None else self.of(tensor)
            if name is not None and not name.makeshift and name.fqn != f"{fqn}.{attribute}":
                aliases.append(f"{attribute}={name.fqn}")
        return aliases

    def forget_with(self, optimizer: torch.optim.Optimizer, tensors: list[int]) -> None:
        """Forget the names of tensors, given by identity, when this optimizer goes and nobody else holds them."""
        key, names, watched = id(optimizer), self, self._optimizers

        def forget(reference: weakref.ref[torch.optim.Optimizer]) -> None:
            if watched.get(key) is reference:
                del watched[key]
            for tensor in tensors:
                name = names.get(tensor)
                if name is not None and not name.is_alive:
                    del names[tensor]

        watched[key] = weakref.ref(optimizer, forget)
