"""Room for a run, and the part of it that a process writes: nothing is lost that is no run, or is being written.

Several processes may write one run, a rank each. Ranks start, end and die when they like, on machines that share a disk
or do not, and training may wait for none of them because of a capture. Each rank computes the same id from what its
launcher told it. Whoever comes first makes the directory and a manifest that names the launch; a file appears whole or
not at all, so it does not matter who that is. From then on a rank writes inside `rankK/` alone: its own manifest,
settings, tensors and lock. Nobody waits for anybody, and readers put the ranks together, see `read.manifests`.

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
from introspect_cli.store.files.folders import (
    FORMAT,
    LABEL,
    LOCK,
    LOG,
    MANIFEST,
    Folder,
    any_lock_held,
    is_locked,
    reason,
)
from introspect_cli.store.files.handles import Handle, take_lock
from introspect_cli.store.format import documents
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from pathlib import Path


_ATTEMPTS = 50

IN_FLIGHT = "collectives.txt"
"""A rank's file of the collectives that began in the step under way; gone once the rank has ended."""


@dataclass(frozen=True)
class Launch:
    """Identity of this process among those that write one run.

    Attributes:
        id: 32 hex digits, the same on every rank and of no other launch or attempt.
        job: the same for all attempts of a launch.
        rank: number of this process.
        world_size: number of ranks.
        attempt: number of restarts by the launcher.
        local_rank: number of this process on its machine; None where the launcher does not say.
    """

    id: str
    job: str
    rank: int
    world_size: int
    attempt: int = 0
    local_rank: int | None = None


def join_launch(path: Path, launch: Launch, *, force: bool) -> Path:
    """Make or find the directory of a launch, and return the path of this rank's directory in it, which is not made.

    A further attempt has a directory `attemptN` in that of the first.

    Args:
        path: the run's directory.
        launch: this process's part.
        force: whether another run that is there, or what this rank has written there, is deleted.

    Raises:
        StoreError: another run is there, or this rank has been written already.
    """
    if launch.attempt:
        _join(path, launch, force=force, first_attempt=True)
        path = path / f"attempt{launch.attempt}"
        path.mkdir(exist_ok=True)
    _join(path, launch, force=force)
    rank = path / f"rank{launch.rank}"
    if rank.is_dir() and any(name != LOCK for name in os.listdir(rank)):  # noqa: PTH208 -- names alone
        refuse_or_remove(rank, force=force)
    return rank


def _join(path: Path, launch: Launch, *, force: bool, first_attempt: bool = False) -> None:
    """Make `path` the directory of this launch, or find that it is.

    Args:
        path: the directory.
        launch: this process's part.
        force: whether another run that is there is removed.
        first_attempt: whether it is that of the launch's first attempt, which has the same job and another id.

    Raises:
        StoreError: another run is there (without `force`), or is being written.
    """
    for _ in range(_ATTEMPTS):
        ids = _launch_at(path)
        if ids is not None and launch.job in ids and (first_attempt or launch.id in ids):
            return
        if ids is None:
            path.mkdir(parents=True, exist_ok=True)
            _announce(path, launch)
        else:
            refuse_or_remove(path, force=force)
    raise StoreError(f"{path} is being written by another launch; choose another directory")


def _launch_at(path: Path) -> tuple[str, ...] | None:
    """(id, job) of the launch at a path; () for any other run, directory or file, and for a manifest that is damaged.

    None for nothing, and for a directory that is empty but for a lock file.
    """
    try:
        folder = Folder.at(str(path))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return ()
    with folder:
        names = [name for name in folder.names() if not name.startswith(f".{MANIFEST}.")]
        if names in ([], [LOCK]):
            return None
        try:
            data = folder.read_file(MANIFEST, 1 << 16)
            manifest = documents.load(data, f"{path}/{MANIFEST}")
        except (FileNotFoundError, StoreError):
            return ()
        launch = manifest.get("launch") if isinstance(manifest, dict) else None
        return (str(manifest["id"]), str(launch.get("job"))) if isinstance(launch, dict) and "id" in manifest else ()


def _announce(path: Path, launch: Launch) -> None:
    """Write the launch's manifest, unless another rank has."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "id": launch.id,
        "tool": {"name": "introspect-cli", "version": __version__},
        "launch": {"world_size": launch.world_size, "attempt": launch.attempt, "job": launch.job},
    }
    with Folder.at(str(path)) as folder, suppress(FileExistsError):
        folder.replace(MANIFEST, [documents.dump(manifest, MANIFEST, launch.id)], 0o600, new=True)


_RUN_FILES = re.compile(
    r"manifest\.yaml|settings|sources|tensors|children|label|\.lock|rank\d{1,6}|attempt\d{1,4}|\.manifest\.yaml\.\d+"
    r"|(log|heads)\.bin|divergence\.jsonl|collectives\.txt|\.(log|heads)\.bin\.\d+"
)


def remove_run(path: Path) -> None:
    """Delete a run, nothing where there is none; StoreError where it is being written or cannot be removed."""
    try:
        refuse_or_remove(path, force=True)
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {reason(error)}") from None


def write_label(path: str | Path, text: str) -> None:
    """Write the user's label of the run at `path`; "" removes it.

    Raises:
        StoreError: it is in object storage, no run, or cannot be written.
    """
    from introspect_cli.store.remote.objects import is_remote
    from introspect_cli.store.remote.pack import open_store  # which a capture does without

    if is_remote(path):
        raise StoreError(f"cannot label {path}: label the run where it was recorded, and publish it again")
    open_store(path).close()
    with Folder.at(str(path)) as folder:
        try:
            if text:
                folder.replace(LABEL, [text.encode()], 0o644)
            else:
                with suppress(FileNotFoundError):
                    os.unlink(LABEL, dir_fd=folder.fd)
        except OSError as error:
            raise StoreError(f"cannot label {path}: {reason(error)}") from None


def refuse_or_remove(path: Path, *, force: bool) -> None:
    """Delete the run at `path`, where there is one; what cannot be deleted stays under a temporary name.

    Raises:
        StoreError: a run is there (without `force`), is being written, or something else is there.
    """
    old = set_aside(path, force=force)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def set_aside(path: Path, *, force: bool) -> Path | None:
    """Move the run at `path` to a temporary name, which is returned; None where nothing is there.

    Nothing is also a directory that is empty but for a lock file, and a run that another process has just moved. Its
    lock is held meanwhile, so that of two captures started at once one is refused.

    Raises:
        StoreError: a run is there (without `force`), is being written, or something else is there.
    """
    try:
        folder = Folder.at(str(path))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        if not path.exists():
            return None  # something above it is a file, and making it will say so
        raise StoreError(f"{path} is a file; choose another directory") from None
    with folder:
        names = folder.names()
        if names in ([], [LOCK]):  # the second is what a capture killed at its very start leaves
            return None
        unexpected = next((name for name in names if not _RUN_FILES.fullmatch(name)), None)
        if unexpected is not None or not {MANIFEST, LOCK, LOG}.intersection(names):
            what = f"holds {unexpected!r}" if unexpected is not None else "has no manifest"
            raise StoreError(f"{path} is not (only) a run: it {what}; choose another directory")
        with lock_file(folder) as lock:
            refuse_unless(take_lock(lock.fd), path)
            if is_moved(folder, path):
                return None  # another rank of this launch was quicker
            refuse_unless(not is_locked(folder, LOG) and not any_lock_held(folder), path)
            if not force:
                raise StoreError(
                    f"{path} holds a run already; choose another directory, or replace it (--force, force=True)"
                )
            aside = path.with_name(f".{path.name}.replaced-{os.getpid()}-{os.urandom(4).hex()}")
            path.rename(aside)
            return aside


def is_moved(folder: Folder, path: Path) -> bool:
    """Whether `path` is no longer the directory opened as `folder`, or no longer there."""
    try:
        return not os.path.samestat(os.fstat(folder.fd), path.stat())
    except FileNotFoundError:
        return True


def lock_file(folder: Folder) -> Handle:
    """Open the run's lock file, not locked yet; create it where there is none."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return Handle(os.open(LOCK, flags, 0o666, dir_fd=folder.fd), f"{folder.path}/{LOCK}")


def refuse_unless(unlocked: bool, path: Path) -> None:
    """Raise StoreError ("is being written by another capture") unless `unlocked`."""
    if not unlocked:
        raise StoreError(f"{path} is being written by another capture; choose another directory")
