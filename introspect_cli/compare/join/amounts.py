"""What two splits of a batch have other amounts of, so that it cannot be compared, and means nothing.

A loader that is asked for batches of later steps gives other batches in a step than the step uses: what goes into the
model is compared instead. Samples that are padded to the longest of their microbatch have other amounts of padding:
what is as long as they are has other elements, and losses and gradients say whether that changed anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.sites import Ids, Mask, kind_code, phase_code
from introspect_cli.compare.table import ABSENT, NOT_SEEN, Because, Table
from introspect_cli.records import Kind, Layout, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.store.batch import StepBatch

_FLOWING = [kind_code(kind) for kind in (Kind.BATCH, Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)]


class Amounts:
    """Compares amounts, and remembers which loaders are asked for batches ahead.

    Attributes:
        ahead: names of those loaders.
        padded: whether samples are padded to another length.
    """

    def __init__(self, layouts: tuple[Sequence[Layout], Sequence[Layout]]) -> None:
        """Take the layouts of both runs, to which a step may add."""
        self._layouts = layouts
        self.ahead: set[str] = set()
        self.padded = False

    def without(self, table: Table) -> Table:
        """The table in which what has other amounts is absent."""
        if not np.isin(table.alignment.kind[table.site[table.diverging]], _FLOWING).any():
            return table
        alignment, rows = table.alignment, table.differing
        kinds = alignment.kind[table.site]
        inputs = (kinds == kind_code(Kind.INPUT)) & (alignment.phase[table.site] == phase_code(Phase.FORWARD))
        given = inputs & np.array(["." not in alignment.fqn[number] for number in table.site.tolist()], np.bool_)
        batches = (kinds == kind_code(Kind.BATCH)) & (alignment.phase[table.site] == phase_code(Phase.DATA))
        samples, elements = self._differ(table)
        used = self._samples_of(table, np.flatnonzero(given & (table.row_a >= 0) & (table.row_b >= 0)))
        for place, row in enumerate(rows.tolist()):
            if batches[row] and samples[place] and not (used and self._samples_of(table, rows[[place]]) <= used):
                self.ahead.add(alignment.fqn[table.site[row]])
        named = np.array([alignment.fqn[number] in self.ahead for number in table.site.tolist()], np.bool_)
        ahead = batches & named & table.diverging
        padded = np.isin(kinds[rows], _FLOWING) & elements & ~ahead[rows]
        lead = batches[rows] | given[rows]
        if not (padded & ~samples & lead).any() or (padded & samples & given[rows]).any():
            padded[:] = False
        self.padded |= bool(padded.any())
        table = table.marked(ahead, ABSENT if given.any() else NOT_SEEN, Because.AHEAD)
        return table.marked(rows[padded], ABSENT, Because.PADDED)

    def _samples_of(self, table: Table, rows: Ids) -> set[tuple[int, int]]:
        """How many samples the runs have of some rows."""
        sides = zip((table.a, table.b), (table.row_a[rows], table.row_b[rows]), self._layouts, strict=True)
        one, two = (_amounts(batch, own, layouts)[0].tolist() for batch, own, layouts in sides)
        return set(zip(one, two, strict=True))

    def _differ(self, table: Table) -> tuple[Mask, Mask]:
        """Of each differing row, whether the runs have other numbers of samples, and of elements."""
        one, two = (
            _amounts(batch, rows, layouts)
            for batch, rows, layouts in zip(
                (table.a, table.b), (table.rows_a, table.rows_b), self._layouts, strict=True
            )
        )
        both = (one[0] >= 0) & (two[0] >= 0)
        return np.asarray(both & (one[0] != two[0])), np.asarray(both & (one[1] != two[1]))

    def notes(self) -> list[str]:
        """What to say of them."""
        found = [
            f"{name} was asked for batches of later steps: those of a step are not what it uses, so what goes into the "
            "model is compared in their place."
            for name in sorted(self.ahead)
        ]
        if self.padded:
            found.append(
                "Samples are padded to the longest of their microbatch, so that what is as long as they are has other "
                "elements in each run and is not compared: losses, gradients and parameters are."
            )
        return found


def _amounts(batch: StepBatch, rows: Ids, layouts: Sequence[Layout]) -> tuple[Ids, Ids]:
    """Samples and elements of each row; -1 where equal values of several calls stand for one, or for several."""
    numbers = np.asarray(batch.layout)[rows].tolist()
    samples = np.array([layouts[number].shape[0] if layouts[number].shape else -1 for number in numbers], np.int64)
    elements = np.array([layouts[number].numel for number in numbers], np.int64)
    if batch.elements is None or batch.calls is None:
        return samples, elements
    together = np.asarray(batch.elements)[rows]
    alike = (together < 0) & (np.asarray(batch.calls)[rows] > 1)
    return np.where(alike, -1, samples), np.where(together >= 0, together, elements)
