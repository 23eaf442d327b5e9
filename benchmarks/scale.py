"""Many ranks, up to thousands: what opening, comparing, merging, checking and sending them costs, on made-up runs.

    python benchmarks/scale.py write FOLDER --ranks 1024 --steps 20 --sites 200   # the runs of `made_runs.RANKS`
    python benchmarks/scale.py measure FOLDER [--workers 1,2]     # a table of what it costs
    python -m moto.server -p 5599 &                     # or any other object storage
    export AWS_ENDPOINT_URL=http://127.0.0.1:5599 AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY=b
    python benchmarks/scale.py send FOLDER --url s3://bucket/runs    # in requests, bytes and seconds

Each measurement is a process of its own. All its processes are looked at every 100 ms: what they read, how much memory
they took, how many files they had open. On a busy machine the clock says little, so CPU seconds are counted: of the
process that asks, of the busiest worker, and of all workers. The last over W, and the first beside it, are what W free
processors would take, where there are so many tasks. Requests to object storage that are made together take one
answer's time, so these are counted as well.
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
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from made_runs import RANKS, write_ranks

from introspect_cli.workers import at_work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.errors import StoreError
    from introspect_cli.store.tasks import Work

_TICK = os.sysconf("SC_CLK_TCK")


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
        asking = self._seen.pop(os.getpid())
        workers = list(self._seen.values())
        every = [asking, *workers]
        return {
            "cpu": asking["cpu"],
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
    family = [pid]
    for parent in family:
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                family += [int(word) for word in (task / "children").read_text().split()]
    return family


def _open(path: str, _: Work | None) -> tuple[str, int]:
    from introspect_cli.store.run import open_run

    with open_run(path) as run:
        return f"{len(run.ranks)} ranks", 0


def _diff(a: str, b: str, work: Work | None) -> tuple[str, int]:
    from introspect_cli.compare.diff import compare_runs
    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.store.run import open_run

    with open_run(a) as one, open_run(b) as two:
        result = compare_runs(one, two, DiffOptions(limit=12, whole_step=True), (), work)
        records = sum(int(run.rank(rank).entries["rows"].sum()) for run in (one, two) for rank in run.ranks)
    where = f" at step {result.first.step}, rank {result.first.rank}" if result.first else ""
    return f"{result.verdict.value}{where}", records


def _records(path: str) -> int:
    from introspect_cli.store.run import open_run

    with open_run(path) as run:
        return sum(int(run.rank(rank).entries["rows"].sum()) for rank in run.ranks)


def _copies(path: str, work: Work | None) -> tuple[str, int]:
    from introspect_cli.health.minority import minority_ranks
    from introspect_cli.store.run import open_run

    with open_run(path) as run:
        odd = [f"rank {each.rank} from step {each.step} on" for each in minority_ranks(run, work or map).findings]
    return ", ".join(odd) or "nothing found", 0


def _check(path: str, work: Work | None) -> tuple[str, int]:
    from introspect_cli.health.check import check
    from introspect_cli.store.run import open_run

    with open_run(path) as run:
        result = check(run, work=work)
    return f"{len(result.findings)} findings", _records(path)


def _merge(path: str, work: Work | None) -> tuple[str, int]:
    from introspect_cli.store.merge import merge

    out = Path(f"{path}-whole")
    shutil.rmtree(out, ignore_errors=True)
    return f"{merge(path, out, work or map)} steps", _records(path)


def _export(path: str, _work: Work | None) -> tuple[str, int]:
    from introspect_cli.exchange.formats import export
    from introspect_cli.store.run import open_run

    with tempfile.TemporaryDirectory(dir=Path(path).parent) as out, open_run(path) as run:
        return f"{export(run, 'parquet', out)} files", _records(path)


WORK = {
    "opened": (_open, ("rows",)),
    "diff, one layout, equal": (_diff, ("rows", "again")),
    "diff, one layout, the last step differs on one rank": (_diff, ("rows", "late")),
    "diff, one layout, all differs from step 0": (_diff, ("rows", "once")),
    "diff, two layouts, equal to the bit": (_diff, ("columns", "rows")),
    "diff, two layouts, all differs from step 0": (_diff, ("columns", "once")),
    "diff, two layouts, equal within rounding": (_diff, ("near", "rows")),
    "diff, two layouts, all differs from the middle on": (_diff, ("half", "rows")),
    "check --copies": (_copies, ("odd",)),
    "check": (_check, ("odd",)),
    "export --format parquet": (_export, ("rows",)),
    "merge": (_merge, ("rows",)),
    "merge, another layout": (_merge, ("columns",)),
    "diff of both put together": (_diff, ("rows-whole", "columns-whole")),
}


def measured(what: str, folder: Path, workers: int) -> dict[str, object]:
    """What one piece of work costs, in this process and those that it starts."""
    work, runs = WORK[what]
    tasks = 0
    with at_work(workers) as pool:
        if pool is not None:
            list(pool(abs, range(64)))  # workers have started

        def counted(task: Any, given: Sequence[Any]) -> Any:
            nonlocal tasks
            tasks += len(given)
            assert pool is not None
            return pool(task, given)

        watch, clock = Watch(), time.perf_counter()
        said, records = work(*(str(folder / name) for name in runs), pool and counted)
        wall = time.perf_counter() - clock
        return {**watch.result(), "wall": wall, "tasks": tasks, "said": said, "records": records}


def measure(folder: Path, numbers: Sequence[str], only: str) -> None:
    """Print a table."""
    print(
        "| | workers | clock s | CPU s of who asks | of the busiest worker | of all workers | tasks | MB read "
        "| records/s a worker | MB of a process | open files | |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for what, (_, runs) in WORK.items():
        for workers in numbers if what != "opened" and "both" not in what else ("1",):
            if only not in what or not all((folder / name).exists() for name in runs):
                continue
            words = [sys.executable, __file__, "one", str(folder), "--what", what, "--workers", workers]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"| {what} | {workers} | {done.stderr.splitlines()[-1]} |", flush=True)
                continue
            costs = json.loads(done.stdout.splitlines()[-1])
            spent = costs["workers"] if costs["tasks"] and workers != "1" else costs["cpu"]
            speed = f"{costs['records'] / spent:,.0f}" if costs["records"] and spent else ""
            figures = "{wall:.1f} | {cpu:.1f} | {busiest:.1f} | {workers:.1f} | {tasks}".format_map(costs)
            print(
                f"| {what} | {workers} | {figures} | {costs['read'] / 1e6:,.0f} | {speed} | {costs['memory']:.0f} "
                f"| {costs['files']:.0f} | {costs['said']} |",
                flush=True,
            )


def send(folder: Path, url: str) -> None:
    """Send runs to object storage, compare them there, and print a table."""
    from introspect_cli.publish.send import Sender
    from introspect_cli.store import remote
    from introspect_cli.store.remote import Storage

    counted: Counter[str] = Counter()

    class Counted(Storage):
        """Storage that counts what it is asked for."""

        def entries(self, folder: str = "", *, deep: bool = False) -> dict[str, int] | None:
            counted.update(requests=1, together=1)
            return super().entries(folder, deep=deep)

        def read(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes | StoreError]:
            got = super().read(wanted)
            fetched = sum(len(data) for data in got if isinstance(data, bytes))
            counted.update(requests=len(wanted), together=1, fetched=fetched)
            return got

    remote.Storage = Counted  # type: ignore[misc] # for the readers
    storage = Storage(url)
    storage.system.makedirs(storage.root.partition("/")[0] if url.startswith("s3:") else storage.root, exist_ok=True)
    for name in ("rows", "again", "late", "columns"):
        clock = time.perf_counter()
        Sender(folder / name, f"{url}/{name}").send()
        print(f"{name}: sent in {time.perf_counter() - clock:.1f} s")
    print("| | requests | one after the other | MB | of | s | s on disk | |\n|---|---|---|---|---|---|---|---|")
    for what, (work, names) in WORK.items():
        if work is not _diff or not {"rows", "again", "late", "columns"}.issuperset(names):
            continue
        size = sum(file.stat().st_size for name in names for file in (folder / name).rglob("*") if file.is_file())
        remote.CACHE = remote.BlockCache()
        counted.clear()
        clock = time.perf_counter()
        said, _ = work(*(f"{url}/{name}" for name in names), None)
        took, clock = time.perf_counter() - clock, time.perf_counter()
        assert said == work(*(str(folder / name) for name in names), None)[0]
        print(
            f"| {what} | {counted['requests']} | {counted['together']} | {counted['fetched'] / 1e6:.1f} "
            f"| {size / 1e6:.0f} | {took:.1f} | {time.perf_counter() - clock:.1f} | {said} |"
        )


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "measure", "send", "one"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sites", type=int, default=200)
    parser.add_argument("--lean", action="store_true", help="checksums alone")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--runs", default=",".join(RANKS), help="which of the runs to write")
    parser.add_argument("--what", dest="which", default="", help="which of the work to measure: a part of its name")
    parser.add_argument("--url", default="", help="where runs are sent")
    given = parser.parse_args()
    if given.what == "one":
        print(json.dumps(measured(given.which, given.folder, int(given.workers))))
    elif given.what == "measure":
        measure(given.folder, given.workers.split(","), given.which)
    elif given.what == "send":
        send(given.folder, given.url)
    else:
        for name in given.runs.split(","):
            began = time.perf_counter()
            write_ranks(given.folder / name, name, given.ranks, given.steps, given.sites, lean=given.lean)
            print(f"{name}: written in {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
