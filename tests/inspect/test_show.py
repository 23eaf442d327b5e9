"""`introspect show`: a run at a glance, its tree, a step, a history, its settings."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from small_runs import MODULES, train
from synthetic import row, write_run

from introspect_cli.errors import UsageError
from introspect_cli.inspect.module_tree import module_tree
from introspect_cli.inspect.overview import histories, overview, step_records
from introspect_cli.records import Kind, ModuleInfo
from introspect_cli.selection import Selection, read_selection
from introspect_cli.store.read.run import open_run

MANIFEST = {"argv": ["train.py", "--lr", "1"], "exit_code": 0, "ended": "2026-01-01T00:00:00+00:00"}
SETTINGS = {"runtime": {"torch": "2.13.0", "python": "3.11"}, "environment": {"A\x1b[2J": "1"}, "empty": {}}


@pytest.fixture
def run(tmp_path):
    write_run(tmp_path / "run", train(), modules=MODULES, manifest=MANIFEST, settings=SETTINGS)
    with open_run(tmp_path / "run") as opened:
        yield opened


@pytest.fixture
def deep(tmp_path):
    """Six equal blocks and one that is not."""
    modules, rows = [ModuleInfo("GPT", "GPT"), ModuleInfo("GPT.h", "ModuleList")], []
    for place in range(7):
        name, width = f"GPT.h.{place}", 4 if place < 6 else 5
        modules += [ModuleInfo(name, "Block"), ModuleInfo(f"{name}.fc", "Linear", "", ("weight",))]
        rows.append(row("start", "param", f"{name}.fc.weight", np.ones((width, 4), np.float32)))
        rows.append(row("forward", "output", f"{name}.fc", np.ones((2, width), np.float32)))
        rows.append(row("forward", "output", name, np.ones((2, width), np.float32)))
    write_run(tmp_path / "deep", [rows], modules=modules)
    with open_run(tmp_path / "deep") as opened:
        yield opened


def test_overview_says_what_ran_and_how_much(run):
    found = overview(run)
    assert (found.state, found.steps, found.first_step, found.last_step) == ("complete", 4, 0, 3)
    assert found.parameters == 128
    assert found.kinds["output"] == 4
    assert found.size > 1000
    assert found.records == sum(len(rows) for rows in train())
    assert found.machine == "torch 2.13.0, python 3.11"


def test_tree_has_classes_parameters_and_outputs(run):
    rows = {row.info.fqn: row for row in module_tree(run)}
    assert rows["Net"].parameters == 128
    assert rows["Net.a"].parameters == 64
    assert (rows["Net.a"].shape, rows["Net.a"].dtype) == ((6, 8), "float32")
    assert rows["Net.norm"].scale > 0
    assert rows["Net"].calls == 1


def test_repeated_layers_are_folded_to_the_first_and_the_last(deep):
    rows = module_tree(deep)
    assert [row.info.fqn for row in rows if row.info.fqn[-1:].isdigit()] == ["GPT.h.0", "GPT.h.5", "GPT.h.6"]
    assert [(row.info.fqn, row.folded) for row in rows if row.folded] == [("GPT.h.0", 4)]
    assert len(rows) == 8
    assert len(module_tree(deep, fold=False)) == 16


def test_the_records_of_a_step_are_shown(run):
    assert len(step_records(run, 1, Selection())) == len(train()[1])
    outputs = step_records(run, 1, read_selection(kinds=["output"], modules=["a", "norm"]))
    assert [record.site.fqn for record in outputs] == ["Net.a", "Net.norm"]
    with pytest.raises(UsageError, match="it has 4 from 0 to 3"):
        step_records(run, 9, Selection())


def test_the_history_of_a_site_is_shown(run):
    (history,) = histories(run, "Net.a", "std", frozenset({Kind.OUTPUT}))
    assert history.steps == (0, 1, 2, 3)
    expected = [next(r[2] for r in rows if r[0].kind is Kind.OUTPUT and r[0].fqn == "Net.a").std() for rows in train()]
    assert history.values == pytest.approx(expected)
    assert len(histories(run, "*.weight", "l2", frozenset({Kind.GRAD}))) == 2
    (rate,) = histories(run, "SGD", "mean", frozenset({Kind.HYPERPARAMETER}))[:1]
    assert rate.values == (0.05,) * 4
    with pytest.raises(UsageError, match=r"did you mean Net\.norm"):
        histories(run, "Net.nrom", "mean", frozenset())
    with pytest.raises(UsageError, match="keeps no statistic"):
        histories(run, "Net.a", "colour", frozenset())
    with pytest.raises(UsageError, match="keeps no statistic"):
        histories(run, "*", "colour", frozenset())


@pytest.mark.parametrize(
    "options",
    [["step", "99"], ["tree", "--settings"], ["history", "x"], ["tree", "--rank", "4"], ["step", "--", "-1"]],
)
def test_what_cannot_be_shown_is_one_sentence(introspect, run, options):
    done = introspect("show", *options, run.path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


def test_an_interrupted_run_and_an_empty_one(introspect, tmp_path):
    write_run(tmp_path / "cut", train(steps=2), complete=False)
    assert "interrupted" in introspect("show", "cut", cwd=tmp_path).stdout
    write_run(tmp_path / "none", [])
    done = introspect("show", "none", cwd=tmp_path)
    assert done.returncode == 0
    assert "none" in done.stdout
    assert introspect("show", "tree", "none", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("verb", ["diff", "show", "check", "export", "verify", "report"])
def test_runs_are_read_without_torch(tmp_path, verb):
    write_run(tmp_path / "a", train(), modules=MODULES)
    words = {
        "diff": ["a", "a"], "show": ["tree", "a"], "check": ["a"], "verify": ["a"], "report": ["a", "-o", "a.html"],
        "export": ["a", "--format", "yaml", "-o", "out"],
    }  # fmt: skip
    done = without_torch(tmp_path, verb, *words[verb])
    assert done.returncode in (0, 1), done.stderr
    assert not done.stderr


def without_torch(tmp_path, *words):
    code = f"import sys; sys.modules['torch'] = None; sys.argv = ['introspect', *{words!r}]\n"
    code += "from introspect_cli.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)


def test_capture_says_what_it_needs(tmp_path):
    (tmp_path / "train.py").write_text("print('ran')\n")
    done = without_torch(tmp_path, "capture", "train.py")
    assert done.returncode == 2
    assert done.stderr == "introspect: capture needs torch: `pip install torch`, in the environment of the script\n"
    assert not done.stdout


def test_two_histories_stand_side_by_side(introspect, tmp_path):
    for name, shift in (("a", 0.0), ("b", 0.5)):
        steps = [
            [row("optimizer", "grad", "Net.attn.qkv.weight", np.array([1.0, 2 + number + shift * (number > 3)]))]
            for number in range(20)
        ]
        write_run(tmp_path / name, steps)
    words = ("show", "history", "attn", "--kinds", "grad", "--stat", "max", "a", "b")
    shown = introspect(*words, env={**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "80"}).stdout
    assert "grad Net.attn.qkv.weight" in shown
    assert re.search(r"^ +4 +6 +6.5 +0.077 +first that differs$", shown, re.MULTILINE), shown
    assert "differs at 16 of 20 steps." in shown
    assert max(map(len, shown.splitlines())) <= 80
    document = json.loads(introspect(*words, "--format", "json").stdout)
    assert document["b"]["histories"][0]["values"][4] == 6.5
    assert introspect("show", "a", "b").returncode == 2
