"""What a check finds, as plain data for tests, scripts and renderers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """How bad a finding is."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


LEVELS = tuple(Level)
"""Levels, worst first."""


@dataclass(frozen=True)
class Finding:
    """Something that one rule found.

    Attributes:
        rule: id of the rule.
        level: how bad it is.
        step: the step it began.
        rank: process it was seen in; where several saw it, the first.
        site: what it was seen at, for people: kind and FQN, or the name of a module or optimizer.
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
        unseen: id of a rule that could not, and what it would have needed.
        notes: what else a reader must know.
        steps: steps in the run.
        only: what the run is a part of, such as one rank of several; "" where it is all there was.
    """

    run: str
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    unseen: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    steps: int
    only: str = ""

    def found(self, level: Level) -> bool:
        """Whether anything is as bad as `level` or worse."""
        worst = LEVELS.index(level)
        return any(LEVELS.index(finding.level) <= worst for finding in self.findings)
