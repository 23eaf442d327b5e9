"""What an object of the script's was given, as plain data, read without running anything of the script's.

It is in the object's attributes. Only an object's `__dict__` is looked into, only exact types are taken apart, and a
length is asked of what the interpreter, torch or numpy implements alone. What is large is told by its kind and size.
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

from introspect_cli.capture.environment.sources import attributes_of, is_users

if TYPE_CHECKING:
    from collections.abc import Iterator


_PLAIN = frozenset({bool, int, float, str, type(None)})
_NAMED = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
FUNCTIONS = (FunctionType, BuiltinFunctionType)
_SIZED = frozenset({list, tuple, dict, set, frozenset, OrderedDict, deque, range, bytes, bytearray})
_ENUMERATED = (list, tuple)

MAX_DEPTH = 4
MAX_ITEMS = 32
MAX_PARTS = 400
MAX_TEXT = 200
MAX_BITS = 256  # bits of an integer

_HOLDERS = (functools.partial, SimpleNamespace, Namespace)
"""Python's classes that hold what they are given."""

_LENGTHS = ("torchvision.", "datasets.")
"""Libraries beside torch whose data sets say how long they are without running anything of the script's."""


class Description:
    """Plain data of one object; cut at depth 4, 32 items of a container and 400 parts in all.

    Args:
        left_out: names of attributes that say how far an object has come, not what it was built with.
    """

    def __init__(self, left_out: frozenset[str] = frozenset()) -> None:
        """Start with no part described; one instance is for one object."""
        self._left_out = left_out
        self._nodes = 0
        self._seen: set[int] = set()

    def describe(self, value: Any, depth: int = 0) -> Any:
        """A value as plain data: a number, text cut to 200 characters, list, dict, or an object's class and attributes.

        A tuple gives a list; items of a dict whose key is no scalar are left out. Given by class and length are sets
        and other containers, and lists, tuples and dicts of more than 32 items; by class are modules, optimizers and
        python's own objects. After 400 parts, and for objects described before, it is as at depth 4.

        Args:
            value: any object; nothing of the script's is run.
            depth: how many objects it is inside of; from 4 on, containers are given by class and length, objects
                by class.
        """
        self._nodes += 1
        kind = type(value)
        if kind is int and value.bit_length() > MAX_BITS:
            return f"int of {value.bit_length()} bits"
        if kind in _PLAIN:
            return value[:MAX_TEXT] if kind is str else value
        if kind in _NAMED:
            return str(value)
        if issubclass(kind, type):
            return called(value)
        if kind in FUNCTIONS or kind is MethodType:
            return self._function(value, depth)
        if issubclass(kind, torch.Tensor):
            return _tensor(value)
        if kind.__module__ == "numpy" and kind.__name__ in {"ndarray", "memmap"}:
            return f"{kind.__name__} {value.dtype} {list(value.shape)}"
        if kind is torch.Generator:
            return f"generator on {value.device}, seed {value.initial_seed()}"
        too_far = depth >= MAX_DEPTH or self._nodes > MAX_PARTS or id(value) in self._seen
        if kind in _SIZED:
            if too_far or kind not in {*_ENUMERATED, dict} or len(value) > MAX_ITEMS:
                return f"{kind.__name__} of {len(value):,}"
            if kind is dict:
                return {
                    str(key)[:MAX_TEXT]: self.describe(held, depth + 1)
                    for key, held in value.items()
                    if type(key) in _PLAIN
                }
            return [self.describe(item, depth + 1) for item in value]
        if too_far or issubclass(kind, (nn.Module, ModuleType, torch.optim.Optimizer)) or _is_pythons(kind):
            return called(kind)
        self._seen.add(id(value))
        if kind is functools.partial:
            given = [self.describe(item, depth + 1) for item in value.args]
            named = {name: self.describe(item, depth + 1) for name, item in value.keywords.items()}
            return {"function": self.describe(value.func, depth + 1), **({"args": given} if given else {}), **named}
        return self._object(value, depth)

    def attributes(self, value: object, depth: int = 0) -> dict[str, Any]:
        """An object's attributes, described, by name without leading underscores; of its `__dict__` the first 64 alone.

        Left out are names in `left_out`, names that begin with `__`, and private ones of torch's and torchvision's
        objects unless they are scalars or lists of them.

        Args:
            value: any object; {} for one without a `__dict__`.
            depth: of the object, as in `describe`.
        """
        held = attributes_of(value)
        library = type(value).__module__.partition(".")[0] in {"torch", "torchvision"}
        attributes = {}
        for name, item in list(held.items())[: 2 * MAX_ITEMS]:
            if type(name) is not str or name in self._left_out or name.startswith("__"):
                continue
            if library and name.startswith("_") and not _is_plain(item):
                continue  # bookkeeping
            attributes[name.lstrip("_")] = self.describe(item, depth + 1)
        return attributes

    def _object(self, value: object, depth: int) -> Any:
        """A dict of class, `length` if known, and attributes; only the class's name where there is neither."""
        name, attributes = called(type(value)), self.attributes(value, depth)
        length = length_of(value)
        if length is not None:
            attributes = {"length": length, **attributes}
        return {"class": name, **attributes} if attributes else name

    def _function(self, value: Any, depth: int) -> Any:
        """Name of a function; for a user's that uses any scalar globals or closure variables, a dict of name and these.

        Of globals, the first 32 names that it uses. From depth 4 on the name alone.
        """
        name = called(value)
        function = value.__func__ if type(value) is MethodType else value
        if type(function) is not FunctionType or depth >= MAX_DEPTH or not is_users(function.__code__.co_filename):
            return name
        code, cells = function.__code__, function.__closure__ or ()
        around = {variable: function.__globals__.get(variable) for variable in code.co_names[:MAX_ITEMS]}
        around = {variable: content for variable, content in around.items() if content is not None}
        for variable, cell in zip(code.co_freevars, cells, strict=False):
            with contextlib.suppress(ValueError):  # not assigned yet
                around[variable] = cell.cell_contents
        held = {
            variable: self.describe(content, depth + 1)
            for variable, content in around.items()
            if type(content) in _PLAIN
        }
        return {"function": name, **held} if held else name


def _is_pythons(kind: type) -> bool:
    """Whether a class is of the standard library; False for `partial`, `Namespace` and `SimpleNamespace`."""
    home = kind.__module__ if type(kind.__module__) is str else ""
    return kind not in _HOLDERS and home != "__main__" and home.partition(".")[0] in sys.stdlib_module_names


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Pairs of dotted name and scalar from what `Description` gives: `sampler`, `transforms[0].padding`.

    Args:
        name: what all names begin with; "" for nothing.
        value: plain data; a dict's `class`, else `function`, is the value of the dict's own name, or is left out where
            `name` is "". A list of scalars is one value, as text.
    """
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


def called(value: Any, *, in_full: bool = False) -> str:
    """Qualified name of a class or function, or of an object's class; with its module unless that is known.

    Args:
        value: any object.
        in_full: False leaves the module out for `__main__`, builtins and torch; True never leaves it out, and takes a
            class for an object, of which it gives the metaclass.
    """
    if type(value) is MethodType:
        value = value.__func__
    if type(value) not in FUNCTIONS and not (issubclass(type(value), type) and not in_full):
        value = type(value)
    module = value.__module__ if type(value.__module__) is str else ""
    is_known = module in {"__main__", "__mp_main__", "builtins", ""} or f"{module}.".startswith("torch.")
    return f"{'' if is_known and not in_full else module}.{value.__qualname__}".lstrip(".")


def _is_plain(value: object) -> bool:
    """Whether a value is a scalar, or a list or tuple of scalars."""
    kind = type(value)
    return kind in _PLAIN or (kind in _ENUMERATED and all(type(item) in _PLAIN for item in value))  # type: ignore[attr-defined] # a list or a tuple


def length_of(value: object) -> int | None:
    """Number of samples in a torch, torchvision or `datasets` data set.

    None for a class whose `__len__` is defined elsewhere, so that no code of the script's runs; for one of torchvision
    or `datasets` with an attribute `dataset`; and where its attributes, or a call of its `__len__`, give no length.
    """
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
    """A CPU tensor of 1 to 16 elements as nested lists (0-dim: a number); any other as `tensor float32 [16, 16]`."""
    if type(value) in (torch.Tensor, nn.Parameter) and value.device.type == "cpu" and 0 < value.numel() <= 16:
        return value.tolist()
    return f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
