"""`introspect diff` as a person or a script runs it."""

import json
import os
import subprocess
import sys

import pytest
from small_runs import MODULES, train
from synthetic import write_run


@pytest.fixture
def runs(tmp_path):
    about = {"modules": MODULES, "settings": {"command": {"argv": ["--lr", "1"]}, "environment": {"PWD": "/x"}}}
    write_run(tmp_path / "a", train(), **about)
    write_run(tmp_path / "same", train(), **about)
    write_run(tmp_path / "other", train("module"), modules=MODULES, settings={"command": {"argv": ["--lr", "2"]}})
    write_run(tmp_path / "short", train(steps=2), modules=MODULES)
    return tmp_path


@pytest.mark.parametrize(
    ("b", "options", "code"),
    [
        ("same", [], 0),
        ("other", [], 1),
        ("short", [], 2),
        ("missing", [], 2),
        ("same", ["--bisect"], 0),
        ("other", ["--bisect"], 1),
        ("short", ["--bisect"], 125),
        ("missing", ["--bisect"], 125),
        ("other", ["--kinds", "batch"], 0),
        ("other", ["--rtol", "0.5"], 0),
        ("other", ["--steps", "0"], 0),
        ("short", ["--steps", ":2"], 0),
        ("other", ["--noise", "other"], 0),
        ("other", ["--steps", "a"], 2),
        ("other", ["--kinds", "outputs"], 2),
        ("other", ["--rename", "x"], 2),
        ("other", ["--ranks", "3"], 2),
        ("other", ["--no-such"], 2),
    ],
)
def test_the_exit_status_says_the_verdict(introspect, runs, b, options, code):
    done = introspect("diff", "a", b, *options, cwd=runs)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) == (not done.stdout)
    assert done.stderr.count("\n") <= 1


def test_the_answer_is_a_table_json_or_yaml(introspect, runs):
    table = introspect("diff", "a", "other", cwd=runs).stdout
    assert table.startswith("First divergence at step 1: the output of Net.a (Linear), relative L2 ")
    assert "more records follow" in table
    assert "\x1b" not in table
    found = json.loads(introspect("diff", "a", "other", "--format", "json", cwd=runs).stdout)
    assert found["first"]["fqn"] == "Net.a"
    assert introspect("diff", "a", "other", "--format", "yaml", cwd=runs).stdout.startswith("format: 1\n")


def test_all_lists_every_divergence(introspect, runs):
    few = introspect("diff", "a", "other", "--limit", "2", cwd=runs).stdout
    every = introspect("diff", "a", "other", "--all", cwd=runs).stdout
    assert few.count("propagated") == 1
    assert every.count("propagated") > 20
    assert "not listed" in few
    assert "not listed" not in every


def test_settings_alone_are_listed_on_request(introspect, runs):
    done = introspect("diff", "a", "other", "--settings", cwd=runs)
    assert done.returncode == 1
    assert "--lr 1 -> 2" in done.stdout
    assert "diverge at" not in done.stdout
    assert "rel. L2" not in done.stdout
    assert introspect("diff", "a", "same", "--settings", cwd=runs).stdout == "No setting that both runs kept differs.\n"


def test_a_run_still_being_written_is_compared_as_far_as_it_is(introspect, tmp_path):
    from synthetic import batch

    from introspect_cli.store.run_writer import StoreWriter

    write_run(tmp_path / "a", train(steps=3))
    store = StoreWriter.create(tmp_path / "b")
    store.write_manifest({"status": "running"})
    writer = store.rank(0, stats=True, sketch=True, sorted_stats=())
    writer.append(0, batch(writer, train(steps=3)[0]))
    done = introspect("diff", "a", "b", cwd=tmp_path)
    store.abandon()
    assert done.returncode == 2
    assert "still being written" in done.stdout
    assert "equal up to and including step 0" in done.stdout


def test_no_color_and_narrow_terminals(runs):
    env = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "introspect_cli", "diff", "a", "other", "--map"],
        cwd=runs,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.isascii()
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert " origin" in done.stdout


def test_manifests_and_settings_of_any_shape_are_borne(introspect, tmp_path):
    strange = {"options": [1], "argv": "x", "not_observed": {"a": 1}, "observed": "abc", "exit_code": [1]}
    settings = {"optimizers": {"x": [1]}, "command": ["a"], "environment": [1, {"b": 2}], "runtime": None, "git": 3}
    other = {"optimizers": [{"groups": 3}, 4], "command": {"arguments": 5}, "environment": {}, "runtime": {}, "git": {}}
    write_run(tmp_path / "a", train(), manifest=strange, settings=settings)
    write_run(tmp_path / "b", train("fresh"), manifest={"options": {"seed": [1]}}, settings=other)
    done = introspect("diff", "a", "b", "--all", "--map", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert json.loads(introspect("diff", "a", "b", "--format", "json", cwd=tmp_path).stdout)["settings"]
    for view in ([], ["settings"], ["tree"]):
        assert introspect("show", *view, "a", cwd=tmp_path).returncode == 0
