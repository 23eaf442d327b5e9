"""Both runs again up to where they diverge: from their own commits, only if they repeat, and what is said if not."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import repositories
from logs import change_document, documents_of
from repositories import git
from synthetic import row, write_run

pytestmark = pytest.mark.usefixtures("quick_python")

TRAIN = """\
import argparse
import os
import pathlib

import torch

import model

parser = argparse.ArgumentParser()
parser.add_argument("--fault-at", type=int, default=-1)
parser.add_argument("--count")
args = parser.parse_args()
torch.manual_seed(0)
shift = 0.0
if args.count:
    path = pathlib.Path(args.count)
    shift = int(path.read_text()) if path.exists() else 0
    path.write_text(str(shift + 1))
net = model.Net()
scale = float(os.environ.get("NET_SCALE", "1"))
for step in range(6):
    x = torch.randn(4, 6) + shift
    if step == args.fault_at:
        x[2] *= 2
    loss = (net(x) * scale).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
"""
"""Updates by hand: torch's optimizers import its compiler, which takes longer than all the rest of a run."""

MODEL = """\
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(6, 8)
        self.b = torch.nn.Linear(8, 2)

    def forward(self, x):
        hidden = torch.relu(self.a(x))
{fault}
        return self.b(hidden)
"""
SOUND, FAULTY = (MODEL.format(fault=f"        hidden = hidden * {each}") for each in ("1.0", "torch.arange(8).lt(6)"))


def introspect(directory, *words, code):
    """Standard output of a command, and under it standard error."""
    answer = repositories.introspect(directory, *words, code=code)
    return answer.stdout + answer.stderr


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """A repository of two commits, each captured; what is checked out is a third, which has no model."""
    path = tmp_path_factory.mktemp("project")
    git(path, "init", "-q", "-b", "main")
    (path / ".gitignore").write_text("runs\nintrospect-runs\n__pycache__\n")
    (path / "train.py").write_text(TRAIN)
    for name, text in (("a", SOUND), ("b", FAULTY)):
        (path / "model.py").write_text(text)
        git(path, "add", "-A")
        git(path, "commit", "-q", "-m", name)
        introspect(path, "capture", "-q", "-o", f"runs/{name}", "train.py", code=0)
    (path / "model.py").write_text("raise SystemExit('no model any more')\n")
    git(path, "commit", "-qam", "gone")
    return path


@pytest.fixture
def project(kept, tmp_path) -> Path:
    """A copy, since a zoom writes beside the runs. The recorded directory is made to be that of the copy."""
    path = Path(shutil.copytree(kept, tmp_path / "a project"))
    moved_to(path, *path.glob("runs/*"))
    return path


def moved_to(directory: Path, *runs: Path) -> None:
    """Write another directory into the commands of runs, as if they had been captured there."""
    for run in runs:
        changed(run, directory=str(directory))


def changed(run: Path, **change: object) -> None:
    """Write other values into what a run tells of its command."""
    change_document(run, "command", change)


def test_each_run_is_repeated_from_its_own_sources(project):
    before = [
        git(project, *words) for words in (["status", "--porcelain"], ["rev-parse", "HEAD"], ["worktree", "list"])
    ]
    said = introspect(project, "zoom", "runs/a", "runs/b", code=1)
    for name in "ab":
        assert f"Run {name} was run again from its recorded sources, and repeats what was recorded." in said
    assert "aten.mul.Tensor of Net  4x8 float32" in said
    assert "run by model.py:12" in said
    assert "which: columns 6 to 7 (of 8)" in said
    assert "how: b is 0 in all of them." in said
    assert "ULPs of float32" in said
    after = [git(project, *words) for words in (["status", "--porcelain"], ["rev-parse", "HEAD"], ["worktree", "list"])]
    assert after == before
    new = documents_of(project / "introspect-runs/zoom-a-b/b")["manifest"]
    assert new["options"]["steps"] == "0"
    assert new["options"]["until_step"] == 0
    assert new["options"]["level"] == "op"


@pytest.fixture
def pair(forks, tmp_path):
    """Capture the script twice in a directory outside of git."""

    def run(*more, before=(), env=()):
        (tmp_path / "train.py").write_text(TRAIN)
        (tmp_path / "model.py").write_text(SOUND)
        (tmp_path / "count").write_text("1")
        for name, arguments, variables in (("a", (), ()), ("b", more, env)):
            done = forks("capture", "-q", *before, "-o", name, "train.py", *arguments, cwd=tmp_path, env=variables)
            assert done.returncode == 0, done.stderr
        return tmp_path

    return run


def test_a_divergence_between_recorded_steps_is_found_where_it_began(pair):
    place = pair("--fault-at", "3", before=("--steps", "::5"))
    said = introspect(place, "zoom", "a", "b", code=1)
    assert "First divergence at step 3" in said
    assert "which: row 2 (of 4), every element there." in said
    assert "how: b is 2 times a." in said
    assert "where it ran, its source files unchanged" in said


def test_a_run_that_does_not_repeat_itself_is_not_zoomed_into(pair):
    place = pair("--count", "count")
    # What b counts from is another number now: it cannot be what was recorded.
    said = introspect(place, "zoom", "a", "b", code=1)
    assert "Run a was run again where it ran, its source files unchanged, and repeats what was recorded." in said
    assert "but does not repeat what was recorded. First divergence at step 0" in said
    assert "What follows is from the runs as they were recorded." in said
    assert "No elements to show: it was not stored whole by run a and run b." in said
    assert "Its recorded statistics: mean" in said
    (place / "model.py").write_text("raise SystemExit('no model any more')\n")
    said = introspect(place, "zoom", "a", "b", code=1)
    assert "Run a was run again from its recorded sources, and repeats what was recorded." in said
    for text in place.glob("?/rank0/sources/*"):
        text.unlink()
    said = introspect(place, "zoom", "a", "b", code=1)
    assert "where it ran, although model.py has changed since and its text is not kept" in said
    assert "but it ended with exit code 1 and recorded no step: no model any more" in said


def test_a_file_that_was_edited_outside_git_runs_as_it_was_recorded_with_linked_data(project):
    (project / "model.py").write_text(FAULTY.replace("* torch.arange", "* 1.0 * torch.arange"))
    text = TRAIN.replace("shift = 0.0", "shift = len(pathlib.Path('data/x').read_text()) - 1.0")
    (project / "data").mkdir()
    (project / "data" / ".keep").write_text("")
    (project / "train.py").write_text(text)
    git(project, "add", "-A")
    git(project, "commit", "-qm", "data")
    (project / "data" / "x").write_text("1")
    introspect(project, "capture", "-q", "-o", "runs/c", "train.py", code=0)
    (project / "data" / "x").write_text("1")  # younger than the run: no longer known to be what it read
    (project / "model.py").write_text("raise SystemExit('no model any more')\n")
    said = introspect(project, "zoom", "runs/a", "runs/c", "--link", "data", code=1)
    assert "Run b was run again from its recorded sources, and repeats what was recorded." in said
    assert git(project, "status", "--porcelain").split() == ["M", "model.py", "??", "data/x"]


def test_variables_are_to_be_as_they_were(pair, monkeypatch):
    place = pair(env=(("NET_SCALE", "3"),))
    monkeypatch.setenv("NET_SCALE", "5")
    said = introspect(place, "zoom", "a", "b", code=1)
    for name in "ab":
        assert (
            f"Run {name} was run again where it ran, its source files unchanged, and repeats what was recorded." in said
        )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"arguments": ["--api-key", "<redacted>"]}, "its command line holds values that were redacted"),
        ({"script": None}, "no command line was recorded that could be run again"),
        ({"directory": "/no/such/place"}, "its directory /no/such/place does not exist"),
    ],
)
def test_what_cannot_be_run_again_is_said(project, change, sentence):
    changed(project / "runs/b", **change)
    said = introspect(project, "zoom", "runs/a", "runs/b", code=1)
    assert f"Run b cannot be run again: {sentence}." in said
    assert "What follows is from the runs as they were recorded." in said


def test_runs_that_agree_are_not_run_again(project):
    said = introspect(project, "zoom", "runs/a", "runs/a", code=0)
    assert "The runs are the same" in said
    assert not (project / "introspect-runs").exists()


@pytest.fixture
def another_python(tmp_path) -> Path:
    """An interpreter with another path and the same packages, which starts by itself."""
    place = tmp_path / "other"
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").symlink_to(os.path.realpath(Path(sys.prefix) / "bin" / "python"))
    (place / "lib").symlink_to(Path(sys.prefix) / "lib")
    if (Path(sys.prefix) / "pyvenv.cfg").exists():
        shutil.copy(Path(sys.prefix) / "pyvenv.cfg", place)
    return place / "bin" / "python"


def test_a_run_is_repeated_with_the_interpreter_that_it_had_if_it_is_there(project, another_python):
    changed(project / "runs/a", python=str(another_python))
    changed(project / "runs/b", python="/no/such/python")
    said = " ".join(introspect(project, "zoom", "runs/a", "runs/b", code=1).split())
    assert "its interpreter /no/such/python does not exist: this one is used" in said
    command = documents_of(project / "introspect-runs/zoom-a-b/a")["command"]
    assert command["python"] == str(another_python)


WORDS = ("torchrun", "--nproc_per_node", "2", "train.py")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*WORDS, "--token", "<redacted>"), "redacted"),
        ((), "its 2 processes were started by a launcher, whose command line was not recorded"),
    ],
)
def test_ranks_are_repeated_by_the_launcher_that_was_captured(tmp_path, words, said):
    launcher = {"launcher": {"arguments": [*words], "directory": str(tmp_path)}} if words else {}
    command = {"script": "train.py", "module": None, "arguments": [], "directory": str(tmp_path), "python": ""}
    about = {"manifest": {"world_size": 2}, "settings": {"command": command | launcher}}
    for name, value in (("a", 1.0), ("b", 2.0)):
        write_run(tmp_path / name, [[row("loss", "loss", "loss", value)]], ranks=2, **about)
    answer = introspect(tmp_path, "zoom", "a", "b", code=1)
    assert said in " ".join(answer.partition("Run b cannot be run again: ")[2].split())
