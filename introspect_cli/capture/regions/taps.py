"""What a tap says, and where it goes while something captures.

A tap is an operator in a graph, and all that it can carry beside its tensor is a constant: a text. The text says which
module the tap sits in, by a number or by name, and what it sees of it. Nothing here registers an operator, so
that a capture can be ready for taps that most scripts never meet.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NUMBERED = "#"
"""Prefix of a module's number, in the place of its name."""

PLAIN = "plain"
"""Marks a value that is no tensor."""

WANTED = "gradient"
"""Marks a value that requires a gradient, of which the tap tells nothing."""

GRADIENT = "gradient of "
"""Prefix of a gradient's text; the rest is the text of the value."""

_SEPARATOR = "|"


class Sink:
    """Receiver of a tap's tensor and text; None while nothing captures."""

    take: Callable[[Tensor, str], None] | None = None


class Tapped(NamedTuple):
    """Fields of a tap's text.

    Attributes:
        module: number of the module after `#`, or its FQN.
        kind: `input` or `output`.
        module_class: class of the module, where the text says so.
        mark: `PLAIN`, `WANTED` or "".
        path: where in the nested value the tensor is.
    """

    module: str
    kind: str
    module_class: str
    mark: str
    path: str


class CallCount:
    """Number of a module's call by the order of its values: an input after an output, or a value again, begins one."""

    def __init__(self) -> None:
        """Count from -1: the first value begins call 0."""
        self._number = -1
        self._seen: set[tuple[str, str]] = set()
        self._last = ""

    def number_of(self, kind: str, path: str, counted: int = 0) -> int:
        """Number of the call that the next value belongs to; to be called once for each value, in order.

        Args:
            kind: `input` or `output`.
            path: where in the nested value the tensor is.
            counted: how many calls of the module have been counted by its hooks; a new call has at least this number.
        """
        is_next = kind == Kind.INPUT.value and self._last == Kind.OUTPUT.value
        if is_next or not self._last or (kind, path) in self._seen:
            self._number = max(self._number + 1, counted)
            self._seen.clear()
        self._seen.add((kind, path))
        self._last = kind
        return self._number


def text_of(module: str, kind: Kind, path: str = "", module_class: str = "", mark: str = "") -> str:
    """Text of a tap: the fields of `Tapped` joined by `|`.

    Args:
        module: number of the module after `#`, or its FQN.
        kind: `Kind.INPUT` or `Kind.OUTPUT`.
        path: where in the nested value the tensor is.
        module_class: class of the module; "" where a number tells it.
        mark: `PLAIN`, `WANTED` or "".
    """
    return _SEPARATOR.join((module, kind.value, module_class, mark, path))


@functools.cache
def parsed(text: str) -> Tapped:
    """Fields of a tap's text (`text_of`), cached; a path may hold any character."""
    return Tapped(*text.split(_SEPARATOR, 4))
