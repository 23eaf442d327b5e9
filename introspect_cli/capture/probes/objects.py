"""What objects of the script are apart from tensors: attributes of modules, what loaders and schedulers are made of."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from argparse import Namespace
from collections import OrderedDict, deque
from dataclasses import replace
from itertools import chain, repeat
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from introspect_cli.capture.environment import redact
from introspect_cli.capture.environment.sources import attributes_of, is_users
from introspect_cli.capture.frames import line_of
from introspect_cli.capture.naming import ById, FreeNames, modules_in
from introspect_cli.capture.probes.base import GuardedProbe
from introspect_cli.records import Phase
from introspect_cli.tensors.values import plain
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.events import Call
    from introspect_cli.records import ModuleInfo


# ---
# What an object of the script's was given, as plain data, read without running anything of the script's.
#
# It is in the object's attributes. Only an object's `__dict__` is looked into, only exact types are taken apart, and
# a length is asked of python's containers alone. What is large is told by its kind and size.

_PLAIN = frozenset({bool, int, float, str, type(None)})
_NAMED = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
_SIZED = frozenset({list, tuple, dict, set, frozenset, OrderedDict, deque, range, bytes, bytearray})
_ENUMERATED = (list, tuple)

MAX_DEPTH = 4
MAX_ITEMS = 32
MAX_PARTS = 400
MAX_TEXT = 200
MAX_BITS = 256  # bits of an integer

_HOLDERS = (functools.partial, SimpleNamespace, Namespace)
"""Python's classes that hold what they are given."""

Facts = list[tuple[str, Any]]
"""Pairs of where in an object something is (`.padding`, `[0].size`; "" for itself) and its value."""


def _facts(value: Any, seen: set[int], depth: int = 0) -> Facts:
    """Facts of a value: a number or text (200 characters), of containers their items, else class and attributes.

    Items of a dict whose key is no scalar are left out. Given by class and length are sets and other containers, and
    lists, tuples and dicts of more than 32 items; by class are modules, optimizers and python's own objects. After 400
    objects, and for those described before, it is as at depth 4.

    Args:
        value: any object; nothing of the script's is run.
        seen: identities of the objects and containers that are described already.
        depth: how many objects it is inside of; from 4 on, containers are given by class and length, objects by class.
    """
    kind = type(value)
    if kind in _PLAIN:
        return [("", value[:MAX_TEXT] if kind is str else _bounded(value))]
    if kind in _NAMED:
        return [("", str(value))]
    if issubclass(kind, type) or kind in _FUNCTIONS:
        return [("", called(value)), *_around(value, seen, depth)]
    if issubclass(kind, torch.Tensor):
        return [("", _tensor(value))]
    if kind.__module__ == "numpy" and kind.__name__ in {"ndarray", "memmap"}:
        return [("", f"{kind.__name__} {value.dtype} {list(value.shape)}")]
    if kind is torch.Generator:
        return [("", f"generator on {value.device}, seed {value.initial_seed()}")]
    too_far = depth >= MAX_DEPTH or len(seen) > MAX_PARTS or id(value) in seen
    if kind in _SIZED:
        if too_far or kind not in {*_ENUMERATED, dict} or len(value) > MAX_ITEMS:
            return [("", f"{kind.__name__} of {len(value):,}")]
        return _named(value, seen, depth) if kind is dict else _listed(value, seen, depth)
    if too_far or issubclass(kind, (nn.Module, ModuleType, torch.optim.Optimizer)) or _is_pythons(kind):
        return [("", called(kind))]
    seen.add(id(value))
    if kind is functools.partial:
        given = {"args": value.args} if value.args else {}
        return [*_facts(value.func, seen, depth + 1), *_named(given | value.keywords, seen, depth)]
    return [("", called(kind)), *_attributes(value, seen, depth)]


def _attributes(value: object, seen: set[int], depth: int = 0) -> Facts:
    """Facts of an object's attributes, by name without leading underscores; of its `__dict__` the first 64 alone.

    Left out are names in `_PROGRESS`, names that begin with `__`, and private ones of torch's and torchvision's objects
    unless they are scalars or lists of them. [] for an object without a `__dict__`.
    """
    library = type(value).__module__.partition(".")[0] in {"torch", "torchvision"}
    held = {
        name.lstrip("_"): item
        for name, item in list(attributes_of(value).items())[: 2 * MAX_ITEMS]
        if type(name) is str and name not in _PROGRESS and not name.startswith("__")
        if not (library and name.startswith("_")) or _is_plain(item)  # bookkeeping
    }
    return _named(held, seen, depth)


def _named(held: dict[Any, Any], seen: set[int], depth: int) -> Facts:
    """Facts of the items of a dict with scalar keys, at `.KEY`."""
    items = [(f".{str(key)[:MAX_TEXT]}", item) for key, item in held.items() if type(key) in _PLAIN]
    return [(place + path, fact) for place, item in items for path, fact in _facts(item, seen, depth + 1)]


def _listed(items: list[Any] | tuple[Any, ...], seen: set[int], depth: int) -> Facts:
    """Facts of items, at `[0]`, `[1]`; the items in a list where each is a scalar."""
    every = [_facts(item, seen, depth + 1) for item in items]
    if all(len(facts) == 1 and not facts[0][0] and type(facts[0][1]) is not list for facts in every):
        return [("", [fact for ((_, fact),) in every])]
    return [(f"[{at}]{path}", fact) for at, facts in enumerate(every) for path, fact in facts]


def _around(function: Any, seen: set[int], depth: int) -> Facts:
    """Scalar globals and closure variables that a user's function uses; [] from depth 4 on, and for others."""
    if type(function) is FunctionType and depth < MAX_DEPTH and is_users(function.__code__.co_filename):
        with contextlib.suppress(ValueError):  # a variable that is not assigned yet
            used = inspect.getclosurevars(function)
            around = {**used.globals, **used.nonlocals}
            return _named({name: value for name, value in around.items() if type(value) in _PLAIN}, seen, depth)
    return []


def _is_pythons(kind: type) -> bool:
    """Whether a class is of the standard library; False for `partial`, `Namespace` and `SimpleNamespace`."""
    home = str(kind.__module__).partition(".")[0]
    return kind not in _HOLDERS and home != "__main__" and home in sys.stdlib_module_names


def called(value: Any, *, in_full: bool = False) -> str:
    """Qualified name of a class or function, or of an object's class; with its module unless that is known.

    Args:
        value: any object.
        in_full: False leaves the module out for `__main__`, builtins and torch; True never leaves it out, and takes a
            class for an object, of which it gives the metaclass.
    """
    if type(value) is MethodType:
        value = value.__func__
    if type(value) not in _FUNCTIONS and not (issubclass(type(value), type) and not in_full):
        value = type(value)
    module = value.__module__ if type(value.__module__) is str else ""
    is_known = module in {"__main__", "__mp_main__", "builtins", ""} or f"{module}.".startswith("torch.")
    return f"{'' if is_known and not in_full else module}.{value.__qualname__}".lstrip(".")


def _is_plain(value: Any) -> bool:
    """Whether a value is a scalar, or a list or tuple of scalars."""
    return all(type(item) in _PLAIN for item in (value if type(value) in _ENUMERATED else [value]))


def _bounded(value: Any) -> Any:
    """A value as it is, but an integer of more than 256 bits as a text that says how many."""
    is_long = type(value) is int and value.bit_length() > MAX_BITS
    return f"int of {value.bit_length()} bits" if is_long else value


def _tensor(value: torch.Tensor) -> Any:
    """A CPU tensor of 1 to 16 elements as nested lists (0-dim: a number); any other as `tensor float32 [16, 16]`."""
    if type(value) in (torch.Tensor, nn.Parameter) and value.device.type == "cpu" and 0 < value.numel() <= 16:
        return value.tolist()
    return f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


# ---
# What each module is apart from its tensors: plain attributes, train or eval mode, and the hooks on it.
#
# An `eps`, a dropout probability, a forgotten `eval()` is what people look for first, and no tensor says it. So plain
# attributes are written with the module tree, and again from the step on at which they changed. Only a module's own
# `__dict__` is read and only exact builtin types are looked into: no property, no `repr` of the script's runs. A
# forward pass in which nothing has changed costs a comparison of identities for each attribute.

_ATTRIBUTES_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has."""

_HOOKS = {
    f"_{words.replace(' ', '_')}_hooks": words for words in ("forward pre", "forward", "backward pre", "backward")
}
"""Attributes that hold a module's hooks, and words for them."""
_SIZED_ATTRIBUTES = (*_HOOKS, "_modules")
_PACKAGE = "introspect_cli."
_GONE: dict[str, object] = {}
"""Attributes of a module that is gone: none, and each has some."""

MAX_TUPLE = 8
MAX_CHANGES = 8
CHANGES_OFTEN = "(changes often)"
"""Recorded for an attribute that has changed 8 times, such as a counter, which is not followed further."""


class AttributeSnapshot:
    """What modules have, quicker to compare than to read again: plain objects, and how many hooks and children.

    It is compared in each step, so no frame of python runs for a module.
    """

    def __init__(self, modules: list[nn.Module], plain: list[dict[str, object]]) -> None:
        """Look at modules, to which it refers weakly; `plain` has the plain attributes of each, by name."""
        held = list(map(vars, modules))
        self._modules = list(map(weakref.ref, modules))
        self._plain = [len(each) for each in plain], [*chain.from_iterable(plain)]
        self._values = [*chain.from_iterable(each.values() for each in plain)]
        sized = [[name for name in _SIZED_ATTRIBUTES if isinstance(own.get(name), dict)] for own in held]
        self._sized = list(map(len, sized)), [*chain.from_iterable(sized)]
        self._sizes = self._sizes_in(held)

    def holds(self) -> bool:
        """Whether each module is alive, has as many attributes, hooks and children, and the very same plain objects."""
        held = [getattr(reference(), "__dict__", _GONE) for reference in self._modules]
        values = map(dict.get, _repeated(held, self._plain[0]), self._plain[1])
        return all(map(is_, values, self._values)) and self._sizes_in(held) == self._sizes

    def _sizes_in(self, held: list[dict[str, object]]) -> list[int]:
        """Numbers of attributes, hooks and children."""
        sized: Any = map(dict.get, _repeated(held, self._sized[0]), self._sized[1], repeat(()))
        return [*map(len, held), *map(len, sized)]


def _repeated(items: list[dict[str, object]], times: list[int]) -> Iterator[dict[str, object]]:
    """Each item as often as `times` says."""
    return chain.from_iterable(map(repeat, items, times))


class AttributeProbe(GuardedProbe):
    """Records plain attributes, mode and hooks of modules when a root is called."""

    name = "attributes"
    lost = "attributes of modules are"

    def __init__(self, context: Context) -> None:
        """Record nothing before `install`."""
        self._watched: ById[AttributeSnapshot] = ById()
        super().__init__(context, then=self._watched.clear)
        self._patches.undo_by(self._watched.clear)
        self._recorded: dict[str, ModuleInfo] = {}
        self._changes: dict[tuple[str, str], int] = {}

    def on_root(self, root: nn.Module) -> None:
        """Write rows for modules named since the last look, and for a root's with other attributes, mode or hooks.

        Nothing in evaluation, or for a root without a name.
        """
        seen = self._watched.get(root)
        if seen is None or not seen.holds():
            self.on_made(root)

    def on_made(self, root: nn.Module) -> None:
        """Write rows of all new modules, and of those in a root whose attributes changed; take a snapshot of it.

        A root here is also a module that no other holds, when it gets its name. No row for a module made again under
        the same name with the same attributes; nothing in evaluation, or for a root without a name.
        """
        names, step = self._context.names, self._recorder.step
        if self._context.stack.phase is Phase.EVAL or names.find(root) is None:
            return
        modules, plain = list(modules_in(root)), list[dict[str, object]]()
        rows = {info.fqn: info for info in names.new_modules()}
        for module in modules:
            plain.append({})
            if (state := names.find(module)) is None:
                continue
            plain[-1], pairs = self._look(state.fqn, module)
            before = self._recorded.get(state.fqn)
            known = rows.get(state.fqn) or before or names.describe(module, state)
            info = replace(known, attributes=pairs, step=step)
            if before is not None and replace(info, step=before.step) == before:
                rows.pop(state.fqn, None)  # made anew under the same name
            else:
                self._recorded[state.fqn] = rows[state.fqn] = info
        self._watched.set(root, AttributeSnapshot(modules, plain))
        if rows:
            self._context.rank.modules(list(rows.values()))

    def _look(self, fqn: str, module: nn.Module) -> tuple[dict[str, object], tuple[tuple[str, str], ...]]:
        """A module's plain attributes, by name, and pairs for its row.

        Pairs are name and text, cut to 200 characters, of each attribute; then `hooks`, kinds and functions, if any.
        Secret values are redacted. Changes of each attribute are counted: from the 8th on, the text is
        `(changes often)`, and the attribute is among the pairs alone.
        """
        info = self._recorded.get(fqn)
        before = {} if info is None else dict(info.attributes)
        plain: dict[str, object] = {}
        pairs: list[tuple[str, str]] = []
        is_torchs = type(module).__module__.startswith("torch.")  # then private names are left out
        for name, value in vars(module).items():
            is_private = type(name) is not str or name in _ATTRIBUTES_OF_TORCH or (is_torchs and name.startswith("_"))
            if is_private or not (text := _text(value)):
                continue
            if value is not None and type(value) is not bool:
                text = redact.value(name, text, self._context.options.redact)[:MAX_TEXT]
            times = self._changes.get((fqn, name), 0) + (before.get(name, text) != text)
            if times:
                self._changes[fqn, name] = times
            if times < MAX_CHANGES:
                # What is not plain may become so; its identity alone would keep no memory alive, so it is not held.
                plain[name] = value
            pairs.append((name, text if times < MAX_CHANGES else CHANGES_OFTEN))
        hooks = [
            f"{words} {name}"
            for key, words in _HOOKS.items()
            for hook in getattr(vars(module).get(key), "values", tuple)()
            if not (name := called(hook, in_full=True)).startswith(_PACKAGE)
        ]
        pairs += [("hooks", ", ".join(hooks)[:MAX_TEXT])] if hooks else []
        return plain, tuple(pairs)


def _text(value: object) -> str:
    """Text of a plain value: number, str, None, dtype, device, function, or tuple of up to 8 of these.

    "" for any other. Of an integer of more than 256 bits it says how many.
    """
    value = plain(value)
    kind = type(value)
    if kind in _PLAIN or kind is complex:
        return repr(_bounded(value))
    if kind in _NAMED:
        return str(value)
    if kind in _FUNCTIONS:
        return called(value, in_full=True)
    if kind is tuple and len(value) <= MAX_TUPLE:  # type: ignore[arg-type] # its exact type is tuple
        texts = [_text(item) for item in value]  # type: ignore[attr-defined] # as above
        return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})" if all(texts) else ""
    return ""


# ---
# What loaders, schedulers and gradient scalers were built with, and where; in which dtypes autocast computes.
#
# A batch differs because `drop_last` does, a learning rate because a warm-up is longer: no tensor says so. A loader
# is kept under the name that its batches have, the others under that of their class.
#
# A gradient or a parameter in float32 that was computed in bfloat16 is rounded as bfloat16 is. Where outputs are
# recorded they tell. Where they are not, what autocast was asked for tells.

MAX_DESCRIBED = 128
"""Objects described at most: some scripts build a loader in every step."""

_LOADER = (
    "batch_size", "drop_last", "num_workers", "sampler", "batch_sampler", "collate_fn", "generator", "worker_init_fn",
    "prefetch_factor", "persistent_workers", "in_order", "dataset",
)  # fmt: skip
_PROGRESS = frozenset(
    {
        "optimizer", "base_lrs", "last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step",
        "verbose", "_schedulers", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter", "mode_worse",
        "data_source", "epoch", "_IterableDataset_len_called", "_iterator",
        "_scale", "_growth_tracker", "_init_growth_tracker", "_per_optimizer_states",
    }
)  # fmt: skip
"""Attributes that say how far something has come, or hold what is described elsewhere."""


class BuiltProbe(GuardedProbe):
    """Notes settings and source line of loaders, schedulers and scalers, and autocast's dtypes."""

    name = "built"
    lost = "what loaders and schedulers are built with is"

    def __init__(self, context: Context) -> None:
        """Note nothing before `install`; the document `autocast` is new at once, and says `off`."""
        super().__init__(context)
        self._autocast: dict[str, None] = {}
        context.facts["autocast"] = self._autocasts
        self._lines: ById[str] = ById()
        self.loaders: dict[tuple[Phase, str], dict[str, Any]] = {}
        """Settings of loaders by what they are for and name."""
        self._names = FreeNames()
        self._made: ById[tuple[str, str]] = ById()
        """Kind and name of each scheduler and scaler."""
        self._described: dict[str, dict[str, dict[str, Any]]] = {}
        self._count = 0

    def _autocasts(self) -> dict[str, str]:
        """The document `settings/autocast`."""
        return {"autocast": ", ".join(self._autocast) or "off"}

    def _note_autocast(self, call: Call, _result: object) -> None:
        """Note `device dtype` (`cuda bfloat16`), each once, where autocast was entered and is enabled."""
        device = call.first.device
        words = f"{device} {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
        if torch.is_autocast_enabled(device) and words not in self._autocast:
            self._autocast[words] = None
            self._context.facts["autocast"] = self._autocasts

    def _note_object(self, call: Call, _result: object) -> None:
        """Keep the line of a new object, and a scheduler or scaler for `document`, each once."""
        thing = call.first
        self._lines.set(thing, line_of(call.frame))
        if not isinstance(thing, DataLoader) and self._made.get(thing) is None:
            kind = "scalers" if isinstance(thing, torch.amp.GradScaler) else "schedulers"
            self._made.set(thing, (kind, self._names.name(thing, type(thing).__name__)))
            self._context.facts["built"] = self.document

    def document(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The document `settings/built`: settings by kind (`loaders`, `schedulers`, `scalers`) and name.

        Describes the schedulers and scalers that are new since the last call, if they still exist. Loaders of an
        evaluation are named `NAME (evaluation)`.
        """
        for reference, (kind, name) in list(self._made.entries.values()):
            of_kind, thing = self._described.setdefault(kind, {}), reference()
            if thing is not None and name not in of_kind and (described := self.describe(thing)):
                of_kind[name] = described
        every = self.loaders.items()
        loaders = {name + " (evaluation)" * (phase is Phase.EVAL): settings for (phase, name), settings in every}
        kinds = {"loaders": loaders, **self._described}
        return {kind: described for kind, described in kinds.items() if described}

    def describe(self, thing: object) -> dict[str, Any]:
        """Settings of an object as dotted names and scalars, the line that made it first.

        {} from the 129th call on, or where describing it failed.
        """
        self._count += 1
        if self._count > MAX_DESCRIBED:
            return {}
        with self._guarded, unobserved():
            if isinstance(thing, DataLoader):
                held = {name: value for name in _LOADER if (value := attributes_of(thing).get(name)) is not None}
                if type(held.get("batch_sampler")) is BatchSampler and "batch_size" in held:
                    del held["batch_sampler"]  # made by the loader itself
                facts = [(f".{at}{path}", fact) for at, value in held.items() for path, fact in _facts(value, set())]
            else:
                facts = _attributes(thing, set())
            line = self._lines.get(thing)
            described = {path[1:]: str(fact) if type(fact) is list else fact for path, fact in facts}
            return {**({"line": line} if line else {}), **described}
        return {}

    def add_loader(self, phase: Phase, name: str, settings: dict[str, Any]) -> None:
        """Add a loader's settings under name and phase, unless they are empty or the name has some.

        Called at each of its batches.
        """
        if settings and (phase, name) not in self.loaders:
            self.loaders[phase, name] = settings
            self._context.facts["built"] = self.document

    def forget_training(self) -> None:
        """Forget training's loaders, as steps start from 0 again."""
        self.loaders = {key: settings for key, settings in self.loaders.items() if key[0] is not Phase.DATA}
        self._context.facts["built"] = self.document
