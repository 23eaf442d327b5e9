"""Captures of several processes, started as a launcher starts them, in forks of one process that has imported torch.

Importing torch and what it has for many ranks takes 4 s; a small training of two ranks takes one.
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

TRAINED = """
import os
import torch, torch.distributed as dist

def steps(rank, count):
    torch.manual_seed(0)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(count):
        optimizer.zero_grad()
        net(torch.full((1, 2), 1.0 + rank)).sum().backward()
        optimizer.step()
        yield step
"""
"""How a script begins whose ranks train a small model, each on a batch of its own: `steps` yields after each."""

DISTRIBUTED = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

SCRIPT = Path(__file__).parents[2] / "fixtures" / "ranks" / "train_ranks.py"

_IMPORTED = """
import torch.distributed.tensor.parallel, torch.distributed.pipelining, torch.distributed.fsdp, torch.distributed.optim
"""


_LATER = ("fsdp2", "hsdp", "gpipe", "1f1b", "interleaved", "tp", "ep")
_IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6)


def lacks(case):
    """Whether this torch is too old for the layout that a case's name begins with.

    Before torch 2.5 DTensor was private, before 2.6 `fully_shard`, and a pipeline stage needed examples of its inputs.
    """
    return _IS_OLD and case.startswith(_LATER)


def needs(*cases):
    """Skip a test of layouts that this torch is too old for."""
    found = [case for case in cases if lacks(case)]
    if found:
        pytest.skip(f"torch {torch.__version__} lacks what the layout needs (DTensor, fully_shard): {', '.join(found)}")


class Process:
    """One forked rank."""

    def __init__(self, folder, argv, env):
        self._out, theirs = socket.socketpair()
        self.said, self.is_open = b"", True
        with theirs, open(os.devnull) as none:
            self._run = _forks().start(argv, env, folder, none.fileno(), theirs.fileno(), theirs.fileno())

    def kill(self):
        self._run.kill()

    def fileno(self):
        return self._out.fileno()

    def read(self):
        """Take what it has printed; False where it has ended: the pipe is closed by its end alone."""
        data = self._out.recv(1 << 16)
        self.said += data
        if not data:
            self.is_open = False
            self._out.close()
        return bool(data)


@functools.cache
def _forks():
    from forks import Forks

    forks = Forks(_IMPORTED)
    atexit.register(forks.close)
    return forks


def _started(folder, world, argv):
    said = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    each = [{**said, "RANK": rank, "LOCAL_RANK": rank} if world > 1 else {} for rank in range(world)]
    argv = [str(word) for word in argv]
    return [Process(folder, argv, {name: str(value) for name, value in item.items()}) for item in each]


def launch(folder, name, world, *words, options=(), script=SCRIPT):
    """Start the ranks of one capture into `folder / name`."""
    argv = ["-m", "introspect_cli", "capture", "--force", "-o", name, *options, script, *words]
    return _started(folder, world, argv)


def together(folder, world, *words, script):
    """Start a script that captures by itself, once for each rank."""
    return _started(folder, world, [script, *words])


def finish(processes, timeout=300, after=60):
    """Wait; what each rank printed.

    torch itself may abort at its exit, or wait there for a rank that has ended, so that codes say nothing, and a rank
    that goes on for long after another's end is ended.
    """
    deadline, ended = time.monotonic() + timeout, False
    with ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        while any(process.is_open for process in processes):
            left = [process for process in processes if process.is_open]
            ready = select.select(left, [], [], max(deadline - time.monotonic(), 0.01))[0]
            for process in ready:
                if not process.read() and not ended:
                    ended, deadline = True, min(deadline, time.monotonic() + after)
            if not ready:
                assert ended, [process.said for process in processes]
                for process in left:
                    process.kill()
                deadline = time.monotonic() + timeout
        return [process.said.decode(errors="replace") for process in processes]


def recorded(folder, started):
    """Wait for launches, by the names of the runs in `folder` that each of them leaves."""
    for name, processes in started.items():
        said = finish(processes)
        assert (folder / name / "manifest.json").exists(), said


def free_port():
    """A port that nobody listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
