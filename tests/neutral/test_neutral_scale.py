"""Much of everything: modules by the thousand, thousands of layers one inside another, new modules at every step.

CI runs a slice of each; the size that is meant runs with `pytest -m sweep`.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
from logs import documents_of, frames_of
from neutrality import Seen, assert_neutral, assert_same, mlp, trajectory, watched
from torch import nn

from introspect_cli.store.files import LIMIT_DOCUMENT
from introspect_cli.store.frames import LAYOUTS, MODULES, SITES
from introspect_cli.store.run import RunState, open_run
from introspect_cli.store.verify import verify_run


def sizes(small, large):
    """A slice, and what is meant."""
    return pytest.mark.parametrize("count", [small, pytest.param(large, marks=pytest.mark.sweep)])


def resident():
    """Bytes of memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Tiny(nn.Module):
    """One number."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


@sizes(1000, 20_000)
def test_twenty_thousand_tiny_modules_train_the_same(tmp_path, count):
    def train(log):
        net = nn.Sequential(*[Tiny() for _ in range(count)])
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        for _ in range(2):
            loss = log.loss(net(torch.ones(4)).sum())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        log(net)

    seen = assert_neutral(train, tmp_path / "run")
    seen.assert_losses()
    last = f"Sequential.{count - 1}"
    assert len(seen.of("output", step=1, phase="forward")) == count + 1
    assert len(seen.of("grad", step=1)) == count
    assert seen.calls("output", last, step=1) == [0]
    assert verify_run(tmp_path / "run").findings == ()


NO_ROOM = "the settings optimizers are not recorded: they are larger than a store allows"


class Inside(nn.Module):
    """A layer that holds all further ones."""

    def __init__(self, inner):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.i = inner

    def forward(self, x):
        return self.i(self.linear(x)) if self.i is not None else x


@sizes(150, 2000)
def test_two_thousand_nested_layers_train_the_same(tmp_path, count):
    """Torch's own code takes three python frames a level, and its lists of parts one a level more."""
    net = None
    for _ in range(count):
        net = Inside(net)

    def train(log):
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.eye(2) if parameter.dim() == 2 else torch.zeros(2))
                parameter.grad = None
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        for _ in range(2):
            log.loss(net(torch.ones(1, 2)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        log([value.detach().clone() for value in net.parameters()])

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 10 * count)
    try:
        bare = trajectory(train)
        with watched(tmp_path / "run") as session:
            captured = trajectory(train)
    finally:
        sys.setrecursionlimit(limit)
    assert_same(bare, captured)
    assert session._guard.details == []
    assert session._guard.sentences == ([NO_ROOM] if count == 2000 else [])  # sixteen million letters
    seen = Seen(tmp_path / "run", captured)
    seen.assert_losses()
    assert len(seen.of("output", step=1, phase="forward")) == 2 * count - 1
    assert len(seen.of("grad", step=1)) == 2 * (count - 1)
    assert verify_run(tmp_path / "run").findings == ()


def train_mlp():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    for _ in range(2):
        net(torch.ones(4, 8)).sum().backward()
        optimizer.step()


def test_settings_without_room_cost_the_run_nothing_else(tmp_path, monkeypatch):
    from introspect_cli.store.run_writer import documents

    dump = documents.dump

    def padded(value):
        """The document of optimizers, a list of them, is too large."""
        return dump(value) + b"\n" * (LIMIT_DOCUMENT if isinstance(value, list) else 0)

    def written(name):
        train_mlp()
        return documents_of(tmp_path / name).keys()

    with watched(tmp_path / "whole"):
        whole = written("whole")
    monkeypatch.setattr(documents, "dump", padded)
    with watched(tmp_path / "run") as session:
        assert written("run") == whole - {"optimizers"}
    assert session._guard.sentences == [NO_ROOM]
    with open_run(tmp_path / "run") as run:
        assert run.state is RunState.COMPLETE
        assert len(run.rank(0).steps) == 2


@sizes(200, 10_000)
def test_neither_steps_nor_modules_made_anew_at_each_leak_anything(tmp_path, count):
    """Neither the names, on disk or read, nor the memory grow with the steps."""
    held = {}
    shared = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(shared.parameters(), lr=1e-3)
    with watched(tmp_path / "run"):
        for step in range(count):
            head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
            head_optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
            nn.MSELoss()(head(shared(torch.randn(16, 64))), torch.zeros(16, 1)).backward()
            head_optimizer.step()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            if step in (count // 2, count - 1):
                gc.collect()
                held[step] = (len(gc.get_objects()), resident())
    first, last = held
    assert held[last][0] - held[first][0] < 1000  # names of what is gone are dropped by the hundred
    assert held[last][1] - held[first][1] < 16e6
    with open_run(tmp_path / "run") as run:
        reader = run.rank(0)
        assert len(set(reader.sites.fqn)) < 40
        assert len(reader.steps) >= count
    kinds = [frame.kind for frame in frames_of(tmp_path / "run" / "rank0")[1]]
    assert all(0 < kinds.count(kind) < 10 for kind in (SITES, LAYOUTS, MODULES)), kinds
