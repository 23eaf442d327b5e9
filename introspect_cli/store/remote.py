"""A run in object storage: what its objects are, and how they are listed, read and put.

Objects cannot be appended to. So what a file has grown by is put in an object of its own, which never changes again:
`log.bin.000000000064` has the bytes of `log.bin` from byte 64 on. One small object, the *catalogue*, is put after them
and says how long they are. Whatever a catalogue names is there; what came later does not exist. It also holds what
every reader needs first: the heads of the log, with the bodies of its small frames. So opening a rank is one request,
and a step is a range of an object.

A process that is killed sends no more, and says nothing of it. So a catalogue says whether it is the last one, when it
was put, and within how many seconds another was to follow.

A URL may name whatever fsspec opens. The clients below it retry what is worth a retry (a cut connection, an answer of
500). What they give up on, each says in words of its own: here it becomes one sentence that names the URL and what to
do.

A request takes longer than a quarter of a megabyte. So objects are read in blocks, which are kept for a while; where
one step of a log follows the other, more of them at a time. What lies in the bytes is checked by who reads them.

Whoever reads runs reads a directory, and does not know of all that. Of a run of many ranks, the catalogues are read at
once, and nothing more until it is asked for.
"""

from __future__ import annotations

import json
import re
import struct
import time
import zlib
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from introspect_cli.errors import StoreError
from introspect_cli.store.files import FORMAT, LIMIT_DOCUMENT, MANIFEST, NAMES, DamageError, Directory, Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


_LONGEST = 200


class NothingThereError(StoreError):
    """Storage has no such object."""


def is_remote(path: str | Path) -> bool:
    """Whether a path is a URL."""
    return "://" in str(path)


def below(place: str, name: str) -> str:
    """`place/name` without slashes at either end; either may be ""."""
    return f"{place}/{name}".strip("/")


class Storage:
    """The objects below a URL.

    Attributes:
        url: without a slash at its end.
        system: of fsspec.
        root: the path in it.
    """

    def __init__(self, url: str) -> None:
        """Find the fsspec file system for a URL.

        Raises:
            StoreError: fsspec is not installed, or no file system opens the URL.
        """
        self.url = url.rstrip("/")
        try:
            import fsspec
        except ImportError:
            raise StoreError(f'{url} needs fsspec: `pip install "introspect-cli[remote]"`') from None
        try:
            self.system, self.root = fsspec.core.url_to_fs(self.url)
        except Exception as error:  # each system raises its own
            raise failure("reach", url, error) from None

    def path(self, name: str) -> str:
        """The file system's path of the object `name` below the URL."""
        return f"{self.root}/{name}" if name else str(self.root)

    def entries(self, folder: str = "", *, deep: bool = False) -> dict[str, int]:
        """Size by name of a folder's entries, -1 for folders. Not cached.

        With `deep`, of all objects below it, by their paths.

        Raises:
            NothingThereError: there is no such folder.
            StoreError: it cannot be listed.
        """
        path, where = self.path(folder), f"{self.url}/{folder}".rstrip("/")
        try:
            self.system.invalidate_cache()  # a run grows while it is looked at
            find = self.system.find if deep else self.system.ls
            listed: Any = find(path, detail=True)
        except Exception as error:
            raise failure("list", where, error) from None
        own, sizes = path.strip("/"), dict[str, int]()
        for entry in listed.values() if deep else listed:
            sizes[str(entry["name"]).strip("/")] = -1 if entry["type"] == "directory" else entry.get("size") or 0
        return {name.removeprefix(own).strip("/"): size for name, size in sizes.items() if name != own}

    def read(self, wanted: Sequence[tuple[str, int, int]]) -> list[bytes | StoreError]:
        """Read ranges (name, first byte, byte after the last), concurrently where possible.

        Returns:
            for each range its bytes, or the error (not raised) where it could not be read.
        """
        names, begins, ends = [name for name, _, _ in wanted], [at for _, at, _ in wanted], [at for _, _, at in wanted]
        try:
            got = self.system.cat_ranges([self.path(name) for name in names], begins, ends, on_error="return")
        except Exception as error:
            got = [error] * len(names)
        return [
            bytes(data) if isinstance(data, (bytes, bytearray)) else failure("read", f"{self.url}/{name}", data)
            for name, data in zip(names, got, strict=True)
        ]

    def put(self, name: str, data: bytes) -> None:
        """Write an object, in place of one that is there; folders are made where the file system has them.

        Raises:
            StoreError: it cannot be written.
        """
        from fsspec.asyn import AsyncFileSystem

        path = self.path(name)
        try:
            if not isinstance(self.system, AsyncFileSystem):  # those have directories, and the others none
                self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.system.pipe_file(path, data)
        except Exception as error:
            raise failure("write", f"{self.url}/{name}", error) from None


def _unless_failed(data: bytes | StoreError) -> bytes:
    """What `Storage.read` gave of a range; raises the error that it gave instead."""
    if isinstance(data, StoreError):
        raise data
    return data


def failure(doing: str, url: str, error: BaseException) -> StoreError:
    """The StoreError for a client's exception.

    NothingThereError for a missing object.

    Args:
        doing: what could not be done, after `cannot`: `read`, `send to`.
        url: of the object.
        error: the exception.
    """
    if isinstance(error.__cause__, OSError):  # fsspec calls it a file that is not there where nobody listens
        return StoreError(f"cannot reach {url}: {error.__cause__}")
    text = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
    if isinstance(error, FileNotFoundError) and "bucket" not in text:
        return NothingThereError(f"there is no run at {url}: check the URL")
    return StoreError(f"cannot {doing} {url}: {text}")


CATALOGUE: Final = "catalogue"
LIMIT: Final = 320 << 20
"""Bytes of a catalogue: the heads of the longest log, and room beside them."""

_HEADER = struct.Struct("<8sIII")
"""Magic, format, CRC-32 of what follows, bytes of the JSON; then both parts, compressed as one."""

_MAGIC = b"INTROSPC"
_ID = re.compile(r"[0-9a-f]{0,32}")
_MOST = 1 << 62
_LATEST = 1e11


@dataclass
class Catalogue:
    """What there is of a rank's directory: a file's bytes are those that are inline, then those of its objects.

    Attributes:
        run_id: of the run; hexadecimal.
        over: whether nothing will follow.
        sent: when it was put, in seconds since 1970.
        every: within how many seconds the next one was to follow.
        inline: bytes that are in the catalogue, by the name of a file.
        objects: bytes of each object of a file, in order, by its name.
    """

    run_id: str = ""
    over: bool = False
    sent: float = 0.0
    every: float = 0.0
    inline: dict[str, bytes] = field(default_factory=dict)
    objects: dict[str, list[int]] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The bytes of the catalogue object: header, then compressed JSON and inline bytes."""
        sizes = {name: len(data) for name, data in self.inline.items()}
        text = json.dumps(vars(self) | {"inline": sizes}, separators=(",", ":")).encode()
        body = zlib.compress(text + b"".join(self.inline.values()), 1)
        return _HEADER.pack(_MAGIC, FORMAT, zlib.crc32(body), len(text)) + body

    def objects_of(self, name: str) -> Iterator[tuple[str, int, int]]:
        """Name, first byte and length of each object of a file, in order."""
        at = len(self.inline.get(name, b""))
        for length in self.objects.get(name, ()):
            yield f"{name}.{at:012d}", at, length
            at += length

    def size(self, name: str) -> int:
        """Bytes of the file `name`."""
        return len(self.inline.get(name, b"")) + sum(self.objects.get(name, ()))

    @property
    def names(self) -> set[str]:
        """Names of all files."""
        return {*self.inline, *self.objects}


def decode_catalogue(data: bytes, path: str) -> Catalogue:
    """Decode a catalogue and check all its numbers and names.

    Args:
        data: the object.
        path: its URL.

    Raises:
        DamageError: it was altered, or no version writes such a thing.
    """
    magic, number, crc, length = _HEADER.unpack_from(data.ljust(_HEADER.size))
    if magic != _MAGIC or zlib.crc32(data[_HEADER.size :]) != crc:
        raise DamageError(path, "its bytes are not those that were sent")
    if number > FORMAT:
        raise DamageError(path, f"it has format {number}, which a newer introspect-cli reads")
    try:
        body = zlib.decompressobj().decompress(data[_HEADER.size :], LIMIT)
        fields, at, inline = json.loads(body[:length]), length, {}
        for name, size in fields["inline"].items():
            inline[name] = body[at : at + _number(size)]
            at += size
        objects = {name: [_number(size) for size in sizes] for name, sizes in fields["objects"].items()}
        sent, every = float(fields["sent"]), float(fields["every"])
        times = 0 <= sent < _LATEST and 0 <= every < _LATEST
        if at != len(body) or not times or not _ID.fullmatch(fields["run_id"]):
            raise ValueError  # noqa: TRY301 - told as all damage is
        catalogue = Catalogue(fields["run_id"], fields["over"] is True, sent, every, inline, objects)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error):
        raise DamageError(path, "what it says cannot be read") from None
    if not all(map(NAMES.fullmatch, catalogue.names)):
        raise DamageError(path, "it names a file that no run has")
    return catalogue


def _number(value: Any) -> int:
    """`value` where it is an integer from 0 to below `_MOST`; ValueError otherwise."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(value)
    return value


# --- pieces


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

    def aligned(self) -> Range:
        """The range with all of the blocks in which it begins and ends."""
        end = min(-(-self.end // _BLOCK) * _BLOCK, self.size)
        return self._replace(begin=self.begin // _BLOCK * _BLOCK, end=end)

    def blocks(self) -> list[tuple[str, int, int]]:
        """Cache keys of the blocks that hold the range: the object, its size, and where each begins."""
        return [(self.url, self.size, at) for at in range(self.begin // _BLOCK * _BLOCK, self.end, _BLOCK)]


CACHE: dict[tuple[str, int, int], bytes] = {}
"""The blocks of objects that were used last, the latest at the end, of all runs that this process reads."""


def read_ranges(wanted: Sequence[Range]) -> list[bytes | StoreError]:
    """The bytes of ranges of one storage; in place of a range that cannot be read, the error, which is not raised.

    All ranges that are not there whole are asked for at once. Errors are not kept: who asks again asks storage again.
    """
    missing = list(dict.fromkeys(each.aligned() for each in wanted if not CACHE.keys() >= {*each.blocks()}))
    read = wanted[0].storage.read([(each.name, each.begin, each.end) for each in missing]) if missing else []
    failed: dict[str, StoreError] = {}
    for each, data in zip(missing, read, strict=True):
        if isinstance(data, NothingThereError):
            failed[each.name] = DamageError(each.url, "it is missing; publish the run again where it was recorded")
        elif isinstance(data, StoreError):
            failed[each.name] = data
        elif len(data) != each.end - each.begin:
            failed[each.name] = DamageError(each.url, f"it gave {len(data):,} of {each.end - each.begin:,} bytes")
        else:
            starts = range(0, len(data), _BLOCK)
            CACHE.update(zip(each.blocks(), (data[at : at + _BLOCK] for at in starts), strict=True))
    out: list[bytes | StoreError] = []
    for each in wanted:
        keys, first = each.blocks(), each.begin % _BLOCK
        if CACHE.keys() >= {*keys}:
            CACHE.update([(key, CACHE.pop(key)) for key in keys])
            out.append(b"".join(map(CACHE.__getitem__, keys))[first : first + each.end - each.begin])
        else:
            out.append(failed[each.name])
    for key in list(islice(CACHE, max(len(CACHE) - _LARGEST_CACHE // _BLOCK, 0))):
        del CACHE[key]
    return out


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
    read_ranges(chosen)
    return taken


class RemoteFile(Source):
    """A file in object storage; reads ahead when read in sequence."""

    def __init__(self, storage: Storage, place: str, catalogue: Catalogue, name: str) -> None:
        """Keep where the bytes are; nothing is read yet.

        Args:
            storage: of the run.
            place: the path of the directory that was uploaded.
            catalogue: of that.
            name: the file's path in it.
        """
        self.path = f"{storage.url}/{below(place, name)}"
        self._catalogue, self._name = catalogue, name
        self._objects = [
            (at, Range(storage, below(place, part), size, 0, size)) for part, at, size in catalogue.objects_of(name)
        ]
        self._next = self._window = -1

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

        Where one read follows another, twice as many are read as the last time, for the next.

        Raises:
            StoreError: storage does not give them.
        """
        self._window = min(2 * self._window, _LARGEST_WINDOW) if begin == self._next else 0
        self._window, self._next = max(self._window, end - begin), end
        if self._window > end - begin:
            prefetch([each] for each in self.ranges(begin, begin + self._window))
        parts = map(_unless_failed, read_ranges(self.ranges(begin, end)))
        return b"".join([self._catalogue.inline.get(self._name, b"")[begin:end], *parts])

    def ranges(self, begin: int, end: int) -> list[Range]:
        """Ranges of objects that hold bytes `begin` to `end`; bytes inside the catalogue need none."""
        return [
            whole._replace(begin=max(begin - at, 0), end=min(end - at, whole.size))
            for at, whole in self._objects
            if begin < at + whole.size and at < end
        ]


# --- remote folder


_FOLDER = re.compile(r"(rank|attempt)(0|[1-9]\d{0,5})")


class RemoteFolder(Directory):
    """A directory of a run in object storage."""

    is_far = True

    def __init__(
        self, storage: Storage, place: str, catalogue: Catalogue, prefix: str = "", others: Iterable[str] = ()
    ) -> None:
        """Take the directory's contents.

        Args:
            storage: of the run.
            place: the path below it of the directory that was uploaded.
            catalogue: of that.
            prefix: this directory's path in it, with a slash at its end; "" where it is the same.
            others: directories of ranks and attempts in it that have catalogues of their own, read when asked for.
        """
        self.path = f"{storage.url}/{below(place, prefix)}".rstrip("/")
        self.catalogue = catalogue
        self._storage, self._place, self._prefix = storage, place, prefix
        self._others: dict[str, RemoteFolder | None] = dict.fromkeys(others)
        inside = [name.removeprefix(prefix) for name in catalogue.names if name.startswith(prefix)]
        self._files = {name for name in inside if "/" not in name}
        self._names = {name.partition("/")[0] for name in inside} | self._others.keys()

    def names(self) -> list[str]:
        """Names of all entries of the directory, sorted."""
        return sorted(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def prefetch(self, names: Iterable[str]) -> None:
        """Read the catalogues, where they were not yet, of the rank directories among `names` concurrently."""
        wanted = [name for name in names if name.startswith("rank") and self._others.get(name, self) is None]
        places = [below(self._place, name) for name in wanted]
        for name, place, catalogue in zip(wanted, places, catalogues(self._storage, places), strict=True):
            self._others[name] = RemoteFolder(self._storage, place, catalogue or Catalogue(over=True))

    def folder(self, name: str) -> RemoteFolder:
        """The directory `name` inside this one; its catalogue is read where it was not yet.

        Raises:
            FileNotFoundError: there is none.
            DamageError: it is a file.
            StoreError: its catalogue cannot be read.
        """
        if name not in self._names:
            raise FileNotFoundError(name)
        if name in self._files:
            raise DamageError(f"{self.path}/{name}", "it is a file where a directory belongs")
        if name not in self._others:
            return RemoteFolder(self._storage, self._place, self.catalogue, f"{self._prefix}{name}/")
        self.prefetch([name])
        if (other := self._others[name]) is None:
            other = self._others[name] = _launch(self._storage, below(self._place, name))
        return other

    def file(self, name: str) -> Source:
        """The file `name` inside this directory, for reading; FileNotFoundError for a directory too."""
        if name not in self._files:
            raise FileNotFoundError(name)
        return RemoteFile(self._storage, self._place, self.catalogue, f"{self._prefix}{name}")

    def files(self) -> Iterator[tuple[str, Source]]:
        """(path, file) of all files in it and in its directories."""
        self.prefetch(self.names())
        for name in self.names():
            if name in self._files:
                yield name, self.file(name)
            else:
                yield from ((f"{name}/{path}", file) for path, file in self.folder(name).files())


def open_remote(url: str) -> RemoteFolder:
    """Open the run's directory at a URL.

    Raises:
        StoreError: there is nothing, or no run, or it cannot be read.
    """
    storage = Storage(url)
    entries = storage.entries()
    if MANIFEST in entries:
        return _launch(storage, "", entries)
    raise StoreError(f"{url} is not a run: it has no {MANIFEST}; name a run in it, or `introspect publish RUN URL`")


def _launch(storage: Storage, place: str, entries: Mapping[str, int] | None = None) -> RemoteFolder:
    """The directory of a run, or of an attempt of it, with its manifest, read now; a rank's catalogue is read later.

    Empty where it has no manifest yet.

    Args:
        storage: of the run.
        place: path of the directory below it; "" for the run itself.
        entries: size by name of the directory's entries; None to list them now.

    Raises:
        StoreError: the manifest cannot be read.
    """
    entries = storage.entries(place) if entries is None else entries
    if MANIFEST not in entries:
        return RemoteFolder(storage, place, Catalogue(over=True))
    [manifest] = storage.read([(below(place, MANIFEST), 0, min(entries[MANIFEST], LIMIT_DOCUMENT))])
    inline = {MANIFEST: _unless_failed(manifest)}
    folders = (name for name in entries if _FOLDER.fullmatch(name))
    return RemoteFolder(storage, place, Catalogue(over=True, inline=inline), others=folders)


def catalogues(storage: Storage, places: list[str]) -> list[Catalogue | None]:
    """Read the catalogues of some places concurrently; None for a place without one.

    Raises:
        StoreError: one cannot be read, or fails its check.
    """
    names = [below(place, CATALOGUE) for place in places]
    read: list[Catalogue | None] = []
    for name, data in zip(names, storage.read([(name, 0, LIMIT) for name in names]), strict=True):
        absent = isinstance(data, NothingThereError)
        read.append(None if absent else decode_catalogue(_unless_failed(data), f"{storage.url}/{name}"))
    return read


def fetch_files(folder: RemoteFolder, target: Path) -> None:
    """Fetch all files of a run into the directory `target`; FileExistsError where one is there already."""
    for name, file in folder.files():
        out = target / name
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("xb") as opened, file:
            for at in range(0, file.size(), _LARGEST_WINDOW):
                opened.write(file.read(at, at + _LARGEST_WINDOW))
