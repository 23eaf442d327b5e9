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


def test_what_changes_between_two_calls_of_a_step_is_distinguished_by_its_count(tmp_path):
    def work():
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                net.weight.clamp_(-0.1, 0.1)
            net(torch.ones(1, 2)).sum().backward()

    path = captured(tmp_path / "run", work)
    assert found(path, 0) == {("Linear.weight", 0), ("Linear.bias", 0)}
    assert found(path, 1) == {("Linear.weight", 0)}


def test_a_line_search_shows_what_it_tries_under_the_models_names(tmp_path):
    def work():
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        x, y = torch.randn(8, 3), torch.randn(8, 1)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)

        def closure():
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    params = [r for r in records(captured(tmp_path / "run", work)) if r.site.kind is Kind.PARAM]
    tried = [(r.site.fqn, r.site.call) for r in params if r.site.phase is Phase.OPTIMIZER]
    assert tried == [(name, call) for call in (1, 2, 0) for name in ("Linear.weight", "Linear.bias")]
    assert len({r.summary.checksum for r in params if r.site.fqn == "Linear.weight"}) == 3  # the last one tried stands


def idle(*_):
    """What the children of these tests do."""


class Idle(multiprocessing.get_context("fork").Process):
    def run(self):
        pass


@pytest.mark.parametrize(
    ("start", "answered"),
    [
        (lambda fork: fork.Process(target=idle), ["idle"]),
        (lambda fork: Idle(), ["Idle"]),
        (lambda fork: None, []),
    ],
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


def test_what_an_engine_of_deepspeed_wraps_keeps_the_names_of_the_model(tmp_path):
    """So that a run under it is compared with one without."""
    wrapper = type("DeepSpeedEngine", (nn.Module,), {"forward": lambda self, x: self.module(x)})
    engine = wrapper()
    engine.module = nn.Sequential(nn.Linear(2, 2))
    found = captured(tmp_path / "run", lambda: engine(torch.ones(1, 2)).sum().backward())
    names = {record.site.fqn for record in records(found) if record.site.kind is Kind.OUTPUT}
    assert names == {"Sequential", "Sequential.0"}
