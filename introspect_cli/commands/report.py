"""`introspect report`: one self-contained page about a run, or two."""

from __future__ import annotations

from pathlib import Path

import click

from introspect_cli.commands.shared import Comparing, RunType, last_runs, say, takes
from introspect_cli.exit_codes import SAME


@click.command(
    epilog="""\b
Examples:
  introspect report -o report.html              (the last run)
  introspect report runA runB --noise runA2 -o report.html""",
)
@click.argument("run", type=RunType(), required=False)
@click.argument("run_b", type=RunType(), required=False)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE", help="File to write.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@takes(Comparing, "compared")
def report(run: str | None, run_b: str | None, output: Path, compared: Comparing, *, force: bool) -> int:
    """Make a page about RUN, or about RUN and RUN_B; without them, about the last run below introspect-runs/.

    The page is one file that needs no network. The options of `diff` narrow the comparison, not the curves; --noise is
    drawn as a band.
    """
    from introspect_cli.commands.page import page_of
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange.checkpoints import opened
    from introspect_cli.render.blocks import write_whole
    from introspect_cli.texts import human_size

    if output.exists() and not force:
        raise UsageError(f"{output} exists: choose another name with -o, or --force to replace it")
    if run_b is None and compared != Comparing(noise=compared.noise):
        raise UsageError("the options of diff say how to compare: name two runs with them")
    named = [run or last_runs(1)[0], *([run_b] if run_b else [])]
    with opened(*named) as runs, opened(*compared.noise) as others:
        text = page_of(runs, others, compared.options(want_map=True, limit=200))
    write_whole(output, text)
    say(f"wrote {output} ({human_size(len(text.encode()))})")
    return SAME
