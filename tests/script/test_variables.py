"""What the script calls its models: recorded past any method of its classes, used where a class is not enough."""

from __future__ import annotations

import copy

import pytest
import torch
from opcapture import captured, compared
from torch import nn

from introspect_cli.compare.result import Verdict
from introspect_cli.records import Kind
from introspect_cli.store.run import open_run


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x)))


class Agent:
    """Holds a network and a copy of it; whatever asks it for anything that it does not hold is told off."""

    def __init__(self):
        self.network = Net()
        self.target_network = copy.deepcopy(self.network)

    def __getattr__(self, name):
        raise AssertionError(name)

    @property
    def models(self):
        raise AssertionError


def learning(*, swapped=False, rate=0.1, seed=0, scale=1.0, other_seed=None):
    """Training of an agent's network towards what its target says; which of the two runs first can be swapped."""

    def work():
        torch.manual_seed(seed)
        agent = Agent()
        if other_seed is not None:
            torch.manual_seed(other_seed)
            agent.target_network = Net()
        optimizer = torch.optim.SGD(agent.network.parameters(), lr=rate)
        source = torch.Generator().manual_seed(1)
        for _ in range(3):
            x = torch.randn(5, 4, generator=source)
            order = ("target_network", "network") if swapped else ("network", "target_network")
            given = {}
            for name in order:
                with torch.set_grad_enabled(name == "network"):
                    given[name] = agent.__dict__[name](x)
            loss = (given["network"] - scale * 0.9 * given["target_network"] - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return work


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("runs") / "plain", learning())


def test_a_model_is_recorded_with_the_variable_that_holds_it(plain):
    with open_run(plain) as run:
        found = {each.fqn: each.variable for each in run.rank(0).modules}
    assert (found["Net"], found["Net#2"]) == ("agent.network", "agent.target_network")
    assert found["Net.inner"] == ""


@pytest.mark.parametrize("kinds", [None, ("param",), ("loss", "param", "grad"), ("output",)])
def test_a_copy_called_first_is_reported_from_its_original(plain, tmp_path, kinds):
    record = {} if kinds is None else {"record": frozenset(map(Kind, kinds))}
    a = captured(tmp_path / "a", learning(), **record) if kinds else plain
    b = captured(tmp_path / "b", learning(swapped=True), **record)
    result = compared(a, b)
    assert result.verdict is Verdict.SAME, result.sentence
    assert "Net is Net#2 in b" in result.sentence


def test_where_no_value_tells_them_apart_the_variable_does(tmp_path):
    """Another seed: no value is shared, and each network is still compared with its own."""
    a = captured(tmp_path / "a", learning(other_seed=5))
    b = captured(tmp_path / "b", learning(swapped=True, seed=3, other_seed=5))
    result = compared(a, b)
    assert result.verdict is Verdict.DIVERGED
    names = {(change.a, change.b) for change in result.structure if change.change == "renamed"}
    assert names == {("Net", "Net#2"), ("Net#2", "Net")}


def test_one_model_alone_is_called_by_its_class(tmp_path):
    def work(rate):
        model = nn.Linear(2, 2)
        nn.init.eye_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    runs = [captured(tmp_path / name, lambda rate=rate: work(rate)) for name, rate in (("a", 0.1), ("b", 0.2))]
    assert not [note for note in compared(*runs).notes if "in the script" in note]


def test_a_plain_variable_names_a_model_before_a_place_and_a_place_where_there_is_none(tmp_path):
    def work():
        models, held, wanted = {"teacher": Net()}, [], Net()
        held.append(wanted)
        (wanted(torch.ones(1, 4)) + models["teacher"](torch.ones(1, 4))).sum().backward()

    with open_run(captured(tmp_path / "run", work)) as run:
        found = {each.fqn: each.variable for each in run.rank(0).modules}
    assert (found["Net"], found["Net#2"]) == ("wanted", "models['teacher']")
