"""`introspect merge`: ranks that were recorded on several machines, put into one run."""

from __future__ import annotations

from pathlib import Path

import click

from introspect_cli.commands.shared import RunType, say
from introspect_cli.exit_codes import SAME


@click.command(
    short_help="Put ranks that were recorded on several machines into one run.",
    epilog="""\b
Examples:
  introspect merge node0/run node1/run -o run
  introspect merge node*.introspect.zip -o run""",
)
@click.argument("runs", nargs=-1, required=True, type=RunType())
@click.option("-o", "--output", metavar="DIR", required=True, help="Directory of the run to make; it must not exist.")
@click.option("--sources/--no-sources", default=True, help="Also take the text of the source files [default: yes].")
def merge(runs: tuple[str, ...], output: str, *, sources: bool) -> int:
    """Put the ranks of one launch, which machines without a common disk recorded in RUNS, into one run.

    RUNS are directories, or packs of them; their files are copied as they are.
    """
    from introspect_cli.records import count
    from introspect_cli.store.merge import merge as put_together
    from introspect_cli.store.reader import open_run

    ranks = put_together([Path(run) for run in runs], Path(output), texts=sources)
    with open_run(output) as run:
        endings = run.endings
    say(f"wrote {output} ({count(len(ranks), 'rank')})")
    for sentence in endings:
        say(f"{sentence}.")
    return SAME
