"""Writes what one rank records, a step at a time, so that a killed process loses nothing that was indexed.

The problem: the process may end between any two instructions, the disk may fill, the directory may go away, and a
step must cost the training less than a millisecond. The way: new names, then the step's batch, then its index
entry, each with one plain write; what no index entry vouches for does not exist. The first failure ends the
recording, never the script.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.records import COUNT_STATS, SETTING_KINDS, Layout, ModuleInfo, Site, SiteInfo
from introspect_cli.store.arrow import END_OF_STREAM, encode_batch, schema_message
from introspect_cli.store.columns import ColumnData, Texts, integer_lists, storable, text_lists, texts
from introspect_cli.store.digest import chained, step_digest
from introspect_cli.store.files import Folder, reason, write_all
from introspect_cli.store.format import (
    END_ENTRY,
    ENTRY,
    FIRST_CHAIN,
    HEADER,
    LAYOUT_COLUMNS,
    LIMIT_BATCH,
    LIMIT_INDEX,
    LIMIT_TEXT,
    MAGIC,
    MODULE_COLUMNS,
    NARROW,
    SITE_COLUMNS,
    STEP_ENTRY,
    float_columns,
    record_columns,
)
from introspect_cli.store.interner import Interner
from introspect_cli.store.locks import take
from introspect_cli.store.names import FORMAT, INDEX, LAYOUTS, MODULES, RECORDS, SITES, STREAMS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.store.batch import StepBatch


class RankWriter:
    """One rank's streams and index, open for appending.

    `site`, `layout` and `modules` may be called from several threads; `append` and `close` from one at a time.

    Attributes:
        bytes_written: bytes in this rank's files.
        rows_written: records in them.
        failure: why nothing more is written, or None while all is well.
    """

    def __init__(self, folder: Folder, rank: int, bits: int, run_id: bytes) -> None:
        self.bytes_written = 0
        self.rows_written = 0
        self.failure: str | None = None
        self._folder = folder
        self._rank = rank
        self._bits = bits
        self._pid = os.getpid()
        self._keys = np.zeros(0, np.uint64)
        self._setting = np.zeros(0, np.bool_)
        self._sites: Interner[tuple[Site, SiteInfo]] = Interner(SITE_COLUMNS, self._encode_sites)
        self._layouts: Interner[Layout] = Interner(LAYOUT_COLUMNS, _encode_layouts)
        self._modules: Interner[ModuleInfo] = Interner(MODULE_COLUMNS, _encode_modules)
        self._schema = record_columns(bits)
        self._step = -1
        self._chain = FIRST_CHAIN
        self._offset = 0
        self._crc = 0
        self._fds: dict[str, int] = {}
        self._lengths: dict[str, int] = {}
        try:
            self._start(run_id)
        except OSError as error:
            self.abandon()
            raise StoreError(f"cannot write to {folder.path}: {reason(error)}") from None

    def _start(self, run_id: bytes) -> None:
        for name in (*STREAMS, INDEX):
            self._fds[name] = self._folder.create(name)
            self._lengths[name] = 0
        take(self._fds[INDEX])
        for name, schema in ((SITES, SITE_COLUMNS), (LAYOUTS, LAYOUT_COLUMNS), (MODULES, MODULE_COLUMNS)):
            self._write(name, schema_message(schema))
        first = schema_message(self._schema)
        self._write(RECORDS, first)
        self._offset = len(first)
        header = bytearray(HEADER.pack(MAGIC, FORMAT, ENTRY.itemsize, self._rank, self._bits, run_id, 0))
        header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
        self._crc = zlib.crc32(header)
        self._write(INDEX, bytes(header))

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

    def append(self, step: int, batch: StepBatch) -> None:
        """Write one step; after a failure, nothing.

        Raises:
            ValueError: the step does not come after the last one, or the batch names a site or layout by a number
                that was not given out.
            StoreError: it could not be written; once, and the store ends at the step before.
        """
        if self.failure is not None:
            return
        if step <= self._step:
            raise ValueError(f"step {step} was appended after step {self._step}")
        try:
            self._append(step, batch)
        except (OSError, StoreError) as error:
            self._fail(reason(error) if isinstance(error, OSError) else str(error))

    def _append(self, step: int, batch: StepBatch) -> None:
        self._guard()
        names = self._take_names()
        rows = len(batch)
        if rows and (batch.site.max() >= self._sites.count or batch.layout.max() >= self._layouts.count):
            raise ValueError("a record names a site or a layout that was never given a number")
        data = b"".join(encode_batch(self._schema, self._columns(batch), rows))
        if len(data) > LIMIT_BATCH:
            raise StoreError(f"one step has more records than a store holds ({LIMIT_BATCH >> 20} MB of them)")
        if self._lengths[INDEX] + 2 * ENTRY.itemsize > LIMIT_INDEX:  # the end mark needs room, too
            raise StoreError(f"more steps than a store holds ({LIMIT_INDEX // ENTRY.itemsize:,})")
        digest = step_digest(self._keys[batch.site], batch.checksum, batch.status, self._setting[batch.site])
        chain = chained(self._chain, step, digest)
        entry = self._entry(STEP_ENTRY, step, len(data), rows, zlib.crc32(data), digest, chain)
        for name, piece in names.items():
            self._write(name, piece)
        self._write(RECORDS, data)
        self._write(INDEX, entry)
        self._step, self._chain = step, chain
        self._offset += len(data)
        self.rows_written += rows

    def _guard(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError("a forked child does not write its parent's store")
        if os.fstat(self._fds[INDEX]).st_nlink == 0:
            raise StoreError("its files were removed")

    def _take_names(self) -> dict[str, bytes]:
        streams = ((SITES, self._sites), (LAYOUTS, self._layouts), (MODULES, self._modules))
        taken = ((name, interner.take()) for name, interner in streams)
        return {name: data for name, data in taken if data}

    def _columns(self, batch: StepBatch) -> dict[str, ColumnData]:
        rows = len(batch)
        columns: dict[str, ColumnData] = {
            "site": batch.site,
            "sequence": batch.sequence,
            "layout": batch.layout,
            "status": batch.status,
            "checksum": batch.checksum,
            "text": _short(batch.text, rows),
        }
        for name in COUNT_STATS:
            columns[name] = batch.counts[name] if name in batch.counts else np.full(rows, -1, np.int64)
        for name in float_columns(self._bits):
            own = batch.floats.get(name)
            columns[name] = own if own is not None else np.full(rows, np.nan, _float_type(name))
        sketch = next((column for column in self._schema if column.name == "sketch"), None)
        if sketch is not None:
            own = batch.sketch
            columns["sketch"] = own if own is not None else np.zeros((rows, sketch.width), np.float32)
        return columns

    def _entry(
        self, kind: int, step: int, length: int, rows: int, batch_crc: int, digest: bytes, chain: bytes
    ) -> bytes:
        entry = np.zeros(1, ENTRY)
        streams = (("sites", self._sites), ("layouts", self._layouts), ("modules", self._modules))
        for name, interner in streams:
            entry[f"n_{name}"] = interner.count
            entry[f"{name}_length"] = interner.length
            entry[f"{name}_crc"] = interner.crc
        entry["kind"], entry["step"], entry["rows"] = kind, step, rows
        entry["offset"], entry["length"], entry["batch_crc"] = self._offset, length, batch_crc
        entry["digest"], entry["chain"] = np.void(digest), np.void(chain)
        covered = zlib.crc32(entry.tobytes()[:-4], self._crc)
        entry["crc"] = covered
        data = entry.tobytes()
        self._crc = zlib.crc32(data[-4:], covered)
        return data

    def _write(self, name: str, data: bytes) -> None:
        write_all(self._fds[name], [data])
        self._lengths[name] += len(data)
        self.bytes_written += len(data)

    def _fail(self, why: str) -> None:
        """Leave the files ending where the last write that succeeded ended, and write no more."""
        ends = f"step {self._step}" if self._step >= 0 else "its beginning: no step was written"
        self.failure = f"cannot write to {self._folder.path}: {why}; the store ends at {ends}"
        if os.getpid() == self._pid:
            for name, fd in self._fds.items():
                with suppress(OSError):  # what follows the last index entry is not read anyway
                    os.ftruncate(fd, self._lengths[name])
        raise StoreError(self.failure)

    def close(self) -> None:
        """Mark the end of the rank's records and close; again is harmless.

        Raises:
            StoreError: the mark could not be written.
        """
        try:
            if self.failure is None and self._fds:
                self._finish()
        finally:
            self.abandon()

    def _finish(self) -> None:
        try:
            self._guard()
            for name, piece in self._take_names().items():
                self._write(name, piece)
            step = max(self._step, 0) if self.rows_written else self._step
            entry = self._entry(END_ENTRY, step, 0, 0, 0, bytes(16), self._chain)
            for name in STREAMS:
                self._write(name, END_OF_STREAM)
            self._write(INDEX, entry)
        except (OSError, StoreError) as error:
            self._fail(reason(error) if isinstance(error, OSError) else str(error))

    def abandon(self) -> None:
        """Close the descriptors and write nothing: what a forked child does."""
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            os.close(fd)
        self._folder.close()

    def _encode_sites(self, rows: Sequence[tuple[Site, SiteInfo]]) -> Mapping[str, ColumnData]:
        # As the texts will be stored, so that the key can be computed again from what is stored.
        sites = [replace(site, fqn=storable(site.fqn), path=storable(site.path)) for site, _ in rows]
        infos = [info for _, info in rows]
        keys = np.array([site.key() for site in sites], np.uint64)
        setting = np.array([site.kind in SETTING_KINDS for site in sites])
        self._keys = np.concatenate([self._keys, keys])
        self._setting = np.concatenate([self._setting, setting])
        return {
            "key": keys,
            "phase": texts([site.phase.value for site in sites]),
            "kind": texts([site.kind.value for site in sites]),
            "fqn": texts([site.fqn for site in sites]),
            "call": np.array([site.call for site in sites], np.uint32),
            "path": texts([site.path for site in sites]),
            "module_class": texts([info.module_class for info in infos]),
            "op": texts([info.op for info in infos]),
            "source": texts([info.source for info in infos]),
        }


def _encode_layouts(rows: Sequence[Layout]) -> Mapping[str, ColumnData]:
    return {
        "shape": integer_lists([row.shape for row in rows]),
        "dtype": texts([row.dtype for row in rows]),
        "device": texts([row.device for row in rows]),
        "strides": texts([row.strides for row in rows]),
    }


def _encode_modules(rows: Sequence[ModuleInfo]) -> Mapping[str, ColumnData]:
    return {
        "fqn": texts([row.fqn for row in rows]),
        "module_class": texts([row.module_class for row in rows]),
        "source": texts([row.source for row in rows]),
        "parameters": text_lists([row.parameters for row in rows]),
        "buffers": text_lists([row.buffers for row in rows]),
        "aliases": text_lists([row.aliases for row in rows]),
    }


def _float_type(name: str) -> type[np.floating]:
    return np.float32 if name in NARROW else np.float64


def _short(values: Sequence[str], rows: int) -> Texts:
    if not values or not any(values):
        return Texts(np.zeros(rows + 1, np.int32), b"")
    return texts([value[:LIMIT_TEXT] for value in values])
