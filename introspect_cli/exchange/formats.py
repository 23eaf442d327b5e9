"""The formats that a run is exported to, each a function that writes the wanted part of it into a fresh directory.

A format is a file here and a line in the table; it is imported when it is asked for, since some need packages that
others do not.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.errors import UsageError
from introspect_cli.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.records import Record
    from introspect_cli.store.run import Run

EVERYTHING = Selection()


FORMATS: dict[str, tuple[str, str]] = {
    "parquet": ("tables, partitioned by step and rank", "frames:write_parquet"),
    "csv": ("one table", "frames:write_csv"),
    "jsonl": ("one file, a JSON object a record", "frames:write_jsonl"),
    "yaml": ("a report for each step and rank", "yaml_reports:write_yaml"),
    "json-tree": ("a tree of module calls for each step", "trees:write_tree"),
}
"""Every format by name, in the order in which help lists them: what it writes, in a line of help; and `module:function`
of this folder, called with the run, the empty directory and the selection."""


def export(run: Run, name: str, output: str | Path, selection: Selection = EVERYTHING) -> int:
    """Write a run in a format; returns the number of files.

    Args:
        run: the run.
        name: the format.
        output: the directory, which may be there and empty.
        selection: what of it.

    Raises:
        UsageError: the directory is not empty.
        OSError: it cannot be written to.
        StoreError: the run is damaged.
    """
    directory = Path(output)
    module, _, function = FORMATS[name][1].partition(":")
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty: name another directory")
    getattr(import_module(f"introspect_cli.exchange.{module}"), function)(run, directory, selection)
    return sum(path.is_file() for path in directory.rglob("*"))


def wanted_steps(run: Run, selection: Selection) -> list[tuple[int, int]]:
    """(step, rank) of every wanted step, by step and then rank."""
    ranks = [rank for rank in run.ranks if selection.wants_rank(rank)]
    steps = [(step, rank) for rank in ranks for step in run.rank(rank).entries["step"].tolist()]
    return sorted(place for place in steps if selection.wants_step(place[0]))


def wanted_records(run: Run, step: int, rank: int, selection: Selection) -> Iterator[Record]:
    """The selected records of a step of a rank, in the order they were made."""
    records = run.rank(rank).records(step)
    return (record for record in records if selection.wants(record.site.kind, record.site.fqn))
