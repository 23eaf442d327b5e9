"""Which steps are meant: as people write them, and as rules that compose, `First(10) | Every(100) | Last(50)`.

The plainest rule is a text of steps and python slices, `0,5,10:20,100::50`, known before the run. It is not enough for
long runs: people want what happened just before the NaN, the step that made the loss jump, one step every ten minutes.
Some of that is known only when the step is over, and some only much later. So a rule answers with an *expiry*: the step
from which on its step need not be kept, `NEVER` for one that is not kept at all, `ALWAYS` for one that stays. Of two
rules joined by `|` the later expiry counts, by `&` the earlier. Before a step, a rule gives bounds; where the upper one
is `NEVER`, nothing is observed.

A condition on a step, `loss > 3 * median`, is arithmetic over a few numbers that a capture knows when the step is over.
Python's own grammar is what people write without looking anything up, but a text from a configuration file must not run
code. So rules and conditions are parsed by python and computed here.
"""

from __future__ import annotations

import ast
import math
import operator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from introspect_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


def _decided(kept: bool) -> tuple[int, int]:
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
    def parse(cls, text: str | None = None, every: int | None = None) -> Schedule:
        """A schedule from the command line, whose text means it again.

        Args:
            text: comma-separated steps and slices; None for all steps.
            every: keep only the multiples of this many steps; None for no such limit.

        Returns:
            The schedule that both ask for.

        Raises:
            UsageError: the text is no schedule, or no step is left.
        """
        if every is not None and every < 1:
            raise UsageError(f"--every {every} records nothing: give a number of steps from 1 on")
        spans = [*cls(":" if text is None else text).spans]
        if every is not None:
            spans = [narrowed for span in spans if (narrowed := _multiples(span, every)) is not None]
            if not spans:
                raise UsageError(f"no step of the schedule {text!r} is a multiple of --every {every}: drop one of them")
        return cls(",".join(map(str, dict.fromkeys(spans))))

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
        return _decided(self.wants(moment.step))

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
        return _decided(self.wants(moment.epoch))


@dataclass(frozen=True)
class Ranks(_Numbers):
    """All steps of some ranks, `Ranks("0,8:16")`."""

    word = "ranks"

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known from the start."""
        return _decided(self.wants(moment.rank))


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
        return _decided(moment.step % self.steps == 0)


@dataclass(frozen=True)
class First(_Count):
    """The first steps of a run."""

    word = "first"

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known from the start."""
        return _decided(moment.step < self.steps)


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
        known = moment.memory.get((self, moment.step))
        if known is None:
            now = int(moment.seconds // self.seconds)
            known = int(moment.memory.get(self) != now)
            moment.memory[self] = now
            moment.memory[self, moment.step] = known
            moment.memory.pop((self, moment.step - 4), None)  # a step is asked about until it is written
        return _decided(bool(known))

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
        return _decided(not moment.copy)


@dataclass(frozen=True)
class When(Rule):
    """Steps of which a condition holds when they are over, such as `When("loss > 3 * median")`."""

    word = "when"

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "_condition", _parsed_condition(self.text))

    @property
    def names(self) -> frozenset[str]:
        """What it asks for, of `NAMES`."""
        nodes = ast.walk(vars(self)["_condition"])
        return frozenset(node.id for node in nodes if isinstance(node, ast.Name) and node.id in NAMES)

    def holds(self, values: Mapping[str, float]) -> bool:
        """Whether the condition holds; where a number in it is not known or has no value, it does not.

        Args:
            values: by name; a loss that is NaN counts as infinite.
        """
        given = dict(values)
        if math.isnan(given.get("loss", 0.0)):
            given["loss"] = math.inf
        try:
            return bool(_value(vars(self)["_condition"], given))
        except (KeyError, ArithmeticError, TypeError):
            return False

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known when the step is over."""
        if moment.values is None:
            return NEVER, ALWAYS
        return _decided(self.holds(moment.values))


_RULES: dict[str, type[Rule]] = {
    rule.word: rule for rule in (Schedule, Every, First, Last, EverySeconds, Epochs, Ranks, OnePerReplica, When)
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


def span_of(part: str, text: str | None) -> Span:
    """One step or slice of a schedule.

    Args:
        part: the text.
        text: the whole, for errors.

    Raises:
        UsageError: it is none, or selects no step.
    """
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


def _multiples(span: Span, every: int) -> Span | None:
    """The steps of `span` that are multiples of `every`, themselves a progression (Chinese remainders)."""
    shared = math.gcd(span.stride, every)
    if span.start % shared:
        return None
    period = every // shared
    ahead = (-span.start // shared) * pow(span.stride // shared, -1, period) % period if period > 1 else 0
    start = span.start + ahead * span.stride
    if span.stop is not None and start >= span.stop:
        return None
    return _single(Span(start, span.stop, span.stride * period))


def _single(span: Span) -> Span:
    """The span itself, or its one step as a step."""
    return Span(span.start, span.start + 1, 1) if span.last == span.start else span


NAMES: tuple[str, ...] = ("loss", "median", "mean", "previous", "grad_norm", "nans", "infs", "step")
"""What a condition may ask for: the step's loss; median, mean and last of the losses before it; the norm of all
gradients; how many recorded values are NaN or infinite; the step's number."""

_ARITHMETIC: dict[type[ast.AST], Callable[[float, float], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[type[ast.AST], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {"abs": abs, "min": min, "max": max}


def _parsed_condition(text: str) -> ast.expr:
    """The syntax of a condition; an error where it is none, or asks for what nobody knows."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _no_condition(text) from None
    for node in ast.walk(tree):
        _check(node, text)
    try:
        _value(tree, dict.fromkeys(NAMES, 1.0))
    except (KeyError, TypeError):  # a function that is not called, or of too few numbers
        raise _no_condition(text) from None
    except ArithmeticError:
        pass  # other numbers may do
    return tree


def _check(node: ast.AST, text: str) -> None:
    if isinstance(node, ast.Name) and node.id not in NAMES and node.id not in _FUNCTIONS:
        raise UsageError(f"{text!r} asks for {node.id!r}: known are {', '.join((*NAMES, *_FUNCTIONS))}")
    if isinstance(node, ast.Constant) and type(node.value) not in (int, float):
        raise _no_condition(text)
    allowed = (
        ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.BinOp, ast.Name, ast.Load,
        ast.Constant, ast.Call, *_ARITHMETIC, *_COMPARISONS,
    )  # fmt: skip
    if not isinstance(node, allowed):
        raise _no_condition(text)
    if isinstance(node, ast.Call) and (
        not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS or node.keywords
    ):
        raise _no_condition(text)


def _no_condition(text: str) -> UsageError:
    return UsageError(f"{text!r} is no condition: write one such as 'loss > 3 * median' or 'grad_norm > 100'")


def _value(node: ast.expr, values: Mapping[str, float]) -> Any:
    if isinstance(node, ast.Constant):
        return float(node.value)  # type: ignore[arg-type] # numbers alone were let pass
    if isinstance(node, ast.Name):
        return float(values[node.id])
    if isinstance(node, ast.BinOp):
        return _ARITHMETIC[type(node.op)](_value(node.left, values), _value(node.right, values))
    if isinstance(node, ast.UnaryOp):
        operand = _value(node.operand, values)
        return not operand if isinstance(node.op, ast.Not) else -operand
    if isinstance(node, ast.BoolOp):
        join = all if isinstance(node.op, ast.And) else any
        return join(_value(part, values) for part in node.values)
    if isinstance(node, ast.Compare):
        sides = [_value(side, values) for side in (node.left, *node.comparators)]
        return all(
            _COMPARISONS[type(sign)](one, two) for sign, one, two in zip(node.ops, sides[:-1], sides[1:], strict=True)
        )
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return _FUNCTIONS[node.func.id](*(_value(argument, values) for argument in node.args))
