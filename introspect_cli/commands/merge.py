"""`introspect merge`: ranks that were recorded on several machines, put into one run."""

from __future__ import annotations

from pathlib import Path

import click

from introspect_cli.commands.shared import RunType, engine_option, say
from introspect_cli.exit_codes import SAME


@click.command(
    epilog="""\b
Examples:
  introspect merge node0/run node1/run -o run
  introspect merge node*.introspect.zip -o run
  introspect merge --whole run -o whole --engine processes:8""",
)
@click.argument("runs", nargs=-1, required=True, type=RunType())
@click.option("-o", "--output", metavar="DIR", required=True, help="Directory of the run to make; it must not exist.")
@click.option("--sources/--no-sources", default=True, help="Also take the text of the source files [default: yes].")
@click.option("--whole", is_flag=True, help="Put the ranks of one RUN together, parts added up: kilobytes a step.")
@engine_option
def merge(runs: tuple[str, ...], output: str, *, sources: bool, whole: bool, engine: str) -> int:
    """Put the ranks of one launch, which machines without a common disk recorded in RUNS, into one run.

    RUNS are directories, packs of them, or URLs; their files are copied as they are. With --whole, the ranks of one run
    become a run that every verb reads like one of a single process.
    """
    from introspect_cli.engine import HERE, engine_of
    from introspect_cli.errors import UsageError
    from introspect_cli.store.merge import merge as put_together
    from introspect_cli.store.reader import open_run
    from introspect_cli.texts import count

    if whole:
        from introspect_cli.store.merge import reduce_run

        if len(runs) > 1:
            raise UsageError("--whole takes one run: merge those of several machines first")
        with engine_of(engine) as at_work:
            steps = reduce_run(runs[0], Path(output), at_work.run, texts=sources)
        say(f"wrote {output} ({count(steps, 'step')})")
        return SAME
    if engine != HERE:
        raise UsageError("--engine says where --whole puts ranks together; files are copied here")
    ranks = put_together(runs, Path(output), texts=sources)
    with open_run(output) as run:
        endings = run.endings
    say(f"wrote {output} ({count(len(ranks), 'rank')})")
    for sentence in endings:
        say(f"{sentence}.")
    return SAME
