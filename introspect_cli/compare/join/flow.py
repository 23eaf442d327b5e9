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
from introspect_cli.compare.join.merged import Merge, Moments, merges_among, moments, same_numbers
from introspect_cli.records import Kind, Phase, Site, Status

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
    found = []
    sequence = np.asarray(batch.sequence)
    for row in np.argsort(sequence, kind="stable").tolist():
        if int(batch.status[row]) != int(Status.OBSERVED):
            continue
        site, info = reader.sites[int(batch.site[row])]
        own = moments(batch, row, layouts)
        if own is None or own.low == own.high or site.phase in (Phase.EVAL, Phase.RECOMPUTE):
            continue
        sketch = None if batch.sketch is None else np.asarray(batch.sketch[row], np.float64)
        shape = tuple(reader.layouts[int(batch.layout[row])].shape)
        checksum = int(batch.checksum[row])
        found.append(Value(site, row, int(sequence[row]), shape, checksum, own, sketch, info.module_class))
    return found


def forward_of(values: Iterable[Value]) -> list[Value]:
    """What flows forward: batches, inputs, outputs, losses."""
    return [own for own in values if own.site.kind in _FORWARD]


def parameters_of(values: Iterable[Value], phase: Phase = Phase.START) -> list[Value]:
    """Parameters, each once, as the step finds them; after it, in phase `optimizer`."""
    kept: dict[str, Value] = {}
    for own in values:
        if own.site.kind is Kind.PARAM and own.site.phase is phase:
            kept.setdefault(own.site.fqn, own)
    return list(kept.values())


def distance(a: Value, b: Value, close: float) -> float | None:
    """Relative L2 distance of two values of one size; infinite where they do not agree, None where reordered.

    Args:
        a: the one.
        b: the other.
        close: up to where they agree.
    """
    if a.checksum == b.checksum:
        return 0.0
    if a.moments.numel != b.moments.numel:
        return np.inf
    if a.sketch is not None and b.sketch is not None:
        size = max(a.moments.squares, b.moments.squares) ** 0.5
        apart = float(np.linalg.norm(a.sketch - b.sketch)) / size if size else np.inf
        if apart <= close:
            return apart
    return None if _alike(a.moments, b.moments, close) else np.inf


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
    for own in two:
        sizes[own.moments.numel].append(own)
    index = {size: _Candidates(values) for size, values in sizes.items()}
    found: dict[int, Match] = {}
    times: dict[int, int] = defaultdict(int)
    for own in one:
        candidates = index.get(own.moments.numel)
        near = candidates.near(own, close) if candidates is not None else []
        if near:
            best = near[0][0] if near[0][0] is not None else np.inf
            level = [pair for pair in near if (pair[0] if pair[0] is not None else np.inf) <= best]
            rel, other = level[min(times[level[0][1].row], len(level) - 1)]
            times[level[0][1].row] += 1
            found[own.row] = Match(own, other, rel)
    return found


class _Candidates:
    """Values of one size, asked for those near to another."""

    def __init__(self, values: Sequence[Value]) -> None:
        """Take values of one number of elements."""
        self.values = values
        self.checksums: dict[int, list[Value]] = defaultdict(list)
        for own in values:
            self.checksums[own.checksum].append(own)
        known = all(own.sketch is not None for own in values)
        self.sketches = np.stack([own.sketch for own in values if own.sketch is not None]) if known else None
        self.squares = np.array([own.moments.squares for own in values])

    def near(self, own: Value, close: float) -> list[tuple[float | None, Value]]:
        """Values that agree with one, the nearest first, those at other places last."""
        equal = self.checksums.get(own.checksum)
        if equal:
            return [(0.0, other) for other in equal]
        if own.sketch is not None and self.sketches is not None:
            size = np.sqrt(np.maximum(self.squares, own.moments.squares))
            apart = np.linalg.norm(self.sketches - own.sketch, axis=1) / np.maximum(size, 1e-300)
            order = [int(place) for place in np.argsort(apart, kind="stable") if apart[place] <= close]
            if order:
                return [(float(apart[place]), self.values[place]) for place in order]
        return [(None, other) for other in self.values if _alike(own.moments, other.moments, close)]


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
    pairs, rest_a, rest_b = _paired(one, two)
    parts_a, parts_b = ({own.site.fqn: own.moments for own in rest} for rest in (rest_a, rest_b))
    merges = [*merges_among(parts_a, parts_b, "b"), *merges_among(parts_b, parts_a, "a")]
    used = {name for own in merges for name in (*own.parts, own.whole)}
    held = [{own.checksum for own in side} for side in (two, one)]
    only = (
        tuple(own for own in rest if own.site.fqn not in used and own.checksum not in there)
        for rest, there in zip((rest_a, rest_b), held, strict=True)
    )
    return Parameters(tuple(pairs), tuple(merges), *only)


def _paired(one: Sequence[Value], two: Sequence[Value]) -> tuple[list[tuple[Value, Value]], list[Value], list[Value]]:
    pairs: list[tuple[Value, Value]] = []
    rest = list(two)
    left = []
    index: dict[int, list[Value]] = defaultdict(list)
    for own in rest:
        index[own.checksum].append(own)
    for own in one:
        if index[own.checksum]:
            pairs.append((own, index[own.checksum].pop(0)))
        else:
            left.append(own)
    taken = {id(other) for _, other in pairs}
    rest = [own for own in rest if id(own) not in taken]
    unpaired = []
    for own in left:
        other = next((other for other in rest if same_numbers(own.moments, other.moments)), None)
        if other is None:
            unpaired.append(own)
            continue
        rest.remove(other)
        pairs.append((own, other))
    return pairs, unpaired, rest
