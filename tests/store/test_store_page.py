"""The reader on the page of the format, which needs numpy alone, reads what a capture writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from synthetic import row, write_run

from introspect_cli.store.read.run import open_run

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "store-format.md"


def test_the_reader_of_the_page_gives_what_the_package_gives(tmp_path):
    code = PAGE.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    (tmp_path / "reader.py").write_text(code)
    steps = [
        [
            row("forward", "output", f"Net.{name}", np.full(3, number + 0.5), path="['é']")
            for name in "abc"[: number + 1]
        ]
        for number in range(3)
    ]
    path = write_run(tmp_path / "run", [*steps, []])
    done = subprocess.run(
        [sys.executable, "-I", "reader.py", str(path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with open_run(path) as run:
        records = [record for step in run.rank(0).entries["step"].tolist() for record in run.rank(0).records(step)]
    assert done.stdout.splitlines() == [
        f"{each.step} {site.kind.value} {site.fqn} {site.call} {site.path} {each.summary.checksum:016x}"
        for each in records
        for site in [each.site]
    ]
    damaged = bytearray((path / "rank0" / "records.arrow").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (path / "rank0" / "records.arrow").write_bytes(damaged)
    again = subprocess.run(
        [sys.executable, "-I", "reader.py", str(path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "is damaged" in again.stderr
