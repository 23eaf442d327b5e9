"""`introspect capture`: run somebody's training script and record it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from introspect_cli import script
from introspect_cli.commands.capture_options import CaptureCommand, capture_options, read_options
from introspect_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


@click.command(
    cls=CaptureCommand,
    # parsing stops at the script: what follows is the script's, `--help` included
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog="""\b
Examples:
  introspect capture -o runA train.py --lr 3e-4
  introspect capture --steps 0:10,100::100 --record input,output,grad train.py
  introspect capture --seed 0 --deterministic -m project.train --epochs 2
  introspect capture --config capture.yaml train.py""",
)
@capture_options
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT|-m MODULE [ARGS]...")
def capture(words: tuple[str, ...], module: bool, **values: Any) -> Callable[[], int]:
    """Run a training script, unmodified, and record what it computes.

    Options of ours come before the script; all that follows it is the script's, and so is the exit code.
    """
    if not words:
        raise UsageError("nothing to run: give a script, or -m and a module (`introspect capture --help`)")
    options = read_options(values)
    first, args = words[0], words[1:]
    target = script.Target(module=first, args=args) if module else script.Target(script=first, args=args)
    script.check(target)
    from introspect_cli.capture.session import run_capture  # torch, once all that can be told without it is

    return partial(run_capture, target, options)
