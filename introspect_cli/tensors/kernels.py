"""The jitted kernels: all of checksum, statistics and sketch over a run of elements, into a row.

The problem: memory must be read once, whatever is computed, and a thousand elements must cost little more than the
call. The way: blocks of 2048 elements stay in the first-level cache while each loop of `vector` passes over them:
checksum of the words; extent and sums; central moments about the block's own mean; sketch. float32 is exact enough
inside a block, since deviations are from the block's mean and scaled by a power of two to around one (no power of
them over- or underflows); blocks are merged in float64. A block whose sum of absolute values is not finite takes a
careful path in float64. Types other than float32 and float64 are widened into a scratch block first.

Importing this module compiles, or loads from numba's cache; `jit` does that, when asked. The entry points take raw
addresses, release the interpreter lock and write nowhere but to the rows they are given.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numba import config, njit

from introspect_cli.tensors import checksum, sketch, vector
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.codes import (
    BF16,
    C32,
    C64,
    C128,
    COPY,
    F16,
    F32,
    F64,
    I8,
    I32,
    JOB_WORDS,
    MAX_DIMS,
    OPAQUE8,
    RUN,
    SIZES,
    SKETCH,
    STATS,
    TABLE,
    U8,
    U16,
    U32,
    U64,
    WORK,
)
from introspect_cli.tensors.vector import pointer

BLOCK: Final = 2048
SPAN: Final = checksum.SPAN
_H1, _H2, _H3 = np.uint64(sketch.HASH_1), np.uint64(sketch.HASH_2), np.uint64(sketch.HASH_3)
_SHIFT, _TURN = np.uint64(sketch.SHIFT), np.uint64(sketch.ROTATION_SHIFT)
_ONE = np.uint64(1)
_FIRST_SKETCH: Final = r.SKETCH
_AREA: Final = 8 + 3 * BLOCK
"""Words of scratch: eight sums, then a widened block, its finite elements, its elements with others as 0."""

_CACHE: Final = bool(config.CACHE_DIR)
"""`jit` names the directory to cache in while it imports this module."""

_inner = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_inner  # type: ignore[untyped-decorator]
def _span(address: Any, spans: Any, words: Any, first: Any, size: Any) -> Any:
    """Raw sum of `spans` whole spans, or of some words within one span."""
    vector.keep_apart()
    full = words // 16
    if size == 4:
        total = vector.checksum_block(address, spans, full, first, 4)
    elif size == 2:
        total = vector.checksum_block(address, spans, full, first, 2)
    else:
        total = vector.checksum_block(address, spans, full, first, 1)
    x4, x2, x1 = pointer(address, np.uint32), pointer(address, np.uint16), pointer(address, np.uint8)
    for i in range(full * 16, words):
        if size == 4:
            x = np.uint64(x4[i])
        elif size == 2:
            x = np.uint64(x2[i])
        else:
            x = np.uint64(x1[i])
        total += vector.checksum_term(x, np.uint64(first + i))
    return total


@_inner  # type: ignore[untyped-decorator]
def _checksum(address: Any, words: Any, first: Any, size: Any) -> Any:
    """Raw sum of words of 1, 2 or 4 bytes, the first with index `first`."""
    vector.keep_apart()
    total = np.uint64(0)
    head = min(words, (SPAN - (first & (SPAN - 1))) & (SPAN - 1))
    whole = (words - head) // SPAN
    rest = words - head - whole * SPAN
    if head:
        total += _span(address, np.int64(1), head, first, size)
    if whole:
        total += _span(address + np.uint64(head * size), whole, np.int64(SPAN), first + head, size)
    if rest:
        done = words - rest
        total += _span(address + np.uint64(done * size), np.int64(1), rest, first + done, size)
    return total


@_inner  # type: ignore[untyped-decorator]
def _narrow(code: Any, address: Any, count: Any, table: Any, out: Any) -> Any:
    """Widen a block to float32 at `out`."""
    vector.keep_apart()
    y = pointer(out, np.float32)
    if code == F16:
        vector.widen_half_block(address, count // 16, out)
        for i in range(count // 16 * 16, count):
            y[i] = vector.half_at(address + np.uint64(2 * i))
    elif code == BF16:
        bits, brain = pointer(out, np.uint32), pointer(address, np.uint16)
        for i in range(count):
            bits[i] = np.uint32(brain[i]) << np.uint32(16)
    elif code == TABLE:
        known, index = pointer(table, np.float32), pointer(address, np.uint8)
        for i in range(count):
            y[i] = known[index[i]]
    elif code == U8:
        u8 = pointer(address, np.uint8)
        for i in range(count):
            y[i] = np.float32(u8[i])
    elif code == I8:
        i8 = pointer(address, np.int8)
        for i in range(count):
            y[i] = np.float32(i8[i])
    elif code == U16:
        u16 = pointer(address, np.uint16)
        for i in range(count):
            y[i] = np.float32(u16[i])
    else:
        i16 = pointer(address, np.int16)
        for i in range(count):
            y[i] = np.float32(i16[i])


@_inner  # type: ignore[untyped-decorator]
def _wide(code: Any, address: Any, count: Any, out: Any) -> Any:
    """Widen a block to float64 at `out`."""
    vector.keep_apart()
    y = pointer(out, np.float64)
    if code == U32:
        u32 = pointer(address, np.uint32)
        for i in range(count):
            y[i] = np.float64(u32[i])
    elif code == I32:
        i32 = pointer(address, np.int32)
        for i in range(count):
            y[i] = np.float64(i32[i])
    elif code == U64:
        u64 = pointer(address, np.uint64)
        for i in range(count):
            y[i] = np.float64(u64[i])
    else:
        i64 = pointer(address, np.int64)
        for i in range(count):
            y[i] = np.float64(i64[i])


@_inner  # type: ignore[untyped-decorator]
def _complex(code: Any, address: Any, count: Any, sizes: Any, parts: Any) -> Any:
    """Absolute values of a block of complex numbers to `sizes`, finite components to `parts`; float64."""
    vector.keep_apart()
    size, part = pointer(sizes, np.float64), pointer(parts, np.float64)
    single, double = pointer(address, np.float32), pointer(address, np.float64)
    for i in range(count):
        if code == C32:
            re = np.float64(vector.half_at(address + np.uint64(4 * i)))
            im = np.float64(vector.half_at(address + np.uint64(4 * i + 2)))
        elif code == C64:
            re, im = np.float64(single[2 * i]), np.float64(single[2 * i + 1])
        else:
            re, im = double[2 * i], double[2 * i + 1]
        if math.isnan(re) or math.isnan(im):
            size[i] = np.nan
        else:
            size[i] = math.hypot(re, im) if code == C128 else math.sqrt(re * re + im * im)
        part[2 * i] = re if math.isfinite(re) else 0.0
        part[2 * i + 1] = im if math.isfinite(im) else 0.0


@_inner  # type: ignore[untyped-decorator]
def _merge(row: Any, n_b: Any, mean_b: Any, m2_b: Any, m3_b: Any, m4_b: Any) -> Any:
    """Merge moments into a row, by the formulas of `stats.merge_moments`."""
    vector.keep_apart()
    ints, floats = pointer(row, np.int64), pointer(row, np.float64)
    n_a = np.float64(ints[r.FINITE])
    if n_b == 0.0:
        return
    ints[r.FINITE] += np.int64(n_b)
    if n_a == 0.0:
        floats[r.MEAN], floats[r.M2], floats[r.M3], floats[r.M4] = mean_b, m2_b, m3_b, m4_b
        return
    mean_a, m2_a, m3_a, m4_a = floats[r.MEAN], floats[r.M2], floats[r.M3], floats[r.M4]
    delta = mean_b - mean_a
    step = delta / (n_a + n_b)
    cross = delta * step * n_a * n_b
    floats[r.MEAN] = mean_a + step * n_b
    floats[r.M2] = m2_a + m2_b + cross
    floats[r.M3] = m3_a + m3_b + cross * step * (n_a - n_b) + 3.0 * step * (n_a * m2_b - n_b * m2_a)
    floats[r.M4] = (
        m4_a
        + m4_b
        + cross * step * step * (n_a * n_a - n_a * n_b + n_b * n_b)
        + 6.0 * step * step * (n_a * n_a * m2_b + n_b * n_b * m2_a)
        + 4.0 * step * (n_a * m3_b - n_b * m3_a)
    )


@_inner  # type: ignore[untyped-decorator]
def _finish(row: Any, out: Any, count: Any, scale: Any, pivot: Any) -> Any:
    """Merge a block's power sums about `pivot / scale`, left at `out`, into a row."""
    s = pointer(out, np.float64)
    n = np.float64(count)
    u = s[0] / n
    m2 = s[1] - n * u * u
    m3 = s[2] - 3.0 * u * s[1] + 2.0 * n * u * u * u
    m4 = s[3] - 4.0 * u * s[2] + 6.0 * u * u * s[1] - 3.0 * n * u * u * u * u
    back = 1.0 / scale
    square = back * back
    _merge(row, n, (pivot + u) * back, max(m2, 0.0) * square, m3 * square * back, max(m4, 0.0) * square * square)


@_inner  # type: ignore[untyped-decorator]
def _scale(largest: Any, limit: Any) -> Any:
    """A power of two that brings a number to between 1/2 and 1, within what the type can hold."""
    _, exponent = math.frexp(largest)
    return math.ldexp(1.0, -int(min(max(float(exponent), -limit), limit)))


@_inner  # type: ignore[untyped-decorator]
def _block32(address: Any, count: Any, row: Any, out: Any) -> Any:
    """Statistics of a block of float32 into a row; False, with nothing written, if not all are finite."""
    vector.keep_apart()
    s, x = pointer(out, np.float64), pointer(address, np.float32)
    full = count // 16
    vector.extent_block(address, full, out, 4)
    low, high, small, total, sizes = s[0], s[1], s[2], s[3], s[4]
    for i in range(full * 16, count):
        v = np.float64(x[i])
        low, high, small = min(low, v), max(high, v), min(small, abs(v))
        total += v
        sizes += abs(v)
    # sums of float32 lanes overflow long before those of float64 do; NaN and Inf arrive here as well
    if not sizes < np.inf:
        return False
    ints, floats = pointer(row, np.int64), pointer(row, np.float64)
    if small == 0.0:
        zeros = 0
        for i in range(count):
            zeros += x[i] == np.float32(0.0)
        ints[r.ZEROS] += zeros
    floats[r.MIN], floats[r.MAX] = min(floats[r.MIN], low), max(floats[r.MAX], high)
    floats[r.ABSMIN] = min(floats[r.ABSMIN], small)
    floats[r.ABSSUM] += sizes
    if low == high:
        _merge(row, np.float64(count), low, 0.0, 0.0, 0.0)
        return True
    scale = _scale(max(-low, high), 120.0)
    pivot = np.float64(np.float32(total / count)) * scale
    vector.moments_block(address, full, scale, pivot, out, 4)
    for i in range(full * 16, count):
        d = np.float64(x[i]) * scale - pivot
        s[0] += d
        s[1] += d * d
        s[2] += d * d * d
        s[3] += d * d * d * d
    _finish(row, out, count, scale, pivot)
    return True


@_inner  # type: ignore[untyped-decorator]
def _block64(address: Any, count: Any, row: Any, out: Any) -> Any:
    """Statistics of a block of finite float64 into a row; False, with nothing written, if not all are finite."""
    vector.keep_apart()
    s, x = pointer(out, np.float64), pointer(address, np.float64)
    full = count // 16
    vector.extent_block(address, full, out, 8)
    low, high, small, total, sizes = s[0], s[1], s[2], s[3], s[4]
    for i in range(full * 16, count):
        v = x[i]
        low, high, small = min(low, v), max(high, v), min(small, abs(v))
        total += v
        sizes += abs(v)
    if not sizes < np.inf:
        return False
    _extent64(address, count, row, low, high, small, sizes)
    _moments64(address, count, row, out, low, high, total / count)
    return True


@_inner  # type: ignore[untyped-decorator]
def _extent64(address: Any, count: Any, row: Any, low: Any, high: Any, small: Any, sizes: Any) -> Any:
    vector.keep_apart()
    ints, floats, x = pointer(row, np.int64), pointer(row, np.float64), pointer(address, np.float64)
    if small == 0.0:
        zeros = 0
        for i in range(count):
            zeros += x[i] == 0.0
        ints[r.ZEROS] += zeros
    floats[r.MIN], floats[r.MAX] = min(floats[r.MIN], low), max(floats[r.MAX], high)
    floats[r.ABSMIN] = min(floats[r.ABSMIN], small)
    floats[r.ABSSUM] += sizes


@_inner  # type: ignore[untyped-decorator]
def _moments64(address: Any, count: Any, row: Any, out: Any, low: Any, high: Any, mean: Any) -> Any:
    vector.keep_apart()
    if low == high:
        _merge(row, np.float64(count), low, 0.0, 0.0, 0.0)
        return
    s, x = pointer(out, np.float64), pointer(address, np.float64)
    full = count // 16
    scale = _scale(max(-low, high), 1000.0)
    pivot = mean * scale
    vector.moments_block(address, full, scale, pivot, out, 8)
    for i in range(full * 16, count):
        d = x[i] * scale - pivot
        s[0] += d
        s[1] += d * d
        s[2] += d * d * d
        s[3] += d * d * d * d
    _finish(row, out, count, scale, pivot)


@_inner  # type: ignore[untyped-decorator]
def _careful(address: Any, narrow: Any, count: Any, row: Any, out: Any, kept: Any, zeroed: Any) -> Any:
    """A block that may hold anything: finite elements to `kept`, all with others as 0 to `zeroed`; then as float64."""
    vector.keep_apart()
    x32, x64 = pointer(address, np.float32), pointer(address, np.float64)
    some, every, ints = pointer(kept, np.float64), pointer(zeroed, np.float64), pointer(row, np.int64)
    finite = np.int64(0)
    for i in range(count):
        v = np.float64(x32[i]) if narrow else x64[i]
        good = math.isfinite(v)
        every[i] = v if good else 0.0
        some[finite] = v
        finite += np.int64(good)
        if not good:
            if math.isnan(v):
                ints[r.NANS] += 1
            elif v > 0.0:
                ints[r.POSINFS] += 1
            else:
                ints[r.NEGINFS] += 1
    if finite and not _block64(kept, finite, row, out):
        # finite numbers whose sum is not: extrema stand, sums overflow, moments are about the middle
        low, high, small = np.inf, -np.inf, np.inf
        for i in range(finite):
            low, high, small = min(low, some[i]), max(high, some[i]), min(small, abs(some[i]))
        _extent64(kept, finite, row, low, high, small, np.inf)
        _moments64(kept, finite, row, out, low, high, 0.5 * low + 0.5 * high)


@_inner  # type: ignore[untyped-decorator]
def _sketch_one(table: Any, place: Any, v: Any) -> Any:
    vector.keep_apart()
    z = ((place >> np.uint64(6)) + _ONE) * _H1
    z = (z ^ (z >> _SHIFT)) * _H2
    signs = (z ^ (z >> _SHIFT)) * _H3
    signs ^= signs >> _SHIFT
    sums = pointer(table, np.float64)
    slot = np.int64((z >> _TURN) * np.uint64(16) + (place & np.uint64(15)))
    if (signs >> (place & np.uint64(63))) & _ONE:
        sums[slot] -= v
    else:
        sums[slot] += v


@_inner  # type: ignore[untyped-decorator]
def _sketch(address: Any, narrow: Any, count: Any, first: Any, table: Any) -> Any:
    """Add finite floats, the first with index `first`, to a sketch table."""
    vector.keep_apart()
    x32, x64 = pointer(address, np.float32), pointer(address, np.float64)
    head = min(count, (64 - (first & 63)) & 63)
    full = (count - head) // 64
    for i in range(head):
        _sketch_one(table, np.uint64(first + i), np.float64(x32[i]) if narrow else x64[i])
    if narrow:
        vector.sketch_block(address + np.uint64(4 * head), full, (first + head) >> 6, table, 4)
    else:
        vector.sketch_block(address + np.uint64(8 * head), full, (first + head) >> 6, table, 8)
    for i in range(head + full * 64, count):
        _sketch_one(table, np.uint64(first + i), np.float64(x32[i]) if narrow else x64[i])


@_inner  # type: ignore[untyped-decorator]
def _clear(row: Any) -> Any:
    ints, floats = pointer(row, np.int64), pointer(row, np.float64)
    for i in range(r.WORDS):
        ints[i] = 0
    floats[r.MIN] = floats[r.ABSMIN] = np.inf
    floats[r.MAX] = -np.inf
    floats[r.MEDIAN] = floats[r.MODE] = np.nan


@_inner  # type: ignore[untyped-decorator]
def _values(
    address: Any, count: Any, first: Any, code: Any, flags: Any, lut: Any, row: Any, table: Any, area: Any
) -> Any:
    """Statistics and sketch of one block."""
    out, block = area, area + np.uint64(64)
    kept, zeroed = block + np.uint64(8 * BLOCK), block + np.uint64(16 * BLOCK)
    narrow = np.int64(code < F64)
    if code in (F32, F64):
        block = address
    elif narrow:
        _narrow(code, address, count, lut, block)
    elif code < C32:
        _wide(code, address, count, block)
    else:
        _complex(code, address, count, block, zeroed)
        if flags & SKETCH:
            _sketch(zeroed, np.int64(0), 2 * count, 2 * first, table)
    source, source_narrow = block, narrow
    if flags & STATS:
        good = _block32(block, count, row, out) if narrow else _block64(block, count, row, out)
        if not good:
            _careful(block, narrow, count, row, out, kept, zeroed)
            source, source_narrow = zeroed, np.int64(0)
    elif flags & SKETCH and code < C32:
        every, x32, x64 = pointer(zeroed, np.float64), pointer(block, np.float32), pointer(block, np.float64)
        for i in range(count):
            v = np.float64(x32[i]) if narrow else x64[i]
            every[i] = v if math.isfinite(v) else 0.0
        source, source_narrow = zeroed, np.int64(0)
    if flags & SKETCH and code < C32:
        _sketch(source, source_narrow, count, first, table)


@_inner  # type: ignore[untyped-decorator]
def run(address: Any, count: Any, first: Any, code: Any, flags: Any, lut: Any, row: Any) -> Any:
    """Summarise contiguous elements into a row.

    Args:
        address: of the elements.
        count: how many.
        first: index of the first in the whole tensor.
        code: type code.
        flags: STATS, SKETCH.
        lut: address of 256 float32 values, for type code TABLE.
        row: address of the row, overwritten.
    """
    vector.keep_apart()
    ints, floats = pointer(row, np.uint64), pointer(row, np.float64)
    area = vector.scratch(_AREA)
    table = vector.scratch(256)
    _clear(row)
    if code >= OPAQUE8:
        flags = 0
    size = SIZES[code]
    width = min(size, 4)
    words = size // width
    step = BLOCK // 2 if C32 <= code <= C128 else BLOCK
    sums = pointer(table, np.float64)
    if flags & SKETCH:
        for i in range(256):
            sums[i] = 0.0
    raw = np.uint64(0)
    if flags == 0:
        raw = _checksum(address, count * words, first * words, width)
    else:
        for start in range(0, count, step):
            some = min(step, count - start)
            here = address + np.uint64(start * size)
            raw += _checksum(here, some * words, (first + start) * words, width)
            _values(here, some, first + start, code, flags, lut, row, table, area)
    ints[r.RAW] = raw
    if flags & SKETCH:
        for turn in range(16):
            for lane in range(16):
                floats[_FIRST_SKETCH + (lane ^ turn)] += sums[turn * 16 + lane]
    return 0


@_inner  # type: ignore[untyped-decorator]
def work(jobs: Any, count: Any, counter: Any, flags: Any) -> Any:
    """Do jobs until none is left; several threads may, on the same counter. Returns how many it did."""
    done = 0
    job = pointer(jobs, np.int64)
    while True:
        at = vector.fetch_add(counter) * JOB_WORDS
        if at >= count * JOB_WORDS:
            return done
        run(
            np.uint64(job[at]),
            job[at + 1],
            job[at + 2],
            job[at + 3],
            flags,
            np.uint64(job[at + 5]),
            np.uint64(job[at + 4]),
        )
        done += 1


@_inner  # type: ignore[untyped-decorator]
def merge(parts: Any, count: Any, row: Any) -> Any:
    """Add up consecutive rows, in order, into a row that is none of them."""
    vector.keep_apart()
    _clear(row)
    ints, floats = pointer(row, np.int64), pointer(row, np.float64)
    for number in range(count):
        place = parts + np.uint64(number * r.ROW_BYTES)
        some, part = pointer(place, np.int64), pointer(place, np.float64)
        ints[r.RAW] += some[r.RAW]
        for column in range(r.NANS, r.ZEROS + 1):
            ints[column] += some[column]
        floats[r.MIN] = min(floats[r.MIN], part[r.MIN])
        floats[r.MAX] = max(floats[r.MAX], part[r.MAX])
        floats[r.ABSMIN] = min(floats[r.ABSMIN], part[r.ABSMIN])
        floats[r.ABSSUM] += part[r.ABSSUM]
        _merge(row, np.float64(some[r.FINITE]), part[r.MEAN], part[r.M2], part[r.M3], part[r.M4])
        for column in range(_FIRST_SKETCH, r.WORDS):
            floats[column] += part[column]
    return 0


@_inner  # type: ignore[untyped-decorator]
def _copy_tiles(a: Any, b: Any, t: Any, rows: Any, columns: Any, step: Any, within: Any, stride: Any) -> Any:
    """Copy a matrix a to b, reading along its rows and writing along its columns, by tiles of whole cache lines.

    Element (i, j), of `rows` and `columns`, is at a[i * step + j * within] and goes to b[j * stride + i].
    """
    for top in range(0, rows, 16):
        height = min(16, rows - top)
        for left in range(0, columns, 16):
            width = min(16, columns - left)
            if height == 16 and width == 16 and within == 1:
                for i in range(16):
                    for j in range(16):
                        t[i * 16 + j] = a[(top + i) * step + left + j]
                for j in range(16):
                    for i in range(16):
                        b[(left + j) * stride + top + i] = t[i * 16 + j]
            else:
                for i in range(height):
                    for j in range(width):
                        b[(left + j) * stride + top + i] = a[(top + i) * step + (left + j) * within]


@_inner  # type: ignore[untyped-decorator]
def _copy_rows(a: Any, b: Any, rows: Any, columns: Any, step: Any, within: Any, out: Any) -> Any:
    """Copy a matrix row by row: element (i, j) is at a[i * step + j * within] and goes to b[i * out + j]."""
    for i in range(rows):
        if within == 1:
            for j in range(columns):
                b[i * out + j] = a[i * step + j]
        else:
            for j in range(columns):
                b[i * out + j] = a[i * step + j * within]


@_inner  # type: ignore[untyped-decorator]
def _copy_matrix(a: Any, b: Any, t: Any, shape: Any) -> Any:
    """One of the two ways: rows where a row is contiguous in the target, tiles where a column is."""
    rows, columns, step, within, out, stride = shape
    if stride == 1:
        _copy_rows(a, b, rows, columns, step, within, out)
    else:
        _copy_tiles(a, b, t, rows, columns, step, within, stride)


@_inner  # type: ignore[untyped-decorator]
def _copy_box(source: Any, target: Any, size: Any, shape: Any) -> Any:
    vector.keep_apart()
    tile = vector.scratch(256)
    if size == 4:
        _copy_matrix(pointer(source, np.uint32), pointer(target, np.uint32), pointer(tile, np.uint32), shape)
    elif size == 8:
        _copy_matrix(pointer(source, np.uint64), pointer(target, np.uint64), pointer(tile, np.uint64), shape)
    elif size == 2:
        _copy_matrix(pointer(source, np.uint16), pointer(target, np.uint16), pointer(tile, np.uint16), shape)
    else:
        _copy_matrix(pointer(source, np.uint8), pointer(target, np.uint8), pointer(tile, np.uint8), shape)


@_inner  # type: ignore[untyped-decorator]
def copy(source: Any, dims: Any, size: Any, plan: Any, target: Any) -> Any:
    """Copy a strided box.

    Args:
        source: address of the first element.
        dims: number of dimensions, at least 2; one of the last two is contiguous in the target.
        size: bytes in an element: 1, 2, 4 or 8.
        plan: address of sizes, strides in the source, strides in the target (elements), and as many zeros;
            MAX_DIMS words each.
        target: address to copy to.
    """
    word = pointer(plan, np.int64)
    a, b = dims - 2, dims - 1
    step, within = word[MAX_DIMS + a], word[MAX_DIMS + b]
    shape = (word[a], word[b], step, within, word[2 * MAX_DIMS + a], word[2 * MAX_DIMS + b])
    boxes = 1
    for dim in range(dims - 2):
        boxes *= word[dim]
    for _ in range(boxes):
        _copy_box(source, target, size, shape)
        dim = dims - 3
        while dim >= 0:
            word[3 * MAX_DIMS + dim] += 1
            source += np.uint64(word[MAX_DIMS + dim] * size)
            target += np.uint64(word[2 * MAX_DIMS + dim] * size)
            if word[3 * MAX_DIMS + dim] < word[dim]:
                break
            source -= np.uint64(word[dim] * word[MAX_DIMS + dim] * size)
            target -= np.uint64(word[dim] * word[2 * MAX_DIMS + dim] * size)
            word[3 * MAX_DIMS + dim] = 0
            dim -= 1
    return 0


@njit("int64(int64,uint64,int64,int64,int64,int64,uint64,uint64)", nogil=True, error_model="numpy", cache=_CACHE)  # type: ignore[untyped-decorator]
def enter(what: Any, address: Any, count: Any, first: Any, code: Any, flags: Any, lut: Any, row: Any) -> Any:
    """The one entry point, so that everything is compiled once: RUN, WORK, MERGE or COPY, see there."""
    if what == RUN:
        return run(address, count, first, code, flags, lut, row)
    if what == WORK:
        return work(address, count, row, flags)
    if what == COPY:
        return copy(address, count, first, lut, row)
    return merge(address, count, row)
