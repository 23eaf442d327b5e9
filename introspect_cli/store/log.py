"""The log of a rank: frames that are only ever appended, each with its own checks, and the digests of steps.

A log is read while it is written, may end in the middle of a frame, may be damaged or forged, and ten thousand steps
must open in a moment. So each frame has a head of 64 bytes whose check goes over all heads before it, and a body with a
check of its own, which is read when it is asked for. What a killed writer left of its last frame does not exist. What
is taken back is not removed: a frame says so. The heads of a long log lie beside it once more, with the bodies of small
frames; without that, they are gone through.

Most steps of two runs that should be equal are equal, and must be passed over without being read; but records arrive
in another order each time, because backward threads race. So a step's digest is two 64-bit sums over mixed records:
order does not matter, a repeated record counts twice. A chain over all steps so far makes the first step that differs
a binary search. Statistics, sketches, texts, devices and strides are left out: they explain a divergence and never are
one. So are the kinds in `SETTING_KINDS`. The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", 2014).
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from zlib_ng.zlib_ng import crc32

from introspect_cli.errors import StoreError
from introspect_cli.store.columns import LIMIT_BATCH, RECORD_COLUMNS, Schema, parse_columns
from introspect_cli.store.files import FORMAT, DamageError
from introspect_cli.store.frames import (
    BACK,
    COLUMNS,
    DOCUMENT,
    DROP,
    END,
    FIRST_CHAIN,
    HEAD,
    LABELS,
    LAYOUTS,
    LIMIT_FRAMES,
    MAGIC,
    NAMED,
    SITES,
    START,
    STEP,
    SUMS,
    chained,
)
from introspect_cli.sums import mix

if TYPE_CHECKING:
    from introspect_cli.store.files import Source


Entries = NDArray[np.void]

_FIELDS = ["kind", "rows", "length", "step", "digest", "chain", "body_crc", "crc"]
HEADS = np.dtype({"names": _FIELDS, "formats": ["S4", "<u4", "<u8", "<i8", "V16", "V16", "<u4", "<u4"]})
"""The same as an array."""

KINDS = (COLUMNS, *NAMED, LABELS, SUMS, STEP, BACK, DROP, DOCUMENT, END)
SMALL = (COLUMNS, LABELS, SUMS, DROP, DOCUMENT)
"""Frames whose bodies lie beside the log with the heads."""

ENTRY = np.dtype([*HEADS.descr, ("offset", "<u8"), ("n_sites", "<u4"), ("n_layouts", "<u4")])
"""A step as readers have it: its head, where its body lies, how many sites and layouts there were."""

CACHE = struct.Struct("<8sII")
"""What the file of heads begins with: magic, CRC-32 of what follows, heads."""

_CACHE_MAGIC = b"INTROSPH"
_CHUNK = 1 << 16
"""Bytes that are read at once where heads are gone through."""


class StepEntry(NamedTuple):
    """Position, size and digests of one step in a rank's log.

    Attributes:
        step: number of the step.
        offset: of its body in the log, bytes.
        length: of its body, bytes.
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


class Frames:
    """The frames of a log, up to the last that is whole.

    Attributes:
        path: of the log, for messages.
        source: its bytes; None of a log that is not there.
        run_id: 16 bytes; empty where a writer was killed before it could write the beginning.
        heads: array of `HEADS`.
        begins: where each frame begins, and where the next one would.
        damage: what ended it before its end, where damage is to be told and not raised; else "".
    """

    def __init__(
        self, source: Source | None, rank: int, path: str, cached: bytes | None = None, *, damaged: bool = False
    ) -> None:
        """Read the heads.

        Args:
            source: the log; where it is None, or shorter than a log's beginning, there are no frames.
            rank: whose it must be.
            path: for messages.
            cached: the file of heads, where there is one.
            damaged: whether an altered head ends the log, and `damage` says so, instead of being raised. An altered
                beginning is raised all the same.

        Raises:
            DamageError: it was altered. A last frame that is cut short is ignored.
            StoreError: a newer version wrote it, or it cannot be read.
        """
        self.path, self.source = path, source
        self.run_id, self.damage = b"", ""
        self.heads, self.begins, self._bodies = np.zeros(0, HEADS), np.zeros(1, np.int64), memoryview(b"")
        self._cached, self._offsets = 0, np.zeros(0, np.int64)
        start = b"" if source is None else source.read(0, START.size)
        if source is None or len(start) < START.size:
            return
        crc = self._check_start(start, rank)
        size = source.size()
        if cached is not None and self._take_cached(cached, size, crc):
            crc = int(self.heads["crc"][-1])
        try:
            self._scan(source, size, crc)
        except DamageError as error:
            if not damaged:
                raise
            self.damage = error.finding.removeprefix(f"{path}: ")

    def _check_start(self, start: bytes, rank: int) -> int:
        """Check the log's first bytes, set `run_id` and return their CRC-32.

        Raises:
            DamageError: it is another file, another rank's log, of an older format, or altered.
            StoreError: a newer version wrote it.
        """
        magic, number, rank_of_file, self.run_id, crc = START.unpack(start)
        if magic != MAGIC:
            raise DamageError(self.path, "it is not a log")
        if crc32(start[:-4]) != crc:
            raise DamageError(self.path, "its beginning was altered")
        if number > FORMAT:
            raise newer_format(number, self.path)
        if rank_of_file != rank or number < FORMAT:
            raise DamageError(self.path, f"it is the log of rank {rank_of_file}, format {number}")
        return int(crc)

    def _take_cached(self, cached: bytes, size: int, before: int) -> bool:
        """Take the heads from the file of heads.

        Returns False, with nothing taken, where it is damaged or empty, or of another or longer log.

        Args:
            cached: the file of heads.
            size: of the log, in bytes.
            before: CRC-32 of the log's beginning, from which that of the first head goes on.

        Raises:
            DamageError: a head is one that no version writes.
        """
        if len(cached) < CACHE.size:
            return False
        magic, crc, count = CACHE.unpack_from(cached)
        begins = magic == _CACHE_MAGIC and crc32(cached[CACHE.size :]) == crc
        bodies = memoryview(cached)[CACHE.size + count * HEAD.size :]
        if not begins or not 0 < count <= LIMIT_FRAMES or len(cached) < CACHE.size + count * HEAD.size:
            return False
        heads = np.frombuffer(cached, HEADS, count, CACHE.size)
        small = np.where(_is_small(heads), heads["length"], 0).astype(np.int64)
        is_of_log = crc32(heads[0].tobytes()[:-4], before) == heads["crc"][0]
        if not is_of_log or len(bodies) != int(small.sum()) or int(_frame_offsets(heads)[-1]) > size:
            return False
        self._set_heads(heads)
        self._cached, self._bodies, self._offsets = count, bodies, np.concatenate([[0], np.cumsum(small)])
        return True

    def _scan(self, source: Source, size: int, crc: int) -> None:
        """Read the heads after the last known one, up to the last whole frame; sets `heads` also where it raises.

        Bodies are not read.

        Args:
            source: the log.
            size: of the log, in bytes.
            crc: CRC-32 of the last known head; of the log's beginning where none is known.

        Raises:
            DamageError: a head's CRC-32 does not fit (64 zeros end the log instead), or there are more than
                LIMIT_FRAMES.
        """
        at, chunk, first = int(self.begins[-1]) or START.size, b"", 0
        heads: list[bytes] = []
        try:
            while at + HEAD.size <= size:
                if not first <= at <= first + len(chunk) - HEAD.size:
                    chunk, first = source.read(at, min(at + _CHUNK, size)), at
                head = chunk[at - first : at - first + HEAD.size]
                if len(head) < HEAD.size:
                    break
                checked = crc32(head[:-4], crc)
                if checked != int.from_bytes(head[-4:], "little"):
                    if not any(head):  # what a power cut leaves
                        break
                    raise DamageError(self.path, f"its frame {len(self.heads) + len(heads)} was altered")
                length = int.from_bytes(head[8:16], "little")
                if at + HEAD.size + length > size:
                    break
                crc, at = checked, at + HEAD.size + length
                heads.append(head)
                if len(heads) > LIMIT_FRAMES:
                    raise DamageError(self.path, "it has more frames than a log")
        finally:
            self._set_heads(np.concatenate([self.heads, np.frombuffer(b"".join(heads), HEADS)]))

    def _set_heads(self, heads: NDArray[np.void]) -> None:
        """Set `heads` and `begins`; DamageError for an unknown kind or a length over the limit."""
        kinds = heads["kind"]
        if not np.isin(kinds, KINDS).all():
            raise DamageError(self.path, "a frame is of a kind that no version writes")
        if (heads["length"] > LIMIT_BATCH).any() or (heads["length"] % 8).any():
            raise DamageError(self.path, "a frame's length is not one")
        self.heads, self.begins = heads, _frame_offsets(heads)

    def encoded(self, count: int | None = None) -> bytes:
        """The bytes of the file of heads for the first `count` frames (None: all): heads, then bodies of small frames.

        Raises:
            DamageError: a body was altered.
        """
        heads = self.heads[:count]
        small = np.flatnonzero(_is_small(heads)).tolist()
        rest = heads.tobytes() + b"".join(map(self.body, small))
        return CACHE.pack(_CACHE_MAGIC, crc32(rest), len(heads)) + rest

    def body(self, number: int) -> bytes:
        """The bytes of frame `number`, checked by CRC-32; read from the log unless they came with the file of heads.

        Raises:
            DamageError: they were altered.
            StoreError: the log cannot be read.
        """
        head = self.heads[number]
        length, at = int(head["length"]), int(self.begins[number]) + HEAD.size
        if number < self._cached and _is_small(self.heads[number : number + 1])[0]:
            begin = int(self._offsets[number])
            data = bytes(self._bodies[begin : begin + length])
        else:
            assert self.source is not None  # frames were read from it
            data = self.source.read(at, at + length)
        if len(data) != length or crc32(data) != head["body_crc"]:
            raise DamageError(self.path, f"a frame of kind {head['kind'].decode()} at byte {at} was altered")
        return data

    def numbers_of(self, *kinds: bytes, counting: bool = True) -> list[int]:
        """Numbers of the frames of these kinds, rising; with `counting`, only of those after the last BACK frame."""
        first = self.back if counting else 0
        found: list[int] = (np.flatnonzero(np.isin(self.heads["kind"][first:], kinds)) + first).tolist()
        return found

    @cached_property
    def back(self) -> int:
        """Number of the frame after the last BACK frame (which takes back all steps before itself); 0 without one."""
        taken = np.flatnonzero(self.heads["kind"] == BACK)
        return int(taken[-1]) + 1 if len(taken) else 0

    @property
    def ended(self) -> bool:
        """Whether the log has an END frame: its writer closed it."""
        return bool((self.heads["kind"] == END).any())

    @cached_property
    def columns(self) -> Schema:
        """The columns of the rank's records, by the log's first COLUMNS frame; without one, those that every store has.

        Raises:
            DamageError: the description was altered, or this version does not write it.
        """
        described = self.numbers_of(COLUMNS, counting=False)
        if not described:
            return RECORD_COLUMNS
        return parse_columns(self.body(described[0]), self.path)

    def entries(self) -> tuple[Entries, tuple[str, ...]]:
        """Steps after the last BACK frame that were not dropped, and in words which were; () for none.

        They are an array of `ENTRY`; sites and layouts are counted from the log's start, and the chain is over the
        steps that are there.

        Raises:
            DamageError: step numbers do not rise, one is negative, or a frame was altered.
        """
        rows = np.array(self.numbers_of(STEP), np.int64)
        steps = self.heads["step"][rows]
        if len(rows) and (steps[0] < 0 or (np.diff(steps) <= 0).any()):
            raise DamageError(self.path, "its steps do not rise")
        gone = np.isin(steps, np.frombuffer(b"".join(map(self.body, self.numbers_of(DROP))), "<i8"))
        lost, rows = steps[gone], rows[~gone]
        out = np.zeros(len(rows), ENTRY)
        out[_FIELDS] = self.heads[rows]
        out["offset"] = self.begins[rows] + HEAD.size
        for name, kind in (("n_sites", SITES), ("n_layouts", LAYOUTS)):
            counts = np.where(self.heads["kind"] == kind, self.heads["rows"], 0)
            out[name] = np.minimum(np.cumsum(counts, dtype=np.int64)[rows], (1 << 32) - 1)
        if not len(lost):
            return out, ()
        chain = FIRST_CHAIN
        for entry in out:
            chain = chained(chain, int(entry["step"]), entry["digest"].tobytes())
            entry["chain"] = np.void(chain)
        several = f"{len(lost):,} steps between {lost[0]} and {lost[-1]}"
        return out, (f"{several if len(lost) > 1 else f'step {lost[0]}'} (recorded, then dropped by --steps)",)

    def check_chain(self) -> None:
        """Compute the chain of step digests again, anew after each BACK frame, and compare it with each head.

        Raises:
            DamageError: one differs.
        """
        chain = FIRST_CHAIN
        for head in self.heads:
            if head["kind"] == BACK:
                chain = FIRST_CHAIN
            elif head["kind"] == STEP:
                chain = chained(chain, int(head["step"]), head["digest"].tobytes())
            if chain != head["chain"].tobytes():
                raise DamageError(self.path, f"the chain of digests breaks at step {head['step']}")


def _is_small(heads: NDArray[np.void]) -> NDArray[np.bool_]:
    return np.isin(heads["kind"], SMALL)


def _frame_offsets(heads: NDArray[np.void]) -> NDArray[np.int64]:
    """int64 (n + 1,), byte offsets of the frames and of the next one to come."""
    return START.size + np.concatenate([np.zeros(1, np.int64), np.cumsum(HEAD.size + heads["length"].astype(np.int64))])


def newer_format(number: int, path: str) -> StoreError:
    """The error for a store or log at `path` of a format that this version cannot read."""
    return StoreError(f"{path} was written by a newer introspect, format {number}: install the newest introspect-cli")


# --- digests

_STATUS = np.uint64(0x9E3779B97F4A7C15)
_SECOND = np.uint64(0xD1B54A32D192ED03)

Words = NDArray[np.uint64]


def step_digest(
    keys: Words, checksums: Words, statuses: NDArray[Any], setting: NDArray[np.bool_], values: Any = slice(None)
) -> bytes:
    """The 16-byte digest of a step: a sum over its records, so equal in any order.

    Args:
        keys: uint64 (n,), of the records' sites.
        checksums: uint64 (m,).
        statuses: uint8 (m,).
        setting: bool (n,), records that are left out.
        values: integers (n,), which of the m is each record's; else that in its place.
    """
    seen = statuses.astype(np.uint64)
    seen += np.uint64(1)
    seen *= _STATUS
    seen += checksums
    seen = mix(seen)[values]
    seen ^= keys
    mixed = mix(seen)
    again = mix(np.add(mixed, _SECOND, out=seen))
    if setting.any():
        mixed, again = mixed[~setting], again[~setting]
    return np.array([mixed.sum(dtype=np.uint64), again.sum(dtype=np.uint64)], "<u8").tobytes()
