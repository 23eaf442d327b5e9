"""`introspect watch`: a run while it goes on, from another terminal."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.commands.shared import Comparing, RunType, comparing, exit_code, last_runs
from introspect_cli.exit_codes import SAME

if TYPE_CHECKING:
    from introspect_cli.compare.terms.result import DiffResult
    from introspect_cli.health.check import Look
    from introspect_cli.render.blocks import Block
    from introspect_cli.store.read.run import Run

_REST = 4
_SLOW = 1.0
"""Seconds that a look may take before it says how many steps the run went on meanwhile."""
_LOOKS = 30
"""Looks over which the rate is taken."""


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

    The screen is drawn again as steps come, and the command ends when the run does. In a pipe it prints a
    line each time it looks, and draws the screen at the end.
    """
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.render.check_text import watch_blocks, watch_line
    from introspect_cli.render.console import Screen
    from introspect_cli.store.read.poll import poll

    path, screen = run or last_runs(1)[0], Screen()
    looks: deque[tuple[float, int]] = deque(maxlen=_LOOKS)
    steps: list[object] = []
    with ExitStack() as stack:
        ask = _question(stack, against, path, compared)
        draw = None if once else stack.enter_context(screen.live())

        def look(run: Run) -> tuple[Look, DiffResult | None, list[Block]]:
            began = time.monotonic()
            seen, result = _look(path, run, ask)
            seen = _with_rate(seen, looks, began)
            reference = None if against is None else (against, result)
            blocks = watch_blocks(seen, reference)
            if draw is not None:
                draw(blocks)
            elif not once and not seen.over and [seen.steps] != steps[-1:]:
                click.echo(watch_line(seen))
            steps.append(seen.steps)
            return seen, result, blocks

        seen, result, blocks = poll(path, look, opened=open_any, rest=_REST, wait=not once)
    if draw is None:
        screen.draw(blocks)
    if result is None or not (seen.over or result.first is not None):
        return SAME
    return exit_code(result.verdict)


def _with_rate(seen: Look, looks: deque[tuple[float, int]], now: float) -> Look:
    """What is seen, with the rate since the earliest of the last looks where the run goes on."""
    if seen.last is None or seen.over:
        return seen
    looks.append((now, seen.last))
    then, before = looks[0]
    if seen.last <= before:
        return seen
    return replace(seen, rate=(seen.last - before) / (now - then), recent=True)


def _question(stack: ExitStack, against: str | None, path: str, asked: Comparing) -> Any:
    """Gives the comparison with a reference, opened, of a run, opened; None without one."""
    from introspect_cli.errors import UsageError

    if against is None:
        if asked != Comparing(match=asked.match):
            raise UsageError("the options of diff say how to compare: name a run with --against")
        return None
    from introspect_cli.commands.live import question
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.rerun.live import may_be_judged, may_grow
    from introspect_cli.store.read.run import RunState

    options = asked.options(want_map=True)
    noise = [stack.enter_context(open_any(run)) for run in asked.noise]
    reference, ask = question(against, Path(path), noise, options)
    held = [stack.enter_context(reference())]

    def compared(run: Run) -> DiffResult | None:
        if may_grow(held[-1]):
            held.append(stack.enter_context(reference()))
            held.pop(0).close()
        if not run.ranks or not may_be_judged(held[-1], run):
            return None
        try:
            return ask(held[-1], run)
        except UsageError:  # what is selected may only come
            if run.state is not RunState.RUNNING:
                raise
            return None

    return compared


def _look(path: str, run: Run, ask: Any) -> tuple[Look, DiffResult | None]:
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.health.check import look

    began = time.monotonic()
    seen, compared = look(run), None if ask is None else ask(run)
    if seen.over or time.monotonic() - began < _SLOW:
        return seen, compared
    with open_any(path) as now:  # what took so long is behind
        return replace(seen, behind=(now.last_step or 0) - (seen.last or 0)), compared
