"""One step of both runs as one table: a row for each record of a, of b, or of both.

A step has thousands of records, so they stand in columns of numpy: the site, the row of either run's records, and what
comparing made of them so far. A pass of a comparison (`passes/`) takes such a table and returns one with other states:
what is known of a pair of records, and by `because`, which pass decided that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from introspect_cli.compare.terms.distance import Floats, Layouts, distances
from introspect_cli.records import Site, Status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from introspect_cli.compare.terms.sites import Alignment, Ids, Mask
    from introspect_cli.store.format.batch import StepBatch

Codes = npt.NDArray[np.int8]

OTHER = {"a": "b", "b": "a"}

ABSENT, EQUAL, WITHIN, DIFFERENT, NOT_SEEN, ONLY_A, ONLY_B, UNUSED = range(8)
"""What is known of a row: nothing that counts (one run alone has it, and the other could not have it), equal, within
tolerance, different, not seen by a run, only in a, or b, different though nothing that rests on it is."""


class Because(IntEnum):
    """The rule that gave a row its state, where anything asks."""

    RECORDS = 0
    """The records themselves, or a rule that nobody asks for."""
    NOT_OBSERVED = 2
    """A run's record says that it saw no value, or too little of it."""
    LISTED = 3
    """The run lists values that were written elsewhere."""
    EVALUATION = 5
    """One run evaluates more often."""
    CUT = 6
    """The other run was stopped within the step, and came to no more of it."""


class Learned(NamedTuple):
    """Knowledge passed from step to step.

    Attributes:
        coarse: the first step that may begin with what was rounded to bfloat16 or float16; None while none may.
        unsettled: parameters whose gradient was seen to be nothing but rounding, each with the step since when, and
            whether that was so of some elements only.
        let_pass: those parameters for which a difference beyond the tolerance was marked WITHIN.
        backward_ratio: ratio of the gradients inside the backward pass of b to those of a, n or 1/n with n whole, where
            ranks or microbatches are put together; None while that was not seen.
        units: how many times larger than those of b outputs of a are, by name, whose gradients are as much smaller.
        flows_back: whether gradients that were chosen are compared by that factor.
    """

    coarse: int | None = None
    unsettled: Mapping[str, tuple[int, bool]] = {}
    let_pass: frozenset[str] = frozenset()
    backward_ratio: float | None = None
    units: Mapping[str, float] = {}
    flows_back: bool = False


class Half(NamedTuple):
    """One run's records of a step.

    Attributes:
        batch: its records, as the store's columns.
        only: rows that the other run should have and has not.
    """

    side: str
    batch: StepBatch
    sites: Ids
    only: Ids


@dataclass(frozen=True, eq=False)
class Table:
    """One step of both runs; n rows.

    Rows that both runs have come first, then those of a alone, then those of b alone.

    Attributes:
        site: int64 (n,), the number of each row's site in the alignment.
        row_a: int64 (n,), the row among a's records; -1 where only b has it.
        row_b: int64 (n,), the row among b's records; -1 where only a has it.
        state: int8 (n,), `EQUAL` and so on.
        because: int8 (n,), which pass decided the state; see `Because`.
        chosen: bool (n,), whether it was selected to be compared.
        cause: bool (n,), whether it diverges but does not count as a divergence (random states, one-sided names).
        left: sites of start values that were copied from the end of the previous step in one run.
    """

    alignment: Alignment
    step: int
    step_b: int
    a: StepBatch
    b: StepBatch
    site: Ids
    row_a: Ids
    row_b: Ids
    state: Codes
    because: Codes
    chosen: Mask
    cause: Mask
    left: Ids

    def __len__(self) -> int:
        return len(self.site)

    # --- other tables

    def marked(self, rows: Ids | Mask, state: int, because: Because = Because.RECORDS) -> Table:
        """A copy where these rows have this `state` and `because`."""
        states, reasons = self.state.copy(), self.because.copy()
        states[rows], reasons[rows] = state, because
        return replace(self, state=states, because=reasons)

    def of(self, rows: Ids | Mask) -> Table:
        """A copy with only these rows, in this order; batches, steps and `left` stay whole."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return replace(self, **columns)

    def keeping(self, rows: Mask) -> Table:
        """A copy in which diverging rows outside of `rows` diverge no more; other rows stay as they are.

        DIFFERENT ones become NOT_SEEN, one-sided ones ABSENT.
        """
        others = self.diverging & ~rows
        if not others.any():
            return self
        states = np.where(self.state == DIFFERENT, NOT_SEEN, ABSENT)
        return replace(self, state=np.where(others, states, self.state).astype(np.int8))

    # --- which rows

    @cached_property
    def diverging(self) -> Mask:
        """Mask of rows whose state is DIFFERENT, ONLY_A or ONLY_B."""
        return np.asarray((self.state == DIFFERENT) | (self.state == ONLY_A) | (self.state == ONLY_B))

    @property
    def diverged(self) -> int:
        """Number of rows that are DIFFERENT, ONLY_A or ONLY_B."""
        return int(self.diverging.sum())

    @cached_property
    def one_sided(self) -> Mask:
        """Mask of rows that only one run has, whatever their state."""
        return np.asarray((self.row_a < 0) | (self.row_b < 0))

    @cached_property
    def differing(self) -> Ids:
        """Indices of the rows whose state is DIFFERENT."""
        return np.flatnonzero(self.state == DIFFERENT)

    @property
    def rows_a(self) -> Ids:
        """Row in a's batch of each DIFFERENT row."""
        return np.asarray(self.row_a[self.differing])

    @property
    def rows_b(self) -> Ids:
        """Row in b's batch of each DIFFERENT row, in the order of `rows_a`."""
        return np.asarray(self.row_b[self.differing])

    @property
    def differing_sites(self) -> Ids:
        """Union number of the site of each DIFFERENT row; one-sided rows are not among them."""
        return np.asarray(self.site[self.differing])

    def distances(self, layouts: tuple[Layouts, Layouts]) -> tuple[Floats, Floats]:
        """(estimated L2 distance, larger of the two L2 norms) of each DIFFERENT row, both float64, as `distances`.

        The distance is NaN where it is unknown.
        """
        return distances(self.a, self.b, self.rows_a, self.rows_b, *layouts)

    @property
    def halves(self) -> tuple[Half, Half]:
        """Records of a and of b, each with the rows that only it has (state ONLY_A, ONLY_B)."""
        return Half("a", self.a, self.sites_a, self.only_a), Half("b", self.b, self.sites_b, self.only_b)

    @property
    def pairs(self) -> tuple[tuple[StepBatch, Ids], tuple[StepBatch, Ids]]:
        """((a's batch, `rows_a`), (b's batch, `rows_b`)), the DIFFERENT rows in both."""
        return (self.a, self.rows_a), (self.b, self.rows_b)

    @cached_property
    def kinds(self) -> npt.NDArray[np.uint8]:
        """Kind code of each DIFFERENT row."""
        return np.asarray(self.alignment.kind[self.differing_sites])

    @cached_property
    def only_a(self) -> Ids:
        """Rows in a's batch of the rows that are ONLY_A."""
        return np.asarray(self.row_a[self.state == ONLY_A])

    @cached_property
    def only_b(self) -> Ids:
        """Rows in b's batch of the rows that are ONLY_B."""
        return np.asarray(self.row_b[self.state == ONLY_B])

    # --- order

    @cached_property
    def order(self) -> npt.NDArray[np.float64]:
        """Place of each row in a's sequence, float64 (n,).

        A row of b alone comes just before the next record that a has and that is not ONLY_A, so behind what is.
        """
        sequence_a = self.a.sequence.astype(np.float64)
        order = np.where(self.row_a >= 0, sequence_a[self.row_a] if len(sequence_a) else np.inf, np.inf)
        alone_b = self.row_b[self.row_a < 0]
        if not len(alone_b):
            return order
        by_site = np.full(self.alignment.size, -1.0)
        by_site[self.sites_a] = sequence_a
        arrival = np.argsort(self.b.sequence, kind="stable")
        reached = np.empty(len(arrival))
        reached[arrival] = np.maximum.accumulate(by_site[self.sites_b[arrival]])
        # before the next record that both have, and after what a alone has there
        shared = np.sort(np.delete(sequence_a, self.only_a))
        ends = np.append(shared, sequence_a.max(initial=0.0) + 2.0)
        order[self.row_a < 0] = ends[np.searchsorted(shared, reached[alone_b], side="right")] - 0.5
        return order

    @cached_property
    def in_order(self) -> Ids:
        """Indices of the diverging rows, sorted by `order`, then by b's sequence."""
        rows = np.flatnonzero(self.diverging)
        sequence_b = self.b.sequence
        of_b = self.row_a[rows] < 0
        tie = np.where(of_b, sequence_b[self.row_b[rows]] if len(sequence_b) else 0, 0).astype(np.float64)
        return np.asarray(rows[np.lexsort((tie, self.order[rows]))])

    @cached_property
    def divergences(self) -> Table:
        """The diverging rows as a table, in the order of `in_order`; computed once."""
        return self.of(self.in_order)

    # --- by site

    @cached_property
    def sites_a(self) -> Ids:
        """Union number of each row of a's batch."""
        return self.a.site.astype(np.int64)

    @cached_property
    def sites_b(self) -> Ids:
        """Union number of each row of b's batch."""
        return np.asarray(self.alignment.b_ids[self.b.site])

    @cached_property
    def state_of(self) -> Codes:
        """State of every site of the alignment.

        DIFFERENT for ONLY_A and ONLY_B too, ABSENT where no row has the site.
        """
        states = np.full(self.alignment.size, ABSENT, dtype=np.int8)
        states[self.site] = np.where((self.state == ONLY_A) | (self.state == ONLY_B), DIFFERENT, self.state)
        return states

    @cached_property
    def order_of(self) -> npt.NDArray[np.float64]:
        """Place of every site of the alignment in a's sequence; infinity where a has no record of it in the step."""
        order = np.full(self.alignment.size, np.inf)
        order[self.sites_a] = self.a.sequence
        return order

    @cached_property
    def _rows_of(self) -> dict[str, dict[int, int]]:
        sides = (("a", self.sites_a), ("b", self.sites_b))
        return {side: {site: row for row, site in enumerate(sites.tolist())} for side, sites in sides}

    def rows_of(self, side: str) -> dict[int, int]:
        """Row in the batch of run `side` (`a`, `b`) by union number; computed once."""
        return self._rows_of[side]

    def _record(self, site: int, side: str) -> tuple[int | None, StepBatch]:
        """(row of a site in the batch of run `side`, or None, that batch)."""
        return self._rows_of[side].get(site), self.a if side == "a" else self.b

    def status(self, site: int, side: str) -> Status | None:
        """Status of the record that run `side` has of site `site`, a union number; None without a record."""
        row, batch = self._record(site, side)
        return None if row is None else Status(int(batch.status[row]))

    def checksum(self, site: int, side: str) -> int | None:
        """Checksum of the record that run `side` has of site `site`, a union number; None without a record."""
        row, batch = self._record(site, side)
        return None if row is None else int(batch.checksum[row])

    def sequence(self, site: int, side: str) -> int | None:
        """Place of that record in run `side`'s order of recording; `site` is a union number. None without a record."""
        row, batch = self._record(site, side)
        return None if row is None else int(batch.sequence[row])

    def sketch(self, site: int, side: str) -> Any:
        """Sketch of a site's record in run `side`, float64 (16,).

        None without a record or sketch, or if it is not finite.
        """
        row, batch = self._record(site, side)
        sketch = None if row is None or batch.sketch is None else batch.sketch[row].astype(np.float64)
        return sketch if sketch is not None and np.isfinite(sketch).all() else None

    def sketches(self, site: int) -> tuple[Any, Any] | None:
        """(sketch in a, sketch in b) of a site; None where `sketch` gives none for either."""
        a, b = self.sketch(site, "a"), self.sketch(site, "b")
        return None if a is None or b is None else (a, b)

    def plain(self, site: int, side: str) -> str | None:
        """`plain_of` a site's record in run `side`; None without a record."""
        row, batch = self._record(site, side)
        return None if row is None else plain_of(batch, row)

    def named(self, row: int) -> Site:
        """The site of row `row` of this table."""
        return self.alignment.site(int(self.site[row]))


def unseen(batch: StepBatch) -> Mask:
    """Mask over all rows of a batch, true for those without a value: NOT_OBSERVED, or PARTIAL with checksum 0."""
    partly = (batch.status == int(Status.PARTIAL)) & (batch.checksum == 0)
    return np.asarray(partly | (batch.status == int(Status.NOT_OBSERVED)))


_COLUMNS = ("site", "row_a", "row_b", "state", "because", "chosen", "cause")


def plain_of(batch: StepBatch, row: int) -> str | None:
    """A value's text (`_six_digits`), else the mean of a tensor as text (`0.1`); None where both are missing."""
    if batch.text[row] or "mean" not in batch.floats:
        return _six_digits(batch.text[row]) or None
    return f"{float(batch.floats['mean'][row]):g}"


def _six_digits(text: str) -> str:
    """A text that begins as a number and has a decimal point, rounded to six significant digits; others unchanged.

    Unchanged are integers and texts that are no numbers.
    """
    try:
        return f"{float(text):.6g}" if re.match(r"^-?[\d.]", text) and "." in text else text
    except ValueError:
        return text
