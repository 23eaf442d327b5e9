"""Torch operations do the work where a device has no kernels, and hold a bounded amount meanwhile."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from introspect_cli.tensors import reference

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


def held(dtype, *, transposed=False, **wanted):
    """What the summary of a tensor on a device holds; the device `meta` computes nothing, so that it costs nothing."""
    tensor = torch.empty(ELEMENTS, dtype=dtype, device="meta")
    tensor = tensor.t() if transposed else tensor
    with Held(tensor) as seen:
        reference.row(tensor, **wanted)
    return seen


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.float64, torch.int64, torch.bool]
)
def test_temporaries_stay_under_64_mb(dtype, transposed):
    assert 1 << 20 < held(dtype, transposed=transposed).peak <= LIMIT


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_temporaries_of_complex_numbers_stay_under_64_mb(dtype):
    assert held(dtype, transposed=True).peak <= LIMIT


def test_a_checksum_alone_needs_no_float64():
    size = torch.Size(ELEMENTS).numel()
    assert held(torch.float32, with_stats=False, with_sketch=False).doubles < size // 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float64_is_for_deviations_their_powers_and_sums_only(dtype):
    """Deviations and squares are one each an element, what the sketch adds up in blocks is half of one."""
    size = torch.Size(ELEMENTS).numel()
    assert held(dtype, with_sketch=False).doubles < 2.01 * 8 * size
    assert held(dtype).doubles < 2.51 * 8 * size


def test_chunks_change_no_checksum_and_no_count(monkeypatch):
    """What a smaller chunk gives on a device is what one piece gives on a CPU."""
    tensor = torch.complex(torch.randn(301, 7, dtype=torch.float64), torch.randn(301, 7, dtype=torch.float64))
    whole = reference.row(tensor)
    monkeypatch.setattr(reference, "CHUNK", 64)
    assert reference.row(tensor)[:6].tolist() == whole[:6].tolist()
