"""Statistics against numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from summaries import taken

from introspect_cli.tensors.summarizer import Summarizer

TOLERANCE = 1e-6
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


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
    """The same by numpy, of the finite ones among float64 values."""
    finite = values[np.isfinite(values)]
    counts = {"nans": np.isnan(values), "posinfs": np.isposinf(values), "neginfs": np.isneginf(values)}
    found = {name: int(mask.sum()) for name, mask in counts.items()} | {"zeros": int((values == 0).sum())}
    distinct, times = np.unique(finite, return_counts=True)
    found |= {
        "min": finite.min(), "max": finite.max(), "absmin": np.abs(finite).min(), "mean": finite.mean(),
        "amean": np.abs(finite).mean(), "var": finite.var(), "med": np.median(finite),
        "mode": distinct[times.argmax()],
    }  # fmt: skip
    if found["var"] > 0:
        deviations = (finite - found["mean"]) / np.sqrt(found["var"])
        found |= {"skew": np.mean(deviations**3), "kurt": np.mean(deviations**4)}
    return {name: float(value) for name, value in found.items()}


def assert_exact(found, tensor):
    """Equal to 1e-6: relative, or of the spread where a statistic is a small difference of large sums."""
    values = np.abs(tensor.to(torch.complex128).numpy()) if tensor.is_complex() else tensor.to(torch.float64).numpy()
    wanted = exact(values.ravel())
    spread = np.sqrt(wanted["var"])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = {"mean": max(abs(value), spread), "skew": math.sqrt(wanted.get("kurt", 1.0))}.get(name, abs(value))
        assert abs(found[name] - value) <= TOLERANCE * scale, (name, found[name], value)


@pytest.mark.parametrize("dtype", FLOATS)
def test_statistics_of_random_numbers_are_exact_without_those_that_are_not_finite(measure, dtype):
    for count in (1, 2, 3, 16, 17, 20, 1000, 2048, 2049, 100_003):
        x = (torch.randn(count) * 3 + 1).to(dtype)
        assert_exact(measure(x), x)
        if count > 17:
            x[::5], x[1::7], x[2::9] = float("nan"), float("inf"), -float("inf")
            assert_exact(measure(x), x)


def far(dtype):
    return (torch.randn(300_000, dtype=torch.float64) + 1e6).to(dtype)


def with_odd(x):
    x[3], x[4], x[5] = complex(float("nan"), 1.0), complex(1.0, float("inf")), 0
    return x


TROUBLE = {
    **{f"of size {scale}": lambda scale=scale: torch.randn(10_000) * scale for scale in (1e-12, 1e-6, 1e6, 1e30)},
    "nearly nothing": lambda: torch.randn(10_000, dtype=torch.float64).mul(1e-30).float(),
    "subnormal": lambda: torch.randn(10_000, dtype=torch.float64).mul(1e-42).float(),
    "a mean of a million deviations": lambda: far(torch.float32),
    "the same in float64": lambda: far(torch.float64),
    "whose float32 sum overflows": lambda: torch.tensor([1.0, torch.finfo(torch.float32).min] * 2500),
    "integers beyond what float64 holds": lambda: torch.randint(-(1 << 62), 1 << 62, (5000,), dtype=torch.int64),
    "unsigned integers": lambda: torch.randint(0, 120, (5000,)).to(torch.uint16),
    "complex numbers": lambda: with_odd(torch.randn(5000, dtype=torch.complex64)),
    "complex numbers in float64": lambda: with_odd(torch.randn(5000, dtype=torch.complex128)),
    **{
        name: lambda name=name: torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
        for name in dir(torch)
        if name.startswith("float8_") and name != "float8_e8m0fnu"  # whose moments are those of the largest
    },
}


@pytest.mark.parametrize("what", TROUBLE)
def test_statistics_of_numbers_that_make_trouble_are_exact(measure, what):
    x = TROUBLE[what]()
    assert_exact(measure(x), x)


@pytest.mark.parametrize(("value", "count"), [(0.1, 1), (0.0, 7), (-3.0, 7), (1e-40, 5000), (3e38, 5000)])
def test_equal_elements_have_no_spread(measure, value, count):
    found = measure(torch.full((count,), value))
    number = float(torch.tensor(value))
    assert found["var"] == 0.0
    assert found["mean"] == pytest.approx(number, rel=1e-12)
    assert not {"skew", "kurt"} & found.keys()
    assert found["min"] == found["max"] == found["med"] == found["mode"] == number


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)])
def test_no_elements_have_no_statistics(measure, shape):
    assert measure(torch.empty(shape)) == {"nans": 0, "posinfs": 0, "neginfs": 0, "zeros": 0}


def test_the_mode_is_the_smallest_of_the_most_frequent(measure):
    found = measure(torch.tensor([3.0, 1.0, 3.0, 1.0, 2.0, float("nan")]))
    assert (found["mode"], found["med"]) == (1.0, 2.0)
    assert measure(torch.tensor([1.0, 2.0, 3.0, 4.0]))["med"] == 2.5


@pytest.mark.sweep
def test_statistics_of_thirty_million_elements_are_exact(measure):
    x = torch.randn(30_000_000).add_(1e3)
    values = x.numpy()
    found = measure(x)
    mean = values.mean(dtype=np.float64)
    assert found["mean"] == pytest.approx(mean, rel=1e-9)
    assert found["var"] == pytest.approx(np.mean((values - mean) ** 2, dtype=np.float64), rel=1e-6)
