"""Writes what one rank records, a step at a time, so that a killed process loses nothing that was written.

Sites, layouts and modules are written once and named by number after: each is a table, of which numbers are handed out
and the rows not yet written are encoded.

The process may end between any two instructions, the disk may fill, the directory may go away, and a step must cost the
training less than a millisecond. So new names, a step's labels and its records are frames that go out in one
plain write; what is torn off at the end does not exist. The first failure ends the recording, never the script.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.records import SETTING_KINDS, Kind, Layout, ModuleInfo, Site, SiteInfo
from introspect_cli.store.batch import given_line, text_line
from introspect_cli.store.columns import LIMIT_BATCH, LIMIT_NAMES, VALUE, Message, described
from introspect_cli.store.documents import encode_labels
from introspect_cli.store.files import reason
from introspect_cli.store.frames import BACK, COLUMNS, LABELS, NAMED, STEP, Frame
from introspect_cli.store.log import step_digest
from introspect_cli.store.names import LAYOUT, MODULE, columns_of, encode, site_columns
from introspect_cli.sums import content_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Sequence

    from introspect_cli.labels import Labels
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.columns import Schema
    from introspect_cli.store.frames import LogWriter, Written
    from introspect_cli.store.names import Names


# --- names


Row = TypeVar("Row")


class Interner(Generic[Row]):
    """Numbers rows from 0 and encodes those not yet written. Several threads may intern; one writes.

    A row gets the next number when it is first seen, and waits here until a step that was written holds it. An
    interrupt may come at any line: whoever writes keeps what counts as written, and no statement here leaves a number
    without its row.

    Attributes:
        numbers: of all rows, written or not, by their keys.
    """

    def __init__(self, columns: Callable[[Sequence[Row]], Names]) -> None:
        """Start without rows; `columns` makes the columns of a table of them."""
        self._columns = columns
        self.numbers: dict[Hashable, int] = {}
        self._waiting: dict[int, Row] = {}
        self._lock = threading.Lock()
        self._bytes: dict[int, int] = {0: 0}  # by the number of rows, bytes of all of them

    def intern(self, key: Hashable, row: Row) -> int:
        """The number of `key`: the next for a new key, whose `row` is kept; later calls change neither."""
        with self._lock:
            number = self.numbers.get(key)
            if number is None:
                number = len(self.numbers)
                self._waiting[number] = row  # before its number: one without the other is never read
                self.numbers[key] = number
            return number

    def rest(self, written: int) -> tuple[bytes, int]:
        """The encoded rows from number `written` on, and how many there are; rows below `written` are let go for good.

        Args:
            written: 0 at first; later that of the last call, to have its rows again, or that plus the number it
                returned.

        Raises:
            StoreError: the table would have more than LIMIT_NAMES bytes.
        """
        # Without the lock, which Python 3.13 leaves held where an interrupt ends a loop inside it (cpython #130279).
        for number in list(self._waiting):
            if number < written:
                del self._waiting[number]
        rows = [self._waiting[number] for number in range(written, len(self.numbers))]
        data = encode(self._columns(rows)) if rows else b""
        self._bytes = {written: self._bytes[written], written + len(rows): self._bytes[written] + len(data)}
        if self._bytes[written + len(rows)] > LIMIT_NAMES:
            raise StoreError(f"more names than a store holds ({LIMIT_NAMES >> 20} MB of them)")
        return data, len(rows)


# --- rank writer


class RankWriter:
    """Appends one rank's records, step by step.

    `site`, `layout` and `modules` may be called from several threads; `append` and `close` from one at a time.

    Attributes:
        failure: why nothing more is written, or None while all is well.
        digest: of the last step that was written.
    """

    def __init__(self, log: LogWriter, schema: Schema) -> None:
        """Write the description of the columns to the log.

        Args:
            log: the rank's.
            schema: the columns of records.

        Raises:
            StoreError: the log cannot be written.
        """
        self.failure: str | None = None
        self.digest = b""
        self._log = log
        self._keys, self._setting = np.zeros(0, np.uint64), np.zeros(0, np.bool_)
        self._expiring: dict[int, tuple[int, int]] = {}  # where the bodies of steps lie that may be dropped
        self._sites: Interner[tuple[Site, SiteInfo]] = Interner(self._site_columns)
        self._layouts: Interner[Layout] = Interner(partial(columns_of, names=LAYOUT))
        self._modules: Interner[ModuleInfo] = Interner(partial(columns_of, names=MODULE))
        self._schema = schema
        try:
            log.commit([Frame(COLUMNS, [described(schema)])])
        except (OSError, StoreError) as error:
            raise StoreError(f"cannot write to {log.folder.path}: {reason(error)}") from None

    def kinds(self) -> frozenset[Kind]:
        """Kinds of all sites numbered so far."""
        return frozenset(site.kind for site in list(self._sites.numbers) if isinstance(site, Site))

    @property
    def last_step(self) -> int | None:
        """Number of the last step written; None where there is none."""
        return self._log.written.step if self._log.written.step >= 0 else None

    @property
    def written(self) -> Written:
        """State of the log up to what counts as written: its `length` in bytes, `rows`, ..."""
        return self._log.written

    def site(self, site: Site, info: SiteInfo) -> int:
        """The number of a site: the next for a new one, whose `info` is kept; later calls change neither."""
        return self._sites.intern(site, (site, info))

    def layout(self, layout: Layout) -> int:
        """The number of a layout; equal layouts have one number."""
        return self._layouts.intern(layout, layout)

    def modules(self, modules: Sequence[ModuleInfo]) -> None:
        """Add rows to the module tree; equal rows are added once."""
        for module in modules:
            self._modules.intern(module, module)

    def message(self, rows: int) -> Message:
        """A new body for a step of `rows` records; fill it in, and again for each later step of as many records."""
        return Message(self._schema, rows)

    def append(
        self, step: int, batch: StepBatch | Message, labels: Labels | None = None, *, expires: bool = False
    ) -> None:
        """Write one step and its labels; does nothing after a failure. `thin` may drop one that `expires`.

        Raises:
            ValueError: the step does not come after the last one, or the batch names a site or layout by a number
                that was not given out.
            StoreError: it could not be written; once, and the store ends at the step before.
            KeyboardInterrupt: one came while the step was written; it was then written all the same, if it could be.
        """
        if self.failure is not None:
            return
        if step <= self._log.written.step:
            raise ValueError(f"step {step} was appended after step {self._log.written.step}")
        try:
            self._append(step, batch, labels, expires=expires)
        except (OSError, StoreError) as error:
            self._fail(reason(error))
        except KeyboardInterrupt:
            if step > self._log.written.step:  # once: a second interrupt is meant
                with suppress(Exception):  # none may take the interrupt's place; what lasts, the next step meets
                    self._append(step, batch, labels, expires=expires)
            raise

    def _append(self, step: int, batch: StepBatch | Message, labels: Labels | None, *, expires: bool) -> None:
        """Write names not yet written, labels and the step in one commit, and set `digest`.

        Raises:
            ValueError: the batch names a site or layout by a number that was not given out.
            OSError: it cannot be written.
            StoreError: the step or the names are too large, or the log refuses.
        """
        self._log.undo_uncounted()
        frames = self._take_names()
        message = batch if isinstance(batch, Message) else self._filled(batch)
        columns = message.columns
        sites, layouts = len(self._sites.numbers), len(self._layouts.numbers)
        if message.largest("site") >= sites or message.largest("layout") >= layouts:
            raise ValueError("a record names a site or a layout that was never given a number")
        data = message.pieces()
        size = sum(map(len, data))
        if size > LIMIT_BATCH or sum(map(len, message.lines)) > LIMIT_NAMES:
            raise StoreError(f"one step has more records than a store holds ({LIMIT_BATCH >> 20} MB of them)")
        site, values = columns["site"], columns[VALUE].astype(np.intp)
        checksums, statuses = (columns[name][: message.values] for name in ("checksum", "status"))
        digest = step_digest(self._keys[site], checksums, statuses, self._setting[site], values)
        if labels:
            frames.append(Frame(LABELS, [encode_labels(labels)], step=step))
        end = self._log.commit([*frames, Frame(STEP, data, message.rows, step, digest)])
        if expires:
            self._expiring[step] = end - size, size
        self.digest = digest

    def restart(self) -> None:
        """Take back all steps by a BACK frame; names stay. Does nothing without steps or after a failure.

        Raises:
            StoreError: the frame could not be written; the store ends where it did.
        """
        if self.failure is not None or self.last_step is None:
            return
        try:
            self._log.commit([Frame(BACK, [])])
            self._expiring.clear()
        except (OSError, StoreError) as error:
            self._fail(reason(error))

    def thin(self, steps: Collection[int]) -> None:
        """Drop steps (numbers) that were appended as ones that expire, the last one excepted.

        Does nothing after a failure, nor with numbers that the log does not have.

        Raises:
            StoreError: that could not be written; then all steps are still there.
        """
        dropped = {step: self._expiring[step] for step in steps if step in self._expiring and step != self.last_step}
        if self.failure is None and dropped:
            try:
                self._log.drop(dropped)
            except (OSError, StoreError) as error:
                raise StoreError(f"cannot drop steps from {self._log.folder.path}: {reason(error)}") from None
            for step in dropped:
                del self._expiring[step]

    def _take_names(self) -> list[Frame]:
        """Frames of the sites, layouts and modules that were not written yet, with digests of the encoded rows.

        They count as written once the frames do.
        """
        interners: tuple[Interner[Any], ...] = self._sites, self._layouts, self._modules
        every = zip(NAMED, interners, self._log.written.names, strict=True)
        taken = ((kind, *each.rest(written)) for kind, each, written in every)
        return [Frame(kind, [data], rows, 0, content_digest(data)) for kind, data, rows in taken if rows]

    def _filled(self, batch: StepBatch) -> Message:
        """A body with the columns of a batch."""
        message = self.message(len(batch))
        for name, column in batch.columns(self._schema).items():
            message.put(name, column)
        message.lines = [text_line(batch.text), given_line(batch.given)]
        return message

    def _fail(self, why: str) -> None:
        """Set `failure`, truncate the log to its last whole frame, and raise StoreError."""
        step = self.last_step
        ends = f"step {step}" if step is not None else "its beginning: no step was written"
        self.failure = f"cannot write to {self._log.folder.path}: {why}; the store ends at {ends}"
        with suppress(OSError, StoreError):  # what follows the last whole frame is not read anyway
            self._log.undo_uncounted()
        raise StoreError(self.failure)

    def close(self) -> None:
        """Write the names not yet written and an END frame; does nothing after a failure or a second time.

        Raises:
            StoreError: they could not be written.
        """
        if self.failure is not None:
            return
        try:
            self._log.commit(self._take_names())
            self._log.end()
        except (OSError, StoreError) as error:
            self._fail(reason(error))

    def _site_columns(self, rows: Sequence[tuple[Site, SiteInfo]]) -> Names:
        """The columns of sites, whose keys are kept by number for digests, and which are settings.

        Those of numbers that do not count as written are replaced: an append that failed had encoded them.
        """
        counted = self._log.written.names[0]  # beyond it, what an append encoded that did not end
        keys = np.array([site.key() for site, _ in rows], np.uint64)
        setting = np.array([site.kind in SETTING_KINDS for site, _ in rows], np.bool_)
        self._keys = np.concatenate([self._keys[:counted], keys])
        self._setting = np.concatenate([self._setting[:counted], setting])
        return site_columns(rows)
