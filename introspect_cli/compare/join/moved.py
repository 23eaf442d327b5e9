"""Modules that are the same but no longer have the same name.

A layer inserted into a `Sequential` shifts the index of all that follow it, so that every later module would be
compared with its neighbour. Children that are named by number are aligned as sequences of classes and parameter shapes,
and compared where they moved to. Renamed modules are only suggested: that two subtrees look alike is no proof.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.join.renames import renamer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.records import ModuleInfo
    from introspect_cli.store.whole import Reader

Signature = tuple[tuple[str, str, tuple[str, ...]], ...]


def tree_at(modules: Sequence[ModuleInfo], step: int | None = None) -> list[ModuleInfo]:
    """The module tree as it is at a step (as it was found, where None); a module that changes has a row a change."""
    found: dict[str, ModuleInfo] = {}
    for module in modules:
        if module.fqn not in found or (step is not None and module.step <= step):
            found[module.fqn] = module
    return list(found.values())


def _children(modules: Sequence[ModuleInfo]) -> dict[str, list[ModuleInfo]]:
    found: dict[str, list[ModuleInfo]] = {}
    for module in modules:
        if module.fqn:  # a module without a name would be its own child
            found.setdefault(module.fqn.rpartition(".")[0], []).append(module)
    return found


def child_counts(names: Iterable[str]) -> dict[str, int]:
    """How many children that are named by number each parent has, by the parent's name."""
    found: Counter[str] = Counter()
    seen: set[str] = set()
    for name in names:
        head = name
        while head and head not in seen:  # what is above was counted with what was seen first
            seen.add(head)
            above, _, part = head.rpartition(".")
            if part.isdecimal():
                found[above] += 1
            head = above
    return dict(found)


def _signature(module: ModuleInfo, children: dict[str, list[ModuleInfo]], *, own: bool = True) -> Signature:
    """A module with all inside it, named relative to it: what it looks like, wherever it is."""
    found: list[tuple[str, str, tuple[str, ...]]] = []
    stack = [module]
    while stack:
        current = stack.pop()
        name = current.fqn[len(module.fqn) :]
        found.append((name, current.module_class if own or name else "", current.parameters))
        stack.extend(children.get(current.fqn, []))
    return tuple(sorted(found))


def moved_modules(a: Reader, b: Reader, rename: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Numbered children of a that are found under another number in b: old FQN to new.

    Empty where the trees agree, which is the ordinary case and costs one comparison.
    """
    modules_a, modules_b = _renamed(tree_at(a.modules), rename), tree_at(b.modules)
    if [(m.fqn, m.module_class) for m in modules_a] == [(m.fqn, m.module_class) for m in modules_b]:
        return {}
    children_a, children_b = _children(modules_a), _children(modules_b)
    moved: dict[str, str] = {}
    for parent in children_a.keys() & children_b.keys():
        one = [m for m in children_a[parent] if m.fqn.rpartition(".")[2].isdecimal()]
        two = [m for m in children_b[parent] if m.fqn.rpartition(".")[2].isdecimal()]
        signs_a = [_signature(m, children_a) for m in one]
        signs_b = [_signature(m, children_b) for m in two]
        if signs_a == signs_b or not one or not two or len(one) == len(two):
            continue
        for i, j in _common(signs_a, signs_b):
            if one[i].fqn != two[j].fqn:
                moved[one[i].fqn] = two[j].fqn
        if any(old != new for old, new in moved.items()):
            _evict(moved, one, two)
    return moved


def _common(one: Sequence[Signature], two: Sequence[Signature]) -> list[tuple[int, int]]:
    """Places of a longest common subsequence, of several the one that keeps most of the beginning.

    Layers that look alike are the rule here, so longest runs (as difflib looks for) would pair the wrong ones.
    """
    rows, width = len(one), len(two)
    best = [[0] * (width + 1) for _ in range(rows + 1)]
    for i in reversed(range(rows)):
        for j in reversed(range(width)):
            best[i][j] = best[i + 1][j + 1] + 1 if one[i] == two[j] else max(best[i + 1][j], best[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < rows and j < width:
        if one[i] == two[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j + 1] >= best[i + 1][j]:
            j += 1
        else:
            i += 1
    return pairs


def _evict(moved: dict[str, str], one: Sequence[ModuleInfo], two: Sequence[ModuleInfo]) -> None:
    """Give a's modules whose name was taken by a moved one a name that b does not have."""
    taken = set(moved.values())
    kept = {m.fqn for m in two}
    for module in one:
        if module.fqn in taken and module.fqn not in moved:
            moved[module.fqn] = f"{module.fqn}(a)"
            assert moved[module.fqn] not in kept


def _renamed(modules: Sequence[ModuleInfo], rename: Sequence[tuple[str, str]]) -> list[ModuleInfo]:
    change = renamer(rename, {})
    if change is None:
        return list(modules)
    return [replace(module, fqn=change(module.fqn)) for module in modules]


def suggest_renames(a: Reader, b: Reader, rename: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """`--rename` options that would align subtrees that only one run has and that look the same."""
    modules_a, modules_b = _renamed(tree_at(a.modules), rename), tree_at(b.modules)
    names_a, names_b = {m.fqn for m in modules_a}, {m.fqn for m in modules_b}
    children_a, children_b = _children(modules_a), _children(modules_b)
    lost = [m for m in modules_a if m.fqn not in names_b and _is_top(m.fqn, names_b, names_a)]
    new = [m for m in modules_b if m.fqn not in names_a and _is_top(m.fqn, names_a, names_b)]
    suggestions = []
    for module in lost:
        sign = _signature(module, children_a, own=not children_a.get(module.fqn))
        for other in list(new):
            if sign == _signature(other, children_b, own=not children_b.get(other.fqn)):
                new.remove(other)
                suggestions.append(f"--rename '^{re.escape(module.fqn)}\\b={other.fqn}'")
                break
    return tuple(suggestions[:5])


def _is_top(fqn: str, other: set[str], own: set[str]) -> bool:
    """Whether a lost module's parent is in both runs, or it has none."""
    parent = fqn.rpartition(".")[0]
    return not parent or parent not in own or parent in other
