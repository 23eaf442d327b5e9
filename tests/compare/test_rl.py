"""The guide docs/guides/trainer-and-engine.md: a policy's log-probabilities under trainer and generation engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from artefacts import run_of

import introspect_cli

SCRIPT = Path(__file__).resolve().parents[2] / "fixtures" / "rl" / "grpo.py"


@pytest.fixture
def sides(forks):
    """The run of the trainer's numbers and that of the engine's."""
    options = ("--no-packages", "--save-tensors", "score/*")

    def run(*words):
        more = ("--iterations", 2, *words)
        return [run_of(forks, SCRIPT, "--score", side, *more, options=options) for side in ("trainer", "engine")]

    return run


def test_a_faithful_engine_differs_by_rounding_only(sides):
    trainer, engine = sides()
    bare = introspect_cli.diff(trainer, engine)
    assert bare.first.site.fqn == "score/1 block 0", "the embedding is looked up alike, the first layer rounds"
    assert bare.first.rel_l2 < 1e-6
    loose = introspect_cli.diff(trainer, engine, rtol=1e-4)
    assert loose.same, loose.sentence
    assert loose.result.counts.within > 0


FAULTS = [
    (("--engine-dtype", "bfloat16"), 0, "score/0 embedding"),
    (("--fault", "stale"), 1, "score/0 embedding"),
    (("--fault", "scale"), 0, "score/2 block 1"),
    (("--fault", "position"), 0, "score/0 embedding"),
]


@pytest.mark.parametrize(("words", "step", "name"), FAULTS, ids=str)
def test_each_mismatch_is_named_at_its_layer(sides, words, step, name):
    trainer, engine = sides(*words)
    found = introspect_cli.diff(trainer, engine, rtol=1e-4)
    assert (found.first.step, found.first.site.fqn) == (step, name), found.sentence
    assert "--score trainer -> engine" in found.sentence
    if words == ("--fault", "position"):
        diverged = introspect_cli.diff(trainer, engine, modules="score/log_probs").first
        tokens = []
        with introspect_cli.open_run(trainer) as one, introspect_cli.open_run(engine) as two:
            values = [run.run.tensor(each.checksum) for run, each in ((one, diverged.a), (two, diverged.b))]
            tokens = np.unique(np.argwhere(np.abs(values[0] - values[1]) > 1e-4)[:, 1])
        assert tokens.tolist() == [10]


def test_the_policy_learns():
    command = [sys.executable, str(SCRIPT), "--iterations", "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rewards = [float(each) for each in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert np.mean(rewards[-5:]) > 2 * np.mean(rewards[:5]), rewards
