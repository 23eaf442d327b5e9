"""`introspect runs`: which runs there are."""

from __future__ import annotations

from pathlib import Path

import click

from introspect_cli.commands.shared import Written, answer, takes
from introspect_cli.errors import UsageError
from introspect_cli.exit_codes import SAME


@click.command(
    epilog="""\b
Examples:
  introspect runs
  introspect runs experiments/ --format json""",
)
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@takes(Written)
def runs(directories: tuple[Path, ...], asked: Written) -> int:
    """List the runs below introspect-runs/ (or DIR), the latest first."""
    from introspect_cli.inspect.runs import find_runs
    from introspect_cli.render.json import document
    from introspect_cli.render.show_text import runs_blocks
    from introspect_cli.store.files import RUNS

    if not directories and not Path(RUNS).is_dir():
        raise UsageError(f"there is no {RUNS}/ here; name a directory that holds runs, or capture one first.")
    places = directories or (Path(RUNS),)
    search = find_runs(places)
    answer(asked.format_, lambda: document(**vars(search)), lambda: runs_blocks(search, [*map(str, places)]))
    return SAME
