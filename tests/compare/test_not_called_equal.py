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

HOLDS = """
class Net(nn.Linear):
    def __init__(self, value):
        super().__init__(4, 1)
        self.register_buffer("value", value)


def fit(value):
    net = Net(value)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1))


"""

CHANGES = "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\ntrain(net, optimizer)\n"

CASES = {
    "a parameter that is changed after the last step": (
        CHANGES + "with torch.no_grad():\n    net.weight.mul_(3 if other else 2)",
        1,
        "step 2: the parameter Linear.weight differs when the step begins",
    ),
    "one that one run alone changes then": (
        CHANGES + "if other:\n    net.weight.data.mul_(2)",
        2,
        "after that, run other alone changes the parameter Linear.weight outside of an optimizer step",
    ),
    "the last update by hand": (
        """
for step in range(2):
    net.zero_grad()
    net(torch.ones(2, 4)).square().mean().backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.01 * parameter.grad * (2 if other else 1) ** step
torch.save(net.state_dict(), "net.pt")
""",
        1,
        (
            "the parameter Linear.weight differs later in the step (relative L2 0.043); left: the script's "
            "update by hand"
        ),
    ),
    "the last update by hand of a tensor that no module holds": (
        """
w = torch.ones(4, requires_grad=True)
for step in range(2):
    (w * torch.arange(4)).square().sum().backward()
    with torch.no_grad():
        w -= 0.01 * w.grad * (2 if other else 1) ** step
        w.grad = None
""",
        1,
        "step 1: the parameter w differs later in the step",
    ),
    "a parameter that an optimizer holds and no module": (
        """
w = nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([*net.parameters(), w], lr=0.1)
for step in range(3):
    if step == 2 and other:
        w.data.mul_(2)
    (w * net(torch.ones(2, 4))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        1,
        "only b has the parameter SGD.group0.2 when the step begins; cause: b alone changed it",
    ),
    "a hyper-parameter that one run changes": (
        """
optimizer = torch.optim.AdamW(net.parameters())
train(net, optimizer, 3, lambda step: optimizer.param_groups[0].update(betas=(0.8 if other and step else 0.9, 0.999)))
""",
        1,
        "cause: betas [0.9, 0.999] -> [0.8, 0.999]",
    ),
    "a sparse tensor with its values elsewhere": (
        HOLDS + "fit(torch.eye(4)[2 if other else 1].to_sparse())",
        1,
        "the buffer Net.value differs",
    ),
    "two changes that cancel in a sketch": (
        HOLDS + "value = torch.ones(64)\nvalue[[1, 17]] += 8.0 * other\nfit(value)",
        1,
        "the buffer Net.value differs before any training (relative L2 0.",
    ),
    "a mask that lets another element through": (
        HOLDS + "fit(torch.full((4,), -torch.inf).index_fill(0, torch.tensor([2 if other else 1]), 0.0))",
        1,
        "the buffer Net.value differs before any training",
    ),
    "a tensor that cannot be seen": (
        HOLDS + "fit(torch.zeros(4 if other else 3, device='meta'))",
        0,
        "About 3 of 37 records could not be observed, so they are not compared.",
    ),
    "a target that is computed without gradients first": (
        """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    with torch.no_grad():
        target = net(torch.ones(2, 4) * (2 if other and step == 2 else 1))
    (net(torch.zeros(2, 4)) - target).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        1,
        (
            "is equal (the batches and what models computed without gradients were not recorded); left: the loss code "
            "(reduction, mask, weighting, scale) or the targets"
        ),
    ),
    "a step that the same exception ends in both runs": (
        CHANGES + "net(torch.ones(2, 4)).mul(2 if other else 1)\nraise ValueError('no more data')",
        0,
        "Both runs ended by the same exception: ValueError: no more data, at train.py:",
    ),
    "a generator of the script's": (
        """
made = torch.Generator().manual_seed(5)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
train(net, optimizer, 3, lambda step: made.manual_seed(6 if other and step else 5))
""",
        0,
        "The random state of torch.Generator made differs from step 1 on and nothing recorded depends on it.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_named_or_said_to_be_unseen(case, tmp_path, introspect):
    script, code, said = CASES[case]
    (tmp_path / "train.py").write_text(BEGIN + script)
    for name in ("a", "other"):
        introspect("capture", "-q", "-o", name, "train.py", name)
    answer = introspect("diff", "a", "other", "--rtol", "1e-3", "-v")
    assert said.replace("run other", "run b") in " ".join(answer.stdout.split())
    assert answer.returncode == code, answer.stdout
    counted = re.search(r"About (\d+) of (\d+) records", answer.stdout)
    if counted:
        assert f" {int(counted[2]) - int(counted[1])} records of " in answer.stdout


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
