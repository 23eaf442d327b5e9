"""Distances: from sketches, exactly from stored tensors, in units of rounding, and as factors."""

import numpy as np
import pytest
from synthetic import row, sketch, write_run

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.reasons.judge import reason_named
from introspect_cli.compare.settings.differences import Difference
from introspect_cli.compare.settings.settings import Blame, setting_changes
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


NEUTRAL = (
    {"packages": {"rich": "1"}, "environment": {"FOO": "x"}},
    {"packages": {"rich": "2"}, "environment": {"FOO": "y"}},
)


@pytest.mark.parametrize(
    ("reason", "rounding", "a", "b", "strongest"),
    [
        ("optimizer", False, {"command": {"argv": ["--name", "x"]}}, {"command": {"argv": ["--name", "y"]}}, "lr"),
        ("module", False, {"packages": {"torch": "2.13"}}, {"packages": {"torch": "2.15"}}, "torch"),
        ("module", False, {"sources": {"model.py": "1"}}, {"sources": {"model.py": "2"}}, "model.py"),
        ("own_code", False, {"sources": {"model.py": "1"}}, {"sources": {"model.py": "2"}}, "model.py"),
        (
            "batch",
            False,
            {"command": {"argv": ["--name", "x", "--workers", "2"]}},
            {"command": {"argv": ["--name", "y", "--workers", "4"]}},
            "--workers",
        ),
        ("batch", False, {"seeds": {"seed": 1}}, {"seeds": {"seed": 2}}, "seed"),
        ("rng", False, {"seeds": {"seed": 1}}, {"seeds": {"seed": 2}}, "seed"),
        (
            "module",
            True,
            {"runtime": {"deterministic_algorithms": True}},
            {"runtime": {"deterministic_algorithms": False}},
            "deterministic_algorithms",
        ),
        (
            "module",
            True,
            {"runtime": {"flash_sdp": True, "python": "3.11"}},
            {"runtime": {"flash_sdp": False, "python": "3.12"}},
            "flash_sdp",
        ),
    ],
)
def test_the_setting_that_can_explain_a_divergence_comes_first(tmp_path, reason, rounding, a, b, strongest):
    for path, differing, neutral in (("a", a, NEUTRAL[0]), ("b", b, NEUTRAL[1])):
        shared = {name: {**value, **differing.get(name, {})} for name, value in neutral.items()}
        write_run(tmp_path / path, [], settings={**differing, **shared})
    said = [Difference("hyperparameter", "lr", "0.1", "0.2", "lr")] if reason == "optimizer" else []
    with open_run(tmp_path / "a") as one, open_run(tmp_path / "b") as two:
        found = setting_changes(one, two, Blame(reason_named(reason), said, rounding=rounding))
    assert found[0].name == strongest
    assert found[0].explains
    assert found[0].weight > max(change.weight for change in found if change.name in {"rich", "FOO", "--name"})
    assert [change.weight for change in found] == sorted((change.weight for change in found), reverse=True)
