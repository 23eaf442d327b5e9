"""The sketch: how well it tells the distance of two tensors that are never in one place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_values import sketch_keys
from summaries import taken
from sweeps import sliced

from introspect_cli.tensors.summarizer import Summarizer

CHANGES = {
    "dense noise": lambda x, g: x * (1 + 1e-4 * torch.randn(x.shape, generator=g)),
    "noise of 1e-6": lambda x, g: x * (1 + 1e-6 * torch.randn(x.shape, generator=g)),
    "one element": lambda x, g: x.view(-1).scatter(0, torch.randint(x.numel(), (1,), generator=g), 5.0).view(x.shape),
    "a zeroed column": lambda x, g: x * (torch.arange(x.shape[1]) != 3),
    "a zeroed row": lambda x, g: x * (torch.arange(len(x))[:, None] != len(x) // 2),
    "a rescale": lambda x, g: x * 1.01,
    "a shift": lambda x, g: x + 0.01,
    "a permutation": lambda x, g: x[:, torch.randperm(x.shape[1], generator=g)],
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def ratios(shape, change, trials, mean=0.0):
    """Estimated distance over true distance, for each trial."""
    generator = torch.Generator().manual_seed(3)
    made = Summarizer(alone=True)
    true = []
    for _ in range(trials):
        x = torch.randn(shape, generator=generator) + mean
        y = CHANGES[change](x, generator)
        made.add(x)
        made.add(y)
        true.append(float((x.double() - y.double()).norm()))
    rows = taken(made).sketch.astype(np.float64)
    made.close()
    estimated = np.linalg.norm(rows[::2] - rows[1::2], axis=1)
    true = np.array(true)
    some = true > 0
    assert some.mean() > 0.8
    assert (estimated[~some] == 0).all()
    return estimated[some] / true[some]


def assert_good(found):
    good = (found > 0.6) & (found < 1.6)
    assert good.mean() >= 0.95, np.sort(found)[[0, len(found) // 2, -1]]
    if found.std() > 0.01:  # the same change in every trial is one trial only
        assert 0.9 < np.sqrt(np.mean(found**2)) < 1.1


@pytest.mark.parametrize("count", [64, 100, 1000, 10_000])
def test_equal_changes_of_neighbours_do_not_cancel(count):
    generator = np.random.default_rng(5)
    found = []
    for start in generator.integers(0, 1 << 40, 500, dtype=np.uint64):
        buckets, signs = sketch_keys(start + np.arange(count, dtype=np.uint64))
        sums = np.bincount(buckets, weights=signs, minlength=16)
        found.append(np.sqrt((sums**2).sum() / count))
    assert_good(np.array(found))


SHAPES = [(2, 5), (7, 13), (40, 64), (100, 1000), (512, 256), (1000, 1024), (10_000, 1000)]
EACH = [(shape, change) for shape in SHAPES for change in CHANGES]


@pytest.mark.parametrize(("shape", "change"), sliced(EACH, [each for each in EACH if each[0] == SHAPES[2]]), ids=str)
def test_the_estimate_is_near_the_truth(change, shape):
    found = ratios(shape, change, 100 if shape[0] < 10_000 else 40)
    if shape == (2, 5) and change != "one element":
        # ten elements go to ten buckets: nothing is estimated at all
        assert found == pytest.approx(np.ones(len(found)), rel=0.2)
    assert_good(found)


def test_noise_in_the_last_bit_is_seen_and_measured():
    generator = torch.Generator().manual_seed(4)
    made, true = Summarizer(alone=True), []
    for _ in range(100):
        x = torch.randn(100_000, generator=generator)
        y = torch.nextafter(x, torch.where(torch.rand(x.shape, generator=generator) < 0.5, torch.inf, -torch.inf))
        made.add(x)
        made.add(y)
        true.append(float((x.double() - y.double()).norm()))
    rows = taken(made).sketch.astype(np.float64)
    made.close()
    found = np.linalg.norm(rows[::2] - rows[1::2], axis=1) / true
    assert ((found > 0.6) & (found < 1.6)).mean() >= 0.95


def test_a_large_common_mean_does_not_drown_the_difference():
    assert_good(ratios((100, 500), "dense noise", 100, mean=100.0))
    assert_good(ratios((100, 500), "a permutation", 100, mean=1000.0))


def test_what_is_not_finite_is_left_out():
    x = torch.randn(5000)
    y = x.clone()
    x[::7], x[3::11] = float("nan"), float("inf")
    y[::7], y[3::11] = 0.0, 0.0
    for stats in (True, False):
        made = Summarizer(stats=stats)
        made.add(x)
        made.add(y)
        rows = taken(made).sketch
        made.close()
        assert rows[0] == pytest.approx(rows[1], rel=1e-6, abs=1e-5)
