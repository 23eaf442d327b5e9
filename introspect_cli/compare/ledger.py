"""One step of a run under the compared names: tensors, batches, random states and numbers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.watched import STATE_KINDS
from introspect_cli.records import Kind, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from introspect_cli.compare.table import Columns
    from introspect_cli.records import Layout
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.reader import Reader


TENSORS = (Kind.PARAM, Kind.BUFFER)
"""Kinds of the tensors that a model holds."""

Tensor = tuple[int, str, str]
"""Kind code, FQN and path of a parameter, a buffer or an optimizer's state."""


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

    def later(self, by: int) -> At:
        """The same rank `by` steps later, on record or not; nothing is read."""
        return replace(self, step=self.step + by)

    @property
    def recorded(self) -> bool:
        """Whether the step is on record."""
        return self.step in self.reader

    @cached_property
    def batch(self) -> StepBatch:
        """The step's records, read from the store at the first access; the step must be on record."""
        return self.reader.read(self.step)

    def layout(self, row: int) -> Layout:
        """Shape, dtype and part of the record in a row of `batch`."""
        return self.reader.layouts[int(self.batch.layout[row])]

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


_VALUE = np.dtype([("checksum", np.uint64), ("step", np.int64), ("row", np.int64)])


def first_sites(sites: Columns) -> dict[Tensor, int]:
    """The number of the first site of each parameter, buffer and optimizer state."""
    return {tensor_of(sites, number): number for number in np.flatnonzero(sites.are(*STATE_KINDS))[::-1].tolist()}


def ledgers(reader: Reader, sites: Columns, steps: Sequence[int] | None = None) -> Iterator[tuple[Moment, Any]]:
    """Each moment at which tensors were recorded, with the rank's ledger then; reads the steps one after the other.

    A ledger is a structured array, an element per site, with the last recorded value of each tensor at its first site:
    `checksum` (0 where none was recorded yet), and the `step` of the record and its `row` there. It is one object,
    which later moments change. Of a step, before it comes first, then after it. Records without a checksum change
    nothing; of several of one, the last counts.

    Args:
        reader: of the rank.
        sites: the rank's sites.
        steps: those to read, in order; None for all.
    """
    places, place, now = first_sites(sites), np.arange(len(sites)), np.zeros(len(sites), _VALUE)
    states = np.flatnonzero(sites.are(*STATE_KINDS))
    place[states] = [places[tensor_of(sites, number)] for number in states.tolist()]
    masks = {when: sites.are(*STATE_KINDS, phase) for phase, when in _MOMENTS.items()}
    for step in np.asarray(reader.entries["step"]).tolist() if steps is None else steps:
        batch = reader.read(step)
        for when, wanted in masks.items():
            rows = np.flatnonzero(wanted[batch.site] & (batch.checksum != 0))
            if len(rows):
                rows = rows[np.argsort(batch.sequence[rows], kind="stable")]
                at = place[batch.site[rows]]
                now["checksum"][at], now["step"][at], now["row"][at] = batch.checksum[rows], step, rows
                yield (step, when), now
