"""Steps that have ended and are not yet written.

What a device computes is not waited for: a step that ends is set aside with what is still to come of its summaries, and
is written when the next one has ended. One whose writing an interrupt stopped is not lost: it is tried once more, and
written once.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.capture.ended_step import save_whole
from introspect_cli.capture.sheet import Sheet
from introspect_cli.errors import StoreError
from introspect_cli.schedule.rule import NEVER
from introspect_cli.store.batch import StepBatch, given_columns
from introspect_cli.store.columns import sparse_texts
from introspect_cli.tensors.columns import Handover
from introspect_cli.tensors.kernels import numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.ended_step import EndedStep
    from introspect_cli.capture.keeping import Keeping
    from introspect_cli.records import Layout
    from introspect_cli.store.batch import Array
    from introspect_cli.store.rank_writer import RankWriter
    from introspect_cli.store.writer import StoreWriter
    from introspect_cli.tensors.columns import SummaryTable
    from introspect_cli.tensors.summarizer import Summarizer


class Backlog:
    """Steps that wait to be written, in order; the caller's lock is held.

    Attributes:
        open: whether the store takes more.
        written: steps that have been written.
    """

    def __init__(
        self,
        rank: RankWriter,
        store: StoreWriter,
        summarizer: Summarizer,
        keeping: Keeping,
        lost: Callable[[StoreError], None],
    ) -> None:
        """Start with none.

        Args:
            rank: where steps go.
            store: where whole tensors go.
            summarizer: gives the summaries.
            keeping: decides which steps are kept, and how long.
            lost: told when the store can no longer be written.
        """
        self.open = True
        self.written = 0
        self._rank = rank
        self._store = store
        self._keeping = keeping
        self._lost = lost
        self._summarizer = summarizer
        self._layouts: list[int] = []
        self._spare: Sheet | None = None  # of a step that is done with
        self._steps: deque[EndedStep] = deque()
        self._begun: EndedStep | None = None  # whose writing has begun and not ended

    def summaries(self, slots: list[int], *, tabled: bool) -> Handover | Sheet:
        """Take the summaries of the step that ends: on a sheet where the kernels fill one at once, else as a table.

        Args:
            slots: the summarizer's slot of each record.
            tabled: whether the table is looked at.
        """
        sheet = None if tabled or self._summarizer.waits else self._sheet(len(slots))
        if sheet is not None and self._summarizer.put_into(sheet.target, slots):
            return sheet
        return self._summarizer.hand_over()

    def _sheet(self, records: int) -> Sheet | None:
        """A sheet for a step of so many records; None where the kernels cannot fill one."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.form.rows == records:
            return spare
        form = self._rank.form(records)
        target = self._summarizer.target(form.columns)
        return None if target is None else Sheet(form, target)

    def add(self, step: EndedStep) -> None:
        """Set a step aside."""
        self._steps.append(step)

    def clear(self) -> None:
        """Forget the steps that wait, and how many were written."""
        self._steps.clear()
        self.written = 0

    def write(self, keep: int) -> None:
        """Append steps that have ended, in order. One that an exception stopped is tried once more the next time.

        Args:
            keep: how many of the last may stay, if a device still computes some of them.
        """
        while self._steps:
            first = self._steps[0]
            if isinstance(first.summaries, Handover):
                if len(self._steps) <= keep and first.summaries.waits:
                    return
                if keep and not first.summaries.ready():
                    return
            if first is self._begun:
                self._steps.popleft()
            self._begun = first
            self._write_one(first)
            if self._steps and self._steps[0] is first:
                self._steps.popleft()
            self._begun = None
            if isinstance(first.summaries, Sheet):
                self._spare = first.summaries

    def _write_one(self, first: EndedStep) -> None:
        table = first.summaries.table() if isinstance(first.summaries, Handover) else None
        if not self.open:
            return
        expiry = self._keeping.expiry(first.step, first.kinds, first.slots, table, first.labels)
        if expiry == NEVER:
            return
        try:
            before = self._rank.bytes_written if self._keeping.drops else 0
            last = self._rank.last_step
            if last is None or last < first.step:
                self._append(first, table)
            self.written += 1
            if self._keeping.box is not None:
                self._keeping.box.add(first, table, self._rank.digest)
            if self._keeping.drops:
                saved: set[int] = set()
                if table is not None:
                    saved |= {int(table.checksum[item.slot]) for item in first.saved if item.always}
                    saved |= {item.key(table) for item in first.samples.each}
                self._keeping.written(first.step, expiry, self._rank.bytes_written - before, frozenset(saved))
        except StoreError as error:
            self._lost(error)

    def _append(self, ended: EndedStep, table: SummaryTable | None) -> None:
        if isinstance(ended.summaries, Sheet):
            known = self._summarizer.layouts
            form = ended.summaries.complete(ended.rows, ended.samples.sums, ended.given, partial(self._numbers, known))
            self._rank.append(ended.step, form, ended.labels)
        elif table is not None:
            for item in ended.saved:
                if item.always:
                    save_whole(self._store, int(table.checksum[item.slot]), item.value)
            for samples in ended.samples.each:
                samples.save(self._store, table)
            self._rank.append(ended.step, self._batch(ended, table), ended.labels)

    def _numbers(self, layouts: list[Layout]) -> Array:
        """The store's numbers of the summarizer's layouts, which are only ever appended to."""
        self._layouts.extend(self._rank.layout(layout) for layout in layouts[len(self._layouts) :])
        return np.asarray(self._layouts, dtype=np.uint32)

    def _batch(self, ended: EndedStep, table: SummaryTable) -> StepBatch:
        pick, texts = numbers(ended.slots), table.texts
        return StepBatch(
            site=numbers(ended.rows),
            sequence=np.arange(len(ended.rows), dtype=np.uint32),
            layout=self._numbers(table.layouts)[table.layout_index[pick]],
            status=table.status[pick],
            checksum=table.checksum[pick],
            counts={name: column[pick] for name, column in table.counts.items()},
            floats={name: column[pick] for name, column in table.floats.items()},
            sketch=None if table.sketch is None else table.sketch[pick],
            text=sparse_texts(len(pick), {row: texts[slot] for row, slot in enumerate(ended.slots) if slot in texts}),
            given=given_columns(ended.given, len(ended.rows)) if ended.given else None,
            samples=ended.samples.sums_by_row(pick),
        )
