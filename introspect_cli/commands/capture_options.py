"""The options of `capture`: their declarations, their help in groups, their meaning as `CaptureOptions`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from introspect_cli.capture.options import (
    COMPILE_MODES,
    DEFAULT_STATS,
    KINDS,
    LEVELS,
    STATS,
    CaptureOptions,
    check_pairs,
    parse_kinds,
    parse_stats,
)
from introspect_cli.config import read_config
from introspect_cli.errors import UsageError
from introspect_cli.records import Kind
from introspect_cli.selection import Schedule, words

if TYPE_CHECKING:
    from collections.abc import Callable

RUN, WHAT, WHEN, HOW, AGAIN, SETTINGS = (
    "The run",
    "What is recorded",
    "When it is recorded",
    "How the script runs",
    "Running it more than once",
    "Settings kept beside it",
)

_NOT_IN_FILE = {"config", "module", "words", "help", "repeat", "verify_neutral", "last_look"}


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
        for heading, lines in headings.items():
            with formatter.section(heading):
                formatter.write_dl(lines)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, telling where a bad value was written if not on the command line."""
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            name = error.param.name if error.param is not None else None
            if name is not None and ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
                message = f"{error.message} (in {ctx.meta['config']})"
                raise click.BadParameter(message, ctx, error.param) from error
            raise
        own = given[: len(given) - len(ctx.params.get("words") or ())]
        ctx.meta["own"] = own[:-1] if own[-1:] == ["--"] else own
        return rest


def _read_config(ctx: click.Context, _: click.Parameter, file: Path | None) -> None:
    if file is None:
        return
    options = [param for param in ctx.command.params if param.name not in _NOT_IN_FILE]
    ctx.meta["config"] = file
    ctx.default_map = read_config(
        file,
        known=[str(param.name) for param in options],
        lists=[str(param.name) for param in options if isinstance(param, click.Option) and param.multiple],
    )


def _option(heading: str, text: str, *names: str, **settings: Any) -> Callable[[Any], Any]:
    return click.option(*names, cls=GroupedOption, heading=heading, help=text, **settings)


_DECLARATIONS = (
    _option(
        RUN,
        "Directory of the run [default: a fresh one under introspect-runs/, named at the end].",
        "-o", "--output", metavar="DIR", type=click.Path(path_type=Path),
    ),
    _option(RUN, "Replace an existing run.", "--force", is_flag=True),
    _option(
        RUN,
        "YAML file with any of these options by long name; the command line wins.",
        "--config", metavar="FILE", type=click.Path(path_type=Path),
        is_eager=True, expose_value=False, callback=_read_config,
    ),
    _option(RUN, "Say nothing but errors.", "-q", "--quiet", is_flag=True),
    _option(
        WHAT,
        f"Kinds of values, with commas between: {', '.join(KINDS)}; or default, all, none.",
        "--record", "--kinds", "record", metavar="KINDS", multiple=True,
    ),
    _option(
        WHAT,
        f"Statistics of each tensor, with commas between: {', '.join(STATS)}; or default "
        f"(all but {' and '.join(name for name in STATS if name not in DEFAULT_STATS)}), all, none.",
        "--stats", metavar="NAMES", multiple=True,
    ),
    _option(
        WHAT,
        "Keep 16 numbers a tensor that tell how far two tensors are apart [default: yes].",
        "--sketch/--no-sketch", default=True,
    ),
    _option(
        WHAT,
        "Record only modules whose name matches, such as '*.attn'; may be repeated.",
        "--modules", metavar="GLOB", multiple=True,
    ),
    _option(
        WHAT,
        "What is looked at: each module, or also the result of each operator in it, forward and backward "
        "[default: module].",
        "--level", type=click.Choice(LEVELS), default="module",
    ),
    _option(
        WHAT,
        "With --level op, record only operators whose name matches, such as mm or 'aten.*norm*'; may be repeated.",
        "--ops", metavar="GLOB", multiple=True,
    ),
    _option(
        WHAT,
        "With --level op, also record results that are views of what went in [default: no].",
        "--views/--no-views", default=False,
    ),
    _option(
        WHAT,
        "With --level op, also record results that are no floating point numbers [default: no].",
        "--all-dtypes/--float-dtypes", default=False,
    ),
    _option(
        WHAT,
        "Record how one value depends on another: the vector-Jacobian product with ones, such as "
        "lm_head:blocks.0/input[0]; may be repeated.",
        "--vjp", metavar="OUTPUT:INPUT", multiple=True,
    ),
    _option(
        WHAT,
        "Estimate the Frobenius norm of such a Jacobian, with its standard error; may be repeated.",
        "--jacobian-norm", metavar="OUTPUT:INPUT", multiple=True,
    ),
    _option(
        WHAT,
        "Random vectors for an estimated norm [default: 8].",
        "--probes", metavar="K", type=click.IntRange(min=2), default=8,
    ),
    _option(
        WHAT,
        "Leave out modules whose name matches; may be repeated.",
        "--exclude", metavar="GLOB", multiple=True,
    ),
    _option(
        WHAT,
        "Record no module more than N levels below its root.",
        "--max-depth", metavar="N", type=click.IntRange(min=0),
    ),
    _option(
        WHAT,
        "Keep whole tensors of what matches by name; may be repeated.",
        "--save-tensors", metavar="GLOB", multiple=True,
    ),
    _option(WHEN, "Steps and python slices, such as 0,5,10:20,100::50.", "--steps", metavar="STEPS"),
    _option(WHEN, "Of these, only the multiples of N.", "--every", metavar="N", type=int),
    _option(
        WHEN,
        "End the script when step N is complete.",
        "--until-step", metavar="N", type=click.IntRange(min=0),
    ),
    _option(
        WHEN,
        "Record forward passes outside training [default: if the script has no optimizer].",
        "--eval/--no-eval", default=None,
    ),
    _option(HOW, "Run the module named next, as `python -m` does.", "-m", "module", is_flag=True),
    _option(
        HOW,
        "What torch.compile compiles: recorded at its boundary; kept compiled and tapped inside, which limits fusion; "
        "or run as python [default: boundary].",
        "--compile", type=click.Choice(COMPILE_MODES), default="boundary",
    ),
    _option(
        HOW,
        "Seed python, numpy and torch before the script starts.",
        "--seed", metavar="N", type=click.IntRange(min=0, max=2**32 - 1),
    ),
    _option(
        HOW,
        "Ask torch and its libraries for deterministic algorithms.",
        "--deterministic", is_flag=True,
    ),
    _option(
        AGAIN,
        "Capture the script N times, into OUT-1 to OUT-N, and say whether all runs are the same.",
        "--repeat", metavar="N", type=click.IntRange(min=1), default=1,
    ),
    _option(
        AGAIN,
        "Run the script watched and bare, and say whether both train the same.",
        "--verify-neutral/--no-verify-neutral", default=False,
    ),
    click.option("--last-look", hidden=True),  # what --verify-neutral gives to the processes it starts
    _option(
        SETTINGS,
        "Environment variables, secrets redacted [default: yes].",
        "--env/--no-env", default=True,
    ),
    _option(SETTINGS, "Installed packages [default: yes].", "--packages/--no-packages", default=True),
    _option(
        SETTINGS,
        "Hashes of the script's own source files [default: yes].",
        "--source/--no-source", default=True,
    ),
    _option(
        SETTINGS,
        "Redact more environment variables, by name, such as 'WANDB_*'; may be repeated.",
        "--redact", metavar="PATTERN", multiple=True,
    ),
)  # fmt: skip


def capture_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Declare the options on a command."""
    for declare in reversed(_DECLARATIONS):
        command = declare(command)
    return command


def read_options(values: dict[str, Any]) -> CaptureOptions:
    """The options as given, checked.

    Raises:
        UsageError: an unknown kind or statistic, a bad schedule.
    """
    values = dict(values)
    record, stats = values.pop("record"), values.pop("stats")
    values |= {name: words(values[name]) for name in ("modules", "exclude", "save_tensors", "redact")}
    schedule = Schedule.parse(values.pop("steps"), values.pop("every"))
    if record:
        values["record"] = parse_kinds(record)
    if values["level"] == "op":
        values["record"] = values.get("record", parse_kinds(["default"])) | {Kind.OP_OUTPUT}
    if values["vjp"] or values["jacobian_norm"]:
        check_pairs((*values["vjp"], *values["jacobian_norm"]))
        values["record"] = values.get("record", parse_kinds(["default"])) | {Kind.OP_OUTPUT}
    if values["level"] != "op" and (values["ops"] or values["views"] or values["all_dtypes"]):
        raise UsageError("--ops, --views and --all-dtypes say which operators are recorded: give --level op with them")
    if stats:
        values["stats"] = parse_stats(stats)
    return CaptureOptions(schedule=schedule, **values)


def split_words(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Capture options and, apart, the script with its arguments (or `-m`, a module and its arguments).

    Raises:
        click.UsageError: the options are not those of `capture`.
    """
    from introspect_cli.commands.capture import capture

    context = capture.make_context("capture", list(words))
    rest: tuple[str, ...] = context.params["words"]
    options = words[: len(words) - len(rest)]
    if context.params["module"]:
        return tuple(word for word in options if word != "-m"), ("-m", *rest)
    return options, rest
