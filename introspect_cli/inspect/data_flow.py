"""The dataflow of one step, as data: operators, what they were given, and what of them is worth showing.

A step of a real model runs thousands of operators and most say nothing new. So the graph can be pruned: operators that
leave the scale of their one input as it is, the middle ones of repeated layers, and whatever was not asked for by name
are taken out, and what they passed on is joined up.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import UsageError
from introspect_cli.inspect.overview import reader_of
from introspect_cli.records import Given, Kind, Phase, Record
from introspect_cli.selection import selects

if TYPE_CHECKING:
    from collections.abc import Iterable

UNCHANGED = 2.0**-16
"""Relative change of the mean of absolutes up to which an operator leaves the scale as it is."""

_LAYER = re.compile(r"\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class Node:
    """One result of an operator.

    Attributes:
        number: the site's number in its run.
        record: the record.
        forward: number of the forward operator that a backward one belongs to; None for others.
        inputs: how many floating point inputs it has, of any origin: operators, parameters, or not recorded.
        state: in a comparison `equal`, `origin`, `diverged`, `only a`; "" outside one.
        rel_l2: relative distance in a comparison; None where not measured.
    """

    number: int
    record: Record
    forward: int | None = None
    inputs: int = 0
    state: str = ""
    rel_l2: float | None = None

    @property
    def name(self) -> str:
        """The operator with its output, such as `aten.mm`; of any other record the FQN."""
        site = self.record.site
        return site.path if site.kind is Kind.OP_OUTPUT else site.fqn

    @property
    def scale(self) -> float | None:
        """Mean of absolutes; None where not measured."""
        return self.record.summary.stats.get("amean")

    @property
    def nonfinite(self) -> bool:
        """Whether it holds NaN or infinities."""
        return any(self.record.summary.stats.get(name) for name in ("nans", "infs"))


@dataclass(frozen=True)
class Graph:
    """Operators and what flows between them.

    Attributes:
        step: the step.
        nodes: in the order they ran.
        edges: pairs of node numbers, from what wrote a value to what was given it.
        total: nodes before pruning.
    """

    step: int
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    total: int


def graph_of(run: Any, step: int | None = None, rank: int | None = None) -> Graph:
    """The dataflow of a step, not pruned.

    Args:
        run: the run.
        step: its number; None for the first of the first eight recorded steps that has operators.
        rank: whose; None for the first.

    Raises:
        UsageError: the run has no such step or rank, or no operators in it.
    """
    reader = reader_of(run, rank, step)
    steps = reader.entries["step"].tolist() if step is None else [step]
    for number in steps[:8]:
        graph = _read(reader, number)
        if graph.nodes:
            return graph
    where = f"step {step}" if step is not None else "its first steps"
    raise UsageError(f"{run.path} has no operators in {where}: capture it with --level op.")


def _read(reader: Any, step: int) -> Graph:
    """The graph of one step: the recorded results of operators in the order they ran, and the edges between them.

    Nodes and edges have site numbers. An edge leads from a recorded earlier result alone: not from parameters, nor from
    the operator itself.
    """
    batch, kinds = reader.read(step), reader.sites.kind
    nodes: dict[int, Node] = {}
    edges: list[tuple[int, int]] = []
    for row in np.argsort(batch.sequence, kind="stable").tolist():
        number = int(batch.site[row])
        if kinds[number] != Kind.OP_OUTPUT.value:
            continue
        record = reader.record(batch, row, step)
        given = record.given or Given()
        nodes[number] = Node(number, record, given.forward if given.forward >= 0 else None, len(given.inputs))
        edges += [(start, number) for start in given.inputs if start in nodes and start != number]
    return Graph(step, tuple(nodes.values()), tuple(dict.fromkeys(edges)), len(nodes))


def prune(graph: Graph, targets: tuple[str, ...] = (), *, repeating: bool = False) -> Graph:
    """A copy of the graph without what is left out; inputs lead on to later users.

    Args:
        graph: what to prune.
        targets: globs over FQNs or operator names to keep; all where empty.
        repeating: keep what says nothing new: operators with one input whose mean of absolutes they and the backward
            operators that belong to them leave within a relative 2^-16; of layers that are numbered alike, all but the
            first and the last; and what runs on gradients between the backward pass and the optimizer step.

    Returns:
        the rest. What diverges in the forward or backward pass, and what holds NaN or infinities, always stays.
    """
    names = {node.number: (node.record.site.fqn, node.name, node.record.info.op) for node in graph.nodes}
    gone = {number for number, each in names.items() if targets and not any(selects(name, targets) for name in each)}
    passing = {node.number for node in graph.nodes if node.record.site.phase is Phase.OPTIMIZER and not repeating}
    if not repeating:
        gone |= passing | _middle(graph) | _unchanging(graph)
    for node in graph.nodes:
        diverges = node.state not in ("", "equal") and node.number not in passing
        if node.nonfinite or node.state == "origin" or diverges:
            gone.discard(node.number)
    return without(graph, gone)


def _unchanging(graph: Graph) -> set[int]:
    """Site numbers of operators with one input that leave its scale, the mean of absolutes, within `UNCHANGED`.

    A forward operator and its backward ones are in it together, or not at all.
    """
    scales = {node.number: math.nan if node.scale is None else node.scale for node in graph.nodes}
    given: dict[int, list[float]] = {}
    for start, end in graph.edges:
        given.setdefault(end, []).append(scales[start])
    same = {
        node.number
        for node in graph.nodes
        if len(before := given.get(node.number, [])) == node.inputs == 1
        and abs(scales[node.number] - before[0]) <= UNCHANGED * abs(before[0])
    }
    # A forward operator and its backward ones go together or not at all.
    same -= {node.forward for node in graph.nodes if node.forward is not None and node.number not in same}
    together = {None, *same}
    return {node.number for node in graph.nodes if node.number in same and node.forward in together}


def _middle(graph: Graph) -> set[int]:
    """Site numbers of nodes in numbered layers between the lowest and the highest number (`h.1` of `h.0` to `h.2`).

    Compared are numbers behind equal names; a name with several numbers counts if any of them is between.
    """
    fqns = [(node.number, node.record.site.fqn) for node in graph.nodes]
    layers = [(number, fqn[: match.start()], int(match[1])) for number, fqn in fqns for match in _LAYER.finditer(fqn)]
    numbers: dict[str, set[int]] = {}
    for _, head, layer in layers:
        numbers.setdefault(head, set()).add(layer)
    return {number for number, head, layer in layers if min(numbers[head]) < layer < max(numbers[head])}


def without(graph: Graph, gone: Iterable[int]) -> Graph:
    """The graph without the nodes `gone`; an edge into one leads on to its next remaining users."""
    gone = set(gone)
    after: dict[int, list[int]] = {}
    for start, end in graph.edges:
        after.setdefault(start, []).append(end)
    reached: dict[int, tuple[int, ...]] = {}
    # Nodes stand in the order they ran, so what follows one is known before it when walked from the end.
    for node in reversed(graph.nodes):
        ends: dict[int, None] = {}
        for end in after.get(node.number, []):
            ends.update(dict.fromkeys(reached.get(end, ()) if end in gone else (end,)))
        reached[node.number] = tuple(ends)
    nodes = tuple(node for node in graph.nodes if node.number not in gone)
    edges = tuple((node.number, end) for node in nodes for end in reached[node.number])
    return replace(graph, nodes=nodes, edges=edges)


def backward_of(graph: Graph) -> dict[int, Node]:
    """By site number of a forward operator, the node of its first operator of the backward pass."""
    backward = (node for node in reversed(graph.nodes) if node.record.site.phase is Phase.BACKWARD)
    return {node.forward: node for node in backward if node.forward is not None}
