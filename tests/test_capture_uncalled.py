"""A model that is only called by `.forward()` shows no inputs and outputs; the last word of a capture says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from opcapture import QUICK
from torch import nn

from introspect_cli.capture.session import Session
from introspect_cli.script import Ending


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
    told = capsys.readouterr().err
    assert "recorded 1 step" in told
    assert ("no module was called, so no inputs and outputs are in it" in told) == forward_alone
