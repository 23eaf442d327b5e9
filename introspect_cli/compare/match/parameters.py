"""Parameters by what they hold: equal, transposed, or one tensor in one run and several in the other (q, k, v: qkv).

A checksum is keyed by an element's place in its tensor, so that of the whole does not follow from those of its parts.
What does add up are sums, and extrema are those of the extreme part: the number of elements, smallest, largest and
smallest absolute value are exact, sums and sums of squares agree to rounding. Numbers drawn at random do not agree in
all of these by accident; what is claimed is just that.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.terms.sites import Alignment, kind_code, phase_code
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from introspect_cli.compare.terms.distance import Layouts
    from introspect_cli.compare.terms.table import Half, Table
    from introspect_cli.records import ModuleInfo, Site
    from introspect_cli.store.format.batch import StepBatch

_MOST = 8  # parts of one whole
_CLOSE = 1e-6  # sums are taken in float64 of statistics that are right to 1e-6


@dataclass(frozen=True)
class Merge:
    """Parts of one run that are one tensor of the other.

    Attributes:
        parts: FQNs of the parts, in order.
        whole: FQN of the whole.
        side: the run that has the whole.
    """

    parts: tuple[str, ...]
    whole: str
    side: str


@dataclass(frozen=True)
class Moments:
    """What adds up of a tensor."""

    numel: int
    low: float
    high: float
    least: float
    total: float
    squares: float


def merge_words(parts: str, whole: str, side: str) -> str:
    """That several modules of one run, `parts` as a list in words, are one in the other, which is `side`."""
    other = "a" if side == "b" else "b"
    return f"{parts} of {other} are one in {side}, {whole}: put together, their parameters have its extrema and moments"


def _together(parts: list[Moments]) -> Moments:
    """The moments of tensors put together."""
    return Moments(
        sum(part.numel for part in parts),
        min(part.low for part in parts),
        max(part.high for part in parts),
        min(part.least for part in parts),
        sum(part.total for part in parts),
        sum(part.squares for part in parts),
    )


def same_numbers(one: Moments, two: Moments) -> bool:
    """Whether two tensors have the same extrema and, to rounding, the same sums; never where all is one number."""
    if (one.numel, one.low, one.high, one.least) != (two.numel, two.low, two.high, two.least) or one.low == one.high:
        return False
    spread = (one.numel * max(one.squares, two.squares)) ** 0.5
    return abs(one.total - two.total) <= _CLOSE * spread and (
        abs(one.squares - two.squares) <= _CLOSE * max(one.squares, two.squares)
    )


def moments(batch: StepBatch, row: int, layouts: Layouts) -> Moments | None:
    """What adds up of a record; None where statistics are missing, or something in it is not finite."""
    names = ("min", "max", "absmin", "mean", "var")
    if any(name not in batch.floats for name in names):
        return None
    low, high, least, mean, var = (float(batch.floats[name][row]) for name in names)
    numel = int(layouts.numel[int(batch.layout[row])])
    odd = any(int(batch.counts[name][row]) != 0 for name in ("nans", "posinfs", "neginfs") if name in batch.counts)
    if odd or not np.isfinite([low, high, least, mean, var]).all():
        return None
    return Moments(numel, low, high, least, mean * numel, (var + mean * mean) * numel)


def merges_of(table: Table, layouts: tuple[Layouts, Layouts]) -> list[Merge]:
    """Parameters that are several in one run and one in the other, among those that one run only has."""
    return merges_between(
        *(_tensors(table.alignment, half, of_run) for half, of_run in zip(table.halves, layouts, strict=True))
    )


def _tensors(alignment: Alignment, half: Half, layouts: Layouts) -> dict[str, Moments]:
    """Moments of parameters in their order of recording: as the step found them, else as it left them."""
    _, batch, sites, rows = half
    by_tensor: dict[str, Moments] = {}
    for phase in (Phase.START, Phase.OPTIMIZER):
        chosen = alignment.kind[sites[rows]] == kind_code(Kind.PARAM)
        chosen &= alignment.phase[sites[rows]] == phase_code(phase)
        for row in rows[chosen].tolist():
            name = alignment.fqn[sites[row]]
            if name not in by_tensor and (sums := moments(batch, row, layouts)) is not None:
                by_tensor[name] = sums
    return by_tensor


def merges_between(one: dict[str, Moments], two: dict[str, Moments]) -> list[Merge]:
    """Parts of either run that together have the moments of a whole of the other."""
    return [*_merges(one, two, "b"), *_merges(two, one, "a")]


def _merges(parts: dict[str, Moments], wholes: dict[str, Moments], side: str) -> list[Merge]:
    """Parts in their order that together have the moments of a whole; `side` is the run that has the wholes."""
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
            for length in range(2, min(_MOST, len(members) - start) + 1):
                names = members[start : start + length]
                sums = _together([parts[name] for name in names])
                for whole in index.get((sums.numel, sums.low, sums.high), ()):
                    if same_numbers(sums, wholes[whole]) and not used & {whole, *names}:
                        used |= {whole, *names}
                        merges.append(Merge(tuple(names), whole, side))
    return merges


# --- all parameters of two implementations


@dataclass(frozen=True, eq=False)
class Value:
    """A record that can prove something.

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
        """The module that a parameter is of."""
        return self.site.fqn.rpartition(".")[0]


@dataclass(frozen=True)
class Parameters:
    """Which parameters of a are which of b.

    Attributes:
        pairs: each with its partner: equal bits, or the same numbers in another order (transposed).
        merges: parts of one run that are one tensor of the other.
        only_a: telling parameters of a that are nowhere in b, not even as one that is paired already (tied ones).
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


def tied_to(modules: Iterable[ModuleInfo], fqn: str) -> str:
    """What a parameter is tied to, by the aliases of its module."""
    owner, _, name = fqn.rpartition(".")
    for module in modules:
        for alias_name, target in module.tied.items():
            if module.fqn == owner and alias_name == name:
                return target
            if target == fqn:
                return f"{module.fqn}.{alias_name}"
    return ""
