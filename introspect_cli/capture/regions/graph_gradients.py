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
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from introspect_cli.capture.regions.tap_sites import OUTSIDE, numbered, wanting, wants_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUMBERS = itertools.count()
"""Numbers taps apart, those of all graphs of a process."""


@dataclass(frozen=True)
class Ends:
    """What is to be done where a graph is entered and left.

    Attributes:
        entering: position of a tensor that comes in, and the text of a tap whose gradient is that tensor's.
        leaving: position of a tensor that goes out and is used inside, too, and the text by which its gradient is
            told from inside; "" where it cannot be told.
    """

    entering: tuple[tuple[int, str], ...]
    leaving: tuple[tuple[int, str], ...]

    def __bool__(self) -> bool:
        """Whether anything is."""
        return bool(self.entering or self.leaving)


@dataclass
class _Value:
    """One tensor of a graph, and the taps that copy it."""

    node: fx.Node
    taps: list[fx.Node] = field(default_factory=list)

    def users(self) -> list[fx.Node]:
        """Whatever takes the value or one of its copies."""
        return [user for node in (self.node, *self.taps) for user in node.users]

    def looks(self) -> list[fx.Node]:
        """Looks at it or one of its copies."""
        return [user for user in self.users() if calls_ours(user, "look")]

    def is_used(self) -> bool:
        """Whether something is computed from it in the graph."""
        return any(user.op != "output" and not calls_ours(user, "look", "tap") for user in self.users())


def rewrite(graph_module: fx.GraphModule) -> Ends:
    """Have every value whose gradient is wanted pass one tap, in place.

    Args:
        graph_module: what Dynamo hands to a backend.
    """
    graph = graph_module.graph
    arguments, shared = _arguments(graph), borrowed(graph)
    entering: list[tuple[int, str]] = []
    leaving: list[tuple[int, str]] = []
    for value, places in _values(graph):
        if not may_be_copied(graph, value.node, shared):
            leaving += [(place, "") for place in places]
            _untold(value)
        elif value.node in arguments:
            texts = _renamed(value)
            _retold(value.taps, None)
            entering += [(arguments.index(value.node), text) for text in texts]
        else:
            text = _told_inside(graph, value)
            leaving += [(place, text) for place in places]
    graph_module.recompile()
    return Ends(tuple(entering), tuple(leaving))


def _arguments(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def borrowed(graph: fx.Graph) -> set[object]:
    """Memory that comes into a graph and goes out again.

    A view of what comes in may be copied unless it goes out again: whoever gets it may write to it.
    """
    return {memory_of(argument) for argument in _arguments(graph)} & {memory_of(result) for result in _results(graph)}


def may_be_copied(graph: fx.Graph, node: fx.Node, shared: set[object]) -> bool:
    """Whether all uses of a value may go on with a copy of it.

    Args:
        graph: what a compiler is given.
        node: of the value.
        shared: the graph's `borrowed` memory.
    """
    if memory_of(node) in shared and node.op != "placeholder":
        return False
    return _settled(graph, node) and not _used_within(node)


def through_tap(graph: fx.Graph, node: fx.Node, text: str) -> fx.Node:
    """Have all uses of a value go on with what a tap makes of it; the tap."""
    with graph.inserting_after(node):
        through = graph.call_function(torch.ops.introspect.tap, (node, text))
    through.meta = dict(node.meta)
    node.replace_all_uses_with(through, delete_user_cb=lambda user: user is not through)
    return through


def _settled(graph: fx.Graph, node: fx.Node) -> bool:
    """Whether nothing writes to a value in place once it is there, nor uses its memory by an older name."""
    version = example_of(node)._version  # noqa: SLF001 - the documented-by-use counter of in-place writes
    if not version:
        return True
    memory, older, writes = memory_of(node), [], 0
    for other in graph.nodes:
        if memory_of(other) != memory or other.op in ("placeholder", "output"):
            continue
        # What writes in place gives its own argument back. A write that gives nothing is missing in the count.
        writes += any(example_of(given) is example_of(other) for given in other.all_input_nodes)
        older.append(other)
        if other is node:
            break
    later = set(itertools.dropwhile(lambda other: other is not node, graph.nodes)) - {node}
    users = (user for other in older[:-1] for user in other.users)
    return writes == version and not any(user in later and not calls_ours(user, "look") for user in users)


def _values(graph: fx.Graph) -> Iterator[tuple[_Value, list[int]]]:
    """Every value whose gradient somebody wants, and where it leaves the graph after being used inside."""
    found: dict[fx.Node, _Value] = {}
    source_of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if calls_ours(node, "look", "tap"):
            source = source_of.get(node.args[0], node.args[0])
            if _has_gradient(source):
                value = found.setdefault(source, _Value(source))
                if calls_ours(node, "tap"):
                    value.taps.append(node)
                    source_of[node] = source
    leaving: dict[fx.Node, list[int]] = {}
    for place, result in enumerate(_results(graph)):
        if _has_gradient(result) and result.op != "placeholder":
            source = source_of.get(result, result)
            if found.get(source, _Value(source)).is_used() or _used_within(source):
                found.setdefault(source, _Value(source))
                leaving.setdefault(source, []).append(place)
    for source, value in found.items():
        yield value, leaving.get(source, [])


def _results(graph: fx.Graph) -> list[Any]:
    """What a graph gives out, in order; nodes most of all."""
    given = next(node for node in reversed(graph.nodes) if node.op == "output").args[0]
    return list(given) if isinstance(given, (tuple, list)) else [given]


def _told_inside(graph: fx.Graph, value: _Value) -> str:
    """Have one tap tell the gradient of a value at all of its sites; returns the text for what is outside."""
    outside = f"{OUTSIDE}{next(_NUMBERS)}"
    texts = (*_renamed(value), outside)
    first = value.taps[0] if value.taps else None
    if first is not None and all(user is first or calls_ours(user, "look") for user in value.node.users):
        _retold(value.taps, first, texts)
        return outside
    _retold(value.taps, None)
    through_tap(graph, value.node, "\n" + "\n".join(texts))
    return outside


def _renamed(value: _Value) -> list[str]:
    """Number the texts of a value's looks and taps, so that two calls of one module are told apart."""
    texts = []
    for node in (*value.taps, *value.looks()):
        place = len(node.args) - 1
        text = str(node.args[place])
        if calls_ours(node, "tap") or wants_gradient(text):
            text = numbered(text, next(_NUMBERS))
            node.update_arg(place, text)
            texts.append(text)
    return texts


def _untold(value: _Value) -> None:
    """Have the taps of a value say that its gradient is not seen."""
    for tap in value.taps:
        tap.update_arg(1, wanting(str(tap.args[1])))
    _retold(value.taps, None)


def _used_within(node: fx.Node) -> bool:
    """Whether the call that gave a value used it for another of its results."""
    call = node
    while call.op == "call_function" and call.target is operator.getitem and isinstance(call.args[0], fx.Node):
        call = call.args[0]
    if call is node:
        return False
    given = {fn for own in call.all_input_nodes for fn in _functions(example_of(own))}
    value = example_of(node)
    mine = (value.grad_fn, value.output_nr)
    waiting = [fn for fn in _functions(example_of(call)) if fn is not value.grad_fn]
    seen = set(waiting)
    while waiting:
        for follows in waiting.pop().next_functions:
            if follows == mine:
                return True
            if follows[0] is not None and follows[0] not in given and follows[0] not in seen:
                seen.add(follows[0])
                waiting.append(follows[0])
    return False


def _functions(value: Any) -> list[Any]:
    """What autograd would run for the tensors in a value."""
    if isinstance(value, (tuple, list)):
        return [fn for item in value for fn in _functions(item)]
    return [value.grad_fn] if isinstance(value, torch.Tensor) and value.grad_fn is not None else []


def _retold(taps: list[fx.Node], teller: fx.Node | None, texts: tuple[str, ...] = ()) -> None:
    """Have one tap tell all that is wanted of a gradient, and the others nothing."""
    for tap in taps:
        tap.update_arg(1, "\n".join((str(tap.args[1]), *(texts if tap is teller else ("",)))))


def calls_ours(node: Any, *names: str) -> bool:
    """Whether a node calls one of our operators."""
    if node.op != "call_function":
        return False
    ours = [getattr(torch.ops.introspect, name) for name in names]
    return any(node.target is packet or node.target is packet.default for packet in ours)


def example_of(node: fx.Node) -> Any:
    """The tensor without contents that tracing left for a node."""
    return node.meta.get("example_value")


def _has_gradient(node: Any) -> bool:
    value = example_of(node) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.requires_grad


def memory_of(value: Any) -> object:
    """What tells whether two values share memory: a node's, by its example, or a tensor's; None for no such tensor."""
    value = example_of(value) if isinstance(value, fx.Node) else value
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage()).cdata
