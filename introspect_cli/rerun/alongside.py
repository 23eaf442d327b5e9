"""Compare a run with a reference while it is written, from another process.

Training must not wait for a comparison, nor do any of it. So it is asked from outside, as any reader would: steps whose
digests are those of the reference at the same number are passed over; where one differs the whole question is asked of
the run so far, as `diff` asks it, since a digest knows nothing of tolerance, of offsets, or of what one run did not
record. A comparison that takes longer than a step falls behind, looks at more steps at once the next time, and rests
twice as long as it worked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from introspect_cli.compare.result import DiffResult, Verdict
from introspect_cli.errors import StoreError
from introspect_cli.records import Phase
from introspect_cli.store.reader import Run, RunState, open_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Ask = Callable[[Run, Run], DiffResult]

PAUSE = 0.05
"""Seconds between two looks at a run that goes on, at least."""

_PATIENCE = 5
"""How often in a row a run may be unreadable: between two looks, a writer may be about to replace a file."""

_REST = 2
_TRAINING = {Phase.BACKWARD.value, Phase.OPTIMIZER.value}


@dataclass
class Digests:
    """What each step of a reference digests to, by rank and number; read again where that goes on itself."""

    by_rank: dict[int, dict[int, bytes]] = field(default_factory=dict)
    looked: dict[int, int] = field(default_factory=dict)

    def read(self, run: Run) -> None:
        """Read those of a reference."""
        for rank in run.ranks:
            entries = run.rank(rank).entries
            steps = zip(entries["step"].tolist(), _digests(entries), strict=True)
            self.by_rank[rank] = dict(steps)

    def differ(self, run: Run) -> bool:
        """Whether a step that was not looked at yet differs; other ranks than the reference's always do."""
        if set(run.ranks) - set(self.by_rank):
            return True
        found = False
        for rank in run.ranks:
            entries, last = run.rank(rank).entries, self.looked.get(rank, -1)
            reference = self.by_rank[rank]
            for step, digest in zip(entries["step"].tolist(), _digests(entries), strict=True):
                if step > last:
                    found |= reference.get(step, digest) != digest
            self.looked[rank] = int(entries["step"][-1]) if len(entries) else -1
        return found


def _digests(entries: object) -> list[bytes]:
    """The 16 bytes of each step; numpy's bytes would lose zeros at their end."""
    data = entries["digest"].tobytes()  # type: ignore[index] # a structured array
    return [data[at : at + 16] for at in range(0, len(data), 16)]


def alongside(
    reference: Callable[[], Run],
    path: Path,
    ask: Ask,
    first: Callable[[DiffResult], None],
    pause: float = PAUSE,
) -> DiffResult:
    """Compare until the run is over.

    Returns:
        the comparison of the whole run.

    Raises:
        StoreError: one of them cannot be read.
        UsageError: the two cannot be compared.
    """
    digests, one = Digests(), reference()
    told, waiting, failed, rest_until = False, False, 0, 0.0
    try:
        digests.read(one)
        while True:
            began = time.monotonic()
            try:
                with open_run(path) as run:
                    over = run.state is not RunState.RUNNING
                    if one.state is RunState.RUNNING:
                        one.close()
                        one = reference()
                        digests.read(one)
                    waiting = (digests.differ(run) or waiting) and not told
                    if over:
                        result = ask(one, run)
                        if result.verdict is Verdict.DIVERGED and not told:
                            first(result)
                        return result
                    if waiting and began >= rest_until and may_be_judged(one, run):
                        waiting, result = False, ask(one, run)
                        rest_until = time.monotonic() + _REST * (time.monotonic() - began)
                        if result.verdict is Verdict.DIVERGED:
                            told = True
                            first(result)
                failed = 0
            except StoreError:
                failed += 1
                if failed > _PATIENCE:
                    raise
            time.sleep(max(pause, _REST * (time.monotonic() - began)))
    finally:
        one.close()


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
