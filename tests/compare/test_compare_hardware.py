"""Hardware among the settings: named where one run alone used it, and left as a cause where nothing else differs."""

from __future__ import annotations

import numpy as np
import pytest
from opcapture import compared
from synthetic import row, write_run

from introspect_cli.records import ModuleInfo

F32 = np.float32
MODULES = (ModuleInfo("Net", "Net"), ModuleInfo("Net.fc", "Linear", "", ("weight",)))
GPU = {"name": "H100", "uuid": "GPU-1234"}


def steps(wrong=None):
    """Five steps of one product each; in one of them an element is wrong."""
    weight = np.random.default_rng(1).normal(size=(8, 8)).astype(F32)
    for step in range(5):
        x = np.random.default_rng(step).normal(size=(4, 8)).astype(F32)
        y = x @ weight
        if step == wrong:
            y[1, 3] *= F32(1.5)
        yield [
            row("start", "param", "Net.fc.weight", weight, module_class="Linear"),
            *(
                row("forward", "input", module.fqn, x, path="[0]", module_class=module.module_class)
                for module in MODULES
            ),
            *(row("forward", "output", module.fqn, y, module_class=module.module_class) for module in MODULES[::-1]),
        ]


def with_settings(folder, *settings):
    """What a comparison finds of a run and one in which an element is wrong, each with its settings."""
    for name, wrong, kept in zip("ab", (None, 1), settings, strict=True):
        write_run(folder / name, list(steps(wrong)), modules=MODULES, settings=kept)
    return compared(folder / "a", folder / "b")


def test_a_gpu_that_one_run_alone_used_is_named_and_not_what_comes_with_it(tmp_path):
    gpu = {"hardware": {"gpus": [{"name": "H100", "uuid": "GPU-1"}] * 2}, "runtime": {"cudnn": 91900, "nccl": "2.28.9"}}
    cpu = {"hardware": {}, "runtime": {"cudnn": None, "nccl": None}}
    result = with_settings(tmp_path, gpu, cpu)
    assert [(change.name, change.a, change.b) for change in result.settings] == [("GPU", "2 x H100", "none used")]


ON_RECORD = {"sources": {}, "packages": {"torch": "2.9"}, "environment": {}, "command": {"argv": ["train.py"]}}


@pytest.mark.parametrize("gpu", [GPU, GPU | {"name": "A100"}, {"name": "H100", "uuid": "GPU-2"}])
def test_hardware_is_left_as_a_cause_where_nothing_else_differs(tmp_path, gpu):
    result = with_settings(tmp_path, *({**ON_RECORD, "hardware": {"gpus": [each]}} for each in (GPU, gpu)))
    (said,) = (line for line in result.evidence if "What is left" in line)
    assert said.startswith("No source file, setting or package on record differs. What is left: randomness")
    assert "the hardware" in said
