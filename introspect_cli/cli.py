"""The command: finding a verb, and turning how it went into text and an exit code.

A tool that is asked for `--help` must not import a deep-learning framework first, so verbs are listed in a
table and imported when called. Errors are raised as sentences wherever they are found and become text here.

A verb is a click command that returns its exit code, or a callable that does the work once click is out of
the way: `capture` runs a stranger's script, which must not find click below it on the stack, where it would
turn an EOFError into "Aborted!".
"""

from __future__ import annotations

import errno
import gc
import io
import keyword
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

import click

from introspect_cli.errors import IntrospectError, abridged, did_you_mean, scarcity
from introspect_cli.exit_codes import UNDECIDED
from introspect_cli.script.ending import leave
from introspect_cli.version import __version__

VERBS = {
    "bisect": "Find the commit or the change that made a script diverge.",
    "capture": "Run a training script and record what it computes.",
    "check": "Look for what usually goes wrong in training.",
    "diff": "Find where two runs first diverge, and why.",
    "export": "Write a run in other formats.",
    "golden": "Keep a small run in git and check a script against it.",
    "import": "Import a run from arrays or reports of other tools.",
    "merge": "Add up the ranks of a run.",
    "pack": "Make one file of a run, which every verb reads.",
    "publish": "Show a run in a logger while it is written.",
    "report": "Write an HTML page about one run, or about two.",
    "runs": "List runs.",
    "show": "Show what is in a run.",
    "verify": "Check that a run on disk is undamaged.",
    "zoom": "Repeat two runs and show which elements first differ.",
}
"""Every verb and its line of help; `introspect_cli/commands/VERB.py` holds the click command `VERB`, or else:"""

_TOGETHER = {
    **dict.fromkeys(("export", "import", "merge", "pack", "verify"), "stores"),
    **dict.fromkeys(("bisect", "golden", "zoom"), "reruns"),
}
"""Name of the file, for verbs that share one."""

_COMPLETE = "_INTROSPECT_COMPLETE"
"""Environment variable by which a shell asks for click's script (`bash_source`), and the script what comes next."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a file that takes no more output."""

Work = Callable[[], int | BaseException | None]

_REPORTED = ("torch", "numpy", "pyarrow", "click")
"""Distributions whose versions a bug report needs."""


class _Verbs(click.Group):
    """Click group of `VERBS`; each command is imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        return command_of(cmd_name) if cmd_name in VERBS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """Write `VERBS` without importing them."""
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """(name, command, other words) of a command line that begins with a verb.

        Raises:
            click.UsageError: the verb is unknown; the nearest one is named, or else all.
        """
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            hint = did_you_mean(name, VERBS, cutoff=0.7) or f"; choose from {', '.join(VERBS)}"
            raise click.UsageError(f"unknown verb {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)


def command_of(verb: str) -> click.Command:
    """Import and return the click command of a verb of `VERBS`, with its line there as short help."""
    name = f"{verb}_" if keyword.iskeyword(verb) else verb  # `import`
    command = getattr(import_module(f"introspect_cli.commands.{_TOGETHER.get(verb, verb)}"), name)
    assert isinstance(command, click.Command)
    command.short_help = VERBS[verb]
    return command


def _print_versions(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    """Print the versions of introspect, python, `_REPORTED` and the platform, and exit; does nothing where not `asked`.

    Nor does it while a shell asks for completions.
    """
    if not asked or ctx.resilient_parsing:
        return
    import platform
    from importlib.metadata import version
    from importlib.util import find_spec

    lines = [f"introspect {__version__}", f"python {platform.python_version()}"]
    lines += [f"{name} {version(name) if find_spec(name) else 'not installed'}" for name in _REPORTED]
    click.echo("\n".join([*lines, platform.platform()]))
    ctx.exit()


@click.group(
    cls=_Verbs,
    subcommand_metavar="VERB [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  introspect capture -o runA train.py --lr 3e-4
  introspect capture -o runB train.py --lr 1e-3
  introspect diff runA runB

`introspect VERB --help` tells more.""",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_versions,
    help="Print the versions a bug report needs and exit.",
)
def introspect() -> None:
    """Capture PyTorch training runs and find where two of them first diverge."""


def main() -> NoReturn:
    """Run the command line of this process and exit with the verb's code; after an interrupt, end as by SIGINT.

    What a captured script has raised ends the process, too.
    """
    outcome = _exit_code_of(_run_verb)
    if callable(outcome):
        outcome = _exit_code_of(outcome)
    match outcome:  # nothing is called, where a signal's handler might raise
        case BaseException():
            raise outcome
        case _ if outcome == -signal.SIGINT:
            leave(outcome)
        case _:
            raise SystemExit(outcome)


def _run_verb() -> int | Work:
    """Run the verb named on the command line; returns its exit code, or a function to call once click has returned.

    The function (of `capture`) does the work and returns the exit code, or what the script has raised. Without words,
    the help is shown; where a shell asks for completions, these are printed. Raises what click and the verb raise.
    """
    if _COMPLETE in os.environ:
        from click.shell_completion import shell_complete

        return shell_complete(introspect, {}, "introspect", _COMPLETE, os.environ[_COMPLETE])
    words = sys.argv[1:] or ["--help"]
    if words[0] != "capture":  # which leaves both to the script as they are
        gc.set_threshold(500_000, *gc.get_threshold()[1:])  # imported objects stay, and scanning them is slow
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")
    with introspect.make_context("introspect", words) as ctx:
        outcome: Any = introspect.invoke(ctx)
    if sys.stdout is not None:  # as it is where a shell has closed it
        sys.stdout.flush()  # a closed pipe is met here, not when the interpreter ends
    return outcome if callable(outcome) else int(outcome or 0)


def _exit_code_of(work: Callable[[], Any]) -> Any:
    """Call `work` and return its result; where it raises, say so on stderr and return an exit code.

    The code is that of an `IntrospectError`, else UNDECIDED. Nothing is said, and the code is -SIGINT, after an
    interrupt; nothing, and UNDECIDED, where the reader of standard output has gone. Standard output that takes no more
    becomes `/dev/null`, so that nothing is flushed to it at the end. A SystemExit comes out.
    """
    try:
        return work()
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except IntrospectError as error:
        return _print_error(str(error), error.exit_code)
    except click.ClickException as error:
        return _print_error(_message_of(error), UNDECIDED)
    except (KeyboardInterrupt, click.Abort):
        return -signal.SIGINT
    except BrokenPipeError:
        # whoever read our output has enough of it; nothing is left to be flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNDECIDED
    except OSError as error:
        if isinstance(error.filename, (str, os.PathLike)) and not scarcity(error):
            return _print_error(f"{os.fspath(error.filename)!r} cannot be used: {error.strerror}", UNDECIDED)
        if error.errno not in _FULL:
            return _report_bug(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _print_error(f"the answer cannot be written: {error.strerror}", UNDECIDED)
    except Exception as error:
        return _report_bug(error)


def _report_bug(error: Exception) -> int:
    """Print an unforeseen exception as a bug, with its traceback; where memory, files or threads ran out, a sentence.

    Returns:
        UNDECIDED.
    """
    lacking = scarcity(error)
    if lacking:
        return _print_error(f"this could not be finished: {lacking}", UNDECIDED)
    import traceback

    traceback.print_exc()
    return _print_error(
        "this is a bug in introspect: please report it with the lines above and `introspect --version`", UNDECIDED
    )


def _message_of(error: click.ClickException) -> str:
    """Message of a click error on one line, followed by a hint at the `--help` of its verb where it has one."""
    message = " ".join(map(str.strip, error.format_message().strip().splitlines()))
    context = getattr(error, "ctx", None)
    if context is None or context.command is introspect:
        return message
    return f"{message.rstrip('.')} (`{context.command_path} --help` tells more)"


def _print_error(sentence: str, code: int) -> int:
    """Print `introspect: <sentence>`, abridged, to stderr; returns `code`."""
    from introspect_cli.commands.shared import say

    say(f"introspect: {abridged(sentence)}", err=True)
    return code
