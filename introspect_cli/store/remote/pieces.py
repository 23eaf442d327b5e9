"""Files whose bytes lie in pieces, in object storage, and what of these is read at once and kept.

Names, totals and settings are kept by what they digest to, so what ranks have in common is read once. Of records the
very bytes of a step are read; where one step follows the other, more of them at a time.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from introspect_cli.errors import StoreError
from introspect_cli.store.files.folders import DamageError
from introspect_cli.store.files.handles import Source
from introspect_cli.store.remote.objects import (
    CATALOGUE,
    INLINE,
    Catalogue,
    Extent,
    NothingThereError,
    Storage,
)
from introspect_cli.sums import content_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_KEPT = 64 << 20
_SPAN = 256 << 10
"""Bytes that are read around what was asked for, since a request takes longer than they do."""

_MOST_AT_ONCE = 16 << 20
"""Bytes that are read at once because they will be asked for, less than what is kept."""

_OF_ALL = re.compile(r"[a-z]+\.arrow|totals\.bin")
_AHEAD = 8 << 20
_GRACE = 60.0


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
        spans = [(self, self.span(extent)), *self._of_other_ranks(extent)]
        wanted = [
            (sent.object(near[0].piece), near[0].offset, near[-1].offset + near[-1].length) for sent, near in spans
        ]
        for (sent, near), read in zip(spans, self.storage.read(wanted), strict=True):
            for each in near:
                at = each.offset - near[0].offset
                part = read[at : at + each.length] if isinstance(read, bytes) else b""
                if content_digest(part) == each.digest:
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

    def _of_other_ranks(self, extent: Extent) -> Iterator[tuple[Sent, list[Extent]]]:
        """What other ranks have in the place of an extent, where each has something else."""
        name, number = self.named[extent]
        asked, room = {extent.digest}, _MOST_AT_ONCE
        for other in self.others if _OF_ALL.fullmatch(name) else ():
            extents = other.catalogue.files.get(name, [])[number : number + 1]
            for each in extents:
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
    jobs, room, taken = [], _MOST_AT_ONCE, 0
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


class RemoteFile(Source):
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

    def is_locked(self) -> bool:
        """Whether it may still grow: its sender has not said that it is over, and its time is not up."""
        catalogue = self._sent.catalogue
        return not catalogue.over and now() < catalogue.sent + 3 * catalogue.every + _GRACE

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
