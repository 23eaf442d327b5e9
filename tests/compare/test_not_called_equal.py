"""Differences in what is easily left unseen are named, or said to be unseen: no answer calls them equal."""

from __future__ import annotations

import re
import shutil

import pytest

from introspect_cli.compare.settings.differences import Difference
from introspect_cli.compare.settings.settings import Blame

BEGIN = """
import sys
import torch
from torch import nn

other = "other" in sys.argv
torch.manual_seed(0)
net = nn.Linear(4, 1)


def train(net, optimizer, steps=2, hook=None):
    for step in range(steps):
        if hook is not None:
            hook(step)
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

CHANGES = "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\ntrain(net, optimizer)\n"


def test_a_step_that_the_same_exception_ends_in_both_runs_is_not_said_to_differ(tmp_path, introspect):
    ends = "net(torch.ones(2, 4)).mul(2 if other else 1)\nraise ValueError('no more data')"
    (tmp_path / "train.py").write_text(BEGIN + CHANGES + ends)
    for name in ("a", "other"):
        introspect("capture", "-q", "-o", name, "train.py", name)
    answer = introspect("diff", "a", "other")
    assert "Both runs ended by the same exception: ValueError: no more data" in " ".join(answer.stdout.split())
    assert answer.returncode == 0, answer.stdout


def test_a_run_that_was_copied_in_part_says_so(tmp_path, introspect):
    (tmp_path / "train.py").write_text(BEGIN + CHANGES)
    introspect("capture", "-q", "-o", "a", "train.py")
    shutil.copytree(tmp_path / "a", tmp_path / "part")
    for path in (tmp_path / "part").rglob("*"):
        if path.is_file() and path.suffix != ".yaml":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    answer = introspect("diff", "a", "part")
    assert answer.returncode == 2
    assert re.search(r"Run b holds [01] of the 2 steps that its manifest names", " ".join(answer.stdout.split()))


@pytest.mark.parametrize("stepped", [False, True])
def test_a_rate_weighs_the_same_on_the_command_line_and_in_a_file(stepped):
    from introspect_cli.compare.reasons.judge import reason_named

    given = Difference("command", "--optim.lr", 1, 2), Difference("files", "conf.yaml: optim.lr", 1, 2, "optim.lr")
    for reason in ("optimizer", "module", "initial", "outside"):
        weights = {Blame(reason=reason_named(reason), stepped=stepped).weight(change) for change in given}
        assert len(weights) == 1
