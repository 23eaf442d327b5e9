"""How long a comparison of two large runs takes, and how much memory.

Two runs of 10 million records (1,000 steps of 10,000 sites), equal, with one record of the last step changed, and with
every record changed by a rounding and compared under a tolerance. Stores are built with the store's own writer, in a
temporary directory that is removed; each comparison runs in a process of its own, and start-up is measured beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from introspect_cli.records import Kind, Layout, Phase, Site, SiteInfo
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.batch import StepBatch
from introspect_cli.store.writer import StoreWriter

RUN = """
import json, resource, sys, time
began = time.perf_counter()
import click, rich, yaml, pyarrow
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.options import DiffOptions
from introspect_cli.render.diff_text import diff_blocks
from introspect_cli.store.reader import open_run
ready = time.perf_counter()
options = DiffOptions(rtol=float(sys.argv[3]))
with open_run(sys.argv[1]) as a, open_run(sys.argv[2]) as b:
    result = compare_runs(a, b, options)
diff_blocks(result)
print(json.dumps({
    "import": ready - began, "compare": time.perf_counter() - ready, "verdict": result.verdict.value,
    "diverged": result.counts.diverged, "within": result.counts.within,
    "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def build(path: Path, steps: int, sites: int, *, change: str = "") -> None:
    """Write a run; `change` is "last" for one other record in the last step, "all" for a rounding everywhere."""
    random = np.random.default_rng(0)
    store = StoreWriter.create(path)
    store.write_manifest({"status": "running"})
    writer = store.rank(0, stats=True, sketch=True, sorted_stats=())
    ids = [
        writer.site(Site(Phase.FORWARD, Kind.OUTPUT, f"Model.blocks.{n // 10}.layer{n % 10}"), SiteInfo("Linear"))
        for n in range(sites)
    ]
    layout = writer.layout(Layout((64, 512), "float32", "cpu", "contiguous"))
    base = random.integers(1, 1 << 62, sites, dtype=np.uint64)
    sketch = random.normal(size=(sites, 16)).astype(np.float32) * 45
    floats = {name: random.normal(size=sites) for name, own in STATISTICS.items() if own.type != "<i8"} | {
        "var": np.ones(sites)
    }
    batch = StepBatch(
        site=np.array(ids, np.uint32),
        sequence=np.arange(sites, dtype=np.uint32),
        layout=np.full(sites, layout, np.uint32),
        status=np.zeros(sites, np.uint8),
        checksum=base,
        counts={name: np.zeros(sites, np.int64) for name, own in STATISTICS.items() if own.type == "<i8"},
        floats=floats,
        sketch=sketch * np.float32(1 + 2e-7) if change == "all" else sketch,
        text=[""] * sites,
    )
    for step in range(steps):
        checksum = base + np.uint64(step)
        if change == "all":
            checksum = checksum ^ np.uint64(1 << 63)
        if change == "last" and step == steps - 1:
            checksum = checksum.copy()
            checksum[sites // 2] ^= np.uint64(1)
        writer.append(step, replace(batch, checksum=checksum))
    store.write_manifest({"status": "complete"})
    store.close()


def measure(a: Path, b: Path, rtol: float = 0.0) -> dict[str, float]:
    """Compare in a fresh process, the second time counting, so that files are in memory as they are after a capture."""
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", RUN, str(a), str(b), str(rtol)], check=True, capture_output=True, text=True
        )
    return json.loads(done.stdout)


def startup(*commands: list[str]) -> list[float]:
    """Seconds that commands take from start to end, best of 9 turns.

    As of an installed package, whose bytecode is there: the first turn writes it, whatever the environment says.
    """
    best = [float("inf")] * len(commands)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(9):
        for number, command in enumerate(commands):
            began = time.perf_counter()
            subprocess.run(command, check=False, capture_output=True, env=environment)
            best[number] = min(best[number], time.perf_counter() - began)
    return best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sites", type=int, default=10_000)
    asked = parser.parse_args()
    print(f"{asked.steps * asked.sites:,} records a run: {asked.steps:,} steps of {asked.sites:,} sites")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        build(root / "a", asked.steps, asked.sites)
        print(f"{'':46} {'target':>8} {'took':>8} {'memory':>8}")
        for change, rtol, target, title in (
            ("", 0.0, 0.2, "equal"),
            ("last", 0.0, 0.5, "one record of the last step differs"),
            ("all", 1e-5, 6.0, "all differ by a rounding, --rtol 1e-5"),
        ):
            build(root / "b", asked.steps, asked.sites, change=change)
            found = measure(root / "a", root / "b", rtol)
            took, memory = found["compare"], found["memory"] / 1e6
            print(f"{title:46} {target:7.1f}s {took:7.3f}s {memory:6.0f}MB  {found['verdict']}")
            if change == "all":
                found = measure(root / "a", root / "b")
                print(f"{'all differ, nothing tolerated':46} {'':8} {found['compare']:7.3f}s")
            subprocess.run(["rm", "-rf", str(root / "b")], check=True)
        build(root / "small", 3, 50)
        build(root / "small2", 3, 50, change="last")
        python, tool = [sys.executable, "-c"], [sys.executable, "-m", "introspect_cli"]
        click, helped, imports, diff = startup(
            [*python, "import click"],
            [*tool, "--help"],
            [*python, "import click, rich, yaml, pyarrow"],
            [*tool, "diff", str(root / "small"), str(root / "small2")],
        )
        for title, limit, took in (
            ("introspect --help; 1.5 x importing click", 1.5 * click, helped),
            ("a diff of two small runs; 2 x its imports", 2 * imports, diff),
        ):
            print(f"{title:46} {limit:7.3f}s {took:7.3f}s  {'met' if took <= limit else 'MISSED'}")


if __name__ == "__main__":
    main()
