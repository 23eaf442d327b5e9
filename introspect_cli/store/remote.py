"""A run in object storage, read as a directory is: whoever reads runs does not know of it.

Of a run of many ranks, the catalogues are read at once, and nothing more until it is asked for. Names, totals and
settings are kept by what they digest to, so what ranks have in common is read once. Of records the very bytes of a step
are read; where one step follows the other, more of them at a time.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import NoRunError, StoreError
from introspect_cli.store.catalogue import CATALOGUE, DIGEST, INLINE, LIMIT, Catalogue, Extent, decode
from introspect_cli.store.files import LIMIT_DOCUMENT, LOCK, MANIFEST, NAMES, TENSORS, DamageError, Folder, Handle
from introspect_cli.store.objects import NothingThereError, Storage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

_FOLDER = re.compile(r"(rank|attempt)(0|[1-9]\d{0,5})")
_KEPT = 64 << 20
_SPAN = 256 << 10
"""Bytes that are read around what was asked for, since a request takes longer than they do."""

_TOGETHER = 16 << 20
"""Bytes that are read at once because they will be asked for, less than what is kept."""

_OF_ALL = re.compile(r"[a-z]+\.arrow|totals\.bin")
_AHEAD = 8 << 20
_GRACE = 60.0
_TORN = 3
_PAUSE = 0.1
_COPIED = 8 << 20


class Kept:
    """What was read last, by what it digests to, up to a number of bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = 0
        self._data: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str) -> bytes | None:
        """What has a digest."""
        with self._lock:
            if digest in self._data:
                self._data.move_to_end(digest)
            return self._data.get(digest)

    def keep(self, digest: str, data: bytes) -> None:
        """Keep it for a while."""
        with self._lock:
            if digest not in self._data and len(data) <= self._most:
                self._data[digest] = data
                self._bytes += len(data)
            while self._bytes > self._most:
                self._bytes -= len(self._data.popitem(last=False)[1])


KEPT = Kept(_KEPT)
now = time.time


class Sent:
    """What was sent of a directory, and where to.

    Attributes:
        storage: of the run.
        place: the folder of its pieces, with a slash at its end, or "".
        catalogue: what is where.
        others: this one and those of other ranks, of which the same is asked for next.
        named: the file of each extent that has a digest, and its place in it.
    """

    def __init__(self, storage: Storage, place: str, catalogue: Catalogue) -> None:
        self.storage = storage
        self.place = place
        self.catalogue = catalogue
        self.others = [self]
        self._sealed: dict[int, list[Extent]] = {}
        self.named: dict[Extent, tuple[str, int]] = {}
        for name, extents in catalogue.files.items():
            for number, extent in enumerate(extents):
                if extent.piece != INLINE and extent.digest:
                    self._sealed.setdefault(extent.piece, []).append(extent)
                    self.named[extent] = name, number
        for sealed in self._sealed.values():
            sealed.sort(key=lambda extent: extent.offset)

    def url(self, piece: int) -> str:
        """Where a piece is."""
        return f"{self.storage.url}/{self.object(piece)}"

    def object(self, piece: int) -> str:
        """The name of a piece below the run's URL."""
        return f"{self.place}{self.catalogue.pieces[piece][0] if piece >= 0 else CATALOGUE}"

    def whole(self, extent: Extent) -> bytes:
        """All bytes of an extent that has a digest.

        At once with it comes what lies behind it, and of names and totals what other ranks have of them.
        """
        data = KEPT.get(extent.digest)
        if data is not None:
            return data
        spans = [(self, self.span(extent)), *self._likewise(extent)]
        wanted = [
            (sent.object(near[0].piece), near[0].offset, near[-1].offset + near[-1].length) for sent, near in spans
        ]
        for (sent, near), read in zip(spans, self.storage.read(wanted), strict=True):
            for each in near:
                at = each.offset - near[0].offset
                part = read[at : at + each.length] if isinstance(read, bytes) else b""
                if blake2b(part, digest_size=DIGEST).hexdigest() == each.digest:
                    KEPT.keep(each.digest, part)
                    data = part if each is extent and sent is self else data
                elif each is extent and sent is self:
                    self._checked(extent.piece, read, wanted[0][2] - wanted[0][1])
                    raise DamageError(self.url(extent.piece), "its bytes are not those that were sent")
        assert data is not None
        return data

    def span(self, extent: Extent) -> list[Extent]:
        """An extent, and those behind it that are worth reading in the same request."""
        near = [extent]
        for other in self._sealed[extent.piece]:
            end = near[-1].offset + near[-1].length
            close = other.offset + other.length - extent.offset <= _SPAN
            if other.offset >= end and close and KEPT.get(other.digest) is None:
                near.append(other)
        return near

    def _likewise(self, extent: Extent) -> Iterator[tuple[Sent, list[Extent]]]:
        """What other ranks have in the place of an extent, where each has something else."""
        name, number = self.named[extent]
        asked, room = {extent.digest}, _TOGETHER
        for other in self.others if _OF_ALL.fullmatch(name) else ():
            theirs = other.catalogue.files.get(name, [])[number : number + 1]
            for each in theirs:
                if each in other.named and each.digest not in asked and KEPT.get(each.digest) is None:
                    near = other.span(each)
                    room -= near[-1].offset + near[-1].length - each.offset
                    if room < 0:
                        return
                    asked.update(more.digest for more in near)
                    yield other, near

    def range(self, piece: int, begin: int, end: int) -> bytes:
        """Some bytes of a piece."""
        data = KEPT.get(self.mark(piece, begin, end))
        if data is None:
            [read] = self.storage.read([(self.object(piece), begin, end)])
            data = self._checked(piece, read, end - begin)
        return data

    def mark(self, piece: int, begin: int, end: int) -> str:
        """By what a range is kept."""
        return f"{self.url(piece)} {begin} {end}"

    def _checked(self, piece: int, data: bytes | StoreError, length: int) -> bytes:
        if isinstance(data, NothingThereError):
            raise DamageError(self.url(piece), "it is missing; publish the run again where it was recorded") from None
        if isinstance(data, StoreError):
            raise data
        if len(data) != length:
            raise DamageError(self.url(piece), f"it gave {len(data):,} of {length:,} bytes")
        return data


Range = tuple[Sent, int, int, int]
"""A piece of what was sent, the first byte, and the byte after the last."""


def fetch(wanted: Iterable[list[Range]]) -> int:
    """Read ranges of one run at once, so that they are there when they are asked for; how many, before a limit."""
    jobs, room, taken = [], _TOGETHER, 0
    for ranges in wanted:
        room -= sum(end - begin for _, _, begin, end in ranges)
        if room < 0 and taken:
            break
        taken += 1
        jobs += [each for each in ranges if KEPT.get(each[0].mark(*each[1:])) is None]
    if jobs:
        read = jobs[0][0].storage.read([(sent.object(piece), begin, end) for sent, piece, begin, end in jobs])
        for (sent, *where), data in zip(jobs, read, strict=True):
            if isinstance(data, bytes):  # else whoever asks for it hears why
                KEPT.keep(sent.mark(*where), data)
    return taken


class RemoteFile(Handle):
    """A file whose bytes lie in pieces."""

    def __init__(self, sent: Sent, extents: list[Extent], path: str) -> None:
        self.path = path
        self._sent = sent
        self._extents = extents
        self._size = sum(extent.length for extent in extents)
        self._next = -1
        self._window = 0
        self._ahead: tuple[int, bytes] = 0, b""

    @property
    def unfinished(self) -> float:
        """When it was sent, in seconds since 1970, if more was to follow; else 0."""
        return 0.0 if self._sent.catalogue.over else self._sent.catalogue.sent

    def held(self) -> bool:
        """Whether it may still grow: its sender has not said that it is over, and its time is not up."""
        said = self._sent.catalogue
        return not said.over and now() < said.sent + 3 * said.every + _GRACE

    def size(self) -> int:
        """Bytes in it."""
        return self._size

    def place(self, offset: int) -> str:
        """The piece that has a byte."""
        return next((self._sent.url(extent.piece) for at, extent in self._from(offset)), self.path)

    def _from(self, offset: int) -> Iterator[tuple[int, Extent]]:
        """Where each extent begins, from the one that has a byte on."""
        at = 0
        for extent in self._extents:
            if at + extent.length > offset:
                yield at, extent
            at += extent.length

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`, fewer where the file ends before."""
        end, parts = min(offset + length, self._size), []
        for at, extent in self._from(offset):
            if at >= end:
                break
            begin, stop = max(offset - at, 0), min(end - at, extent.length)
            if extent.piece == INLINE:
                inline = self._sent.catalogue.inline
                parts.append(inline[extent.offset + begin : extent.offset + stop])
            elif extent.digest:
                parts.append(self._sent.whole(extent)[begin:stop])
            else:
                parts.append(self._records(at, extent, begin, stop))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _records(self, at: int, extent: Extent, begin: int, stop: int) -> bytes:
        """Some bytes of an extent of records that begins at a place in the file; more at once where one asks on."""
        first, data = self._ahead
        if first <= at + begin and at + stop <= first + len(data):
            self._next = at + stop
            return data[at + begin - first : at + stop - first]
        length = stop - begin
        self._window = min(max(2 * self._window, length), _AHEAD) if at + begin == self._next else 0
        self._next = at + stop
        last = min(begin + max(length, self._window), extent.length)
        data = self._sent.range(extent.piece, extent.offset + begin, extent.offset + last)
        self._ahead = at + begin, data
        self._window = max(self._window, length)
        return data[:length]

    def ranges(self, offset: int, length: int) -> Iterator[Range]:
        """Which bytes of which pieces records are; nothing where they are in the catalogue."""
        for at, extent in self._from(offset):
            begin, stop = max(offset - at, 0), min(offset + length - at, extent.length)
            if extent.piece != INLINE and not extent.digest and begin < stop:
                yield self._sent, extent.piece, extent.offset + begin, extent.offset + stop

    def read_into(self, offset: int, memory: NDArray[np.uint8]) -> int:
        """Fill memory with the bytes from `offset` on; how many there were."""
        data = self.read(offset, len(memory))
        memory[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)


class RemoteFolder(Folder):
    """A directory of a run in object storage.

    Attributes:
        sent: where its files are; None where a catalogue of each directory in it says so.
    """

    def __init__(
        self, storage: Storage, place: str, sent: Sent | None, inside: dict[str, Any], waiting: Iterable[str] = ()
    ) -> None:
        """Take what is in it.

        Args:
            storage: of the run.
            place: the directory's path below it.
            sent: where its files are; None where a catalogue of each directory says so.
            inside: the extents of files and what is in directories, by name.
            waiting: names of directories whose catalogue was not read yet.
        """
        self.path = f"{storage.url}/{place}".rstrip("/")
        self._storage = storage
        self._place = place
        self.sent = sent
        self._inside = inside
        self._waiting = set(waiting)
        self._ranks: dict[str, RemoteFolder] = {}

    def close(self) -> None:
        """Nothing is open."""

    @property
    def size_elsewhere(self) -> int:
        """Bytes of the files whose catalogue was read."""
        own = sum(map(self.sent.catalogue.size, self.sent.catalogue.files)) if self.sent else 0
        return own + sum(rank.size_elsewhere for rank in self._ranks.values())

    def names(self) -> list[str]:
        """What the directory holds, sorted."""
        return sorted({*self._inside, *self._waiting, *self._ranks})

    def __contains__(self, name: str) -> bool:
        return name in self._inside or name in self._waiting or name in self._ranks

    def expect(self, names: Iterable[str]) -> None:
        """Read the catalogues of directories that are looked into next, at once."""
        wanted = sorted(name for name in self._waiting.intersection(names) if name.startswith("rank"))
        places = [f"{self._place}/{name}".lstrip("/") for name in wanted]
        for name, place, catalogue in zip(wanted, places, catalogues(self._storage, places), strict=True):
            self._waiting.discard(name)
            self._ranks[name] = _folder(self._storage, place, catalogue)
        known = [rank.sent for _, rank in sorted(self._ranks.items()) if rank.sent is not None]
        for sent in known:
            sent.others = known

    def folder(self, name: str) -> Folder:
        """The directory `name` inside this one."""
        if name in self._waiting and name.startswith("attempt"):
            return _attempt(self._storage, name)
        self.expect([name])
        if name in self._ranks:
            return self._ranks[name]
        inside = self._inside.get(name)
        if inside is None:
            raise FileNotFoundError(name)
        if not isinstance(inside, dict):
            raise DamageError(f"{self.path}/{name}", "it is a file where a directory belongs")
        return RemoteFolder(self._storage, f"{self._place}/{name}".lstrip("/"), self.sent, inside)

    def file(self, name: str) -> Handle:
        """The file `name` inside this directory, for reading."""
        extents = [] if name == LOCK else self._inside.get(name)  # the one tells whether it is over
        if not isinstance(extents, list) or self.sent is None:
            raise FileNotFoundError(name)
        remote = RemoteFile(self.sent, extents, f"{self.path}/{name}")
        return _copied(remote) if self._place.rpartition("/")[2] == TENSORS else remote

    def files(self) -> Iterator[tuple[str, Handle]]:
        """All files in it, by their paths."""
        self.expect(list(self._waiting))
        for name in self.names():
            if isinstance(self._inside.get(name), list):
                yield name, self.file(name)
            else:
                inside = self.folder(name)
                assert isinstance(inside, RemoteFolder)
                yield from ((f"{name}/{path}", file) for path, file in inside.files())


def _copied(remote: RemoteFile) -> Handle:
    """A whole tensor as a file without a name, since it is mapped into memory."""
    with tempfile.TemporaryFile() as file:
        for at in range(0, remote.size(), _COPIED):
            file.write(remote.read(at, _COPIED))
        file.flush()
        return Handle(os.dup(file.fileno()), remote.path)


def open_remote(url: str) -> RemoteFolder | None:
    """The directory of a run at a URL; None where one object is there.

    Raises:
        StoreError: there is nothing, or no run, or it cannot be read.
    """
    storage = Storage(url)
    try:
        entries = storage.entries()
    except NothingThereError:
        raise NoRunError(f"there is no run at {url}: check the URL") from None
    if entries is None:
        return None
    if CATALOGUE in entries:
        [catalogue] = catalogues(storage, [""])
        return _folder(storage, "", catalogue)
    if MANIFEST in entries:
        return _launch(storage, "", entries)
    runs = sorted(name for name, size in entries.items() if size < 0)
    remedy = (
        f"name one of the runs in it, such as {url}/{runs[0]}" if runs else "`introspect publish RUN URL` sends one"
    )
    raise NoRunError(f"{url} is not a run: it has no {CATALOGUE}; {remedy}")


def _attempt(storage: Storage, name: str) -> RemoteFolder:
    """The directory of another attempt of a launch; empty where it has no manifest yet."""
    entries = storage.entries(name) or {}
    return _launch(storage, name, entries) if MANIFEST in entries else RemoteFolder(storage, name, None, {})


def _launch(storage: Storage, place: str, entries: Mapping[str, int]) -> RemoteFolder:
    """A directory whose ranks have a catalogue each."""
    size = min(entries[MANIFEST], LIMIT_DOCUMENT)
    path = f"{place}/{MANIFEST}".lstrip("/")
    [manifest] = storage.read([(path, 0, size)])
    if isinstance(manifest, StoreError):
        raise manifest
    sent = Sent(storage, place, Catalogue(over=True, inline=manifest))
    waiting = [name for name in entries if _FOLDER.fullmatch(name)]
    return RemoteFolder(storage, place, sent, {MANIFEST: [Extent(INLINE, 0, len(manifest))]}, waiting)


def _folder(storage: Storage, place: str, catalogue: Catalogue | None) -> RemoteFolder:
    """A directory, given its catalogue; empty where none was put yet."""
    if catalogue is None:
        return RemoteFolder(storage, place, None, {})
    inside: dict[str, Any] = {}
    for name, extents in catalogue.files.items():
        *folders, last = name.split("/")
        into = inside
        for folder in folders:
            into = into.setdefault(folder, {})
        into[last] = extents
    return RemoteFolder(storage, place, Sent(storage, f"{place}/".lstrip("/"), catalogue), inside)


def catalogues(storage: Storage, places: list[str]) -> list[Catalogue | None]:
    """The catalogues in some places, read at once; None where there is none.

    One that fails its check may be about to be replaced, where storage does not replace an object at once.
    """
    found: dict[str, Catalogue | None] = {}
    for again in range(_TORN):
        left = [place for place in places if place not in found]
        if not left:
            break
        if again:
            time.sleep(_PAUSE)
        names = [f"{place}/{CATALOGUE}".lstrip("/") for place in left]
        for place, name, data in zip(left, names, storage.read([(name, 0, LIMIT) for name in names]), strict=True):
            if isinstance(data, NothingThereError):
                found[place] = None
            elif isinstance(data, StoreError):
                raise data
            else:
                try:
                    found[place] = decode(data, f"{storage.url}/{name}", NAMES)
                except DamageError:
                    if again == _TORN - 1:
                        raise
    return [found[place] for place in places]


def copy_of(folder: RemoteFolder, target: Path) -> None:
    """Fetch all files of a run into a directory."""
    for name, file in folder.files():
        out = target / name
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("xb") as opened, file:
            for at in range(0, file.size(), _COPIED):
                opened.write(file.read(at, _COPIED))
