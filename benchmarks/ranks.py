"""Runs of many ranks: what reading them as one costs, and what is left when one rank is killed.

    python benchmarks/ranks.py merge --ranks 64 --steps 120   # two sharded runs of 2,000 sites a rank
    python benchmarks/ranks.py equal --ranks 64 --steps 1000  # two runs of one layout that are equal, or differ late
    python benchmarks/ranks.py collectives                    # what recording each collective of DDP costs a step
    python benchmarks/ranks.py kills --kills 30               # one of two ranks, when it may be

The first writes stores with the store's own writer, each rank a shard of every parameter, and compares two layouts of
them, so that every step of every rank is read and added up: all of them, half and then those that are counted after
the first divergence, and these alone. 120 steps take 5 GB of disk. The second compares ranks one by one, with checksums
alone: equal steps are not opened, so that 50 sites tell the same as 2,000. The third runs blocks of steps bare,
captured and captured with collectives in turn, in the same two processes, and takes the quickest step of each. The last
reads the run after each kill: every step that a rank said it had ended must be there, the other rank must be whole, and
the reader must say who was cut off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from introspect_cli.health.check import check
from introspect_cli.records import Kind, Layout, Part, Phase, Site, SiteInfo
from introspect_cli.statistics import STATISTICS
from introspect_cli.store.batch import StepBatch
from introspect_cli.store.launch import Launch
from introspect_cli.store.reader import RunState, open_run
from introspect_cli.store.verify import verify_run
from introspect_cli.store.writer import StoreWriter

COMPARE = """
import json, resource, sys, time
from introspect_cli.compare.diff import compare_runs
from introspect_cli.compare.options import DiffOptions
from introspect_cli.store.reader import open_run
began, clock = time.process_time(), time.perf_counter()
with open_run(sys.argv[1]) as a, open_run(sys.argv[2]) as b:
    result = compare_runs(a, b, DiffOptions())
print(json.dumps({"seconds": time.process_time() - began, "wall": time.perf_counter() - clock,
    "compared": result.counts.steps_compared, "verdict": result.verdict.value,
    "records": result.counts.records, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""
SCRIPT = """
import os, sys, torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
out = open(f"{sys.argv[1]}.{dist.get_rank()}", "w")
for step in range(100000):
    optimizer.zero_grad()
    net(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    out.write(f"{step}\\n")
    out.flush()
"""

STEPS = """
import contextlib, json, sys, time, torch
import torch.distributed as dist
from introspect_cli import recording
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
rounds, steps = 7, int(sys.argv[1])
quiet = {"env": False, "packages": False, "source": False, "force": True}
modes = {"bare": None, "captured": {}, "collectives": {"record": ["default", "collective"]}}

def layer():
    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU())

def built(layout):
    torch.manual_seed(0)
    if layout in ("alone", "calls"):
        return torch.nn.Linear(256, 256)
    net = torch.nn.Sequential(*[layer() for _ in range(12)])
    if layout == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.25)
    mesh = init_device_mesh("cpu", (2,))
    for part in (*net, net):
        fully_shard(part, mesh=mesh)
    return net

found = {}
total = torch.zeros(16)
for layout in ("alone", "calls", "ddp", "fsdp2"):
    net = built(layout)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.randn(64, 256)
    own = found[layout] = {name: {"cpu": 1e9, "wall": 1e9, "number": 0} for name in modes}
    for turn in range(rounds):
        for name, options in modes.items():
            dist.barrier()
            path = f"run-{layout}-{name}"
            around = contextlib.nullcontext() if options is None else recording(None, path, **quiet, **options)
            with around:
                for step in range(steps):
                    began = time.process_time(), time.perf_counter()
                    optimizer.zero_grad()
                    net(x).square().mean().backward()
                    for _ in range(100 if layout == "calls" else 0):
                        dist.all_reduce(total)
                    optimizer.step()
                    taken = time.process_time() - began[0], time.perf_counter() - began[1]
                    if step > 2:
                        own[name]["cpu"] = min(own[name]["cpu"], taken[0])
                        own[name]["wall"] = min(own[name]["wall"], taken[1])
    dist.barrier()
    from introspect_cli.store.reader import open_run
    with open_run(f"run-{layout}-collectives") as run:
        rank = run.rank(dist.get_rank())
        sites = {(r.site.fqn, r.site.call) for r in rank.records(rank.last_step) if r.site.kind.value == "collective"}
        own["collectives"]["number"] = len(sites)
    dist.barrier()
print(json.dumps(found), flush=True)
dist.destroy_process_group()
"""


def build(
    path: Path,
    ranks: int,
    steps: int,
    sites: int,
    *,
    rows: bool,
    lean: bool = False,
    late: bool = False,
    apart: int | None = None,
) -> None:
    """Write a run in which each rank has its share of every parameter: of the rows, or of the columns.

    Args:
        path: where.
        ranks: how many.
        steps: how many.
        sites: of each rank.
        rows: whether ranks have rows.
        lean: whether checksums alone are kept.
        late: whether the last step has other values.
        apart: the step from which on sketches are others than those of a run without it; None for none.
    """
    generator = np.random.default_rng(rows)  # other bits in each run, so that every step is read
    for rank in range(ranks):
        store = StoreWriter.create(path, launch=Launch("0" * 32, "0" * 32, rank, ranks))
        store.write_manifest({"status": "running", "rank": rank, "world_size": ranks})
        writer = store.rank(rank, stats=not lean, sketch=not lean, sorted_stats=())
        names = [f"Model.blocks.{number // 10}.layer{number % 10}.weight" for number in range(sites)]
        ids = [writer.site(Site(Phase.OPTIMIZER, Kind.PARAM, name), SiteInfo("Linear")) for name in names]
        own, whole = ((rank * 8, 8),), ((0, 512),)
        part = Part((own, whole) if rows else (whole, own))
        shape = (8 * ranks, 512) if rows else (512, 8 * ranks)
        layout = writer.layout(Layout(shape, "float32", "cpu", "contiguous", part))
        batch = StepBatch(
            site=np.array(ids, np.uint32),
            sequence=np.arange(sites, dtype=np.uint32),
            layout=np.full(sites, layout, np.uint32),
            status=np.zeros(sites, np.uint8),
            checksum=generator.integers(1, 1 << 62, sites, dtype=np.uint64),
            counts={name: np.zeros(sites, np.int64) for name, kept in STATISTICS.items() if kept.type == "<i8"},
            floats={name: np.ones(sites) for name, kept in STATISTICS.items() if kept.type != "<i8"},
            sketch=np.ones((sites, 16), np.float32),
            text=[""] * sites,
        )
        if lean:
            batch = replace(batch, counts={}, floats={}, sketch=None)
        for step in range(steps):
            other = late and step == steps - 1
            own = batch if apart is None or step < apart else replace(batch, sketch=-np.ones((sites, 16), np.float32))
            writer.append(step, replace(own, checksum=batch.checksum + np.uint64(step + other)))
        store.write_manifest({"status": "complete", "rank": rank, "world_size": ranks, "steps": steps})
        store.close()


def merge(ranks: int, steps: int, sites: int) -> None:
    """Print what comparing two layouts of so many ranks costs: where all, half or none of the steps agree."""
    cases = (
        ("all agree within the tolerance", steps // 2, None),
        ("all agree within the tolerance", steps, None),
        ("they diverge in the middle", steps, steps // 2),
        ("they diverge at once", steps, 0),
    )
    for what, number, apart in cases:
        with tempfile.TemporaryDirectory() as folder:
            runs = [Path(folder) / name for name in ("rows", "columns")]
            for path in runs:
                whole = path.name == "rows"
                build(path, ranks, number, sites, rows=whole, apart=None if whole else apart)
            command = [sys.executable, "-c", COMPARE, *map(str, runs)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"{ranks} ranks x {number} steps x {sites:,} sites, {what}: {found['seconds']:.1f} s of CPU, "
            f"{found['wall']:.1f} s by the clock, {found['compared']} steps compared "
            f"({found['seconds'] / found['compared']:.3f} s each), {found['memory']:.0f} MB, {found['verdict']}",
            flush=True,
        )


def equal(ranks: int, steps: int, sites: int) -> None:
    """Print what comparing two equal runs of one layout costs, and two of which the last step differs."""
    with tempfile.TemporaryDirectory() as folder:
        one, two, other = (Path(folder) / name for name in ("one", "two", "other"))
        for path in (one, two, other):
            build(path, ranks, steps, sites, rows=True, lean=True, late=path == other)
        for path, what in ((two, "equal"), (other, "the last step differs")):
            command = [sys.executable, "-c", COMPARE, str(one), str(path)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(
                f"{ranks} ranks x {steps} steps x {sites:,} sites, {what}: {found['seconds']:.2f} s of CPU, "
                f"{found['memory']:.0f} MB, {found['verdict']}"
            )


def collectives(steps: int) -> None:
    """Print what a step over two processes costs bare, captured, and captured with collectives."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "steps.py"
        script.write_text(STEPS)
        port = 20000 + os.getpid() % 20000
        processes = []
        for rank in range(2):
            variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            own = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}
            command = [sys.executable, str(script), str(steps)]
            processes.append(subprocess.Popen(command, cwd=folder, env=own, stdout=subprocess.PIPE, text=True))
        told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    for layout, found in told[0].items():
        bare, number = found["bare"]["cpu"], found["collectives"]["number"]
        for mode in ("bare", "captured", "collectives"):
            own = found[mode]
            print(
                f"{layout}, {mode}: {own['cpu'] * 1e3:.2f} ms of CPU a step ({own['cpu'] / bare:.3f} x bare), "
                f"{own['wall'] * 1e3:.2f} ms by the clock"
            )
        if number:
            more = (found["collectives"]["cpu"] - found["captured"]["cpu"]) / number
            print(f"{layout}: {number} collectives a step, {more * 1e6:.0f} us of CPU for each that is recorded")
    extra = {
        layout: told[0][layout]["captured"]["cpu"] - told[0][layout]["bare"]["cpu"] for layout in ("alone", "calls")
    }
    each = (extra["calls"] - extra["alone"]) / 100
    print(f"captured without collectives, each of 100 a step costs {each * 1e6:.1f} us more than bare")


def killed(folder: Path, number: int, source: random.Random) -> list[str]:
    """Kill one of two ranks at a random instant; what is wrong with what is left."""
    script, port = folder / "train.py", 20000 + source.randrange(20000)
    script.write_text(SCRIPT)
    told = folder / f"told{number}"
    processes = []
    for rank in range(2):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}
        command = [sys.executable, "-m", "introspect_cli", "capture", "--no-packages", "-o", f"run{number}"]
        command += [str(script), str(told)]
        sink = subprocess.DEVNULL
        processes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=sink, stderr=sink))
    first = Path(f"{told}.0")
    while not (first.exists() and first.read_text()):
        time.sleep(0.01)
    time.sleep(source.random())
    victim = source.randrange(2)
    processes[victim].send_signal(signal.SIGKILL)
    processes[victim].wait()
    other = processes[1 - victim]
    try:
        other.wait(5)
    except subprocess.TimeoutExpired:
        other.terminate()
        other.wait()
    wrong = []
    with open_run(folder / f"run{number}") as run:
        for rank in range(2):
            said = len(Path(f"{told}.{rank}").read_text().splitlines())
            kept = len(run.rank(rank))
            if not said <= kept <= said + 2:  # a step is written before it is told; one that broke off may follow
                wrong.append(f"rank {rank} told of {said} steps, {kept} are there")
        if run.state is not RunState.INTERRUPTED:
            wrong.append(f"the run is called {run.state.value}")
        if not any(
            f"ank {victim} of 2 was cut off" in text or "anks 0, 1 of 2 were cut" in text for text in run.endings
        ):
            wrong.append(f"nobody says that rank {victim} was cut off: {run.endings}")
        if "lost-rank" not in {finding.rule for finding in check(run).findings}:
            wrong.append("check does not find it")
    if not verify_run(folder / f"run{number}").sound:
        wrong.append("verify finds damage")
    return wrong


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("merge", "equal", "collectives", "kills"))
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sites", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.what == "merge":
        merge(options.ranks, options.steps, options.sites)
        return
    if options.what == "equal":
        equal(options.ranks, options.steps, options.sites)
        return
    if options.what == "collectives":
        collectives(options.steps)
        return
    source = random.Random(options.seed)
    sound = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.kills):
            wrong = killed(Path(folder), number, source)
            sound += not wrong
            if wrong:
                print(f"kill {number}: {'; '.join(wrong)}")
    print(f"{sound} of {options.kills} kills left a run that is whole and says who was cut off")
    sys.exit(sound != options.kills)


if __name__ == "__main__":
    main()
