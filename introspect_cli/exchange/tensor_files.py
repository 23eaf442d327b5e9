"""Files and directories that hold tensors, as plain data: what is in them, before anything is made of it.

They are somebody else's files. Nothing in them is executed, every length they claim is held against the file's, a
directory's index may name files in that directory alone, and only regular files are opened: a pipe would wait for
ever. Tensors are not read here; each says how to, so that no more than a piece of one is in memory. Element types that
numpy does not know (bfloat16, fp8) keep their bits and are widened exactly.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import StoreError, scarcity
from introspect_cli.exchange.distributed_files import read_distributed
from introspect_cli.exchange.incoming import DAMAGE, is_file_beside, open_regular, read_small
from introspect_cli.store.tensorfile import CODES, NUMPY
from introspect_cli.tensors.arrays import PIECE, Pieces, cut
from introspect_cli.tensors.arrays import read as read_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".pkl")
"""Endings of files that torch.save writes."""
SUFFIXES = (".safetensors", ".npz", *TORCH)
"""Endings of checkpoints."""
ARRAYS = (".npy", ".npz", ".safetensors")
"""Endings of files that hold arrays by name, or one array."""

DISTRIBUTED = ".metadata"
"""The file that a directory of `torch.distributed.checkpoint` has."""

_WEIGHTS = (
    *((".safetensors.index.json",), (".safetensors",), (".bin.index.json",)),
    *((".pt", ".pth", ".bin", ".ckpt"), (".npz",)),
)
"""Endings of files that have the model's tensors, by groups; of the first group that a directory has, all are read."""
_TRAINING_STATE = re.compile(
    r"(optimizer|scheduler|scaler)(_\d+)?\.(pt|bin)|rng_state(_\d+)?\.pth|random_states_\d+\.pkl"
)
_NO_MODEL = re.compile(rf"({_TRAINING_STATE.pattern})\Z|training_args")
_STATE = "trainer_state.json"
_COUNTERS = ("global_step", "epoch", "max_steps", "num_train_epochs", "train_batch_size", "total_flos", "best_metric")
_MOST_HEADER = 1 << 27
_SAFETENSORS_TYPES = {code: name for name, code in CODES.items()} | {"C64": "complex64"}


def is_tensors(path: str | Path) -> bool:
    """Whether a path is a tensor file by its suffix, or a directory with tensor files or a distributed checkpoint.

    In a directory, files directly in it count, and subdirectories that are distributed checkpoints. A link to nothing
    counts by its suffix.
    """
    place = Path(path)
    if place.is_dir():
        names = {entry.name for entry in place.iterdir()}
        return DISTRIBUTED in names or bool(_tensor_files(names)) or bool(_distributed_parts(place, names))
    return place.suffix in SUFFIXES and (place.exists() or place.is_symlink())


def _tensor_files(names: set[str]) -> list[str]:
    """The names of the model's files in a directory: those of the first group of `_WEIGHTS` that has any."""
    files = sorted(name for name in names if not _NO_MODEL.match(name))
    groups = ([name for name in files if name.endswith(endings)] for endings in _WEIGHTS)
    return next(filter(None, groups), [])


def _distributed_parts(place: Path, names: set[str]) -> list[str]:
    """Names of subdirectories that are `torch.distributed.checkpoint` directories."""
    return [name for name in sorted(names) if (place / name / DISTRIBUTED).is_file()]


def read_any(path: Path) -> dict[Any, Any]:
    """Read a tensor file or directory as nested plain data; tensors as `Pieces`, a lone array under "".

    Raises:
        StoreError: it cannot be read.
    """
    try:
        return _read_directory(path) if path.is_dir() else _named_tensors(path)
    except (OSError, MemoryError) as error:
        why = scarcity(error) or getattr(error, "strerror", None) or str(error)
        raise StoreError(f"cannot read {path}: {why.lower()}") from None


def _named_tensors(path: Path) -> dict[Any, Any]:
    """What a file holds, by name; a lone array has an empty name."""
    content = _read_file(path)
    return content if isinstance(content, dict) else {"": content}


def _read_directory(path: Path) -> dict[Any, Any]:
    """The model's tensors, distributed parts and training state of a directory, each part under its own key.

    A directory that is itself a distributed checkpoint is read as that, and one with model tensors alone gives these.
    StoreError where two files have a tensor of one name.
    """
    names = {entry.name for entry in path.iterdir()}
    if DISTRIBUTED in names:
        return read_distributed(path)
    tensors: dict[Any, Any] = {}
    files = _tensor_files(names)
    for name in files:
        # of several files whose tensors are called alike, each is a part of its own
        inside = _read_sharded(path, name) if name.endswith(".index.json") else _named_tensors(path / name)
        if twice := tensors.keys() & inside.keys():
            raise StoreError(f"{path} has several files with a tensor {next(iter(twice))!r}: name one of them")
        tensors |= inside
    whole: dict[Any, Any] = {"model": tensors} if tensors else {}
    for name in _distributed_parts(path, names):
        part = read_distributed(path / name)
        whole |= part if not whole.keys() & part.keys() else {name: part}
    for name in sorted(names):
        if match := _TRAINING_STATE.fullmatch(name):
            whole[name.partition(".")[0] if match[1] else f"rng {name.partition('.')[0]}"] = _read_file(path / name)
    if _STATE in names:
        state = _read_json(path / _STATE)
        whole["trainer"] = {key: state[key] for key in _COUNTERS if key in state} if isinstance(state, dict) else {}
    return whole if len(whole) > 1 or not tensors else tensors


def _read_sharded(folder: Path, name: str) -> dict[Any, Any]:
    """The tensors that an index's `weight_map` lists, each from the file that it names there.

    Other tensors of these files are left out. StoreError where there is no `weight_map`, a file does not lie beside the
    index, or a file does not have a tensor that the index lists.
    """
    index = _read_json(folder / name)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise StoreError(f"{folder / name} is no index of tensors: it has no weight_map")
    tensors: dict[Any, Any] = {}
    for file in dict.fromkeys(places.values()):
        if not is_file_beside(file):
            raise StoreError(f"{folder / name} names {file!r}, which is no file beside it: nothing of it is read")
        held = _named_tensors(folder / file)
        wanted = [tensor for tensor, place in places.items() if place == file]
        if lost := [tensor for tensor in wanted if tensor not in held]:
            raise StoreError(f"{folder / file} lacks {lost[0]}, which {name} says is there")
        tensors |= {tensor: held[tensor] for tensor in wanted}
    return tensors


def _read_json(path: Path) -> Any:
    """Parse a JSON file; StoreError where it is too large or invalid."""
    try:
        return json.loads(read_small(path))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is no JSON: {error}") from None


def _read_file(path: Path) -> Any:
    """What a file of tensors holds, read by its ending; StoreError where it is not one, or damaged."""
    with open_regular(path):
        pass
    if path.suffix not in (*SUFFIXES, ".npy"):
        raise StoreError(f"{path} is not a file of tensors: name one that ends in {', '.join(SUFFIXES)}")
    if path.suffix in TORCH:
        return read_torch(path, str(path))
    try:
        return {".safetensors": _read_safetensors, ".npz": _read_npz, ".npy": _read_npy}[path.suffix](path)
    except DAMAGE as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> StoreError:
    """What is raised for a damaged file in place of a reader's own error."""
    return StoreError(f"{path} is not a {path.suffix} file that can be read: {str(error) or type(error).__name__}")


# --- safetensors


def _read_safetensors(path: Path) -> dict[Any, Any]:
    """The tensors of a safetensors file by name, their data read when asked for.

    One of an unknown type says in `unread` that it is not read. ValueError where a size or place in the file cannot be.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = struct.unpack("<Q", file.read(8))[0]
        if length > min(size - 8, _MOST_HEADER):
            raise ValueError("its header claims more bytes than the file holds")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header lists no tensors")  # noqa: TRY004 - the reader's word for what cannot be read
    data, tensors = 8 + length, {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, (begin, end) = _SAFETENSORS_TYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
        numbers_ok = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        if not numbers_ok or begin > end or end > size - data:
            raise ValueError(f"{name} lies beyond the end of the file")
        if kind is None:
            unread = f"elements of type {str(entry['dtype'])[:40]} are not read"
            tensors[name] = Pieces(str(entry["dtype"])[:40].lower(), tuple(shape), tuple, unread)
            continue
        if math.prod(shape) * NUMPY[kind].itemsize != end - begin:
            raise ValueError(f"{name} needs another number of bytes than it has")
        tensors[name] = Pieces(kind, tuple(shape), partial(_read_span, path, data + begin, end - begin, NUMPY[kind]))
    return tensors


def _read_span(path: Path, first: int, length: int, stored: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Read `length` bytes from byte `first` on, as arrays of at most `PIECE` elements.

    Not mapped into memory: a file that is truncated meanwhile would end the process. StoreError where it ends early.
    """
    with open_regular(path) as file:
        file.seek(first)
        for begin in range(0, length, PIECE * stored.itemsize):
            size = min(length - begin, PIECE * stored.itemsize)
            if len(data := file.read(size)) < size:
                raise StoreError(f"{path} ends before its last tensor: it is cut, or being written")
            yield np.frombuffer(data, stored)


# --- numpy's files


def _read_npy(path: Path) -> dict[Any, Any]:
    return {"": _numpy_pieces(path)}


def _read_npz(path: Path) -> dict[Any, Any]:
    """The arrays of an archive of numpy's by name."""
    with open_regular(path) as file, np.load(file) as archive:
        names = list(archive.files)
    return {name: _numpy_pieces(path, name) for name in names}


def _numpy_pieces(path: Path, name: str = "") -> Pieces:
    """An array of a file of numpy's: the one called `name` in an archive, else the file's own.

    It is read as a whole, now and for each reading. One of an unknown element type says so in `unread`.
    """

    def load() -> Any:
        """Read the array; StoreError where the file is damaged, or holds objects that would have to be executed."""
        try:
            with open_regular(path) as file:
                found = np.load(file)
                return found[name] if name else found
        except DAMAGE as error:
            raise _damaged(path, error) from None

    array = load()
    dtype = array.dtype
    if dtype.name not in NUMPY:
        return Pieces(dtype.name, array.shape, tuple, f"elements of numpy's type {dtype} are not read")
    return Pieces(dtype.name, array.shape, lambda: cut(load().astype(NUMPY[dtype.name], copy=False).reshape(-1)))
