"""Compiled kernels as files: one directory, shared by processes that start at once.

The problem: machine code that is damaged, half written or put there by someone else must not be run, and several
processes that need it at once should not all compile it. The way: a file is named by a hash of its contents, checked
before it is loaded, and appears by being renamed; whoever compiles holds a lock, which the system takes back if it
is killed; and a directory that others could write to is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from typing import IO, TYPE_CHECKING, Final

from introspect_cli.tensors.machine_code import Code, in_memory, linked, mapped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

try:
    import fcntl
except ImportError:  # only POSIX has it
    fcntl = None  # type: ignore[assignment]

_PATIENCE: Final = 300.0
"""Seconds to wait for a process that compiles; it may have been stopped."""
_PAUSE: Final = 0.05
"""Seconds between looks."""


def private(parent: Path, name: str) -> Path | None:
    """A directory that exists, is ours alone to write and can be written; None otherwise.

    Raises:
        OSError: it cannot be made.
    """
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = parent.lstat()
    if not stat.S_ISDIR(about.st_mode):
        return None
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
        return None
    path = parent / name
    path.mkdir(mode=0o700, exist_ok=True)
    return path if os.access(path, os.W_OK | os.X_OK) else None


def _is_held(lock: IO[bytes]) -> bool:
    """Take a lock, if that can be done; whether another process has it."""
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system that knows no locks
            return False
    return False


def _name(content: bytes, suffix: str) -> str:
    return f"{hashlib.blake2b(content, digest_size=16).hexdigest()}{suffix}"


class Binaries:
    """The files in one directory.

    Args:
        directory: exists.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Have other processes wait, where the file system knows locks, and not for ever.

        Raises:
            OSError: nothing can be written here.
        """
        with (self._directory / "lock").open("wb") as lock:
            end = time.monotonic() + _PATIENCE
            while _is_held(lock) and time.monotonic() < end:
                time.sleep(_PAUSE)
            yield

    def load(self) -> Code | None:
        """What can be loaded of what is there: the shared library, or else the object file; None if nothing."""
        for suffix in (".so", ".o"):
            for path in sorted(self._directory.glob(f"*{suffix}")):
                content = path.read_bytes()
                if path.name != _name(content, suffix):
                    continue
                with contextlib.suppress(OSError, ImportError, RuntimeError):
                    return mapped(path) if suffix == ".so" else in_memory(content)
        return None

    def keep(self, binary: bytes) -> None:
        """Write an object file, and what a linker makes of it.

        Raises:
            OSError: no room, or not allowed.
        """
        for suffix, content in ((".so", linked(binary)), (".o", binary)):
            if content is None:
                continue
            path = self._directory / _name(content, suffix)
            new = path.with_suffix(f".{os.getpid()}")
            new.write_bytes(content)
            new.replace(path)
