"""Reads what one rank recorded: the index at once, names when asked for, records one step at a time.

Comparing must not read what digests show to be equal, nor trust a byte before it is checked, nor be upset by a writer
that is still at work. The file's descriptor stays open, a step is one read of the bytes that its index entry names, its
CRC is taken over those very bytes, and columns are views of them.
"""

from __future__ import annotations

import zlib
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import Layout, ModuleInfo, Status
from introspect_cli.store.files.folders import INDEX, RECORDS, DamageError, Directory, unreadable
from introspect_cli.store.format.arrow import END_OF_STREAM
from introspect_cli.store.format.arrow_decoder import Decoder
from introspect_cli.store.format.arrow_schema import Malformed, schema_message
from introspect_cli.store.format.batch import StepBatch
from introspect_cli.store.format.documents import LABELS, LIMIT_LABELS, decode_labels
from introspect_cli.store.format.index import EMPTY, Entries, Index, parse_index, records_name
from introspect_cli.store.format.schemas import LIMIT_INDEX
from introspect_cli.store.format.totals import LIMIT_TOTALS, TOTALS, Totals
from introspect_cli.store.format.totals import decode as decode_totals
from introspect_cli.store.read.name_tables import NameTables, SiteTable, layouts_of, modules_of
from introspect_cli.store.read.step_reader import StepReader
from introspect_cli.store.remote.pieces import RemoteFile, fetch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from introspect_cli.labels import Labels
    from introspect_cli.store.files.handles import Source
    from introspect_cli.store.remote.pieces import Range

_STATUSES = len(Status)
_MOST_OPEN = 64
"""Files of records that the ranks of a run have open at once."""


class Shared:
    """What the ranks of a run share: thousands of them may neither have a file open each, nor a table of one content.

    Attributes:
        opened: the readers that have their records open, the latest last.
        tables: sites, layouts and modules.
    """

    def __init__(self) -> None:
        self.opened = deque[RankReader]()
        self.tables = NameTables()


class RankReader(StepReader):
    """One rank of a run, as it was when it was opened.

    Attributes:
        rank: its number.
        path: its directory, for messages.
        running: whether a process was still writing it.
        ended: whether its writer closed it properly.
        entries: structured array of `schemas.ENTRY`, one a step: `step`, `rows`, `digest`, `chain`, ...
        run_id: 16 bytes that its index names as the run's; empty where it has no header yet.
        cut: what is missing of its records although its writer closed it; "" for nothing.
        thinned: steps that were recorded and then dropped.
        unfinished: when it was sent to object storage, in seconds since 1970, if more was to follow; else 0.
    """

    def __init__(
        self, run: Directory, rank: int, *, damaged: bool = False, shared: Shared | None = None, many: int = 1
    ) -> None:
        """Open a rank; a `damaged` one, whose records are cut off, up to the last step that is whole.

        Args:
            run: the run's directory.
            rank: its number.
            damaged: see above.
            shared: what it shares with other ranks of the run.
            many: how many ranks were put together in this one.
        """
        self._shared = Shared() if shared is None else shared
        self.cut = ""
        self._damaged = damaged
        self.many = many
        self.rank = rank
        self.path = f"{run.path}/rank{rank}"
        self._run = run
        self._records: Source | None = None
        index, self.running, self.unfinished = _read_index(run, rank)
        while True:
            try:
                self._take(index)
                break
            except DamageError:
                # Where steps were dropped just now, another index names other records.
                again, self.running, self.unfinished = _read_index(run, rank)
                if again.generation == index.generation:
                    raise
                index = again

    @property
    def readers(self) -> list[RankReader]:
        """Itself, as several ranks that are read as one have theirs."""
        return [self]

    @property
    def is_whole(self) -> bool:
        """Whether its records are those of several ranks, put together."""
        return self.many > 1

    def _take(self, index: Index) -> None:
        self._index = index
        self.ended = index.ended
        self.run_id = index.run_id
        self.thinned = index.thinned
        self._schema = index.columns.records
        self._decoder = Decoder(self._schema)
        self._file_of_records = records_name(index.generation)
        self.entries = self._whole_entries(index)

    def _whole_entries(self, index: Index) -> Entries:
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

    def read_file(self, name: str, limit: int) -> bytes:
        """The bytes of another file of the rank, at most `limit` of them.

        Raises:
            FileNotFoundError: there is none.
        """
        with self._run.rank(self.rank) as folder:
            return folder.read_file(name, limit)

    def _open(self, name: str) -> Source:
        try:
            with self._run.rank(self.rank) as folder:
                return folder.file(name)
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
        """
        last = self._index.last
        if last is None or not self.ended or (self.cut and name == RECORDS):
            return
        end = last["offset"] if name == RECORDS else last[f"{name.removesuffix('.arrow')}_length"]
        with self._open(self._file_of_records if name == RECORDS else name) as handle:
            end_of_file = handle.read(int(end), len(END_OF_STREAM) + 1)
        if end_of_file != END_OF_STREAM:
            raise DamageError(handle.path, "its end is not the one that was written")

    # --- steps

    def rows_in(self, rows: Any) -> int:
        """How many records some steps (positions among the entries) have."""
        return int(self.entries["rows"][rows].sum(dtype=np.int64))

    @cached_property
    def labels(self) -> dict[int, Labels]:
        """What the framework calls each step, by number; steps without a name of its own are left out."""
        by_step = decode_labels(self._optional(LABELS, LIMIT_LABELS + (1 << 16)), f"{self.path}/{LABELS}")
        return {step: by_step[step] for step in self.entries["step"].tolist() if step in by_step}

    @cached_property
    def totals(self) -> Totals:
        """What the records of each step add up to, where the writer kept that."""
        return decode_totals(self._optional(TOTALS, 2 * LIMIT_TOTALS), self.entries, f"{self.path}/{TOTALS}")

    def _optional(self, name: str, limit: int) -> bytes:
        """The bytes of a file that only some steps make; nothing where none did."""
        try:
            return self.read_file(name, limit) if len(self) else b""
        except FileNotFoundError:
            return b""

    # --- names

    @cached_property
    def sites(self) -> SiteTable:
        """All sites, by number."""
        return self._shared.tables.read(self._run, self.rank, self._index, "sites", SiteTable)

    @cached_property
    def layouts(self) -> list[Layout]:
        """All layouts, by number."""
        return self._shared.tables.read(self._run, self.rank, self._index, "layouts", layouts_of)

    @cached_property
    def modules(self) -> list[ModuleInfo]:
        """The module tree, in the order it was found: each module as it was at first."""
        first: dict[str, ModuleInfo] = {}
        for module in self.module_rows:
            first.setdefault(module.fqn, module)
        return list(first.values())

    @cached_property
    def module_rows(self) -> list[ModuleInfo]:
        """All rows of modules in order: a module that changed is there again, with the step from which that holds."""
        return self._shared.tables.read(self._run, self.rank, self._index, "modules", modules_of)

    # --- records

    def digests(self) -> dict[int, bytes]:
        """What each step digests to, by number; numpy's bytes would lose zeros at their end."""
        data = self.entries["digest"].tobytes()
        pieces = (data[at : at + 16] for at in range(0, len(data), 16))
        return dict(zip(self.entries["step"].tolist(), pieces, strict=True))

    def read_row(self, row: int) -> StepBatch:
        """All records of the `row`-th step, as views of the bytes just read and checked."""
        entry = self.entries[row]
        records = self._records_open()
        step, length = int(entry["step"]), int(entry["length"])
        try:
            data = records.read(int(entry["offset"]), length)
        except OSError as error:
            raise unreadable(records.path, error) from None
        if len(data) != length or zlib.crc32(data) != entry["batch_crc"]:
            where = records.place(int(entry["offset"]))
            raise DamageError(where, f"the records of step {step} are not those that were indexed")
        try:
            batch = self._decoder.decode(memoryview(data))
            out = StepBatch.of(batch.columns, self._schema)
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
        if out.given is not None and not out.given.within(int(entry["n_sites"])):
            raise DamageError(records.path, f"an operator of step {step} names a site that is not there")
        return out

    def ranges(self, rows: Iterable[int]) -> list[Range]:
        """Where some steps lie in object storage; nothing where the run is on disk."""
        records = self._records_open() if len(self) else None
        if not isinstance(records, RemoteFile):
            return []
        places = [(int(self.entries["offset"][row]), int(self.entries["length"][row])) for row in rows]
        return [each for offset, length in places for each in records.ranges(offset, length)]

    def _records_open(self) -> Source:
        """The file of records, for which that of another rank may be closed."""
        if self._records is None:
            self._records = self._open(self._file_of_records)
            opened = self._shared.opened
            opened.append(self)
            while len(opened) > _MOST_OPEN:
                other = opened.popleft()
                if not other.running and other is not self:
                    other.close()
        return self._records


def read_rows(readers: Sequence[RankReader], rows: Sequence[int]) -> Iterator[StepBatch]:
    """A step of each rank; from object storage many at once."""
    there = 0
    for number, (reader, row) in enumerate(zip(readers, rows, strict=True)):
        if number == there:
            there += fetch(each.ranges([at]) for each, at in zip(readers[number:], rows[number:], strict=True))
        yield reader.read_row(row)


def _read_index(run: Directory, rank: int) -> tuple[Index, bool, float]:
    """The index of a rank, whether a process is writing it, and when what is there was sent, if more was to follow."""
    try:
        with run.rank(rank) as folder, folder.file(INDEX) as handle:
            try:
                running, unfinished = handle.is_locked(), handle.unfinished
                if handle.size() > LIMIT_INDEX:
                    raise DamageError(handle.path, "it is larger than any index")
                data = handle.read(0, LIMIT_INDEX)
            except OSError as error:
                raise unreadable(handle.path, error) from None
    except FileNotFoundError:
        return EMPTY, False, 0.0
    return parse_index(data, rank, handle.path), running, unfinished


def last_common_step(ranks: Iterable[RankReader]) -> int | None:
    """Number of the last step that every rank has whole; None where there is none."""
    last = [rank.last_step for rank in ranks]
    recorded = [step for step in last if step is not None]
    return min(recorded) if recorded and len(recorded) == len(last) else None
