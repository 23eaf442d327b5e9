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
from introspect_cli.errors import StoreError, UsageError
from introspect_cli.records import Phase
from introspect_cli.store.read.run import Run, RunState, open_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Ask = Callable[[Run, Run], DiffResult]

PAUSE = 0.05
"""Seconds between two looks at a run that goes on, at least."""

_PATIENCE = 5
"""How often in a row one of the runs may be unreadable: a writer may be about to replace a file, or all of it."""

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
    digests = Digests()
    one: Run | None = None
    reported, waiting, failed, rest_until, last = False, False, 0, 0.0, -1
    with ExitStack() as held:
        while True:
            began = time.monotonic()
            try:
                with open_run(path) as run:
                    over = run.state is not RunState.RUNNING
                    if one is None or may_grow(one):
                        held.close()
                        one = held.enter_context(reference())
                        digests.read(one)
                    waiting = (digests.differ(run) or waiting) and not reported
                    if over:
                        result = ask(one, run)
                        if result.verdict is Verdict.DIVERGED and not reported:
                            first(result)
                        return result
                    if waiting and began >= rest_until and may_be_judged(one, run):
                        with suppress(UsageError):  # what is selected may only come
                            result = ask(one, run)
                            waiting, reported = False, result.verdict is Verdict.DIVERGED
                            if reported:
                                first(result)
                        rest_until = time.monotonic() + _REST * (time.monotonic() - began)
                    if not (waiting or reported) and digests.last != last:
                        last = digests.last
                        agreed(last)
                failed = 0
            except StoreError:
                failed += 1
                if failed > _PATIENCE:
                    raise
                one = None  # another run may lie there by now
            time.sleep(max(pause, _REST * (time.monotonic() - began)))


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
