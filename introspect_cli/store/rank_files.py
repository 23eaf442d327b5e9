"""The files of one rank while they are written, and how much of them counts.

A process may be interrupted between any two lines, and the script may catch the interrupt and train on. So what counts
as written is one value, exchanged by one assignment once the index entry is out; whatever writes next first takes back
what was written beyond it.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.errors import StoreError
from introspect_cli.store.files import INDEX, RECORDS, STREAMS, Appended, Folder, reason
from introspect_cli.store.format import FIRST_CHAIN
from introspect_cli.store.labels import LABELS
from introspect_cli.store.rewritten import Rewritten, clear, exchange, exchanged, write_without
from introspect_cli.store.totals import TOTALS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from introspect_cli.store.arrow import Pieces
    from introspect_cli.store.files import Folder
    from introspect_cli.store.names import Stream


_BESIDE = (LABELS, TOTALS)
"""Files that a step makes which needs them."""


class Written(NamedTuple):
    """What counts as written: all that the next index entry follows from.

    Attributes:
        step: the last step, -1 where there is none.
        chain: after that step.
        rows: records in all steps.
        crc: CRC-32 of the index.
        names: by file name, the streams of names.
        lengths: by file name, bytes.
    """

    step: int
    chain: bytes
    rows: int
    crc: int
    names: Mapping[str, Stream]
    lengths: Mapping[str, int]


class RankFiles:
    """A rank's streams and index, open for appending.

    Attributes:
        folder: the rank's directory.
        written: what counts as written.
    """

    def __init__(self, folder: Folder, header: bytes, schemas: Mapping[str, bytes], *, durable: bool) -> None:
        """Make the files.

        Args:
            folder: the rank's directory.
            header: what the index begins with.
            schemas: by file name, what the streams begin with.
            durable: whether to force each step to disk before the next begins.

        Raises:
            OSError: they cannot be made; `close` is still to be called.
        """
        self.folder = folder
        self.written = self._first = Written(-1, FIRST_CHAIN, 0, zlib.crc32(header), {}, {})
        self._durable = durable
        self._pid = os.getpid()
        self._files: dict[str, Appended] = {}
        self._torn = False  # whether the files may hold what does not count as written
        self._dropping = False  # whether other files may be the store, or left over of that
        self._rewritten: Rewritten | None = None
        self._generation = 0  # how often steps were dropped
        try:
            for name in (*STREAMS, INDEX):
                self._files[name] = Appended(folder, name, locked=name == INDEX)
            for name, data in {**schemas, INDEX: header}.items():
                self._files[name].append(data)
        except BaseException:
            self.close()
            raise

    def begin(self, names: Mapping[str, Stream]) -> None:
        """Count what was written so far: streams before their first row."""
        self._first = self.written = self.written._replace(names=names, lengths=self._lengths())

    @property
    def are_open(self) -> bool:
        """Whether there is anything to close."""
        return bool(self._files)

    def commit(self, pieces: Mapping[str, Pieces], entry: bytes, written: Written) -> None:
        """Write pieces, then the index entry that vouches for them; from then on they count.

        Args:
            pieces: what is appended, by file name.
            entry: the index entry.
            written: what then counts; its lengths are those of the files.
        """
        self._torn = True
        for name, data in pieces.items():
            if name not in self._files:
                self._files[name] = Appended(self.folder, name)
            self._files[name].append(*data)
        self._sync(*pieces)
        self._files[INDEX].append(entry)
        self._sync(INDEX)
        self.written = written._replace(lengths=self._lengths())
        self._torn = False

    def guard(self) -> None:
        """Make sure that this process may write the files, and that they hold what counts as written.

        Each is looked at once more when it is written to: whether its descriptor is still its own, and it still there.
        """
        if os.getpid() != self._pid:
            raise StoreError("a forked child does not write its parent's store")
        self._take_back()

    def restart(self) -> None:
        """Take back all steps; names stay. A reader sees the store as it was before its first step."""
        before = self.written
        try:
            self.guard()
            before, first = self.written, self._first.lengths
            lengths = {**before.lengths, INDEX: first[INDEX], RECORDS: first[RECORDS], **dict.fromkeys(_BESIDE, 0)}
            self._torn = True
            self.written = self._first._replace(names=before.names, lengths=lengths)
            self._take_back()
        except (OSError, StoreError):
            self.written = before
            raise

    def drop(self, rank: int, steps: Collection[int], why: str) -> None:
        """Drop steps that were written, and say so in the index; see above.

        Raises:
            StoreError: the rest could not be written anew; then all steps are still there.
        """
        try:
            self.guard()
            self._files[INDEX].secure()
            self._torn = self._dropping = True
            folder = self.folder.secure()
            self._rewritten = write_without(folder, rank, steps, why, durable=self._durable)
            if self._rewritten is not None:
                exchange(folder, self._rewritten, durable=self._durable)
            self._take_back()
        except (OSError, StoreError) as error:
            with suppress(OSError, StoreError):  # else before the next step
                self._take_back()
            raise StoreError(f"cannot drop steps from {self.folder.path}: {reason(error)}") from None

    def cut(self) -> None:
        """Leave the files ending where the last write that succeeded ended."""
        if os.getpid() == self._pid:
            for file in self._files.values():
                with suppress(OSError):  # what follows the last index entry is not read anyway
                    file.cut()

    def close(self) -> None:
        """Close the descriptors and write nothing: all that a forked child does."""
        files, self._files = self._files, {}
        for file in files.values():
            file.close()
        self.folder.close()

    def _take_back(self) -> None:
        """Shorten the files to what counts as written, where something stopped in between."""
        if not self._torn:
            return
        if self._dropping:
            self._settle()
        lengths = self.written.lengths
        for name in _BESIDE:
            if name not in self._files:  # it may have been made, and not been noted
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self.folder.secure().fd)
        # The index first: what no entry vouches for does not exist.
        for name in (INDEX, *(name for name in self._files if name != INDEX)):
            self._files[name].shorten(lengths.get(name, 0))
        self._torn = False

    def _settle(self) -> None:
        """Go on with the files that are the store, where steps were being dropped, and remove the others."""
        made, folder = self._rewritten, self.folder.secure()
        if made is not None and exchanged(folder, made):
            for name, file in ((INDEX, made.index), (RECORDS, made.records)):
                before, self._files[name] = self._files[name], file
                if before is not file:
                    before.close()
            lengths = {**self.written.lengths, INDEX: made.index.length, RECORDS: made.records.length}
            self.written = self.written._replace(chain=made.chain, rows=made.rows, crc=made.crc, lengths=lengths)
            first = {INDEX: made.header, RECORDS: self._first.lengths[RECORDS]}
            self._first = self._first._replace(crc=made.header_crc, lengths=first)
            self._generation = made.generation
            clear(folder, made.generation - 1)
        else:
            clear(folder, self._generation + 1)
        self._rewritten = None
        self._dropping = False

    def _lengths(self) -> dict[str, int]:
        return {name: file.length for name, file in self._files.items()}

    def _sync(self, *names: str) -> None:
        if self._durable:
            for name in names:
                os.fsync(self._files[name].fd)
