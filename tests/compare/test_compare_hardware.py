"""Hardware among the settings: named where one run alone used it, and left as a cause where nothing else differs."""

from __future__ import annotations

import pytest
from opcapture import compared
from small_runs import MODULES, train
from synthetic import write_run

GPU = {"name": "H100", "uuid": "GPU-1234"}


def with_settings(folder, *settings):
    """What a comparison finds of a run and one with another output, each with its settings."""
    for name, fault, kept in zip("ab", ((), ("module",)), settings, strict=True):
        write_run(folder / name, train(*fault), modules=MODULES, settings=kept)
    return compared(folder / "a", folder / "b")


def test_a_gpu_that_one_run_alone_used_is_named_and_not_what_comes_with_it(tmp_path):
    gpu = {"hardware": {"gpus": [{"name": "H100", "uuid": "GPU-1"}] * 2}, "runtime": {"cudnn": 91900, "nccl": "2.28.9"}}
    result = with_settings(tmp_path, gpu, {"hardware": {}, "runtime": {"cudnn": None, "nccl": None}})
    assert [(change.name, change.a, change.b) for change in result.settings] == [("GPU", "2 x H100", "none used")]


ON_RECORD = {"sources": {}, "packages": {"torch": "2.9"}, "environment": {}, "command": {"argv": ["train.py"]}}


@pytest.mark.parametrize("gpu", [GPU, GPU | {"name": "A100"}, {"name": "H100", "uuid": "GPU-2"}])
def test_hardware_is_left_as_a_cause_where_nothing_else_differs(tmp_path, gpu):
    result = with_settings(tmp_path, *({**ON_RECORD, "hardware": {"gpus": [each]}} for each in (GPU, gpu)))
    (said,) = (line for line in result.evidence if "What is left" in line)
    assert said.startswith("No source file, setting or package on record differs. What is left: randomness")
    assert "the hardware" in said
