"""Collectives on record: which, with what and from where; and what `check` and `diff` make of one that is not right."""

from __future__ import annotations

import os
import time

import pytest
import torch
from artefacts import decided
from launches import DISTRIBUTED, SCRIPT, finish, launch, together

from introspect_cli.health.check import check
from introspect_cli.records import Kind
from introspect_cli.store.run import open_run
from introspect_cli.store.run_writer import IN_FLIGHT
from introspect_cli.store.verify import verify_run

pytestmark = [pytest.mark.launch, DISTRIBUTED]

FAULTS = SCRIPT.parent / "faults.py"
LINES = FAULTS.read_text().splitlines()
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def line_of(function):
    """Where the script's helper calls torch."""
    return f"faults.py:{LINES.index(f'def {function}(tensor: torch.Tensor) -> None:') + 2}"


def collectives(run, rank=0, step=0):
    return [found for found in run.rank(rank).records(step) if found.site.kind is Kind.COLLECTIVE]


def test_each_collective_is_on_record_with_what_goes_in():
    (path,) = decided("faults", "collectives/calls-none~collectives")
    with open_run(path) as run:
        by_rank = [collectives(run, rank) for rank in (0, 1)]
        assert [(r.site.fqn, r.site.call, r.site.path) for r in by_rank[0]] == [
            *(("ranks 0,1", call, path) for call in (0, 1) for path in ("", ".in[0]")),
            *(("messages of ranks 0,1", 0, f"send to rank 1{path}") for path in ("", ".in[0]")),
        ]
        assert by_rank[0][0].summary.text == "'all_reduce sum of float32 [4]'"
        assert (by_rank[0][0].info.source, by_rank[0][0].info.op) == (line_of("first"), "all_reduce")
        assert [records[1].summary.stats["mean"] for records in by_rank] == [1.0, 2.0]
        assert by_rank[1][-1].site.path == "recv from rank 0"
    assert verify_run(path).sound
    assert not list(path.glob(f"rank*/{IN_FLIGHT}"))


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        ("2/ddp-none", "all_reduce sum of float32 [668]"),
        ("collectives/fsdp2-none", "reduce_scatter avg of float32 [668]"),
        ("collectives/fsdp2-none", "all_gather of float32 [334]"),
        ("collectives/tpsp-none", "reduce_scatter sum of float32"),
        ("collectives/gpipe-none", "send to rank 1 of float32 [2, 4, 16]"),
    ],
)
def test_what_libraries_send_is_seen_too(run, wanted):
    with open_run(*decided("faults", f"{run}~collectives")) as opened:
        found = {r.summary.text.strip("'"): r.info.source for r in collectives(opened) if r.summary.text}
    if TORCH < (2, 6) and "ddp" in run:  # its reducer calls from C++, and python cannot read the reduction
        wanted = wanted.replace(" sum", "")
    source = next((source for text, source in found.items() if text.startswith(wanted)), None)
    assert source is not None, found
    assert ".py:" in source


def test_a_hang_is_readable_and_both_lines_are_named(tmp_path):
    processes = together(tmp_path, 2, tmp_path, "calls-hang~collectives", script=FAULTS)
    run = tmp_path / "calls-hang~collectives"
    deadline = time.monotonic() + 600
    try:
        while not all(_began(run / f"rank{rank}" / IN_FLIGHT, 3) for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
        finish(processes)
    with open_run(run) as opened:
        assert opened.last_step == 0
        found = {finding.rule: finding for finding in check(opened).findings}
    assert "Ranks 0, 1 of 2 were cut off after step 0" in found["lost-rank"].evidence
    evidence = found["collectives"].evidence
    assert "collective 2 of ranks 0,1 in step 1, which did not end, is all_reduce sum of float32 [2, 2] at" in evidence
    assert "on rank 0 and broadcast from rank 0 of float32 [2, 2] at faults.py:" in evidence


def _began(path, number):
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return False
    return sum(line.startswith("1\t") for line in lines) >= number


HOLDS = """
import gc, time, weakref
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    total, part = torch.ones(4), torch.zeros(4)
    works = [dist.all_reduce(total, async_op=True), dist.reduce_scatter_tensor(part, torch.ones(4), async_op=True)]
    print([weakref.getweakrefcount(own) for own in (total, part)], len(gc.get_referrers(total)))
    works.pop().wait()
    while not works[0].is_completed():
        pass
    del works
    for own in (total, part):
        for _ in range(100):  # a thread of the backend lets go a little later
            try:
                torch.utils.swap_tensors(own, torch.full((4,), 7.0))
                break
            except RuntimeError as error:
                time.sleep(0.005)
                told = str(error)
        else:
            print(told)
        print(own.tolist())
    gone = weakref.ref(total)
    del total, part, own
    print(gone())
    other = torch.ones(4)
    dist.all_reduce(other)
    net(other.reshape(2, 2)).sum().backward()
    optimizer.step()
"""


def test_no_tensor_is_held_or_referred_to_while_a_collective_is_under_way(introspect, tmp_path):
    (tmp_path / "train.py").write_text(HOLDS)
    launched = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}  # the other rank never comes
    done = introspect("capture", "-q", "-o", "run", "--record", "default,collective", "train.py", env=launched)
    assert done.stdout.splitlines() == [*["[0, 0] 1", *["[7.0, 7.0, 7.0, 7.0]"] * 2, "None"] * 2], done.stderr


FORKS = f"""
import os
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
if not (child := os.fork()):
    os._exit(0)
os.waitpid(child, 0)
print([place.read_text().count("all_reduce") for place in Path("run").rglob("{IN_FLIGHT}")])
"""


def test_a_forked_child_leaves_what_is_under_way_in_its_place(introspect, tmp_path):
    (tmp_path / "train.py").write_text(FORKS)
    launched = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}  # the other rank never comes
    done = introspect("capture", "-q", "-o", "run", "--record", "default,collective", "train.py", env=launched)
    assert done.stdout == "[1]\n", done.stderr
    assert not list(tmp_path.rglob(IN_FLIGHT))


RECORDED = ("--record", "default,collective")
COMPILED = """
import os, sys
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=int(os.environ.get("RANK", 0)), world_size=2, store=FakeStore())
net = torch.nn.Linear(2, 2)
reduced = lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) * 2
if "compiled" in sys.argv:
    reduced = torch.compile(reduced, backend="eager")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(1, 2)).sum().backward()
reduced(net.bias.grad)
optimizer.step()
"""


@pytest.mark.parametrize("word", ["plain", "compiled"])
def test_collectives_that_a_compiler_hides_are_said_to_be_unseen(tmp_path, word):
    script = tmp_path / "train.py"
    script.write_text(COMPILED)
    said = finish(launch(tmp_path, "run", 2, word, options=RECORDED, script=script))
    with open_run(tmp_path / "run") as run:
        kinds = [record.site.kind.value for record in run.rank(0).records(0)]
        unseen = " ".join(run.manifest["not_observed"])
    assert word == "compiled" or "collective" in kinds, said  # older compilers call the function that we replaced
    assert ("collectives inside that, if any, are not recorded" in unseen) == (word == "compiled")


def test_collectives_of_ranks_that_no_launcher_reported_are_said_to_be_unseen(tmp_path, introspect):
    (tmp_path / "train.py").write_text(COMPILED)
    done = introspect("capture", *RECORDED, "-o", "run", "train.py")
    assert "collectives are not recorded" in done.stderr
