"""Evaluation never shifts training: the same training with and without it is the same run."""

from __future__ import annotations

import copy

import pytest
import torch
from neutrality import watched
from torch import nn
from torch.utils.data import DataLoader

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.options import DiffOptions
from introspect_cli.compare.result import Verdict
from introspect_cli.store.reader import open_run

STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def without_gradients(net, average, criterion, loader):
    del average
    net.eval()
    with torch.no_grad():
        for x, y in loader:
            criterion(net(x), y)
    net.train()


def gradients_off_around_the_model_only(net, average, criterion, loader):
    del average
    net.eval()
    for x, y in loader:
        with torch.no_grad():
            criterion(net(x), y)
    net.train()


def gradients_left_on(net, average, criterion, loader):
    del average
    net.eval()
    for x, y in loader:
        criterion(net(x), y)
    net.train()


def averaged_copy(net, average, criterion, loader):
    del net
    with torch.no_grad():
        for x, y in loader:
            criterion(average(x), y)


def plain_tensors(net, average, criterion, loader):
    del average, loader
    with torch.no_grad():
        criterion(net(torch.ones(2, 4)), torch.zeros(2, dtype=torch.long))


WAYS = [without_gradients, gradients_off_around_the_model_only, averaged_copy, plain_tensors]


def train(evaluate, when):
    torch.manual_seed(3)
    x, y = torch.randn(STEPS * 4, 4), torch.randint(0, 2, (STEPS * 4,))
    # A loader draws a seed for its workers from its generator: with one of its own, evaluation leaves training's alone.
    training = DataLoader(list(zip(x, y, strict=True)), batch_size=4, generator=torch.Generator())
    validation = DataLoader(list(zip(-x, y, strict=True)), batch_size=5, generator=torch.Generator())
    net, criterion = Net(), nn.CrossEntropyLoss()
    average = copy.deepcopy(net).eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if when == "before":
        evaluate(net, average, criterion, validation)
    for step, (inputs, target) in enumerate(training):
        if when == "between a batch and its use" and step == 1:
            evaluate(net, average, criterion, validation)
        loss = criterion(net(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if when == "in the middle" and step == 1:
            evaluate(net, average, criterion, validation)
    if when == "after":
        evaluate(net, average, criterion, validation)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone") / "run"
    with watched(path):
        train(lambda *_: None, "never")
    return path


def places(run):
    sites = run.rank(0).sites
    return set(zip(sites.phase, sites.fqn, sites.kind, sites.call.tolist(), strict=True))


def assert_same(a, b):
    with open_run(a) as one, open_run(b) as other:
        result = compare_runs(one, other, DiffOptions(), [])
        assert result.verdict is Verdict.SAME, result.sentence
        assert one.manifest["steps"] == other.manifest["steps"] == STEPS


@pytest.mark.parametrize("when", ["before", "between a batch and its use", "in the middle", "after"])
@pytest.mark.parametrize("evaluate", WAYS, ids=lambda way: way.__name__)
def test_training_is_not_shifted(tmp_path, alone, evaluate, when):
    with watched(tmp_path / "run"):
        train(evaluate, when)
    assert_same(alone, tmp_path / "run")


@pytest.mark.parametrize("when", ["between a batch and its use", "in the middle", "after"])
def test_gradients_left_on_in_eval_mode(tmp_path, alone, when):
    with watched(tmp_path / "run"):
        train(gradients_left_on, when)
    assert_same(alone, tmp_path / "run")


@pytest.mark.parametrize("evaluate", WAYS[:2], ids=lambda way: way.__name__)
def test_evaluation_has_sites_and_calls_of_its_own(tmp_path, evaluate):
    with watched(tmp_path / "run", eval=True):
        train(evaluate, "in the middle")
    with open_run(tmp_path / "run") as run:
        found = {place[1:] for place in places(run) if place[0] == "eval"}
    assert {call for fqn, kind, call in found if (fqn, kind) == ("CrossEntropyLoss", "output")} == {0, 1, 2}
    assert {call for fqn, kind, call in found if (fqn, kind) == ("DataLoader", "batch")} == {0, 1, 2}


def test_a_teacher_belongs_to_training(tmp_path):
    def distill():
        torch.manual_seed(1)
        net, teacher, criterion = Net(), Net().eval(), nn.MSELoss()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x in DataLoader(torch.randn(8, 4), batch_size=4):
            with torch.no_grad():
                wanted = teacher(x)
            criterion(net(x), wanted).backward()
            optimizer.step()

    with watched(tmp_path / "run"):
        distill()
    with open_run(tmp_path / "run") as run:
        phases = {phase for phase, fqn, kind, _ in places(run) if fqn in ("Net", "Net#2") and kind == "output"}
    assert phases == {"forward"}


def test_a_script_that_only_runs_a_model_is_recorded_without_being_asked_to(tmp_path):
    torch.manual_seed(0)
    net = Net().eval()
    with watched(tmp_path / "run"), torch.no_grad():
        for x in DataLoader(torch.ones(6, 4), batch_size=2):
            net(x)
    with open_run(tmp_path / "run") as run:
        assert run.manifest["steps"] == 3
        assert {("data", "batch"), ("forward", "output")} <= {(phase, kind) for phase, _, kind, _ in places(run)}
