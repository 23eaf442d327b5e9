"""What capturing costs, as a multiple of the bare training step.

Bare and captured steps alternate in short blocks in one process, so that whatever else the machine does hits both;
each ratio is the median of those of neighbouring blocks. The first captured steps of a block are not counted: they meet
every site, shape and optimizer state for the first time, which a training does once.

Whatever else runs only adds time. So beside it stands the ratio of the quickest captured step to the quickest bare one,
and that of the least CPU time: with one thread the steadiest, to find what costs; with several, it has
what waiting threads burn. What a user feels is the first.
Run: python benchmarks/overhead.py [--quick] [--blocks N] [--threads N] [--workload NAME] [--mode NAME]
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import measuring
import torch
from workloads import WORKLOADS

from introspect_cli.capture.options import DEFAULT_STATS, CaptureOptions
from introspect_cli.records import Kind
from introspect_cli.schedule.rules import Schedule
from introspect_cli.store.run import open_run
from introspect_cli.tensors import kernels, parallel, rows
from introspect_cli.tensors.cpu import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.records import Layout

STATE = frozenset({Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE})
OPERATORS = frozenset({Kind.OP_OUTPUT})
FOURTEEN = (
    *("infs", "nans", "zeros", "mean", "amean", "std", "var", "uvar"),
    *("skew", "kurt", "min", "max", "shape", "dtype"),
)

MODES: dict[str, tuple[CaptureOptions, float]] = {
    "everything": (CaptureOptions(), 1.08),
    "checksums only": (CaptureOptions(stats=(), sketch=False), 1.04),
    "outside schedule": (CaptureOptions(steps=Schedule.parse("1000000")), 1.005),
    "state, 14 statistics": (CaptureOptions(record=STATE, stats=FOURTEEN, sketch=False), 1.06),
    # Every operator's results with checksum and statistics: alone, and beside what is recorded of modules.
    "op level, no modules": (CaptureOptions(level="op", record=OPERATORS, sketch=False), 2.5),
    "op level": (CaptureOptions(level="op", record=CaptureOptions().record | OPERATORS, sketch=False), 2.5),
}
"""The options of each mode, and the ratio it should have."""
OTHERS: dict[str, dict[str, float]] = {
    "gpt d=128": {"everything": 1.11, "checksums only": 1.05},
    "gpt 2x64": {"everything": 1.15, "checksums only": 1.15},
    "cnn": {"everything": 1.12, "checksums only": 1.12},
    "200 small layers": {"everything": 1.35, "checksums only": 1.35},
    "200 layers of 8": {"everything": 1.35, "checksums only": 1.35},
}
"""Where a step computes little for the tensors it has: the ratios that it should have instead, by mode."""
assert set(FOURTEEN) <= set(DEFAULT_STATS)
FIRST = 3
"""Captured steps of a block that are not counted."""


class Time(NamedTuple):
    """What a step took, in seconds: by the clock, and of the processor, all threads together."""

    wall: float
    cpu: float


@dataclass
class Captured:
    """What one block of captured steps came to.

    Attributes:
        times: of each step.
        rows: records a step.
        distinct: bytes of all tensors recorded in a step, what several sites share counted once.
    """

    times: list[Time]
    rows: int
    distinct: int


def captured(options: CaptureOptions, directory: Path, step: Callable[[], None], count: int) -> Captured:
    """Times of `count` captured steps, after those that are not counted."""
    with measuring.captured(options, directory):
        timed(step, FIRST)
        times = timed(step, count)
    return Captured(times, *volume(directory, FIRST + count - 1))


def volume(directory: Path, step: int) -> tuple[int, int]:
    """Records of a step, and bytes of their tensors, those with the same checksum once."""
    with open_run(directory) as run:
        rank = run.rank(0)
        if step not in rank:
            return 0, 0
        batch = rank.read(step)
        sizes = [_bytes(layout) for layout in rank.layouts]
    distinct = {int(key): sizes[layout] for key, layout in zip(batch.checksum, batch.layout, strict=True)}
    return len(batch.site), sum(distinct.values())


def _bytes(layout: Layout) -> int:
    dtype = getattr(torch, layout.dtype, None)
    return math.prod(layout.shape) * dtype.itemsize if isinstance(dtype, torch.dtype) else 0


def timed(step: Callable[[], object], count: int) -> list[Time]:
    """Times of `count` steps."""
    times = []
    for _ in range(count):
        began, worked = time.perf_counter(), time.process_time()
        step()
        times.append(Time(time.perf_counter() - began, time.process_time() - worked))
    return times


def bandwidth() -> float:
    """Bytes a second at which torch reads memory that is not in the cache: `x.sum()` over 64 tensors of 4 MB."""
    tensors = [torch.randn(1 << 20) for _ in range(64)]
    best = min(sum(timed(tensor.sum, 1)[0].wall for tensor in tensors) for _ in range(5))
    return len(tensors) * (4 << 20) / best


def kernel_speed(options: CaptureOptions) -> float:
    """Bytes a second that the kernels of a mode reach on 4 MB of float32 in the cache, with torch's threads."""
    tensor, row, engine = torch.randn(1 << 20), rows.empty(1), Engine()
    parallel.note_computation([tensor])  # as after an optimizer step of the script's
    flags = kernels.STATS * options.measures | kernels.SKETCH * options.sketch

    def summarise() -> None:
        engine.summarise_contiguous(row.ctypes.data, tensor.data_ptr(), tensor.numel(), 0, kernels.F32, 0, flags)

    return tensor.nbytes / min(timed(summarise, 200)).wall


@dataclass
class Result:
    """What a mode came to.

    Attributes:
        bare: seconds of a bare step, median.
        ratio: captured over bare, the median over blocks of steps that alternated.
        spread: half the distance between the quartiles of those ratios: what the machine's noise makes of one.
        quickest: the quickest captured step over the quickest bare one.
        cpu: the same of CPU time.
        least: the ratio there would be if every distinct tensor were only read once, at the speed of `x.sum()`.
        kernels: the same, summarised once at the speed that the mode's kernels have in the cache.
        last: the last block.
    """

    bare: float
    ratio: float
    spread: float
    quickest: float
    cpu: float
    least: float
    kernels: float
    last: Captured


def measure(step: Callable[[], None], blocks: int, per_block: int, modes: list[str]) -> dict[str, Result]:
    """Alternate bare and captured steps, mode by mode."""
    for _ in range(3):
        step()
    bare: list[Time] = []
    steps: dict[str, list[Time]] = {name: [] for name in modes}
    ratios: dict[str, list[float]] = {name: [] for name in modes}
    last: dict[str, Captured] = {}
    speed = bandwidth()
    with tempfile.TemporaryDirectory() as scratch:
        for block in range(blocks):
            for name in modes:
                before = timed(step, per_block)
                last[name] = captured(MODES[name][0], Path(scratch) / f"{block}", step, per_block)
                before += timed(step, per_block)
                ratios[name].append(_median(last[name].times) / _median(before))
                bare += before
                steps[name] += last[name].times
        speed = statistics.median([speed, bandwidth(), bandwidth()])
    results = {}
    base = _median(bare)
    for name, times in steps.items():
        least = 1 + last[name].distinct / speed / base
        kernels = 1 + last[name].distinct / kernel_speed(MODES[name][0]) / base
        low, middle, high = statistics.quantiles(ratios[name], n=4, method="inclusive")
        quickest, cpu = (min(step[kind] for step in times) / min(step[kind] for step in bare) for kind in (0, 1))
        results[name] = Result(base, middle, (high - low) / 2, quickest, cpu, least, kernels, last[name])
    return results


def _median(times: list[Time]) -> float:
    return statistics.median(step.wall for step in times)


def target_of(workload: str, mode: str) -> float:
    """The ratio that a mode should have on a workload, at most."""
    return OTHERS.get(workload, {}).get(mode, MODES[mode][1])


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4 blocks")
    parser.add_argument("--blocks", type=int, default=16, help="blocks of each mode; more where the machine is noisy")
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append")
    parser.add_argument("--mode", choices=list(MODES), action="append")
    parser.add_argument("--threads", type=int, default=2, help="torch's; targets are for two")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    modes: list[str] = arguments.mode or list(MODES)
    print(f"{'workload':<16} {'mode':<22}  bare ms   ratio     +-  target  quickest    cpu", end="")
    print("   least  kernels  records    MB")
    for workload in arguments.workload or WORKLOADS:
        torch.manual_seed(0)
        results = measure(WORKLOADS[workload](), 4 if arguments.quick else arguments.blocks, 2, modes)
        for name, result in results.items():
            target = target_of(workload, name)
            verdict = "met" if result.ratio <= target else "MISSED"
            print(
                f"{workload:<16} {name:<22} {result.bare * 1e3:8.1f} {result.ratio:7.3f} "
                f"{result.spread:6.3f} {target:7.3f}    {result.quickest:6.3f} {result.cpu:6.3f}  "
                f"{result.least:6.3f}  {result.kernels:7.3f} {result.last.rows:8,} "
                f"{result.last.distinct / 1e6:5.0f} {verdict}",
                flush=True,
            )
    print("ratio: a captured step over a bare one, by the clock: the median of neighbouring blocks")
    print("quickest: the quickest captured step over the quickest bare one")
    print("cpu: the same of the least CPU time, all threads together")
    print("+-: half the distance between the quartiles of the ratios of blocks")
    print("least: every distinct tensor of the step read once at the speed of x.sum(), and nothing else done")
    print("kernels: every one summarised once at the speed the mode's kernels have in the cache, and nothing else done")


if __name__ == "__main__":
    main()
