"""What the store costs: bytes a record, time to append a step, time to open and to read.

Run as `python benchmarks/store.py`; prints one row a figure with its target and whether it was met. Times are the
median of many; the disk is whatever holds the temporary directory.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import SKETCH_SIZE, Kind, Layout, Phase, Site, SiteInfo
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.batch import StepBatch
from introspect_cli.store.reader import open_run
from introspect_cli.store.writer import StoreWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.store.rank_writer import RankWriter

RECORDS = 1500


def made(writer: RankWriter, records: int) -> StepBatch:
    """A step of `records` records, three in a hundred with a text."""
    kinds = list(Kind)
    sites = [
        Site(Phase.FORWARD, kinds[row % len(kinds)], f"GPT.blocks.{row // 40}.mlp.{row}", 0, "[0]")
        for row in range(records)
    ]
    rng = np.random.default_rng(0)
    return StepBatch(
        site=np.array([writer.site(site, SiteInfo("Linear")) for site in sites], np.uint32),
        sequence=np.arange(records, dtype=np.uint32),
        layout=np.array(
            [writer.layout(Layout((8, 128, row % 20), "float32", "cpu")) for row in range(records)], np.uint32
        ),
        status=np.zeros(records, np.uint8),
        checksum=rng.integers(0, 1 << 63, records, np.uint64),
        counts={name: np.zeros(records, np.int64) for name, own in STATISTICS.items() if own.type == "<i8"},
        floats={
            name: np.abs(rng.standard_normal(records)).astype(own.type)
            for name, own in STATISTICS.items()
            if own.type != "<i8"
        },
        sketch=rng.standard_normal((records, SKETCH_SIZE)).astype(np.float32),
        text=["0.001" if row % 33 == 0 else "" for row in range(records)],
    )


def write(path: Path, steps: int, records: int, *, sketch: bool = True) -> tuple[float, list[float]]:
    """Write a run; bytes a record, and the seconds of each append after the first."""
    with StoreWriter.create(path) as store:
        writer = store.rank(0, stats=True, sketch=sketch, samples=True)
        batch = made(writer, records)
        times = []
        for step in range(steps):
            begin = time.perf_counter()
            writer.append(step, batch)
            times.append(time.perf_counter() - begin)
        store.write_manifest({"status": "complete"})
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return size / (steps * records), times[1:]


def median(action: Callable[[], object], repeats: int = 7) -> float:
    """Median seconds of `action`."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


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


def main() -> int:
    """Print the table; 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000_000, help="records in the large stores")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="introspect-benchmark-"))
    rows: list[tuple[str, float, str, float | None]] = []
    try:
        plain, _ = write(folder / "plain", 200, RECORDS, sketch=False)
        full, times = write(folder / "full", 200, RECORDS)
        rows += [
            ("bytes a record, no sketch", plain, "B", 120),
            ("bytes a record, sketch", full, "B", 200),
            ("append 1,500 records, median", statistics.median(times) * 1e3, "ms", 1),
            ("append 1,500 records, 95th percentile", sorted(times)[int(0.95 * len(times))] * 1e3, "ms", None),
        ]
        write(folder / "steps", 10_000, 1)
        rows.append(("open 10,000 steps", median(lambda: open_run(folder / "steps").close()) * 1e3, "ms", 100))
        steps = max(options.records // RECORDS, 1)
        for name in ("a", "b"):
            write(folder / name, steps, RECORDS, sketch=False)
        rows += [
            (
                f"two equal stores of {steps * RECORDS:,}",
                median(lambda: same(folder / "a", folder / "b")) * 1e3,
                "ms",
                200,
            ),
            (f"read and check {steps * RECORDS:,} records", median(lambda: read_all(folder / "a"), 3), "s", 3),
        ]
    finally:
        shutil.rmtree(folder)
    print(f"{'what':44} {'measured':>12} {'target':>10}")
    missed = 0
    for what, value, unit, target in rows:
        verdict = "" if target is None else "met" if value <= target else "MISSED"
        missed += verdict == "MISSED"
        print(f"{what:44} {value:9.3g} {unit:2} {'' if target is None else f'{target:7g} {unit:2}':>10} {verdict}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
