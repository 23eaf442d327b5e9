"""All ranks of a run side by side, step by step: the table that rules about ranks look at.

Each rank numbers its sites and layouts, and not all of them record the same. Here a site has one number, and
beside it stands the row of each rank that recorded it. Which of these records ought to be equal is written nowhere:
`equal.ROWS` says it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from introspect_cli.derived import l2_norm, scale_between
from introspect_cli.health.table import adding_up
from introspect_cli.records import Kind, Layout, Phase, Status
from introspect_cli.store.whole import WholeReader
from introspect_cli.texts import rank_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from introspect_cli.records import Site
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.reader import RankReader
    from introspect_cli.store.run import Run

    Rows = Mapping[int, int]  # rank -> its row

_MULTIPLE = 1e-5
_SUMMED = re.compile(
    r"bias of (Linear|(Layer|Group|Batch|Instance|SyncBatch)Norm\w*|Conv\d?d|ConvTranspose\d?d)$|weight of Embedding$"
)


class Difference(NamedTuple):
    """Values of one site that should be equal on some ranks and are not.

    Attributes:
        others: the ranks that differ from `base`.
        base: the lowest of the ranks that were compared.
        distance: L2 distance over the larger norm, from sketches; NaN where it is not known.
        scale: how many times the base's the first of `others`' is, where it is a multiple; NaN otherwise.
        single: whether it is one element, of which no multiple tells anything.
        words: what each rank has, where that is no tensor; or why they differ.
    """

    step: int
    others: tuple[int, ...]
    base: int
    distance: float = np.nan
    scale: float = np.nan
    single: bool = False
    words: str = ""

    @property
    def rank(self) -> int:
        """The lowest rank that differs from `base`."""
        return self.others[0]

    @property
    def is_multiple(self) -> bool:
        """Whether the value of `rank` is a multiple of that of `base` (`scale` is known)."""
        return not np.isnan(self.scale)

    @property
    def size(self) -> str:
        """How far `rank` is from `base`, for a sentence: ` (0.5 x)`, ` (relative L2 1.4e-03)`, "" where not known."""
        if self.is_multiple and f"{self.scale:.6g}" != "1":
            return f" ({self.scale:.6g} x)"
        return "" if np.isnan(self.distance) else f" (relative L2 {self.distance:.1e})"

    @property
    def whose(self) -> str:
        """The ranks, for a sentence: `ranks 1, 2, compared with rank 0`."""
        return f"{rank_list(list(self.others))}, compared with rank {self.base}"


@dataclass
class Ledger:
    """Results of comparing named values between ranks, step after step.

    Attributes:
        shared: names equal in their first comparison.
        equal: names equal in their last comparison.
        first: the first difference of each name.
        parted: the first difference of each name that had been equal before.
        since: for each name that differs now, the difference with which that began.
        times: by name, how often it differed, and how often it was compared.
    """

    shared: set[str] = field(default_factory=set)
    equal: set[str] = field(default_factory=set)
    first: dict[str, Difference] = field(default_factory=dict)
    parted: dict[str, Difference] = field(default_factory=dict)
    since: dict[str, Difference] = field(default_factory=dict)
    times: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))

    def note(self, name: str, difference: Difference | None) -> None:
        """Add the comparison of the next step for a name; `difference` is None where the values are equal.

        It is counted in `times`. A difference is kept in `first`, in `since` until a step is equal again, and in
        `parted` if the comparison before was equal; a name that is equal in its first comparison is added to `shared`.
        """
        self.times[1][name] += 1
        if difference is None:
            self.equal.add(name)
            self.since.pop(name, None)
            if self.times[1][name] == 1:
                self.shared.add(name)
            return
        self.times[0][name] += 1
        for held in (self.first, self.since, *([self.parted] if name in self.equal else ())):
            held.setdefault(name, difference)
        self.equal.discard(name)


@dataclass
class Gathered:
    """Base of what rules about ranks gather, one step after the other."""

    ranks: Ranks

    def step(self, now: AlignedStep) -> None:
        """Take in the next step that all ranks have; called for each, in order. Does nothing in the base."""


T = TypeVar("T", bound=Gathered)


@dataclass
class Ranks:
    """The ranks of a run, and everything gathered of their common steps.

    Attributes:
        run: the run.
        numbers: ranks that were to record steps, the lowest first.
        steps: the steps that all of them have.
        gathered: what was gathered of these steps, in the order in which it takes them in.
    """

    run: Run
    numbers: tuple[int, ...]
    steps: list[int]
    gathered: list[Gathered] = field(default_factory=list)

    def of(self, kind: type[T]) -> T:
        """The instance of the class `kind` among `gathered`."""
        return next(held for held in self.gathered if isinstance(held, kind))

    @cached_property
    def readers(self) -> dict[int, RankReader]:
        """The reader of each rank, by rank."""
        return {rank: self.run.rank(rank) for rank in self.numbers}

    @cached_property
    def whole(self) -> WholeReader:
        """All ranks as one reader, for common site numbers."""
        return WholeReader(str(self.run.path), [*self.readers.values()], stages=self.run.stages)

    @cached_property
    def sites(self) -> list[Site]:
        """Each site, by common number."""
        return [site for site, _ in self.whole.sites]

    @cached_property
    def adding_up(self) -> dict[str, list[int]]:
        """By FQN of a bias or embedding weight, the numbers of the sites of its module's output gradients.

        The elements of the parameter's gradient add up to those of these output gradients. Only parameters with a
        gradient on record, of modules known to add a bias to all of their output.
        """
        adding = adding_up(self.whole.sites, _SUMMED)
        return {self.sites[number].fqn: outputs for number, outputs in adding.items()}

    @cached_property
    def groups(self) -> list[frozenset[int]]:
        """Data-parallel groups of ranks, one for each rank whose manifest names one; equal ones come several times."""
        said = (self.run.manifests.get(rank, {}).get("data_parallel") for rank in self.numbers)
        groups = (group for group in said if group and isinstance(group, list))
        return [frozenset(rank for rank in group if type(rank) is int) for group in groups]

    @cached_property
    def has_parts(self) -> bool:
        """Whether any rank has a layout with a part (a sharded tensor)."""
        return any(layout.part is not None for reader in self.readers.values() for layout in reader.layouts)


class AlignedStep:
    """One step of all ranks.

    Attributes:
        sites: by number; see `Ranks`.
        rows: of each site that any rank recorded, each rank's row.
    """

    def __init__(self, step: int, ranks: Ranks, batches: Mapping[int, StepBatch]) -> None:
        """Put the ranks' rows together by site, now; `batches` are the records of the step by rank."""
        self.step, self.batches, self.sites, self._readers = step, batches, ranks.sites, ranks.readers
        rows: dict[int, dict[int, int]] = {}
        for (rank, batch), numbers in zip(batches.items(), ranks.whole.site_numbers, strict=True):
            for row, number in enumerate(numbers[batch.site].tolist()):
                rows.setdefault(number, {})[rank] = row
        self.rows: Mapping[int, Rows] = rows
        self._by_kind: dict[tuple[Kind, Phase], list[int]] = {}
        for number in rows:
            site = self.sites[number]
            self._by_kind.setdefault((site.kind, site.phase), []).append(number)

    def of(self, kind: Kind, *phases: Phase) -> list[int]:
        """Sites of a kind that any rank recorded, in some phases (all for none), by their lowest sequence number."""
        numbers = [n for phase in phases or Phase for n in self._by_kind.get((kind, phase), ())]
        rows = self.rows
        return sorted(numbers, key=lambda n: min(int(self.batches[at].sequence[row]) for at, row in rows[n].items()))

    @cached_property
    def calls(self) -> dict[tuple[Kind, str, int], list[int]]:
        """Sites of what modules' calls were given (INPUT) and drew (RNG), by kind, FQN and call."""
        calls: dict[tuple[Kind, str, int], list[int]] = {}
        for number in (*self.of(Kind.INPUT, Phase.FORWARD), *self.of(Kind.RNG, Phase.FORWARD)):
            site = self.sites[number]
            calls.setdefault((site.kind, site.fqn, site.call), []).append(number)
        return calls

    def checksum(self, rank: int, row: int) -> int:
        """Checksum of a rank's record; 0 where it was not observed."""
        return int(self.batches[rank].checksum[row])

    def text(self, rank: int, row: int) -> str:
        """Text of a rank's record, which is its plain value."""
        return self.batches[rank].text[row]

    def layout(self, rank: int, row: int) -> Layout:
        """Layout of a rank's record."""
        return self._readers[rank].layouts[int(self.batches[rank].layout[row])]

    def status(self, rank: int, row: int) -> Status:
        """Status of a rank's record."""
        return Status(int(self.batches[rank].status[row]))

    def stats(self, rank: int, row: int, *names: str) -> NDArray[np.float64]:
        """Statistics of a rank's record, NaN where absent."""
        floats = self.batches[rank].floats
        return np.array([floats[name][row] if name in floats else np.nan for name in names], np.float64)

    def is_whole(self, rank: int, row: int) -> bool:
        """Whether a record was observed and its layout has no part."""
        return self.status(rank, row) is Status.OBSERVED and self.layout(rank, row).part is None

    def numel(self, rank: int, row: int) -> int:
        """Number of elements that the rank holds: of its part, where there is one."""
        layout = self.layout(rank, row)
        return layout.numel if layout.part is None else layout.part.numel

    def values(self, number: int, ranks: Iterable[int]) -> frozenset[object]:
        """Distinct (checksum, part, text) of the site `number` on `ranks`; those without a record are ignored."""
        held = ((rank, self.rows[number][rank]) for rank in ranks if rank in self.rows[number])
        return frozenset((self.checksum(*at), self.layout(*at).part, self.text(*at)) for at in held)

    def total(self, rank: int, row: int) -> NDArray[np.float64]:
        """float64 (2,), the sum of a record's elements and of their absolutes.

        NaN where any element is not finite, or mean or mean of absolutes is unknown.
        """
        counts = self.batches[rank].counts
        odd = any(int(counts[name][row]) != 0 for name in ("nans", "posinfs", "neginfs") if name in counts)
        sums = self.stats(rank, row, "mean", "amean") * self.numel(rank, row)
        return np.where(odd or not np.isfinite(sums).all(), np.nan, sums)

    def difference(self, rows: Rows, value: Callable[[AlignedStep, int, int], object] | None) -> Difference | None:
        """How ranks' records of one site differ from the lowest rank's; None where all are equal, or there are none.

        Distance and scale are those of the first rank that differs.

        Args:
            rows: the rank's row, by rank.
            value: what is compared, given this step, a rank and its row; None for the checksum, whose difference also
                has a distance.
        """
        values = {rank: (value or AlignedStep.checksum)(self, rank, rows[rank]) for rank in sorted(rows)}
        base = min(values, default=0)
        others = tuple(rank for rank in values if values[rank] != values[base])
        if not others:
            return None
        if value is not None:
            words = "; ".join(f"rank {rank}: {said}" for rank, said in values.items())
            return Difference(self.step, others, base, words=f" ({words})")
        single = self.layout(base, rows[base]).numel < 2
        return Difference(self.step, others, base, *self._distance(base, others[0], rows), single)

    def _distance(self, base: int, other: int, rows: Rows) -> tuple[float, float]:
        """(relative L2 distance, scale) of the records of two ranks, by sketches; both NaN without sketches or norms.

        The distance is relative to the larger norm, and NaN where that is 0. Scale is NaN where neither is a multiple
        of the other, and for records of one element.
        """
        both = (base, rows[base]), (other, rows[other])
        mean, var = np.array([self.stats(*at, "mean", "var") for at in both]).T
        sizes = l2_norm(mean, var, np.array([self.layout(*at).numel for at in both], np.float64))
        x, y = (None if (held := self.batches[rank].sketch) is None else held[row] for rank, row in both)
        if x is None or y is None or np.isnan(sizes).all():
            return np.nan, np.nan
        scale, rest = scale_between(x, y)
        multiple = self.layout(*both[0]).numel > 1 and abs(scale) > 0 and rest < _MULTIPLE  # one element always is
        distance = np.linalg.norm(x.astype(np.float64) - y) / max(sizes) if max(sizes) else np.nan
        return float(distance), scale if multiple else np.nan
