"""The checksum: what changes it, what adds up, and how well it spreads."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kernel_values import checksum_terms
from summaries import taken
from sweeps import sliced

from introspect_cli.tensors import checksum
from introspect_cli.tensors.summarizer import Summarizer

U = np.uint64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def summarizer():
    made = Summarizer(stats=False, sketch=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def of(summarizer):
    def sums(*tensors):
        for tensor in tensors:
            summarizer.add(tensor)
        return [int(value) for value in taken(summarizer).checksum]

    return sums


def test_it_does_not_change_between_versions_unnoticed(of):
    # stores of different machines are compared: a new value here is a new format version
    assert of(torch.arange(10, dtype=torch.float32).view(2, 5)) == [0x745F6DAD757CF4ED]
    assert of(torch.tensor(1.5, dtype=torch.float64)) == [0x3A1A3887811B5CA7]
    assert checksum.header("float32", (2, 3)) == 0xBA9AEB09F5054CE6


def test_any_single_bit_counts(of):
    base = torch.randn(37)
    bits = base.view(torch.int32)
    flipped = []
    for place in range(37):
        for bit in range(32):
            other = bits.clone()
            other[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            flipped.append(other.view(torch.float32))
    sums = of(base, *flipped)
    assert len(set(sums)) == len(sums)


def test_a_swap_of_pairs_with_equal_sums_counts(of):
    a, b = torch.tensor([1.0, 4.0, 2.0, 3.0]), torch.tensor([2.0, 3.0, 1.0, 4.0])
    assert len(set(of(a, b, a[[1, 0, 3, 2]], b[[1, 0, 3, 2]]))) == 4


def test_transposing_counts_although_the_memory_is_the_same(of):
    x = torch.randn(40, 40)
    first, second, again = of(x, x.t(), x.t().contiguous())
    assert first != second
    assert second == again


def test_the_bits_count_not_the_values(of):
    zero, minus = of(torch.zeros(3), -torch.zeros(3))
    assert zero != minus
    quiet = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, -0x400000], dtype=torch.int32).view(torch.float32)
    assert quiet.isnan().all()
    assert len(set(of(*quiet))) == 4


def test_shape_and_dtype_count(of):
    x = torch.arange(12, dtype=torch.int32)
    same = [x, x.view(3, 4), x.view(4, 3), x.view(1, 12), x.view(12, 1), x.view(torch.float32), x.view(torch.int16)]
    assert len(set(of(*same))) == len(same)
    assert len(set(of(torch.zeros(0), torch.zeros(0, 3), torch.zeros(3, 0), torch.zeros(1), torch.zeros(())))) == 5


def differences(words, places):
    """For every bit of a tensor's words: the change of the raw sum when it is flipped, and its word's place."""
    before = checksum_terms(words, places)
    changes = [checksum_terms(words ^ U(1 << bit), places) - before for bit in range(32)]
    return np.stack(changes, axis=1).ravel(), np.repeat(places, 32)


PLACES = {
    "a row": np.arange(64, dtype=U),
    "a column": np.arange(64, dtype=U) * U(512),
    "a square": (np.arange(8, dtype=U)[:, None] * U(512) + np.arange(8, dtype=U)).ravel(),
    "a wide square": (np.arange(8, dtype=U)[:, None] * U(4096) + np.arange(8, dtype=U) * U(64)).ravel(),
}


EVERY = [(base, places) for base in ("zeros", "ones", "counting", "random") for places in PLACES]


@pytest.mark.parametrize(("base", "places"), sliced(EVERY, EVERY[:1]))
def test_two_flipped_bits_never_cancel_nor_look_like_two_others(base, places):
    rng = np.random.default_rng(1)
    words = {
        "zeros": np.zeros(64, U),
        "ones": np.full(64, 0x3F800000, U),
        "counting": np.arange(64, dtype=U),
        "random": rng.integers(0, 1 << 32, 64, dtype=U),
    }[base]
    change, place = differences(words, PLACES[places])
    first, second = np.triu_indices(len(change), 1)
    unequal = place[first] != place[second]
    sums = change[first[unequal]] + change[second[unequal]]
    assert len(sums) > 2_000_000
    sums.sort()
    assert (np.diff(sums) != 0).all()
    assert (sums != 0).all()


CHANGED = [(bit, spread) for bit in (0, 22, 23, 29, 31) for spread in (1, 512, 1024 + 3)]


@pytest.mark.parametrize(("bit", "spread"), sliced(CHANGED, CHANGED[:1]))
def test_the_same_change_at_two_places_is_reported_from_two_other_places(bit, spread):
    # such as one-hot rows and masks, which differ in nothing but where
    places = np.arange(2048, dtype=U) * U(spread)
    for base in (0, 0x3F800000):
        words = np.full(2048, base, U)
        change = checksum_terms(words ^ U(1 << bit), places) - checksum_terms(words, places)
        first, second = np.triu_indices(2048, 1)
        sums = change[first] + change[second]
        sums.sort()
        assert (np.diff(sums) != 0).all()


def test_low_and_high_bits_are_spread_evenly(of):
    tensors = [torch.tensor([number // 64, number % 64], dtype=torch.int32) for number in range(1 << 14)]
    sums = np.array(of(*tensors), dtype=U)
    for shift in (0, 24, 56):
        seen = np.bincount(((sums >> U(shift)) & U(0xFF)).astype(np.int64), minlength=256)
        chi = ((seen - 64.0) ** 2 / 64.0).sum()
        assert 255 - 6 * math.sqrt(510) < chi < 255 + 6 * math.sqrt(510)
    ones = np.unpackbits((sums[1:] ^ sums[:-1]).view(np.uint8)).reshape(-1, 64).sum(axis=1)
    assert 31.5 < np.mean(ones) < 32.5
