"""Summaries of arrays that lie on disk: by the compiled kernels, or in numpy alone.

Reading such files needs neither torch nor compiled code, and a result that is bit-equal in its checksum, equal to
rounding in the rest. An array may be larger than memory, so it comes in pieces, whose rows are merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from introspect_cli.records import Layout, Status, Summary
from introspect_cli.statistics import STATISTICS
from introspect_cli.tensors import checksum, sketch, statistics
from introspect_cli.tensors import kernels as k
from introspect_cli.tensors import rows as r

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

CHUNK: Final = 1 << 18
"""Elements summarised at once; temporaries are some hundred bytes an element."""

PIECE: Final = 1 << 20
"""Elements of a piece of an array that is read piece by piece: a whole number of the kernels' chunks."""

CODES: Final = {
    "float32": k.F32,
    "float16": k.F16,
    "bfloat16": k.BF16,
    "uint8": k.U8,
    "bool": k.U8,
    "int8": k.I8,
    "int16": k.I16,
    "float64": k.F64,
    "int32": k.I32,
    "int64": k.I64,
    "uint16": k.U16,
    "uint32": k.U32,
    "uint64": k.U64,
    "complex32": k.C32,
    "complex64": k.C64,
    "complex128": k.C128,
}
"""Type code of the kernels by torch's name of the element type; those of one byte beside have a table of values."""

_FACTORS: Final = np.array(checksum.FACTORS, np.uint64)
_SHIFTS: Final = np.array(checksum.SHIFTS, np.uint64)
_KEPT: Final = tuple(name for name, own in STATISTICS.items() if not own.on_request)


@dataclass(frozen=True, eq=False)
class Pieces:
    """A tensor that lies on disk, or is put together when it is asked for.

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
    """The pieces of an array of shape (n,) that is in memory."""
    for start in range(0, len(flat), PIECE):
        yield flat[start : start + PIECE]


def summary_of(tensor: Pieces, widen: Callable[[NDArray[Any], str], NDArray[Any]]) -> Summary:
    """What a capture would keep of a tensor.

    Args:
        tensor: it.
        widen: gives elements of a type as numbers.
    """
    dtype = tensor.dtype
    layout = Layout(tensor.shape, dtype, "cpu", "contiguous")
    if tensor.unread:
        return Summary(Status.NOT_OBSERVED, layout, 0, text=tensor.unread)
    total, first = r.empty(1), 0
    for bits in tensor.read():
        row = _by_kernels(bits, dtype, first, widen) if k.KERNELS is not None else None
        total = statistics.merge(total, _merged(bits, widen(bits, dtype), first) if row is None else row)
        first += len(bits)
    return _summary(total, dtype, tensor.shape)


def _by_kernels(
    bits: NDArray[Any], dtype: str, first: int, widen: Callable[[NDArray[Any], str], NDArray[Any]]
) -> r.Rows | None:
    """The raw result of a piece; None where the kernels do not know its type."""
    code, table = CODES.get(dtype), np.zeros(0, np.float32)
    if code is None and bits.dtype.itemsize == 1:
        code, table = k.TABLE, np.ascontiguousarray(widen(np.arange(256, dtype=np.uint8), dtype), np.float32)
    if code is None or not len(bits) or k.KERNELS is None:
        return None
    row, bits = r.empty(1), np.ascontiguousarray(bits)
    team, parts = _team()
    if len(bits) // k.CHUNK + 2 > len(parts):
        return None
    flags = k.STATS | k.SKETCH
    where = table.ctypes.data if len(table) else 0
    k.KERNELS.summarise(bits.ctypes.data, len(bits), first, code, flags, where, row.ctypes.data, team.ctypes.data)
    row.view(np.float64)[0, [r.MEDIAN, r.MODE]] = np.nan
    return row


@cache
def _team() -> tuple[NDArray[np.int64], r.Rows]:
    """What the kernels keep beside a call, and room for the rows of a piece's chunks."""
    team, parts = np.zeros(k.TEAM_WORDS, np.int64), r.empty(4 * PIECE // k.CHUNK + 2)
    team[[k.PARTS, k.THREADS, k.ROOM]] = parts.ctypes.data, 1, 4 * PIECE
    return team, parts


def _merged(bits: NDArray[Any], values: NDArray[Any], first: int) -> r.Rows:
    """The raw result of elements in numpy, the first of which has this index in the whole."""
    total = r.empty(1)
    for start in range(0, len(bits), CHUNK):
        end = start + CHUNK
        total = statistics.merge(total, _row(bits[start:end], values[start:end], first + start))
    return total


def _summary(total: r.Rows, dtype: str, shape: tuple[int, ...]) -> Summary:
    head = np.array([checksum.header(dtype, shape)], np.uint64)
    # Medians are absent of merged rows, and where there was nothing to merge.
    columns = statistics.finalise(total, _KEPT)
    stats = {name: float(column[0]) for name, column in columns.items() if not np.isnan(column[0])}
    return Summary(
        Status.OBSERVED,
        Layout(shape, dtype, "cpu", "contiguous"),
        int(checksum.finalise(total[:, r.RAW], head)[0]),
        stats,
        tuple(sketch.finalise(total)[0].tolist()),
    )


def _row(bits: NDArray[Any], values: NDArray[Any], first: int) -> r.Rows:
    """The raw result of a few elements, the first of which has this index in the whole."""
    row = r.empty(1)
    ints, floats = row[0], row.view(np.float64)[0]
    ints[r.RAW] = _raw_sum(bits, first)
    complex_ = values.dtype.kind == "c"
    wide = np.ascontiguousarray(values).astype(np.complex128 if complex_ else np.float64)
    parts = wide.view(np.float64)
    floats[r.SKETCH :] = _sketch(parts, first * (2 if complex_ else 1))
    sizes = np.where(np.isnan(wide), np.nan, np.abs(wide)) if complex_ else wide
    known = sizes[np.isfinite(sizes)]
    ints[r.FINITE] = len(known)
    for column, flags in ((r.NANS, np.isnan(sizes)), (r.POSINFS, sizes == np.inf), (r.NEGINFS, sizes == -np.inf)):
        ints[column] = np.count_nonzero(flags)
    if len(known):
        ints[r.ZEROS] = np.count_nonzero(known == 0)
        mean = known.mean()
        apart = known - mean
        with np.errstate(over="ignore"):
            floats[[r.MIN, r.MAX, r.ABSMIN]] = known.min(), known.max(), np.abs(known).min()
            floats[[r.MEAN, r.M2, r.M3, r.M4]] = mean, (apart**2).sum(), (apart**3).sum(), (apart**4).sum()
            floats[r.ABSSUM] = np.abs(known).sum()
    return row


def _raw_sum(bits: NDArray[Any], first: int) -> int:
    """The position-keyed sum of the checksum over elements, the first of which has this index in the whole."""
    size = bits.dtype.itemsize
    words = np.ascontiguousarray(bits).view(f"<u{min(size, 4)}").astype(np.uint64)
    places = np.arange(len(words), dtype=np.uint64) + np.uint64(first * max(1, size // 4))
    lanes = (places % np.uint64(checksum.SPAN)).astype(np.int64)
    with np.errstate(over="ignore"):
        blocks = (places // np.uint64(checksum.SPAN) + np.uint64(1)) * np.uint64(checksum.G)
        z = words * _FACTORS[lanes] + _SHIFTS[lanes] + checksum.finalise(blocks, np.zeros(1, np.uint64))
        terms = (z & np.uint64(0xFFFFFFFF)) * (z >> np.uint64(32)) + z
        return int(terms.sum(dtype=np.uint64))


def _sketch(parts: NDArray[np.float64], first: int) -> NDArray[np.float64]:
    """Signed bucket sums of finite numbers, the first of which has this index in the whole; shape (16,)."""
    with np.errstate(over="ignore"):
        buckets, signs = sketch.keys(np.arange(first, first + len(parts), dtype=np.uint64))
    return np.bincount(buckets, np.where(np.isfinite(parts), parts * signs, 0.0), 16).astype(np.float64)
