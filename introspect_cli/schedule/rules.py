"""The rules that say which steps are kept, and their texts: `first(10) | every(100) & epochs('0:3')`.

Numbers in them are written as people write them: single ones and python slices, ends exclusive.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from introspect_cli.errors import UsageError
from introspect_cli.schedule.rule import ALWAYS, NEVER, Moment, Rule, When, decided

if TYPE_CHECKING:
    from collections.abc import Sequence


STEPS_HELP = "give steps and python slices from 0 on, such as 0,5,10:20,100::50"


def whole_number(text: str) -> int | None:
    """A whole number from 0 on in ASCII digits alone: int() takes `1_0`, `+3` and the digits of other scripts too."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


class Span(NamedTuple):
    """The steps `start, start + stride, ...` below `stop`, or without end where `stop` is None."""

    start: int
    stop: int | None
    stride: int

    def wants(self, step: int) -> bool:
        """Whether `step` is one of them."""
        return step >= self.start and (self.stop is None or step < self.stop) and (step - self.start) % self.stride == 0

    @property
    def last(self) -> int | None:
        """The last of them, None where there is none."""
        if self.stop is None:
            return None
        return self.start + (self.stop - 1 - self.start) // self.stride * self.stride

    def __str__(self) -> str:
        if self.stop == self.start + 1:
            return str(self.start)
        start = str(self.start) if self.start else ""
        stop = "" if self.stop is None else str(self.stop)
        stride = f":{self.stride}" if self.stride != 1 else ""
        return f"{start}:{stop}{stride}"


def span_of(part: str, text: str | None) -> Span:
    """One step or slice of a schedule."""
    fields = part.split(":")
    numbers = [_field(field, text) for field in fields]
    if len(fields) == 1:
        if numbers[0] is None:
            raise UsageError(f"the schedule {text!r} has an empty entry: {STEPS_HELP}")
        return Span(numbers[0], numbers[0] + 1, 1)
    if len(fields) > 3:
        raise UsageError(f"{part.strip()!r} in the schedule {text!r} has too many colons: {STEPS_HELP}")
    start, stop, stride = (*numbers, None)[:3]
    span = Span(start or 0, stop, 1 if stride is None else stride)
    if span.stride < 1:
        raise UsageError(f"{part.strip()!r} in the schedule {text!r} has a stride of 0: {STEPS_HELP}")
    if span.stop is not None and span.stop <= span.start:
        raise UsageError(f"{part.strip()!r} in the schedule {text!r} selects no step: its end is exclusive")
    return _single(span)


def _field(text: str, schedule: str | None) -> int | None:
    number = whole_number(text)
    if number is None and text.strip():
        raise UsageError(f"{text.strip()!r} in the schedule {schedule!r} is not a step: {STEPS_HELP}")
    return number


def _single(span: Span) -> Span:
    """The span itself, or its one step as a step."""
    return Span(span.start, span.start + 1, 1) if span.last == span.start else span


@dataclass(frozen=True)
class _Numbers(Rule):
    """A rule about numbers that are written as steps and python slices (`0,5,10:20,100::50`, ends exclusive).

    Attributes:
        text: the numbers.
        spans: the progressions whose union they are, so that asking for one is arithmetic; never empty.
    """

    text: str = ":"
    spans: tuple[Span, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        spans = [span_of(part, self.text) for part in self.text.split(",")]
        object.__setattr__(self, "spans", tuple(dict.fromkeys(spans)))

    def wants(self, number: int) -> bool:
        """Whether a number is one of them."""
        return any(span.wants(number) for span in self.spans)


@dataclass(frozen=True)
class Schedule(_Numbers):
    """Steps and python slices; without arguments, all steps."""

    word = "steps"

    @classmethod
    def parse(cls, text: str = ":") -> Schedule:
        """A schedule from the command line, whose text means it again."""
        return cls(",".join(map(str, cls(text).spans)))

    @classmethod
    def only(cls, step: int) -> Schedule:
        """The schedule of a single step."""
        return cls(str(step))

    @classmethod
    def of(cls, steps: Sequence[int]) -> Schedule:
        """The schedule of some steps, rising and at least one."""
        spans: list[Span] = []
        for step in steps:
            if spans and step == spans[-1].stop:
                spans[-1] = spans[-1]._replace(stop=step + 1)
            else:
                spans.append(Span(step, step + 1, 1))
        return cls(",".join(map(str, spans)))

    @property
    def last(self) -> int | None:
        """The last step it can want, None where it goes on for ever."""
        ends = [span.last for span in self.spans]
        return None if None in ends else max(end for end in ends if end is not None)

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known from the start."""
        return decided(self.wants(moment.step))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Epochs(_Numbers):
    """Epochs as Lightning, transformers' Trainer and accelerate count them, `Epochs("0,10:12")`."""

    word = "epochs"

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known once the step's epoch is; of a step of no epoch nothing is kept."""
        if moment.epoch is None:
            return NEVER, NEVER if moment.values is not None else ALWAYS
        return decided(self.wants(moment.epoch))


@dataclass(frozen=True)
class Ranks(_Numbers):
    """All steps of some ranks, `Ranks("0,8:16")`."""

    word = "ranks"

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known from the start."""
        return decided(self.wants(moment.rank))


@dataclass(frozen=True)
class _Count(Rule):
    """A rule about so many steps."""

    steps: int

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise UsageError(f"{self.word}({self.steps!r}) keeps no step: give a number of steps from 1 on")


@dataclass(frozen=True)
class Every(_Count):
    """The multiples of a number of steps."""

    word = "every"

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known from the start."""
        return decided(moment.step % self.steps == 0)


@dataclass(frozen=True)
class First(_Count):
    """The first steps of a run."""

    word = "first"

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known from the start."""
        return decided(moment.step < self.steps)


@dataclass(frozen=True)
class Last(_Count):
    """The last steps of a run, wherever it ends: older ones are dropped from the store as it goes on."""

    word = "last"

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Kept until that many steps later."""
        expiry = moment.step + self.steps
        return expiry, expiry


@dataclass(frozen=True)
class EverySeconds(Rule):
    """The first step, and the first of each stretch of so many seconds by the clock.

    Ranks ask the clock of their own machine: near the end of a stretch they may choose neighbouring steps.
    """

    word = "every_seconds"

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise UsageError(f"every_seconds({self.seconds}) keeps no step: give a number of seconds above 0")

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known when the step begins; asked again, the same."""
        chosen = moment.memory.get((self, moment.step))
        if chosen is None:
            now = int(moment.seconds // self.seconds)
            chosen = int(moment.memory.get(self) != now)
            moment.memory[self] = now
            moment.memory[self, moment.step] = chosen
            moment.memory.pop((self, moment.step - 4), None)  # a step is asked about until it is written
        return decided(bool(chosen))

    @property
    def expression(self) -> str:
        """The rule as a call."""
        return f"every_seconds({self.seconds:g})"


@dataclass(frozen=True)
class OnePerReplica(Rule):
    """All steps of one rank for each part of the model: of ranks that are copies of one another, the lowest."""

    word = "one_per_replica"

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known once a step has run: only then has the script said which ranks are copies."""
        if moment.copy is None and moment.values is None:
            return NEVER, ALWAYS
        return decided(not moment.copy)


_RULES: dict[str, type[Rule]] = {
    rule.word: rule for rule in (Schedule, Every, First, Last, EverySeconds, Epochs, Ranks, OnePerReplica, When)
}


def parse_rule(text: str) -> Rule:
    """A rule from its text, such as `first(10) | every(100) & epochs('0:3')`."""
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
        raise UsageError(f"unknown rule in a schedule: {node.func.id!r}; choose from {', '.join(_RULES)}")
    try:
        return made(*map(ast.literal_eval, node.args))  # type: ignore[no-any-return]
    except (TypeError, AttributeError, ValueError):
        raise _no_rule(text) from None


def _no_rule(text: str) -> UsageError:
    return UsageError(f"{text!r} is not a schedule: write rules with | and & between, such as first(10) | every(100)")
