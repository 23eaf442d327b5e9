"""Distances: from sketches, exactly from stored tensors, in units of rounding, and as factors."""

import numpy as np
import pytest
from synthetic import row, sketch, write_run

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.reasons.judge import reason_named
from introspect_cli.compare.settings.differences import Difference, describe
from introspect_cli.compare.settings.documents import command_options
from introspect_cli.compare.settings.hyperparameters import Optimizers, optimizer_differences
from introspect_cli.compare.settings.settings import Blame, setting_changes
from introspect_cli.compare.step.size import proportion
from introspect_cli.compare.terms.distance import Tensors, distance_of, rounding
from introspect_cli.compare.terms.options import DiffOptions
from introspect_cli.compare.terms.words import amount
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


def test_rounding_is_counted_in_units_people_know():
    assert rounding(2.0**-24, "float32", "float32") == (1.0, "float32")
    assert rounding(3 * 2.0**-8, "float32", "bfloat16") == (3.0, "bfloat16")
    k, unit = rounding(0.7 * 2.0**-8, "float32", "float32")
    assert (pytest.approx(k), unit) == (0.7, "bfloat16")
    assert rounding(0.3, "float32", "float32") is None
    assert rounding(0.3, "int64", "int64") is None
    assert "about 2 float32 rounding units" in amount(2 * 2.0**-24 + 1e-9, "float32", "float32")
    assert amount(1e-9, "float64", "float64").startswith("less than")
    assert amount(0.25, "float32", "float32") == "relative L2 0.25"


def test_a_factor_is_found_and_noise_is_none():
    random = np.random.default_rng(0)
    a = random.normal(size=(30, 30)).astype(np.float32)
    one = np.array(sketch(a))
    assert proportion(one, np.array(sketch(a * np.float32(0.25))))[0] == pytest.approx(0.25, rel=1e-6)
    assert proportion(one, np.array(sketch(a * np.float32(-3))))[0] == pytest.approx(-3, rel=1e-6)
    assert proportion(one, one) is None
    assert proportion(one, np.array(sketch(a + np.float32(0.001)))) is None
    assert proportion(np.zeros(16), one) is None


def test_command_lines_are_compared_by_option():
    assert command_options(["--lr", "1", "--lr", "2", "-I", "x", "-I", "y"]) == {"--lr": "2", "-I": "x", "-I (2)": "y"}
    assert command_options(["data", "--lr", "1e-3", "--amp", "--n=4", "-x", "-3", "model.depth=2"]) == {
        "--lr": "1e-3",
        "--amp": "given",
        "--n": "4",
        "argument 0": "data",
        "-x": "-3",
        "model.depth": "2",
    }


def test_settings_that_are_noise_are_left_out_and_numeric_packages_lead(tmp_path):
    packages = {"torch": "2.13", "rich": "1"}
    write_run(tmp_path / "a", [], settings={"packages": packages, "environment": {"PWD": "/a", "SSH_TTY": "1"}})
    changed = {
        "packages": {"torch": "2.15", "rich": "2", "new": "1"},
        "environment": {"PWD": "/b", "OMP_NUM_THREADS": "4"},
    }
    write_run(tmp_path / "b", [], settings=changed)
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        found = setting_changes(a, b, Blame(reason_named("module"), rounding=True))
    assert [change.name for change in found][:2] == ["torch", "OMP_NUM_THREADS"]
    assert {change.name for change in found} == {"torch", "rich", "new", "OMP_NUM_THREADS"}
    assert describe(found[0]) == "torch 2.13 -> 2.15"
    assert describe(next(change for change in found if change.name == "new")) == "new = 1 only in b"


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


def test_nested_settings_are_compared_by_deepdiff(tmp_path):
    write_run(tmp_path / "a", [], settings={"hardware": {"gpus": ["A", "B"], "nested": {"x": {"y": 1}}}})
    write_run(tmp_path / "b", [], settings={"hardware": {"gpus": ["A", "C"], "nested": {"x": {"y": 2}}}})
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        found = {change.name: (change.a, change.b) for change in setting_changes(a, b)}
    assert found == {"gpus[1]": ("B", "C"), "nested.x.y": ("1", "2")}


def group(lr, *names, **more):
    return {"lr": lr, "params": list(names)} | more


PORTED = (("Net", 0.1), ("Task.net", 0.3))


def test_optimizers_are_compared_by_what_applies_to_a_parameter():
    def differing(a, b):
        return [change[1:4] for change in optimizer_differences(a, b)]

    a = [{"name": "SGD", "groups": [group(0.1, "w", "b", initial_lr=0.1)]}]
    b = [{"name": "SGD", "groups": [group(0.2, "w", "b", initial_lr=0.2)]}]
    assert differing(a, b) == [("lr", 0.1, 0.2)]
    split = [{"name": "SGD", "groups": [group(0.1, "w", initial_lr=0.1), group(0.3, "b", initial_lr=0.3)]}]
    assert differing(a, split) == [("lr of b", 0.1, 0.3)]
    assert [change[1:4] for change in Optimizers(a, split).changes_for("b")] == [("lr", "0.1", "0.3")]
    assert Optimizers(a, split).changes_for("w") == []
    fewer = [{"name": "SGD", "groups": [group(0.1, "w", initial_lr=0.1)]}]
    assert differing(a, fewer) == [("parameter b", "optimized", None)]
    named = [[{"name": "SGD", "groups": [group(0.1, f"{top}.w"), group(rate, f"{top}.b")]}] for top, rate in PORTED]
    assert differing(*named) == [("lr of Task.net.b", 0.1, 0.3)]
    assert Optimizers(a, fewer).has("b", "b") is False
    assert Optimizers(a, [{"name": "SGD", "groups": [{"lr": 1}]}]).has("b", "b") is None
    assert differing(a, [{"name": "Adam", "groups": []}]) == [("optimizer", "SGD", "Adam")]
