"""Steps of all ranks combined wherever there is a processor: as tasks that name a run and some steps.

Steps depend on one another in nothing. So any process that can read the run puts some steps together, and gives back
one record a site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.store.run import open_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from introspect_cli.records import Layout
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.reader import Reader
    from introspect_cli.store.run import Run
    from introspect_cli.store.whole import WholeReader


STEPS_PER_TASK = 4
"""Steps that are put together by one task: few enough for all workers to have some to the end."""

Fold = Mapping[tuple[bool, str], int]


Work = Callable[[Callable[[Any], Any], "Sequence[Any]"], "Iterable[Any]"]
"""Calls a function for each of some tasks, wherever that may be, and gives the results in order."""

MANY = 64
"""Ranks that are read at once; of more, each is read for itself, and they are shared out to so many tasks."""


class Task(NamedTuple):
    """Work on the same ranks of some runs, to be done in any process.

    Attributes:
        paths: the runs.
        ranks: the ranks of each that `opened` opens.
        given: further data for the work.
    """

    paths: tuple[str, ...]
    ranks: tuple[int, ...]
    given: Any = None

    @contextmanager
    def opened(self) -> Iterator[list[Run]]:
        """The runs, opened with only these ranks for the block."""
        with ExitStack() as stack:
            yield [stack.enter_context(open_run(path, only=self.ranks)) for path in self.paths]


def tasks_of(runs: Sequence[Run], ranks: Sequence[int], given: Any = None, each: int = 0) -> list[Task]:
    """Split `ranks` into tasks on the same ranks of all runs.

    Args:
        runs: the runs, which tasks open by their addresses.
        ranks: numbers of ranks.
        given: further data for the work.
        each: how many ranks a task has; 0 for so many that there are at most `MANY` tasks.
    """
    paths, each = tuple(run.address for run in runs), each or -(-len(ranks) // MANY) or 1
    return [Task(paths, tuple(ranks[at : at + each]), given) for at in range(0, len(ranks), each)]


@lru_cache(maxsize=2)
def _opened(path: str) -> Reader:
    """All ranks of a run as one, kept for the next task: to open thousands takes longer than to put a step together."""
    return as_one(open_run(path))


def combine_steps(task: Task) -> tuple[list[StepBatch], list[Layout]]:
    """Combine the steps of a task; returns the batches, and the layouts by the numbers that they have in these batches.

    `given` of the task is `mark_of` the run, and positions of common steps. The run stays open for the next task, until
    `forget`.

    Raises:
        StoreError: the run has changed since the task was made.
    """
    from introspect_cli.store.whole import WholeReader

    mark, rows = task.given
    [path] = task.paths
    reader = _opened(path)
    if not isinstance(reader, WholeReader) or mark_of(reader) != mark:
        forget()
        raise StoreError(f"{path} changed while it was read: wait for its end, then try again")
    return [reader.read_row(row) for row in rows], list(reader.layouts)


def forget() -> None:
    """Let go of the runs that tasks left open in this process."""
    _opened.cache_clear()


def mark_of(reader: WholeReader) -> bytes:
    """A hash of each rank's run id, last chain and number of steps: equal while no step is added or dropped."""
    digest = blake2b(digest_size=16)
    for each in reader.readers:
        digest.update(each.run_id + each.entries["chain"][-1:].tobytes() + len(each).to_bytes(8, "little"))
    return digest.digest()


def combined_elsewhere(reader: WholeReader, path: str, work: Work) -> Iterator[StepBatch]:
    """Combine all common steps in tasks; yields each step's batch in order, its layouts numbered as the reader's.

    The reader is given layouts that it does not have. Runs that tasks left open in this process are closed at the end,
    also where the iterator is not used up.

    Args:
        reader: of the run.
        path: the run, as workers find it.
        work: runs the tasks.
    """
    mark, rows = mark_of(reader), range(len(reader.common_steps))
    tasks = [Task((path,), (), (mark, rows[at : at + STEPS_PER_TASK])) for at in rows[::STEPS_PER_TASK]]
    try:
        for batches, layouts in work(combine_steps, tasks):
            numbers = np.array([reader.layout_number(layout) for layout in layouts] or [0], np.uint32)
            for batch in batches:
                yield replace(batch, layout=numbers[batch.layout])
    finally:
        forget()  # where tasks ran in this process


def as_one(run: Run, fold: Fold | None = None) -> Reader:
    """A reader of all ranks of a run as one.

    It is the rank's own reader where the run was put together already, or has one rank, all recorded, without parts and
    `fold`.

    Args:
        run: the run, which stays open as long as the reader is used.
        fold: as `WholeReader` takes it.
    """
    readers = [run.rank(rank) for rank in run.recorded]
    if run.combined_ranks:
        return readers[0]
    complete = len(readers) >= run.world_size
    if len(readers) == 1 and not fold and complete and not any(layout.part for layout in readers[0].layouts):
        return readers[0]
    from introspect_cli.store.whole import WholeReader  # one rank does without it

    lacking = "" if complete else f"{len(readers)} of {run.world_size} ranks were recorded"
    return WholeReader(str(run.path), readers, fold, run.stages, lacking=lacking, complete=complete)


def ended_unevenly(run: Run) -> bool:
    """Whether all ranks ended properly, none with another exit code than 0, and their last steps differ.

    False also where a rank is missing, has no step or was cut off; ranks that were to record nothing are ignored.
    """
    readers = [run.rank(rank) for rank in run.ranks if rank not in run.left_out]
    last = {reader.last_step for reader in readers}
    well = all(manifest.get("exit_code") in (None, 0) for manifest in run.manifests.values())
    every = len(readers) + len(run.left_out) == run.world_size and all(reader.ended for reader in readers)
    return well and every and None not in last and len(last) > 1
