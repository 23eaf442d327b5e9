"""`introspect show`: a run at a glance, its tree, a step, a history, its settings."""

import subprocess
import sys

import numpy as np
import pytest
from small_runs import MODULES, train
from synthetic import row, write_run

from introspect_cli.records import ModuleInfo


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", train(), modules=MODULES)


def test_repeated_layers_are_folded_to_the_first_and_the_last(introspect, tmp_path):
    """Of seven blocks the last is another."""
    modules, rows = [ModuleInfo("GPT", "GPT"), ModuleInfo("GPT.h", "ModuleList")], []
    for place in range(7):
        name, width = f"GPT.h.{place}", 4 if place < 6 else 5
        modules += [ModuleInfo(name, "Block"), ModuleInfo(f"{name}.fc", "Linear", "", ("weight",))]
        rows.append(row("start", "param", f"{name}.fc.weight", np.ones((width, 4), np.float32)))
        rows.append(row("forward", "output", name, np.ones((2, width), np.float32)))
    write_run(tmp_path / "deep", [rows], modules=modules)
    shown, unfolded = (introspect("show", "tree", "deep", *more).stdout for more in ((), ("--unfold",)))
    named = [[line.split()[0] for line in text.splitlines()] for text in (shown, unfolded)]
    assert [name for name in named[0] if name.isdigit()] == ["0", "5", "6"]
    assert [name for name in named[1] if name.isdigit()] == [*"0123456"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["step", "9"], "it has 4 from 0 to 3"),
        (["history", "Net.nrom"], "did you mean Net.norm"),
        (["history", "Net.a", "--stat", "colour"], "there is no statistic"),
        (["history", "*", "--stat", "colour"], "there is no statistic"),
    ],
)
def test_what_there_is_not_is_told_with_what_there_is(introspect, run, words, said):
    done = introspect("show", *words, run)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    "options",
    [["step", "99"], ["tree", "--settings"], ["history", "x"], ["tree", "--rank", "4"], ["step", "--", "-1"]],
)
def test_what_cannot_be_shown_is_one_sentence(introspect, run, options):
    done = introspect("show", *options, run)
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
