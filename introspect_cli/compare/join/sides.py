"""One rank of all runs that take part in a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from introspect_cli.compare.join.exact import Tensors
    from introspect_cli.compare.join.renames import Rename


@dataclass(frozen=True)
class Sides:
    """What does not change from step to step.

    Attributes:
        rank: process.
        a: reader of run a's rank.
        b: reader of run b's rank.
        noise: readers of the noise runs' ranks.
        manifest_a: manifest of run a.
        manifest_b: manifest of run b.
        tensors: whole tensors, where they are stored.
        rename: FQNs of a to those of b; None where they are the same.
    """

    rank: int
    a: Any
    b: Any
    noise: tuple[Any, ...]
    manifest_a: dict[str, Any]
    manifest_b: dict[str, Any]
    tensors: Tensors
    rename: Rename | None = None
