"""Arrays that lie in `.npy`, `.npz` and `.safetensors` files, read without a package beyond numpy.

Such files come from JAX, TensorFlow, C++ or somebody else's machine. So nothing in them is executed (no pickles), every
length is checked against the file, and element types that numpy does not know (bfloat16, fp8) keep their bits and are
widened exactly.
"""

from __future__ import annotations

import json
import math
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.store.files import reason
from introspect_cli.store.tensorfile import CODES, NUMPY, widened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

SUFFIXES = (".npy", ".npz", ".safetensors")
"""Endings of the files that are read."""

_LIMIT_HEADER = 1 << 27
_DAMAGE = (
    *(ValueError, EOFError, KeyError, TypeError, SyntaxError, MemoryError, OverflowError, RecursionError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)
_TYPES = {own: name for name, own in CODES.items()} | {"C64": "complex64"}


@dataclass(frozen=True, eq=False)
class Stored:
    """An array as it was stored.

    Attributes:
        name: what it is called: the key in an archive, "" in a file of one array.
        bits: its elements, little-endian, row-major, shape (n,).
        values: the same as numbers, shape (n,).
        dtype: torch's name of the element type without the prefix.
        shape: sizes.
    """

    name: str
    bits: NDArray[Any]
    values: NDArray[Any]
    dtype: str
    shape: tuple[int, ...]


def read(path: Path) -> Iterator[Stored]:
    """The arrays of a file, in the order in which it has them.

    Raises:
        StoreError: it cannot be read, or holds what is no array of numbers.
    """
    try:
        if path.suffix == ".safetensors":
            yield from _safetensors(path)
        elif path.suffix == ".npy":
            yield _array("", np.load(path, mmap_mode="r", allow_pickle=False), path)
        else:
            with np.load(path, allow_pickle=False) as archive:
                for name in archive.files:
                    yield _array(name, archive[name], path)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {reason(error)}") from None
    except _DAMAGE as error:
        raise StoreError(
            f"{path} is not a {path.suffix} file that can be read: {error or type(error).__name__}"
        ) from None


def _array(name: str, array: Any, path: Path) -> Stored:
    """An array that numpy read.

    Raises:
        StoreError: it holds something else than numbers.
    """
    kind = array.dtype.name
    if kind not in NUMPY:
        which = f"{name} in {path}" if name else str(path)
        more = "; bfloat16 loses its name in numpy's files: save it as float32 or as .safetensors" * (kind == "void16")
        raise StoreError(f"{which} has elements of type {array.dtype}, which is no type of torch's{more}")
    flat = np.ascontiguousarray(array).reshape(-1).astype(NUMPY[kind], copy=False)
    return Stored(name, flat, flat, kind, tuple(array.shape))


def _safetensors(path: Path) -> Iterator[Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0]
        if length > min(size - 8, _LIMIT_HEADER):
            raise ValueError("its header claims more bytes than the file holds")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header lists no tensors")  # noqa: TRY004 - the reader's word for what cannot be read
    data = np.memmap(path, np.uint8, "r", offset=8 + length) if size > 8 + length else np.zeros(0, np.uint8)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, (begin, end) = _TYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
        if kind is None:
            raise StoreError(f"{name} in {path} has elements of type {entry['dtype']}, which is not known here")
        if not all(type(own) is int and own >= 0 for own in (*shape, begin, end)):
            raise ValueError(f"the sizes of {name} are not numbers")
        stored = NUMPY[kind]
        if not begin <= end <= len(data) or math.prod(shape) * stored.itemsize != end - begin:
            raise ValueError(f"{name} needs another number of bytes than it has")
        bits = np.frombuffer(data[begin:end].tobytes(), stored)
        yield Stored(name, bits, widened(bits, kind), kind, tuple(shape))
