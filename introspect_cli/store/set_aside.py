"""Room for a run where there is something already: nothing is lost that is no run, or is being written."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING

from introspect_cli.errors import StoreError
from introspect_cli.store.closed import CLOSED
from introspect_cli.store.files import LOCK, MANIFEST, Folder, any_lock_held, reason
from introspect_cli.store.handles import Handle, take_lock

if TYPE_CHECKING:
    from pathlib import Path

_RUN_FILES = re.compile(
    r"manifest\.yaml|settings|sources|tensors|children|label|\.lock|shared|rank\d{1,6}|attempt\d{1,4}|\.manifest\.yaml\.\d+|index\.bin"
    r"|[a-z]+\.arrow|(labels|divergence)\.jsonl|(totals|closed)\.bin|records-\d+\.arrow|\.((index|closed)\.bin|[a-z]+\.arrow)\.\d+"
)


def remove_run(path: Path) -> None:
    """Delete a run that nobody is writing."""
    try:
        refuse_or_remove(path, force=True)
    except OSError as error:
        raise StoreError(f"cannot remove {path}: {reason(error)}") from None


def refuse_or_remove(path: Path, *, force: bool) -> None:
    """Make room for a run that other processes will write.

    Raises:
        StoreError: a run is there (without `force`), is being written, or something else is there.
    """
    old = set_aside(path, force=force)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def set_aside(path: Path, *, force: bool) -> Path | None:
    """Make sure nothing is lost at `path`; where a run was moved to that may be deleted, if one was.

    The lock of the old run is held while it is moved, so that of two captures started at once one is refused.
    """
    try:
        folder = Folder.at(str(path))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        if not path.exists():
            return None  # something above it is a file, and making it will say so
        raise StoreError(f"{path} is a file; choose another directory") from None
    try:
        names = folder.names()
        if names in ([], [LOCK]):  # the second is what a capture killed at its very start leaves
            return None
        strange = next((name for name in names if not _RUN_FILES.fullmatch(name)), None)
        if strange is not None or not {MANIFEST, LOCK, CLOSED}.intersection(names):
            what = f"holds {strange!r}" if strange is not None else "has no manifest"
            raise StoreError(f"{path} is not (only) a run: it {what}; choose another directory")
        lock = lock_file(folder)
        try:
            refuse_unless(take_lock(lock.fd), path)
            if moved(folder, path):
                return None  # another rank of this launch was quicker
            refuse_unless(not any_lock_held(folder), path)
            if not force:
                raise StoreError(
                    f"{path} holds a run already; choose another directory, or replace it (--force, force=True)"
                )
            aside = path.with_name(f".{path.name}.replaced-{os.getpid()}-{os.urandom(4).hex()}")
            path.rename(aside)
            return aside
        finally:
            lock.close()
    finally:
        folder.close()


def moved(folder: Folder, path: Path) -> bool:
    """Whether another directory is at the path by now than the one that was opened."""
    try:
        return not os.path.samestat(os.fstat(folder.fd), path.stat())
    except FileNotFoundError:
        return True


def lock_file(folder: Folder) -> Handle:
    """The lock of a run, made where there is none."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return Handle(os.open(LOCK, flags, 0o666, dir_fd=folder.fd), f"{folder.path}/{LOCK}")


def refuse_unless(unlocked: bool, path: Path) -> None:
    """Say that another capture writes a run."""
    if not unlocked:
        raise StoreError(f"{path} is being written by another capture; choose another directory")
