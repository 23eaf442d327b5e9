"""What a compiler's graph says of its values.

In the graph that Dynamo hands to a backend every node carries an example, a tensor without contents, by which memory,
in-place writes and autograd's own graph can be asked without computing anything.

A compiler runs what it compiled in an order of its own: a look at a constant (`torch.arange` that goes into a position
embedding) comes by after the outputs of the modules that follow. So the order in which taps come by tells no call from
the next. The graph that Dynamo hands to a backend is in the order of the program, and there each tap is given its
number, once for all runs of that graph.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from introspect_cli.capture.regions.taps import CallCount, parsed, placed

if TYPE_CHECKING:
    from collections.abc import Iterator


_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
"""With nothing to drop they give their argument itself, from torch 2.15 on in a graph, too."""
_HANDING_ON = ("contiguous", "to", "float", "double", "half", "bfloat16", "cpu", "type_as")
"""Methods of a tensor that give it itself where it is as asked for."""


def calls_introspect(node: Any, *names: str) -> bool:
    """Whether a node calls one of the named operators of introspect (`look`, `tap`)."""
    if node.op != "call_function":
        return False
    ours = [getattr(torch.ops.introspect, name) for name in names]
    return any(node.target is packet or node.target is packet.default for packet in ours)


def example_of(node: fx.Node) -> Any:
    """Tracing's example tensor of a node; None without one."""
    return node.meta.get("example_value")


def has_gradient(node: Any) -> bool:
    """Whether a node's value is a tensor that requires a gradient."""
    value = example_of(node) if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.requires_grad


def memory_of(value: Any) -> object:
    """Identity of the storage of a node's example or a tensor; None without a strided tensor."""
    value = example_of(value) if isinstance(value, fx.Node) else value
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage()).cdata


def arguments(graph: fx.Graph) -> list[fx.Node]:
    """Placeholder nodes of a graph in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def results(graph: fx.Graph) -> list[Any]:
    """Outputs of a graph in order, mostly nodes."""
    given = next(node for node in reversed(graph.nodes) if node.op == "output").args[0]
    return list(given) if isinstance(given, (tuple, list)) else [given]


def borrowed(graph: fx.Graph) -> set[object]:
    """Storages of both an input and an output.

    A view of what comes in may be copied unless it goes out again: whoever gets it may write to it.
    """
    return {memory_of(argument) for argument in arguments(graph)} & {memory_of(result) for result in results(graph)}


def may_be_copied(graph: fx.Graph, node: fx.Node, shared: set[object]) -> bool:
    """Whether all uses of a value may take a copy; `shared` is the graph's `borrowed` memory."""
    if memory_of(node) in shared and node.op != "placeholder":
        return False
    return _settled(graph, node) and not used_within(node)


def through_tap(graph: fx.Graph, node: fx.Node, text: str) -> fx.Node:
    """Insert a tap after a node and replace all uses by it; returns the tap."""
    with graph.inserting_after(node):
        through = graph.call_function(torch.ops.introspect.tap, (node, text))
    through.meta = dict(node.meta)
    node.replace_all_uses_with(through, delete_user_cb=lambda user: user is not through)
    return through


def _settled(graph: fx.Graph, node: fx.Node) -> bool:
    """Whether nothing writes to a value in place later, nor uses its memory by an earlier node."""
    version = example_of(node)._version  # noqa: SLF001 - the documented-by-use counter of in-place writes
    if not version:
        return True
    memory, older, writes = memory_of(node), [], 0
    for other in graph.nodes:
        if memory_of(other) != memory or other.op in ("placeholder", "output"):
            continue
        # What writes in place gives its own argument back. A write that gives nothing is missing in the count.
        given_back = any(example_of(given) is example_of(other) for given in other.all_input_nodes)
        writes += given_back and not _only_hands_on(other)
        older.append(other)
        if other is node:
            break
    later = set(itertools.dropwhile(lambda other: other is not node, graph.nodes)) - {node}
    users = (user for other in older[:-1] for user in other.users)
    return writes == version and not any(user in later and not calls_introspect(user, "look") for user in users)


def _only_hands_on(node: fx.Node) -> bool:
    """Whether a call writes nothing although it may return its argument."""
    if node.op == "call_method":
        return node.target in _HANDING_ON
    if node.target not in _DROPOUTS:
        return calls_introspect(node, "tap")  # one put in for another value carries that one's example
    inplace = node.args[3] if len(node.args) > 3 else node.kwargs.get("inplace", False)
    return inplace is False


def used_within(node: fx.Node) -> bool:
    """Whether another result of the same call depends on this one, as with an LSTM cell's state."""
    call = node
    while call.op == "call_function" and call.target is operator.getitem and isinstance(call.args[0], fx.Node):
        call = call.args[0]
    if call is node:
        return False
    given = {fn for argument in call.all_input_nodes for fn in _functions(example_of(argument))}
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
    """`grad_fn` of each tensor in a value."""
    if isinstance(value, (tuple, list)):
        return [fn for item in value for fn in _functions(item)]
    return [value.grad_fn] if isinstance(value, torch.Tensor) and value.grad_fn is not None else []


def number_calls(graph_module: fx.GraphModule) -> bool:
    """Number each tap and look by the call of its module in the graph, in place.

    Args:
        graph_module: what Dynamo hands to a backend; graphs that are called in it once are numbered along.

    Returns:
        whether there are any.
    """
    counts: dict[str, CallCount] = {}
    taps: list[tuple[fx.Node, int, int]] = []
    for place, node in enumerate(_in_order(graph_module)):
        if calls_introspect(node, "look", "tap"):
            tapped = parsed(str(node.args[-1]))
            call = counts.setdefault(tapped.module, CallCount()).at(tapped.kind, tapped.path)
            taps.append((node, place, call))
    for node, place, call in taps:
        node.update_arg(len(node.args) - 1, placed(str(node.args[-1]), place, call))
    return bool(taps)


def _in_order(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """Nodes in order of execution; those of a nested graph with one caller follow the node that calls it."""
    names = Counter(node.target for node in graph_module.graph.nodes if node.op == "get_attr")
    for node in graph_module.graph.nodes:
        yield node
        if node.op != "call_function":
            continue
        for argument in node.all_input_nodes:
            nested = getattr(graph_module, str(argument.target), None) if argument.op == "get_attr" else None
            if isinstance(nested, fx.GraphModule) and names[argument.target] == 1 and len(argument.users) == 1:
                yield from _in_order(nested)
