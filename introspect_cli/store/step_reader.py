"""What can be read step by step: one rank, or all ranks of a run as one.

Who compares, checks or shows a run need not know which of the two it reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Joined, Record, Status, Summary
from introspect_cli.store.derived import record_stats
from introspect_cli.store.index import StepEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.records import Layout
    from introspect_cli.store.batch import Array, StepBatch
    from introspect_cli.store.index import Entries
    from introspect_cli.store.site_table import SiteTable

_MEASURED = (Status.OBSERVED, Status.PARTIAL)
_MOST_ELEMENTS = (1 << 63) - 1


class StepReader(ABC):
    """Steps of one rank, or of several as one.

    Attributes:
        rank: its number; of several, the lowest.
        path: where it is, for messages.
        entries: structured array of `format.ENTRY`, one a step: `step`, `rows`, `digest`, `chain`, ...
    """

    rank: int
    path: str
    entries: Entries

    @property
    @abstractmethod
    def sites(self) -> SiteTable:
        """All sites, by number."""

    @property
    @abstractmethod
    def layouts(self) -> list[Layout]:
        """All layouts, by number."""

    @abstractmethod
    def read_row(self, row: int) -> StepBatch:
        """All records of the `row`-th step."""

    def ahead(self, rows: Sequence[int]) -> None:  # noqa: B027 -- who reads one rank has nothing to do beforehand
        """Which steps are going to be read, in order, for who puts them together beforehand."""

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
        return StepEntry(
            int(entry["step"]),
            int(entry["offset"]),
            int(entry["length"]),
            int(entry["rows"]),
            entry["digest"].tobytes(),
            entry["chain"].tobytes(),
        )

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
        try:
            self.row_of(step)
        except KeyError:
            return False
        return True

    def record(self, batch: StepBatch, row: int, step: int) -> Record:
        """One row as a record, with derived statistics filled in."""
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
