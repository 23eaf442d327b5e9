"""Files whose bytes lie in objects, and what of these is read at once and kept.

A request takes longer than a quarter of a megabyte. So objects are read in blocks, which are kept for a while; where
one step of a log follows the other, more of them at a time. What lies in the bytes is checked by who reads them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.errors import StoreError
from introspect_cli.store.files.folders import DamageError
from introspect_cli.store.files.handles import Source
from introspect_cli.store.remote.objects import INLINE, NothingThereError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from introspect_cli.store.remote.objects import Catalogue, Extent, Storage

_KEPT = 64 << 20
_BLOCK = 256 << 10
_MOST_AT_ONCE = 16 << 20
"""Bytes that are read at once because they will be asked for, less than what is kept."""

_AHEAD = 8 << 20
_GRACE = 60.0


class Kept:
    """A least-recently-used cache of blocks, limited in bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = 0
        self._data: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> bytes | None:
        """The block of a name, now the last used; None where it is not cached."""
        with self._lock:
            if name in self._data:
                self._data.move_to_end(name)
            return self._data.get(name)

    def keep(self, name: str, data: bytes) -> None:
        """Cache a block; the least recently used ones are dropped beyond the limit."""
        with self._lock:
            self._bytes += len(data) - len(self._data.get(name, b""))
            self._data[name] = data
            while self._bytes > self._most:
                self._bytes -= len(self._data.popitem(last=False)[1])


KEPT = Kept(_KEPT)
now = time.time


class Range(NamedTuple):
    """Bytes of an object.

    Attributes:
        sent: the directory that it is of.
        piece: its number.
        begin: the first byte.
        end: the byte after the last.
    """

    sent: Sent
    piece: int
    begin: int
    end: int

    def lacking(self) -> Iterator[Range]:
        """The range of whole blocks from the first to the last that is not cached; nothing where all are."""
        size = self.sent.catalogue.pieces[self.piece][1]
        first = last = None
        for at in range(self.begin // _BLOCK * _BLOCK, self.end, _BLOCK):
            if KEPT.get(self.sent.block(self.piece, at)) is None:
                first, last = at if first is None else first, min(at + _BLOCK, size)
        if first is not None and last is not None:
            yield self._replace(begin=first, end=last)


class Sent:
    """An uploaded directory: its storage and catalogue.

    Attributes:
        storage: of the run.
        place: the folder of its pieces, with a slash at its end, or "".
        catalogue: what is where.
    """

    def __init__(self, storage: Storage, place: str, catalogue: Catalogue) -> None:
        self.storage = storage
        self.place = place
        self.catalogue = catalogue

    def url(self, piece: int) -> str:
        """URL of a piece."""
        return f"{self.storage.url}/{self.object(piece)}"

    def object(self, piece: int) -> str:
        """The name of a piece below the run's URL."""
        return f"{self.place}{self.catalogue.pieces[piece][0]}"

    def block(self, piece: int, at: int) -> str:
        """Cache key of the block that begins at byte `at` of a piece."""
        return f"{self.url(piece)} {self.catalogue.pieces[piece][1]} {at}"

    def read(self, piece: int, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end` of a piece, from the cache as far as they are there."""
        wanted = Range(self, piece, begin, end)
        first = begin // _BLOCK * _BLOCK
        blocks = [KEPT.get(self.block(piece, at)) for at in range(first, end, _BLOCK)]
        if None in blocks:
            missing = next(wanted.lacking())
            [data] = self.storage.read([(self.object(piece), missing.begin, missing.end)])
            self.take(missing, data)
            assert isinstance(data, bytes)  # else it was raised
            before = b"".join(block or b"" for block in blocks[: (missing.begin - first) // _BLOCK])
            after = blocks[-(-(missing.end - first) // _BLOCK) :]
            blocks = [before, data, *after]
        return b"".join(block or b"" for block in blocks)[begin - first : end - first]

    def take(self, wanted: Range, data: bytes | StoreError) -> None:
        """Cache the blocks of the range `wanted`.

        Raises:
            StoreError: it could not be read, or less came than was sent.
        """
        if isinstance(data, NothingThereError):
            where = self.url(wanted.piece)
            raise DamageError(where, "it is missing; publish the run again where it was recorded") from None
        if isinstance(data, StoreError):
            raise data
        if len(data) != wanted.end - wanted.begin:
            asked = wanted.end - wanted.begin
            raise DamageError(self.url(wanted.piece), f"it gave {len(data):,} of {asked:,} bytes")
        for at in range(0, len(data), _BLOCK):
            KEPT.keep(self.block(wanted.piece, wanted.begin + at), data[at : at + _BLOCK])


def fetch(wanted: Iterable[list[Range]]) -> int:
    """Read ranges of one run concurrently into the cache; returns how many items fit into `_MOST_AT_ONCE` bytes."""
    jobs, room, taken = dict[Range, None](), _MOST_AT_ONCE, 0
    for ranges in wanted:
        room -= sum(each.end - each.begin for each in ranges)
        if room < 0 and taken:
            break
        taken += 1
        jobs |= dict.fromkeys(lacking for each in ranges for lacking in each.lacking())
    if jobs:
        storage = next(iter(jobs)).sent.storage
        read = storage.read([(each.sent.object(each.piece), each.begin, each.end) for each in jobs])
        for each, data in zip(jobs, read, strict=True):
            if isinstance(data, bytes) and len(data) == each.end - each.begin:  # else whoever asks for it hears why
                each.sent.take(each, data)
    return taken


class RemoteFile(Source):
    """A file in object storage, its bytes spread over pieces; reads ahead when read in sequence."""

    def __init__(self, sent: Sent, extents: list[Extent], path: str) -> None:
        self.path = path
        self._sent = sent
        self._extents = extents
        self._size = sum(extent.length for extent in extents)
        self._next = -1
        self._window = 0

    @property
    def unfinished(self) -> float:
        """Time of upload in seconds since 1970 where more was to follow; 0 where the upload is complete."""
        return 0.0 if self._sent.catalogue.over else self._sent.catalogue.sent

    def is_locked(self) -> bool:
        """Whether the upload is not over, and its last part is younger than three intervals and a grace period."""
        catalogue = self._sent.catalogue
        return not catalogue.over and now() < catalogue.sent + 3 * catalogue.every + _GRACE

    def size(self) -> int:
        """Number of bytes."""
        return self._size

    def place(self, offset: int) -> str:
        """URL of the piece that holds the byte at `offset`."""
        return next((each.sent.url(each.piece) for each in self.ranges(offset, offset + 1)), self.path)

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to before `end`, fewer where the file ends before."""
        if begin == self._next:  # one asks on: more is read at once
            self._window = min(max(2 * self._window, end - begin), _AHEAD)
            if self._window > end - begin:
                fetch([[each] for each in self.ranges(begin, begin + self._window)])
        else:
            self._window = end - begin
        self._next = end
        parts = []
        for at, extent in self._from(begin):
            first, last = max(begin - at, 0) + extent.offset, min(end - at, extent.length) + extent.offset
            if at >= end:
                break
            if extent.piece == INLINE:
                parts.append(self._sent.catalogue.inline[first:last])
            else:
                parts.append(self._sent.read(extent.piece, first, last))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _from(self, offset: int) -> Iterator[tuple[int, Extent]]:
        """(first byte in the file, extent) from the extent that holds `offset` on."""
        at = 0
        for extent in self._extents:
            if at + extent.length > offset:
                yield at, extent
            at += extent.length

    def ranges(self, begin: int, end: int) -> Iterator[Range]:
        """Ranges of pieces that hold bytes `begin` to `end`; bytes inside the catalogue need none."""
        for at, extent in self._from(begin):
            first, last = max(begin - at, 0), min(end - at, extent.length)
            if extent.piece != INLINE and first < last:
                yield Range(self._sent, extent.piece, extent.offset + first, extent.offset + last)
