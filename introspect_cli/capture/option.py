"""What one option of a capture is: how it is written, what it means for a comparison, which values it may have.

Names of kinds and statistics, sizes and pairs of values are checked here: nothing downstream meets an unknown one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import UsageError
from introspect_cli.records import DERIVED_STATS, STATISTICS, Kind
from introspect_cli.selection import choose

if TYPE_CHECKING:
    from collections.abc import Iterable

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


RUN, WHAT, WHEN, HOW, AGAIN, SETTINGS = HEADINGS = (
    "The run",
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


def written(heading: str, text: str, *flags: str, **details: Any) -> dict[str, Option]:
    """What a field of `CaptureOptions` carries as its metadata."""
    return {"option": Option(heading, flags, text, **details)}


def parse_kinds(names: Iterable[str]) -> frozenset[Kind]:
    """Kinds by name.

    Args:
        names: names of kinds, or `default`, `all` or `none`.

    Raises:
        UsageError: a name is unknown.
    """
    return frozenset(Kind(name) for name in choose(names, KINDS, "kind", default=DEFAULT_KINDS))


_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: object) -> int:
    """Bytes, from `2GB`, `500 MB`, `1.5GiB` or a number.

    Raises:
        UsageError: it is no size, or none that holds a step.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", str(text).strip().lower())
    if found is None or found[2] not in _SIZES:
        raise UsageError(f"{str(text)!r} is no size: give one such as 500MB or 2GB")
    size = int(float(found[1]) * _SIZES[found[2]])
    if size < 10**5:
        raise UsageError(f"--max-size {text} holds no run: give 100kB at least")
    return size


def check_pairs(texts: Iterable[str]) -> None:
    """Make sure that each text names two values.

    Raises:
        UsageError: one does not.
    """
    for text in texts:
        later, colon, earlier = (part.strip() for part in text.partition(":"))
        if not (colon and later and earlier):
            raise UsageError(
                f"{text!r} does not name two values: write OUTPUT:INPUT, such as lm_head:blocks.0/input[0]"
            )


def parse_stats(names: Iterable[str]) -> tuple[str, ...]:
    """Names of statistics, in the order of `STATS`.

    Args:
        names: names of statistics, or `default`, `all` or `none`.

    Raises:
        UsageError: a name is unknown.
    """
    return choose(names, STATS, "statistic", default=DEFAULT_STATS)
