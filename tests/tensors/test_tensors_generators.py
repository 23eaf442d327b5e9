"""The default generators are found in memory, and not a draw is missed."""

import random

import numpy as np
import pytest
import torch

from introspect_cli.tensors.generators import Generators

DRAWS = {
    "one number": ("torch", lambda: torch.rand(1)),
    "as many numbers as the state has words": ("torch", lambda: torch.rand(624)),
    "a normal number, of which one stays to spare": ("torch", lambda: torch.randn(1)),
    "the one to spare": ("torch", lambda: torch.randn(1)),
    "a permutation": ("torch", lambda: torch.randperm(5)),
    "dropout": ("torch", lambda: torch.nn.functional.dropout(torch.ones(3), 0.5)),
    "a seed": ("torch", lambda: torch.manual_seed(12)),
    "python": ("python", random.random),
    "numpy": ("numpy", lambda: np.random.rand(3)),  # noqa: NPY002 - the global generator is what is watched
}


@pytest.fixture
def watching():
    torch.manual_seed(3)
    generators = Generators()
    generators.watch([])
    return generators


def test_each_draw_is_noticed_once_and_of_the_right_generator(watching):
    assert watching.is_complete
    for what, (name, draw) in DRAWS.items():
        draw()
        assert watching.moved(), what
        assert [found for found, _ in watching.take_moved()] == [name], what
        assert not watching.moved(), what


def test_what_draws_nothing_or_puts_the_state_back_is_not_noticed(watching):
    torch.ones(3).sum()
    torch.rand(3, generator=torch.Generator())
    with torch.random.fork_rng():
        torch.rand(5)
    assert not watching.moved()
    assert watching.take_moved() == []


def test_the_state_reported_is_the_one_before_and_equal_states_are_reported_equal(watching):
    def states():
        torch.manual_seed(7)
        watching.take_moved()
        said = []
        for count in (1, 700, 2):
            torch.rand(count)
            said += [state for _, state in watching.take_moved()]
        return said

    first = states()
    assert states() == first
    assert len(set(first)) == 3
    torch.manual_seed(8)
    watching.take_moved()
    torch.rand(1)
    assert watching.take_moved()[0][1] not in first


class Philox:
    """As an accelerator's generator."""

    def __init__(self):
        self.offset = 0
        self.capturing = False

    def initial_seed(self):
        if self.capturing:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")
        return 5

    def get_offset(self):
        return self.offset


def test_accelerators_are_asked_for_seed_and_offset_and_left_alone_while_a_graph_is_captured(watching):
    device = Philox()
    watching.watch([("cuda:0", device)])
    assert watching.is_complete
    assert not watching.moved()
    device.offset = 4
    assert watching.moved()
    assert [name for name, _ in watching.take_moved()] == ["cuda:0"]
    device.offset, device.capturing = 8, True
    assert not watching.moved()
