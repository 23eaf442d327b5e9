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
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import GRADIENT_OF, KIND_CODES, Kind, Layout, ModuleInfo, Phase
from introspect_cli.store.format.batch import rows_of
from introspect_cli.store.format.kinds import kinds_that
from introspect_cli.store.format.log import ENTRY
from introspect_cli.store.ranks.combine import CombinedStep, join_slices
from introspect_cli.store.ranks.digests import layout_free_digests
from introspect_cli.store.ranks.plan import plan_of
from introspect_cli.store.ranks.stacked import LayoutTables, Rows, StackedStep, batched_layout, whole_layout
from introspect_cli.store.read.name_tables import SiteTable
from introspect_cli.store.read.rank_reader import RankReader, read_rows
from introspect_cli.store.read.step_reader import Reader
from introspect_cli.store.write.names import encode_sites

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from introspect_cli.labels import Labels
    from introspect_cli.records import Part, Site, SiteInfo
    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.format.log import Entries
    from introspect_cli.store.ranks.plan import Plan
    from introspect_cli.store.read.manifests import Stages

    Array = NDArray[Any]

MOST_ROWS = 1_000_000
"""Records of ranks that are put together at once: of all that is recorded, some 300 MB."""

_BY_CALL = kinds_that("by_call")

_GOING_IN = [Kind.INPUT.value, Kind.GRAD_INPUT.value]
_COMING_OUT = [Kind.OUTPUT.value, Kind.GRAD_OUTPUT.value]
_VALUE_OF = {gradient.value: value.value for value, gradient in GRADIENT_OF.items()}

_STATES = frozenset({Kind.PARAM.value, Kind.OPTIMIZER_STATE.value})


class WholeReader(Reader):
    """All ranks of a run, read as one rank.

    Ranks number their sites by themselves, and stages of a pipeline have roots of the same name: here they have common
    numbers, and names as in the whole model.

    Attributes:
        rank: the lowest of them.
        readers: the ranks' own readers.
        stages: of ranks that run stages of a pipeline, these.
        lacking: why values that each rank has its own of are not all there; "" where they are.
        complete: whether all ranks were recorded, so that a missing part of the model is an error.
    """

    is_whole = True
    readers: list[RankReader]

    def __init__(
        self,
        path: str,
        readers: Sequence[RankReader],
        fold: Mapping[tuple[bool, str], int] | None = None,
        stages: Mapping[int, Stages] | None = None,
        *,
        lacking: str = "",
        complete: bool = False,
    ) -> None:
        """Combine what the ranks' readers know by now; records and names are read when asked for.

        Args:
            path: the run, for messages.
            readers: of the ranks, at least one, by rank.
            fold: how many calls of a name belong to one microbatch, of what is called more often than in the other run:
                by whether it is in evaluation, and its name. Calls are put together modulo that.
            stages: of ranks that run stages of a pipeline, these.
            lacking: why values that each rank has its own of are not all there; "" where they are.
            complete: whether these are all ranks of the run.
        """
        self.path, self.readers = path, list(readers)
        self._fold, self.stages = fold or {}, stages or {}
        self.rank_count = len(self.readers)
        self.rank = self.readers[0].rank
        self.running = any(reader.running for reader in self.readers)
        self.ended = all(reader.ended for reader in self.readers)
        self.thinned = tuple(dict.fromkeys(dropped for reader in self.readers for dropped in reader.thinned))
        self.lacking, self.complete = lacking, complete
        self._sizes: dict[tuple[int, int], int] = {}
        self._forms = np.full(len(self.common_steps), -1, np.int64)
        self._last_plan: tuple[tuple[int, int], Plan, Array] | None = None
        self._batched: dict[bytes, int] = {}
        self._read = lru_cache(maxsize=3)(self._combined_row)

    @cached_property
    def common_steps(self) -> NDArray[np.int64]:
        """int64, the numbers of the steps that every rank has, rising."""
        common = self.readers[0].entries["step"]
        for reader in self.readers[1:]:
            if not np.array_equal(common, reader.entries["step"]):
                common = np.intersect1d(common, reader.entries["step"])
        return np.asarray(common, np.int64)

    @cached_property
    def entries(self) -> Entries:  # type: ignore[override]  # mypy takes it for a property that cannot be set
        """Entries of the steps that every rank has; only step, digest and chain are set (see `rows_in` for `rows`).

        A digest is the same in any layout where the ranks' totals determine it, else it is one over the ranks' digests.
        """
        out = np.zeros(len(self.common_steps), ENTRY)
        out["step"] = self.common_steps
        of_each = [reader.entries["digest"][rows] for reader, rows in zip(self.readers, self._positions, strict=True)]
        every = np.stack(of_each, axis=1) if len(out) else ()
        chain, step_digests, chains = bytes(16), [], []
        for digest, ranks in zip(self._layout_free_digests(), every, strict=True):
            step_digests.append(digest or blake2b(ranks.tobytes(), digest_size=16).digest())
            chain = blake2b(chain + step_digests[-1], digest_size=16).digest()
            chains.append(chain)
        out["digest"] = np.frombuffer(b"".join(step_digests), out["digest"].dtype)
        out["chain"] = np.frombuffer(b"".join(chains), out["chain"].dtype)
        return out

    def _layout_free_digests(self) -> list[bytes | None]:
        """For each step a digest that is equal in any layout; None where the ranks' totals do not determine it.

        None for all steps of one rank, of stages of a pipeline, with a fold, and where a rank was not recorded. Else
        sets `_forms` to the number of each step's combination of forms, for `rows_in`.
        """
        if self._fold or self.stages or self.lacking or len(self.readers) == 1:
            return [None] * len(self.common_steps)
        totals, tables = [reader.totals for reader in self.readers], self.tables
        keys = np.asarray(self.sites.key, np.uint64)
        step_digests, self._forms = layout_free_digests(totals, keys, self.kinds, tables, self._positions, self._plans)
        return step_digests

    def _plans(self, row: int) -> list[Plan]:
        """The plan of each slice of the step at a position; sets its number of records, for `rows_in`."""
        of = self._slices_of(row)
        plans = [self._planned(self._stacked(row, which, of), (which, of))[0] for which in range(of)]
        self._sizes[self._size_key(row)] = sum(len(plan.starts) for plan in plans)
        return plans

    @property
    def layout_mark(self) -> str:
        """16 hex digits over each rank's parts and names of parameters and optimizer state: equal if sharded alike."""
        digest = blake2b(digest_size=8)
        for reader in self.readers:
            parts = sorted({str((layout.shape, layout.part)) for layout in reader.layouts if layout.part is not None})
            held = sorted({row for row in zip(reader.sites.fqn, reader.sites.kind, strict=True) if row[1] in _STATES})
            digest.update(repr((reader.rank, parts, held)).encode())
        return digest.hexdigest()

    @cached_property
    def labels(self) -> dict[int, Labels]:
        """Labels by step, of each step all from the first rank that has some."""
        labels: dict[int, Labels] = {}
        for reader in reversed(self.readers):
            labels |= reader.labels
        return labels

    def rows_in(self, rows: Array) -> int:
        """Number of combined records in some steps (positions among the entries).

        No index says that: a step is planned for it, unless one with the same forms of totals was planned or read.
        """
        every = np.arange(len(self))[rows].tolist()
        for row in every:
            if self._size_key(row) not in self._sizes:
                self._plans(row)
        return sum(self._sizes[self._size_key(row)] for row in every)

    def _size_key(self, row: int) -> tuple[int, int]:
        """A key that is equal only for steps with as many combined records: the forms, else the position."""
        form = int(self._forms[row])
        return (form, -1) if form >= 0 else (-1, row)

    # --- names

    @cached_property
    def distinct_roots(self) -> frozenset[str]:
        """Root modules whose pipeline stages have parameters of equal name and part that start with different values.

        A parameter that several stages share begins with equal values on all of them. Each rank's first step on record
        is read for it.
        """
        seen: dict[tuple[str, Part | None], tuple[int, object]] = {}
        roots = set()
        for reader in self.readers:
            stages = self.stages.get(reader.rank)
            if stages is None or not len(reader):
                continue
            sites, batch = reader.sites, reader.read_row(0)
            for site, layout, checksum in zip(
                np.asarray(batch.site).tolist(), np.asarray(batch.layout).tolist(), batch.checksum.tolist(), strict=True
            ):
                if sites.kind[site] != Kind.PARAM.value or sites.phase[site] != Phase.START.value:
                    continue
                recorded, fqn = reader.layouts[layout], sites.fqn[site]
                stage, name = stages.stage(fqn.partition(".")[0]), stages.name(fqn)
                mark = recorded.shape, recorded.dtype, checksum
                other = seen.setdefault((name, recorded.part), (stage, mark))
                if other[0] != stage and other[1] != mark:
                    roots.add(name.partition(".")[0])
        return frozenset(roots)

    @property
    def sites(self) -> SiteTable:
        """All sites of all ranks, by common number: the first rank's, then further ones of the others."""
        return self._numbered[0]

    @property
    def site_numbers(self) -> list[Array]:
        """For each reader, int64, the common number of each of its sites."""
        return self._numbered[1]

    @cached_property
    def _numbered(self) -> tuple[SiteTable, list[Array]]:
        """The common site table and, for each reader, the common number of each site.

        Sites are one where they are equal under their names in the whole model, with folded calls.
        """
        numbers: list[Array] = []
        number_of: dict[int, int] = {}
        by_site: dict[Site, int] = {}
        rows: list[tuple[Site, SiteInfo]] = []
        last: tuple[Array, Stages | None] | None = None
        for reader in self.readers:
            stages = self.stages.get(reader.rank)
            if last is not None and last[1] == stages and np.array_equal(last[0], reader.sites.key):
                numbers.append(numbers[-1])
                continue
            if last is not None and last[1] != stages:
                number_of.clear()  # the same name may be another's
            last = reader.sites.key, stages
            keys = last[0].tolist()
            for number, key in enumerate(keys):
                if key not in number_of:
                    site, info = reader.sites[number]
                    named = site.fqn if stages is None else stages.name(site.fqn)
                    each = self._fold.get((site.evaluates, named), 0) if site.kind in _BY_CALL else 0
                    if stages is not None:
                        site = replace(site, fqn=stages.name(site.fqn, self.distinct_roots))
                    if each:
                        site = replace(site, call=site.call % each)
                    number_of[key] = by_site.setdefault(site, len(rows))
                    if number_of[key] == len(rows):
                        rows.append((site, info))
            numbers.append(np.array([number_of[key] for key in keys], np.int64))
        return SiteTable(dict(encode_sites(rows)), f"{self.path}: its ranks"), numbers

    @cached_property
    def modules(self) -> list[ModuleInfo]:
        """The modules of all ranks, one per name: the lowest rank's, then further ones of the others."""
        every = (module for reader in reversed(self.readers) for module in self._named(reader, reader.modules))
        return list({module.fqn: module for module in every}.values())

    @cached_property
    def module_rows(self) -> list[ModuleInfo]:
        """All distinct rows of modules of all ranks, in order of rank."""
        return list(dict.fromkeys(row for reader in self.readers for row in self._named(reader, reader.module_rows)))

    def _named(self, reader: RankReader, modules: list[ModuleInfo]) -> list[ModuleInfo]:
        """A rank's modules under their names in the whole model; `modules` itself for a rank without stages."""
        stages = self.stages.get(reader.rank)
        return (
            modules
            if stages is None
            else [replace(module, fqn=stages.name(module.fqn, self.distinct_roots)) for module in modules]
        )

    @cached_property
    def kinds(self) -> Array:
        """int64 (sites,), the code of each site's kind."""
        return np.array([KIND_CODES[kind] for kind in self.sites.kind], np.int64)

    @cached_property
    def buffers_at_first(self) -> Array:
        """Bool (sites,), True for the value of a buffer at the start of a run (START, call 0)."""
        begins = zip(self.sites.kind, self.sites.phase, self.sites.call.tolist(), strict=True)
        first = Kind.BUFFER.value, Phase.START.value, 0
        return np.array([site == first for site in begins], np.bool_)

    @cached_property
    def value_of(self) -> Array:
        """int64 (sites,), for the gradient of an activation the site of that activation; -1 for all others."""
        sites = self.sites
        rows = list(zip(sites.kind, sites.fqn, sites.path, sites.call.tolist(), strict=True))
        values = {row: number for number, row in enumerate(rows) if row[0] in _VALUE_OF.values()}
        return np.array([values.get((_VALUE_OF.get(row[0], ""), *row[1:]), -1) for row in rows], np.int64)

    def left_out(self, step: StackedStep) -> Array:
        """Bool (rows,), rows that are ignored: collectives, and what one pipeline stage passes to another.

        Every stage of a pipeline has a root of the same name: what goes into the model goes into that of the first,
        what comes out of it out of that of the last.
        """
        out: Array = (self.kinds == KIND_CODES[Kind.COLLECTIVE])[step.rows.site]
        if self.stages:
            passed = [
                np.asarray(is_passed[batch.site]) for is_passed, batch in zip(self._passed, step.batches, strict=True)
            ]
            out = out | np.concatenate(passed)
        return out

    @cached_property
    def _passed(self) -> list[Array]:
        """For each rank, bool (sites,), True for a stage's root input or output that is not the whole model's."""
        out = []
        for reader in self.readers:
            stages, sites = self.stages.get(reader.rank), reader.sites
            is_passed = np.zeros(len(sites), np.bool_)
            for number, (fqn, kind) in enumerate(zip(sites.fqn, sites.kind, strict=True) if stages is not None else ()):
                if "." not in fqn and stages is not None:
                    is_passed[number] = (kind in _GOING_IN and stages.stage(fqn) != 0) or (
                        kind in _COMING_OUT and stages.stage(fqn) != stages.of - 1
                    )
            out.append(is_passed)
        return out

    @cached_property
    def layouts(self) -> list[Layout]:
        """Layouts of wholes, by number; `layout_number` may append."""
        return list(dict.fromkeys(whole_layout(layout) for reader in self.readers for layout in reader.layouts))

    @cached_property
    def _layout_numbers(self) -> dict[Layout, int]:
        return {layout: number for number, layout in enumerate(self.layouts)}

    def layout_number(self, layout: Layout) -> int:
        """The number of a layout of wholes; an unknown one is appended."""
        number = self._layout_numbers.setdefault(layout, len(self.layouts))
        if number == len(self.layouts):
            self.layouts.append(layout)
        return number

    def whole_number(self, part: int) -> int:
        """The number of the whole tensor's layout, given the number of a part's among `tables.layouts`.

        A layout that is new gets the next number.
        """
        return self.layout_number(whole_layout(self.tables.layouts[part]))

    def batched_number(self, numbers: Array) -> int:
        """The number of the layout of tensors concatenated along dimension 0.

        A layout that is new gets the next number.

        Args:
            numbers: int64, the numbers of the tensors' layouts among `tables.layouts`.
        """
        key = numbers.tobytes()
        if key not in self._batched:
            layouts = [self.tables.layouts[number] for number in numbers.tolist()]
            self._batched[key] = self.layout_number(batched_layout(layouts))
        return self._batched[key]

    # --- putting together

    def read_row(self, row: int) -> StepBatch:
        """The combined records of the `row`-th step; the last 3 are cached."""
        return self._read(row)

    def _combined_row(self, row: int) -> StepBatch:
        """Combine the `row`-th step, and set the number of its records for `rows_in`."""
        of, slices = self._slices_of(row), []
        for which in range(of):
            step = self._stacked(row, which, of)
            plan, layouts = self._planned(step, (which, of))
            slices.append(CombinedStep(self, step, plan, layouts.copy()).combined())
        batch = join_slices(slices)
        self._sizes[self._size_key(row)] = len(batch)
        return batch

    def _slices_of(self, row: int) -> int:
        """In how many slices of sites the step is combined, so that each has at most about `MOST_ROWS` records."""
        rows = sum(
            int(reader.entries["rows"][at]) for reader, at in zip(self.readers, self._positions[:, row], strict=True)
        )
        return max(1, min(-(-rows // MOST_ROWS), len(self.sites)))

    def _stacked(self, row: int, which: int, of: int) -> StackedStep:
        """The records of slice `which` of `of` of the `row`-th step of all ranks.

        A site is in the slice of its number modulo `of`; a gradient in that of its value.
        """
        batches, read = [], read_rows(self.readers, self._positions[:, row].tolist())
        wanted = np.where(self.value_of < 0, np.arange(len(self.sites)), self.value_of) % of == which
        for batch, numbers in zip(read, self.site_numbers, strict=True):
            rows_of_slice = np.flatnonzero(wanted[numbers[batch.site]])
            batches.append(batch if of == 1 else rows_of([batch], [rows_of_slice]))
        last = self._last_plan[1].basis if self._last_plan is not None and self._last_plan[0] == (which, of) else None
        alike = last is not None and last.are_of(batches)
        rows = last if last and alike else Rows(batches, self.site_numbers, self.tables.common_numbers)
        return StackedStep(batches, [reader.rank for reader in self.readers], rows)

    def _planned(self, step: StackedStep, of: tuple[int, int]) -> tuple[Plan, Array]:
        """The plan of a step, and the layout of each group's whole: those of the step before, where the rows are its.

        Args:
            step: the records.
            of: which slice of how many.
        """
        if self._last_plan is None or self._last_plan[1].basis is not step.rows:
            plan = plan_of(step, self.tables, self.kinds, self.left_out(step))
            different, which = np.unique(step.rows.layout[plan.rows[plan.starts]], return_inverse=True)
            wholes = np.array([self.whole_number(number) for number in different.tolist()], np.uint32)
            self._last_plan = of, plan, wholes[which.reshape(-1)]
        return self._last_plan[1:]

    @cached_property
    def _positions(self) -> Array:
        """int64 (ranks, steps), position of each common step among each rank's entries."""
        return np.stack([np.searchsorted(reader.entries["step"], self.common_steps) for reader in self.readers])

    @cached_property
    def tables(self) -> LayoutTables:
        """The ranks' layouts."""
        return LayoutTables(self.readers)
