"""The formats that a run is exported to, each a function that writes the wanted part of it into a fresh directory.

A format is a file here and a line in the table; it is imported when it is asked for, since some need packages that
others do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import UsageError
from introspect_cli.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.store.reader import Run

EVERYTHING = Selection()


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        about: what it writes, in a line of help.
        writer: `module:function`; called with the run, the directory, the selection and the options by name, it writes
            and returns the number of files.
        options: names of the options of `export` that it takes.
    """

    about: str
    writer: str
    options: frozenset[str] = frozenset()


FORMATS: dict[str, Format] = {
    "parquet": Format("tables, partitioned by step and rank", "introspect_cli.exchange.frames:write_parquet"),
    "csv": Format("one table", "introspect_cli.exchange.frames:write_csv"),
    "jsonl": Format("one file, a JSON object a record", "introspect_cli.exchange.frames:write_jsonl"),
    "yaml": Format("a report for each step and rank", "introspect_cli.exchange.yaml_reports:write_yaml"),
    "json-tree": Format(
        "a tree of module calls for each step", "introspect_cli.exchange.trees:write_tree", frozenset({"prune_layers"})
    ),
    "tensorboard": Format(
        "scalars, and histograms of what was stored whole", "introspect_cli.exchange.tensorboard:write_tensorboard"
    ),
}
"""Every format by name, in the order in which help lists them."""


def export(run: Run, name: str, output: str | Path, selection: Selection = EVERYTHING, **options: Any) -> int:
    """Write a run in a format; files written.

    Raises:
        UsageError: the format does not take an option, the directory is not empty or cannot be written to.
        StoreError: the run is damaged.
    """
    form = FORMATS[name]
    given = {option: value for option, value in options.items() if value}
    for option in given:
        if option not in form.options:
            takers = [other for other, its in FORMATS.items() if option in its.options]
            raise UsageError(f"--{option.replace('_', '-')} belongs to --format {' or '.join(takers)}: leave it out")
    module, _, function = form.writer.partition(":")
    directory = _fresh(output)
    try:
        written: int = getattr(import_module(module), function)(run, directory, selection, **given)
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}") from None
    return written


def wanted_steps(run: Run, selection: Selection) -> Iterator[tuple[int, int]]:
    """(step, rank) of every wanted step, by step and then rank."""
    steps = [
        (int(step), rank)
        for rank in run.ranks
        if selection.wants_rank(rank)
        for step in run.rank(rank).entries["step"]
        if selection.wants_step(int(step))
    ]
    return iter(sorted(steps))


def _fresh(path: str | Path) -> Path:
    """Make the directory to write to."""
    directory = Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"{directory} is not empty: name another directory")
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}; name another directory") from None
    return directory
