"""Which name of a is which name of b: everything that is known of it, put together in one place.

Names are equal, or changed by `--rename`. What is left is recognised by what it holds (`by_value`), and numbered
children around which others were inserted by what they look like (`trees`). A name of a that is another module's in b
gets one that b does not have (`evicted`). What comes out is a function from a's names to b's, and where each is known
from.

The first step that both runs have is looked at, a later one and the last: what was equal by chance, or is a copy that
training has not parted yet, is told apart there.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.resume import offset_by_labels
from introspect_cli.compare.join.sites import columns
from introspect_cli.compare.match.by_value import Search, matched_roots
from introspect_cli.compare.match.evicted import emptied, evicted
from introspect_cli.compare.match.flow import CLOSE
from introspect_cli.compare.match.holdings import Side
from introspect_cli.compare.match.names import (
    Rename,
    Renamed,
    Source,
    ambiguous,
    class_of_root,
    renamer,
    renamer_of,
)
from introspect_cli.compare.match.trees import moved_modules
from introspect_cli.store.whole import Reader, WholeReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.store.rank_reader import RankReader

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
        settled: parents of numbered children, with their dot, of which values told where some are.
        notes: what is to be said of names that were found without values.
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

    @property
    def by_value(self) -> bool:
        """Whether a name is known by what it holds."""
        return any(new.source is not Source.POSITION for new in self.renamed.values())

    def root_words(self, name: str) -> str:
        """Which of several models of one class the root of a name is, as the scripts call it; "" where nobody asks."""
        root, change = name.partition(".")[0], self.rename or str
        a, b = ({change(own): variable for own, variable in self.variables[0].items()}, self.variables[1])
        if class_of_root(root) not in ambiguous(a, b) or root not in a or root not in b:
            return ""
        if a[root] == b[root]:
            return f"{root} is {a[root]} of the script."
        return f"{root} is {a[root]} of the script in a, {b[root]} in b."


def correspond(a: Reader, b: Reader, options: DiffOptions) -> Correspondence:
    """Which names of a are other names of b; ranks that recorded the same everywhere need none."""
    if _last_chain(a) == _last_chain(b):
        return Correspondence(options.rename)
    found = Correspondence(options.rename)
    if options.by_value and not (isinstance(a, WholeReader) or isinstance(b, WholeReader)):
        offset = options.offset if options.offset is not None else offset_by_labels(a.labels, b.labels)
        found = matched_by_value(a, b, options.rename, offset=offset, close=max(CLOSE, options.rtol or 0.0))
    moved = {old: new for old, new in moved_modules(a, b, options.rename).items() if not old.startswith(found.settled)}
    notes = tuple(
        f"{old} of a is compared with {new} of b: the modules around it were inserted or removed."
        for old, new in moved.items()
    )
    by_position = {old: Renamed(new, Source.POSITION) for old, new in moved.items() if old not in found.renamed}
    return replace(found, renamed={**found.renamed, **by_position}, notes=notes)


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
    rename = renamer(patterns, {})
    given, two = Side(columns(a.sites, rename), a, chosen), Side(columns(b.sites), b, [own - offset for own in chosen])
    variables = _variables(a, rename), _variables(b, None)
    roots = matched_roots((given, two), variables)
    one = given
    if roots:  # a root whose name is taken gets one that b does not have
        taken = {old: new.name for old, new in evicted(given, roots).items()}
        moved = renamer_of({**roots, **taken})
        one = Side(columns(a.sites, lambda name: moved(rename(name) if rename else name)), a, chosen)
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
    return Correspondence(patterns, renamed, close, variables, search.settled)


def _variables(reader: RankReader, rename: Rename | None) -> dict[str, str]:
    """What the script calls each root, by the root's name as it is compared."""
    return {
        rename(module.fqn) if rename else module.fqn: module.variable for module in reader.modules if module.variable
    }
