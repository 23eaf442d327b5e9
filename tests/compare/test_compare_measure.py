"""Distances: from sketches, exactly from stored tensors, in units of rounding, and as factors."""

import numpy as np
import pytest
from synthetic import row, sketch, write_run

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.step.size import proportion
from introspect_cli.compare.terms.distance import Tensors, distance_of
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.store.read.run import open_run


class Stored:
    """A run that keeps whole tensors."""

    def __init__(self, **tensors):
        self.tensors = {int(name[1:]): np.asarray(value) for name, value in tensors.items()}

    def tensor(self, checksum):
        return self.tensors.get(checksum)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [3.0, 4.0], 1.0),
        ([3.0, 4.0], [-3.0, -4.0], 2.0),
        ([1, 2], [1, 4], 2 / 17**0.5),
        ([1.0, np.nan], [1.0, 5.0], None),
        ([1.0, np.nan], [1.0, np.inf], None),
        ([1.0, np.nan], [2.0, np.nan], 0.5),
        ([1j, 0], [0, 1j], 2**0.5),
    ],
)
def test_exact_distance_over_the_larger_norm(a, b, expected):
    tensors = Tensors(Stored(_1=a), Stored(_2=b))
    assert distance_of(*tensors.both(1, 2, (2,))) == pytest.approx(expected)
    assert tensors.both(1, 3, (2,)) is None
    assert tensors.both(1, 2, (3,)) is None
    assert tensors.both(0, 2, (2,)) is None


@pytest.mark.parametrize("change", ["noise", "element", "column", "scale"])
def test_sketched_distances_are_near_the_true_ones(tmp_path, change):
    random = np.random.default_rng(3)
    ratios = []
    for run in range(12):
        a = random.normal(size=(64, 32)).astype(np.float32)
        b = a.copy()
        if change == "noise":
            b += random.normal(size=a.shape).astype(np.float32) * np.float32(1e-3)
        elif change == "element":
            b[3, 4] += 1
        elif change == "column":
            b[:, 7] = 0
        else:
            b *= np.float32(1.01)
        write_run(tmp_path / f"a{run}", [[row("forward", "output", "Net", a)]])
        write_run(tmp_path / f"b{run}", [[row("forward", "output", "Net", b)]])
        with open_run(tmp_path / f"a{run}") as one, open_run(tmp_path / f"b{run}") as two:
            found = compare_runs(one, two, DiffOptions()).first
        true = np.linalg.norm(a.astype(float) - b) / max(np.linalg.norm(a), np.linalg.norm(b))
        ratios.append(found.rel_l2 / true)
        assert not found.exact
    assert 0.7 < np.median(ratios) < 1.4


def test_a_factor_is_found_and_noise_is_none():
    random = np.random.default_rng(0)
    a = random.normal(size=(30, 30)).astype(np.float32)
    one = np.array(sketch(a))
    assert proportion(one, np.array(sketch(a * np.float32(0.25))))[0] == pytest.approx(0.25, rel=1e-6)
    assert proportion(one, np.array(sketch(a * np.float32(-3))))[0] == pytest.approx(-3, rel=1e-6)
    assert proportion(one, one) is None
    assert proportion(one, np.array(sketch(a + np.float32(0.001)))) is None
    assert proportion(np.zeros(16), one) is None
