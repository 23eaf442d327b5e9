"""Which call of its module each tap of a graph belongs to, and where in the program it stands.

A compiler runs what it compiled in an order of its own: a look at a constant (`torch.arange` that goes into a position
embedding) comes by after the outputs of the modules that follow. So the order in which taps come by tells no call from
the next. The graph that Dynamo hands to a backend is in the order of the program, and there each tap is given its
number, once for all runs of that graph.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import fx

from introspect_cli.capture.regions.graph import calls_ours
from introspect_cli.capture.regions.taps import CallCount, parsed, placed

if TYPE_CHECKING:
    from collections.abc import Iterator

PLACE = "introspect_place"
"""Key of a node's meta data under which its place in the program stands; even numbers, so that looks fit in between."""


def number_calls(graph_module: fx.GraphModule) -> bool:
    """Have every tap and look say which call of its module in the graph it belongs to, in place.

    Args:
        graph_module: what Dynamo hands to a backend; graphs that are called in it once are numbered along.

    Returns:
        whether there are any.
    """
    counts: dict[str, CallCount] = {}
    found: list[tuple[fx.Node, int, int]] = []
    for place, node in enumerate(_in_order(graph_module)):
        node.meta[PLACE] = 2 * place
        if calls_ours(node, "look", "tap"):
            tapped = parsed(str(node.args[-1]))
            call = counts.setdefault(tapped.module, CallCount()).at(tapped.kind, tapped.path)
            found.append((node, 2 * place, call))
    for node, place, call in found:
        node.update_arg(len(node.args) - 1, placed(str(node.args[-1]), place, call))
    return bool(found)


def _in_order(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """All nodes as they run; a nested graph that one node alone names (a checkpoint) where that node calls it."""
    names = Counter(node.target for node in graph_module.graph.nodes if node.op == "get_attr")
    for node in graph_module.graph.nodes:
        yield node
        if node.op != "call_function":
            continue
        for argument in node.all_input_nodes:
            nested = getattr(graph_module, str(argument.target), None) if argument.op == "get_attr" else None
            if isinstance(nested, fx.GraphModule) and names[argument.target] == 1 and len(argument.users) == 1:
                yield from _in_order(nested)
