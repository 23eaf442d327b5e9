"""Names of modules and tensors, and what contains what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.records import DRAWN_BEFORE, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterable

FORWARD = frozenset({Phase.FORWARD, Phase.EVAL, Phase.RECOMPUTE})
"""Phases in which modules are called."""


def owner_of(fqn: str) -> str:
    """The module a parameter or buffer belongs to, or the parent of a module; "" for a root."""
    return fqn.rpartition(".")[0]


def ancestors(fqn: str) -> list[str]:
    """All modules that contain this name, innermost first."""
    found = []
    head = fqn.rpartition(".")[0]
    while head:
        found.append(head)
        head = head.rpartition(".")[0]
    return found


def with_ancestors(names: Iterable[str]) -> set[str]:
    """These names and those of all modules that contain them."""
    found = set(names)
    level = found
    while level:  # a level at once: of a million names that is twice as fast as name by name
        level = {name.rpartition(".")[0] for name in level} - found
        found |= level
    found.discard("")
    return found


def generator_of(site: Site) -> str:
    """The random generator that an `rng` record is of: named by its path within a step, by its name at the start."""
    return site.path.removesuffix(DRAWN_BEFORE) or site.fqn
