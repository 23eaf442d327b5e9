"""What ranks share out by samples, compared by its samples.

Of values that differ from rank to rank only extrema and means are known, and two orders of the tokens of a batch have
the same. Where both runs have the sum of the checksums of all samples (batches always, activations in the first step),
the ranks' sums add up to one that depends neither on the order of samples nor on who has them: equal sums are equal
samples. Where both kept each sample's checksum (`--per-sample`), these are compared as a bag, so that it is known how
many are the same.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.closeup import samples_of
from introspect_cli.records import Joined, Status
from introspect_cli.store.ranks.whole_reader import Reader, WholeReader

if TYPE_CHECKING:
    from introspect_cli.compare.join.steps import Sides
    from introspect_cli.compare.terms.sites import Ids, Mask
    from introspect_cli.compare.terms.table import Table
    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.read.run import Run


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
