"""Thousands of ranks: what opening, comparing, putting together and checking them costs, on synthetic stores.

    python benchmarks/scale.py write FOLDER --ranks 1024 --steps 20 --sites 200     # three runs, by the store's writer
    python benchmarks/scale.py measure FOLDER [--engine processes:2]                # a table of what reading costs

The runs are `rows` and `columns`, which hold the same parameters, cut by rows and by columns; `again`, equal to `rows`;
`late`, `again` with another last step; and `odd`, in which one rank's copy of what all have is another from the middle
on. Each measurement is a process of its own, so that its memory is its own; open files are looked at every 20 ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from introspect_cli.records import STATISTICS, Kind, Layout, Part, Phase, Site, SiteInfo
from introspect_cli.store.batch import StepBatch
from introspect_cli.store.launch import Launch
from introspect_cli.store.writer import StoreWriter
from introspect_cli.sums import header, mix

RUNS = ("rows", "columns", "again", "late", "odd")
_COPIED = 8
"""One site in so many is whole on every rank."""

MEASURE = """
import json, os, resource, sys, threading, time
sys.path.insert(0, {here!r})
import scale
began, clock = time.process_time(), time.perf_counter()
watch = scale.Watch()
said = scale.WORK[{what!r}](*{given!r})
print(json.dumps(dict(cpu=time.process_time() - began, wall=time.perf_counter() - clock, said=said, files=watch.most(),
    memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)))
"""


def build(path: Path, name: str, ranks: int, steps: int, sites: int, *, lean: bool) -> None:
    """Write one of the runs: parts that add up to the same wholes however they are cut, and copies."""
    generator = np.random.default_rng(0)
    total = generator.integers(1, 1 << 62, sites, dtype=np.uint64)
    side = 8 * ranks
    shape, copied = (side, side), np.arange(sites) % _COPIED == 0
    heads = np.full(sites, header("float32", shape), np.uint64)
    own = np.random.default_rng(1 + (name == "columns"))
    added = np.zeros(sites, np.uint64)
    for rank in range(ranks):
        store = StoreWriter.create(path, launch=Launch("0" * 32, "0" * 32, rank, ranks))
        store.write_manifest({"status": "running", "rank": rank, "world_size": ranks, "host": f"node{rank // 8}"})
        writer = store.rank(rank, stats=not lean, sketch=not lean, sorted_stats=())
        names = [f"Model.blocks.{number // 10}.layer{number % 10}.weight" for number in range(sites)]
        ids = [writer.site(Site(Phase.OPTIMIZER, Kind.PARAM, each), SiteInfo("Linear")) for each in names]
        held, whole = ((rank * 8, 8),), ((0, side),)
        part = Part((whole, held) if name == "columns" else (held, whole))
        layouts = [writer.layout(Layout(shape, "float32", "cpu", "contiguous", which)) for which in (part, None)]
        sums = own.integers(1, 1 << 62, sites, dtype=np.uint64) if rank < ranks - 1 else total - added
        added += sums
        sums = np.where(copied, total, sums)
        batch = StepBatch(
            site=np.array(ids, np.uint32),
            sequence=np.arange(sites, dtype=np.uint32),
            layout=np.where(copied, layouts[1], layouts[0]).astype(np.uint32),
            status=np.zeros(sites, np.uint8),
            checksum=np.zeros(sites, np.uint64),
            counts={}
            if lean
            else {n: np.zeros(sites, np.int64) for n, kept in STATISTICS.items() if kept.type == "<i8"},
            floats={} if lean else {n: np.ones(sites) for n, kept in STATISTICS.items() if kept.type != "<i8"},
            sketch=None if lean else np.ones((sites, 16), np.float32),
            text=[""] * sites,
        )
        for step in range(steps):
            more = np.uint64(step) * (copied | (rank == 0))
            if name == "late" and step == steps - 1 and rank == ranks // 2:
                more = more + ~copied
            if name == "odd" and rank == ranks // 3 and step >= steps // 2:
                more = more + copied
            writer.append(step, replace(batch, checksum=mix(sums + more.astype(np.uint64) + heads)))
        ended = {"status": "complete", "rank": rank, "world_size": ranks, "steps": steps, "host": f"node{rank // 8}"}
        store.write_manifest({**ended, "exit_code": 0})
        store.close()


class Watch:
    """Counts the open files of this process."""

    def __init__(self) -> None:
        self._most, self._done = 0, threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self._done.is_set():
            self._most = max(self._most, len(list(Path("/proc/self/fd").iterdir())))
            time.sleep(0.02)

    def most(self) -> int:
        """The most that were seen."""
        self._done.set()
        return self._most


def _open(path: str) -> str:
    from introspect_cli.store.reader import open_run

    with open_run(path) as run:
        return f"{len(run.ranks)} ranks"


def _compare(a: str, b: str) -> str:
    from introspect_cli.compare.diff import compare_runs
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.store.reader import open_run

    with open_run(a) as one, open_run(b) as two:
        result = compare_runs(one, two, DiffOptions())
    where = f" at step {result.first.step}, rank {result.first.rank}" if result.first else ""
    return f"{result.verdict.value}{where}, {result.counts.records:,} records"


def _copies(path: str, engine: str) -> str:
    from introspect_cli.engine import engine_of
    from introspect_cli.health.odd import odd_ranks
    from introspect_cli.store.reader import open_run

    with open_run(path) as run, engine_of(engine) as at_work:
        found = [f"rank {each.rank} from step {each.step} on" for each in odd_ranks(run, at_work.total).findings]
    return ", ".join(found) or "nothing found"


def _reduce(path: str, out: str, engine: str) -> str:
    from introspect_cli.engine import engine_of
    from introspect_cli.store.reduce import reduce_run

    with engine_of(engine) as at_work:
        return f"{reduce_run(path, Path(out), at_work.run)} steps"


WORK = {"open": _open, "compare": _compare, "reduce": _reduce, "copies": _copies}


def measured(what: str, *given: str) -> dict[str, object]:
    """What one piece of work costs in a process of its own."""
    code = MEASURE.format(here=str(Path(__file__).parent), what=what, given=given)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        return {
            "cpu": float("nan"),
            "wall": float("nan"),
            "said": done.stderr.splitlines()[-1],
            "files": 0,
            "memory": 0.0,
        }
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(folder: Path, engine: str) -> None:
    """Print a table."""
    rows, columns, again, late = (str(folder / name) for name in RUNS[:4])
    works = [
        ("opened", "open", rows),
        ("one layout, equal", "compare", rows, again),
        ("one layout, the last step differs", "compare", rows, late),
        ("two layouts, equal to the bit", "compare", columns, rows),
        ("two layouts, the last step differs", "compare", columns, late),
        (f"put together ({engine})", "reduce", rows, str(folder / "rows-whole"), engine),
        (f"another layout put together ({engine})", "reduce", columns, str(folder / "columns-whole"), engine),
        (f"copies on all ranks ({engine})", "copies", str(folder / "odd"), engine),
        ("both put together, compared", "compare", str(folder / "rows-whole"), str(folder / "columns-whole")),
    ]
    print("| | CPU s | by the clock | MB | open files | |\n|---|---|---|---|---|---|")
    for words, what, *given in works:
        read = given[:1] if what != "compare" else given
        if not all(Path(path).exists() for path in read):
            continue
        found = measured(what, *given)
        print(
            f"| {words} | {found['cpu']:.1f} | {found['wall']:.1f} | {found['memory']:.0f} | {found['files']} "
            f"| {found['said']} |",
            flush=True,
        )


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sites", type=int, default=200)
    parser.add_argument("--lean", action="store_true", help="checksums alone")
    parser.add_argument("--engine", default="here")
    parser.add_argument("--runs", default=",".join(RUNS), help="which of the runs to write")
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.folder, given.engine)
        return
    for name in given.runs.split(","):
        began = time.perf_counter()
        build(given.folder / name, name, given.ranks, given.steps, given.sites, lean=given.lean)
        print(f"{name}: written in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
