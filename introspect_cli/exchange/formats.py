"""The formats that a run is exported to, each a function that writes the wanted part of it into a fresh directory.

A format is a file here and a line in the table; it is imported when it is asked for, since some need packages that
others do not. What an engine writes is written in pieces, some steps of some ranks each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.errors import StoreError, UsageError
from introspect_cli.schedule.rules import Schedule
from introspect_cli.selection import Selection
from introspect_cli.store.ranks.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.records import Record
    from introspect_cli.store.ranks.tasks import Work
    from introspect_cli.store.read.run import Run

EVERYTHING = Selection()

_PIECE = 64
"""Steps of ranks that one task writes."""


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        about: what it writes, in a line of help.
        writer: `module:function`; called with the run, the directory and the selection, it writes and returns how many
            files.
        one: whether it is one file, which one process writes.
        by_rank: whether a file has all steps of a rank.
    """

    about: str
    writer: str
    one: bool = False
    by_rank: bool = False


FORMATS: dict[str, Format] = {
    "parquet": Format("tables, partitioned by step and rank", "introspect_cli.exchange.frames:write_parquet"),
    "csv": Format("one table", "introspect_cli.exchange.frames:write_csv", one=True),
    "jsonl": Format("one file, a JSON object a record", "introspect_cli.exchange.frames:write_jsonl", one=True),
    "yaml": Format("a report for each step and rank", "introspect_cli.exchange.yaml_reports:write_yaml"),
    "json-tree": Format("a tree of module calls for each step", "introspect_cli.exchange.trees:write_tree"),
    "tensorboard": Format(
        "scalars, and histograms of what was stored whole",
        "introspect_cli.exchange.tensorboard:write_tensorboard",
        by_rank=True,
    ),
}
"""Every format by name, in the order in which help lists them."""


def export(run: Run, name: str, output: str | Path, selection: Selection = EVERYTHING, work: Work | None = None) -> int:
    """Write a run in a format; returns the number of files.

    A run of one rank, and a format of one file, are written here in any case.

    Args:
        run: the run.
        name: the format.
        output: the directory, which may be there and empty.
        selection: what of it.
        work: runs tasks, each of which writes a piece; None to write here.

    Raises:
        UsageError: the directory is not empty or cannot be written to.
        StoreError: the run is damaged.
    """
    directory = _make_directory(output)
    try:
        if work is None or len(run.ranks) < 2 or FORMATS[name].one:
            return _write_format(name, run, directory, selection)
        return _write_in_pieces(name, run, directory, selection, work)
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}") from None


def _write_format(name: str, run: Run, directory: Path, selection: Selection) -> int:
    """Call the format's writer on the selected part of a run; returns the number of files."""
    module, _, function = FORMATS[name].writer.partition(":")
    written: int = getattr(import_module(module), function)(run, directory, selection)
    return written


def _write_piece(task: Task) -> int:
    """Write the steps and ranks of a task (`given`: format, directory, selection); returns the number of files.

    The directory is made. StoreError where it cannot be written to.
    """
    name, where, selection = task.given
    directory = Path(where)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with task.opened() as [run]:
            return _write_format(name, run, directory, selection)
    except OSError as error:
        raise StoreError(f"cannot write to {directory}: {error.strerror}") from None


def _write_in_pieces(name: str, run: Run, directory: Path, selection: Selection, work: Work) -> int:
    """Write in tasks run by `work`, some steps of some ranks each; returns the number of files that are there then.

    Raises:
        UsageError: files were written, and none is in the directory: workers have another disk.
    """
    tasks = []
    for steps, ranks in _pieces(wanted_steps(run, selection), by_rank=FORMATS[name].by_rank):
        narrowed = replace(selection, steps=Schedule.of(steps), ranks=ranks)
        # what is said of all ranks is said by the first of them
        opened = tuple({*ranks, *run.ranks[:2]})
        tasks.append(Task((run.address,), opened, (name, str(directory.absolute()), narrowed)))
    written = sum(work(_write_piece, tasks))
    there = sum(path.is_file() for path in directory.rglob("*"))
    if written and not there:
        raise UsageError(f"{directory} is not one directory for all workers: name one on a disk that they share")
    return there


def _pieces(places: list[tuple[int, int]], *, by_rank: bool) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Split (step, rank) pairs into groups: steps, and the ranks whose files of these steps one task writes.

    A group has about `_PIECE` pairs. With `by_rank` it has all steps of its ranks.
    """
    steps, ranks = sorted({step for step, _ in places}), sorted({rank for _, rank in places})
    stretch = len(steps) if by_rank else max(1, _PIECE // max(len(ranks), 1))
    group = max(1, _PIECE // max(len(steps), 1)) if by_rank else max(_PIECE, len(ranks) if stretch > 1 else 0)
    for step in range(0, len(steps), stretch or 1):
        for rank in range(0, len(ranks), group):
            yield steps[step : step + stretch], tuple(ranks[rank : rank + group])


def wanted_steps(run: Run, selection: Selection) -> list[tuple[int, int]]:
    """(step, rank) of every wanted step, by step and then rank."""
    ranks = [rank for rank in run.ranks if selection.wants_rank(rank)]
    steps = [(step, rank) for rank in ranks for step in run.rank(rank).entries["step"].tolist()]
    return sorted(place for place in steps if selection.wants_step(place[0]))


def wanted_records(run: Run, step: int, rank: int, selection: Selection) -> Iterator[Record]:
    """The selected records of a step of a rank, in the order they were made."""
    for record in run.rank(rank).records(step):
        if selection.wants(record.site.kind, record.site.fqn):
            yield record


def _make_directory(path: str | Path) -> Path:
    """Make the output directory where it is not there; UsageError where it is not empty or cannot be written."""
    directory = Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"{directory} is not empty: name another directory")
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}; name another directory") from None
    return directory
