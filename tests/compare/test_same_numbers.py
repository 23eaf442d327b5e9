"""Effects before causes: what changes no number is told, and is no divergence; what changes one is named as before."""

from __future__ import annotations

import numpy as np
import pytest
from counted import calls_of
from opcapture import compared
from synthetic import row, write_run

from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.result import DiffOptions, Verdict
from introspect_cli.records import Layout, Status, Summary
from introspect_cli.store.run import open_run


def test_a_tensor_that_is_saved_under_another_name_of_its_model_is_structure(tmp_path):
    def rows(inside, key):
        weight = np.random.default_rng(0).normal(size=(3, 3))
        trained = [row(phase, "param", f"Net.{inside}.w", weight) for phase in ("start", "optimizer")]
        return [
            [*trained, row("loss", "loss", "loss", 1.0), row("forward", "product", "n.pt", weight, path=f"['{key}']")]
        ]

    runs = (("net", "net.w"), ("net", "module.net.w"), ("body", "body.w"))
    for name, run in zip("abc", runs, strict=True):
        write_run(tmp_path / name, rows(*run))
    other = rows("net", "average.w")
    other[0][-1] = row("forward", "product", "n.pt", np.ones((3, 3)), path="['average.w']")
    write_run(tmp_path / "d", other)
    for name, (_, key) in zip("bc", runs[1:3], strict=True):
        result = compared(tmp_path / "a", tmp_path / name)
        assert result.verdict is Verdict.SAME
        assert f"only b has the saved tensor ['{key}'] of n.pt in step 0" in result.sentence
    several = rows("net", "module.net.w")
    several[0] += [row("forward", "product", "n.pt", several[0][0][2], path=f"['{key}']") for key in ("x", "y")]
    write_run(tmp_path / "e", several)
    said = compared(tmp_path / "a", tmp_path / "e").sentence
    assert "only b has the saved tensor ['module.net.w'] of n.pt and 2 more in step 0" in said
    assert compared(tmp_path / "a", tmp_path / "d").verdict is Verdict.DIVERGED


def test_states_of_a_saved_optimizer_that_numbers_its_parameters_in_another_order_agree(tmp_path):
    """As where weight decay puts other parameters into the first group; a state that no number has still differs."""
    states = {name: np.random.default_rng(seed).normal(size=(3, 3)) for seed, name in enumerate("abc")}

    def run(name, order, changed="", key="['optimizer']['state']"):
        saved = [states[of] * (1 + (of == changed)) for of in order]
        rows = [row("forward", "product", "n.pt", x, path=f"{key}[{at}]['exp_avg']") for at, x in enumerate(saved)]
        write_run(tmp_path / name, [[row("optimizer", "param", "Net.w", np.arange(3)), *rows]], force=True)
        return tmp_path / name

    a = run("a", "abc")
    result = compared(a, run("b", "bca"))
    assert result.verdict is Verdict.SAME
    assert "3 of them only within tolerance" in result.sentence
    result = compared(a, run("b", "bca", changed="b"))
    assert result.verdict is Verdict.DIVERGED
    assert {one.site.path[-13] for one in result.divergences} == {"0", "1"}
    weights = {"key": "['weights']"}  # of which the number is a name
    assert compared(run("a", "abc", **weights), run("b", "bca", **weights)).verdict is Verdict.DIVERGED


def test_two_models_that_share_nothing_are_not_the_same(tmp_path):
    rng = np.random.default_rng(0)

    def steps(name):
        return [
            [
                row("data", "batch", "DataLoader", np.arange(5)),
                row("start", "param", f"{name}.weight", rng.normal(size=(3, 3))),
                row("optimizer", "param", f"{name}.weight", rng.normal(size=(3, 3))),
            ]
        ]

    write_run(tmp_path / "a", steps("Net"))
    write_run(tmp_path / "b", steps("Other"))
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        result = compare_runs(a, b, DiffOptions())
    assert result.verdict is Verdict.DIVERGED
    assert result.first.reason == "structure"


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constants_prove_no_rename(tmp_path, value):
    other = np.random.default_rng(0).normal(size=4)

    def steps(name):
        return [
            [
                row("start", "param", f"Net.{name}.weight", np.full((3, 3), value)),
                row("loss", "loss", "loss", 1.0),
                row("forward", "output", "Net", other),
            ]
        ]

    write_run(tmp_path / "a", steps("old"))
    write_run(tmp_path / "b", steps("new"))
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        result = compare_runs(a, b, DiffOptions())
    assert {change.change for change in result.structure} == {"only"}


def test_values_that_two_modules_share_prove_no_rename_of_either(tmp_path):
    value = np.random.default_rng(0).normal(size=(3, 3))

    def steps(names):
        rows = [row("start", "param", f"Net.{name}", value) for name in names]
        return [[*rows, row("loss", "loss", "loss", 1.0)]]

    write_run(tmp_path / "a", steps(["one", "two"]))
    write_run(tmp_path / "b", steps(["red", "blue"]))
    with open_run(tmp_path / "a") as a, open_run(tmp_path / "b") as b:
        result = compare_runs(a, b, DiffOptions())
    assert "renamed" not in {change.change for change in result.structure}


def test_many_sites_are_known_under_other_names_in_about_linear_time(tmp_path):
    """Layers of ten modules, one of which has another name in b."""
    kinds = {"param": "start", "input": "forward", "output": "forward", "grad": "optimizer", "grad_output": "backward"}

    def work(layers):
        for name, renamed in (("a", "body"), ("b", "mlp")):
            values = iter(np.random.default_rng(1).integers(1, 2**63, layers * 50).tolist())
            layout = Layout((3,), "float32", "cpu", "contiguous")
            steps = [
                row(phase, kind, f"Net.blocks.{layer}.{renamed if slot == 3 else f'm{slot}'}",
                    Summary(Status.OBSERVED, layout, next(values), {"min": 0.0, "max": 1.0}))
                for layer in range(layers) for slot in range(10) for kind, phase in kinds.items()
            ]  # fmt: skip
            write_run(tmp_path / name, [steps], force=True)
        made, result = calls_of(lambda: compared(tmp_path / "a", tmp_path / "b"))
        assert result.verdict is Verdict.SAME, result.sentence
        return made

    assert work(160) < 12 * work(20)
