"""Statistics of one block that lies in the first-level cache, in jitted code.

The problem: moments in one pass lose everything to cancellation, and one NaN spoils a sum. The way: a first pass for
extent and sums, a second for powers of deviations from the block's own mean, scaled by a power of two to around one,
so that no power over- or underflows; blocks are merged in float64. A block whose sum of absolute values is not
finite, by what is in it or by overflow, goes through `careful` in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from introspect_cli.tensors import rows as r
from introspect_cli.tensors import vector
from introspect_cli.tensors.vector import inner, pointer


@inner  # type: ignore[untyped-decorator]
def merge_moments(row: Any, n_b: Any, mean_b: Any, m2_b: Any, m3_b: Any, m4_b: Any) -> Any:
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


@inner  # type: ignore[untyped-decorator]
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
    merge_moments(row, n, (pivot + u) * back, max(m2, 0.0) * square, m3 * square * back, max(m4, 0.0) * square * square)


@inner  # type: ignore[untyped-decorator]
def _scale(largest: Any, limit: Any) -> Any:
    """A power of two that brings a number to between 1/2 and 1, within what the type can hold."""
    _, exponent = math.frexp(largest)
    return math.ldexp(1.0, -int(min(max(float(exponent), -limit), limit)))


@inner  # type: ignore[untyped-decorator]
def block32(address: Any, count: Any, row: Any, out: Any) -> Any:
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
        merge_moments(row, np.float64(count), low, 0.0, 0.0, 0.0)
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


@inner  # type: ignore[untyped-decorator]
def block64(address: Any, count: Any, row: Any, out: Any) -> Any:
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


@inner  # type: ignore[untyped-decorator]
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


@inner  # type: ignore[untyped-decorator]
def _moments64(address: Any, count: Any, row: Any, out: Any, low: Any, high: Any, mean: Any) -> Any:
    vector.keep_apart()
    if low == high:
        merge_moments(row, np.float64(count), low, 0.0, 0.0, 0.0)
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


@inner  # type: ignore[untyped-decorator]
def careful(address: Any, narrow: Any, count: Any, row: Any, out: Any, kept: Any, zeroed: Any) -> Any:
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
    if finite and not block64(kept, finite, row, out):
        # finite numbers whose sum is not: extrema stand, sums overflow, moments are about the middle
        low, high, small = np.inf, -np.inf, np.inf
        for i in range(finite):
            low, high, small = min(low, some[i]), max(high, some[i]), min(small, abs(some[i]))
        _extent64(kept, finite, row, low, high, small, np.inf)
        _moments64(kept, finite, row, out, low, high, 0.5 * low + 0.5 * high)
