"""Nested values as a flat list of paths and leaves.

The problem: modules take and return tuples, dicts, dataclasses, model outputs, caches and packed sequences, nested
at will, and a divergence must be told by the path of the tensor inside. The way: walk what is known by structure
(dict, list, tuple, namedtuple, dataclass), then what torch's pytree registry knows, then the attributes of other
objects that hold tensors. Paths are written as pytree key strings: `[0]['hidden']`, `.logits`. Anything else is a
leaf, for the caller to judge. Depth, cycles and the number of leaves are bounded.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch

MAX_DEPTH: Final = 16
MAX_LEAVES: Final = 100_000
MAX_OBJECT_DEPTH: Final = 4
"""Objects known by attributes only are followed this deep."""

_ATOMS: Final = frozenset({int, float, complex, bool, str, bytes, type(None), torch.Size, torch.dtype, torch.device})

Leaves = list[tuple[str, Any]]


def flatten(value: Any) -> Leaves:
    """Leaves of a nested value with their paths, in order; `""` is the path of a value that is a leaf itself.

    Non-tensor leaves are returned too. A container met again inside itself, or below `MAX_DEPTH`, is left out;
    an empty container has no leaves.
    """
    cls = type(value)
    if cls in _ATOMS or isinstance(value, torch.Tensor):
        return [("", value)]
    if cls is tuple or cls is list:
        if all(isinstance(item, torch.Tensor) for item in value):
            return [(f"[{index}]", item) for index, item in enumerate(value)]
    elif cls is dict and all(isinstance(item, torch.Tensor) for item in value.values()):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    leaves: Leaves = []
    _walk(value, "", leaves, [], 0)
    return leaves


def _children(value: Any, objects: int) -> list[tuple[str, Any]] | None:
    """Direct children with the last piece of their paths; None for a leaf."""
    cls = type(value)
    if cls in _ATOMS or isinstance(value, (torch.Tensor, type)):
        return None
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        if isinstance(names, tuple) and len(names) == len(value):
            return [(f".{name}", item) for name, item in zip(names, value, strict=True)]
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, list):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value))
        return [(f".{name}", getattr(value, name)) for name in names if getattr(value, name, None) is not None]
    if isinstance(value, dict):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    registered = _registered(value)
    if registered is not None:
        return registered
    return _attributes(value) if objects < MAX_OBJECT_DEPTH else None


def _registered(value: Any) -> list[tuple[str, Any]] | None:
    """Children by torch's pytree registry; None for what it does not know."""
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


def _attributes(value: Any) -> list[tuple[str, Any]] | None:
    """Attributes of an object that holds tensors, or objects that might; None for one that holds none."""
    if isinstance(value, torch.nn.Module) or callable(value):
        return None
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict) or not _holds_tensors(held):
        return None
    return [(f".{name}", item) for name, item in held.items() if _may_hold(item)]


def _may_hold(item: Any) -> bool:
    return isinstance(item, torch.Tensor) or (type(item) not in _ATOMS and not callable(item))


def _holds_tensors(held: dict[str, Any], depth: int = 3) -> bool:
    """Whether a tensor is among the values, or in lists, dicts and objects among them, a few levels down."""
    for item in held.values():
        if isinstance(item, torch.Tensor):
            return True
        if depth == 0 or not _may_hold(item):
            continue
        inner: Any = item if isinstance(item, dict) else getattr(item, "__dict__", None)
        if isinstance(item, (list, tuple)):
            inner = dict(enumerate(item[:64]))
        if isinstance(inner, dict) and _holds_tensors(inner, depth - 1):
            return True
    return False


def _walk(value: Any, path: str, leaves: Leaves, above: list[int], objects: int) -> None:
    if len(leaves) >= MAX_LEAVES:
        return
    children = _children(value, objects)
    if children is None:
        leaves.append((path, value))
        return
    if len(above) >= MAX_DEPTH or id(value) in above:
        return
    above.append(id(value))
    plain = isinstance(value, (tuple, list, dict)) or dataclasses.is_dataclass(value)
    for piece, item in children:
        _walk(item, path + piece, leaves, above, objects if plain else objects + 1)
    above.pop()


def containers(value: Any) -> list[tuple[str, str]]:
    """Path and class name of everything that holds the leaves of a nested value, outermost first."""
    found: list[tuple[str, str]] = []
    _name(value, "", found, [], 0)
    return found


def _name(value: Any, path: str, found: list[tuple[str, str]], above: list[int], objects: int) -> None:
    children = _children(value, objects) if len(found) < MAX_LEAVES else None
    if children is None or len(above) >= MAX_DEPTH or id(value) in above:
        return
    found.append((path, type(value).__name__))
    above.append(id(value))
    plain = isinstance(value, (tuple, list, dict)) or dataclasses.is_dataclass(value)
    for piece, item in children:
        _name(item, path + piece, found, above, objects if plain else objects + 1)
    above.pop()
