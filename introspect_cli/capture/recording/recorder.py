"""The hub between probes and the store: what the current step has recorded so far.

Probes fire from the main thread, from autograd's threads, from the script's own threads. Each hands over a site
and a value; the recorder has the value summarised at once (the script may overwrite it a line later), notes the
order, and at the end of the step gives everything to the store in one batch. A lock keeps a step's rows and the
summariser's slots together when threads meet.

What a device computes is not waited for: a step that ends is set aside with what is still to come of its summaries, and
is written when the next one has ended. One whose writing an interrupt stopped is not lost: it is tried once more, and
written once.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from introspect_cli.capture.environment.redact import plain
from introspect_cli.capture.recording.keeping import Records
from introspect_cli.capture.recording.rows import EndedStep, Row, SavedTensor, Sites, StepBlock, save_tensor
from introspect_cli.errors import StoreError
from introspect_cli.schedule.rules import ALWAYS, NEVER
from introspect_cli.statistics import STATISTICS
from introspect_cli.tensors.kernels import KERNELS, numbers_of
from introspect_cli.tensors.places import Placed
from introspect_cli.tensors.views import in_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from introspect_cli.capture.capture import Capture
    from introspect_cli.capture.recording.keeping import StepPolicy
    from introspect_cli.labels import Labels
    from introspect_cli.records import Given, Site
    from introspect_cli.store.rank_writer import RankWriter
    from introspect_cli.tensors.summarizer import Summarizer


_SUMMARISED = (torch.Tensor, Placed)


_NOT_SMALL: Callable[[int, Any], int] = lambda _site, _value: -1  # noqa: E731 - no more than a value
_NONE_SMALL: Callable[[Any, Any], bool | list[int]] = lambda _sites, _tensors: False  # noqa: E731 - as above
"""Stand for the intake's `record` and `record_all` where values cannot be recorded in one call: nothing is done."""


class Recorder:
    """Collects the records of one step at a time and appends them to one rank's streams."""

    def __init__(self, capture: Capture, summarizer: Summarizer, rank: RankWriter, policy: StepPolicy) -> None:
        """Start at step 0.

        Args:
            capture: has the store of whole tensors, says which are stored, and is told once when the store is lost.
            summarizer: turns values into slots.
            rank: where finished steps go.
            policy: which steps are wanted, and kept.
        """
        save_tensors = capture.options.save_tensors
        self.summarizer = summarizer
        self.step = 0
        self.alive = True
        self.wanted = policy.wants(0)
        self.resumed = True
        self.labels: Callable[[], Labels] = dict
        """Labels of the ending step by the script's framework."""
        self.steps_written = 0
        """How many steps have been written so far; ended steps may still wait."""
        self._rank, self._store = rank, capture.store
        self._lock: Any = KERNELS.lock()
        self._policy = policy
        self._store_lost = capture.store_lost
        self._sites = Sites(rank, self._lock, save_tensors)
        self._saved: list[SavedTensor] = []  # copies of this step's values that are stored whole
        self.site = self._sites.number
        """Gives a site its number, the same for the whole run."""
        self._rows: Any = KERNELS.step()  # of this step: the site and slot of each; the intake appends, too
        self._given: dict[int, Given] = {}  # what operators were given, by row
        self._only: frozenset[Site] | None = None  # sites that may be recorded; all where None
        self._layouts = 0  # how many the store has been given
        self._spare: StepBlock | None = None  # of a step that was written
        self._blocks: deque[StepBlock] = deque()  # of ended steps that wait to be written
        self._begun: StepBlock | None = None  # whose writing has begun and not ended
        self.intake = None if save_tensors or policy.box is not None else summarizer.intake
        """Records small plain tensors in one call; None where nothing does."""
        self.record_small = _NOT_SMALL
        """Record a value in one compiled call: its slot; -1, with nothing done, where that is not to be."""
        self._record_small_all = _NONE_SMALL
        if self.intake is not None:
            self.intake.into(self._rows, self._lock)
            self.record_small, self._record_small_all = self.intake.record, self.intake.record_all

    def record_only(self, sites: frozenset[Site] | None) -> None:
        """Record at no other sites than these from now on, and without the compiled intake; None for all sites."""
        self._only = sites
        if sites is not None and self.intake is not None:
            self.intake.into()
            self.record_small, self._record_small_all = _NOT_SMALL, _NONE_SMALL

    @property
    def rows(self) -> int:
        """Rows recorded in the current step so far."""
        return len(self._rows.sites)

    def emit(self, site: int, value: object, given: Given | None = None) -> None:
        """Record a tensor or plain value at a site of this step; a tensor is summarised at once.

        A value whose site has a secret name in its path is redacted.

        Args:
            site: its number.
            value: what is recorded.
            given: an operator's inputs; None for any other value.
        """
        if given is None and self.record_small(site, value) >= 0:
            return
        with self._lock:
            if given is not None:
                self._given[self.rows] = given
            self._slot_of(site, value)

    def emit_at(self, sites: Sequence[int], value: torch.Tensor) -> None:
        """Record one tensor at several sites with one summary; `sites` must not be empty."""
        with self._lock:
            slot = self._slot_of(sites[0], value)
            for site in sites[1:]:
                self._note(site, slot)

    def _slot_of(self, site: int, value: Any) -> int:
        """Summarise a value, append its row, and copy it if it is to be stored whole; returns its slot. Lock held."""
        if not issubclass(type(value), _SUMMARISED):
            slot = self.summarizer.add_value(plain(value, secret=site in self._sites.secret))
            self._note(site, slot)
        elif (slot := self.record_small(site, value)) < 0:
            slot = self.summarizer.add(value, lean=site in self._sites.passing and self._policy.is_lean(self.step))
            self._note(site, slot)
            self._save(site, slot, value)
        return slot

    def _save(self, site: int, slot: int, value: torch.Tensor | Placed) -> None:
        """Copy a value, if its site matches `--save-tensors` or the black box takes it; else nothing. Lock held.

        A vastly expanded tensor is not copied. An error of a copy for the black box closes that.

        Args:
            site: number of its site.
            slot: the summarizer's.
            value: just recorded.
        """
        box, always = self._policy.box, site in self._sites.whole
        if not always and box is None:
            return
        value = value.local if isinstance(value, Placed) else value
        if always:
            if value.layout is not torch.strided or in_memory(value.shape, value.stride()) is None:
                self._saved.append(SavedTensor(slot, self.summarizer.copy_to_host(value)))
        elif box is not None and box.reserve(self._sites.of[site], value):
            try:
                self._saved.append(SavedTensor(slot, self.summarizer.copy_to_host(value), always=False))
            except Exception as error:  # there is no memory for it, or no way to copy it
                box.give_up(error)

    def tell_comparison(self, agreed: int, diverged: tuple[int | None] | None) -> None:
        """Tell the black box, where there is an open one, how far the runs agree, or where they diverge.

        From then on no step is lean.
        """
        box = self._policy.box
        if diverged is not None:
            self._policy.full_every = 1
        if box is not None and box.open:
            with self._lock:
                box.tell_comparison(agreed, diverged)

    def emit_many(self, sites: Sequence[int], values: Sequence[Any]) -> None:
        """Record each value at its site, in order; where all are tensors they are summarised together, quicker."""
        with self._lock:
            if not all(issubclass(kind, _SUMMARISED) for kind in set(map(type, values))):
                for site, value in zip(sites, values, strict=True):
                    self.emit(site, value)
                return
            done = self._record_small_all(sites, values)
            if done is not True:
                self._record_rest(sites, values, done or None)

    def _record_rest(self, sites: Sequence[int], values: Sequence[Any], known: list[int] | None) -> None:
        """Record tensors that the compiled path has not finished. Lock held.

        Args:
            sites: one for each value.
            values: tensors.
            known: a slot for each value that was summarised, -1 for the others; None where none was.
        """
        lean = self._policy.is_lean(self.step) and self._sites.passing.issuperset(sites)
        slots = self.summarizer.add_all(values, known, lean=lean)
        for site, slot, value in zip(sites, slots, values, strict=True) if self.intake is None else ():
            self._save(site, slot, value)
        self._note_all(sites, slots)

    def _note(self, site: int, slot: int) -> None:
        """Append a row; the caller holds the lock.

        A site's second row in a step gets the path suffix `@1`, its third `@2`. Nothing for a site that `record_only`
        leaves out.
        """
        if self._only is not None and self._sites.of[site] not in self._only:
            return
        if times := self._rows.note(site, slot):
            # A site names one value a step. Whatever comes again (a second backward through one graph) is
            # told apart by its count, so that no two records share a site.
            self._rows.note(self._sites.changed_site(site, path=f"{self._sites.of[site].path}@{times}"), slot)

    def _note_all(self, sites: Sequence[int], slots: list[int]) -> None:
        """Append rows as `_note` does, all at once where no site comes again; the caller holds the lock."""
        if self._only is not None or not self._rows.note_all(numbers_of(sites), numbers_of(slots)):
            for site, slot in zip(sites, slots, strict=True):
                self._note(site, slot)

    def take_back(self, start: int) -> list[Row]:
        """Remove and return all rows of this step from index `start` on; their sites count as not recorded in it.

        Summaries and copies of the values stay until the step ends, so that `put` can record the rows elsewhere.
        """
        with self._lock:
            sites, slots = self._rows.sites, self._rows.slots
            taken = [Row(sites[at], slots[at], self._given.pop(at, None)) for at in range(start, self.rows)]
            for row in taken:
                self._rows.uncount(row.site)
            sites.cut(start)
            slots.cut(start)
            return taken

    def put(self, rows: Iterable[Row], change: Callable[[Site], dict[str, Any] | None] = lambda _: {}) -> None:
        """Append rows that `take_back` returned to the current step, at the same or at other sites.

        Args:
            rows: what was taken out.
            change: the fields of a site that change, by name; None to drop the row.
        """
        with self._lock:
            for row in rows:
                if (changes := change(self._sites.of[row.site])) is not None:
                    if row.given is not None:
                        self._given[self.rows] = row.given
                    self._note(self._sites.changed_site(row.site, **changes), row.slot)

    def record_compiled(self, collect: Callable[..., Any], sites: Sequence[int], *known: object) -> bool:
        """Record an optimizer's tensors by one compiled function; False, with nothing done, where it cannot.

        What the function summarises without recording is recorded here.

        Args:
            collect: is called with the intake, `sites` and `known`.
            sites: one for each tensor.
            known: further arguments of `collect`.
        """
        with self._lock:
            done = self.intake is not None and collect(self.intake, sites, *known)
            if done and done is not True:
                self._record_rest(sites, done[1], done[0])
            return bool(done)

    def gap(self, site: int, reason: str) -> None:
        """Record a site as not observed, for a reason."""
        with self._lock:
            self._note(site, self.summarizer.add_missing(reason))

    def restart(self, *, keep: bool) -> None:
        """Drop all steps that have ended, written or not, and count from 0 again.

        A store that can no longer be written ends the recording, and the session is told.

        Args:
            keep: whether the current step's records stay, as step 0, where that step is wanted.
        """
        with self._lock:
            wanted = self._policy.wants(0) and (self.wanted or not keep)
            if not (keep and wanted):
                self._empty()
            self._blocks.clear()
            self.step = self.steps_written = 0
            self._policy.restart()
            self.wanted = self.alive and wanted
            self.resumed = True
            try:
                self._rank.restart()
            except StoreError as error:
                self._lose(error)

    def tick(self) -> None:
        """End the step and begin the next; write the ended steps whose summaries are there.

        The last step is not waited for if a device still computes it: it is written when the next one has ended. Sets
        `step`, `wanted` and `resumed` for the next one.
        """
        with self._lock:
            was_wanted = self.wanted
            try:
                self._end()
                self._write(keep=1)
            finally:
                self._empty()  # once more: an interrupt may have come before anything was set aside, or meanwhile
                self.step += 1
                self.wanted = self.alive and self._policy.wants(self.step)
                self.resumed = self.wanted and not was_wanted

    def flush(self, *, current: bool) -> None:
        """Write all ended steps, and wait for devices to finish them.

        Args:
            current: whether the rows of the current step, if any, become a step, too: at the end of a run, what came
                after the last optimizer step, such as a batch that nobody used.
        """
        with self._lock:
            if current:
                self._end()
            self._write(keep=0)

    def _end(self) -> None:
        """Set the current rows aside as an ended step; nothing without rows. Lock held."""
        if not self.rows:
            return
        try:
            ended = EndedStep(self.step, self._saved, self._given, self.labels())
            block, self._spare = self._spare, None
            if block is None or block.message.rows != self.rows:
                block = StepBlock(self._rank.message(self.rows))
            block.begin(ended, self._rows.sites, self._rows.slots, self.summarizer)
            self._blocks.append(block)
        finally:  # whatever comes in between: slots are numbered anew, and what stayed would be the next step's
            self._empty()

    def _write(self, keep: int) -> None:
        """Write the steps that wait, in order; a device is waited for, except as `keep` says. Lock held.

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
        """Wait for a step's summaries and write it with its whole tensors, unless the policy does not want it.

        Black box and policy are given what was written. Nothing is written once recording has stopped. A store that
        fails stops it, and the session is told.
        """
        block.rows.finish()
        if not self.alive:
            return
        ended, policy = block.ended, self._policy
        records: Records | None = None
        if policy.wants_values:
            kinds = np.array([self._sites.of[site].kind.value for site in block.sites])
            layouts, layout = self.summarizer.layouts, block.columns.layout
            values = {name: block.of_records(name) for name in block.columns.arrays if name in STATISTICS}
            records = Records(kinds, values, lambda row: layouts[layout[row]].numel)
        expiry = policy.keep(ended.step, records)
        if expiry == NEVER:
            return
        try:
            saved = block.saved(always=True)
            for checksum, value in saved.items():
                save_tensor(self._store, checksum, value)
            last = self._rank.last_step
            if last is None or last < ended.step:
                self._append(block, expires=expiry < ALWAYS)
            self.steps_written += 1
            if policy.box is not None:
                not_finite = records is not None and (records.has_nan() or records.is_infinite())
                policy.box.add(ended.step, block.saved(always=False), self._rank.digest, not_finite=not_finite)
            policy.note_written(ended.step, expiry, frozenset(saved))
        except StoreError as error:
            self._lose(error)

    def _append(self, block: StepBlock, *, expires: bool) -> None:
        """Append a step to the rank's stream, after those layouts that the store has not got yet."""
        message = block.complete()
        # Those that records have are only ever added to, so the store gives them the same numbers.
        largest = message.largest("layout")
        while self._layouts <= largest:
            self._rank.layout(self.summarizer.layouts[self._layouts])
            self._layouts += 1
        self._rank.append(block.ended.step, message, block.ended.labels, expires=expires)

    def _empty(self) -> None:
        """Clear the current rows and copies, and give the black box's next step its full share. Lock held."""
        self._rows.clear()
        self._given = {}  # the old one is the ended step's
        self._saved = []  # the old list is the ended step's
        if self._policy.box is not None:
            self._policy.box.begin_step()

    def _lose(self, error: StoreError) -> None:
        """Stop recording, and tell the session that the store was lost."""
        self.stop()
        self._store_lost(error)

    def stop(self) -> None:
        """Record nothing more from now on; ended steps that wait are not written either."""
        self.alive = self.wanted = False
