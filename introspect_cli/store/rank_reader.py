"""Reads what one rank recorded: the index at once, names when asked for, records one step at a time.

Comparing must not read what digests show to be equal, nor trust a byte before it is checked, nor be upset by a writer
that is still at work. The file's descriptor stays open, a step is one read of the bytes that its index entry names, its
CRC is taken over those very bytes, and columns are views of them.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.records import Layout, ModuleInfo, Record, Status, Summary
from introspect_cli.store import format1
from introspect_cli.store.arrow import END_OF_STREAM, Batch, Malformed, Schema, decode_batch, schema_message
from introspect_cli.store.batch import GivenColumns, StepBatch, has_infinities, record_stats, samples_of, statistics
from introspect_cli.store.columns import Harmless
from introspect_cli.store.compiled import ALIKE, OTHER, UNREAD
from introspect_cli.store.files import (
    INDEX,
    LAYOUTS,
    MODULES,
    RECORDS,
    SITES,
    DamageError,
    Folder,
    Handle,
    Room,
    lock_held,
    unreadable,
)
from introspect_cli.store.format import LIMIT_INDEX, LIMIT_TEXT, SAMPLES, STATISTIC
from introspect_cli.store.index import EMPTY, Entries, Index, StepEntry, parse_index
from introspect_cli.store.labels import LABELS, LIMIT_LABELS
from introspect_cli.store.labels import decode as decode_labels
from introspect_cli.store.names import SiteTable, decode_names, layouts_of, modules_of, no_rows
from introspect_cli.store.repeated import Repeated, repeated
from introspect_cli.store.thinned import records_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.labels import Labels
    from introspect_cli.store.columns import ColumnData

_STATUSES = len(Status)
_MEASURED = (Status.OBSERVED, Status.PARTIAL)


class RankReader:
    """One rank of a run, as it was when it was opened.

    Attributes:
        rank: its number.
        path: its directory, for messages.
        running: whether a process was still writing it.
        ended: whether its writer closed it properly.
        entries: structured array of `format.ENTRY`, one a step: `step`, `rows`, `digest`, `chain`, ...
        run_id: 16 bytes that its index names as the run's; empty where it has no header yet.
        cut: what is missing of its records although its writer closed it; "" for nothing.
        thinned: steps that were recorded and then dropped.
    """

    def __init__(self, run: Folder, rank: int, *, damaged: bool = False) -> None:
        """Open a rank.

        Args:
            run: the run's directory.
            rank: its number.
            damaged: whether to open one whose records are cut off too, up to the last step that is whole.

        Raises:
            StoreError: it is damaged.
        """
        self.cut = ""
        self._damaged = damaged
        self.rank = rank
        self.path = f"{run.path}/rank{rank}"
        self._run = run
        self._records: Handle | None = None
        index, self.running = self._open_index()
        while True:
            try:
                self._take(index)
                break
            except DamageError:
                # Where steps were dropped just now, another index names other records.
                again, self.running = self._open_index()
                if again.generation == index.generation:
                    raise
                index = again

    def _take(self, index: Index) -> None:
        self._index = index
        self.ended = index.ended
        self.run_id = index.run_id
        self.thinned = index.thinned
        self._schema = index.columns.records
        self._file_of_records = records_name(index.generation)
        self.entries = self._indexed_and_there(index)

    def _open_index(self) -> tuple[Index, bool]:
        try:
            handle = self._file(INDEX)
        except FileNotFoundError:
            return EMPTY, False
        try:
            running = lock_held(handle.fd)
            if handle.size() > LIMIT_INDEX:
                raise DamageError(handle.path, "it is larger than any index")
            data = handle.read(0, LIMIT_INDEX)
        except OSError as error:
            raise unreadable(handle.path, error) from None
        finally:
            handle.close()
        return parse_index(data, self.rank, handle.path), running

    def _indexed_and_there(self, index: Index) -> Entries:
        entries = index.entries
        if index.last is None:
            return entries
        records = self._open(self._file_of_records)
        if self.running:  # its steps may be dropped while they are read
            self._records = records
        first = schema_message(self._schema)
        if records.read(0, len(first)) != first:
            raise DamageError(records.path, "its columns are not those that its index names")
        # Only a power cut leaves an index that is ahead of the records; then the records decide.
        there = entries["offset"] + entries["length"] <= np.uint64(records.size())
        whole = int(np.argmin(there)) if not there.all() else len(entries)
        if whole < len(entries) and self.ended:
            self.cut = f"it ends before step {int(entries['step'][whole])}, which the index names"
            if not self._damaged:
                raise DamageError(records.path, self.cut)
        return entries[:whole]

    def _file(self, name: str) -> Handle:
        folder = self._run.folder(f"rank{self.rank}")
        try:
            return folder.file(name)
        finally:
            folder.close()

    def beside(self, name: str, limit: int) -> bytes:
        """The bytes of another file of the rank, at most `limit` of them.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it cannot be read, or is larger.
        """
        folder = self._run.folder(f"rank{self.rank}")
        try:
            return folder.read_file(name, limit)
        finally:
            folder.close()

    def _open(self, name: str) -> Handle:
        try:
            return self._file(name)
        except FileNotFoundError:
            raise DamageError(f"{self.path}/{name}", "it is missing") from None

    def close(self) -> None:
        """Close the files; batches already read stay valid."""
        if self._records is not None:
            self._records.close()
            self._records = None

    def check_end(self, name: str) -> None:
        """Make sure of the end of the stream `name` (`names.STREAMS`) of a rank that was closed.

        Nobody reads what follows the last indexed byte; that it is as it was written concerns `verify` alone.

        Raises:
            StoreError: it is missing, or not what was written.
        """
        last = self._index.last
        if last is None or not self.ended or (self.cut and name == RECORDS):
            return
        end = last["offset"] if name == RECORDS else last[f"{name.removesuffix('.arrow')}_length"]
        handle = self._open(self._file_of_records if name == RECORDS else name)
        try:
            found = handle.read(int(end), len(END_OF_STREAM) + 1)
        finally:
            handle.close()
        if found != END_OF_STREAM:
            raise DamageError(handle.path, "its end is not the one that was written")

    # --- steps

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.entries)

    @cached_property
    def steps(self) -> tuple[StepEntry, ...]:
        """All steps, in order. For many thousands, use `entries`."""
        return tuple(self.entry(row) for row in range(len(self.entries)))

    def entry(self, row: int) -> StepEntry:
        """The `row`-th step's entry."""
        entry = self.entries[row]
        return StepEntry(
            int(entry["step"]),
            int(entry["offset"]),
            int(entry["length"]),
            int(entry["rows"]),
            entry["digest"].tobytes(),
            entry["chain"].tobytes(),
        )

    @property
    def has_samples(self) -> bool:
        """Whether sums of samples were kept."""
        return any(column.name == SAMPLES.name for column in self._schema)

    @property
    def last_step(self) -> int | None:
        """Number of the last step that is whole; None where there is none."""
        return int(self.entries["step"][-1]) if len(self.entries) else None

    def rows_in(self, rows: Any) -> int:
        """How many records some steps (positions among the entries) have."""
        return int(self.entries["rows"][rows].sum(dtype=np.int64))

    def row_of(self, step: int) -> int:
        """Position of `step` among the entries.

        Raises:
            KeyError: it was not recorded.
        """
        row = int(np.searchsorted(self.entries["step"], step))
        if row == len(self.entries) or self.entries["step"][row] != step:
            raise KeyError(step)
        return row

    def __contains__(self, step: int) -> bool:
        try:
            self.row_of(step)
        except KeyError:
            return False
        return True

    @cached_property
    def labels(self) -> dict[int, Labels]:
        """What the framework calls each step, by number; steps without a name of its own are left out.

        Raises:
            StoreError: the file is damaged.
        """
        folder = self._run.folder(f"rank{self.rank}") if len(self) else None
        try:
            data = folder.read_file(LABELS, LIMIT_LABELS + (1 << 16)) if folder is not None else b""
        except FileNotFoundError:
            return {}
        finally:
            if folder is not None:
                folder.close()
        found = decode_labels(data, f"{self.path}/{LABELS}")
        return {step: found[step] for step in self.entries["step"].tolist() if step in found}

    # --- names

    @cached_property
    def sites(self) -> SiteTable:
        """All sites, by number.

        Raises:
            StoreError: the stream is damaged.
        """
        return SiteTable(self._names("sites"), f"{self.path}/{SITES}")

    @cached_property
    def layouts(self) -> list[Layout]:
        """All layouts, by number.

        Raises:
            StoreError: the stream is damaged.
        """
        return layouts_of(self._names("layouts"), f"{self.path}/{LAYOUTS}")

    @cached_property
    def modules(self) -> list[ModuleInfo]:
        """The module tree, in the order it was found: each module as it was at first.

        Raises:
            StoreError: the stream is damaged.
        """
        first: dict[str, ModuleInfo] = {}
        for module in self.module_rows:
            first.setdefault(module.fqn, module)
        return list(first.values())

    @cached_property
    def module_rows(self) -> list[ModuleInfo]:
        """All rows of modules in order: a module that changed is there again, with the step from which that holds.

        Raises:
            StoreError: the stream is damaged.
        """
        return modules_of(self._names("modules"), f"{self.path}/{MODULES}")

    def _names(self, stream: str) -> dict[str, ColumnData]:
        """The columns of `sites`, `layouts` or `modules`, as far as the index vouches for them."""
        last, schema = self._index.last, getattr(self._index.columns, stream)
        if last is None:
            return no_rows(schema)
        length, crc, count = int(last[f"{stream}_length"]), int(last[f"{stream}_crc"]), int(last[f"n_{stream}"])
        handle = self._open(f"{stream}.arrow")
        try:
            data = handle.read(0, length)
        except OSError as error:
            raise unreadable(handle.path, error) from None
        finally:
            handle.close()
        if len(data) < length:
            raise DamageError(handle.path, "it ends before the names that the index counts")
        if zlib.crc32(data) != crc:
            raise DamageError(handle.path, "its bytes are not those that were indexed")
        return decode_names(data, schema, count, handle.path)

    # --- records

    def read(self, step: int, room: Room | None = None) -> StepBatch:
        """All records of a step, as views of the bytes just read and checked.

        Args:
            step: which.
            room: memory to read into: what is read into it next takes the place of these records.

        Raises:
            KeyError: the step was not recorded.
            StoreError: its bytes are damaged.
        """
        return self.read_row(self.row_of(step), room)

    def read_row(self, row: int, room: Room | None = None) -> StepBatch:
        """All records of the `row`-th step; see `read`."""
        entry = self.entries[row]
        if self._records is None:
            self._records = self._open(self._file_of_records)
        records = self._records
        step, length = int(entry["step"]), int(entry["length"])
        known = room.known if room is not None else None
        found = UNREAD
        if isinstance(known, _Known) and known.repeated is not None:
            found = known.repeated.read(records.fd, entry)
            if found == ALIKE:
                return self._given(known.now())
        data = room.of(length) if found == OTHER and room is not None else self._bytes(records, entry, room)
        try:
            batch, out = self._decoded(memoryview(data), room)
        except Malformed as error:
            raise DamageError(records.path, f"step {step}: {error}") from None
        if batch.length != length or batch.rows != entry["rows"]:
            raise DamageError(records.path, f"step {step} has another length than its index entry says")
        if batch.rows and (
            out.site.max() >= entry["n_sites"]
            or out.layout.max() >= entry["n_layouts"]
            or out.status.max() >= _STATUSES
        ):
            raise DamageError(records.path, f"a record of step {step} names a site, layout or status that is not there")
        if out.given is not None and self._index.format > 1 and not out.given.within(int(entry["n_sites"])):
            raise DamageError(records.path, f"an operator of step {step} names a site that is not there")
        if isinstance(known, _Known) and known.batch is batch and known.repeated is None and room is not None:
            room.known = known._replace(step=out, repeated=repeated(data, batch, out, entry))
        return self._given(out)

    def _given(self, step: StepBatch) -> StepBatch:
        return format1.with_given(step, self.sites) if self._index.format == 1 else step

    def _bytes(self, records: Handle, entry: Any, room: Room | None) -> bytes | memoryview:
        """What an index entry vouches for, read and checked."""
        offset, length = int(entry["offset"]), int(entry["length"])
        try:
            data = records.read(offset, length) if room is None else records.read_into(offset, room.of(length))
        except OSError as error:
            raise unreadable(records.path, error) from None
        if len(data) != length or zlib.crc32(data) != entry["batch_crc"]:
            raise DamageError(records.path, f"the records of step {entry['step']} are not those that were indexed")
        return data

    def _decoded(self, data: memoryview, room: Room | None) -> tuple[Batch, StepBatch]:
        """Bytes as a batch and as columns; those made before where a room has the like of it again.

        Raises:
            Malformed: the bytes are not what a writer would have written.
        """
        known = room.known if room is not None else None
        if isinstance(known, _Known) and known.batch.fits(data) and known.step.is_possible():
            return known.batch, replace(
                known.now(), site=known.step.site.view()
            )  # sites that are the same array are equal
        batch = decode_batch(self._schema, data)
        out = _step_batch(batch.columns, self._schema)
        if room is not None:
            room.known = _Known(batch, out) if _views(out, batch.columns) else None
        return batch, out

    def record(self, batch: StepBatch, row: int, step: int) -> Record:
        """One row as a record, with derived statistics filled in.

        Raises:
            StoreError: its site or layout is damaged.
        """
        site, info = self.sites[int(batch.site[row])]
        layout = self.layouts[int(batch.layout[row])]
        stats = record_stats(batch.counts, batch.floats, min(layout.numel, (1 << 63) - 1), row)
        status = Status(int(batch.status[row]))
        sketch: tuple[float, ...] = ()
        if batch.sketch is not None and status in _MEASURED:
            sketch = tuple(batch.sketch[row].tolist())
        summary = Summary(status, layout, int(batch.checksum[row]), stats, sketch, batch.text[row])
        given = batch.given.row(row) if batch.given is not None else None
        return Record(step, self.rank, int(batch.sequence[row]), site, info, summary, given)

    def records(self, step: int) -> Iterator[Record]:
        """All records of a step, in the order they were made."""
        batch = self.read(step)
        return (self.record(batch, int(row), step) for row in np.argsort(batch.sequence, kind="stable"))


class _Known(NamedTuple):
    """A batch as it was read into a room, the columns that were made of it, all of them views, and what reads more."""

    batch: Batch
    step: StepBatch
    repeated: Repeated | None = None

    def now(self) -> StepBatch:
        """The columns as they are now: all but the samples are views."""
        return (
            replace(self.step, samples=_samples(self.batch.columns)) if "samples" in self.batch.columns else self.step
        )


def _views(step: StepBatch, columns: dict[str, ColumnData]) -> bool:
    """Whether a step's columns are those that were read, and none had to be replaced or is missing."""
    every = {**step.counts, **step.floats, **({} if step.sketch is None else {"sketch": step.sketch})}
    return all(columns.get(name) is column for name, column in every.items())


def _finite(sketch: Any) -> Any:
    """The sketches; infinities, which no capture writes, are absent."""
    return np.where(np.isinf(sketch), np.float32(np.nan), sketch) if has_infinities(sketch) else sketch


def _step_batch(columns: dict[str, Any], schema: Schema) -> StepBatch:
    counts, floats = statistics({column.name: columns[column.name] for column in schema if column.role == STATISTIC})
    return StepBatch(
        site=columns["site"],
        sequence=columns["sequence"],
        layout=columns["layout"],
        status=columns["status"],
        checksum=columns["checksum"],
        counts=counts,
        floats=floats,
        sketch=_finite(columns.get("sketch")),
        text=Harmless(columns["text"], LIMIT_TEXT),
        given=GivenColumns(columns["given"], columns["forward"], Harmless(columns["node"], LIMIT_TEXT))
        if "given" in columns
        else None,
        samples=_samples(columns),
    )


def _samples(columns: dict[str, Any]) -> dict[int, int]:
    return samples_of(columns[SAMPLES.name]) if SAMPLES.name in columns else {}
