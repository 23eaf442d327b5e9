"""Summaries of arrays that lie on disk, by the compiled kernels: no torch is needed.

An array may be larger than memory, so it comes in pieces, whose rows are merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from introspect_cli.records import SKETCH_SIZE, Layout, Status, Summary
from introspect_cli.statistics import STATISTICS
from introspect_cli.tensors import checksum
from introspect_cli.tensors import kernels as k
from introspect_cli.tensors import rows as r

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

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

_SEEN: Final = np.zeros(1, np.uint8)
"""All of a row counts."""
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
    code, table = CODES.get(dtype), np.zeros(0, np.float32)
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
    k.KERNELS.columns(block.ctypes.data, 1, 0, head.ctypes.data, _SEEN.ctypes.data, 1, places.ctypes.data)
    stats = {name: float(columns[name][0]) for name in _KEPT if not np.isnan(columns[name][0])}
    return Summary(
        Status.OBSERVED,
        Layout(shape, dtype, "cpu", "contiguous"),
        int(columns["checksum"][0]),
        stats,
        tuple(columns["sketch"][0].tolist()),
    )
