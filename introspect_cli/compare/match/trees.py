"""Modules that are the same but no longer have the same name, by what their trees look like.

A layer inserted into a `Sequential` shifts the index of all that follow it, so that every later module would be
compared with its neighbour. Children that are named by number are aligned as sequences of classes and parameter shapes,
and compared where they moved to. Renamed modules are only suggested: that two subtrees look alike is no proof.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.match.candidates import common_subsequence
from introspect_cli.compare.match.names import EVICTED, Rename

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.records import ModuleInfo
    from introspect_cli.store.whole import Reader

Signature = tuple[tuple[str, str, tuple[str, ...]], ...]


def tree_at(modules: Sequence[ModuleInfo], step: int | None = None) -> list[ModuleInfo]:
    """The module tree as it is at a step (as it was found, where None); a module that changes has a row a change."""
    tree: dict[str, ModuleInfo] = {}
    for module in modules:
        if module.fqn not in tree or (step is not None and module.step <= step):
            tree[module.fqn] = module
    return list(tree.values())


class _Tree:
    """A run's modules as they were found, under the names by which they are compared."""

    def __init__(self, reader: Reader, rename: Rename | None = None) -> None:
        change = rename or str
        self.modules = [replace(module, fqn=change(module.fqn)) for module in tree_at(reader.modules)]
        self.names = {module.fqn for module in self.modules}
        self.children: dict[str, list[ModuleInfo]] = {}
        for module in self.modules:
            if module.fqn:  # a module without a name would be its own child
                self.children.setdefault(module.fqn.rpartition(".")[0], []).append(module)

    def numbered(self, parent: str) -> list[ModuleInfo]:
        """The children of a module that are named by number."""
        return [module for module in self.children.get(parent, []) if module.fqn.rpartition(".")[2].isdecimal()]

    def signature(self, module: ModuleInfo, *, with_class: bool = True) -> Signature:
        """A module with all inside it, named relative to it: what it looks like, wherever it is."""
        parts: list[tuple[str, str, tuple[str, ...]]] = []
        stack = [module]
        while stack:
            current = stack.pop()
            name = current.fqn[len(module.fqn) :]
            parts.append((name, current.module_class if with_class or name else "", current.parameters))
            stack.extend(self.children.get(current.fqn, []))
        return tuple(sorted(parts))


def moved_modules(a: Reader, b: Reader, rename: Rename | None) -> dict[str, str]:
    """Numbered children of a that are found under another number in b: old FQN to new.

    Empty where the trees agree, which is the ordinary case and costs one comparison. One whose name was taken by
    another gets a name that b does not have.
    """
    tree_a, tree_b = _Tree(a, rename), _Tree(b)
    if [(m.fqn, m.module_class) for m in tree_a.modules] == [(m.fqn, m.module_class) for m in tree_b.modules]:
        return {}
    moved: dict[str, str] = {}
    for parent in filter(tree_b.children.__contains__, tree_a.children):
        one, two = tree_a.numbered(parent), tree_b.numbered(parent)
        if not one or not two or len(one) == len(two):
            continue
        common = common_subsequence([tree_a.signature(m) for m in one], [tree_b.signature(m) for m in two])
        moved |= {one[i].fqn: two[j].fqn for i, j in common if one[i].fqn != two[j].fqn}
        taken = set(moved.values())
        moved |= {m.fqn: m.fqn + EVICTED for m in one if m.fqn in taken and m.fqn not in moved}
    return moved


def suggest_renames(a: Reader, b: Reader, rename: Rename | None) -> tuple[str, ...]:
    """`--rename` options that would align subtrees that only one run has and that look the same."""
    tree_a, tree_b = _Tree(a, rename), _Tree(b)
    lost, new = _tops_of_one(tree_a, tree_b), _tops_of_one(tree_b, tree_a)
    suggestions = []
    for module in lost:
        sign = tree_a.signature(module, with_class=module.fqn not in tree_a.children)
        for other in new:
            if sign == tree_b.signature(other, with_class=other.fqn not in tree_b.children):
                new.remove(other)
                suggestions.append(f"--rename '^{re.escape(module.fqn)}\\b={other.fqn}'")
                break
    return tuple(suggestions[:5])


def _tops_of_one(tree: _Tree, other: _Tree) -> list[ModuleInfo]:
    """Modules that one run only has, and whose parent both have, or that have none."""
    tops = []
    for module in tree.modules:
        parent = module.fqn.rpartition(".")[0]
        if module.fqn not in other.names and (not parent or parent not in tree.names or parent in other.names):
            tops.append(module)
    return tops
