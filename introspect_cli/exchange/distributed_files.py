"""Directories of `torch.distributed.checkpoint`: each tensor put together of the parts that ranks wrote.

What is where stands in a pickle, `.metadata`, which torch itself loads without any care. Here whatever it names becomes
that name with what it was given. The parts are files of torch.save, which the weights-only loader reads.
"""

from __future__ import annotations

import io
import math
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.exchange.incoming import DAMAGE, is_file_beside, read_small
from introspect_cli.store.tensorfile import NUMPY
from introspect_cli.tensors.arrays import Pieces, cut
from introspect_cli.tensors.arrays import read as read_torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray
    from typing_extensions import Self

_METADATA = ".metadata"
_DEEPEST = 64


class Made:
    """What a pickle would make by a call.

    Attributes:
        name: the callable, with its module.
        given: its arguments.
        state: what is set on the result; None for nothing.
    """

    name = ""
    given: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *given: Any) -> Self:
        """Keep the arguments, whatever they are."""
        made = super().__new__(cls)
        made.given = given
        return made

    def __setstate__(self, state: Any) -> None:
        """Keep the state, whatever it is."""
        self.state = state


_REFUSED = pickle.BYTEARRAY8 + pickle.EXT1 + pickle.EXT2 + pickle.EXT4


def _load_list(count: int, unpickler: Any) -> None:
    """Load the last items of a pickle's stack as a list."""
    unpickler.stack[-count:] = [unpickler.stack[-count:]]


class _HarmlessUnpickler(pickle._Unpickler):  # noqa: SLF001 - the one in C takes a place in its memo for a size
    """Python's unpickler with nothing to call: whatever a pickle names is a class of `Made`, and makes such objects.

    A bytearray would be made as long as the file claims before it is read, and extensions are classes of this process.
    Tuples become lists: to hash one that holds another, and so on, ends the process.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: load for code, load in pickle._Unpickler.dispatch.items() if code not in _REFUSED},  # noqa: SLF001
        pickle.TUPLE[0]: pickle._Unpickler.dispatch[pickle.LIST[0]],  # noqa: SLF001
        **{
            code: partial(_load_list, count)
            for count, code in enumerate(pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3, 1)
        },
    }

    def find_class(self, module: str, name: str) -> type[Made]:
        """The class of `Made` that stands for a name."""
        return type("Made", (Made,), {"name": f"{module}.{name}"})


class _Part(NamedTuple):
    """A stored part: where in which file."""

    path: Path
    offset: int
    length: int

    def read(self, called: str) -> Any:
        """What torch.save wrote there; errors call it `called`."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return read_torch(io.BytesIO(file.read(self.length)), called)


def read_distributed(folder: Path) -> dict[Any, Any]:
    """Read a `torch.distributed.checkpoint` directory as nested data, tensors as `Pieces`.

    Raises:
        StoreError: the metadata is damaged, or names a part that is not there.
        OSError: a file cannot be read.
    """
    path = folder / _METADATA
    data = read_small(path)
    try:
        return _tensors(folder, _HarmlessUnpickler(io.BytesIO(data)).load().state)
    except (*DAMAGE, MemoryError) as error:
        raise StoreError(f"{path} is no metadata of torch.distributed.checkpoint: {error!r:.120}") from None


def _tensors(folder: Path, state: dict[str, Any]) -> dict[Any, Any]:
    """The nested data that the metadata describes; tensors as `Pieces`, read when asked for, other values at once.

    A value that no file has is left out. ValueError where parts are compressed, encrypted or not where they should be;
    other damage raises what python does.
    """
    places: dict[tuple[str, tuple[int, ...] | None], _Part] = {}
    for index, where in state["storage_data"].items():
        offset = index.state.get("offset")
        begins = None if offset is None else _sizes(offset)
        if where.state.get("transform_descriptors"):
            raise ValueError("its parts are compressed or encrypted, which is not read")
        places[str(index.state["fqn"]), begins] = _part(folder, where.state)
    nested = state.get("planner_data") or {}
    tree: dict[Any, Any] = {}
    for name, about in state["state_dict_metadata"].items():
        keys = nested.get(name) or [name]
        if about.name.endswith(".TensorStorageMetadata"):
            value: Any = _tensor(folder, name, about.state, places)
        elif (name, None) in places:
            value = places[name, None].read(f"{name} in {folder}")
        else:
            continue
        _put(tree, keys if isinstance(keys, list) else [name], value)
    return tree


def _put(tree: dict[Any, Any], keys: list[Any], value: Any) -> None:
    """Set the value at a path of keys in nested dicts, made where missing; list indices are keys too.

    Raises:
        ValueError: a key on the way has a value that is no dict, or there are more than `_DEEPEST` keys.
    """
    if len(keys) > _DEEPEST:
        raise ValueError("it is nested too deeply")
    for key in keys[:-1]:
        inside = tree.setdefault(key, {})
        if not isinstance(inside, dict):
            raise ValueError(f"{key!r} is a value and holds others")  # noqa: TRY004 - the reader's word for damage
        tree = inside
    tree[keys[-1]] = value


def _sizes(made: Any) -> tuple[int, ...]:
    """The sizes of a `torch.Size`, as `_HarmlessUnpickler` gives it; ValueError for anything but integers from 0 on."""
    sizes = tuple(made.given[0]) if made.given else ()
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("a size is no number")
    return sizes


def _part(folder: Path, where: dict[str, Any]) -> _Part:
    """A part by its entry in the metadata; ValueError unless it is inside a file beside the metadata."""
    file, offset, length = where["relative_path"], where["offset"], where["length"]
    if not is_file_beside(file):
        raise ValueError(f"it names {str(file)[:80]!r}, which is no file beside it")
    path = folder / file
    if not path.is_file():
        raise ValueError(f"{file} is missing")
    if not (type(offset) is int and type(length) is int and 0 <= offset <= offset + length <= path.stat().st_size):
        raise ValueError(f"a part lies beyond the end of {file}")
    return _Part(path, offset, length)


def _tensor(
    folder: Path, name: str, about: dict[str, Any], places: dict[tuple[str, tuple[int, ...] | None], _Part]
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
    dtype = about["properties"].state[0].name.rpartition(".")[2]
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
            part = where.read(f"{name} in {where.path}")
            if not isinstance(part, Pieces) or (part.dtype, part.shape, part.unread) != (dtype, sizes, ""):
                raise StoreError(f"{where.path} holds another part of {name} than {_METADATA} says")
            flat = np.concatenate([*part.read(), np.empty(0, NUMPY[dtype])])
            place = tuple(slice(first, first + size) for first, size in zip(begins, sizes, strict=True))
            if len(parts) > 1 and filled[place].any():
                raise StoreError(f"{folder} has parts of {name} that overlap")
            filled[place if len(parts) > 1 else ...] = True
            whole[place] = flat.view(NUMPY[dtype]).reshape(sizes)
        yield from cut(whole.reshape(-1))

    return Pieces(dtype, shape, read)
