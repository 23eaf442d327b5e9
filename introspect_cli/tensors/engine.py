"""Summarising a tensor in CPU memory: by the jitted kernels, or by the reference where there are none.

The problem: small tensors are bound by the cost of a call, large ones by bandwidth, strided ones by copying. The
way: contiguous memory goes to the kernels by address; large tensors are cut into chunks whose rows are merged in
order, so that the result does not depend on the number of threads; strided ones are copied piece by piece. Both
implementations fill the same row and agree on every checksum bit.
"""

from __future__ import annotations

import os
import time
from ctypes import c_uint64, memmove
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from introspect_cli.tensors import codes, jit, openmp, reference
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.pace import Pace
from introspect_cli.tensors.threads import Helpers
from introspect_cli.tensors.views import cut, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

CHUNK: Final = 1 << 16
"""Elements in a chunk, whose row is merged with those of the other chunks."""
SHARED: Final = 1 << 18
"""Elements from which on a tensor is worth the other threads."""
PIECE_BYTES: Final = 4 << 20
"""Bytes copied at once of a tensor that is not contiguous."""

CODES: Final[dict[torch.dtype, int]] = {
    torch.float32: codes.F32,
    torch.float16: codes.F16,
    torch.bfloat16: codes.BF16,
    torch.uint8: codes.U8,
    torch.bool: codes.U8,
    torch.int8: codes.I8,
    torch.int16: codes.I16,
    torch.float64: codes.F64,
    torch.int32: codes.I32,
    torch.int64: codes.I64,
    torch.complex32: codes.C32,
    torch.complex64: codes.C64,
    torch.complex128: codes.C128,
}
"""Type code of the kernels by dtype."""

_NEWER: Final = {
    "uint16": codes.U16,
    "uint32": codes.U32,
    "uint64": codes.U64,
    "float4_e2m1fn_x2": codes.OPAQUE8,
    "bits8": codes.OPAQUE8,
    "bits16": codes.OPAQUE16,
}

for _name, _code in _NEWER.items():
    if hasattr(torch, _name):
        CODES[getattr(torch, _name)] = _code

TABLES: Final[dict[torch.dtype, np.ndarray[tuple[int], np.dtype[np.float32]]]] = {}
"""For each type of one byte that is neither integer nor packed, the float32 value of every byte."""

for _name in dir(torch):
    if _name.startswith("float8_"):
        _dtype = getattr(torch, _name)
        _every = torch.from_numpy(np.arange(256, dtype=np.uint8)).view(_dtype)
        TABLES[_dtype] = np.ascontiguousarray(_every.to(torch.float32).numpy())
        CODES[_dtype] = codes.TABLE

TABLE_ADDRESS: Final[dict[torch.dtype, int]] = {dtype: table.ctypes.data for dtype, table in TABLES.items()}


Jobs = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def thread_count() -> int:
    """Threads worth using: torch's own number, but no more than this process may run on."""
    try:
        available = len(os.sched_getaffinity(0))
    except AttributeError:
        available = os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), available))


def _chunks(count: int) -> tuple[int, int]:
    """Elements in a chunk and number of chunks: by the tensor's size alone, so that results do not vary."""
    # chunks grow with the tensor, so that their rows stay small beside it
    chunk = CHUNK * max(1, -(-count // (CHUNK << 12)))
    return chunk, -(-count // chunk)


def _jobs(address: int, count: int, first: int, code: int, table: int, parts: int) -> Jobs:
    """One job a chunk, shape (chunks, 6); rows go to consecutive places from address `parts`."""
    chunk, number = _chunks(count)
    order = np.arange(number, dtype=np.int64)
    jobs = np.empty((number, codes.JOB_WORDS), dtype=np.int64)
    jobs[:, 0] = address + order * (chunk * codes.SIZES[code])
    jobs[:, 1] = chunk
    jobs[-1, 1] = count - (number - 1) * chunk
    jobs[:, 2] = first + order * chunk
    jobs[:, 3] = code
    jobs[:, 4] = parts + order * r.ROW_BYTES
    jobs[:, 5] = table
    return jobs


def _copy_plan(shape: tuple[int, ...], strides: tuple[int, ...]) -> Jobs:
    """What `kernels.copy` takes, for a copy to contiguous memory; the number of dimensions is in the last word.

    The dimension that is contiguous in the target goes last; or, if another has a smaller stride in the source, last
    but one, and that one last. The others go by falling strides in the source.
    """
    dims, step = [], 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1:
            dims.append((size, stride, step))
            step *= size
    row, *others = dims or [(1, 1, 1)]
    others = [(1, 0, 0), *sorted(others, key=lambda dim: -dim[1])]
    close = min((dim for dim in others if dim[1]), key=lambda dim: dim[1], default=row)
    if close[1] < row[1]:
        others.remove(close)
        order = [*others, row, close]
    else:
        order = [*others, row]
    plan = np.zeros((4, codes.MAX_DIMS), dtype=np.int64)
    for place, dim in enumerate(order):
        plan[:3, place] = dim
    plan[0, -1] = len(order)
    return plan


class Engine:
    """The kernels and the threads that help with large tensors. Not for two threads at once.

    Args:
        threads: threads to use, the caller's included; by default torch's own, and as many.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.enter = jit.enter()
        """The kernels' entry point; None if the reference must do."""
        self._threads = threads
        self._helpers: Helpers | None = None
        self._counter = np.zeros(1, dtype=np.int64)
        self._parts = r.empty(64)
        self._again = r.empty(1)
        self._parallel = openmp.parallel()
        self._call = np.zeros(9, dtype=np.int64)
        self._paces = [Pace() for _ in range((codes.STATS | codes.SKETCH) + 1)]

    def contiguous(self, out: int, address: int, count: int, first: int, code: int, table: int, flags: int) -> None:
        """Summarise contiguous elements into the row at address `out`; needs `enter`. See `kernels.run`."""
        assert self.enter is not None
        if count <= CHUNK:
            self.enter(codes.RUN, address, count, first, code, flags, table, out)
            return
        number = _chunks(count)[1]
        if number > len(self._parts):
            self._parts = r.empty(number)
        parts = self._parts.ctypes.data
        self._work(_jobs(address, count, first, code, table, parts), flags, share=count >= SHARED)
        self.enter(codes.MERGE, parts, number, 0, 0, 0, 0, out)

    def again(self, out: int, known: int, address: int, count: int, code: int) -> bool:
        """Copy a known row to address `out` if the elements still have its checksum; False, and nothing, if not."""
        place = self._again.ctypes.data
        self.contiguous(place, address, count, 0, code, 0, 0)
        if self._again[0, r.RAW] != c_uint64.from_address(known).value:
            return False
        memmove(out, known, r.ROW_BYTES)
        return True

    def batch(self, items: Sequence[tuple[int, int, int, int, int]], flags: int) -> None:
        """Summarise many contiguous tensors at once, so that threads are woken once; needs `enter`.

        Args:
            items: of each tensor the address of its row, its address, elements, type code, and table address.
            flags: STATS, SKETCH.
        """
        if not items:
            return
        assert self.enter is not None
        total, cut = 0, [(item, _chunks(item[2])[1]) for item in items if item[2] > CHUNK]
        parts = r.empty(sum(number for _, number in cut))
        jobs, merges, at = [], [], parts.ctypes.data
        for (out, address, count, code, table), number in cut:
            jobs.append(_jobs(address, count, 0, code, table, at))
            merges.append((at, number, out))
            at += number * r.ROW_BYTES
            total += count
        small = [(item[1], item[2], 0, item[3], item[0], item[4]) for item in items if item[2] <= CHUNK]
        if small:
            jobs.append(np.array(small, dtype=np.int64))
            total += sum(item[1] for item in small)
        self._work(np.concatenate(jobs), flags, share=total >= SHARED)
        for start, number, out in merges:
            self.enter(codes.MERGE, start, number, 0, 0, 0, 0, out)

    def _work(self, jobs: Jobs, flags: int, *, share: bool) -> None:
        """Do jobs, shared among threads if that is wanted and pays."""
        enter, count, at = self.enter, len(jobs), jobs.ctypes.data
        assert enter is not None
        self._counter[0] = 0
        counter = self._counter.ctypes.data

        def take_part() -> None:
            enter(codes.WORK, at, count, 0, 0, flags, 0, counter)

        if not share:
            take_part()
            return
        pace = self._paces[flags]
        shared, start = pace.pays(), time.perf_counter()
        if shared:
            self._share(take_part, (codes.WORK, at, count, 0, 0, flags, 0, counter))
        else:
            take_part()
        pace.note((time.perf_counter() - start) / int(jobs[:, 1].sum()), shared=shared)

    def _share(self, take_part: Callable[[], None], call: tuple[int, ...]) -> None:
        """Have several threads take part: torch's, or ours where a number was asked for or torch's cannot be had."""
        if self._threads is None and self._parallel is not None and openmp.usable():
            threads = torch.get_num_threads()
            if threads > 1:
                function, entry = jit.addresses()
                self._call[:] = entry, *call
                self._parallel(function, self._call.ctypes.data, threads, 0)
                return
        threads = self._threads or thread_count()
        if threads == 1:
            take_part()
            return
        if self._helpers is None:
            self._helpers = Helpers(threads - 1)
        self._helpers.share(take_part)

    def fill(
        self,
        out: r.Rows,
        tensor: torch.Tensor,
        *,
        with_stats: bool,
        with_sketch: bool,
        sorted_stats: Sequence[str] = (),
        runs: Sequence[tuple[int, torch.Tensor]] | None = None,
    ) -> None:
        """Summarise any strided CPU tensor into a row.

        Args:
            out: the row, shape (32,).
            tensor: what to summarise; not quantized.
            with_stats: whether to fill the statistics words.
            with_sketch: whether to fill the sketch words.
            sorted_stats: `med`, `mode`.
            runs: the runs of a shard, see `reference.row`.
        """
        code = CODES.get(tensor.dtype)
        if self.enter is None or code is None:
            row = reference.row(
                tensor, with_stats=with_stats, with_sketch=with_sketch, sorted_stats=sorted_stats, runs=runs
            )
            out[:] = row.numpy().view(np.uint64)
            return
        flags = codes.STATS * with_stats | codes.SKETCH * with_sketch
        table = TABLE_ADDRESS.get(tensor.dtype, 0)
        self._runs(out, self._pieces(tensor) if runs is None else runs, code, table, flags)
        if sorted_stats and reference.has_values(tensor.dtype) and tensor.numel():
            order = reference.order_words(tensor, sorted_stats)
            out.view(np.float64)[r.MEDIAN : r.MODE + 1] = order.numpy()

    def _pieces(self, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """As `views.pieces`, and quicker: the kernel copies in the order of the source's memory."""
        limit = max(1, PIECE_BYTES // tensor.element_size())
        lazy = tensor.is_conj() or tensor.is_neg()
        if lazy or tensor.is_contiguous() or tensor.dim() >= codes.MAX_DIMS - 1 or tensor.element_size() > 8:
            yield from pieces(tensor, limit)
            return
        # some rows at a time, so that a cache line of a transposed source serves them all
        if tensor.shape[-1] * 16 <= CHUNK:
            limit = min(limit, CHUNK)
        block = torch.empty(min(limit, tensor.numel()), dtype=tensor.dtype)
        for offset, view in cut(tensor, limit):
            count = view.numel()
            self._copy(view, block.data_ptr())
            yield offset, block[:count]

    def _copy(self, view: torch.Tensor, target: int) -> None:
        """Copy a strided view to an address, in row-major order."""
        assert self.enter is not None
        plan = _copy_plan(tuple(view.shape), view.stride())
        dims = int(plan[0, -1])
        self.enter(codes.COPY, view.data_ptr(), dims, view.element_size(), 0, 0, plan.ctypes.data, target)

    def _runs(self, out: r.Rows, runs: Iterable[tuple[int, torch.Tensor]], code: int, table: int, flags: int) -> None:
        """Summarise runs and merge their rows, in order."""
        assert self.enter is not None
        rows = r.empty(1)
        number = 0
        for first, flat in runs:
            if number == len(rows):
                rows = np.concatenate([rows, r.empty(len(rows))])
            self.contiguous(rows[number:].ctypes.data, flat.data_ptr(), flat.numel(), first, code, table, flags)
            number += 1
        if number == 1:
            out[:] = rows[0]
        else:
            place = r.empty(1)
            self.enter(codes.MERGE, rows.ctypes.data, number, 0, 0, 0, 0, place.ctypes.data)
            out[:] = place[0]

    def abandon(self) -> None:
        """In a forked child: forget threads that only the parent has."""
        self._helpers = None

    def close(self) -> None:
        """End the helper threads."""
        if self._helpers is not None:
            self._helpers.close()
            self._helpers = None
