"""A run in object storage, read as a directory is: whoever reads runs does not know of it.

Of a run of many ranks, the catalogues are read at once, and nothing more until it is asked for.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from introspect_cli.errors import NoRunError, StoreError
from introspect_cli.store.files.folders import LIMIT_DOCUMENT, LOCK, MANIFEST, DamageError, Directory
from introspect_cli.store.remote.objects import (
    CATALOGUE,
    LIMIT,
    Catalogue,
    NothingThereError,
    Storage,
    below,
    decode_catalogue,
)
from introspect_cli.store.remote.pieces import RemoteFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from introspect_cli.store.files.handles import Source

_FOLDER = re.compile(r"(rank|attempt)(0|[1-9]\d{0,5})")
_PAUSE = 0.1


class RemoteFolder(Directory):
    """A directory of a run in object storage."""

    def __init__(
        self,
        storage: Storage,
        place: str,
        catalogue: Catalogue,
        prefix: str = "",
        others: Iterable[str] = (),
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

    @property
    def remote_size(self) -> int:
        """Bytes of all files whose catalogues were read."""
        others = sum(each.remote_size for each in self._others.values() if each is not None)
        return others + sum(map(self.catalogue.size, self.catalogue.names))

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
        """The file `name` inside this directory, for reading; FileNotFoundError for a directory too.

        The lock file is an empty one, whose `is_locked` says whether the upload is not over.
        """
        if name not in self._files and name != LOCK:
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
        return RemoteFolder(storage, "", catalogue or Catalogue())
    if MANIFEST in entries:
        return _launch(storage, "", entries)
    runs = sorted(name for name, size in entries.items() if size < 0)
    remedy = (
        f"name one of the runs in it, such as {url}/{runs[0]}" if runs else "`introspect publish RUN URL` sends one"
    )
    raise NoRunError(f"{url} is not a run: it has no {CATALOGUE}; {remedy}")


def _launch(storage: Storage, place: str, entries: Mapping[str, int] | None = None) -> RemoteFolder:
    """The directory of a launch, or of an attempt of it, with its manifest, read now; a rank's catalogue is read later.

    Empty where it has no manifest yet.

    Args:
        storage: of the run.
        place: path of the directory below it; "" for the run itself.
        entries: size by name of the directory's entries; None to list them now.

    Raises:
        StoreError: the manifest cannot be read.
    """
    entries = (storage.entries(place) or {}) if entries is None else entries
    if MANIFEST not in entries:
        return RemoteFolder(storage, place, Catalogue(over=True))
    [manifest] = storage.read([(below(place, MANIFEST), 0, min(entries[MANIFEST], LIMIT_DOCUMENT))])
    if isinstance(manifest, StoreError):
        raise manifest
    folders = (name for name in entries if _FOLDER.fullmatch(name))
    return RemoteFolder(storage, place, Catalogue(over=True, inline={MANIFEST: manifest}), others=folders)


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
            read.append(decode_catalogue(data, f"{storage.url}/{name}") if isinstance(data, bytes) else None)
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
