"""Statistics against numpy and scipy in float64."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import scipy.stats
import torch
from summaries import taken

from introspect_cli.tensors.summarizer import Summarizer

TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def measure():
    """Statistics of one tensor as a dict; names that are absent are missing."""
    made = Summarizer(sorted_stats=("med", "mode"))

    def measured(tensor):
        made.add(tensor)
        table = taken(made)
        found = {name: float(column[0]) for name, column in table.floats.items()}
        found = {name: value for name, value in found.items() if not math.isnan(value)}
        return found | {name: int(column[0]) for name, column in table.counts.items()}

    yield measured
    made.close()


def exact(values):
    """The same by numpy and scipy, from float64 values of which all are finite."""
    found = {
        "min": values.min(),
        "max": values.max(),
        "absmin": np.abs(values).min(),
        "mean": values.mean(),
        "amean": np.abs(values).mean(),
        "var": values.var(),
        "med": np.median(values),
        "mode": scipy.stats.mode(values).mode,
    }
    if found["var"] > 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found["skew"] = scipy.stats.skew(values)
            found["kurt"] = scipy.stats.kurtosis(values, fisher=False)
    return {name: float(value) for name, value in found.items()}


def assert_close(found, wanted, spread=None):
    """Equal to 1e-6: relative, or of the spread where a statistic is a small difference of large sums."""
    spread = np.sqrt(wanted["var"]) if spread is None else spread
    for name, value in wanted.items():
        scale = {"mean": max(abs(value), spread), "skew": math.sqrt(wanted.get("kurt", 1.0))}.get(name, abs(value))
        assert name in found, name
        assert abs(found[name] - value) <= TOLERANCE * scale, (name, found[name], value)


def doubles(tensor):
    return tensor.to(torch.float64).numpy().ravel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_statistics_of_random_numbers_are_exact(measure, dtype):
    for count in (1, 2, 3, 16, 17, 1000, 2048, 2049, 100_003):
        x = (torch.randn(count) * 3 + 1).to(dtype)
        found = measure(x)
        assert_close(found, exact(doubles(x)))
        assert found["nans"] == found["posinfs"] == found["neginfs"] == 0
        assert found["zeros"] == int((x == 0).sum())


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-12, 1e-6, 1e6, 1e30])
def test_statistics_are_exact_at_any_magnitude(measure, scale):
    x = torch.randn(10_000, dtype=torch.float64).mul(scale).to(torch.float32)
    assert_close(measure(x), exact(doubles(x)))


def test_a_mean_of_a_million_standard_deviations(measure):
    x = (torch.randn(300_000, dtype=torch.float64) + 1e6).to(torch.float32)
    assert_close(measure(x), exact(doubles(x)))
    x = torch.randn(300_000, dtype=torch.float64) + 1e6
    assert_close(measure(x), exact(doubles(x)))


@pytest.mark.parametrize("value", [0.0, 0.1, -3.0, 1e-40, 3e38])
@pytest.mark.parametrize("count", [1, 7, 5000])
def test_equal_elements_have_no_spread(measure, value, count):
    found = measure(torch.full((count,), value))
    number = float(torch.tensor(value))
    assert found["var"] == 0.0
    assert found["mean"] == pytest.approx(number, rel=1e-12)
    assert "skew" not in found
    assert "kurt" not in found
    assert found["min"] == found["max"] == found["med"] == found["mode"] == number


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)])
def test_no_elements_have_no_statistics(measure, shape):
    assert measure(torch.empty(shape)) == {"nans": 0, "posinfs": 0, "neginfs": 0, "zeros": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [20, 2048, 30_000])
def test_what_is_not_finite_is_counted_and_left_out(measure, dtype, count):
    x = torch.randn(count).to(dtype)
    x[::5], x[1::7], x[2::9] = float("nan"), float("inf"), -float("inf")
    found = measure(x)
    values = doubles(x)
    assert found["nans"] == np.isnan(values).sum()
    assert found["posinfs"] == np.isposinf(values).sum()
    assert found["neginfs"] == np.isneginf(values).sum()
    assert_close(found, exact(values[np.isfinite(values)]))


def test_finite_numbers_whose_float32_sum_overflows(measure):
    x = torch.full((5000,), torch.finfo(torch.float32).min)
    x[::2] = 1.0
    found = measure(x)
    assert found["neginfs"] == 0
    assert_close(found, exact(doubles(x)))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
)
def test_statistics_of_integers_are_exact(measure, dtype):
    x = torch.randint(0, 120, (5000,)).to(dtype)
    found = measure(x)
    assert_close(found, exact(doubles(x)))
    assert found["zeros"] == int((x.to(torch.int64) == 0).sum())


def test_integers_beyond_what_float64_holds(measure):
    x = torch.randint(-(1 << 62), 1 << 62, (5000,), dtype=torch.int64)
    assert_close(measure(x), exact(doubles(x)))


@pytest.mark.parametrize("name", [name for name in dir(torch) if name.startswith("float8_")])
def test_statistics_of_every_float8_are_exact(measure, name):
    every = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
    values = doubles(every)
    found = measure(every)
    assert found["nans"] == np.isnan(values).sum()
    assert found["posinfs"] == np.isposinf(values).sum()
    kept = values[np.isfinite(values)]
    wanted = exact(kept)
    if name == "float8_e8m0fnu":  # from 2**-127 to 2**127: the moments are those of the largest
        wanted = {key: wanted[key] for key in ("min", "max", "mean", "amean", "var", "med")}
    assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_by_their_absolute_values(measure, dtype):
    x = torch.randn(5000, dtype=dtype)
    x[3] = complex(float("nan"), 1.0)
    x[4] = complex(1.0, float("inf"))
    x[5] = 0
    found = measure(x)
    assert (found["nans"], found["posinfs"], found["zeros"]) == (1, 1, 1)
    values = np.abs(x.to(torch.complex128).numpy())
    assert_close(found, exact(values[np.isfinite(values)]))


def test_the_mode_is_the_smallest_of_the_most_frequent(measure):
    found = measure(torch.tensor([3.0, 1.0, 3.0, 1.0, 2.0, float("nan")]))
    assert found["mode"] == 1.0
    assert found["med"] == 2.0
    assert measure(torch.tensor([1.0, 2.0, 3.0, 4.0]))["med"] == 2.5


@pytest.mark.sweep
def test_statistics_of_thirty_million_elements_are_exact(measure):
    x = torch.randn(30_000_000).add_(1e3)
    values = x.numpy()
    found = measure(x)
    mean = values.mean(dtype=np.float64)
    assert found["mean"] == pytest.approx(mean, rel=1e-9)
    assert found["var"] == pytest.approx(np.mean((values - mean) ** 2, dtype=np.float64), rel=1e-6)
