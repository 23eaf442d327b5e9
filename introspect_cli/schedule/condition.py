"""Conditions on a step, `loss > 3 * median`: arithmetic over a few numbers that a capture knows when the step is over.

Python's own grammar is what people write without looking anything up, but a text from a configuration file must not run
code. So conditions are parsed by python and computed here.
"""

from __future__ import annotations

import ast
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import UsageError
from introspect_cli.schedule.rule import ALWAYS, NEVER, Moment, Rule, decided

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
