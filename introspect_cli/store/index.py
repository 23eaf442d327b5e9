"""The step index of one rank, and the digests of steps that it holds.

The index is read while it is written, may end in the middle of an entry, may be damaged or forged, and ten thousand
steps must open in a moment. So it is read at once, one CRC covers all of it, and vectorised checks make sure that every
number follows from the one before; only when the CRC fails is it gone through entry by entry, to tell an end that was
torn off from damage.

Most steps of two runs that should be equal are equal, and must be passed over without being read; but records arrive
in another order each time, because backward threads race. So a step's digest is two 64-bit sums over mixed records:
order does not matter, a repeated record counts twice. A chain over all steps so far makes the first step that differs
a binary search. Statistics, sketches, texts, devices and strides are left out: they explain a divergence and never are
one. So are the kinds in `SETTING_KINDS`. The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", 2014).
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from introspect_cli.errors import StoreError
from introspect_cli.store import format1, thinned
from introspect_cli.store.arrow import Malformed, schema_message
from introspect_cli.store.files import FORMAT, DamageError
from introspect_cli.store.format import (
    END_ENTRY,
    ENTRY,
    FIRST_CHAIN,
    HEADER,
    LIMIT_BATCH,
    LIMIT_COLUMNS,
    LIMIT_NAMES,
    MAGIC,
    STEP_ENTRY,
    Columns,
    parse_columns,
    row_bytes,
)
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.store.thinned import Thinned

Entries = NDArray[np.void]


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
        format: of the store.
        columns: of the rank's streams.
        run_id: 16 bytes.
        ended: whether the writer closed the store itself.
        last: the entry that vouches for the streams of names: the end mark, or the last step; None without any.
        generation: which file of records is its own, by number.
        thinned: steps that were recorded and dropped.
    """

    entries: Entries
    format: int
    columns: Columns
    run_id: bytes
    ended: bool
    last: np.void | None
    generation: int = 0
    thinned: tuple[Thinned, ...] = ()


EMPTY = Index(np.zeros(0, ENTRY), FORMAT, format1.columns_of(0), b"", ended=False, last=None)
"""The index of a rank that was killed before it could write a header."""


def parse_index(data: bytes, rank: int, path: str) -> Index:
    """The index in `data`, up to the last whole entry.

    Raises:
        StoreError: it is damaged before its end, or of a newer format.
    """
    if len(data) < HEADER.size:
        return EMPTY
    found, length, run_id = _header(data, rank, path)
    if found == 1:
        start, columns, about = HEADER.size, format1.columns_of(length), b""
    else:
        start = HEADER.size + length
        if len(data) < start:
            return EMPTY
        about = data[HEADER.size : start]
        columns = _columns(about, HEADER.unpack_from(data)[6], path)
    count = (len(data) - start) // ENTRY.itemsize
    entries = np.frombuffer(data, ENTRY, count, start)
    if count:
        entries = entries[: _sound(data, start, entries, path)]
    ended = len(entries) > 0 and bool(entries["kind"][-1] == END_ENTRY)
    last = entries[-1] if len(entries) else None
    if ended and start + len(entries) * ENTRY.itemsize != len(data):
        raise DamageError(path, "something follows its end mark")
    _check(entries, columns, path, ended=ended)
    try:
        generation, dropped = thinned.parse(about)
    except Malformed as error:
        raise DamageError(path, str(error)) from None
    return Index(entries[:-1] if ended else entries, found, columns, run_id, ended, last, generation, dropped)


def newer_format(found: int, version: str | None, path: str) -> StoreError:
    """The error for a store of a format that this version cannot read."""
    by = f"introspect {version}" if version else "a newer introspect"
    remedy = f"install introspect-cli>={version}" if version else "install the newest introspect-cli"
    return StoreError(
        f"{path} was written by {by}, format {found}; "
        f"this is {__version__}, which reads up to format {FORMAT}: {remedy}"
    )


def _header(data: bytes, rank: int, path: str) -> tuple[int, int, bytes]:
    """Format, the field that depends on it, and id of the run."""
    magic, found, entry_size, own_rank, extra, run_id, _, crc = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamageError(path, "it is not an index")
    if zlib.crc32(data[: HEADER.size - 4]) != crc:
        raise DamageError(path, "its header was altered")
    if found > FORMAT:
        raise newer_format(found, None, path)
    limit = format1.KNOWN_BITS if found == 1 else LIMIT_COLUMNS
    if entry_size != ENTRY.itemsize or extra > limit or not found > 0:
        raise DamageError(path, "its header holds values that no version writes")
    if own_rank != rank:
        raise DamageError(path, f"it is the index of rank {own_rank}")
    return found, extra, run_id


def _columns(description: bytes, crc: int, path: str) -> Columns:
    if zlib.crc32(description) != crc:
        raise DamageError(path, "what it says of columns was altered")
    try:
        return parse_columns(description)
    except Malformed as error:
        raise DamageError(path, str(error)) from None


def _sound(data: bytes, start: int, entries: Entries, path: str) -> int:
    """How many entries can be believed: all, or all but the last where that was torn."""
    end = start + len(entries) * ENTRY.itemsize - 4
    if zlib.crc32(data[:end]) == entries["crc"][-1]:
        return len(entries)
    crc = zlib.crc32(data[:start])
    for number, stored in enumerate(entries["crc"].tolist()):
        begin = start + number * ENTRY.itemsize
        entry = data[begin : begin + ENTRY.itemsize]
        crc = zlib.crc32(entry[:-4], crc)
        if crc != stored:
            if number == len(entries) - 1:
                return number
            raise DamageError(path, f"its entry {number} was altered; the {number} before it are sound")
        crc = zlib.crc32(entry[-4:], crc)
    return len(entries)


def _check(entries: Entries, columns: Columns, path: str, *, ended: bool) -> None:
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
    if (steps["rows"].astype(np.uint64) * np.uint64(row_bytes(columns.records)) > steps["length"]).any():
        raise DamageError(path, "a step claims more records than its bytes hold")
    ends = np.cumsum(entries["length"], dtype=np.uint64) + np.uint64(len(schema_message(columns.records)))
    if entries["offset"][0] + entries["length"][0] != ends[0] or (entries["offset"][1:] != ends[:-1]).any():
        raise DamageError(path, "its steps do not follow one another in the records")
    for name in ("sites", "layouts", "modules"):
        schema = getattr(columns, name)
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


# --- digests

_STATUS = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xD1B54A32D192ED03)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)

Words = NDArray[np.uint64]


def _mix(z: Words) -> Words:
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return np.asarray(z ^ (z >> _S31))


def step_digest(keys: Words, checksums: Words, statuses: NDArray[Any], setting: NDArray[np.bool_]) -> bytes:
    """The 16-byte digest of a step.

    Args:
        keys: uint64 (n,), the key of each record's site.
        checksums: uint64 (n,).
        statuses: uint8 (n,).
        setting: bool (n,), True for records that digests leave out.
    """
    mixed = _mix(keys ^ _mix(checksums + (statuses.astype(np.uint64) + np.uint64(1)) * _STATUS))
    again = _mix(mixed + _SECOND)
    if setting.any():
        mixed, again = mixed[~setting], again[~setting]
    low = int(mixed.sum(dtype=np.uint64))
    high = int(again.sum(dtype=np.uint64))
    return struct.pack("<QQ", low, high)


def _of_records(
    keys: Words, left_out: NDArray[np.bool_], sites: NDArray[Any], checksums: Words, statuses: NDArray[Any]
) -> bytes:
    return step_digest(keys[sites], checksums, statuses, left_out[sites])


@dataclass(frozen=True)
class Sums:
    """What computes a step's sums while it is written: this module, or something quicker that gives the same.

    Attributes:
        crc32: of bytes, as zlib has it.
        digest: `step_digest` of records: the key of each site, which sites it leaves out; and of each record its site,
            checksum and status.
    """

    crc32: Callable[[bytes], int] = zlib.crc32
    digest: Callable[[Words, NDArray[np.bool_], NDArray[Any], Words, NDArray[Any]], bytes] = _of_records


def chained(chain: bytes, step: int, digest: bytes) -> bytes:
    """The 16-byte chain after a step: BLAKE2b of the chain before, the step number and its digest."""
    return hashlib.blake2b(chain + struct.pack("<q", step) + digest, digest_size=16).digest()
