"""Steps of all ranks put together wherever there is a processor: as tasks that name a run, some steps, and some sites.

Steps depend on one another in nothing, and what becomes of a site follows from its own records. So any process that can
read the run puts a stretch of steps together, or a slice of their sites where all would not fit into its memory, and
gives back one record a site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.store.ranks.combined import joined
from introspect_cli.store.ranks.whole_names import StoredNames, WholeNames
from introspect_cli.store.ranks.whole_reader import StoredWhole, WholeReader
from introspect_cli.store.read.run import open_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from introspect_cli.records import Layout
    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.ranks.whole_reader import Reader
    from introspect_cli.store.read.run import Run

STRETCH = 4
"""Steps that are put together by one task: few enough for all workers to have some to the end."""

_FEWEST, _MOST = 4, 64
"""Steps that are put together before they are asked for: a comparison may need no more than a few, or all."""

_AT_ONCE = 8
"""In how many tasks."""

Fold = Mapping[tuple[bool, str], int]


class Stretch(NamedTuple):
    """Some steps of a run, and a slice of their sites, that are to be put together.

    Attributes:
        path: the run.
        mark: what it has, see `mark_of`.
        fold: as `WholeNames` takes it.
        steps: their numbers.
        which: the slice.
        of: how many slices there are.
    """

    path: str
    mark: bytes
    fold: Fold
    steps: tuple[int, ...]
    which: int
    of: int


class Wholes(NamedTuple):
    """Steps that were put together, or a slice of them.

    Attributes:
        batches: of each step.
        layouts: those that they name, by number.
    """

    batches: list[StepBatch]
    layouts: list[Layout]


Work = Callable[[Callable[[Any], Any], "Sequence[Any]"], "Iterable[Any]"]
"""Calls a function for each of some tasks, wherever that may be, and gives the results in order."""

MANY = 64
"""Ranks that are read at once; of more, each is read for itself, and they are shared out to so many tasks."""


class Task(NamedTuple):
    """Work on some ranks of some runs.

    Attributes:
        paths: the runs.
        ranks: the ranks of each that are opened.
        given: what else the work needs.
    """

    paths: tuple[str, ...]
    ranks: tuple[int, ...]
    given: Any = None

    @contextmanager
    def opened(self) -> Iterator[list[Run]]:
        """The runs with these ranks alone."""
        with ExitStack() as stack:
            yield [stack.enter_context(open_run(path, only=self.ranks)) for path in self.paths]


def tasks_of(runs: Sequence[Run], ranks: Sequence[int], given: Any = None, each: int = 0) -> list[Task]:
    """Work on ranks of runs, so many at a time; `MANY` tasks where that is 0."""
    paths, each = tuple(run.address for run in runs), each or -(-len(ranks) // MANY) or 1
    return [Task(paths, tuple(ranks[at : at + each]), given) for at in range(0, len(ranks), each)]


_OPEN: list[tuple[Stretch, Run, Reader]] = []
"""The runs that the last tasks read: to open thousands of ranks takes longer than to put a step together."""

_MOST_OPEN = 2


def put_together(stretch: Stretch) -> Wholes:
    """Put all ranks of some steps together; the run stays open for the next task, until `forget`."""
    opened = next((opened for opened in _OPEN if opened[0][:3] == stretch[:3]), None)
    if opened is None:
        run = open_run(stretch.path)
        _OPEN.append(opened := (stretch, run, as_one(run, stretch.fold)))
        forget(_MOST_OPEN)
    reader = opened[2]
    if not isinstance(reader, WholeReader) or mark_of(reader) != stretch.mark:
        forget()
        raise StoreError(f"{stretch.path} changed while it was read: wait for its end, then try again")
    rows = np.searchsorted(reader.steps_of_all, stretch.steps).tolist()
    return Wholes([reader.read_slice(row, stretch.which, stretch.of) for row in rows], list(reader.layouts))


def forget(but: int = 0) -> None:
    """Close the runs that tasks left open, but the last so many."""
    while len(_OPEN) > but:
        _OPEN.pop(0)[1].close()


def mark_of(reader: WholeReader) -> bytes:
    """What is equal where all ranks have the same steps with the same records."""
    digest = blake2b(digest_size=16)
    for each in reader.readers:
        digest.update(each.run_id + each.entries["chain"][-1:].tobytes() + len(each).to_bytes(8, "little"))
    return digest.digest()


def stretches(
    reader: WholeReader, path: str, rows: Sequence[int], fold: Fold, each: int = STRETCH
) -> list[tuple[Stretch, ...]]:
    """Steps at some positions as tasks, so many each; those of all slices of the same steps beside one another."""
    out, mark = [], mark_of(reader)
    for at in range(0, len(rows), each):
        own = rows[at : at + each]
        of = max(map(reader.slices_of, own))
        steps = tuple(reader.steps_of_all[list(own)].tolist())
        out.append(tuple(Stretch(path, mark, fold, steps, which, of) for which in range(of)))
    return out


def carried_out(
    tasks: Sequence[tuple[Stretch, ...]], work: Work, number_of: Callable[[Layout], int]
) -> Iterator[StepBatch]:
    """Each step of some stretches, with the numbers that a layout has for who asks."""
    try:
        done = iter(work(put_together, [task for slices in tasks for task in slices]))
        for slices in tasks:
            every = []
            for wholes in [next(done) for _ in slices]:
                numbers = np.array([number_of(layout) for layout in wholes.layouts] or [0], np.uint32)
                every.append([replace(batch, layout=numbers[batch.layout]) for batch in wholes.batches])
            yield from map(joined, zip(*every, strict=True))
    finally:
        forget()  # where tasks ran in this process


def as_one(run: Run, fold: Fold | None = None, work: Work | None = None) -> Reader:
    """All ranks of a run as one, whose steps are put together wherever there is a processor; here without `work`.

    Args:
        run: the run.
        fold: as `WholeNames` takes it.
        work: runs tasks.
    """
    path, readers = str(run.path), [run.rank(rank) for rank in run.recorded]
    if run.whole_of:
        return StoredWhole(StoredNames(path, readers), many=run.whole_of)
    if len(readers) == 1 and not fold and not run.left_out and not any(layout.part for layout in readers[0].layouts):
        return readers[0]
    elsewhere = Spread(run.address, fold or {}, work) if work is not None else None
    return WholeReader(
        WholeNames(path, readers, fold, run.stages),
        lacking=f"{len(readers)} of {run.world_size} ranks were recorded" if run.left_out else "",
        complete=len(readers) == run.world_size,
        elsewhere=elsewhere,
    )


class Spread:
    """Puts steps of a reader of all ranks together wherever there is a processor: its `elsewhere`."""

    def __init__(self, path: str, fold: Fold, work: Work) -> None:
        """Take the run's address, how calls are folded, and what runs tasks."""
        self._path, self._fold, self._work = path, fold, work
        self._rows: list[int] = []
        self._next = _FEWEST
        self._done: dict[int, StepBatch] = {}

    def ahead(self, rows: Sequence[int]) -> None:
        """Which steps are going to be read, in order, as far as is known."""
        self._rows = list(rows)

    def read(self, reader: WholeReader, row: int) -> StepBatch:
        """The records of the `row`-th step, and those of some that are going to be read."""
        if row not in self._done:
            rows = [row]
            if row in self._rows:
                at = self._rows.index(row)
                rows, self._next = self._rows[at : at + self._next], min(2 * self._next, _MOST)
            tasks = stretches(reader, self._path, rows, self._fold, -(-len(rows) // _AT_ONCE))
            self._done = dict(zip(rows, carried_out(tasks, self._work, reader.names.layout_number), strict=True))
        return self._done.pop(row)
