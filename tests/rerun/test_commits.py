"""Two revisions in one command: each runs as it would in the user's work tree, which nothing touches."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from interpreter import PYTHON
from repositories import git, introspect

pytestmark = pytest.mark.usefixtures("quick_python")

TRAIN = """\
import os, sys, time

import torch

import model

torch.manual_seed(0)
scale = float(open("data/scale.txt").read())
net = model.Net()
open("data/log.txt", "w").write("written by the script")
for step in range(int(sys.argv[1])):
    pause = float(os.environ.get(getattr(model, "PAUSE", "PAUSE"), 0))
    time.sleep(pause * min(1.15**step, 100))  # it is ended meanwhile, on a busy machine too
    loss = net(torch.randn(4, 3) * scale).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
"""

MODEL = """\
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.a(x){fault}
"""


def commit(repository: Path, name: str, **files: str) -> None:
    for file, text in files.items():
        (repository / file.replace("__", "/")).with_suffix(".py").write_text(text)
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", name)
    git(repository, "tag", name)


@pytest.fixture(scope="module")
def history(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("history")
    git(path, "init", "-q", "-b", "main")
    (path / ".gitignore").write_text("data\n")
    (path / "data").mkdir()
    (path / "data" / "scale.txt").write_text("2")
    (path / "data" / "log.txt").write_text("the user's")
    commit(path, "first", train=TRAIN, model=MODEL.replace("{fault}", ""))
    slow = MODEL.replace("{fault}", " * 1.001") + "\n\nPAUSE = 'SLOW'\n"
    commit(path, "faulty", model=slow)
    commit(path, "refactored", model=MODEL.replace("{fault}", " * 1.0"))
    return path


@pytest.fixture
def repository(tmp_path: Path, history: Path) -> Path:
    return Path(shutil.copytree(history, tmp_path / "a project"))


def everything(repository: Path) -> dict[str, object]:
    """All that must stay as it is."""
    files = {
        str(path): path.read_bytes()
        for path in repository.rglob("*")
        if path.is_file() and "introspect-runs" not in path.parts and ".git" not in path.parts
    }
    index = (repository / ".git" / "index").read_bytes()
    asked = (
        ["--no-optional-locks", "status", "--porcelain"],
        ["rev-parse", "HEAD"],
        ["stash", "list"],
        ["worktree", "list"],
        ["branch"],
    )
    return files | {"index": index} | {str(words): git(repository, *words) for words in asked}


def left(repository: Path) -> list[str]:
    """What is below `introspect-runs/commits` and no run."""
    return [
        path.name
        for path in (repository / "introspect-runs" / "commits").glob("*")
        if path.suffix != ".log" and not (path / "manifest.json").exists()
    ]


def test_two_commits_are_compared_and_a_second_question_is_answered_from_disk(repository: Path):
    before = everything(repository)
    words = ("diff", "first", "faulty", "--", "train.py", "40")
    answer = introspect(repository, *words, code=1, SLOW="0.2")
    assert answer.stdout.startswith("First divergence at step 0: the output of Net")
    assert "return self.a(x) * 1.001" in answer.stdout
    assert "run b was ended at its first divergence" in answer.stdout
    assert everything(repository) == before
    assert not left(repository)

    again = introspect(repository, *words, code=1, SLOW="0.2")
    assert again.stdout == answer.stdout
    assert again.stderr.count("captured before") == 2

    runs = (repository / "introspect-runs" / "commits").glob("*/manifest.json")
    runs = [run.parent.name for run in sorted(runs, key=lambda run: run.stat().st_mtime)]
    proof = introspect(repository, "bisect", "--changes", *(f"introspect-runs/commits/{run}" for run in runs), code=1)
    assert "one makes them diverge: model.py:" in proof.stdout
    assert everything(repository) == before

    more = introspect(repository, "diff", "first", "refactored", "--", "train.py", "40", code=0, SLOW="0.2")
    assert more.stdout.startswith("The runs are the same")
    assert more.stderr.count("captured before") == 1

    last = introspect(repository, "diff", "first", "refactored", "--", "train.py", "40", code=0, SLOW="0.2")
    assert last.stderr.count("captured before") == 2


def test_the_work_tree_as_it_is_runs_with_all_that_is_not_committed(repository: Path):
    (repository / "model.py").write_text(
        MODEL.replace("{fault}", " * helper.SCALE").replace("torch\n", "torch, helper\n", 1)
    )
    (repository / "helper.py").write_text("SCALE = 1.001\n")
    (repository / "staged.py").write_text("")
    git(repository, "add", "staged.py")
    (repository / ".gitattributes").unlink(missing_ok=True)
    before = everything(repository)
    answer = introspect(repository, "diff", "HEAD", ".", "--", "train.py", "2", code=1)
    assert "helper.SCALE" in answer.stdout
    assert "b is the work tree" in answer.stderr
    assert "with 3 changed" in answer.stderr
    assert everything(repository) == before

    # an edit is another state of the work tree, and a is at hand
    (repository / "helper.py").write_text("SCALE = 1.0\n")
    answer = introspect(repository, "diff", "HEAD", ".", "--", "train.py", "2", code=0)
    assert answer.stderr.count("captured before") == 1


@pytest.mark.sweep
def test_a_subdirectory_and_what_lies_beside_the_repository(repository: Path):
    (repository / "sub").mkdir()
    (repository / "sub" / "model.py").write_text(MODEL.replace("{fault}", ""))
    commit(repository, "deep", sub__train=TRAIN.replace("data/scale", "../../beside/scale").replace("data/", ""))
    (repository.parent / "beside").mkdir()
    (repository.parent / "beside" / "scale.txt").write_text("2")
    answer = introspect(repository / "sub", "diff", "deep", "HEAD", "--", "train.py", "2", code=0)
    assert not (repository / "sub" / "log.txt").exists()
    assert git(repository, "status", "--porcelain") == ""
    (repository.parent / "beside" / "scale.txt").write_text("3")
    answer = introspect(repository / "sub", "diff", "deep", "HEAD", "--", "train.py", "2", code=0)
    assert "scale.txt has changed since it was captured" in answer.stderr
    assert "captured before" not in answer.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_comparison_touches_nothing_and_leaves_nothing(repository: Path, number: int):
    (repository / "model.py").write_text(MODEL.replace("{fault}", " * 1.001"))
    before = everything(repository)
    running = subprocess.Popen(
        [sys.executable, "-m", "introspect_cli", "diff", "first", ".", "--", "train.py", "4000"],
        cwd=repository,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PAUSE": "0.05"},
    )
    kept = repository / "introspect-runs" / "commits"
    deadline = time.monotonic() + 600
    while not list(kept.glob("*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(kept.glob("*/manifest.json"))
    os.killpg(running.pid, number) if number != signal.SIGTERM else running.send_signal(number)
    with running:
        assert running.wait(600) != 0
    after = everything(repository)
    if number == signal.SIGKILL:
        after[str(["worktree", "list"])] = before[str(["worktree", "list"])]  # the next one removes it
        answer = introspect(repository, "diff", "first", ".", "--", "train.py", "2", code=1)
        assert answer.stdout.startswith("First divergence at step 0")
        assert everything(repository) == before
    else:
        assert not list(kept.glob("*")) or not kept.exists()
    assert after == before


def test_a_capture_ends_with_the_one_who_is_killed(tmp_path: Path):
    code = "import sys; from pathlib import Path; from introspect_cli.rerun.variant import run_logged\n"
    code += "run_logged([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(900)'], "
    running = subprocess.Popen([PYTHON, "-c", f"{code}Path('log'), Path.cwd())"], cwd=tmp_path)
    deadline = time.monotonic() + 600
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.kill()
    running.wait()
    process = Path("/proc", (tmp_path / "log").read_text().strip())
    while process.exists() and "State:\tZ" not in (process / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_cannot_be_meant_is_one_sentence(repository: Path, tmp_path: Path):
    commit(repository, "exits", train="import sys\nsys.exit('no such option')\n")
    for words, said in (
        (("first", "nowhere", "--", "train.py"), "no revision 'nowhere'"),
        (("first", "HEAD", "--", "other.py"), "nothing to compare: other.py at first ("),
        (("first", "HEAD", "--"), "nothing to run"),
        (("first", "HEAD", "--", "--seed", "1"), "nothing to run: name a script, or -m and a module"),
        (("first", "--", "train.py"), "name two revisions before `--`"),
        (("first", "HEAD"), "there is no run at first"),
        (("first", "HEAD", "--fresh"), "name what to run after `--`"),
        (("first", "HEAD", "--", "-o", "x", "train.py"), "leave -o out"),
        (("first", "HEAD", "--link", "nowhere", "--", "train.py"), "no such path to link: nowhere"),
        (("exits", "first", "--", "train.py", "2"), "ends by exit code 1 (no such option), before its first step"),
    ):
        answer = introspect(repository, "diff", *words, code=2)
        assert said in answer.stderr, answer.stderr
        assert "Traceback" not in answer.stderr
        assert not answer.stdout
        assert not left(repository)
    outside = introspect(tmp_path, "diff", "first", "HEAD", "--", "train.py", code=2)
    assert "is in no git repository that has it as a revision" in outside.stderr


def test_a_script_that_fails_at_one_commit_is_reported_with_its_exception(repository: Path):
    counting = "self.n = getattr(self, 'n', 0) + 1\n        if self.n == 3:\n            raise ValueError('bad shape')"
    commit(repository, "later", model=MODEL.replace("{fault}", "").replace("return", f"{counting}\n        return"))
    commit(repository, "at_once", model="raise ImportError('no such thing')\n")
    answer = introspect(repository, "diff", "first", "later", "--", "train.py", "5", code=1)
    assert "Run b ended by an exception" in answer.stdout
    assert "ValueError: bad shape, at model.py:" in " ".join(answer.stdout.split())
    answer = introspect(repository, "diff", "first", "at_once", "--", "train.py", "5")
    assert answer.returncode != 0
    assert "ImportError: no such thing" in " ".join((answer.stdout + answer.stderr).split())
    answer = introspect(repository, "diff", "at_once", "first", "--", "train.py", "5", code=2)
    assert "nothing to compare: train.py 5 at at_once" in answer.stderr
    assert "ends by ImportError: no such thing, at model.py:1" in answer.stderr


def test_a_run_of_that_name_wins_over_a_branch(repository: Path):
    introspect(repository, "capture", "-q", "--seed", "0", "-o", "first", "train.py", "2", code=0)
    answer = introspect(repository, "diff", "first", "faulty", "--", "train.py", "2", code=1)
    assert "a is " not in answer.stderr


@pytest.mark.sweep
def test_large_data_is_not_copied_but_named_and_linked_on_request(repository: Path):
    with (repository / "data" / "large.bin").open("wb") as file:
        file.truncate(600 << 20)
    words = ("diff", "first", "refactored", "--", "train.py", "1")
    said = introspect(repository, *words, code=0).stderr
    assert "data/large.bin" in said
    assert (repository / "data" / "log.txt").read_text() == "the user's"
    said = introspect(repository, *words[:3], "--link", "data", *words[3:], code=0).stderr
    assert "large.bin" not in said
    assert (repository / "data" / "log.txt").read_text() == "written by the script"  # the link was asked for


@pytest.mark.sweep
def test_submodules_run_as_they_lie_and_another_commit_of_one_is_refused(repository: Path, tmp_path: Path):
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "-q", "-b", "main")
    commit(library, "one", scale="SCALE = 1.0\n")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(library), "lib")
    text = "from lib.scale import SCALE\n" + MODEL.replace("{fault}", " * SCALE")
    commit(repository, "with_lib", model=text)
    before = everything(repository)
    introspect(repository, "diff", "with_lib", ".", "--", "train.py", "2", code=0)
    (repository / "lib" / "scale.py").write_text("SCALE = 1.001\n")
    commit(repository / "lib", "two")
    said = introspect(repository, "diff", "with_lib", ".", "--", "train.py", "2", code=2).stderr
    assert "of the submodule lib: check it out there" in said
    git(repository / "lib", "checkout", "-q", "one")
    assert everything(repository) == before


@pytest.mark.sweep
def test_the_project_is_imported_from_the_revision_where_it_is_installed_as_editable(repository: Path):
    (repository / "src").mkdir()
    git(repository, "mv", "model.py", "src/model.py")
    commit(repository, "src")
    commit(repository, "src_faulty", src__model=MODEL.replace("{fault}", " * 1.001"))
    path = str(repository / "src")
    answer = introspect(repository, "diff", "src", "src_faulty", "--", "train.py", "2", code=1, PYTHONPATH=path)
    assert "src/model.py" in answer.stdout
    # one that goes to the user's files by an absolute path is not called the revision's
    train = f"import sys\nsys.path.insert(0, {path!r})\n{TRAIN}"
    commit(repository, "absolute", train=train, src__model=MODEL.replace("{fault}", ""))
    (repository / "src" / "model.py").write_text(MODEL.replace("{fault}", " * 3"))
    answer = introspect(repository, "diff", "absolute", "HEAD", "--", "train.py", "2", code=2)
    assert "model.py was read as it lies in your project" in answer.stderr
    assert not left(repository)


@pytest.mark.sweep
def test_captures_that_were_not_used_for_longest_go(repository: Path):
    introspect(repository, "diff", "first", "refactored", "--", "train.py", "1", code=0)
    base = repository / "introspect-runs" / "commits"
    runs = sorted(path.parent for path in base.glob("*/manifest.json"))
    for number in range(20):
        copy = Path(shutil.copytree(runs[0], base / f"old-{number}"))
        os.utime(copy, (1 + number, 1 + number))
    introspect(repository, "diff", "first", "faulty", "--", "train.py", "1", code=1)
    left = {path.parent.name for path in base.glob("*/manifest.json")}
    assert {run.name for run in runs} <= left
    assert len(left) == 20
    assert "old-0" not in left
