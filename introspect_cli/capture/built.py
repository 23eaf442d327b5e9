"""What loaders, schedulers and gradient scalers were built with, and where: the document `settings/built`.

A batch differs because `drop_last` does, a learning rate because a warm-up is longer: no tensor says so. A loader is
kept under the name that its batches have, the others under that of their class.

What an object was given is in its attributes. Nothing of the script's runs to read them: only an object's `__dict__` is
looked into, only exact types are taken apart, and a length is asked of what the interpreter, torch or numpy implements
alone. What is large is told by its kind and size.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from argparse import Namespace
from collections import OrderedDict, deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from introspect_cli.capture.environment.sources import is_users
from introspect_cli.capture.identity import ById, FreeNames
from introspect_cli.records import Phase
from introspect_cli.tensors.views import unobserved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.capture.guard import Guard

_MOST = 64
"""How many things of a kind are described: some scripts build a loader in every step."""

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

_PLAIN = frozenset({bool, int, float, str, type(None)})
_NAMED = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_SIZED = frozenset({list, tuple, dict, set, frozenset, OrderedDict, deque, range, bytes, bytearray})
_ENUMERATED = (list, tuple)

_DEEPEST = 4
_MOST_ITEMS = 32
_MOST_NODES = 400
_LONGEST = 200
_LARGEST = 256  # bits of an integer

_HOLDERS = (functools.partial, SimpleNamespace, Namespace)
"""Python's classes that hold what they are given."""

_LENGTHS = ("torchvision.", "datasets.")
"""Libraries beside torch whose data sets say how long they are without running anything of the script's."""


class Built:
    """The document in the making.

    Attributes:
        changed: whether `found` is another than when it was last written.
    """

    def __init__(self, guard: Guard) -> None:
        self._guarded = guard.around("built", "what loaders and schedulers are built with is")
        self.changed = False
        self.lines: ById[str] = ById()
        """Where each was built."""
        self._loaders: dict[tuple[Phase, str], list[dict[str, Any]]] = {}
        self._names = FreeNames()
        self._waiting: list[tuple[str, str, Any]] = []
        self._described: dict[str, dict[str, dict[str, Any]]] = {}
        self._count = 0

    @property
    def found(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Kind of thing, to its name, to what it was built with."""
        waiting, self._waiting = self._waiting, []
        with self._guarded, unobserved():
            for kind, name, reference in waiting:
                thing = reference()
                if thing is not None:
                    of_kind = self._described.setdefault(kind, {})
                    of_kind[name] = _with_line(self.lines.get(thing), Description(_PROGRESS).attributes(thing))
        loaders: dict[str, dict[str, Any]] = {}
        for (phase, name), settings in self._loaders.items():
            shown = f"{name} (evaluation)" if phase is Phase.EVAL else name
            loaders |= {
                f"{shown} ({number})" if number > 1 else shown: variant for number, variant in enumerate(settings, 1)
            }
        return {**({"loaders": loaders} if loaders else {}), **self._described}

    def note(self, kind: str, thing: object, line: str) -> None:
        """Something was built, or is being built: it is described when the document is written."""
        if len(self._waiting) + sum(map(len, self._described.values())) >= _MOST or self._names.find(thing) is not None:
            return
        name = self._names.name(thing, type(thing).__name__)
        self.lines.set(thing, line)
        self._waiting.append((kind, name, self.lines.entries[id(thing)][0]))
        self.changed = True

    def describe(self, loader: DataLoader[Any]) -> dict[str, Any]:
        """What a loader was built with; nothing where very many have been described."""
        self._count += 1
        settings: dict[str, Any] = {}
        if self._count > _MOST:
            return settings
        with self._guarded, unobserved():
            held = object.__getattribute__(loader, "__dict__")
            for name in _LOADER:
                value = held.get(name)
                if name == "batch_sampler" and type(value) is BatchSampler and held.get("batch_size") is not None:
                    continue  # made by the loader itself
                if value is not None:
                    settings[name] = Description(_PROGRESS).of(value)
            settings = _with_line(self.lines.get(loader), settings)
        return settings  # noqa: RET504 - nothing where describing it failed

    def loader(self, phase: Phase, name: str, settings: dict[str, Any]) -> None:
        """A loader, or one that was made anew under its name, has given its first batch in a phase."""
        variants = self._loaders.setdefault((phase, name), [])
        if settings and settings not in variants:
            variants.append(settings)
            self.changed = True

    def renamed(self, names: dict[str, str]) -> None:
        """Training begins anew: loaders that fed it have other names, the others fed something else."""
        before = {key: settings for key, settings in self._loaders.items() if key[0] is Phase.DATA}
        self._loaders = {key: settings for key, settings in self._loaders.items() if key[0] is not Phase.DATA}
        for (_, name), settings in before.items():
            if name in names:
                self._loaders[Phase.DATA, names[name]] = settings
        self.changed = True

    def moved(self, name: str) -> None:
        """What seemed to feed training feeds evaluation."""
        self._loaders.pop((Phase.DATA, name), None)
        self.changed = True


def _with_line(line: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    return {**({"line": line} if line else {}), **dict(flat("", settings))}


class Description:
    """Describes one object; what is deep or has many parts is cut short.

    Args:
        left_out: names of attributes that say how far an object has come, not what it was built with.
    """

    def __init__(self, left_out: frozenset[str] = frozenset()) -> None:
        self._left_out = left_out
        self._nodes = 0
        self._seen: set[int] = set()

    def of(self, value: Any, depth: int = 0) -> Any:
        """A value as plain data."""
        self._nodes += 1
        kind = type(value)
        if kind is int and value.bit_length() > _LARGEST:
            return f"int of {value.bit_length()} bits"
        if kind in _PLAIN:
            return value[:_LONGEST] if kind is str else value
        if kind in _NAMED:
            return str(value)
        if issubclass(kind, type):
            return called(value)
        if kind in _FUNCTIONS or kind is MethodType:
            return self._function(value, depth)
        if issubclass(kind, torch.Tensor):
            return _tensor(value)
        if kind.__module__ == "numpy" and kind.__name__ in {"ndarray", "memmap"}:
            return f"{kind.__name__} {value.dtype} {list(value.shape)}"
        if kind is torch.Generator:
            return f"generator on {value.device}, seed {value.initial_seed()}"
        too_far = depth >= _DEEPEST or self._nodes > _MOST_NODES or id(value) in self._seen
        if kind in _SIZED:
            if too_far or kind not in {*_ENUMERATED, dict} or len(value) > _MOST_ITEMS:
                return f"{kind.__name__} of {len(value):,}"
            if kind is dict:
                return {
                    str(key)[:_LONGEST]: self.of(held, depth + 1) for key, held in value.items() if type(key) in _PLAIN
                }
            return [self.of(item, depth + 1) for item in value]
        if too_far or issubclass(kind, (nn.Module, ModuleType, torch.optim.Optimizer)) or _is_pythons(kind):
            return called(kind)
        self._seen.add(id(value))
        if kind is functools.partial:
            given = [self.of(item, depth + 1) for item in value.args]
            named = {name: self.of(item, depth + 1) for name, item in value.keywords.items()}
            return {"function": self.of(value.func, depth + 1), **({"args": given} if given else {}), **named}
        return self._object(value, depth)

    def attributes(self, value: object, depth: int = 0) -> dict[str, Any]:
        """What an object holds in its attributes, by name."""
        try:
            held = object.__getattribute__(value, "__dict__")
        except (AttributeError, TypeError):
            return {}
        if type(held) is not dict:
            return {}
        library = type(value).__module__.partition(".")[0] in {"torch", "torchvision"}
        attributes = {}
        for name, item in list(held.items())[: 2 * _MOST_ITEMS]:
            if type(name) is not str or name in self._left_out or name.startswith("__"):
                continue
            if library and name.startswith("_") and not _is_plain(item):
                continue  # bookkeeping
            attributes[name.lstrip("_")] = self.of(item, depth + 1)
        return attributes

    def _object(self, value: object, depth: int) -> Any:
        name, attributes = called(type(value)), self.attributes(value, depth)
        length = length_of(value)
        if length is not None:
            attributes = {"length": length, **attributes}
        return {"class": name, **attributes} if attributes else name

    def _function(self, value: Any, depth: int) -> Any:
        """A function's name, and plain values that it takes from around it: `lambda step: min(1, step / warmup)`."""
        name = called(value)
        function = value.__func__ if type(value) is MethodType else value
        if type(function) is not FunctionType or depth >= _DEEPEST or not is_users(function.__code__.co_filename):
            return name
        code, cells = function.__code__, function.__closure__ or ()
        around = {variable: function.__globals__.get(variable) for variable in code.co_names[:_MOST_ITEMS]}
        around = {variable: content for variable, content in around.items() if content is not None}
        for variable, cell in zip(code.co_freevars, cells, strict=False):
            with contextlib.suppress(ValueError):  # not assigned yet
                around[variable] = cell.cell_contents
        held = {
            variable: self.of(content, depth + 1) for variable, content in around.items() if type(content) in _PLAIN
        }
        return {"function": name, **held} if held else name


def _is_pythons(kind: type) -> bool:
    """Whether a class is python's own, a logger or a lock, which says nothing of what was asked for."""
    home = kind.__module__ if type(kind.__module__) is str else ""
    return kind not in _HOLDERS and home != "__main__" and home.partition(".")[0] in sys.stdlib_module_names


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What `Description` gave as names and scalars: `sampler`, `sampler.replacement`, `transforms[0].padding`."""
    if type(value) is dict:
        head = next((value[key] for key in ("class", "function") if key in value), None)
        if head is not None and name:
            yield name, head
        for key, item in value.items():
            if head is None or key not in {"class", "function"}:
                yield from flat(f"{name}.{key}" if name else key, item)
    elif type(value) is list and not all(type(item) in _PLAIN for item in value):
        for number, item in enumerate(value):
            yield from flat(f"{name}[{number}]", item)
    else:
        yield name, str(value) if type(value) is list else value


def called(value: Any) -> str:
    """The name of a class or function, with its module where that is not the script's or torch's."""
    if type(value) is MethodType:
        value = value.__func__
    if type(value) not in _FUNCTIONS and not issubclass(type(value), type):
        value = type(value)
    module = value.__module__ if type(value.__module__) is str else ""
    shown = "" if module in {"__main__", "__mp_main__", "builtins", ""} or f"{module}.".startswith("torch.") else module
    return f"{shown}.{value.__qualname__}".lstrip(".")


def _is_plain(value: object) -> bool:
    kind = type(value)
    return kind in _PLAIN or (kind in _ENUMERATED and all(type(item) in _PLAIN for item in value))  # type: ignore[attr-defined] # a list or a tuple


def length_of(value: object) -> int | None:
    """How many samples a data set has; None where the script's own code would have to say."""
    asked = next((vars(cls)["__len__"] for cls in type(value).__mro__ if "__len__" in vars(cls)), None)
    home = f"{asked.__module__}." if type(asked) is FunctionType else ""
    held = object.__getattribute__(value, "__dict__") if home else {}
    if home.startswith("torch."):
        tensors, indices, sizes = (held.get(name) for name in ("tensors", "indices", "cumulative_sizes"))
        if type(tensors) is tuple and tensors and type(tensors[0]) is torch.Tensor:
            return tensors[0].shape[0]
        if type(indices) in _SIZED:
            return len(indices)  # type: ignore[arg-type] # each of these types has a length
        return sizes[-1] if type(sizes) is list and sizes and type(sizes[-1]) is int else None
    if home.startswith(_LENGTHS) and "dataset" not in held:
        try:
            length = len(value)  # type: ignore[arg-type] # it has a `__len__`
        except Exception:  # whatever a library's own does not like
            return None
        return length if type(length) is int else None
    return None


def _tensor(value: torch.Tensor) -> Any:
    if type(value) in (torch.Tensor, nn.Parameter) and value.device.type == "cpu" and 0 < value.numel() <= 16:
        return value.tolist()
    return f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
