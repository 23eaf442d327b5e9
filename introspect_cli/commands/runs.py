"""`introspect runs`: which runs there are, and removing those nobody needs."""

from __future__ import annotations

from pathlib import Path

import click

from introspect_cli.commands.shared import DefaultGroup, RunType, Written, answer, say, takes
from introspect_cli.exit_codes import SAME

_directories = click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))


@click.group(
    cls=DefaultGroup,
    subcommand_metavar="[list|label|prune] [DIR]...",
    epilog="""\b
Examples:
  introspect runs
  introspect runs experiments/ --format json
  introspect runs label runA 'before the new tokenizer'
  introspect runs prune --keep 10 --dry-run""",
)
def runs() -> None:
    """List the runs below introspect-runs/ (or DIR), label them, and remove old ones."""


@runs.command("list")
@_directories
@takes(Written)
def list_(directories: tuple[Path, ...], asked: Written) -> int:
    """List runs, the latest first."""
    from introspect_cli.inspect.runs import find_runs
    from introspect_cli.render.json import document
    from introspect_cli.render.show_text import runs_blocks

    places = _places(directories)
    search = find_runs(places)
    answer(asked.format_, lambda: document(**vars(search)), lambda: runs_blocks(search, [*map(str, places)]))
    return SAME


@runs.command("label")
@click.argument("run", type=RunType(file_okay=False))
@click.argument("text")
def label(run: str, text: str) -> int:
    """Give RUN a label, shown in the list.

    Every verb takes the label for a run below introspect-runs/. An empty TEXT removes it.
    """
    from introspect_cli.errors import UsageError
    from introspect_cli.store.files import LONGEST_LABEL
    from introspect_cli.store.run_writer import write_label
    from introspect_cli.texts import clean

    cleaned = clean(text.strip())
    if len(cleaned) > LONGEST_LABEL:
        raise UsageError(f"a label has at most {LONGEST_LABEL} characters, this one {len(cleaned)}.")
    write_label(run, cleaned)
    return SAME


@runs.command("prune")
@_directories
@click.option("--keep", type=click.IntRange(min=0), required=True, metavar="N", help="Keep the N latest runs.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(directories: tuple[Path, ...], *, keep: int, dry_run: bool) -> int:
    """Remove all runs but the latest, those that are packed, and those that are still written."""
    from introspect_cli.inspect.runs import find_runs, prunable
    from introspect_cli.store.run_writer import refuse_or_remove
    from introspect_cli.texts import count, human_size

    search = find_runs(_places(directories))
    going = prunable(search.runs, keep=keep)
    for row in going:
        if not dry_run:
            refuse_or_remove(row.path, force=True)
        say(f"{'would remove' if dry_run else 'removed'} {row.path} ({human_size(row.size)})")
    freed = human_size(sum(row.size for row in going))
    click.echo(f"{count(len(going), 'run')}, {freed}{' would be freed' if dry_run else ' freed'}")
    return SAME


def _places(directories: tuple[Path, ...]) -> list[Path]:
    """The directories to look in: those named (not checked), or `introspect-runs/`.

    Raises:
        UsageError: none is named, and there is no `introspect-runs/` here.
    """
    from introspect_cli.errors import UsageError
    from introspect_cli.store.files import RUNS

    if not directories and not Path(RUNS).is_dir():
        raise UsageError(f"there is no {RUNS}/ here; name a directory that holds runs, or capture one first.")
    return list(directories) or [Path(RUNS)]
