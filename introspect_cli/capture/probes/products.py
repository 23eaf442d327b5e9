"""What comes of a training: what the script saves, keeps as copies, and records itself."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections import Counter, deque
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from introspect_cli.capture.environment.sources import attributes_of
from introspect_cli.capture.frames import script_frames, variables_of
from introspect_cli.capture.naming import own_tensors, parameters_in
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.records import Kind, Phase
from introspect_cli.script import calls
from introspect_cli.tensors.flatten import flatten
from introspect_cli.tensors.views import memory_of, unobserved
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call


# ---
# What a script hands on itself: values that it names, its phases, and the tensors of a checkpoint that it saves.
#
# An averaged copy of the weights is what a run is for, and nothing sees it but `torch.save`. So tensors are recorded
# when they are saved, by the file's name and their place in what is saved; what is written is not touched. States of
# random generators are in checkpoints, too: they are recorded as such elsewhere, and are no product.

_RANDOM = re.compile(r"rng|random[_ ]?state|generator", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
MAX_FILE_NAMES = 20


class ProductProbe(GuardedProbe):
    """Records tensors that the script saves."""

    name = "products"
    lost = "what the script saves is"
    kind = Kind.PRODUCT

    def _record_saved(self, call: Call, _result: object) -> None:
        """Record the tensors in an object that was saved, without states of generators.

        Other probes record first what models hold now. In an unrecorded step only the name is noted, of 20 files.
        """
        held, place = ("tensors", "filename") if call.name == "save_file" else ("obj", "f")
        name = _file_label(call.given(1, place))
        if not self._recorder.wanted:
            if len(self._context.saved_unseen) < MAX_FILE_NAMES:
                self._context.saved_unseen[name] = None
            return
        self._context.clock.tell("on_look")
        with unobserved():
            saved = [pair for pair in tensors_of(call.given(0, held)) if not _is_random(*pair)]
            self._emit(Phase.FORWARD, Kind.PRODUCT, name, saved, self._context.count(self, name))


def tensors_of(held: object) -> list[tuple[str, torch.Tensor]]:
    """Path and tensor for each tensor in a nested object; a module gives its parameters and buffers.

    A tensor in two places comes twice.
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    for path, leaf in flatten(held):
        if issubclass(type(leaf), nn.Module):
            tensors += [(f"{path}[{name!r}]", tensor) for name, tensor in tensors_in_module(leaf)]
        elif issubclass(type(leaf), torch.Tensor):
            tensors.append((path, leaf))
    return tensors


def tensors_in_module(root: Any) -> list[tuple[str, torch.Tensor]]:
    """Dotted name and tensor for each parameter and buffer in a module tree, read past the module's methods.

    A tensor that two modules share comes twice, those of a module in two places once.
    """
    tensors, waiting, seen = list[tuple[str, torch.Tensor]](), [("", root)], {id(root)}
    while waiting:
        prefix, module = waiting.pop()
        tensors += [(prefix + name, tensor) for name, tensor in own_tensors(module)]
        for name, child in module._modules.items():  # noqa: SLF001 - the public view may be the script's
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append((f"{prefix}{name}.", child))
    return tensors


def _is_random(path: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor counts as a generator's state: uint8, and of shape (5056,) or at a path such as `rng_state`."""
    is_of_cpu = tuple(tensor.shape) == (5056,)  # the state of torch's generator there
    return tensor.dtype is torch.uint8 and (is_of_cpu or bool(_RANDOM.search(path)))


def _file_label(place: Any) -> str:
    """File name without directory, each number replaced by `#`: `ckpt-#.pt`; `(memory)` where there is none.

    Args:
        place: a path or an open file.
    """
    path = getattr(place, "name", "") if type(place).__module__ == "_io" else place
    is_path = type(path) is str or (type(path).__module__.startswith("pathlib") and isinstance(path, PurePath))
    return _NUMBER.sub("#", PurePath(path if is_path else "").name) or "(memory)"


class ScriptCallsProbe(GuardedProbe):
    """Records what the script reports by `introspect_cli.step`, `record` and `phase`."""

    name = "script calls"
    lost = "values that the script records itself are"

    def __init__(self, context: Context) -> None:
        """Listen to nothing before `install`."""
        super().__init__(context)
        self._wants_eval = context.clock.evaluation.wanted
        self._phase = ""

    def install(self) -> None:
        """Begin to hear the calls that the script makes of `introspect_cli`."""
        super().install()
        self._patches.undo_by(functools.partial(calls.unlisten, self))
        calls.listen(self)

    def end_step(self) -> None:
        """End the step, as the script says so; from now on nothing else ends steps."""
        with self._context.guard.around("clock", "steps that the script ends itself are"):
            self._context.clock.manual_tick()

    def enter_phase(self, name: str) -> None:
        """Begin a phase of the script's, or end it with "".

        Until it ends, `PHASE/` is put before names of values, and forward passes without gradients are recorded.
        """
        if self._guarded.on:
            with self._guarded:
                self._phase = str(name)
                self._context.clock.evaluation.wanted = self._wants_eval or bool(name)

    def record_value(self, name: str, value: object) -> None:
        """Record a value in phase `forward` under `PHASE/NAME`, or NAME outside of phases; each leaf at its path.

        A leaf that is None is left out. Begins the step if it has not begun. Nothing in an unrecorded step or while a
        compiler traces the call.
        """
        if not (self._guarded.on and self._recorder.wanted) or torch.compiler.is_compiling():
            return
        with self._guarded, unobserved():
            self._context.clock.begin()
            fqn = f"{self._phase}/{name}" if self._phase else str(name)
            leaves = [(path, leaf) for path, leaf in flatten(value) if leaf is not None]
            self._emit(Phase.FORWARD, Kind.VALUE, fqn, leaves, self._context.count(self, fqn))


# ---
# Copies of what is trained that the script moves along by hand: a moving average in a dictionary, a list, a module.
#
# Nothing runs them, no optimizer has them and no file need ever show them, so no other probe sees one. But a variable
# leads to it: from the frames under path when an optimizer steps, through attributes and containers. Looking for them
# takes milliseconds, so it is done after one step, after two, 16, 128 and so on. What has tensors of the same shapes
# as the parameters of a trained model is watched; where it has changed by the next look, it is recorded in each step
# from then on. What never changes (a checkpoint that was loaded, a frozen teacher) is none. No reference to any of it
# is kept: only where it was, and each step goes that path again.

_CONTAINERS = (dict, list, tuple)
_NO_PLACE = (type, ModuleType, FunctionType, torch.optim.Optimizer, torch.Tensor)
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})
MAX_OBJECTS = 2000
MAX_ITEMS = 100
MAX_DEPTH = 4


ObjectPath = tuple[Any, ...]
"""Path to an object: variable's scope (code object, or module name), then attributes and `(key,)` tuples."""


class CopiesProbe(GuardedProbe):
    """Records averaged copies of trained models that no other probe sees."""

    name = "copies"
    lost = "averaged copies that nothing runs or saves are"
    kind = Kind.PRODUCT

    def __init__(self, context: Context) -> None:
        """Look for nothing before the first step ends."""
        super().__init__(context)
        self._due = 1
        self._seen: dict[ObjectPath, dict[int, Hashable]] = {}
        self._moving: dict[ObjectPath, str] = {}
        self._recorded = -1

    def on_after_optimizer(self) -> None:
        """Record the copies found so far; once 1, 2, 16, 128, ... steps have ended, look for more before that."""
        if self._recorder.step >= self._due:
            self._due = 8 * self._due if self._due > 1 else 2
            self._find_copies()
        self._record()

    def on_look(self) -> None:
        """Record the copies once the script is over.

        Nothing while it runs, when a save may come before their update.
        """
        if self._recorder.wanted and next(script_frames(), None) is None:
            with unobserved():
                self._record()

    def _record(self) -> None:
        """Record the tensors of each averaged copy found so far (`_moving`), at most once in a step.

        One that is gone, or that is by now a module with a name, is skipped.
        """
        if self._recorded == self._recorder.step or not self._moving:
            return
        self._recorded = self._recorder.step
        scopes = _scopes()
        for path, name in self._moving.items():
            held = _object_at(path, scopes)
            if held is not None and not self._is_named(held):
                self._emit(Phase.OPTIMIZER, Kind.PRODUCT, name, tensors_of(held))

    def _find_copies(self) -> None:
        """Look for objects with as many tensors of each shape as a trained root has parameters, and note new copies.

        Only parameters that require a gradient count; the object may have more tensors. It is a copy from now on if its
        tensors have changed since the last look. Passed over are named modules, objects with any named tensor or memory
        of a trained parameter or its gradient, and models of one parameter.
        """
        clock, names = self._context.clock, self._context.names.parameters
        trained = [root for root in self._context.names.roots() if clock.trained.is_trained(root)]
        shapes = [_shapes(one for one in parameters_in(root) if one.requires_grad) for root in trained]
        shapes = [wanted for wanted in shapes if wanted.total() > 1]
        if not shapes:
            return
        parameters = [one for root in trained for one in parameters_in(root)]
        gradients = [one.grad for one in parameters if one.grad is not None]
        held = {memory_of(one) for one in (*parameters, *gradients)} - {0}
        before, self._seen = self._seen, {}
        for path, found in _candidates(2 * max(map(Counter.total, shapes)) + MAX_ITEMS):
            if path in self._moving or self._is_named(found):
                continue
            tensors = [tensor for _, tensor in tensors_of(found)]
            sizes = _shapes(tensors)
            if not any(wanted <= sizes for wanted in shapes):
                continue
            if any(memory_of(one) in held or names.name_of(one) is not None for one in tensors):
                continue
            marks: dict[int, Hashable] = {}
            self._recorder.summarizer.keep_marks(tensors, marks)
            if before.get(path, marks) == marks:
                self._seen[path] = marks
            else:
                self._moving[path] = _name(path)

    def _is_named(self, found: Any) -> bool:
        """Whether an object is a module that has a name, so that it is recorded when it is called."""
        return issubclass(type(found), nn.Module) and self._context.names.find(found) is not None


def _shapes(tensors: Iterable[torch.Tensor]) -> Counter[tuple[int, ...]]:
    """Number of tensors of each shape; one that comes twice counts once."""
    return Counter(tuple(tensor.shape) for tensor in {id(one): one for one in tensors}.values())


def _name(path: ObjectPath) -> str:
    """A path without its scope as a Python expression, cut to 80 characters: `ema['weights'].shadow`."""
    text = "".join(f"[{key[0]!r}]" if type(key) is tuple else f".{key}" for key in path[1:])
    return clean(text[1:], 80)


def _scopes() -> dict[CodeType | str, dict[str, Any]]:
    """Variables: globals by module name, and locals by code object, those of the outermost frame if several run it.

    `__main__` comes first, then what the script's frames have, from the outermost to the innermost.
    """
    scopes: dict[CodeType | str, dict[str, Any]] = {"__main__": vars(sys.modules["__main__"])}
    for frame in [*script_frames()][::-1]:
        scopes[str(frame.f_globals.get("__name__"))] = frame.f_globals
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            scopes.setdefault(frame.f_code, variables_of(frame))
    return scopes


def _parts_of(value: object) -> dict[Any, Any]:
    """Objects inside a value: by name for attributes, by `(key,)` for items.

    Of a dict, items with text or integer keys. {} where there are more than 100, and for classes, modules, functions,
    optimizers and tensors.
    """
    if type(value) not in _CONTAINERS:
        inside = {} if issubclass(type(value), _NO_PLACE) else attributes_of(value)
        return inside if len(inside) <= MAX_ITEMS else {}
    items: Any = value
    pairs = list(items.items() if type(value) is dict else enumerate(items)) if len(items) <= MAX_ITEMS else []
    return {(key,): item for key, item in pairs if type(key) in {int, str}}


def _candidates(most: int) -> Iterator[tuple[ObjectPath, object]]:
    """Paths and objects that may be copies, breadth first from the script's variables.

    2000 objects are visited at most, 4 keys deep; each object comes once, by its first path. Variables whose names
    begin with `__` are passed over, and a container whose first item is a tensor is not looked into.

    Args:
        most: a list, tuple or dict of tensors is given only if it has as many or fewer; modules always are.
    """
    seen: set[int] = set()
    waiting: deque[tuple[ObjectPath, object]] = deque(
        ((scope, name), value)
        for scope, variables in _scopes().items()
        for name, value in list(variables.items())
        if not name.startswith("__")
    )
    while waiting and len(seen) < MAX_OBJECTS:
        path, value = waiting.popleft()
        if type(value) in _ATOMS or id(value) in seen:
            continue
        seen.add(id(value))
        items: Any = value.values() if type(value) is dict else value if type(value) in _CONTAINERS else ()
        of_tensors = issubclass(type(next(iter(items), None)), torch.Tensor)
        if issubclass(type(value), nn.Module) or (of_tensors and len(items) <= most):
            yield path, value
        if not of_tensors and len(path) <= MAX_DEPTH:
            waiting.extend(((*path, key), item) for key, item in _parts_of(value).items())


def _object_at(path: ObjectPath, scopes: dict[CodeType | str, dict[str, Any]]) -> object:
    """The object that a path leads to now; None where it leads to nothing.

    Args:
        path: to it.
        scopes: as `_scopes` gives them.
    """
    held, value = scopes.get(path[0], {}), None
    for key in path[1:]:
        value = held.get(key)
        held = _parts_of(value)
    return value
