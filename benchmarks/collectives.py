"""What a step of two processes costs bare, captured, and captured with collectives.

Blocks of steps run bare, captured and captured with collectives in turn, in the same two processes, and the quickest
step of each counts.

    python benchmarks/collectives.py [--steps 10]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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

results = {}
total = torch.zeros(16)
for layout in ("alone", "calls", "ddp", "fsdp2"):
    net = built(layout)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.randn(64, 256)
    costs = results[layout] = {name: {"cpu": 1e9, "wall": 1e9, "number": 0} for name in modes}
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
                        costs[name]["cpu"] = min(costs[name]["cpu"], taken[0])
                        costs[name]["wall"] = min(costs[name]["wall"], taken[1])
    dist.barrier()
    from introspect_cli.store.read.run import open_run
    with open_run(f"run-{layout}-collectives") as run:
        rank = run.rank(dist.get_rank())
        sites = {(r.site.fqn, r.site.call) for r in rank.records(rank.last_step) if r.site.kind.value == "collective"}
        costs["collectives"]["number"] = len(sites)
    dist.barrier()
print(json.dumps(results), flush=True)
dist.destroy_process_group()
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "steps.py"
        script.write_text(STEPS)
        port = 20000 + os.getpid() % 20000
        processes = []
        for rank in range(2):
            variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **{name: str(value) for name, value in variables.items()},
            }
            command = [sys.executable, str(script), str(steps)]
            processes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    for layout, costs in outputs[0].items():
        bare, number = costs["bare"]["cpu"], costs["collectives"]["number"]
        for mode in ("bare", "captured", "collectives"):
            cost = costs[mode]
            print(
                f"{layout}, {mode}: {cost['cpu'] * 1e3:.2f} ms of CPU a step ({cost['cpu'] / bare:.3f} x bare), "
                f"{cost['wall'] * 1e3:.2f} ms by the clock"
            )
        if number:
            more = (costs["collectives"]["cpu"] - costs["captured"]["cpu"]) / number
            print(f"{layout}: {number} collectives a step, {more * 1e6:.0f} us of CPU for each that is recorded")
    extra = {
        layout: outputs[0][layout]["captured"]["cpu"] - outputs[0][layout]["bare"]["cpu"]
        for layout in ("alone", "calls")
    }
    each = (extra["calls"] - extra["alone"]) / 100
    print(f"captured without collectives, each of 100 a step costs {each * 1e6:.1f} us more than bare")


if __name__ == "__main__":
    main()
