"""Torch's own worker threads, for a kernel call.

The problem: between torch's operations its OpenMP workers spin on all cores, waiting for the next one, and any other
thread that wants a core has to wait for its turn, which takes longer than the work. The way: hand the work to those
workers, through the runtime that torch has loaded, as torch itself does for each operation: `GOMP_parallel`, which
GNU's runtime and its compatible ones offer. The number of threads is passed with each call and set nowhere. Not in a
forked child, where the workers do not exist and the runtime waits for them for ever; there, and where torch uses
another runtime, `threads` helps.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

_START = os.getpid()
"""The process that imported this module: any other is a fork of it."""


def workers() -> tuple[int, int] | None:
    """Addresses of two functions of the runtime that torch uses; None if they cannot be had.

    `GOMP_parallel(function, data, threads, flags)` calls the function in each thread with `data`, and returns when all
    are through; `omp_get_thread_num()` is 0 in the calling thread.
    """
    try:
        runtime = _runtime()
        if runtime is None:
            return None
        library = ctypes.CDLL(runtime)
        parallel, number = (
            ctypes.cast(function, ctypes.c_void_p).value
            for function in (library.GOMP_parallel, library.omp_get_thread_num)
        )
    except (OSError, AttributeError):
        return None
    return (parallel, number) if parallel and number else None


def usable() -> bool:
    """Whether the workers may be called: not in a forked child."""
    return os.getpid() == _START


def _runtime() -> str | None:
    """Path of the one OpenMP runtime in this process, torch's own if there are several."""
    with Path("/proc/self/maps").open(encoding="utf-8") as maps:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in maps}
    names = ("libgomp", "libiomp5", "libomp")
    found = sorted(path for path in mapped if Path(path).name.startswith(names) and ".so" in path)
    own = [path for path in found if Path(path).parent == Path(torch.__file__).parent / "lib"]
    if len(own) == 1:
        return own[0]
    return found[0] if len(found) == 1 else None
