"""What a rule is: a name, a level, a cause, and a function from a table to what it found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from introspect_cli.health.findings import Level
    from introspect_cli.health.replicas import Replicas
    from introspect_cli.health.table import Table


@dataclass(frozen=True)
class Unseen:
    """The rule could not be decided; what it would have needed."""

    needs: str


@dataclass(frozen=True)
class Hit:
    """One thing found: the step it began, where, and the sentence that shows it."""

    step: int
    site: str
    evidence: str


Answer = list[Hit] | Unseen


@dataclass(frozen=True)
class _Named:
    """What every rule says of itself.

    Attributes:
        id: name on the command line.
        level: how bad what it finds is.
        about: what it looks for, in a line.
        when: the numbers from which something counts, what does not count, and whose advice that is, if anybody's.
        cause: what usually causes it.
    """

    id: str
    level: Level
    about: str
    when: str
    cause: str


@dataclass(frozen=True)
class Rule(_Named):
    """A rule about one rank: `find` is a pure function from its table to what was found."""

    find: Callable[[Table], Answer]


@dataclass(frozen=True)
class RankRule(_Named):
    """A rule about ranks of one run: `find` takes what they hold against one another, all of them together."""

    find: Callable[[Replicas], RankAnswer]


RankAnswer = list[tuple[int, Hit]] | Unseen
"""What was found, each with the rank that is to be named; or what would have been needed."""


def runs(flags: list[bool]) -> Iterator[tuple[int, int]]:
    """Begin and end (exclusive) of each stretch of true flags."""
    start: int | None = None
    for position, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = position
        elif not flag and start is not None:
            yield start, position
            start = None


def lasting(flags: list[bool], least: int) -> int | None:
    """Where the stretch of true flags begins that lasts to the end, if it is `least` long or longer."""
    count = 0
    for flag in reversed(flags):
        if not flag:
            break
        count += 1
    return len(flags) - count if count >= least else None
