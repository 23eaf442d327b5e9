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
from introspect_cli.store.remote.objects import NothingThereError, below

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from introspect_cli.store.remote.objects import Catalogue, Storage

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


class RemoteFile(Source):
    """A file in object storage; reads ahead when read in sequence."""

    def __init__(self, storage: Storage, place: str, catalogue: Catalogue, name: str) -> None:
        """Keep where the bytes are; nothing is read yet.

        Args:
            storage: of the run.
            place: the path of the directory that was uploaded; "" for all of the run.
            catalogue: of that.
            name: the file's path in it.
        """
        self.path = f"{storage.url}/{below(place, name)}"
        self._catalogue, self._name = catalogue, name
        self._objects = [
            (at, Range(storage, below(place, part), size, 0, size)) for part, at, size in catalogue.objects_of(name)
        ]
        self._next = -1
        self._window = 0

    @property
    def unfinished(self) -> float:
        """Time of upload in seconds since 1970 where more was to follow; 0 where the upload is complete."""
        return 0.0 if self._catalogue.over else self._catalogue.sent

    def is_locked(self) -> bool:
        """Whether the upload is not over, and its last part is younger than three intervals and a grace period."""
        return not self._catalogue.over and now() < self._catalogue.sent + 3 * self._catalogue.every + _GRACE

    def size(self) -> int:
        """Number of bytes."""
        return self._catalogue.size(self._name)

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
        wanted = self.ranges(begin, end)
        parts = [self._catalogue.inline.get(self._name, b"")[begin:end], *(CACHE.read(wanted) if wanted else ())]
        for data in parts:
            if isinstance(data, StoreError):
                raise data
        return b"".join(parts)

    def ranges(self, begin: int, end: int) -> list[Range]:
        """Ranges of objects that hold bytes `begin` to `end`; bytes inside the catalogue need none."""
        return [
            whole._replace(begin=max(begin - at, 0), end=min(end - at, whole.size))
            for at, whole in self._objects
            if begin < at + whole.size and at < end
        ]
