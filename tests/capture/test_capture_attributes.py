"""What a module is apart from its tensors is on record, from the step on at which it changed."""

from __future__ import annotations

import functools

import pytest
import torch
from opcapture import captured
from torch import nn

import introspect_cli
from introspect_cli.store.read.run import open_run


class Strange:
    """An object of the script's that must not be looked into."""

    def __getattribute__(self, name):
        raise AssertionError(name)

    def __eq__(self, other):
        raise AssertionError

    __hash__ = None


class Net(nn.Module):
    def __init__(self, eps=1e-5, p=0.1):
        super().__init__()
        self.norm, self.drop, self.conv = nn.LayerNorm(4, eps=eps), nn.Dropout(p), nn.Conv1d(2, 2, 3, padding=1)
        self.scale, self.label, self.ratio = 2, "wide", None
        self.api_key, self.num_tokens = "hunter2", 12
        self.calls, self.act = 0, nn.functional.gelu
        vars(self)["odd"] = Strange()

    @property
    def heads(self):
        raise AssertionError("a property was read")

    def extra_repr(self):
        raise AssertionError("extra_repr was called")

    def forward(self, x):
        self.calls += 1
        return self.drop(self.norm(self.act(self.conv(x)))) * self.scale


def seen_hook(_module, _args, _output):
    pass


def trained(steps=4, *, before=(), **options):
    """Train a net; `before` maps a step to what is done to the net before it."""

    def work():
        torch.manual_seed(0)
        net = Net(**options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(steps):
            dict(before).get(step, lambda _: None)(net)
            net(torch.randn(3, 2, 4)).sum().backward()
            optimizer.step()

    return work


def rows(path, fqn):
    with open_run(path) as run:
        return [(row.step, dict(row.attributes)) for row in run.rank(0).module_rows if row.fqn == fqn]


def changed(net):
    net.drop.p = 0.5
    net.norm.eval()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    hooked = {2: changed, 3: lambda net: net.conv.register_forward_hook(functools.partial(seen_hook))}
    return captured(tmp_path_factory.mktemp("attributes") / "run", trained(12, before=hooked))


def test_plain_attributes_are_written_with_the_tree(path):
    (step, net), *_ = rows(path, "Net")
    assert step == 0
    assert net == {
        "training": "True",
        "scale": "2",
        "label": "'wide'",
        "ratio": "None",
        "api_key": "<redacted>",
        "num_tokens": "12",
        "calls": "0",
        "act": "torch._C._nn.gelu",
    }
    assert rows(path, "Net.conv")[0][1]["kernel_size"] == "(3,)"


def test_changes_are_written_with_their_step(path):
    assert [(step, found["p"]) for step, found in rows(path, "Net.drop")] == [(0, "0.1"), (2, "0.5")]
    assert [(step, found["training"]) for step, found in rows(path, "Net.norm")] == [(0, "True"), (2, "False")]
    assert [(step, found.get("hooks")) for step, found in rows(path, "Net.conv")] == [
        (0, None),
        (3, "forward functools.partial"),
    ]


class Fresh(nn.Module):
    """A module that makes another one in each forward."""

    def __init__(self, eps):
        super().__init__()
        self.linear, self.eps = nn.Linear(4, 4), eps

    def forward(self, x):
        return nn.LayerNorm(4, eps=self.eps)(self.linear(x))


def test_a_module_that_is_made_in_each_forward_has_its_attributes_on_record(tmp_path):
    for name, eps in (("a", 1e-5), ("b", 1e-2)):
        torch.manual_seed(0)
        net = Fresh(eps)
        with introspect_cli.recording(net, tmp_path / name):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(3):
                net(torch.ones(2, 4)).square().sum().backward()
                optimizer.step()
    with open_run(tmp_path / "a") as run:
        rows = [row for row in run.rank(0).modules if row.fqn == "Fresh.LayerNorm" and row.attributes]
    assert len(rows) == 1  # as it is the same each time
    assert ("eps", "1e-05") in rows[0].attributes
    sentence = introspect_cli.diff(tmp_path / "a", tmp_path / "b").sentence
    assert "the output of Fresh.LayerNorm (LayerNorm)" in sentence
    assert sentence.endswith("Likely: eps 1e-05 -> 0.01.")
