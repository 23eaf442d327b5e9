"""All ranks of a run as if one process had recorded it: what a comparison of two layouts reads.

A parameter may be whole on every rank, or cut over some; a batch is some samples here and the others
there; a layer may run on one rank alone. So records are put together by site. Equal records are copies and count
once. Parts whose place is known add up: checksum, sketch and moments are sums over elements keyed by their index in
the whole. Values that differ from rank to rank without a place (samples, activations, losses) are gathered: of these
only what depends neither on order nor on layout is known, their extrema and means. What cannot be put together counts
as not observed, and says why.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import GRADIENT_OF, KIND_CODES, Kind, Layout, ModuleInfo, Phase, Record, Status, Summary
from introspect_cli.store.batch import StepBatch, record_stats
from introspect_cli.store.files import Room
from introspect_cli.store.format import ENTRY
from introspect_cli.store.index import StepEntry
from introspect_cli.store.names import SiteTable, encode_sites
from introspect_cli.store.rank_reader import RankReader
from introspect_cli.store.ranked import Places, RankedStep, whole_layout
from introspect_cli.store.side_by_side import side_by_side
from introspect_cli.store.together import Together

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from introspect_cli.labels import Labels
    from introspect_cli.records import Part, Site, SiteInfo
    from introspect_cli.store.index import Entries
    from introspect_cli.store.stages import Stages

    Array = NDArray[Any]

_FLOWING = frozenset({Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.LOSS})
_GOING_IN = [Kind.INPUT.value, Kind.GRAD_INPUT.value]
_COMING_OUT = [Kind.OUTPUT.value, Kind.GRAD_OUTPUT.value]
_VALUE_OF = {gradient.value: value.value for value, gradient in GRADIENT_OF.items()}


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
        stages: Mapping[int, Stages] | None = None,
        lacking: str = "",
        complete: bool = False,
    ) -> None:
        """Take the ranks' readers, which stay theirs who opened them.

        Args:
            path: the run, for messages.
            readers: at least one, by rank.
            fold_calls: whether all calls of a module in a step count as one: microbatches, accumulation.
            stages: of ranks that run stages of a pipeline, these.
            lacking: why the values that each rank has its own of are not all there; "" where they are.
            complete: whether these are all ranks of the run.
        """
        self.fold_calls = fold_calls
        self._stages = dict(stages or {})
        self._lacking, self._complete = lacking, complete
        self.path = path
        self.readers = list(readers)
        self.rank = self.readers[0].rank
        self.running = any(reader.running for reader in readers)
        self.ended = all(reader.ended for reader in readers)
        self.thinned = tuple(dict.fromkeys(own for reader in readers for own in reader.thinned))
        self.layouts = list(dict.fromkeys(whole_layout(layout) for reader in readers for layout in reader.layouts))
        self._layout_number = {layout: number for number, layout in enumerate(self.layouts)}
        self.numbers: list[Array] = []
        self._sizes: dict[int, int] = {}
        self._rooms = [Room() for _ in self.readers]
        self.read = lru_cache(maxsize=3)(self._read)

    @cached_property
    def apart(self) -> frozenset[str]:
        """Roots whose stages have other parameters under equal names, as stages cut out of a sequence have.

        One that several stages have begins with equal values on all of them.
        """
        seen: dict[tuple[str, Part | None], tuple[int, object]] = {}
        found = set()
        for reader in self.readers:
            stages = self._stages.get(reader.rank)
            if stages is None or not len(reader):
                continue
            sites, batch = reader.sites, reader.read_row(0)
            for site, layout, checksum in zip(
                np.asarray(batch.site).tolist(), np.asarray(batch.layout).tolist(), batch.checksum.tolist(), strict=True
            ):
                if sites.kind[site] != Kind.PARAM.value or sites.phase[site] != Phase.START.value:
                    continue
                own, fqn = reader.layouts[layout], sites.fqn[site]
                stage, name = stages.stage(fqn.partition(".")[0]), stages.name(fqn)
                mark = own.shape, own.dtype, checksum
                other = seen.setdefault((name, own.part), (stage, mark))
                if other[0] != stage and other[1] != mark:
                    found.add(name.partition(".")[0])
        return frozenset(found)

    @cached_property
    def sites(self) -> SiteTable:
        """All sites of all ranks, by number: those of the first, then what others have beside."""
        number_of: dict[int, int] = {}
        by_site: dict[Site, int] = {}
        rows: list[tuple[Site, SiteInfo]] = []
        last: tuple[Array, Stages | None] | None = None
        for reader in self.readers:
            stages = self._stages.get(reader.rank)
            if last is not None and last[1] == stages and np.array_equal(last[0], reader.sites.key):
                self.numbers.append(self.numbers[-1])
                continue
            if last is not None and last[1] != stages:
                number_of.clear()  # the same name may be another's
            last = reader.sites.key, stages
            keys = last[0].tolist()
            for number, key in enumerate(keys):
                if key not in number_of:
                    site, info = reader.sites[number]
                    if stages is not None:
                        site = replace(site, fqn=stages.name(site.fqn, self.apart))
                    if self.fold_calls and site.kind in _FLOWING:
                        site = replace(site, call=0)
                    number_of[key] = by_site.setdefault(site, len(rows))
                    if number_of[key] == len(rows):
                        rows.append((site, info))
            self.numbers.append(np.array([number_of[key] for key in keys], np.int64))
        return SiteTable(dict(encode_sites(rows)), f"{self.path}: its ranks")

    @cached_property
    def modules(self) -> list[ModuleInfo]:
        """The modules of all ranks: those of the first, then what others have beside."""
        every = (module for reader in reversed(self.readers) for module in self._named(reader, reader.modules))
        return list({module.fqn: module for module in every}.values())

    @cached_property
    def module_rows(self) -> list[ModuleInfo]:
        """All rows of modules of all ranks, each once."""
        return list(dict.fromkeys(row for reader in self.readers for row in self._named(reader, reader.module_rows)))

    def _named(self, reader: RankReader, modules: list[ModuleInfo]) -> list[ModuleInfo]:
        """A rank's modules by their names in the whole model."""
        stages = self._stages.get(reader.rank)
        return modules if stages is None else [replace(own, fqn=stages.name(own.fqn, self.apart)) for own in modules]

    @cached_property
    def labels(self) -> dict[int, Labels]:
        """What the framework calls each step, as the first rank that says so has it."""
        found: dict[int, Labels] = {}
        for reader in reversed(self.readers):
            found |= reader.labels
        return found

    @cached_property
    def entries(self) -> Entries:
        """The steps that all ranks have, with a digest over the ranks' own; without numbers of rows, see `rows_in`."""
        common = self.readers[0].entries["step"]
        for reader in self.readers[1:]:
            common = np.intersect1d(common, reader.entries["step"])
        out = np.zeros(len(common), ENTRY)
        out["step"] = common
        own = [reader.entries["digest"][np.searchsorted(reader.entries["step"], common)] for reader in self.readers]
        chain, digests, chains = bytes(16), [], []
        for every in np.stack(own, axis=1) if len(common) else ():
            digests.append(blake2b(every.tobytes(), digest_size=16).digest())
            chain = blake2b(chain + digests[-1], digest_size=16).digest()
            chains.append(chain)
        out["digest"] = np.frombuffer(b"".join(digests), out["digest"].dtype)
        out["chain"] = np.frombuffer(b"".join(chains), out["chain"].dtype)
        return out

    def rows_in(self, rows: Array) -> int:
        """How many records some steps (positions among the entries) have once copies and parts are put together.

        No index says that: a step that was not read before is read.
        """
        steps = self.entries["step"][rows].tolist()
        return sum(self._sizes[step] if step in self._sizes else len(self.read(step)) for step in steps)

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.entries)

    def entry(self, row: int) -> StepEntry:
        """The `row`-th step's entry."""
        found = self.entries[row]
        return StepEntry(int(found["step"]), 0, 0, 0, found["digest"].tobytes(), found["chain"].tobytes())

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

    def held(self, step: int, site: int) -> dict[int, tuple[int, ...]]:
        """What the ranks recorded of a site in a step: the checksum of each value of it, with its shape.

        Values with a place in the whole, and what a rank could not see, are of no shape.
        """
        found: dict[int, tuple[int, ...]] = {}
        for reader, numbers in zip(self.readers, self.numbers, strict=True):
            batch = reader.read(step)
            for row in np.flatnonzero(numbers[np.asarray(batch.site)] == site).tolist():
                layout = reader.layouts[int(batch.layout[row])]
                seen = batch.status[row] == int(Status.OBSERVED) and layout.part is None
                found[int(batch.checksum[row])] = layout.shape if seen else ()
        return found

    # --- putting together

    def _read(self, step: int) -> StepBatch:
        """A step of all ranks, put together by site.

        Raises:
            KeyError: a rank has not recorded it.
            StoreError: a rank's bytes are damaged.
        """
        if not self.numbers:
            _ = self.sites
        rows = self._rows[:, self.row_of(step)].tolist()
        every = zip(self.readers, rows, self._rooms, strict=True)
        batches = side_by_side([partial(own.read_row, row, room) for own, row, room in every])
        ranks = [reader.rank for reader in self.readers]
        together = self._together
        found = together.put(RankedStep(batches, ranks, self.numbers, self._places.numbers, together.rows))
        self._sizes[step] = len(found)
        return found

    @cached_property
    def _rows(self) -> Array:
        """Where among each rank's entries the steps are that all have; (ranks, steps)."""
        steps = self.entries["step"]
        return np.stack([np.searchsorted(reader.entries["step"], steps) for reader in self.readers])

    @cached_property
    def _places(self) -> Places:
        return Places(self.readers)

    @cached_property
    def _together(self) -> Together:
        kinds = np.array([KIND_CODES[kind] for kind in self.sites.kind], np.int64)
        told = (self._places, kinds, self._left_out, self._layout, self._lacking)
        return Together(*told, of=self._of, complete=self._complete)

    @cached_property
    def _of(self) -> Array:
        """Of each site of a gradient that flows back, the site of the value that it is of; -1 of all others."""
        sites = self.sites
        rows = list(zip(sites.kind, sites.fqn, sites.path, sites.call.tolist(), strict=True))
        values = {row: number for number, row in enumerate(rows) if row[0] in _VALUE_OF.values()}
        return np.array([values.get((_VALUE_OF.get(row[0], ""), *row[1:]), -1) for row in rows], np.int64)

    def _left_out(self, step: RankedStep) -> Array:
        """The rows that are not the model's: collectives, and what flows between stages of a pipeline.

        Every stage of a pipeline has a root of the same name: what goes into the model goes into that of the first,
        what comes out of it out of that of the last.
        """
        out: Array = self._collectives[step.site]
        if self._stages:
            passed = [np.asarray(own[batch.site]) for own, batch in zip(self._passed, step.batches, strict=True)]
            out = out | np.concatenate(passed)
        return out

    @cached_property
    def _collectives(self) -> Array:
        return np.array([kind == Kind.COLLECTIVE.value for kind in self.sites.kind], np.bool_)

    @cached_property
    def _passed(self) -> list[Array]:
        """Of each rank's sites, whether it is what a stage of a pipeline is given by another, or gives to one."""
        out = []
        for reader in self.readers:
            stages, sites = self._stages.get(reader.rank), reader.sites
            found = np.zeros(len(sites), np.bool_)
            for number, (fqn, kind) in enumerate(zip(sites.fqn, sites.kind, strict=True) if stages is not None else ()):
                if "." not in fqn and stages is not None:
                    found[number] = (kind in _GOING_IN and stages.stage(fqn) != 0) or (
                        kind in _COMING_OUT and stages.stage(fqn) != stages.of - 1
                    )
            out.append(found)
        return out

    def _layout(self, layout: Layout) -> int:
        number = self._layout_number.get(layout)
        if number is None:
            number = self._layout_number[layout] = len(self.layouts)
            self.layouts.append(layout)
        return number


Reader = RankReader | WholeReader
"""What can be read like one rank: one, or all as one."""
