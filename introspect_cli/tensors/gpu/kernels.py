"""The Triton kernels: elements as numbers, the merging of partial rows, and the summary of a tensor."""

from __future__ import annotations

import triton
import triton.language as tl

from introspect_cli.tensors import checksum, sketch
from introspect_cli.tensors import kernels as types
from introspect_cli.tensors import rows as r

# ---
# Elements of a tensor on a GPU: where they lie, the integers that are there, and the numbers that these stand for.

_MIX_1 = tl.constexpr(checksum.MIX_1)
_MIX_2 = tl.constexpr(checksum.MIX_2)

_F32 = tl.constexpr(types.F32)
_F16 = tl.constexpr(types.F16)
_BF16 = tl.constexpr(types.BF16)
_TABLE = tl.constexpr(types.TABLE)
_I8 = tl.constexpr(types.I8)
_I16 = tl.constexpr(types.I16)
F64 = tl.constexpr(types.F64)
_I32 = tl.constexpr(types.I32)
_I64 = tl.constexpr(types.I64)


@triton.jit
def mixed(z):
    """`checksum.mix` of uint64 values, elementwise."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def pointer_to(null, address, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to unsigned integers of SIZE bytes at `address`, a multiple of SIZE; ALIGNED says that it is one of 16.

    The compiler forgets what a number was a multiple of when it is cast to a pointer, and then reads elements one by
    one; what is added to a pointer it remembers, so that the address is added to a null pointer.
    """
    if SIZE == 1:
        pointer = null.to(tl.pointer_type(tl.uint8))
    elif SIZE == 2:
        pointer = null.to(tl.pointer_type(tl.uint16))
    elif SIZE == 4:
        pointer = null.to(tl.pointer_type(tl.uint32))
    else:
        pointer = null.to(tl.pointer_type(tl.uint64))
    offset = address // SIZE
    if ALIGNED:
        # Four elements a thread, of any size: with more, the checksum's factors would not fit into registers.
        offset = tl.multiple_of(offset, 4 if SIZE < 8 else 2)
    return pointer + offset


@triton.jit
def integers(pointer, start, k, ok, FULL: tl.constexpr):
    """Load the integers at the places start + k, counted from `pointer`; 0 where not `ok`. FULL says that all are."""
    if FULL:
        return tl.load(pointer + start + k)
    return tl.load(pointer + start + k, mask=ok, other=0)


@triton.jit
def number_of(bits, lookup, KIND: tl.constexpr):
    """Value of stored bits, as float64 for type codes from F64 on, else as float32; `lookup` is the table of TABLE."""
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
    elif KIND < F64:
        return bits.to(tl.float32)
    elif KIND == F64:
        return bits.to(tl.float64, bitcast=True)
    elif KIND == _I32:
        return bits.to(tl.int32, bitcast=True).to(tl.float64)
    elif KIND == _I64:
        return bits.to(tl.int64, bitcast=True).to(tl.float64)
    else:
        return bits.to(tl.float64)


@triton.jit
def transpose(null, address, target, rows, columns, SIZE: tl.constexpr, ALIGNED: tl.constexpr, EDGE: tl.constexpr):
    """Copy adjacent matrices transposed, one tile in each program.

    A copy that follows the strides of one side reads or writes elements far apart, each with the memory around it for
    nothing: torch's reaches a sixth of this one, which reads along rows and writes along columns.

    Args:
        null: 0, as a pointer.
        address: of the first element.
        target: address of the first element of the copy.
        rows: of a matrix.
        columns: of a matrix, side by side in memory.
        SIZE: bytes of an element.
        ALIGNED: whether rows and columns are multiples of 4, and addresses of 16.
        EDGE: rows and columns of a tile.
    """
    # The interpreter takes small numbers for 32 bits wide.
    address, target, rows, columns = address.to(tl.int64), target.to(tl.int64), rows.to(tl.int64), columns.to(tl.int64)
    if not null.dtype.is_ptr():
        null = null.to(tl.int64)
    me = tl.program_id(0).to(tl.int64)
    across = (columns + (EDGE - 1)) // EDGE
    down = (rows + (EDGE - 1)) // EDGE
    begin = me // (across * down) * rows * columns
    i = (me // across % down * EDGE + tl.arange(0, EDGE))[:, None]
    j = (me % across * EDGE + tl.arange(0, EDGE))[None, :]
    ok = (i < rows) & (j < columns)
    tile = tl.load(pointer_to(null, address, SIZE, ALIGNED) + begin + i * columns + j, mask=ok)
    tl.store(pointer_to(null, target, SIZE, ALIGNED) + begin + j * rows + i, tile, mask=ok)


# ---
# The rows of a tensor's programs, added up to the tensor's row: in one order, so to the same bits.

MERGED = tl.constexpr(512)
"""Rows of programs that are added up at once."""
WORDS = tl.constexpr(r.WORDS)

FINITE = tl.constexpr(r.FINITE)
NANS = tl.constexpr(r.NANS)
POSINFS = tl.constexpr(r.POSINFS)
NEGINFS = tl.constexpr(r.NEGINFS)
ZEROS = tl.constexpr(r.ZEROS)
MIN = tl.constexpr(r.MIN)
MAX = tl.constexpr(r.MAX)
ABSMIN = tl.constexpr(r.ABSMIN)
MEAN = tl.constexpr(r.MEAN)
M2 = tl.constexpr(r.M2)
M3 = tl.constexpr(r.M3)
M4 = tl.constexpr(r.M4)
ABSSUM = tl.constexpr(r.ABSSUM)
MEDIAN = tl.constexpr(r.MEDIAN)
MODE = tl.constexpr(r.MODE)
SKETCH_WORD = tl.constexpr(r.SKETCH)


@triton.jit
def inverse_of(n, WIDE: tl.constexpr):
    """1 / n, as float64 if WIDE, else float32: by Newton's method, since a float64 division takes a call and memory."""
    share = 1.0 / n.to(tl.float32)
    if WIDE:
        share = share.to(tl.float64)
        for _ in tl.static_range(2):  # each step of Newton's doubles the digits that are right
            share = share * (2.0 - n.to(tl.float64) * share)
    return share


@triton.jit
def about_lower(n, s1, s2, s3, s4, u):
    """Sums of the first four powers of n deviations, about a point that is lower by u than the one they are of.

    All merging of moments is this: a tile's sums to its program's, these to the mean, a program's to its tensor's.
    """
    m1 = s1 + n * u
    m2 = s2 + 2.0 * u * s1 + n * u * u
    m3 = s3 + 3.0 * u * s2 + 3.0 * u * u * s1 + n * u * u * u
    m4 = s4 + 4.0 * u * s3 + 6.0 * u * u * s2 + 4.0 * u * u * u * s1 + n * u * u * u * u
    return m1, m2, m3, m4


@triton.jit
def write_moments(real, apart, low, high, mean, m2, m3, m4):
    """Write mean and central moments to a row; where all elements are equal (`low` == `high`), no spread by rounding.

    `real` is the address of the row's word 0, and `apart` how many words lie from one word of the row to the next.
    """
    alike = low == high
    tl.store(real + MEAN * apart, tl.where(alike, low, mean))
    tl.store(real + M2 * apart, tl.where(alike | (m2 < 0), 0.0, m2))
    tl.store(real + M3 * apart, tl.where(alike, 0.0, m3))
    tl.store(real + M4 * apart, tl.where(alike | (m4 < 0), 0.0, m4))


@triton.jit
def _load_word(pointer, programs, at, lane, word, other):
    """Word number `word` of the rows of programs `at + lane`, which lie word by word; `other` from `programs` on."""
    return tl.load(pointer + word * programs + at + lane, mask=at + lane < programs, other=other)


@triton.jit
def two_sums(a, b):
    """The sums of two arrays over their first dimension: together, so that threads wait for one another once."""
    return tl.split(tl.sum(tl.join(a, b), axis=0))


@triton.jit
def merge(jobs):
    """Add up the rows of each tensor's programs, all about one mean, and write the tensor's row: a tensor a program.

    Words that do not wait for one another are asked for together, and lie in memory as the threads read them.

    Args:
        jobs: address of three words for each tensor: the address of its row, that of its programs' rows, and how many
            programs it has.
    """
    job = jobs.to(tl.pointer_type(tl.int64)) + tl.program_id(0) * 3
    row = tl.load(job)
    scratch = tl.load(job + 1)
    programs = tl.load(job + 2).to(tl.int32)
    lane = tl.arange(0, MERGED)
    floats = scratch.to(tl.pointer_type(tl.float64))
    lines = scratch.to(tl.pointer_type(tl.int64))
    out = row.to(tl.pointer_type(tl.int64))
    real = row.to(tl.pointer_type(tl.float64))
    # The words that are added up as integers are the first six.
    word = tl.arange(0, 8)
    counts = tl.zeros((8, MERGED // 4), dtype=tl.int64)
    line = tl.arange(0, MERGED // 4)[None, :]
    for at in range(0, programs, MERGED // 4):
        counts += _load_word(lines, programs, at, line, word[:, None], 0)
    totals = tl.sum(counts, axis=1)
    tl.store(out + word, totals, mask=word <= ZEROS)
    finite = tl.sum(tl.where(word == FINITE, totals, 0), axis=0)
    low = tl.full((MERGED,), float("inf"), dtype=tl.float64)
    high = tl.full((MERGED,), float("-inf"), dtype=tl.float64)
    small = low
    sizes = tl.zeros((MERGED,), dtype=tl.float64)
    for at in range(0, programs, MERGED):
        low = tl.minimum(low, _load_word(floats, programs, at, lane, MIN, float("inf")))
        high = tl.maximum(high, _load_word(floats, programs, at, lane, MAX, float("-inf")))
        small = tl.minimum(small, _load_word(floats, programs, at, lane, ABSMIN, float("inf")))
        sizes += _load_word(floats, programs, at, lane, ABSSUM, 0.0)
    share = inverse_of(tl.maximum(finite, 1), True)
    means = tl.zeros((MERGED,), dtype=tl.float64)
    for at in range(0, programs, MERGED):
        n = _load_word(lines, programs, at, lane, FINITE, 0).to(tl.float64)
        mean = _load_word(floats, programs, at, lane, MEAN, 0.0)
        means += tl.where(n > 0, n * share * mean, 0.0)
    mean_all, size = two_sums(means, sizes)
    s2 = tl.zeros((MERGED,), dtype=tl.float64)
    s3 = tl.zeros((MERGED,), dtype=tl.float64)
    s4 = tl.zeros((MERGED,), dtype=tl.float64)
    for at in range(0, programs, MERGED):
        n = _load_word(lines, programs, at, lane, FINITE, 0).to(tl.float64)
        d = tl.where(n > 0, _load_word(floats, programs, at, lane, MEAN, 0.0) - mean_all, 0.0)
        m2 = _load_word(floats, programs, at, lane, M2, 0.0)
        m3 = _load_word(floats, programs, at, lane, M3, 0.0)
        m4 = _load_word(floats, programs, at, lane, M4, 0.0)
        _, m2, m3, m4 = about_lower(n, 0.0, m2, m3, m4, d)
        s2 += m2
        s3 += m3
        s4 += m4
    least = tl.min(low, axis=0)
    most = tl.max(high, axis=0)
    tl.store(real + MIN, least)
    tl.store(real + MAX, most)
    tl.store(real + ABSMIN, tl.min(small, axis=0))
    m2, m4 = two_sums(s2, s4)
    write_moments(real, 1, least, most, mean_all, m2, tl.sum(s3, axis=0), m4)
    tl.store(real + ABSSUM, size)
    tl.store(real + MEDIAN, float("nan"))  # no kernel computes these
    tl.store(real + MODE, float("nan"))
    bucket = tl.arange(0, 16)
    total = tl.zeros((16, MERGED // 4), dtype=tl.float64)
    line = tl.arange(0, MERGED // 4)[None, :]
    for at in range(0, programs, MERGED // 4):
        total += _load_word(floats, programs, at, line, SKETCH_WORD + bucket[:, None], 0.0)
    tl.store(real + SKETCH_WORD + bucket, tl.sum(total, axis=1))


@triton.jit
def write_no_statistics(row, apart):
    """Write counts, extrema and moments of an empty tensor to the row at address `row`, words `apart` words apart."""
    out = row.to(tl.pointer_type(tl.int64))
    real = row.to(tl.pointer_type(tl.float64))
    for word in tl.static_range(FINITE, ZEROS + 1):
        tl.store(out + word * apart, tl.zeros((), dtype=tl.int64))
    tl.store(real + MIN * apart, float("inf"))
    tl.store(real + MAX * apart, float("-inf"))
    tl.store(real + ABSMIN * apart, float("inf"))
    for word in tl.static_range(MEAN, ABSSUM + 1):
        tl.store(real + word * apart, 0.0)


# ---
# Checksum, statistics and sketch of tensors on a GPU, in one launch and one pass over memory.
#
# Memory is what a summary on a GPU has to wait for, so elements are read once, in tiles that stay in registers; the
# sketch reads them again out of the cache, with the sixteen neighbours of a bucket row in the order of their buckets,
# so that no thread has to hand a number to another. A tile is R rows of 512 elements, and begins at a multiple of 512
# of the element's index in the whole tensor: a column then has one factor and one shift of the checksum, and one
# place in the sketch's blocks, and these stay in registers. Sums of a tile are in float32 about the tile's own mean,
# scaled by a power of two (types that float32 does not hold: in float64); a program adds tiles up in float64 about
# the mean of its first one, which loses no more than a factor of the number of tiles; and `merge` adds up the programs'
# rows, always in the same order. No float is added atomically, so the same tensor always has the same row. A lean pass
# sums up about the mean of the program's first tile, so that no thread waits for another from tile to tile.

SPAN = tl.constexpr(checksum.SPAN)
"""Elements in a row of a tile."""
BLOCK = tl.constexpr(sketch.BLOCK)
BUCKETS = tl.constexpr(16)
ITEM_WORDS = tl.constexpr(7)
"""Words in an item of a table: address, elements, index of the first in the whole tensor; its first program and how
many; its row's first program and how many."""
_TINY = tl.constexpr(2.0**-16)
_LARGE = tl.constexpr(2.0**16)
"""Bring the sum of a tile into range, and back."""
_FAINT = tl.constexpr(1e-28)
"""Sums of squares below which float32 may have lost some."""
_G = tl.constexpr(checksum.G)
_LOW = tl.constexpr(0xFFFFFFFF)
_HASH_1 = tl.constexpr(sketch.HASH_1)
_HASH_2 = tl.constexpr(sketch.HASH_2)
_HASH_3 = tl.constexpr(sketch.HASH_3)
_SHIFT = tl.constexpr(sketch.SHIFT)
_ROTATION = tl.constexpr(sketch.ROTATION_SHIFT)


@triton.jit
def _tile_sum(x):
    """Sum of a tile, shape (ROWS, 512), to one number: first each thread's own column, then over the threads."""
    return tl.sum(tl.sum(x, axis=0), axis=0)


@triton.jit
def _column_sums(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Sums over a tile, shape (ROWS, 512), in 128 parts: of the four columns that a thread has in each row.

    So no thread waits for another. The four lie side by side, but for elements of one byte (SIZE 1), which are not read
    in vectors.
    """
    if SIZE == 1:
        return tl.sum(tl.sum(tl.reshape(x, (ROWS, 4, SPAN // 4)), axis=1), axis=0)
    return tl.sum(tl.sum(tl.reshape(x, (ROWS, SPAN // 4, 4)), axis=2), axis=0)


@triton.jit
def _scales(largest, WIDE: tl.constexpr):
    """A power of two that brings a number of this size to about one, and its inverse as float64.

    `largest` is not negative: a float64 if WIDE, else a float32. The power has its type, and is bounded, so that
    neither overflows.
    """
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
def _checksum_terms(bits, block, keys, factor, shift, ROWS: tl.constexpr):
    """The checksum's terms of a tile of words, int64, shape (ROWS, 512).

    `bits` are the words; `block` is the number of the checksum block of the first row; `keys` is the address of the
    keys of all blocks from 0 on, 0 to compute them; `factor` and `shift` are those of the 512 columns.
    """
    if keys != 0:
        key = tl.load(keys.to(tl.pointer_type(tl.uint64)) + block + tl.arange(0, ROWS))
    else:
        key = mixed((block + 1 + tl.arange(0, ROWS)).to(tl.uint64) * _G)
    z = bits.to(tl.uint32).to(tl.uint64) * factor[None, :]
    z = z + shift[None, :]  # added one by one, so that all of it stays where the elements were loaded to
    z = z + key[:, None]
    return ((z & _LOW) * (z >> 32) + z).to(tl.int64)


@triton.jit
def _sketch_tile(
    sums,
    pointer,
    start,
    block,
    low,
    high,
    lookup,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    FINITE: tl.constexpr,
):
    """Add a tile's elements to sums of buckets, float64, shape (8, 16): a row for each block of 64 in a tile's row.

    `sums` are those so far. `start` is the tile's first element, counted from `pointer`; `block` the number of its
    first block of 64 in the whole tensor. Elements from `low` (inclusive) to `high` (exclusive) are read, counted from
    the tile's first; if FULL, all. If FINITE, none is looked at for being finite; else those that are not are left out.
    `lookup`, KIND and ROWS are as for `summarise`.
    """
    PER_ROW: tl.constexpr = SPAN // BLOCK
    bucket = tl.arange(0, BUCKETS)[None, :]
    for step in range(ROWS):
        # Row by row, since the hashes of a whole tile would not fit into registers.
        u = step * PER_ROW + tl.arange(0, PER_ROW)[:, None]
        one = ((block + 1 + u).to(tl.uint64)) * _HASH_1
        one = (one ^ (one >> _SHIFT)) * _HASH_2
        two = (one ^ (one >> _SHIFT)) * _HASH_3
        two = two ^ (two >> _SHIFT)
        turn = (one >> _ROTATION).to(tl.int32)
        place = u * BLOCK + (bucket ^ turn)
        shift = (31 - bucket) ^ turn
        total = tl.zeros((PER_ROW, BUCKETS), dtype=tl.float64 if KIND >= F64 else tl.float32)
        # Quarter by quarter of the blocks, so that a thread works a block's hashes out once for its four elements.
        for quarter in tl.static_range(BLOCK // BUCKETS):
            k = place + quarter * BUCKETS
            ok = True if FULL else (k >= low) & (k < high)
            x = number_of(integers(pointer, start, k, ok, FULL), lookup, KIND)
            if not FINITE:
                x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
            # The bit of the sign, shifted to where a 32-bit number has its own; low places are in the low half.
            half = (two >> (quarter // 2 * 32)).to(tl.uint32)
            sign = half << (shift - quarter % 2 * BUCKETS).to(tl.uint32)
            if x.dtype == tl.float32:
                x = (x.to(tl.uint32, bitcast=True) ^ (sign & 0x80000000)).to(tl.float32, bitcast=True)
            else:
                x = tl.where(sign >= 0x80000000, -x, x)
            total += x
        sums += total.to(tl.float64)
    return sums


@triton.jit
def summarise(
    null,
    items,
    owners,
    address,
    count,
    first,
    scratch,
    factors,
    shifts,
    keys,
    lookup,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HASHED: tl.constexpr,
    STATS: tl.constexpr,
    SKETCH: tl.constexpr,
    LEAN: tl.constexpr,
    MANY: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Summarise one tensor, or (MANY) those of a table; each of the programs that share one leaves a row for `merge`.

    Args:
        null: a pointer to address 0.
        items: address of the table's items, ITEM_WORDS words each; 0 without a table, as `owners`.
        owners: address of the number of the item that each program works on, int32.
        address: of the first element; this and the next two are the table's with a table.
        count: number of elements.
        first: index of the first element in the whole tensor.
        scratch: address of a row for each program, a tensor's word by word.
        factors: address of the checksum's factors.
        shifts: address of the checksum's shifts.
        keys: address of the keys of the checksum's blocks, for as many as are read; 0 where they are to be computed.
        lookup: address of the float32 values of the 256 bytes of a type that has no arithmetic.
        KIND: type code of the elements.
        SIZE: bytes of an element.
        ROWS: rows of a tile.
        HASHED: whether to compute the checksum.
        STATS: whether to compute statistics.
        SKETCH: whether to compute the sketch.
        LEAN: whether to leave out what costs most, without SKETCH: sketch, cubes and fourth powers are NaN.
        MANY: whether there is a table.
        ALIGNED: whether address, first and count are multiples of 16.
    """
    WIDE: tl.constexpr = KIND >= F64
    REAL: tl.constexpr = tl.float64 if WIDE else tl.float32
    TILE: tl.constexpr = ROWS * SPAN
    WORD: tl.constexpr = 4 if SIZE > 4 else SIZE  # noqa: FURB136  # no min() of constants there
    PER: tl.constexpr = SIZE // WORD

    # The interpreter takes small numbers for 32 bits wide.
    items, owners, address = items.to(tl.int64), owners.to(tl.int64), address.to(tl.int64)
    count, first, lookup = count.to(tl.int64), first.to(tl.int64), lookup.to(tl.int64)
    if not null.dtype.is_ptr():
        null = null.to(tl.int64)
    me = tl.program_id(0)
    group = me * 0
    programs = tl.num_programs(0)
    apart = programs
    if MANY:
        item = tl.load(owners.to(tl.pointer_type(tl.int32)) + me)
        entry = items.to(tl.pointer_type(tl.int64)) + item.to(tl.int64) * ITEM_WORDS
        address = tl.load(entry)
        count = tl.load(entry + 1)
        first = tl.load(entry + 2)
        begun = tl.load(entry + 3).to(tl.int32)
        programs = tl.load(entry + 4).to(tl.int32)
        group = tl.load(entry + 5).to(tl.int32)
        apart = tl.load(entry + 6).to(tl.int32)
        number = me - begun
    else:
        number = me
    if ALIGNED:
        count = tl.multiple_of(count, 16)
        first = tl.multiple_of(first, 16)
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
    factor = tl.load(pointer_to(null, factors, 4, True) + column).to(tl.uint64)
    shift = tl.load(pointer_to(null, shifts, 8, True) + column)
    raw = tl.zeros((SPAN,), dtype=tl.int64)
    sums = tl.full((SPAN // BLOCK, BUCKETS), float("nan") if LEAN else 0.0, dtype=tl.float64)
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
    s1 = tl.zeros((SPAN // 4,), dtype=tl.float64)
    s2 = s1
    s3 = s1 + float("nan") if LEAN else s1
    s4 = s3
    k = tl.arange(0, ROWS)[:, None] * SPAN + column[None, :]
    s0 = s1
    nothing = raw, finite, nans, posinfs, neginfs, zeros, lows, smalls, highs, sizes, s0, s1, s2
    careful = finite
    tile = begin
    while tile < stop:
        start = tile.to(tl.int64) * TILE
        local = start - skip
        head = tl.maximum(skip - start, 0).to(tl.int32)
        tail = tl.minimum(end - start, TILE).to(tl.int32)
        if ALIGNED:
            head = tl.multiple_of(head, 16)
            tail = tl.multiple_of(tail, 16)
            local = tl.multiple_of(local, 16)
        full = (head == 0) & (tail == TILE)
        block = (origin + start) // SPAN
        pointer = pointer_to(null, address, SIZE, ALIGNED)
        words = pointer_to(null, address, WORD, ALIGNED)
        if PER > 1:
            full = full & False
            for part in tl.static_range(PER):
                at = k + part * TILE
                ok = (at >= head * PER) & (at < tail * PER)
                if HASHED:
                    word = integers(words, local * PER, at, ok, False)
                    h = _checksum_terms(word, block * PER + part * ROWS, keys, factor, shift, ROWS)
                    raw += tl.sum(tl.where(ok, h, 0), axis=0)
            bits = tl.zeros((ROWS, SPAN), dtype=tl.uint32)
        elif full:
            bits = integers(words, local, k, True, True)
            raw += tl.sum(_checksum_terms(bits, block, keys, factor, shift, ROWS), axis=0)
        else:
            ok = (k >= head) & (k < tail)
            bits = integers(words, local, k, ok, False)
            raw += tl.sum(tl.where(ok, _checksum_terms(bits, block, keys, factor, shift, ROWS), 0), axis=0)
        usual = full
        if STATS:
            ok = (k >= head) & (k < tail)
            if PER > 1:
                bits = integers(pointer, local, k, ok, False)
            x = number_of(bits, table, KIND)
            n = tail - head
            quick = full & (careful == 0) if LEAN else False
            if quick:
                # No thread waits for another: all is about the mean of the first tile, and what is not finite shows.
                if finite == 0:
                    pivot = (_tile_sum(x) * (1.0 / TILE)).to(tl.float64)
                d = x - pivot.to(REAL)
                s0 += _column_sums(tl.abs(x), ROWS, SIZE).to(tl.float64)
                s1 += _column_sums(d, ROWS, SIZE).to(tl.float64)
                s2 += _column_sums(d * d, ROWS, SIZE).to(tl.float64)
                lows = tl.minimum(lows, tl.min(x, axis=0))
                highs = tl.maximum(highs, tl.max(x, axis=0))
                smalls = tl.minimum(smalls, tl.min(tl.abs(x), axis=0))
                zeros += tl.sum((x == 0).to(tl.int32), axis=0)
            else:
                # What to count from and the scale only have to be about right, so that float32 is enough for both.
                total, about = two_sums(tl.sum(tl.abs(x), axis=0), tl.sum(x, axis=0))
                share = inverse_of(n, WIDE)
                typical = total * share
                about = about * share
                tile_sizes = total.to(tl.float64)
                usual = usual & (total < float("inf"))
                if usual:
                    # The usual tile: nothing is left out, and nothing asks for each element whether to.
                    lows = tl.minimum(lows, tl.min(x, axis=0))
                    highs = tl.maximum(highs, tl.max(x, axis=0))
                    smalls = tl.minimum(smalls, tl.min(tl.abs(x), axis=0))
                    zeros += tl.sum((x == 0).to(tl.int32), axis=0)
                    scale, back = _scales(typical, WIDE)
                    d = x * scale - about * scale
                    m = tl.full((SPAN // 4,), 4 * ROWS, dtype=tl.float64)
                else:
                    if not (total < float("inf")):
                        # Something is not finite: an element, or the sum of finite ones.
                        nans += _tile_sum((ok & (x != x)).to(tl.int32))
                        posinfs += _tile_sum((ok & (x == float("inf"))).to(tl.int32))
                        neginfs += _tile_sum((ok & (x == float("-inf"))).to(tl.int32))
                        x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
                        n = _tile_sum((ok & (x == x)).to(tl.int32))
                        share = inverse_of(tl.maximum(n, 1), WIDE)
                        total = _tile_sum(tl.where(x == x, tl.abs(x), 0.0))
                        typical = total * share
                        about = _tile_sum(tl.where(x == x, x, 0.0)) * share
                        tile_sizes = total.to(tl.float64)
                        if not (total < float("inf")):
                            total = _tile_sum(tl.where(x == x, tl.abs(x) * _TINY, 0.0))
                            typical = total * share * _LARGE
                            about = _tile_sum(tl.where(x == x, x * _TINY, 0.0)) * share * _LARGE
                            tile_sizes = total.to(tl.float64) * _LARGE
                    good = ok & (x == x)
                    lows = tl.minimum(lows, tl.min(tl.where(good, x, float("inf")), axis=0))
                    highs = tl.maximum(highs, tl.max(tl.where(good, x, float("-inf")), axis=0))
                    smalls = tl.minimum(smalls, tl.min(tl.where(good, tl.abs(x), float("inf")), axis=0))
                    zeros += tl.sum((ok & (x == 0)).to(tl.int32), axis=0)
                    scale, back = _scales(typical, WIDE)
                    d = tl.where(good, x * scale - about * scale, 0.0)
                    m = _column_sums(good.to(tl.int32), ROWS, SIZE).to(tl.float64)
                sizes += tile_sizes
                # No element is larger than the sum of sizes, so no power of what is scaled by their mean overflows.
                square = d * d
                p1 = _column_sums(d, ROWS, SIZE).to(tl.float64) * back
                p2 = _column_sums(square, ROWS, SIZE).to(tl.float64) * back * back
                p3 = _column_sums(square * d, ROWS, SIZE).to(tl.float64) * back * back * back
                p4 = _column_sums(square * square, ROWS, SIZE).to(tl.float64) * back * back * back * back
                pivot = tl.where(finite == 0, about.to(tl.float64), pivot)
                u = tl.where(n > 0, about.to(tl.float64) - pivot, 0.0)
                p1, p2, p3, p4 = about_lower(m, p1, p2, p3, p4, u)
                if not LEAN:
                    s4 += p4
                    s3 += p3
                s2 += p2
                s1 += p1
            finite += n
        if SKETCH:
            cell = block * (SPAN // BLOCK)
            if usual:
                sums = _sketch_tile(sums, pointer, local, cell, 0, TILE, table, KIND, ROWS, True, STATS)
            else:
                sums = _sketch_tile(sums, pointer, local, cell, head, tail, table, KIND, ROWS, False, False)
        tile += 1
        if STATS and LEAN:  # noqa: SIM102  # known when it is compiled, unlike the rest
            if (tile == stop) & (careful == 0):
                right = (s0 + s2 < float("inf")) & ((s2 > _FAINT) | (s1 == 0))
                if tl.min(right.to(tl.int32), axis=0) == 0:
                    # Something is not finite, or its square is not: all of it once more, tile by tile.
                    careful += 1
                    tile = begin
                    raw, finite, nans, posinfs, neginfs, zeros, lows, smalls, highs, sizes, s0, s1, s2 = nothing

    # The rows of a tensor's programs lie word beside word.
    mine = scratch + (group.to(tl.int64) * WORDS + (me - group)) * 8
    out = mine.to(tl.pointer_type(tl.int64))
    real = mine.to(tl.pointer_type(tl.float64))
    tl.store(out, tl.sum(raw, axis=0))
    if STATS:
        if LEAN:
            sizes += tl.sum(s0, axis=0)
        s1, s2 = two_sums(s1, s2)
        s3, s4 = two_sums(s3, s4)
        n_all = finite.to(tl.float64)
        u = s1 * inverse_of(tl.maximum(finite, 1), True)
        _, m2, m3, m4 = about_lower(n_all, s1, s2, s3, s4, -u)
        tl.store(out + FINITE * apart, finite.to(tl.int64))
        tl.store(out + NANS * apart, nans.to(tl.int64))
        tl.store(out + POSINFS * apart, posinfs.to(tl.int64))
        tl.store(out + NEGINFS * apart, neginfs.to(tl.int64))
        low = tl.min(lows, axis=0).to(tl.float64)
        high = tl.max(highs, axis=0).to(tl.float64)
        tl.store(out + ZEROS * apart, tl.sum(zeros.to(tl.int64), axis=0))
        tl.store(real + MIN * apart, low)
        tl.store(real + MAX * apart, high)
        tl.store(real + ABSMIN * apart, tl.min(smalls, axis=0).to(tl.float64))
        write_moments(real, apart, low, high, pivot + u, m2, m3, m4)
        tl.store(real + ABSSUM * apart, sizes)
    else:
        write_no_statistics(mine, apart)
    tl.store(real + (SKETCH_WORD + tl.arange(0, BUCKETS)) * apart, tl.sum(sums, axis=0))
