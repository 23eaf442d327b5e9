"""All ranks of a run as if one process had recorded it: what a comparison of two layouts reads.

A parameter may be whole on every rank, or cut over some; a batch is some samples here and the others
there; a layer may run on one rank alone. So records are put together by site. Equal records are copies and count
once. Parts whose place is known add up: checksum, sketch and moments are sums over elements keyed by their index in
the whole. Values that differ from rank to rank without a place (samples, activations, losses) are gathered: of these
only what depends neither on order nor on layout is known, their extrema and means. What cannot be put together counts
as not observed, and says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import Kind, Layout, ModuleInfo, Record, Status, Summary
from introspect_cli.store.batch import AS_RECORDED, COPIES, GATHERED, OWED, PARTS, StepBatch, absent, record_stats
from introspect_cli.store.format import ENTRY
from introspect_cli.store.index import StepEntry
from introspect_cli.store.launched import rank_list
from introspect_cli.store.names import SiteTable, encode_sites
from introspect_cli.store.rank_reader import RankReader
from introspect_cli.sums import combine, header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from introspect_cli.labels import Labels
    from introspect_cli.records import Part, Site, SiteInfo
    from introspect_cli.store.index import Entries

    Array = NDArray[Any]

_COPIED = frozenset({Kind.PARAM.value, Kind.GRAD.value, Kind.OPTIMIZER_STATE.value})
_FIRSTS = frozenset({Kind.BUFFER.value, Kind.HYPERPARAMETER.value})
"""Of these the first rank's counts: DDP gives its buffers to the others before each forward pass."""

DIFFERENT_COPIES = "copies differ"
"""How the text of a record begins that stands for copies which are not equal."""

_COPIES_APART = 1e-4
_NOT_SEEN, _PARTIAL, _VALUE = int(Status.NOT_OBSERVED), int(Status.PARTIAL), int(Status.VALUE)
_NONFINITE = ("nans", "posinfs", "neginfs")
_FLOWING = frozenset({Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.LOSS})
_GOING_IN = frozenset({Kind.INPUT.value, Kind.GRAD_INPUT.value})
_COMING_OUT = frozenset({Kind.OUTPUT.value, Kind.GRAD_OUTPUT.value})
_EXTREMA = {"min": np.fmin, "max": np.fmax, "absmin": np.fmin}


@dataclass
class _Row:
    """One record of the whole in the making."""

    row: int
    layout: Layout
    status: int
    checksum: int
    how: int = AS_RECORDED
    text: str = ""
    stats: dict[str, float] | None = None
    sketch: Array | None = None


class WholeReader:
    """The ranks of a run as one; what it offers is what `RankReader` does.

    Attributes:
        rank: the lowest of them.
        path: the run, for messages.
        readers: the ranks' own readers.
        layouts: of wholes, by number; reading a step may add some.
        numbers: for each reader, the whole's number of each of its sites; filled in with `sites`.
    """

    def __init__(
        self,
        path: str,
        readers: Sequence[RankReader],
        *,
        fold_calls: bool = False,
        stages: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        """Take the ranks' readers, which stay theirs who opened them.

        Args:
            path: the run, for messages.
            readers: at least one, by rank.
            fold_calls: whether all calls of a module in a step count as one: microbatches, accumulation.
            stages: of ranks that run a stage of a pipeline, its number and how many there are.
        """
        self.fold_calls = fold_calls
        self._stages = dict(stages or {})
        self.path = path
        self.readers = list(readers)
        self.rank = self.readers[0].rank
        self.running = any(reader.running for reader in readers)
        self.ended = all(reader.ended for reader in readers)
        self.thinned = tuple(dict.fromkeys(own for reader in readers for own in reader.thinned))
        self.layouts = list(dict.fromkeys(_whole(layout) for reader in readers for layout in reader.layouts))
        self._layout_number = {layout: number for number, layout in enumerate(self.layouts)}
        self.numbers: list[Array] = []
        self._rank_of: Array = np.zeros(0, np.int64)
        self.read = lru_cache(maxsize=3)(self._read)

    @cached_property
    def sites(self) -> SiteTable:
        """All sites of all ranks, by number: those of the first, then what others have beside."""
        number_of: dict[int, int] = {}
        by_site: dict[Site, int] = {}
        rows: list[tuple[Site, SiteInfo]] = []
        for reader in self.readers:
            keys = reader.sites.key.tolist()
            for number, key in enumerate(keys):
                if key not in number_of:
                    site, info = reader.sites[number]
                    if self.fold_calls and site.kind in _FLOWING:
                        site = replace(site, call=0)
                    number_of[key] = by_site.setdefault(site, len(rows))
                    if number_of[key] == len(rows):
                        rows.append((site, info))
            self.numbers.append(np.array([number_of[key] for key in keys], np.int64))
        return SiteTable(dict(encode_sites(rows)), f"{self.path}: its ranks")

    @cached_property
    def _kinds(self) -> list[str]:
        return self.sites.kind

    @cached_property
    def modules(self) -> list[ModuleInfo]:
        """The modules of all ranks: those of the first, then what others have beside."""
        return list({module.fqn: module for reader in reversed(self.readers) for module in reader.modules}.values())

    @cached_property
    def module_rows(self) -> list[ModuleInfo]:
        """All rows of modules of all ranks, each once."""
        return list(dict.fromkeys(row for reader in self.readers for row in reader.module_rows))

    @cached_property
    def labels(self) -> dict[int, Labels]:
        """What the framework calls each step, as the first rank that says so has it."""
        found: dict[int, Labels] = {}
        for reader in reversed(self.readers):
            found |= reader.labels
        return found

    @cached_property
    def entries(self) -> Entries:
        """The steps that all ranks have, with a digest over the ranks' own."""
        common = self.readers[0].entries["step"]
        for reader in self.readers[1:]:
            common = np.intersect1d(common, reader.entries["step"])
        out = np.zeros(len(common), ENTRY)
        out["step"] = common
        chain = bytes(16)
        for row, step in enumerate(common.tolist()):
            own = [reader.entry(reader.row_of(step)).digest for reader in self.readers]
            digest = blake2b(b"".join(own), digest_size=16).digest()
            chain = blake2b(chain + digest, digest_size=16).digest()
            out[row]["digest"], out[row]["chain"] = np.void(digest), np.void(chain)
            out[row]["rows"] = self._count(step)
        return out

    def _count(self, step: int) -> int:
        """How many records a step has once copies and parts are put together."""
        if not self.numbers:
            _ = self.sites
        if self._stages:
            return len(self.read(step))
        held = [self.numbers[at][reader.read(step).site] for at, reader in enumerate(self.readers)]
        return len(np.unique(np.concatenate(held)))

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.entries)

    def entry(self, row: int) -> StepEntry:
        """The `row`-th step's entry."""
        found = self.entries[row]
        return StepEntry(
            int(found["step"]), 0, 0, int(found["rows"]), found["digest"].tobytes(), found["chain"].tobytes()
        )

    @property
    def last_step(self) -> int | None:
        """Number of the last step that all ranks have; None where there is none."""
        return int(self.entries["step"][-1]) if len(self) else None

    def row_of(self, step: int) -> int:
        """Position of `step` among the entries.

        Raises:
            KeyError: a rank has not recorded it.
        """
        found = np.flatnonzero(self.entries["step"] == step)
        if not len(found):
            raise KeyError(step)
        return int(found[0])

    def __contains__(self, step: int) -> bool:
        return bool((self.entries["step"] == step).any())

    def read_row(self, row: int) -> StepBatch:
        """The records of the `row`-th step; see `read`."""
        return self.read(int(self.entries[row]["step"]))

    def record(self, batch: StepBatch, row: int, step: int) -> Record:
        """One row as a record, with derived statistics filled in."""
        site, info = self.sites[int(batch.site[row])]
        layout = self.layouts[int(batch.layout[row])]
        stats = record_stats(batch.counts, batch.floats, min(layout.numel, (1 << 63) - 1), row)
        sketch = tuple(batch.sketch[row].tolist()) if batch.sketch is not None else ()
        summary = Summary(
            Status(int(batch.status[row])), layout, int(batch.checksum[row]), stats, sketch, batch.text[row]
        )
        return Record(step, self.rank, int(batch.sequence[row]), site, info, summary)

    def records(self, step: int) -> Iterator[Record]:
        """All records of a step."""
        batch = self.read(step)
        return (self.record(batch, int(row), step) for row in np.argsort(batch.sequence, kind="stable"))

    # --- putting together

    def _read(self, step: int) -> StepBatch:
        """A step of all ranks, put together by site.

        Raises:
            KeyError: a rank has not recorded it.
            StoreError: a rank's bytes are damaged.
        """
        if not self.numbers:
            _ = self.sites
        step_of = _Step([reader.read(step) for reader in self.readers], self.readers, self.numbers)
        self._rank_of = step_of.rank
        groups = ((site, rows) for site, rows in step_of.groups() if self._kinds[site] != Kind.COLLECTIVE.value)
        sites = ((site, self._of_stage(site, rows)) for site, rows in groups)
        rows = [_together(step_of, own, self._kinds[site]) for site, own in sites if own]
        return self._batch(step_of, rows)

    def _of_stage(self, site: int, rows: list[int]) -> list[int]:
        """The rows of a site that are the model's: what goes into it at the first stage, what comes out of the last.

        Every stage of a pipeline has a root of the same name, and what goes into that of a later one is not what goes
        into the model.
        """
        kind = self._kinds[site]
        if not self._stages or "." in self.sites.fqn[site] or kind not in _GOING_IN | _COMING_OUT:
            return rows
        wanted = [rank for rank, (stage, of) in self._stages.items() if stage == (0 if kind in _GOING_IN else of - 1)]
        ranks = [reader.rank for reader in self.readers]
        return [row for row in rows if ranks[int(self._rank_of[row])] in wanted]

    def _batch(self, step: _Step, rows: list[_Row]) -> StepBatch:
        first = np.array([row.row for row in rows], np.int64)
        counts = {name: column[first] for name, column in step.counts.items()}
        floats = {name: column[first] for name, column in step.floats.items()}
        sketch = step.sketch[first] if step.sketch is not None else None
        for at, row in enumerate(rows):
            if row.stats is not None:
                for columns in (counts, floats):
                    for name, column in columns.items():
                        column[at] = row.stats.get(name, absent(column.dtype.str, 1)[0])
            if sketch is not None and row.how != AS_RECORDED:
                sketch[at] = np.nan if row.sketch is None else row.sketch
        return StepBatch(
            site=step.site[first].astype(np.uint32),
            sequence=np.argsort(np.argsort(step.order[first], kind="stable")).astype(np.uint32),
            layout=np.array([self._layout(row.layout) for row in rows], np.uint32),
            status=np.array([row.status for row in rows], np.uint8),
            checksum=np.array([row.checksum for row in rows], np.uint64),
            counts=counts,
            floats=floats,
            sketch=sketch,
            text=[row.text for row in rows],
            how=np.array([row.how for row in rows], np.uint8),
        )

    def _layout(self, layout: Layout) -> int:
        number = self._layout_number.get(layout)
        if number is None:
            number = self._layout_number[layout] = len(self.layouts)
            self.layouts.append(layout)
        return number


Reader = RankReader | WholeReader
"""What can be read like one rank: one, or all as one."""


class _Step:
    """One step of all ranks, their columns end to end.

    Attributes:
        site: int64 (n,), numbers of the whole.
        order: float64 (n,), where in the step.
    """

    def __init__(self, batches: list[StepBatch], readers: Sequence[RankReader], numbers: list[Array]) -> None:
        self._layouts = [reader.layouts for reader in readers]
        self._ranks = [reader.rank for reader in readers]
        sizes = [len(batch) for batch in batches]
        self.rank = np.repeat(np.arange(len(batches)), sizes)
        self.site = np.concatenate([own[np.asarray(batch.site)] for own, batch in zip(numbers, batches, strict=True)])
        self.order = np.concatenate([np.asarray(batch.sequence, np.float64) for batch in batches])
        self.number = np.concatenate([np.asarray(batch.layout, np.int64) for batch in batches])
        self.status = np.concatenate([np.asarray(batch.status) for batch in batches])
        self.checksum = np.concatenate([np.asarray(batch.checksum) for batch in batches])
        self.counts = {name: np.concatenate([b.counts[name] for b in batches]) for name in _shared("counts", batches)}
        self.floats = {
            name: np.concatenate([np.asarray(b.floats[name], np.float64) for b in batches])
            for name in _shared("floats", batches)
        }
        sketches = [batch.sketch for batch in batches]
        self.sketch = (
            None if any(own is None for own in sketches) else np.concatenate([np.asarray(s) for s in sketches])
        )
        self._texts = [batch.text for batch in batches]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])

    def groups(self) -> Iterator[tuple[int, list[int]]]:
        """The rows of each site, in the order of ranks."""
        ranked = np.argsort(self.site, kind="stable")
        bounds = np.flatnonzero(np.diff(self.site[ranked], prepend=-1, append=-1))
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            rows = ranked[start:stop].tolist()
            yield int(self.site[rows[0]]), rows

    def layout(self, row: int) -> Layout:
        """What a row's tensor is on its rank."""
        layout: Layout = self._layouts[int(self.rank[row])][int(self.number[row])]
        return layout

    def number_of_rank(self, row: int) -> int:
        """The rank that recorded a row."""
        return self._ranks[int(self.rank[row])]

    def text(self, row: int) -> str:
        """A row's text."""
        rank = int(self.rank[row])
        return self._texts[rank][row - int(self._starts[rank])]


def _shared(name: str, batches: list[StepBatch]) -> list[str]:
    """Statistics that all ranks kept."""
    every = [getattr(batch, name) for batch in batches]
    return [key for key in every[0] if all(key in own for own in every)]


def _together(step: _Step, rows: list[int], kind: str) -> _Row:
    """What the ranks recorded of one site, as one record."""
    first = rows[0]
    layout = step.layout(first)
    alone = _Row(first, layout, int(step.status[first]), int(step.checksum[first]), text=step.text(first))
    blind = [row for row in rows if step.status[row] == _NOT_SEEN]
    if blind:
        return _unseen(step, blind[0], step.text(blind[0]))
    held = [row for row in rows if (part := step.layout(row).part) is None or part.numel]
    if held and all(step.layout(row).part is None for row in held):
        rows = held  # the others hold nothing of it
    parts = [step.layout(row).part for row in rows]
    if any(part is not None for part in parts):
        if any(part is None or step.layout(row).shape != layout.shape for part, row in zip(parts, rows, strict=True)):
            return _unseen(step, first, "some ranks hold parts of it and others what has no known place")
        return _of_parts(step, rows, [part for part in parts if part is not None])
    if rows[0] != first:
        first, layout = rows[0], step.layout(rows[0])
        alone = _Row(first, layout, int(step.status[first]), int(step.checksum[first]), text=step.text(first))
    if any(step.status[row] == _PARTIAL and "not known" in step.text(row) for row in rows):
        return _unseen(step, first, step.text(first))
    distinct = {int(step.checksum[row]): row for row in reversed(rows)}
    if len(distinct) == 1:
        return alone
    if kind == Kind.RNG.value:
        return _unseen(step, first, "each rank has its own")
    if kind in _COPIED:
        return _copies(step, rows, alone)
    if kind in _FIRSTS:
        return alone
    return _gathered(step, sorted(distinct.values()))


def _whole(layout: Layout) -> Layout:
    """The layout of a whole, given that of a part."""
    return layout if layout.part is None else replace(layout, part=None)


def _unseen(step: _Step, row: int, why: str) -> _Row:
    layout = step.layout(row)
    return _Row(row, _whole(layout), _NOT_SEEN, 0, GATHERED, why, {})


def _copies(step: _Step, rows: list[int], alone: _Row) -> _Row:
    """Copies that are not the same bits: one of them where rounding explains that, and else none."""
    if step.sketch is not None:
        sketches = step.sketch[rows].astype(np.float64)
        apart = np.linalg.norm(sketches - sketches[0], axis=1).max()
        if apart <= _COPIES_APART * np.linalg.norm(sketches, axis=1).max():
            return alone
    others = [row for row in rows if step.checksum[row] != step.checksum[rows[0]]]
    mark = int.from_bytes(blake2b(step.checksum[rows].tobytes(), digest_size=8).digest(), "little")
    ranks = rank_list([step.number_of_rank(row) for row in others])
    text = f"{DIFFERENT_COPIES}: {ranks} from rank {step.number_of_rank(rows[0])}"
    return replace(alone, how=COPIES, checksum=mark, text=text, stats={})


def _of_parts(step: _Step, rows: list[int], parts: list[Part]) -> _Row:
    """A whole out of its parts: each once, whoever else has a copy of it."""
    first, layout = rows[0], step.layout(rows[0])
    whole = _whole(layout)
    owing = parts[0].owing
    if parts[0].owed:
        distinct = list({int(step.checksum[row]): row for row in rows}.values())
        if parts[0].owed not in ("sum", "avg") or len(distinct) > owing or step.sketch is None:
            return _unseen(step, first, f"a {parts[0].owed} over {owing} ranks is still owed")
        total = step.sketch[rows].astype(np.float64).sum(axis=0) * (owing / len(rows))
        if parts[0].owed == "avg":
            total = total / owing
        mark = int.from_bytes(blake2b(step.checksum[rows].tobytes(), digest_size=8).digest(), "little")
        text = f"{parts[0].owed} over {owing} ranks, still owed"
        finite: dict[str, float] = {n: int(step.counts[n][rows].sum()) for n in _NONFINITE if n in step.counts}
        return _Row(first, whole, _PARTIAL, mark, OWED, text, finite, total.astype(np.float32))
    holders: dict[Part, int] = {}
    for row, part in zip(rows, parts, strict=True):
        known = holders.setdefault(part, row)
        if step.checksum[known] != step.checksum[row]:
            return _unseen(step, first, "two ranks hold the same part of it with different values")
    held = sum(part.numel for part in holders)
    if held != whole.numel:
        return _unseen(step, first, f"the parts of it on record cover {held:,} of {whole.numel:,} elements")
    own = list(holders.values())
    head = header(whole.dtype, whole.shape)
    raw = combine(map(int, step.checksum[own]), [head] * len(own), head)
    sketch = None if step.sketch is None else step.sketch[own].astype(np.float64).sum(axis=0).astype(np.float32)
    sizes = [part.numel for part in holders]
    return _Row(first, whole, int(Status.OBSERVED), raw, PARTS, "", _moments(step, own, sizes), sketch)


def _gathered(step: _Step, rows: list[int]) -> _Row:
    """Values of ranks that differ, as one: their extrema and moments."""
    first = rows[0]
    layouts = [step.layout(row) for row in rows]
    layout = layouts[0]
    shape = layout.shape
    if shape and all(own.shape[1:] == shape[1:] for own in layouts if own.shape):
        shape = (sum(own.shape[0] for own in layouts if own.shape), *shape[1:])
    whole = replace(layout, shape=shape)
    mark = int.from_bytes(blake2b(np.sort(step.checksum[rows]).tobytes(), digest_size=8).digest(), "little")
    text = f"values of {len(rows)} ranks together"
    if any(step.status[row] == _VALUE for row in rows):
        return _unseen(step, first, "a plain value, another on each rank")
    stats = _moments(step, rows, [own.numel for own in layouts])
    return _Row(first, whole, int(Status.OBSERVED), mark, GATHERED, text, stats)


def _moments(step: _Step, rows: list[int], sizes: list[int]) -> dict[str, float]:
    """Statistics of several tensors' elements together."""
    out: dict[str, float] = {}
    for name, column in step.counts.items():
        own = column[rows]
        out[name] = int(own.sum()) if (own >= 0).all() else -1
    left_out = sum(np.maximum(step.counts[n][rows], 0) for n in _NONFINITE if n in step.counts)
    finite = np.asarray(sizes, np.float64) - left_out
    total = float(finite.sum())
    weight = finite / total if total else finite
    used = finite > 0
    for name, column in step.floats.items():
        values = column[rows][used]
        if name in _EXTREMA:
            out[name] = float(_EXTREMA[name].reduce(values)) if len(values) else np.nan
        elif name in ("mean", "amean"):
            out[name] = float((weight[used] * values).sum()) if len(values) else np.nan
        elif name == "var" and "mean" in step.floats and len(values):
            means = step.floats["mean"][rows][used]
            middle = float((weight[used] * means).sum())
            out[name] = float((weight[used] * (values + (means - middle) ** 2)).sum())
    return out
