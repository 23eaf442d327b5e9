"""Calls of modules and operators: all are recorded, what is the script's passes, and nothing is left behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from neutrality import Seen, assert_same, trajectory, watched
from torch import nn


class Everything(nn.Module):
    """Modules called plainly and in every other way."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
        self.shared = nn.Linear(8, 8)
        self.two = nn.Bilinear(8, 8, 8)
        self.by_name = ByName()
        self.wide = nn.Linear(8, 4096)
        self.inplace = nn.ReLU(inplace=True)
        self.nested = Nested()

    def forward(self, x):
        y = self.inner(x)
        y = self.shared(self.shared(y))
        y = self.two(y, y)
        y = self.by_name(y, scale=2.0) + self.nested([y, {"a": y}])["sum"]
        wide = self.inplace(self.wide(y))
        return y.sum() + wide.mean()


class ByName(nn.Module):
    def forward(self, x, *, scale):
        return x * scale


class Nested(nn.Module):
    def forward(self, values):
        return {"sum": values[0] + values[1]["a"]}


def train(log):
    net = Everything()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(6, 8, requires_grad=True)
        loss = net(x)
        loss.backward(retain_graph=True)
        if step == 2:
            loss.backward()  # gradients come a second time
        with torch.no_grad():
            net.inner(x)  # a part by itself, in training mode
        log(loss, x.grad, net, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def run(path, train=train, **options):
    torch.manual_seed(3)
    with watched(path, **options):
        return trajectory(train)


def train_with_old_graphs(log):
    """Graphs outlive their steps, and gradients flow through them again later."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # what the graphs need stays as it is
    kept = []
    for step in range(5):
        kept.append(net(torch.randn(4, 8)).sum())
        kept[-1].backward(retain_graph=True)
        if step in (2, 3):
            kept[step - 2].backward()
            kept[step - 1].backward(retain_graph=True)
        log(kept[-1], net, optimizer)
        optimizer.step()


def test_a_graph_that_lives_on_keeps_its_hooks_to_itself(tmp_path):
    assert_same(trajectory(train_with_old_graphs), run(tmp_path / "run", train_with_old_graphs))
    seen = Seen(tmp_path / "run")
    assert [len(seen.of("grad_output", step=step)) for step in range(5)] == [4, 4, 12, 12, 4]


def test_what_a_module_raises_reaches_the_script_and_the_next_call_is_recorded(tmp_path):
    class Raises(nn.Module):
        error = None

        def forward(self, x):
            if self.error is not None:
                raise self.error
            return x * 2

    net = nn.Sequential(nn.Linear(8, 8), Raises(), nn.Linear(8, 1))
    with watched(tmp_path / "run") as session:
        net(torch.randn(2, 8)).sum().backward()
        for error in (ValueError("mine"), KeyboardInterrupt(), SystemExit(3)):
            Raises.error = error
            with pytest.raises(type(error)) as caught:
                net(torch.randn(2, 8))
            assert caught.value is error
            assert session.probes.modules.stack.calls == []
        Raises.error = None
        net(torch.randn(2, 8)).sum().backward()
        assert session._guard.details == []
    seen = Seen(tmp_path / "run")
    assert len(seen.of("output", "Sequential.1")) == 2
    assert len(seen.of("grad_output", "Sequential.1")) == 2


def test_modules_that_call_themselves_without_end_end_as_without_us(tmp_path):
    class Endless(nn.Module):
        def forward(self, x):
            return self(x)

    net = nn.Sequential(Endless())
    with watched(tmp_path / "run") as session:
        for _ in range(2):
            with pytest.raises(RecursionError):
                net(torch.randn(2))
        assert session.probes.modules.stack.calls == []


def test_nothing_of_a_capture_lives_on(tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with watched(tmp_path / "run") as session:
        for _ in range(2):
            loss = net(torch.randn(2, 8)).sum()
            loss.backward(retain_graph=True)
    probe = weakref.ref(session.probes.modules)
    del session, loss
    gc.collect()
    assert probe() is None
