"""Bisection over a history that is mostly refactoring: it stops at the one commit that moved a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from repositories import git, introspect

if TYPE_CHECKING:
    from pathlib import Path

TRAIN = """\
import torch

import model

torch.manual_seed(0)
net = model.build()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
source = torch.Generator().manual_seed(1)
for step in range(3):
    loss = net(torch.randn(4, 3, generator=source)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

MODEL = """\
import torch
from torch import nn


class Body(nn.Module):
    def __init__(self, first, act):
        super().__init__()
        self.{first}, self.act = first, act

    def forward(self, x):
        return self.act(self.{first}(x))


class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        first, head = nn.Linear(3, 4), nn.Linear(4, 2)
        act = {act}
        {body}
        self.{head} = {wrapped}
        {more}

    def forward(self, x):
        x = {run}
        return {gave}


def build():
    return {built}
"""


def model(done: int, *, faulty: bool) -> str:
    """The model after so many refactorings, none of which changes a number."""
    first = "first" if done >= 1 else "a"
    nested = done >= 6
    extra = "self.extra = nn.Identity()" if done >= 4 else "pass"
    if done >= 5:
        extra = "self.extra = nn.Dropout(0.0)"
    head = "head" if done >= 2 else "b"
    inner = f"self.body(x){' * 1.001' if faulty else ''}" if nested else f"self.act(self.{first}(x))"
    inner = inner if nested or not faulty else f"{inner} * 1.001"
    return MODEL.format(
        first=first,
        name="Model" if done >= 7 else "Net",
        act="nn.ReLU(inplace=False)" if done >= 8 else "nn.ReLU()",
        body="self.body = Body(first, act)" if nested else f"self.{first}, self.act = first, act",
        head=head,
        wrapped="nn.Sequential(head)" if 3 <= done < 9 else "head",
        more=extra,
        run=inner,
        gave=f"self.{head}(self.extra(x))" if done >= 4 else f"self.{head}(x)",
        built=f"nn.Sequential({'Model' if done >= 7 else 'Net'}())"
        if done >= 10
        else f"{'Model' if done >= 7 else 'Net'}()",
    )


@pytest.mark.sweep
def test_of_thirty_commits_with_ten_refactorings_the_one_that_moved_a_number_is_named(tmp_path: Path):
    path = tmp_path / "project"
    path.mkdir()
    git(path, "init", "-q", "-b", "main")
    done = 0
    for number in range(1, 31):
        subject = f"note {number}"
        if number % 3 == 2:
            done += 1
            subject = f"refactoring {done}"
        if number == 21:
            subject = "scale the hidden layer"
        (path / "notes.txt").write_text(f"note {number}\n")
        (path / "model.py").write_text(model(done, faulty=number >= 21))
        (path / "train.py").write_text(TRAIN)
        git(path, "add", "-A")
        git(path, "commit", "-q", "-m", subject)
    assert done == 10
    good = git(path, "rev-parse", "HEAD~29")
    answer = introspect(path, "bisect", "--good", good, "train.py", code=1)
    assert "scale the hidden layer" in answer.stdout
    said = [line for line in answer.stderr.splitlines() if " is good" in line]
    assert said, answer.stderr
