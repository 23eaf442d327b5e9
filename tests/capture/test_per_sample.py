"""`capture --per-sample`: which samples of a batch differ is told without a second run."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
from opcapture import captured  # noqa: E402 - torch first: without it there is nothing to test
from torch import nn  # noqa: E402

from introspect_cli.compare.diff import compare_runs  # noqa: E402
from introspect_cli.compare.terms.options import DiffOptions  # noqa: E402
from introspect_cli.records import Kind  # noqa: E402
from introspect_cli.schedule.rules import Schedule  # noqa: E402
from introspect_cli.store.read.run import open_run  # noqa: E402
from introspect_cli.store.read.verify import verify_run  # noqa: E402


class Net(nn.Module):
    def __init__(self, wrong, at=1):
        super().__init__()
        self.one, self.two, self.wrong, self.at, self.step = nn.Linear(6, 8), nn.Linear(8, 3), wrong, at, -1

    def forward(self, x):
        self.step += self.training
        x = self.one(x)
        if self.wrong and self.step == self.at and self.training:
            scale = torch.ones(len(x), 1)
            scale[list(self.wrong)] = 1.5
            x = x * scale
        return self.two(torch.relu(x))


def train(wrong=(), steps=4, *, evaluated=False, states=None):
    def work():
        torch.manual_seed(0)
        net = Net(wrong)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4 * steps, 6)), 4):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluated:
                net.eval()
                with torch.no_grad():
                    net(x)
                net.train()
        if states is not None:
            states.append(([each.clone() for each in net.parameters()], torch.get_rng_state()))

    return work


@pytest.fixture
def said(tmp_path):
    """What `diff` says of the samples of a run against one with wrong samples."""

    def run(wrong, diffed=None, more=None, **options):
        runs = []
        for name, change in (("a", ()), ("b", wrong)):
            path = captured(tmp_path / name, train(change, **(more or {})), **{"per_sample": True, **options})
            assert not verify_run(path).findings
            runs.append(path)
        with open_run(runs[0]) as a, open_run(runs[1]) as b:
            result = compare_runs(a, b, diffed or DiffOptions())
        assert result.first is not None
        return result.first, [line for line in result.evidence if "samples" in line or "dimension 0" in line]

    return run


def test_one_wrong_sample_is_named(said):
    first, lines = said([2])
    assert (first.step, first.site.kind, first.site.fqn) == (1, Kind.INPUT, "Net.two")
    assert lines == ["Of 4 samples, 1 sample differs: 2 (relative L2 0.33); the other 3 are equal."]


@pytest.mark.parametrize(
    ("wrong", "begins", "ends"),
    [([0, 3], "Of 4 samples, 2 samples differ: ", "; the other 2 are equal."),
     ([0, 1, 3], "Of 4 samples, 3 samples differ: ", "; the other one is equal."),
     (range(4), "All 4 samples differ (relative L2 0.33", ").")],
)  # fmt: skip
def test_several_wrong_samples_are(said, wrong, begins, ends):
    (line,) = said(wrong)[1]
    assert line.startswith(begins)
    assert line.endswith(ends)
    assert all(str(at) in line for at in wrong if len(wrong) < 4)


def test_lean_records_sampled_steps_filters_evaluation_and_tolerance(said):
    lean = frozenset({Kind.OUTPUT, Kind.LOSS, Kind.BATCH})
    first, (line,) = said([2], record=lean)
    assert (first.site.kind, "2 (" in line) == (Kind.OUTPUT, True)
    (line,) = said([2], sketch=False)[1]
    assert line == "Of 4 samples, 1 sample differs: 2; the other 3 are equal."
    (line,) = said([2], steps=Schedule.parse("1::2"))[1]
    assert "1 sample differs: 2" in line
    (line,) = said([2], more={"evaluated": True}, eval=True)[1]
    assert "1 sample differs: 2" in line
    (line,) = said([2], DiffOptions(modules=("Net.two",), rtol=1e-3))[1]
    assert "1 sample differs: 2" in line
    (line,) = said([2], record=lean - {Kind.BATCH})[1]  # nobody knows what the first dimension is
    assert line.startswith("Of 4 indices of dimension 0, 1 index of dimension 0 differs: 2")


def test_without_the_option_nothing_is_said(said):
    assert said([2], per_sample=False)[1] == []


def test_the_option_changes_no_number_and_drops_what_its_steps_drop(tmp_path):
    states = []
    train(states=states)()
    captured(tmp_path / "a", train(states=states), per_sample=True, last=1)
    assert all(torch.equal(one, two) for one, two in zip(states[0][0], states[1][0], strict=True))
    assert torch.equal(states[0][1], states[1][1])
    captured(tmp_path / "b", train(steps=40), per_sample=True, last=1)
    with open_run(tmp_path / "b") as run:
        assert len(run.rank(0)) == 1
    kept = [len(os.listdir(tmp_path / name / "tensors")) for name in "ab"]
    assert kept[1] < 4 * kept[0]
