"""Writes what one rank records, a step at a time, so that a killed process loses nothing that was indexed.

The process may end between any two instructions, the disk may fill, the directory may go away, and a step must cost the
training less than a millisecond. So it writes new names, then the step's batch, then its index entry, each with one
plain write; what no index entry vouches for does not exist. The first failure ends the recording, never the script.

An interrupt may also be raised between any two lines, and the script may catch it and train on. So what counts as
written is one value, exchanged by one assignment once the index entry is out; whatever writes next first takes back
what was written beyond it.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.records import SETTING_KINDS, Kind, Layout, ModuleInfo, Site, SiteInfo
from introspect_cli.store.arrow import END_OF_STREAM, Schema, schema_message
from introspect_cli.store.batch import absent, given_columns, sample_lists
from introspect_cli.store.files import (
    INDEX,
    LAYOUTS,
    MODULES,
    RECORDS,
    SITES,
    STREAMS,
    Appended,
    Folder,
    reason,
)
from introspect_cli.store.form import Form, short_texts
from introspect_cli.store.format import (
    END_ENTRY,
    ENTRY,
    ENTRY_VALUES,
    FIRST_CHAIN,
    LIMIT_BATCH,
    LIMIT_INDEX,
    SAMPLES,
    STATISTIC,
    STEP_ENTRY,
    Columns,
    index_header,
)
from introspect_cli.store.index import Sums, chained
from introspect_cli.store.labels import LABELS, LIMIT_LABELS
from introspect_cli.store.labels import encode as encode_labels
from introspect_cli.store.names import Encoded, Interner, Stream, encode_layouts, encode_modules, encode_sites

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from introspect_cli.labels import Labels
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.columns import ColumnData
    from introspect_cli.store.thinning import Written as Anew


class _Written(NamedTuple):
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


class RankWriter:
    """One rank's streams and index, open for appending.

    `site`, `layout` and `modules` may be called from several threads; `append` and `close` from one at a time.

    Attributes:
        failure: why nothing more is written, or None while all is well.
    """

    def __init__(
        self,
        folder: Folder,
        rank: int,
        schema: Schema,
        run_id: bytes,
        *,
        durable: bool = False,
        sums: Sums | None = None,
    ) -> None:
        self.failure: str | None = None
        self._folder = folder
        self._rank = rank
        self._durable = durable
        self._sums = sums or Sums()
        self._pid = os.getpid()
        self._keys = np.zeros(0, np.uint64)
        self._setting = np.zeros(0, np.bool_)
        columns = Columns(schema)
        self._sites: Interner[tuple[Site, SiteInfo]] = Interner(columns.sites, self._encode_sites)
        self._layouts: Interner[Layout] = Interner(columns.layouts, encode_layouts)
        self._modules: Interner[ModuleInfo] = Interner(columns.modules, encode_modules)
        self._interners = ((SITES, self._sites), (LAYOUTS, self._layouts), (MODULES, self._modules))
        self._schema = schema
        self._run_id = run_id
        self._files: dict[str, Appended] = {}
        self._torn = False  # whether the files may hold what does not count as written
        self._dropping = False  # whether other files may be the store, or left over of that
        self._anew: Anew | None = None
        self._spare: Form | None = None  # of a step that was written
        self._generation = 0  # how often that has happened
        self._written = _Written(-1, FIRST_CHAIN, 0, 0, {}, {})
        try:
            self._start(columns, run_id)
        except OSError as error:
            self.abandon()
            raise StoreError(f"cannot write to {folder.path}: {reason(error)}") from None

    def _start(self, columns: Columns, run_id: bytes) -> None:
        for name in (*STREAMS, INDEX):
            self._files[name] = Appended(self._folder, name, locked=name == INDEX)
        for name, schema in ((SITES, columns.sites), (LAYOUTS, columns.layouts), (MODULES, columns.modules)):
            self._write(name, schema_message(schema))
        self._write(RECORDS, schema_message(self._schema))
        header = index_header(self._rank, run_id, columns.described())
        self._write(INDEX, header)
        names = {name: interner.begun for name, interner in self._interners}
        self._first = self._written = _Written(-1, FIRST_CHAIN, 0, zlib.crc32(header), names, self._lengths())

    def kinds(self) -> frozenset[Kind]:
        """Kinds of all sites there are."""
        return frozenset(site.kind for site in self._sites.keys() if isinstance(site, Site))  # noqa: SIM118 - no dict

    @property
    def last_step(self) -> int | None:
        """The last step written; None where there is none."""
        return self._written.step if self._written.step >= 0 else None

    @property
    def rows_written(self) -> int:
        """Records in all steps."""
        return self._written.rows

    @property
    def bytes_written(self) -> int:
        """Bytes in this rank's files that count as written."""
        return sum(self._written.lengths.values())

    def site(self, site: Site, info: SiteInfo) -> int:
        """The number of a site; what is known of it is taken from the first call."""
        return self._sites.intern(site, (site, info))

    def layout(self, layout: Layout) -> int:
        """The number of a layout."""
        return self._layouts.intern(layout, layout)

    def modules(self, modules: Sequence[ModuleInfo]) -> None:
        """Add to the module tree; what is there already is not added again."""
        for module in modules:
            self._modules.intern(module, module)

    def form(self, rows: int) -> Form:
        """A form for a step of so many records; it may be filled in anew for the next step."""
        return Form(self._schema, rows)

    def append(self, step: int, batch: StepBatch | Form, labels: Labels | None = None) -> None:
        """Write one step, with what its framework calls it; after a failure, nothing.

        Raises:
            ValueError: the step does not come after the last one, or the batch names a site or layout by a number
                that was not given out.
            StoreError: it could not be written; once, and the store ends at the step before.
            KeyboardInterrupt: one came while the step was written; it was then written all the same, if it could be.
        """
        if self.failure is not None:
            return
        if step <= self._written.step:
            raise ValueError(f"step {step} was appended after step {self._written.step}")
        try:
            self._append(step, batch, labels)
        except (OSError, StoreError) as error:
            self._fail(reason(error) if isinstance(error, OSError) else str(error))
        except KeyboardInterrupt:
            if step > self._written.step:  # once: a second interrupt is meant
                with suppress(Exception):  # none may take the interrupt's place; what lasts, the next step meets
                    self._append(step, batch, labels)
            raise

    def _append(self, step: int, batch: StepBatch | Form, labels: Labels | None) -> None:
        self._guard()
        before = self._written
        names, streams = self._take_names()
        form = batch if isinstance(batch, Form) else self._filled(batch)
        rows, columns = form.rows, form.columns
        site, layout = form.names()
        if site >= streams[SITES].rows or layout >= streams[LAYOUTS].rows:
            raise ValueError("a record names a site or a layout that was never given a number")
        data = form.message()
        if len(data) > LIMIT_BATCH:
            raise StoreError(f"one step has more records than a store holds ({LIMIT_BATCH >> 20} MB of them)")
        if before.lengths[INDEX] + 2 * ENTRY.itemsize > LIMIT_INDEX:  # the end mark needs room, too
            raise StoreError(f"more steps than a store holds ({LIMIT_INDEX // ENTRY.itemsize:,})")
        digest = self._sums.digest(self._keys, self._setting, columns["site"], columns["checksum"], columns["status"])
        chain = chained(before.chain, step, digest)
        entry, crc = self._entry(STEP_ENTRY, step, streams, data, rows, digest, chain)
        self._torn = True
        for name, piece in names.items():
            self._write(name, piece)
        if labels:
            self._label(step, labels)
        self._write(RECORDS, data)
        self._sync(*names, RECORDS)  # before the entry that vouches for it
        self._write(INDEX, entry)
        self._sync(INDEX)
        self._written = _Written(step, chain, before.rows + rows, crc, streams, self._lengths())
        self._torn = False
        if form is not batch:
            self._spare = form

    def _lengths(self) -> dict[str, int]:
        return {name: file.length for name, file in self._files.items()}

    def _take_back(self) -> None:
        """Shorten the files to what counts as written, where something stopped in between.

        Raises:
            OSError: they could not be shortened.
        """
        if not self._torn:
            return
        if self._dropping:
            self._settle()
        lengths = self._written.lengths
        if LABELS not in self._files:  # it may have been made, and not been noted
            with suppress(FileNotFoundError):
                os.unlink(LABELS, dir_fd=self._folder.secure().fd)
        # The index first: what no entry vouches for does not exist.
        for name in (INDEX, *(name for name in self._files if name != INDEX)):
            self._files[name].shorten(lengths.get(name, 0))
        self._torn = False

    def _label(self, step: int, labels: Labels) -> None:
        if LABELS not in self._files:
            self._files[LABELS] = Appended(self._folder, LABELS)
        if self._files[LABELS].length < LIMIT_LABELS:
            self._write(LABELS, encode_labels(step, labels))
            self._sync(LABELS)

    def restart(self) -> None:
        """Take back all steps; names stay. A reader sees the store as it was before its first step.

        Raises:
            StoreError: the files could not be shortened; the store ends where it did.
        """
        if self.failure is not None or self._written.step < 0:
            return
        before = self._written
        try:
            self._guard()
            before, first = self._written, self._first.lengths
            lengths = {**before.lengths, INDEX: first[INDEX], RECORDS: first[RECORDS], LABELS: 0}
            self._torn = True
            self._written = self._first._replace(names=before.names, lengths=lengths)
            self._take_back()
        except (OSError, StoreError) as error:
            self._written = before
            self._fail(reason(error) if isinstance(error, OSError) else str(error))

    def thin(self, steps: Collection[int], why: str) -> None:
        """Drop steps that were written, and say so in the index; the last step stays, whatever is asked.

        Args:
            steps: their numbers.
            why: a key of `thinned.OPTIONS`.

        Raises:
            StoreError: the rest could not be written anew; then all steps are still there.
        """
        from introspect_cli.store.thinning import exchange, write_without

        dropped = frozenset(steps) - {self._written.step}
        if self.failure is not None or not dropped:
            return
        try:
            self._guard()
            self._files[INDEX].secure()
            self._torn = self._dropping = True
            folder = self._folder.secure()
            self._anew = write_without(folder, self._rank, self._run_id, dropped, why, durable=self._durable)
            if self._anew is not None:
                exchange(folder, self._anew, durable=self._durable)
            self._take_back()
        except (OSError, StoreError) as error:
            with suppress(OSError, StoreError):  # else before the next step
                self._take_back()
            told = reason(error) if isinstance(error, OSError) else str(error)
            raise StoreError(f"cannot drop steps from {self._folder.path}: {told}") from None

    def _settle(self) -> None:
        """Go on with the files that are the store, where steps were being dropped, and remove the others."""
        from introspect_cli.store.thinning import clear, exchanged

        made, folder = self._anew, self._folder.secure()
        if made is not None and exchanged(folder, made):
            for name, file in ((INDEX, made.index), (RECORDS, made.records)):
                before, self._files[name] = self._files[name], file
                if before is not file:
                    before.close()
            lengths = {**self._written.lengths, INDEX: made.index.length, RECORDS: made.records.length}
            self._written = self._written._replace(chain=made.chain, rows=made.rows, crc=made.crc, lengths=lengths)
            first = {INDEX: made.header, RECORDS: self._first.lengths[RECORDS]}
            self._first = self._first._replace(crc=made.header_crc, lengths=first)
            self._generation = made.generation
            clear(folder, made.generation - 1)
        else:
            clear(folder, self._generation + 1)
        self._anew = None
        self._dropping = False

    def _guard(self) -> None:
        """Make sure that the files are ours to write, and hold what counts as written.

        Each is looked at once more when it is written to: whether its descriptor is still ours, and it still there.

        Raises:
            StoreError: they are another process's, or were removed.
            OSError: they cannot be reached.
        """
        if os.getpid() != self._pid:
            raise StoreError("a forked child does not write its parent's store")
        self._take_back()

    def _take_names(self) -> tuple[dict[str, bytes], Mapping[str, Stream]]:
        """By file name, what new names add, and the streams with them."""
        written = self._written.names
        if not any(interner.waits for _, interner in self._interners):
            return {}, written
        taken = {name: interner.rest(written[name]) for name, interner in self._interners}
        return {name: data for name, (data, _) in taken.items() if data}, {
            name: own for name, (_, own) in taken.items()
        }

    def _filled(self, batch: StepBatch) -> Form:
        form, self._spare = self._spare, None
        if form is None or form.rows != len(batch):
            form = self.form(len(batch))
        for name, column in self._columns(batch).items():
            form.put(name, column)
        return form

    def _columns(self, batch: StepBatch) -> dict[str, ColumnData]:
        rows = len(batch)
        columns: dict[str, ColumnData] = {
            "site": batch.site,
            "sequence": batch.sequence,
            "layout": batch.layout,
            "status": batch.status,
            "checksum": batch.checksum,
            "text": short_texts(batch.text, rows),
        }
        given = batch.given
        for column in self._schema:
            name, own = column.name, None
            if column.role == STATISTIC:
                own = batch.counts.get(name) if column.type == "<i8" else batch.floats.get(name)
                columns[name] = absent(column.type, rows) if own is None else own
            elif name == "sketch":
                own = batch.sketch
                columns[name] = np.zeros((rows, column.width), np.float32) if own is None else own
            elif name == SAMPLES.name:
                columns[name] = sample_lists(batch.samples, rows)
            elif name == "given":
                given = given_columns({}, rows) if given is None else given
                columns |= {"given": given.inputs, "forward": given.forward, "node": short_texts(given.node, rows)}
        return columns

    def _entry(
        self, kind: int, step: int, streams: Mapping[str, Stream], data: bytes, rows: int, digest: bytes, chain: bytes
    ) -> tuple[bytes, int]:
        """The next entry of the index, and the CRC-32 of the index with it."""
        sites, layouts, modules = streams[SITES], streams[LAYOUTS], streams[MODULES]
        entry = ENTRY_VALUES.pack(
            *(step, self._written.lengths[RECORDS], len(data), rows),
            *(sites.rows, layouts.rows, modules.rows),
            *(sites.length, layouts.length, modules.length),
            *(sites.crc, layouts.crc, modules.crc, self._sums.crc32(data)),
            *(digest, chain, kind, 0),
        )[:-4]
        covered = zlib.crc32(entry, self._written.crc)
        own = covered.to_bytes(4, "little")
        return entry + own, zlib.crc32(own, covered)

    def _write(self, name: str, data: bytes) -> None:
        self._files[name].append(data)

    def _sync(self, *names: str) -> None:
        if self._durable:
            for name in names:
                os.fsync(self._files[name].fd)

    def _fail(self, why: str) -> None:
        """Leave the files ending where the last write that succeeded ended, and write no more."""
        step = self._written.step
        ends = f"step {step}" if step >= 0 else "its beginning: no step was written"
        self.failure = f"cannot write to {self._folder.path}: {why}; the store ends at {ends}"
        if os.getpid() == self._pid:
            for file in self._files.values():
                with suppress(OSError):  # what follows the last index entry is not read anyway
                    file.cut()
        raise StoreError(self.failure)

    def close(self) -> None:
        """Mark the end of the rank's records and close; again is harmless.

        Raises:
            StoreError: the mark could not be written.
        """
        try:
            if self.failure is None and self._files:
                self._finish()
        finally:
            self.abandon()

    def _finish(self) -> None:
        try:
            self._guard()
            names, streams = self._take_names()
            for name, piece in names.items():
                self._write(name, piece)
            written = self._written
            entry, _ = self._entry(END_ENTRY, written.step, streams, b"", 0, bytes(16), written.chain)
            for name in STREAMS:
                self._write(name, END_OF_STREAM)
            self._sync(*STREAMS)
            self._write(INDEX, entry)
            self._sync(INDEX)
            self._written = written._replace(lengths=self._lengths())
        except (OSError, StoreError) as error:
            self._fail(reason(error) if isinstance(error, OSError) else str(error))

    def abandon(self) -> None:
        """Close the descriptors and write nothing: what a forked child does."""
        files, self._files = self._files, {}
        for file in files.values():
            file.close()
        self._folder.close()

    def _encode_sites(self, rows: Sequence[tuple[Site, SiteInfo]]) -> Encoded:
        encoded = encode_sites(rows)
        setting = np.array([site.kind in SETTING_KINDS for site, _ in rows])
        known = self._written.names[SITES].rows  # beyond it, what an append encoded that did not end
        self._keys = np.concatenate([self._keys[:known], np.asarray(encoded["key"])])
        self._setting = np.concatenate([self._setting[:known], setting])
        return encoded
