"""A rank's log while it is written, and how much of it counts.

A process may be interrupted between any two lines, and the script may catch the interrupt and train on. So what counts
as written is one value, exchanged by one assignment once the frames are out; whatever writes next first takes back what
was written beyond it.

A log only grows, so that a kill loses nothing; a long run must not fill the disk. So where steps are dropped, the log
is written once more without them, with a frame that says how many were dropped, from where to where and why: nobody may
take them for steps that were never recorded. The new log replaces the old one by a rename, and who reads the old one
has it open.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from contextlib import suppress
from dataclasses import astuple
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from introspect_cli.errors import StoreError
from introspect_cli.store.files.folders import (
    HEADS,
    LOG,
    SHARED,
    Appended,
    Folder,
    launch_of_rank,
    reason,
    shared_name,
)
from introspect_cli.store.format.columns import padded
from introspect_cli.store.format.log import (
    BACK,
    DOCUMENT,
    DROP,
    END,
    HEAD,
    NAMED,
    OF_STEPS,
    STEP,
    Frames,
    add_thinned,
    begin_log,
    chained,
    head_of,
)
from introspect_cli.store.format.schemas import FIRST_CHAIN, LIMIT_FRAMES
from introspect_cli.sums import content_digest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from introspect_cli.store.format.columns import Pieces

_NO_DIGEST = bytes(16)
_LEAST_CACHED = 256
"""Frames of a log whose heads are gone through in no time."""

_LEAST_NAMES, _MOST_NAMES = 1 << 12, 64
_LEAST_DOCUMENT, _MOST_DOCUMENTS = 1 << 9, 4
"""Bytes of what ranks share, and how many different ones of a name they share at most: more stay in each rank's log."""


class Frame(NamedTuple):
    """A frame to append; see `log.HEAD` for its fields."""

    kind: bytes
    body: Pieces
    rows: int = 0
    step: int = 0
    digest: bytes = _NO_DIGEST
    crc: int | None = None


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
        length = sum(map(len, frame.body))
        crc = reduce(lambda crc, piece: zlib.crc32(piece, crc), frame.body, 0) if frame.crc is None else frame.crc
        step, chain, rows, names = self.step, self.chain, self.rows, self.names
        if frame.kind == STEP:
            step, chain, rows = frame.step, chained(chain, frame.step, frame.digest), rows + frame.rows
        elif frame.kind == BACK:
            step, chain, rows = -1, FIRST_CHAIN, 0
        elif frame.kind in NAMED:
            at = NAMED.index(frame.kind)
            names = (*names[:at], names[at] + frame.rows, *names[at + 1 :])
        head, crc = head_of(
            frame.kind, (length, crc), self.crc, rows=frame.rows, step=frame.step, digest=frame.digest, chain=chain
        )
        written = Written(self.length + HEAD.size + padded(length), crc, self.frames + 1, step, chain, rows, names)
        return written, [head, *frame.body, bytes(-length % 8)]


class LogWriter:
    """A rank's log, open for appending by one thread at a time; `document` may be called from any thread.

    Attributes:
        folder: the rank's directory.
        written: what counts as written.
    """

    def __init__(self, folder: Folder, rank: int, run_id: bytes, *, durable: bool, shared: bool = False) -> None:
        """Make the file and lock it.

        Args:
            folder: the rank's directory, which is closed with the log.
            rank: its number.
            run_id: of the run.
            durable: whether to force each step to disk before the next begins.
            shared: whether other ranks write the same run.

        Raises:
            OSError: it cannot be made; FileExistsError where there is a log.
        """
        self.folder, self.rank = folder, rank
        self._run_id, self._durable, self._shared = run_id, durable, shared
        self._pid = os.getpid()
        self._temporary = f".{LOG}.{self._pid}"
        self._torn = False  # whether the file may hold what does not count as written
        self._ended = False
        self._lock = threading.RLock()
        self._fresh: tuple[Appended, Written] | None = None  # a log without some steps, that may have become the log
        start = begin_log(rank, run_id)
        self._file = Appended(folder, LOG, locked=True)
        self.written = Written(len(start), zlib.crc32(start[:-4]))
        try:
            self._file.append(start)
        except BaseException:
            self.close()
            raise

    def commit(self, frames: Iterable[Frame]) -> None:
        """Append frames in one write: either all count afterwards or none.

        Raises:
            OSError: they cannot be written.
            StoreError: too many frames, or a forked child.
        """
        with self._lock:
            self.undo_uncounted()
            pieces: Pieces = []
            written = self.written
            for frame in frames:
                written, more = written.after(frame)
                pieces += more
            if written.frames >= LIMIT_FRAMES:
                raise StoreError(f"more steps than a store holds ({LIMIT_FRAMES:,} frames)")
            self._torn = True
            self._file.append(*pieces)
            if self._durable:
                os.fsync(self._file.fd)
            self.written = written
            self._torn = False

    def names(self, kind: bytes, data: bytes, rows: int) -> Frame:
        """The frame of a table of names; the encoded rows are its body, unless `shared/` has them.

        Where several ranks write the run, `_put_shared` may put them there at once; the body is then empty, and the
        frame's `step` their length in bytes (0 where the body has them).

        Args:
            kind: SITES, LAYOUTS or MODULES.
            data: the encoded rows.
            rows: how many.
        """
        digest = bytes.fromhex(content_digest(data))
        shared = self._put_shared(kind.decode().lower(), data, digest, _LEAST_NAMES, _MOST_NAMES)
        return Frame(kind, [] if shared else [data], rows, len(data) * shared, digest)

    def document(self, name: str, data: bytes) -> None:
        """Append a document, which replaces an earlier one of the same name.

        Its bytes go into `shared/` where ranks share them (`_put_shared`), but never a manifest's.

        Raises:
            OSError: it cannot be written.
            StoreError: too many frames, or a forked child.
        """
        self.undo_uncounted()
        digest = bytes.fromhex(content_digest(data))
        shared = name != "manifest" and self._put_shared(name, data, digest, _LEAST_DOCUMENT, _MOST_DOCUMENTS)
        body: Pieces = [f"{name}\n".encode(), *(() if shared else (data,))]
        self.commit([Frame(DOCUMENT, body, 0, len(data) * shared, digest)])

    def _put_shared(self, name: str, data: bytes, digest: bytes, least: int, most: int) -> bool:
        """Put a content into `shared/`, where it is not there yet, and return whether it is there now.

        False, and nothing is put, for a run of one process, for fewer than `least` bytes, and where `most` other
        contents of this name are there.
        """
        if not self._shared or len(data) < least:
            return False
        named = shared_name(name, digest)
        with launch_of_rank(self.folder.reopen_if_closed()) as launch, launch.make_folder(SHARED, 0o700) as shared:
            there = shared.names()
            if named not in there and sum(other.startswith(f"{name}-") for other in there) < most:
                shared.replace(named, [data], 0o600, durable=self._durable)
                return True
        return named in there

    def drop(self, steps: Collection[int], why: str) -> None:
        """Rewrite the log without the steps with the numbers `steps`, and note in it how many were dropped and why.

        Numbers that the log does not have are ignored; with none that it has, nothing is written.

        Raises:
            StoreError: the log could not be written anew; then all steps are still there.
        """
        with self._lock:
            try:
                self.undo_uncounted()
                self._file.reopen_if_closed()
                self._torn = True
                self._write_without(frozenset(steps), why)
                self.undo_uncounted()
            except (OSError, StoreError) as error:
                with suppress(OSError, StoreError):  # else before the next step
                    self.undo_uncounted()
                raise StoreError(f"cannot drop steps from {self.folder.path}: {reason(error)}") from None

    def _write_without(self, dropped: frozenset[int], why: str) -> None:
        """Write a new log without the steps `dropped` beside the old one, and rename it over that.

        Steps that were taken back go too, and the file of heads. Nothing is done where the log has none of the steps.
        `undo_uncounted` then goes on with whichever has the log's name.
        """
        folder = self.folder.reopen_if_closed()
        with folder.file(LOG) as old:
            frames = Frames(old, self.rank, old.path)
            gone = {int(frames.heads["step"][number]) for number in frames.numbers_of(STEP)} & dropped
            if not gone:
                return
            with suppress(FileNotFoundError):
                os.unlink(self._temporary, dir_fd=folder.fd)
            fresh, start = Appended(folder, self._temporary, locked=True), begin_log(self.rank, self._run_id)
            self._fresh = fresh, self.written
            fresh.append(start)
            written = Written(len(start), zlib.crc32(start[:-4]))
            for number, head in enumerate(frames.heads):
                kind, step = bytes(head["kind"]), int(head["step"])
                lost = kind in OF_STEPS and (number < frames.back or step in gone)
                if kind not in (DROP, BACK) and not lost:
                    frame = Frame(kind, [frames.body(number)], int(head["rows"]), step, head["digest"].tobytes())
                    written, pieces = written.after(frame)
                    fresh.append(*pieces)
            thinned = add_thinned(frames.thinned, why, sorted(gone))
            written, pieces = written.after(Frame(DROP, [json.dumps([astuple(each) for each in thinned]).encode()]))
            fresh.append(*pieces)
        if self._durable:
            os.fsync(fresh.fd)
        self._fresh = fresh, written
        with suppress(FileNotFoundError):
            os.unlink(HEADS, dir_fd=folder.fd)
        os.rename(self._temporary, LOG, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        if self._durable:
            os.fsync(folder.fd)

    def undo_uncounted(self) -> None:
        """Truncate the log to what counts as written, where a write may have failed; go on with the log in place.

        Whether the descriptor is still the log's, and the log still there, is checked again when it is written to.
        Where `drop` failed, the new log goes on if it has the log's name; else it is deleted.

        Raises:
            StoreError: this is a forked child.
        """
        if os.getpid() != self._pid:
            raise StoreError("a forked child does not write its parent's store")
        if not self._torn:
            return
        if self._fresh is not None:
            folder, (fresh, written) = self.folder.reopen_if_closed(), self._fresh
            if fresh.is_same_file(folder, LOG):
                before, fresh.path = self._file, f"{folder.path}/{LOG}"
                self._file, self.written = fresh, written
                if before is not fresh:
                    before.close()
            else:
                with suppress(OSError):
                    os.unlink(self._temporary, dir_fd=folder.fd)
                fresh.close()
            self._fresh = None
        self._file.shorten(self.written.length)
        self._torn = False

    def end(self) -> None:
        """Append the END frame, once.

        Raises:
            OSError: it cannot be written.
            StoreError: too many frames, or a forked child.
        """
        if not self._ended:
            self.commit([Frame(END, [])])
            self._ended = True

    def close(self) -> None:
        """Close the file and the rank's directory.

        A log with an END frame and `_LEAST_CACHED` frames or more gets its file of heads, if it can be written.
        """
        if self._ended and self._file.fd >= 0 and self.written.frames >= _LEAST_CACHED:
            with suppress(OSError, StoreError), self.folder.reopen_if_closed().file(LOG) as log:
                frames = Frames(log, self.rank, log.path)
                self.folder.replace(HEADS, [frames.encoded()], 0o666, durable=self._durable)
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors and write nothing: all that a forked child does."""
        self._file.close()
        self.folder.close()
