"""A user's script is type checked against the package's own annotations."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

SCRIPT = """
from pathlib import Path

import introspect_cli


def train(path: Path) -> None:
    with introspect_cli.recording(None, path, steps="first(10) | every(100)", packages=False):
        with introspect_cli.phase("rollout"):
            introspect_cli.record("reward", 1.0)
        introspect_cli.step()


comparison = introspect_cli.diff("runA", Path("runB"), rtol=1e-5)
if not comparison.same and comparison.first is not None:
    reveal_type(comparison.sentence)
    reveal_type(comparison.first.step)
with introspect_cli.open_run("runA") as run:
    reveal_type(run)
introspect_cli.diff(1, "runB")  # type: ignore[arg-type]
introspect_cli.record(3, 4)  # type: ignore[arg-type]
"""


@pytest.mark.longest
def test_a_users_script_is_type_checked_and_its_mistakes_are_found(tmp_path):
    """An ignored mistake that is none would be an error of its own."""
    (tmp_path / "train.py").write_text(SCRIPT)
    root = Path(__file__).parents[2]
    rules = str(root / "pyproject.toml")  # of which packages have no annotations
    # what is known of torch and of the package is kept for `mypy`, which CI runs later, and for the next time
    cache = str(root / ".mypy_cache")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", rules, "--cache-dir", cache, "train.py"]
    home = {"MYPYPATH": str(root)}  # an editable install is found by python alone
    done = subprocess.run(
        command, cwd=tmp_path, text=True, capture_output=True, check=False, env={**os.environ, **home}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line, revealed in ((16, "str"), (17, "int"), (19, "RunView")):
        assert re.search(
            rf'^train.py:{line}: note: Revealed type is "[\w.]*\b{revealed}"$', done.stdout, re.MULTILINE
        ), done.stdout
