"""`introspect watch`: a run while it goes on, from another terminal."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from introspect_cli.commands.shared import Comparing, RunType, comparing, exit_code, last_runs
from introspect_cli.exit_codes import SAME

if TYPE_CHECKING:
    from introspect_cli.compare.terms.result import DiffResult
    from introspect_cli.health.check import Look
    from introspect_cli.render.blocks import Block
    from introspect_cli.rerun.live import LiveReference
    from introspect_cli.store.read.run import Run

_REST = 4


@click.command(
    epilog="""\b
Examples:
  introspect watch                    (the last run below introspect-runs/)
  introspect watch runB --against runA
  introspect watch runB --once

Exit status: 0; with --against, 1 where the runs diverge, and that of diff once the run is over.""",
)
@click.argument("run", type=RunType(), required=False)
@click.option("--against", type=RunType(), metavar="RUN", help="A run, pack, URL or golden run to compare with.")
@comparing
@click.option("--once", is_flag=True, help="Show it once, as it is now, for scripts and cron.")
def watch(run: str | None, against: str | None, compared: Comparing, *, once: bool) -> int:
    """Show how far RUN is, its losses and norms, what `check` finds, and its distance to another run.

    It ends when the run does. In a pipe it prints a line each time it looks.
    """
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.health.check import look
    from introspect_cli.render.check_text import watch_blocks, watch_line
    from introspect_cli.render.console import Screen
    from introspect_cli.store.read.poll import poll

    path, screen = run or last_runs(1)[0], Screen()
    steps: list[object] = []
    with ExitStack() as stack:
        reference = _reference(stack, against, path, compared)
        draw = None if once else stack.enter_context(screen.live())

        def seen_now(run: Run) -> tuple[Look, DiffResult | None, list[Block]]:
            seen = look(run)
            result = None if reference is None or not run.ranks else reference.result(run)
            shown = None if against is None else (against, result)
            blocks = watch_blocks(seen, shown)
            if draw is not None:
                draw(blocks)
            elif not once and not seen.over and [seen.steps] != steps[-1:]:
                click.echo(watch_line(seen))
            steps.append(seen.steps)
            return seen, result, blocks

        seen, result, blocks = poll(path, seen_now, opened=open_any, rest=_REST, wait=not once)
    if draw is None:
        screen.draw(blocks)
    if result is None or not (seen.over or result.first is not None):
        return SAME
    return exit_code(result.verdict)


def _reference(stack: ExitStack, against: str | None, path: str, asked: Comparing) -> LiveReference | None:
    """The comparison that is asked for, whose reference is closed with the stack."""
    from introspect_cli.errors import UsageError

    if against is None:
        if asked != Comparing(match=asked.match):
            raise UsageError("the options of diff say how to compare: name a run with --against")
        return None
    from introspect_cli.commands.live import against as compared
    from introspect_cli.exchange.checkpoints import opened

    noise = stack.enter_context(opened(*asked.noise))
    reference = compared(against, Path(path), noise, asked.options(want_map=True))
    stack.callback(reference.close)
    return reference
