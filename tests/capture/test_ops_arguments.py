"""With --level op, arguments that functions were called with are on record, and the answer names those that differ."""

from __future__ import annotations

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional

import introspect_cli


class Net(nn.Module):
    def __init__(self, said):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self._told = said  # not plain: no attribute of the module tells of it

    def forward(self, x):
        x = functional.gelu(self.lin(x), approximate=self._told.get("approximate", "none"))
        x = functional.layer_norm(x, (4,), eps=self._told.get("eps", 1e-5))
        return functional.leaky_relu(x, self._told.get("slope", 0.01))


def train(path, said, late=None):
    torch.manual_seed(0)
    net = Net(dict(said))
    with introspect_cli.recording(net, path, level="op"):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2):
            net._told.update(late or {} if step else {})
            optimizer.zero_grad()
            net(torch.ones(2, 4) * torch.arange(4)).square().sum().backward()
            optimizer.step()
    return path


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"approximate": "tanh"}, "cause: argument approximate none -> tanh."),
        ({"eps": 0.5}, "cause: argument eps 1e-05 -> 0.5."),
        ({"slope": 0.3}, "cause: argument negative_slope 0.01 -> 0.3."),
    ],
)
def test_the_argument_that_differs_is_named(tmp_path, said, words):
    sentence = introspect_cli.diff(train(tmp_path / "a", {}), train(tmp_path / "b", said)).sentence
    assert words in sentence
    assert "has different options or a different kernel" not in sentence


def test_arguments_are_noted_once(tmp_path):
    train(tmp_path / "a", {})
    found = yaml.safe_load((tmp_path / "a/settings/operators.yaml").read_text())
    assert found["forward Net 0 aten.leaky_relu.default"] == {"negative_slope": 0.01}
    assert found["forward Net 0 aten.native_layer_norm.default"] == {"normalized_shape": "[4]", "eps": 1e-05}
