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
_FUNCTIONS: dict[str, Callable[..., float]] = {"abs": abs, "min": min, "max": max}


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
        return decided(self.holds(moment.values))


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
