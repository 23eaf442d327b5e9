"""Modules that have kept their name, and not what is inside them.

A norm that is moved into the attention behind it leaves that its name, `fn`: in one run it is given what the norm made,
in the other what the norm is given. No number is another one, and the inputs of the two are not one value any more. So
where a module is known to have moved over the boundary of another, the inputs and outputs of that other one are looked
at: if what one run gives it is known inside it in the other, it is another module of the same name.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.holdings import parents
from introspect_cli.compare.join.renames import renamer
from introspect_cli.compare.join.sites import kind_code
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from introspect_cli.compare.join.holdings import Feature, Side

_ENDS = frozenset(map(kind_code, (Kind.INPUT, Kind.OUTPUT)))


def crossed(a: Side, b: Side, names: Mapping[str, str]) -> set[str]:
    """Modules of a whose name in b another module has: one with more, or less, inside.

    Args:
        a: run a's names and values.
        b: run b's.
        names: names of a that are other names of b.
    """
    doubtful = _doubtful(a, b, names)
    if not doubtful:
        return set()
    inner = _Inside(a, doubtful), _Inside(b, doubtful.values())
    return {old for old, new in doubtful.items() if _moved(inner, old, new)}


def _doubtful(a: Side, b: Side, names: Mapping[str, str]) -> dict[str, str]:
    """Modules that both runs have, and that something with another name is inside of in one run alone."""
    change = renamer((), dict(names)) or str
    back = renamer((), {new: old for old, new in names.items()}) or str
    found = {}
    for old, new in names.items():
        if old.rpartition(".")[0] == new.rpartition(".")[0]:
            continue
        left = {change(head): head for head in parents(old)}
        entered = {
            head: next((own for own in (head, back(head)) if change(own) == head), head) for head in parents(new)
        }
        for name in left.keys() ^ entered.keys():
            own = left.get(name) or entered[name]
            if own in a.names and name in b.names:
                found[own] = name
    return found


class _Inside:
    """What modules of a run are given and give in the first step that is looked at, and what is known inside them."""

    def __init__(self, side: Side, names: Iterable[str]) -> None:
        """Look at the modules and at all that is below them."""
        chosen = {name: side.tree.below(name) for name in names}
        self._held = side.held({*chosen, *(own for below in chosen.values() for own in below)})
        self._below = chosen
        self.every = {int(own) for own in np.asarray(side.first.checksum)}

    def ends(self, name: str) -> dict[Feature, set[int]]:
        """Checksums of its inputs and outputs, by kind, phase and call."""
        found: dict[Feature, set[int]] = defaultdict(set)
        for place, kind, phase, call, checksum in self._held.of(name):
            if not place and kind in _ENDS:
                found[kind, phase, call].add(checksum)
        return found

    def values(self, name: str) -> set[int]:
        """Checksums of all that is below it."""
        return {own[-1] for name in self._below[name] for own in self._held.of(name) if not own[0]}


def _moved(inner: tuple[_Inside, _Inside], old: str, new: str) -> bool:
    """Whether each input and output is one value in both, or is known inside the module in one of them."""
    one, two = inner[0].ends(old), inner[1].ends(new)
    parted = False
    for place in one.keys() & two.keys():
        gone, come = one[place] - two[place], two[place] - one[place]
        if not gone and not come:
            continue
        outside_a = gone and gone <= inner[1].values(new) and come <= inner[0].every
        outside_b = come and come <= inner[0].values(old) and gone <= inner[1].every
        if not (outside_a or outside_b):
            return False
        parted = True
    return parted
