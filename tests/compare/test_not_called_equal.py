"""Differences in what is easily left unseen are named, or said to be unseen: no answer calls them equal."""

from __future__ import annotations

import itertools
import json
import re
import shutil

import pytest
from artefacts import REPOSITORY
from opcapture import compared
from small_runs import MODULES, train
from synthetic import write_run


def test_a_run_that_was_copied_in_part_says_so(tmp_path, project, introspect):
    shutil.copytree(project("a"), tmp_path / "part")
    for path in (tmp_path / "part").rglob("*"):
        if path.is_file() and path.suffix != ".json":
            path.write_bytes(path.read_bytes()[: path.stat().st_size * 4 // 5])
    answer = introspect("diff", "a", "part")
    assert answer.returncode == 2
    assert re.search(r"Run b was interrupted: it holds up to and including step [01]", answer.stdout)


@pytest.mark.parametrize("fault", ["module", "init", "script", "missed"])
def test_a_rate_explains_as_much_on_the_command_line_and_in_a_file(tmp_path, fault):
    said = []
    for of_file, of_command in ((2, 1), (1, 2)):
        for name, command, file in (("a", 1, 1), ("b", of_command, of_file)):
            settings = {"command": {"argv": ["train.py", "--optim.lr", str(command), "--tag", str(command + file)]}}
            files = {"conf.yaml": f"optim:\n  lr: {file}\n"}
            about = {"modules": MODULES, "settings": settings, "files": files, "force": True}
            write_run(tmp_path / name, train(*[fault] * (name == "b")), **about)
        changed = compared(tmp_path / "a", tmp_path / "b").settings
        said.append([(change.name != "--tag", change.explains) for change in changed])
    assert said[0] == said[1] == [(True, True), (False, False)]


@pytest.mark.parametrize(
    ("paths", "more", "said"),
    [
        (("/projects/one/train.py", "/projects/two/train.py"), {"sources": {}}, []),
        (("/projects/one/train.py", "/projects/two/train.py"), {}, ["argument 0"]),  # what they hold is not on record
        (("/projects/one/train.py", "/projects/two/other.py"), {"sources": {}}, ["argument 0"]),
    ],
)
def test_the_same_script_in_another_folder_explains_nothing(tmp_path, paths, more, said):
    """A pair of worktrees: the path of the script differs, and what it holds is told by its hash."""
    for name, path in zip("ab", paths, strict=True):
        settings = {"command": {"argv": [path, "--lr", "1e-3"]}, **more}
        write_run(tmp_path / name, train(*["module"] * (name == "b")), modules=MODULES, settings=settings)
    assert [change.name for change in compared(tmp_path / "a", tmp_path / "b").settings] == said


def test_what_a_step_begins_with_is_held_against_what_the_other_run_left_where_one_recorded_some_steps(introspect):
    script = REPOSITORY / "fixtures" / "train_gpt.py"
    for name, of_capture, rate in (
        ("a", (), "1e-3"),
        ("b", ("--steps", "2:"), "2e-3"),
        ("c", ("--steps", "2:"), "1e-3"),
    ):
        introspect("capture", "-q", *of_capture, "-o", name, script, "--steps", "3", "--lr", rate)
    for order in ("ab", "ba"):
        first = json.loads(introspect("diff", *order, "--format", "json").stdout)["first"]
        assert (first["step"], first["phase"], first["kind"]) == (2, "start", "param")
        assert first["role"] == "propagated"
    assert introspect("diff", "a", "c").returncode == 0


@pytest.mark.parametrize(
    ("left_out", "note"),
    [
        (("--kinds", "param,grad"), "Note: Neither run recorded buffer, loss, optimizer_state: not compared."),
        (("--steps", "0"), "Note: Both captures left records out (--steps): what neither has is not compared."),
    ],
)
def test_what_both_captures_left_out_is_said_of_runs_that_agree(introspect, left_out, note):
    script = REPOSITORY / "fixtures" / "train_gpt.py"
    for name in "ab":
        introspect("capture", "-q", *left_out, "-o", name, script, "--steps", "2")
    answer = introspect("diff", "a", "b")
    assert answer.returncode == 0
    assert note in " ".join(answer.stdout.split())


TWO_IMPLEMENTATIONS = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
w = torch.randn(8, 4)
class A(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 1)
        with torch.no_grad():
            self.q.weight.copy_(w[:4]); self.k.weight.copy_(w[4:])
    def forward(self, x):
        return self.out(torch.cat([self.q(x), self.k(x)], -1))
class B(nn.Module):
    def __init__(self):
        super().__init__()
        a = A()
        self.both, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        with torch.no_grad():
            self.both.weight.copy_(w); self.both.bias.copy_(torch.cat([a.q.bias, a.k.bias]))
            self.last.weight.copy_(a.out.weight); self.last.bias.copy_(a.out.bias)
    def forward(self, x):
        return self.last(self.both(x))
net = A() if sys.argv[1] == "a" else B()
opt = torch.optim.SGD(net.parameters(), 0.1)
torch.manual_seed(1)
for step in range(int(sys.argv[2])):
    x = torch.randn(5, 4)
    loss = net(x).pow(2).mean() * (1 + (step == 2 and sys.argv[1] == "b"))
    opt.zero_grad(); loss.backward(); opt.step()
"""


def test_two_implementations_of_which_the_first_step_was_compared_are_not_called_the_same(introspect, tmp_path):
    """What they compute in one step is asked for, or all that they recorded."""
    (tmp_path / "train.py").write_text(TWO_IMPLEMENTATIONS)
    for run, steps in itertools.product("ab", (1, 4)):
        assert introspect("capture", "-q", "-o", f"{run}{steps}", "train.py", run, steps).returncode == 0
    assert introspect("diff", "a1", "b1").returncode == 0
    asked = introspect("diff", "a4", "b4")
    assert asked.returncode == 2
    assert asked.stdout.startswith(
        "Could not tell: equal up to and including step 0; 3 steps after that were not compared"
    )
    assert "only b has B.both (Linear) in step 0" in asked.stdout
    assert introspect("diff", "a4", "b4", "--steps", "0").returncode == 0
    assert introspect("diff", "a4", "b4", "--steps", ":").returncode == 1
