"""Stages of pipelines: several of one rank, and schedules that are the same run."""

from __future__ import annotations

import textwrap

import pytest
from artefacts import launched
from laid_out import together
from launches import DISTRIBUTED, needs
from opcapture import compared

from introspect_cli.compare.result import Verdict
from introspect_cli.health.check import check
from introspect_cli.store.run import Stages, open_run, stages_of

pytestmark = [pytest.mark.launch, DISTRIBUTED]

QUIET = ("--no-packages", "--no-env", "--no-source")

SEQUENCE = textwrap.dedent("""
    import os
    import torch
    import torch.distributed as dist
    from torch import nn

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)]
    own = nn.Sequential(*layers[4 * rank : 4 * rank + 4] if world > 1 else layers)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    mean = lambda out, wanted: (out - wanted).square().mean()
    if world > 1:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
        dist.init_process_group("gloo")
        stage = PipelineStage(own, rank, world, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=mean)
    for step in range(2):
        x, y = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)), torch.zeros(4, 4)
        optimizer.zero_grad()
        if world == 1:
            mean(own(x), y).backward()
        elif rank:
            schedule.step(target=y)
        else:
            schedule.step(x)
        optimizer.step()
    if world > 1:
        dist.destroy_process_group()
""")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    needs("interleaved")
    folder = tmp_path_factory.mktemp("pipelines")
    worlds = {"single": 1, "1f1b": 2, "interleaved": 2}
    return launched(folder, {name: (world, name, "--steps", "2") for name, world in worlds.items()}, options=QUIET)


def test_stages_of_one_rank_are_pieces_of_one_model(runs):
    with open_run(runs / "interleaved") as run, open_run(runs / "single") as one:
        assert stages_of(run.manifests[1]) == Stages(3, 4, {"GPT": 1, "GPT#2": 3})
        names = {
            fqn
            for reader in (together(one), together(run))
            for fqn in reader.sites.fqn
            if "#" in fqn and "SGD" not in fqn
        }
        assert names == set()


@pytest.mark.parametrize("other", ["1f1b", "single"])
def test_an_interleaved_schedule_is_the_same_run(runs, other):
    """Every checksum, where the other one is a pipeline of as many microbatches."""
    for names in ((other, "interleaved"), ("interleaved", other)):
        result = compared(*(runs / name for name in names))
        assert result.verdict is Verdict.SAME, result.sentence
        assert (result.counts.within == 0) is (other != "single")
        assert result.counts.records > (500 if other != "single" else 250)


@pytest.mark.parametrize(
    "said", [None, 3, {}, {"stage": 2, "stages": 2}, {"stage": 0, "stages": 2, "roots": {"GPT": 5}}, {"roots": []}]
)
def test_what_a_manifest_should_not_say_of_stages_says_nothing(said):
    assert stages_of({"pipeline": said}) is None


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """A sequence, alone and cut into two stages that count their layers from 0 each."""
    needs("gpipe")
    return launched(tmp_path_factory.mktemp("cut"), {"one": (1,), "two": (2,)}, options=QUIET, script=SEQUENCE)


def test_equal_names_in_two_stages_are_no_copies(cut):
    result = compared(cut / "one", cut / "two")
    assert result.verdict is Verdict.SAME, result.sentence
    assert "have the same numbers" in result.sentence
    with open_run(cut / "two") as b:
        assert together(b).distinct_roots == {"Sequential"}
        assert not {"rank-layout", "copies-differ"} & {finding.rule for finding in check(b).findings}
