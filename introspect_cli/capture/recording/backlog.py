"""Steps that have ended and are not yet written.

What a device computes is not waited for: a step that ends is set aside with what is still to come of its summaries, and
is written when the next one has ended. One whose writing an interrupt stopped is not lost: it is tried once more, and
written once.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.capture.recording.step_block import EndedStep, StepBlock
from introspect_cli.capture.recording.step_policy import Records
from introspect_cli.errors import StoreError
from introspect_cli.schedule.rules import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.capture.recording.step_policy import StepPolicy
    from introspect_cli.capture.recording.step_rows import Sites
    from introspect_cli.store.write.rank_writer import RankWriter
    from introspect_cli.store.write.run_writer import StoreWriter
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
        policy: StepPolicy,
        sites: Sites,
        lost: Callable[[StoreError], None],
    ) -> None:
        """Start with no step.

        Args:
            rank: where steps go.
            store: where whole tensors go.
            summarizer: has the summaries.
            policy: which steps are written.
            sites: by number.
            lost: called with the error when the store can no longer be written.
        """
        self.open = True
        self.written = 0
        self._rank = rank
        self._store = store
        self._policy = policy
        self._sites = sites
        self._lost = lost
        self._summarizer = summarizer
        self._layouts = 0  # how many the store has been given
        self._spare: StepBlock | None = None  # of a step that was written
        self._blocks: deque[StepBlock] = deque()
        self._begun: StepBlock | None = None  # whose writing has begun and not ended

    def add(self, ended: EndedStep) -> None:
        """Append an ended step with its summaries, of which devices may still compute some."""
        block, self._spare = self._spare, None
        if block is None or block.message.rows != len(ended.sites):
            block = StepBlock(self._rank.message(len(ended.sites)))
        block.begin(ended, self._summarizer)
        self._blocks.append(block)

    def clear(self) -> None:
        """Drop the steps that wait, and set `written` to 0."""
        self._blocks.clear()
        self.written = 0

    def write(self, keep: int) -> None:
        """Write the steps that wait, in order; a device is waited for, except as `keep` says.

        A step whose writing an exception stopped is tried once more at the next call.

        Args:
            keep: that many of the last steps stay if a device still computes them, and so does every step that is not
                ready; 0 waits for all.
        """
        while self._blocks:
            first = self._blocks[0]
            if first.rows.is_waiting and (len(self._blocks) <= keep or (keep and not first.rows.is_ready())):
                return
            if first is self._begun:
                self._blocks.popleft()
            self._begun = first
            self._write_one(first)
            if self._blocks and self._blocks[0] is first:
                self._blocks.popleft()
            self._begun = None
            self._spare = first

    def _write_one(self, block: StepBlock) -> None:
        """Wait for a step's summaries and write it with its whole tensors, unless the policy does not want it."""
        block.rows.finish()
        if not self.open:
            return
        ended, policy = block.ended, self._policy
        records = self._records(block) if policy.wants_values else None
        expiry = policy.keep(ended.step, records)
        if expiry == NEVER:
            return
        try:
            saved = block.save_whole(self._store)
            last = self._rank.last_step
            if last is None or last < ended.step:
                self._append(block)
            self.written += 1
            if policy.box is not None:
                not_finite = records is not None and (records.has_nan() or records.is_infinite())
                policy.box.add(ended.step, block.boxed(), self._rank.digest, not_finite=not_finite)
            if policy.may_drop:
                policy.note_written(ended.step, expiry, saved)
        except StoreError as error:
            self._lost(error)

    def _records(self, block: StepBlock) -> Records:
        """A step's kinds and columns for the policy, which looks at values."""
        kinds = np.array([self._sites.of[site].kind.value for site in block.ended.sites])
        layouts, layout = self._summarizer.layouts, block.columns.layout
        return Records(kinds, block.columns.arrays, lambda row: layouts[layout[row]].numel)

    def _append(self, block: StepBlock) -> None:
        """Append a step to the rank's stream, after those layouts that the store has not got yet."""
        message = block.complete()
        # Those that records have are only ever added to, so the store gives them the same numbers.
        while self._layouts <= message.largest("layout"):
            self._rank.layout(self._summarizer.layouts[self._layouts])
            self._layouts += 1
        self._rank.append(block.ended.step, message, block.ended.labels)
