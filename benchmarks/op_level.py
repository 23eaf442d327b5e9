"""What recording every operator costs, as a multiple of the bare step, and how much of a model it sees.

`--level op` with checksum and statistics, in two ways: operators alone, and beside all that is recorded at module
level. Bare and captured steps alternate. Run: python benchmarks/op_level.py [--workload NAME]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from overhead import captured, timed
from workloads import WORKLOADS

from introspect_cli.capture.options import CaptureOptions
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET = 1.5
OPERATORS = CaptureOptions(level="op", record=frozenset({Kind.OP_OUTPUT}), sketch=False)
MODES = {
    "operators": OPERATORS,
    "operators and modules": CaptureOptions(
        level="op", record=CaptureOptions().record | {Kind.OP_OUTPUT}, sketch=False
    ),
}


def measure(step: Callable[[], None], blocks: int = 4, per_block: int = 4) -> dict[str, tuple[float, float, int]]:
    """For each mode: median bare and captured step in seconds, and records a step."""
    for _ in range(3):
        step()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, options in MODES.items():
            bare, watched, rows = [], [], 0
            for block in range(blocks):
                bare += timed(step, per_block)
                times, rows = captured(options, Path(scratch) / str(block), step, per_block)
                watched += times
            results[name] = (statistics.median(bare), statistics.median(watched), rows)
    return results


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{'workload':<18} {'mode':<22} {'bare ms':>9} {'captured':>9} {'ratio':>7} {'target':>7}  records")
    for workload in arguments.workload or WORKLOADS:
        torch.manual_seed(0)
        for name, (bare, watched, rows) in measure(WORKLOADS[workload]()).items():
            verdict = "met" if watched / bare <= TARGET else "MISSED"
            print(
                f"{workload:<18} {name:<22} {bare * 1e3:9.1f} {watched * 1e3:9.1f} {watched / bare:7.3f} "
                f"{TARGET:7.3f}  {rows:,} {verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()
