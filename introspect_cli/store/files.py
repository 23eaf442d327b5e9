"""Files inside a store: their names, and how they are opened and locked so that nothing outside can be reached.

Who writes a store holds a lock (`flock`) on a descriptor that it keeps open, which the system drops with the process,
however that ends; a file system without locks behaves as if nobody ever held one.

A store from a stranger may hold symbolic links to other files, pipes that never answer, and names with `..`; and a
script may change its directory, or have its store renamed, while it is captured. So there is one descriptor for the
store's directory, everything is opened relative to it, links are refused, and only regular files and directories are
accepted.

Nothing here needs numpy: a capture makes its directory before the script may have loaded numpy itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import StoreError, scarcity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Self


_HIGH = 960
"""Where numbers of our descriptors begin: below the 1,024 that a process may usually have, above what others use."""

_ATTEMPTS = 5
_PAUSE = 0.01  # seconds; a reader that asks holds the lock for microseconds


def _identity(fd: int) -> tuple[int, int] | None:
    """(device, inode) of the file behind a descriptor; None where it is not open."""
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


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
        """What of object storage holds the bytes `begin` to `end`, for `remote.prefetch`; empty on disk."""
        return ()


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

    def is_locked(self) -> bool:
        """Whether another process holds the exclusive lock; False where the file system has no locks.

        It is found out by taking a shared lock for a moment.
        """
        return not (_lock(self.fd, fcntl.LOCK_SH) and _lock(self.fd, fcntl.LOCK_UN))

    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self.fd).st_size

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to before `end`, fewer where the file ends before.

        Raises:
            StoreError: they cannot be read.
        """
        pieces = []
        try:
            while begin < end and (piece := os.pread(self.fd, min(end - begin, 1 << 30), begin)):
                pieces.append(piece)
                begin += len(piece)
        except OSError as error:
            raise unreadable(self.path, error) from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def take_lock(fd: int) -> bool:
    """Take the exclusive lock until `fd` is closed; waits some 50 ms for another process, then returns False.

    True, without a lock, where the file system has none.
    """
    for _ in range(_ATTEMPTS):
        if _lock(fd, fcntl.LOCK_EX):
            return True
        time.sleep(_PAUSE)
    return _lock(fd, fcntl.LOCK_EX)


def _lock(fd: int, how: int) -> bool:
    """Take or release a lock at once; False where another process has one, True where the file system has none."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


# --- folders


RUNS = "introspect-runs"
"""Where runs are kept that were given no directory."""

REDACTED = "<redacted>"
"""What stands in a setting for a value that is nobody else's business."""

FORMAT = 2
"""What this version writes, and the newest it reads."""

MANIFEST = "manifest.json"
GOLDEN_RUN = "run.zip"
"""Where the directory of a golden run has what was recorded."""
TENSORS = "tensors"
SOURCES = "sources"
CHILDREN = "children"
DIVERGENCE = "divergence.jsonl"
"""What the first of several ranks says to the others while they are compared with a reference; see the capture."""
LOG = "log.bin"
HEADS = "heads.bin"
"""A rank's log, and the heads of its frames once more; see `log`."""

RANK_NAME = re.compile(r"rank(0|[1-9]\d{0,5})")
ATTEMPT_NAME = re.compile(r"attempt([1-9]\d{0,3})")
"""Directories of ranks, and of further attempts of a launch."""

NAMES = re.compile(
    r"(attempt\d{1,6}/)?(rank\d{1,6}/)?"
    r"(manifest\.json|(log|heads)\.bin|divergence\.jsonl|tensors/[0-9a-f]{16}\.safetensors|sources/[0-9a-f]{16}\.gz)"
)
"""Files of a run, by their paths in it."""

LIMIT_DOCUMENT = 4 << 20
"""Bytes of a document."""

Pieces = list[bytes | memoryview]
"""Bytes that are written one after the other."""

_DIRECTORY = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_MOST_PIECES = 1000
"""How many pieces one call of `pwritev` is given."""

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class DamageError(StoreError):
    """Something inside a store, at `path`, that is not as it was written.

    Attributes:
        finding: the damage alone, for a list of them; the message also says what to do.
    """

    def __init__(self, path: str, what: str) -> None:
        """Make the error; `what` says what is wrong, to follow a colon, and `path` where."""
        self.finding = f"{path}: {what}"
        super().__init__(f"{path} is damaged: {what}; `introspect verify` on the run says what is still sound")


class Appended(Descriptor):
    """A file of the store that is only appended to, locked until it is closed."""

    def __init__(self, folder: Folder, name: str) -> None:
        """Create the file `name` in `folder` now, and lock it; FileExistsError where it is there."""
        super().__init__(folder.create(name), f"{folder.path}/{name}")
        take_lock(self.fd)

    def reopen_if_closed(self) -> int:
        """The descriptor; the file is opened and locked again first where the script closed it.

        Raises:
            StoreError: the file was removed, and its descriptor is open.
            FileNotFoundError: nothing or another file is at its path now, and its descriptor was closed.
        """
        if not self.is_ours():
            self.open_again(os.O_WRONLY)
            take_lock(self.fd)
        elif os.fstat(self.fd).st_nlink == 0:
            raise StoreError("its files were removed")
        return self.fd


class Directory(Closing, ABC):
    """A directory of a run, on disk or in object storage.

    Attributes:
        path: where it is, for messages.
        is_far: whether it is in object storage, where much is better read at once.
    """

    path: str
    is_far = False

    @abstractmethod
    def names(self) -> list[str]:
        """Names of all entries of the directory, sorted."""

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """Whether anything is at `name`."""

    @abstractmethod
    def folder(self, name: str) -> Directory:
        """The directory `name` inside this one.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it is a link, or not a directory.
        """

    @abstractmethod
    def file(self, name: str) -> Source:
        """The file `name` inside this directory, for reading.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it is a link, a pipe, a device, a directory, or may not be read.
        """

    def rank(self, number: int) -> Directory:
        """The directory of a rank.

        Raises:
            FileNotFoundError: there is none.
        """
        return self.folder(f"rank{number}")

    def read_file(self, name: str, limit: int) -> bytes:
        """All of the regular file `name`, read once.

        Args:
            name: of the file.
            limit: the most bytes that it may have.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it cannot be read, or is larger.
        """
        with self.file(name) as handle:
            if handle.size() > limit:
                raise DamageError(handle.path, f"it is larger than the {limit >> 20} MB that are allowed")
            return handle.read(0, min(handle.size(), limit))

    def prefetch(self, names: Iterable[str]) -> None:
        """Prefetch the directories `names`, which are read next; on disk nothing is done."""


class Folder(Descriptor, Directory):
    """A directory on disk, held by an open descriptor."""

    @classmethod
    def at(cls, path: str) -> Self:
        """Open the directory at `path`; a symbolic link is followed here, and nowhere below it."""
        return cls(os.open(path, _DIRECTORY), path)

    def reopen_if_closed(self) -> Folder:
        """This directory itself, opened again first where the script closed its descriptor.

        FileNotFoundError where another directory, or none, is at its path by then.
        """
        if not self.is_ours():
            self.open_again(os.O_RDONLY | os.O_DIRECTORY)
        return self

    def folder(self, name: str) -> Folder:
        """The directory `name` inside this one."""
        return Folder(self._open(name, _DIRECTORY), f"{self.path}/{name}")

    def file(self, name: str) -> Handle:
        """The regular file `name` inside this directory, opened for reading; links are not followed.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it is no regular file, or cannot be read.
        """
        handle = Handle(self._open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), f"{self.path}/{name}")
        if not stat.S_ISREG(os.fstat(handle.fd).st_mode):
            handle.close()
            raise DamageError(handle.path, "it is not a regular file")
        return handle

    def _open(self, name: str, flags: int) -> int:
        """A descriptor of `name` inside this directory, which must not be a link; errors are those of `file`."""
        try:
            return os.open(name, flags | os.O_NOFOLLOW, dir_fd=self.fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unreadable(f"{self.path}/{name}", error) from None

    def names(self) -> list[str]:
        """Names of all entries of the directory, sorted."""
        return sorted(os.listdir(self.fd))  # noqa: PTH208 -- pathlib has no directory descriptors

    def __contains__(self, name: str) -> bool:
        """Whether anything is at `name`, a link that leads nowhere included."""
        with suppress(FileNotFoundError):
            return bool(os.stat(name, dir_fd=self.fd, follow_symlinks=False))
        return False

    def make_folder(self, name: str) -> Folder:
        """Open the directory `name` inside this one; create it, for its owner alone, where it does not exist."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.fd)
        return self.folder(name)

    def create(self, name: str) -> int:
        """Create the file `name`, for its owner alone, and return its descriptor; FileExistsError where it exists."""
        return os.open(name, _CREATE, 0o600, dir_fd=self.fd)

    def replace(self, name: str, pieces: Pieces, *, durable: bool = False, new: bool = False) -> int:
        """Write the file `name` atomically, by a temporary file that gets its name, and return the number of bytes.

        Args:
            name: of the file.
            pieces: its content, joined.
            durable: whether to force file and directory to disk before returning.
            new: whether a file that is there stays, and FileExistsError is raised.
        """
        # Threads of a script may come here at once: each has a file of its own.
        temporary = f".{name}.{os.getpid()}{threading.get_native_id()}"
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self.fd)
        fd = self.create(temporary)
        try:
            written = write_all(fd, pieces)
            if durable:
                os.fsync(fd)
            (os.link if new else os.rename)(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        finally:
            os.close(fd)
            with suppress(FileNotFoundError):  # it has its name by now
                os.unlink(temporary, dir_fd=self.fd)
        if durable:
            os.fsync(self.fd)
        return written


def write_all(fd: int, pieces: Sequence[bytes | memoryview], at: int = 0) -> int:
    """Write all of `pieces` from byte `at` on; returns the byte after them.

    Raises:
        OSError: EFBIG where that is over the process's file size limit (RLIMIT_FSIZE): the write itself would also send
            SIGXFSZ, which a script may handle or be ended by.
    """
    rest = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and at + sum(map(len, rest)) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    while rest:
        written = os.pwritev(fd, rest[:_MOST_PIECES], at)
        at += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]
    return at


_DAMAGE = {
    errno.ELOOP: "it is a symbolic link, and a store holds none",
    errno.ENOTDIR: "it is a link or a file where a directory belongs",
}


def unreadable(path: str, error: OSError) -> StoreError:
    """The error for a failed read: StoreError for a cause outside the file (`outside_cause`), else DamageError."""
    why = outside_cause(error)
    if why:
        return StoreError(f"cannot read {path}: {why}")
    return DamageError(path, _DAMAGE.get(error.errno or 0, reason(error)))


def outside_cause(error: OSError | ValueError) -> str:
    """The cause of a failed read that is not the file's fault: no memory, disk or descriptors left, or no permission.

    "" for every other error.
    """
    return scarcity(error) or (reason(error) if isinstance(error, PermissionError) else "")


def reason(error: Exception) -> str:
    """The message of an error to follow a colon: an OSError's `strerror` in lower case, or the text of any other."""
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)


# --- locks


def any_lock_held(run: Directory) -> bool:
    """Whether a writer holds the lock of a log in `run`, or in any `rank*` or `attempt*` directory of it."""
    with suppress(FileNotFoundError), run.file(LOG) as handle:
        if handle.is_locked():
            return True
    for name in run.names():
        if name.startswith(("rank", "attempt")):
            with run.folder(name) as folder:
                if any_lock_held(folder):
                    return True
    return False
