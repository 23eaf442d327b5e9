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


def test_more_than_are_done_without_a_pause(into):
    into.summarizer._arena.hold(3000)
    assert into.said().record_all(list(range(3000)), some(3000)) is True
    assert into.slots == list(range(3000))
    assert means(into.summarizer) == [float(number) for number in range(3000)]


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


def test_a_site_that_comes_twice_is_left_to_others(into):
    into.said().times.add(5, 1)
    assert into.record_all([1, 2, 1], some(3)) == [0, 1, 2]
    assert into.noted == ([], [], {5: 1})


@pytest.mark.parametrize("why", ["recorded", "in a tuple", "too few sites", "no room", "nowhere", "locked"])
def test_what_is_not_to_be_recorded_is_left_alone(into, why):
    if why != "nowhere":
        into.said()
    sites, tensors = [4, 5], some(2)
    if why == "recorded":
        into.times.add(5, 1)
    elif why == "no room":
        sites, tensors = list(range(2000)), some(2000)
    elif why == "too few sites":
        sites = [4]
    elif why == "in a tuple":
        tensors = tuple(tensors)
    if why == "locked":  # by another thread
        ready, over = threading.Event(), threading.Event()

        def hold():
            with into.summarizer._lock:
                ready.set()
                over.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        ready.wait()
        done = into.record_all(sites, tensors)
        over.set()
        holder.join()
        assert done is False
        assert into.record_all(sites, tensors) is True
        return
    before = into.noted
    assert into.record_all(sites, tensors) is False
    assert into.noted == before
    assert len(taken(into.summarizer)) == 0


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


def test_a_step_s_numbers_are_a_list_that_keeps_its_room():
    numbers, plain = kernels.new_numbers(), []
    for held in (numbers, plain):
        held.extend([5, 6])
        held.extend((7, 2**40))
        held.append(8)
        held[1] = 9
        del held[4:]
    assert numbers == plain == [5, 9, 7, 2**40]
    assert numbers != [5, 9, 7]
    assert (numbers[1:3], numbers[-1], len(numbers), list(numbers)) == ([9, 7], 2**40, 4, plain)
    with pytest.raises(IndexError):
        numbers[4]
    kept = numbers.copy()
    numbers.clear()
    assert (len(numbers), bool(numbers), kept) == (0, False, plain)


def test_a_lock_is_its_thread_s_until_it_was_given_back_as_often_as_taken():
    lock, over, seen = kernels.new_lock(), threading.Event(), []

    def other():
        seen.append(lock.acquire(blocking=False))
        with lock:  # waits
            seen.append(over.is_set())

    with lock, lock:
        thread = threading.Thread(target=other)
        thread.start()
        while not seen:
            pass
        assert lock.acquire()
        lock.release()
        over.set()
    thread.join()
    assert seen == [False, True]
    with pytest.raises(RuntimeError):
        lock.release()


def test_times_count_the_sites_of_one_step():
    times = kernels.KERNELS.times()
    assert not times
    assert times.once([3, 5000])
    assert not times.once([4, 4])
    assert not times.once([6, 3])
    times.add(3, 2)
    times.add(7, 1)
    times.add(7, -1)
    assert [times.of(site) for site in (3, 4, 5000, 6, 7, 10**6)] == [3, 0, 1, 0, 0, 0]
    assert times
    times.clear()
    assert not times
    assert (times.of(3), times.once([3])) == (0, True)
