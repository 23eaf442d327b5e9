"""Summaries of arrays without kernels are those that a capture would have made of the same tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from summaries import taken

from introspect_cli.exchange.checkpoints import open_any
from introspect_cli.tensors.summarizer import Summarizer

NAMES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
TYPES = {name: getattr(torch, name) for name in (*NAMES, "complex64", "complex128", "float8_e4m3fn", "float8_e5m2")}
SHAPES = [(), (0,), (1,), (7, 5), (3, 4, 50), (1000, 700)]


@pytest.fixture(scope="module")
def kept():
    made = Summarizer()

    def of(tensor):
        made.add(tensor)
        return taken(made)

    yield of
    made.close()


def made(dtype, shape):
    torch.manual_seed(len(shape))
    values = torch.randn(shape) * 3
    if values.numel() > 20 and dtype.is_floating_point:
        flat = values.view(-1)
        flat[3], flat[11], flat[12] = float("nan"), 0.0, -0.0
        if "e4m3fn" not in str(dtype):
            flat[5], flat[6] = float("inf"), -float("inf")
    return values.to(dtype)


@pytest.mark.parametrize("name", TYPES)
def test_an_array_keeps_what_a_capture_keeps(kept, tmp_path, name):
    tensors = {str(shape): made(TYPES[name], shape) for shape in SHAPES}
    torch.save(tensors, tmp_path / "a.pt")
    with open_any(tmp_path / "a.pt") as run:
        summaries = {record.site.fqn: record.summary for record in run.rank(0).records(0)}
    assert summaries.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert_kept(summaries[key], kept(tensor))


def assert_kept(summary, theirs):
    assert summary.checksum == int(theirs.checksum[0])
    for statistic, column in {**theirs.counts, **theirs.floats}.items():
        known = column[0]
        if statistic in summary.stats:
            assert summary.stats[statistic] == pytest.approx(float(known), rel=1e-5, abs=1e-6), statistic
        else:
            assert np.isnan(known), statistic
    size = np.linalg.norm(theirs.sketch[0]) or 1.0
    assert np.linalg.norm(np.array(summary.sketch) - theirs.sketch[0]) <= 1e-5 * size
