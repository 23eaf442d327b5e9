"""Directories of `torch.distributed.checkpoint`: each tensor put together of the parts that ranks wrote.

What is where stands in a pickle, `.metadata`, which torch itself loads without any care. Here it is taken apart by its
opcodes, and makes nothing: a class becomes its name with what it was given. The parts are files of torch.save, which
the weights-only loader reads.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.store.tensorfile import NUMPY
from introspect_cli.tensors.arrays import Pieces, cut
from introspect_cli.tensors.arrays import read as read_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

_METADATA = ".metadata"
_MOST_METADATA = 1 << 28


@dataclass(eq=False)
class Made:
    """An object that a pickle would make by a call: the callable's name, its arguments, and the state set on it."""

    name: str
    given: tuple[Any, ...] = ()
    state: dict[str, Any] = field(default_factory=dict)
    other: Any = None


_MARK = object()
"""Where an opcode's arguments begin on the stack."""

_PUSHED: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_GIVEN = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
    | {"BINBYTES", "SHORT_BINBYTES", "INT", "LONG", "FLOAT", "UNICODE"}
)


def parse_pickle(data: bytes) -> Any:
    """Decode a pickle without executing anything; calls become `Made`.

    Raises:
        ValueError: it has an opcode that `.metadata` files do not, or no end. Other damage raises what python does.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}

    def taken(count: int) -> list[Any]:
        """Pop the last `count` items of the stack."""
        items = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return items

    def marked() -> list[Any]:
        """Pop all items after the last mark, and the mark."""
        return taken(next(at for at, item in enumerate(reversed(stack), 1) if item is _MARK))[1:]

    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _GIVEN:
            stack.append(argument)
        elif name in _PUSHED:
            stack.append(_PUSHED[name]())
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name.endswith("PUT"):
            memo[argument] = stack[-1]
        elif name.endswith("GET"):
            stack.append(memo[argument])
        elif name.startswith("TUPLE"):
            stack.append(tuple(marked() if name == "TUPLE" else taken(int(name[-1]))))
        elif name in ("APPEND", "APPENDS"):
            values = marked() if name == "APPENDS" else taken(1)
            stack[-1].extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = marked() if name == "SETITEMS" else taken(2)
            stack[-1].update(zip(values[::2], values[1::2], strict=True))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            words = str(argument).split(" ") if name == "GLOBAL" else taken(2)
            stack.append(Made(".".join(map(str, words))))
        elif name in ("REDUCE", "NEWOBJ"):
            called, given = taken(2)
            stack.append(Made(called.name, tuple(given)))
        elif name == "BUILD":
            [state] = taken(1)
            if isinstance(state, dict):
                stack[-1].state.update(state)
            else:
                stack[-1].other = state
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"its metadata has an opcode {name}")
    raise ValueError("its metadata has no end")


class _Where(NamedTuple):
    """File, offset and length of a stored part."""

    file: str
    offset: int
    length: int


def read_distributed(folder: Path) -> dict[Any, Any]:
    """Read a `torch.distributed.checkpoint` directory as nested data, tensors as `Pieces`.

    Raises:
        StoreError: the metadata is damaged, or names a part that is not there.
        OSError: a file cannot be read.
    """
    path = folder / _METADATA
    try:
        if not path.is_file() or path.stat().st_size > _MOST_METADATA:
            raise ValueError("it is larger than any metadata, or no file")  # noqa: TRY301 - told as all damage is
        tree = _tensors(folder, parse_pickle(path.read_bytes()).state)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, StopIteration, OverflowError) as error:
        raise StoreError(f"{path} is no metadata of torch.distributed.checkpoint: {error!r:.120}") from None
    return tree


def _tensors(folder: Path, state: dict[str, Any]) -> dict[Any, Any]:
    """The nested data that the metadata describes; tensors as `Pieces`, read when asked for, other values at once.

    A value that no file has is left out. ValueError where parts are compressed, encrypted or not where they should be;
    other damage raises what python does.
    """
    places: dict[tuple[str, tuple[int, ...] | None], _Where] = {}
    for index, where in state["storage_data"].items():
        offset = index.state.get("offset")
        begins = None if offset is None else _sizes(offset)
        if where.state.get("transform_descriptors"):
            raise ValueError("its parts are compressed or encrypted, which is not read")
        places[str(index.state["fqn"]), begins] = _place_of_part(folder, where.state)
    nested = state.get("planner_data") or {}
    tree: dict[Any, Any] = {}
    for name, about in state["state_dict_metadata"].items():
        keys = nested.get(name) or (name,)
        kind = about.name.rpartition(".")[2]
        if kind == "TensorStorageMetadata":
            value: Any = _tensor(folder, name, about.state, places)
        elif (name, None) in places:
            value = read_torch(_piece(folder, places[name, None]), f"{name} in {folder}")
        else:
            continue
        _put(tree, keys if isinstance(keys, tuple) else (name,), value)
    return tree


def _put(tree: dict[Any, Any], keys: tuple[Any, ...], value: Any) -> None:
    """Set the value at a path of keys in nested dicts, made where missing; list indices are keys too.

    Raises:
        ValueError: a key on the way has a value that is no dict.
    """
    for key in keys[:-1]:
        inside = tree.setdefault(key, {})
        if not isinstance(inside, dict):
            raise ValueError(f"{key!r} is a value and holds others")  # noqa: TRY004 - the reader's word for damage
        tree = inside
    tree[keys[-1]] = value


def _sizes(made: Any) -> tuple[int, ...]:
    """The sizes of a `torch.Size`, as `parse_pickle` gives it; ValueError for anything but integers from 0 on."""
    sizes = tuple(made.given[0]) if made.given else ()
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("a size is no number")
    return sizes


def _place_of_part(folder: Path, where: dict[str, Any]) -> _Where:
    """Where a part lies, by its entry `where` in the metadata.

    ValueError unless it is inside a file beside the metadata.
    """
    file, offset, length = where["relative_path"], where["offset"], where["length"]
    if not isinstance(file, str) or file != os.path.basename(file) or file in ("", ".", ".."):  # noqa: PTH119 - a name
        raise ValueError(f"it names {str(file)[:80]!r}, which is no file beside it")
    path = folder / file
    if not path.is_file():
        raise ValueError(f"{file} is missing")
    if not (type(offset) is int and type(length) is int and 0 <= offset <= offset + length <= path.stat().st_size):
        raise ValueError(f"a part lies beyond the end of {file}")
    return _Where(file, offset, length)


def _piece(folder: Path, where: _Where) -> io.BytesIO:
    """The bytes of a stored part, as a file in memory."""
    with (folder / where.file).open("rb") as file:
        file.seek(where.offset)
        return io.BytesIO(file.read(where.length))


def _tensor(
    folder: Path, name: str, about: dict[str, Any], places: dict[tuple[str, tuple[int, ...] | None], _Where]
) -> Pieces:
    """A tensor that is assembled from its parts when read; one of an unknown type says in `unread` that it is not.

    Args:
        folder: the checkpoint.
        name: of the tensor.
        about: its size, type and parts in the metadata.
        places: where each part lies, by name and first indices; None for these where a file has one part.

    Raises:
        ValueError: the parts lie outside of it, or have not as many elements.
    """
    dtype = about["properties"].other[0].name.rpartition(".")[2]
    shape = _sizes(about["size"])
    if dtype not in NUMPY:
        return Pieces(dtype, shape, tuple, f"elements of type {dtype} are not read")
    parts = []
    for chunk in about["chunks"]:
        begins, sizes = _sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"])
        inside = len(begins) == len(sizes) == len(shape)
        if not inside or any(first + size > whole for first, size, whole in zip(begins, sizes, shape, strict=True)):
            raise ValueError(f"a part of {name} lies outside of it")
        where = places.get((name, begins)) or places[name, None]
        if math.prod(sizes) * NUMPY[dtype].itemsize > where.length:
            raise ValueError(f"a part of {name} needs more bytes than it has")
        parts.append((begins, sizes, where))
    if sum(math.prod(sizes) for _, sizes, _ in parts) != math.prod(shape):
        raise ValueError(f"the parts of {name} are not all of it")

    def read() -> Iterator[NDArray[Any]]:
        """Yield the elements in pieces, all parts being read at once.

        StoreError where a part is another one, or parts overlap.
        """
        whole = np.empty(shape, NUMPY[dtype])
        filled = np.zeros(shape if len(parts) > 1 else (), np.bool_)
        for begins, sizes, where in parts:
            part = read_torch(_piece(folder, where), f"{name} in {folder / where.file}")
            if not isinstance(part, Pieces) or (part.dtype, part.shape, part.unread) != (dtype, sizes, ""):
                raise StoreError(f"{folder / where.file} holds another part of {name} than {_METADATA} says")
            flat = np.concatenate([*part.read(), np.empty(0, NUMPY[dtype])])
            place = tuple(slice(first, first + size) for first, size in zip(begins, sizes, strict=True))
            if len(parts) > 1 and filled[place].any():
                raise StoreError(f"{folder} has parts of {name} that overlap")
            filled[place if len(parts) > 1 else ...] = True
            whole[place] = flat.view(NUMPY[dtype]).reshape(sizes)
        yield from cut(whole.reshape(-1))

    return Pieces(dtype, shape, read)
