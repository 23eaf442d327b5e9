"""Follow a run while it is written, and hand on each step that is complete.

What publishes must never hold up training, draw from its random generators, import into it, or take it down. So it is
another process, which reads the store as any reader does: a run is readable while it goes on, and says itself whether
it still does. A logger that hangs or fails costs its own numbers and nothing else.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from introspect_cli.errors import StoreError
from introspect_cli.store.reader import RunState, open_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from introspect_cli.store.rank_reader import RankReader

_PATIENCE = 5
"""How often in a row a run may be unreadable: between two looks, a writer may be about to replace a file."""


def follow(
    path: str | Path,
    take: Callable[[RankReader, int], None],
    *,
    pause: float = 1.0,
    wait: bool = True,
    rank: int | None = None,
    look: Callable[[], None] = lambda: None,
) -> tuple[int, RunState]:
    """Hand on every step of a run's lowest rank, in order, until the run is over.

    Args:
        path: the run.
        take: called with the rank and the number of a step.
        pause: seconds between two looks.
        wait: whether to wait for a run that is being written; else what is there is all.
        rank: the only one to look at; the lowest of all, where it is None.
        look: called after each look.

    Returns:
        how many steps there were, and how the run ended.

    Raises:
        StoreError: the run cannot be read.
    """
    last, count, failed = -1, 0, 0
    while True:
        try:
            with open_run(path, only=None if rank is None else {rank}) as run:
                state = run.state
                reader = run.rank(run.ranks[0]) if run.ranks else None
                new = [step for step in reader.entries["step"].tolist() if step > last] if reader is not None else []
                for step in new:
                    assert reader is not None
                    take(reader, step)
                    last, count = step, count + 1
            failed = 0
        except StoreError:
            failed += 1
            if failed > _PATIENCE or not wait:
                raise
            state = RunState.RUNNING
        look()
        if state is not RunState.RUNNING or not wait:
            return count, state
        time.sleep(pause)
