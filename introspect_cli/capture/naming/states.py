"""What has a name: a module with its calls, a parameter or buffer as long as somebody holds the tensor.

A tensor of the script must go when the script drops it, and another may come to its address. So none is referred to:
who holds it is known, weakly, and is asked whether it is still there. A tensor has the name of the place where a module
keeps it. An optimizer may be given one that no module is known to hold: that one is named by its place in the
optimizer, until a module turns up that holds it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import nn

    from introspect_cli.capture.torch_distributed import Style, Unsharded
    from introspect_cli.records import Kind, Phase


class Named:
    """A module, parameter or buffer with a name: whether it is recorded, and its sites."""

    __slots__ = ("fqn", "module_class", "sites", "watched")

    def __init__(self, fqn: str, module_class: str, *, watched: bool) -> None:
        """Set the name; no site yet.

        Args:
            fqn: the name.
            module_class: class of the module, or of the module that owns the parameter.
            watched: whether it is recorded.
        """
        self.fqn = fqn
        self.module_class = module_class
        self.watched = watched
        self.sites: dict[tuple[Phase, Kind, str, int], int] = {}


class ModuleState(Named):
    """A module's name, and its count of calls in the current step."""

    def __init__(self, reference: weakref.ref[nn.Module], fqn: str, module_class: str, *, watched: bool) -> None:
        """Start with no call counted; `reference` is to the module."""
        super().__init__(fqn, module_class, watched=watched)
        self.reference = reference
        self.plain: type[nn.Module] | None = None
        """The module's class, once it is known that a call of it is nothing but a call."""
        self.inner: ModuleState | None = None
        self.compiled = False
        self.step = -1
        self.styles: list[Style] | None = None
        """Tensor parallel styles of the inputs; None before the first call."""
        self.gives: list[Style] = []
        """Tensor parallel styles of the outputs."""
        self.tagged = False
        """Whether what goes in or comes out may be one rank's share of a DTensor."""
        self.calls: dict[Phase, int] = {}

    def next_call(self, step: int, phase: Phase) -> int:
        """Number of the call that begins, from 0 in each step and phase; counts it."""
        self._enter_step(step)
        number = self.calls.get(phase, 0)
        self.calls[phase] = number + 1
        return number

    def calls_so_far(self, step: int, phase: Phase) -> int:
        """Number of calls counted in that step and phase; 0 where the last call was in another step."""
        return self.calls.get(phase, 0) if self.step == step else 0

    def include_call(self, step: int, phase: Phase, call: int) -> None:
        """Have the next call in this step and phase get a number above `call`, which was counted elsewhere."""
        self._enter_step(step)
        self.calls[phase] = max(self.calls.get(phase, 0), call + 1)

    def count_from(self, step: int, phase: Phase, number: int) -> None:
        """Have the next call of a step and phase get this number."""
        self._enter_step(step)
        self.calls[phase] = number

    def _enter_step(self, step: int) -> None:
        """Drop the counts of calls if they are of another step than this."""
        if self.step != step:
            self.step = step
            self.calls.clear()

    def called(self, step: int) -> bool:
        """Whether the last step in which calls were counted is this one, and has any."""
        return self.step == step and bool(self.calls)


class ParameterName(Named):
    """A parameter's or buffer's name and the class of the module that owns it."""

    __slots__ = ("_holders", "makeshift")

    def __init__(self, fqn: str, module_class: str, *, watched: bool, makeshift: bool = False) -> None:
        """Set the name; nothing holds the tensor yet, so call `add_holder` next.

        Args:
            fqn: the name.
            module_class: class of the module that owns it, or of the optimizer.
            watched: whether it is recorded.
            makeshift: whether no module is known to hold the tensor.
        """
        super().__init__(fqn, module_class, watched=watched)
        self.makeshift = makeshift
        """Whether no module was known to hold the tensor when it got its name: once one is, it gives a better one."""
        self._holders: list[Holder] = []

    def add_holder(self, holder: Holder) -> None:
        """Add a holder of the tensor; an earlier one of the same owner, and those whose owner is gone, are dropped."""
        self._holders = [other for other in self._holders if other.is_alive and not other.same_owner(holder)]
        self._holders.append(holder)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether any holder has this very tensor at its place now."""
        for holder in self._holders:  # noqa: SIM110 - asked eight times of each parameter, and a generator takes longer
            if holder.holds(tensor):
                return True
        return False

    def place_of(self, tensor: torch.Tensor) -> tuple[weakref.ref[Any], str] | None:
        """A weak reference to the first module that holds the tensor now, and the attribute; None without one."""
        return next((place for holder in self._holders if holder.holds(tensor) and (place := holder.place)), None)

    @property
    def is_alive(self) -> bool:
        """Whether any holder's owner is alive."""
        return any(holder.is_alive for holder in self._holders)


class Holder:
    """Where a tensor of the script is kept: by a module under an attribute, or by an optimizer at a place in a group.

    It tells a tensor from another that has come to its address without any reference to the tensor.
    """

    __slots__ = ("_owner", "_place")

    def __init__(self, owner: nn.Module | torch.optim.Optimizer, place: str | tuple[int, int]) -> None:
        """Refer to the owner weakly.

        Args:
            owner: a module or an optimizer.
            place: a module's attribute, or group and position of an optimizer's parameter.
        """
        self._owner = weakref.ref(owner)
        self._place = place

    @property
    def is_alive(self) -> bool:
        """Whether the owner is alive."""
        return self._owner() is not None

    @property
    def place(self) -> tuple[weakref.ref[Any], str] | None:
        """A weak reference to the module, and the attribute; None where the owner is an optimizer."""
        return (self._owner, self._place) if isinstance(self._place, str) else None

    def same_owner(self, other: Holder) -> bool:
        """Whether both have the same owner."""
        return self._owner() is other._owner()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the owner has this very tensor at the place; False once the owner is gone.

        The place is a module's parameter or buffer, or a position in an optimizer's group.
        """
        owner: Any = self._owner()
        if owner is None:
            return False
        place = self._place
        if isinstance(place, str):
            # The public views build strings; a scripted module's own have no get().
            kept = owner._parameters  # noqa: SLF001 - see above
            if place in kept and kept[place] is tensor:
                return True
            kept = owner._buffers  # noqa: SLF001 - as above
            return place in kept and kept[place] is tensor
        group, position = place
        groups = owner.param_groups
        return (
            group < len(groups)
            and position < len(groups[group]["params"])
            and groups[group]["params"][position] is tensor
        )


class Keeper(Holder):
    """Holder of a rank's shard while the module has the gathered parameter."""

    __slots__ = ()

    def __init__(self, owner: Any) -> None:
        """Refer weakly to what keeps the shard, `owner.sharded_param`."""
        super().__init__(owner, "sharded_param")

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the shard that is kept is this very tensor."""
        return getattr(self._owner(), "sharded_param", None) is tensor


class ParameterNames(dict[int, ParameterName]):
    """Names by the tensor's identity.

    Attributes:
        changes: how often a name was set or deleted.
        replaced: how many tensors that no module was known to hold have got a name from one since.
    """

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        """Start empty; `wanted(fqn)` says whether a name is to be recorded."""
        super().__init__()
        self.changes = 0
        self.replaced = 0
        self._wanted = wanted
        self._room = 100

    def __setitem__(self, tensor: int, name: ParameterName) -> None:
        self.changes += 1
        super().__setitem__(tensor, name)

    def __delitem__(self, tensor: int) -> None:
        self.changes += 1
        super().__delitem__(tensor)

    def name_of(self, tensor: torch.Tensor) -> ParameterName | None:
        """The name of a parameter or buffer; None where it has none, or its holders no longer hold it."""
        name = self.get(id(tensor))
        return name if name is not None and name.is_of(tensor) else None

    def name_alone(self, tensor: torch.Tensor, fqn: str, module_class: str) -> ParameterName:
        """Give a makeshift name to a tensor that no module holds; the caller adds a holder to what is returned."""
        name = ParameterName(fqn, module_class, watched=self._wanted(fqn), makeshift=True)
        self[id(tensor)] = name
        return name

    def name_in(self, module: nn.Module, state: ModuleState) -> None:
        """Name a module's own parameters and buffers `<fqn>.<attribute>`, but those already named by a module."""
        for group in (module._parameters, module._buffers):  # noqa: SLF001 - the public views build strings
            for name, tensor in group.items():
                if tensor is not None and self._is_free(tensor):
                    self._name(tensor, state, name, Holder(module, name))

    def name_shards(self, gathered: Iterable[Unsharded], find: Callable[[nn.Module], ModuleState | None]) -> None:
        """Name this rank's shards of gathered parameters as their modules name these: the optimizer has the shards.

        Shards that have a name from a module, and those of modules without a name, are passed over.

        Args:
            gathered: the parameters.
            find: the state of a module; None for one without a name.
        """
        for holder, name, _, keeper in gathered:
            shard, state = keeper.sharded_param, find(holder)
            if state is not None and self._is_free(shard):
                self._name(shard, state, name, Keeper(keeper), Holder(holder, name))  # the last: once it is there again

    def _is_free(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has no name yet, or only a makeshift one."""
        name = self.name_of(tensor)
        return name is None or name.makeshift

    def _name(self, tensor: torch.Tensor, state: ModuleState, attribute: str, *holders: Holder) -> None:
        """Name a tensor `<fqn of state>.<attribute>`, in place of any earlier name, which counts in `replaced`.

        Args:
            tensor: to name.
            state: of the module.
            attribute: of the module.
            holders: who holds the tensor.
        """
        self.replaced += self.name_of(tensor) is not None
        name = ParameterName(f"{state.fqn}.{attribute}", state.module_class, watched=state.watched)
        for holder in holders:
            name.add_holder(holder)
        self[id(tensor)] = name

    def take_back(self, module: nn.Module, fqn: str) -> None:
        """Drop the names `<fqn>.<attribute>` of a module's own tensors; other names of them stay."""
        for group in (module._parameters, module._buffers):  # noqa: SLF001 - as above
            for attribute, tensor in group.items():
                name = None if tensor is None else self.name_of(tensor)
                if name is not None and name.fqn == f"{fqn}.{attribute}":
                    del self[id(tensor)]

    def aliases(self, module: nn.Module, fqn: str) -> list[str]:
        """`attribute=name` for each of a module's own parameters that is named otherwise than `<fqn>.<attribute>`.

        Parameters without a name, or with a makeshift one, are left out.
        """
        aliases = []
        for attribute, tensor in module._parameters.items():  # noqa: SLF001 - as above
            name = None if tensor is None else self.name_of(tensor)
            if name is not None and not name.makeshift and name.fqn != f"{fqn}.{attribute}":
                aliases.append(f"{attribute}={name.fqn}")
        return aliases

    def drop_gone(self) -> None:
        """Drop the names of tensors whose holders are gone; looks only where there are many more names than before.

        That is, over 100 more than twice as many as it left the last time. No weak reference to a tensor tells when it
        goes: with one, torch could not swap it for another.
        """
        if len(self) > self._room:
            for tensor in [tensor for tensor, name in self.items() if not name.is_alive]:
                del self[tensor]
            self._room = 2 * len(self) + 100
