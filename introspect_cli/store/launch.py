"""The directory that all processes of one launch write, a rank each.

Ranks start, end and die when they like, on machines that share a disk or do not, and training may wait for none of them
because of a capture. Each rank computes the same id from what its launcher told it. Whoever comes first makes the
directory and a manifest that names the launch; a file appears whole or not at all, so it does not matter who that is.
From then on a rank writes inside `rankK/` alone: its own manifest, settings, tensors and lock. Nobody waits for
anybody, and readers put the ranks together.

A launcher that restarts its processes begins another attempt, a run of its own in `attemptN/`.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError
from introspect_cli.store import documents
from introspect_cli.store.files import FORMAT, LOCK, MANIFEST, Folder, write_all
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ATTEMPT_NAME = re.compile(r"attempt([1-9]\d{0,3})")
_ATTEMPTS = 50


@dataclass(frozen=True)
class Launch:
    """Which part of a run this process writes.

    Attributes:
        id: 32 hex digits, the same on every rank and of no other launch or attempt.
        job: the same for all attempts of a launch.
        rank: this process.
        world_size: how many there are.
        attempt: how often the launcher has restarted them.
        local_rank: this process among those of its machine; None where the launcher does not say.
    """

    id: str
    job: str
    rank: int
    world_size: int
    attempt: int = 0
    local_rank: int | None = None


def joined(path: Path, launch: Launch, set_aside: Callable[[Path], Path | None]) -> Path:
    """Make or find the directory of a launch; the directory in it that is this rank's.

    Args:
        path: the run's directory.
        launch: this process's part.
        set_aside: moves away another run that may be replaced, and says where to; refuses one that may not.

    Raises:
        StoreError: another run is there, or this rank has been written already.
    """
    if launch.attempt:
        _join(path, launch, set_aside, first_attempt=True)
        path = path / f"attempt{launch.attempt}"
        path.mkdir(exist_ok=True)
    _join(path, launch, set_aside)
    rank = path / f"rank{launch.rank}"
    if rank.is_dir() and any(name != LOCK for name in os.listdir(rank)):  # noqa: PTH208 -- names alone
        old = set_aside(rank)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
    return rank


def _join(path: Path, launch: Launch, set_aside: Callable[[Path], Path | None], *, first_attempt: bool = False) -> None:
    for _ in range(_ATTEMPTS):
        found = _found_at(path)
        if found is not None and launch.job in found and (first_attempt or launch.id in found):
            return
        if found is None:
            path.mkdir(parents=True, exist_ok=True)
            _announce(path, launch)
            continue
        old = set_aside(path)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
    raise StoreError(f"{path} is being written by another launch; choose another directory")


def _found_at(path: Path) -> tuple[str, ...] | None:
    """Id and job of the launch at a path, empty for any other run or thing; None where nothing is."""
    try:
        folder = Folder.at(str(path))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return ()
    try:
        names = [name for name in folder.names() if not name.startswith(f".{MANIFEST}.")]
        if names in ([], [LOCK]):
            return None
        try:
            data = folder.read_file(MANIFEST, 1 << 16)
            found = documents.load(data, f"{path}/{MANIFEST}")
        except (FileNotFoundError, StoreError):
            return ()
        told = found.get("launch") if isinstance(found, dict) else None
        return (str(found["id"]), str(told.get("job"))) if isinstance(told, dict) and "id" in found else ()
    finally:
        folder.close()


def _announce(path: Path, launch: Launch) -> None:
    """Write the manifest of a launch, unless another rank has."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "id": launch.id,
        "tool": {"name": "introspect-cli", "version": __version__},
        "launch": {"world_size": launch.world_size, "attempt": launch.attempt, "job": launch.job},
    }
    folder = Folder.at(str(path))
    temporary = f".{MANIFEST}.{launch.rank}{os.getpid()}"
    try:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder.fd)
        fd = folder.create(temporary, 0o600)
        try:
            write_all(fd, [documents.dump(manifest, MANIFEST, launch.id)])
        finally:
            os.close(fd)
        with suppress(FileExistsError):
            os.link(temporary, MANIFEST, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        os.unlink(temporary, dir_fd=folder.fd)
    finally:
        folder.close()
