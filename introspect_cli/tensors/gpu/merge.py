"""The rows of a tensor's programs, added up to the tensor's row: in one order, so to the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

from introspect_cli.tensors import rows as r

MERGED = tl.constexpr(128)
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
    """One over a count, without the division in float64 that takes a call, and memory for it."""
    share = 1.0 / n.to(tl.float32)
    if WIDE:
        share = share.to(tl.float64)
        for _ in tl.static_range(2):  # each step of Newton's doubles the digits that are right
            share = share * (2.0 - n.to(tl.float64) * share)
    return share


@triton.jit
def write_moments(real, low, high, mean, m2, m3, m4):
    """Write moments; where all elements are equal, rounding must not make a spread of it."""
    alike = low == high
    tl.store(real + MEAN, tl.where(alike, low, mean))
    tl.store(real + M2, tl.where(alike | (m2 < 0), 0.0, m2))
    tl.store(real + M3, tl.where(alike, 0.0, m3))
    tl.store(real + M4, tl.where(alike | (m4 < 0), 0.0, m4))


@triton.jit
def merge_programs(
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
        for word in tl.static_range(FINITE, ZEROS + 1):
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
            n = tl.load(lines + at * WORDS + FINITE, mask=ok, other=0, cache_modifier=".cg").to(tl.float64)
            mean = tl.load(floats + at * WORDS + MEAN, mask=ok, other=0.0, cache_modifier=".cg")
            origin = tl.minimum(origin, tl.min(tl.where(n > 0, mean, float("inf")), axis=0))
            low = tl.minimum(low, tl.load(floats + at * WORDS + MIN, mask=ok, other=float("inf"), cache_modifier=".cg"))
            high = tl.maximum(
                high, tl.load(floats + at * WORDS + MAX, mask=ok, other=float("-inf"), cache_modifier=".cg")
            )
            small = tl.minimum(
                small, tl.load(floats + at * WORDS + ABSMIN, mask=ok, other=float("inf"), cache_modifier=".cg")
            )
            sizes += tl.load(floats + at * WORDS + ABSSUM, mask=ok, other=0.0, cache_modifier=".cg")
            count += n
        n_all = tl.sum(count, axis=0)
        origin = tl.where(n_all > 0, origin, 0.0)
        away = tl.zeros((MERGED,), dtype=tl.float64)
        for at in range(0, programs, MERGED):
            ok = at + lane < programs
            n = tl.load(lines + at * WORDS + FINITE, mask=ok, other=0, cache_modifier=".cg").to(tl.float64)
            mean = tl.load(floats + at * WORDS + MEAN, mask=ok, other=0.0, cache_modifier=".cg")
            away += tl.where(n > 0, n * (mean - origin), 0.0)
        mean_all = origin + tl.sum(away, axis=0) * inverse_of(tl.where(n_all > 0, n_all, 1.0), True)
        s2 = tl.zeros((MERGED,), dtype=tl.float64)
        s3 = tl.zeros((MERGED,), dtype=tl.float64)
        s4 = tl.zeros((MERGED,), dtype=tl.float64)
        for at in range(0, programs, MERGED):
            ok = at + lane < programs
            n = tl.load(lines + at * WORDS + FINITE, mask=ok, other=0, cache_modifier=".cg").to(tl.float64)
            mean = tl.load(floats + at * WORDS + MEAN, mask=ok, other=0.0, cache_modifier=".cg")
            m2 = tl.load(floats + at * WORDS + M2, mask=ok, other=0.0, cache_modifier=".cg")
            m3 = tl.load(floats + at * WORDS + M3, mask=ok, other=0.0, cache_modifier=".cg")
            m4 = tl.load(floats + at * WORDS + M4, mask=ok, other=0.0, cache_modifier=".cg")
            d = tl.where(n > 0, mean - mean_all, 0.0)
            s2 += m2 + n * d * d
            s3 += m3 + 3.0 * d * m2 + n * d * d * d
            s4 += m4 + 4.0 * d * m3 + 6.0 * d * d * m2 + n * d * d * d * d
        least = tl.min(low, axis=0)
        most = tl.max(high, axis=0)
        tl.store(real + MIN, least)
        tl.store(real + MAX, most)
        tl.store(real + ABSMIN, tl.min(small, axis=0))
        write_moments(real, least, most, mean_all, tl.sum(s2, axis=0), tl.sum(s3, axis=0), tl.sum(s4, axis=0))
        tl.store(real + ABSSUM, tl.sum(sizes, axis=0))
    else:
        write_no_statistics(row)
    tl.store(real + MEDIAN, float("nan"))
    tl.store(real + MODE, float("nan"))
    bucket = tl.arange(0, 16)
    total = tl.zeros((MERGED // 16, 16), dtype=tl.float64)
    if SKETCH:
        line = tl.arange(0, MERGED // 16)[:, None]
        places = scratch.to(tl.pointer_type(tl.float64)) + (first + line) * WORDS + (SKETCH_WORD + bucket[None, :])
        for at in range(0, programs, MERGED // 16):
            total += tl.load(places + at * WORDS, mask=at + line < programs, other=0.0, cache_modifier=".cg")
    tl.store(real + SKETCH_WORD + bucket, tl.sum(total, axis=0))


@triton.jit
def write_no_statistics(row):
    """What a row says of no element."""
    out = row.to(tl.pointer_type(tl.int64))
    real = row.to(tl.pointer_type(tl.float64))
    for word in tl.static_range(FINITE, ZEROS + 1):
        tl.store(out + word, tl.zeros((), dtype=tl.int64))
    tl.store(real + MIN, float("inf"))
    tl.store(real + MAX, float("-inf"))
    tl.store(real + ABSMIN, float("inf"))
    for word in tl.static_range(MEAN, ABSSUM + 1):
        tl.store(real + word, 0.0)
