"""Operators that torch lists as nondeterministic on GPUs are recognised, and no others."""

from __future__ import annotations

from dataclasses import replace

import torch
from opcapture import compared
from synthetic import row, summary, write_run


def found(folder, path, *devices):
    """The codes of what is found where an operator diverges that ran on these devices."""
    for name, value, device in zip("ab", (1.0, 2.0), devices, strict=True):
        made = summary(torch.full((2,), value).numpy())
        result = row(
            "forward", "op_output", "Net", replace(made, layout=replace(made.layout, device=device)), path=path
        )
        given = row("forward", "input", "Net", 1.0, path="[0]")
        write_run(folder / name, [[given, result]], force=True)
    return [finding.code for finding in compared(folder / "a", folder / "b").explains]


LISTED = ("index_add.default", "scatter_add_.default", "index_put_.default", "cumsum.default", "scatter_reduce.two")
OTHERS = ("mm.default", "index_select.default", "scatter_foo.default", "cumsum_backward.default")


def test_a_listed_operator_on_gpus_is_said_to_be_one_and_no_other(tmp_path):
    for name in LISTED:
        assert hasattr(torch.ops.aten, name.partition(".")[0])
        assert "nondeterministic" in found(tmp_path, f"aten.{name}", "cuda:0", "cuda:1")
    for name in OTHERS:
        assert "nondeterministic" not in found(tmp_path, f"aten.{name}", "cuda:0", "cuda:0")
    for devices in (("cpu", "cpu"), ("cuda:0", "cpu"), ("mps:0", "mps:0")):
        assert "nondeterministic" not in found(tmp_path, "aten.index_add.default", *devices)
