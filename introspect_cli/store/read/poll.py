"""A run looked at again and again while it is written, by whoever waits for it.

Between two looks a writer may be about to replace a file, or all of the run. So a run may be unreadable some times in a
row before that is an error; and who looks rests longer than a look took, so that training has the machine.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

from introspect_cli.errors import StoreError
from introspect_cli.store.read.run import RunState, open_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from introspect_cli.store.read.run import Run

Seen = TypeVar("Seen")

PATIENCE = 5
"""How often in a row a run may be unreadable."""


def poll(
    path: str | Path,
    look: Callable[[Run], Seen],
    *,
    opened: Callable[..., Run] = open_run,
    pause: float = 1.0,
    rest: float = 0.0,
    wait: bool = True,
    between: Callable[[], Any] = lambda: None,
    unreadable: Callable[[], Any] = lambda: None,
) -> Seen:
    """Look at a run, opened anew each time, until it is no longer being written; returns what the last look gave.

    Args:
        path: the run.
        look: called with the opened run; what it returns at last is returned.
        opened: opens the run at a path.
        pause: the least number of seconds between two looks.
        rest: the pause is at least so many times as long as the look before it took.
        wait: whether to wait for a run that is being written; else there is one look.
        between: called after each look, also one that failed, with the run closed.
        unreadable: called where a look failed and will be tried again.

    Raises:
        StoreError: the run could not be read `PATIENCE` times in a row and once more; without `wait` the first time.
    """
    failed = 0
    while True:
        began = time.monotonic()
        try:
            with opened(path) as run:
                over = run.state is not RunState.RUNNING or not wait
                seen = look(run)
            failed = 0
        except StoreError:
            failed += 1
            if failed > PATIENCE or not wait:
                raise
            over = False
            unreadable()
        between()
        if over:
            return seen
        time.sleep(max(pause, rest * (time.monotonic() - began)))
