"""The benchmark for GPUs runs, as far as a machine without one can tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]


def dry_run(tmp_path, *options):
    report = tmp_path / "gpu.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry-run", "--json", str(report), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(report.read_text())["rows"]


@pytest.mark.sweep
def test_every_part_of_the_gpu_benchmark_runs(tmp_path):
    pytest.importorskip("triton")
    rows = dry_run(tmp_path)
    assert len({row["section"] for row in rows}) == 7
    assert not [row for row in rows if row["verdict"] == "FAILED"]
