"""Which steps a capture keeps, as rules that compose: `First(10) | Every(100) | Last(50)`.

A schedule that is known before the run ("every 100th step") is not enough for long runs: people want what happened just
before the NaN, the step that made the loss jump, one step every ten minutes. Some of that is known only when the step
is over, and some only much later. So a rule answers with an *expiry*: the step from which on its step need not be kept,
`NEVER` for one that is not kept at all, `ALWAYS` for one that stays. Of two rules joined by `|` the later expiry
counts, by `&` the earlier. Before a step, a rule gives bounds; where the upper one is `NEVER`, nothing is observed.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from introspect_cli.conditions import Condition
from introspect_cli.errors import UsageError
from introspect_cli.schedule import Schedule

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

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """The least and the greatest expiry that a step can turn out to have; the same one where it is known."""
        raise NotImplementedError

    def __or__(self, other: Rule) -> Rule:
        return Either(self, other)

    def __and__(self, other: Rule) -> Rule:
        return Both(self, other)

    @property
    def parts(self) -> Sequence[Rule]:
        """The rules that it is made of, all the way down; itself where of none."""
        return (self,)


def _known(kept: bool) -> tuple[int, int]:
    return (ALWAYS, ALWAYS) if kept else (NEVER, NEVER)


@dataclass(frozen=True)
class Either(Rule):
    """Steps that one of two rules keeps, as long as either does."""

    one: Rule
    two: Rule

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """The later expiry."""
        one, two = self.one.bounds(moment), self.two.bounds(moment)
        return max(one[0], two[0]), max(one[1], two[1])

    @property
    def parts(self) -> Sequence[Rule]:
        """Those of both."""
        return (*self.one.parts, *self.two.parts)

    def __str__(self) -> str:
        return f"{self.one} | {self.two}"


@dataclass(frozen=True)
class Both(Rule):
    """Steps that two rules keep, as long as both do."""

    one: Rule
    two: Rule

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """The earlier expiry."""
        one, two = self.one.bounds(moment), self.two.bounds(moment)
        return min(one[0], two[0]), min(one[1], two[1])

    @property
    def parts(self) -> Sequence[Rule]:
        """Those of both."""
        return (*self.one.parts, *self.two.parts)

    def __str__(self) -> str:
        return " & ".join(f"({own})" if isinstance(own, Either) else str(own) for own in (self.one, self.two))


@dataclass(frozen=True)
class _Numbers(Rule):
    """A rule about numbers that are written as steps and python slices."""

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "_schedule", Schedule.parse(self.text))

    def wants(self, number: int) -> bool:
        """Whether a number is one of them."""
        return bool(vars(self)["_schedule"].wants(number))

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({self.text!r})"


@dataclass(frozen=True)
class Steps(_Numbers):
    """Steps and python slices, `Steps("0:10,100::100")`; without arguments, all."""

    text: str = ":"

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known from the start."""
        return _known(self.wants(moment.step))


@dataclass(frozen=True)
class _Count(Rule):
    """A rule about so many steps."""

    steps: int

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise UsageError(f"{self._word}({self.steps!r}) keeps no step: give a number of steps from 1 on")

    @property
    def _word(self) -> str:
        return type(self).__name__.lower()

    def __str__(self) -> str:
        return f"{self._word}({self.steps})"


@dataclass(frozen=True)
class Every(_Count):
    """The multiples of a number of steps."""

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known from the start."""
        return _known(moment.step % self.steps == 0)


@dataclass(frozen=True)
class First(_Count):
    """The first steps of a run."""

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known from the start."""
        return _known(moment.step < self.steps)


@dataclass(frozen=True)
class Last(_Count):
    """The last steps of a run, wherever it ends: older ones are dropped from the store as it goes on."""

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Kept until that many steps later."""
        expiry = moment.step + self.steps
        return expiry, expiry


@dataclass(frozen=True)
class EverySeconds(Rule):
    """The first step, and the first of each stretch of so many seconds by the clock.

    Ranks ask the clock of their own machine: near the end of a stretch they may choose neighbouring steps.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"every_seconds({self.seconds}) keeps no step: give a number of seconds above 0")

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known when the step begins; asked again, the same."""
        known = moment.memory.get((self, moment.step))
        if known is None:
            now = int(moment.seconds // self.seconds)
            known = int(moment.memory.get(self) != now)
            moment.memory[self] = now
            moment.memory[self, moment.step] = known
            moment.memory.pop((self, moment.step - 4), None)  # a step is asked about until it is written
        return _known(bool(known))

    def __str__(self) -> str:
        return f"every_seconds({self.seconds:g})"


@dataclass(frozen=True)
class Epochs(_Numbers):
    """Epochs as Lightning, transformers' Trainer and accelerate count them, `Epochs("0,10:12")`."""

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known once the step's epoch is; of a step of no epoch nothing is kept."""
        if moment.epoch is None:
            return NEVER, NEVER if moment.values is not None else ALWAYS
        return _known(self.wants(moment.epoch))


@dataclass(frozen=True)
class Ranks(_Numbers):
    """All steps of some ranks, `Ranks("0,8:16")`."""

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known from the start."""
        return _known(self.wants(moment.rank))


@dataclass(frozen=True)
class OnePerReplica(Rule):
    """All steps of one rank for each part of the model: of ranks that are copies of one another, the lowest."""

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known once a step has run: only then has the script said which ranks are copies."""
        if moment.copy is None and moment.values is None:
            return NEVER, ALWAYS
        return _known(not moment.copy)

    def __str__(self) -> str:
        return "one_per_replica()"


@dataclass(frozen=True)
class When(Rule):
    """Steps of which a condition holds when they are over, such as `When("loss > 3 * median")`."""

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "condition", Condition.parse(self.text))

    @property
    def names(self) -> frozenset[str]:
        """What it asks for."""
        return frozenset(vars(self)["condition"].names)

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known when the step is over."""
        if moment.values is None:
            return NEVER, ALWAYS
        return _known(vars(self)["condition"].holds(moment.values))

    def __str__(self) -> str:
        return f"when({self.text!r})"


_RULES: dict[str, type[Rule]] = {
    "steps": Steps,
    "every": Every,
    "first": First,
    "last": Last,
    "every_seconds": EverySeconds,
    "epochs": Epochs,
    "ranks": Ranks,
    "one_per_replica": OnePerReplica,
    "when": When,
}


def parse_rule(text: str) -> Rule:
    """A rule from its text, such as `first(10) | every(100) & epochs('0:3')`.

    Raises:
        UsageError: it is no rule.
    """
    try:
        return _rule(ast.parse(text.strip(), mode="eval").body, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _no_rule(text) from None


def _rule(node: ast.AST, text: str) -> Rule:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd)):
        one, two = _rule(node.left, text), _rule(node.right, text)
        return one | two if isinstance(node.op, ast.BitOr) else one & two
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.keywords or len(node.args) > 1:
        raise _no_rule(text)
    made: Any = _RULES.get(node.func.id)
    if made is None:
        raise UsageError(f"no rule of a schedule is called {node.func.id!r}: known are {', '.join(_RULES)}")
    try:
        return made(*map(ast.literal_eval, node.args))  # type: ignore[no-any-return]
    except (TypeError, AttributeError, ValueError):
        raise _no_rule(text) from None


def _no_rule(text: str) -> UsageError:
    return UsageError(f"{text!r} is no schedule: write rules with | and & between, such as first(10) | every(100)")
