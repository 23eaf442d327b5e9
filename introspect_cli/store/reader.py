"""What can be read step by step: one rank, or all ranks of a run as one.

Who compares, checks or shows a run need not know which of the two it reads. Of statistics, those that follow from
others need no bytes of their own: they are worked out here.

Thousands of ranks have a model each, most often the same one: tables of names that ranks have the same bytes of are
decoded once.

Of a rank, heads are read at once, names when asked for, records one step at a time. Comparing must not read what
digests show to be equal, nor trust a byte before it is checked, nor be upset by a writer that is still at work. A step
is one read of the bytes that its head names, its CRC is taken over those very bytes, and columns are views of them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from zlib_ng.zlib_ng import crc32

from introspect_cli.errors import StoreError
from introspect_cli.records import Joined, Layout, ModuleInfo, Record, Status, Summary
from introspect_cli.store.batch import StepBatch, decode_lines, record_stats
from introspect_cli.store.columns import LIMIT_NAMES, decode_rows
from introspect_cli.store.documents import decode_labels
from introspect_cli.store.files import HEADS, LOG, DamageError, Directory
from introspect_cli.store.frames import COLUMNS, DOCUMENT, LABELS, LAYOUTS, MODULES, SITES
from introspect_cli.store.log import Frames, StepEntry
from introspect_cli.store.names import INFO, LAYOUT, MODULE, SITE, SiteTable, layouts_of, modules_of
from introspect_cli.store.remote import prefetch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from introspect_cli.labels import Labels
    from introspect_cli.store.log import Entries
    from introspect_cli.store.remote import Range


_MEASURED = (Status.OBSERVED, Status.PARTIAL)


class Reader(ABC):
    """Steps of one rank, or of several as one.

    Attributes:
        rank: its number; of several, the lowest.
        path: where it is, for messages.
        entries: structured array of `log.ENTRY`, one a step: `step`, `rows`, `digest`, `chain`, ...
        rank_count: how many ranks it stands for.
        running: whether a process was still writing any of them.
        ended: whether all of them were closed properly.
        thinned: in words which steps were recorded and then dropped.
        readers: a `RankReader` of each rank.
    """

    rank: int
    path: str
    entries: Entries
    rank_count: int
    running: bool
    ended: bool
    thinned: tuple[str, ...]
    readers: Sequence[Any]

    @property
    @abstractmethod
    def sites(self) -> SiteTable:
        """All sites, by number."""

    @property
    @abstractmethod
    def layouts(self) -> list[Layout]:
        """All layouts, by number."""

    @property
    @abstractmethod
    def module_rows(self) -> list[ModuleInfo]:
        """All rows of modules in order: a module that changed is there again, with the step from which that holds."""

    @property
    @abstractmethod
    def labels(self) -> Mapping[int, Labels]:
        """The framework's labels of each step, by step; steps without any are left out."""

    @property
    def is_whole(self) -> bool:
        """Whether its records may be combined from several ranks (`merge`)."""
        return self.rank_count > 1

    @abstractmethod
    def read_row(self, row: int) -> StepBatch:
        """All records of the `row`-th step."""

    def read(self, step: int) -> StepBatch:
        """All records of a step.

        Raises:
            KeyError: the step was not recorded.
            StoreError: its bytes are damaged.
        """
        return self.read_row(self.row_of(step))

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.entries)

    @cached_property
    def modules(self) -> list[ModuleInfo]:
        """The module tree in the order in which it was written; of several rows of a module the first."""
        first: dict[str, ModuleInfo] = {}
        for module in self.module_rows:
            first.setdefault(module.fqn, module)
        return list(first.values())

    @cached_property
    def steps(self) -> tuple[StepEntry, ...]:
        """All steps, in order. For many thousands, use `entries`."""
        return tuple(self.entry(row) for row in range(len(self.entries)))

    def entry(self, row: int) -> StepEntry:
        """The `row`-th step's entry."""
        return StepEntry(*self.entries[[*StepEntry._fields]][row].item())

    @property
    def last_step(self) -> int | None:
        """Number of the last step that is whole; None where there is none."""
        return int(self.entries["step"][-1]) if len(self.entries) else None

    def row_of(self, step: int) -> int:
        """Position of `step` among the entries.

        Raises:
            KeyError: it was not recorded.
        """
        if step not in self:
            raise KeyError(step)
        return int(np.searchsorted(self.entries["step"], step))

    def __contains__(self, step: int) -> bool:
        """Whether the step with this number was recorded."""
        row = np.searchsorted(self.entries["step"], step)
        return step in self.entries["step"][row : row + 1]

    def record(self, batch: StepBatch, row: int, step: int) -> Record:
        """One row as a record, with derived statistics filled in; the sketch is () where none was computed."""
        site, info = self.sites[int(batch.site[row])]
        layout = self.layouts[int(batch.layout[row])]
        stats = record_stats(batch, row, self.layouts)
        status = Status(int(batch.status[row]))
        sketch: tuple[float, ...] = ()
        if batch.sketch is not None and status in _MEASURED and not np.isnan(batch.sketch[row]).all():
            sketch = tuple(batch.sketch[row].tolist())
        joined = Joined.AS_RECORDED if batch.how is None else Joined(int(batch.how[row]))
        ranks = 0 if batch.ranks is None else int(batch.ranks[row])
        summary = Summary(status, layout, int(batch.checksum[row]), stats, sketch, batch.text[row], joined, ranks)
        return Record(step, self.rank, int(batch.sequence[row]), site, info, summary, batch.given.get(row))

    def records(self, step: int) -> Iterator[Record]:
        """All records of a step, in the order they were made."""
        batch = self.read(step)
        return (self.record(batch, int(row), step) for row in np.argsort(batch.sequence, kind="stable"))


# --- name tables


TABLES = {SITES: (SITE + INFO, SiteTable), LAYOUTS: (LAYOUT, layouts_of), MODULES: (MODULE, modules_of)}
"""Columns of each table, and what makes it of them."""


class Shared:
    """What the readers of a run's ranks share: open files, and tables of names where frames have the same digests.

    Attributes:
        opened: the readers that have their logs open, the latest last.
    """

    def __init__(self) -> None:
        """Start with no log open and no table read."""
        self.opened = deque[Any]()
        self._tables: dict[tuple[Any, ...], Any] = {}

    def table(self, frames: Frames, kind: bytes) -> Any:
        """The table that a rank's frames of `kind` hold; the same object for frames with equal digests.

        Args:
            frames: of the rank's log.
            kind: one of `TABLES`.

        Raises:
            DamageError: it was altered, is no such table, or is longer than LIMIT_NAMES.
        """
        numbers, path = frames.numbers_of(kind, counting=False), f"{frames.path} ({kind.decode()})"
        heads = frames.heads[numbers]
        key = kind, tuple(heads["rows"].tolist()), heads["digest"].tobytes()
        if key not in self._tables:
            if heads["length"].sum() > LIMIT_NAMES:
                raise DamageError(path, "it is longer than a table of names")
            names, made = TABLES[kind]
            columns: dict[str, list[Any]] = {name: [] for name in names}
            try:
                for number, rows in zip(numbers, heads["rows"].tolist(), strict=True):
                    part = json.loads(frames.body(number))
                    for name in names:
                        columns[name] += part[name]
                    if {len(part[name]) for name in names} != {rows}:
                        raise ValueError(rows)  # noqa: TRY301 - told as all damage is
                self._tables[key] = made(columns)
            except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
                raise DamageError(path, "it is no table of names") from None
        return self._tables[key]


# --- rank reader


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

    def __init__(self, run: Directory, rank: int, *, damaged: bool = False, shared: Shared | None = None) -> None:
        """Open a rank's log and read the heads of its frames; nothing is raised where it has no log yet.

        Args:
            run: the run's directory.
            rank: its number.
            damaged: whether a damaged log is read up to the damage, which `cut` tells, instead of raising; the file of
                heads is then not read.
            shared: what it shares with other ranks of the run; None for a reader by itself.

        Raises:
            StoreError: the log is damaged, or a newer version wrote it.
        """
        self._shared = Shared() if shared is None else shared
        self.rank_count = 1
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

    def read_file(self, name: str, limit: int) -> bytes:
        """The bytes of another file of the rank.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it has more than `limit` bytes, or cannot be read.
        """
        with self._run.rank(self.rank) as folder:
            return folder.read_file(name, limit)

    def _opened(self) -> Frames:
        """The frames of the log, opened again first where it was closed so that another rank's could be opened."""
        if self.frames.source is None and self.frames.run_id:  # else the rank has no log
            try:
                with self._run.rank(self.rank) as folder:
                    self.frames.source = folder.file(LOG)
            except FileNotFoundError:
                raise DamageError(self.frames.path, "it is missing") from None
            self._limit_open_logs()
        return self.frames

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
        return self._opened().body(number)

    @cached_property
    def documents(self) -> dict[str, bytes]:
        """The body of each document in the log, by name, `manifest` among them; the last one of a name counts.

        Raises:
            StoreError: one is damaged.
        """
        found = {}
        for number in self.frames.numbers_of(DOCUMENT, counting=False):
            name, _, data = self.body(number).partition(b"\n")
            found[name.decode("ascii", "replace")] = data
        return found

    # --- steps

    @cached_property
    def labels(self) -> dict[int, Labels]:
        """The framework's labels of each step, by step; steps without any are left out. Cached."""
        frames = self._opened()
        bodies = {int(frames.heads["step"][number]): frames.body(number) for number in frames.numbers_of(LABELS)}
        return {step: decode_labels(data, frames.path) for step, data in bodies.items() if step in self}

    # --- names

    def _table(self, kind: bytes) -> Any:
        return self._shared.table(self._opened(), kind)

    @cached_property
    def sites(self) -> SiteTable:
        """All sites, by number."""
        return cast("SiteTable", self._table(SITES))

    @cached_property
    def layouts(self) -> list[Layout]:
        """All layouts, by number."""
        return cast("list[Layout]", self._table(LAYOUTS))

    @cached_property
    def module_rows(self) -> list[ModuleInfo]:
        """All rows of modules in order: a module that changed is there again, with the step from which that holds."""
        return cast("list[ModuleInfo]", self._table(MODULES))

    # --- records

    def digests(self) -> dict[int, bytes]:
        """The 16-byte digest of each step, by step."""
        return {int(entry["step"]): entry["digest"].tobytes() for entry in self.entries}

    def read_row(self, row: int) -> StepBatch:
        """All records of the `row`-th step, as views of the bytes just read and checked.

        Raises:
            StoreError: they cannot be read, were altered, or name a site or layout that is not there.
        """
        entry = self.entries[row]
        step, offset, length = int(entry["step"]), int(entry["offset"]), int(entry["length"])
        log = self._opened().source
        assert log is not None  # it is there, since it has steps
        data = log.read(offset, offset + length)
        if length and self.running and not any(data):
            raise StoreError(f"step {step} of {log.path} was dropped while it was read: try again")
        if len(data) != length or crc32(data) != entry["body_crc"]:
            raise DamageError(log.path, f"the records of step {step} are not those that were written")
        path = f"{log.path} (step {step})"
        rows, sites = int(entry["rows"]), int(entry["n_sites"])
        columns, lines = decode_rows(self._schema, memoryview(data), rows, path)
        out = StepBatch.from_columns(columns, self._schema, *decode_lines(lines, rows, sites, path))
        if len(out) and (
            out.site.max() >= sites
            or out.layout.max() >= entry["n_layouts"]
            or out.status.max() >= len(Status)
            or (out.how is not None and out.how.max() >= len(Joined))
        ):
            raise DamageError(path, "a record names a site, layout or status that is not there")
        return out

    def ranges(self, rows: Iterable[int]) -> list[Range]:
        """Byte ranges of some steps (positions) in object storage; empty where the run is on disk."""
        log = self._opened().source if len(self) and self._run.is_far else None
        entries = () if log is None else map(self.entry, rows)
        return [each for at in entries if log for each in log.ranges(at.offset, at.offset + at.length)]


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
