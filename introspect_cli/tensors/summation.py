"""The jitted kernels: all of checksum, statistics and sketch over a run of elements, into a row.

The problem: memory must be read once, whatever is computed, and a thousand elements must cost little more than the
call. The way: blocks of 2048 elements stay in the first-level cache while each loop of `vector` passes over them:
checksum of the words; extent and sums; central moments about the block's own mean; sketch. float32 is exact enough
inside a block, since deviations are from the block's mean and scaled by a power of two to around one (no power of
them over- or underflows); blocks are merged in float64. A block whose sum of absolute values is not finite takes a
careful path in float64. Types other than float32 and float64 are widened into a scratch block first.

Everything takes raw addresses and writes nowhere but to the rows it is given.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from introspect_cli.tensors import checksum, sketch, vector
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.codes import C32, C128, F32, F64, OPAQUE8, SIZES, SKETCH, STATS
from introspect_cli.tensors.moments import block32, block64, careful, merge_moments
from introspect_cli.tensors.vector import inner, pointer
from introspect_cli.tensors.widen import complex_parts, to_float32, to_float64

BLOCK: Final = 2048
SPAN: Final = checksum.SPAN
_H1, _H2, _H3 = np.uint64(sketch.HASH_1), np.uint64(sketch.HASH_2), np.uint64(sketch.HASH_3)
_SHIFT, _TURN = np.uint64(sketch.SHIFT), np.uint64(sketch.ROTATION_SHIFT)
_ONE = np.uint64(1)
_FIRST_SKETCH: Final = r.SKETCH
_AREA: Final = 8 + 3 * BLOCK
"""Words of scratch: eight sums, then a widened block, its finite elements, its elements with others as 0."""


@inner  # type: ignore[untyped-decorator]
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


@inner  # type: ignore[untyped-decorator]
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


@inner  # type: ignore[untyped-decorator]
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


@inner  # type: ignore[untyped-decorator]
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


@inner  # type: ignore[untyped-decorator]
def _clear(row: Any) -> Any:
    ints, floats = pointer(row, np.int64), pointer(row, np.float64)
    for i in range(r.WORDS):
        ints[i] = 0
    floats[r.MIN] = floats[r.ABSMIN] = np.inf
    floats[r.MAX] = -np.inf
    floats[r.MEDIAN] = floats[r.MODE] = np.nan


@inner  # type: ignore[untyped-decorator]
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
        to_float32(code, address, count, lut, block)
    elif code < C32:
        to_float64(code, address, count, block)
    else:
        complex_parts(code, address, count, block, zeroed)
        if flags & SKETCH:
            _sketch(zeroed, np.int64(0), 2 * count, 2 * first, table)
    source, source_narrow = block, narrow
    if flags & STATS:
        good = block32(block, count, row, out) if narrow else block64(block, count, row, out)
        if not good:
            careful(block, narrow, count, row, out, kept, zeroed)
            source, source_narrow = zeroed, np.int64(0)
    elif flags & SKETCH and code < C32:
        every, x32, x64 = pointer(zeroed, np.float64), pointer(block, np.float32), pointer(block, np.float64)
        for i in range(count):
            v = np.float64(x32[i]) if narrow else x64[i]
            every[i] = v if math.isfinite(v) else 0.0
        source, source_narrow = zeroed, np.int64(0)
    if flags & SKETCH and code < C32:
        _sketch(source, source_narrow, count, first, table)


@inner  # type: ignore[untyped-decorator]
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


@inner  # type: ignore[untyped-decorator]
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
        merge_moments(row, np.float64(some[r.FINITE]), part[r.MEAN], part[r.M2], part[r.M3], part[r.M4])
        for column in range(_FIRST_SKETCH, r.WORDS):
            floats[column] += part[column]
    return 0
