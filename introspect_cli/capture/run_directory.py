"""Where a run is written: one directory for one process."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.store.files import RUNS

if TYPE_CHECKING:
    from introspect_cli.script import Target


def distributed_rank() -> tuple[int, int]:
    """The rank of this process and their number, as launchers such as torchrun tell them; (0, 1) where none did."""
    try:
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
    return (rank, ranks) if 0 <= rank < ranks else (0, 1)


def run_directory(target: Target | None, asked: Path | None) -> Path:
    """The directory that this process writes to.

    Args:
        target: what runs; None where the caller runs it.
        asked: the directory that the user asked for; None for a fresh one.
    """
    rank, ranks = distributed_rank()
    if ranks == 1:
        return asked or own_run(target)
    # One process, one store: a lock cannot be shared by processes that nobody else ties together.
    together = asked or fresh_run(target)
    return together.with_name(f"{together.name}-rank{rank}")


def fresh_run(target: Target | None) -> Path:
    """A directory under `introspect-runs/` that does not exist yet, named by the script and the time."""
    name = "run"
    if target is not None:
        name = target.module or Path(target.script or "run").stem or "run"
    stem = f"{name}-{dt.datetime.now().strftime('%Y%m%d-%H%M%S')}"  # noqa: DTZ005 - the user's own clock, for the user
    path, number = Path(RUNS) / stem, 1
    while path.exists():
        number += 1
        path = Path(RUNS) / f"{stem}-{number}"
    return path


def own_run(target: Target | None) -> Path:
    """A fresh run's directory, made, so that captures that start in the same second have one each."""
    while True:
        path = fresh_run(target)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                return path  # whoever opens the store says what stands in the way
            continue
        except OSError:
            return path  # as above
        return path
