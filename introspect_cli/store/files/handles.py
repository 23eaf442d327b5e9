"""Sources of bytes, open descriptors of a store that a script cannot close unnoticed, and the locks on them.

Who writes a store holds a lock (`flock`) on a descriptor that it keeps open, which the system drops with the process,
however that ends; a file system without locks behaves as if nobody ever held one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

_HIGH = 960
"""Where numbers of our descriptors begin: below the 1,024 that a process may usually have, above what others use."""

_ATTEMPTS = 5
_PAUSE = 0.01  # seconds; a reader that asks holds the lock for microseconds


def status_of(fd: int) -> os.stat_result | None:
    """`os.fstat` of a descriptor; None where it is not open."""
    try:
        return os.fstat(fd)
    except OSError:
        return None


def _identity(fd: int) -> tuple[int, int] | None:
    """(device, inode) of the file behind a descriptor; None where it is not open."""
    status = status_of(fd)
    return None if status is None else (status.st_dev, status.st_ino)


def _move_high(fd: int) -> int:
    """Move a descriptor to a number of `_HIGH` or above, so that low numbers stay as the script expects them.

    Returns:
        the new number, and the old one is closed; where the system refuses, or the number is that high, the old one.
    """
    if fd >= _HIGH:
        return fd
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:  # so many are not allowed
        return fd
    os.close(fd)
    return high


class Closing:
    """What has something open until it is closed, at the end of a `with` at the latest."""

    def close(self) -> None:
        """Close what is open; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class Source(Closing, ABC):
    """Bytes that are read by ranges: a file, or pieces in object storage.

    Attributes:
        path: the file's path or URL, for messages.
    """

    path: str

    @abstractmethod
    def size(self) -> int:
        """Number of bytes at this moment."""

    @abstractmethod
    def read(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to before `end`; fewer where the source ends earlier."""

    @property
    def unfinished(self) -> float:
        """Time of an upload that was to be continued, in seconds since 1970; 0 where complete, or on disk."""
        return 0.0

    def is_locked(self) -> bool:
        """Whether a writer may still append; False where the kind of source cannot tell."""
        return False

    def ranges(self, begin: int, end: int) -> Sequence[Any]:  # noqa: ARG002 - nothing on disk is read beforehand
        """What of object storage holds the bytes `begin` to `end`, for `remote.pieces.prefetch`; empty on disk."""
        return ()

    def blocks(self, begin: int = 0, end: int | None = None, most: int = 8 << 20) -> Iterator[bytes]:
        """The bytes from `begin` to before `end` (None: the end of the source), in blocks of at most `most` bytes."""
        end = self.size() if end is None else end
        while begin < end and (data := self.read(begin, min(begin + most, end))):
            yield data
            begin += len(data)

    def on_disk(self) -> Handle:
        """A file with the same bytes that can be mapped into memory: itself, or else an unnamed temporary copy."""
        import tempfile

        with tempfile.TemporaryFile() as file:
            file.writelines(self.blocks())
            file.flush()
            return Handle(os.dup(file.fileno()), self.path)


class Descriptor(Closing):
    """An open file descriptor that closes with its owner, or at the end of a `with`.

    A script may close descriptors that are not its own (`os.closerange(3, 100)`, as daemons do) and get the numbers for
    its files: what is behind a number is asked before it is written to or closed.
    """

    fd = -1  # also where an interrupt comes before there is one
    _file: tuple[int, int] | None = None

    def __init__(self, fd: int, path: str) -> None:
        """Take over the open descriptor `fd`, moved to a number from `_HIGH` on.

        `path` is where it may be opened again.
        """
        self.fd = fd = _move_high(fd)
        self.path = path
        self._file = _identity(fd)

    def is_ours(self) -> bool:
        """Whether the descriptor still refers to the file it was opened on (same device and inode)."""
        return self.fd >= 0 and _identity(self.fd) == self._file

    def open_again(self, flags: int) -> None:
        """Open `path` again with `flags`; FileNotFoundError where nothing, or another file, is there by now.

        The number that it had is not closed: it may be the script's.
        """
        fd = _move_high(os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW))
        if _identity(fd) != self._file:
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "its descriptors were closed and its files replaced")
        self.fd = fd

    def close(self) -> None:
        """Close the descriptor, unless the script has closed and reused its number; a second call does nothing."""
        ours, fd, self.fd = self.is_ours(), self.fd, -1
        if ours:
            os.close(fd)

    def __del__(self, _ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ends():  # python has begun to take modules apart; the system closes what is left
            self.close()


class Handle(Descriptor, Source):
    """An open file on disk, for reading."""

    def on_disk(self) -> Handle:
        """The handle itself."""
        return self

    def is_locked(self) -> bool:
        """Whether another process holds the exclusive lock; False where the file system has no locks.

        It is found out by taking a shared lock for a moment.
        """
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self.fd).st_size

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to before `end`, fewer where the file ends before."""
        pieces = []
        while begin < end and (piece := os.pread(self.fd, min(end - begin, 1 << 30), begin)):
            pieces.append(piece)
            begin += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def take_lock(fd: int) -> bool:
    """Take the exclusive lock until `fd` is closed; waits some 50 ms for another process, then returns False.

    True, without a lock, where the file system has none.
    """
    for _ in range(_ATTEMPTS):
        if _try_lock(fd):
            return True
        time.sleep(_PAUSE)
    return _try_lock(fd)


def _try_lock(fd: int) -> bool:
    """Take the lock at once; False where another process has it, True also where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True
