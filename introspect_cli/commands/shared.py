"""What several verbs have in common: options that select a part of a run, and documents written to stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from introspect_cli.exit_codes import DIVERGED, SAME, UNDECIDED

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.result import Verdict
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
        help="Only these kinds of values, with commas between.",
    ),
    "modules": click.option(
        "--modules",
        metavar="GLOB",
        multiple=True,
        help="Only modules of that name, with all that is inside them, such as blocks.0 or '*.attn'; may be repeated.",
    ),
    "ranks": click.option(
        "--ranks", metavar="RANKS", help="Only these ranks: 0,3, one-per-replica (of copies the lowest), all."
    ),
}


def selecting(*names: str) -> Callable[[Any], Any]:
    """Declare options that select a part of a run: of `steps`, `kinds`, `modules` and `ranks`."""

    def declare(command: Any) -> Any:
        for name in reversed(names):
            command = _SELECTING[name](command)
        return command

    return declare


def selection_of(asked: dict[str, Any]) -> Selection:
    """Take the options that `selecting` declared out of what was asked.

    Raises:
        UsageError: one cannot be read.
    """
    from introspect_cli.selection import read_selection

    return read_selection(**{name: asked.pop(name) for name in _SELECTING if name in asked})


def echo_document(document: Any, format_: str = "json") -> None:
    """Write a document to stdout as JSON or YAML."""
    from introspect_cli.render.json import to_json, to_yaml

    click.echo(to_yaml(document) if format_ == "yaml" else to_json(document))


def say(sentence: str, *, err: bool = False) -> None:
    """Write a sentence that may hold the name of a file: whoever made that may have put codes for a terminal in it."""
    from introspect_cli.records import clean

    click.echo("\n".join(map(clean, sentence.split("\n"))), err=err)


def exit_code(verdict: Verdict) -> int:
    """What a shell script is told of a comparison."""
    from introspect_cli.compare.result import Verdict

    return {Verdict.SAME: SAME, Verdict.DIVERGED: DIVERGED, Verdict.UNDECIDED: UNDECIDED}[verdict]
