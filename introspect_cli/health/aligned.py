"""All ranks of a run side by side, step by step: the table that rules about ranks look at.

Each rank numbers its sites and layouts, and not all of them record the same. Here a site has one number, and
beside it stands the row of each rank that recorded it. Which of these records ought to be equal is written nowhere.
Each noun that rules about ranks ask for (copies of parameters, outputs, collectives, ...) is a class that takes in one
aligned step after the other, and its file has the rules that ask for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from introspect_cli.records import Kind, Layout, Phase, Status
from introspect_cli.store.format.batch import StepBatch, fitted
from introspect_cli.store.ranks.whole_reader import WholeReader
from introspect_cli.store.read.step_reader import l2_norm

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from introspect_cli.store.read.rank_reader import RankReader
    from introspect_cli.store.read.run import Run

    Rows = Mapping[int, int]  # rank -> its row

_MULTIPLE = 1e-5
_BIAS = re.compile(r"(Linear|(Layer|Group|Batch|Instance|SyncBatch)Norm\w*|Conv\d?d|ConvTranspose\d?d)$")


class SiteName(NamedTuple):
    """What a site is called, whatever the rank."""

    kind: str
    phase: str
    fqn: str
    path: str
    call: int


@dataclass(frozen=True)
class Difference:
    """Records that ought to be equal on some ranks and are not.

    Attributes:
        rank: the first rank that differs from `base`.
        others: all ranks that do.
        base: the lowest of the ranks that were compared.
        distance: L2 distance over the larger norm, from sketches; NaN where it is not known.
        scale: how many times the base's the rank's is, where it is a multiple; NaN otherwise.
        single: whether it is one element, of which no multiple tells anything.
    """

    step: int
    rank: int
    others: tuple[int, ...]
    base: int
    distance: float
    scale: float
    single: bool

    @property
    def is_multiple(self) -> bool:
        """Whether one is a multiple of the other."""
        return not np.isnan(self.scale)

    @property
    def size(self) -> str:
        """`0.5 x`, `relative L2 1.4e-03`, or ""."""
        if self.is_multiple and f"{self.scale:.6g}" != "1":
            return f"{self.scale:.6g} x"
        return "" if np.isnan(self.distance) else f"relative L2 {self.distance:.1e}"


class Value(NamedTuple):
    """What is on record of a tensor of one rank; NaN where a statistic is absent.

    Attributes:
        numel: its elements, those of its part where it is one.
        amean: mean of absolute values.
        sketch: float64 (16,); None where there is none.
    """

    rank: int
    checksum: int
    numel: int
    low: float
    high: float
    mean: float
    amean: float
    var: float
    sketch: NDArray[np.float64] | None

    @property
    def total(self) -> float:
        """The sum of its elements."""
        return self.mean * self.numel

    @property
    def size(self) -> float:
        """The sum of their absolute values."""
        return self.amean * self.numel

    @property
    def squares(self) -> float:
        """The sum of their squares."""
        return float(l2_norm(np.float64(self.mean), np.float64(self.var), np.float64(self.numel))) ** 2


@dataclass
class Gathered:
    """What rules about ranks ask for, gathered from one step after the other."""

    ranks: Ranks

    def step(self, now: AlignedStep) -> None:
        """Take in the next step."""


T = TypeVar("T", bound=Gathered)


@dataclass
class Ranks:
    """The ranks of a run, and what was gathered of them.

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
        """What one of the classes has gathered so far."""
        gathered = next((held for held in self.gathered if isinstance(held, kind)), None)
        if gathered is None:
            gathered = kind(self)
            self.gathered.append(gathered)
        return gathered

    @cached_property
    def readers(self) -> dict[int, RankReader]:
        """Of each rank."""
        return {rank: self.run.rank(rank) for rank in self.numbers}

    @cached_property
    def whole(self) -> WholeReader:
        """The ranks' readers as one, which numbers their sites alike."""
        return WholeReader(str(self.run.path), [*self.readers.values()], stages=self.run.stages)

    @cached_property
    def sites(self) -> list[SiteName]:
        """All sites by number."""
        sites = self.whole.sites
        names = zip(sites.kind, sites.phase, sites.fqn, sites.path, sites.call.tolist(), strict=True)
        return [SiteName(*name) for name in names]

    @cached_property
    def adding_up(self) -> dict[str, list[int]]:
        """Of parameters whose gradient adds up to that of their module's output, the sites of the latter."""
        classes = {module.fqn: module.module_class for module in self.whole.modules}
        outputs: dict[str, list[int]] = {}
        for number, site in enumerate(self.sites):
            if site.kind == Kind.GRAD_OUTPUT and site.phase == Phase.BACKWARD and not site.path:
                outputs.setdefault(site.fqn, []).append(number)
        adding = {}
        for site in self.sites:
            owner, _, name = site.fqn.rpartition(".")
            biased, looked_up = _BIAS.match(classes.get(owner, "")), classes.get(owner) == "Embedding"
            adds_up = (name == "bias" and biased is not None) or (name == "weight" and looked_up)
            if site.kind == Kind.GRAD and owner in outputs and adds_up:
                adding[site.fqn] = outputs[owner]
        return adding

    @cached_property
    def groups(self) -> list[frozenset[int]]:
        """Ranks between which wrappers share out the samples, as each rank recorded it."""
        groups = [self.run.manifests.get(rank, {}).get("data_parallel") for rank in self.numbers]
        return [
            frozenset(rank for rank in group if type(rank) is int)
            for group in groups
            if group and isinstance(group, list)
        ]

    @cached_property
    def has_parts(self) -> bool:
        """Whether any rank holds parts of tensors."""
        return any(layout.part is not None for reader in self.readers.values() for layout in reader.layouts)

    def take(self, step: int, batches: Mapping[int, StepBatch]) -> None:
        """Hand a step of all ranks to whatever gathers."""
        now = AlignedStep(step, self, batches)
        for gathered in self.gathered:
            gathered.step(now)


class AlignedStep:
    """One step of all ranks.

    Attributes:
        sites: by number; see `Ranks`.
        rows: of each site that any rank recorded, each rank's row.
    """

    def __init__(self, step: int, ranks: Ranks, batches: Mapping[int, StepBatch]) -> None:
        """Put the ranks' rows together by site."""
        self.step, self.batches, self.sites, self._readers = step, batches, ranks.sites, ranks.readers
        rows: dict[int, dict[int, int]] = {}
        for (rank, batch), numbers in zip(batches.items(), ranks.whole.numbers, strict=True):
            for row, number in enumerate(numbers[batch.site].tolist()):
                rows.setdefault(number, {})[rank] = row
        self.rows: Mapping[int, Rows] = rows
        self._by_kind: dict[tuple[str, str], list[int]] = {}
        for number in rows:
            site = self.sites[number]
            self._by_kind.setdefault((site.kind, site.phase), []).append(number)

    def of(self, kind: Kind, *phases: Phase) -> list[int]:
        """Sites of a kind, in some phases; in all where none is named."""
        wanted = phases or tuple(Phase)
        return [number for phase in wanted for number in self._by_kind.get((kind.value, phase.value), ())]

    def in_order(self, *kinds: Kind) -> list[int]:
        """Sites of some kinds in the order in which their first ranks recorded them."""
        return sorted((number for number in self.rows if self.sites[number].kind in kinds), key=self.begun)

    def begun(self, number: int) -> int:
        """Where in the step the first rank recorded a site."""
        return min(int(self.batches[rank].sequence[row]) for rank, row in self.rows[number].items())

    def checksum(self, rank: int, row: int) -> int:
        """Of a rank's record; 0 where it was not observed."""
        return int(self.batches[rank].checksum[row])

    def layout(self, rank: int, row: int) -> Layout:
        """Of a rank's record."""
        return self._readers[rank].layouts[int(self.batches[rank].layout[row])]

    def is_whole(self, rank: int, row: int) -> bool:
        """Whether a rank has all of a tensor, and all of it was seen."""
        return bool(self.batches[rank].status[row] == Status.OBSERVED) and self.layout(rank, row).part is None

    def numel(self, rank: int, row: int) -> int:
        """Elements that a rank holds itself; none of what lies in another rank's part."""
        layout = self.layout(rank, row)
        return layout.numel if layout.part is None else layout.part.numel

    def value(self, rank: int, row: int) -> Value:
        """What a rank's record says of its tensor."""
        batch = self.batches[rank]
        low, high, mean, amean, var = (
            float(batch.floats[name][row]) if name in batch.floats else np.nan
            for name in ("min", "max", "mean", "amean", "var")
        )
        sketch = None if batch.sketch is None else np.asarray(batch.sketch[row], np.float64)
        return Value(rank, self.checksum(rank, row), self.numel(rank, row), low, high, mean, amean, var, sketch)

    def values(self, number: int, ranks: Iterable[int]) -> set[object]:
        """The different values that some ranks, those of them that have one, recorded at a site."""
        rows = self.rows[number]
        return {
            (self.checksum(rank, rows[rank]), self.layout(rank, rows[rank]).part, self.batches[rank].text[rows[rank]])
            for rank in ranks
            if rank in rows
        }

    def is_equal(self, number: int) -> bool:
        """Whether all ranks that recorded a site recorded one value."""
        return len(self.values(number, self.rows[number])) == 1

    def difference(self, rows: Rows) -> Difference | None:
        """How records of some ranks differ; None where all checksums are equal."""
        base, *rest = sorted(rows)
        others = [rank for rank in rest if self.checksum(rank, rows[rank]) != self.checksum(base, rows[base])]
        if not others:
            return None
        single = self.layout(base, rows[base]).numel < 2
        distance, scale = self._distance((base, rows[base]), (others[0], rows[others[0]]))
        return Difference(self.step, others[0], tuple(others), base, distance, scale, single)

    def _distance(self, one: tuple[int, int], two: tuple[int, int]) -> tuple[float, float]:
        """The distance of two records, and by which factor they differ; see `Difference`."""
        sketches = [self.batches[rank].sketch for rank, _ in (one, two)]
        if sketches[0] is None or sketches[1] is None or "mean" not in self.batches[one[0]].floats:
            return np.nan, np.nan
        x, y = sketches[0][one[1]].astype(np.float64), sketches[1][two[1]].astype(np.float64)
        sizes = []
        for rank, row in (one, two):
            floats = self.batches[rank].floats
            numel = np.float64(self.layout(rank, row).numel)
            sizes.append(float(l2_norm(floats["mean"][row], floats["var"][row], numel)))
        larger = max(sizes)
        scale, rest = fitted(x, y)
        several = self.layout(*one).numel > 1  # a single one is always a multiple
        multiple = several and abs(scale) > 0 and rest < _MULTIPLE
        return float(np.linalg.norm(x - y) / larger) if larger else np.nan, scale if multiple else np.nan
