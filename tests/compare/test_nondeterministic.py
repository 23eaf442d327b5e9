"""Operators that torch lists as nondeterministic on GPUs are recognised, and no others."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from introspect_cli.compare.reasons.forward import find_nondeterminism


def found(path, *devices):
    """The codes of what is found where an operator diverges that ran on these devices."""
    a, b = (device and SimpleNamespace(layout=SimpleNamespace(device=device)) for device in devices)
    at = SimpleNamespace(site=SimpleNamespace(path=path), first=SimpleNamespace(a=a, b=b))
    return [finding.code for finding in find_nondeterminism(at)]


LISTED = ("index_add.default", "scatter_add_.default", "index_put_.default", "cumsum.default", "scatter_reduce.two")
OTHERS = ("mm.default", "index_select.default", "scatter_foo.default", "cumsum_backward.default")


def test_a_listed_operator_on_gpus_is_said_to_be_one_and_no_other():
    for name in LISTED:
        assert hasattr(torch.ops.aten, name.partition(".")[0])
        assert found(f"aten.{name}", "cuda:0", "cuda:1") == ["nondeterministic"]
    for name in OTHERS:
        assert found(f"aten.{name}", "cuda:0", "cuda:0") == []
    for devices in (("cpu", "cpu"), ("cuda:0", "cpu"), ("cuda:0", None), ("mps:0", "mps:0")):
        assert found("aten.index_add.default", *devices) == []
