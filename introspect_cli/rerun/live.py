"""A reference run that a run is compared with while it is written, from another process.

Training must not wait for a comparison, nor do any of it. So it is asked from outside, as any reader would: with each
new step the whole question is asked of the run so far, as `diff` asks it; that takes milliseconds while digests agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.errors import UsageError
from introspect_cli.records import Phase
from introspect_cli.store.run import Run, RunState

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.result import DiffResult

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


def _has_training(run: Run) -> bool:
    """Whether any rank's first, middle or last step has a record of a training phase."""
    for rank in run.ranks:
        reader = run.rank(rank)
        phases = reader.sites.phase  # of sites that may have no record yet
        for row in {0, len(reader) // 2, len(reader) - 1} if len(reader) else ():
            if any(phases[site] in _TRAINING for site in reader.read_row(row).site.tolist()):
                return True
    return False
