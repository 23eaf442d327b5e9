"""A git repository and the command line in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """\
import argparse
import os

import torch

import model

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--name", default="x")
parser.add_argument("--scale", type=float, default=1.0)
parser.add_argument("--shift", type=float, default=0.0)
args = parser.parse_args()
torch.manual_seed(0)
net = model.Net()
shift = args.shift if os.environ.get("USE_SHIFT") == "1" else 0.0
for step in range(args.steps):
    loss = (net(torch.randn(4, 3)) * args.scale + shift).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= args.lr * parameter.grad
            parameter.grad = None
"""
"""Updates by hand: torch's optimizers import its compiler, which takes longer than all the rest of a run."""


MODEL = """\
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 4)
        self.b = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)){fault})
"""


def git(repository: Path, *words: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    for role in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{role}_NAME": "someone", f"GIT_{role}_EMAIL": "someone@example.invalid"}
    answer = subprocess.run(
        ["git", *words], cwd=repository, env=environment, capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()


def introspect(directory, *words, code=None, **variables):
    """Run a command; what it printed, with each sentence in one line."""
    answer = subprocess.run(
        [sys.executable, "-m", "introspect_cli", *map(str, words)],
        cwd=directory, capture_output=True, text=True, check=False, env={**os.environ, **variables},
    )  # fmt: skip
    assert code is None or answer.returncode == code, answer.stdout + answer.stderr
    return answer


@pytest.fixture
def repository(tmp_path: Path, history: Path) -> Path:
    """30 commits: the culprit is the 21st, the 16th and 18th do not run."""
    return Path(shutil.copytree(history, tmp_path / "a project"))


@pytest.fixture(scope="module")
def history(tmp_path_factory) -> Path:
    """What each test gets a copy of."""
    path = tmp_path_factory.mktemp("history")
    git(path, "init", "-q", "-b", "main")
    for number in range(1, 31):
        (path / "notes.txt").write_text(f"note {number}\n")
        fault = " * 1.001" if number >= 21 else ""
        text = MODEL.replace("{fault}", fault)
        if number in {16, 18}:
            text = "import no_such_module_anywhere\n" + text
        (path / "model.py").write_text(text)
        (path / "train.py").write_text(TRAIN)
        git(path, "add", "-A")
        git(path, "commit", "-q", "-m", "scale the hidden layer" if number == 21 else f"note {number}")
    return path
