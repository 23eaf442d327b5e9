"""Which steps are meant: steps and slices, `0,5,10:20,100::50`, or rules, `first(10) | every(100) | last(50)`.

Numbers are written as people write them: single ones and python slices, ends exclusive. That is not enough for long
runs: people want what happened just before the NaN, or the step that made the loss jump. Some of that is known only
when the step is over, and some only much later. So a rule answers with an *expiry*: the step from which on its step
need not be kept, `NEVER` for one that is not kept at all, `ALWAYS` for one that stays. Of two rules joined by `|` the
later expiry counts, by `&` the earlier.

Python's own grammar is what people write without looking anything up, but a text from a configuration file must not run
code: what is evaluated is made of numbers, arithmetic, comparisons and three functions.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from introspect_cli.errors import UsageError

STEPS_HELP = "give steps and python slices from 0 on, such as 0,5,10:20,100::50"

NEVER, ALWAYS = -1, 1 << 62
"""Expiries of a step that is not kept, and of one that stays."""


def whole_number(text: str) -> int | None:
    """A number from 0 on of up to 18 ASCII digits; None for other text (int() takes `1_0`, `+3`, other scripts)."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


class Span(NamedTuple):
    """The steps `start, start + stride, ...` below `stop`, or without end where `stop` is None."""

    start: int
    stop: int | None
    stride: int

    def wants(self, step: int) -> bool:
        """Whether `step` is one of the span's steps."""
        return step >= self.start and (self.stop is None or step < self.stop) and (step - self.start) % self.stride == 0

    @property
    def last(self) -> int | None:
        """The last step of the span, inclusive; None where it has no end."""
        if self.stop is None:
            return None
        return self.start + (self.stop - 1 - self.start) // self.stride * self.stride

    def __str__(self) -> str:
        """The span as it is written in an option: `5`, `10:20`, `100::50`."""
        if self.stop == self.start + 1:
            return str(self.start)
        start = str(self.start) if self.start else ""
        stop = "" if self.stop is None else str(self.stop)
        stride = f":{self.stride}" if self.stride != 1 else ""
        return f"{start}:{stop}{stride}"


def span_of(part: str, text: str | None) -> Span:
    """A step or slice of a schedule, such as `5` or `10:20:2`; a slice of one step is that step.

    Args:
        part: the step or slice.
        text: all of the schedule, for messages.

    Raises:
        UsageError: it is no such thing, or selects no step.
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
    return Span(span.start, span.start + 1, 1) if span.last == span.start else span


def _field(text: str, schedule: str | None) -> int | None:
    """The number of a field of a slice, None where it is empty; UsageError, which names `schedule`, for other text."""
    number = whole_number(text)
    if number is None and text.strip():
        raise UsageError(f"{text.strip()!r} in the schedule {schedule!r} is not a step: {STEPS_HELP}")
    return number


@dataclass(frozen=True)
class Schedule:
    """Steps and python slices; without arguments, all steps.

    Attributes:
        text: as it was written.
        spans: what it means.
    """

    text: str = ":"
    spans: tuple[Span, ...] = field(init=False, repr=False, compare=False)

    names = frozenset[str]()
    forgets = False

    def __post_init__(self) -> None:
        """Set `spans` from the text; UsageError where it is no schedule."""
        spans = [span_of(part, self.text) for part in self.text.split(",")]
        object.__setattr__(self, "spans", tuple(dict.fromkeys(spans)))

    @classmethod
    def parse(cls, text: str = ":") -> Schedule:
        """A schedule whose text is in normal form: `3:4` becomes `3`, a span that comes twice is kept once.

        UsageError where the text is no schedule.
        """
        return cls(",".join(map(str, cls(text).spans)))

    @classmethod
    def only(cls, step: int) -> Schedule:
        """The schedule of a single step."""
        return cls(str(step))

    def wants(self, step: int) -> bool:
        """Whether `step` is in any span."""
        return any(span.wants(step) for span in self.spans)

    def expiry(self, step: int, _values: Mapping[str, float] | None) -> int:
        """`ALWAYS` for a step that is wanted, else `NEVER`, whatever the values; see `Expiry`."""
        return ALWAYS if self.wants(step) else NEVER

    def __str__(self) -> str:
        return self.text


Expiry = Callable[[int, "Mapping[str, float] | None"], int]
"""From which step on a step need not be kept, given what conditions may ask for; None while the step has not ended."""


@dataclass(frozen=True)
class Rule:
    """Steps by rules.

    Attributes:
        text: as it was written.
        expiry: see `Expiry`.
        names: what its conditions ask for, of `NAMES`.
        forgets: whether some steps are dropped later.
    """

    text: str
    expiry: Expiry = field(repr=False, compare=False)
    names: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    forgets: bool = field(default=False, repr=False, compare=False)

    def __str__(self) -> str:
        return self.text


def parse_rule(text: str) -> Schedule | Rule:
    """A schedule of steps and slices, or, with a `(`, a rule such as `first(10) | every(100) & steps(':900')`.

    Raises:
        UsageError: it is neither.
    """
    text = text.strip()
    if "(" not in text:
        return Schedule.parse(text)
    try:
        return _rule(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _no_rule(text) from None


def _rule(node: ast.AST, text: str) -> Rule:
    """A rule from its syntax tree: `|` takes the later expiry, `&` the earlier, and a call is `_rule_of_call`'s.

    UsageError for anything else.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd)):
        one, two = _rule(node.left, text), _rule(node.right, text)
        pick = max if isinstance(node.op, ast.BitOr) else min

        def joined(step: int, values: Mapping[str, float] | None) -> int:
            return pick(one.expiry(step, values), two.expiry(step, values))

        return Rule(text, joined, one.names | two.names, one.forgets or two.forgets)
    match node:
        case ast.Call(func=ast.Name(id=word), args=[ast.Constant(value=given)], keywords=[]):
            return _rule_of_call(word, given, text)
    raise _no_rule(text)


def _rule_of_call(word: str, given: Any, text: str) -> Rule:
    """A rule from one call: `every(100)`, `first(10)`, `last(50)`, `steps('...')`, `when('...')`.

    Steps that `last` keeps expire that many steps later.

    Args:
        word: the name of the function.
        given: its argument.
        text: all of the schedule, for messages.

    Raises:
        UsageError: the function is unknown, or takes no such argument.
    """
    if word in ("steps", "when"):
        if type(given) is not str:
            raise _no_rule(text)
        return _when(given, text) if word == "when" else Rule(text, Schedule(given).expiry)
    if word not in ("every", "first", "last"):
        raise UsageError(f"unknown rule in a schedule: {word!r}; choose from every, first, last, steps, when")
    if type(given) is not int or given < 1:
        raise UsageError(f"{word}({given!r}) keeps no step: give a number of steps from 1 on")
    if word == "last":
        return Rule(text, lambda step, _: step + given, forgets=True)
    schedule = Schedule(f"::{given}" if word == "every" else f":{given}")
    return Rule(text, schedule.expiry)


def _no_rule(text: str) -> UsageError:
    return UsageError(f"{text!r} is not a schedule: write rules with | and & between, such as first(10) | every(100)")


NAMES: tuple[str, ...] = ("loss", "median", "mean", "previous", "grad_norm", "nans", "infs", "step")
"""What a condition may ask for: the step's loss; median, mean and last of the losses before it; the norm of all
gradients; how many recorded values are NaN or infinite; the step's number."""

_FUNCTIONS = {"abs": abs, "min": min, "max": max, "__builtins__": {}}
_PARTS = (
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Constant, ast.Name, ast.Call),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)
_ENDLESS = (ast.Pow, ast.LShift)
"""Operators that can take any time and memory."""


def _when(condition: str, text: str) -> Rule:
    """A rule that keeps the steps for which a condition holds when they end, such as `loss > 3 * median`.

    Before its end each step is wanted. The condition does not hold where a number in it is missing or cannot be
    computed; a loss that is NaN counts as infinite.

    Args:
        condition: the comparison.
        text: all of the schedule, for messages.

    Raises:
        UsageError: it has more than arithmetic, comparisons, `and`, `or`, `not`, and calls of `abs`, `min` and `max`;
            it has a power, a shift, or too few numbers for a function; or it asks for a name that is not in `NAMES`.
    """
    wrong = UsageError(f"{condition!r} is not a condition: write one such as 'loss > 3 * median' or 'grad_norm > 100'")
    try:
        tree = ast.parse(condition.strip(), mode="eval")
        nodes = list(ast.walk(tree.body))
        code = compile(tree, "<condition>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise wrong from None
    called = {id(node.func): node.func for node in nodes if isinstance(node, ast.Call) and not node.keywords}
    names = frozenset(node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in called)
    for name in sorted(names - {*NAMES}):
        raise UsageError(f"{condition!r} asks for {name!r}; choose from {', '.join((*NAMES, *[*_FUNCTIONS][:3]))}")
    numbers = all(type(node.value) in (int, float) for node in nodes if isinstance(node, ast.Constant))
    functions = all(isinstance(one, ast.Name) and one.id in _FUNCTIONS for one in called.values())
    allowed = all(isinstance(node, _PARTS) and not isinstance(node, _ENDLESS) for node in nodes)
    if not (numbers and functions and allowed) or len(called) != sum(isinstance(node, ast.Call) for node in nodes):
        raise wrong

    def holds(values: Mapping[str, float]) -> bool:
        return bool(eval(code, dict(_FUNCTIONS), dict(values)))  # noqa: S307 - of arithmetic alone, see above

    try:
        holds(dict.fromkeys(NAMES, 1.0))
    except TypeError:  # a function of too few numbers
        raise wrong from None
    except ArithmeticError:
        pass  # other numbers may do

    def expiry(_step: int, values: Mapping[str, float] | None) -> int:
        """`ALWAYS` where the condition holds or the step has not ended, else `NEVER`."""
        if values is None:
            return ALWAYS
        known = {**values, "loss": math.inf} if math.isnan(values.get("loss", 0.0)) else values
        try:
            return ALWAYS if holds(known) else NEVER
        except (NameError, ArithmeticError, TypeError):
            return NEVER

    return Rule(text, expiry, names)
