"""`introspect capture`: run somebody's training script and record it."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from introspect_cli.capture.options.capture_options import CaptureOptions, described
from introspect_cli.capture.options.option import AGAIN, HEADINGS, HOW, RUN, SHORT, WHEN, Option
from introspect_cli.capture.options.parse import options_of
from introspect_cli.capture.processes import command_of
from introspect_cli.commands.shared import RunType
from introspect_cli.errors import UsageError, did_you_mean
from introspect_cli.script.target import Target, check

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

_NOT_IN_FILE = {"config", "module", "words", "help", "repeat", "verify_neutral", "last_look"}
_PERTURB = "--perturb"
_LONGEST = 1 << 16
"""Characters that options take at most: a device has no end."""
_SHORT = (
    "Only every N-th step, as --steps ::N.",
    "Also the first N steps; only these where no other steps are asked for.",
    "Also the last N steps, or only these: older ones are dropped from the run as it goes on.",
)
_UNSET = ("", "~", "null", "Null", "NULL")


class GroupedOption(click.Option):
    """An option that says under which heading its help stands."""

    def __init__(self, *args: Any, heading: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class CaptureCommand(click.Command):
    """A command whose help stands under headings, and whose errors name the file a value came from."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section a heading."""
        headings: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            line = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if line is not None:
                headings.setdefault(getattr(param, "heading", "Help"), []).append(line)
        for heading in sorted(headings, key=(*HEADINGS, "Help").index):
            with formatter.section(heading):
                formatter.write_dl(headings[heading])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, telling where a bad value was written if not on the command line."""
        args = self._with_seed(args)
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            name = error.param.name if error.param is not None else None
            if name is not None and ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
                message = f"{error.message} (in {ctx.meta['config']})"
                raise click.BadParameter(message, ctx, error.param) from error
            raise
        before_script = given[: len(given) - len(ctx.params.get("words") or ())]
        ctx.meta["before script"] = before_script[:-1] if before_script[-1:] == ["--"] else before_script
        return rest

    def _with_seed(self, args: list[str]) -> list[str]:
        """The command line with a seed for `--perturb` where none follows it: click would take the script for one."""
        takes = {
            name: not (param.is_flag or param.count)
            for param in self.params
            if isinstance(param, click.Option)
            for name in (*param.opts, *param.secondary_opts)
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
            if args[at] == _PERTURB:
                seed = args[at + 1 : at + 2]
                if not (seed and seed[0].isascii() and seed[0].isdigit()):
                    return [*args[:at], f"{_PERTURB}=0", *self._with_seed(args[at + 1 :])]
            at += 2 if takes.get(args[at], False) else 1
        return args


def _read_config(ctx: click.Context, _: click.Parameter, file: Path | None) -> None:
    if file is None:
        return
    options = [param for param in ctx.command.params if param.name not in _NOT_IN_FILE]
    ctx.meta["config"] = file
    ctx.default_map = read_config(
        file,
        names=[str(param.name) for param in options],
        lists=[str(param.name) for param in options if isinstance(param, click.Option) and param.multiple],
    )


def _declared(heading: str, text: str, *names: str, **settings: Any) -> Callable[[Any], Any]:
    return click.option(*names, cls=GroupedOption, heading=heading, help=text, **settings)


def from_field(name: str, option: Option, default: object) -> Callable[[Any], Any]:
    """One field of `CaptureOptions` as an option of the command line."""
    settings: dict[str, Any] = {"metavar": option.metavar}
    if option.metavar == "RUN":
        settings |= {"type": RunType()}
    if option.repeated:
        settings |= {"multiple": True}
    elif isinstance(default, float):
        settings |= {"type": click.FloatRange(min=0), "default": default}
    elif option.choices is not None:
        settings |= {"type": click.Choice(option.choices), "default": default}
    elif option.least is not None:
        settings |= {"type": click.IntRange(min=option.least, max=option.most), "default": default}
    elif option.metavar == "DIR":
        settings |= {"type": click.Path(path_type=Path)}
    elif option.metavar is None:
        settings |= {"default": default} if "/" in option.flags[-1] else {"is_flag": True}
    return _declared(option.heading, option.help, *option.flags, name, **settings)


def _declarations() -> Iterable[Callable[[Any], Any]]:
    """All options: those that are fields, and those that steer this command only."""
    for name, option in described():
        yield from_field(name, option, getattr(CaptureOptions, name))
        if name == "steps":
            for word, text in zip(SHORT, _SHORT, strict=True):
                yield _declared(WHEN, text, f"--{word}", metavar="N", type=int)
    yield _declared(
        RUN,
        "YAML file with any of these options by long name; the command line wins.",
        "--config", metavar="FILE", type=click.Path(path_type=Path),
        is_eager=True, expose_value=False, callback=_read_config,
    )  # fmt: skip
    yield _declared(HOW, "Run the module named next, as `python -m` does.", "-m", "module", is_flag=True)
    yield _declared(
        AGAIN,
        "Capture the script N times, into OUT-1 to OUT-N, and say whether all runs are the same.",
        "--repeat", metavar="N", type=click.IntRange(min=1), default=1,
    )  # fmt: skip
    yield _declared(
        AGAIN,
        "Run the script with and without a capture, and say whether both train the same.",
        "--verify-neutral/--no-verify-neutral", default=False,
    )  # fmt: skip
    yield click.option("--last-look", hidden=True)  # what --verify-neutral gives to the processes it starts


def capture_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Declare the options on a command."""
    for declare in reversed(list(_declarations())):
        command = declare(command)
    return command


def split_words(command: click.Command, line: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Capture options and, apart, the script with its arguments (or `-m`, a module and its arguments).

    Raises:
        click.UsageError: the options are not those of `capture`.
    """
    context = command.make_context("capture", list(line))
    rest: tuple[str, ...] = context.params["words"]
    options = line[: len(line) - len(rest)]
    if context.params["module"]:
        return tuple(word for word in options if word != "-m"), ("-m", *rest)
    return options, rest


def read_config(file: Path, *, names: Collection[str], lists: Collection[str]) -> dict[str, str | list[str]]:
    """The options in a YAML file, by parameter name.

    Raises:
        UsageError: no such file, not YAML, not a mapping, an unknown option, a value of the wrong form.
    """
    options: dict[str, str | list[str]] = {}
    for written, value in _mapping(file).items():
        name = str(written).replace("-", "_")
        if name not in names:
            written_as = [option.replace("_", "-") for option in names]
            hint = did_you_mean(str(written).replace("_", "-"), written_as) or ";"
            raise UsageError(f"{file} has an unknown option {written!r}{hint} choose from {', '.join(written_as)}")
        values: list[Any] = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in values):
            raise UsageError(f"{file}: {written!r} takes a value or a list of values, not a mapping")
        if name in lists:
            options[name] = [item for item in values if item not in _UNSET]
        elif name == "steps":
            options[name] = ",".join(values)
        elif isinstance(value, list):
            raise UsageError(f"{file}: {written!r} takes one value, not a list")
        elif value not in _UNSET:
            options[name] = value
    return options


def _mapping(file: Path) -> dict[Any, Any]:
    import yaml

    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise UsageError(f"{file} is longer than {_LONGEST:,} characters: write one `option: value` a line")
        # BaseLoader makes nothing but text, lists and mappings: less than SafeLoader does
        content = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - see above
    except OSError as error:
        raise UsageError(f"the options in {str(file)!r} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" (line {where.line + 1})" if where is not None else ""
        raise UsageError(f"{file} is not YAML{line}: write one `option: value` a line") from error
    if content in (None, ""):
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{file} is not a mapping of options: write one `option: value` a line")
    return content


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
  introspect capture --steps 'first(9) | last(9)' --publish mlflow train.py
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
        raise UsageError("--verify-neutral and --repeat cannot be combined: give one of them")
    if verify_neutral and options.perturb is not None:
        raise UsageError("--perturb changes training, so --verify-neutral cannot check it: leave one out")
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
