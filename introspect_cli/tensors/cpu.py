"""Summarising a tensor in CPU memory, by the compiled kernels.

Small tensors are bound by the cost of a call, large ones by bandwidth, strided ones by copying. So contiguous memory
goes to the kernels by address; large tensors are cut into chunks whose rows are merged in order, so that the result
does not depend on the number of threads; strided ones are copied piece by piece. Both implementations fill the same
row and agree on every bit of the checksum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from introspect_cli.tensors import kernels as k
from introspect_cli.tensors import parallel
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.views import address_of, pieces

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


SHARED: Final = 2 * k.CHUNK
"""Elements from which on a tensor is worth the other threads."""
WIDTH: Final = 8
"""Bytes of an element that the kernels copy, at most."""
PIECE_BYTES: Final = 4 << 20
"""Bytes copied at once of a tensor that is not contiguous."""

CODES: Final[dict[torch.dtype, int]] = {}
"""Type code of the kernels by dtype; types of less than a byte and packed ones have bits alone."""

TABLES: Final[dict[torch.dtype, np.ndarray[tuple[int], np.dtype[np.float32]]]] = {}
"""For each type of one byte that is neither integer nor packed, the float32 value of every byte."""

for _name, _dtype in vars(torch).items():
    if isinstance(_dtype, torch.dtype) and not _name.startswith("q"):
        _opaque = k.OPAQUE8 if _dtype.itemsize == 1 else k.OPAQUE16
        CODES[_dtype] = k.TABLE if _name.startswith("float8_") else k.CODES.get(str(_dtype)[len("torch.") :], _opaque)
        if CODES[_dtype] == k.TABLE:
            _every = torch.from_numpy(np.arange(256, dtype=np.uint8)).view(_dtype)
            TABLES[_dtype] = np.ascontiguousarray(_every.to(torch.float32).numpy())

TABLE_ADDRESS: Final[dict[torch.dtype, int]] = {dtype: table.ctypes.data for dtype, table in TABLES.items()}


class Engine:
    """Compiled kernels, with torch's threads for large tensors unless `alone`; one call at a time."""

    def __init__(self, *, alone: bool = False) -> None:
        """Allocate room for the rows of chunks and, unless `alone`, look for torch's threads; starts no thread."""
        self.kernels = k.KERNELS
        self._room = 0
        self._parts = r.empty(0)
        self.team = np.zeros(k.TEAM_WORDS, dtype=np.int64)
        """Words that threads in a call share, laid out as in `kernels` (PARTS, THREADS, ...)."""
        self._team_address = self.team.ctypes.data
        self._team_threads = 0
        self._blocks = np.zeros(0, dtype=np.uint8)
        workers = None if alone else parallel.find_workers()
        self._has_workers = workers is not None
        if workers is not None:
            self.team[[k.PARALLEL, k.NUMBER]] = workers
        self._make_room(1 << 22)

    def _make_room(self, count: int) -> None:
        """Allocate rows for the chunks of `count` elements, in however many tensors, and put their address in `team`.

        Each tensor may have one chunk that is not full, so there are more chunks than `count` / CHUNK. A tensor of one
        chunk needs no room, so there are fewer than twice as many.
        """
        self._room = count
        self._parts = r.empty(2 * count // k.CHUNK + 1)
        self.team[[k.PARTS, k.ROOM]] = self._parts.ctypes.data, count

    def summarise_contiguous(
        self, out: int, address: int, count: int, first: int, code: int, table: int, flags: int
    ) -> None:
        """Summarise contiguous elements into a row, which is overwritten.

        Args:
            out: address of the row.
            address: of the first element, in CPU memory.
            count: number of elements.
            first: index of the first one in the whole tensor.
            code: the type code of the elements (`CODES`).
            table: address of 256 float32 values for the code TABLE, else 0.
            flags: the sum of STATS and SKETCH, as far as they are wanted.
        """
        self._call_kernel("summarise", count, address, count, first, code, flags, table, out)

    def summarise_strided(self, out: int, tensor: torch.Tensor, code: int, table: int, flags: int) -> bool:
        """Summarise a tensor that is not contiguous, in CPU memory, into a row.

        Args:
            out: address of the row.
            tensor: without lazy conjugation or negation.
            code: the type code of its elements (`CODES`).
            table: address of 256 float32 values for the code TABLE, else 0.
            flags: the sum of STATS and SKETCH, as far as they are wanted.

        Returns:
            False, and the row is as it was, where the kernels cannot copy it: no elements or dimensions, too many
            dimensions, elements above 8 bytes, too long a last dimension, or no memory.
        """
        count, size, dims = tensor.numel(), k.SIZES[code], tensor.dim()
        if not count or not 0 < dims < k.MAX_DIMS - 1 or size > WIDTH or tensor.shape[-1] * k.LINES > k.CHUNK:
            return False
        threads = self._thread_count(count)
        if len(self._blocks) < threads * k.CHUNK * size:
            room = np.empty(threads * k.CHUNK * size + 64, dtype=np.uint8)
            self._blocks = room[-room.ctypes.data % 64 :]
        layout = np.array((tensor.shape, tensor.stride()), np.int64)
        where = (address_of(tensor), count, dims, layout.ctypes.data, self._blocks.ctypes.data)
        return bool(self._call_kernel("summarise_strided", count, *where, code, flags, table, out))

    def _thread_count(self, count: int) -> int:
        """Number of threads for a call over `count` elements, the calling one included.

        1 below `SHARED` elements, for an engine that is `alone`, and where torch's workers may not be called.
        """
        if count < SHARED or not self._has_workers:
            return 1
        threads = torch.get_num_threads()
        return threads if threads > 1 and parallel.may_call_workers(threads) else 1

    def _call_kernel(self, function: str, count: int, *arguments: int) -> int:
        """Call a kernel with its arguments and the team, and return its result.

        Args:
            function: its name, as in `kernels`.
            count: elements that it reads in all, which decides the room and the threads.
            *arguments: all its arguments but the last one, the team.
        """
        if count > self._room:
            self._make_room(count)
        threads = self._thread_count(count)
        if threads != self._team_threads:
            self.team[k.THREADS] = self._team_threads = threads
        result: int = getattr(self.kernels, function)(*arguments, self._team_address)
        return result

    def fill(
        self,
        out: r.Rows,
        tensor: torch.Tensor,
        flags: int,
        sorted_stats: Sequence[str] = (),
        runs: Sequence[tuple[int, torch.Tensor]] | None = None,
    ) -> None:
        """Summarise any strided CPU tensor into a row.

        Args:
            out: the row, shape (32,); overwritten.
            tensor: any shape, strides and dtype; not quantized.
            flags: the sum of STATS and SKETCH, as far as they are wanted.
            sorted_stats: `med`, `mode` or both, to compute these too, over all of the tensor; nothing where it has no
                elements, or none that are numbers.
            runs: contiguous runs to summarise in place of the tensor, each with the index of its first element in the
                whole tensor; None for all of the tensor.
        """
        code, table = CODES[tensor.dtype], TABLE_ADDRESS.get(tensor.dtype, 0)
        is_strided = runs is None and not (tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg())
        if not (is_strided and self.summarise_strided(out.ctypes.data, tensor, code, table, flags)):
            every = pieces(tensor, PIECE_BYTES // tensor.element_size()) if runs is None else runs
            self._add_up_runs(out, every, code, table, flags)
        if sorted_stats and code < k.OPAQUE8 and tensor.numel():
            out.view(np.float64)[r.MEDIAN : r.MODE + 1] = median_and_mode(tensor, sorted_stats).numpy()

    def _add_up_runs(
        self, out: r.Rows, runs: Iterable[tuple[int, torch.Tensor]], code: int, table: int, flags: int
    ) -> None:
        """Summarise runs one after the other, and write the sum of their rows, merged in order, to `out`.

        Args:
            out: the row, shape (32,); overwritten.
            runs: contiguous elements, each with the index of their first one in the whole tensor.
            code: the type code of the elements (`CODES`).
            table: address of 256 float32 values for the code TABLE, else 0.
            flags: the sum of STATS and SKETCH, as far as they are wanted.
        """
        rows = r.empty(1)
        number = 0
        for first, flat in runs:
            if number == len(rows):
                rows = np.concatenate([rows, r.empty(len(rows))])
            self.summarise_contiguous(
                rows[number:].ctypes.data, address_of(flat), flat.numel(), first, code, table, flags
            )
            number += 1
        if number == 1:
            out[:] = rows[0]
        else:
            place = r.empty(1)
            self.kernels.merge(rows.ctypes.data, number, place.ctypes.data)
            out[:] = place[0]

    def abandon(self) -> None:
        """Use the calling thread alone from now on: for a forked child, since only its parent has the threads."""
        self._has_workers = False


def real_values(values: torch.Tensor) -> torch.Tensor:
    """Elements as float64; of complex ones the absolute value, NaN where either part is NaN."""
    if not values.dtype.is_complex:
        return values.to(torch.float64)
    parts = torch.view_as_real(values).to(torch.float64)
    return torch.hypot(parts[..., 0], parts[..., 1]).where(~parts.isnan().any(-1), float("nan"))


def median_and_mode(tensor: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """Median and mode of the finite elements, shape (2,).

    The median is the mean of the two middle elements, the mode the smallest of the most frequent. Both are NaN where
    no element is finite.

    Args:
        tensor: strided, any shape, with at least one element.
        names: `med`, `mode` or both; what is not named is NaN.
    """
    values = real_values(tensor.detach().resolve_conj().resolve_neg().reshape(-1))
    ordered, found = values[values.isfinite()].sort().values, values.new_full((2,), float("nan"))
    if "med" in names and len(ordered):
        found[0] = ordered[[(len(ordered) - 1) // 2, len(ordered) // 2]].mean()
    if "mode" in names and len(ordered):
        each, times = ordered.unique_consecutive(return_counts=True)
        found[1] = each[times.argmax()]
    return found
