"""Hardware among the settings; memory formats; back ends of attention."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic import row, write_run

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.records import ModuleInfo
from introspect_cli.store.read.run import open_run

F32 = np.float32
MODULES = (ModuleInfo("Net", "Net"), ModuleInfo("Net.fc", "Linear", "", ("weight",)))
GPU = {"name": "H100", "uuid": "GPU-1234"}


def steps(wrong=None, by=0.5, module_class="Linear"):
    """Five steps of one product each; one of them may be wrong."""
    weight = np.random.default_rng(1).normal(size=(8, 8)).astype(F32)
    recorded = []
    for step in range(5):
        x = np.random.default_rng(step).normal(size=(4, 8)).astype(F32)
        y = x @ weight
        if step == wrong:
            y[1, 3] += F32(by) * abs(y[1, 3])
        rows = [row("start", "param", "Net.fc.weight", weight, module_class=module_class)]
        rows += [row("forward", "input", name, x, path="[0]", module_class=cls) for name, cls in named(module_class)]
        rows += [row("forward", "output", name, y, module_class=cls) for name, cls in reversed(named(module_class))]
        recorded.append(rows)
    return recorded


def named(module_class):
    return [("Net", "Net"), ("Net.fc", module_class)]


def test_a_gpu_that_one_run_alone_used_is_named_and_not_what_comes_with_it(tmp_path):
    gpu = {"hardware": {"gpus": [{"name": "H100", "uuid": "GPU-1"}] * 2}, "runtime": {"cudnn": 91900, "nccl": "2.28.9"}}
    cpu = {"hardware": {}, "runtime": {"cudnn": None, "nccl": None}}
    for name, settings in (("a", gpu), ("b", cpu)):
        write_run(tmp_path / name, steps(1 if name == "b" else None), modules=MODULES, settings=settings)
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        result = compare_runs(a, b, DiffOptions())
    assert [(change.name, change.a, change.b) for change in result.settings] == [("GPU", "2 x H100", "none used")]


ON_RECORD = {"sources": {}, "packages": {"torch": "2.9"}, "environment": {}, "command": {"argv": ["train.py"]}}


@pytest.mark.parametrize("gpu", [GPU, GPU | {"name": "A100"}, {"name": "H100", "uuid": "GPU-2"}])
def test_hardware_is_left_as_a_cause_where_nothing_else_differs(tmp_path, gpu):
    for name, wrong, device in (("a", None, GPU), ("b", 1, gpu)):
        settings = {**ON_RECORD, "hardware": {"gpus": [device]}}
        write_run(tmp_path / name, steps(wrong), modules=MODULES, settings=settings)
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        (said,) = (line for line in compare_runs(a, b, DiffOptions()).evidence if "What is left" in line)
    assert said.startswith("No source file, setting or package on record differs. What is left: randomness")
    assert "the hardware" in said
