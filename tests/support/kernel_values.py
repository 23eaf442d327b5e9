"""Values that the kernels are tried on, and the rows that their documented formulas give, in numpy and float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from introspect_cli.tensors import checksum
from introspect_cli.tensors import rows as r

U = np.uint64
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.bool,
]  # fmt: skip
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
EIGHTS = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
PACKED = [torch.float4_e2m1fn_x2] if hasattr(torch, "float4_e2m1fn_x2") else []
EVERY = FLOATS + INTS + COMPLEX + EIGHTS + PACKED


def words_of(flat):
    """The words of contiguous elements as the checksum takes them: of at most 32 bits, in uint64."""
    data = flat.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
    return np.frombuffer(data, dtype=f"u{min(4, flat.element_size())}").astype(U)


def checksum_terms(words, places):
    """The checksum's formula: one term for each word at its place in the whole tensor."""
    blocks, lanes = places // checksum.SPAN, (places % checksum.SPAN).astype(np.int64)
    present, number = np.unique(blocks, return_inverse=True)
    keys = np.array([checksum.mix((int(block) + 1) * checksum.G) for block in present], dtype=U)[number]
    with np.errstate(over="ignore"):
        z = words.astype(U) * np.array(checksum.FACTORS, dtype=U)[lanes]
        z = z + np.array(checksum.SHIFTS, dtype=U)[lanes] + keys
        return (z & U(0xFFFFFFFF)) * (z >> U(32)) + z


def sketch_keys(indices):
    """Bucket (0 to 15) and sign (1.0 or -1.0) of each element index, as the sketch's docstring has them."""
    with np.errstate(over="ignore"):
        value = (indices // U(64) + U(1)) * U(0x9FB21C651E98DF25)
        first = (value ^ (value >> U(32))) * U(0xC4CEB9FE1A85EC53)
        second = (first ^ (first >> U(32))) * U(0xD6E8FEB86659FD93)
    signs = (second ^ (second >> U(32))) >> (indices % U(64)) & U(1)
    buckets = (indices % U(16)) ^ (first >> U(60))
    return buckets.astype(np.int64), 1.0 - 2.0 * signs.astype(np.float64)


def expected_row(tensor, *, runs=None):
    """The row of a tensor, shape (1, 32), uint64.

    Args:
        tensor: any shape, strides and type on the CPU.
        runs: pieces of it in row-major order, each with the index of its first element in the whole tensor; all of it
            from index 0 on if not given.
    """
    row = r.empty(1)
    if runs is None:
        runs = [(0, tensor.detach().resolve_conj().resolve_neg().reshape(-1))]
    runs = [(offset, flat) for offset, flat in runs if flat.numel()]
    parts = []
    for offset, flat in runs:
        words, width = words_of(flat), max(1, flat.element_size() // 4)
        with np.errstate(over="ignore"):
            places = U(offset * width) + np.arange(len(words), dtype=U)
            row[0, r.RAW] += checksum_terms(words, places).sum(dtype=U)
        if tensor.dtype not in PACKED:
            parts.append((offset, _components(flat)))
    if not parts:
        return row
    floats = row.view(np.float64)[0]
    for offset, values in parts:
        indices = U(offset * values.shape[1]) + np.arange(values.size, dtype=U)
        buckets, signs = sketch_keys(indices)
        finite = np.where(np.isfinite(values), values, 0.0).ravel()
        floats[r.SKETCH :] += np.bincount(buckets, weights=signs * finite, minlength=16)
    _add_statistics(row, np.concatenate([values for _, values in parts]))
    return row


def _components(flat):
    """Elements as float64, shape (n, 1); those of complex numbers, shape (n, 2)."""
    parts = torch.view_as_real(flat) if flat.dtype.is_complex else flat[:, None]
    return parts.to(torch.float64).numpy()


def _add_statistics(row, components):
    """Counts, extrema and moments of all elements; complex numbers count by their absolute values."""
    if components.shape[1] == 2:
        values = np.where(np.isnan(components).any(1), np.nan, np.hypot(components[:, 0], components[:, 1]))
    else:
        values = components[:, 0]
    finite, floats = values[np.isfinite(values)], row.view(np.float64)[0]
    row[0, r.FINITE : r.ZEROS + 1] = [
        len(finite), np.isnan(values).sum(), np.isposinf(values).sum(), np.isneginf(values).sum(), (values == 0).sum(),
    ]  # fmt: skip
    if not len(finite):
        return
    floats[[r.MIN, r.MAX, r.ABSMIN]] = finite.min(), finite.max(), np.abs(finite).min()
    with np.errstate(over="ignore", invalid="ignore"):
        exact = finite.astype(np.longdouble)
        mean = exact.mean()
        deviations = exact - mean
        moments = [(deviations**power).sum() for power in (2, 3, 4)]
        floats[[r.MEAN, r.M2, r.M3, r.M4, r.ABSSUM]] = mean, *moments, np.abs(exact).sum()


def assert_same(a, b, rel=1e-6):
    """Equal integers, and floats to a share of what they are made of."""
    assert a[0, : r.ZEROS + 1].tolist() == b[0, : r.ZEROS + 1].tolist()
    x, y = a.view(np.float64)[0], b.view(np.float64)[0]
    assert x[r.MIN : r.ABSMIN + 1] == pytest.approx(y[r.MIN : r.ABSMIN + 1], rel=1e-14, nan_ok=True)
    count = max(1, int(a[0, r.FINITE]))
    spread = math.sqrt(y[r.M2] / count)
    assert x[r.MEAN] == pytest.approx(y[r.MEAN], rel=rel, abs=rel * spread)
    assert x[r.M2] == pytest.approx(y[r.M2], rel=rel)
    assert x[r.M3] == pytest.approx(y[r.M3], rel=rel, abs=rel * math.sqrt(y[r.M2] * y[r.M4]))
    assert x[r.M4] == pytest.approx(y[r.M4], rel=rel)
    assert x[r.ABSSUM] == pytest.approx(y[r.ABSSUM], rel=rel)
    size = max(np.abs(y[r.SKETCH :]).max(), abs(y[r.ABSSUM]) / math.sqrt(count))
    assert x[r.SKETCH :] == pytest.approx(y[r.SKETCH :], rel=rel, abs=0.1 * rel * size)


def example(dtype, shape, seed=0):
    """A tensor with ordinary numbers, zeros and, where there are, some that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in PACKED:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)
    if dtype in INTS:
        return torch.randint(0, 100, shape, generator=generator).to(dtype)
    x = torch.randn(shape, generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    x = x * 3 + 0.5
    if x.numel() > 40 and not dtype.is_complex:
        flat = x.view(-1)
        flat[7], flat[11], flat[20], flat[33] = 0.0, float("nan"), float("inf"), -float("inf")
    return x.to(dtype)


STRIDED = {
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[::3, 1::2],
    "column": lambda x: x[:, 5],
    "expanded": lambda x: x[:1].expand(700, -1),
    "channels_last": lambda x: x.reshape(2, 5, 14, 15).to(memory_format=torch.channels_last),
    "permuted": lambda x: x.reshape(2, 5, 14, 15).permute(2, 0, 3, 1),
    "scalar": lambda x: x[3, 4],
    "offset": lambda x: x.view(-1)[3:-5],
}
