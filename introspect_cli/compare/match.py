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

*Parameters* of two implementations of one model are equal, transposed, or one tensor in one run and several in the
other (q, k, v: qkv). A checksum is keyed by an element's place, so that of the whole does not follow from those of
parts. Sums add up, and extrema are those of the extreme part: number of elements, smallest, largest and smallest
absolute value are exact, sums and sums of squares agree to rounding. Random numbers do not agree in all of these by
accident.

*Activations* are paired by checksum, or by sketch, which keys elements by their place in the flattened tensor and so
allows another shape. Constants are left out. Of several that agree, the nearest is taken, then the earliest. Modules
with equal parameters are paired; the first, in a's order, whose output does not agree is where to look, and whether its
input agrees says on which side of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.compare.measure import Mask, Moments, moments, moments_agree, same_numbers
from introspect_cli.compare.names import (
    DISPLACED,
    Rename,
    Renamed,
    ambiguous,
    ancestors,
    class_of_root,
    numbered_children,
    renamer,
    with_ancestors,
)
from introspect_cli.compare.table import MODULE_VALUES, Columns, columns, of_kinds, phase_code
from introspect_cli.records import Kind, Phase, Status
from introspect_cli.store.reader import RankReader
from introspect_cli.texts import begin_alike

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

    from introspect_cli.compare.result import DiffOptions, Divergence
    from introspect_cli.records import ModuleInfo, Site
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.reader import Reader
    from introspect_cli.store.run import Run


NamePair = tuple[str, str]
"""A name of a and a name of b."""

Feature = tuple[int, ...]
"""The place of a step among those looked at, kind, phase, call and checksum of a record."""

Held = dict[str, set[Feature]]
"""The values of each name."""


@dataclass(frozen=True)
class Correspondence:
    """The mapping of a's names to b's.

    Attributes:
        patterns: regular expressions and replacements that were asked for.
        renamed: names of a, after these, that have another name in b, or none; the longest prefix wins.
    """

    patterns: Sequence[tuple[str, str]] = ()
    renamed: Mapping[str, Renamed] = field(default_factory=dict)

    @cached_property
    def rename(self) -> Rename | None:
        """Function from a's names to b's, by `patterns` and `renamed`; None where all names are the same."""
        return renamer(self.patterns, {old: new.name for old, new in self.renamed.items()})

    @cached_property
    def asked(self) -> Rename | None:
        """Function that applies only `patterns` to a's names; None where there are none."""
        return renamer(self.patterns, {})


def correspond(a: Reader, b: Reader, options: DiffOptions, offset: int) -> Correspondence:
    """Which name of a rank of a is which of b, matched by value.

    By `--rename` alone if either reader stands for several ranks, `by_value` is off, or all steps are equal.

    Args:
        a: reader of run a's rank.
        b: reader of run b's rank.
        options: what counts.
        offset: step k of b belongs to step k + offset of a.
    """
    if not isinstance(a, RankReader) or not isinstance(b, RankReader) or a.is_whole or b.is_whole:
        return Correspondence(options.rename)
    if not options.by_value or _last_chain(a) == _last_chain(b):
        return Correspondence(options.rename)
    return matched_by_value(a, b, options.rename, offset=offset)


def other_roots(a: Run, b: Run, options: DiffOptions) -> Correspondence | None:
    """`correspond` for two runs of one rank whose root modules have no name in common; None for all other runs.

    None too where either run recorded no parameter.
    """
    if len(a.recorded) != 1 or len(b.recorded) != 1 or a.combined_ranks or b.combined_ranks:
        return None
    one, two = a.rank(a.recorded[0]), b.rank(b.recorded[0])
    roots = [
        {fqn.partition(".")[0] for fqn, kind in zip(reader.sites.fqn, reader.sites.kind, strict=True) if kind == _PARAM}
        for reader in (one, two)
    ]
    return correspond(one, two, options, options.offset or 0) if all(roots) and not roots[0] & roots[1] else None


_PARAM = Kind.PARAM.value


def _last_chain(reader: Reader) -> tuple[int, bytes]:
    """(number of steps, digest chained over all of them): equal for ranks that recorded the same in all steps."""
    return (len(reader), reader.entry(len(reader) - 1).chain) if len(reader) else (0, b"")


def matched_by_value(
    a: RankReader, b: RankReader, patterns: Sequence[tuple[str, str]] = (), *, offset: int = 0
) -> Correspondence:
    """Which name of a is which of b, by equal checksums in the first, second and last step that both have.

    By `patterns` alone where they have no step in common. A name of a that is another module's in b gets one that b
    does not have (`DISPLACED`).

    Args:
        a: reader of run a's rank.
        b: reader of run b's rank.
        patterns: (regular expression, replacement) for a's names, applied first.
        offset: step k of b belongs to step k + offset of a.
    """
    steps = np.asarray(a.entries["step"])
    steps = steps[np.isin(steps - offset, b.entries["step"])]
    if not len(steps):
        return Correspondence(patterns)
    chosen = sorted({int(steps[place]) for place in {0, min(1, len(steps) - 1), len(steps) - 1}})
    one = Side(a, Correspondence(patterns).asked, chosen)
    renamed = renamed_by_value(one, Side(b, None, [step - offset for step in chosen]))
    names = {new.name for new in renamed.values()}
    taken = [name for name in names if name not in renamed and name in one.around]
    return Correspondence(patterns, renamed | {name: Renamed(name + DISPLACED) for name in taken})


# --- what names hold

TENSORS = (Kind.PARAM, Kind.BUFFER)
NAMED = (*TENSORS, Kind.GRAD, *MODULE_VALUES)
"""Kinds whose FQN names a module, or a tensor of one."""
PROVES_NOTHING = (Phase.EVAL, Phase.RECOMPUTE)
"""Phases that prove nothing."""


class Side:
    """One run's records in a few steps, under the names that are compared; only distinctive values count."""

    def __init__(self, reader: RankReader, rename: Rename | None, steps: Sequence[int]) -> None:
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
        return of_kinds(self.sites.kind, NAMED) & ~np.isin(
            self.sites.phase, [phase_code(phase) for phase in PROVES_NOTHING]
        )

    @cached_property
    def first(self) -> StepBatch:
        """The records of the first of `steps`; kept, while those of other steps are read each time."""
        return self.reader.read(self.steps[0])

    @cached_property
    def names(self) -> KeysView[str]:
        """Names of `named` sites, each once, in the order of recording."""
        fqn = self.sites.fqn
        return dict.fromkeys(fqn if self.named.all() else compress(fqn, self.named.tolist())).keys()

    @cached_property
    def around(self) -> set[str]:
        """`names` with all their ancestors."""
        return with_ancestors(self.names)

    @cached_property
    def tensors(self) -> set[str]:
        """Names of parameters and buffers."""
        return {self.sites.fqn[site] for site in np.flatnonzero(of_kinds(self.sites.kind, TENSORS)).tolist()}

    def held(self, names: AbstractSet[str]) -> Held:
        """Distinctive values (`distinctive_rows`) of `names` in all of `steps`; names without one are left out.

        Each is (index in `steps`, kind, phase, call, checksum).
        """
        sites, features = self.sites, Held()
        fqn = sites.fqn
        wanted = np.fromiter(map(names.__contains__, fqn), np.bool_, len(fqn)) & self.named
        for place, step in enumerate(self.steps):
            batch = self.reader.read(step) if place else self.first
            rows = np.flatnonzero(wanted[batch.site] & distinctive_rows(batch))
            numbers = batch.site[rows]
            columns = sites.kind[numbers], sites.phase[numbers], sites.call[numbers], batch.checksum[rows]
            for number, *feature in zip(numbers.tolist(), *(column.tolist() for column in columns), strict=True):
                features.setdefault(fqn[number], set()).add((place, *feature))
        return features


def distinctive_rows(batch: StepBatch) -> Mask:
    """Mask over all rows of a batch, true for distinctive values.

    That is, OBSERVED ones whose minimum is not their maximum; where these are not on record, all OBSERVED ones.
    """
    mask: Mask = batch.status == int(Status.OBSERVED)
    low, high = batch.floats.get("min"), batch.floats.get("max")
    if low is not None and high is not None:
        with np.errstate(invalid="ignore"):
            mask &= ~(np.asarray(low) == np.asarray(high))
    return mask


# --- names that hold the same values

_MAX_PAIRS = 8  # more pairs of names with one value than this, and nobody can say which is which


def equal_pairs(one: Held, two: Held) -> dict[str, str]:
    """The partner in b of each name of a: by most shared values (`by_votes`).

    A value that more than `_MAX_PAIRS` pairs of names share does not count.
    """
    holders: dict[Feature, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, held in enumerate((one, two)):
        for name, features in held.items():
            for feature in features:
                holders[feature][side].append(name)
    few = (product(*names) for names in holders.values() if len(names[0]) * len(names[1]) <= _MAX_PAIRS)
    return by_votes(Counter(chain.from_iterable(few)))


def assigned(ranks: Mapping[NamePair, Any]) -> dict[str, str]:
    """The partner of each old name, where each name gets one at most, the lowest rank first.

    Pairs of one rank that share a name are dropped, and their names get no partner.

    Args:
        ranks: (old name, new name) to its rank, anything that can be sorted.
    """
    levels: dict[Any, list[NamePair]] = defaultdict(list)
    for pair, rank in ranks.items():
        levels[rank].append(pair)
    partners: dict[str, str] = {}
    gone: tuple[set[str], set[str]] = (set(), set())
    for rank in sorted(levels):
        free = [pair for pair in levels[rank] if pair[0] not in gone[0] and pair[1] not in gone[1]]
        times = Counter(old for old, _ in free), Counter(new for _, new in free)
        partners |= {old: new for old, new in free if times[0][old] == times[1][new] == 1}
        for names, taken in zip(gone, times, strict=True):
            names.update(taken)
    return partners


def by_votes(votes: Mapping[NamePair, float]) -> dict[str, str]:
    """The partner of each old name: the pair with most votes, else the equal name, else the most alike.

    Ties are dropped.

    Args:
        votes: (old name, new name) to the number of values that they share.
    """
    return assigned({(old, new): (-count, old != new, -_likeness(old, new)) for (old, new), count in votes.items()})


def _likeness(old: str, new: str) -> int:
    """How alike two dotted names are: equal components at their beginnings, plus twice those at their ends."""
    one, two = old.split("."), new.split(".")
    return 2 * begin_alike(one[::-1], two[::-1]) + begin_alike(one, two)


# --- the tree above them


def renamed_by_value(a: Side, b: Side) -> dict[str, Renamed]:
    """Names of a that are other names of b, by equal values of tensors; of nested ones the outermost that holds.

    Tensors that one run alone has are matched, those in numbered lists whose lengths differ, and those of several
    models of one class, which are numbered in the order in which they were made. A pair of parents holds while all
    tensors below the old one are paired with those below the new one, and no equal name shares more values.
    """
    several = ambiguous(*({name.partition(".")[0] for name in side.names} for side in (a, b)))
    if a.names == b.names and not several:
        return {}
    lists = _lists_of_other_length(a, b)
    one, two = (
        {
            name
            for name in side.tensors
            if name not in other.names or _is_in_any(name, lists) or class_of_root(name.partition(".")[0]) in several
        }
        for side, other in ((a, b), (b, a))
    )
    pairs = equal_pairs(a.held(one), b.held(two))
    levels = {old: _parent_pairs(old, new) for old, new in pairs.items()}
    votes = Counter(chain.from_iterable(levels.values()))
    better_kept = _better_unrenamed(a, b, votes)
    paired = Counter(head for name in pairs for head in (name, *ancestors(name)))
    held_by_others = with_ancestors(a.tensors - one)
    renamed: dict[str, Renamed] = {}
    for old in sorted(old for old, new in pairs.items() if old != new):
        top = (old, pairs[old])
        for level in levels[old]:
            if votes[level] != paired[level[0]] or level[0] in held_by_others or level in better_kept:
                break
            top = level
        renamed.setdefault(top[0], Renamed(top[1], votes.get(top, 1)))
    for called, old in a.roots.items():  # where no value tells models of one class apart, their variables do
        if called[0] in several and old not in paired and b.roots.get(called, old) != old:
            renamed.setdefault(old, Renamed(b.roots[called]))
    return renamed


def _is_in_any(name: str, lists: AbstractSet[str]) -> bool:
    """Whether a name is in any of these numbered lists: `blocks.3.fc` in `blocks.`."""
    parts = (head.rpartition(".") for head in (name, *ancestors(name))) if lists else ()
    return any(part.isdecimal() and f"{above}." in lists for above, _, part in parts)


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
    """Pairs of parents, innermost first, for as long as what is cut off is equal and the names are not.

    (`a.x.w`, `b.x.w`) gives (`a.x`, `b.x`), (`a`, `b`).
    """
    pairs: list[NamePair] = []
    while True:
        old, dot, end = old.rpartition(".")
        new, other_dot, other_end = new.rpartition(".")
        if not (dot and other_dot and end == other_end and old != new):
            return pairs
        pairs.append((old, new))


def _lists_of_other_length(a: Side, b: Side) -> frozenset[str]:
    """Prefixes (`blocks.`) of numbered lists that both runs have, with different numbers of children."""
    counts = numbered_children(a.names), numbered_children(b.names)
    both = counts[0].keys() & counts[1].keys()
    return frozenset(f"{parent}." for parent in both if counts[0][parent] != counts[1][parent])


_MAX_PARTS = 8  # parts of one whole


class Merge(NamedTuple):
    """Several tensors of one run that are one tensor of the other.

    Attributes:
        parts: FQNs of the parts, in order.
        whole: FQN of the whole.
        side: the run that has the whole.
    """

    parts: tuple[str, ...]
    whole: str
    side: str


_OF_PARTS: tuple[Callable[[Any], Any], ...] = (sum, min, max, min, sum, sum)
"""How each of the moments of a whole follows from those of its parts."""


def _merges(parts: dict[str, Moments], wholes: dict[str, Moments], side: str) -> list[Merge]:
    """Merges of 2 to `_MAX_PARTS` tensors that follow one another into one with their moments.

    Each tensor is used once.

    Candidates are tensors of one name whose modules have one parent (`attn.q.weight`, `attn.k.weight`).

    Args:
        parts: moments of one run's tensors, in order.
        wholes: moments of the other run's.
        side: `a` or `b`, the run that has the wholes.
    """
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in parts:
        owner, _, leaf = name.rpartition(".")
        families[owner.rpartition(".")[0], leaf].append(name)
    index: dict[tuple[int, float, float], list[str]] = defaultdict(list)
    for name, sums in wholes.items():
        index[sums.numel, sums.low, sums.high].append(name)
    merges, used = [], set[str]()
    for members in families.values():
        for start in range(len(members)):
            for length in range(2, min(_MAX_PARTS, len(members) - start) + 1):
                names = members[start : start + length]
                columns = zip(*(parts[name] for name in names), strict=True)
                sums = Moments(*(of(column) for of, column in zip(_OF_PARTS, columns, strict=True)))
                for whole in index.get((sums.numel, sums.low, sums.high), ()):
                    if same_numbers(sums, wholes[whole]) and not used & {whole, *names}:
                        used |= {whole, *names}
                        merges.append(Merge(tuple(names), whole, side))
    return merges


# --- all parameters of two implementations


@dataclass(frozen=True, eq=False)
class Value:
    """A record with a distinctive value.

    Attributes:
        row: its row in the step's batch.
        order: its place in the order of recording.
        sketch: its sketch; None where none was kept.
    """

    site: Site
    row: int
    order: int
    shape: tuple[int, ...]
    checksum: int
    moments: Moments
    sketch: NDArray[np.float64] | None
    module_class: str

    @property
    def owner(self) -> str:
        """FQN of the module of a parameter or buffer; "" for a name without a dot."""
        return self.site.fqn.rpartition(".")[0]


class Parameters(NamedTuple):
    """The pairing of a's and b's parameters.

    Attributes:
        pairs: each with its partner: equal bits, or the same numbers in another order (transposed).
        merges: parts of one run that are one tensor of the other.
        only_a: distinctive parameters of a that are nowhere in b, not even as one that is paired already (tied ones).
        only_b: the other way round.
    """

    pairs: tuple[tuple[Value, Value], ...]
    merges: tuple[Merge, ...]
    only_a: tuple[Value, ...]
    only_b: tuple[Value, ...]

    @property
    def transposed(self) -> int:
        """Number of pairs whose checksums are not equal: the same numbers in another order."""
        return sum(one.checksum != two.checksum for one, two in self.pairs)


def parameters(one: Sequence[Value], two: Sequence[Value]) -> Parameters:
    """Pair the parameters of a (`one`) with those of b (`two`): by checksum, else by moments, else as merges.

    One that is left over counts as one run's alone only if no parameter of the other has its checksum.
    """
    pairs, *rest = _pair_up(one, two)
    left_a, left_b = ({value.site.fqn: value.moments for value in left} for left in rest)
    merges = [*_merges(left_a, left_b, "b"), *_merges(left_b, left_a, "a")]
    used = {name for merge in merges for name in (*merge.parts, merge.whole)}
    only = [
        tuple(value for value in left if value.site.fqn not in used and value.checksum not in there)
        for left, there in zip(rest, ({value.checksum for value in side} for side in (two, one)), strict=True)
    ]
    return Parameters(tuple(pairs), tuple(merges), *only)


def _pair_up(one: Sequence[Value], two: Sequence[Value]) -> tuple[list[tuple[Value, Value]], list[Value], list[Value]]:
    """(pairs, those of `one` without a partner, those of `two` without one).

    Paired by equal checksum first, then by `same_numbers`, each with the first of `two` that no other has taken.
    """
    pairs, left, rest = list[tuple[Value, Value]](), list(one), list(two)
    for agree in (lambda x, y: x.checksum == y.checksum, lambda x, y: same_numbers(x.moments, y.moments)):
        for value in tuple(left):
            other = next((other for other in rest if agree(value, other)), None)
            if other is not None:
                pairs.append((value, other))
                left.remove(value)
                rest.remove(other)
    return pairs, left, rest


def tied_to(modules: Iterable[ModuleInfo], fqn: str) -> str:
    """The other name of a tied parameter: its target where `fqn` is the alias, else its first alias.

    "" if it is not tied.
    """
    owner, _, name = fqn.rpartition(".")
    for module in modules:
        for alias_name, target in module.tied.items():
            if module.fqn == owner and alias_name == name:
                return target
            if target == fqn:
                return f"{module.fqn}.{alias_name}"
    return ""


# --- values that flow through both

CLOSE = 1e-5
"""Relative L2 distance up to which activations agree: more than float32 rounds by, less than faults move values by."""

_FORWARD = frozenset({Kind.BATCH, Kind.INPUT, Kind.OUTPUT, Kind.LOSS})


class ValuePair(NamedTuple):
    """A value of a, and the value of b that it is compared with.

    Attributes:
        rel_l2: their distance; None where it is not known, or they hold the same numbers at other places.
        agree: whether they agree.
        inputs: of outputs of two modules, whether every distinctive input of a agrees with one of b; None where a run
            has recorded none.
    """

    a: Value
    b: Value
    rel_l2: float | None
    agree: bool = True
    inputs: bool | None = None


def distinctive_values(reader: RankReader, step: int) -> list[Value]:
    """Records of a step with distinctive, finite values and statistics, in order of recording; reads the step.

    Evaluation and recomputation are left out.
    """
    batch, values = reader.read(step), list[Value]()
    proves = distinctive_rows(batch)
    for row in np.argsort(batch.sequence, kind="stable").tolist():
        record = reader.record(batch, row, step) if proves[row] else None
        sums = None if record is None else moments(record.summary)
        if record is None or sums is None or record.site.phase in PROVES_NOTHING:
            continue
        site, order, of = record.site, record.sequence, record.summary
        sketch = np.asarray(of.sketch, np.float64) if of.sketch else None
        value = Value(site, row, order, tuple(of.layout.shape), of.checksum, sums, sketch, record.info.module_class)
        values.append(value)
    return values


def parameters_of(values: Iterable[Value]) -> list[Value]:
    """Of these values, parameters at the start of a step, the first of each name."""
    first: dict[str, Value] = {}
    for value in values:
        if value.site.kind is Kind.PARAM and value.site.phase is Phase.START:
            first.setdefault(value.site.fqn, value)
    return list(first.values())


def compared(a: Value, b: Value, close: float) -> ValuePair:
    """Two values as a pair; they agree where they have as many elements and are `agreeing`."""
    near = agreeing(a, [b], close) if a.moments.numel == b.moments.numel else []
    return near[0] if near else ValuePair(a, b, sketch_distance(a, b), agree=False)


def sketch_distance(a: Value, b: Value) -> float | None:
    """Relative L2 distance of two values by their sketches.

    None if either has no sketch, they have other numbers of elements, or both are zero.
    """
    if a.sketch is None or b.sketch is None or a.moments.numel != b.moments.numel:
        return None
    size = max(a.moments.squares, b.moments.squares) ** 0.5
    return float(np.linalg.norm(a.sketch - b.sketch)) / size if size else None


def matched_values(one: Sequence[Value], two: Sequence[Value], close: float) -> dict[int, ValuePair]:
    """For each value of a that has one, by its row: the value of b that agrees and is nearest.

    Of equally near ones, the n-th is paired with the n-th: the third of five equal values with the third. Where b has
    fewer, the last is taken again.

    Args:
        one: values of a, in order.
        two: values of b, in order.
        close: relative L2 distance up to which values agree.
    """
    sizes: dict[int, list[Value]] = defaultdict(list)
    for value in two:
        sizes[value.moments.numel].append(value)
    matches: dict[int, ValuePair] = {}
    times: dict[int, int] = defaultdict(int)
    for value in one:
        near = agreeing(value, sizes.get(value.moments.numel, ()), close)
        if near:
            level = [match for match in near if match.rel_l2 == near[0].rel_l2]
            first = level[0].b.row
            matches[value.row] = level[min(times[first], len(level) - 1)]
            times[first] += 1
    return matches


def agreeing(value: Value, others: Sequence[Value], close: float) -> list[ValuePair]:
    """Pairs of `value` with each of these values of as many elements that agrees, nearest first; [] for none.

    All of equal checksum; if there are none, those at most `close` away by sketch, where all have one; if there are
    none, those whose moments agree (`moments_agree`).
    """
    if equal := [ValuePair(value, other, 0.0) for other in others if other.checksum == value.checksum]:
        return equal
    sketches = [other.sketch for other in others if other.sketch is not None]
    if value.sketch is not None and len(sketches) == len(others) > 0:
        size = np.sqrt([max(other.moments.squares, value.moments.squares, 1e-300) for other in others])
        distance = np.linalg.norm(np.stack(sketches) - value.sketch, axis=1) / size
        order = [int(place) for place in np.argsort(distance, kind="stable") if distance[place] <= close]
        if order:
            return [ValuePair(value, others[place], float(distance[place])) for place in order]
    return [
        ValuePair(value, other, None)
        for other in others
        if other.moments.numel >= 16 and moments_agree(value.moments, other.moments, close)
    ]


# --- the flow through both

_PORT_SHARE = 1 / 3


def are_ports(a: RankReader, b: RankReader, first: Divergence | None, *, listed: bool = False) -> bool:
    """Whether two runs are implementations of one model under other names.

    They share less than a third of the names of parameters and module values (of the run with fewer), and the first
    divergence is only one of structure, of a random state, a one-sided one, or a start value of another shape. False
    where either run has no such name.

    Args:
        a: reader of run a's rank.
        b: reader of run b's rank.
        first: first divergence of comparing by name; None for none.
        listed: whether a run is a list, for which the first divergence does not matter.
    """
    known = listed or first is None or first.reason == "structure" or first.site.kind is Kind.RNG
    named = None if known else first
    if named is not None and named.a is not None and named.b is not None:
        # A parameter that is transposed, or has become part of another, has another shape from the start.
        transposed = named.reason == "initial" and named.a.layout.shape != named.b.layout.shape
        if not transposed:
            return False
    kinds = {Kind.PARAM.value, Kind.INPUT.value, Kind.OUTPUT.value}
    one, two = (
        {fqn for fqn, kind in zip(run.sites.fqn, run.sites.kind, strict=True) if kind in kinds} for run in (a, b)
    )
    return bool(one) and bool(two) and len(one & two) < _PORT_SHARE * min(len(one), len(two))


class Flow(NamedTuple):
    """The pairing of all values of one step of two implementations.

    Attributes:
        step: the step, of a and of b.
        close: relative L2 distance up to which values agree.
        readers: of a and of b.
        ordered: whether the order of a's records, and of b's, is that in which they were computed.
        parameters: which parameters are which.
        values: what flows forward in a, and in b.
        forward: matched values, in a's order.
        modules: outputs of modules with the same parameters, in the order in which a ran them.
        end: what of a model's outputs agrees; None where nothing does.
        gradients: of paired parameters, in the order of recording.
    """

    step: int
    close: float
    readers: tuple[RankReader, RankReader]
    ordered: tuple[bool, bool]
    parameters: Parameters
    values: tuple[Sequence[Value], Sequence[Value]]
    forward: tuple[ValuePair, ...]
    modules: tuple[ValuePair, ...]
    end: ValuePair | None
    gradients: tuple[ValuePair, ...]

    @property
    def related(self) -> bool:
        """Whether anything is paired that shows that the runs are of one model: a parameter or a module's output."""
        shared = self.parameters.pairs or self.parameters.merges
        return bool(shared) or any(match.a.site.kind is Kind.OUTPUT for match in self.forward)


def flow_of(
    readers: tuple[RankReader, RankReader], step: int, close: float, ordered: tuple[bool, bool] = (True, True)
) -> Flow:
    """Pair the values of one step of both runs; reads the step of both.

    Modules are in a's order; in b's where only b's records are in the order of computation. `end` is the first pair
    among the last outputs (`ends`), None for none.

    Args:
        readers: of a rank of a and of b.
        step: number of the step, in both.
        close: relative L2 distance up to which values agree; of gradients, ten times that.
        ordered: whether a's records, and b's, are in the order of computation.
    """
    one, two = (distinctive_values(reader, step) for reader in readers)
    shared = parameters(parameters_of(one), parameters_of(two))
    forward = [[value for value in side if value.site.kind in _FORWARD] for side in (one, two)]
    matches = matched_values(forward[0], forward[1], close)
    modules = _module_pairs(shared, forward[0], forward[1], close)
    if ordered == (False, True):
        modules.sort(key=lambda pair: pair.b.order)
    return Flow(
        step=step,
        close=close,
        readers=readers,
        ordered=ordered,
        parameters=shared,
        values=(forward[0], forward[1]),
        forward=tuple(matches[value.row] for value in forward[0] if value.row in matches),
        modules=tuple(modules),
        end=next(iter(matched_values(ends(forward[0]), ends(forward[1]), close).values()), None),
        gradients=tuple(_gradients(shared, one, two, close)),
    )


def ends(values: Sequence[Value]) -> list[Value]:
    """Outputs of the last call of the last root module; of the last call of any module where no root has outputs.

    Args:
        values: in order of recording.
    """
    outputs = [value for value in values if value.site.kind is Kind.OUTPUT]
    roots = [value for value in outputs if "." not in value.site.fqn] or outputs
    return [root for root in roots if (root.site.fqn, root.site.call) == (roots[-1].site.fqn, roots[-1].site.call)]


def _module_pairs(shared: Parameters, one: Sequence[Value], two: Sequence[Value], close: float) -> list[ValuePair]:
    """Pairs of outputs of modules whose paired parameters all have partners in one module; inputs are compared too.

    An output is paired with the first of the same call that has as many elements, whether they agree or not. Inputs
    agree if each of a's does with any of b's; None where either has none. Modules that take part in a merge are left
    out.

    Args:
        shared: which parameters are which.
        one: values of a's forward pass, in order.
        two: values of b's forward pass, in order.
        close: relative L2 distance up to which values agree.
    """
    partners: dict[str, str] = {}
    for first, second in shared.pairs:
        # A module whose parameters lie in several of the other run does what none of these does.
        if partners.setdefault(first.owner, second.owner) != second.owner:
            partners[first.owner] = ""
    merged = {name.rpartition(".")[0] for merge in shared.merges for name in (*merge.parts, merge.whole)}
    calls_a, calls_b, pairs = _by_call(one), _by_call(two), []
    for value in one:
        name, call = value.site.fqn, value.site.call
        other = partners.get(name)
        if value.site.kind is not Kind.OUTPUT or not other or {name, other} & merged:
            continue
        outputs = calls_b.get((Kind.OUTPUT, other, call), ())
        partner = next((output for output in outputs if output.moments.numel == value.moments.numel), None)
        if partner is None:
            continue
        given, given_b = calls_a.get((Kind.INPUT, name, call), ()), calls_b.get((Kind.INPUT, other, call), ())
        inputs = all(any(compared(x, y, close).agree for y in given_b) for x in given) if given and given_b else None
        pairs.append(compared(value, partner, close)._replace(inputs=inputs))
    return pairs


def _by_call(values: Sequence[Value]) -> dict[tuple[Kind, str, int], list[Value]]:
    """Values by (kind, FQN, call), each in the order given."""
    by_call: dict[tuple[Kind, str, int], list[Value]] = defaultdict(list)
    for value in values:
        by_call[value.site.kind, value.site.fqn, value.site.call].append(value)
    return by_call


def _gradients(shared: Parameters, one: Sequence[Value], two: Sequence[Value], close: float) -> list[ValuePair]:
    """Gradients of paired parameters, which agree to ten times `close`, in a's order."""
    sides = [{value.site.fqn: value for value in side if value.site.kind is Kind.GRAD} for side in (one, two)]
    both = [(sides[0].get(first.site.fqn), sides[1].get(second.site.fqn)) for first, second in shared.pairs]
    # Gradients gather the rounding of the whole backward pass.
    pairs = [compared(mine, other, 10 * close) for mine, other in both if mine is not None and other is not None]
    return sorted(pairs, key=lambda pair: pair.a.order)
