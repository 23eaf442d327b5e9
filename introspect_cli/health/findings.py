"""What a rule is, what it yields, and what a check makes of it: plain data for tests, scripts and renderers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

Find: TypeAlias = "Callable[[Any], Iterable[Hit]]"


class Level(str, Enum):
    """How bad a finding is."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


LEVELS = tuple(Level)
"""Levels, worst first."""


class NotObservedError(Exception):
    """A rule could not be decided; its message says what it would have needed."""


def require(value: T, needs: str) -> T:
    """`value` itself, which is what a rule needs.

    Raises:
        NotObservedError: it is empty or false; `needs` is the message.
    """
    if not value:
        raise NotObservedError(needs)
    return value


@dataclass(frozen=True)
class Hit:
    """One thing that a rule found.

    Attributes:
        step: the step it began.
        site: what it was seen at, for people: kind and FQN, or the name of a module or optimizer.
        evidence: one sentence with the numbers that show it.
        rank: the rank to name; of a rule about one rank, it is filled in.
    """

    step: int
    site: str
    evidence: str
    rank: int = 0


@dataclass(frozen=True)
class Rule:
    """A rule about one rank, or about all ranks of a run together.

    Attributes:
        id: name on the command line.
        level: how bad what it finds is.
        about: what it looks for, in a line.
        when: the numbers from which something counts, what does not count, and whose advice that is, if anybody's.
        cause: what usually causes it.
        find: yields what it finds in a rank's `table.Table`, or raises `NotObservedError`.
        over_ranks: whether `find` takes the `aligned.Ranks` of a run instead.
    """

    id: str
    level: Level
    about: str
    when: str
    cause: str
    find: Find
    over_ranks: bool = False


def rule(level: Level, *, over_ranks: bool = False) -> Callable[[Find], Rule]:
    """Make a `Rule` of a function: id from its name, hyphens for underscores; the rest from its docstring.

    That is `About. When: ... Cause: ...`, in which `{NAME}` is replaced by that constant of the function's file.
    """

    def made(find: Any) -> Rule:
        """Read the docstring of `find` and make the rule."""
        text = " ".join((find.__doc__ or "").format_map(find.__globals__).split())
        about, _, rest = text.partition(". When: ")
        when, _, cause = rest.partition(" Cause: ")
        return Rule(find.__name__.replace("_", "-"), level, about, when, cause, find, over_ranks)

    return made


@dataclass(frozen=True)
class Finding:
    """All that one rule found: the earliest of it, and where else.

    Attributes:
        rule: id of the rule.
        level: how bad it is.
        step: the step it began.
        rank: process it was seen in; where several saw it, the first.
        site: what it was seen at.
        evidence: one sentence with the numbers that show it.
        cause: what usually causes it.
        also: further sites at which the same rule found the same.
    """

    rule: str
    level: Level
    step: int
    rank: int
    site: str
    evidence: str
    cause: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckResult:
    """All that a check of a run found.

    Attributes:
        run: path of the run, as given.
        findings: worst first, then by step.
        checked: ids of the rules that could be decided.
        unseen: rules that could not be decided, with what each would have needed.
        notes: what else a reader must know.
        steps: steps in the run.
        checkpoint: whether it is a checkpoint, one moment and no run.
    """

    run: str
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    unseen: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    steps: int
    checkpoint: bool = False

    def reaches(self, level: Level) -> bool:
        """Whether any finding is of `level` or worse."""
        return any(LEVELS.index(finding.level) <= LEVELS.index(level) for finding in self.findings)
