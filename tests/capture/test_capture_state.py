"""Tensors that something other than the end of an optimizer step changes are recorded again; children are told of."""

from __future__ import annotations

import copy

import pytest
import torch
from opcapture import captured, records
from torch import multiprocessing, nn
from torch.utils.data import DataLoader

from introspect_cli.records import Kind, Phase
from introspect_cli.store.read.run import open_run

TENSORS = {Kind.PARAM, Kind.BUFFER}


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def fit(between, steps=4):
    """Train; before step 2 something is done to the model."""

    def work():
        torch.manual_seed(0)
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        first = copy.deepcopy(net.state_dict())
        for step in range(steps):
            if step == 2:
                between(net, first)
            for _ in range(2):
                net(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return work


def found(path, step):
    """FQNs and calls of what was recorded at the start of a step."""
    return {
        (r.site.fqn, r.site.call) for r in records(path, step) if r.site.phase is Phase.START and r.site.kind in TENSORS
    }


ALL = {f"Sequential.{name}" for name in network().state_dict()}


@pytest.mark.parametrize(
    ("between", "changed"),
    [
        (lambda net, first: None, set()),
        (lambda net, first: net.load_state_dict(first), ALL),
        (lambda net, first: net.load_state_dict(first, assign=True), ALL),
        (lambda net, first: net[0].bias.detach().add_(1), {"Sequential.0.bias"}),
        (lambda net, first: net[1].reset_running_stats(), {name for name in ALL if "running" in name or "num" in name}),
        (lambda net, first: setattr(net[2].weight, "data", torch.ones(2, 4)), {"Sequential.2.weight"}),
        (lambda net, first: net[2].weight.sum().item(), set()),
    ],
    ids=["nothing", "loaded", "assigned", "in place", "buffers", "new memory", "looked at"],
)
def test_what_changed_since_it_was_recorded_is_recorded_again(tmp_path, between, changed):
    path = captured(tmp_path / "run", fit(between))
    assert {name for name, _ in found(path, 0)} == ALL
    assert found(path, 1) == set()
    assert found(path, 2) == {(name, 0) for name in changed}
    assert found(path, 3) == set()


def idle(*_):
    """What the children of these tests do."""


class Idle(multiprocessing.get_context("fork").Process):
    def run(self):
        pass


@pytest.mark.parametrize(
    ("start", "answered"),
    [(lambda fork: fork.Process(target=idle), ["idle"]), (lambda fork: Idle(), ["Idle"]), (lambda fork: None, [])],
    ids=["function", "class", "none"],
)
def test_processes_that_the_script_starts_are_reported(tmp_path, start, answered):
    def work():
        process = start(multiprocessing.get_context("fork"))
        if process is not None:
            process.start()
            process.join()
        list(DataLoader(torch.arange(4), num_workers=1, multiprocessing_context="fork"))
        nn.Linear(1, 1)(torch.ones(1, 1))

    with open_run(captured(tmp_path / "run", work)) as run:
        assert run.manifest["children"] == answered
        said = [text for text in run.manifest["not_observed"] if "in a process of its own" in text]
    assert [text.split()[3] for text in said] == answered


def test_spawned_ranks_are_reported_by_their_function(tmp_path):
    def work():
        multiprocessing.start_processes(idle, nprocs=2, start_method="fork")
        nn.Linear(1, 1)(torch.ones(1, 1))

    with open_run(captured(tmp_path / "run", work)) as run:
        assert run.manifest["children"] == ["idle"]
