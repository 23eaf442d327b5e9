"""The compiled intake's one call for many tensors: what it notes, and when it leaves all or some of it to others."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from summaries import taken

from introspect_cli.tensors import kernels
from introspect_cli.tensors.summarizer import Summarizer


class Into:
    """What a recorder has, with a summarizer that has met tensors of shape (5,)."""

    def __init__(self):
        self.summarizer = Summarizer()
        self.rows, self.slots = kernels.new_numbers(), kernels.new_numbers()
        self.times = kernels.KERNELS.times()
        self.lock = kernels.new_lock()
        self.summarizer.add(torch.ones(5))
        taken(self.summarizer)

    def said(self):
        self.summarizer.intake.into(self.rows, self.slots, self.times, self.lock)
        return self

    def record_all(self, sites, tensors):
        return self.summarizer.intake.record_all(sites, tensors)

    @property
    def noted(self):
        return self.rows, self.slots, {site: times for site in range(10) if (times := self.times.of(site))}


@pytest.fixture
def into():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as many as the script has called in any case
    made = Into()
    if made.summarizer.intake is None or not made.summarizer._engine.team[kernels.PARALLEL]:
        pytest.skip("no compiled intake, or no threads that it can call")
    yield made
    made.summarizer.close()
    torch.set_num_threads(before)


def some(count, start=0.0):
    return [torch.full((5,), start + number) for number in range(count)]


def means(summarizer):
    return taken(summarizer).floats["mean"].tolist()


def test_many_are_summarised_and_noted(into):
    into.said()
    assert into.record_all([7, 3], some(2)) is True
    assert into.record_all([9], some(1, 8.0)) is True
    assert into.noted == ([7, 3, 9], [0, 1, 2], {7: 1, 3: 1, 9: 1})
    assert means(into.summarizer) == [0.0, 1.0, 8.0]


@pytest.mark.parametrize("odd", [torch.ones(6), torch.ones(3, 4).t(), torch.ones(5, device="meta"), "text"], ids=str)
def test_what_goes_the_long_way_is_left_to_it_and_nothing_is_noted(into, odd):
    tensors = [*some(2), odd, *some(1, 4.0)]
    slots = into.said().record_all([1, 2, 3, 4], tensors)
    assert slots == [0, 1, -1, 2]
    assert into.noted == ([], [], {})
    assert into.summarizer.add_all(tensors, slots) == [0, 1, 3, 2]
    table = taken(into.summarizer)
    assert len(table) == 4
    assert table.floats["mean"][[0, 1, 2]].tolist() == [0.0, 1.0, 4.0]


def test_the_lock_is_free_afterwards(into):
    assert into.said().record_all([1, {}], some(2)) is False
    assert into.record_all([1, 2], ["text", None]) == [-1, -1]
    assert into.record_all([1, 2], some(2)) is True
    with pytest.raises(TypeError):
        into.summarizer.intake.record_all([1])
    free = []

    def try_it():
        free.append(into.summarizer._lock.acquire(blocking=False))
        into.summarizer._lock.release()

    other = threading.Thread(target=try_it)
    other.start()
    other.join()
    assert free == [True]


def test_large_ones_are_summarised_together_and_the_same(into):
    """More elements than there is room for at once, one tensor twice, and one that comes again."""
    torch.manual_seed(0)
    tensors = [torch.randn(1 << 21) for _ in range(3)] + [torch.randn(20_000), torch.ones(5)]
    tensors.append(tensors[1])
    for tensor in tensors:
        into.summarizer.add(tensor)
    expected = taken(into.summarizer)
    into.said()
    for _ in range(2):
        for field in (into.rows, into.slots, into.times):
            field.clear()
        assert into.record_all(list(range(6)), tensors) is True
        table = taken(into.summarizer)
        assert table.checksum.tolist() == expected.checksum.tolist()
        np.testing.assert_array_equal(table.sketch, expected.sketch)
        for name, column in expected.floats.items():
            np.testing.assert_array_equal(table.floats[name], column)
