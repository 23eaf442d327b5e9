"""What a tap says, and where it goes while something captures.

A tap is an operator in a graph, and all that it can carry beside its tensor is a constant: a text. The text says which
module the tap sits in, by a number of ours or by name, and what it sees of it. Nothing here registers an operator, so
that a capture can be ready for taps that most scripts never meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from introspect_cli.records import Kind

NUMBERED = "#"
"""How a module that is known by number begins."""

PLAIN = "plain"
"""Marks a value that is no tensor."""

WANTED = "gradient"
"""Marks a value whose gradient no tap will see."""

NUMBER = "."
"""How the mark of a value begins whose gradient a tap will see; the rest is the tap's number."""

GRADIENT = "gradient of "
"""How the text of a gradient begins; the rest names the value it is the gradient of."""

OPERATOR = "@"
"""How the text of a look begins that sees an operator's result; the rest is its number."""

OUTSIDE = "*"
"""How the text of a gradient begins that is told from inside a graph for a tensor outside."""

_SEPARATOR = "|"


class Sink:
    """What takes a tensor and the text of its tap; None while nothing captures."""

    take: Callable[[Tensor, str], None] | None = None


@dataclass(frozen=True)
class Tapped:
    """What a tap's text says.

    Attributes:
        module: number of the module, or its FQN.
        kind: `input` or `output`.
        path: where in the nested value.
        module_class: class of the module, where the text says so.
        gradient: `gradient` where one will pass that no tap can see; `.` and a number where a tap will; `plain` for a
            value that is no tensor.
    """

    module: str
    kind: str
    path: str
    module_class: str
    gradient: str


def text_of(module: str, kind: Kind, path: str = "", module_class: str = "", gradient: str = "") -> str:
    """The text a tap carries."""
    return _SEPARATOR.join((module, kind.value, module_class, gradient, path))


def parsed(text: str) -> Tapped:
    """What a text of `text_of` says."""
    module, kind, module_class, gradient, path = text.split(_SEPARATOR, 4)
    return Tapped(module, kind, path, module_class, gradient)


def wants_gradient(text: str) -> bool:
    """Whether a tap's text asks for the gradient of what it looks at."""
    return parsed(text).gradient == WANTED


def numbered(text: str, number: int) -> str:
    """A tap's text that is told from every other; its gradient will be seen."""
    return _with_gradient(text, f"{NUMBER}{number}")


def wanting(text: str) -> str:
    """A tap's text that asks for a gradient which no tap will see."""
    return _with_gradient(text, WANTED)


def _with_gradient(text: str, gradient: str) -> str:
    module, kind, module_class, _, path = text.split(_SEPARATOR, 4)
    return _SEPARATOR.join((module, kind, module_class, gradient, path))
