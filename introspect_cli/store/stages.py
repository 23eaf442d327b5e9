"""Which stages of a pipeline a rank ran, as its manifest tells, and what their modules are called in the whole model.

The stages of one process are modules of one class, so all but the first have a number in their names: `GPT#2`. They are
pieces of one model, whose layers have the names that they have in it.
"""

from __future__ import annotations

from dataclasses import dataclass
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

    def has(self, root: str, stage: int) -> bool:
        """Whether a root module is that stage's."""
        return dict(self.roots).get(root, self.last) == stage

    def name(self, fqn: str) -> str:
        """What a module, parameter or buffer of the rank is called in the whole model."""
        root, dot, rest = fqn.partition(".")
        base = root.partition("#")[0]
        roots = dict(self.roots)
        return f"{base}{dot}{rest}" if base != root and base in roots and root in roots else fqn


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
