"""Captures of several processes, started as a launcher starts them, in forks of one process that has imported torch.

Importing torch and what it has for many ranks takes 4 s; a small training of two ranks takes one.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "fixtures" / "ranks" / "train_ranks.py"
_BENCHMARKS = str(Path(__file__).resolve().parent.parent / "benchmarks")

_SERVER = """
import gc, json, os, signal, socket, sys
import numpy, torch, torch._dynamo, torch.distributed.tensor.parallel, torch.distributed.pipelining
import torch.distributed.fsdp, torch.distributed.optim
import introspect_cli.cli, introspect_cli.commands.capture
sys.path.insert(0, sys.argv[2])
from forks import become
del sys.path[0], sys.modules["forks"]  # else it passes for a source of the script's
server = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
gc.freeze()  # a recording looks through all objects for optimizers; there is none among these
while True:
    data, (out, *_), _, _ = socket.recv_fds(server, 1 << 16, 1)
    told = json.loads(data)
    child = os.fork()
    if child == 0:
        server.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        become(out=out, err=out, **told)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.close(out)
    server.send(str(child).encode())
"""


class Process:
    """One forked rank."""

    def __init__(self, pid, out):
        self._pid, self._out = pid, out

    def kill(self):
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def output(self, deadline):
        """What it printed, when it has ended; the pipe is closed by its end alone."""
        told = b""
        with self._out:
            while True:
                self._out.settimeout(max(deadline - time.monotonic(), 0.01))
                data = self._out.recv(1 << 16)
                if not data:
                    return told.decode(errors="replace")
                told += data


@functools.cache
def _server():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(theirs.fileno()), _BENCHMARKS],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    atexit.register(lambda: (server.kill(), server.wait()))
    return ours


def _start(folder, argv, env, *, is_capture):
    ours, theirs = socket.socketpair()
    with theirs:
        told = {"argv": argv, "env": env, "cwd": str(folder), "is_capture": is_capture}
        socket.send_fds(_server(), [json.dumps(told).encode()], [theirs.fileno()])
    return Process(int(_server().recv(64)), ours)


def _started(folder, world, argv, *, is_capture):
    told = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    each = [{**told, "RANK": rank, "LOCAL_RANK": rank} if world > 1 else {} for rank in range(world)]
    argv = [str(word) for word in argv]
    return [
        _start(folder, argv, {name: str(value) for name, value in own.items()}, is_capture=is_capture) for own in each
    ]


def launch(folder, name, world, *words, options=(), script=SCRIPT):
    """Start the ranks of one capture into `folder / name`."""
    argv = ["introspect", "capture", "--force", "-o", name, *options, script, *words]
    return _started(folder, world, argv, is_capture=True)


def together(folder, world, *words, script):
    """Start a script that captures by itself, once for each rank."""
    return _started(folder, world, [script, *words], is_capture=False)


def finish(processes, timeout=300):
    """Wait; what each rank printed. torch itself may abort at its exit, so that codes say nothing."""
    deadline = time.monotonic() + timeout
    with ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        return [process.output(deadline) for process in processes]


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
