"""Operators that torch lists as nondeterministic on GPUs are recognised, and no others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from introspect_cli.compare.reasons.forward import find_nondeterminism


def found(path, *devices):
    """The codes of what is found where an operator diverges that ran on these devices."""
    a, b = (device and SimpleNamespace(layout=SimpleNamespace(device=device)) for device in devices)
    at = SimpleNamespace(site=SimpleNamespace(path=path), first=SimpleNamespace(a=a, b=b))
    return [finding.code for finding in find_nondeterminism(at)]


LISTED = ["index_add.default", "scatter_add_.default", "index_put_.default", "cumsum.default", "convolution.default"]
LISTED += [
    "upsample_bilinear2d_backward.default",
    "grid_sampler_2d_backward.default",
    "scatter.src",
    "scatter_reduce.two",
]
OTHERS = ["mm.default", "add.Tensor", "index_select.default", "scatter_foo.default", "cumsum_backward.default"]


@pytest.mark.parametrize("name", LISTED)
def test_a_listed_operator_on_a_gpu_is_said_to_be_one(name):
    assert hasattr(torch.ops.aten, name.partition(".")[0])
    assert found(f"aten.{name}", "cuda:0", "cuda:1") == ["nondeterministic"]


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_operator_is_called_nondeterministic(name):
    assert found(f"aten.{name}", "cuda:0", "cuda:0") == []


@pytest.mark.parametrize("devices", [("cpu", "cpu"), ("cuda:0", "cpu"), ("cuda:0", None), ("mps:0", "mps:0")])
def test_nothing_is_said_where_not_both_ran_on_a_gpu(devices):
    assert found("aten.index_add.default", *devices) == []
