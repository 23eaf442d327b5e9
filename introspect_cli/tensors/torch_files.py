"""Files that `torch.save` wrote, as plain data: dicts, lists, texts, numbers, and tensors that are read when asked for.

Such a file is a pickle, which can run any program when it is loaded. So torch's weights-only loader reads it and
nothing else does: what it does not know is an error that names the class. Tensors are mapped where the file allows it,
so that a checkpoint larger than memory is read one tensor at a time; of older files, which cannot be mapped, all are
held.
"""

from __future__ import annotations

import io
import re
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.tensors.arrays import PIECE, Pieces, cut

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch
    from numpy.typing import NDArray

_MOST_NODES = 1_000_000
_MOST_AGAIN = 10_000
"""Times that lists and dicts may be met again: few refer to one object twice."""
_DEEPEST = 64
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_MOST_PICKLE = 1 << 28
_INTEGERS: dict[int, Any] = {1: np.uint8, 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


def read(source: Path | io.BytesIO, called: str) -> Any:
    """Content of a file of torch.save as plain data: dicts, lists, texts, numbers, None, and tensors as `Pieces`.

    Tensors of a zip file on disk are mapped: they are read when their `Pieces` are.

    Args:
        source: the file's path, or its bytes in memory.
        called: what errors call it.

    Raises:
        StoreError: torch or memory is missing, or the file is damaged or holds more than tensors and plain values.
    """
    try:
        import torch
    except ImportError:
        raise StoreError(
            f"{called} was written by torch.save, and reading it needs torch: install torch, or save it as .safetensors"
        ) from None
    mapped = _is_zip(source, called) and not isinstance(source, io.BytesIO)
    try:
        with torch.serialization.safe_globals(_numpy_globals()):
            found = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except MemoryError:
        raise StoreError(f"cannot read {called}: there is not enough memory") from None
    except Exception as error:  # torch raises whatever a damaged file leads it to
        raise StoreError(_refusal_sentence(called, error)) from None
    return _Converter(called).plain(found, 0)


def _is_zip(source: Path | io.BytesIO, called: str) -> bool:
    """Whether a file is a zip archive, as torch writes them since 1.6; a file in memory is rewound.

    Raises:
        StoreError: it cannot be read, any of its parts is compressed, or its pickle is larger than 256 MiB.
    """
    try:
        if not zipfile.is_zipfile(source):
            return False
        with zipfile.ZipFile(source) as archive:
            members = archive.infolist()
    except (OSError, zipfile.BadZipFile, ValueError, RuntimeError) as error:
        raise StoreError(f"{called} cannot be read: {error}") from None
    finally:
        if isinstance(source, io.BytesIO):
            source.seek(0)
    packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    large = any(member.file_size > _MOST_PICKLE for member in members if member.filename.endswith("data.pkl"))
    if packed or large:
        why = "its parts are compressed" if packed else "what it says of its tensors is larger than any checkpoint's"
        raise StoreError(f"{called} is not a file of torch.save: {why}")
    return True


def _numpy_globals() -> list[Any]:
    """Functions and classes that the pickle of a plain numpy array names, for torch's loader to allow."""
    core: Any = getattr(np, "_core", None) or np.core
    kinds = {type(np.dtype(name)) for name in ("u1", "u4", "u8", "i4", "i8", "f4", "f8")}
    return [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype, *kinds]  # noqa: SLF001 - these


def _refusal_sentence(called: str, error: Exception) -> str:
    """Sentence for the person: why torch's weights-only loader did not read the file.

    It names the class that reading would have run, where the error does; else it has the first 200 characters of the
    error's first line, or, where that is one word, says that the file is damaged or of another format.
    """
    text = str(error)
    found = _GLOBAL.search(text)
    if found is not None:
        return (
            f"{called} holds more than tensors and plain values ({found[1]}), and reading that would execute code: it "
            "is not read; save the state dicts alone, or as .safetensors"
        )
    first = text.strip().partition("\n")[0][:200]
    first = first if " " in first else "it is damaged, or of another format"
    return f"{called} is not a file of torch.save that can be read: {first}"


class _Converter:
    """Converts loaded objects to plain data; raises for too many values, repetitions or levels."""

    def __init__(self, called: str) -> None:
        """Start with nothing counted; `called` is what errors call the file."""
        import torch

        self._called, self._tensor = called, torch.Tensor
        self._nodes = self._again = 0
        self._seen = set[int]()

    def plain(self, value: Any, depth: int) -> Any:
        """A loaded value as plain data, with all inside it: tensors and arrays as `Pieces`, tuples and sets as lists.

        Keys of dicts stay as they are. Other objects become their `str`, cut to 200 characters.

        Args:
            value: what torch loaded.
            depth: how many containers it is in.

        Raises:
            StoreError: in all calls together more than 1,000,000 values, or 10,000 times a dict or list seen before; or
                `depth` above 64.
        """
        self._nodes += 1
        if isinstance(value, (dict, list)):
            self._again += id(value) in self._seen
            self._seen.add(id(value))
        if self._nodes > _MOST_NODES or self._again > _MOST_AGAIN or depth > _DEEPEST:
            raise StoreError(f"{self._called} is not a checkpoint: what it holds is nested too deep, or without end")
        if isinstance(value, self._tensor):
            return _pieces_of_tensor(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return _pieces_of_array(np.asarray(value))
        if isinstance(value, dict):
            return {key: self.plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self.plain(item, depth + 1) for item in value]
        return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)[:200]


def _pieces_of_array(array: NDArray[Any]) -> Pieces:
    """A numpy array as `Pieces`; with `unread` set where it holds neither booleans, integers, floats nor complex."""
    if array.dtype.kind not in "biufc":
        return Pieces(array.dtype.name, tuple(array.shape), lambda: (), "numpy's type is none of torch's")
    flat = np.ascontiguousarray(array).reshape(-1)
    flat = flat.astype(flat.dtype.newbyteorder("<"), copy=False)
    return Pieces(array.dtype.name, tuple(array.shape), lambda: cut(flat))


def _pieces_of_tensor(tensor: torch.Tensor) -> Pieces:
    """A torch tensor as `Pieces`; with `unread` set where it is quantized, nested, sparse or on the meta device.

    Its elements are copied when the pieces are read.
    """
    import torch

    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    odd = "a quantized tensor" if tensor.is_quantized else "a nested tensor" if tensor.is_nested else ""
    if tensor.layout is not torch.strided or odd or tensor.is_meta:
        return Pieces(
            dtype, shape, lambda: (), f"{odd or ('on meta' if tensor.is_meta else 'a sparse tensor')}: not read"
        )

    def read() -> Iterator[NDArray[Any]]:
        """Copy the elements, row-major, one piece at a time."""
        with torch.no_grad():
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            for start in range(0, flat.numel(), PIECE):
                yield _as_numpy(flat[start : start + PIECE])

    return Pieces(dtype, shape, read)


def _as_numpy(flat: torch.Tensor) -> NDArray[Any]:
    """Elements, shape (n,), as a numpy array; as unsigned integers of the same bits where numpy lacks the type.

    complex32 becomes pairs of float16, with the fields `real` and `imag`.
    """
    import torch

    if flat.dtype is torch.complex32:
        return torch.view_as_real(flat).numpy().view(np.dtype([("real", "<f2"), ("imag", "<f2")])).reshape(-1)
    try:
        return flat.numpy()
    except TypeError:  # numpy has no such type
        width = flat.element_size()
        found: NDArray[Any] = flat.view(torch.uint8).numpy().view(_INTEGERS[width])
        return found
