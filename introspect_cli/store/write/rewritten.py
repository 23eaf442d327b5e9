"""Steps that are dropped from a rank: the rest of it is written anew beside what is there.

A store only grows, so that a kill loses nothing; a long run must not fill the disk. So steps are dropped by writing the
rest anew beside what is there: records under a new name, then an index that names them, which replaces the old index by
one rename. Before that rename the old files are the store, after it the new ones, and whatever is left over of the
other does not exist. An exception may be raised between any two lines, too, and the run goes on: so who writes the rank
asks the directory which files are the store (`exchanged`), and removes the others (`clear`). The index says how many
steps were dropped, from where to where and why: nobody may take them for steps that were never recorded.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.store.files.folders import INDEX, Appended, Folder
from introspect_cli.store.format.arrow import schema_message
from introspect_cli.store.format.index import added, chained, parse_index, records_name
from introspect_cli.store.format.schemas import FIRST_CHAIN, LIMIT_INDEX, index_header

if TYPE_CHECKING:
    from collections.abc import Collection

    from introspect_cli.store.files.folders import Folder
    from introspect_cli.store.files.handles import Handle
    from introspect_cli.store.format.index import Entries

_PIECE = 1 << 20


@dataclass(frozen=True)
class Rewritten:
    """A rank's index and records as they were written anew.

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


def write_without(folder: Folder, rank: int, dropped: Collection[int], why: str, *, durable: bool) -> Rewritten | None:
    """Write a rank's records and index anew without some steps, beside what is there; `exchange` makes them the store.

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
    thinned = added(index.thinned, why, index.entries["step"][gone].tolist())
    generation = index.generation + 1
    clear(folder, generation)
    records = Appended(folder, records_name(generation))
    with folder.file(records_name(index.generation)) as old:
        _copy(old, records, entries, schema_message(index.columns.records))
    about = index.columns.described(generation=generation, thinned=[list(astuple(each)) for each in thinned])
    header = index_header(rank, index.run_id, about)
    body, crc, chain = _indexed(entries, len(schema_message(index.columns.records)), zlib.crc32(header))
    fresh = Appended(folder, _beside(), locked=True)
    fresh.append(header + body)
    if durable:
        os.fsync(records.fd)
        os.fsync(fresh.fd)
    rows = int(entries["rows"].sum(dtype=np.int64))
    return Rewritten(fresh, records, generation, len(header), crc, zlib.crc32(header), chain, rows)


def exchange(folder: Folder, made: Rewritten, *, durable: bool) -> None:
    """Have the new index replace the old one."""
    os.rename(_beside(), INDEX, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    made.index.path = f"{folder.path}/{INDEX}"
    if durable:
        os.fsync(folder.fd)


def exchanged(folder: Folder, made: Rewritten) -> bool:
    """Whether the new index is the store's."""
    if not made.index.is_at(folder, INDEX):
        return False
    made.index.path = f"{folder.path}/{INDEX}"  # what exchanged them may have stopped before
    return True


def clear(folder: Folder, generation: int) -> None:
    """Remove files that are not the store's, where that can be done: a new index, and records of a generation."""
    for name in (_beside(), records_name(generation)):
        with suppress(OSError):
            os.unlink(name, dir_fd=folder.fd)


def _beside() -> str:
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
