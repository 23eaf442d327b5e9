"""The guide docs/guides/trainer-and-engine.md: a policy's log-probabilities under trainer and generation engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).resolve().parents[2] / "fixtures" / "rl" / "grpo.py"


def test_the_policy_learns():
    command = [sys.executable, str(SCRIPT), "--iterations", "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rewards = [float(each) for each in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert np.mean(rewards[-5:]) > 2 * np.mean(rewards[:5]), rewards
