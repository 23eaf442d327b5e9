"""Evaluation never shifts training: the same training with and without it is the same run."""

from __future__ import annotations

import pytest
import torch
from lit import fit
from neutrality import watched
from torch import nn
from torch.utils.data import DataLoader

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.result import Verdict
from introspect_cli.store.read.run import open_run

STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def places(run):
    sites = run.rank(0).sites
    return set(zip(sites.phase, sites.fqn, sites.kind, sites.call.tolist(), strict=True))


def assert_same(a, b):
    with open_run(a) as one, open_run(b) as other:
        result = compare_runs(one, other, DiffOptions(), [])
        assert result.verdict is Verdict.SAME, result.sentence
        assert one.manifest["steps"] == other.manifest["steps"] == STEPS


def test_a_forward_before_the_optimizer_whose_graph_is_used_is_training(tmp_path):
    torch.manual_seed(3)
    net, criterion = Net(), nn.CrossEntropyLoss()
    with watched(tmp_path / "run"):
        loss = criterion(net(torch.ones(2, 4)), torch.zeros(2, dtype=torch.long))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss.backward()
        optimizer.step()
    with open_run(tmp_path / "run") as run:
        assert run.manifest["steps"] == 1
        found = {(record.site.phase.value, record.site.fqn) for record in run.rank(0).records(0)}
        assert {("forward", "Net"), ("loss", "loss")} <= found


def test_lightnings_sanity_check_is_evaluation(tmp_path):
    for name, checks in (("a", 0), ("b", 2)):
        torch.manual_seed(3)
        net = Net()
        with watched(tmp_path / name):
            fit(net, tmp_path, STEPS, sanity_checks=checks, validation_batches=checks)
    assert_same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("held", [False, True], ids=["its own", "frozen in the optimizer"])
def test_a_teacher_belongs_to_training(tmp_path, held):
    def distill():
        torch.manual_seed(1)
        net, teacher, criterion = Net(), Net().eval().requires_grad_(not held), nn.MSELoss()
        optimizer = torch.optim.SGD([*net.parameters(), *(teacher.parameters() if held else ())], lr=0.1)
        for x in DataLoader(torch.randn(8, 4), batch_size=4):
            with torch.no_grad():
                wanted = teacher(x)
            criterion(net(x), wanted).backward()
            optimizer.step()

    with watched(tmp_path / "run"):
        distill()
    with open_run(tmp_path / "run") as run:
        found = {(fqn, phase) for phase, fqn, kind, _ in places(run) if fqn in ("Net", "Net#2") and kind == "output"}
    assert found == {("Net", "forward"), ("Net#2", "forward")}


def test_a_script_that_only_runs_a_model_is_recorded_without_being_asked_to(tmp_path):
    torch.manual_seed(0)
    net = Net().eval()
    with watched(tmp_path / "run"), torch.no_grad():
        for x in DataLoader(torch.ones(6, 4), batch_size=2):
            net(x)
    with open_run(tmp_path / "run") as run:
        assert run.manifest["steps"] == 3
        assert {("data", "batch"), ("forward", "output")} <= {(phase, kind) for phase, _, kind, _ in places(run)}
