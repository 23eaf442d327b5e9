"""One step of a run under the compared names: tensors, batches, random states and numbers."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.table import PHASES, Columns, phase_code
from introspect_cli.compare.watched import STATE_KINDS
from introspect_cli.records import DRAWN_BEFORE, Kind, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.reader import Reader


Tensor = tuple[int, str, str]
"""Kind code, FQN and path of a parameter, a buffer or an optimizer's state."""

States = dict[tuple[Phase, int, str, str], int]
"""Checksums of one generator's states, by phase, call, module and path."""


@dataclass(frozen=True)
class At:
    """One step of a rank, read when first asked; a step that was not recorded has no rows.

    Attributes:
        reader: of the rank.
        sites: the rank's sites, names as they are compared.
        step: the step, as the run numbers it.
    """

    reader: Reader
    sites: Columns
    step: int

    @classmethod
    def first(cls, reader: Reader, sites: Columns) -> At:
        """`At` the first recorded step of a rank; step -1 where there is none."""
        return cls(reader, sites, int(reader.entry(0).step) if len(reader) else -1)

    def to(self, step: int) -> At:
        """The same rank at step `step`, as the run numbers it, on record or not; nothing is read."""
        return replace(self, step=step)

    @property
    def recorded(self) -> bool:
        """Whether the step is on record."""
        return self.step in self.reader

    @cached_property
    def batch(self) -> StepBatch:
        """The step's records, read from the store at the first access; the step must be on record."""
        return self.reader.read(self.step)

    def rows(self, kinds: Iterable[Kind], phase: Phase | None = None) -> list[tuple[int, int]]:
        """(row in `batch`, number of the site) of records of these kinds, in order of recording; [] without the step.

        Args:
            kinds: kinds that are wanted.
            phase: the phase that is wanted; None for all.
        """
        if not self.recorded:
            return []
        numbers = self.batch.site
        rows = np.flatnonzero(self.sites.are(*kinds, *([] if phase is None else [phase]))[numbers])
        rows = rows[np.argsort(self.batch.sequence[rows], kind="stable")]
        return list(zip(rows.tolist(), numbers[rows].tolist(), strict=True))

    def tensor_rows(self, phase: Phase | None = None) -> dict[Tensor, int]:
        """Row in `batch` of each parameter, buffer and optimizer state.

        Of several records of one, the first where `phase` is START, else the last.

        Args:
            phase: the phase that is wanted; None for all.
        """
        rows = self.rows(STATE_KINDS, phase)
        ordered = reversed(rows) if phase is Phase.START else rows
        return {tensor_of(self.sites, number): row for row, number in ordered}

    def tensors(self, phase: Phase | None = None) -> dict[Tensor, int]:
        """Checksum of each parameter, buffer and optimizer state in this step; NOT_OBSERVED ones are left out.

        Of several records of one, the first where `phase` is START, else the last. Empty without the step.
        """
        rows, unseen = self.tensor_rows(phase).items(), Status.NOT_OBSERVED
        return {tensor: int(self.batch.checksum[row]) for tensor, row in rows if self.batch.status[row] != unseen}

    def random_states(self) -> dict[str, tuple[States, States]]:
        """By generator, its state as the step begins, and those of draws in the step.

        States recorded before draws that happen between modules are left out.
        """
        sites, states = self.sites, defaultdict[str, tuple[States, States]](lambda: ({}, {}))
        for row, number in self.rows([Kind.RNG]):
            phase, path, fqn = PHASES[sites.phase[number]], sites.path[number], sites.fqn[number]
            if not path.endswith(DRAWN_BEFORE):  # the later run may have some to get to where it goes on
                of_draws = states[path or fqn][phase is not Phase.START]
                of_draws[phase, int(sites.call[number]), path and fqn, ""] = int(self.batch.checksum[row])
        return states

    def numbers(self, kind: Kind, phase: Phase) -> list[tuple[tuple[str, str], float | None]]:
        """((FQN, path), number) of records of a kind and phase in this step, in order of recording.

        The number is that of a text, else a tensor's mean; None where it is not known.
        """
        sites, rows = self.sites, self.rows([kind], phase)
        return [((sites.fqn[number], sites.path[number]), _scalar(self.batch, row)) for row, number in rows]


def tensor_of(sites: Any, number: int) -> Tensor:
    """(kind code, FQN, path) of site `number`, in a table of sites as columns."""
    return int(sites.kind[number]), sites.fqn[number], sites.path[number]


def _scalar(batch: StepBatch, row: int) -> float | None:
    """The number that a record's text is, else the mean of its tensor; None where it has neither, or NaN.

    A text that is no number makes it None.
    """
    with suppress(ValueError, KeyError):
        value = float(batch.text[row] or batch.floats["mean"][row])
        return None if np.isnan(value) else value
    return None


# --- over time

Moment = tuple[int, str]
"""A step, and `before` or `after` it."""

_MOMENTS = {Phase.START: "before", Phase.OPTIMIZER: "after"}


@dataclass(eq=False)
class Ledger:
    """The last recorded value of each tensor of a rank at a moment, as arrays with an element per tensor.

    Attributes:
        tensors: kind, FQN and path of each.
        checksum: uint64, 0 where none was recorded yet.
        step: int64, number of the step of the record.
        row: int64, its row in that step.
    """

    tensors: list[Tensor]
    checksum: Any
    step: Any
    row: Any


def ledgers(reader: Reader, sites: Columns, steps: Sequence[int] | None = None) -> Iterator[tuple[Moment, Ledger]]:
    """Each moment at which tensors were recorded, with the rank's ledger then; reads the steps one after the other.

    Of a step, before it first, then after it. Records without a checksum change nothing; of several of one, the last
    counts. The ledger is one object, which later moments change.

    Args:
        reader: of the rank.
        sites: the rank's sites.
        steps: those to read, in order; None for all.
    """
    wanted = np.flatnonzero(sites.are(*STATE_KINDS)).tolist()
    numbers: dict[Tensor, int] = {}
    of_site = np.full(len(sites), -1)
    of_site[wanted] = [numbers.setdefault(tensor_of(sites, number), len(numbers)) for number in wanted]
    blank = np.zeros(len(numbers), np.int64)
    now = Ledger(list(numbers), np.zeros(len(numbers), np.uint64), blank, blank.copy())
    for step in np.asarray(reader.entries["step"]).tolist() if steps is None else steps:
        batch = reader.read(step)
        site, checksums = batch.site.astype(np.int64), batch.checksum
        for phase, when in _MOMENTS.items():
            rows = np.flatnonzero((of_site[site] >= 0) & (sites.phase[site] == phase_code(phase)) & (checksums != 0))
            if len(rows):
                rows = rows[np.argsort(batch.sequence[rows], kind="stable")]
                ids = of_site[site[rows]]
                now.checksum[ids], now.step[ids], now.row[ids] = checksums[rows], step, rows
                yield (step, when), now
