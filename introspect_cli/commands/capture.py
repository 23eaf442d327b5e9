"""`introspect capture`: run somebody's training script and record it."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.capture.follow.processes import command_of
from introspect_cli.capture.parse_options import options_of
from introspect_cli.commands.capture_options import CaptureCommand, capture_options
from introspect_cli.errors import UsageError
from introspect_cli.script.target import Target, check

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
  introspect capture --last 100 --until-nan train.py
  introspect capture --against runA --stop train.py
  introspect capture --first 10 --every-seconds 600 --publish mlflow train.py
  introspect capture --seed 0 --deterministic -m project.train --epochs 2
  introspect capture --config capture.yaml train.py""",
)
@capture_options
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT|-m MODULE [ARGS]...")
@click.pass_context
def capture(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    module: bool,
    repeat: int,
    verify_neutral: bool,
    last_look: str | None,
    **values: Any,
) -> Callable[[], int]:
    """Run a training script, unmodified, and record what it computes.

    Put introspect's options before SCRIPT. Everything after it belongs to the script, and the exit code is the
    script's, too.
    """
    if not words:
        raise UsageError("nothing to run: give a script, or -m and a module (`introspect capture --help`)")
    options = options_of(values)
    if options.diff:
        from introspect_cli.commands.shared import compared_as

        compared_as(shlex.split(options.diff))
    first, args = words[0], words[1:]
    target = Target(module=first, args=args) if module else Target(script=first, args=args)
    command = command_of(words, module=module, interpreter=sys.executable)
    if command is None:
        check(target)
    if find_spec("torch") is None:
        raise UsageError("capture needs torch: `pip install torch`, in the environment of the script")
    if verify_neutral and command is not None:
        raise UsageError("--verify-neutral compares one process with itself: give it the script, not a launcher")
    if verify_neutral and repeat > 1:
        raise UsageError("--verify-neutral and --repeat are two questions: ask one at a time")
    if verify_neutral and options.perturb is not None:
        raise UsageError("--perturb changes what is trained, so --verify-neutral says nothing of it: leave one out")
    if verify_neutral or repeat > 1:
        from introspect_cli.commands import capture_again

        before_script = ctx.meta["before script"]
        if verify_neutral:
            return partial(capture_again.verify_neutral, target, options, before_script, words)
        return partial(capture_again.repeat, target, options, before_script, words, repeat)
    if command is not None:
        from introspect_cli.capture.follow.launcher import run_followed

        return partial(run_followed, command, target, options, words)
    if last_look is not None:
        from introspect_cli.capture.last_look import install, run_bare

        mode, _, report = last_look.partition(":")
        install(Path(report))
        if mode == "bare":
            return partial(run_bare, target, options)
    from introspect_cli.capture.session import run_capture  # torch, once all that can be told without it is

    if options.children != "all":
        return partial(run_capture, target, options)
    from introspect_cli.capture.follow.launcher import follow_children

    return partial(run_capture, target, options, partial(follow_children, options))
