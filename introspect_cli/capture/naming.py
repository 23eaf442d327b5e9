"""What modules, parameters and buffers are called, for how long, and what a module holds."""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from introspect_cli.capture import private_api, torch_distributed
from introspect_cli.capture.environment.sources import class_source
from introspect_cli.capture.frames import script_frames, variable_names
from introspect_cli.records import Kind, ModuleInfo
from introspect_cli.selection import near_module, selects
from introspect_cli.texts import bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from introspect_cli.capture.options import CaptureOptions
    from introspect_cli.capture.torch_distributed import Style, Unsharded
    from introspect_cli.records import Phase


# ---
# Facts about the script's objects, kept no longer than the objects are.
#
# Modules, loaders and optimizers are told apart by identity (a script may give them any `__eq__` and `__hash__`), and
# an identity is free for another object once its owner is gone. So every entry holds a weak reference, answers only
# for the very object it was made for, and goes when that object goes. It is not for tensors:
# `torch.utils.swap_tensors` refuses a tensor that has weak references.

Value = TypeVar("Value")


class ById(Generic[Value]):
    """A dictionary keyed by the identity of live objects."""

    def __init__(self) -> None:
        """Start with no object."""
        self.entries: dict[int, tuple[weakref.ref[Any], Value]] = {}
        """Reference and value by `id`; the dict object stays the same."""

    def get(self, thing: object) -> Value | None:
        """The object's value; None where it has none."""
        entry = self.entries.get(id(thing))
        return entry[1] if entry is not None and entry[0]() is thing else None

    def set(self, thing: object, value: Value) -> None:
        """Set the object's value; it is forgotten when the object goes."""
        # Written in C: a signal's handler never runs in it, so that nothing which one raises is dropped there.
        gone = functools.partial(self.entries.pop, id(thing))
        self.entries[id(thing)] = (weakref.ref(thing, gone), value)

    def discard(self, thing: object) -> None:
        """Forget the object; nothing where it has no value."""
        self.entries.pop(id(thing), None)

    def objects(self) -> list[Any]:
        """Live objects that have a value, in the order in which they first got one."""
        return [thing for reference, _ in list(self.entries.values()) if (thing := reference()) is not None]

    def clear(self) -> None:
        """Forget all objects."""
        self.entries.clear()


class FreeNames:
    """Names by class and number: `Adam`, `Adam#2`; the number of an object that is gone is free again.

    A name may have to rest: two models of one class that live one after the other within a step are two, and their
    values are not to be told apart by the order in which they came.
    """

    def __init__(self) -> None:
        """Start with all names free."""
        self._fresh: set[str] = set()
        self._taken: dict[str, weakref.ref[Any]] = {}

    def find(self, thing: object) -> str | None:
        """The name given to this object, None if it has none."""
        return next((name for name, taken in self._taken.items() if taken() is thing), None)

    def release(self, thing: object) -> None:
        """Free the object's name; nothing where it has none."""
        self._taken.pop(self.find(thing) or "", None)

    def free_resting(self) -> None:
        """Free the names given by `name(rests=True)` whose objects are gone; the caller does so as a step ends."""
        self._fresh.clear()

    def name(self, thing: object, base: str, *, rests: bool = False) -> str:
        """The object's name: the one it has, else the first free one of `base`, `base#2`, `base#3`, ...

        Args:
            thing: the object.
            base: its class.
            rests: True if the name is not free before `free_resting`, even if the object goes.
        """
        if (existing := self.find(thing)) is not None:
            return existing
        number, name = 1, base
        while (taken := self._taken.get(name)) is not None and (name in self._fresh or taken() is not None):
            number += 1
            name = f"{base}#{number}"
        if rests:
            self._fresh.add(name)
        self._taken[name] = weakref.ref(thing)
        return name


# ---
# What a module holds, and what kind of module it is, without asking the module.
#
# `modules()`, `parameters()` and their like may be overridden by the script: they may have effects, count calls, or
# leave things out. What torch itself keeps in each module is walked instead.
#
# Some calls of modules are more than a call, or none: traced for their shapes, compiled, scripted, fused, wrapped.
# What runs inside such a call is not seen, or is recorded elsewhere: who records calls has to know them.

WRAPPED_BY = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
"""Classes that only wrap another module, and the attribute that holds it."""


def modules_in(root: nn.Module) -> Iterator[nn.Module]:
    """A module and all below it, each once: depth first, parents before children."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        children = module._modules  # noqa: SLF001 - the public view may be the script's
        if children:  # most have none, and this is asked of all of them in each step
            pending += [child for child in reversed(list(children.values())) if child is not None]


def holders_in(root: nn.Module) -> list[nn.Module]:
    """Modules of a tree that have parameters or buffers of their own, each once, parents before children."""
    return [module for module in modules_in(root) if module._parameters or module._buffers]  # noqa: SLF001 - the public views build strings


Contents = tuple[list[Kind], list[torch.Tensor], list[Any]]
"""Tensors, and the kind of each (no pairs, since every few hundred of those cost a round of the garbage collector); and
the modules' dictionaries that hold them."""


def tensors_in(holders: list[weakref.ref[nn.Module]], kinds: frozenset[Kind]) -> Contents:
    """Modules' own parameters and buffers: the kinds, the tensors, each once, in the order met, and what holds them.

    Those of submodules are not among them.

    Args:
        holders: the modules, each looked at by itself (see `holders_in`); one that is gone is passed over.
        kinds: PARAM, BUFFER or both.
    """
    param, buffer = Kind.PARAM, Kind.BUFFER  # an attribute of an enumeration takes as long as a call
    parameters, buffers = param in kinds, buffer in kinds
    groups: list[Any] = []  # a scripted module's is no dict
    kind_of: list[Kind] = []
    for module in [module for reference in holders if (module := reference()) is not None]:  # all, in each step
        if parameters and (group := module._parameters):  # noqa: SLF001 - as above
            groups.append(group)
            kind_of.append(param)
        if buffers and (own := module._buffers):  # noqa: SLF001 - as above
            groups.append(own)
            kind_of.append(buffer)
    of = [*chain.from_iterable(map(repeat, kind_of, map(len, groups)))]
    tensors = [*chain.from_iterable(map(methodcaller("values"), groups))]
    ids = [*map(id, tensors)]
    if len({*ids}) < len(ids) or id(None) in ids:
        first = {one: at for at, one in reversed([*enumerate(ids)]) if one != id(None)}
        at = sorted(first.values())
        of, tensors = [of[one] for one in at], [tensors[one] for one in at]
    return of, tensors, groups


def place_of(tensors: list[torch.Tensor], groups: list[Any]) -> object:
    """A key of what `tensors_in` gives: another one where a module, name or tensor is another, or stands elsewhere."""
    return [*map(id, groups), *chain.from_iterable(map(methodcaller("keys"), groups)), *map(id, tensors)]


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Attribute and tensor of each parameter and buffer of a module itself."""
    groups = (module._parameters, module._buffers)  # noqa: SLF001 - the public views may be the script's, or build strings
    return [(name, tensor) for group in groups for name, tensor in group.items() if tensor is not None]


def parameters_in(root: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of a module and all below it; one that several modules share comes several times."""
    for module in modules_in(root):
        yield from (parameter for parameter in module._parameters.values() if parameter is not None)  # noqa: SLF001 - as above


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters of all groups in order; of a single group the optimizer's own list, which must not be changed."""
    groups = optimizer.param_groups
    if len(groups) == 1:  # as it is: a copy is memory that the allocator has to tidy up for
        return list(groups[0]["params"]) if type(groups[0]["params"]) is not list else groups[0]["params"]
    return [parameter for group in groups for parameter in group["params"]]


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module that a wrapper holds; None for a module whose class's name is not in `WRAPPED_BY`."""
    attribute = WRAPPED_BY.get(type(module).__name__)
    inner = module._modules.get(attribute) if attribute else None  # noqa: SLF001 - `__getattr__` may be the wrapper's
    return inner if isinstance(inner, nn.Module) else None


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside all wrappers; the module itself where it is no wrapper."""
    while (inner := wrapped(module)) is not None:
        module = inner
    return module


def is_traced(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether any argument itself (not nested) is a fake tensor, so that the call computes nothing (export, shapes)."""
    fake = private_api.FAKE_TENSOR
    for value in args:  # no generators: this runs for every call of every module
        if type(value) is not torch.Tensor and issubclass(type(value), fake):
            return True
    return bool(kwargs) and any(issubclass(type(value), fake) for value in kwargs.values())


def hides(module: nn.Module) -> bool:
    """Whether what runs inside a module's calls is not seen: it is scripted, or compiled by `torch.compile`."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or type(module).__name__ == "OptimizedModule"
        or module.__dict__.get(private_api.MODULE_WRAPPED_CALL) is not None
    )


def is_unfinished(module: nn.Module) -> bool:
    """Whether `nn.Module.__init__` was not called, which torch reports when the module is called."""
    return "_forward_hooks" not in module.__dict__


def has_own_call(cls: type[nn.Module]) -> bool:
    """Whether a class, or a base of it that comes before `nn.Module`, defines `__call__`."""
    return next(base for base in cls.__mro__ if "__call__" in vars(base)) is not nn.Module


def is_plain_call(module: nn.Module) -> bool:
    """Whether a call of a module is only that: no own `__call__`, wrapper, graph, script or compiled region.

    False for a `TransformerEncoderLayer`, which torch may fuse, and for the list of a parametrization.
    """
    if has_own_call(type(module)):
        return False
    special = (torch.jit.ScriptModule, nn.TransformerEncoderLayer, torch.fx.GraphModule, ParametrizationList)
    return not isinstance(module, special) and wrapped(module) is None and not hides(module)


# ---
# What has a name: a module with its calls, a parameter or buffer as long as somebody holds the tensor.
#
# A tensor of the script must go when the script drops it, and another may come to its address. So none is referred
# to: who holds it is known, weakly, and is asked whether it is still there. A tensor has the name of the place where
# a module keeps it. An optimizer may be given one that no module is known to hold: that one is named by its place in
# the optimizer, until a module turns up that holds it.


@dataclass(eq=False, slots=True)
class Named:
    """A module, parameter or buffer with a name.

    Attributes:
        fqn: the name.
        module_class: class of the module, of the module that owns the parameter, or of the optimizer that has it.
        watched: whether it is recorded.
        sites: numbers of its sites.
    """

    fqn: str
    module_class: str
    watched: bool
    sites: dict[tuple[Phase, Kind, str, int], int] = field(default_factory=dict, init=False)


@dataclass(eq=False, slots=True)
class ModuleState(Named):
    """A module's name, and its count of calls in the current step.

    Attributes:
        plain: the module's class, once it is known that a call of it is nothing but a call.
        compiled: whether the module is what a compiled region was made of.
        step: the last one in which it was called; -1 before.
        styles: tensor parallel styles of the inputs; None before the first call.
        tagged: whether what goes in or comes out may be one rank's share of a DTensor.
        calls: how many in that step, by phase.
    """

    plain: type[nn.Module] | None = None
    compiled: bool = False
    step: int = -1
    styles: list[Style] | None = None
    tagged: bool = False
    calls: dict[Phase, int] = field(default_factory=dict)

    def calls_in(self, step: int) -> dict[Phase, int]:
        """Numbers of calls so far in the step that runs, by phase; counts of another step are dropped."""
        if self.step != step:
            self.step = step
            self.calls.clear()
        return self.calls


Place = str | tuple[int, int]
"""Where an owner holds a tensor: under an attribute, or at a position in an optimizer's group."""


@dataclass(eq=False, slots=True)
class ParameterName(Named):
    """A parameter's or buffer's name; nothing holds the tensor at first, so `add_holder` is to be called next.

    Attributes:
        makeshift: whether no module was known to hold the tensor when it got its name: once one is, it gives a better
            one.
    """

    makeshift: bool = False
    _holders: list[tuple[weakref.ref[Any], Place]] = field(default_factory=list)

    def add_holder(self, owner: object, place: Place) -> None:
        """Add who holds the tensor, and where; an earlier place of the same owner is dropped, and so are owners gone.

        Args:
            owner: a module, an optimizer, or what keeps a rank's shard while the module has the gathered parameter.
            place: a module's attribute, group and position of an optimizer's parameter, or a keeper's attribute.
        """
        self._holders = [each for each in self._holders if (other := each[0]()) is not None and other is not owner]
        self._holders.append((weakref.ref(owner), place))

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether any holder has this very tensor at its place now."""
        for reference, place in self._holders:  # noqa: SIM110 - asked eight times of each parameter, and a generator takes longer
            if _held_at(reference(), place) is tensor:
                return True
        return False

    def module_of(self, tensor: torch.Tensor) -> nn.Module | None:
        """The first module that holds the tensor now; None where only optimizers do."""
        held = ((reference(), place) for reference, place in self._holders)
        holders = (owner for owner, place in held if isinstance(owner, nn.Module) and _held_at(owner, place) is tensor)
        return next(holders, None)

    @property
    def is_alive(self) -> bool:
        """Whether any holder is alive."""
        return any(reference() is not None for reference, _ in self._holders)


def _held_at(owner: Any, place: Place) -> object:
    """The tensor that an owner has at a place now; None where it has none there, or is gone."""
    if owner is None:
        return None
    if not isinstance(place, str):
        group, position = place
        held = owner.param_groups[group]["params"] if group < len(owner.param_groups) else ()
        return held[position] if position < len(held) else None
    if not isinstance(owner, nn.Module):
        return getattr(owner, place, None)
    # The public views build strings; a scripted module's own have no get().
    kept = owner._parameters if place in owner._parameters else owner._buffers  # noqa: SLF001 - see above
    return kept[place] if place in kept else None  # noqa: SIM401 - see above


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

    def name_of(self, tensor: torch.Tensor) -> ParameterName | None:
        """The name of a parameter or buffer; None where it has none, or its holders no longer hold it."""
        name = self.get(id(tensor))
        return name if name is not None and name.is_of(tensor) else None

    def name_alone(self, tensor: torch.Tensor, fqn: str, module_class: str) -> ParameterName:
        """Give a makeshift name to a tensor that no module holds; the caller adds a holder to what is returned."""
        self.changes += 1
        name = self[id(tensor)] = ParameterName(fqn, module_class, watched=self._wanted(fqn), makeshift=True)
        return name

    def name_in(self, module: nn.Module, state: ModuleState) -> None:
        """Name a module's own parameters and buffers `<fqn>.<attribute>`, but those already named by a module."""
        for name, tensor in own_tensors(module):
            if self._is_free(tensor):
                self._name(tensor, state, name).add_holder(module, name)

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
                named = self._name(shard, state, name)
                named.add_holder(keeper, "sharded_param")
                named.add_holder(holder, name)  # once it is there again

    def _is_free(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has no name yet, or only a makeshift one."""
        name = self.name_of(tensor)
        return name is None or name.makeshift

    def _name(self, tensor: torch.Tensor, state: ModuleState, attribute: str) -> ParameterName:
        """Name a tensor `<fqn of state>.<attribute>`, in place of any earlier name, which counts in `replaced`.

        The caller adds a holder to what is returned.
        """
        self.replaced += self.name_of(tensor) is not None
        self.changes += 1
        name = self[id(tensor)] = ParameterName(f"{state.fqn}.{attribute}", state.module_class, watched=state.watched)
        return name

    def take_back(self, module: nn.Module, fqn: str) -> None:
        """Drop the names `<fqn>.<attribute>` of a module's own tensors; other names of them stay."""
        for attribute, tensor in own_tensors(module):
            name = self.name_of(tensor)
            if name is not None and name.fqn == f"{fqn}.{attribute}":
                self.changes += 1
                del self[id(tensor)]

    def aliases(self, module: nn.Module, fqn: str) -> list[str]:
        """`attribute=name` for each of a module's own parameters that is named otherwise than `<fqn>.<attribute>`.

        Parameters without a name, or with a makeshift one, are left out.
        """
        held = [(at, self.name_of(one)) for at, one in module._parameters.items() if one is not None]  # noqa: SLF001 - as above
        named = [(at, name.fqn) for at, name in held if name is not None and not name.makeshift]
        return [f"{at}={name}" for at, name in named if name != f"{fqn}.{at}"]

    def drop_gone(self) -> None:
        """Drop the names of tensors whose holders are gone; looks only where there are many more names than before.

        That is, over 100 more than twice as many as it left the last time. No weak reference to a tensor tells when it
        goes: with one, torch could not swap it for another.
        """
        if len(self) > self._room:
            for tensor in [tensor for tensor, name in self.items() if not name.is_alive]:
                self.changes += 1
                del self[tensor]
            self._room = 2 * len(self) + 100


# ---
# Names for modules and parameters that two runs of a script agree on.
#
# A script never says what its model is called. A module gets its name when it is first called: the topmost module
# that holds it is the root, named by its class, and everything below is named by attribute path, as in `state_dict`.
# Wrappers (DDP, compile, checkpoint) are transparent: what they wrap has the name it would have without. A name that
# belonged to a module that is gone is free again, so a loss module built anew each step keeps one name instead of
# getting a thousand.

_LONGEST_VARIABLE = 80

_PASSING_PARENTS = ("torch.export", "torch._export", "torch._dynamo")
"""Modules with classes that hold a model temporarily and are not part of it."""


def class_name(module: nn.Module) -> str:
    """Name of the class as its author wrote it, of a wrapper that of the module inside.

    Also for a scripted, traced or `fully_shard`ed module.
    """
    module = unwrap(module)
    if isinstance(module, torch.jit.ScriptModule):
        return str(module.original_name)
    cls = type(module)
    # fully_shard gives a module a class of its own, made of torch's and the author's.
    if cls.__name__.startswith("FSDP") and len(cls.__bases__) == 2 and cls.__bases__[0].__name__ == "FSDPModule":
        cls = cls.__bases__[1]
    return cls.__name__


class NameFilter:
    """Predicate over FQNs: matches an include glob, if any, no exclude glob, and has at most `max_depth` dots."""

    def __init__(self, options: CaptureOptions) -> None:
        """Keep the options; names are matched when the filter is called."""
        self._include, self._exclude, self._max_depth = options.modules, options.exclude, options.max_depth
        self._asked: set[str] = set()

    def __call__(self, fqn: str) -> bool:
        """Whether the module of that name is to be recorded; with globs, the name is kept for `unmatched`."""
        if self._include or self._exclude:
            self._asked.add(fqn)
        is_too_deep = self._max_depth is not None and fqn.count(".") > self._max_depth
        is_included = not self._include or selects(fqn, self._include)
        return is_included and not is_too_deep and not selects(fqn, self._exclude)

    def unmatched(self) -> list[str]:
        """A sentence for each glob that matched no name the filter was called with; [] where it was never called."""
        names = sorted(self._asked)
        globs = (*self._include, *self._exclude) if names else ()
        unmatched = [glob for glob in globs if not any(selects(name, (glob,)) for name in names)]
        return [f"no module that ran matches {glob}{near_module(glob, names)}" for glob in unmatched]


class Names:
    """Gives every module and parameter its name, once."""

    def __init__(self, wanted: NameFilter) -> None:
        """Start without names; `wanted` says of a name whether it is to be recorded."""
        self.wanted = wanted
        """Says whether what has a name is to be recorded."""
        self.states: ById[ModuleState] = ById()
        self.find = self.states.get
        """Gives the state of a module that has a name; None without one."""
        self._parents: ById[weakref.ref[nn.Module]] = ById()
        self._holders: ById[bool] = ById()
        self._free = FreeNames()
        self.parameters = ParameterNames(wanted)
        """Names of parameters and buffers."""
        self._roots: ById[bool] = ById()
        self.roots: Callable[[], list[nn.Module]] = self._roots.objects
        """Gives the live roots, in the order in which they were first named."""
        self._trees: list[ModuleInfo] = []
        self._variables: dict[str, str] = {}
        self._made: dict[str, ModuleState] = {}
        self._lock = threading.RLock()
        self.settled = False
        self.any_module = False
        """Whether any module was ever named, or called."""
        self.made_on_the_fly: Callable[[nn.Module], None] = lambda _module: None
        """Told of a module that no other one holds, when it is named in the forward that calls it."""

    def clear(self) -> None:
        """Drop modules' states and tensors' names, so that all is freed when python ends as without a capture."""
        with self._lock:
            self.states.clear()
            self._made.clear()
            self.parameters.clear()

    def note_child(self, parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        """Note that a module was put into another; torch calls it (registration hook).

        Before training, a root that is put into another loses its name, and all below it theirs. Nothing for None, for
        a parent of torch's compiler or export, and for an FX graph that is given a module which another one holds.
        """
        if child is None or type(parent).__module__.startswith(_PASSING_PARENTS):
            return
        if isinstance(parent, torch.fx.GraphModule) and self._topmost(child) is not child:
            return  # a graph of what belongs to a model
        self._parents.set(child, weakref.ref(parent))
        if not self.settled and self.find(child) is not None and self._roots.get(child):
            with self._lock:
                self._unname_tree(child)

    def note_parameter(self, module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        """Note that a module was given a parameter, so that it may be a model by itself; nothing once `settled`.

        Torch calls it (registration hook).
        """
        if not self.settled and self._holders.get(module) is None:
            self._holders.set(module, True)

    def ensure_named(self, module: nn.Module, caller: ModuleState | None, suffix: str = "") -> ModuleState:
        """The state of a module that is being called; names it now if it has no name, and with it all of its root.

        A module that no other one holds, called in another's forward, is named below its caller, `GPT.Linear`, goes on
        with the count of calls of the last module of that name, and is given to `made_on_the_fly`.

        Args:
            module: the module called.
            caller: state of the module in whose forward it is called; None for an outermost call.
            suffix: what the name of a new root gets after its class.
        """
        if (state := self.find(module)) is not None:
            return state
        with self._lock:
            self.any_module = True
            top = self._topmost(module)
            if top is module and caller is not None:
                # Held in a plain list or built on the fly: no path leads to it but the call. Each call may make a new
                # one, whose calls are counted on from those of the last one of its name.
                made = self._name_tree(module, f"{caller.fqn}.{class_name(module)}")
                state = self._made.setdefault(made.fqn, made)
                self.states.set(module, state)
                self.made_on_the_fly(module)
            else:
                self._name_tree(top, class_name(top) + suffix)
                state = self.find(module) or self._name_tree(module, class_name(module))
            return state

    def name_root(self, module: nn.Module, name: str) -> None:
        """Name a module `name`, and all below it by path, before its first call.

        It becomes `name#2` if another has that name; a module that has a name keeps it.
        """
        with self._lock:
            self.any_module = True
            self._name_tree(module, name)

    def renumber(self, kept: int | None) -> None:
        """Change the step of all counts of calls, as steps start from 0 again.

        Args:
            kept: the step that becomes step 0; counts of others are dropped. None drops all.
        """
        for _, state in self.states.entries.values():
            state.step = 0 if state.step == kept else -1

    def root_of(self, module: nn.Module) -> nn.Module:
        """The root of a named module.

        The module itself where it is a root, or has a name that is not below its root's.
        """
        state = self.find(module)
        top = self._topmost(module)
        named = self.find(top)
        return top if state is not None and named is not None and state.fqn.startswith(f"{named.fqn}.") else module

    def name_holders_of(self, tensors: list[torch.Tensor]) -> None:
        """Name the models that hold any of these tensors as parameters, among all modules that were seen being built.

        All below them is named, too. Graphs of compilers and exports are passed over.

        A script that resumes from a checkpoint may step its optimizer before it calls the model, to make its state. And
        `functional_call` calls a model while it holds other tensors.
        """
        with self._lock:
            heard = [*self._holders.objects(), *self._parents.objects()]  # in the order of building, wrapped or not
            tops = {id(top): top for top in map(self._topmost, heard)}
            for top in tops.values():
                if type(top).__module__.startswith(_PASSING_PARENTS) or isinstance(top, torch.fx.GraphModule):
                    continue
                held = set(map(id, parameters_in(top)))
                if any(id(tensor) in held for tensor in tensors):
                    self._name_tree(top, class_name(top))

    def new_modules(self) -> list[ModuleInfo]:
        """Rows of modules that were named since the last call; a second call returns []."""
        with self._lock:
            trees, self._trees = self._trees, []
            return trees

    def refresh(self, root: nn.Module) -> None:
        """Name modules and tensors that were put below a named root since (adapters, lazy parameters).

        Nothing for a root without a name.
        """
        if (state := self.find(root)) is not None:
            with self._lock:
                self._name_below(root, state.fqn)

    def free_gone_names(self) -> None:
        """As a step ends, free the names of models and tensors that are gone."""
        self._free.free_resting()
        self.parameters.drop_gone()

    def _topmost(self, module: nn.Module) -> nn.Module:
        """The outermost module that holds a module, directly or not; the module itself where none does."""
        return [module, *self.holders_of(module)][-1]

    def holders_of(self, module: nn.Module) -> Iterator[nn.Module]:
        """Modules that hold a module, the nearest first; those that no longer hold it end the chain."""
        seen = {id(module)}
        while (entry := self._parents.get(module)) is not None:
            parent = entry()
            if parent is None or id(parent) in seen or all(held is not module for held in parent._modules.values()):  # noqa: SLF001 - the public view copies
                return
            yield parent
            module = parent
            seen.add(id(module))

    def _name_tree(self, root: nn.Module, base: str) -> ModuleState:
        """Make a module a root, and name all below it; of a new one with parameters the script's variable is noted.

        Returns its state.

        Args:
            root: keeps its name if it, or what it wraps, has one.
            base: else the first free name of `base`, `base#2`, ...
        """
        if (state := self.find(root) or self.find(unwrap(root))) is not None:
            fqn = state.fqn
        else:
            trains = next(parameters_in(root), None) is not None
            fqn = self._free.name(root, base, rests=trains)
            if trains and fqn not in self._variables:
                self._variables[fqn] = _variable_name(root)
        self._roots.set(root, True)
        self._name_below(root, fqn)
        return self.states.entries[id(root)][1]

    def _unname_tree(self, root: nn.Module) -> None:
        """Drop the names of a former root, which is now part of another module, and of all below it.

        Their rows that were not taken yet are dropped, too.
        """
        state = self.find(root)
        assert state is not None
        self._roots.discard(root)
        self._free.release(root)
        gone = set()
        for module, fqn, _ in _tree(root, state.fqn):
            gone.add(fqn)
            self.states.discard(module)
            self.parameters.take_back(module, fqn)
        self._trees = [info for info in self._trees if info.fqn not in gone]

    def _name_below(self, root: nn.Module, fqn: str) -> None:
        """Name each module, parameter and buffer of a tree that has no name; new modules get a row, but wrappers none.

        Of parameters that `fully_shard` has gathered, this rank's shards are named as well.

        Args:
            root: of the tree.
            fqn: its name.
        """
        gathered: list[torch_distributed.Unsharded] = []
        for module, name, inner in _tree(root, fqn):
            if (state := self.find(module)) is None:
                state = ModuleState(name, class_name(module), watched=self.wanted(name))
                self.states.set(module, state)
                if inner is None:
                    self._trees.append(self.describe(module, state))
            self.parameters.name_in(module, state)
            gathered += torch_distributed.unsharded_of(module)
        self.parameters.name_shards(gathered, self.find)

    def describe(self, module: nn.Module, state: ModuleState) -> ModuleInfo:
        """A module's row of the tree, without attributes; it is not written here."""
        return ModuleInfo(
            fqn=state.fqn,
            module_class=state.module_class,
            source=class_source(type(module)),
            parameters=tuple(name for name, value in module._parameters.items() if value is not None),  # noqa: SLF001
            buffers=tuple(name for name, value in module._buffers.items() if value is not None),  # noqa: SLF001
            aliases=tuple(self.parameters.aliases(module, state.fqn)),
            variable=self._variables.get(state.fqn, ""),
        )


def _variable_name(root: nn.Module) -> str:
    """Name by which the script's outermost frame holds a model or what it wraps: `net`, `cfg['net']`; "" for none.

    Frames further in are asked after it. Cut to 80 characters.
    """
    inner = unwrap(root)
    names = variable_names({id(root), id(inner)}, nn.Module, reversed(list(script_frames())), plain_first=True)
    return bounded(names.get(id(root)) or names.get(id(inner), ""), _LONGEST_VARIABLE)


def _tree(root: nn.Module, fqn: str) -> Iterator[tuple[nn.Module, str, nn.Module | None]]:
    """Each module of a tree once, depth first: the module, its FQN, and the module that it wraps, None for none.

    A wrapped module has the FQN of its wrapper.

    Args:
        root: of the tree.
        fqn: its name.
    """
    seen: set[int] = set()
    waiting = [(root, fqn)]
    while waiting:
        module, name = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        inner = wrapped(module)
        yield module, name, inner
        if inner is not None:
            waiting.append((inner, name))
            continue
        held = module._modules.items()  # noqa: SLF001 - `named_children` hides repeated ones
        waiting += reversed([(child, f"{name}.{attribute}") for attribute, child in held if child is not None])
