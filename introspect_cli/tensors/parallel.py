"""Threads that share the work on large tensors, and when to use them.

A large tensor wants all cores for a fraction of a millisecond. Between torch's operations its OpenMP workers spin on
all cores, waiting for the next one, and any other thread that wants a core waits for its turn longer than the work
takes. So the work goes to those workers, through the runtime that torch has loaded, as torch itself does for each
operation: `GOMP_parallel`, which GNU's runtime and its compatible ones offer. The number of threads is passed with each
call and set nowhere.

A call would start the workers where there are none, and the script would feel it: a child that it forks waits for
ever for workers that only its parent has, and workers started before `torch.set_flush_denormal` compute with
subnormal numbers where those started after it would not. So they are called only in a thread in which an operation
of the script's own has called as many, and never in a forked child. Nor does an operation of torch that we need for a
large tensor call any in a thread without them: `single_threaded` says for that long that the thread has no others.

Whether sharing pays at the moment, the kernels know (`pace.cpp`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_START = os.getpid()
"""The process that imported this module: any other is a fork of it."""

_GRAIN = 1 << 15
"""Elements from which on torch's operations may call the workers: `at::internal::GRAIN_SIZE`."""
SHARED_OUT = 2 * _GRAIN
"""Elements from which on an operation on a whole tensor surely calls them."""

SCRIPT = threading.local()
"""`threads`: how many the script itself has called, the calling one included, in this thread of its own."""


@functools.cache
def _openmp_library() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded, cached; None where it is not found for certain."""
    try:
        path = _runtime_path()
        return None if path is None else ctypes.CDLL(path)
    except OSError:
        return None


def find_workers() -> tuple[int, int] | None:
    """Addresses of `GOMP_parallel` and `omp_get_thread_num` in torch's runtime; None if either is not found.

    `GOMP_parallel(function, data, threads, flags)` calls the function in each thread with `data`, and returns when all
    are through; `omp_get_thread_num()` is 0 in the calling thread.
    """
    try:
        library: Any = _openmp_library()
        parallel, number = (
            ctypes.cast(function, ctypes.c_void_p).value
            for function in (library.GOMP_parallel, library.omp_get_thread_num)
        )
    except AttributeError:
        return None
    return (parallel, number) if parallel and number else None


@contextlib.contextmanager
def single_threaded(tensor: torch.Tensor) -> Iterator[None]:
    """Have torch's operations inside the `with` start no threads that the script itself has not started.

    Sets the number of threads of OpenMP in this thread to 1 meanwhile, where the tensor is in CPU memory and large
    enough for several. Torch reports the same number as before.
    """
    set_threads = getattr(_openmp_library(), "omp_set_num_threads", None)
    threads = torch.get_num_threads()
    if not tensor.is_cpu or tensor.numel() < _GRAIN or set_threads is None or threads == 1 or may_call_workers(threads):
        yield
        return
    set_threads(1)
    try:
        yield
    finally:
        set_threads(threads)


def note_computation(tensors: Iterable[torch.Tensor]) -> None:
    """Note that the script itself ran operations over these tensors: sets `SCRIPT.threads` of the calling thread.

    It becomes torch's number of threads where that is 1, or where any of the tensors is so large that an operation on
    it called them all (at least `SHARED_OUT` elements, plain, strided, in CPU memory). Else it stays.
    """
    threads = torch.get_num_threads()
    if threads == 1 or getattr(SCRIPT, "threads", 0) == threads:
        SCRIPT.threads = threads
        return
    for tensor in tensors:
        plain = type(tensor) is torch.Tensor and tensor.numel() >= SHARED_OUT and tensor.layout is torch.strided
        if plain and tensor.device.type == "cpu":
            SCRIPT.threads = threads
            return


def may_call_workers(threads: int) -> bool:
    """Whether torch's threads may be called without starting any: the script has called as many in this thread itself.

    False in a forked child.

    Args:
        threads: how many are to be called, the calling thread included.
    """
    return getattr(SCRIPT, "threads", 0) == threads and os.getpid() == _START


def _runtime_path() -> str | None:
    """Path of the OpenMP runtime in this process: the one beside torch's libraries, else the only one.

    Returns:
        None where there is none, or several and not exactly one beside torch's.

    Raises:
        OSError: /proc/self/maps cannot be read, as outside Linux.
    """
    with Path("/proc/self/maps").open(encoding="utf-8") as maps:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in maps}
    names = ("libgomp", "libiomp5", "libomp")
    paths = sorted(path for path in mapped if Path(path).name.startswith(names) and ".so" in path)
    own = [path for path in paths if Path(path).parent == Path(torch.__file__).parent / "lib"]
    if len(own) == 1:
        return own[0]
    return paths[0] if len(paths) == 1 else None
