"""What one option of a capture is: how it is written, what it means for a comparison, which values it may have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from introspect_cli.records import DERIVED_STATS, STATISTICS, Kind

KINDS: tuple[str, ...] = tuple(kind.value for kind in Kind if kind not in {Kind.OP_OUTPUT, Kind.VALUE})
"""Kinds that can be asked for; values that a script records itself always are."""

DEFAULT_KINDS: tuple[str, ...] = tuple(kind for kind in KINDS if kind != Kind.COLLECTIVE.value)
"""Those that are recorded by default."""

COMPILE_MODES: tuple[str, ...] = ("boundary", "keep", "eager")
"""What can be done with compiled regions."""

CHILDREN: tuple[str, ...] = ("none", "script", "all")
"""Which processes are followed."""

LEVELS: tuple[str, ...] = ("module", "op")
"""How deep a capture looks."""

STATS: tuple[str, ...] = (
    "shape",
    "dtype",
    *(name for name in (*STATISTICS, *DERIVED_STATS) if name not in ("posinfs", "neginfs")),  # `infs` stands for both
)
"""Statistics that can be asked for."""

DEFAULT_STATS: tuple[str, ...] = tuple(
    name for name in STATS if name not in STATISTICS or not STATISTICS[name].on_request
)
"""Statistics kept unless told otherwise: all that need no sort."""

LAYOUT_STATS = frozenset({"shape", "dtype"})
"""Statistics that are kept whatever was asked for, since a layout is no measurement."""


RUN, AGAINST, WHAT, WHEN, HOW, AGAIN, SETTINGS = HEADINGS = (
    "The run",
    "Compared with another run while it goes on",
    "What is recorded",
    "When it is recorded",
    "How the script runs",
    "Running it more than once",
    "Settings kept beside it",
)
"""Headings of the help."""


@dataclass(frozen=True)
class Option:
    """How one option is written on a command line and what it means for a comparison.

    Attributes:
        heading: of the help.
        flags: names on the command line, synonyms included; `--a/--no-a` for a switch that can be turned off.
        help: one sentence, with the default.
        narrows: whether it makes a capture observe less, or something else, of the same training. Two runs that differ
            in it do not diverge because of that.
        in_manifest: whether it says anything about what is in the run.
        metavar: what stands for the value in the help.
        repeated: whether it may be given several times.
        commas: whether commas part several values in one.
        choices: all values there are, None for any.
        least: smallest number allowed.
        most: largest number allowed.
    """

    heading: str
    flags: tuple[str, ...]
    help: str
    narrows: bool = False
    in_manifest: bool = True
    metavar: str | None = None
    repeated: bool = False
    commas: bool = True
    choices: tuple[str, ...] | None = None
    least: int | None = None
    most: int | None = None


def option(default: object, text: str, *flags: str, **details: Any) -> Any:
    """A field of `CaptureOptions`: its default, and an `Option` as its metadata; its class has the heading."""
    return field(default=default, metadata={"option": Option("", flags, text, **details)})
