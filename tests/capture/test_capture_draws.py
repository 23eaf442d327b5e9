"""Random numbers drawn within a step: who drew them, and what follows from one draw more."""

import random

import numpy as np
import torch
from neutrality import watched
from torch import nn

from introspect_cli.capture.draws import Draws, state_of
from introspect_cli.records import Kind
from introspect_cli.store.read.run import open_run


def draw_here_and_there():
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kept = random.getstate()
    changes = (
        lambda: None,
        lambda: random.gauss(0, 1),
        lambda: random.gauss(0, 1),
        lambda: np.random.randn(1),  # noqa: NPY002 - the global generator is what is recorded
        lambda: np.random.randn(1),  # noqa: NPY002 - as above
        lambda: None,
        lambda: random.seed(3),
        lambda: random.setstate(kept),
        lambda: np.random.seed(4),  # noqa: NPY002 - as above
        lambda: None,
    )
    for change in changes:
        change()
        net(torch.ones(3, 2)).sum().backward()
        optimizer.step()


def states(path):
    with open_run(path) as run:
        rank = run.rank(0)
        kept = [[each for each in rank.records(entry.step) if each.site.kind is Kind.RNG] for entry in rank.steps]
        return [
            {each.site.path or each.site.fqn: (each.summary.checksum, each.summary.text) for each in step}
            for step in kept
        ]


def test_states_that_stand_as_they_did_are_recorded_as_if_they_were_asked_for(tmp_path, monkeypatch):
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002 - as above
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 - as above
    with watched(tmp_path / "reused"):
        draw_here_and_there()
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002 - as above
    monkeypatch.setattr(Draws, "stand", lambda *_: None)
    with watched(tmp_path / "asked"):
        draw_here_and_there()
    reused = states(tmp_path / "reused")
    assert reused == states(tmp_path / "asked")
    python, numpy = ([step[name] for step in reused] for name in ("python", "numpy"))
    assert [python.index(each) for each in python] == [0, 1, 2, 2, 2, 2, 6, 0, 0, 0]
    assert [numpy.index(each) for each in numpy] == [0, 0, 0, 3, 4, 4, 4, 4, 8, 8]


def test_a_state_is_read_inside_a_transform_of_torch_func_too():
    generator, seen = torch.Generator().manual_seed(3), []
    torch.func.grad(lambda x: (seen.append(state_of(generator)), x.sum())[1])(torch.ones(2))
    assert seen == [state_of(generator)] != [0]
