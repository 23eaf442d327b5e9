"""Which name of a is which name of b: everything that is known of it, put together in one place.

Names are equal, or changed by `--rename`. What is left is recognised by what it holds (`by_value`), and numbered
children around which others were inserted by what they look like (`names`). A name of a that is another module's in b
gets one that b does not have. What comes out is a function from a's names to b's, and where each is known
from.

The first step that both runs have is looked at, a later one and the last: what was equal by chance, or is a copy that
training has not changed yet, shows there.

A module of a that has moved to a name of b evicts what has that name in a. So does a module that has kept its name, and
not what is inside it. A norm that is moved into the attention behind it leaves that its name, `fn`: in one run it is
given what the norm made, in the other what the norm is given. No number is another one, and the inputs of the two are
not one value any more. So where a module is known to have moved over the boundary of another, the inputs and outputs of
that other one are looked at: if what one run gives it is known inside it in the other, it is another module of the same
name.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.match.by_value import Search, matched_roots
from introspect_cli.compare.match.candidates import by_place
from introspect_cli.compare.match.flow import CLOSE
from introspect_cli.compare.match.holdings import Side
from introspect_cli.compare.terms.names import (
    EVICTED,
    Rename,
    Renamed,
    Source,
    Tree,
    ambiguous,
    ancestors,
    class_of_root,
    moved_modules,
    renamer,
    renamer_of,
)
from introspect_cli.compare.terms.sites import kind_code
from introspect_cli.records import Kind
from introspect_cli.store.read.rank_reader import RankReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.match.holdings import Feature
    from introspect_cli.compare.terms.options import DiffOptions
    from introspect_cli.store.ranks.whole_reader import Reader

Variables = tuple["Mapping[str, str]", "Mapping[str, str]"]
"""Of a and of b, what the script calls each root."""


@dataclass(frozen=True)
class Correspondence:
    """Which name of a is which of b.

    Attributes:
        patterns: regular expressions and replacements that were asked for.
        renamed: names of a, after these, that have another name in b, or none; the longest prefix wins.
        close: the relative L2 distance that was taken for rounding.
        variables: of a and of b, what the script calls each root.
        settled: parents of numbered children, with their dot, of which values showed where some are.
        notes: what is to be said of names that were matched without values.
    """

    patterns: Sequence[tuple[str, str]] = ()
    renamed: Mapping[str, Renamed] = field(default_factory=dict)
    close: float = CLOSE
    variables: Variables = field(default_factory=lambda: ({}, {}))
    settled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def rename(self) -> Rename | None:
        """From a's names to b's; None where they are the same."""
        return renamer(self.patterns, {old: new.name for old, new in self.renamed.items()})

    @cached_property
    def asked(self) -> Rename | None:
        """The names of a as the patterns change them; None where they stay."""
        return renamer(self.patterns, {})

    @property
    def by_value(self) -> bool:
        """Whether a name is known by what it holds."""
        return any(new.source is not Source.POSITION for new in self.renamed.values())

    def root_words(self, name: str) -> str:
        """Which of several models of one class the root of a name is, as the scripts call it; "" where nobody asks."""
        root, change = name.partition(".")[0], self.rename or str
        a, b = ({change(root_of_a): variable for root_of_a, variable in self.variables[0].items()}, self.variables[1])
        if class_of_root(root) not in ambiguous(a, b) or root not in a or root not in b:
            return ""
        if a[root] == b[root]:
            return f"{root} is called {a[root]} in the script."
        return f"{root} is called {a[root]} in the script of a, {b[root]} in that of b."


def correspond(a: Reader, b: Reader, options: DiffOptions, offset: int) -> Correspondence:
    """Which names of a are other names of b; ranks that recorded the same everywhere need none.

    Step k of b is looked at beside step k + offset of a.
    """
    if _last_chain(a) == _last_chain(b):
        return Correspondence(options.rename)
    matched = Correspondence(options.rename)
    if options.by_value and isinstance(a, RankReader) and isinstance(b, RankReader) and not (a.is_whole or b.is_whole):
        matched = matched_by_value(a, b, options.rename, offset=offset, close=max(CLOSE, options.rtol or 0.0))
    moved = {old: new for old, new in moved_modules(a, b, matched.asked).items() if not old.startswith(matched.settled)}
    notes = tuple(
        f"{old} of a is compared with {new} of b: the modules around it were inserted or removed."
        for old, new in moved.items()
    )
    by_position = {old: Renamed(new, Source.POSITION) for old, new in moved.items() if old not in matched.renamed}
    return replace(matched, renamed={**matched.renamed, **by_position}, notes=notes)


def _last_chain(reader: Reader) -> tuple[int, bytes]:
    """What is equal for two ranks that recorded the same everywhere."""
    return (len(reader), reader.entry(len(reader) - 1).chain) if len(reader) else (0, b"")


@contextmanager
def _uncollected() -> Iterator[None]:
    """No search for cycles meanwhile: nothing here makes one, and a million names are long looked through for some."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_uncollected()
def matched_by_value(
    a: RankReader, b: RankReader, patterns: Sequence[tuple[str, str]] = (), *, offset: int = 0, close: float = CLOSE
) -> Correspondence:
    """Which names of a are other names of b, by what they hold in the steps that both have."""
    steps = np.asarray(a.entries["step"])
    steps = steps[np.isin(steps - offset, b.entries["step"])]
    if not len(steps):
        return Correspondence(patterns)
    chosen = sorted({int(steps[place]) for place in {0, min(1, len(steps) - 1), len(steps) - 1}})
    rename = Correspondence(patterns).asked
    given, two = Side(a, rename, chosen), Side(b, None, [step - offset for step in chosen])
    roots = matched_roots((given, two))
    one = given
    if roots:  # a root whose name is taken gets one that b does not have
        taken = {old: new.name for old, new in evicted(given, roots).items()}
        moved = renamer_of({**roots, **taken})
        one = Side(a, lambda name: moved(rename(name) if rename else name), chosen)
    search = Search(one, two, close)
    others = emptied(one, two, {old: new.name for old, new in search.renamed.items()})
    back = {new: old for old, new in roots.items()}

    def in_a(name: str) -> str:
        """A name as it is before the roots have theirs."""
        head, dot, rest = name.partition(".")
        return back.get(head, head) + dot + rest

    renamed = {old: Renamed(new, Source.ROOT) for old, new in roots.items()}
    renamed |= {in_a(old): new for old, new in search.renamed.items()}
    renamed = {old: new for old, new in renamed.items() if old != new.name}
    renamed |= evicted(given, {old: new.name for old, new in renamed.items()}, set(map(in_a, others)))
    return Correspondence(patterns, renamed, close, (given.variables, two.variables), search.settled)


# --- names that mean one module in a and another in b

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
