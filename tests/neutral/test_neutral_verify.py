"""`capture --verify-neutral` and `--repeat`: the question asked of one's own script, and every answer there is."""

from __future__ import annotations

import pytest

from introspect_cli.capture.neutrality import Outcome, judge
from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED

pytestmark = pytest.mark.usefixtures("quick_python")

TRAIN = """
import random, sys, torch
torch.manual_seed(0)
def main():
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        loss = net(torch.randn(2, 4){noise}).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {disturbed}
        print(step, loss.item())
main()
sys.exit(3)
"""


def outcome(tensors=5, **aspects):
    names = {"parameters": "parameters and optimizer state", "out": "standard output", "code": "exit code"}
    base = dict.fromkeys((*names.values(), "modules", "random generators", "standard error"), 0)
    return Outcome({**base, **{names[key]: value for key, value in aspects.items()}}, tensors)


JUDGED = {
    "agree": (outcome(), outcome(), None, SAME, "5 tensors"),
    "agree about nothing": (outcome(tensors=0), outcome(tensors=0), None, UNDECIDED, ""),
    "differ": (outcome(parameters=1), outcome(), outcome(), DIVERGED, "differ in parameters and optimizer state"),
    "differ as bare runs do": (
        outcome(parameters=1), outcome(parameters=2), outcome(parameters=3), UNDECIDED, "not deterministic by itself",
    ),
    "print times": (
        outcome(out=1), outcome(out=2), outcome(out=3), SAME,
        "standard output differs between runs without a capture, too",
    ),
    "print times and differ": (outcome(out=1, parameters=1), outcome(out=2), outcome(out=3), DIVERGED, ""),
    "end otherwise": (outcome(code=1), outcome(), outcome(), DIVERGED, "exit code"),
}  # fmt: skip


@pytest.mark.parametrize("runs", JUDGED)
def test_what_runs_with_and_without_a_capture_say_together(runs):
    captured, bare, again, verdict, said = JUDGED[runs]

    def third():
        assert again is not None, "a third run was not needed"
        return again

    finding = judge(captured, bare, third)
    assert finding.exit_code == verdict
    assert said in finding.sentence


def capture(introspect, tmp_path, *options, noise="", disturbed="pass"):
    (tmp_path / "train.py").write_text(TRAIN.format(noise=noise, disturbed=disturbed))
    return introspect("capture", *options, "-o", "run", "train.py")


NOTICES = "call = torch.nn.Module.__call__; net.weight.data += call is not torch.nn.Module._wrapped_call_impl"
"""The measurement itself works: a script that behaves otherwise under capture is found out."""


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ({}, 0, "neutral: the runs with and without a capture agree in "),
        ({"noise": " * random.random()"}, 2, "not deterministic by itself"),
        (
            {"disturbed": NOTICES}, 1,
            "not neutral: the runs with and without a capture differ in parameters and optimizer state",
        ),
    ],
    ids=["neutral", "not deterministic", "noticing"],
)  # fmt: skip
def test_a_script_is_called_what_it_is(introspect, tmp_path, script, code, said):
    out = capture(introspect, tmp_path, "--verify-neutral", **script)
    assert out.returncode == code, out.stderr
    assert said in out.stderr
    assert len(out.stdout.splitlines()) == 3
    assert (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.sweep
def test_a_seed_makes_a_script_deterministic(introspect, tmp_path):
    out = capture(introspect, tmp_path, "--repeat", "2", "--seed", "1", noise=" * random.random()")
    assert out.returncode == 0, out.stderr
    assert "introspect: deterministic: All 2 runs have the same numbers." in out.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "run-1", "run-2"}


def test_repeat_finds_where_it_parts(introspect, tmp_path):
    out = capture(introspect, tmp_path, "--repeat", "2", noise=" * random.random()")
    assert out.returncode == 1, out.stderr
    assert "not deterministic: All 2 runs differ from each other. First divergence at step 0" in out.stderr
    again = capture(introspect, tmp_path, "--repeat", "2")
    assert again.returncode == 2
    assert "run-1 exists already" in again.stderr


@pytest.mark.parametrize("options", [("--verify-neutral", "--repeat", "2"), ("--repeat", "0")])
def test_options_that_cannot_go_together_are_refused(introspect, tmp_path, options):
    out = capture(introspect, tmp_path, *options)
    assert out.returncode == 2
    assert out.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
