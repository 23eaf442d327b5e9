"""Thousands of ranks: what opening, comparing, putting together and checking them costs, on synthetic stores.

    python benchmarks/scale.py write FOLDER --ranks 1024 --steps 20 --sites 200   # six runs, by the store's writer
    python benchmarks/scale.py measure FOLDER [--engines here,processes:2,dask:1,dask:2]     # a table of what it costs

The runs are `rows` and `columns`, which hold the same parameters, cut by rows and by columns; `again`, equal to `rows`;
`late`, `again` with another last step; `once`, in which all differs from the first step on; and `odd`, in which one
rank's copy of what all have is another from the middle on.

Each measurement is a process of its own, and `dask:N` in it a scheduler with N worker processes. All its processes are
looked at every 100 ms: what they read, how much memory they took, how many files they had open. On a busy machine the
clock says little, so CPU seconds are counted: of the process that asks, of the busiest worker, and of all workers. The
last over W, and the first beside it, are what W free processors would take, where there are so many tasks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import Kind, Layout, Part, Phase, Site, SiteInfo
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.batch import StepBatch
from introspect_cli.store.launch import Launch
from introspect_cli.store.writer import StoreWriter
from introspect_cli.sums import header, mix

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.engine import Engine

RUNS = ("rows", "columns", "again", "late", "once", "odd")
_COPIED = 8
"""One site in so many is whole on every rank."""

_TICK = os.sysconf("SC_CLK_TCK")


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
            sketch=None if lean else np.ones((sites, 16), np.float32) * (2 if name == "once" else 1),
            text=[""] * sites,
        )
        for step in range(steps):
            more = np.uint64(step) * (copied | (rank == 0))
            if name == "once":
                more = more + np.uint64(1)
            if name == "late" and step == steps - 1 and rank == ranks // 2:
                more = more + ~copied
            if name == "odd" and rank == ranks // 3 and step >= steps // 2:
                more = more + copied
            writer.append(step, replace(batch, checksum=mix(sums + more.astype(np.uint64) + heads)))
        ended = {"status": "complete", "rank": rank, "world_size": ranks, "steps": steps, "host": f"node{rank // 8}"}
        store.write_manifest({**ended, "exit_code": 0})
        store.close()


class Watch:
    """Looks at this process and those that it starts, again and again."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[str, float]] = {}
        self._before = {pid: _looked_at(pid) for pid in _family(os.getpid())}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(0.1):
            self._once()

    def _once(self) -> None:
        for pid in _family(os.getpid()):
            with suppress(OSError, ValueError, IndexError):
                now, seen = _looked_at(pid), self._seen.setdefault(pid, {})
                for name in ("cpu", "read"):
                    now[name] -= self._before.get(pid, {}).get(name, 0)
                for name, value in now.items():
                    seen[name] = max(seen.get(name, 0), value)

    def result(self) -> dict[str, float]:
        """What all of them used."""
        self._once()
        self._done.set()
        self._thread.join()
        own = self._seen.pop(os.getpid())
        workers = list(self._seen.values())
        every = [own, *workers]
        return {
            "cpu": own["cpu"],
            "busiest": max((each["cpu"] for each in workers), default=0.0),
            "workers": sum(each["cpu"] for each in workers),
            "memory": max(each["memory"] for each in every),
            "files": max(each["files"] for each in every),
            "read": sum(each["read"] for each in every),
        }


def _looked_at(pid: int) -> dict[str, float]:
    at = Path(f"/proc/{pid}")
    fields = (at / "stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in (at / "status").read_text().splitlines())
    return {
        "cpu": (int(fields[11]) + int(fields[12])) / _TICK,
        "memory": int(status["VmHWM"].split()[0]) / 1024,
        "files": len(list((at / "fd").iterdir())),
        "read": int((at / "io").read_text().split()[1]),
    }


def _family(pid: int) -> list[int]:
    """A process and those below it."""
    found = [pid]
    for own in found:
        with suppress(OSError):
            for task in Path(f"/proc/{own}/task").iterdir():
                found += [int(word) for word in (task / "children").read_text().split()]
    return found


@contextmanager
def _cluster(engine: str) -> Iterator[str]:
    """The engine to ask for, with a scheduler and workers where it is Dask's."""
    if not engine.startswith("dask:"):
        yield engine
        return
    import dask
    from distributed import LocalCluster

    number = int(engine.removeprefix("dask:"))
    with (
        dask.config.set({"distributed.worker.daemon": False, "distributed.worker.preload": []}),
        LocalCluster(n_workers=number, threads_per_worker=1, processes=True, dashboard_address=None) as local,
    ):
        yield f"dask:{local.scheduler_address}"


def _open(path: str, _: Engine) -> tuple[str, int]:
    from introspect_cli.store.reader import open_run

    with open_run(path) as run:
        return f"{len(run.ranks)} ranks", 0


def _diff(a: str, b: str, engine: Engine) -> tuple[str, int]:
    from introspect_cli.compare.diff import compare_runs
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.store.reader import open_run

    with open_run(a) as one, open_run(b) as two:
        result = compare_runs(one, two, DiffOptions(limit=12, whole_step=True), (), engine.elsewhere)
        records = sum(run.rank(rank).rows_in(slice(None)) for run in (one, two) for rank in run.ranks)
    where = f" at step {result.first.step}, rank {result.first.rank}" if result.first else ""
    return f"{result.verdict.value}{where}", records


def _records(path: str) -> int:
    from introspect_cli.store.reader import open_run

    with open_run(path) as run:
        return sum(run.rank(rank).rows_in(slice(None)) for rank in run.ranks)


def _copies(path: str, engine: Engine) -> tuple[str, int]:
    from introspect_cli.health.odd import odd_ranks
    from introspect_cli.store.reader import open_run

    with open_run(path) as run:
        found = [f"rank {each.rank} from step {each.step} on" for each in odd_ranks(run, engine.total).findings]
    return ", ".join(found) or "nothing found", 0


def _check(path: str, engine: Engine) -> tuple[str, int]:
    from introspect_cli.health.check import check
    from introspect_cli.store.reader import open_run

    with open_run(path) as run:
        result = check(run, work=engine.elsewhere)
    return f"{len(result.findings)} findings", _records(path)


def _merge(path: str, engine: Engine) -> tuple[str, int]:
    from introspect_cli.store.merge import reduce_run

    out = Path(f"{path}-whole")
    shutil.rmtree(out, ignore_errors=True)
    return f"{reduce_run(path, out, engine.run)} steps", _records(path)


def _export(path: str, engine: Engine) -> tuple[str, int]:
    from introspect_cli.exchange.formats import export
    from introspect_cli.store.reader import open_run

    with tempfile.TemporaryDirectory(dir=Path(path).parent) as out, open_run(path) as run:
        return f"{export(run, 'parquet', out, work=engine.elsewhere)} files", _records(path)


WORK = {
    "opened": (_open, ("rows",)),
    "diff, one layout, equal": (_diff, ("rows", "again")),
    "diff, one layout, the last step differs on one rank": (_diff, ("rows", "late")),
    "diff, one layout, all differs from step 0": (_diff, ("rows", "once")),
    "diff, two layouts, equal to the bit": (_diff, ("columns", "rows")),
    "diff, two layouts, all differs from step 0": (_diff, ("columns", "once")),
    "check --copies": (_copies, ("odd",)),
    "check": (_check, ("odd",)),
    "export --format parquet": (_export, ("rows",)),
    "merge --whole": (_merge, ("rows",)),
    "merge --whole, another layout": (_merge, ("columns",)),
    "diff of both put together": (_diff, ("rows-whole", "columns-whole")),
}


def measured(what: str, folder: Path, engine: str) -> dict[str, object]:
    """What one piece of work costs, in this process and those that it starts."""
    from introspect_cli.engine import engine_of

    work, runs = WORK[what]
    with _cluster(engine) as text, engine_of(text) as at_work:
        if engine != "here":
            list(at_work.run(abs, range(64)))  # workers have started
        tasks = 0
        kind, run = type(at_work), type(at_work).run

        def counted(self: Engine, task: Any, given: Sequence[Any]) -> Any:
            nonlocal tasks
            tasks += len(given)
            return run(self, task, given)

        kind.run = counted  # type: ignore[method-assign]
        watch, clock = Watch(), time.perf_counter()
        said, records = work(*(str(folder / name) for name in runs), at_work)
        wall = time.perf_counter() - clock
        return {**watch.result(), "wall": wall, "tasks": tasks, "said": said, "records": records}


def measure(folder: Path, engines: Sequence[str], only: str) -> None:
    """Print a table."""
    print(
        "| | engine | clock s | CPU s of who asks | of the busiest worker | of all workers | tasks | MB read "
        "| records/s a worker | MB of a process | open files | |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for what, (_, runs) in WORK.items():
        for engine in engines if what != "opened" and "both" not in what else ("here",):
            if only not in what or not all((folder / name).exists() for name in runs):
                continue
            words = [sys.executable, __file__, "one", str(folder), "--what", what, "--engines", engine]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"| {what} | {engine} | {done.stderr.splitlines()[-1]} |", flush=True)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            spent = found["workers"] if found["tasks"] and engine != "here" else found["cpu"]
            speed = f"{found['records'] / spent:,.0f}" if found["records"] and spent else ""
            numbers = "{wall:.1f} | {cpu:.1f} | {busiest:.1f} | {workers:.1f} | {tasks}".format_map(found)
            print(
                f"| {what} | {engine} | {numbers} | {found['read'] / 1e6:,.0f} | {speed} | {found['memory']:.0f} "
                f"| {found['files']:.0f} | {found['said']} |",
                flush=True,
            )


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "measure", "one"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sites", type=int, default=200)
    parser.add_argument("--lean", action="store_true", help="checksums alone")
    parser.add_argument("--engines", default="here,processes:2,dask:1,dask:2")
    parser.add_argument("--runs", default=",".join(RUNS), help="which of the runs to write")
    parser.add_argument("--what", dest="which", default="", help="which of the work to measure: a part of its name")
    given = parser.parse_args()
    if given.what == "one":
        print(json.dumps(measured(given.which, given.folder, given.engines)))
        return
    if given.what == "measure":
        measure(given.folder, given.engines.split(","), given.which)
        return
    for name in given.runs.split(","):
        began = time.perf_counter()
        build(given.folder / name, name, given.ranks, given.steps, given.sites, lean=given.lean)
        print(f"{name}: written in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
