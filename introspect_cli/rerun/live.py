"""Compare a run with a reference while it is written, from another process.

Training must not wait for a comparison, nor do any of it. So it is asked from outside, as any reader would: steps whose
digests are those of the reference at the same number are passed over; where one differs the whole question is asked of
the run so far, as `diff` asks it, since a digest knows nothing of tolerance, of offsets, or of what one run did not
record. A comparison that takes longer than a step falls behind, looks at more steps at once the next time, and rests
twice as long as it worked.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from introspect_cli.compare.terms.result import DiffResult, Verdict
from introspect_cli.errors import UsageError
from introspect_cli.records import Phase
from introspect_cli.store.read.poll import poll
from introspect_cli.store.read.run import Run, RunState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Ask = Callable[[Run, Run], DiffResult]

PAUSE = 0.05
"""Seconds between two looks at a run that goes on, at least."""

_REST = 2
_TRAINING = {Phase.BACKWARD.value, Phase.OPTIMIZER.value}


@dataclass
class Digests:
    """What each step of a reference digests to, by rank and number; read again where that goes on itself."""

    by_rank: dict[int, dict[int, bytes]] = field(default_factory=dict)
    looked: dict[int, int] = field(default_factory=dict)

    def read(self, run: Run) -> None:
        """Read those of a reference."""
        self.by_rank |= {rank: run.rank(rank).digests() for rank in run.ranks}

    @property
    def last(self) -> int:
        """The last step that was looked at of every rank; -1 before there is one."""
        return min(self.looked.values(), default=-1)

    def differ(self, run: Run) -> bool:
        """Whether a step that was not looked at yet differs; other ranks than the reference's always do."""
        if set(run.ranks) - set(self.by_rank):
            return True
        differs = False
        for rank in run.ranks:
            digests, last = run.rank(rank).digests(), self.looked.get(rank, -1)
            reference = self.by_rank[rank]
            differs |= any(step > last and reference.get(step, digest) != digest for step, digest in digests.items())
            self.looked[rank] = max(digests, default=-1)
        return differs


def compare_live(
    reference: Callable[[], Run],
    path: Path,
    ask: Ask,
    first: Callable[[DiffResult], None],
    agreed: Callable[[int], None] = lambda _step: None,
    pause: float = PAUSE,
) -> DiffResult:
    """Compare until the run is over.

    `first` hears once of the first divergence that is seen, and `agreed`, until then, of each step up to which the two
    do not diverge.

    Returns:
        the comparison of the whole run.

    Raises:
        StoreError: one of them cannot be read.
        UsageError: the two cannot be compared.
    """
    live = _Live(reference, ask, first, agreed)
    with live.held:
        result = poll(path, live.look, pause=pause, rest=_REST, unreadable=live.held.close)
    assert result is not None  # the run is over
    return result


@dataclass
class _Live:
    """A comparison under way."""

    reference: Callable[[], Run]
    ask: Ask
    first: Callable[[DiffResult], None]
    agreed: Callable[[int], None]
    digests: Digests = field(default_factory=Digests)
    held: ExitStack = field(default_factory=ExitStack)
    one: Run | None = None
    waiting: bool = False
    reported: bool = False
    rest_until: float = 0.0
    last: int = -1

    def look(self, run: Run) -> DiffResult | None:
        """What the comparison says once the run is over; None before."""
        one = self._reference()
        self.waiting = (self.digests.differ(run) or self.waiting) and not self.reported
        if run.state is not RunState.RUNNING:
            return self._asked(one, run)
        began = time.monotonic()
        if self.waiting and began >= self.rest_until and may_be_judged(one, run):
            with suppress(UsageError):  # what is selected may only come
                self._asked(one, run)
                self.waiting = False
            self.rest_until = time.monotonic() + _REST * (time.monotonic() - began)
        if not (self.waiting or self.reported) and self.digests.last != self.last:
            self.last = self.digests.last
            self.agreed(self.last)
        return None

    def _reference(self) -> Run:
        """The reference, opened again where it may have grown, or where another run may lie there by now."""
        if self.one is None or may_grow(self.one):
            self.held.close()
            self.one = self.held.enter_context(self.reference())
            self.held.callback(setattr, self, "one", None)
            self.digests.read(self.one)
        return self.one

    def _asked(self, one: Run, run: Run) -> DiffResult:
        result = self.ask(one, run)
        if result.verdict is Verdict.DIVERGED and not self.reported:
            self.reported = True
            self.first(result)
        return result


def may_grow(reference: Run) -> bool:
    """Whether a reference may have more by now than when it was opened: it goes on, or is just being written anew."""
    return reference.state is RunState.RUNNING or reference.last_step is None


def may_be_judged(reference: Run, run: Run) -> bool:
    """Whether what a run has recorded so far stays.

    What a model computes before anything is trained may turn out to have been an evaluation, and is then taken back.
    """
    return run.state is not RunState.RUNNING or _trains(run) or not _trains(reference)


def _trains(run: Run) -> bool:
    """Whether anything is trained in the steps that are looked at: the first, the last and one between."""
    for rank in run.ranks:
        reader = run.rank(rank)
        phases = reader.sites.phase  # of sites that may have no record yet
        for row in {0, len(reader) // 2, len(reader) - 1} if len(reader) else ():
            if any(phases[site] in _TRAINING for site in reader.read_row(row).site.tolist()):
                return True
    return False
