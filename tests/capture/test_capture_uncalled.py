"""A model that is only called by `.forward()` shows no inputs and outputs; the last word of a capture says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from opcapture import QUICK, captured, records
from torch import nn

from introspect_cli.capture.session import Session
from introspect_cli.records import Kind
from introspect_cli.script.ending import Ending
from introspect_cli.store.read.run import open_run


def train(call):
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    call(net, torch.ones(2, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("forward_alone", [True, False])
def test_the_last_word_tells_of_a_model_that_was_not_called(tmp_path, capsys, forward_alone):
    session = Session(None, replace(QUICK, output=tmp_path / "run", force=True, quiet=False))
    try:
        session.attach()
        train((lambda net, x: net.forward(x)) if forward_alone else (lambda net, x: net(x)))
    finally:
        session.finish(Ending(0, "returned"))
    session.last_word()
    said = capsys.readouterr().err
    assert "recorded 1 step" in said
    assert ("no module was called, so no inputs and outputs are in it" in said) == forward_alone


def resumed(model):
    """Train as a script that resumes from a checkpoint: its optimizer makes its state before the model is called."""
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        if step == 0:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        else:
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)), "Sequential.1.bias"),
        (lambda: nn.Linear(4, 1), "Linear.bias"),
    ],
)
def test_parameters_have_the_names_of_their_model_where_the_optimizer_steps_first(tmp_path, build, name):
    """A model is found by its parts, or is alone."""
    session = Session(None, replace(QUICK, output=tmp_path / "run", force=True))
    try:
        session.attach()
        resumed(build())
    finally:
        session.finish(Ending(0, "returned"))
    with open_run(tmp_path / "run") as run:
        for step in range(3):
            for kind in ("grad", "param", "optimizer_state"):
                found = [r.site.fqn for r in run.rank(0).records(step) if r.site.kind.value == kind]
                assert name in found
                assert not any("Adam.group" in fqn for fqn in found)
        assert name in run.settings["optimizers"][0]["groups"][0]["params"]
        assert not any("no module was called" in said for said in run.manifest["not_observed"])


def test_parameters_have_their_names_though_the_model_only_runs_with_others_in_their_place(tmp_path):
    def work():
        net = nn.Sequential(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def loss(weights, x):
            return torch.func.functional_call(net, weights, (x,)).square().sum()

        torch.func.vmap(loss, (None, 0))(dict(net.named_parameters()), torch.ones(3, 2)).sum().backward()
        optimizer.step()

    found = {r.site.fqn for r in records(captured(tmp_path / "run", work)) if r.site.kind is Kind.GRAD}
    assert found == {"Sequential.0.weight", "Sequential.0.bias"}
