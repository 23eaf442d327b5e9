"""What a rule about steps is, and two of them as one.

The plainest rule is a text of steps and python slices, `0,5,10:20,100::50`, known before the run. It is not enough for
long runs: people want what happened just before the NaN, the step that made the loss jump, one step every ten minutes.
Some of that is known only when the step is over, and some only much later. So a rule answers with an *expiry*: the step
from which on its step need not be kept, `NEVER` for one that is not kept at all, `ALWAYS` for one that stays. Of two
rules joined by `|` the later expiry counts, by `&` the earlier. Before a step, a rule gives bounds; where the upper one
is `NEVER`, nothing is observed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NEVER, ALWAYS = -1, 1 << 62
"""Expiries of a step that is not kept, and of one that stays."""


@dataclass(frozen=True)
class Moment:
    """What is known of a step.

    Attributes:
        step: its number.
        epoch: its epoch as the training framework counts; None where nobody does.
        seconds: the time, in seconds from anywhere.
        values: what conditions may ask for, when the step is over; None before.
        memory: what rules remember from step to step.
        rank: the process, in a distributed run.
        copy: whether a lower rank holds the same parts of everything; None where nothing says so, or not yet.
    """

    step: int
    epoch: int | None = None
    seconds: float = 0.0
    values: Mapping[str, float] | None = None
    memory: dict[Any, int] = field(default_factory=dict)
    rank: int = 0
    copy: bool | None = None


class Rule:
    """Something that says which steps are kept; `|` and `&` put two together."""

    word: ClassVar[str]
    """What it is called in an expression."""

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """The least and the greatest expiry that a step can turn out to have; the same one where it is known."""
        raise NotImplementedError

    @property
    def parts(self) -> Sequence[Rule]:
        """The rules that it is made of, all the way down; itself where of none."""
        return (self,)

    @property
    def expression(self) -> str:
        """What `parse_rule` reads as this rule."""
        given = [getattr(self, item.name) for item in fields(self) if item.init]  # type: ignore[arg-type] # all are dataclasses
        return f"{self.word}({', '.join(map(repr, given))})"

    def __or__(self, other: Rule) -> Rule:
        return Either(self, other)

    def __and__(self, other: Rule) -> Rule:
        return Both(self, other)

    def __str__(self) -> str:
        return self.expression


def decided(kept: bool) -> tuple[int, int]:
    """The bounds of a step that is known to be kept, or not."""
    return (ALWAYS, ALWAYS) if kept else (NEVER, NEVER)


@dataclass(frozen=True)
class _Joined(Rule):
    """Two rules as one."""

    one: Rule
    two: Rule

    @property
    def parts(self) -> Sequence[Rule]:
        """Those of both."""
        return (*self.one.parts, *self.two.parts)


class Either(_Joined):
    """Steps that one of two rules keeps, as long as either does."""

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """The later expiry."""
        one, two = self.one.bounds(moment), self.two.bounds(moment)
        return max(one[0], two[0]), max(one[1], two[1])

    @property
    def expression(self) -> str:
        """One or the other."""
        return f"{self.one.expression} | {self.two.expression}"


class Both(_Joined):
    """Steps that two rules keep, as long as both do."""

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """The earlier expiry."""
        one, two = self.one.bounds(moment), self.two.bounds(moment)
        return min(one[0], two[0]), min(one[1], two[1])

    @property
    def expression(self) -> str:
        """One and the other."""
        joined = (self.one, self.two)
        return " & ".join(f"({rule.expression})" if isinstance(rule, Either) else rule.expression for rule in joined)
