"""The files of a rank that has ended: records, and one file that holds all the small ones.

A rank writes some twenty files, each alone, since it may be killed at any time; a launch of thousands would leave a
hundred thousand. So a rank that has closed its files puts the small ones into one, `closed.bin`, and those that other
ranks have alike into a directory of the launch, once. Each of these appears whole or not at all, and the files that it
stands for are removed only then: a rank that is killed on the way has both, with equal content. A file that is written
anew later counts before what is in `closed.bin`.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from introspect_cli.errors import StoreError
from introspect_cli.store.files.folders import (
    FORMAT,
    LIMIT_DOCUMENT,
    LOCK,
    SETTINGS,
    SHARED,
    DamageError,
    Directory,
    Folder,
)
from introspect_cli.store.files.handles import Handle, Source, take_lock
from introspect_cli.sums import content_digest

if TYPE_CHECKING:
    from collections.abc import Iterator


CLOSED = "closed.bin"

_SMALL = re.compile(
    r"manifest\.yaml|index\.bin|totals\.bin|labels\.jsonl|(sites|layouts|modules)\.arrow|settings/[a-z0-9_]{1,64}\.yaml"
)
"""What is put into one file."""

_ONE_RANKS = re.compile(r"manifest\.yaml|.*\.(bin|jsonl)")
"""Of these, what no two ranks have alike."""

SHARED_NAME = re.compile(r"[a-z0-9_]{1,64}\.(?:yaml|arrow)-([0-9a-f]{32})")
LARGEST = 256 << 20
"""Bytes of a file that is put with others, or shared."""

_SOME, _MANY, _LITTLE = 1, 64, 1 << 16
"""How many different files of a name ranks share at most, of little ones and of others: more stay in each rank's."""

_HEADER = struct.Struct("<8sIII")
"""Magic, format, CRC-32 of the table, its bytes. It is JSON: by name, where in what follows a file begins and how long
it is, or its name among the files that ranks share."""

_MAGIC = b"INTROSPF"
_AT_ONCE = 4096
"""Bytes that are read at once, in which the table is as a rule."""

_MODE = 0o600


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
    with _launch_of(rank) as launch:
        try:
            with launch.folder(SHARED) as shared:
                return shared.file(name)
        except FileNotFoundError:
            raise DamageError(f"{rank.path}/{CLOSED}", f"{SHARED}/{name}, which it names, is missing") from None


def _launch_of(rank: Folder) -> Folder:
    """The directory of the launch."""
    return Folder(os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=rank.fd), f"{rank.path}/..")


def _decoded(handle: Handle) -> _Bundle:
    """What `closed.bin` says."""
    head = handle.read(0, _AT_ONCE)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise DamageError(handle.path, "it is not what a rank closes with")
    _, number, crc, length = _HEADER.unpack_from(head)
    begin = _HEADER.size + length
    text = head[_HEADER.size : begin] if begin <= len(head) else handle.read(_HEADER.size, min(length, LIMIT_DOCUMENT))
    if number > FORMAT or zlib.crc32(text) != crc:
        raise DamageError(handle.path, "its table was altered, or is a newer version's")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict) or not all(map(_SMALL.fullmatch, table)):
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


# --- closing


def close_rank(folder: Folder) -> None:
    """Put the small files of a rank that has ended into one, and those that other ranks have alike into the launch's.

    Where that fails, the rank keeps its files.
    """
    if folder.fd < 0:
        return
    with suppress(OSError, StoreError), Folder(os.dup(folder.secure().fd), folder.path) as rank:
        with RankFolder(Folder(os.dup(rank.fd), rank.path)) as there:  # what was bundled before counts, too
            files = dict(_small(there))
        with _launch_of(rank) as launch, launch.make_folder(SHARED, 0o700) as shared:
            alone = take_lock(shared.fd)  # ranks end at once, and each would take itself for the first
            named = {name: _share(shared, name, data, alone=alone) for name, data in files.items()}
        _write(rank, files, named)
        for name in (*files, LOCK):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=rank.fd)
        os.rmdir(SETTINGS, dir_fd=rank.fd)


def _small(rank: Directory) -> Iterator[tuple[str, bytes]]:
    every = rank.names()
    if SETTINGS in every:
        with rank.folder(SETTINGS) as settings:
            for name in settings.names():
                if _SMALL.fullmatch(f"{SETTINGS}/{name}"):
                    yield f"{SETTINGS}/{name}", settings.read_file(name, LIMIT_DOCUMENT)
    for name in every:
        if _SMALL.fullmatch(name):
            yield name, rank.read_file(name, LARGEST)


def _share(shared: Folder, path: str, data: bytes, *, alone: bool) -> str:
    """The name of the file with this content that ranks share; "" where each keeps its own."""
    name = path.rpartition("/")[2]
    if _ONE_RANKS.fullmatch(name):
        return ""
    named = shared_name(name, data)
    if named in shared:
        return named if shared.read_file(named, LARGEST) == data else ""
    most = _MANY if len(data) >= _LITTLE else _SOME if alone else 0
    if sum(other.startswith(f"{name}-") for other in shared.names()) >= most:
        return ""
    shared.replace(named, [data], _MODE, durable=True)
    return named


def _write(rank: Folder, files: dict[str, bytes], named: dict[str, str]) -> None:
    """Write `closed.bin`, to the disk, since what it stands for may have been there for long."""
    table: dict[str, Any] = {}
    rest, at = [], 0
    for name, data in files.items():
        table[name] = named[name] or [at, len(data)]
        if not named[name]:
            rest.append(data)
            at += len(data)
    text = json.dumps(table, separators=(",", ":")).encode()
    header = _HEADER.pack(_MAGIC, FORMAT, zlib.crc32(text), len(text))
    rank.replace(CLOSED, [header, text, *rest], _MODE, durable=True)
