"""Send a run to object storage while it is written, in rounds.

Ranks of a launch send their own, each from the process beside it. Storage that is slow or fails delays what sends, and
nobody else.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING

from introspect_cli.errors import StoreError
from introspect_cli.store.files import (
    ATTEMPT_NAME,
    HEADS,
    LIMIT_DOCUMENT,
    LOG,
    MANIFEST,
    RANK_NAME,
    SOURCES,
    TENSORS,
    DamageError,
    Folder,
    reason,
)
from introspect_cli.store.frames import START
from introspect_cli.store.log import Frames
from introspect_cli.store.pack import files_of
from introspect_cli.store.remote import CATALOGUE, Catalogue, NothingThereError, Storage, below, catalogues
from introspect_cli.store.run import checked_manifest, launch_of, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


ROUND_SECONDS = 10.0
"""Seconds between two rounds."""

ROUND_FRACTION = 0.02
"""Of the time so far, where that is more: a run of a week has some hundred rounds, not sixty thousand."""

MAX_CONCURRENT = 8


def _job_id(manifest: bytes, path: str) -> object:
    """The job id of the launch in a manifest (its bytes), the run's id where it names none. `path` is for errors."""
    said = checked_manifest(manifest, path)
    return (launch_of(said) or {}).get("job", said.get("id"))


class Sender:
    """Uploads a run, or one rank of it, in rounds.

    Attributes:
        due: when the next round is, on the clock that never goes back.
    """

    def __init__(self, run: Path, url: str, rank: int | None = None, *, sources: bool = False) -> None:
        """Open the storage; nothing is sent yet.

        Args:
            run: its directory.
            url: what is to be the run's.
            rank: which rank of the last attempt of a launch; None for all ranks of all attempts.
            sources: whether the text of source files goes with it.

        Raises:
            StoreError: it cannot be reached.
        """
        self.storage = Storage(url)
        self._run = run
        self._rank = rank
        self._sources = sources
        self._parts: dict[str, PartSender] = {}
        self._manifests_sent: set[str] = set()
        self._began = time.monotonic()
        self.due = 0.0

    def send(self) -> None:
        """Upload what is new, several directories at once, and wait for it; sets when the next round is due.

        It may be called before that.

        Raises:
            StoreError: some of it was not sent, a file could not be read, or another run is in the storage.
        """
        now = time.monotonic()
        every = max(ROUND_SECONDS, ROUND_FRACTION * (now - self._began))
        self.due = now + every
        try:
            parts = [self._parts.get(place) or self._new_part(place) for place in self._directories()]
            with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
                for done in [pool.submit(part.send, every) for part in parts]:
                    done.result()
        except OSError as error:
            raise StoreError(f"cannot read {self._run}: {reason(error)}") from None

    def _new_part(self, place: str) -> PartSender:
        """Make the `PartSender` of a rank, with the run's id, and keep it for further rounds.

        Raises:
            StoreError: what is in the storage cannot be found out, or is another run's.
        """
        base = place.rpartition("/")[0]
        with Folder.at(str(self._run / base)) as folder:
            run_id = str(read_manifest(folder).get("id"))
        self._parts[place] = part = PartSender(self._run, place, self.storage, run_id, sources=self._sources)
        return part

    def _directories(self) -> list[str]:
        """The directories with a catalogue each: `rankN`, `attemptN/rankN`.

        Only those that have a log; with a `rank`, only that one's in the last attempt. Uploads the manifests of the run
        and its attempts, each once.
        """
        with Folder.at(str(self._run)) as folder:
            numbers = [int(match[1]) for match in map(ATTEMPT_NAME.fullmatch, folder.names()) if match]
        bases = ["", *(f"attempt{number}/" for number in sorted(numbers))]
        places = []
        for base in bases:
            with Folder.at(str(self._run / base)) as folder:
                if base not in self._manifests_sent and MANIFEST in folder:
                    self._send_manifest(folder, base)
                names = [match for match in map(RANK_NAME.fullmatch, folder.names()) if match]
            if self._rank is not None:
                names = [match for match in names if int(match[1]) == self._rank and base == bases[-1]]
            places += [f"{base}{match[0]}" for match in names]
        return [place for place in places if (self._run / place / LOG).exists()]

    def _send_manifest(self, folder: Folder, base: str) -> None:
        """Upload a run's manifest if there is none yet.

        Raises:
            StoreError: another run's is there, or it cannot be sent.
        """
        name = f"{base}{MANIFEST}"
        data = folder.read_file(MANIFEST, LIMIT_DOCUMENT)
        [there] = self.storage.read([(name, 0, LIMIT_DOCUMENT)])
        if isinstance(there, NothingThereError):
            self.storage.put(name, data)
        elif isinstance(there, StoreError):
            raise there
        elif _job_id(there, f"{self.storage.url}/{name}") != _job_id(data, name):
            raise StoreError(OTHER_RUN.format(self.storage.url))
        self._manifests_sent.add(base)


MAX_OBJECT = 16 << 20

OTHER_RUN = "{} holds another run: choose another URL, or remove what is there"

_TENSOR = ".safetensors"
_NEVER_REPLACED = (f"{TENSORS}/", f"{SOURCES}/")
"""Directories of files that are named by their content."""


class PartSender:
    """Uploads the directory of a rank, with a catalogue.

    Attributes:
        over: whether all is sent of a run that nobody writes any more.
    """

    def __init__(self, run: Path, place: str, storage: Storage, run_id: str, *, sources: bool) -> None:
        """Read the catalogue of this directory that is in the storage, if any, to go on from it; nothing is sent yet.

        Args:
            run: the run's directory.
            place: the directory in it.
            storage: where to.
            run_id: the run's.
            sources: whether the text of source files goes with it.

        Raises:
            StoreError: it cannot be found out, or another run is there.
        """
        self.over = False
        self._path = run / place
        self._storage, self._place = storage, place
        self._run_id = run_id
        self._sources = sources
        self._sent: dict[str, list[int]] = {}
        self._resume()

    def _resume(self) -> None:
        """Take over the objects of an earlier catalogue that exist, as far as each file has them without a gap.

        Nothing where there is no catalogue or it is damaged.

        Raises:
            StoreError: the catalogue is another run's.
        """
        with suppress(NothingThereError, DamageError):
            [before] = catalogues(self._storage, [self._place])
            there = self._storage.entries(self._place, deep=True)
            if before is None:
                return
            if before.run_id != self._run_id:
                raise StoreError(OTHER_RUN.format(self._storage.url))
            for name in before.objects:
                whole = takewhile(lambda each: there.get(each[0]) == each[2], before.objects_of(name))
                self._sent[name] = [length for _, _, length in whole]

    def send(self, every: float) -> None:
        """Upload what is new, then the catalogue; sets `over`.

        The catalogue is uploaded even if nothing is new, except where `over` was set before.

        Args:
            every: within how many seconds this will be called again; said in the catalogue.

        Raises:
            StoreError: some of it was not sent.
            OSError: a file could not be read.
        """
        over, inline, lengths = self._state()
        unsent = list(self._unsent(inline, lengths))
        if self.over and not unsent:
            return
        for name, begin, end in unsent:
            self._put(name, begin, end)
        sent = {name: lengths for name, lengths in self._sent.items() if lengths}
        catalogue = Catalogue(self._run_id, over, time.time(), every, inline, sent)
        self._storage.put(below(self._place, CATALOGUE), catalogue.encoded())
        self.over = over

    # --- what there is

    def _state(self) -> tuple[bool, dict[str, bytes], dict[str, int]]:
        """The directory's present state.

        Without `sources`, the text of source files is left out; of a log that has no run id yet there is nothing.

        Returns:
            whether nobody writes it any more; content that goes into the catalogue itself, by the name of its file:
            what may be replaced by another; bytes of each other file, by its name, of a log those of whole frames.
        """
        inline, lengths = dict[str, bytes](), dict[str, int]()
        with Folder.at(str(self._path)) as folder, folder.file(LOG) as file:
            over = not file.is_locked()  # asked first: what is then read is all there will be
            for name, path in files_of(self._path, sources=self._sources):
                if name.startswith(_NEVER_REPLACED):
                    lengths[name] = path.stat().st_size
                elif name not in (LOG, HEADS):
                    inline[name] = path.read_bytes()
            frames = Frames(file, int(self._path.name.removeprefix("rank")), file.path)
            if frames.run_id:
                inline[HEADS], lengths[LOG] = frames.encoded(), int(frames.begins[-1])
                inline[LOG] = file.read(0, START.size)
        return over, inline, lengths

    # --- what is to be sent

    def _unsent(self, inline: dict[str, bytes], lengths: dict[str, int]) -> Iterator[tuple[str, int, int]]:
        """(file, begin, end) of bytes in no object yet, `MAX_OBJECT` at most: sources, then logs, then tensors.

        Files of one sort by the order of `lengths`; the head of a log, which is inline, is not among them.
        """
        for name in sorted(lengths, key=lambda name: name.endswith(LOG) + 2 * name.endswith(_TENSOR)):
            begin = len(inline.get(name, b"")) + sum(self._sent.get(name, ()))
            for at in range(begin, lengths[name], MAX_OBJECT):
                yield name, at, min(at + MAX_OBJECT, lengths[name])

    def _put(self, name: str, begin: int, end: int) -> None:
        """Upload bytes of a file as an object.

        Raises:
            OSError: the file became shorter.
        """
        folders, _, last = name.rpartition("/")
        with Folder.at(str(self._path / folders)) as place, place.file(last) as file:
            data = file.read(begin, end)
        if len(data) != end - begin:
            raise OSError(f"{self._path / name} became shorter")
        self._storage.put(below(self._place, f"{name}.{begin:012d}"), data)
        self._sent.setdefault(name, []).append(len(data))
