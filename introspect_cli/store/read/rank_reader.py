"""Reads what one rank recorded: heads at once, names when asked for, records one step at a time.

Comparing must not read what digests show to be equal, nor trust a byte before it is checked, nor be upset by a writer
that is still at work. A step is one read of the bytes that its head names, its CRC is taken over those very bytes, and
columns are views of them.
"""

from __future__ import annotations

import zlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.errors import StoreError
from introspect_cli.records import Layout, ModuleInfo, Status
from introspect_cli.store.files.folders import (
    HEADS,
    LOG,
    DamageError,
    Directory,
    unreadable,
)
from introspect_cli.store.format.batch import StepBatch
from introspect_cli.store.format.columns import Malformed, decode_rows
from introspect_cli.store.format.documents import decode_labels
from introspect_cli.store.format.log import COLUMNS, DOCUMENT, LABELS, LAYOUTS, MODULES, SITES, TOTALS, Frames
from introspect_cli.store.format.schemas import LAYOUT_COLUMNS, MODULE_COLUMNS, SITE_COLUMNS
from introspect_cli.store.format.totals import Totals
from introspect_cli.store.format.totals import decode as decode_totals
from introspect_cli.store.read.name_tables import Names, Shared, SiteTable, layouts_of, modules_of
from introspect_cli.store.read.step_reader import Reader
from introspect_cli.store.remote.pieces import prefetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from introspect_cli.labels import Labels
    from introspect_cli.store.files.handles import Source
    from introspect_cli.store.format.columns import ColumnData, Schema
    from introspect_cli.store.remote.pieces import Range

_STATUSES = len(Status)
LARGEST_HEADS = 320 << 20
_MOST_OPEN = 64
"""Logs that the ranks of a run have open at once."""


class RankReader(Reader):
    """One rank of a run, as it was when it was opened.

    Attributes:
        rank: its number.
        path: its directory, for messages.
        running: whether a process was still writing it.
        ended: whether its writer closed it properly.
        entries: structured array of `log.ENTRY`, one a step: `step`, `rows`, `digest`, `chain`, ...
        frames: of its log.
        cut: what is missing of its log although its writer closed it; "" for nothing.
        thinned: in words which steps were recorded and then dropped.
        unfinished: when it was sent to object storage, in seconds since 1970, if more was to follow; else 0.
    """

    def __init__(
        self, run: Directory, rank: int, *, damaged: bool = False, shared: Shared | None = None, rank_count: int = 1
    ) -> None:
        """Open a rank's log and read the heads of its frames; nothing is raised where it has no log yet.

        Args:
            run: the run's directory.
            rank: its number.
            damaged: whether a damaged log is read up to the damage, which `cut` tells, instead of raising; the file of
                heads is then not read.
            shared: what it shares with other ranks of the run; None for a reader by itself.
            rank_count: how many ranks were put together in this one.

        Raises:
            StoreError: the log is damaged, or a newer version wrote it.
        """
        self._shared = Shared() if shared is None else shared
        self.rank_count = rank_count
        self.rank = rank
        self.path = f"{run.path}/rank{rank}"
        self._run = run
        path = f"{self.path}/{LOG}"
        try:
            with run.rank(rank) as folder:
                log = folder.file(LOG)
                cached = None
                if not damaged and HEADS in folder:
                    cached = folder.read_file(HEADS, LARGEST_HEADS)
        except FileNotFoundError:
            self.frames, self.running, self.unfinished = Frames(None, rank, path), False, 0.0
        else:
            self.running, self.unfinished = log.is_locked(), log.unfinished
            self.frames = Frames(log, rank, path, cached, damaged=damaged)
            self._limit_open_logs()
        self.cut = self.frames.damage
        self.run_id, self.ended = self.frames.run_id, self.frames.ended
        self.entries, self.thinned = self.frames.entries()
        self._schema = self.frames.columns

    @property
    def began(self) -> bool:
        """Whether the log has described its columns, which a writer does before the first step."""
        return bool(self.frames.numbers_of(COLUMNS, counting=False))

    @property
    def readers(self) -> list[RankReader]:  # type: ignore[override]  # as an attribute it would be a cycle
        """The reader itself in a list, for the same interface as `WholeReader`."""
        return [self]

    @property
    def is_whole(self) -> bool:
        """Whether its records were combined from several ranks (`merge --whole`)."""
        return self.rank_count > 1

    def read_file(self, name: str, limit: int) -> bytes:
        """The bytes of another file of the rank.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it has more than `limit` bytes, or cannot be read.
        """
        with self._run.rank(self.rank) as folder:
            return folder.read_file(name, limit)

    def _log(self) -> Source:
        """The log; opened again first where it was closed so that another rank's could be opened."""
        self._reopen()
        assert self.frames.source is not None  # it is there, since it has steps
        return self.frames.source

    def _reopen(self) -> None:
        """Open the log again where it was closed; nothing for a rank without a log."""
        if self.frames.source is None and self.frames.run_id:
            try:
                with self._run.rank(self.rank) as folder:
                    self.frames.source = folder.file(LOG)
            except FileNotFoundError:
                raise DamageError(self.frames.path, "it is missing") from None
            self._limit_open_logs()

    def _limit_open_logs(self) -> None:
        """Add this reader to those with an open log, and close the ones opened first while there are over `_MOST_OPEN`.

        A log that is still being written stays open: by its name there may soon be another.
        """
        opened = self._shared.opened
        opened.append(self)
        while len(opened) > _MOST_OPEN:
            other = opened.popleft()
            if not other.running and other is not self:
                other.close()

    def close(self) -> None:
        """Close the log; batches already read stay valid, and reading more opens it again."""
        if self.frames.source is not None:
            self.frames.source.close()
            self.frames.source = None

    def body(self, number: int) -> bytes:
        """The body of frame `number` of the log; DamageError where it was altered."""
        self._reopen()
        return self.frames.body(number)

    # --- documents

    @cached_property
    def _documents(self) -> dict[str, bytes]:
        """The body of each document in the log, by name; the last one of a name counts."""
        found = {}
        for number in self.frames.numbers_of(DOCUMENT, counting=False):
            name, _, data = self.body(number).partition(b"\n")
            found[name.decode("ascii", "replace")] = data
        return found

    def documents(self) -> list[str]:
        """Names of the documents in its log, `manifest` among them."""
        return list(self._documents)

    def document(self, name: str) -> bytes:
        """A document of its log.

        Raises:
            KeyError: there is none.
            StoreError: it is damaged.
        """
        return self._documents[name]

    # --- steps

    def rows_in(self, rows: Any) -> int:
        """Number of records in some steps (positions among the entries)."""
        return int(self.entries["rows"][rows].sum(dtype=np.int64))

    @cached_property
    def labels(self) -> dict[int, Labels]:
        """The framework's labels of each step, by step; steps without any are left out. Cached."""
        self._reopen()
        path = self.frames.path
        return {step: decode_labels(data, path) for step, data in self.frames.bodies_of(LABELS) if step in self}

    @cached_property
    def totals(self) -> Totals:
        """Totals of the records of each step, where the writer kept them; see `format.totals`. Cached."""
        self._reopen()
        return decode_totals(self.frames.bodies_of(TOTALS), self.entries, self.frames.path)

    # --- names

    def _names(self, kind: bytes, schema: Schema, made: Callable[[dict[str, ColumnData], str], Names]) -> Names:
        self._reopen()
        return self._shared.table(self.frames, kind, schema, made)

    @cached_property
    def sites(self) -> SiteTable:
        """All sites, by number."""
        return self._names(SITES, SITE_COLUMNS, SiteTable)

    @cached_property
    def layouts(self) -> list[Layout]:
        """All layouts, by number."""
        return self._names(LAYOUTS, LAYOUT_COLUMNS, layouts_of)

    @cached_property
    def modules(self) -> list[ModuleInfo]:
        """The module tree in the order in which it was written; of several rows of a module the first."""
        first: dict[str, ModuleInfo] = {}
        for module in self.module_rows:
            first.setdefault(module.fqn, module)
        return list(first.values())

    @cached_property
    def module_rows(self) -> list[ModuleInfo]:
        """All rows of modules in order: a module that changed is there again, with the step from which that holds."""
        return self._names(MODULES, MODULE_COLUMNS, modules_of)

    # --- records

    def digests(self) -> dict[int, bytes]:
        """The 16-byte digest of each step, by step."""
        data = self.entries["digest"].tobytes()
        pieces = (data[at : at + 16] for at in range(0, len(data), 16))
        return dict(zip(self.entries["step"].tolist(), pieces, strict=True))

    def read_row(self, row: int) -> StepBatch:
        """All records of the `row`-th step, as views of the bytes just read and checked.

        Raises:
            StoreError: they cannot be read, were altered, or name a site or layout that is not there.
        """
        entry = self.entries[row]
        step, offset, length = int(entry["step"]), int(entry["offset"]), int(entry["length"])
        log = self._log()
        try:
            data = log.read(offset, offset + length)
        except OSError as error:
            raise unreadable(log.path, error) from None
        if length and self.running and not any(data):
            raise StoreError(f"step {step} of {log.path} was dropped while it was read: try again")
        if len(data) != length or zlib.crc32(data) != entry["body_crc"]:
            raise DamageError(log.path, f"the records of step {step} are not those that were written")
        try:
            out = StepBatch.from_columns(decode_rows(self._schema, memoryview(data), int(entry["rows"])), self._schema)
        except Malformed as error:
            raise DamageError(log.path, f"step {step}: {error}") from None
        if len(out) and (
            out.site.max() >= entry["n_sites"]
            or out.layout.max() >= entry["n_layouts"]
            or out.status.max() >= _STATUSES
        ):
            raise DamageError(log.path, f"a record of step {step} names a site, layout or status that is not there")
        if out.given is not None and not out.given.within(int(entry["n_sites"])):
            raise DamageError(log.path, f"an operator of step {step} names a site that is not there")
        return out

    def ranges(self, rows: Iterable[int]) -> list[Range]:
        """Byte ranges of some steps (positions) in object storage; empty where the run is on disk."""
        if not len(self):
            return []
        entries, log = self.entries[list(rows)], self._log()
        begins, ends = entries["offset"].tolist(), (entries["offset"] + entries["length"]).tolist()
        return [each for begin, end in zip(begins, ends, strict=True) for each in log.ranges(begin, end)]


def read_rows(readers: Sequence[RankReader], rows: Sequence[int]) -> Iterator[StepBatch]:
    """Yield one step of each rank (`rows`: its position in each); from object storage many are fetched at once."""
    prefetched = 0
    for number, (reader, row) in enumerate(zip(readers, rows, strict=True)):
        if number == prefetched:
            prefetched += prefetch(each.ranges([at]) for each, at in zip(readers[number:], rows[number:], strict=True))
        yield reader.read_row(row)


def last_common_step(ranks: Iterable[RankReader]) -> int | None:
    """The lowest of the ranks' last steps (a rank may lack it); None where a rank has no step, or there is no rank."""
    last = [rank.last_step for rank in ranks]
    recorded = [step for step in last if step is not None]
    return min(recorded) if recorded and len(recorded) == len(last) else None
