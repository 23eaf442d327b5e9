"""The divergence map and the module tree, as lines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from introspect_cli.render.blocks import Block, Line, Span, line
from introspect_cli.render.text import clean, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.result import DiffResult, DivergenceMap, TreeNode

_SHADES = ((0.0, "·", "dim"), (1e-6, "░", "warm"), (1e-3, "▒", "warm"), (1e-1, "▓", "hot"), (math.inf, "█", "hot"))
_BEHIND = ("-", "warm")
_MOST_ROWS = 40


def map_blocks(result: DiffResult, width: int, most: int = _MOST_ROWS) -> list[Block]:
    """The map and the tree, where there is anything to see."""
    blocks: list[Block] = []
    if result.map is not None:
        blocks += [line(), *_map(result.map, min(width, 160), most)]
    if result.tree:
        blocks += [line(), *_tree(result.tree, most)]
    return blocks


def _fold(row: Sequence[float], fold: int) -> list[float]:
    return [max(row[start : start + fold]) for start in range(0, len(row), fold)]


def _map(divergence_map: DivergenceMap, width: int, most: int) -> list[Block]:
    names = [clean(name) for name in divergence_map.modules]
    label = min(max((len(name) for name in names), default=6), 34)
    room = max(width - label - 2, 10)
    fold = max(1, -(-len(divergence_map.steps) // room))
    wide = 2 if len(divergence_map.steps) * 2 <= room and fold == 1 else 1
    rows = list(range(len(names)))
    left_out = 0
    if len(rows) > most:
        hot = [row for row in rows if any(value != 0 for value in divergence_map.values[row])]
        first = {row: next(i for i, value in enumerate(divergence_map.values[row]) if value != 0) for row in hot}
        kept = sorted(sorted(hot, key=lambda row: (first[row], row))[:most])
        left_out = len(rows) - len(kept)
        rows = kept
    last = divergence_map.steps[-1] if divergence_map.steps else 0
    span = (
        f"steps {divergence_map.steps[0]} to {last}" + (f", {fold} a column" if fold > 1 else "")
        if divergence_map.steps
        else ""
    )
    blocks: list[Block] = [Line((("Divergence map", "heading"), (f" ({span})", "dim")))]
    for row in rows:
        spans: list[Span] = [(shorten(names[row], label).ljust(label) + "  ", "")]
        behind = _fold(divergence_map.behind[row], fold)
        shades = [
            _BEHIND if value == 0 and other else _shade(value)
            for value, other in zip(_fold(divergence_map.values[row], fold), behind, strict=True)
        ]
        spans += [(mark * wide, style) for mark, style in shades]
        blocks.append(Line(tuple(spans), wrap=False))
    if left_out:
        blocks.append(line(f"{left_out} more rows are not shown", "dim"))
    blocks.append(
        line(
            "· equal  - forward equal, rest not  ░ below 1e-6  ▒ below 1e-3  ▓ below 0.1  █ more, or one run only",
            "dim",
        )
    )
    return blocks


def _shade(value: float) -> tuple[str, str]:
    if math.isnan(value):
        return " ", ""
    for limit, mark, style in _SHADES:
        if value <= limit:
            return mark, style
    return _SHADES[-1][1:]


def _tree(nodes: tuple[TreeNode, ...], most: int) -> list[Block]:
    """The tree down to the origin: its ancestors, their children, and the origin's own children."""
    origin = next((node.fqn for node in nodes if node.state == "origin"), "")
    path = {origin}
    head = origin
    while "." in head:
        head = head.rpartition(".")[0]
        path.add(head)
    marks = {
        "equal": ("=", ""),
        "diverged": ("~", "warm"),
        "origin": (">", "bad"),
        "only a": ("-", "hot"),
        "only b": ("+", "hot"),
    }
    blocks: list[Block] = [line("Modules at the first diverging step (> origin, ~ diverged, = equal)", "heading")]
    shown = [node for node in nodes if "." not in node.fqn or node.fqn.rpartition(".")[0] in path]
    for node in shown[:most]:
        mark, style = marks.get(node.state, (" ", ""))
        name = node.fqn.rpartition(".")[2] if "." in node.fqn else node.fqn
        depth = node.fqn.count(".")
        text = f"{mark} {'  ' * depth}{clean(name)} ({clean(node.module_class)})"
        tail = (
            "   <- origin"
            if node.state == "origin"
            else ""
            if node.state in {"equal", "diverged"}
            else f"   {node.state}"
        )
        blocks.append(Line(((text, style), (tail, style)), wrap=False))
    if len(shown) > most:
        blocks.append(line(f"{len(shown) - most} more modules are not shown", "dim"))
    return blocks
