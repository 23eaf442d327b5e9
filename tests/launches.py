"""Captures of several processes, started as a launcher starts them, without the launcher's own second of importing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "fixtures" / "ranks" / "train_ranks.py"


def launch(folder, name, world, *words, options=(), script=SCRIPT):
    """Start the ranks of one capture into `folder / name`."""
    port = _free_port()
    processes = []
    for rank in range(world):
        told = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        alone = {} if world == 1 else {key: str(value) for key, value in told.items()}
        command = [sys.executable, "-m", "introspect_cli", "capture", "--force", "-o", name, *options]
        processes.append(
            subprocess.Popen(
                [*command, str(script), *map(str, words)],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **alone},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


def together(folder, world, *words, script):
    """Start a script that captures by itself, once for each rank, and wait; what each printed."""
    port = _free_port()
    told = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(world):
        own = {**told, "RANK": rank, "LOCAL_RANK": rank} if world > 1 else {}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *map(str, words)],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in own.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


def finish(processes, timeout=300):
    """What each rank printed; torch itself may abort at its exit, so that codes say nothing."""
    with ExitStack() as stack:
        for process in processes:
            stack.callback(process.kill)
        return [process.communicate(timeout=timeout)[0] for process in processes]


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
