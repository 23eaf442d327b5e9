"""Which name of a is which name of b, and which value: two runs matched by what they hold.

*Names* are equal, or changed by `--rename`. The others are recognised by what they hold: a refactoring renames, wraps,
moves and inserts; none of it changes a number, and a checksum does not know a name. Parameters, inputs, outputs and
gradients with equal checksums are paired, each name with the one partner that shares most with it. A match of one
tensor is taken for its module, and for as much of the tree above it as nothing contradicts, so that a rename that is
recognised once holds everywhere below and in all steps. A name of a that is another module's in b gets one that b does
not have. Of several models of one class, the one that holds the same is the same, else the one that one variable holds.

Zeros, ones and other constants are equal everywhere, so they prove nothing, and are left out. So are evaluation and
recomputation, which a run may do more often than another without another name. Values that several unmatched modules
share prove nothing, unless the rest of these modules distinguishes them.

The first step that both runs have is looked at, a later one and the last: what was equal by chance, or is a copy that
training has not changed yet, holds other values there although all that has kept its name agrees.

*Two implementations of one model* share few names, and hold parameters in other forms (or one is a list of values).
They are compared as all runs are, under the names that their parameters show, in their first step: to a tolerance, as
their sums have other orders; whatever shape a tensor has; and what one of them alone has is structure. A checksum is
keyed by an element's place, while number of elements, smallest, largest and smallest absolute value are those of a
transposed tensor too. Random numbers do not agree in all of these by accident.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress, product, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.ledger import TENSORS
from introspect_cli.compare.measure import Layouts, Mask, Records
from introspect_cli.compare.names import (
    DISPLACED,
    Rename,
    ambiguous,
    ancestors,
    class_of_root,
    grouped,
    numbered_children,
    owner_of,
    renamer,
    roots_of,
    with_ancestors,
)
from introspect_cli.compare.table import MODULE_VALUES, PHASE_CODES, Columns, among, columns
from introspect_cli.compare.watched import is_list
from introspect_cli.records import KIND_CODES, Kind, Phase, Status
from introspect_cli.texts import begin_alike

if TYPE_CHECKING:
    from collections.abc import Iterable, KeysView, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.records import ModuleInfo
    from introspect_cli.store.reader import Reader
    from introspect_cli.store.run import Run


NamePair = tuple[str, str]
"""A name of a and a name of b."""

Feature = tuple[float, ...]
"""The place of a step among those looked at, kind, phase, call, and checksum or extrema of a record."""

Held = dict[str, set[Feature]]
"""The values of each name."""


@dataclass(frozen=True)
class Correspondence:
    """The mapping of a's names to b's.

    Attributes:
        patterns: regular expressions and replacements that were asked for.
        renamed: names of a, after these, that have another name in b, or none; the longest prefix wins.
        is_port: whether the runs are of two implementations of one model.
    """

    patterns: Sequence[tuple[str, str]] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    is_port: bool = False

    @cached_property
    def rename(self) -> Rename | None:
        """Function from a's names to b's, by `patterns` and `renamed`; None where all names are the same."""
        return renamer(self.patterns, self.renamed)


def correspond(a: Reader, b: Reader, options: DiffOptions, offset: int, *, listed: bool) -> Correspondence:
    """Which name of a rank of a is which of b, by equal checksums in the first, second and last step that both have.

    By `--rename` alone if either reader stands for several ranks, `by_value` is off, all steps are equal, or there is
    no common one. A name of a that is another module's in b gets one that b does not have (`DISPLACED`).

    Args:
        a: reader of run a's rank.
        b: reader of run b's rank.
        options: what counts.
        offset: step k of b belongs to step k + offset of a.
        listed: whether either run is a list of values.
    """
    steps = np.intersect1d(a.entries["step"], b.entries["step"] + offset, assume_unique=True)
    same = np.array_equal(a.entries["chain"][-1:], b.entries["chain"][-1:])  # of all steps
    if a.is_whole or b.is_whole or not options.by_value or same or not len(steps):
        return Correspondence(options.rename)
    chosen = sorted({*steps[:2].tolist(), int(steps[-1])})
    one, two = Side(a, renamer(options.rename, {}), chosen), Side(b, None, [step - offset for step in chosen])
    is_port = are_ports(one, two, listed=listed)
    renamed = renamed_by_value(one, two, in_order=is_port)
    patterns, is_port = options.rename, is_port and bool(renamed)
    if is_port:
        renamed |= _last_tensors(one, two, renamed)
        (old, *more), (new, *others) = roots_of(one.tensors), roots_of(two.tensors)
        if not (more or others):  # the root alone: what has no partner keeps its name
            patterns = (*patterns, (rf"^{re.escape(old)}$", new))
    taken = (set(renamed.values()) - renamed.keys()) & with_ancestors(one.names)
    renamed |= {name: name + DISPLACED for name in taken}
    return Correspondence(patterns, renamed, is_port and not options.strict)


def other_roots(a: Run, b: Run, options: DiffOptions) -> Correspondence | None:
    """`correspond` for two runs of one rank whose root modules have no name in common; None for all other runs.

    None too where either run recorded no parameter or buffer.
    """
    if len(a.recorded) != 1 or len(b.recorded) != 1 or a.combined_ranks or b.combined_ranks:
        return None
    one, two = a.rank(a.recorded[0]), b.rank(b.recorded[0])
    roots = [roots_of(Side(reader, None, ()).tensors) for reader in (one, two)]
    if not all(roots) or roots[0] & roots[1]:
        return None
    return correspond(one, two, options, options.offset or 0, listed=any(is_list(run.manifest) for run in (a, b)))


# --- two implementations of one model


_PORT_SHARE = 1 / 3
_FIRST_PARAMETERS = (0, KIND_CODES[Kind.PARAM], PHASE_CODES[Phase.START])


def are_ports(a: Side, b: Side, *, listed: bool) -> bool:
    """Whether two runs share few names, and either is a list, or some parameter has no equal in the other run.

    Few are less than a third of the names of tensors and module values, of the run with fewer.
    """
    if len(a.names & b.names) >= _PORT_SHARE * min(len(a.names), len(b.names)):
        return False
    start = [
        {feature for held in side.held(side.tensors).values() for feature in held if feature[:3] == _FIRST_PARAMETERS}
        for side in (a, b)
    ]
    return listed or start[0] != start[1]


def _last_tensors(a: Side, b: Side, renamed: Mapping[str, str]) -> dict[str, str]:
    """Partners of tensors that are the only one of a module in `renamed` without an equal, in a and in b."""
    rename = Correspondence(renamed=renamed).rename or str
    mine = grouped((rename(owner_of(name)), name) for name in a.tensors if rename(name) not in b.tensors)
    theirs = grouped((owner_of(name), name) for name in b.tensors.difference(map(rename, a.tensors)))
    return {names[0]: theirs[owner][0] for owner, names in mine.items() if len(names) == len(theirs[owner]) == 1}


# --- what names hold

NAMED = (*TENSORS, Kind.GRAD, *MODULE_VALUES)
"""Kinds whose FQN names a module, or a tensor of one."""


class Side:
    """One run's records in a few steps, under the names that are compared; only distinctive values count."""

    def __init__(self, reader: Reader, rename: Rename | None, steps: Sequence[int]) -> None:
        """Keep the arguments; records and names are read at the first access.

        Args:
            reader: of the run's rank.
            rename: changes its names to those that are compared; None to strip wrappers alone.
            steps: numbers of the steps to read, in the run's own count.
        """
        self.reader, self.steps, self._rename = reader, steps, rename

    @cached_property
    def sites(self) -> Columns:
        """The run's sites with renamed FQNs."""
        return columns(self.reader.sites, self._rename)

    @cached_property
    def roots(self) -> dict[tuple[str, str], str]:
        """By class and what the script calls it, without what it is an attribute of (`model`): the renamed root."""
        change = self._rename or str
        called = [(change(one.fqn), one.variable.rpartition(".")[2]) for one in self.reader.modules if one.variable]
        return {(class_of_root(root), name): root for root, name in called}

    @cached_property
    def named(self) -> Mask:
        """Mask of sites whose kind is in `NAMED`, outside of evaluation and recomputation."""
        return self.sites.are(*NAMED) & ~self.sites.are(Phase.EVAL, Phase.RECOMPUTE)

    @cached_property
    def names(self) -> KeysView[str]:
        """Names of `named` sites, each once, in the order of recording."""
        return dict.fromkeys(compress(self.sites.fqn, self.named.tolist())).keys()

    @cached_property
    def tensors(self) -> set[str]:
        """Names of parameters and buffers."""
        return {self.sites.fqn[site] for site in np.flatnonzero(self.sites.are(*TENSORS)).tolist()}

    def held(self, names: AbstractSet[str]) -> Held:
        """Distinctive values of `names` in all of `steps`; names without one are left out.

        Those are OBSERVED ones whose minimum is not their maximum; where these are not on record, all OBSERVED ones.

        Each is (index in `steps`, kind, phase, call, checksum), and of tensors as a step begins, whose order may be
        another, also with the number of elements and the extrema in place of the checksum.
        """
        sites, features = self.sites, Held()
        wanted = among(sites.fqn, names) & self.named
        for place, step in enumerate(self.steps):
            batch = self.reader.read(step)
            rows = np.flatnonzero(wanted[batch.site] & (batch.status == Status.OBSERVED))
            records = Records(batch, rows, Layouts(self.reader.layouts))
            form = np.stack([records.layout("numel"), *map(records.statistic, ("min", "max", "absmin"))], axis=1)
            varied = form[:, 1] != form[:, 2]  # where they are not on record, too
            rows, form, numbers = rows[varied], form[varied], batch.site[rows[varied]]
            drawn = sites.are(*TENSORS, Phase.START, sites=numbers)  # steps of one size make extrema of constants alike
            columns = numbers, sites.kind[numbers], sites.phase[numbers], sites.call[numbers], batch.checksum[rows]
            for at, (number, *feature) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
                values = features.setdefault(sites.fqn[number], set())
                values.add((place, *feature))
                if drawn[at]:
                    values.add((place, *feature[:-1], *form[at].tolist()))
        return features


# --- names that hold the same values

_MAX_PAIRS = 8  # more pairs of names with one value than this, and nobody can say which is which


def equal_pairs(one: Held, two: Held, order: Iterable[str]) -> dict[str, str]:
    """The partner in b of each name of a: by most shared values, else the equal name, else the most alike.

    A value that more than `_MAX_PAIRS` pairs of names share does not count. Ties are dropped, unless `order` has the
    names of b, of which the first counts then.
    """
    of_a, of_b = (grouped((value, name) for name, values in held.items() for value in values) for held in (one, two))
    shared = ((names, of_b[value]) for value, names in of_a.items() if value in of_b)
    few = (product(*names) for names in shared if len(names[0]) * len(names[1]) <= _MAX_PAIRS)
    places = {name: place for place, name in enumerate(order)}
    ranks: dict[Any, list[NamePair]] = defaultdict(list)
    for (old, new), count in Counter(chain.from_iterable(few)).items():
        ranks[-count, old != new, -_likeness(old, new), places.get(new)].append((old, new))
    partners: dict[str, str] = {}
    gone = set[tuple[int, str]]()  # (0, name of a), (1, name of b)
    for rank in sorted(ranks):
        free = [pair for pair in ranks[rank] if gone.isdisjoint(enumerate(pair))]
        times = Counter(chain.from_iterable(map(enumerate, free)))
        partners |= {old: new for old, new in free if times[0, old] == times[1, new] == 1}
        gone |= times.keys()
    return partners


def _likeness(old: str, new: str) -> int:
    """How alike two dotted names are: equal components at their beginnings, plus twice those at their ends."""
    one, two = old.split("."), new.split(".")
    return 2 * begin_alike(one[::-1], two[::-1]) + begin_alike(one, two)


# --- the tree above them


def renamed_by_value(a: Side, b: Side, *, in_order: bool) -> dict[str, str]:
    """Names of a that are other names of b, by equal values of tensors; of nested ones the outermost that holds.

    Tensors that one run alone has are matched, those in numbered lists whose lengths differ, and those of several
    models of one class, which are numbered in the order in which they were made. A pair of parents holds while all
    tensors below the old one are paired with those below the new one, and no equal name shares more values.

    Args:
        a: run a.
        b: run b.
        in_order: whether of several equal tensors of b the first is taken, and not none.
    """
    several = ambiguous(a.names, b.names)
    if a.names == b.names and not several:
        return {}
    lengths = numbered_children(a.names), numbered_children(b.names)
    lists = {parent for parent, length in lengths[0].items() if lengths[1].get(parent, length) != length}

    def is_open(name: str, other: Side) -> bool:
        """Whether a tensor may have another name in the other run."""
        return name not in other.names or not lists.isdisjoint(ancestors(name)) or class_of_root(name) in several

    one, two = ({name for name in side.tensors if is_open(name, other)} for side, other in ((a, b), (b, a)))
    pairs = equal_pairs(a.held(one), b.held(two), b.names if in_order else ())
    levels = {old: _parent_pairs(old, new) for old, new in pairs.items()}
    votes = Counter(chain.from_iterable(levels.values()))
    paired = Counter(chain.from_iterable(map(ancestors, pairs)))
    held_by_others = with_ancestors(a.tensors - one)
    hold = {level for level, number in votes.items() if number == paired[level[0]] and level[0] not in held_by_others}
    hold -= _better_unrenamed(a, b, votes)
    renamed: dict[str, str] = {}
    for old, new in sorted(pair for pair in pairs.items() if pair[0] != pair[1]):
        *_, top = (old, new), *takewhile(hold.__contains__, levels[old])
        if old.rpartition(".")[2] != new.rpartition(".")[2]:
            renamed[old] = new
        renamed.setdefault(*top)
    for called, old in a.roots.items():  # where no value tells models of one class apart, their variables do
        if called[0] in several and old not in paired and b.roots.get(called, old) != old:
            renamed.setdefault(old, b.roots[called])
    return renamed


def _better_unrenamed(a: Side, b: Side, levels: Iterable[NamePair]) -> set[NamePair]:
    """Pairs of parents (x, y) that share fewer values than x of a and x of b do, or y of a and y of b.

    Only pairs where b has x or a has y are looked at.
    """
    taken = {(one, two) for one, two in levels if two in a.names or one in b.names}
    names = {name for level in taken for name in level}
    held_a, held_b = (a.held(names), b.held(names)) if taken else ({}, {})

    def alike(old: str, new: str) -> int:
        return len(held_a.get(old, set()) & held_b.get(new, set()))

    return {(one, two) for one, two in taken if max(alike(two, two), alike(one, one)) > alike(one, two)}


def _parent_pairs(old: str, new: str) -> list[NamePair]:
    """Pairs of parents, innermost first, for as long as the names are not equal, and what is cut off of parents is.

    (`a.x.w`, `b.x.v`) gives (`a.x`, `b.x`), (`a`, `b`).
    """
    alike = begin_alike(old.split(".")[-2::-1], new.split(".")[-2::-1])
    every = zip(ancestors(old), ancestors(new), strict=False)
    return [(one, two) for one, two in every if one != two][: alike + 1]


def tied_to(modules: Iterable[ModuleInfo], fqn: str) -> str:
    """The other name of a tied parameter: its target where `fqn` is the alias, else its first alias.

    "" if it is not tied.
    """
    pairs = [(f"{module.fqn}.{alias}", target) for module in modules for alias, target in module.tied.items()]
    return next((other for pair in pairs for one, other in (pair, pair[::-1]) if one == fqn), "")
