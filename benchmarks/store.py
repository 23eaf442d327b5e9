"""What the store costs: bytes a record, time to append a step, time to open and to read.

Run as `python benchmarks/store.py`; prints one row a figure with its target and whether it was met. Times are the
median of many; the disk is whatever holds the temporary directory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from made_runs import batch_of
from measuring import Row, bounded, seconds, show

from introspect_cli.records import SKETCH_SIZE, Kind, Layout, Phase, Site
from introspect_cli.store.run import open_run
from introspect_cli.store.run_writer import StoreWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.rank_writer import RankWriter

RECORDS = 1500


def made(writer: RankWriter, records: int, *, sketch: bool) -> StepBatch:
    """A step of `records` records, three in a hundred with a text."""
    kinds, rng = list(Kind), np.random.default_rng(0)
    sites = [
        Site(Phase.FORWARD, kinds[row % len(kinds)], f"GPT.blocks.{row // 40}.mlp.{row}", 0, "[0]")
        for row in range(records)
    ]
    batch = batch_of(
        writer,
        sites,
        np.array([writer.layout(Layout((8, 128, row % 20), "float32", "cpu")) for row in range(records)]),
        values=lambda count: np.abs(rng.standard_normal(count)),
        sketch=rng.standard_normal((records, SKETCH_SIZE)).astype(np.float32) if sketch else None,
        text=["0.001" if row % 33 == 0 else "" for row in range(records)],
    )
    return replace(batch, checksum=rng.integers(0, 1 << 63, records, np.uint64))


def write(path: Path, steps: int, records: int, *, sketch: bool = True) -> tuple[float, list[float]]:
    """Write a run; bytes a record, and the seconds of each append after the first."""
    with StoreWriter.create(path) as store:
        writer = store.rank(0, stats=True, sketch=sketch)
        batch = made(writer, records, sketch=sketch)
        times = [seconds(lambda step=step: writer.append(step, batch)) for step in range(steps)]  # type: ignore[misc]
        store.write_manifest({"status": "complete"})
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return size / (steps * records), times[1:]


def median(action: Callable[[], object], repeats: int = 7) -> float:
    """Median seconds of `action`."""
    return statistics.median(seconds(action) for _ in range(repeats))


def same(a: Path, b: Path) -> bool:
    """What a diff of equal runs has to read."""
    with open_run(a) as left, open_run(b) as right:
        last = (run.rank(0).entries["chain"][-1].tobytes() for run in (left, right))
        return next(last) == next(last)


def read_all(path: Path) -> int:
    """Read and check every record."""
    with open_run(path) as run:
        reader = run.rank(0)
        return sum(len(reader.read_row(row)) for row in range(len(reader)))


def measured(folder: Path, steps: int) -> Iterator[Row]:
    """The rows of the table."""
    plain, _ = write(folder / "plain", 200, RECORDS, sketch=False)
    full, times = write(folder / "full", 200, RECORDS)
    yield bounded("bytes a record, no sketch", plain, "B", most=120)
    yield bounded("bytes a record, sketch", full, "B", most=200)
    yield bounded("append 1,500 records, median", statistics.median(times) * 1e3, "ms", most=1)
    yield bounded("append 1,500 records, 95th percentile", sorted(times)[int(0.95 * len(times))] * 1e3, "ms")
    write(folder / "steps", 10_000, 1)
    opened = median(lambda: open_run(folder / "steps").close())
    yield bounded("open 10,000 steps", opened * 1e3, "ms", most=100)
    a, b = folder / "a", folder / "b"
    for path in (a, b):
        write(path, steps, RECORDS, sketch=False)
    yield bounded(f"two equal stores of {steps * RECORDS:,}", median(lambda: same(a, b)) * 1e3, "ms", most=200)
    yield bounded(f"read and check {steps * RECORDS:,} records", median(lambda: read_all(a), 3), "s", most=3)


def main() -> int:
    """Print the table; 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000_000, help="records in the large stores")
    steps = max(parser.parse_args().records // RECORDS, 1)
    with tempfile.TemporaryDirectory(prefix="introspect-benchmark-") as folder:
        return int(show(measured(Path(folder), steps)) > 0)


if __name__ == "__main__":
    sys.exit(main())
