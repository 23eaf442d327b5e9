"""Files inside a store: their names, and how they are opened so that nothing outside can be reached.

A store from a stranger may hold symbolic links to other files, pipes that never answer, and names with `..`; and a
script may change its directory, or have its store renamed, while it is captured. So there is one descriptor for the
store's directory, everything is opened relative to it, links are refused, and only regular files and directories are
accepted.

Nothing here needs numpy: a capture makes its directory before the script may have loaded numpy itself.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import stat
import struct
import threading
import zlib
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from introspect_cli.errors import StoreError, scarcity
from introspect_cli.store.files.handles import Descriptor, Handle, Source, status_of, take_lock
from introspect_cli.sums import content_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self

RUNS = "introspect-runs"
"""Where runs are kept that were given no directory."""

REDACTED = "<redacted>"
"""What stands in a setting for a value that is nobody else's business."""

FORMAT = 2
"""What this version writes, and the newest it reads."""

MANIFEST = "manifest.yaml"
SETTINGS = "settings"
GOLDEN_RUN = "run.zip"
"""Where the directory of a golden run has what was recorded."""
TENSORS = "tensors"
SOURCES = "sources"
CHILDREN = "children"
SHARED = "shared"
"""What ranks of a launch have alike, once; see `write.closing`."""
DIVERGENCE = "divergence.jsonl"
"""What the first of several ranks says to the others while they are compared with a reference; see the capture."""
LOCK = ".lock"
LABEL = "label"
INDEX = "index.bin"
RECORDS = "records.arrow"
SITES = "sites.arrow"
LAYOUTS = "layouts.arrow"
MODULES = "modules.arrow"
STREAMS = (SITES, LAYOUTS, MODULES, RECORDS)

RANK_NAME = re.compile(r"rank(0|[1-9]\d{0,5})")
ATTEMPT_NAME = re.compile(r"attempt([1-9]\d{0,3})")
"""Directories of ranks, and of further attempts of a launch."""

NAMES = re.compile(
    r"(attempt\d{1,6}/)?(rank\d{1,6}/)?"
    r"(manifest\.yaml|label|[a-z_]{1,32}\.(arrow|bin|jsonl)|records-\d{1,9}\.arrow|settings/[a-z0-9_]{1,64}\.yaml|tensors/[0-9a-f]{16}\.safetensors"
    r"|sources/[0-9a-f]{16}\.gz|shared/[a-z0-9_]{1,64}\.(yaml|arrow)-[0-9a-f]{32})"
)
"""Files of a run, by their paths in it."""

LIMIT_DOCUMENT = 4 << 20
"""Bytes of a YAML document."""

LONGEST_LABEL = 200
"""Characters of a label."""

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_DIRECTORY = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class DamageError(StoreError):
    """Something inside a store, at `path`, that is not as it was written.

    Attributes:
        finding: the damage alone, for a list of them; the message also says what to do.
    """

    def __init__(self, path: str, what: str) -> None:
        self.finding = f"{path}: {what}"
        super().__init__(f"{path} is damaged: {what}; `introspect verify` on the run says what is still sound")


class Appended(Handle):
    """A file of the store that grows.

    Attributes:
        length: bytes written.
    """

    def __init__(self, folder: Folder, name: str, *, locked: bool = False) -> None:
        super().__init__(folder.create(name), f"{folder.path}/{name}")
        self.length = 0
        self._locked = locked
        if locked:
            take_lock(self.fd)

    def append(self, *pieces: bytes | memoryview) -> None:
        """Write at the end of what was written, wherever the descriptor stands."""
        self.secure()
        end = self.length
        check_size(end + sum(memoryview(piece).nbytes for piece in pieces))
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                written = os.pwrite(self.fd, rest, end)
                rest, end = rest[written:], end + written
        self.length = end

    def secure(self) -> None:
        """Make sure that the descriptor is still this file's, opening the file again where the script closed it."""
        status = status_of(self.fd)
        if status is None or (status.st_dev, status.st_ino) != self._file:
            self.open_again(os.O_WRONLY)
            if self._locked:
                take_lock(self.fd)
        elif status.st_nlink == 0:
            raise StoreError("its files were removed")

    def shorten(self, length: int) -> None:
        """Take back what was written from a place on."""
        self.secure()
        os.ftruncate(self.fd, length)
        self.length = length

    def cut(self) -> None:
        """Leave out what a write that failed has left behind."""
        if self.is_ours() and self.size() > self.length:
            os.ftruncate(self.fd, self.length)


class Directory(ABC):
    """A directory of a run, on disk or in object storage.

    Attributes:
        path: where it is, for messages.
    """

    path: str

    @abstractmethod
    def names(self) -> list[str]:
        """What the directory holds, sorted."""

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
        """All of the regular file `name`, which may hold at most `limit` bytes.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it cannot be read, or is larger.
        """
        with self.file(name) as handle:
            try:
                if handle.size() > limit:
                    raise DamageError(handle.path, f"it is larger than the {limit >> 20} MB that are allowed")
                return handle.read(0, limit)
            except OSError as error:
                raise unreadable(handle.path, error) from None

    @property
    def remote_size(self) -> int:
        """Bytes of its files where they are not on disk."""
        return 0

    def content(self, name: str) -> str:  # noqa: ARG002 - who knows more says it
        """What tells the content of a file from any other without reading it; "" where nothing does."""
        return ""

    def expect(self, names: Iterable[str]) -> None:  # noqa: B027 - on disk there is nothing to do beforehand
        """Hear which directories are looked into next: one that is far away fetches what it can at once."""

    def close(self) -> None:  # noqa: B027 - of some nothing is open
        """Close what is open; again is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class Folder(Descriptor, Directory):
    """A directory that is open."""

    @classmethod
    def at(cls, path: str) -> Self:
        """The directory at `path`, which may be a link: a person named it."""
        return cls(os.open(path, _DIRECTORY), path)

    def secure(self) -> Folder:
        """This directory, opened again where the script closed its descriptor."""
        if not self.is_ours():
            self.open_again(os.O_RDONLY | os.O_DIRECTORY)
        return self

    def folder(self, name: str) -> Folder:
        """The directory `name` inside this one."""
        try:
            fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self.fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unreadable(f"{self.path}/{name}", error) from None
        return Folder(fd, f"{self.path}/{name}")

    def rank(self, number: int) -> Directory:
        """The directory of a rank."""
        return RankFolder(self.folder(f"rank{number}"))

    def file(self, name: str) -> Handle:
        """The regular file `name` inside this directory, for reading."""
        path = f"{self.path}/{name}"
        try:
            handle = Handle(os.open(name, _READ, dir_fd=self.fd), path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise unreadable(path, error) from None
        if not stat.S_ISREG(os.fstat(handle.fd).st_mode):
            handle.close()
            raise DamageError(path, "it is not a regular file")
        return handle

    def names(self) -> list[str]:
        """What the directory holds, sorted."""
        return sorted(os.listdir(self.fd))  # noqa: PTH208 -- pathlib has no directory descriptors

    def __contains__(self, name: str) -> bool:
        """Whether anything is at `name`, a link that leads nowhere included."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def make_folder(self, name: str, mode: int = 0o777) -> Folder:
        """The directory `name` inside this one, made where there is none."""
        with suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=self.fd)
        return self.folder(name)

    def create(self, name: str, mode: int = 0o666) -> int:
        """A descriptor of the new file `name`, for writing; it must not exist."""
        return os.open(name, _CREATE, mode, dir_fd=self.fd)

    def replace(self, name: str, pieces: Iterable[bytes | memoryview], mode: int, *, durable: bool = False) -> int:
        """Write the file `name` so that readers see the old content or the new, never a part; bytes written."""
        # Threads of a script may come here at once: each has a file of its own.
        temporary = f".{name}.{os.getpid()}{threading.get_native_id()}"
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self.fd)
        fd = self.create(temporary, mode)
        try:
            written = write_all(fd, list(pieces))
            if durable:
                os.fsync(fd)
        except BaseException:
            os.unlink(temporary, dir_fd=self.fd)
            raise
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        if durable:
            os.fsync(self.fd)
        return written


def check_size(size: int) -> None:
    """Raise what the system would, where a file may not become that large.

    It also sends a signal, which python ignores: but a script may have taken it (`SIGXFSZ`), or be ended by it.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and size > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def write_all(fd: int, pieces: Sequence[bytes | memoryview]) -> int:
    """Write `pieces` one after another in as few calls as the system allows; bytes written."""
    data = memoryview(b"".join(pieces)) if len(pieces) > 1 else memoryview(pieces[0])
    total = len(data)
    check_size(total)
    while data:
        data = data[os.write(fd, data) :]
    return total


_DAMAGE = {
    errno.ELOOP: "it is a symbolic link, and a store holds none",
    errno.ENOTDIR: "it is a link or a file where a directory belongs",
}


def unreadable(path: str, error: OSError) -> StoreError:
    """The error of a file that could not be read: damage, or what says nothing of the file."""
    why = outside_cause(error)
    if why:
        return StoreError(f"cannot read {path}: {why}")
    return DamageError(path, _DAMAGE.get(error.errno or 0, reason(error)))


def outside_cause(error: OSError | ValueError) -> str:
    """Why a sound file can fail to be read: something has run out, or the reader may not; "" for anything else."""
    return scarcity(error) or (reason(error) if isinstance(error, PermissionError) else "")


def reason(error: OSError | StoreError) -> str:
    """What the system says of an error, or the store, to follow a colon."""
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)


# --- a rank that has ended

CLOSED = "closed.bin"

SMALL = re.compile(
    r"manifest\.yaml|index\.bin|totals\.bin|labels\.jsonl|(sites|layouts|modules)\.arrow|settings/[a-z0-9_]{1,64}\.yaml"
)
"""What is put into one file."""

SHARED_NAME = re.compile(r"[a-z0-9_]{1,64}\.(?:yaml|arrow)-([0-9a-f]{32})")
LARGEST = 256 << 20
"""Bytes of a file that is put with others, or shared."""

BUNDLE_HEADER = struct.Struct("<8sIII")
"""Magic, format, CRC-32 of the table, its bytes. It is JSON: by name, where in what follows a file begins and how long
it is, or its name among the files that ranks share."""

BUNDLE_MAGIC = b"INTROSPF"
_AT_ONCE = 4096
"""Bytes that are read at once, in which the table is as a rule."""


class _Within(Source):
    """A file that lies within another."""

    def __init__(self, handle: Handle, path: str, offset: int, length: int) -> None:
        self._handle, self.path = handle, path
        self._offset, self._length = offset, length

    def size(self) -> int:
        """Bytes in the file."""
        return self._length

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`, fewer where the file ends before."""
        return self._handle.read(self._offset + offset, min(length, self._length - offset))

    def changed(self) -> int:
        """When the file that it lies in was changed, in nanoseconds."""
        return self._handle.changed()

    def close(self) -> None:
        """Close the file that it lies in."""
        self._handle.close()


class _Bundle(NamedTuple):
    """`closed.bin`, open.

    Attributes:
        handle: of it.
        table: what it says of each file, by name.
        begin: where the bytes begin that it tells of.
    """

    handle: Handle
    table: dict[str, Any]
    begin: int


class RankFolder(Directory):
    """A rank's directory, or that of its settings, with what is in `closed.bin`."""

    def __init__(self, here: Folder | None, rank: Folder | None = None, below: str = "") -> None:
        """Take an open directory.

        Args:
            here: it; None where there is no such directory.
            rank: the rank's; the same where it is None.
            below: the path of the directory in the rank's, with a slash at its end.
        """
        self._here = here
        self._rank = rank or here
        self._below = below
        assert self._rank is not None
        self.path = f"{self._rank.path}/{below}".rstrip("/")
        self._bundle: _Bundle | None = None

    def close(self) -> None:
        """Close what is open."""
        for folder in (self._here, self._rank):
            if folder is not None:
                folder.close()
        if self._bundle is not None:
            self._bundle.handle.close()

    def names(self) -> list[str]:
        """What the directory holds, sorted."""
        there = self._here.names() if self._here is not None else []
        inside = [name.removeprefix(self._below) for name in self.bundled() if name.startswith(self._below)]
        return sorted({*there, *(name.partition("/")[0] for name in inside)} - {CLOSED})

    def __contains__(self, name: str) -> bool:
        """Whether anything is at `name`."""
        path = f"{self._below}{name}"
        if self._is_there(name):
            return True
        return path in self.bundled() or any(inside.startswith(f"{path}/") for inside in self.bundled())

    def _is_there(self, name: str) -> bool:
        """Whether the directory itself has a file, which then counts before what was bundled."""
        return self._here is not None and name in self._here

    def folder(self, name: str) -> Directory:
        """The directory `name` inside this one."""
        assert self._here is not None  # of a directory that is not there, nothing was said to be one
        try:
            there: Folder | None = self._here.folder(name)
        except FileNotFoundError:
            if name != SETTINGS or name not in self:
                raise
            there = None
        if name != SETTINGS:
            assert there is not None
            return there
        return RankFolder(there, Folder(os.dup(self._here.fd), self.path), f"{name}/")

    def file(self, name: str) -> Source:
        """The file `name` inside this directory, for reading."""
        if self._here is not None:
            with suppress(FileNotFoundError):
                return self._here.file(name)
        if name == LOCK:
            raise FileNotFoundError(name)
        entry = self.bundled().get(f"{self._below}{name}")
        if entry is None or self._bundle is None or self._rank is None:
            raise FileNotFoundError(name)
        where = _where(self._bundle, entry)
        if isinstance(where, str):
            return _shared_file(self._rank, where)
        handle = self._bundle.handle
        return _Within(Handle(os.dup(handle.fd), handle.path), f"{self.path}/{name}", *where)

    def content(self, name: str) -> str:
        """What tells the content of a file that several ranks have; "" of others."""
        entry = None if self._is_there(name) else self.bundled().get(f"{self._below}{name}")
        return entry if isinstance(entry, str) else ""

    def bundled(self) -> dict[str, Any]:
        """The table of the small files of a rank that has ended, by name."""
        if self._bundle is None:
            try:
                handle = self._rank.file(CLOSED) if self._rank is not None else None
            except FileNotFoundError:
                return {}
            assert handle is not None
            self._bundle = _decoded(handle)
        return self._bundle.table


def shared_name(name: str, data: bytes) -> str:
    """What a file with this content is called among the files that ranks share."""
    return f"{name}-{content_digest(data)}"


def check_shared(folder: Directory, name: str) -> None:
    """Make sure that a file which ranks share holds what its name says."""
    if shared_name(name.rpartition("-")[0], folder.read_file(name, LARGEST)) != name:
        raise DamageError(f"{folder.path}/{name}", "it is not what its digest says")


def _shared_file(rank: Folder, name: str) -> Handle:
    """A file that several ranks have alike."""
    with launch_of_rank(rank) as launch:
        try:
            with launch.folder(SHARED) as shared:
                return shared.file(name)
        except FileNotFoundError:
            raise DamageError(f"{rank.path}/{CLOSED}", f"{SHARED}/{name}, which it names, is missing") from None


def launch_of_rank(rank: Folder) -> Folder:
    """The directory of the launch."""
    return Folder(os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=rank.fd), f"{rank.path}/..")


def _decoded(handle: Handle) -> _Bundle:
    """What `closed.bin` says."""
    head = handle.read(0, _AT_ONCE)
    if len(head) < BUNDLE_HEADER.size or not head.startswith(BUNDLE_MAGIC):
        raise DamageError(handle.path, "it is not what a rank closes with")
    _, number, crc, length = BUNDLE_HEADER.unpack_from(head)
    begin = BUNDLE_HEADER.size + length
    text = head[BUNDLE_HEADER.size : begin]
    if begin > len(head):
        text = handle.read(BUNDLE_HEADER.size, min(length, LIMIT_DOCUMENT))
    if number > FORMAT or zlib.crc32(text) != crc:
        raise DamageError(handle.path, "its table was altered, or is a newer version's")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict) or not all(map(SMALL.fullmatch, table)):
        raise _unreadable(handle)
    return _Bundle(handle, table, begin)


def _where(closed: _Bundle, entry: Any) -> tuple[int, int] | str:
    """Where a file lies, given its entry in the table."""
    if isinstance(entry, str):
        if SHARED_NAME.fullmatch(entry):
            return entry
    elif isinstance(entry, list) and len(entry) == 2 and all(type(number) is int and number >= 0 for number in entry):
        at, size = closed.begin + entry[0], entry[1]
        if at + size <= closed.handle.size():
            return at, size
    raise _unreadable(closed.handle)


def _unreadable(handle: Handle) -> DamageError:
    return DamageError(handle.path, "its table cannot be read")


# --- locks


def any_lock_held(run: Directory) -> bool:
    """Whether any rank of a run that several processes write is being written."""
    for name in run.names():
        if not name.startswith(("rank", "attempt")):
            continue
        with run.folder(name) as folder:
            if any_lock_held(folder) or is_locked(folder):
                return True
    return False


def is_locked(folder: Directory) -> bool:
    """Whether a capture holds the run in `folder`."""
    try:
        with folder.file(LOCK) as handle:
            return handle.is_locked()
    except FileNotFoundError:
        return False
