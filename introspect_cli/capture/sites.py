"""The sites of a run, numbered: a record names its site by number, and most sites come again in every step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from introspect_cli.capture.environment.redact import is_secret_path
from introspect_cli.records import Site, SiteInfo
from introspect_cli.selection import selects

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from introspect_cli.store.rank_writer import RankWriter

NO_INFO = SiteInfo()


class Sites:
    """Gives each site its number, once.

    Attributes:
        of: the sites by number.
        whole: numbers of those whose tensors are stored whole.
        secret: numbers of those whose path says that their values are nobody's business.
    """

    def __init__(
        self, rank: RankWriter, lock: threading.RLock, save_tensors: tuple[str, ...], met: Callable[[int, Site], None]
    ) -> None:
        """Start with none.

        Args:
            rank: the writer that knows them, too.
            lock: the recorder's.
            save_tensors: globs over FQNs of values that are stored whole.
            met: told of each new number, and its site.
        """
        self.of: dict[int, Site] = {}
        self.whole: set[int] = set()
        self.secret: set[int] = set()
        self._rank = rank
        self._lock = lock
        self._save_tensors = save_tensors
        self._met = met
        self._numbers: dict[Site, int] = {}
        self._infos: dict[int, SiteInfo] = {}

    def number(self, site: Site, info: SiteInfo = NO_INFO) -> int:
        """The number of a site, the same for the whole run."""
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
            self._met(number, site)
            return number

    def changed(self, number: int, **changes: Any) -> int:
        """The number of a site that is like another one but for some of its fields."""
        return self.number(replace(self.of[number], **changes), self._infos[number])
