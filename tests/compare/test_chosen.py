"""Words that stand for runs: `@1`, `@2`, labels, and nothing at all."""

import json
from pathlib import Path

import pytest
from synthetic import row, write_run

from introspect_cli.api import diff
from introspect_cli.errors import StoreError, UsageError

STARTED = "2026-06-15T12:00:0{}+00:00"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Three runs, the second of which differs from the others; named so that their names are in another order."""
    for number, (name, value) in enumerate({"c": 1.0, "a": 2.0, "b": 1.0}.items()):
        rows = [[row("forward", "output", "Net", value)]]
        write_run(tmp_path / "introspect-runs" / name, rows, manifest={"started": STARTED.format(number)})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "introspect-runs"


def chosen(word):
    return diff(word, word).result.a


def test_runs_are_counted_from_the_last_one(home):
    assert [Path(chosen(f"@{number}")).name for number in (1, 2, 3)] == ["b", "a", "c"]
    with pytest.raises(UsageError, match="there is no @4 among 3 runs below introspect-runs/ here"):
        chosen("@4")


def test_what_is_at_a_path_comes_before_numbers(home):
    Path("@1").mkdir()
    with pytest.raises(StoreError, match=r"^@1 "):
        chosen("@1")


def test_diff_alone_compares_the_last_two_and_says_which(home, introspect):
    done = introspect("diff", "--format", "json")
    assert done.returncode == 1, done.stderr
    assert done.stderr == "introspect: a is introspect-runs/a, b is introspect-runs/b\n"
    document = json.loads(done.stdout)
    assert (document["a"], document["b"]) == ("introspect-runs/a", "introspect-runs/b")
    assert introspect("diff", "@3", "@1").returncode == 0
    done = introspect("zoom")
    assert done.returncode == 1, done.stderr
    assert done.stderr == "introspect: a is introspect-runs/a, b is introspect-runs/b\n"


def test_diff_of_one_run_and_of_too_few_says_what_to_do(home, introspect, tmp_path):
    assert "name a second run to compare introspect-runs/b with" in introspect("diff", "@1").stderr
    (tmp_path / "empty").mkdir()
    done = introspect("diff", cwd=tmp_path / "empty")
    assert (done.returncode, done.stderr) == (
        2,
        "introspect: there is no @2 among 0 runs below introspect-runs/ here: name a run by its path.\n",
    )


@pytest.mark.parametrize("words", [["show"], ["check"], ["show", "tree"], ["report", "-o", "page.html"]])
def test_what_looks_at_one_run_takes_the_last(home, introspect, words):
    done = introspect(*words)
    assert "introspect: the last run is introspect-runs/b\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["verify", "pack -o packed.zip", "export --format csv -o out"])
def test_every_verb_that_takes_a_run_takes_a_number(home, introspect, words):
    verb, *rest = words.split()
    done = introspect(verb, "@2", *rest)
    assert done.returncode == 0, done.stderr


def test_the_python_functions_take_numbers_of_runs_too(home):
    assert diff("@3", "@1").verdict == "same"
    assert diff("@2", "@1").verdict == "diverged"
