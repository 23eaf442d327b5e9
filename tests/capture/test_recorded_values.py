"""What a script records itself: nothing without a capture, a record with one, and a reason where it differs first."""

from __future__ import annotations

import subprocess
import sys

import torch
from opcapture import captured, compared, records

import introspect_cli
from introspect_cli.records import Kind


def train(scale=1.0, steps=2):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        with introspect_cli.phase("rollout"), torch.no_grad():
            values = model(torch.ones(2, 3))
            introspect_cli.record("advantages", {"raw": values * (scale if step else 1.0), "mean": 0.5})
        model(torch.ones(2, 3)).sum().backward()
        introspect_cli.record("norm", 1.5)
        introspect_cli.record("norm", 2.5)
        optimizer.step()
        optimizer.zero_grad()


def recorded_values(path, step=0):
    found = (record for record in records(path, step) if record.site.kind is Kind.VALUE)
    return {(record.site.fqn, record.site.call, record.site.path): record.summary for record in found}


def test_values_are_recorded_by_name_phase_and_count(tmp_path):
    found = recorded_values(captured(tmp_path / "run", train))
    assert set(found) == {
        ("rollout/advantages", 0, "['raw']"),
        ("rollout/advantages", 0, "['mean']"),
        ("norm", 0, ""),
        ("norm", 1, ""),
    }
    assert found["norm", 1, ""].text == "2.5"
    assert found["rollout/advantages", 0, "['raw']"].layout.shape == (2, 1)


def test_a_value_that_differs_first_is_the_divergence(tmp_path):
    a, b = (captured(tmp_path / name, lambda s=scale: train(s)) for name, scale in (("a", 1.0), ("b", 1.5)))
    result = compared(a, b)
    assert (result.first.reason, result.first.step) == ("value", 1)
    assert "the recorded value rollout/advantages ['raw']" in result.sentence
    assert ("random_at_start", "equal") in {(one.thing, one.known) for one in result.rests_on}
    assert "left: the code that computes it" in result.sentence


def test_without_a_capture_calls_do_nothing_and_import_nothing():
    code = """
import introspect_cli, sys
introspect_cli.step()
introspect_cli.record("x", 1)
with introspect_cli.phase("rollout"):
    pass
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_phase_ends_with_its_block_and_with_the_capture(tmp_path):
    def work():
        train(steps=1)
        with introspect_cli.phase("outer"):
            with introspect_cli.phase("inner"):
                introspect_cli.record("x", 1)
            introspect_cli.record("x", 2)
        introspect_cli.phase("left open")
        introspect_cli.record("x", 3)

    run = captured(tmp_path / "run", work)
    assert {name for name, _, _ in recorded_values(run, 1)} == {"inner/x", "outer/x", "left open/x"}
    again = captured(tmp_path / "again", lambda: introspect_cli.record("x", 4) or train(steps=1))
    assert ("x", 0, "") in recorded_values(again)
