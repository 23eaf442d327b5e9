"""Runs that go on from weights which no `torch.load` reads, and steps that only make room for a checkpoint."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from opcapture import captured, compared
from torch import nn

from introspect_cli.compare.terms.result import Verdict
from introspect_cli.records import Kind


def recorded(path, work, **options):
    """A capture as in a process of its own, where the generators begin in another state than training leaves them."""
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002 - as above
    return captured(path, work, **options)


def test_a_step_that_makes_room_for_a_distributed_checkpoint_is_none_of_the_training(tmp_path):
    """`get_state_dict` steps a new optimizer with gradients and a learning rate of 0."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def work(*, room):
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(net.parameters())
        if room:
            state = get_state_dict(net, optimizer)[1]
            assert {float(state["state"][name]["step"]) for name in ("weight", "bias")} == {1}
        for _ in range(2):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    run = recorded(tmp_path / "b", lambda: work(room=True), record=frozenset({Kind.PARAM, Kind.GRAD, Kind.LOSS}))
    assert (
        compared(
            recorded(tmp_path / "a", lambda: work(room=False), record=frozenset({Kind.PARAM, Kind.GRAD, Kind.LOSS})),
            run,
        ).counts.steps_b
        == 2
    )


READS = """
import sys
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
first = int(sys.argv[2])
if first:
    loaded = load_file(sys.argv[1]) if sys.argv[1].endswith("safetensors") else np.load(sys.argv[1])
    kept = {name: torch.as_tensor(loaded[name]) for name in net.state_dict()}
    net.load_state_dict({name: value + 1 for name, value in kept.items()} if "lose" in sys.argv else kept)
for step in range(first, 6):
    if step == 3 and not first:
        save_file(net.state_dict(), "weights.safetensors")
        np.savez("weights.npz", **net.state_dict())
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def reads(tmp_path_factory, forks):
    """Captures of a loop whose checkpoint no `torch.load` reads."""
    folder = tmp_path_factory.mktemp("reads")
    (folder / "train.py").write_text(READS)

    def run(name, *words, options=()):
        command = ["capture", "-q", "--no-packages", "--no-env", *options, "-o", name, "train.py", *words]
        done = forks(*command, cwd=folder)
        assert done.returncode == 0, done.stderr
        return folder / name

    run("whole", "-", "0")
    return run, folder / "whole"


@pytest.mark.parametrize("file", ["weights.safetensors", "weights.npz"])
def test_a_run_that_reads_weights_without_torch_load_is_known_as_resumed(reads, file):
    run, whole = reads
    result = compared(whole, run(file.partition(".")[2], file, "3"))
    assert (result.resumed.at, result.verdict) == (3, Verdict.SAME), result.sentence
    assert result.sentence.startswith("Resumed correctly: run b restored all that is on record of step 2 of a.")


def test_a_run_that_alone_reads_weights_and_begins_with_none_of_the_others_says_how_to_set_it_beside(reads):
    run, whole = reads
    lost = run("lost", "weights.safetensors", "3", "lose")
    said = "Run {0} alone reads weights.safetensors. If it continues run {1}, say after which step: --offset {2}K "
    for a, b, words in ((whole, lost, "ba"), (lost, whole, "ab")):
        result = compared(a, b)
        assert result.resumed is None
        begins = said.format(*words, "-" * (words == "ab"))
        assert any(note.startswith(begins) for note in result.notes), result.notes
    assert compared(whole, lost, offset=3).resumed.lost[0].part == "parameters"
    assert compared(lost, whole, offset=-3).resumed.lost[0].part == "parameters"
