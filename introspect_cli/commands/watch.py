"""`introspect watch`: a run while it goes on, from another terminal."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from introspect_cli.commands.shared import Comparing, RunType, exit_code, last_runs, option, takes
from introspect_cli.exit_codes import SAME

if TYPE_CHECKING:
    from introspect_cli.compare.result import DiffResult
    from introspect_cli.health.check import Look
    from introspect_cli.render.blocks import Block
    from introspect_cli.store.run import Run

_REST = 4


@dataclass(frozen=True)
class WatchOptions:
    """What a run is compared with, and how often it is shown."""

    against: str | None = option(None, "A run, pack, URL or golden run to compare with.", metavar="RUN")
    once: bool = option(False, "Show it once, as it is now, for scripts and cron.")


@click.command(
    epilog="""\b
Examples:
  introspect watch                    (the last run below introspect-runs/)
  introspect watch runB --against runA

Exit status: 0; with --against, 1 where the runs diverge, and that of diff once the run is over.""",
)
@click.argument("run", type=RunType(), required=False)
@takes(WatchOptions)
@takes(Comparing, "compared")
def watch(run: str | None, asked: WatchOptions, compared: Comparing) -> int:
    """Show how far RUN is, its losses and norms, what `check` finds, and its distance to another run.

    It ends when the run does. In a pipe it prints a line each time it looks.
    """
    from introspect_cli.commands.live import reference_of
    from introspect_cli.errors import UsageError
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.health.check import summarise
    from introspect_cli.render.check_text import watch_blocks, watch_line
    from introspect_cli.render.console import Screen
    from introspect_cli.store.run import poll

    path, screen = run or last_runs(1)[0], Screen()
    steps: list[object] = []
    if asked.against is None and compared != Comparing():
        raise UsageError("the options of diff say how to compare: name a run with --against")
    with ExitStack() as stack:
        reference = None
        if asked.against is not None:
            reference = stack.enter_context(reference_of(asked.against, Path(path), compared, want_map=True))
        draw = None if asked.once else stack.enter_context(screen.live())

        def show_state(run: Run) -> tuple[Look, DiffResult | None, list[Block]]:
            """Look at the run and show it: drawn anew in a terminal, else a line if the number of steps changed.

            With `--once`, or once the run is over outside of a terminal, nothing is shown. Returns the look, the
            comparison (None without a reference, or where nothing can be said yet) and the blocks to draw.
            """
            seen = summarise(run)
            result = None if reference is None or not run.ranks else reference.result(run)
            blocks = watch_blocks(seen, None if asked.against is None else (asked.against, result))
            if draw is not None:
                draw(blocks)
            elif not asked.once and not seen.over and [seen.steps] != steps[-1:]:
                click.echo(watch_line(seen))
            steps.append(seen.steps)
            return seen, result, blocks

        seen, result, blocks = poll(path, show_state, opened=open_any, rest=_REST, wait=not asked.once)
    if draw is None:
        screen.draw(blocks)
    if result is None or not (seen.over or result.first is not None):
        return SAME
    return exit_code(result.verdict)
