"""Compare a run with a reference while it is written, from another process.

Training must not wait for a comparison, nor do any of it. So it is asked from outside, as any reader would: with each
new step the whole question is asked of the run so far, as `diff` asks it; that takes milliseconds while digests agree.
A comparison that takes longer than a step falls behind, looks at more steps at once the next time, and rests twice as
long as it worked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.compare.result import DiffResult, Verdict
from introspect_cli.errors import UsageError
from introspect_cli.records import Phase
from introspect_cli.store.run import Run, RunState, poll

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAUSE = 0.05
"""Seconds between two looks at a run that goes on, at least."""

_REST = 2
"""How many times as long as a look took the pause after it is, at least."""
_TRAINING = {Phase.BACKWARD.value, Phase.OPTIMIZER.value}


@dataclass
class LiveReference:
    """A reference run, opened again while it may grow, for comparison with a run in progress.

    Attributes:
        open_reference: opens the reference.
        compare: compares the reference with the run.
    """

    open_reference: Callable[[], Run]
    compare: Callable[[Run, Run], DiffResult]
    _opened: Run | None = None

    def reference(self) -> Run:
        """The reference, open until `close`; opened again in each call while it is being written or has no step."""
        if self._opened is None or self._opened.state is RunState.RUNNING or self._opened.last_step is None:
            self.close()
            self._opened = self.open_reference()
        return self._opened

    def close(self) -> None:
        """Close the reference; `reference` opens it again."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def result(self, run: Run) -> DiffResult | None:
        """Compare the reference with a run; None while the run goes on and nothing can be said of it yet.

        That is while it has no record of training (backward or optimizer), but the reference has: what a model computes
        before anything is trained may turn out to have been an evaluation. It is also while the run has no rank, or has
        nothing of what was selected.

        Raises:
            UsageError: the run is over, and the two cannot be compared.
        """
        one, running = self.reference(), run.state is RunState.RUNNING
        if running and not (_has_training(run) or (run.ranks and not _has_training(one))):
            return None
        try:
            return self.compare(one, run)
        except UsageError:  # what is selected may only come
            if running:
                return None
            raise


def compare_live(
    against: LiveReference,
    path: Path,
    first: Callable[[DiffResult], None],
    agreed: Callable[[int], None] = lambda _step: None,
    pause: float = PAUSE,
) -> DiffResult:
    """Compare a run with a reference while it is written, until it is over.

    Args:
        against: the reference.
        path: the run.
        first: called at most once, with the first comparison that is DIVERGED; then only the last comparison follows.
        agreed: called before that with the last step that all ranks have and up to which the two do not diverge, each
            time it is another.
        pause: seconds between two looks at the run, at least.

    Returns:
        the comparison of the whole run.

    Raises:
        StoreError: one of them cannot be read.
        UsageError: the two cannot be compared.
    """
    last: int | None = None
    is_reported = False  # to `first`

    def look(run: Run) -> DiffResult | None:
        """Compare the run so far where it has a new step, or is over.

        Calls `first` once, with the first result that is DIVERGED; before that, `agreed` with each new step. Returns
        the result, None where none was made; the last look makes one.
        """
        nonlocal last, is_reported
        is_over = run.state is not RunState.RUNNING
        if not is_over and (is_reported or run.last_step == last):
            return None
        last, result = run.last_step, against.result(run)
        if result is not None and result.verdict is Verdict.DIVERGED and not is_reported:
            is_reported = True
            first(result)
        elif result is not None and result.counts.steps_compared and last is not None and not is_over:
            agreed(last)
        return result

    try:
        result = poll(path, look, pause=pause, rest=_REST, unreadable=against.close)
    finally:
        against.close()
    assert result is not None  # the run is over
    return result


def _has_training(run: Run) -> bool:
    """Whether any rank's first, middle or last step has a record of a training phase."""
    for rank in run.ranks:
        reader = run.rank(rank)
        phases = reader.sites.phase  # of sites that may have no record yet
        for row in {0, len(reader) // 2, len(reader) - 1} if len(reader) else ():
            if any(phases[site] in _TRAINING for site in reader.read_row(row).site.tolist()):
                return True
    return False
