"""What ranks share out by samples, compared by its samples; and what two splits of a batch have other amounts of.

Of values that differ from rank to rank only extrema and means are known, and two orders of the tokens of a batch have
the same. Where both runs have the sum of the checksums of all samples (batches always, activations in the first step),
the ranks' sums add up to one that depends neither on the order of samples nor on who has them: equal sums are equal
samples. Where both kept each sample's checksum (`--per-sample`), these are compared as a bag, so that it is known how
many are the same.

A loader that is asked for batches of later steps gives other batches in a step than the step uses: what goes into the
model is compared instead. Samples that are padded to the longest of their microbatch have other amounts of padding:
what is as long as they are has other elements, and losses and gradients say whether that changed anything.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.closeup import samples_of
from introspect_cli.compare.terms.sites import Ids, Mask, kind_code, phase_code
from introspect_cli.compare.terms.table import ABSENT, NOT_SEEN, Because, Table
from introspect_cli.records import Joined, Kind, Layout, Phase, Status
from introspect_cli.store.ranks.whole_reader import Reader, WholeReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.join.steps import Sides
    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.read.run import Run


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
        one, two = (_amounts(batch, of_run, layouts)[0].tolist() for batch, of_run, layouts in sides)
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
        lines = [
            f"{name} was asked for batches ahead of their steps, so the batches of a step are not those it uses: the "
            "model's inputs are compared instead."
            for name in sorted(self.ahead)
        ]
        if self.padded:
            lines.append(
                "Samples are padded to the longest of their microbatch, so values of that length have different "
                "elements in each run and are not compared; losses, gradients and parameters are."
            )
        return lines


def _amounts(batch: StepBatch, rows: Ids, layouts: Sequence[Layout]) -> tuple[Ids, Ids]:
    """Samples and elements of each row; -1 where equal values of several calls stand for one, or for several."""
    numbers = batch.layout[rows].tolist()
    samples = np.array([layouts[number].shape[0] if layouts[number].shape else -1 for number in numbers], np.int64)
    elements = np.array([layouts[number].numel for number in numbers], np.int64)
    if batch.elements is None or batch.calls is None:
        return samples, elements
    together = np.asarray(batch.elements)[rows]
    alike = (together < 0) & (np.asarray(batch.calls)[rows] > 1)
    return np.where(alike, -1, samples), np.where(together >= 0, together, elements)


SAME, OTHER, UNKNOWN = range(3)


class SharedOut:
    """Compares samples, where both runs have their sum, or kept each."""

    def __init__(self, sides: Sides) -> None:
        self._readers = sides.a, sides.b
        self._runs = sides.tensors.a, sides.tensors.b
        self._each = all(manifest.get("options", {}).get("per_sample") is True for manifest in sides.manifests)

    def sameness(self, pair: Table) -> Ids:
        """Of each differing row, whether its samples are the same, others, or not known."""
        out = np.full(len(pair.rows_a), UNKNOWN, np.int64)
        shared = _shared(pair.a)[pair.rows_a] | _shared(pair.b)[pair.rows_b]
        if not self._each:
            shared &= np.isin(pair.rows_a, list(pair.a.samples)) & np.isin(pair.rows_b, list(pair.b.samples))
        for at in np.flatnonzero(shared).tolist():
            out[at] = self.sameness_of(pair, int(pair.rows_a[at]), int(pair.rows_b[at]))
        return out

    def sameness_of(self, pair: Table, row_a: int, row_b: int) -> int:
        """Whether the samples of a record of both runs are the same, others, or not known."""
        sums = pair.a.samples.get(row_a), pair.b.samples.get(row_b)
        if None not in sums and self._alike(pair, row_a, row_b):
            return SAME if sums[0] == sums[1] else OTHER
        bags = self.bags(pair, row_a, row_b)
        return UNKNOWN if bags is None else SAME if bags[0] == bags[1] else OTHER

    def _alike(self, pair: Table, row_a: int, row_b: int) -> bool:
        """Whether both have as many samples, of one shape and type."""
        rows = zip(self._readers, (pair.a, pair.b), (row_a, row_b), strict=True)
        one, two = (reader.layouts[int(batch.layout[row])] for reader, batch, row in rows)
        return bool(one.shape) and (one.shape, one.dtype) == (two.shape, two.dtype)

    def bags(self, pair: Table, row_a: int, row_b: int) -> tuple[Counter[int], Counter[int]] | None:
        """The samples of both sides, by checksum; None where not all were kept, or there are other numbers of them."""
        if not self._each:
            return None
        both = []
        sides = zip(self._runs, self._readers, (pair.a, pair.b), (pair.step, pair.step_b), (row_a, row_b), strict=True)
        for run, reader, batch, step, row in sides:
            bag = _bag(run, reader, batch, step, row)
            if bag is None:
                return None
            both.append(bag)
        one, two = both
        return (one, two) if one.total() == two.total() else None


def _shared(batch: StepBatch) -> Mask:
    return np.zeros(len(batch), np.bool_) if batch.how is None else np.asarray(batch.how) == Joined.GATHERED


def _bag(run: Run, reader: Reader, batch: StepBatch, step: int, row: int) -> Counter[int] | None:
    """The samples of one record, of all ranks that have some of it; equal tensors are copies and count once."""
    site = int(batch.site[row])
    if isinstance(reader, WholeReader):
        values = reader.values_of(step, site)
    else:
        seen = not reader.is_whole or batch.status[row] == Status.OBSERVED
        values = {int(batch.checksum[row]): reader.layouts[int(batch.layout[row])].shape if seen else ()}
    out: Counter[int] = Counter()
    for checksum, shape in values.items():
        samples = samples_of(run, checksum, shape[0]) if shape else None
        if samples is None:
            return None
        out.update(samples[0].tolist())
    return out


def shares(reader: Reader) -> float:
    """Into how many shares of its samples ranks cut a batch: stages of a pipeline are given the same ones."""
    stages = reader.stages.values() if isinstance(reader, WholeReader) else ()
    return reader.many / max((each.of / max(len(each.roots), 1) for each in stages), default=1)
