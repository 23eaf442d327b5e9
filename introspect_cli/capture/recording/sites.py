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

if TYPE_CHECKING:
    import threading

    from introspect_cli.records import Given
    from introspect_cli.store.rank_writer import RankWriter


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
        """Number of a site, the same for the whole run; at its first call it is written to the store, with `info`.

        That call also adds it to `of`, and to `whole` or `secret` where it belongs there. A later call ignores `info`.
        """
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
        """Number of the site that differs from the site `number` in some fields; a new one is registered.

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
