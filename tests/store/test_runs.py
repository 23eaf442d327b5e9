"""`introspect runs`: what lies below a directory, and what may be removed."""

import json
from pathlib import Path

import pytest
from synthetic import row, write_run

from introspect_cli.inspect import runs as listing
from introspect_cli.inspect.runs import RunRow, find_runs, prunable
from introspect_cli.render.show_text import unseen_sentences


def listed(name, ended="complete"):
    return RunRow(Path(name), "train.py", None, 1, 10, ended)


def test_the_latest_stay_and_what_may_be_under_way_or_is_packed_never_goes():
    rows = [listed("a"), listed("b"), listed("c", "running"), listed("d", "unreadable"), listed("e", "damaged")]
    rows.append(listed("f.introspect.zip"))
    assert [str(found.path) for found in prunable(rows, keep=1)] == ["b", "e"]
    assert [str(found.path) for found in prunable(rows, keep=0)] == ["a", "b", "e"]


def test_a_search_says_where_it_did_not_look(runs, monkeypatch, introspect):
    for name in ("closed", "a/b/c/d/e/f", "gone"):
        (runs / name).mkdir(parents=True)
    (runs / "closed" / "inside").mkdir()
    write_run(runs / "far" / "run", [[row("forward", "output", "Net", 1.0)]])
    whole = find_runs([runs])
    assert {found.path.name for found in whole.runs} == {"first", "second", "broken", "run"}
    assert whole.not_searched == [runs / "a/b/c/d/e"]
    assert unseen_sentences(whole)[0].startswith(
        f"Not searched: {runs / 'a/b/c/d/e'} (not readable, more than 4 levels"
    )
    assert "more than 4 levels down" in introspect("runs", str(runs)).stdout
    document = json.loads(introspect("runs", str(runs), "--format", "json").stdout)
    assert document["not_searched"] == [str(runs / "a/b/c/d/e")]

    scandir = listing.os.scandir

    def refused(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        if Path(path).name == "gone":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return scandir(path)

    monkeypatch.setattr(listing.os, "scandir", refused)
    found = find_runs([runs])
    assert found.not_searched == [runs / "closed", *whole.not_searched]
    assert {each.path for each in found.runs} == {each.path for each in whole.runs}

    near = find_runs([runs], most=8)  # the root and what is in it: a, closed, far, first, gone, nested, second
    assert {each.path.name for each in near.runs} == {"first", "second"}
    assert len(near.not_searched) == 4


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
    document = json.loads(introspect("runs", "list", "--format", "json", str(runs)).stdout)
    assert {Path(found["path"]).name: found["steps"] for found in document["runs"]} == {
        "first": 3,
        "second": 3,
        "broken": 0,
    }


def test_pruning_removes_and_says_what(introspect, runs):
    done = introspect("runs", "prune", "--keep", "2", "--dry-run", cwd=runs.parent)
    assert "would remove" in done.stdout
    assert len(list(runs.glob("*/rank0"))) == 2
    done = introspect("runs", "prune", "--keep", "1", str(runs / "first"), str(runs / "second"))
    assert done.returncode == 0, done.stderr
    assert len(list(runs.glob("*/rank0"))) == 1
    assert list(runs.glob(".*replaced*")) == []


def test_what_cannot_be_done_is_reported(introspect, tmp_path):
    assert introspect("runs", cwd=tmp_path).returncode == 2
    done = introspect("runs", "prune", str(tmp_path))
    assert done.returncode == 2
    assert "Missing option '--keep'" in done.stderr
