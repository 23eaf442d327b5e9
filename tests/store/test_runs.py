"""`introspect runs`: what lies below a directory."""

import json
import os
from pathlib import Path

import pytest
from synthetic import row, write_run
from verbs import verb


def test_a_search_says_where_it_did_not_look(runs, monkeypatch):
    for name in ("closed/inside", "a/b/c/d/e/f", "gone"):
        (runs / name).mkdir(parents=True)
    write_run(runs / "far" / "run", [[row("forward", "output", "Net", 1.0)]])
    listed = json.loads(verb("runs", "--format", "json", runs).stdout)
    assert {Path(found["path"]).name for found in listed["runs"]} == {"first", "second", "broken", "run"}
    assert listed["not_searched"] == [str(runs / "a/b/c/d/e")]
    said = f"Not searched: {runs / 'a/b/c/d/e'} (not readable, or more than 4 levels"
    assert said in verb("runs", runs).stdout

    scandir = os.scandir

    def refused(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        if Path(path).name == "gone":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    found = json.loads(verb("runs", "--format", "json", runs).stdout)
    assert found["not_searched"] == [str(runs / "closed"), *listed["not_searched"]]
    assert found["runs"] == listed["runs"]


def test_nothing_is_said_to_be_absent_where_nobody_looked(tmp_path, introspect):
    (tmp_path / "empty").mkdir()
    assert introspect("runs", "empty").stdout == "No runs below empty.\n"
    (tmp_path / "empty" / "a/b/c/d/e").mkdir(parents=True)
    assert introspect("runs", "empty").stdout.startswith("No runs found below empty.\nNot searched")


@pytest.fixture
def runs(tmp_path):
    home = tmp_path / "introspect-runs"
    for name in ("first", "second"):
        write_run(home / name, [[row("forward", "output", "Net", name)] for _ in range(3)])
    broken = home / "nested" / "broken"
    broken.mkdir(parents=True)
    (broken / "manifest.json").write_text("[")
    return home


def test_runs_are_listed_with_what_is_damaged(introspect, runs):
    done = introspect("runs", cwd=runs.parent)
    assert done.returncode == 0, done.stderr
    assert "introspect-runs/first" in done.stdout
    assert "damaged" in done.stdout
    assert "3 runs" in done.stdout
    document = json.loads(introspect("runs", "--format", "json", str(runs)).stdout)
    assert {Path(found["path"]).name: found["steps"] for found in document["runs"]} == {
        "first": 3,
        "second": 3,
        "broken": 0,
    }


def test_where_no_run_was_made_it_says_so(introspect, tmp_path):
    assert introspect("runs", cwd=tmp_path).returncode == 2
