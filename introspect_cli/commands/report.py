"""`introspect report`: one self-contained page about a run, or two."""

from __future__ import annotations

import tempfile
import webbrowser
from dataclasses import dataclass
from pathlib import Path

import click

from introspect_cli.commands.shared import Comparing, RunType, last_runs, option, say, takes
from introspect_cli.exit_codes import SAME


@dataclass(frozen=True)
class ReportOptions:
    """Where the page goes."""

    output: Path | None = option(None, "File to write.", "-o", metavar="FILE")
    open_: bool = option(False, "Open it in the browser; without -o, a temporary file.")
    force: bool = option(False, "Replace a file that is there.")


@click.command(
    epilog="""\b
Examples:
  introspect report --open                      (the last run, in the browser)
  introspect report runA runB --noise runA2 -o report.html""",
)
@click.argument("run", type=RunType(), required=False)
@click.argument("run_b", type=RunType(), required=False)
@takes(ReportOptions)
@takes(Comparing, "compared")
def report(run: str | None, run_b: str | None, asked: ReportOptions, compared: Comparing) -> int:
    """Make a page about RUN, or about RUN and RUN_B; without them, about the last run below introspect-runs/.

    The page is one file that needs no network. The options of `diff` narrow the comparison, not the curves; --noise is
    drawn as a band.
    """
    from introspect_cli.commands.page import page_of
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange.checkpoints import opened
    from introspect_cli.render.blocks import write_whole
    from introspect_cli.texts import human_size

    output = asked.output
    if output is None and not asked.open_:
        raise UsageError("say where the page goes: -o report.html, or --open to see it in the browser")
    if output is not None and output.exists() and not asked.force:
        raise UsageError(f"{output} exists: choose another name with -o, or --force to replace it")
    if run_b is None and compared != Comparing(noise=compared.noise):
        raise UsageError("the options of diff say how to compare: name two runs with them")
    named = [run or last_runs(1)[0], *([run_b] if run_b else [])]
    with opened(*named) as runs, opened(*compared.noise) as others:
        text = page_of(runs, others, compared.options(want_map=True, limit=200))
    if output is None:
        output = Path(tempfile.mkdtemp(prefix="introspect-")) / "report.html"
    write_whole(output, text)
    say(f"wrote {output} ({human_size(len(text.encode()))})")
    if asked.open_ and not webbrowser.open(output.resolve().as_uri()):
        say(f"no browser could be opened here: open {output} in one", err=True)
    return SAME
