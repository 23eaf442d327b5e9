"""One look at a run that may go on: how far it is, how fast, its curves, and what a check finds so far."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING

from introspect_cli.health.check import check_tables
from introspect_cli.health.curves import Curve, curves
from introspect_cli.health.reading import read_table
from introspect_cli.store.reader import Run, RunState

if TYPE_CHECKING:
    from introspect_cli.health.findings import CheckResult
    from introspect_cli.labels import Labels


@dataclass(frozen=True)
class Look:
    """What is seen of a run.

    Attributes:
        path: where it is.
        state: whether it goes on, or how it ended.
        steps: steps that can be read, of the rank with most.
        last: the last of them that every rank has; None without any.
        labels: what its framework calls that step.
        rate: steps of the script in a second; None where nothing tells.
        recent: whether that is the rate of late; else it is the average since the script started.
        curves: losses, norms and learning rates of its lowest rank.
        check: what a check of it finds.
        behind: steps that the run went on while it was looked at.
    """

    path: str
    state: RunState
    steps: int
    last: int | None
    labels: Labels
    rate: float | None
    curves: tuple[Curve, ...]
    check: CheckResult
    recent: bool = False
    behind: int = 0

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.state is not RunState.RUNNING


def look(run: Run) -> Look:
    """Look at a run that was opened just now.

    Raises:
        StoreError: it cannot be read.
    """
    tables = {rank: read_table(run.rank(rank)) for rank in run.ranks}
    drawn = curves(tables[run.ranks[0]]) if run.ranks else ()
    last = run.last_step
    labels = run.rank(run.ranks[0]).labels.get(last, {}) if run.ranks and last is not None else {}
    steps = max((len(run.rank(rank)) for rank in run.ranks), default=0)
    check = check_tables(str(run.path), list(tables.values()))
    return Look(str(run.path), run.state, steps, last, labels, _rate(run), drawn, check)


def _rate(run: Run) -> float | None:
    """Steps in a second from the start of the script to now, or to its end."""
    began, ended = _time(run.manifest.get("started")), _time(run.manifest.get("ended"))
    if run.state is RunState.RUNNING:
        ended = dt.datetime.now(dt.timezone.utc)
    if began is None or ended is None or run.last_step is None or ended <= began:
        return None
    return (run.last_step + 1) / (ended - began).total_seconds()


def _time(value: object) -> dt.datetime | None:
    try:
        time = dt.datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return time if time.tzinfo else None
