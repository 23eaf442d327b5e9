"""`capture --verify-neutral`: the question asked of one's own script, and every answer there is."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("quick_python")

TRAIN = """
import random, sys, time, torch
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


def capture(introspect, tmp_path, *options, noise="", disturbed="pass", text=TRAIN):
    (tmp_path / "train.py").write_text(text.format(noise=noise, disturbed=disturbed))
    return introspect("capture", *options, "-o", "run", "train.py")


IS_WATCHED = "(torch.nn.Module.__call__ is not torch.nn.Module._wrapped_call_impl)"
NOTICES = f"net.weight.data += {IS_WATCHED}"
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
        ({"disturbed": "print(time.time())"}, 0, "standard output differs between runs without a capture, too"),
        ({"disturbed": f"print(time.time()); {NOTICES}"}, 1, "differ in parameters and optimizer state"),
        ({"text": TRAIN.replace("exit(3)", f"exit(3 + {IS_WATCHED})")}, 1, "exit code"),
    ],
    ids=["neutral", "not deterministic", "noticing", "printing", "printing, noticing", "ending"],
)  # fmt: skip
def test_a_script_is_called_what_it_is(introspect, tmp_path, script, code, said):
    out = capture(introspect, tmp_path, "--verify-neutral", **script)
    assert out.returncode == code, out.stderr
    assert said in out.stderr
    assert len(out.stdout.splitlines()) in {3, 6}
    assert (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.parametrize("options", [("--verify-neutral", "--perturb", "0"), ("--steps", "last(0)")])
def test_options_that_cannot_go_together_are_refused(introspect, tmp_path, options):
    out = capture(introspect, tmp_path, *options)
    assert out.returncode == 2
    assert out.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
