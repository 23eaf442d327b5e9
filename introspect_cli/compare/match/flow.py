"""Which values of one implementation are values of another, whatever their names are.

Two implementations of one model share no name and no structure: their modules are nested otherwise, layers are fused,
weights are transposed, inputs are called otherwise. What they share are the numbers that flow through them. A parameter
is known by its checksum, or, transposed or concatenated, by its extrema and sums; an activation by its checksum, or by
its sketch, which keys elements by their place in the flattened tensor and so does not mind another shape.

Constants prove nothing and are left out. Of several values that agree, the nearest is taken, and the earliest of these.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.distance import Layouts
from introspect_cli.compare.match.holdings import UNTOLD, telling
from introspect_cli.compare.match.merged import Merge, Moments, merges_between, moments, same_numbers
from introspect_cli.records import Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from introspect_cli.store.rank_reader import RankReader

CLOSE = 1e-5
"""Relative L2 distance up to which activations agree: more than float32 rounds by, less than faults move values by."""

_FORWARD = frozenset({Kind.BATCH, Kind.INPUT, Kind.OUTPUT, Kind.LOSS})


@dataclass(frozen=True, eq=False)
class Value:
    """A record that can prove something.

    Attributes:
        site: what was recorded.
        row: its row in the step's batch.
        order: its place in the order of recording.
        shape: its shape.
        checksum: its checksum.
        moments: what adds up of it.
        sketch: its sketch; None where none was kept.
        module_class: class of its module.
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
        """The module that a parameter is of."""
        return self.site.fqn.rpartition(".")[0]


@dataclass(frozen=True, eq=False)
class Match:
    """A value of a and the value of b that it is.

    Attributes:
        a: of run a.
        b: of run b.
        rel_l2: how far apart they are; None where they hold the same numbers at other places.
    """

    a: Value
    b: Value
    rel_l2: float | None


def values_of(reader: RankReader, step: int) -> list[Value]:
    """The telling records of a step, in the order of recording; evaluation and recomputation left out."""
    batch, layouts = reader.read(step), Layouts(reader.layouts)
    values = []
    sequence, proves = batch.sequence, telling(batch)
    for row in np.argsort(sequence, kind="stable").tolist():
        sums = moments(batch, row, layouts) if proves[row] else None
        if sums is None:
            continue
        site, info = reader.sites[int(batch.site[row])]
        if site.phase in UNTOLD:
            continue
        sketch = None if batch.sketch is None else np.asarray(batch.sketch[row], np.float64)
        shape = tuple(reader.layouts[int(batch.layout[row])].shape)
        checksum = int(batch.checksum[row])
        values.append(Value(site, row, int(sequence[row]), shape, checksum, sums, sketch, info.module_class))
    return values


def forward_of(values: Iterable[Value]) -> list[Value]:
    """What flows forward: batches, inputs, outputs, losses."""
    return [value for value in values if value.site.kind in _FORWARD]


def parameters_of(values: Iterable[Value]) -> list[Value]:
    """Parameters, each once, as the step finds them."""
    first: dict[str, Value] = {}
    for value in values:
        if value.site.kind is Kind.PARAM and value.site.phase is Phase.START:
            first.setdefault(value.site.fqn, value)
    return list(first.values())


def agreement(a: Value, b: Value, close: float) -> Match | None:
    """Two values as one, where they are equal, near, or hold the same numbers at other places; None where not."""
    if a.checksum == b.checksum:
        return Match(a, b, 0.0)
    distance = measured(a, b)
    if distance is not None and distance <= close:
        return Match(a, b, distance)
    return Match(a, b, None) if _alike(a.moments, b.moments, close) else None


def measured(a: Value, b: Value) -> float | None:
    """Relative L2 distance of two values of one size, however far apart; None where it cannot be told."""
    if a.sketch is None or b.sketch is None or a.moments.numel != b.moments.numel:
        return None
    size = max(a.moments.squares, b.moments.squares) ** 0.5
    return float(np.linalg.norm(a.sketch - b.sketch)) / size if size else None


def _alike(one: Moments, two: Moments, close: float) -> bool:
    """Whether two values of many elements have the same extrema and sums, to the tolerance."""
    if one.numel != two.numel or one.numel < 16:
        return False
    size = (max(one.squares, two.squares) / one.numel) ** 0.5
    ends = max(abs(one.low - two.low), abs(one.high - two.high))
    return (
        ends <= close * size
        and abs(one.total - two.total) <= close * size * one.numel
        and abs(one.squares - two.squares) <= 2 * close * max(one.squares, two.squares)
    )


def matched(one: Sequence[Value], two: Sequence[Value], close: float) -> dict[int, Match]:
    """For each value of a, by its row, the nearest value of b that agrees; none where there is none.

    Of equally near ones the first at the same place in line is taken: the third of five equal values is the third.
    """
    sizes: dict[int, list[Value]] = defaultdict(list)
    for value in two:
        sizes[value.moments.numel].append(value)
    index = {size: _Candidates(values) for size, values in sizes.items()}
    matches: dict[int, Match] = {}
    times: dict[int, int] = defaultdict(int)
    for value in one:
        near = index[value.moments.numel].near(value, close) if value.moments.numel in index else []
        if near:
            level = [match for match in near if match.rel_l2 == near[0].rel_l2]
            first = level[0].b.row
            matches[value.row] = level[min(times[first], len(level) - 1)]
            times[first] += 1
    return matches


class _Candidates:
    """Values of one size, asked for those near to another."""

    def __init__(self, values: Sequence[Value]) -> None:
        self.values = values
        self.checksums: dict[int, list[Value]] = defaultdict(list)
        for value in values:
            self.checksums[value.checksum].append(value)
        sketched = all(value.sketch is not None for value in values)
        self.sketches = np.stack([value.sketch for value in values if value.sketch is not None]) if sketched else None
        self.squares = np.array([value.moments.squares for value in values])

    def near(self, value: Value, close: float) -> list[Match]:
        """The values that agree with one (`agreement`), the nearest first, those at other places last."""
        equal = self.checksums.get(value.checksum)
        if equal:
            return [Match(value, other, 0.0) for other in equal]
        if value.sketch is not None and self.sketches is not None:
            size = np.sqrt(np.maximum(self.squares, value.moments.squares))
            distance = np.linalg.norm(self.sketches - value.sketch, axis=1) / np.maximum(size, 1e-300)
            order = [int(place) for place in np.argsort(distance, kind="stable") if distance[place] <= close]
            if order:
                return [Match(value, self.values[place], float(distance[place])) for place in order]
        return [Match(value, other, None) for other in self.values if _alike(value.moments, other.moments, close)]


@dataclass(frozen=True)
class Parameters:
    """Which parameters of a are which of b.

    Attributes:
        pairs: each with its partner: equal bits, or the same numbers in another order (transposed).
        merges: parts of one run that are one tensor of the other.
        only_a: telling parameters of a that are found nowhere in b, not even as one that is paired already (tied ones).
        only_b: the other way round.
    """

    pairs: tuple[tuple[Value, Value], ...]
    merges: tuple[Merge, ...]
    only_a: tuple[Value, ...]
    only_b: tuple[Value, ...]

    @property
    def transposed(self) -> int:
        """How many pairs hold the same numbers in another order."""
        return sum(one.checksum != two.checksum for one, two in self.pairs)


def parameters(one: Sequence[Value], two: Sequence[Value]) -> Parameters:
    """Put parameters together: by checksum, then by extrema and sums, then as parts of one."""
    pairs, *rest = _paired(one, two)
    merges = merges_between(*({value.site.fqn: value.moments for value in left} for left in rest))
    used = {name for merge in merges for name in (*merge.parts, merge.whole)}
    only = [
        tuple(value for value in left if value.site.fqn not in used and value.checksum not in there)
        for left, there in zip(rest, ({value.checksum for value in side} for side in (two, one)), strict=True)
    ]
    return Parameters(tuple(pairs), tuple(merges), *only)


def _paired(one: Sequence[Value], two: Sequence[Value]) -> tuple[list[tuple[Value, Value]], list[Value], list[Value]]:
    """Parameters that hold the same, and those of a and of b that are left."""
    index: dict[int, list[Value]] = defaultdict(list)
    for value in two:
        index[value.checksum].append(value)
    partners = {value: index[value.checksum].pop(0) for value in one if index[value.checksum]}
    left, taken = [value for value in one if value not in partners], set(partners.values())
    rest = [value for value in two if value not in taken]
    unpaired = []
    for value in left:
        other = next((other for other in rest if same_numbers(value.moments, other.moments)), None)
        if other is None:
            unpaired.append(value)
        else:
            partners[value] = other
            rest.remove(other)
    return list(partners.items()), unpaired, rest
