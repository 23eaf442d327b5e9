"""Which sites are causes, that explain a divergence, and not values, that make one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.sites import Alignment, Mask, kind_code, of_kinds
from introspect_cli.compare.match.names import with_ancestors
from introspect_cli.records import Kind, ModuleInfo

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.table import Table


_ACTIVATIONS = (Kind.BATCH, Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.OP_OUTPUT)
"""Of these, one run may have more than the other although both have the module: another call, another path."""


class Causes:
    """Which sites are causes where one run only has them, or where they differ."""

    def __init__(self, alignment: Alignment, trees: tuple[Iterable[ModuleInfo], Iterable[ModuleInfo]]) -> None:
        """Look at all names once, those of the modules and of their tensors included that left no record."""
        self._alignment = alignment
        self._random = alignment.kind == kind_code(Kind.RNG)
        alone = of_kinds(alignment.kind, _ACTIVATIONS)
        alone |= alignment.evaluating
        named = (alignment.names_a, alignment.names_b)
        held = [with_ancestors(names | _named_in(tree)) for names, tree in zip(named, trees, strict=True)]
        missing = {name for name in alignment.names_a | alignment.names_b if not (name in held[0] and name in held[1])}
        if missing:
            alone |= np.fromiter((name in missing for name in alignment.fqn), np.bool_, alignment.size)
        alone &= ~self._random
        self._one_sided = alone

    def among(self, table: Table) -> Mask:
        """Which diverging rows of a table are causes."""
        one_sided = table.one_sided & self._one_sided[table.site]
        return np.asarray(table.diverging & (self._random[table.site] | one_sided))


def _named_in(tree: Iterable[ModuleInfo]) -> set[str]:
    """FQNs of modules and of the tensors they hold."""
    names = set()
    for module in tree:
        names.add(module.fqn)
        names |= {f"{module.fqn}.{name}" for name in (*module.parameters, *module.buffers)}
    return names
