"""What one option of a capture is: how it is written, what it means for a comparison, which values it may have."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

from introspect_cli.records import Kind
from introspect_cli.statistics import DERIVED_STATS, STATISTICS

KINDS: tuple[str, ...] = tuple(kind.value for kind in Kind if kind not in {Kind.OP_OUTPUT, Kind.VALUE})
"""Kinds that can be asked for; values that a script records itself always are."""

DEFAULT_KINDS: tuple[str, ...] = tuple(kind for kind in KINDS if kind != Kind.COLLECTIVE.value)
"""Kinds recorded by default: all but collectives."""

COMPILE_MODES: tuple[str, ...] = ("boundary", "keep", "eager")
"""Values of `--compile`."""

CHILDREN: tuple[str, ...] = ("none", "script", "all")
"""Values of `--children`."""

LEVELS: tuple[str, ...] = ("module", "op")
"""Values of `--level`."""

SHORT: tuple[str, ...] = ("first", "last")
"""Short forms of rules in `steps`: the first, or the last N of a run."""

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
    "Comparing it with another run while it runs",
    "What is recorded",
    "When it is recorded",
    "How the script runs",
    "Running it more than once",
    "Settings recorded with it",
)
"""Headings of the help."""


@dataclass(frozen=True)
class Option:
    """One capture option: its flags, and whether a difference in it can explain a divergence.

    Attributes:
        heading: of the help.
        flags: names on the command line beside that of the field, or `--a/--no-a` in its place.
        help: one sentence, with the default.
        narrows: whether it makes a capture observe less, or something else, of the same training. Two runs that differ
            in it do not diverge because of that.
        in_manifest: whether it says anything about what is in the run.
        metavar: what stands for the value in the help.
        repeated: whether it may be given several times, as where its default is a collection.
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

    def named(self, name: str, default: object) -> Option:
        """A copy with the flag made from the field's name, and `repeated` set from its default.

        A default of True makes `--x/--no-x`; a flag with a slash among `flags` is used in place of the made one.

        Args:
            name: the field's name.
            default: the field's default; a tuple or frozenset means that the option may be repeated.
        """
        flags = self.flags
        if not any("/" in flag for flag in flags):
            flag = f"--{name.replace('_', '-')}"
            flag += f"/--no-{flag[2:]}" if default is True else ""
            short = [word for word in flags if not word.startswith("--")]
            flags = (*short, flag, *(word for word in flags if word not in short))
        return replace(self, flags=flags, repeated=isinstance(default, (tuple, frozenset)))


def option(heading: str, default: object, text: str, *flags: str, **details: Any) -> Any:
    """A dataclass field with this default, and an `Option` in its metadata.

    Args:
        heading: of the help.
        default: the value where the option is not given.
        text: the help.
        flags: further names on the command line.
        details: other fields of `Option`, such as `metavar`.
    """
    return field(default=default, metadata={"option": Option(heading, flags, text, **details)})


of_the_run = functools.partial(option, RUN, in_manifest=False)
of_comparing = functools.partial(option, AGAINST, in_manifest=False)
of_records = functools.partial(option, WHAT, narrows=True)
of_steps = functools.partial(option, WHEN, narrows=True)
of_the_script = functools.partial(option, HOW)
of_settings = functools.partial(option, SETTINGS)
