"""Where a run is written: one directory for one process, or for all processes of a launch."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from pathlib import Path
from typing import TYPE_CHECKING

from introspect_cli.store.files import RUNS

if TYPE_CHECKING:
    from introspect_cli.script.target import Target
    from introspect_cli.store.launch import Launch


def run_directory(target: Target | None, asked: Path | None, launch: Launch | None) -> Path:
    """The directory of the run that this process writes, or writes a part of; a fresh one where none was asked for."""
    if asked is not None:
        return asked
    return new_run(target) if launch is None else _common_run(target, launch)


def _common_run(target: Target | None, launch: Launch) -> Path:
    """A fresh run's directory that all ranks of a launch come to: the first writes down the name for the others."""
    runs, number = Path(RUNS), 1
    while True:
        marker = runs / (f".launch-{launch.job[:16]}" + (f"-{number}" if number > 1 else ""))
        try:
            path = runs / _written_once(marker, fresh_run(target).name)
        except OSError:
            return fresh_run(target)  # whoever opens the store says what stands in the way
        attempt = path / f"attempt{launch.attempt}" if launch.attempt else path
        if not (attempt / f"rank{launch.rank}").exists():
            return path
        number += 1  # this rank has captured a script under this launcher before


def _written_once(marker: Path, name: str) -> str:
    marker.parent.mkdir(parents=True, exist_ok=True)
    temporary = marker.with_name(f"{marker.name}.{os.getpid()}")
    temporary.write_text(name)
    with contextlib.suppress(FileExistsError):
        os.link(temporary, marker)
    temporary.unlink()
    return Path(marker.read_text()).name


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


def new_run(target: Target | None) -> Path:
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
