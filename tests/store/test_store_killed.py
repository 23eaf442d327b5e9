"""Killed at any instant, a run keeps every step whose end was reached, and nothing torn is read as whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_a_kill_at_any_instant_loses_no_whole_step():
    """In a process of its own, which forks: the test process may have threads."""
    script = Path(__file__).parents[1] / "support" / "store_kills.py"
    out = subprocess.run([sys.executable, script, "40", "7"], capture_output=True, text=True, check=False)
    assert out.stderr == ""
    match = re.match(r"(\d+) kills inside writes, 40 at random instants: 0 problems\n$", out.stdout)
    assert match, out.stdout
    assert int(match[1]) > 50
    assert out.returncode == 0
