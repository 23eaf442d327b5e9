"""The hub between probes and the store: what the current step has recorded so far.

Probes fire from the main thread, from autograd's threads, from the script's own threads. Each hands over a site
and a value; the recorder has the value summarised at once (the script may overwrite it a line later), notes the
order, and at the end of the step gives everything to the store in one batch. A lock keeps a step's rows and the
summariser's slots together when threads meet.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from introspect_cli.capture.backlog import Backlog, EndedStep, SavedTensor
from introspect_cli.capture.environment.redact import is_secret_path, plain
from introspect_cli.capture.keeping import Keeping
from introspect_cli.capture.samples import SampleKeeper
from introspect_cli.errors import StoreError
from introspect_cli.records import Given, Kind, Phase, Site, SiteInfo
from introspect_cli.selection import selects
from introspect_cli.tensors.places import Placed
from introspect_cli.tensors.views import in_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from introspect_cli.labels import Labels
    from introspect_cli.schedule import Schedule
    from introspect_cli.store.rank_writer import RankWriter
    from introspect_cli.store.writer import StoreWriter
    from introspect_cli.tensors.summarizer import Summarizer

NO_INFO = SiteInfo()


def _no_short_way(_site: int, _tensor: torch.Tensor) -> int:
    return -1


def _none_at_once(_sites: Sequence[int], _tensors: Sequence[torch.Tensor]) -> bool | list[int]:
    return False


class Recorder:
    """Collects the records of one step at a time and appends them to one rank's streams."""

    def __init__(
        self,
        summarizer: Summarizer,
        rank: RankWriter,
        store: StoreWriter,
        schedule: Schedule | Keeping,
        save_tensors: tuple[str, ...] = (),
        store_lost: Callable[[StoreError], None] = lambda _error: None,
        *,
        per_sample: bool = False,
    ) -> None:
        """Start at step 0.

        Args:
            summarizer: turns values into slots.
            rank: where finished steps go.
            store: where whole tensors go.
            schedule: which steps are wanted, and kept.
            save_tensors: globs over FQNs of values that are stored whole.
            store_lost: told once when the store can no longer be written.
            per_sample: summarise the samples of batches and activations one by one, too.
        """
        self.summarizer = summarizer
        self.step = 0
        self.alive = True
        self.wanted = schedule.wants(0)
        self.resumed = True
        self.labels: Callable[[], Labels] = dict
        """What the script's framework calls the step that ends."""
        self._rank = rank
        self._schedule = schedule
        self._keeping = schedule if isinstance(schedule, Keeping) else None
        self.undecided = self._keeping is not None and self._keeping.undecided
        self._save_tensors = save_tensors
        self._store_lost = store_lost
        self._lock = threading.RLock()
        self._only: frozenset[Site] | None = None
        self._ids: dict[Site, int] = {}
        self._sites: dict[int, Site] = {}
        self._infos: dict[int, SiteInfo] = {}
        self._saved_whole: set[int] = set()
        self._secret: set[int] = set()  # sites whose path says that their values are nobody's business
        self._rows: list[int] = []
        self._slots: list[int] = []
        self._times: dict[int, int] = {}
        self._given: dict[int, Given] = {}
        self._saved: list[SavedTensor] = []
        self._samples = SampleKeeper(summarizer, each=per_sample)
        self._backlog = Backlog(rank, store, summarizer, self._keeping, self._lose)
        self.intake = None if save_tensors or per_sample else summarizer.intake
        """Records small plain tensors in one call; None where nothing does."""
        self._short: Callable[[int, torch.Tensor], int] = _no_short_way
        self._all_short: Callable[[Sequence[int], Sequence[torch.Tensor]], bool | list[int]] = _none_at_once
        self._go_the_short_way(on=True)

    def _go_the_short_way(self, *, on: bool) -> None:
        """Have small plain tensors recorded in one call, which looks at no site's name, or not.

        Who calls it in the first step has tensors of which the samples count.
        """
        if self.intake is None:
            return
        if on and self._only is None:
            sums = self._samples.step.sums if self._samples.first else None
            own = (self._rows, self._slots, self._times, self._lock.acquire, self._lock.release)
            self.intake.into(*own, sums, self.summarizer.sample_headers)
            self._short, self._all_short = self.intake.record, self.intake.record_all
        else:
            self.intake.into()
            self._short, self._all_short = _no_short_way, _none_at_once

    @property
    def only(self) -> frozenset[Site] | None:
        """Sites that may be recorded; all where None."""
        return self._only

    @only.setter
    def only(self, sites: frozenset[Site] | None) -> None:
        self._only = sites
        if sites is not None:
            self._go_the_short_way(on=False)

    @property
    def steps_written(self) -> int:
        """Steps that have been written so far."""
        return self._backlog.written

    @property
    def rows(self) -> int:
        """Rows recorded in the current step so far."""
        return len(self._rows)

    def site(self, site: Site, info: SiteInfo = NO_INFO) -> int:
        """The number of a site, the same for the whole run."""
        known = self._ids.get(site)
        if known is not None:
            return known
        with self._lock:
            number = self._rank.site(site, info)
            self._sites[number] = site
            self._infos[number] = info
            if self._save_tensors and selects(site.fqn, self._save_tensors):
                self._saved_whole.add(number)
            self._ids[site] = number  # the last: whatever ends this early, no number has another's name
            if site.path and is_secret_path(site.path):
                self._secret.add(number)
            self._samples.known(number, site.kind)
            return number

    def tensor(self, site: int, value: torch.Tensor | Placed, given: Given | None = None) -> int:
        """Record a tensor, and what its operator was given; returns its slot, good until the end of the step."""
        if given is None and not isinstance(value, Placed) and self._samples.go_the_short_way(site):
            slot = self._short(site, value)
            if slot >= 0:
                return slot
        with self._lock:
            slot = self.summarizer.add(value)
            if given is not None:
                self._given[len(self._rows)] = given
            self._note(site, slot)
            if site in self._saved_whole:
                self._save(slot, value)
            self._samples.note(site, self._sites[site].kind, slot, value)
            return slot

    def tensors(self, sites: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        """Record many tensors, each at its site: the kernels' threads share them out."""
        with self._lock:
            looks = self._samples.looks_at(sites)
            short = not looks and self._all_short(sites, values)
            if short is True:
                return
            slots = self.summarizer.add_all(values, short or None)
            if self._save_tensors:
                for site, slot, value in zip(sites, slots, values, strict=True):
                    if site in self._saved_whole:
                        self._save(slot, value)
            if looks:
                for site, slot, value in zip(sites, slots, values, strict=True):
                    self._samples.note(site, self._sites[site].kind, slot, value)
            times = dict.fromkeys(sites, 1)
            if self._only is None and len(times) == len(sites) and self._times.keys().isdisjoint(times):
                self._times.update(times)
                self._rows.extend(sites)
                self._slots.extend(slots)
            else:
                for site, slot in zip(sites, slots, strict=True):
                    self._note(site, slot)

    def nested(self, sites: Sequence[int], values: Sequence[object]) -> None:
        """Record the leaves of a nested value in their order; tensors that follow each other are summarised together.

        Args:
            sites: the site of each.
            values: tensors and plain values.
        """
        with self._lock:
            for is_tensor, group in groupby(zip(sites, values, strict=True), _is_tensor):
                places, held = zip(*group, strict=True)
                if is_tensor and len(held) > 1:
                    self.tensors(places, held)
                elif is_tensor:
                    self.tensor(places[0], held[0])
                else:
                    for site, value in zip(places, held, strict=True):
                        self.value(site, value)

    def _save(self, slot: int, value: torch.Tensor | Placed) -> None:
        value = value.local if isinstance(value, Placed) else value
        if value.layout is not torch.strided or in_memory(value.shape, value.stride()) is None:
            self._saved.append(SavedTensor(slot, self.summarizer.copied(value)))

    def tensor_at(self, sites: Sequence[int], value: torch.Tensor) -> None:
        """Record a tensor that is several sites' value; another thread may end the step before or after, not within."""
        if len(sites) == 1:
            self.tensor(sites[0], value)
            return
        with self._lock:
            slot = self.tensor(sites[0], value)
            for site in sites[1:]:
                self._note(site, slot)

    def value(self, site: int, value: object) -> None:
        """Record a plain value: a number, a string, a flag."""
        with self._lock:
            self._note(site, self.summarizer.value(plain(value, secret=site in self._secret)))

    def missing(self, site: int, reason: str) -> None:
        """Record that a site is there and could not be seen."""
        with self._lock:
            self._note(site, self.summarizer.missing(reason))

    def _note(self, site: int, slot: int) -> None:
        if self._only is not None and self._sites[site] not in self._only:
            return
        times = self._times.get(site, 0)
        self._times[site] = times + 1
        if times:
            # A site names one value a step. Whatever comes again (a second backward through one graph) is
            # told apart by its count, so that no two records share a site.
            first = self._sites[site]
            site = self.site(replace(first, path=f"{first.path}@{times}"), self._infos[site])
            self._times[site] = self._times.get(site, 0) + 1
        self._rows.append(site)
        self._slots.append(slot)

    def take_back(self, start: int) -> list[tuple[int, int]]:
        """Take all rows from one on out of the step; their sites and slots."""
        with self._lock:
            taken = list(zip(self._rows[start:], self._slots[start:], strict=True))
            del self._rows[start:], self._slots[start:]
            for row in [row for row in self._given if row >= start]:
                del self._given[row]
            for site, _ in taken:
                self._times[site] -= 1
            return taken

    def give_back(self, taken: list[tuple[int, int]]) -> None:
        """Put rows that were taken out into the step again."""
        with self._lock:
            for site, slot in taken:
                self._note(site, slot)

    def put_elsewhere(self, taken: list[tuple[int, int]], phase: Phase, kind: Kind, fqn: str, call: int) -> None:
        """Put those of the rows that are of a kind into the step again, at another place."""
        with self._lock:
            for number, slot in taken:
                site = self._sites[number]
                if site.kind is kind:
                    moved = replace(site, phase=phase, fqn=fqn, call=call)
                    self._note(self.site(moved, self._infos[number]), slot)

    def rename(self, kind: Kind, names: dict[str, str]) -> None:
        """Give rows of a kind in the current step other names: old FQN to new."""
        with self._lock:
            for row, number in enumerate(self._rows):
                site = self._sites[number]
                if site.kind is kind and names.get(site.fqn, site.fqn) != site.fqn:
                    self._rows[row] = self.site(replace(site, fqn=names[site.fqn]), self._infos[number])
                    self._times[number] -= 1
                    self._times[self._rows[row]] = self._times.get(self._rows[row], 0) + 1

    def rearrange(self, places: Sequence[tuple[int, int]]) -> None:
        """Put some rows of the current step in another order among themselves.

        Args:
            places: numbers of rows, rising, each with what to sort them by.
        """
        with self._lock:
            ranked = [row for row, _ in sorted(places, key=lambda entry: entry[1])]
            taken = [(self._rows[row], self._slots[row], self._given.pop(row, None)) for row in ranked]
            for (row, _), (site, slot, given) in zip(places, taken, strict=True):
                self._rows[row], self._slots[row] = site, slot
                if given is not None:
                    self._given[row] = given

    def restart(self, *, keep: bool) -> None:
        """Take back all steps so far, as if recording began now.

        Args:
            keep: whether the current step stays, as the first.
        """
        with self._lock:
            wanted = self._schedule.wants(0) and (self.wanted or not keep)
            if not (keep and wanted):
                self.take_back(0)
                self._times.clear()
                self._saved.clear()
                self._samples.forget_step()
            self._backlog.clear()
            self._samples.first = True
            self._go_the_short_way(on=False)
            self.step = 0
            if self._keeping is not None:
                self._keeping.restart()
            self.wanted = self.alive and wanted
            self.resumed = True
            try:
                self._rank.restart()
            except StoreError as error:
                self._lose(error)

    def tick(self) -> None:
        """End the current step: write it if it was wanted, and begin the next.

        What a device still computes is not waited for: that step is written when the next one has ended.
        """
        with self._lock:
            was_wanted = self.wanted
            try:
                self._end()
                self._backlog.write(keep=1)
            finally:
                if self._rows or self._slots or self._times:
                    self._empty()  # an interrupt came before anything was set aside, or while this was done
                self.step += 1
                self.wanted = self.alive and self._schedule.wants(self.step)
                self.resumed = self.wanted and not was_wanted

    def decide(self) -> None:
        """The step begins: where that tells more of it (its epoch), decide again whether it is wanted."""
        if self.wanted and self._keeping is not None:
            self.wanted = self._keeping.wants(self.step, begins=True)
            self.resumed &= self.wanted

    def flush(self) -> None:
        """Append what the current step has recorded, if anything, as that step; nothing is left behind.

        At the end of a run this is what came after the last optimizer step: a batch nobody used, an evaluation.
        """
        with self._lock:
            self._end()
            self._backlog.write(keep=0)

    def settle(self) -> None:
        """Write the steps that have ended, and leave alone what the current one has recorded."""
        with self._lock:
            self._backlog.write(keep=0)

    def _end(self) -> None:
        """Set aside what the current step has recorded, if anything."""
        if not self._rows:
            return
        try:
            labels, rows, slots = self.labels(), self._rows.copy(), self._slots.copy()
            saved, samples, given = self._saved, self._samples.step, self._given
            looks = self._keeping is not None and self._keeping.looks
            kinds = [self._sites[site].kind for site in rows] if looks else []
            # A table is looked at, or comes later.
            tabled = looks or saved or samples.each or self.summarizer.waits
            sheet = None if tabled else self._backlog.sheet(len(rows))
            filled = sheet is not None and self.summarizer.put_into(sheet.target, slots)
            summaries = sheet if sheet is not None and filled else self.summarizer.hand_over()
            self._backlog.add(EndedStep(self.step, rows, slots, kinds, saved, samples, given, summaries, labels))
        finally:  # whatever comes in between: slots are numbered anew, and what stayed would be the next step's
            self._empty()

    def _empty(self) -> None:
        """Begin a step with nothing recorded."""
        for own in (self._rows, self._slots, self._times):
            own.clear()  # the short way holds them too
        self._saved, self._given = [], {}
        self._samples.forget_step()
        if self._samples.first:
            self._samples.first_is_over()
            self._go_the_short_way(on=True)

    def _lose(self, error: StoreError) -> None:
        self.stop()
        self._store_lost(error)

    def stop(self) -> None:
        """Take no more records (in a forked child, or when the session ends)."""
        self.alive = self.wanted = self._backlog.open = False


def _is_tensor(leaf: tuple[int, object]) -> bool:
    return issubclass(type(leaf[1]), torch.Tensor)
