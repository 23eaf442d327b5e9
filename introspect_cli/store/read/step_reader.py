"""What can be read step by step: one rank, or all ranks of a run as one.

Who compares, checks or shows a run need not know which of the two it reads.

Of statistics, those that follow from others need no bytes of their own: they are worked out here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import Joined, Record, Status, Summary
from introspect_cli.statistics import DERIVED_STATS
from introspect_cli.store.format.log import StepEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from introspect_cli.labels import Labels
    from introspect_cli.records import Layout, ModuleInfo
    from introspect_cli.store.format.batch import Array, StepBatch
    from introspect_cli.store.format.log import Entries
    from introspect_cli.store.read.name_tables import SiteTable


_MEASURED = (Status.OBSERVED, Status.PARTIAL)
_MOST_ELEMENTS = (1 << 63) - 1


class Reader(ABC):
    """Steps of one rank, or of several as one.

    Attributes:
        rank: its number; of several, the lowest.
        path: where it is, for messages.
        entries: structured array of `log.ENTRY`, one a step: `step`, `rows`, `digest`, `chain`, ...
        rank_count: how many ranks it stands for.
        running: whether a process was still writing any of them.
        ended: whether all of them were closed properly.
        thinned: in words which steps were recorded and then dropped.
        readers: a `RankReader` of each rank.
    """

    rank: int
    path: str
    entries: Entries
    rank_count: int
    running: bool
    ended: bool
    thinned: tuple[str, ...]
    readers: Sequence[Any]

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether each record may be put together from the records of several ranks."""

    @property
    @abstractmethod
    def sites(self) -> SiteTable:
        """All sites, by number."""

    @property
    @abstractmethod
    def layouts(self) -> list[Layout]:
        """All layouts, by number."""

    @property
    @abstractmethod
    def modules(self) -> list[ModuleInfo]:
        """The module tree, one row per module: its first."""

    @property
    @abstractmethod
    def module_rows(self) -> list[ModuleInfo]:
        """All rows of modules in order: a module that changed is there again, with the step from which that holds."""

    @property
    @abstractmethod
    def labels(self) -> Mapping[int, Labels]:
        """The framework's labels of each step, by step; steps without any are left out."""

    @abstractmethod
    def read_row(self, row: int) -> StepBatch:
        """All records of the `row`-th step."""

    @abstractmethod
    def rows_in(self, rows: Array) -> int:
        """Number of records in some steps (positions among the entries)."""

    def read(self, step: int) -> StepBatch:
        """All records of a step.

        Raises:
            KeyError: the step was not recorded.
            StoreError: its bytes are damaged.
        """
        return self.read_row(self.row_of(step))

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.entries)

    @cached_property
    def steps(self) -> tuple[StepEntry, ...]:
        """All steps, in order. For many thousands, use `entries`."""
        return tuple(self.entry(row) for row in range(len(self.entries)))

    def entry(self, row: int) -> StepEntry:
        """The `row`-th step's entry."""
        entry = self.entries[row]
        step, offset, length, rows = (int(entry[name]) for name in ("step", "offset", "length", "rows"))
        return StepEntry(step, offset, length, rows, entry["digest"].tobytes(), entry["chain"].tobytes())

    @property
    def last_step(self) -> int | None:
        """Number of the last step that is whole; None where there is none."""
        return int(self.entries["step"][-1]) if len(self.entries) else None

    def row_of(self, step: int) -> int:
        """Position of `step` among the entries.

        Raises:
            KeyError: it was not recorded.
        """
        row = int(np.searchsorted(self.entries["step"], step))
        if row == len(self.entries) or self.entries["step"][row] != step:
            raise KeyError(step)
        return row

    def __contains__(self, step: int) -> bool:
        """Whether the step with this number was recorded."""
        try:
            self.row_of(step)
        except KeyError:
            return False
        return True

    def record(self, batch: StepBatch, row: int, step: int) -> Record:
        """One row as a record, with derived statistics filled in; the sketch is () where nothing was measured."""
        site, info = self.sites[int(batch.site[row])]
        layout = self.layouts[int(batch.layout[row])]
        stats = record_stats(batch, row, self._numels)
        status = Status(int(batch.status[row]))
        sketch: tuple[float, ...] = ()
        if batch.sketch is not None and status in _MEASURED:
            sketch = tuple(batch.sketch[row].tolist())
        joined = Joined.AS_RECORDED if batch.how is None else Joined(int(batch.how[row]))
        ranks = 0 if batch.ranks is None else int(batch.ranks[row])
        summary = Summary(status, layout, int(batch.checksum[row]), stats, sketch, batch.text[row], joined, ranks)
        given = batch.given.row(row) if batch.given is not None else None
        return Record(step, self.rank, int(batch.sequence[row]), site, info, summary, given)

    def _numels(self, layouts: Array) -> list[int]:
        return [min(self.layouts[layout].numel, _MOST_ELEMENTS) for layout in layouts.tolist()]

    def records(self, step: int) -> Iterator[Record]:
        """All records of a step, in the order they were made."""
        batch = self.read(step)
        return (self.record(batch, int(row), step) for row in np.argsort(batch.sequence, kind="stable"))


def _infs(c: Mapping[str, Array]) -> Array:
    return np.where(c["posinfs"] >= 0, c["posinfs"] + c["neginfs"], np.nan)


def l2_norm(mean: Array, var: Array, finite: Array) -> Array:
    """The L2 norm from mean, variance and the number of finite elements; non-finite elements are ignored."""
    return np.asarray(np.sqrt((var + mean * mean) * np.maximum(finite, 0)))


FORMULAS: dict[str, Callable[[Mapping[str, Array]], Array]] = {
    "infs": _infs,
    "absmax": lambda c: np.maximum(np.abs(c["min"]), np.abs(c["max"])),
    "absmean": lambda c: np.abs(c["mean"]),
    "uvar": lambda c: np.where(c["n"] > 1, c["var"] * c["n"] / np.maximum(c["n"] - 1, 1), np.nan),
    "std": lambda c: np.sqrt(c["var"]),
    "l2": lambda c: l2_norm(c["mean"], c["var"], c["n"]),
}
"""How each of `DERIVED_STATS` follows from stored columns and `n`, the number of finite elements (moments are stored
without the others); `uvar` by Bessel's correction."""


def derived_stats(counts: Mapping[str, Array], floats: Mapping[str, Array], numel: Array) -> dict[str, Array]:
    """Derived statistics of n records, float64 (n,) by name, NaN where absent or infinite; {} without counts.

    Args:
        counts: int64 (n,) by name, -1 where absent.
        floats: float (n,) by name, NaN where absent.
        numel: int64 (n,), elements of each record's tensor.
    """
    if not counts:
        return {}
    left_out = sum(np.maximum(counts[name], 0) for name in ("nans", "posinfs", "neginfs"))
    columns = {**counts, **floats, "n": (numel - left_out).astype(np.float64)}
    with np.errstate(all="ignore"):
        derived = {name: FORMULAS[name](columns) for name in DERIVED_STATS}
        return {name: np.where(np.isfinite(column), column, np.nan) for name, column in derived.items()}


def record_stats(batch: StepBatch, row: int, numels: Callable[[Array], list[int]]) -> dict[str, float]:
    """All statistics of one row, stored and derived; counts are ints, absent ones are left out.

    Args:
        batch: the step's; what is derived for all its rows is kept in `derived`.
        row: which row.
        numels: gives the number of elements of each of some layouts, by their numbers.
    """
    if not batch.derived:
        numel = np.array(numels(batch.layout), np.int64)
        batch.derived.update(derived_stats(batch.counts, batch.floats, numel))
    out: dict[str, float] = {name: int(column[row]) for name, column in batch.counts.items() if column[row] >= 0}
    for name, column in (*batch.floats.items(), *batch.derived.items()):
        if not math.isnan(value := float(column[row])):
            out[name] = int(value) if name == "infs" else value
    return out
