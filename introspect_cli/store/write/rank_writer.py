"""Writes what one rank records, a step at a time, so that a killed process loses nothing that was indexed.

The process may end between any two instructions, the disk may fill, the directory may go away, and a step must cost the
training less than a millisecond. So it writes new names, then the step's batch, then its index entry, each with one
plain write; what no index entry vouches for does not exist. The first failure ends the recording, never the script.
"""

from __future__ import annotations

import functools
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.records import SETTING_KINDS, Kind, Layout, ModuleInfo, Site, SiteInfo
from introspect_cli.store.files.folders import (
    INDEX,
    LAYOUTS,
    MODULES,
    RECORDS,
    SITES,
    STREAMS,
    Folder,
    reason,
)
from introspect_cli.store.format.arrow import END_OF_STREAM, Message, Pieces
from introspect_cli.store.format.arrow_schema import Schema, schema_message
from introspect_cli.store.format.documents import LABELS, LIMIT_LABELS, encode_labels
from introspect_cli.store.format.index import chained, step_digest
from introspect_cli.store.format.schemas import (
    END_ENTRY,
    ENTRY,
    ENTRY_VALUES,
    LIMIT_BATCH,
    LIMIT_INDEX,
    STEP_ENTRY,
    Columns,
    index_header,
)
from introspect_cli.store.format.totals import LIMIT_TOTALS, TOTALS, StepTotals
from introspect_cli.store.write.names import Encoded, Interner, Stream, encode_layouts, encode_modules, encode_sites
from introspect_cli.store.write.rank_files import RankFiles, Written

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from introspect_cli.labels import Labels
    from introspect_cli.store.format.batch import StepBatch


class RankWriter:
    """One rank's streams and index, open for appending.

    `site`, `layout` and `modules` may be called from several threads; `append` and `close` from one at a time.

    Attributes:
        failure: why nothing more is written, or None while all is well.
        digest: of the last step that was written.
        compiled: computes the same as zlib's `crc32` and `step_digest`, of what lies at addresses; None without.
    """

    def __init__(
        self,
        folder: Folder,
        rank: int,
        schema: Schema,
        run_id: bytes,
        *,
        durable: bool = False,
        totals: bool = False,
    ) -> None:
        self.failure: str | None = None
        self.digest = b""
        self.compiled: Any = None
        self._rank = rank
        self._totals = StepTotals() if totals else None
        self._keys = np.zeros(0, np.uint64)
        self._setting = np.zeros(0, np.bool_)
        columns = Columns(schema)
        self._sites: Interner[tuple[Site, SiteInfo]] = Interner(columns.sites, self._encode_sites)
        self._layouts: Interner[Layout] = Interner(columns.layouts, self._encode_layouts)
        self._modules: Interner[ModuleInfo] = Interner(columns.modules, encode_modules)
        self._interners = ((SITES, self._sites), (LAYOUTS, self._layouts), (MODULES, self._modules))
        self._schema = schema
        header = index_header(rank, run_id, columns.described())
        schemas = (columns.sites, columns.layouts, columns.modules, schema)
        begun = dict(zip((SITES, LAYOUTS, MODULES, RECORDS), map(schema_message, schemas), strict=True))
        try:
            self._files = RankFiles(folder, header, begun, durable=durable)
        except OSError as error:
            raise StoreError(f"cannot write to {folder.path}: {reason(error)}") from None
        self._files.begin({name: interner.begun for name, interner in self._interners})

    def kinds(self) -> frozenset[Kind]:
        """Kinds of all sites there are."""
        return frozenset(site.kind for site in self._sites.keys() if isinstance(site, Site))  # noqa: SIM118 - no dict

    @property
    def last_step(self) -> int | None:
        """The last step written; None where there is none."""
        return self._files.written.step if self._files.written.step >= 0 else None

    @property
    def rows_written(self) -> int:
        """Records in all steps."""
        return self._files.written.rows

    @property
    def bytes_written(self) -> int:
        """Bytes in this rank's files that count as written."""
        return sum(self._files.written.lengths.values())

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

    def message(self, rows: int) -> Message:
        """The message of a step of so many records, to be filled in, and filled in anew for the next step."""
        return Message(self._schema, rows)

    def append(self, step: int, batch: StepBatch | Message, labels: Labels | None = None) -> None:
        """Write one step, with what its framework calls it; after a failure, nothing.

        Raises:
            ValueError: the step does not come after the last one, or the batch names a site or layout by a number
                that was not given out.
            StoreError: it could not be written; once, and the store ends at the step before.
            KeyboardInterrupt: one came while the step was written; it was then written all the same, if it could be.
        """
        if self.failure is not None:
            return
        if step <= self._files.written.step:
            raise ValueError(f"step {step} was appended after step {self._files.written.step}")
        try:
            self._append(step, batch, labels)
        except (OSError, StoreError) as error:
            self._fail(reason(error))
        except KeyboardInterrupt:
            if step > self._files.written.step:  # once: a second interrupt is meant
                with suppress(Exception):  # none may take the interrupt's place; what lasts, the next step meets
                    self._append(step, batch, labels)
            raise

    def _append(self, step: int, batch: StepBatch | Message, labels: Labels | None) -> None:
        self._files.guard()
        before = self._files.written
        names, streams = self._take_names()
        message = batch if isinstance(batch, Message) else self._filled(batch)
        rows, columns = message.rows, message.columns
        if message.largest("site") >= streams[SITES].rows or message.largest("layout") >= streams[LAYOUTS].rows:
            raise ValueError("a record names a site or a layout that was never given a number")
        data = message.pieces()
        if sum(map(len, data)) > LIMIT_BATCH:
            raise StoreError(f"one step has more records than a store holds ({LIMIT_BATCH >> 20} MB of them)")
        if before.lengths[INDEX] + 2 * ENTRY.itemsize > LIMIT_INDEX:  # the end mark needs room, too
            raise StoreError(f"more steps than a store holds ({LIMIT_INDEX // ENTRY.itemsize:,})")
        digest = _digest(self.compiled, columns, self._keys, self._setting)
        chain = chained(before.chain, step, digest)
        entry, crc = self._entry(
            STEP_ENTRY, step, streams, data, rows, digest, chain, _crc(self.compiled, data, message.address)
        )
        if labels and before.lengths.get(LABELS, 0) < LIMIT_LABELS:
            names[LABELS] = encode_labels(step, labels)
        if self._totals is not None and before.lengths.get(TOTALS, 0) < LIMIT_TOTALS:
            names[TOTALS] = self._totals.encoded(step, digest, columns, before.lengths.get(TOTALS, 0))
        self._files.commit(
            {**{name: [new] for name, new in names.items()}, RECORDS: data},
            entry,
            Written(step, chain, before.rows + rows, crc, streams, before.lengths),
        )
        self.digest = digest

    def restart(self) -> None:
        """Take back all steps; names stay. A reader sees the store as it was before its first step.

        Raises:
            StoreError: the files could not be shortened; the store ends where it did.
        """
        if self.failure is not None or self.last_step is None:
            return
        try:
            self._files.restart()
        except (OSError, StoreError) as error:
            self._fail(reason(error))

    def thin(self, steps: Collection[int], why: str) -> None:
        """Drop steps that were written, and say in the index why (of `index.OPTIONS`); the last step always stays.

        Raises:
            StoreError: the rest could not be written anew; then all steps are still there.
        """
        dropped = frozenset(steps) - {self._files.written.step}
        if self.failure is None and dropped:
            self._files.drop(self._rank, dropped, why)

    def _take_names(self) -> tuple[dict[str, bytes], Mapping[str, Stream]]:
        """By file name, what new names add, and the streams with them."""
        written = self._files.written.names
        if not any(interner.waits for _, interner in self._interners):
            return {}, written
        taken = {name: interner.rest(written[name]) for name, interner in self._interners}
        return {name: data for name, (data, _) in taken.items() if data}, {
            name: stream for name, (_, stream) in taken.items()
        }

    def _filled(self, batch: StepBatch) -> Message:
        message = self.message(len(batch))
        for name, column in batch.columns(self._schema).items():
            message.put(name, column)
        return message

    def _entry(
        self,
        kind: int,
        step: int,
        streams: Mapping[str, Stream],
        data: Pieces,
        rows: int,
        digest: bytes,
        chain: bytes,
        crc_of_data: int = 0,
    ) -> tuple[bytes, int]:
        """The next entry of the index, and the CRC-32 of the index with it."""
        sites, layouts, modules = streams[SITES], streams[LAYOUTS], streams[MODULES]
        entry = ENTRY_VALUES.pack(
            *(step, self._files.written.lengths[RECORDS], sum(map(len, data)), rows),
            *(sites.rows, layouts.rows, modules.rows),
            *(sites.length, layouts.length, modules.length),
            *(sites.crc, layouts.crc, modules.crc, crc_of_data),
            *(digest, chain, kind, 0),
        )[:-4]
        covered = zlib.crc32(entry, self._files.written.crc)
        crc = covered.to_bytes(4, "little")
        return entry + crc, zlib.crc32(crc, covered)

    def _fail(self, why: str) -> None:
        """Leave the files ending where the last write that succeeded ended, and write no more."""
        step = self.last_step
        ends = f"step {step}" if step is not None else "its beginning: no step was written"
        self.failure = f"cannot write to {self._files.folder.path}: {why}; the store ends at {ends}"
        self._files.cut()
        raise StoreError(self.failure)

    def close(self) -> None:
        """Mark the end of the rank's records and close; again is harmless.

        Raises:
            StoreError: the mark could not be written.
        """
        try:
            if self.failure is None and self._files.are_open:
                self._finish()
        finally:
            self.abandon()

    def _finish(self) -> None:
        try:
            self._files.guard()
            names, streams = self._take_names()
            written = self._files.written
            entry, _ = self._entry(END_ENTRY, written.step, streams, [], 0, bytes(16), written.chain)
            ends: dict[str, Pieces] = {name: [names.get(name, b""), END_OF_STREAM] for name in STREAMS}
            self._files.commit(ends, entry, written)
        except (OSError, StoreError) as error:
            self._fail(reason(error))

    def abandon(self) -> None:
        """Close the descriptors and write nothing: what a forked child does."""
        self._files.close()

    def _encode_sites(self, rows: Sequence[tuple[Site, SiteInfo]]) -> Encoded:
        encoded = encode_sites(rows)
        setting = np.array([site.kind in SETTING_KINDS for site, _ in rows])
        counted = self._files.written.names[SITES].rows  # beyond it, what an append encoded that did not end
        self._keys = np.concatenate([self._keys[:counted], np.asarray(encoded["key"])])
        self._setting = np.concatenate([self._setting[:counted], setting])
        if self._totals is not None:
            self._totals.name_sites(counted, np.asarray(encoded["key"]), [site.kind for site, _ in rows])
        return encoded

    def _encode_layouts(self, rows: Sequence[Layout]) -> Encoded:
        if self._totals is not None:
            self._totals.name_layouts(self._files.written.names[LAYOUTS].rows, list(rows))
        return encode_layouts(rows)


def _digest(compiled: Any, columns: Mapping[str, NDArray[Any]], keys: NDArray[Any], setting: NDArray[Any]) -> bytes:
    """The digest of a step; `keys` and `setting` are by site."""
    site, checksum, status = columns["site"], columns["checksum"], columns["status"]
    if compiled is None:
        return step_digest(keys[site], checksum, status, setting[site])
    sums = np.zeros(2, np.uint64)
    compiled.step_digest(len(site), *(each.ctypes.data for each in (site, checksum, status, keys, setting, sums)))
    return sums.tobytes()


def _crc(compiled: Any, data: Pieces, address: int) -> int:
    """The CRC-32 of pieces, of which the first lies at an address."""
    first = 0 if compiled is None else compiled.crc32(address, len(data[0]), 0)
    return functools.reduce(lambda crc, piece: zlib.crc32(piece, crc), data if compiled is None else data[1:], first)
