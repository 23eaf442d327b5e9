"""The files of one rank while they are written, and how much of them counts.

A process may be interrupted between any two lines, and the script may catch the interrupt and train on. So what counts
as written is one value, exchanged by one assignment once the index entry is out; whatever writes next first takes back
what was written beyond it.

A store only grows, so that a kill loses nothing; a long run must not fill the disk. So steps are dropped by writing the
rest beside what is there: records under a new name, then an index that names them, which replaces the old index by one
rename. Before that rename the old files are the store, after it the new ones, and whatever is left over of the other
does not exist. The index says how many steps were dropped, from where to where and why: nobody may take them for steps
that were never recorded.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.store.files.folders import INDEX, RECORDS, STREAMS, Appended, Folder, reason
from introspect_cli.store.format.arrow_schema import schema_message
from introspect_cli.store.format.documents import LABELS
from introspect_cli.store.format.index import add_thinned, chained, parse_index, records_name
from introspect_cli.store.format.schemas import FIRST_CHAIN, LIMIT_INDEX, index_header
from introspect_cli.store.format.totals import TOTALS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from introspect_cli.store.files.handles import Handle
    from introspect_cli.store.format.arrow import Pieces
    from introspect_cli.store.format.index import Entries
    from introspect_cli.store.write.names import Stream


_OPTIONAL = (LABELS, TOTALS)
"""Files that a step makes which needs them."""

_PIECE = 1 << 20


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


@dataclass(frozen=True)
class _Rewritten:
    """A rank's index and records without some steps, beside what is there.

    Attributes:
        index: the new index, under a name that no reader looks for.
        records: the new records.
        generation: how often that has happened.
        header: bytes of the index before its first entry.
        crc: CRC-32 of the whole index.
        header_crc: CRC-32 of the header.
        chain: after the last step.
        rows: records in it.
    """

    index: Appended
    records: Appended
    generation: int
    header: int
    crc: int
    header_crc: int
    chain: bytes
    rows: int


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
        self._rewritten: _Rewritten | None = None
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
            lengths = {**before.lengths, INDEX: first[INDEX], RECORDS: first[RECORDS], **dict.fromkeys(_OPTIONAL, 0)}
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
            self._rewritten = _write_without(folder, rank, steps, why, durable=self._durable)
            if self._rewritten is not None:
                os.rename(_new_index(), INDEX, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
                if self._durable:
                    os.fsync(folder.fd)
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
        for name in _OPTIONAL:
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
        if made is not None and made.index.is_at(folder, INDEX):
            made.index.path = f"{folder.path}/{INDEX}"
            for name, file in ((INDEX, made.index), (RECORDS, made.records)):
                before, self._files[name] = self._files[name], file
                if before is not file:
                    before.close()
            lengths = {**self.written.lengths, INDEX: made.index.length, RECORDS: made.records.length}
            self.written = self.written._replace(chain=made.chain, rows=made.rows, crc=made.crc, lengths=lengths)
            first = {INDEX: made.header, RECORDS: self._first.lengths[RECORDS]}
            self._first = self._first._replace(crc=made.header_crc, lengths=first)
            self._generation = made.generation
            _clear(folder, made.generation - 1)
        else:
            _clear(folder, self._generation + 1)
        self._rewritten = None
        self._dropping = False

    def _lengths(self) -> dict[str, int]:
        return {name: file.length for name, file in self._files.items()}

    def _sync(self, *names: str) -> None:
        if self._durable:
            for name in names:
                os.fsync(self._files[name].fd)


# --- steps that are dropped


def _write_without(
    folder: Folder, rank: int, dropped: Collection[int], why: str, *, durable: bool
) -> _Rewritten | None:
    """Write a rank's records and index without some steps, beside what is there.

    Returns:
        What was written; None where no such step is there.

    Raises:
        OSError: it cannot be written; then the old files are as they were.
        StoreError: the old index is damaged.
    """
    index = parse_index(folder.read_file(INDEX, LIMIT_INDEX), rank, f"{folder.path}/{INDEX}")
    gone = np.isin(index.entries["step"], list(dropped))
    if not gone.any():
        return None
    entries = index.entries[~gone].copy()
    thinned = add_thinned(index.thinned, why, index.entries["step"][gone].tolist())
    generation = index.generation + 1
    _clear(folder, generation)
    records = Appended(folder, records_name(generation))
    with folder.file(records_name(index.generation)) as old:
        _copy(old, records, entries, schema_message(index.columns.records))
    about = index.columns.described(generation=generation, thinned=[list(astuple(each)) for each in thinned])
    header = index_header(rank, index.run_id, about)
    body, crc, chain = _indexed(entries, len(schema_message(index.columns.records)), zlib.crc32(header))
    fresh = Appended(folder, _new_index(), locked=True)
    fresh.append(header + body)
    if durable:
        os.fsync(records.fd)
        os.fsync(fresh.fd)
    rows = int(entries["rows"].sum(dtype=np.int64))
    return _Rewritten(fresh, records, generation, len(header), crc, zlib.crc32(header), chain, rows)


def _clear(folder: Folder, generation: int) -> None:
    """Remove files that are not the store's, where that can be done: a new index, and records of a generation."""
    for name in (_new_index(), records_name(generation)):
        with suppress(OSError):
            os.unlink(name, dir_fd=folder.fd)


def _new_index() -> str:
    return f".{INDEX}.{os.getpid()}"


def _copy(old: Handle, new: Appended, entries: Entries, first: bytes) -> None:
    """Copy the batches of some steps, neighbours together."""
    new.append(first)
    ranges: list[list[int]] = []
    for offset, length in zip(entries["offset"].tolist(), entries["length"].tolist(), strict=True):
        if ranges and ranges[-1][1] == offset:
            ranges[-1][1] = offset + length
        else:
            ranges.append([offset, offset + length])
    for begin, end in ranges:
        at = begin
        for data in old.blocks(begin, end, _PIECE):
            new.append(data)
            at += len(data)
        if at < end:
            raise OSError(f"{old.path} ends before its last step")


def _indexed(entries: Entries, offset: int, crc: int) -> tuple[bytes, int, bytes]:
    """The entries of steps that follow one another from an offset on, the CRC of all of it, and the last chain."""
    chain, pieces = FIRST_CHAIN, []
    for row in range(len(entries)):
        entry = entries[row : row + 1]
        chain = chained(chain, int(entry["step"][0]), entry["digest"].tobytes())
        entry["offset"], entry["chain"] = offset, np.void(chain)
        offset += int(entry["length"][0])
        crc = zlib.crc32(entry.tobytes()[:-4], crc)
        entry["crc"] = crc
        data = entry.tobytes()
        crc = zlib.crc32(data[-4:], crc)
        pieces.append(data)
    return b"".join(pieces), crc, chain
