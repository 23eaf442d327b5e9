"""Which stages of a pipeline a rank ran, as its manifest tells, and what their modules are called in the whole model.

The stages of one process are modules of one class, so all but the first have a number in their names: `GPT#2`. They are
pieces of one model, whose layers have the names that they have in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Stages:
    """The stages of one rank.

    Attributes:
        last: number of one of them, which counts where a root is not known.
        of: how many the pipeline has.
        roots: numbers by the names of the stages' modules.
    """

    last: int
    of: int
    roots: tuple[tuple[str, int], ...] = ()

    @cached_property
    def _by_root(self) -> dict[str, int]:
        return dict(self.roots)

    def stage(self, root: str) -> int:
        """The stage of a root module."""
        return self._by_root.get(root, self.last)

    def name(self, fqn: str, apart: frozenset[str] = frozenset()) -> str:
        """What a module, parameter or buffer of the rank is called in the whole model.

        Args:
            fqn: its name in the rank.
            apart: names of roots whose stages have different things under equal names: the name tells the stage, then.
        """
        root, dot, rest = fqn.partition(".")
        base, roots = root.partition("#")[0], self._by_root
        if root not in roots or (base != root and base not in roots):
            return fqn
        told = f"[stage {roots[root]}]" if base in apart and roots[root] else ""
        return f"{base}{told}{dot}{rest}"


def stages_in(manifests: Mapping[int, Mapping[str, Any]]) -> dict[int, Stages]:
    """The stages of each rank that names some, given the ranks' manifests."""
    return {rank: found for rank, manifest in manifests.items() if (found := stages_of(manifest)) is not None}


def stages_of(manifest: Mapping[str, Any]) -> Stages | None:
    """The stages that a rank's manifest names; None where it names none."""
    told = manifest.get("pipeline")
    if not isinstance(told, dict):
        return None
    stage, of, roots = told.get("stage"), told.get("stages"), told.get("roots", {})
    if type(stage) is not int or type(of) is not int or not 0 <= stage < of or not isinstance(roots, dict):
        return None
    if not all(isinstance(root, str) and type(own) is int and 0 <= own < of for root, own in roots.items()):
        return None
    return Stages(stage, of, tuple(sorted(roots.items())))
