"""Files whose bytes lie in objects, and which of these bytes are read at once and kept.

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
    from collections.abc import Iterable, Iterator, Sequence

    from introspect_cli.store.remote.objects import Catalogue, Extent, Storage

_BLOCK = 256 << 10
_LARGEST_CACHE = 64 << 20
_LARGEST_PREFETCH = 16 << 20
"""Bytes that are read at once because they will be asked for, less than what is kept."""

_LARGEST_WINDOW = 8 << 20
"""Bytes of a file that are read at once where it is read in sequence."""

_GRACE = 60.0
now = time.time


class Range(NamedTuple):
    """Bytes `begin` to before `end` of the object `name` of `size` bytes."""

    storage: Storage
    name: str
    size: int
    begin: int
    end: int

    @property
    def url(self) -> str:
        """URL of the object."""
        return f"{self.storage.url}/{self.name}"

    def blocks(self) -> list[tuple[str, int, int]]:
        """Cache keys of the blocks that hold the range: the object, its size, and where each begins."""
        return [(self.url, self.size, at) for at in range(self.begin // _BLOCK * _BLOCK, self.end, _BLOCK)]


class BlockCache:
    """The blocks of objects that were used last, of all runs that this process reads."""

    def __init__(self, most: int = _LARGEST_CACHE) -> None:
        """Start empty; at most `most` bytes are kept."""
        self._most = most // _BLOCK
        self._blocks: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, wanted: Sequence[Range]) -> list[bytes | StoreError]:
        """The bytes of ranges of one storage; in place of a range that cannot be read, the error, which is not raised.

        All that is missing is asked for at once: of each range the blocks from the first to the last that is missing.
        Errors are not kept: who asks again asks storage again.
        """
        keys = [key for each in wanted for key in each.blocks()]
        with self._lock:
            found = {key: self._blocks[key] for key in keys if key in self._blocks}
        missing = dict[Range, None]()
        for each in wanted:
            lacking = [at for url, size, at in each.blocks() if (url, size, at) not in found]
            if lacking:
                missing[each._replace(begin=lacking[0], end=min(lacking[-1] + _BLOCK, each.size))] = None
        failed: dict[str, StoreError] = {}
        read = wanted[0].storage.read([(each.name, each.begin, each.end) for each in missing]) if missing else []
        for each, data in zip(missing, read, strict=True):
            if isinstance(data, StoreError) or len(data) != each.end - each.begin:
                failed[each.name] = _failure(each, data)
                continue
            for key in each.blocks():
                found[key] = data[key[2] - each.begin : key[2] - each.begin + _BLOCK]
        with self._lock:
            for key in keys:
                if key in found:
                    self._blocks[key] = found[key]
                    self._blocks.move_to_end(key)
            while len(self._blocks) > self._most:
                self._blocks.popitem(last=False)
        out: list[bytes | StoreError] = []
        for each in wanted:
            of_range = each.blocks()
            if all(key in found for key in of_range):
                first = each.begin - of_range[0][2] if of_range else 0
                out.append(b"".join(found[key] for key in of_range)[first : first + each.end - each.begin])
            else:
                out.append(failed[each.name])
        return out


def _failure(wanted: Range, data: bytes | StoreError) -> StoreError:
    """Why a range could not be read: DamageError where its object is missing, or `data` has not as many bytes as asked.

    Any other error in `data` is returned itself.
    """
    if isinstance(data, NothingThereError):
        return DamageError(wanted.url, "it is missing; publish the run again where it was recorded")
    if isinstance(data, StoreError):
        return data
    return DamageError(wanted.url, f"it gave {len(data):,} of {wanted.end - wanted.begin:,} bytes")


CACHE = BlockCache()


def prefetch(wanted: Iterable[Sequence[Range]]) -> int:
    """Read the ranges of items of one run concurrently into the cache, as many as fit into `_LARGEST_PREFETCH` bytes.

    A range that cannot be read is passed over: whoever asks for it reads it again, and gets the error.

    Args:
        wanted: the ranges of each item.

    Returns:
        how many items were taken, from the first on: at least one where there are any.
    """
    chosen: list[Range] = []
    taken = 0
    for ranges in wanted:
        if taken and sum(each.end - each.begin for each in (*chosen, *ranges)) > _LARGEST_PREFETCH:
            break
        taken += 1
        chosen += ranges
    CACHE.read(chosen)
    return taken


class SentFolder(NamedTuple):
    """An uploaded directory.

    Attributes:
        storage: of the run.
        place: the folder of its pieces, with a slash at its end, or "".
        catalogue: its pieces and files.
    """

    storage: Storage
    place: str
    catalogue: Catalogue


class RemoteFile(Source):
    """A file in object storage, its bytes spread over pieces; reads ahead when read in sequence."""

    def __init__(self, sent: SentFolder, extents: list[Extent], path: str) -> None:
        """Keep where the bytes are; nothing is read yet.

        Args:
            sent: the directory that was uploaded.
            extents: the file's, in order.
            path: its URL, for messages.
        """
        self.path = path
        self._sent = sent
        self._extents = extents
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
        return sum(extent.length for extent in self._extents)

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to before `end`, fewer where the file ends before.

        Where one read follows another, reads ahead.

        Raises:
            StoreError: storage does not give them.
        """
        if begin == self._next:  # one asks on: more is read at once
            self._window = min(max(2 * self._window, end - begin), _LARGEST_WINDOW)
            if self._window > end - begin:
                prefetch([each] for each in self.ranges(begin, begin + self._window))
        else:
            self._window = end - begin
        self._next = end
        parts = []
        for part in self._parts(begin, end):
            [data] = [part] if isinstance(part, bytes) else CACHE.read([part])
            if isinstance(data, StoreError):
                raise data
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def ranges(self, begin: int, end: int) -> list[Range]:
        """Ranges of pieces that hold bytes `begin` to `end`; bytes inside the catalogue need none."""
        return [part for part in self._parts(begin, end) if isinstance(part, Range)]

    def _parts(self, begin: int, end: int) -> Iterator[bytes | Range]:
        """The bytes `begin` to `end` where they are in the catalogue, else the range of the piece that has them."""
        at = 0
        for extent in self._extents:
            first, last = max(begin - at, 0) + extent.offset, min(end - at, extent.length) + extent.offset
            at += extent.length
            if first >= last:
                continue
            if extent.piece == INLINE:
                yield self._sent.catalogue.inline[first:last]
            else:
                name, size = self._sent.catalogue.pieces[extent.piece]
                yield Range(self._sent.storage, f"{self._sent.place}{name}", size, first, last)
