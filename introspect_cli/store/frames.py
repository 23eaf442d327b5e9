"""The frames of a log as they are written: appended, in one write for a step, and never touched again.

A process may be interrupted between any two lines, and the script may catch the interrupt and train on. So what counts
as written is one value, exchanged by one assignment once the frames are out; whatever writes next first takes back what
was written beyond it.

A log only grows, so that a kill loses nothing; a long run must not fill the disk. So where steps are dropped, a frame
says which, so that nobody takes them for steps that were never recorded, and then the file system is asked to let go of
their bytes: a hole is left in the file, which reads as zeros.

Nothing here needs numpy: a capture makes its log before the script may have loaded numpy itself.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from contextlib import suppress
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from zlib_ng.zlib_ng import crc32

from introspect_cli.errors import StoreError
from introspect_cli.store.files import FORMAT, LOG, Appended, Descriptor, Folder, write_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from introspect_cli.store.files import Pieces


MAGIC = b"INTROSPL"
START = struct.Struct("<8sII16s28xI")
"""What a log begins with: magic, format, rank, run id, zeros, CRC-32 of the 60 bytes before."""

HEAD = struct.Struct("<4sIQq16s16sII")
"""A frame's head: kind, rows, bytes of the body, step, digest, chain, CRC-32 of the body, CRC-32 of the 60 bytes before
that begins with the one of the head before, or with that of the log's beginning."""

COLUMNS, SITES, LAYOUTS, MODULES = b"COLS", b"SITE", b"LAYO", b"MODU"
LABELS, SUMS, STEP, BACK, DROP, DOCUMENT, END = b"LABL", b"SUMS", b"STEP", b"BACK", b"DROP", b"META", b"ENDS"
"""Kinds of frames. SUMS was written by earlier versions, and is passed over."""
NAMED = (SITES, LAYOUTS, MODULES)

FIRST_CHAIN = bytes(16)
LIMIT_FRAMES = 4 << 20
"""Frames of a log: as many steps, or half as many where each has labels."""

_ROOM = 64 << 10
"""Bytes for the documents that say how a run ended."""
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of Linux


def begin_log(rank: int, run_id: bytes) -> bytes:
    """The first bytes of a log: magic, format, rank, run id and their CRC-32."""
    start = START.pack(MAGIC, FORMAT, rank, run_id, 0)[:-4]
    return start + crc32(start).to_bytes(4, "little")


def chained(chain: bytes, step: int, digest: bytes) -> bytes:
    """The 16-byte chain after a step: BLAKE2b of the chain before, the step number and its digest."""
    return hashlib.blake2b(chain + struct.pack("<q", step) + digest, digest_size=16).digest()


class Frame(NamedTuple):
    """A frame to append; see `HEAD` for its fields."""

    kind: bytes
    body: Pieces
    rows: int = 0
    step: int = 0
    digest: bytes = bytes(16)


class Written(NamedTuple):
    """State of the log up to the last frame that counts as written.

    Attributes:
        length: bytes.
        crc: of the last head.
        frames: how many.
        step: the last step that counts, -1 where there is none.
        chain: after that step.
        rows: records in the steps that count.
        names: rows of names, by kind of frame.
    """

    length: int
    crc: int
    frames: int = 0
    step: int = -1
    chain: bytes = FIRST_CHAIN
    rows: int = 0
    names: tuple[int, ...] = (0,) * len(NAMED)

    def after(self, frame: Frame) -> tuple[Written, Pieces]:
        """The state after appending a frame, and the frame's bytes."""
        body = [*frame.body, b" " * (-sum(map(len, frame.body)) % 8)]
        length = sum(map(len, body))
        crc = reduce(lambda crc, piece: crc32(piece, crc), body, 0)
        step, chain, rows, names = self.step, self.chain, self.rows, self.names
        if frame.kind == STEP:
            step, chain, rows = frame.step, chained(chain, frame.step, frame.digest), rows + frame.rows
        elif frame.kind == BACK:
            step, chain, rows = -1, FIRST_CHAIN, 0
        elif frame.kind in NAMED:
            at = NAMED.index(frame.kind)
            names = (*names[:at], names[at] + frame.rows, *names[at + 1 :])
        head = HEAD.pack(frame.kind, frame.rows, length, frame.step, frame.digest, chain, crc, 0)[:-4]
        crc = crc32(head, self.crc)
        written = Written(self.length + HEAD.size + length, crc, self.frames + 1, step, chain, rows, names)
        return written, [head + crc.to_bytes(4, "little"), *body]


class LogWriter:
    """A rank's log, open for appending by one thread at a time; `document` may be called from any thread.

    Attributes:
        folder: the rank's directory.
        written: what counts as written.
        ended: whether it has its END frame.
    """

    def __init__(self, folder: Folder, rank: int, run_id: bytes, *, durable: bool) -> None:
        """Make the file and lock it.

        Args:
            folder: the rank's directory, which is closed with the log.
            rank: its number.
            run_id: of the run.
            durable: whether to force each step to disk before the next begins.

        Raises:
            OSError: it cannot be made; FileExistsError where there is a log.
        """
        self.folder, self.rank = folder, rank
        self._durable = durable
        self._pid = os.getpid()
        self._torn = False  # whether the file may hold what does not count as written
        self.ended = False
        self._lock = threading.RLock()
        start = begin_log(rank, run_id)
        self._file = Appended(folder, LOG)
        self._room = _reserved(folder)
        self.written = Written(len(start), crc32(start[:-4]))
        write_all(self._file.fd, [start])

    def commit(self, frames: Iterable[Frame]) -> int:
        """Append frames in one write, either all or none; returns how many bytes the log has then.

        Raises:
            OSError: they cannot be written.
            StoreError: too many frames, or a forked child.
        """
        with self._locked():
            self.undo_uncounted()
            pieces: Pieces = []
            written = self.written
            for frame in frames:
                written, more = written.after(frame)
                pieces += more
            if written.frames >= LIMIT_FRAMES:
                raise StoreError(f"more steps than a store holds ({LIMIT_FRAMES:,} frames)")
            self._torn = True
            try:
                write_all(self._file.reopen_if_closed(), pieces, self.written.length)
            except OSError:  # where the disk is full, how it ended shall find room
                self._room.close()
                raise
            if self._durable:
                os.fsync(self._file.fd)
            self.written = written
            self._torn = False
            return written.length

    def document(self, name: str, data: bytes) -> None:
        """Append a document, which replaces an earlier one of the same name.

        Raises:
            OSError: it cannot be written.
            StoreError: too many frames, or a forked child.
        """
        self.commit([Frame(DOCUMENT, [f"{name}\n".encode(), data])])

    def drop(self, bodies: Mapping[int, tuple[int, int]]) -> None:
        """Append a DROP frame for steps, and make holes where their bodies lie, if the file system can.

        Args:
            bodies: by step, the first byte of its body in the log, and how many it has.

        Raises:
            OSError: the frame cannot be written; then all steps are still there.
            StoreError: too many frames, or a forked child.
        """
        self.commit([Frame(DROP, [struct.pack(f"<{len(bodies)}q", *sorted(bodies))])])
        import ctypes  # for this alone

        punch: Any = getattr(ctypes.CDLL(None), "fallocate", None)
        for begin, length in bodies.values() if punch else ():
            punch(self._file.fd, _PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(length))

    def undo_uncounted(self) -> None:
        """Truncate the log to what counts as written, where a write may have failed.

        Whether the descriptor is still the log's, and the log still there, is checked again when it is written to.

        Raises:
            StoreError: this is a forked child.
        """
        with self._locked():  # what another thread is writing is not counted yet, nor is it torn
            if self._torn:
                os.ftruncate(self._file.reopen_if_closed(), self.written.length)
                self._torn = False

    def _locked(self) -> threading.RLock:
        """The lock; StoreError in a forked child, where a thread that is not there may hold it."""
        if os.getpid() != self._pid:
            raise StoreError("a forked child does not write its parent's store")
        return self._lock

    def end(self) -> None:
        """Append the END frame, once.

        Raises:
            OSError: it cannot be written.
            StoreError: too many frames, or a forked child.
        """
        if not self.ended:
            self.commit([Frame(END, [])])
            self.ended = True

    def close(self) -> None:
        """Close the descriptors; a second call does nothing."""
        self._file.close()
        self._room.close()
        self.folder.close()


def _reserved(folder: Folder) -> Descriptor:
    """A file without a name that takes `_ROOM` bytes of the disk until it is closed; fewer where they are not there."""
    name = f".{LOG}.{os.getpid()}"
    room = Descriptor(folder.create(name), f"{folder.path}/{name}")
    os.unlink(name, dir_fd=folder.fd)
    with suppress(OSError):
        os.posix_fallocate(room.fd, 0, _ROOM)
    return room
