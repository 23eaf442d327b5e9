"""What capturing costs, as a multiple of the bare training step.

Bare and captured steps alternate in short blocks in one process, so that whatever else the machine does hits both;
each ratio is that of the medians. Run: python benchmarks/overhead.py [--quick] [--workload NAME]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from workloads import WORKLOADS

from introspect_cli.capture.options import DEFAULT_STATS, CaptureOptions
from introspect_cli.capture.schedule import Schedule
from introspect_cli.capture.session import Session
from introspect_cli.records import Kind
from introspect_cli.script import Ending

if TYPE_CHECKING:
    from collections.abc import Callable

STATE = frozenset({Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE})
OPERATORS = frozenset({Kind.OP_OUTPUT})
FOURTEEN = (
    "infs",
    "nans",
    "zeros",
    "mean",
    "amean",
    "std",
    "var",
    "uvar",
    "skew",
    "kurt",
    "min",
    "max",
    "shape",
    "dtype",
)

MODES: dict[str, tuple[CaptureOptions, float]] = {
    "everything": (CaptureOptions(), 1.10),
    "checksums only": (CaptureOptions(stats=(), sketch=False), 1.04),
    "outside schedule": (CaptureOptions(schedule=Schedule.parse("1000000")), 1.005),
    "state, 14 statistics": (CaptureOptions(record=STATE, stats=FOURTEEN, sketch=False), 1.06),
    # Every operator's results with checksum and statistics: alone, and beside what is recorded of modules.
    "op level, alone": (CaptureOptions(level="op", record=OPERATORS, sketch=False), 1.5),
    "op level": (CaptureOptions(level="op", record=CaptureOptions().record | OPERATORS, sketch=False), 1.5),
}
assert set(FOURTEEN) <= set(DEFAULT_STATS)


def captured(options: CaptureOptions, directory: Path, step: Callable[[], None], count: int) -> tuple[list[float], int]:
    """Times of `count` captured steps, in seconds, after one that is not counted; and records a step."""
    session = Session(None, CaptureOptions(**{**vars(options), "output": directory, "force": True, "quiet": True}))
    session.attach()
    step()
    times = timed(step, count)
    session.finish(Ending(0, "returned"))
    rows = session.rows
    return times, rows // (count + 1)


def timed(step: Callable[[], None], count: int) -> list[float]:
    """Times of `count` steps in seconds."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


def measure(step: Callable[[], None], blocks: int, per_block: int) -> dict[str, tuple[float, float, int]]:
    """For each mode: median bare and captured step in seconds, and records a step."""
    for _ in range(3):
        step()
    bare: dict[str, list[float]] = {name: [] for name in MODES}
    watched: dict[str, list[float]] = {name: [] for name in MODES}
    rows = dict.fromkeys(MODES, 0)
    with tempfile.TemporaryDirectory() as scratch:
        for block in range(blocks):
            for name, (options, _) in MODES.items():
                bare[name] += timed(step, per_block)
                times, rows[name] = captured(options, Path(scratch) / f"{block}", step, per_block)
                watched[name] += times
    return {name: (statistics.median(bare[name]), statistics.median(watched[name]), rows[name]) for name in MODES}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer blocks")
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    print(f"{'workload':<18} {'mode':<22} {'bare ms':>9} {'captured':>9} {'ratio':>7} {'target':>7}  records")
    for workload in arguments.workload or WORKLOADS:
        torch.manual_seed(0)
        results = measure(WORKLOADS[workload](), 3 if arguments.quick else 8, 4)
        for name, (bare, watched, rows) in results.items():
            target = MODES[name][1]
            verdict = "met" if watched / bare <= target else "MISSED"
            print(
                f"{workload:<18} {name:<22} {bare * 1e3:9.1f} {watched * 1e3:9.1f} {watched / bare:7.3f} "
                f"{target:7.3f}  {rows:,} {verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()
