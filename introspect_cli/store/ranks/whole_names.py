"""What all ranks of a run call what they record: their sites, modules and layouts, as the whole numbers them.

Ranks number their sites by themselves, and stages of a pipeline have roots of the same name; of a part, the whole has
another layout.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import GRADIENT_OF, KIND_CODES, Kind, Layout, ModuleInfo, Phase
from introspect_cli.store.format.kinds import kinds_that
from introspect_cli.store.ranks.stacked import whole_layout
from introspect_cli.store.read.name_tables import SiteTable
from introspect_cli.store.write.names import encode_sites

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from introspect_cli.records import Part, Site, SiteInfo
    from introspect_cli.store.ranks.stacked import StackedStep
    from introspect_cli.store.read.manifests import Stages
    from introspect_cli.store.read.rank_reader import RankReader

    Array = NDArray[Any]

_BY_CALL = kinds_that("by_call")

_GOING_IN = [Kind.INPUT.value, Kind.GRAD_INPUT.value]
_COMING_OUT = [Kind.OUTPUT.value, Kind.GRAD_OUTPUT.value]
_VALUE_OF = {gradient.value: value.value for value, gradient in GRADIENT_OF.items()}


class WholeNames:
    """Sites, modules and layouts of several ranks under common numbers.

    Attributes:
        path: the run, for messages.
        readers: the ranks' own readers.
        stages: of ranks that run stages of a pipeline, these.
    """

    def __init__(
        self,
        path: str,
        readers: Sequence[RankReader],
        fold: Mapping[tuple[bool, str], int] | None = None,
        stages: Mapping[int, Stages] | None = None,
    ) -> None:
        """Combine the names of the ranks' readers; closing these stays with their owner.

        Args:
            path: the run, for messages.
            readers: at least one, by rank.
            fold: how many calls of a name belong to one microbatch, of what is called more often than in the other run:
                by whether it is in evaluation, and its name. Calls are put together modulo that.
            stages: of ranks that run stages of a pipeline, these.
        """
        self.path, self.readers = path, list(readers)
        self._fold, self.stages = fold or {}, stages or {}

    @cached_property
    def distinct_roots(self) -> frozenset[str]:
        """Root modules whose pipeline stages have parameters of equal name and part that start with different values.

        A parameter that several stages share begins with equal values on all of them.
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
        """The common site table and, for each reader, the common number of each site."""
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
        """A rank's modules under their names in the whole model, without the number of the pipeline stage."""
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
