"""Torch's own worker threads, for a kernel call.

The problem: between torch's operations its OpenMP workers spin on all cores, waiting for the next one, and any other
thread that wants a core has to wait for its turn, which takes longer than the work. The way: hand the work to those
workers, through the runtime that torch has loaded, as torch itself does for each operation: `GOMP_parallel`, which
GNU's runtime and its compatible ones offer. The number of threads is passed with each call and set nowhere.

A call would start the workers where there are none, and the script would feel it: a child that it forks waits for
ever for workers that only its parent has, and workers started before `torch.set_flush_denormal` compute with
subnormal numbers where those started after it would not. So they are called only in a thread in which an operation
of the script's own has called as many; not in a forked child; and elsewhere, as where torch uses another runtime,
`threads` helps. Nor does an operation of torch that we need for a large tensor run in a thread without them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_START = os.getpid()
"""The process that imported this module: any other is a fork of it."""

_GRAIN = 1 << 15
"""Elements from which on torch's operations may call the workers: `at::internal::GRAIN_SIZE`."""
_SURE = 2 * _GRAIN
"""Elements from which on an operation on a whole tensor surely calls them."""

_SCRIPT = threading.local()
"""`threads`: how many the script itself has called, the calling one included, in this thread of its own."""


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


def computed(tensors: Iterable[torch.Tensor]) -> None:
    """Hear from the script's thread that operations of its own went over all elements of these tensors."""
    threads = torch.get_num_threads()
    if getattr(_SCRIPT, "threads", 0) == threads:
        return
    for tensor in tensors:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
        if plain and tensor.numel() >= _SURE:
            _SCRIPT.threads = threads
            return


def usable(threads: int) -> bool:
    """Whether so many workers may be called: the script has them in this thread, which is not a forked child's."""
    return getattr(_SCRIPT, "threads", 0) == threads and os.getpid() == _START


def starts(tensor: torch.Tensor) -> bool:
    """Whether operations of ours on a tensor could start workers in this thread that the script has not called."""
    if not tensor.is_cpu or tensor.numel() < _GRAIN:
        return False
    threads = torch.get_num_threads()
    return threads > 1 and not usable(threads)


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
