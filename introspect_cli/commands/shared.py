"""What several verbs have in common: options as fields of dataclasses, and answers written as they were asked for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.errors import UsageError
from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED
from introspect_cli.selection import Option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from introspect_cli.compare.result import DiffOptions, Verdict
    from introspect_cli.render.blocks import Block
    from introspect_cli.selection import Selection

TO_CAPTURE = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Context settings of verbs that hand on what they do not know to `capture`."""


class RunType(click.Path):
    """A run: its path, or `@1` for the last run, `@2` for the one before it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path of the run that `@1` stands for; any other word is taken for a path as it is.

        Raises:
            UsageError: there are not so many runs.
        """
        from introspect_cli.inspect.runs import chosen

        return super().convert(os.fspath(chosen(value)), param, ctx)


class DefaultGroup(click.Group):
    """A group that runs its first command where none is named, or where a run has the name of that command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the first command first where none is named.

        The first command's name counts as a run where such a path exists and only options follow. `-h` and `--help` in
        the first place are the group's.
        """
        default = next(iter(self.commands))
        is_run = not any(not word.startswith("-") for word in args[1:]) and Path(default).exists()
        has_command = bool(args) and args[0] in self.commands and not (args[0] == default and is_run)
        if not has_command and args[:1] not in (["-h"], ["--help"]):
            args = [default, *args]
        return super().parse_args(ctx, args)


# --- options


class GroupedOption(click.Option):
    """An option that says under which heading its help stands; "" for none."""

    def __init__(self, *args: Any, heading: str = "", **kwargs: Any) -> None:
        """Declare an option as click does; `heading` is only kept, for the code that writes the help."""
        super().__init__(*args, **kwargs)
        self.heading = heading


def option(default: object, text: str, *flags: str, **details: Any) -> Any:
    """A field of a dataclass, with an `Option` as its metadata `option`; `takes` declares it.

    Args:
        default: value of the field where the option is not given.
        text: the help.
        flags: names of the option beside that of the field.
        details: more fields of `Option`.
    """
    return field(default=default, metadata={"option": Option("", flags, text, **details)})


def declare(name: str, described: Option, default: object, annotation: str = "") -> Callable[[Any], Any]:
    """A decorator that declares a field of a dataclass as an option of a command.

    Its type follows from the metavar `RUN`, else a `Path` in the annotation, else a float as default, choices, a least
    number, an int in the annotation; without any of these, a metavar or two names (`--a/--b`) it is a flag. A
    collection as default makes it repeatable.

    Args:
        name: of the field.
        described: the option.
        default: of the field.
        annotation: the field's type as text.
    """
    settings: dict[str, Any] = {"metavar": described.metavar, "help": described.help, "heading": described.heading}
    if described.metavar == "RUN":
        settings["type"] = RunType()
    elif "Path" in annotation:
        settings["type"] = click.Path(path_type=Path)
    elif isinstance(default, float):
        settings["type"] = click.FloatRange(min=0)
    elif described.choices is not None:
        settings["type"] = click.Choice(described.choices)
    elif described.least is not None:
        settings |= {"type": click.IntRange(described.least, described.most), "metavar": described.metavar or "N"}
    elif "int" in annotation:
        settings["type"] = int
    elif described.metavar is None and "/" not in described.flags[-1]:
        settings["is_flag"] = True
    settings |= {"multiple": True} if described.repeated else {"default": default}
    return click.option(*described.flags, name, cls=GroupedOption, **settings)


def takes(kind: type[Any], name: str = "asked", only: Sequence[str] = ()) -> Callable[[Any], Any]:
    """A decorator that declares the fields of a dataclass as options of a verb.

    Args:
        kind: the dataclass.
        name: keyword by which the verb gets the options, as one value of the dataclass.
        only: names of the fields that are declared; () for all.
    """
    chosen = [item for item in fields(kind) if not only or item.name in only]

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a command so that it takes these options, in the order of the fields, and gets them as one value."""

        @wraps(command)
        def call(*args: Any, **given: Any) -> Any:
            """Call the command with the values of these options as one dataclass, the keyword `name`."""
            asked = kind(**{item.name: given.pop(item.name) for item in chosen})
            return command(*args, **{name: asked}, **given)

        for item in reversed(chosen):
            described = item.metadata["option"].named(item.name.strip("_"), item.default)
            call = declare(item.name, described, item.default, str(item.type))(call)
        return call

    return add


@dataclass(frozen=True)
class Written:
    """How an answer is written."""

    format_: str = option("table", "How the answer is written [default: table].", choices=("table", "json"))


@dataclass(frozen=True)
class Working:
    """Where the work on many ranks is done."""

    workers: int = option(1, "Read ranks in so many processes [default: 1].", least=1, most=9999)


@dataclass(frozen=True)
class Linking:
    """What of the project is linked where it is rebuilt."""

    link: tuple[str, ...] = option((), "Link this data instead of copying it; repeatable.", metavar="PATH")


@dataclass(frozen=True)
class Selecting:
    """The options that select a part of a run."""

    steps: str | None = option(None, "Only these steps: 0,5,10:20,100::50.", metavar="STEPS")
    kinds: tuple[str, ...] = option((), "Only these kinds of values: grad,loss.", "--record", metavar="KINDS")
    modules: tuple[str, ...] = option(
        (), "Only these modules and what is inside, such as blocks.0; repeatable.", metavar="GLOB"
    )
    ranks: str | None = option(None, "Only these ranks: 0,3, or all.", metavar="RANKS")

    def read(self) -> Selection:
        """The selection that these options describe.

        Raises:
            UsageError: an option cannot be read.
        """
        from introspect_cli.selection import read_selection

        return read_selection(self.steps, self.kinds, self.modules, self.ranks)


@dataclass(frozen=True)
class Tolerating:
    """Which differences are accepted."""

    rtol: float = option(0.0, "Accept relative RMS differences up to X.", metavar="X")
    atol: float = option(0.0, "Accept absolute RMS differences up to X.", metavar="X")


@dataclass(frozen=True)
class Comparing(Tolerating, Selecting):
    """The options that change the answer of a comparison."""

    noise: tuple[str, ...] = option((), "A repeat of A: accept differences as large as theirs.", metavar="RUN")
    rename: tuple[str, ...] = option((), "Rename FQNs of A by a regular expression.", metavar="OLD=NEW")
    match: str = option("value", "Recognise renamed modules by value [default: value].", choices=("name", "value"))
    strict: bool = option(False, "Count every difference, in structure and random states, too.")
    offset: int | None = option(None, "Compare step K of B with step K+N of A; resumed runs need none.", metavar="N")

    def options(self, **more: Any) -> DiffOptions:
        """The options of a comparison as `DiffOptions`; `more` are further fields of it.

        Raises:
            UsageError: an option cannot be read.
        """
        from introspect_cli.compare.result import DiffOptions

        same = {name: getattr(self, name) for name in ("offset", "rtol", "atol", "strict")}
        rename = tuple(_parsed_rename(text) for text in self.rename)
        return DiffOptions(**vars(self.read()), **same, by_value=self.match == "value", rename=rename, **more)


def compared_as(words: Sequence[str]) -> Comparing:
    """Read options of a comparison from words, as they are written for `diff`.

    Raises:
        UsageError: a word is no option that changes the answer of `diff` (a field of `Comparing`), or its value cannot
            be read.
    """
    command = click.command("--diff", add_help_option=False)(takes(Comparing)(lambda asked: asked))
    try:
        with command.make_context("--diff", list(words)) as context:
            asked: Comparing = command.invoke(context)
    except click.ClickException as error:
        takes_what = "--diff takes options that change the answer of `introspect diff`"
        raise UsageError(f"{takes_what}: {error.format_message()}") from None
    asked.options()
    return asked


# --- runs


def last_runs(count: int) -> list[str]:
    """Paths of the last `count` (1 or 2) runs below `introspect-runs/`, the older first; written to stderr, too.

    Raises:
        UsageError: there are fewer.
    """
    from introspect_cli.inspect.runs import latest

    paths = [str(path) for path in reversed(latest(count))]
    tell(f"introspect: the last run is {paths[0]}" if count == 1 else f"introspect: a is {paths[0]}, b is {paths[1]}")
    return paths


def pair_of(a: str | None, b: str | None) -> tuple[str, str]:
    """The two runs to compare: those named; where `a` is None, the last two, which are written to stderr.

    Raises:
        UsageError: only one is named, or there are fewer than two.
    """
    if a is None:
        a, b = last_runs(2)
    if b is None:
        raise UsageError(f"name a second run to compare {a} with, or none at all for the last two.")
    return a, b


# --- answers


def answer(format_: str, document: Callable[[], Any], blocks: Callable[[], Iterable[Block]]) -> None:
    """Write an answer to standard output.

    Args:
        format_: `table`, `json` or `yaml`.
        document: makes the answer as plain values; called for json and yaml alone.
        blocks: makes the answer as blocks; called for a table alone.
    """
    if format_ == "table":
        from introspect_cli.render.console import Screen

        Screen().draw(blocks())
        return
    from introspect_cli.render.json import to_json, to_yaml

    click.echo(to_yaml(document()) if format_ == "yaml" else to_json(document()))


def say(sentence: str, *, err: bool = False) -> None:
    """Write a sentence to standard output, or with `err` to stderr, with control characters but line ends as escapes.

    A file name in it may hold codes for a terminal.
    """
    from introspect_cli.texts import clean

    click.echo("\n".join(map(clean, sentence.split("\n"))), err=err)


def tell(line: str) -> None:
    """Write a line of progress to stderr; control characters, line ends included, as escapes."""
    from introspect_cli.texts import clean

    click.echo(clean(line), err=True)


def exit_code(verdict: Verdict) -> int:
    """The exit code for a verdict: 0 same, 1 diverged, 2 undecided."""
    return {"same": SAME, "diverged": DIVERGED, "undecided": UNDECIDED}[verdict.value]


def _parsed_rename(text: str) -> tuple[str, str]:
    r"""(pattern, replacement) of the text `OLD=NEW`, cut at its first `=`; `\=` stands for an equals sign.

    Raises:
        UsageError: no equals sign, an empty OLD, OLD is no regular expression, or NEW no replacement of it.
    """
    parts = re.split(r"(?<!\\)=", text, maxsplit=1)
    if len(parts) != 2 or not parts[0]:
        raise UsageError(f"--rename takes OLD=NEW, a regular expression and its replacement, not {text!r}.")
    old, new = parts[0].replace("\\=", "="), parts[1].replace("\\=", "=")
    try:
        re.compile(old).sub(new, "")
    except (re.error, IndexError) as error:
        raise UsageError(f"--rename {text!r} is not a regular expression with its replacement: {error}.") from None
    return old, new
