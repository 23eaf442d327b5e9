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
large tensor run in a thread without them: `Stand` runs it elsewhere.

Whether sharing pays at the moment, the kernels know (`pace.cpp`).
"""

from __future__ import annotations

import _thread
import ctypes
import os
import threading
from _queue import SimpleQueue
from pathlib import Path
from types import BuiltinFunctionType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_START = os.getpid()
"""The process that imported this module: any other is a fork of it."""

_GRAIN = 1 << 15
"""Elements from which on torch's operations may call the workers: `at::internal::GRAIN_SIZE`."""
SHARED_OUT = 2 * _GRAIN
"""Elements from which on an operation on a whole tensor surely calls them."""

SCRIPT = threading.local()
"""`threads`: how many the script itself has called, the calling one included, in this thread of its own."""


def find_workers() -> tuple[int, int] | None:
    """Addresses of `GOMP_parallel` and `omp_get_thread_num` in torch's runtime; None if not found.

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


def note_computation(tensors: Iterable[torch.Tensor]) -> None:
    """Note that the script ran operations over these tensors, so that torch's workers exist in this thread."""
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
    """Whether the script has called as many workers in this thread, and this is no forked child."""
    return getattr(SCRIPT, "threads", 0) == threads and os.getpid() == _START


def would_start_workers(tensor: torch.Tensor) -> bool:
    """Whether an operation on the tensor could start workers that the script has not started."""
    if not tensor.is_cpu or tensor.numel() < _GRAIN:
        return False
    threads = torch.get_num_threads()
    return threads > 1 and not may_call_workers(threads)


def _runtime() -> str | None:
    """Path of the one OpenMP runtime in this process, torch's own if there are several."""
    with Path("/proc/self/maps").open(encoding="utf-8") as maps:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in maps}
    names = ("libgomp", "libiomp5", "libomp")
    paths = sorted(path for path in mapped if Path(path).name.startswith(names) and ".so" in path)
    own = [path for path in paths if Path(path).parent == Path(torch.__file__).parent / "lib"]
    if len(own) == 1:
        return own[0]
    return paths[0] if len(paths) == 1 else None


def _start(life: Callable[..., None], *args: object) -> None:
    """Start a thread.

    Raises:
        RuntimeError: no more are to be had, or the interpreter is going down, or what python calls threads are none:
            gevent's take turns with the one that waits for them.
    """
    start = _thread.start_new_thread
    if not isinstance(start, BuiltinFunctionType):
        raise RuntimeError("threads have been replaced")  # noqa: TRY004 - as python says that there are none
    start(life, args)


def _answer(calls: SimpleQueue[Callable[[], object] | None], answers: SimpleQueue[BaseException | None]) -> None:
    """Run calls from a queue until None, and answer each with its exception or None."""
    while True:
        call = calls.get()
        if call is None:
            answers.put(None)
            return
        try:
            call()
        except BaseException as error:  # raised again where the call came from
            answers.put(error)
        else:
            answers.put(None)
        del call


class Stand:
    """A helper thread that runs a call while its caller waits; one caller at a time."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._answers: SimpleQueue[BaseException | None] = SimpleQueue()
        self._on = False

    def call(self, call: Callable[[], object]) -> None:
        """Run a call in the thread and raise what it raises; in this thread if none can be started."""
        if not self._on:
            try:
                _start(_answer, self._calls, self._answers)
            except RuntimeError:  # no more threads to be had, or the interpreter is going down
                call()
                return
            self._on = True
        self._calls.put(call)
        try:
            error = self._answers.get()
        except BaseException:  # a signal's handler raised; the call still reads what is the caller's
            self._answers.get()
            raise
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame

    def close(self) -> None:
        """End the thread, and wait for it."""
        if self._on:
            self._calls.put(None)
            self._answers.get()
            self._on = False
