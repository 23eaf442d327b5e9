"""Values that the kernels are tried on, and what torch alone computes of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference_rows as reference
import torch

from introspect_cli.tensors import rows as r

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


INTS = [
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.bool,
]  # fmt: skip


COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


EIGHTS = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]


PACKED = [torch.float4_e2m1fn_x2] if hasattr(torch, "float4_e2m1fn_x2") else []


EVERY = FLOATS + INTS + COMPLEX + EIGHTS + PACKED


def by_torch(tensor, **options):
    return reference.row(tensor, **options).numpy().view(np.uint64)[None].copy()


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
