"""Single operators inside a compiled region: which there would be, run as python, and what they gave.

The graph that a compiler is given holds calls of functions; what a function gave is what the last of its operators
gave. A look is put behind each call whose result an operator gave, and says which operator that is, by module and by
how many of its sort the region runs in that module before. The other operators of a call have no value of their own
once it is compiled, and are recorded as not observed; so are those of the backward pass, which the compiler makes by
itself.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from introspect_cli.capture.environment import sources
from introspect_cli.capture.ops.values import outputs, tensors
from introspect_cli.capture.regions.graph import (
    NOTHING,
    PLACE,
    Call,
    Ran,
    borrowed,
    calls_introspect,
    example_of,
    may_be_copied,
    memory_of,
    through_tap,
    watching,
)
from introspect_cli.capture.regions.taps import OPERATOR
from introspect_cli.records import OTHERS, Kind, Phase, Site, SiteInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.capture.context import Context
    from introspect_cli.capture.ops.calls import OpCall, Scope
    from introspect_cli.capture.ops.probe import OpProbe
    from introspect_cli.capture.ops.schema import OpFacts
    from introspect_cli.capture.regions.probe import TapProbe

_LINE = re.compile(r'File "(.+?)", line (\d+)')

_INNER = "inside a compiled region only the last operator of a call is seen"
_BACKWARD = "a compiled backward pass is not looked into"
_UNKNOWN = "inside a compiled region; which operators this call runs could not be determined"


@dataclass
class _Result:
    """One result of one operator of a graph.

    Attributes:
        module: number of the module that runs it, "" for the module or function that was compiled.
        facts: the operator.
        before: how many of its sort the graph runs in that module before it.
        path: of this result among those of the operator.
        shape: sizes as the operator gave them, one at most -1; None where the call's result has the same.
        source: the user's line.
        given: numbers of the results that it was given, -1 for others.
        site: where it was recorded last.
    """

    module: str
    facts: OpFacts
    before: int
    path: str
    shape: list[int] | None
    source: str
    given: list[int]
    site: int = -1


@dataclass
class Graph:
    """One graph.

    Attributes:
        order: what looks in it say they write to; None where it has none: it is tapped then, which copies.
        shared: memory that comes in and goes out again, of which nothing may be copied.
        totals: how often it runs an operator in a module.
        inner: results of operators that have no value of their own.
        unknown: modules with calls whose operators are not known.
        modules: all modules it runs.
    """

    order: fx.Node | None
    shared: set[object]
    totals: Counter[tuple[str, OpFacts]] = field(default_factory=Counter)
    inner: list[_Result] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)


class CompiledOps:
    """Puts looks into graphs, and records what they see."""

    def __init__(self, context: Context, taps: TapProbe, ops: OpProbe) -> None:
        self._recorder = context.recorder
        self._taps = taps
        self._ops = ops
        self._results: list[_Result] = []
        self._numbers: dict[int, str] = {}
        self._marked: set[int] = set()
        context.clock.on_tick.append(self._marked.clear)

    def put_in(self, graph_module: fx.GraphModule) -> Graph:
        """Put a look behind every call that gives what an operator gave, in a graph rewritten for gradients."""
        graph = graph_module.graph
        order = _order(graph)
        about, writers = Graph(order, borrowed(graph) if order is None else set()), dict[object, int]()
        self._numbers = self._taps.numbers()
        with watching(graph) as listen:
            for node in _calls(graph):
                ran = listen(node)
                if ran is NOTHING:
                    continue
                module = self._module(node)
                about.modules.add(module)
                if ran is None:
                    about.unknown.add(module)
                else:
                    self._take(about, writers, module, node, ran)
        for nested in graph_module.modules():
            if nested is not graph_module and isinstance(nested, fx.GraphModule):
                inside = {self._module(node) for node in _calls(nested.graph)}
                about.unknown |= inside
                about.modules |= inside
        graph_module.recompile()
        return about

    def _take(self, about: Graph, writers: dict[object, int], module: str, node: fx.Node, ran: Call) -> None:
        """Look at what a call gives, where one of its operators gave that; note the others."""
        line = _line(node)
        places = dict(_places(node, ran.result))
        given = [writers.get(memory_of(example_of(argument)), -1) for argument in node.all_input_nodes]
        for call, path, value, facts in self._floats(about, module, ran.ran):
            before = about.totals[module, facts] - 1
            entry = _Result(module, facts, before, path, None, line, given)
            place = places.pop(memory_of(value), None) if _is_last(call, value, ran.ran) else None
            number = len(self._results)
            seen = place is not None and _fits(entry, value, example_of(place))
            if (
                place is None
                or not seen
                or not _see(place, about, f"{OPERATOR}{number}.{node.meta.get(PLACE, -2) + 1}")
            ):
                about.inner.append(entry)
                continue
            self._results.append(entry)
            writers[memory_of(example_of(place))] = number

    def _floats(self, about: Graph, module: str, ran: list[Ran]) -> Iterator[tuple[Ran, str, torch.Tensor, OpFacts]]:
        """Every result that is recorded of operators run as python, each operator counted."""
        for call in ran:
            facts = self._ops.facts(call.func)
            about.totals[module, facts] += 1
            if facts.recorded:
                for path, value in outputs(facts, call.args, call.kwargs, call.result):
                    if self._ops.wants(value):
                        yield call, path, value, facts

    def _module(self, node: fx.Node) -> str:
        """What taps call the innermost module that a node belongs to; "" outside every module of the graph."""
        for key in reversed(list(node.meta.get("nn_module_stack") or ())):
            identity, _, _ = str(key).partition("@")  # the second call of a module has @1 behind it
            if identity.isdigit() and int(identity) in self._numbers:
                return self._numbers[int(identity)]
        return ""

    def take_look(self, number: int, value: torch.Tensor) -> None:
        """A look has come by."""
        entry = self._results[number]
        call = self._call(entry, self._scope(entry.module))
        if call is not None:
            shaped = value if entry.shape is None else value.reshape(entry.shape)
            given = [self._results[other].site if other >= 0 else -1 for other in entry.given]
            entry.site = self._ops.record(call, entry.path, shaped, given)

    def _scope(self, module: str) -> Scope | None:
        place = self._taps.place(module)
        if place is None:
            return None
        return self._ops.calls.scope(place.fqn, place.phase, place.module_class, watched=place.watched)

    def _call(self, entry: _Result, scope: Scope | None) -> OpCall | None:
        return self._ops.inside(scope, entry.facts, entry.before, entry.source)

    def end_graph(self, graph: Graph) -> None:
        """A graph has run forward: say what of it was not seen, and count its operators."""
        if not self._recorder.wanted or not self._ops.live:
            return
        scopes = {module: self._scope(module) for module in graph.modules}
        for entry in graph.inner:
            call = self._call(entry, scopes[entry.module])
            if call is not None:
                self._ops.record(call, entry.path, None, [], _INNER)
        for (module, facts), times in graph.totals.items():
            if (ran_in := scopes[module]) is not None:
                self._ops.calls.count(ran_in, facts, times)
        root = scopes.get("")
        if root is not None and root.phase is Phase.LOSS:
            # a function, or what comes after a graph break in any of the modules that it calls
            scopes |= {module: self._scope(module) for module in self._taps.numbers().values()}
        for module, scope in scopes.items():
            self._mark(scope, unknown=module in graph.unknown)

    def _mark(self, scope: Scope | None, *, unknown: bool) -> None:
        """Note that operators of a module, or of its backward pass, are not all seen; once a step."""
        if scope is None or not scope.watched:
            return
        phases = [(scope.phase, _UNKNOWN if unknown else _INNER)]
        if scope.phase is Phase.LOSS:  # of a function: run as python, some would be in the phase before
            phases.append((Phase.DATA, _INNER))
        if scope.phase in {Phase.FORWARD, Phase.LOSS} and torch.is_grad_enabled():
            phases.append((Phase.BACKWARD, _BACKWARD))
        for phase, reason in phases:
            site = Site(phase, Kind.OP_OUTPUT, scope.fqn, 0, OTHERS)
            number = self._recorder.site(site, SiteInfo(scope.module_class))
            if number not in self._marked:
                self._marked.add(number)
                self._recorder.missing(number, reason)


def _calls(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute something; introspect's, and those that take results apart, do not."""
    return [
        node
        for node in graph.nodes
        if node.op in {"call_function", "call_method"}
        and node.target is not operator.getitem
        and not calls_introspect(node, "tap", "look")
    ]


def _places(node: fx.Node, result: Any) -> Iterator[tuple[object, fx.Node]]:
    """Memory of each tensor among a call's results, and the node that stands for it."""
    if isinstance(result, torch.Tensor):
        yield memory_of(result), node
    elif isinstance(result, (tuple, list)):
        for user in list(node.users):
            if user.target is operator.getitem and isinstance(user.args[1], int):
                value = result[user.args[1]]
                if isinstance(value, torch.Tensor):
                    yield memory_of(value), user


def _is_last(call: Ran, value: torch.Tensor, ran: list[Ran]) -> bool:
    """Whether no later operator of the same call writes to a result's memory."""
    later = itertools.islice(ran, ran.index(call) + 1, None)
    return not any(
        memory_of(item) == memory_of(value) and _writes(other) for other in later for _, item in tensors("", other.args)
    )


def _writes(call: Ran) -> bool:
    schema = getattr(call.func, "_schema", None)
    return schema is None or schema.is_mutable


def _fits(entry: _Result, value: torch.Tensor, example: torch.Tensor) -> bool:
    """Whether a call's value has all elements that an operator gave, in their order; the entry learns their sizes."""
    if value.numel() != example.numel() or value.storage_offset() != example.storage_offset():
        return False
    if value.shape == example.shape and value.stride() == example.stride():
        return True
    entry.shape = [size if isinstance(size, int) else -1 for size in value.shape]
    return value.is_contiguous() and example.is_contiguous() and entry.shape.count(-1) <= 1


def _line(node: fx.Node) -> str:
    """`file:line` of the innermost line of the user's that a node was traced from."""
    for path, line in reversed(_LINE.findall(node.meta.get("stack_trace") or "")):
        if sources.is_users(path):
            return f"{sources.relative(path)}:{line}"
    return ""


def _order(graph: fx.Graph) -> fx.Node | None:
    """What looks in a graph say they write to; None where there are none, and nothing may be added for them."""
    order = next((node.args[1] for node in graph.nodes if calls_introspect(node, "look")), None)
    return order if isinstance(order, fx.Node) else None


def _see(place: fx.Node, about: Graph, text: str) -> bool:
    """Have a node's value looked at, or tapped where a graph takes no looks; whether that could be done."""
    graph = place.graph
    if about.order is not None:
        with graph.inserting_after(place):
            graph.call_function(torch.ops.introspect.look, (place, about.order, text))
    elif example_of(place).is_floating_point() and may_be_copied(graph, place, about.shared):
        through_tap(graph, place, text)
    else:
        return False
    return True
