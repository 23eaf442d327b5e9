"""`introspect capture`: run somebody's training script and record it."""

from __future__ import annotations

import shlex
import sys
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.capture.options import AGAIN, HEADINGS, HOW, CaptureOptions, described, options_of
from introspect_cli.commands.shared import GroupedOption, compared_as, declare, say
from introspect_cli.errors import UsageError
from introspect_cli.script.processes import command_of
from introspect_cli.script.target import Target, check

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class CaptureCommand(click.Command):
    """A command whose options are grouped under headings in its help, and which keeps the words before the script."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help of the options, a section for each heading, in the order of `HEADINGS`; "Help" comes last."""
        headings: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            line = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if line is not None:
                headings.setdefault(getattr(param, "heading", "Help"), []).append(line)
        for heading in sorted(headings, key=(*HEADINGS, "Help").index):
            with formatter.section(heading):
                formatter.write_dl(headings[heading])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and set `ctx.meta["before script"]` to the words before the script, without a `--` at their end."""
        given = tuple(args)
        rest = super().parse_args(ctx, args)
        before = given[: len(given) - len(ctx.params.get("words") or ())]
        ctx.meta["before script"] = before[:-1] if before[-1:] == ("--",) else before
        return rest


def capture_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Declare all options of `capture` on a command: fields of `CaptureOptions`, then those of this command alone."""
    types = {item.name: str(item.type) for item in fields(CaptureOptions)}
    every = [declare(name, option, getattr(CaptureOptions, name), types[name]) for name, option in described()]
    declared = partial(click.option, cls=GroupedOption)
    neutral = "Run the script with and without a capture, and say whether both train the same."
    every += [
        declared("-m", "module", is_flag=True, heading=HOW, help="Run the module named next, as `python -m` does."),
        declared("--verify-neutral/--no-verify-neutral", default=False, heading=AGAIN, help=neutral),
        click.option("--last-look", hidden=True),  # what --verify-neutral gives to the processes it starts
    ]
    for add in reversed(every):
        command = add(command)
    return command


@click.command(
    cls=CaptureCommand,
    # parsing stops at the script: what follows is the script's, `--help` included
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    epilog="""\b
Examples:
  introspect capture -o runA train.py --lr 3e-4
  introspect capture --steps 0:10,100::100 --record input,output,grad train.py
  introspect capture --steps 'last(100)' --until-nan train.py
  introspect capture --against runA --stop train.py
  introspect capture --seed 0 --deterministic -m project.train --epochs 2""",
)
@capture_options
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT|-m MODULE [ARGS]...")
@click.pass_context
def capture(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    module: bool,
    verify_neutral: bool,
    last_look: str | None,
    **values: Any,
) -> Callable[[], int | BaseException | None]:
    """Run a training script, unmodified, and record what it computes.

    Put introspect's options before SCRIPT. Everything after it belongs to the script, and the exit code is the
    script's, too.
    """
    if not words:
        raise UsageError("nothing to run: give a script, or -m and a module (`introspect capture --help`)")
    options = options_of(values)
    if options.diff:
        compared_as(shlex.split(options.diff))
    first, args = words[0], words[1:]
    target = Target(module=first, args=args) if module else Target(script=first, args=args)
    command = command_of(words, module=module, interpreter=sys.executable)
    if command is None:
        check(target)
    if find_spec("torch") is None:
        raise UsageError("capture needs torch: `pip install torch`, in the environment of the script")
    if verify_neutral:
        if command is not None or options.perturb is not None:
            other = "a launcher" if command is not None else "--perturb"
            raise UsageError(f"--verify-neutral compares one process with itself: with {other}, leave one out")
        return partial(_verify_neutral, target, options, ctx.meta["before script"], words)
    if command is not None:
        from introspect_cli.capture.follow.launcher import run_followed

        return partial(run_followed, command, target, options, words)
    if last_look is not None:
        from introspect_cli.capture.neutrality import install, run_bare

        mode, _, report = last_look.partition(":")
        install(Path(report))
        if mode == "bare":
            return partial(run_bare, target, options)
    from introspect_cli.capture.session import run_capture  # torch, once all that can be told without it is

    if options.children != "all":
        return partial(run_capture, target, options)
    from introspect_cli.capture.follow.launcher import follow_children

    return partial(run_capture, target, options, partial(follow_children, options))


def _verify_neutral(target: Target, options: CaptureOptions, before_script: Sequence[str], words: Sequence[str]) -> int:
    """Run the script under a capture and without one, and say on stderr whether both train the same.

    The captured run is kept, and its directory named on stderr, if it was made.

    Args:
        target: what is run.
        options: the capture options.
        before_script: the words of the command line before the script.
        words: the script and its arguments.

    Returns:
        exit code: 0 they do, 1 they do not, 2 it cannot be told.

    Raises:
        UsageError: the run's directory exists and is not empty, and `--force` was not given.
    """
    from introspect_cli.capture import neutrality
    from introspect_cli.capture.ranks.launchers import new_run

    output = options.output or new_run(target)
    if not options.force and output.exists() and any(output.iterdir()):
        raise UsageError(f"{output} exists already; choose another place with -o, or --force to replace it")
    code, sentence = neutrality.verify_neutral(before_script, words, output)
    say(f"introspect: {sentence}", err=True)
    if output.exists():
        say(f"introspect: the captured run is in {output}", err=True)
    return code


def split_words(line: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(capture options, the script with its arguments, or `-m`, a module and its arguments) of a command line.

    It is only parsed; nothing runs. The second is () where no script is named.

    Raises:
        click.UsageError: the options are not those of `capture`.
    """
    context = capture.make_context("capture", list(line))
    options, rest = context.meta["before script"], context.params["words"]
    if context.params["module"]:
        return tuple(word for word in options if word != "-m"), ("-m", *rest)
    return options, rest
