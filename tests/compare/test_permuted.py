"""Rows, channels or samples in another order are told as that, and no other difference is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import introspect_cli

ORDERED = "by its statistics the same values in another order"


def run(path, *, batch=lambda x: x, between=lambda x: x, weight=lambda w: w, tokens=False):
    torch.manual_seed(0)
    first = nn.Embedding(64, 8) if tokens else nn.Linear(6, 8)
    data = torch.randint(0, 64, (5, 6)) if tokens else torch.randn(5, 6)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = first, nn.Linear(8, 1)

        def forward(self, x):
            return self.head(between(self.first(x)))

    net = Net()
    with torch.no_grad():
        net.head.weight.copy_(weight(net.head.weight))
    with introspect_cli.recording(net, path, source=False):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(batch(data)).sum().backward()
        optimizer.step()
    return path


CHANGES = {
    "rows": {"batch": lambda x: x.flip(0)},
    "features": {"batch": lambda x: x[:, [1, 0, 2, 3, 4, 5]]},
    "channels": {"between": lambda x: x.roll(1, -1)},
    "weight": {"weight": lambda w: w.flip(1)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_permuted_is_reported_as_the_same_values_in_another_order(tmp_path, name):
    result = introspect_cli.diff(run(tmp_path / "a"), run(tmp_path / "b", **CHANGES[name]))
    assert ORDERED in result.sentence, result.sentence


def test_permuted_tokens_are_reported_too(tmp_path):
    other = run(tmp_path / "b", tokens=True, batch=lambda x: x.flip(1))
    assert ORDERED in introspect_cli.diff(run(tmp_path / "a", tokens=True), other).sentence


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: -x, id="sign"),
        pytest.param(lambda x: x + torch.eye(5, 6) * 0.01, id="few-elements"),
        pytest.param(lambda x: x * (1 + 1e-7), id="rounding"),
    ],
)
def test_other_values_are_never_called_a_permutation(tmp_path, change):
    result = introspect_cli.diff(run(tmp_path / "a"), run(tmp_path / "b", batch=change))
    assert result.first is not None
    assert "another order" not in result.sentence, result.sentence


def test_one_element_of_a_large_tensor_is_no_permutation(tmp_path):
    runs = []
    for name, more in (("a", 0.0), ("b", 2e-6)):
        data = torch.linspace(0.5, 1.5, 1 << 20)
        data[7] += more
        with introspect_cli.recording(net := nn.Identity(), tmp_path / name, source=False):
            net(data)
        runs.append(tmp_path / name)
    result = introspect_cli.diff(*runs)
    assert result.first is not None
    assert "another order" not in result.sentence, result.sentence
