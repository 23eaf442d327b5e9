"""What has a name: a module with its calls, a parameter or buffer with those who hold it.

A tensor of the script must go when the script drops it, and another may come to its address. So none is referred to:
who holds it is known, weakly, and is asked whether it is still there.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from introspect_cli.capture.ranks.tags import Style
    from introspect_cli.records import Kind, Phase


class Named:
    """A module, a parameter or a buffer that has a name, whether it is wanted, and the sites of what is its own."""

    __slots__ = ("fqn", "module_class", "sites", "watched")

    def __init__(self, fqn: str, module_class: str, *, watched: bool) -> None:
        """Start without sites; of a parameter, the class is that of the module that owns it."""
        self.fqn = fqn
        self.module_class = module_class
        self.watched = watched
        self.sites: dict[tuple[Phase, Kind, str, int], int] = {}


class CallSites:
    """The sites of one call of a module, counted within a step, whose inputs are tensors by position and one comes out.

    Attributes:
        inputs: of each input, and of its gradient; -1 for what is not recorded.
        output: of what comes out, and of its gradient; None until something has.
    """

    __slots__ = ("inputs", "output")

    def __init__(self) -> None:
        self.inputs: list[tuple[int, int]] = []
        self.output: tuple[int, int] | None = None


class ModuleState(Named):
    """What is known of one module: its name, and its count of calls in the current step."""

    __slots__ = (
        "__weakref__",
        "calls",
        "compiled",
        "forward",
        "gives",
        "inner",
        "plain",
        "reference",
        "step",
        "styles",
        "tagged",
        "tensors",
    )

    def __init__(self, reference: weakref.ref[nn.Module], fqn: str, module_class: str, *, watched: bool) -> None:
        super().__init__(fqn, module_class, watched=watched)
        self.reference = reference
        self.plain: type[nn.Module] | None = None
        """The module's class, once it is known that a call of it is nothing but a call."""
        self.forward: list[CallSites] = []
        """Of each call in the phase of that name."""
        self.inner: ModuleState | None = None
        self.compiled = False
        self.step = -1
        self.styles: list[Style] | None = None
        """What tensor parallelism takes its inputs for; None before that was looked at."""
        self.gives: list[Style] = []
        """What plain tensors tensor parallelism makes of its outputs."""
        self.tagged = False
        """Whether what goes in or comes out may be one rank's share of a DTensor."""
        self.calls: dict[Phase, int] = {}
        self.tensors: dict[int, ParameterName] = {}

    def sites_of_call(self, call: int) -> CallSites:
        """The sites of a call in an ordinary forward pass."""
        while len(self.forward) <= call:
            self.forward.append(CallSites())
        return self.forward[call]

    def next_call(self, step: int, phase: Phase) -> int:
        """Count a call; the count starts anew with each step."""
        self._be_in(step)
        number = self.calls.get(phase, 0)
        self.calls[phase] = number + 1
        return number

    def counted(self, step: int, phase: Phase) -> int:
        """Calls so far in that step and phase."""
        return self.calls.get(phase, 0) if self.step == step else 0

    def seen(self, step: int, phase: Phase, call: int) -> None:
        """Note a call that something else than the module's own `__call__` has counted."""
        self._be_in(step)
        self.calls[phase] = max(self.calls.get(phase, 0), call + 1)

    def count_from(self, step: int, phase: Phase, number: int) -> None:
        """Have the next call of a step and phase be the one of this number."""
        self._be_in(step)
        self.calls[phase] = number

    def _be_in(self, step: int) -> None:
        if self.step != step:
            self.step = step
            self.calls.clear()

    def called(self, step: int) -> bool:
        """Whether the module was called in that step."""
        return self.step == step and bool(self.calls)


class ParameterName(Named):
    """A parameter's or buffer's name and the class of the module that owns it."""

    __slots__ = ("_holders", "makeshift")

    def __init__(self, fqn: str, module_class: str, *, watched: bool, makeshift: bool = False) -> None:
        super().__init__(fqn, module_class, watched=watched)
        self.makeshift = makeshift
        """Whether no module was known to hold the tensor when it got its name: once one is, it gives a better one."""
        self._holders: list[Holder] = []

    def held_by(self, holder: Holder) -> None:
        """Hear who holds the tensor."""
        self._holders = [other for other in self._holders if other.is_alive and not other.same_owner(holder)]
        self._holders.append(holder)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether one of those who hold what has this name holds this very tensor."""
        for holder in self._holders:  # noqa: SIM110 - asked eight times of each parameter, and a generator takes longer
            if holder.holds(tensor):
                return True
        return False

    def place_of(self, tensor: torch.Tensor) -> tuple[weakref.ref[Any], str] | None:
        """Which module holds the tensor, and under which name; None where no module does."""
        return next((place for holder in self._holders if holder.holds(tensor) and (place := holder.place)), None)

    @property
    def is_alive(self) -> bool:
        """Whether anybody still holds what has this name."""
        return any(holder.is_alive for holder in self._holders)


class Holder:
    """Where a tensor of the script is kept: by a module under an attribute, or by an optimizer at a place in a group.

    It tells a tensor from another that has come to its address without any reference to the tensor.
    """

    __slots__ = ("_owner", "_place")

    def __init__(self, owner: nn.Module | torch.optim.Optimizer, place: str | tuple[int, int]) -> None:
        """Keep no reference to the owner but a weak one."""
        self._owner = weakref.ref(owner)
        self._place = place

    @property
    def is_alive(self) -> bool:
        """Whether the owner is."""
        return self._owner() is not None

    @property
    def place(self) -> tuple[weakref.ref[Any], str] | None:
        """The module, and the attribute; None where it is an optimizer."""
        return (self._owner, self._place) if isinstance(self._place, str) else None

    def same_owner(self, other: Holder) -> bool:
        """Whether it is the same owner's."""
        return self._owner() is other._owner()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is still there."""
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
    """What keeps a rank's shard of a parameter while the module has the whole of it."""

    __slots__ = ()

    def __init__(self, owner: Any) -> None:
        """Keep no reference to the owner but a weak one."""
        super().__init__(owner, "sharded_param")

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the shard is still that tensor."""
        return getattr(self._owner(), "sharded_param", None) is tensor
