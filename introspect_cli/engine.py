"""Where work on many ranks runs: here, in a pool of processes, or on a Dask cluster that somebody has.

Work is a function and many small tasks, which name runs by their paths and say which steps or ranks of them; results
come in the order of the tasks. Scheduling, retries and transport are the engine's: nothing of them is
here. Each worker has the runs on a disk, or at an address, that it can read by the same name.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from introspect_cli.errors import StoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

Task = TypeVar("Task")
Result = TypeVar("Result")

HERE = "here"
_PROCESSES = re.compile(r"processes:([1-9]\d{0,3})")
_PATIENCE = "10s"


class Engine:
    """Runs work in this process."""

    @property
    def elsewhere(self) -> Callable[..., Iterator[Any]] | None:
        """The method `run` where work runs in other processes; None where it runs in this one."""
        return None if type(self) is Engine else self.run

    def run(self, work: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """The result of `work` for each task, in the order of the tasks; here each is worked out when it is asked for.

        Raises:
            StoreError: a task could not read what it was to read, or its worker was killed.
        """
        return map(work, tasks)

    def __enter__(self) -> Self:
        """Connect with what runs the tasks; nothing to do for this process."""
        return self

    def __exit__(self, *_: object) -> None:
        """End or leave what runs the tasks; nothing to do for this process."""


def engine_of(text: str) -> Engine:
    """The engine for `here`, `processes:N` (N from 1 to 9999) or `dask:ADDRESS`; nothing is started or connected yet.

    Raises:
        UsageError: the text is none of these.
    """
    match = _PROCESSES.fullmatch(text)
    if text == HERE:
        return Engine()
    if match:
        return Processes(int(match[1]))
    if text.startswith("dask:") and text != "dask:":
        return Dask(text.removeprefix("dask:"))
    raise UsageError(f"there is no engine {text!r}: here, processes:N, or dask:ADDRESS, such as dask:tcp://host:8786")


def _results(done: Iterator[Any], killed: type[Exception], why: Callable[[Exception], str]) -> Iterator[Any]:
    """Yield what `done` yields; StoreError, with a reason, where what worked on it was killed."""
    try:
        yield from done
    except killed as error:
        raise StoreError(why(error)) from None


class Processes(Engine):
    """A pool of processes on this machine, started by the first task."""

    def __init__(self, number: int) -> None:
        """Prepare a pool of `number` processes; the first task starts them."""
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        self._pool = ProcessPoolExecutor(number, mp_context=get_context("spawn"))

    def run(self, work: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Submit all tasks to the pool now; the iterator waits for each result, in the order of the tasks."""
        from concurrent.futures.process import BrokenProcessPool

        why = "a process of the pool was killed, by lack of memory perhaps: give --engine fewer processes"
        return _results(self._pool.map(work, tasks), BrokenProcessPool, lambda _: why)

    def __exit__(self, *_: object) -> None:
        """Cancel tasks that did not begin, wait for those that did, and end the processes."""
        self._pool.shutdown(cancel_futures=True)


class Dask(Engine):
    """A cluster of Dask, by the address of its scheduler."""

    def __init__(self, address: str) -> None:
        """Keep the scheduler's address; `__enter__` connects."""
        self._address = address
        self._client: Any = None

    def run(self, work: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Submit all tasks to the cluster now; the iterator waits for each result, in the order of the tasks.

        Only once, inside of the block of this engine.
        """
        from distributed import KilledWorker

        futures = self._client.map(work, tasks, pure=False)
        done = (futures.pop(0).result() for _ in tasks)
        return _results(done, KilledWorker, lambda error: f"workers of {self._address} were killed: {error}")

    def __enter__(self) -> Self:
        """Connect with the scheduler.

        Raises:
            UsageError: Dask is not installed, or no scheduler answers within `_PATIENCE`.
        """
        try:
            from distributed import Client

            client: Any = Client
            self._client = client(self._address, timeout=_PATIENCE, set_as_default=False)
        except ImportError:
            raise UsageError("--engine dask:ADDRESS needs Dask: install introspect-cli[cluster]") from None
        except (OSError, ValueError) as error:
            why = str(error) or "it does not answer"
            raise UsageError(f"there is no Dask scheduler at {self._address}: {why}") from None
        return self

    def __exit__(self, *_: object) -> None:
        """Close the runs that tasks left open on the workers, and the connection; the cluster runs on."""
        if self._client is not None:
            from introspect_cli.store.tasks import forget

            with suppress(Exception):  # workers, or the scheduler, may be gone: then nothing is open
                self._client.run(forget)
            self._client.close()
