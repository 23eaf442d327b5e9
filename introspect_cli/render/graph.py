"""The dataflow of a step as a table, and as a picture that any browser shows without a script.

Layers follow what depends on what, top to bottom; within a layer nodes stand near what they were given. Colour says
scale, or how a comparison went; hovering tells the rest.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.errors import UsageError
from introspect_cli.inspect.data_flow import Graph, Node, backward_of
from introspect_cli.records import Phase, Site
from introspect_cli.render.blocks import Block, Column, cut, line, number, shape, statistic, table_of, write_whole
from introspect_cli.texts import clean

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.result import DiffResult

_STATS = (
    ("mean|x|", "amean"),
    ("|mean|", "absmean"),
    ("std", "std"),
    ("max|x|", "absmax"),
    ("min|x|", "absmin"),
)
_WIDE, _HIGH, _GAP, _BELOW, _EDGE = 168, 38, 20, 34, 24
_STATES = {"equal": "var(--eq,#e8ecef)", "origin": "#d7263d", "diverged": "#f4a259", "only a": "#8e6bbf"}
"""Colour of an operator by its state in a comparison."""
_NAN = "#d7263d"
_RAMP = ("#2b5c8a", "#5b8db8", "#a8c6dc", "#e8ecef", "#f3d1a5", "#e59a4f", "#b85c1c")
_DARK = {_NAN, _RAMP[0], _RAMP[-1], _STATES["only a"]}
# Inside a page the variables are those of its theme; a drawing by itself falls back to light.
_STYLE = (
    ".ops text{font:11px system-ui,sans-serif;fill:var(--front,#1b1f24)}.ops text.m{fill:var(--quiet,#57606a)}"
    ".ops text.d{fill:#fff}.ops text.i{fill:#1b1f24}.ops path{fill:none;stroke:var(--noise,#8c959f);stroke-width:1.1}"
    ".ops .s path{stroke:var(--line,#dfe3e8)}.ops rect{stroke:var(--quiet,#57606a);stroke-width:.8}"
    ".ops .g rect{stroke-dasharray:4 2}.ops .origin rect{stroke:var(--front,#1b1f24);stroke-width:2.5}"
)


def mark_ops(graph: Graph, result: DiffResult) -> Graph:
    """A copy of the graph with each operator's state: `equal`, `diverged`, `origin`, `only a`.

    Operators that b alone has are not drawn. `result` must list all divergences of the step.
    """
    divergences = {(item.step, item.site): item for item in result.divergences}
    nodes = []
    for node in graph.nodes:
        item = divergences.get((graph.step, node.record.site))
        state, rel = "equal", None
        if item is not None:
            state = "only a" if item.b is None else "origin" if item.role.value == "origin" else "diverged"
            rel = item.rel_l2
        nodes.append(replace(node, state=state, rel_l2=rel))
    return replace(graph, nodes=tuple(nodes))


def graph_blocks(graph: Graph) -> list[Block]:
    """A line on how many operators are shown, and a table of them with their scales and those of their gradients.

    A gradient is that of the first backward operator; columns without any text are left out.
    """
    gradients = {at: statistic(node.record.summary, "amean", 3) for at, node in backward_of(graph).items()}

    def scale(title: str, name: str, drop_at: int) -> tuple[Column, Callable[[Node], str]]:
        return Column(title, right=True, drop_at=drop_at), lambda node: statistic(node.record.summary, name, 3)

    columns: list[tuple[Column, Callable[[Node], str]]] = [
        (Column("phase", drop_at=1), lambda node: node.record.site.phase.value),
        (Column("module", least=14), lambda node: clean(node.record.site.fqn)),
        (Column("operator", least=16), lambda node: _operator(node.record.site)),
        (Column("shape", drop_at=6), lambda node: shape(node.record.summary.layout.shape)),
        *(scale(title, name, 3 if place > 1 else 0) for place, (title, name) in enumerate(_STATS)),
        (Column("gradient mean|x|", right=True, drop_at=5), lambda node: gradients.get(node.number, "")),
        (Column("line", least=12, drop_at=4), lambda node: clean(node.record.info.source)),
        (Column("state"), lambda node: node.state),
        (Column("rel L2", right=True), lambda node: "" if node.rel_l2 is None else number(node.rel_l2, 2)),
    ]
    left = graph.total - len(graph.nodes)
    head = f"Step {graph.step}: {len(graph.nodes)} results of operators{f', {left} more left out' if left else ''}."
    table = table_of(graph.nodes, columns, lambda node: "origin" if node.state == "origin" or node.nonfinite else "")
    return [line(head), table]


def _operator(site: Site) -> str:
    """The operator and output of a site, with the number of the call in brackets where it is not 0."""
    return f"{clean(site.path)}{f' ({site.call})' if site.call else ''}"


def graph_svg(graph: Graph) -> str:
    """The graph as one SVG document, without scripts or anything from elsewhere."""
    places, width, height = _layout(graph)
    size = f'width="{width}" height="{height}"'
    # What the forward pass saved for the backward pass is drawn first, and faintly: there is much of it.
    backward = {node.number for node in graph.nodes if node.record.site.phase is Phase.BACKWARD}
    across = {edge for edge in graph.edges if len(backward & {*edge}) == 1}
    parts = []
    for edge in sorted(graph.edges, key=lambda edge: edge not in across):
        (x0, y0), (x1, y1) = (places[end] for end in edge)
        x0, x1, y0 = x0 + _WIDE / 2, x1 + _WIDE / 2, y0 + _HIGH
        bend = max((y1 - y0) / 2, 12)
        curve = f"M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"
        parts.append(f'<g class="{"s" if edge in across else "f"}"><path d="{curve}"/></g>')
    parts += [_box(node, *places[node.number]) for node in graph.nodes]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ops" {size} viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="operators of step {graph.step}"><style>{_STYLE}</style>'
        f'<rect {size} style="fill:var(--back,#fff);stroke:none"/>{"".join(parts)}</svg>'
    )


def draw(graph: Graph, path: str) -> None:
    """Write the picture to a file, which any browser shows.

    Raises:
        UsageError: the name does not end in .svg, or it cannot be written.
    """
    if not path.endswith(".svg"):
        raise UsageError(f"{path} is no .svg: name the file so that its kind is known.")
    write_whole(Path(path), graph_svg(graph))


def _box(node: Node, x: float, y: float) -> str:
    """One operator as SVG: a box, two lines of text, and a tooltip."""
    site, summary = node.record.site, node.record.summary
    colour, ink, faint = _colour(node)
    name, bracket, output = site.path.removeprefix("aten.").partition("[")
    facts = [
        f"{site.phase.value} {site.fqn}: {_operator(site)}",
        f"{shape(summary.layout.shape)} {summary.layout.dtype}",
        ", ".join(f"{title} {number(summary.stats[key], 4)}" for title, key in _STATS if key in summary.stats),
        node.record.info.source,
        node.state + (f", relative L2 {number(node.rel_l2, 3)}" if node.rel_l2 is not None else ""),
    ]
    tip = html.escape("\n".join(clean(text) for text in facts if text))
    kind = ("g" if site.phase is Phase.BACKWARD else "n") + (" origin" if node.state == "origin" else "")
    short = f"{name.partition('.')[0]}{bracket}{output}"
    return (
        f'<g class="{kind}" transform="translate({x:.0f} {y:.0f})"><title>{tip}</title>'
        f'<rect width="{_WIDE}" height="{_HIGH}" rx="6" style="fill:{colour}"/>'
        f'<text x="8" y="15" class="{ink}">{html.escape(cut(clean(short), 23))}</text>'
        f'<text x="8" y="30" class="{faint}">{html.escape(cut(clean(site.fqn), 24, front=True))}</text></g>'
    )


def _colour(node: Node) -> tuple[str, str, str]:
    """(fill colour, CSS class of the first line of text, of the second).

    NaN or infinity is red; in a comparison the state decides; else the mean of absolutes, in powers of ten from 1e-6 to
    100, clipped; the background where it is unknown.
    """
    scale = node.scale
    if node.nonfinite:
        colour = _NAN
    elif node.state or scale is None:
        colour = _STATES.get(node.state, "var(--back,#fff)")
    else:
        place = min(max(math.log10(scale) + 6, 0), 8) / 8 if scale else 0
        colour = _RAMP[round(place * (len(_RAMP) - 1))]
    return (colour, "", "m") if colour.startswith("var") else (colour, *("d" if colour in _DARK else "i") * 2)


def _layout(graph: Graph) -> tuple[dict[int, tuple[float, float]], int, int]:
    """(left, top) of each node by its number; width, at least 560, and height of the picture.

    A node stands below all that it was given. Without inputs, nodes of the loss, backward pass and optimizer stand
    below the forward pass so far.
    """
    before: dict[int, list[int]] = {node.number: [] for node in graph.nodes}
    for start, end in graph.edges:
        before[end].append(start)
    depth: dict[int, int] = {}
    layers: defaultdict[int, list[int]] = defaultdict(list)
    first_backward = 0
    for node in graph.nodes:
        given, phase = before[node.number], node.record.site.phase
        level = max((depth[start] + 1 for start in given if start in depth), default=0)
        if not given and phase in (Phase.BACKWARD, Phase.OPTIMIZER, Phase.LOSS):
            level = first_backward  # nothing drawn leads to it; it must not stand above the forward pass
        depth[node.number] = level
        layers[level].append(node.number)
        if phase is Phase.FORWARD:
            first_backward = max(first_backward, level + 1)
    left: dict[int, float] = {}
    for level, layer in sorted(layers.items()):
        drawn = {item: [left[start] for start in before[item] if start in left] for item in layer}
        wished = {item: sum(given) / len(given) if given else 0.0 for item, given in drawn.items()}
        at = -math.inf
        for item in sorted(layer, key=lambda item: wished[item]):
            at = left[item] = max(at + _WIDE + _GAP, wished[item])
        # Pushing to the right only would let the picture drift; half of it is taken back.
        drift = sum(left[item] - wished[item] for item in layer) / len(layer) if level else 0.0
        for item in layer:
            left[item] -= drift
    shift = _EDGE - min(left.values(), default=0.0)
    places = {item: (x + shift, float(_EDGE + depth[item] * (_HIGH + _BELOW))) for item, x in left.items()}
    width = int(max((x for x, _ in places.values()), default=0) + _WIDE + _EDGE)
    return places, max(width, 560), int(len(layers) * (_HIGH + _BELOW) + _EDGE)
