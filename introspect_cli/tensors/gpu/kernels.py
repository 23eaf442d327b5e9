"""Checksum, statistics and sketch of tensors on a GPU, in one launch and one pass over memory.

Memory is what a summary on a GPU has to wait for, so elements are read once, in tiles that stay in registers; the
sketch reads them again out of the cache, with the sixteen neighbours of a bucket row in the order of their buckets,
so that no thread has to hand a number to another. A tile is R rows of 512 elements, and begins at a multiple of 512
of the element's index in the whole tensor: a column then has one factor and one shift of the checksum, and one place
in the sketch's blocks, and these stay in registers. Sums of a tile are in float32 about the tile's own mean, scaled
by a power of two (types that float32 does not hold: in float64); a program adds tiles up in float64 about the mean of
its first one, which loses no more than a factor of the number of tiles; and the last program of a tensor to arrive
adds up the programs' rows, always in the same order. No float is added atomically, so the same tensor always has the
same row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from introspect_cli.tensors import checksum, sketch
from introspect_cli.tensors import kernels as types
from introspect_cli.tensors import rows as r

SPAN = tl.constexpr(checksum.SPAN)
"""Elements in a row of a tile."""
BLOCK = tl.constexpr(sketch.BLOCK)
MERGED = tl.constexpr(128)
"""Rows of programs that are added up at once."""

ITEM_WORDS = tl.constexpr(9)
"""Words in an item of a table: address, elements, index of the first in the whole tensor, address of the layout,
address of the row; its first program and how many; its row's first program and how many."""
WORDS = tl.constexpr(r.WORDS)

_TINY = tl.constexpr(2.0**-16)
_LARGE = tl.constexpr(2.0**16)
"""Bring the sum of a tile into range, and back."""
_G = tl.constexpr(checksum.G)
_MIX_1 = tl.constexpr(checksum.MIX_1)
_MIX_2 = tl.constexpr(checksum.MIX_2)
_LOW = tl.constexpr(0xFFFFFFFF)
_HASH_1 = tl.constexpr(sketch.HASH_1)
_HASH_2 = tl.constexpr(sketch.HASH_2)
_HASH_3 = tl.constexpr(sketch.HASH_3)
_SHIFT = tl.constexpr(sketch.SHIFT)
_ROTATION = tl.constexpr(sketch.ROTATION_SHIFT)

_F32 = tl.constexpr(types.F32)
_F16 = tl.constexpr(types.F16)
_BF16 = tl.constexpr(types.BF16)
_TABLE = tl.constexpr(types.TABLE)
_I8 = tl.constexpr(types.I8)
_I16 = tl.constexpr(types.I16)
_F64 = tl.constexpr(types.F64)
_I32 = tl.constexpr(types.I32)
_I64 = tl.constexpr(types.I64)

_FINITE = tl.constexpr(r.FINITE)
_NANS = tl.constexpr(r.NANS)
_POSINFS = tl.constexpr(r.POSINFS)
_NEGINFS = tl.constexpr(r.NEGINFS)
_ZEROS = tl.constexpr(r.ZEROS)
_MIN = tl.constexpr(r.MIN)
_MAX = tl.constexpr(r.MAX)
_ABSMIN = tl.constexpr(r.ABSMIN)
_MEAN = tl.constexpr(r.MEAN)
_M2 = tl.constexpr(r.M2)
_M3 = tl.constexpr(r.M3)
_M4 = tl.constexpr(r.M4)
_ABSSUM = tl.constexpr(r.ABSSUM)
_MEDIAN = tl.constexpr(r.MEDIAN)
_MODE = tl.constexpr(r.MODE)
_SKETCH = tl.constexpr(r.SKETCH)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _pointer(address, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to unsigned integers of SIZE bytes."""
    if SIZE == 1:
        pointer = address.to(tl.pointer_type(tl.uint8))
    elif SIZE == 2:
        pointer = address.to(tl.pointer_type(tl.uint16))
    elif SIZE == 4:
        pointer = address.to(tl.pointer_type(tl.uint32))
    else:
        pointer = address.to(tl.pointer_type(tl.uint64))
    if ALIGNED:
        # Four elements a thread, of any size: with more, the checksum's factors would not fit into registers.
        pointer = tl.multiple_of(pointer, 4 * SIZE if SIZE < 8 else 16)
    return pointer


@triton.jit
def _place(index, layout, DIMS: tl.constexpr, NARROW: tl.constexpr):
    """Where in memory, in elements, the element with a row-major index is; negative indices give nonsense."""
    rest = index.to(tl.uint32) if NARROW else index.to(tl.uint64)
    place = index * 0
    for step in tl.static_range(DIMS - 1):
        size = tl.load(layout + (DIMS - 1 - step)).to(rest.dtype)
        place += (rest % size).to(tl.int64) * tl.load(layout + (2 * DIMS - 1 - step))
        rest = rest // size
    return place + rest.to(tl.int64) * tl.load(layout + DIMS)


@triton.jit
def _read(
    pointer, start, k, ok, layout, PARTS: tl.constexpr, ALIGNED: tl.constexpr, DIMS: tl.constexpr, NARROW: tl.constexpr
):
    """Integers at the places start + k, where an element is PARTS of them; 0 where not ok."""
    if DIMS == 0:
        if ALIGNED:
            start = tl.multiple_of(start, 16)
        return tl.load(pointer + start + k, mask=ok, other=0)
    index = tl.where(ok, start + k, 0)
    place = _place(index // PARTS, layout, DIMS, NARROW) * PARTS + index % PARTS
    return tl.load(pointer + place, mask=ok, other=0)


@triton.jit
def _number(bits, lookup, KIND: tl.constexpr):
    """What bits stand for, as float32 or float64."""
    if KIND == _F32:
        return bits.to(tl.float32, bitcast=True)
    elif KIND == _F16:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == _BF16:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == _TABLE:
        return tl.load(lookup + bits.to(tl.int32))
    elif KIND == _I8:
        return bits.to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == _I16:
        return bits.to(tl.int16, bitcast=True).to(tl.float32)
    elif KIND < _F64:
        return bits.to(tl.float32)
    elif KIND == _F64:
        return bits.to(tl.float64, bitcast=True)
    elif KIND == _I32:
        return bits.to(tl.int32, bitcast=True).to(tl.float64)
    elif KIND == _I64:
        return bits.to(tl.int64, bitcast=True).to(tl.float64)
    else:
        return bits.to(tl.float64)


@triton.jit
def _sum(x):
    """Of a tile: first each thread's own column, then over the threads."""
    return tl.sum(tl.sum(x, axis=0), axis=0)


@triton.jit
def _scale(largest, WIDE: tl.constexpr):
    """A power of two that brings a number to about one, and the other way back, as float64."""
    if WIDE:
        exponent = (largest.to(tl.int64, bitcast=True) >> 52) & 0x7FF
        exponent = tl.minimum(tl.maximum(exponent, 23), 2023)
        scale = ((2046 - exponent) << 52).to(tl.float64, bitcast=True)
        back = (exponent << 52).to(tl.float64, bitcast=True)
    else:
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
        exponent = tl.minimum(tl.maximum(exponent, 7), 247)
        scale = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        back = (exponent << 23).to(tl.float32, bitcast=True).to(tl.float64)
    return scale, back


@triton.jit
def _modulus(re, im):
    """Absolute values of complex numbers, float64, scaled by powers of two so that squares stay within range."""
    a = tl.abs(re)
    b = tl.abs(im)
    scale, back = _scale(tl.where(a > b, a, b), True)
    a = a * scale
    b = b * scale
    square = a * a + b * b
    # A square root in float64 takes a call, and memory for it; this is right to the last digit or two.
    usual = (square > 0) & (square < float("inf"))
    share = tl.rsqrt(tl.where(usual, square, 1.0).to(tl.float32)).to(tl.float64)
    for _ in tl.static_range(2):
        share = share * (1.5 - 0.5 * square * share * share)
    size = tl.where(usual, square * share, square) * back
    return tl.where((re != re) | (im != im), float("nan"), size)


@triton.jit
def _inverse(n, WIDE: tl.constexpr):
    """One over a count, without the division in float64 that takes a call, and memory for it."""
    share = 1.0 / n.to(tl.float32)
    if WIDE:
        share = share.to(tl.float64)
        for _ in tl.static_range(2):  # each step of Newton's doubles the digits that are right
            share = share * (2.0 - n.to(tl.float64) * share)
    return share


@triton.jit
def _checksum_tile(raw, bits, ok, block, factor, shift, ROWS: tl.constexpr):
    """Add a tile of words to the column sums; block is the number of its first row's block."""
    number = (block + 1 + tl.arange(0, ROWS)).to(tl.uint64)
    key = _mix(number * _G)
    z = bits.to(tl.uint32).to(tl.uint64) * factor[None, :]
    z = z + shift[None, :]  # added one by one, so that all of it stays where the elements were loaded to
    z = z + key[:, None]
    h = (z & _LOW) * (z >> 32) + z
    return raw + tl.sum(tl.where(ok, h, 0).to(tl.int64), axis=0)


@triton.jit
def _sketch_tile(
    sums,
    pointer,
    start,
    block,
    low,
    high,
    layout,
    lookup,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Add a tile of components to the sums of its columns, shape (8, 64).

    Args:
        sums: float64.
        pointer: to the first component.
        start: the tile's first component, counted from there.
        block: number of its first block of 64.
        low: its first component to be read, counted from the tile's first.
        high: the one behind its last.
        layout: as for `summarise`.
        lookup: as for `summarise`.
        KIND: as for `summarise`.
        PARTS: as for `summarise`.
        ROWS: as for `summarise`.
        DIMS: as for `summarise`.
        NARROW: as for `summarise`.
    """
    PER_ROW: tl.constexpr = SPAN // BLOCK
    lane = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((PER_ROW, BLOCK), dtype=tl.float64 if KIND >= _F64 else tl.float32)
    for step in range(ROWS):
        # Row by row, since the hashes of a whole tile would not fit into registers.
        u = step * PER_ROW + tl.arange(0, PER_ROW)[:, None]
        one = ((block + 1 + u).to(tl.uint64)) * _HASH_1
        one = (one ^ (one >> _SHIFT)) * _HASH_2
        two = (one ^ (one >> _SHIFT)) * _HASH_3
        two = two ^ (two >> _SHIFT)
        place = lane ^ (one >> _ROTATION).to(tl.int32)
        k = u * BLOCK + place
        bits = _read(pointer, start, k, (k >= low) & (k < high), layout, PARTS, False, DIMS, NARROW)
        x = _number(bits, lookup, KIND)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        # The bit of the sign, shifted to where a 32-bit number has its own; low places are in the low half.
        half = tl.where(lane < 32, two & _LOW, two >> 32).to(tl.uint32)
        sign = half << (31 - (place & 31)).to(tl.uint32)
        if x.dtype == tl.float32:
            x = (x.to(tl.uint32, bitcast=True) ^ (sign & 0x80000000)).to(tl.float32, bitcast=True)
        else:
            x = tl.where(sign >= 0x80000000, -x, x)
        total += x
    return sums + total.to(tl.float64)


@triton.jit
def _store_moments(real, low, high, mean, m2, m3, m4):
    """Write moments; where all elements are equal, rounding must not make a spread of it."""
    alike = low == high
    tl.store(real + _MEAN, tl.where(alike, low, mean))
    tl.store(real + _M2, tl.where(alike | (m2 < 0), 0.0, m2))
    tl.store(real + _M3, tl.where(alike, 0.0, m3))
    tl.store(real + _M4, tl.where(alike | (m4 < 0), 0.0, m4))


@triton.jit
def _merge(
    scratch,
    row,
    first,
    programs,
    STATS: tl.constexpr,
    SKETCH: tl.constexpr,
):
    """Add up the rows of a tensor's programs, all about one mean, and write the tensor's row.

    Lines of scratch are read past the first-level cache, which does not see what others wrote.
    """
    lane = tl.arange(0, MERGED)
    lines = scratch.to(tl.pointer_type(tl.int64)) + (first + lane) * WORDS
    floats = scratch.to(tl.pointer_type(tl.float64)) + (first + lane) * WORDS
    out = row.to(tl.pointer_type(tl.int64))
    real = row.to(tl.pointer_type(tl.float64))
    raw = tl.zeros((MERGED,), dtype=tl.int64)
    for at in range(0, programs, MERGED):
        raw += tl.load(lines + at * WORDS, mask=at + lane < programs, other=0, cache_modifier=".cg")
    tl.store(out, tl.sum(raw, axis=0))
    if STATS:
        for word in tl.static_range(_FINITE, _ZEROS + 1):
            total = tl.zeros((MERGED,), dtype=tl.int64)
            for at in range(0, programs, MERGED):
                total += tl.load(lines + at * WORDS + word, mask=at + lane < programs, other=0, cache_modifier=".cg")
            tl.store(out + word, tl.sum(total, axis=0))
        count = tl.zeros((MERGED,), dtype=tl.float64)
        low = tl.full((MERGED,), float("inf"), dtype=tl.float64)
        high = tl.full((MERGED,), float("-inf"), dtype=tl.float64)
        small = tl.full((MERGED,), float("inf"), dtype=tl.float64)
        sizes = tl.zeros((MERGED,), dtype=tl.float64)
        # Any mean will do to count from, as long as it is one: that of the first program with an element.
        origin = tl.full((), float("inf"), dtype=tl.float64)
        for at in range(0, programs, MERGED):
            ok = at + lane < programs
            n = tl.load(lines + at * WORDS + _FINITE, mask=ok, other=0, cache_modifier=".cg").to(tl.float64)
            mean = tl.load(floats + at * WORDS + _MEAN, mask=ok, other=0.0, cache_modifier=".cg")
            origin = tl.minimum(origin, tl.min(tl.where(n > 0, mean, float("inf")), axis=0))
            low = tl.minimum(
                low, tl.load(floats + at * WORDS + _MIN, mask=ok, other=float("inf"), cache_modifier=".cg")
            )
            high = tl.maximum(
                high, tl.load(floats + at * WORDS + _MAX, mask=ok, other=float("-inf"), cache_modifier=".cg")
            )
            small = tl.minimum(
                small, tl.load(floats + at * WORDS + _ABSMIN, mask=ok, other=float("inf"), cache_modifier=".cg")
            )
            sizes += tl.load(floats + at * WORDS + _ABSSUM, mask=ok, other=0.0, cache_modifier=".cg")
            count += n
        n_all = tl.sum(count, axis=0)
        origin = tl.where(n_all > 0, origin, 0.0)
        away = tl.zeros((MERGED,), dtype=tl.float64)
        for at in range(0, programs, MERGED):
            ok = at + lane < programs
            n = tl.load(lines + at * WORDS + _FINITE, mask=ok, other=0, cache_modifier=".cg").to(tl.float64)
            mean = tl.load(floats + at * WORDS + _MEAN, mask=ok, other=0.0, cache_modifier=".cg")
            away += tl.where(n > 0, n * (mean - origin), 0.0)
        mean_all = origin + tl.sum(away, axis=0) * _inverse(tl.where(n_all > 0, n_all, 1.0), True)
        s2 = tl.zeros((MERGED,), dtype=tl.float64)
        s3 = tl.zeros((MERGED,), dtype=tl.float64)
        s4 = tl.zeros((MERGED,), dtype=tl.float64)
        for at in range(0, programs, MERGED):
            ok = at + lane < programs
            n = tl.load(lines + at * WORDS + _FINITE, mask=ok, other=0, cache_modifier=".cg").to(tl.float64)
            mean = tl.load(floats + at * WORDS + _MEAN, mask=ok, other=0.0, cache_modifier=".cg")
            m2 = tl.load(floats + at * WORDS + _M2, mask=ok, other=0.0, cache_modifier=".cg")
            m3 = tl.load(floats + at * WORDS + _M3, mask=ok, other=0.0, cache_modifier=".cg")
            m4 = tl.load(floats + at * WORDS + _M4, mask=ok, other=0.0, cache_modifier=".cg")
            d = tl.where(n > 0, mean - mean_all, 0.0)
            s2 += m2 + n * d * d
            s3 += m3 + 3.0 * d * m2 + n * d * d * d
            s4 += m4 + 4.0 * d * m3 + 6.0 * d * d * m2 + n * d * d * d * d
        least = tl.min(low, axis=0)
        most = tl.max(high, axis=0)
        tl.store(real + _MIN, least)
        tl.store(real + _MAX, most)
        tl.store(real + _ABSMIN, tl.min(small, axis=0))
        _store_moments(real, least, most, mean_all, tl.sum(s2, axis=0), tl.sum(s3, axis=0), tl.sum(s4, axis=0))
        tl.store(real + _ABSSUM, tl.sum(sizes, axis=0))
    else:
        _no_stats(row)
    tl.store(real + _MEDIAN, float("nan"))
    tl.store(real + _MODE, float("nan"))
    bucket = tl.arange(0, 16)
    total = tl.zeros((MERGED // 16, 16), dtype=tl.float64)
    if SKETCH:
        line = tl.arange(0, MERGED // 16)[:, None]
        places = scratch.to(tl.pointer_type(tl.float64)) + (first + line) * WORDS + (_SKETCH + bucket[None, :])
        for at in range(0, programs, MERGED // 16):
            total += tl.load(places + at * WORDS, mask=at + line < programs, other=0.0, cache_modifier=".cg")
    tl.store(real + _SKETCH + bucket, tl.sum(total, axis=0))


@triton.jit
def _no_stats(row):
    """What a row says of no element."""
    out = row.to(tl.pointer_type(tl.int64))
    real = row.to(tl.pointer_type(tl.float64))
    for word in tl.static_range(_FINITE, _ZEROS + 1):
        tl.store(out + word, tl.zeros((), dtype=tl.int64))
    tl.store(real + _MIN, float("inf"))
    tl.store(real + _MAX, float("-inf"))
    tl.store(real + _ABSMIN, float("inf"))
    for word in tl.static_range(_MEAN, _ABSSUM + 1):
        tl.store(real + word, 0.0)


@triton.jit
def summarise(
    items,
    owners,
    address,
    count,
    first,
    layout,
    row,
    scratch,
    counters,
    factors,
    shifts,
    lookup,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    STATS: tl.constexpr,
    SKETCH: tl.constexpr,
    MANY: tl.constexpr,
    ALIGNED: tl.constexpr,
    DIMS: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Summarise one tensor, or the tensors of a table.

    Args:
        items: of a table: ITEM_WORDS words each.
        owners: of a table: the item that each program works on.
        address: of the first element.
        count: elements.
        first: index of the first in the whole tensor.
        layout: address of DIMS sizes and DIMS strides.
        row: address of the row to write.
        scratch: address of a row for each program.
        counters: address of a count for each item, 0 before and after.
        factors: of the checksum.
        shifts: of the checksum.
        lookup: values of the 256 bytes of a type that has no arithmetic.
        KIND: of the components.
        SIZE: bytes of a component.
        PARTS: components of an element.
        ROWS: rows of a tile.
        STATS: whether to compute statistics.
        SKETCH: whether to compute the sketch.
        MANY: whether there is a table.
        ALIGNED: whether address, first and count are multiples of 16.
        DIMS: dimensions of the layout; 0 for contiguous elements.
        NARROW: whether a tensor has fewer than 2**31 elements.
    """
    WIDE: tl.constexpr = KIND >= _F64 or PARTS == 2
    REAL: tl.constexpr = tl.float64 if WIDE else tl.float32
    TILE: tl.constexpr = ROWS * SPAN
    BYTES: tl.constexpr = SIZE * PARTS
    WORD: tl.constexpr = 4 if BYTES > 4 else BYTES  # noqa: FURB136  # no min() of constants there
    PER: tl.constexpr = BYTES // WORD

    # The interpreter takes small numbers for 32 bits wide.
    items, owners, address, layout = items.to(tl.int64), owners.to(tl.int64), address.to(tl.int64), layout.to(tl.int64)
    count, first, lookup = count.to(tl.int64), first.to(tl.int64), lookup.to(tl.int64)
    me = tl.program_id(0)
    group = me * 0
    programs = tl.num_programs(0)
    alike = programs
    counter = counters.to(tl.pointer_type(tl.int32))
    if MANY:
        item = tl.load(owners.to(tl.pointer_type(tl.int32)) + me)
        entry = items.to(tl.pointer_type(tl.int64)) + item.to(tl.int64) * ITEM_WORDS
        address = tl.load(entry)
        count = tl.load(entry + 1)
        first = tl.load(entry + 2)
        layout = tl.load(entry + 3)
        row = tl.load(entry + 4)
        begun = tl.load(entry + 5).to(tl.int32)
        programs = tl.load(entry + 6).to(tl.int32)
        group = tl.load(entry + 7).to(tl.int32)
        alike = tl.load(entry + 8).to(tl.int32)
        counter += group
        number = me - begun
    else:
        number = me
    if ALIGNED:
        count = tl.multiple_of(count, 16)
        first = tl.multiple_of(first, 16)
    sizes_strides = layout.to(tl.pointer_type(tl.int64))
    table = lookup.to(tl.pointer_type(tl.float32))

    # Tiles begin at multiples of 512 of the index in the whole tensor, some elements before the first.
    skip = first % SPAN
    origin = first - skip
    end = skip + count
    tiles = ((end + (TILE - 1)) // TILE).to(tl.int32)
    each = (tiles + programs - 1) // programs
    begin = number * each
    stop = tl.minimum(begin + each, tiles)

    column = tl.arange(0, SPAN)
    factor = tl.load(factors.to(tl.pointer_type(tl.uint32)) + column).to(tl.uint64)
    shift = tl.load(shifts.to(tl.pointer_type(tl.uint64)) + column)
    raw = tl.zeros((SPAN,), dtype=tl.int64)
    sums = tl.zeros((SPAN // BLOCK, BLOCK), dtype=tl.float64)
    finite = tl.zeros((), dtype=tl.int32)
    nans = finite
    posinfs = finite
    neginfs = finite
    zeros = tl.zeros((SPAN,), dtype=tl.int32)
    lows = tl.full((SPAN,), float("inf"), dtype=REAL)
    smalls = lows
    highs = -lows
    sizes = tl.zeros((), dtype=tl.float64)
    pivot = sizes
    s1 = sizes
    s2 = sizes
    s3 = sizes
    s4 = sizes
    k = tl.arange(0, ROWS)[:, None] * SPAN + column[None, :]
    for tile in range(begin, stop):
        start = (begin * 0 + tile).to(tl.int64) * TILE
        local = start - skip
        head = tl.maximum(skip - start, 0).to(tl.int32)
        tail = tl.minimum(end - start, TILE).to(tl.int32)
        if ALIGNED:
            head = tl.multiple_of(head, 16)
            tail = tl.multiple_of(tail, 16)
        ok = (k >= head) & (k < tail)
        bits = (
            _read(_pointer(address, WORD, ALIGNED), local * PER, k, ok, sizes_strides, PER, ALIGNED, DIMS, NARROW)
            if PER == 1
            else tl.zeros((ROWS, SPAN), dtype=tl.uint32)
        )
        block = (origin + start) // SPAN
        if PER == 1:
            raw = _checksum_tile(raw, bits, ok, block, factor, shift, ROWS)
        else:
            for part in tl.static_range(PER):
                at = k + part * TILE
                some = (at >= head * PER) & (at < tail * PER)
                word = _read(
                    _pointer(address, WORD, ALIGNED), local * PER, at, some, sizes_strides, PER, ALIGNED, DIMS, NARROW
                )
                raw = _checksum_tile(raw, word, some, block * PER + part * ROWS, factor, shift, ROWS)
        if SKETCH:
            for part in tl.static_range(PARTS):
                sums = _sketch_tile(
                    sums,
                    _pointer(address, SIZE, ALIGNED),
                    local * PARTS + part * TILE,
                    (block * PARTS + part * ROWS) * (SPAN // BLOCK),
                    head * PARTS - part * TILE,
                    tail * PARTS - part * TILE,
                    sizes_strides,
                    table,
                    KIND,
                    PARTS,
                    ROWS,
                    DIMS,
                    NARROW,
                )
        if STATS:
            pointer = _pointer(address, SIZE, ALIGNED)
            if PARTS == 2:
                re = _read(pointer, local * 2, 2 * k, ok, sizes_strides, 2, ALIGNED, DIMS, NARROW)
                im = _read(pointer, local * 2, 2 * k + 1, ok, sizes_strides, 2, False, DIMS, NARROW)
                x = _modulus(_number(re, table, KIND).to(tl.float64), _number(im, table, KIND).to(tl.float64))
            elif PER == 1:
                x = _number(bits, table, KIND)
            else:
                x = _number(_read(pointer, local, k, ok, sizes_strides, 1, ALIGNED, DIMS, NARROW), table, KIND)
            n = tail - head
            # What to count from and the scale only have to be about right, so that float32 is enough for both.
            total = _sum(tl.abs(x))
            share = _inverse(n, WIDE)
            typical = total * share
            about = _sum(x) * share
            tile_sizes = total.to(tl.float64)
            if not (total < float("inf")):
                # Something is not finite: an element, or the sum of finite ones.
                nans += _sum((ok & (x != x)).to(tl.int32))
                posinfs += _sum((ok & (x == float("inf"))).to(tl.int32))
                neginfs += _sum((ok & (x == float("-inf"))).to(tl.int32))
                x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
                n = _sum((ok & (x == x)).to(tl.int32))
                share = _inverse(tl.maximum(n, 1), WIDE)
                total = _sum(tl.where(x == x, tl.abs(x), 0.0))
                typical = total * share
                about = _sum(tl.where(x == x, x, 0.0)) * share
                tile_sizes = total.to(tl.float64)
                if not (total < float("inf")):
                    total = _sum(tl.where(x == x, tl.abs(x) * _TINY, 0.0))
                    typical = total * share * _LARGE
                    about = _sum(tl.where(x == x, x * _TINY, 0.0)) * share * _LARGE
                    tile_sizes = total.to(tl.float64) * _LARGE
            good = ok & (x == x)
            lows = tl.minimum(lows, tl.min(tl.where(good, x, float("inf")), axis=0))
            highs = tl.maximum(highs, tl.max(tl.where(good, x, float("-inf")), axis=0))
            smalls = tl.minimum(smalls, tl.min(tl.where(good, tl.abs(x), float("inf")), axis=0))
            zeros += tl.sum((ok & (x == 0)).to(tl.int32), axis=0)
            sizes += tile_sizes
            # No element is larger than the sum of sizes, so no power of what is scaled by their mean overflows.
            scale, back = _scale(typical, WIDE)
            d = tl.where(good, x * scale - about * scale, 0.0)
            square = d * d
            p1 = _sum(d).to(tl.float64) * back
            p2 = _sum(square).to(tl.float64) * back * back
            p3 = _sum(square * d).to(tl.float64) * back * back * back
            p4 = _sum(square * square).to(tl.float64) * back * back * back * back
            pivot = tl.where(finite == 0, about.to(tl.float64), pivot)
            u = tl.where(n > 0, about.to(tl.float64) - pivot, 0.0)
            m = n.to(tl.float64)
            s4 += p4 + 4.0 * u * p3 + 6.0 * u * u * p2 + 4.0 * u * u * u * p1 + m * u * u * u * u
            s3 += p3 + 3.0 * u * p2 + 3.0 * u * u * p1 + m * u * u * u
            s2 += p2 + 2.0 * u * p1 + m * u * u
            s1 += p1 + m * u
            finite += n

    # A tensor of one program has its row at once; others leave theirs for the last to arrive.
    mine = row
    if alike > 1:
        mine = scratch + me.to(tl.int64) * (8 * WORDS)
    out = mine.to(tl.pointer_type(tl.int64))
    real = mine.to(tl.pointer_type(tl.float64))
    tl.store(out, tl.sum(raw, axis=0))
    if STATS:
        n_all = finite.to(tl.float64)
        u = s1 * _inverse(tl.maximum(finite, 1), True)
        m2 = s2 - n_all * u * u
        tl.store(out + _FINITE, finite.to(tl.int64))
        tl.store(out + _NANS, nans.to(tl.int64))
        tl.store(out + _POSINFS, posinfs.to(tl.int64))
        tl.store(out + _NEGINFS, neginfs.to(tl.int64))
        m3 = s3 - 3.0 * u * s2 + 2.0 * n_all * u * u * u
        m4 = s4 - 4.0 * u * s3 + 6.0 * u * u * s2 - 3.0 * n_all * u * u * u * u
        low = tl.min(lows, axis=0).to(tl.float64)
        high = tl.max(highs, axis=0).to(tl.float64)
        tl.store(out + _ZEROS, tl.sum(zeros.to(tl.int64), axis=0))
        tl.store(real + _MIN, low)
        tl.store(real + _MAX, high)
        tl.store(real + _ABSMIN, tl.min(smalls, axis=0).to(tl.float64))
        _store_moments(real, low, high, pivot + u, m2, m3, m4)
        tl.store(real + _ABSSUM, sizes)
    else:
        _no_stats(mine)
    tl.store(real + _MEDIAN, float("nan"))
    tl.store(real + _MODE, float("nan"))
    buckets = tl.sum(tl.reshape(sums, (SPAN // 16, 16)), axis=0)
    tl.store(real + _SKETCH + tl.arange(0, 16), buckets)
    if alike > 1:
        tl.debug_barrier()
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == alike - 1:
            tl.debug_barrier()
            _merge(scratch, row, group.to(tl.int64), alike, STATS, SKETCH)
            tl.atomic_xchg(counter, 0)
