"""What a rule about steps is, two of them as one, and conditions on a step, `loss > 3 * median`.

The plainest rule is a text of steps and python slices, `0,5,10:20,100::50`, known before the run. It is not enough for
long runs: people want what happened just before the NaN, the step that made the loss jump, one step every ten minutes.
Some of that is known only when the step is over, and some only much later. So a rule answers with an *expiry*: the step
from which on its step need not be kept, `NEVER` for one that is not kept at all, `ALWAYS` for one that stays. Of two
rules joined by `|` the later expiry counts, by `&` the earlier. Before a step, a rule gives bounds; where the upper one
is `NEVER`, nothing is observed.

Python's own grammar is what people write without looking anything up, but a text from a configuration file must not run
code. So conditions are parsed by python and computed here.
"""

from __future__ import annotations

import ast
import math
import operator
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

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
        return Joined(self, other, "|")

    def __and__(self, other: Rule) -> Rule:
        return Joined(self, other, "&")

    def __str__(self) -> str:
        return self.expression


def decided(kept: bool) -> tuple[int, int]:
    """The bounds of a step that is known to be kept, or not."""
    return (ALWAYS, ALWAYS) if kept else (NEVER, NEVER)


@dataclass(frozen=True)
class Joined(Rule):
    """Two rules as one: steps that one keeps, as long as either does (`|`), or both, as long as both do (`&`)."""

    one: Rule
    two: Rule
    sign: str

    @property
    def parts(self) -> Sequence[Rule]:
        """Those of both."""
        return (*self.one.parts, *self.two.parts)

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """The later expiry, or the earlier."""
        pick, one, two = max if self.sign == "|" else min, self.one.bounds(moment), self.two.bounds(moment)
        return pick(one[0], two[0]), pick(one[1], two[1])

    @property
    def expression(self) -> str:
        """One and the other, or one or the other."""
        inside = []
        for rule in (self.one, self.two):
            is_either = isinstance(rule, Joined) and rule.sign == "|"
            inside.append(f"({rule.expression})" if is_either and self.sign == "&" else rule.expression)
        return f" {self.sign} ".join(inside)


# --- conditions


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
_SIGNS: dict[type[ast.AST], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., float]] = {"abs": abs, "min": min, "max": max}


@dataclass(frozen=True)
class When(Rule):
    """Steps of which a condition holds when they are over, such as `When("loss > 3 * median")`.

    Attributes:
        text: the condition.
        names: what it asks for, of `NAMES`.
    """

    word = "when"

    text: str
    names: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Take the condition apart, once."""
        try:
            tree = ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise _no_condition(self.text) from None
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        object.__setattr__(self, "names", frozenset(node.id for node in nodes if node.id in NAMES))
        try:
            object.__setattr__(self, "_condition", _computed(tree, self.text))
            vars(self)["_condition"](dict.fromkeys(NAMES, 1.0))
        except (TypeError, RecursionError):  # a function of too few numbers, or a thousand brackets
            raise _no_condition(self.text) from None
        except ArithmeticError:
            pass  # other numbers may do

    def holds(self, values: Mapping[str, float]) -> bool:
        """Whether the condition holds; where a number in it is not known or has no value, it does not.

        Args:
            values: by name; a loss that is NaN counts as infinite.
        """
        given = dict(values)
        if math.isnan(given.get("loss", 0.0)):
            given["loss"] = math.inf
        try:
            return bool(vars(self)["_condition"](given))
        except (KeyError, ArithmeticError, TypeError):
            return False

    def bounds(self, moment: Moment) -> tuple[int, int]:
        """Known when the step is over."""
        if moment.values is None:
            return NEVER, ALWAYS
        return decided(self.holds(moment.values))


def _computed(node: ast.expr, text: str) -> Callable[[Mapping[str, float]], Any]:
    """What computes an expression from values by name; an error where it is none, or asks for what nobody knows."""

    def inside(*nodes: ast.expr) -> list[Callable[[Mapping[str, float]], Any]]:
        return [_computed(each, text) for each in nodes]

    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        number = float(node.value)  # type: ignore[arg-type] # its type is one of these
        return lambda _: number
    if isinstance(node, ast.Name) and node.id not in _FUNCTIONS:
        name = node.id
        if name not in NAMES:
            raise UsageError(f"{text!r} asks for {name!r}; choose from {', '.join((*NAMES, *_FUNCTIONS))}")
        return lambda values: float(values[name])
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        apply, (left, right) = _ARITHMETIC[type(node.op)], inside(node.left, node.right)
        return lambda values: apply(left(values), right(values))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        change, [operand] = _SIGNS[type(node.op)], inside(node.operand)
        return lambda values: change(operand(values))
    if isinstance(node, ast.BoolOp):
        join, parts = all if isinstance(node.op, ast.And) else any, inside(*node.values)
        return lambda values: join(part(values) for part in parts)
    if isinstance(node, ast.Compare) and _COMPARISONS.keys() >= set(map(type, node.ops)):
        signs, sides = [_COMPARISONS[type(sign)] for sign in node.ops], inside(node.left, *node.comparators)

        def compared(values: Mapping[str, float]) -> bool:
            numbers = [side(values) for side in sides]
            return all(sign(*pair) for sign, pair in zip(signs, pairwise(numbers), strict=True))

        return compared
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function, given = _FUNCTIONS.get(node.func.id), inside(*node.args)
        if function is not None:
            return lambda values: function(*(argument(values) for argument in given))
    raise _no_condition(text)


def _no_condition(text: str) -> UsageError:
    return UsageError(f"{text!r} is not a condition: write one such as 'loss > 3 * median' or 'grad_norm > 100'")
