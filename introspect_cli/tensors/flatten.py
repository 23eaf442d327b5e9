"""Nested values as a flat list of paths and leaves.

Modules take and return tuples, dicts, dataclasses, model outputs, caches and packed sequences, nested at will, and a
divergence must be told by the path of the tensor inside. So this walks what is known by structure (dict, list, tuple,
namedtuple, dataclass), then what torch's pytree registry knows, then the attributes of other objects that hold tensors.
Paths are written as pytree key strings: `[0]['hidden']`, `.logits`. Anything else is a leaf, for the caller to judge.
What a class defines for itself (`__iter__`, `__getattr__`, `__eq__`, `__repr__`) is never called: it may have effects,
take long, or raise. Depth, cycles and the number of leaves are bounded.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType
from typing import Any, Final

import torch

MAX_DEPTH: Final = 16
MAX_LEAVES: Final = 100_000
MAX_OBJECT_DEPTH: Final = 4
"""Objects known by attributes only are followed this deep."""

_ATOMS: Final = frozenset({int, float, complex, bool, str, bytes, type(None), torch.Size, torch.dtype, torch.device})

_CODE: Final = (torch.nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, functools.partial)
"""Classes of callables that are leaves, whatever they hold."""

_PLAIN: Final = (bool, int, float, str)

Leaves = list[tuple[str, Any]]


def is_plain(cls: type) -> bool:
    """Whether a class is bool, int, float or str, or numpy's subclass of one."""
    return cls in _PLAIN or (cls.__module__ == "numpy" and issubclass(cls, _PLAIN))


def flatten(value: Any) -> Leaves:
    """Leaves of a nested value with their paths, in order: `('[0]', tensor)`, `("['hidden']", tensor)`.

    Leaves that are no tensors are returned too. A value that is a leaf itself has the path "". An empty container has
    no leaves; one that is inside itself, or below 16 levels, is left out, and so is what comes after 100,000 leaves.
    """
    cls = type(value)
    if cls in _ATOMS or issubclass(cls, torch.Tensor):
        return [("", value)]
    if cls is tuple or cls is list:
        if all(_is_tensor(item) for item in value):
            return [(f"[{index}]", item) for index, item in enumerate(value)]
    elif cls is dict and all(_is_tensor(item) for item in value.values()):
        return [(_key_text(key, index), item) for index, (key, item) in enumerate(value.items())]
    leaves: Leaves = []
    _collect(value, "", leaves, [], 0)
    return leaves


def _children(value: Any, objects: int) -> list[tuple[str, Any]] | None:
    """Path piece and value of each child of a container; None for a leaf.

    Fields of a dataclass that are None are left out.

    Args:
        value: any value.
        objects: how many of the containers around it are neither tuple, list, dict nor dataclass; from 4 on, an object
            that torch's registry does not have is a leaf.
    """
    cls = type(value)
    if cls in _ATOMS or issubclass(cls, (torch.Tensor, type)):
        return None
    if issubclass(cls, tuple):
        items = list(tuple.__iter__(value))
        names = getattr(cls, "_fields", None)
        if type(names) is tuple and len(names) == len(items):
            return [(f".{name}", item) for name, item in zip(names, items, strict=True)]
        return [(f"[{index}]", item) for index, item in enumerate(items)]
    if issubclass(cls, list):
        return [(f"[{index}]", item) for index, item in enumerate(list.__iter__(value))]
    if dataclasses.is_dataclass(cls):
        fields = [(field.name, _attribute(value, field.name)) for field in dataclasses.fields(cls)]
        return [(f".{name}", item) for name, item in fields if item is not None]
    if issubclass(cls, dict):
        return [(_key_text(key, index), item) for index, (key, item) in enumerate(dict.items(value))]
    registered = _registered_children(value)
    if registered is not None:
        return registered
    return _attribute_children(value) if objects < MAX_OBJECT_DEPTH else None


def _registered_children(value: Any) -> list[tuple[str, Any]] | None:
    """Path piece and value of each child by torch's pytree registry, whose functions are called.

    Returns:
        None for a class that is not registered, or if its function raises.
    """
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    try:
        with_keys = getattr(node, "flatten_with_keys_fn", None)
        if with_keys is not None:
            return [(_pytree.keystr((key,)), item) for key, item in with_keys(value)[0]]
        return [(f"[{index}]", item) for index, item in enumerate(node.flatten_fn(value)[0])]
    except Exception:  # a registered function is the script's own code
        return None


def _attribute_children(value: Any) -> list[tuple[str, Any]] | None:
    """Path piece and value of each attribute that may hold a tensor; None, for a leaf, if `_has_tensors` is False.

    Modules, classes, functions and objects without `__dict__` are leaves, too.
    """
    if issubclass(type(value), _CODE):
        return None
    held = _own_dict(value)
    if held is None or not _has_tensors(held):
        return None
    return [(f".{name}", item) for name, item in held.items() if _may_hold_tensors(item)]


def _is_tensor(item: Any) -> bool:
    return issubclass(type(item), torch.Tensor)


def _key_text(key: Any, index: int) -> str:
    """A dict's key as a piece of a path: `['name']`; of a class outside `_ATOMS`, by class and place: `[<Class 0>]`."""
    cls = type(key)
    return f"[{key!r}]" if cls in _ATOMS else f"[<{cls.__name__} {index}>]"


def _own_dict(value: Any) -> dict[str, Any] | None:
    """An object's `__dict__`, read without calling its class's methods; None where it has none, or no plain dict."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return held if type(held) is dict else None


def _attribute(value: Any, name: str) -> Any:
    """An attribute stored in `__dict__` or a set slot, read without the class's methods; None for any other."""
    held = _own_dict(value)
    if held is not None and name in held:
        return held[name]
    for cls in type(value).__mro__:
        descriptor = vars(cls).get(name)
        if type(descriptor) is MemberDescriptorType:
            try:
                return descriptor.__get__(value, type(value))
            except AttributeError:
                return None
    return None


def _may_hold_tensors(item: Any) -> bool:
    """Whether an item is a tensor, or may contain one: it is no number, text, module, class or function."""
    return _is_tensor(item) or (type(item) not in _ATOMS and not issubclass(type(item), _CODE))


def _has_tensors(held: dict[str, Any], depth: int = 3) -> bool:
    """Whether any value of `held` is a tensor, or holds one at most `depth` levels inside.

    Of a list or tuple the first 64 items are looked at, of an object its `__dict__`.
    """
    for item in held.values():
        if _is_tensor(item):
            return True
        if depth and _may_hold_tensors(item) and _has_tensors(_held_in(item), depth - 1):
            return True
    return False


def _held_in(item: Any) -> dict[Any, Any]:
    """Values in a dict, a list or tuple (the first 64), or another object's `__dict__`, by key; {} for any other.

    They are read without calling methods of the class.
    """
    cls = type(item)
    if issubclass(cls, dict):
        return dict(dict.items(item))
    if issubclass(cls, (list, tuple)):
        walk = list.__iter__ if issubclass(cls, list) else tuple.__iter__
        return dict(enumerate(itertools.islice(walk(item), 64)))
    return _own_dict(item) or {}


def _collect(value: Any, path: str, leaves: Leaves, above: list[int], objects: int) -> None:
    """Append the leaves of a nested value.

    A container that is inside itself, or below 16 levels, is left out.

    Args:
        value: the value.
        path: where it is.
        leaves: takes path and value of each leaf, at most 100,000.
        above: the ids of the containers around it, outermost first.
        objects: how many of these are neither tuple, list, dict nor dataclass.
    """
    if len(leaves) >= MAX_LEAVES:
        return
    children = _children(value, objects)
    if children is None:
        leaves.append((path, value))
        return
    if len(above) >= MAX_DEPTH or id(value) in above:
        return
    above.append(id(value))
    cls = type(value)
    plain = issubclass(cls, (tuple, list, dict)) or dataclasses.is_dataclass(cls)
    for piece, item in children:
        _collect(item, path + piece, leaves, above, objects if plain else objects + 1)
    above.pop()
