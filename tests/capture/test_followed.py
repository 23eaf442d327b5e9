"""Launchers, shell scripts and test runners under capture: what trains below them is recorded, and nothing else is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from artefacts import artefact
from kept_runs import PACKAGE
from opcapture import compared
from sweeps import sliced

from introspect_cli.store.run import open_run

pytestmark = pytest.mark.launch

TRAIN = """\
import os, sys
import torch
class Descent(torch.optim.Optimizer):
    add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__
    zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
    def step(self):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = Descent(model.parameters(), {})
for _ in range(2):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("argv", sys.argv[1:], "PYTHONPATH", os.environ.get("PYTHONPATH"), "follow", "INTROSPECT_FOLLOW" in os.environ)
assert "torch._dynamo" not in sys.modules
"""
"""Torch's own optimizers import its compiler, which takes as long as all the rest of a process."""
FILES = {
    "train.py": TRAIN,
    "fails.py": TRAIN + "raise ValueError('too bad')\n",
    "plain.py": "print('no torch here')\n",
    "run.sh": '#!/bin/sh\nset -e\npython plain.py\npython train.py "$@"\npython train.py again\n',
    "Makefile": "train:\n\tpython train.py\n",
    "test_it.py": "def test_training():\n    exec(open('train.py').read(), {})\n",
}
ACCELERATE = [
    "--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
]  # fmt: skip
TWO = ["--nproc-per-node", "2", "--master-port", "0", "--standalone"]
COMMANDS = {
    "direct": ["train.py"],
    "python": ["python", "train.py"],
    "python -m": ["python", "-u", "-m", "train"],
    "torchrun": ["torchrun", *TWO, "train.py", "--lr", "1"],
    "-m torch.distributed.run": ["-m", "torch.distributed.run", "--standalone", "train.py"],
    "accelerate launch": ["accelerate", "launch", *ACCELERATE, "train.py"],
    "-m accelerate": ["-m", "accelerate.commands.launch", *ACCELERATE, "train.py"],
    "fabric run": ["fabric", "run", "--accelerator", "cpu", "--devices", "1", "train.py"],
    "uv run": ["uv", "run", "--no-project", "--python", sys.executable, "python", "train.py"],
    "shell script": ["./run.sh", "1"],
    "make": ["make", "-s", "train"],
    "pytest": ["pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
    "fails": ["python", "fails.py"],
    "plain": ["python", "plain.py"],
    "isolated": ["python", "-I", "train.py"],
}


FOLLOWED = ["python", "python -m", "torchrun", "-m torch.distributed.run", "accelerate launch", "-m accelerate"]
FOLLOWED += ["fabric run", "uv run", "shell script", "make", "pytest"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Links to what each command recorded."""
    return tmp_path_factory.mktemp("followed")


def write_files(folder):
    for name, text in FILES.items():
        path = folder / name
        path.write_text(text)
    (folder / "run.sh").chmod(0o755)


@pytest.fixture(scope="module")
def ended(folder):
    """What came of each command, run once under capture."""

    @cache
    def run(name):
        if COMMANDS[name][0] in {"make", "accelerate", "fabric", "uv"} and shutil.which(COMMANDS[name][0]) is None:
            pytest.skip(f"there is no {COMMANDS[name][0]}")
        if name in FOLLOWED:
            run("direct")
        made = artefact("followed", partial(follow, name=name), PACKAGE / "commands", PACKAGE / "cli.py")
        if (made / f"run {name}").exists():
            (folder / f"run {name}").symlink_to(made / f"run {name}")
        return SimpleNamespace(folder=made, **json.loads((made / "ended.json").read_text()))

    return run


def follow(folder, name):
    write_files(folder)
    bin_ = str(Path(sys.executable).parent)
    variables = {"PATH": os.pathsep.join([bin_, os.environ["PATH"]]), "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "introspect_cli", "capture", "--no-packages", "-o", f"run {name}", *COMMANDS[name]],
        cwd=folder,
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    ended = {"returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    (folder / "ended.json").write_text(json.dumps(ended))


def same_as_direct(folder, name):
    result = compared(folder / "run direct", folder / f"run {name}")
    return result.verdict.value == "same" and result.counts.steps_compared == 2


@pytest.mark.parametrize("name", sliced(FOLLOWED[:-1], ("python", "torchrun", "shell script")))
def test_what_trains_below_a_launcher_is_recorded_as_it_is_alone(folder, ended, name):
    assert ended(name).returncode == 0, ended(name).stderr
    assert same_as_direct(folder, name), ended(name).stderr
    assert "recorded 2 steps" in ended(name).stderr


def test_what_a_test_trains_is_recorded(folder, ended):
    assert ended("pytest").returncode == 0, ended("pytest").stdout
    assert same_as_direct(folder, "pytest")


@pytest.mark.parametrize("name", ["python", "torchrun"])
def test_the_script_sees_its_own_environment(folder, ended, name):
    assert f"PYTHONPATH {Path(__file__).parents[2]} follow False" in ended(name).stdout
    assert ended(name).stdout.count("argv") == (2 if name == "torchrun" else 1)


def test_ranks_of_a_launch_are_one_run(folder, ended):
    assert ended("torchrun").returncode == 0
    with open_run(folder / "run torchrun") as run:
        assert list(run.ranks) == [0, 1]
    assert ended("torchrun").stderr.count("recorded 2 steps") == 1


def test_an_exception_ends_the_run_as_it_ends_the_script(folder, ended):
    done = ended("fails")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert "introspect_cli" not in done.stderr
    with open_run(folder / "run fails") as run:
        assert run.manifest["status"] == "complete"
        assert run.manifest["exception"] == "ValueError: too bad"
        assert run.last_step == 1


def test_where_nothing_is_recorded_the_line_to_use_is_reported(folder, ended):
    assert "plain.py ended without importing torch" in ended("plain").stderr
    assert "no python process with introspect-cli was seen below python" in ended("isolated").stderr
    assert "`introspect capture -o RUN` in the place of `python`" in ended("isolated").stderr
    assert not (folder / "run plain").exists()


def test_a_launcher_whose_processes_are_not_followed_is_refused(introspect):
    done = introspect("capture", "--children", "none", "torchrun", "train.py", new_process=True)
    assert done.returncode == 2
    assert "--children none follows none: nothing would be recorded" in done.stderr
