"""Bisection over a real repository, and over settings: the culprit is found and the user's checkout is left alone."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from answer_schema import schema
from logs import documents_of
from repositories import MODEL, git, introspect

pytestmark = pytest.mark.usefixtures("quick_python")


def test_culprit_is_named_and_the_checkout_left_alone(repository: Path):
    culprit = git(repository, "rev-parse", "HEAD~9")
    good = git(repository, "rev-parse", "HEAD~11")
    (repository / "notes.txt").write_text("put away\n")
    git(repository, "stash")
    (repository / "notes.txt").write_text("not committed\n")
    (repository / "staged.txt").write_text("staged\n")
    git(repository, "add", "staged.txt")
    before, words = state(repository), ("--good", good, "--bad", "HEAD~6")
    answer = introspect(repository, "bisect", *words, "-o", "../kept", "train.py", "--lr", "0.05", code=1)
    assert f"first bad commit is {culprit[:10]}: scale the hidden layer" in answer.stdout
    assert "model.py" in answer.stdout
    assert "Net" in answer.stdout
    said = " ".join(answer.stdout.split())
    assert "Of 1 change in 1 file, one makes them diverge: model.py:11; proven by 2 runs" in said
    assert "+ return self.b(torch.relu(self.a(x)) * 1.001)" in said
    assert state(repository) == before
    assert git(repository, "worktree", "list").count("\n") == 0
    assert not git(repository, "for-each-ref", "refs/bisect")
    assert len(answer.stderr.splitlines()) <= 12

    kept = repository.parent / "kept"
    assert sorted(set(steps_of(kept).values())) == [1, 4]

    # Started again, it answers from what is kept.
    times = written(kept)
    again = introspect(repository, "bisect", *words, "-o", "../kept", "train.py", "--lr", "0.05", code=1)
    assert again.stdout.splitlines()[0] == answer.stdout.splitlines()[0]
    assert written(kept) == times


@pytest.mark.sweep
def test_the_bad_revision_ends_soon_after_its_first_divergence(repository: Path):
    slow = '"1.001" in model.__loader__.get_data(model.__file__).decode()'  # the bad one waits, until it is ended
    script = (
        repository / "train.py"
    ).read_text() + f"    import time; time.sleep(args.pause * min(1.15**step, 100) * ({slow}))\n"
    script = script.replace("args = parser", 'parser.add_argument("--pause", type=float, default=0)\nargs = parser')
    git(repository, "checkout", "-q", "-b", "slow", "HEAD~13")
    (repository / "train.py").write_text(script)
    git(repository, "commit", "-qam", "good")
    (repository / "model.py").write_text(MODEL.replace("{fault}", " * 1.001"))
    git(repository, "commit", "-qam", "bad")
    words = ("--steps", "80", "--pause", "0.1")
    answer = introspect(repository, "bisect", "--good", "HEAD~1", "-o", "../kept", "train.py", *words, code=1)
    assert f"first bad commit is {git(repository, 'rev-parse', 'HEAD')[:10]}: bad" in answer.stdout
    steps = sorted(steps_of(repository.parent / "kept").values())
    assert steps[-1] == 80
    assert steps[-2] < 80


def state(repository: Path) -> list[str]:
    """The user's checkout, index and stash."""
    asked = (["status", "--porcelain"], ["rev-parse", "HEAD"], ["diff"], ["diff", "--cached"], ["stash", "list"])
    return [git(repository, *words) for words in asked]


def steps_of(kept: Path) -> dict[str, int]:
    return {run.parent.name: documents_of(run.parent)["manifest"]["steps"] for run in kept.glob("*/manifest.json")}


def written(kept: Path) -> dict[Path, int]:
    return {run: run.stat().st_mtime_ns for run in kept.glob("*/manifest.json")}


def test_a_killed_bisection_goes_on_where_it_stopped(repository: Path):
    command = ["bisect", "--good", "HEAD~10", "--bad", "HEAD~7", "-o", "../kept", "train.py"]
    kept = repository.parent / "kept"
    running = subprocess.Popen(
        [sys.executable, "-m", "introspect_cli", *command],
        cwd=repository,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with running:
        for line in running.stderr:
            if "later steps are not run" in line:
                break
        os.killpg(running.pid, signal.SIGKILL)
    done = {run: when for run, when in written(kept).items() if steps_of(kept)[run.parent.name] > 1}
    assert done
    before = state(repository)
    answer = introspect(repository, *command, code=1)
    assert "scale the hidden layer" in answer.stdout
    assert written(kept).items() >= done.items()
    assert state(repository) == before
    assert git(repository, "worktree", "list").count("\n") == 0


def test_steps_are_limited(repository: Path):
    words = ("--good", "HEAD~10", "--bad", "HEAD~9", "--until-step", "2", "-o", "../kept", "train.py")
    answer = introspect(repository, "bisect", "--format", "json", *words, code=1)
    assert "scale the hidden layer" in answer.stdout
    schema("bisect").validate(json.loads(answer.stdout))
    assert set(steps_of(repository.parent / "kept").values()) == {3}


def test_revisions_that_do_not_run_are_skipped(repository: Path):
    good, bad = git(repository, "rev-parse", "HEAD~16"), git(repository, "rev-parse", "HEAD~11")
    git(repository, "checkout", "-q", "HEAD~9")
    answer = introspect(repository, "bisect", "--good", "HEAD~6", "--bad", "HEAD", "train.py", code=1)
    assert "is skipped" in answer.stderr
    assert "scale the hidden layer" in answer.stdout
    answer = introspect(repository, "bisect", "--good", good, "--bad", bad, "train.py", code=2)
    assert "nothing to bisect" in answer.stderr


def test_what_cannot_be_meant_is_one_sentence(repository: Path, tmp_path: Path):
    for words, said in (
        (("--good", "nowhere", "train.py"), "no revision 'nowhere'"),
        (("--good", "HEAD", "--bad", "HEAD~3", "train.py"), "is not an ancestor"),
        (("--good", "HEAD~14", "train.py"), "does not run"),
        (("train.py",), "say what to bisect"),
    ):
        answer = introspect(repository, "bisect", *words, code=2)
        assert said in answer.stderr
        assert "Traceback" not in answer.stderr
        assert not answer.stdout
    assert "not a git repository" in introspect(tmp_path, "bisect", "--good", "x", "train.py", code=2).stderr


@pytest.mark.sweep
def test_setup_runs_in_each_revision(repository: Path):
    answer = introspect(
        repository, "bisect", "--good", "HEAD~13", "--setup", "test -f model.py && echo > prepared", "train.py", code=1
    )
    assert "scale the hidden layer" in answer.stdout
    assert not (repository / "prepared").exists()


WORDS = shlex.split(
    "data --verbose --sizes 1 2 -x -3 --empty= --deep=--er model.depth=2 -p lr=1 -p depth=2 --hp a.b=3 -I x -I y -v -v"
)
"""Of a command line that is read and written again, and that no parser knows."""


def test_settings_that_make_runs_diverge(repository: Path):
    train = repository / "train.py"
    train.write_text(train.read_text().replace("parser.parse_args()", "parser.parse_known_args()[0]"))
    for run, seed, more in (("a", (), ()), ("b", ("--seed", "3"), ("--scale", "2"))):
        words = (*seed, "train.py", "--lr", "0.1", "--name", f"the-{run}", *WORDS, *more)
        introspect(repository, "capture", "-q", "-o", f"../{run}", *words, code=0)
    answer = introspect(repository, "bisect", "--changes", "../a", "../b", "-o", "../kept", code=1)
    assert answer.stdout.startswith("Of 3 differing settings, one makes them diverge: --scale; proven by 2 runs")
    assert set(steps_of(repository.parent / "kept").values()) == {1}, "no variant runs past the first divergence"
    assert "--scale: - -> 2" in answer.stdout
    for path in (repository.parent / "kept").glob("*/manifest.json"):
        made = documents_of(path.parent)["command"]["arguments"]
        assert made[4 : 4 + len(WORDS)] == WORDS
        assert made[:3] == ["--lr", "0.1", "--name"]
        assert made[4 + len(WORDS) :] in ([], ["--scale", "2"])


@pytest.mark.sweep
def test_an_argument_and_a_variable_that_only_together_make_runs_diverge(repository: Path):
    introspect(repository, "capture", "-q", "-o", "../a", "train.py", code=0, USE_SHIFT="0")
    words = ("-q", "-o", "../b", "--deterministic", "train.py", "--shift", "1")
    introspect(repository, "capture", *words, code=0, USE_SHIFT="1")
    answer = introspect(repository, "bisect", "--changes", "../a", "../b", code=1, USE_SHIFT="0")
    sentence = " ".join(answer.stdout.partition("--shift: ")[0].split())
    assert "differing settings, 2 make them diverge: --shift and USE_SHIFT; proven by " in sentence
    assert "deterministic" not in answer.stdout.partition("runs, in ")[0]


@pytest.mark.sweep
def test_git_bisect_run_takes_the_exit_status_of_diff(repository: Path):
    """The recipe of the documentation, as git runs it."""
    python = f"{sys.executable} -m introspect_cli"
    recipe = repository.parent / "bisect.sh"
    good = git(repository, "rev-parse", "HEAD~13")
    git(repository, "checkout", "-q", good)
    introspect(repository, "capture", "-q", "-o", "../good", "train.py", code=0)
    recipe.write_text(
        f"{python} capture -q --force -o ../this train.py || exit 125\n{python} diff --bisect ../good ../this\n"
    )
    git(repository, "bisect", "start", "main", good)
    log = git(repository, "bisect", "run", "sh", str(recipe))
    assert "scale the hidden layer" in log
    assert "is the first bad commit" in log
    git(repository, "bisect", "reset")
