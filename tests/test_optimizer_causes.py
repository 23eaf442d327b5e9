"""Why an optimizer leaves a parameter alone in one run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import introspect_cli


def train(path, *, rates=(0.1, 0.1)):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with introspect_cli.recording(net, path):
        optimizer = torch.optim.AdamW(net.parameters())
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            net.zero_grad()
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    return path


@pytest.mark.parametrize("backwards", [False, True])
def test_a_warm_up_that_begins_with_zero_is_named_by_its_learning_rates(tmp_path, backwards):
    runs = [train(tmp_path / "a", rates=(0.0, 0.05)), train(tmp_path / "b", rates=(0.05, 0.1))]
    sentence = introspect_cli.diff(*(reversed(runs) if backwards else runs)).sentence
    change, side = ("lr 0.05 -> 0", "b") if backwards else ("lr 0 -> 0.05", "a")
    assert f"The cause is {change}: with lr 0, AdamW leaves it as it was in {side}." in sentence
    assert "not among its parameters" not in sentence
