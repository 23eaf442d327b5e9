"""Names of modules and parameters: ancestors, wrappers, renamings, and module trees.

Capture strips wrappers; stores that were imported or written by older versions may hold them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from introspect_cli.records import DRAWN_BEFORE, Phase, Site

if TYPE_CHECKING:
    from introspect_cli.records import ModuleInfo


FORWARD = frozenset({Phase.FORWARD, Phase.EVAL, Phase.RECOMPUTE})
"""Phases in which modules are called."""


K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> defaultdict[K, list[V]]:
    """By the first of each pair, the second ones, in order."""
    groups = defaultdict[K, list[V]](list)
    for key, value in pairs:
        groups[key].append(value)
    return groups


def owner_of(fqn: str) -> str:
    """The name without its last component, the parent module: `a.b` for `a.b.c`; "" for a root."""
    return fqn.rpartition(".")[0]


def ancestors(fqn: str) -> list[str]:
    """All prefixes of a name, innermost first: `a.b`, `a` for `a.b.c`."""
    parts = fqn.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1)]


def with_ancestors(names: Iterable[str]) -> set[str]:
    """A new set of the names themselves and all their prefixes at dots; "" is left out."""
    return {head for name in names for head in (name, *ancestors(name)) if head}


def generator_of(site: Site) -> str:
    """Name of the random generator of an `rng` site: its path without DRAWN_BEFORE, else its FQN."""
    return site.path.removesuffix(DRAWN_BEFORE) or site.fqn


_WRAPPED = re.compile(r"\.(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")
_NUMBERED_ROOT = re.compile(r"#\d+$")

Rename = Callable[[str], str]


DISPLACED = "(a)"
"""What a name of a ends with that b does not have."""


def strip_wrappers(fqn: str) -> str:
    """An FQN without the components `_orig_mod`, `_fsdp_wrapped_module` and `_checkpoint_wrapped_module`.

    DDP's `.module` stays: models use that name too, and capture strips it below a known wrapper.
    """
    return _WRAPPED.sub("", fqn) if "._" in fqn else fqn


def renamer(patterns: Sequence[tuple[str, str]], prefixes: Mapping[str, str]) -> Rename | None:
    """A function from run a's FQNs to run b's, which strips wrappers too; None if both arguments are empty.

    Args:
        patterns: (regular expression, replacement), applied one after the other.
        prefixes: FQN of a module in a, after the patterns, to its FQN in b; the longest that fits is replaced.
    """
    if not patterns and not prefixes:
        return None
    compiled = [(re.compile(old), new) for old, new in patterns]

    def rename(fqn: str) -> str:
        """The name after wrappers are stripped, all patterns are applied and the longest prefix is replaced."""
        name = strip_wrappers(fqn)
        for pattern, new in compiled:
            name = pattern.sub(new, name)
        head = next((head for head in (name, *ancestors(name)) if head in prefixes), "")
        return prefixes[head] + name[len(head) :] if head else name

    return rename


# --- roots


def roots_of(names: Iterable[str]) -> set[str]:
    """The first component of each name."""
    return {name.partition(".")[0] for name in names}


def class_of_root(name: str) -> str:
    """The class that the root of a name is named by: `Net` of `Net#2.fc`."""
    return _NUMBERED_ROOT.sub("", name.partition(".")[0])


def ambiguous(*runs: Iterable[str]) -> set[str]:
    """Classes of which at least one of the runs has several roots (`Net`, `Net#2`); each run is its names."""
    counts = [Counter(map(class_of_root, roots_of(names))) for names in runs]
    return {name for count in counts for name, number in count.items() if number > 1}


# --- above and below


def numbered_children(names: Iterable[str]) -> Counter[str]:
    """By parent, how many children have a number as their name (`blocks.0`).

    Prefixes of names count as names.
    """
    every = (name.rpartition(".") for name in with_ancestors(names))
    return Counter(parent for parent, _, last in every if last.isdecimal())


# --- trees of modules


def tree_at(modules: Sequence[ModuleInfo], step: int | None = None) -> list[ModuleInfo]:
    """The modules as they are at `step`, by the last of each module's entries up to it; where None, by its first entry.

    Modules that were first recorded later count as they were then. An attribute that changes within the step has all
    its values, in order: `train, then eval`.
    """
    tree: dict[str, ModuleInfo] = {}
    for module in modules:
        before = tree.setdefault(module.fqn, module)
        if before is not module and step is not None and module.step <= step:
            tree[module.fqn] = _joined_attributes(before, module) if before.step == module.step == step else module
    return list(tree.values())


THEN = ", then "


def _joined_attributes(before: ModuleInfo, after: ModuleInfo) -> ModuleInfo:
    """A copy of `after`, where each attribute has all its values in order, joined by `THEN`.

    Those of `before`, then that of `after` if it is not the last of these.
    """
    held, texts = dict(before.attributes), dict(after.attributes)
    for name, text in after.attributes:
        if name in held:
            texts[name] = held[name] if held[name].split(THEN)[-1] == text else f"{held[name]}{THEN}{text}"
    return replace(after, attributes=tuple(texts.items()))
