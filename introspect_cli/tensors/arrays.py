"""Tensors on disk without a training: summaries of arrays by the compiled kernels, and what files of torch hold."""

from __future__ import annotations

import io
import re
import zipfile
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.records import SKETCH_SIZE, Layout, Status, Summary
from introspect_cli.statistics import STATISTICS
from introspect_cli.tensors import checksum
from introspect_cli.tensors import kernels as k
from introspect_cli.tensors import rows as r

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    import torch
    from numpy.typing import NDArray


# ---
# Summaries of arrays that lie on disk, by the compiled kernels: no torch is needed.
#
# An array may be larger than memory, so it comes in pieces, whose rows are merged.

PIECE: Final = 1 << 20
"""Elements of a piece of an array that is read piece by piece: a whole number of the kernels' chunks."""

_ZERO: Final = np.zeros(1, np.uint64)
"""Slot and layout of the only row, of which all counts and was observed."""
_KEPT: Final = tuple(name for name, own in STATISTICS.items() if not own.on_request)


@dataclass(frozen=True, eq=False)
class Pieces:
    """A tensor on disk, or computed when asked for, as an iterator of pieces.

    Attributes:
        dtype: torch's name of the element type without the prefix.
        shape: sizes.
        read: gives its elements as they are stored, little-endian, row-major, in pieces of shape (n,); all but the last
            one have `PIECE` elements, or a multiple.
        unread: why its elements cannot be read; "" where they can.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Iterable[NDArray[Any]]]
    unread: str = ""


def cut(flat: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Views of a flat array one after the other, of `PIECE` elements each, the last one of what is left."""
    for start in range(0, len(flat), PIECE):
        yield flat[start : start + PIECE]


def summary_of(tensor: Pieces, widen: Callable[[NDArray[Any], str], NDArray[Any]]) -> Summary:
    """Summary of a tensor as a capture would keep it; the pieces are read now, one at a time.

    Args:
        tensor: the tensor; one that is `unread` gives a NOT_OBSERVED summary with the reason.
        widen: takes elements as stored and the name of their type, and returns them as numbers; called for types of
            one byte that numpy lacks.
    """
    dtype = tensor.dtype
    layout = Layout(tensor.shape, dtype, "cpu", "contiguous")
    if tensor.unread:
        return Summary(Status.NOT_OBSERVED, layout, 0, text=tensor.unread)
    rows, first = r.empty(2), 0  # the sum of all pieces, and the next
    for bits in (part for piece in tensor.read() for part in cut(piece)):
        rows[1] = _row_of_piece(bits, dtype, first, widen)
        k.KERNELS.merge(rows.ctypes.data, 2, rows.ctypes.data)
        first += len(bits)
    return _summary_of_row(rows[:1], dtype, tensor.shape)


def _row_of_piece(
    bits: NDArray[Any], dtype: str, first: int, widen: Callable[[NDArray[Any], str], NDArray[Any]]
) -> r.Rows:
    """Row of one piece, shape (1, 32).

    Args:
        bits: its elements as stored, shape (n,).
        dtype: torch's name of their type.
        first: index of the first one in the whole tensor.
        widen: as for `summary_of`.
    """
    code, table = k.CODES.get(dtype), np.zeros(0, np.float32)
    if code is None and bits.dtype.itemsize == 1:
        code, table = k.TABLE, np.ascontiguousarray(widen(np.arange(256, dtype=np.uint8), dtype), np.float32)
    row, bits = r.empty(1), np.ascontiguousarray(bits)
    team, _ = _shared_memory()
    flags = k.STATS | k.SKETCH
    where = table.ctypes.data if len(table) else 0
    k.KERNELS.summarise(bits.ctypes.data, len(bits), first, code, flags, where, row.ctypes.data, team.ctypes.data)
    return row


@cache
def _shared_memory() -> tuple[NDArray[np.int64], r.Rows]:
    """Words that a call of the kernels in one thread needs, and rows for a piece's chunks; one pair, overwritten."""
    team, parts = np.zeros(k.TEAM_WORDS, np.int64), r.empty(PIECE // k.CHUNK + 2)
    team[[k.PARTS, k.THREADS, k.ROOM]] = parts.ctypes.data, 1, PIECE
    return team, parts


def _summary_of_row(total: r.Rows, dtype: str, shape: tuple[int, ...]) -> Summary:
    """OBSERVED summary of a whole array from its row, shape (1, 32); statistics that are NaN are left out."""
    sizes = {"checksum": "<u8", **{name: STATISTICS[name].type for name in _KEPT}, "sketch": f"{SKETCH_SIZE}<f4"}
    columns = {name: np.zeros(1, kind) for name, kind in sizes.items()}
    order = (columns.get(name) for name in k.COLUMNS)
    places = np.array([0 if column is None else column.ctypes.data for column in order], np.uint64)
    block, head = np.array([total.ctypes.data]), np.array([checksum.header(dtype, shape)], np.uint64)
    zero = _ZERO.ctypes.data
    k.KERNELS.columns(block.ctypes.data, 1, zero, head.ctypes.data, zero, zero, zero, 1, 0, places.ctypes.data)
    stats = {name: float(columns[name][0]) for name in _KEPT if not np.isnan(columns[name][0])}
    return Summary(
        Status.OBSERVED,
        Layout(shape, dtype, "cpu", "contiguous"),
        int(columns["checksum"][0]),
        stats,
        tuple(columns["sketch"][0].tolist()),
    )


# ---
# Files that `torch.save` wrote, as plain data: dicts, lists, texts, numbers, and tensors that are read when asked
# for.
#
# Such a file is a pickle, which can run any program when it is loaded. So torch's weights-only loader reads it and
# nothing else does: what it does not know is an error that names the class. Tensors are mapped where the file allows
# it, so that a checkpoint larger than memory is read one tensor at a time; of older files, which cannot be mapped,
# all are held.

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
    return _as_plain(found, called)


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


def _as_plain(found: Any, called: str) -> Any:
    """A loaded value as plain data, with all inside it: tensors and arrays as `Pieces`, tuples and sets as lists.

    Keys of dicts stay as they are. Other objects become their `str`, cut to 200 characters.

    Args:
        found: what torch loaded.
        called: what errors call the file.

    Raises:
        StoreError: more than 1,000,000 values, 10,000 times a dict or list seen before, or more than 64 levels.
    """
    import torch

    nodes = again = 0
    seen = set[int]()

    def plain(value: Any, depth: int) -> Any:
        """A value that is in `depth` containers."""
        nonlocal nodes, again
        nodes += 1
        if isinstance(value, (dict, list)):
            again += id(value) in seen
            seen.add(id(value))
        if nodes > _MOST_NODES or again > _MOST_AGAIN or depth > _DEEPEST:
            raise StoreError(f"{called} is not a checkpoint: what it holds is nested too deep, or without end")
        if isinstance(value, torch.Tensor):
            return _pieces_of_tensor(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return _pieces_of_array(np.asarray(value))
        if isinstance(value, dict):
            return {key: plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [plain(item, depth + 1) for item in value]
        return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)[:200]

    return plain(found, 0)


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
