"""`introspect watch`: a run while it goes on, from another terminal."""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.commands.shared import RunType, exit_code, last_runs, rtol
from introspect_cli.exit_codes import SAME

if TYPE_CHECKING:
    from introspect_cli.compare.result import DiffResult
    from introspect_cli.health.look import Look
    from introspect_cli.store.reader import Run

_PAUSE = 1.0
_REST = 4
_PATIENCE = 5
_LOOKS = 30
"""Looks over which the rate is taken."""


@click.command(
    short_help="Show a run while it goes on.",
    epilog="""\b
Examples:
  introspect watch                    (the last run below introspect-runs/)
  introspect watch runB --against runA
  introspect watch runB --once

Exit status: 0; with --against, 1 where the runs diverge, and that of diff once the run is over.""",
)
@click.argument("run", type=RunType(), required=False)
@click.option("--against", type=RunType(), metavar="RUN", help="A run, pack, URL or golden run to compare with.")
@rtol
@click.option("--once", is_flag=True, help="Show it once, as it is now, for scripts and cron.")
def watch(run: str | None, against: str | None, rtol: float, *, once: bool) -> int:
    """Show how far RUN is, its losses and norms, what `check` finds, and its distance to another run.

    The screen is drawn again as steps come, and the command ends when the run does. In a pipe it prints a
    line each time it looks, and draws the screen at the end.
    """
    from introspect_cli.errors import StoreError
    from introspect_cli.render.check_text import watch_blocks, watch_line
    from introspect_cli.render.console import Screen

    path, screen, failed, last = run or last_runs(1)[0], Screen(), 0, None
    looks: deque[tuple[float, int]] = deque(maxlen=_LOOKS)
    with ExitStack() as stack:
        ask = _question(stack, against, path, rtol)
        draw = None if once else stack.enter_context(screen.live())
        while True:
            began = time.monotonic()
            try:
                seen, compared = _look(path, ask)
                failed = 0
            except StoreError:  # a writer may be about to replace a file
                failed += 1
                if once or last is None or failed > _PATIENCE:
                    raise
                time.sleep(_PAUSE)
                continue
            seen = _with_rate(seen, looks, began)
            beside = None if against is None else (against, compared)
            blocks = watch_blocks(seen, screen.width, beside, ascii_only=not screen.unicode)
            if draw is not None:
                draw(blocks)
            elif not once and not seen.over and (last is None or seen.steps != last.steps):
                click.echo(watch_line(seen))
            last = seen
            if once or seen.over:
                break
            time.sleep(max(_PAUSE, _REST * (time.monotonic() - began)))
    if draw is None:
        screen.draw(blocks)
    if compared is None or not (seen.over or compared.first is not None):
        return SAME
    return exit_code(compared.verdict)


def _with_rate(seen: Look, looks: deque[tuple[float, int]], now: float) -> Look:
    """What is seen, with the rate since the earliest of the last looks where the run goes on."""
    if seen.last is None or seen.over:
        return seen
    looks.append((now, seen.last))
    then, before = looks[0]
    if seen.last <= before:
        return seen
    return replace(seen, rate=(seen.last - before) / (now - then), recent=True)


def _question(stack: ExitStack, against: str | None, path: str, rtol: float) -> Any:
    """Gives the comparison with a reference, opened, of a run, opened; None without one."""
    if against is None:
        return None
    from introspect_cli.commands.alongside import question
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.rerun.alongside import may_be_judged
    from introspect_cli.store.reader import RunState

    reference, ask = question(against, Path(path), (), DiffOptions(rtol=rtol, want_map=True))
    held = [stack.enter_context(reference())]

    def compared(run: Run) -> DiffResult | None:
        if held[-1].state is RunState.RUNNING:
            held.append(stack.enter_context(reference()))
            held.pop(0).close()
        return ask(held[-1], run) if run.ranks and may_be_judged(held[-1], run) else None

    return compared


def _look(path: str, ask: Any) -> tuple[Look, DiffResult | None]:
    from introspect_cli.exchange.checkpoints import open_any
    from introspect_cli.health.look import look

    with open_any(path) as run:
        return look(run), None if ask is None else ask(run)
