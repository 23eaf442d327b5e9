"""The kernels in numpy alone, for arrays that another framework wrote to disk.

Importing such files needs neither torch nor compiled code, and a result that is bit-equal in its checksum, equal to
rounding in the rest. It reads a file once and nobody trains meanwhile, so clarity goes before speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from introspect_cli.records import STATISTICS, Layout, Status, Summary
from introspect_cli.tensors import checksum, sketch, statistics
from introspect_cli.tensors import rows as r

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK: Final = 1 << 18
"""Elements summarised at once; temporaries are some hundred bytes an element."""

_FACTORS: Final = np.array(checksum.FACTORS, np.uint64)
_SHIFTS: Final = np.array(checksum.SHIFTS, np.uint64)
_KEPT: Final = tuple(name for name, own in STATISTICS.items() if not own.on_request)


def summary(bits: NDArray[Any], values: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> Summary:
    """What a capture would keep of a tensor.

    Args:
        bits: its elements as they are stored, little-endian, row-major, shape (n,).
        values: the same elements as numbers, shape (n,); `bits` itself where numpy knows the type.
        dtype: torch's name of the element type without the prefix.
        shape: sizes.
    """
    total = r.empty(1)
    for start in range(0, len(bits), CHUNK):
        end = start + CHUNK
        total = statistics.merge(total, _row(bits[start:end], values[start:end], start))
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
