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


@pytest.mark.parametrize("record", ["default", "param,grad,loss"])
def test_optimizers_that_step_in_another_order_are_reported_so_where_each_step_is_its_own(tmp_path, record):
    runs = [two_optimizers(tmp_path / name, crossed=name == "b", record=record) for name in "ab"]
    sentence = introspect_cli.diff(*runs).sentence
    assert "the optimizers step in a different order (AdamW in a; SGD in b)" in sentence


def by_closure(path, *, zero_grad=True):
    torch.manual_seed(0)
    net, data = nn.Linear(4, 1), torch.randn(8, 4)
    with introspect_cli.recording(net, path):
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

        def closure():
            if zero_grad:
                optimizer.zero_grad()
            loss = net(data).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return path


def test_zero_grad_that_is_missing_in_a_closure_is_named_though_later_evaluations_differ_too(tmp_path):
    runs = by_closure(tmp_path / "a"), by_closure(tmp_path / "b", zero_grad=False)
    sentence = introspect_cli.diff(*runs).sentence
    assert "in evaluation 1 of its closure" in sentence
    assert "plus that of the evaluation before: zero_grad is missing or late in b" in sentence


@pytest.mark.parametrize("record", ["default", "param,loss"])
def test_a_hyper_parameter_is_the_cause_only_where_all_else_is_on_record(tmp_path, introspect, record):
    script = """
import sys, torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(net.parameters(), lr=float(sys.argv[1]))
net(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""
    (tmp_path / "train.py").write_text(script)
    for name, rate in (("a", "0.1"), ("b", "0.2")):
        introspect("capture", "-q", "-o", name, "--record", record, "train.py", rate)
    answer = introspect("diff", "a", "b").stdout.split("\n\n")[0]
    certain = any(line.split()[:2] == ["cause", "lr"] for line in answer.splitlines())
    assert certain is (record == "default"), answer
    assert ("left     the optimizer, what was not recorded" in answer) is (record != "default"), answer


@pytest.mark.parametrize("record", ["default", "param,grad,loss"])
def test_another_class_of_optimizer_is_named_though_no_step_of_it_may_be_on_record(tmp_path, record):
    for name, made in (("a", torch.optim.Adam), ("b", torch.optim.AdamW)):
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        with introspect_cli.recording(net, tmp_path / name, record=record):
            optimizer = made(net.parameters(), lr=0.1, weight_decay=0.1)
            net(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
    sentence = introspect_cli.diff(tmp_path / "a", tmp_path / "b").sentence
    assert "the optimizer is Adam in a and AdamW in b." in sentence
