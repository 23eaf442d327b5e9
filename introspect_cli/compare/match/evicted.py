"""Names that mean one module in a and another in b.

A module of a that has moved to a name of b drives out what has that name in a, which gets a name that b does not have.
So does a module that has kept its name, and not what is inside it. A norm that is moved into the attention behind it
leaves that its name, `fn`: in one run it is given what the norm made, in the other what the norm is given. No number is
another one, and the inputs of the two are not one value any more. So where a module is known to have moved over the
boundary of another, the inputs and outputs of that other one are looked at: if what one run gives it is known inside it
in the other, it is another module of the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.join.sites import kind_code
from introspect_cli.compare.match.candidates import by_place
from introspect_cli.compare.match.names import EVICTED, Renamed, Source, Tree, ancestors, renamer_of
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.match.holdings import Feature, Side

_ENDS = frozenset(map(kind_code, (Kind.INPUT, Kind.OUTPUT)))


def evicted(side: Side, names: Mapping[str, str], others: AbstractSet[str] = frozenset()) -> dict[str, Renamed]:
    """What drives out what.

    Returns:
        Those whose name is taken, or in `others`, each with a name that b does not have; and what is inside of these
        and stays where it is.
    """
    if not names or not (others or side.has_any(names.values())):
        return {}
    every, tree, change = set(side.sites.fqn), side.every_name, renamer_of(names)
    goes = {name: new for name in _at_or_below(tree, names, every) if (new := change(name)) != name}
    taken = {new for new in names.values() if new in every and new not in names}
    clash = {name for name in (*goes.values(), *taken, *others) if name in every and name not in goes}
    gone = {name: Renamed(name + EVICTED, Source.EVICTED) for name in clash if clash.isdisjoint(ancestors(name))}
    stays = {}
    for name in _at_or_below(tree, gone, every):
        if name not in goes and name not in clash:  # what has the same name in b
            top = next(head for head in ancestors(name) if head in clash)
            child = name[len(top) + 1 :].partition(".")[0]
            stays[f"{top}.{child}"] = Renamed(f"{top}.{child}", Source.KEPT)
    return stays | gone


def _at_or_below(tree: Tree, tops: Iterable[str], names: AbstractSet[str]) -> dict[str, None]:
    """Those of the names that are among the tops, or below one."""
    return dict.fromkeys(name for top in tops for name in (*((top,) if top in names else ()), *tree.below(top)))


def emptied(a: Side, b: Side, names: Mapping[str, str]) -> set[str]:
    """Modules of a whose name in b another module has: one with more, or less, inside."""
    doubtful = _doubtful(a, b, names)
    if not doubtful:
        return set()
    inside = _Inside(a, doubtful), _Inside(b, doubtful.values())
    return {old for old, new in doubtful.items() if _is_another(inside, old, new)}


def _doubtful(a: Side, b: Side, names: Mapping[str, str]) -> dict[str, str]:
    """Modules that both runs have, and that something with another name is inside of in one run alone."""
    change, back = renamer_of(names), renamer_of({new: old for old, new in names.items()})
    doubtful = {}
    for old, new in names.items():
        if old.rpartition(".")[0] == new.rpartition(".")[0]:
            continue
        left = {change(head): head for head in ancestors(old)}
        entered = {
            head: next((name for name in (head, back(head)) if change(name) == head), head) for head in ancestors(new)
        }
        for name in left.keys() ^ entered.keys():
            module = left.get(name) or entered[name]
            if module in a.names and name in b.names:
                doubtful[module] = name
    return doubtful


class _Inside:
    """What modules of a run are given and give in the first step that is looked at, and what is known inside them."""

    def __init__(self, side: Side, names: Iterable[str]) -> None:
        """Look at the modules and at all that is below them."""
        self._below = {name: side.tree.below(name) for name in names}
        self._held = side.held({*self._below, *(name for below in self._below.values() for name in below)})
        self.every = {int(checksum) for checksum in side.first.checksum}

    def ends(self, name: str) -> dict[Feature, set[int]]:
        """Checksums of its inputs and outputs, by where they stand."""
        return by_place(feature for feature in self._held.of(name) if not feature[0] and feature[1] in _ENDS)

    def values(self, name: str) -> set[int]:
        """Checksums of all that is below it."""
        return {feature[-1] for below in self._below[name] for feature in self._held.of(below) if not feature[0]}


def _is_another(inside: tuple[_Inside, _Inside], old: str, new: str) -> bool:
    """Whether each input and output is one value in both, or is known inside the module in one of them."""
    one, two = inside[0].ends(old), inside[1].ends(new)
    moved = [(one[place] - two[place], two[place] - one[place]) for place in one.keys() & two.keys()]
    moved = [(gone, come) for gone, come in moved if gone or come]
    values, every = (inside[0].values(old), inside[1].values(new)), (inside[0].every, inside[1].every)
    return bool(moved) and all(
        (gone and gone <= values[1] and come <= every[0]) or (come and come <= values[0] and gone <= every[1])
        for gone, come in moved
    )
