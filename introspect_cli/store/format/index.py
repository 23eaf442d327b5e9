"""The step index of one rank: where steps are, their digests, and which steps were dropped.

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
import json
import struct
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from introspect_cli.errors import StoreError
from introspect_cli.store.files.folders import FORMAT, RECORDS, DamageError
from introspect_cli.store.format.arrow_schema import Malformed, schema_message
from introspect_cli.store.format.schemas import (
    END_ENTRY,
    ENTRY,
    FIRST_CHAIN,
    HEADER,
    LIMIT_BATCH,
    LIMIT_COLUMNS,
    LIMIT_NAMES,
    MAGIC,
    RECORD_COLUMNS,
    STEP_ENTRY,
    TEXT,
    Columns,
    parse_columns,
    row_bytes,
)
from introspect_cli.sums import mix
from introspect_cli.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable


Entries = NDArray[np.void]

OPTIONS = {"last": "--steps", "max_size": "--max-size", "rule": "--steps"}
"""What drops steps, and the option that asks for it."""

_MOST_STEPS = 1 << 62


@dataclass(frozen=True)
class Thinned:
    """Steps that were recorded and are no longer there.

    Attributes:
        why: what dropped them, a key of `OPTIONS`.
        count: how many.
        first: the first of them.
        last: the last of them.
        times: in how many goes.
    """

    why: str
    count: int
    first: int
    last: int
    times: int

    def __str__(self) -> str:
        steps = (
            f"step {self.first}" if self.count == 1 else f"{self.count:,} steps between {self.first} and {self.last}"
        )
        return f"{steps} (recorded, then dropped by {OPTIONS[self.why]})"


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
        columns: of the rank's streams.
        run_id: 16 bytes.
        ended: whether the writer closed the store itself.
        last: the entry that vouches for the streams of names: the end mark, or the last step; None without any.
        generation: which file of records is its own, by number.
        thinned: steps that were recorded and dropped.
    """

    entries: Entries
    columns: Columns
    run_id: bytes
    ended: bool
    last: np.void | None
    generation: int = 0
    thinned: tuple[Thinned, ...] = ()


EMPTY = Index(np.zeros(0, ENTRY), Columns((*RECORD_COLUMNS, TEXT)), b"", ended=False, last=None)
"""The index of a rank that was killed before it could write a header."""


def parse_index(data: bytes, rank: int, path: str) -> Index:
    """The index in `data`, up to the last whole entry."""
    if len(data) < HEADER.size:
        return EMPTY
    length, run_id, crc = _header(data, rank, path)
    start = HEADER.size + length
    if len(data) < start:
        return EMPTY
    about = data[HEADER.size : start]
    if zlib.crc32(about) != crc:
        raise DamageError(path, "what it says of columns was altered")
    try:
        columns = parse_columns(about)
        generation, dropped = parse_thinned(about)
    except Malformed as error:
        raise DamageError(path, str(error)) from None
    count = (len(data) - start) // ENTRY.itemsize
    entries = np.frombuffer(data, ENTRY, count, start)
    if count:
        entries = entries[: _sound(data, start, entries, path)]
    ended = len(entries) > 0 and bool(entries["kind"][-1] == END_ENTRY)
    last = entries[-1] if len(entries) else None
    if ended and start + len(entries) * ENTRY.itemsize != len(data):
        raise DamageError(path, "something follows its end mark")
    _check(entries, columns, path, ended=ended)
    return Index(entries[:-1] if ended else entries, columns, run_id, ended, last, generation, dropped)


def newer_format(number: int, version: str | None, path: str) -> StoreError:
    """The error for a store of a format that this version cannot read."""
    by = f"introspect {version}" if version else "a newer introspect"
    named = version and version != __version__
    remedy = f"install introspect-cli>={version}" if named else "install the newest introspect-cli"
    return StoreError(
        f"{path} was written by {by}, format {number}; "
        f"this is {__version__}, which reads up to format {FORMAT}: {remedy}"
    )


def _header(data: bytes, rank: int, path: str) -> tuple[int, bytes, int]:
    """Bytes of the description of columns, the id of the run, and the description's CRC."""
    magic, format_number, entry_size, rank_of_file, length, run_id, described, crc = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamageError(path, "it is not an index")
    if zlib.crc32(data[: HEADER.size - 4]) != crc:
        raise DamageError(path, "its header was altered")
    if format_number > FORMAT:
        raise newer_format(format_number, None, path)
    if entry_size != ENTRY.itemsize or length > LIMIT_COLUMNS or format_number < FORMAT:
        raise DamageError(path, "its header holds values that no version writes")
    if rank_of_file != rank:
        raise DamageError(path, f"it is the index of rank {rank_of_file}")
    return length, run_id, described


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


# --- steps that were dropped


def records_name(generation: int) -> str:
    """The file of records that belongs to an index."""
    return RECORDS if not generation else f"records-{generation}.arrow"


def add_thinned(thinned: Iterable[Thinned], why: str, steps: list[int]) -> tuple[Thinned, ...]:
    """What is to be said once some more steps, at least one, are dropped."""
    more = Thinned(why, len(steps), min(steps), max(steps), 1)
    by_reason = {each.why: each for each in thinned}
    before = by_reason.get(why)
    if before is not None:
        more = replace(
            more,
            count=before.count + more.count,
            first=min(before.first, more.first),
            last=max(before.last, more.last),
            times=before.times + 1,
        )
    return tuple((by_reason | {why: more}).values())


def parse_thinned(about: bytes) -> tuple[int, tuple[Thinned, ...]]:
    """Which records belong to an index, by number, and what was dropped from them.

    Raises:
        Malformed: it says neither as a capture does.
    """
    if b'"generation"' not in about:
        return 0, ()
    try:
        description = json.loads(about)
        generation, rows = description["generation"], [_thinned(row) for row in description["thinned"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Malformed("what it says of dropped steps cannot be read") from None
    if not _is_number(generation, 1) or generation > 10**9 or len(rows) > len(OPTIONS):
        raise Malformed("what it says of dropped steps cannot be")
    return generation, tuple(rows)


def _thinned(row: Any) -> Thinned:
    why, count, first, last, times = row
    if why not in OPTIONS or not all(_is_number(number, 0) for number in (count, first, last, times)) or first > last:
        raise ValueError(row)
    return Thinned(why, count, first, last, times)


def _is_number(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < _MOST_STEPS


# --- digests

_STATUS = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xD1B54A32D192ED03)

Words = NDArray[np.uint64]


def step_digest(keys: Words, checksums: Words, statuses: NDArray[Any], setting: NDArray[np.bool_]) -> bytes:
    """The 16-byte digest of a step."""
    seen = statuses.astype(np.uint64)
    seen += np.uint64(1)
    seen *= _STATUS
    seen += checksums
    seen = mix(seen)
    seen ^= keys
    mixed = mix(seen)
    again = mix(np.add(mixed, _SECOND, out=seen))
    if setting.any():
        mixed, again = mixed[~setting], again[~setting]
    low = int(mixed.sum(dtype=np.uint64))
    high = int(again.sum(dtype=np.uint64))
    return struct.pack("<QQ", low, high)


def chained(chain: bytes, step: int, digest: bytes) -> bytes:
    """The 16-byte chain after a step: BLAKE2b of the chain before, the step number and its digest."""
    return hashlib.blake2b(chain + struct.pack("<q", step) + digest, digest_size=16).digest()
