"""The rows of the current step: which sites have been recorded, in which order, with which summaries.

A record names its site by number, and most sites come again in every step. Most rows stay as they were noted. Some are
taken out again and come back elsewhere, or later: a batch turns out to be for an evaluation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from introspect_cli.capture.environment.redact import is_secret_path
from introspect_cli.records import Site, SiteInfo
from introspect_cli.selection import selects
from introspect_cli.tensors.kernels import KERNELS, new_numbers

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Sequence

    from introspect_cli.records import Given
    from introspect_cli.store.write.rank_writer import RankWriter


NO_INFO = SiteInfo()


class Sites:
    """Gives each site its number, once.

    Attributes:
        of: the sites by number.
        whole: numbers of those whose tensors are stored whole.
        secret: numbers of those with a secret name in their path, whose values are redacted.
    """

    def __init__(self, rank: RankWriter, lock: threading.RLock, save_tensors: tuple[str, ...]) -> None:
        """Start with none.

        Args:
            rank: the writer that knows them, too.
            lock: the recorder's.
            save_tensors: globs over FQNs of values that are stored whole.
        """
        self.of: dict[int, Site] = {}
        self.whole: set[int] = set()
        self.secret: set[int] = set()
        self._rank = rank
        self._lock = lock
        self._save_tensors = save_tensors
        self._numbers: dict[Site, int] = {}
        self._infos: dict[int, SiteInfo] = {}

    def number(self, site: Site, info: SiteInfo = NO_INFO) -> int:
        """Number of a site, the same for the whole run; registered at the first call."""
        known = self._numbers.get(site)
        if known is not None:
            return known
        with self._lock:
            number = self._rank.site(site, info)
            self.of[number] = site
            self._infos[number] = info
            if self._save_tensors and selects(site.fqn, self._save_tensors):
                self.whole.add(number)
            self._numbers[site] = number  # the last: whatever ends this early, no number has another's name
            if site.path and is_secret_path(site.path):
                self.secret.add(number)
            return number

    def changed_site(self, number: int, **changes: Any) -> int:
        """Number of the site that differs from that of a number in some fields; registered if it is new.

        Args:
            number: of the site.
            changes: fields of `Site` by name, with their new values.
        """
        return self.number(replace(self.of[number], **changes), self._infos[number])


class Row(NamedTuple):
    """A row that was taken out of its step: numbers of its site and slot, and what its operator was given."""

    site: int
    slot: int
    given: Given | None


class StepRows:
    """Rows of the current step in order; the compiled intake appends to the lists, too.

    Attributes:
        sites: the number of each row's site.
        slots: the summarizer's slot of each row.
        times: how often each site has been recorded.
        given: what operators were given, by row.
        only: sites that may be recorded; all where None.
    """

    def __init__(self, numbering: Sites, lock: threading.RLock) -> None:
        """Start without rows.

        Args:
            numbering: gives numbers to sites.
            lock: the recorder's.
        """
        self.sites, self.slots = new_numbers(), new_numbers()
        self.times: Any = KERNELS.times()
        self.given: dict[int, Given] = {}
        self.only: frozenset[Site] | None = None
        self._numbering = numbering
        self._lock = lock

    def clear(self) -> None:
        """Empty the rows; `given` becomes a new dict, since the ended step has the old one."""
        for held in (self.sites, self.slots, self.times):
            held.clear()  # the intake holds them too
        self.given = {}

    def note(self, site: int, slot: int) -> None:
        """Append a row; the caller holds the lock.

        A site's second row in a step gets the path suffix `@1`, its third `@2`.

        Nothing for a site that `only` leaves out.
        """
        if self.only is not None and self._numbering.of[site] not in self.only:
            return
        times = self.times.of(site)
        self.times.add(site, 1)
        if times:
            # A site names one value a step. Whatever comes again (a second backward through one graph) is
            # told apart by its count, so that no two records share a site.
            site = self._numbering.changed_site(site, path=f"{self._numbering.of[site].path}@{times}")
            self.times.add(site, 1)
        self.sites.append(site)
        self.slots.append(slot)

    def note_all(self, sites: Sequence[int], slots: list[int]) -> None:
        """Append rows as `note` does, all at once where no site comes again; the caller holds the lock."""
        if self.only is None and self.times.once(list(sites)):
            self.sites.extend(sites)
            self.slots.extend(slots)
        else:
            for site, slot in zip(sites, slots, strict=True):
                self.note(site, slot)

    def take_back(self, start: int) -> list[Row]:
        """Remove and return all rows from index `start` on; their sites count as not recorded in this step."""
        with self._lock:
            numbers = zip(self.sites[start:], self.slots[start:], strict=True)
            taken = [Row(*pair, self.given.pop(at, None)) for at, pair in enumerate(numbers, start)]
            del self.sites[start:], self.slots[start:]
            for row in taken:
                self.times.add(row.site, -1)
            return taken

    def put(self, rows: Iterable[Row], change: Callable[[Site], dict[str, Any] | None] = lambda _: {}) -> None:
        """Append rows that `take_back` returned, here or at other sites.

        Args:
            rows: what was taken out.
            change: the fields of a site that change, by name; None to drop the row.
        """
        with self._lock:
            for row in rows:
                changes = change(self._numbering.of[row.site])
                if changes is not None:
                    if row.given is not None:
                        self.given[len(self.sites)] = row.given
                    self.note(self._numbering.changed_site(row.site, **changes), row.slot)
