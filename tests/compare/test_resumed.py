"""Runs that go on from weights which no `torch.load` reads, and steps that only make room for a checkpoint."""

from __future__ import annotations

import random

import numpy as np
import torch
from opcapture import captured, compared
from torch import nn

from introspect_cli.records import Kind


def recorded(path, work, **options):
    """A capture as in a process of its own, where the generators begin in another state than training leaves them."""
    random.seed(99)
    np.random.seed(99)  # noqa: NPY002 - as above
    return captured(path, work, **options)


def test_a_step_that_makes_room_for_a_distributed_checkpoint_is_none_of_the_training(tmp_path):
    """`get_state_dict` steps a new optimizer with gradients and a learning rate of 0."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def work(*, room):
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(net.parameters())
        if room:
            state = get_state_dict(net, optimizer)[1]
            assert {float(state["state"][name]["step"]) for name in ("weight", "bias")} == {1}
        for _ in range(2):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    run = recorded(tmp_path / "b", lambda: work(room=True), record=frozenset({Kind.PARAM, Kind.GRAD, Kind.LOSS}))
    assert (
        compared(
            recorded(tmp_path / "a", lambda: work(room=False), record=frozenset({Kind.PARAM, Kind.GRAD, Kind.LOSS})),
            run,
        ).counts.steps_b
        == 2
    )
