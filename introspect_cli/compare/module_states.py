"""The module tree with the state of each module at the first diverging step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.facts import FORWARD, ancestors
from introspect_cli.compare.result import Divergence, TreeNode
from introspect_cli.records import Kind, ModuleInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.reasons.facts import Facts
    from introspect_cli.compare.reasons.origin import Cause

_OF_MODULE = (Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)


def tree_of(
    facts: Facts, modules_a: Sequence[ModuleInfo], modules_b: Sequence[ModuleInfo], first: Divergence, cause: Cause
) -> tuple[TreeNode, ...]:
    """All modules of both runs, in a's order, those of b alone after their neighbours."""
    origin = cause.module or first.site.fqn
    if first.site.kind not in _OF_MODULE and not cause.module:
        origin = first.site.fqn.rpartition(".")[0]
    diverged: set[str] = set()
    lonely_a: set[str] = set()
    lonely_b: set[str] = set()
    forward_only = first.site.phase in FORWARD  # gradients of everything differ then, and say nothing
    for index, site in enumerate(facts.sites):
        if forward_only and site.phase not in FORWARD:
            continue
        owner = site.fqn if site.kind in _OF_MODULE else site.fqn.rpartition(".")[0]
        diverged.add(owner)
        if facts.items.row_b[index] < 0:
            lonely_a.add(owner)
        elif facts.items.row_a[index] < 0:
            lonely_b.add(owner)
    known_a, known_b = {m.fqn for m in modules_a}, {m.fqn for m in modules_b}
    for name in list(diverged):
        diverged.update(ancestors(name))
    nodes = []
    for module in _merged(modules_a, modules_b):
        fqn = module.fqn
        state = "diverged" if fqn in diverged else "equal"
        if fqn == origin:
            state = "origin"
        elif fqn not in known_b and fqn in lonely_a:
            state = "only a"
        elif fqn not in known_a:
            state = "only b"
        nodes.append(TreeNode(fqn, module.module_class, state))
    return tuple(nodes)


def _merged(modules_a: Sequence[ModuleInfo], modules_b: Sequence[ModuleInfo]) -> list[ModuleInfo]:
    """Both trees in one order: a's, and what only b has after what precedes it there."""
    merged = list(modules_a)
    place = {module.fqn: index for index, module in enumerate(merged)}
    inserted: dict[int, list[ModuleInfo]] = {}
    last = -1
    for module in modules_b:
        if module.fqn in place:
            last = place[module.fqn]
        else:
            inserted.setdefault(last, []).append(module)
    out = list(inserted.get(-1, []))
    for index, module in enumerate(merged):
        out += [module, *inserted.get(index, [])]
    return out
