"""What several verbs have in common: options, and answers written as they were asked for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from introspect_cli.compare.terms.options import DiffOptions
    from introspect_cli.compare.terms.result import Verdict
    from introspect_cli.render.blocks import Block
    from introspect_cli.selection import Selection

_SELECTING: dict[str, Callable[[Any], Any]] = {
    "steps": click.option(
        "--steps", metavar="STEPS", help="Only these steps: 0,5,10:20,100::50, or a framework's: epoch=3,batch=12."
    ),
    "kinds": click.option(
        "--kinds",
        "--record",
        "kinds",
        metavar="KINDS",
        multiple=True,
        help="Only these kinds of values: grad,loss.",
    ),
    "modules": click.option(
        "--modules",
        metavar="GLOB",
        multiple=True,
        help="Only these modules and what is inside, such as blocks.0 or '*.attn'; repeatable.",
    ),
    "ranks": click.option(
        "--ranks",
        metavar="RANKS",
        help="Only these ranks: 0,3, one-per-replica, all.",
    ),
}


class RunType(click.Path):
    """A run: its path, or `@1` for the last run, `@2` for the one before it, or a label."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path of the run."""
        from introspect_cli.inspect.runs import chosen

        return super().convert(chosen(value), param, ctx)


def last_runs(count: int) -> list[str]:
    """The last runs, the oldest of them first, where none was named; says which they are.

    Raises:
        UsageError: there are not so many.
    """
    from introspect_cli.inspect.runs import latest

    paths = [str(path) for path in reversed(latest(count))]
    tell(f"introspect: the last run is {paths[0]}" if count == 1 else f"introspect: a is {paths[0]}, b is {paths[1]}")
    return paths


def pair_of(a: str | None, b: str | None) -> tuple[str, str]:
    """The two runs to compare: those named, or the last two.

    Raises:
        UsageError: only one is named, or there are not two.
    """
    from introspect_cli.errors import UsageError

    if a is None:
        a, b = last_runs(2)
    if b is None:
        raise UsageError(f"name a second run to compare {a} with, or none at all for the last two.")
    return a, b


_TOLERATED: dict[str, Any] = {"type": click.FloatRange(min=0), "default": 0.0, "metavar": "X"}
rtol_option = click.option("--rtol", **_TOLERATED, help="Accept relative RMS differences up to X.")
atol_option = click.option("--atol", **_TOLERATED, help="Accept absolute RMS differences up to X.")


_COMPARED = (
    rtol_option,
    atol_option,
    click.option(
        "--noise",
        multiple=True,
        type=RunType(),
        metavar="RUN",
        help="A repeat of A: accept differences as large as between these two.",
    ),
    click.option("--rename", multiple=True, metavar="OLD=NEW", help="Rename FQNs of A by a regular expression."),
    click.option(
        "--match",
        type=click.Choice(["name", "value"]),
        default="value",
        show_default=True,
        help="Recognise renamed modules by their values, or not.",
    ),
    click.option("--strict", is_flag=True, help="Count every difference, in structure and random states, too."),
    click.option(
        "--offset", type=int, metavar="N", help="Compare step K of B with step K+N of A; resumed runs need none."
    ),
)

engine_option = click.option(
    "--engine",
    metavar="ENGINE",
    default="here",
    show_default=True,
    help="Where many ranks are read: here, processes:N or dask:ADDRESS.",
)


link_option = click.option(
    "--link",
    "links",
    multiple=True,
    metavar="PATH",
    help="Link this data instead of copying it; repeatable.",
)


def force_option(what: str) -> Callable[[Any], Any]:
    """Declare `--force`."""
    return click.option("--force", is_flag=True, help=f"Replace {what} that is there.")


def formats(*more: str) -> Callable[[Any], Any]:
    """Declare `--format`: a table, JSON, and more."""
    choice = click.Choice(["table", "json", *more])
    return click.option(
        "--format", "format_", type=choice, default="table", show_default=True, help="How the answer is written."
    )


def gathered(kind: type[Any], name: str) -> Callable[[Any], Any]:
    """Hand those options that are fields of a dataclass to a verb as one value of it, under a name."""

    def declare(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def call(*args: Any, **given: Any) -> Any:
            asked = kind(**{field.name: given.pop(field.name) for field in fields(kind) if field.name in given})
            return command(*args, **{name: asked}, **given)

        return call

    return declare


@dataclass(frozen=True)
class Selecting:
    """The options that select a part of a run."""

    steps: str | None = None
    kinds: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    ranks: str | None = None

    def read(self) -> Selection:
        """The selection.

        Raises:
            UsageError: an option cannot be read.
        """
        from introspect_cli.selection import read_selection

        return read_selection(self.steps, self.kinds, self.modules, self.ranks)


@dataclass(frozen=True)
class Comparing(Selecting):
    """The options that change the answer of a comparison."""

    rtol: float = 0.0
    atol: float = 0.0
    noise: tuple[str, ...] = ()
    rename: tuple[str, ...] = ()
    match: str = "value"
    strict: bool = False
    offset: int | None = None

    def options(self, **more: Any) -> DiffOptions:
        """What a comparison is asked with, and more of its fields.

        Raises:
            UsageError: an option cannot be read.
        """
        from introspect_cli.compare.terms.names import parse_rename
        from introspect_cli.compare.terms.options import DiffOptions

        return DiffOptions(
            **vars(self.read()),
            offset=self.offset,
            rtol=self.rtol,
            atol=self.atol,
            strict=self.strict,
            by_value=self.match == "value",
            rename=tuple(parse_rename(text) for text in self.rename),
            **more,
        )


def selecting(*names: str) -> Callable[[Any], Any]:
    """Declare options that select a part of a run, of `steps`, `kinds`, `modules`, `ranks`; they come as `selected`."""

    def declare(command: Any) -> Any:
        command = gathered(Selecting, "selected")(command)
        for name in reversed(names):
            command = _SELECTING[name](command)
        return command

    return declare


def comparing(command: Any) -> Any:
    """Declare the options that change the answer of a comparison; they come as `compared`."""
    return _comparing(gathered(Comparing, "compared")(command))


def _comparing(command: Any) -> Any:
    for option in reversed((*_SELECTING.values(), *_COMPARED)):
        command = option(command)
    return command


def compared_as(words: Sequence[str]) -> tuple[DiffOptions, tuple[str, ...]]:
    """What a comparison is asked with, written as for `diff`: its options, and the repeated runs of a.

    Raises:
        UsageError: that is no option that changes the answer of `diff`, or cannot be meant.
    """
    from introspect_cli.errors import UsageError

    try:
        with _comparing(click.Command("--diff", params=[])).make_context("--diff", list(words)) as context:
            asked = Comparing(**context.params)
    except click.ClickException as error:
        raise UsageError(
            f"--diff takes options that change the answer of `introspect diff`: {error.format_message()}"
        ) from None
    return asked.options(), asked.noise


def answer(format_: str, document: Callable[[], Any], blocks: Callable[[], Iterable[Block]]) -> None:
    """Write an answer to stdout: drawn, or as a document in JSON or YAML; only what was asked for is made."""
    if format_ == "table":
        from introspect_cli.render.console import Screen

        Screen().draw(blocks())
        return
    from introspect_cli.render.json import to_json, to_yaml

    click.echo(to_yaml(document()) if format_ == "yaml" else to_json(document()))


def say(sentence: str, *, err: bool = False) -> None:
    """Write a sentence that may hold the name of a file: whoever made that may have put codes for a terminal in it."""
    from introspect_cli.texts import clean

    click.echo("\n".join(map(clean, sentence.split("\n"))), err=err)


def tell(line: str) -> None:
    """Write to stderr, on one line, how far something is that takes a while."""
    from introspect_cli.texts import clean

    click.echo(clean(line), err=True)


def exit_code(verdict: Verdict) -> int:
    """What a shell script is told of a comparison."""
    from introspect_cli.compare.terms.result import Verdict

    return {Verdict.SAME: SAME, Verdict.DIVERGED: DIVERGED, Verdict.UNDECIDED: UNDECIDED}[verdict]
