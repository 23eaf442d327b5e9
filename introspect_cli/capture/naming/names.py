"""Names for modules and parameters that two runs of a script agree on.

A script never says what its model is called. A module gets its name when it is first called: the topmost module
that holds it is the root, named by its class, and everything below is named by attribute path, as in
`state_dict`. Wrappers (DDP, compile, checkpoint) are transparent: what they wrap has the name it would have
without. A name that belonged to a module that is gone is free again, so a loss module built anew each step keeps
one name instead of getting a thousand.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from introspect_cli.capture import torch_distributed
from introspect_cli.capture.environment.sources import class_source
from introspect_cli.capture.frames import script_frames, variable_names
from introspect_cli.capture.naming.contents import parameters_in, unwrap, wrapped
from introspect_cli.capture.naming.identity import ById, FreeNames, Keyed, keyed
from introspect_cli.capture.naming.states import ModuleState, ParameterNames
from introspect_cli.records import ModuleInfo
from introspect_cli.selection import near_module, selects
from introspect_cli.texts import bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LONGEST_VARIABLE = 80

_PASSING_PARENTS = ("torch.export", "torch._export", "torch._dynamo")
"""Modules with classes that hold a model temporarily and are not part of it."""


def class_name(module: nn.Module) -> str:
    """Name of the class as its author wrote it, also for a scripted, traced or `fully_shard`ed module."""
    if isinstance(module, torch.jit.ScriptModule):
        return str(module.original_name)
    cls = type(module)
    # fully_shard gives a module a class of its own, made of torch's and the author's.
    if cls.__name__.startswith("FSDP") and len(cls.__bases__) == 2 and cls.__bases__[0].__name__ == "FSDPModule":
        cls = cls.__bases__[1]
    return cls.__name__


class NameFilter:
    """Predicate over FQNs: matches an include glob, if any, no exclude glob, and has at most `max_depth` dots."""

    def __init__(self, include: tuple[str, ...], exclude: tuple[str, ...], max_depth: int | None) -> None:
        """Keep the options; names are matched when the filter is called.

        Args:
            include: globs, of which a name has to match any; () for every name.
            exclude: globs, of which a name must match none.
            max_depth: how many dots a name may have at most; None for any number.
        """
        self._include = include
        self._exclude = exclude
        self._max_depth = max_depth
        self._asked: set[str] = set()

    def __call__(self, fqn: str) -> bool:
        """Whether the module of that name is to be recorded; with globs, the name is kept for `unmatched`."""
        if self._include or self._exclude:
            self._asked.add(fqn)
        if self._max_depth is not None and fqn.count(".") > self._max_depth:
            return False
        if self._include and not selects(fqn, self._include):
            return False
        return not selects(fqn, self._exclude)

    def unmatched(self) -> list[str]:
        """A sentence for each glob that matched no name the filter was called with; [] where it was never called."""
        names = sorted(self._asked)
        unmatched = [
            glob for glob in (*self._include, *self._exclude) if not any(selects(name, (glob,)) for name in names)
        ]
        return [f"no module that ran matches {glob}{near_module(glob, names)}" for glob in unmatched] if names else []


class Names:
    """Gives every module and parameter its name, once."""

    def __init__(self, wanted: NameFilter) -> None:
        """Start without names; `wanted` says of a name whether it is to be recorded."""
        self.wanted = wanted
        """Says whether what has a name is to be recorded."""
        self.states: dict[int, ModuleState] = {}
        """States by `id` of the module; the dict object stays the same."""
        self._parents: ById[weakref.ref[nn.Module]] = ById()
        self._holders: ById[bool] = ById()
        self._free = FreeNames()
        self.parameters = ParameterNames(wanted)
        """Names of parameters and buffers."""
        self._roots: list[weakref.ref[nn.Module]] = []
        self._trees: list[ModuleInfo] = []
        self._variables: dict[str, str] = {}
        self._made: dict[str, ModuleState] = {}
        self._lock = threading.RLock()
        self.settled = False
        self.any_module = False
        """Whether any module was ever named, or called."""
        self._module_gone = self._new_forgetter()
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
        if not self.settled and self.find(child) is not None and any(reference() is child for reference in self._roots):
            with self._lock:
                self._unname_tree(child)

    def note_parameter(self, module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        """Note that a module was given a parameter, so that it may be a model by itself; nothing once `settled`.

        Torch calls it (registration hook).
        """
        if not self.settled and self._holders.get(module) is None:
            self._holders.set(module, True)

    def find(self, module: nn.Module) -> ModuleState | None:
        """The state of a module that has a name; None without one."""
        state = self.states.get(id(module))
        return state if state is not None and state.reference() is module else None

    def ensure_named(self, module: nn.Module, caller: ModuleState | None, suffix: str = "") -> ModuleState:
        """The state of a module that is being called; names it now if it has no name, and with it all of its root.

        A module that no other one holds, called in another's forward, is named below its caller, `GPT.Linear`, goes on
        with the count of calls of the last module of that name, and is given to `made_on_the_fly`.

        Args:
            module: the module called.
            caller: state of the module in whose forward it is called; None for an outermost call.
            suffix: what the name of a new root gets after its class.
        """
        state = self.find(module)
        if state is not None:
            return state
        with self._lock:
            self.any_module = True
            top = self._topmost(module)
            if top is module and caller is not None:
                # Held in a plain list or built on the fly: no path leads to it but the call.
                self._name_tree(module, f"{caller.fqn}.{class_name(unwrap(module))}")
                self._continue_count(module)
                self.made_on_the_fly(module)
            else:
                self._name_tree(top, class_name(unwrap(top)) + suffix)
                if self.find(module) is None:
                    self._name_tree(module, class_name(unwrap(module)))
            named = self.find(module)
            assert named is not None
            return named

    def _continue_count(self, module: nn.Module) -> None:
        """Go on counting a module's calls where the last module of its name stopped: each call may make a new one."""
        named = self.find(module)
        assert named is not None
        last = self._made.get(named.fqn)
        if last is not None:
            named.step, named.calls = last.step, last.calls
        self._made[named.fqn] = named

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
        for state in self.states.values():
            state.step = 0 if state.step == kept else -1

    def roots(self) -> list[nn.Module]:
        """The live roots, in the order in which they were first named."""
        return [root for reference in self._roots if (root := reference()) is not None]

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
                    self._name_tree(top, class_name(unwrap(top)))

    def new_modules(self) -> list[ModuleInfo]:
        """Rows of modules that were named since the last call; a second call returns []."""
        with self._lock:
            trees, self._trees = self._trees, []
            return trees

    def refresh(self, root: nn.Module) -> None:
        """Name modules and tensors that were put below a named root since (adapters, lazy parameters).

        Nothing for a root without a name.
        """
        state = self.find(root)
        if state is not None:
            with self._lock:
                self._name_below(root, state.fqn)

    def free_gone_names(self) -> None:
        """As a step ends, free the names of models and tensors that are gone."""
        self._free.free_resting()
        self.parameters.drop_gone()

    def _topmost(self, module: nn.Module) -> nn.Module:
        """The outermost module that holds a module, directly or not; the module itself where none does."""
        top = module
        for holder in self.holders_of(module):
            top = holder
        return top

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

    def _name_tree(self, root: nn.Module, base: str) -> None:
        """Make a module a root, and name all below it; of a new one with parameters the script's variable is noted.

        Args:
            root: keeps its name if it, or what it wraps, has one.
            base: else the first free name of `base`, `base#2`, ...
        """
        state = self.find(root) or self.find(unwrap(root))
        if state is not None:
            fqn = state.fqn
        else:
            trains = next(parameters_in(root), None) is not None
            fqn = self._free.name(root, base, rests=trains)
            if trains and fqn not in self._variables:
                self._variables[fqn] = _variable_name(root)
        if not any(reference() is root for reference in self._roots):
            self._roots = [reference for reference in self._roots if reference() is not None]
            self._roots.append(weakref.ref(root))
        self._name_below(root, fqn)

    def _unname_tree(self, root: nn.Module) -> None:
        """Drop the names of a former root, which is now part of another module, and of all below it.

        Their rows that were not taken yet are dropped, too.
        """
        self._roots = [reference for reference in self._roots if reference() is not root]
        self._free.release(root)
        gone = set()
        for module, fqn, _ in _tree(root, self.states[id(root)].fqn):
            gone.add(fqn)
            self.states.pop(id(module), None)
            self.parameters.take_back(module, fqn)
        self._trees = [info for info in self._trees if info.fqn not in gone]

    def _name_below(self, root: nn.Module, fqn: str) -> None:
        """Name each module, parameter and buffer of a tree that has no name; new modules get a row, but wrappers none.

        Of parameters that `fully_shard` has gathered, this rank's shards are named as well. Wrappers' states are given
        the state of what they wrap as `inner`.

        Args:
            root: of the tree.
            fqn: its name.
        """
        wrappers = []
        gathered: list[torch_distributed.Unsharded] = []
        for module, name, inner in _tree(root, fqn):
            state = self.find(module)
            if state is None:
                state = self._new_state(module, name)
                if inner is None:
                    self._trees.append(self.describe(module, state))
            self.parameters.name_in(module, state)
            gathered += torch_distributed.unsharded_of(module)
            if inner is not None:
                wrappers.append((state, inner))
        self.parameters.name_shards(gathered, self.find)
        for state, inner in wrappers:
            state.inner = self.find(inner)

    def _new_state(self, module: nn.Module, name: str) -> ModuleState:
        """Make the state of a module, which is kept until the module goes."""
        forget = self._module_gone
        reference = keyed(module, forget)
        state = ModuleState(reference, name, class_name(unwrap(module)), watched=self.wanted(name))
        self.states[id(module)] = state
        return state

    def _new_forgetter(self) -> Callable[[Keyed[nn.Module]], None]:
        """A callback for weak references to modules: drops a module's state."""
        states = self.states

        def forget(reference: Keyed[nn.Module]) -> None:
            """Drop the state of a module that is gone, unless another module has its `id` by now."""
            state = states.get(reference.key)
            if state is not None and state.reference is reference:
                del states[reference.key]

        return forget

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
