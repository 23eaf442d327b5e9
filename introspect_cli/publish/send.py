"""Send a run to object storage while it is written, in rounds.

Ranks of a launch send their own, each from the process beside it. Storage that is slow or fails delays what sends, and
nobody else.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from introspect_cli.errors import StoreError
from introspect_cli.publish.part import OTHER_RUN, PartSender
from introspect_cli.store import documents
from introspect_cli.store.files import ATTEMPT_NAME, LIMIT_DOCUMENT, LOG, MANIFEST, RANK_NAME, Folder, reason
from introspect_cli.store.remote import NothingThereError, Storage
from introspect_cli.store.run import launch_of, read_manifest

if TYPE_CHECKING:
    from pathlib import Path

ROUND_SECONDS = 10.0
"""Seconds between two rounds."""

ROUND_FRACTION = 0.02
"""Of the time so far, where that is more: a run of a week has some hundred rounds, not sixty thousand."""

MAX_CONCURRENT = 8


def _job_id(manifest: bytes, path: str) -> object:
    """The job id of the launch in a manifest (its bytes); None where it names none. `path` is for errors."""
    said = documents.load(manifest, path)
    return (launch_of(said) or {}).get("job") if isinstance(said, dict) else None


class Sender:
    """Uploads a run, or one rank of it, in rounds."""

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
        self._next = 0.0

    @property
    def waiting(self) -> int:
        """Bytes that the last round saw and did not send, over all directories."""
        return sum(part.waiting for part in self._parts.values())

    def is_due(self) -> bool:
        """Whether the interval since the last round is over."""
        return time.monotonic() >= self._next

    def send(self) -> None:
        """Upload what is new, several directories at once, and wait for it; sets when the next round is due.

        It may be called before that.

        Raises:
            StoreError: some of it was not sent, a file could not be read, or another run is in the storage.
        """
        now = time.monotonic()
        every = max(ROUND_SECONDS, ROUND_FRACTION * (now - self._began))
        self._next = now + every
        try:
            parts = [self._parts.get(place) or self._new_part(place) for place in self._directories()]
            with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
                for done in [pool.submit(part.send, every) for part in parts]:
                    done.result()
        except OSError as error:
            raise StoreError(f"cannot read {self._run}: {reason(error)}") from None

    def _new_part(self, place: str) -> PartSender:
        """Make the `PartSender` of a directory, with the run's or the launch's id, and keep it for further rounds.

        Raises:
            StoreError: what is in the storage cannot be found out, or is another run's.
        """
        base = place.rpartition("/")[0]
        with Folder.at(str(self._run / base)) as folder:
            run_id = str(read_manifest(folder).get("id"))
        self._parts[place] = part = PartSender(self._run, place, self.storage, run_id, sources=self._sources)
        return part

    def _directories(self) -> list[str]:
        """The directories with a catalogue each: "" for a run of one process, else `rankN`, `attemptN/rankN`.

        Only those that have a log; with a `rank`, only that one's in the last attempt. Uploads the manifests of a
        launch and its attempts, each once.
        """
        with Folder.at(str(self._run)) as folder:
            if launch_of(read_manifest(folder)) is None:
                return [""]
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
        """Upload a launch's manifest if there is none yet.

        Raises:
            StoreError: another launch's is there, or it cannot be sent.
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
