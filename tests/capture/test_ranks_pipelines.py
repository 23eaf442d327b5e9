"""Microbatches of pipeline stages: numbered by the schedule, in whatever order they run, by several stages a rank."""

from __future__ import annotations

import textwrap

import pytest
import torch
from artefacts import launched
from laid_out import together
from launches import DISTRIBUTED, needs
from opcapture import compared

from introspect_cli.compare.result import Verdict
from introspect_cli.health.check import check
from introspect_cli.records import Kind
from introspect_cli.store.run import Stages, open_run, stages_of

pytestmark = [pytest.mark.launch, DISTRIBUTED]

QUIET = ("--no-packages", "--no-env", "--no-source")

ORDERED = textwrap.dedent("""
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(self.first(self.act(self.first(x))))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    net = Net()
    stage = PipelineStage(net, 0, 1, torch.device("cpu"))
    stage.chunks = 4
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.arange(32.0).view(8, 4).chunk(8)
    for order in sys.argv[1:]:
        optimizer.zero_grad()
        for turn, chunk in enumerate(map(int, order)):
            stage.forward_one_chunk(chunk, (x[chunk + 4 * (turn > 3)],)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
""")

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

ORDERS = {
    "another": ("0123", "1032"),
    "after that": ("3210", "3120"),
    "left out": ("0123", "023"),
    "twice, another": ("0123", "10320312"),
}


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
def test_a_call_has_the_number_of_its_microbatch(tmp_path, orders):
    """And of how often the microbatch has called the module: layers are called twice here."""
    needs("gpipe")
    launched(tmp_path, {"run": (1, *orders)}, options=QUIET, script=ORDERED)
    x = torch.arange(32.0).view(8, 4).chunk(8)
    with open_run(tmp_path / "run") as run:
        step = len(orders) - 1
        records = list(run.rank(0).records(step))
    given = {r.site.call: r.summary for r in records if r.site.kind is Kind.INPUT and r.site.fqn == "Net"}
    wanted = {int(chunk) + 4 * (turn > 3) for turn, chunk in enumerate(orders[-1])}
    assert set(given) == wanted
    for call, summary in given.items():
        assert summary.stats["mean"] == pytest.approx(x[call].mean().item())
    inner = {r.site.call: r.summary for r in records if r.site.kind is Kind.INPUT and r.site.fqn == "Net.first"}
    assert set(inner) == {2 * chunk + turn for chunk in wanted for turn in (0, 1)}
    assert all(inner[2 * chunk].checksum == given[chunk].checksum for chunk in wanted)


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
