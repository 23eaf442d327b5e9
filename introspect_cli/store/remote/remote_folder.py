"""A run in object storage, read as a directory is: whoever reads runs does not know of it.

Of a run of many ranks, the catalogues are read at once, and nothing more until it is asked for.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from introspect_cli.errors import NoRunError, StoreError
from introspect_cli.store.files.folders import LIMIT_DOCUMENT, LOCK, MANIFEST, NAMES, SHARED, DamageError, Directory
from introspect_cli.store.remote.objects import (
    CATALOGUE,
    INLINE,
    LIMIT,
    Catalogue,
    Extent,
    NothingThereError,
    Storage,
    below,
    decode_catalogue,
)
from introspect_cli.store.remote.pieces import RemoteFile, SentFolder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from introspect_cli.store.files.handles import Source

_FOLDER = re.compile(r"(rank|attempt)(0|[1-9]\d{0,5})|shared")
_PAUSE = 0.1


class RemoteFolder(Directory):
    """A directory of a run in object storage.

    Attributes:
        sent: where its files are; None where a catalogue of each directory in it says so.
    """

    def __init__(self, storage: Storage, place: str, sent: SentFolder | None, inside: dict[str, Any]) -> None:
        """Take the directory's contents.

        Args:
            storage: of the run.
            place: the directory's path below it.
            sent: pieces and catalogue of its files; None where each directory in it has its own catalogue.
            inside: by name, the extents of a file; of a directory a dict of this kind, a `RemoteFolder`, or None until
                its catalogue is read.
        """
        self.path = f"{storage.url}/{place}".rstrip("/")
        self.sent = sent
        self._storage, self._place, self._inside = storage, place, inside

    @property
    def remote_size(self) -> int:
        """Bytes of all files whose catalogues were read."""
        here = sum(map(self.sent.catalogue.size, self.sent.catalogue.files)) if self.sent else 0
        return here + sum(each.remote_size for each in self._inside.values() if isinstance(each, RemoteFolder))

    def names(self) -> list[str]:
        """Names of all entries of the directory, sorted."""
        return sorted(self._inside)

    def __contains__(self, name: str) -> bool:
        return name in self._inside

    def prefetch(self, names: Iterable[str]) -> None:
        """Read the catalogues, where they were not yet, of the rank directories among `names` concurrently."""
        wanted = [name for name in names if name.startswith("rank") and self._inside.get(name, name) is None]
        places = [below(self._place, name) for name in wanted]
        for name, place, catalogue in zip(wanted, places, catalogues(self._storage, places), strict=True):
            self._inside[name] = _folder(self._storage, place, catalogue)

    def folder(self, name: str) -> RemoteFolder:
        """The directory `name` inside this one; its catalogue is read where it was not yet.

        Raises:
            FileNotFoundError: there is none.
            DamageError: it is a file.
            StoreError: its catalogue cannot be read.
        """
        self.prefetch([name])
        if name not in self._inside:
            raise FileNotFoundError(name)
        inside, place = self._inside[name], below(self._place, name)
        if inside is None:
            self._inside[name] = inside = (_shared if name == SHARED else _attempt)(self._storage, place)
        if isinstance(inside, list):
            raise DamageError(f"{self.path}/{name}", "it is a file where a directory belongs")
        return RemoteFolder(self._storage, place, self.sent, inside) if isinstance(inside, dict) else inside

    def file(self, name: str) -> Source:
        """The file `name` inside this directory, for reading; FileNotFoundError for a directory too.

        The lock file is an empty one, whose `is_locked` says whether the upload is not over.
        """
        extents = [] if name == LOCK else self._inside.get(name)  # the one tells whether it is over
        if not isinstance(extents, list) or self.sent is None:
            raise FileNotFoundError(name)
        return RemoteFile(self.sent, extents, f"{self.path}/{name}")

    def files(self) -> Iterator[tuple[str, Source]]:
        """(path, file) of all files in it and in its directories."""
        self.prefetch(self.names())
        for name in self.names():
            if isinstance(self._inside[name], list):
                yield name, self.file(name)
            else:
                yield from ((f"{name}/{path}", file) for path, file in self.folder(name).files())


def open_remote(url: str) -> RemoteFolder | None:
    """Open the run's directory at a URL; None where the URL is a single object.

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
    """The directory of another attempt of a launch, at the path `name`, listed now.

    Empty where it has no manifest yet.
    """
    entries = storage.entries(name) or {}
    return _launch(storage, name, entries) if MANIFEST in entries else RemoteFolder(storage, name, None, {})


def _launch(storage: Storage, place: str, entries: Mapping[str, int]) -> RemoteFolder:
    """The directory of a launch, with its manifest, read now, and a catalogue to read later for each rank.

    Args:
        storage: of the run.
        place: path of the directory below it; "" for the run itself.
        entries: size by name of the directory's entries.

    Raises:
        StoreError: the manifest cannot be read.
    """
    size = min(entries[MANIFEST], LIMIT_DOCUMENT)
    path = below(place, MANIFEST)
    [manifest] = storage.read([(path, 0, size)])
    if isinstance(manifest, StoreError):
        raise manifest
    sent = SentFolder(storage, place, Catalogue(over=True, inline=manifest))
    folders = dict.fromkeys(name for name in entries if _FOLDER.fullmatch(name))
    return RemoteFolder(storage, place, sent, {**folders, MANIFEST: [Extent(INLINE, 0, len(manifest))]})


def _shared(storage: Storage, place: str) -> RemoteFolder:
    """The directory of files that ranks share, at the path `place`, each file an object of its own.

    It is listed now.
    """
    entries = storage.entries(place) or {}
    sent = SentFolder(storage, f"{place}/", Catalogue(over=True, pieces=list(entries.items())))
    inside = {name: [Extent(at, 0, size)] for at, (name, size) in enumerate(entries.items())}
    return RemoteFolder(storage, place, sent, inside)


def _folder(storage: Storage, place: str, catalogue: Catalogue | None) -> RemoteFolder:
    """The directory at the path `place` that a catalogue describes; empty where that is None."""
    if catalogue is None:
        return RemoteFolder(storage, place, None, {})
    inside: dict[str, Any] = {}
    for name, extents in catalogue.files.items():
        *folders, last = name.split("/")
        into = inside
        for folder in folders:
            into = into.setdefault(folder, {})
        into[last] = extents
    return RemoteFolder(storage, place, SentFolder(storage, f"{place}/".lstrip("/"), catalogue), inside)


def catalogues(storage: Storage, places: list[str], *, attempts: int = 3) -> list[Catalogue | None]:
    """Read the catalogues of some places concurrently; None for a place without one.

    One that fails its check may be about to be replaced, where storage does not replace an object at once: after a
    pause all are read again.

    Args:
        storage: of the run.
        places: paths of the directories.
        attempts: how often to read, at most.

    Raises:
        StoreError: one cannot be read, or fails its check each time.
    """
    names = [below(place, CATALOGUE) for place in places]
    read: list[Catalogue | None] = []
    try:
        for name, data in zip(names, storage.read([(name, 0, LIMIT) for name in names]), strict=True):
            if isinstance(data, StoreError) and not isinstance(data, NothingThereError):
                raise data
            read.append(decode_catalogue(data, f"{storage.url}/{name}", NAMES) if isinstance(data, bytes) else None)
    except DamageError:
        if attempts < 2:
            raise
        time.sleep(_PAUSE)
        return catalogues(storage, places, attempts=attempts - 1)
    return read


def fetch_files(folder: RemoteFolder, target: Path) -> None:
    """Fetch all files of a run into the directory `target`; FileExistsError where one is there already."""
    for name, file in folder.files():
        out = target / name
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("xb") as opened, file:
            opened.writelines(file.blocks())
