"""What a tap says, and where it goes while something captures.

A tap is an operator in a graph, and all that it can carry beside its tensor is a constant: a text. The text says which
module the tap sits in, by a number or by name, and what it sees of it. Nothing here registers an operator, so
that a capture can be ready for taps that most scripts never meet.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NUMBERED = "#"
"""Prefix of a module's number, in the place of its name."""

PLAIN = "plain"
"""Marks a value that is no tensor."""

WANTED = "gradient"
"""Marks a value whose gradient no tap will see."""

NUMBER = "."
"""Prefix of a tap's number, which marks a value whose gradient the tap will see."""

GRADIENT = "gradient of "
"""Prefix of a gradient's text; the rest is the text of the value."""

OUTSIDE = "*"
"""Prefix of the text of a gradient reported from inside a graph for a tensor outside."""

_SEPARATOR = "|"


class Sink:
    """Receiver of a tap's tensor and text; None while nothing captures."""

    take: Callable[[Tensor, str], None] | None = None


@dataclass(frozen=True)
class Tapped:
    """Content of a tap's text.

    Attributes:
        module: number of the module, or its FQN.
        kind: `input` or `output`.
        path: where in the nested value.
        module_class: class of the module, where the text says so.
        gradient: `gradient` where one will pass that no tap can see; `.` and a number where a tap will; `plain` for a
            value that is no tensor.
        call: which call of the module in its graph, -1 where there is no graph to tell.
        place: where in the program of its graph it stands, -1 where there is no graph.
    """

    module: str
    kind: str
    path: str = ""
    module_class: str = ""
    gradient: str = ""
    call: int = -1
    place: int = -1

    @property
    def text(self) -> str:
        """The text: fields joined by `|`."""
        at = f"{self.call}.{self.place}" if self.call >= 0 else ""
        return _SEPARATOR.join((self.module, self.kind, self.module_class, at, self.gradient, self.path))


class CallCount:
    """Call number of a module by its values: an input after an output, or a value again, begins a call."""

    def __init__(self) -> None:
        self.number = 0
        self._seen: set[tuple[str, str]] = set()
        self._last = ""

    def at(self, kind: str, path: str) -> int:
        """Number of the call with this value, from 0."""
        if (kind == Kind.INPUT.value and self._last == Kind.OUTPUT.value) or (kind, path) in self._seen:
            self.number += 1
            self._seen.clear()
        self._seen.add((kind, path))
        self._last = kind
        return self.number


def text_of(module: str, kind: Kind, path: str = "", module_class: str = "", gradient: str = "") -> str:
    """The text of a tap."""
    return _SEPARATOR.join((module, kind.value, module_class, "", gradient, path))


@functools.cache
def parsed(text: str) -> Tapped:
    """Fields of a tap's text."""
    module, kind, module_class, at, gradient, path = text.split(_SEPARATOR, 5)
    call, _, place = at.partition(".")
    return Tapped(module, kind, path, module_class, gradient, int(call or -1), int(place or -1))


def wants_gradient(text: str) -> bool:
    """Whether a tap's text is marked with a gradient that no tap sees so far."""
    return parsed(text).gradient == WANTED


def numbered(text: str, number: int) -> str:
    """The text marked with its tap's number, so that its gradient is seen."""
    return replace(parsed(text), gradient=f"{NUMBER}{number}").text


def wanting(text: str) -> str:
    """The text marked as having a gradient that no tap sees."""
    return replace(parsed(text), gradient=WANTED).text


def placed(text: str, place: int, call: int) -> str:
    """The text with its place in the graph's program and the call of its module."""
    return replace(parsed(text), place=place, call=call).text
