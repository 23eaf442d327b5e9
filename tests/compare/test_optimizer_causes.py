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
    assert f"cause: {change}; in {side} the optimizer (AdamW) leaves it as it was." in sentence
    assert "not among its parameters" not in sentence


def two_optimizers(path, *, swapped=False, crossed=False, record="default"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with introspect_cli.recording(net, path, record=record):
        held = [net[2], net[0]] if swapped else [net[0], net[2]]
        adam = torch.optim.AdamW(held[0].parameters(), lr=1e-3)
        sgd = torch.optim.SGD(held[1].parameters(), lr=1e-2)
        for _ in range(2):
            net.zero_grad()
            net(torch.ones(2, 4)).sum().backward()
            for optimizer in (sgd, adam) if crossed else (adam, sgd):
                optimizer.step()
    return path


def test_optimizers_whose_parameters_were_exchanged_are_reported_by_what_each_steps(tmp_path):
    runs = two_optimizers(tmp_path / "a"), two_optimizers(tmp_path / "b", swapped=True)
    sentence = introspect_cli.diff(*runs).sentence
    assert "AdamW steps it in a, SGD in b" in sentence
    assert "cleared" not in sentence


def adversarial(path, *, fault, record="default"):
    """A discriminator and a generator with an optimizer each, of one class."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"d": nn.Linear(2, 1), "g": nn.Linear(2, 2)})
    noise = torch.randn(3, 4, 2)
    with introspect_cli.recording(net, path, record=record):
        first, second = (torch.optim.Adam(net[name].parameters(), lr=1e-2) for name in "dg")
        for number, values in enumerate(noise):
            net["d"].zero_grad()
            net["d"](net["g"](values).detach()).square().mean().backward()
            if fault != "left out" or number:
                first.step()
            net["g"].zero_grad()
            net["d"](net["g"](values)).mean().backward()
            (first if fault == "always" or (fault == "twice" and not number) else second).step()
    return path


@pytest.mark.parametrize(
    ("fault", "record", "said"),
    [
        ("twice", "default", "step in a different order (Adam#2 in a; Adam in b)."),
        ("left out", "default", "the optimizers step in a different order (ModuleDict.d.bias in a; ModuleDict.g."),
    ],
)
def test_the_step_of_another_optimizer_is_reported_as_one(tmp_path, fault, record, said):
    runs = [adversarial(tmp_path / name, fault=how, record=record) for name, how in (("a", ""), ("b", fault))]
    sentence = introspect_cli.diff(*runs).sentence
    assert said in sentence
    assert "cleared" not in sentence
    assert "accumulated" not in sentence
