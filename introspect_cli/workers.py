"""Where work on many ranks runs: in this process, or in several of this machine.

Work is a function and many small tasks, which name runs by their paths and say which steps or ranks of them; results
come in the order of the tasks.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from introspect_cli.store.tasks import Work


@contextmanager
def at_work(number: int) -> Iterator[Work | None]:
    """For the length of a block, what runs tasks in `number` processes; None for 1, where work runs in this one.

    The first task starts the processes. All tasks are submitted at once, and results are waited for as they are asked
    for. StoreError is raised there where a task could not read what it was to read, or its process was killed.
    """
    if number == 1:
        yield None
        return
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    def results(done: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from done
        except BrokenProcessPool:
            raise StoreError("a worker was killed, by lack of memory perhaps: ask for fewer with --workers") from None

    def run(work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        return results(pool.map(work, tasks))

    pool = ProcessPoolExecutor(number, mp_context=get_context("spawn"))
    try:
        yield run
    finally:  # waits for what has begun
        pool.shutdown(cancel_futures=True)
