"""The rows of a tensor's programs, added up to the tensor's row: in one order, so to the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

from introspect_cli.tensors import rows as r

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
def _load_word(pointer, first, programs, at, lane, word, other):
    """Word number `word` of the rows of programs `at + lane`; `other` for those from `programs` on.

    `first` is the number of the tensor's first program: its programs' rows begin there, word by word. They are read
    past the first-level cache, which does not see what others wrote.
    """
    places = pointer + first * WORDS + word * programs + at + lane
    return tl.load(places, mask=at + lane < programs, other=other, cache_modifier=".cg")


@triton.jit
def two_sums(a, b):
    """The sums of two arrays over their first dimension: together, so that threads wait for one another once."""
    return tl.split(tl.sum(tl.join(a, b), axis=0))


@triton.jit
def merge_programs(scratch, row, first, programs, STATS: tl.constexpr, SKETCH: tl.constexpr):
    """Add up the rows of a tensor's programs, all about one mean, and write the tensor's row.

    `scratch` is the address of all programs' rows, `row` that of the row to write; `first` is the number of the
    tensor's first program, `programs` how many it has. The device is idle while this program works: so words that do
    not wait for one another are asked for together, and lie in memory as the threads read them.
    """
    lane = tl.arange(0, MERGED)
    floats = scratch.to(tl.pointer_type(tl.float64))
    lines = scratch.to(tl.pointer_type(tl.int64))
    out = row.to(tl.pointer_type(tl.int64))
    real = row.to(tl.pointer_type(tl.float64))
    if STATS:
        # The words that are added up as integers are the first six.
        word = tl.arange(0, 8)
        counts = tl.zeros((8, MERGED // 4), dtype=tl.int64)
        line = tl.arange(0, MERGED // 4)[None, :]
        for at in range(0, programs, MERGED // 4):
            counts += _load_word(lines, first, programs, at, line, word[:, None], 0)
        totals = tl.sum(counts, axis=1)
        tl.store(out + word, totals, mask=word <= ZEROS)
        finite = tl.sum(tl.where(word == FINITE, totals, 0), axis=0)
        low = tl.full((MERGED,), float("inf"), dtype=tl.float64)
        high = tl.full((MERGED,), float("-inf"), dtype=tl.float64)
        small = low
        sizes = tl.zeros((MERGED,), dtype=tl.float64)
        for at in range(0, programs, MERGED):
            low = tl.minimum(low, _load_word(floats, first, programs, at, lane, MIN, float("inf")))
            high = tl.maximum(high, _load_word(floats, first, programs, at, lane, MAX, float("-inf")))
            small = tl.minimum(small, _load_word(floats, first, programs, at, lane, ABSMIN, float("inf")))
            sizes += _load_word(floats, first, programs, at, lane, ABSSUM, 0.0)
        share = inverse_of(tl.maximum(finite, 1), True)
        means = tl.zeros((MERGED,), dtype=tl.float64)
        for at in range(0, programs, MERGED):
            n = _load_word(lines, first, programs, at, lane, FINITE, 0).to(tl.float64)
            mean = _load_word(floats, first, programs, at, lane, MEAN, 0.0)
            means += tl.where(n > 0, n * share * mean, 0.0)
        mean_all, size = two_sums(means, sizes)
        s2 = tl.zeros((MERGED,), dtype=tl.float64)
        s3 = tl.zeros((MERGED,), dtype=tl.float64)
        s4 = tl.zeros((MERGED,), dtype=tl.float64)
        for at in range(0, programs, MERGED):
            n = _load_word(lines, first, programs, at, lane, FINITE, 0).to(tl.float64)
            d = tl.where(n > 0, _load_word(floats, first, programs, at, lane, MEAN, 0.0) - mean_all, 0.0)
            m2 = _load_word(floats, first, programs, at, lane, M2, 0.0)
            m3 = _load_word(floats, first, programs, at, lane, M3, 0.0)
            m4 = _load_word(floats, first, programs, at, lane, M4, 0.0)
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
    else:
        raw = tl.zeros((MERGED,), dtype=tl.int64)
        for at in range(0, programs, MERGED):
            raw += _load_word(lines, first, programs, at, lane, 0, 0)
        tl.store(out, tl.sum(raw, axis=0))
        write_no_statistics(row)
    write_no_order(row)
    bucket = tl.arange(0, 16)
    total = tl.zeros((16, MERGED // 4), dtype=tl.float64)
    if SKETCH:
        line = tl.arange(0, MERGED // 4)[None, :]
        for at in range(0, programs, MERGED // 4):
            total += _load_word(floats, first, programs, at, line, SKETCH_WORD + bucket[:, None], 0.0)
    tl.store(real + SKETCH_WORD + bucket, tl.sum(total, axis=1))


@triton.jit
def write_no_order(row):
    """Write NaN for median and mode, which no kernel computes, to the row at address `row`."""
    real = row.to(tl.pointer_type(tl.float64))
    tl.store(real + MEDIAN, float("nan"))
    tl.store(real + MODE, float("nan"))


@triton.jit
def write_no_statistics(row):
    """Write counts, extrema and moments of an empty tensor to the row at address `row`."""
    out = row.to(tl.pointer_type(tl.int64))
    real = row.to(tl.pointer_type(tl.float64))
    for word in tl.static_range(FINITE, ZEROS + 1):
        tl.store(out + word, tl.zeros((), dtype=tl.int64))
    tl.store(real + MIN, float("inf"))
    tl.store(real + MAX, float("-inf"))
    tl.store(real + ABSMIN, float("inf"))
    for word in tl.static_range(MEAN, ABSSUM + 1):
        tl.store(real + word, 0.0)
