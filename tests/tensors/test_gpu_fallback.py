"""Torch operations do the work where a device has no kernels, and hold a bounded amount meanwhile."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from kernel_values import EVERY, PACKED, example, expected_row
from sweeps import sliced
from torch.utils._python_dispatch import TorchDispatchMode

from introspect_cli.tensors import fallback
from introspect_cli.tensors import rows as r

pytestmark = pytest.mark.gpu

LIMIT = 64 << 20
ELEMENTS = (1024, 4096)
"""Eight chunks: a temporary of the whole would stand out."""


class Held(TorchDispatchMode):
    """Bytes of the results of operations that are alive at once, without the tensor that is summarised."""

    def __init__(self, given):
        super().__init__()
        self.given = given.untyped_storage()._cdata
        self.users, self.now, self.peak, self.doubles = {}, 0, 0, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.note(tensor)
        return result

    def note(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key == self.given:
            return
        if not self.users.get(key):
            self.now += size
            self.peak = max(self.peak, self.now)
            self.doubles += (tensor.dtype == torch.float64) * size
        self.users[key] = self.users.get(key, 0) + 1
        weakref.finalize(tensor, self.gone, key, size)

    def gone(self, key, size):
        self.users[key] -= 1
        if not self.users[key]:
            self.now -= size


def held(dtype, *, transposed=False):
    """What the summary of a tensor on a device holds; the device `meta` computes nothing, so that it costs nothing."""
    tensor = torch.empty(ELEMENTS, dtype=dtype, device="meta")
    tensor = tensor.t() if transposed else tensor
    with Held(tensor) as seen:
        fallback.row_of(tensor)
    return seen


TYPES = (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.float64, torch.int64, torch.bool)
EACH = [(dtype, transposed) for dtype in TYPES for transposed in (False, True)]


@pytest.mark.parametrize(
    ("dtype", "transposed"), sliced(EACH, [(torch.float32, False), (torch.bfloat16, True), (torch.int64, False)])
)
def test_temporaries_stay_under_64_mb(dtype, transposed):
    assert 1 << 20 < held(dtype, transposed=transposed).peak <= LIMIT


@pytest.mark.parametrize("dtype", [dtype for dtype in EVERY if dtype not in PACKED], ids=str)
def test_what_is_computed_is_what_the_kernels_compute(monkeypatch, dtype):
    monkeypatch.setattr(fallback, "CHUNK", 64)
    tensor = example(dtype, (301, 7))
    found, wanted = fallback.row_of(tensor).numpy(), expected_row(tensor).view("int64")[0]
    assert found[: r.MIN].tolist() == wanted[: r.MIN].tolist()
    found, wanted = found.view("float64"), wanted.view("float64")
    for word in (r.MIN, r.MAX, r.ABSMIN, r.MEAN, r.ABSSUM):
        assert found[word] == pytest.approx(wanted[word], rel=1e-9, abs=1e-12)
    assert np.isnan(found[[r.M2, r.M3, r.M4, r.MEDIAN, *range(r.SKETCH, r.WORDS)]]).all()
