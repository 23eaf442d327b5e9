"""The step index of one rank, checked as a whole before anything it says is believed.

The problem: the index is read while it is written, may end in the middle of an entry, may be damaged or forged, and
ten thousand steps must open in a moment. The way: one read, one CRC over all of it, and vectorised checks that
every number follows from the one before; only when the CRC fails is it gone through entry by entry, to tell an
end that was torn off from damage.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from introspect_cli.errors import StoreError
from introspect_cli.store.arrow import schema_message
from introspect_cli.store.digest import chained
from introspect_cli.store.files import DamageError
from introspect_cli.store.format import (
    END_ENTRY,
    ENTRY,
    FIRST_CHAIN,
    HEADER,
    LAYOUT_COLUMNS,
    LIMIT_BATCH,
    LIMIT_NAMES,
    MAGIC,
    MODULE_COLUMNS,
    SITE_COLUMNS,
    STEP_ENTRY,
    record_columns,
    row_bytes,
)
from introspect_cli.store.names import FORMAT
from introspect_cli.version import __version__

Entries = NDArray[np.void]

_KNOWN_BITS = 15
_NAMES = (("sites", SITE_COLUMNS), ("layouts", LAYOUT_COLUMNS), ("modules", MODULE_COLUMNS))


@dataclass(frozen=True)
class StepEntry:
    """Where one step is, and what it digests to.

    Attributes:
        step: number of the step.
        offset: of its batch in `records.arrow`, bytes.
        length: of its batch, bytes.
        rows: records in it.
        digest: 16 bytes, equal for steps with equal values at equal sites.
        chain: 16 bytes over all steps up to this one.
    """

    step: int
    offset: int
    length: int
    rows: int
    digest: bytes
    chain: bytes


@dataclass(frozen=True, eq=False)
class Index:
    """The entries of one rank.

    Attributes:
        entries: array of `format.ENTRY`, one a step, steps rising.
        bits: which optional columns the records have.
        run_id: 16 bytes.
        ended: whether the writer closed the store itself.
        last: the entry that vouches for the streams of names: the end mark, or the last step; None without any.
    """

    entries: Entries
    bits: int
    run_id: bytes
    ended: bool
    last: np.void | None


EMPTY = Index(np.zeros(0, ENTRY), 0, b"", ended=False, last=None)
"""The index of a rank that was killed before it could write a header."""


def parse_index(data: bytes, rank: int, path: str) -> Index:
    """The index in `data`, up to the last whole entry.

    Raises:
        StoreError: it is damaged before its end, or of a newer format.
    """
    if len(data) < HEADER.size:
        return EMPTY
    bits, run_id = _header(data, rank, path)
    count = (len(data) - HEADER.size) // ENTRY.itemsize
    entries = np.frombuffer(data, ENTRY, count, HEADER.size)
    if count:
        entries = entries[: _sound(data, entries, path)]
    ended = len(entries) > 0 and bool(entries["kind"][-1] == END_ENTRY)
    last = entries[-1] if len(entries) else None
    if ended and HEADER.size + len(entries) * ENTRY.itemsize != len(data):
        raise DamageError(path, "something follows its end mark")
    _check(entries, bits, path, ended=ended)
    return Index(entries[:-1] if ended else entries, bits, run_id, ended, last)


def newer_format(found: int, version: str | None, path: str) -> StoreError:
    """The error for a store of a format that this version cannot read."""
    by = f"introspect {version}" if version else "a newer introspect"
    remedy = f"install introspect-cli>={version}" if version else "install the newest introspect-cli"
    return StoreError(
        f"{path} was written by {by}, format {found}; "
        f"this is {__version__}, which reads up to format {FORMAT}: {remedy}"
    )


def _header(data: bytes, rank: int, path: str) -> tuple[int, bytes]:
    magic, found, entry_size, own_rank, bits, run_id, crc = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamageError(path, "it is not an index")
    if zlib.crc32(data[: HEADER.size - 4]) != crc:
        raise DamageError(path, "its header was altered")
    if found > FORMAT:
        raise newer_format(found, None, path)
    if entry_size != ENTRY.itemsize or bits & ~_KNOWN_BITS or not found > 0:
        raise DamageError(path, "its header holds values that no version writes")
    if own_rank != rank:
        raise DamageError(path, f"it is the index of rank {own_rank}")
    return bits, run_id


def _sound(data: bytes, entries: Entries, path: str) -> int:
    """How many entries can be believed: all, or all but the last where that was torn."""
    end = HEADER.size + len(entries) * ENTRY.itemsize - 4
    if zlib.crc32(data[:end]) == entries["crc"][-1]:
        return len(entries)
    crc = zlib.crc32(data[: HEADER.size])
    for number, stored in enumerate(entries["crc"].tolist()):
        start = HEADER.size + number * ENTRY.itemsize
        crc = zlib.crc32(data[start : start + ENTRY.itemsize - 4], crc)
        if crc != stored:
            if number == len(entries) - 1:
                return number
            raise DamageError(path, f"its entry {number} was altered; the {number} before it are sound")
        crc = zlib.crc32(data[start + ENTRY.itemsize - 4 : start + ENTRY.itemsize], crc)
    return len(entries)


def _check(entries: Entries, bits: int, path: str, *, ended: bool) -> None:
    """Every number must follow from the ones before."""
    if not len(entries):
        return
    steps = entries[:-1] if ended else entries
    if (steps["kind"] != STEP_ENTRY).any():
        raise DamageError(path, "an end mark is in its middle")
    if len(steps) and (steps["step"][0] < 0 or (np.diff(steps["step"]) <= 0).any()):
        raise DamageError(path, "its steps do not rise")
    if (entries["length"] > LIMIT_BATCH).any() or (entries["length"] % 8).any():
        raise DamageError(path, "a step's length is not one")
    if (steps["rows"].astype(np.uint64) * np.uint64(row_bytes(bits)) > steps["length"]).any():
        raise DamageError(path, "a step claims more records than its bytes hold")
    ends = np.cumsum(entries["length"], dtype=np.uint64) + np.uint64(len(schema_message(record_columns(bits))))
    if entries["offset"][0] + entries["length"][0] != ends[0] or (entries["offset"][1:] != ends[:-1]).any():
        raise DamageError(path, "its steps do not follow one another in the records")
    for name, schema in _NAMES:
        lengths, counts = entries[f"{name}_length"], entries[f"n_{name}"]
        if (
            lengths[0] < len(schema_message(schema))
            or lengths[-1] > LIMIT_NAMES
            or (lengths[1:] < lengths[:-1]).any()
            or (counts[1:] < counts[:-1]).any()
        ):
            raise DamageError(path, f"what it says of {name} cannot be")
    _check_chain(entries, len(steps), path)


def _check_chain(entries: Entries, steps: int, path: str) -> None:
    chain = FIRST_CHAIN
    numbers = entries["step"].tolist()
    digests, chains = entries["digest"].tobytes(), entries["chain"].tobytes()
    for row in range(steps):
        chain = chained(chain, numbers[row], digests[16 * row : 16 * row + 16])
        if chain != chains[16 * row : 16 * row + 16]:
            raise DamageError(path, f"the chain of digests breaks at step {numbers[row]}")
    if steps < len(entries) and chains[16 * steps :] != chain:
        raise DamageError(path, "its end mark has another chain of digests")
