"""Gradients of whole values inside a compiled region, as a hook on the tensor would see them.

A tap in a module's hook sees the gradient of what passes through the tap: of one use of an input, or of the uses of an
output that come after. Outside a graph a hook on the tensor sees the sum over all uses. In the graph that a compiler
is given, every value and all of its uses are known. So before it is compiled, each value whose gradient is wanted gets
one tap that all of its uses go through; where it has that already, the tap at hand tells for all. What comes into the
graph is a tensor outside, and gets a hook there; what leaves it and is used inside, too, is told from inside.

A value that the graph goes on to write to in place, or that shares memory with what comes in and goes out again, keeps
its uses as they are: a copy would part from that memory. So does a result that the function which gives it uses itself
for another (the state of an LSTM cell). Of those no gradient is recorded, rather than a share of it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from introspect_cli.capture.regions.graph import (
    arguments,
    borrowed,
    calls_introspect,
    has_gradient,
    may_be_copied,
    results,
    through_tap,
    used_within,
)
from introspect_cli.capture.regions.taps import OUTSIDE, numbered, wanting, wants_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import fx

_NUMBERS = itertools.count()
"""Numbers taps apart, those of all graphs of a process."""


@dataclass(frozen=True)
class Ends:
    """Gradients to watch where a graph is entered and left.

    Attributes:
        entering: position of a tensor that comes in, and the text of a tap whose gradient is that tensor's.
        leaving: position of a tensor that goes out and is used inside, too, and the text by which its gradient is
            told from inside; "" where it cannot be told.
    """

    entering: tuple[tuple[int, str], ...]
    leaving: tuple[tuple[int, str], ...]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.entering or self.leaving)


@dataclass
class _Value:
    """One tensor of a graph, and the taps that copy it."""

    node: fx.Node
    taps: list[fx.Node] = field(default_factory=list)

    def users(self) -> list[fx.Node]:
        """Nodes that take the value or a tap's copy of it."""
        return [user for node in (self.node, *self.taps) for user in node.users]

    def looks(self) -> list[fx.Node]:
        """Look nodes of the value or a copy."""
        return [user for user in self.users() if calls_introspect(user, "look")]

    def is_used(self) -> bool:
        """Whether any node but outputs, looks and taps takes it."""
        return any(user.op != "output" and not calls_introspect(user, "look", "tap") for user in self.users())


def rewrite(graph_module: fx.GraphModule) -> Ends:
    """Route each value whose gradient is wanted through one tap, in place, in Dynamo's graph for a backend."""
    graph = graph_module.graph
    taken, shared = arguments(graph), borrowed(graph)
    entering: list[tuple[int, str]] = []
    leaving: list[tuple[int, str]] = []
    for value, places in _values(graph):
        if not may_be_copied(graph, value.node, shared):
            leaving += [(place, "") for place in places]
            _leave_unseen(value)
        elif value.node in taken:
            texts = _renamed(value)
            _assign(value.taps, None)
            entering += [(taken.index(value.node), text) for text in texts]
        else:
            text = _text_inside(graph, value)
            leaving += [(place, text) for place in places]
    graph_module.recompile()
    return Ends(tuple(entering), tuple(leaving))


def _values(graph: fx.Graph) -> Iterator[tuple[_Value, list[int]]]:
    """Values with a wanted gradient, each with its positions among the outputs if it is also used inside."""
    values: dict[fx.Node, _Value] = {}
    source_of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if calls_introspect(node, "look", "tap"):
            source = source_of.get(node.args[0], node.args[0])
            if has_gradient(source):
                value = values.setdefault(source, _Value(source))
                if calls_introspect(node, "tap"):
                    value.taps.append(node)
                    source_of[node] = source
    leaving: dict[fx.Node, list[int]] = {}
    for place, result in enumerate(results(graph)):
        if has_gradient(result) and result.op != "placeholder":
            source = source_of.get(result, result)
            if values.get(source, _Value(source)).is_used() or used_within(source):
                values.setdefault(source, _Value(source))
                leaving.setdefault(source, []).append(place)
    for source, value in values.items():
        yield value, leaving.get(source, [])


def _text_inside(graph: fx.Graph, value: _Value) -> str:
    """Have one tap report a value's gradient at all of its sites; returns the tap's text for the outside."""
    outside = f"{OUTSIDE}{next(_NUMBERS)}"
    texts = (*_renamed(value), outside)
    first = value.taps[0] if value.taps else None
    if first is not None and all(user is first or calls_introspect(user, "look") for user in value.node.users):
        _assign(value.taps, first, texts)
        return outside
    _assign(value.taps, None)
    through_tap(graph, value.node, "\n" + "\n".join(texts))
    return outside


def _renamed(value: _Value) -> list[str]:
    """Give each look and tap of a value a number of its own; returns the texts."""
    texts = []
    for node in (*value.taps, *value.looks()):
        place = len(node.args) - 1
        text = str(node.args[place])
        if calls_introspect(node, "tap") or wants_gradient(text):
            text = numbered(text, next(_NUMBERS))
            node.update_arg(place, text)
            texts.append(text)
    return texts


def _leave_unseen(value: _Value) -> None:
    """Mark a value's taps as without a gradient."""
    for tap in value.taps:
        tap.update_arg(1, wanting(str(tap.args[1])))
    _assign(value.taps, None)


def _assign(taps: list[fx.Node], teller: fx.Node | None, texts: tuple[str, ...] = ()) -> None:
    """Have one tap report gradients for `texts`, the other taps none."""
    for tap in taps:
        tap.update_arg(1, "\n".join((str(tap.args[1]), *(texts if tap is teller else ("",)))))
