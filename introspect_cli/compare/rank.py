"""One rank of both runs, compared step by step.

Only steps whose digests differ are opened, one at a time, so memory stays at one step whatever the size of a run.
Counting is done on arrays; divergences become objects only as far as they are to be listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.align import (
    KINDS,
    PHASES,
    Columns,
    align,
    columns,
)
from introspect_cli.compare.coverage import Coverage, coverage
from introspect_cli.compare.facts import Carried, Facts, carry_over
from introspect_cli.compare.heat import Heat
from introspect_cli.compare.items import materialise
from introspect_cli.compare.match import StepPair, in_order, match
from introspect_cli.compare.measure import Layouts
from introspect_cli.compare.offset import end_values, start_values
from introspect_cli.compare.origin import Cause, judge
from introspect_cli.compare.result import Reason, Role
from introspect_cli.compare.steps import Paired, differing, pair_steps
from introspect_cli.compare.tolerance import NoiseFloor, keep_rows, relative_rows, within_tolerance
from introspect_cli.records import Kind, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.compare.result import Divergence
    from introspect_cli.compare.sides import Sides


@dataclass(frozen=True)
class Tally:
    """Counts of one rank; the words are those of `result.Counts`.

    Attributes:
        blind: records that only one side could see.
        blind_both: records that run a could not see, by estimate.
    """

    records: int = 0
    diverged_steps: int = 0
    diverged: int = 0
    only_a: int = 0
    only_b: int = 0
    within: int = 0
    not_observed: int = 0
    blind: int = 0
    blind_both: int = 0


@dataclass
class RankOutcome:
    """What came out of comparing one rank.

    Attributes:
        rank: process.
        paired: the steps of both.
        offset: step k of b was compared with step k + offset of a.
        tally: counts.
        listed: divergences, in order, up to the limit.
        first: the first divergence, also where the limit is 0.
        cause: why the first one is what it is.
        facts: the first diverging step.
        previous: the compared step before it; None where there is none.
        blind_site: a site that only one side could see, as an example.
        heat: the divergence map in the making.
    """

    rank: int
    paired: Paired
    offset: int = 0
    tally: Tally = field(default_factory=Tally)
    listed: list[Divergence] = field(default_factory=list)
    first: Divergence | None = None
    cause: Cause | None = None
    facts: Facts | None = None
    previous: StepPair | None = None
    blind_site: str = ""
    heat: Heat | None = None


def compare_rank(sides: Sides, options: DiffOptions, offset: int) -> RankOutcome:
    """Compare one rank of two runs."""
    wanted = options.wants_step if options.steps else None
    paired = pair_steps(sides.a, sides.b, offset, wanted)
    outcome = RankOutcome(sides.rank, paired, offset)
    places = differing(paired)
    records = paired.records
    if not places:
        outcome.tally = Tally(records=records, blind_both=_blind_rows(sides.a, paired))
        return outcome
    return _Walk(sides, options, outcome, places, records).run()


def _blind_rows(reader: Any, paired: Paired) -> int:
    """How many records run a could not see, in all compared steps.

    Steps with equal digests are not opened to find out, and what a run cannot see hardly changes from step to step: the
    first and the last common step are counted, and the last stands for those between.
    """
    if not len(paired):
        return 0
    first, last = (_blind_in(reader, paired[place][0]) for place in (0, len(paired) - 1))
    return first + last * (len(paired) - 1)


def _blind_in(reader: Any, entry: Any) -> int:
    batch = reader.read(entry.step)
    status = np.asarray(batch.status)
    partial = (status == int(Status.PARTIAL)) & (np.asarray(batch.checksum) == 0)
    return int(((status == int(Status.NOT_OBSERVED)) | partial).sum())


class _Walk:
    """The walk over one rank's differing steps; it keeps what must be remembered from step to step."""

    def __init__(
        self, sides: Sides, options: DiffOptions, outcome: RankOutcome, places: Sequence[int], records: int
    ) -> None:
        self.sides, self.options, self.outcome, self.places = sides, options, outcome, places
        self.columns_a = columns(sides.a.sites, sides.rename)
        self.columns_b = columns(sides.b.sites)
        self.alignment = align(self.columns_a, self.columns_b)
        self.layouts_a, self.layouts_b = Layouts(sides.a.layouts), Layouts(sides.b.layouts)
        self.counted = self.alignment.mask(options.kinds, options.modules)
        offset = outcome.offset
        self.same_start = sides.a.entry(0).step == sides.b.entry(0).step + offset
        self.cover: Coverage = coverage(self.alignment, sides.manifest_a, sides.manifest_b, same_start=self.same_start)
        self.full = self.counted.all() or not options.narrowed
        self.floors = [
            NoiseFloor(align(self.columns_a, self._noise_columns(n)), len(self.columns_a)) for n in sides.noise
        ]
        self.tally = {"records": records, "steps": 0, "diverged": 0, "only_a": 0, "only_b": 0}
        self.tally |= {"within": 0, "unseen": 0, "blind": 0}
        self.resumed = False
        self.recorded = {self.alignment.fqn[union] for union in np.flatnonzero(self._tensor_sites())}

    def _tensor_sites(self) -> Any:
        alignment = self.alignment
        kinds = [KINDS.index(Kind.PARAM), KINDS.index(Kind.BUFFER)]
        return np.isin(alignment.kind, kinds) & (alignment.phase == PHASES.index(Phase.OPTIMIZER))

    def _noise_columns(self, reader: Any) -> Columns:
        return columns(reader.sites, self.sides.rename)

    def run(self) -> RankOutcome:
        """Walk the steps."""
        carried = self._resumed() if not self.same_start else Carried()
        self.resumed = bool(carried.params or carried.buffers)
        last = -1
        for place, pair in self._pairs():
            if place > last + 1:
                carried = Carried(
                    params={name for name in carried.params if name not in self.recorded},
                    buffers={name for name in carried.buffers if name not in self.recorded},
                    diverged=carried.diverged,
                )
            last = place
            if not pair.diverged:
                continue
            carried = self._take(place, pair, carried)
        counts = self.tally
        self.outcome.tally = Tally(
            records=counts["records"],
            diverged_steps=counts["steps"],
            diverged=counts["diverged"],
            only_a=counts["only_a"],
            only_b=counts["only_b"],
            within=counts["within"],
            not_observed=counts["unseen"],
            blind=counts["blind"],
            blind_both=_blind_rows(self.sides.a, self.outcome.paired),
        )
        return self.outcome

    def _pairs(self) -> Iterator[tuple[int, StepPair]]:
        """Differing steps, matched and filtered."""
        common = self.outcome.paired
        chosen = set(self.places)
        steps = range(len(common)) if self.floors else self.places
        for place in steps:
            entry_a, entry_b = common[place]
            if self.floors:
                self._learn(entry_a)
            if place not in chosen:
                continue
            pair = self._match(entry_a, entry_b)
            yield place, pair

    def _match(self, entry_a: Any, entry_b: Any, *, everything: bool = False) -> StepPair:
        batch_a, batch_b = self.sides.a.read(entry_a.step), self.sides.b.read(entry_b.step)
        counted = self.alignment.mask(frozenset(), ()) if everything else self.counted
        pair = match(self.alignment, counted, entry_a.step, entry_b.step, batch_a, batch_b)
        site_b = self.alignment.b_ids[np.asarray(batch_b.site)]
        site_a = np.asarray(batch_a.site).astype(np.int64)
        pair = replace(
            pair,
            only_a=pair.only_a[self.cover.only_a[site_a[pair.only_a]]],
            only_b=pair.only_b[self.cover.only_b[site_b[pair.only_b]]],
        )
        if everything:
            return pair
        self._count_unseen(pair)
        before = len(pair.rows_a)
        if before and self.options.tolerant:
            passes = within_tolerance(self.alignment, pair, self.options, self.layouts_a, self.layouts_b)
            pair = keep_rows(pair, ~passes)
        if len(pair.rows_a) and self.floors:
            rel = relative_rows(pair, self.layouts_a, self.layouts_b)
            passes = np.logical_or.reduce([floor.within(pair, rel, self.options.noise_factor) for floor in self.floors])
            pair = keep_rows(pair, ~passes)
        self.tally["within"] += before - len(pair.rows_a)
        return pair

    def _count_unseen(self, pair: StepPair) -> None:
        if not len(pair.unseen_a):
            return
        seen_a = np.asarray(pair.a.status)[pair.unseen_a] != int(Status.NOT_OBSERVED)
        seen_b = np.asarray(pair.b.status)[pair.unseen_b] != int(Status.NOT_OBSERVED)
        one_sided = seen_a != seen_b
        self.tally["unseen"] += len(pair.unseen_a)
        self.tally["blind"] += int(one_sided.sum())
        if one_sided.any() and not self.outcome.blind_site:
            union = int(np.asarray(pair.a.site)[pair.unseen_a[np.argmax(one_sided)]])
            site = self.alignment.site(union)
            self.outcome.blind_site = f"{site.kind.value} of {site.fqn} at step {pair.step}"

    def _learn(self, entry_a: Any) -> None:
        """Let each noise run raise its floor at a step, where it has that step and differs there."""
        for reader, floor in zip(self.sides.noise, self.floors, strict=True):
            if entry_a.step not in reader:
                continue
            entry = reader.entry(reader.row_of(entry_a.step))
            if entry.digest == entry_a.digest:
                continue
            counted = floor.alignment.mask(frozenset(), ())
            pair = match(
                floor.alignment,
                counted,
                entry_a.step,
                entry.step,
                self.sides.a.read(entry_a.step),
                reader.read(entry.step),
            )
            floor.learn(pair, self.layouts_a, Layouts(reader.layouts))

    def _resumed(self) -> Carried:
        """Tensors that the later of two captures began with and that differ from what the other had then."""
        sides, outcome = self.sides, self.outcome
        first_a, first_b = sides.a.entry(0).step, sides.b.entry(0).step + outcome.offset
        late, whole, sites_late, sites_whole, first = (
            (sides.b, sides.a, self.columns_b, self.columns_a, first_b)
            if first_b > first_a
            else (sides.a, sides.b, self.columns_a, self.columns_b, first_a - outcome.offset)
        )
        if first - 1 not in whole:
            return Carried()
        entry = whole.entry(whole.row_of(first - 1))
        began, ended = start_values(late, sites_late), end_values(whole, sites_whole, entry)
        unequal = {key for key in began.keys() & ended.keys() if began[key] != ended[key]}
        buffer = str(KINDS.index(Kind.BUFFER))
        return Carried(
            params={fqn for kind, fqn in unequal if kind != buffer},
            buffers={fqn for kind, fqn in unequal if kind == buffer},
        )

    def _take(self, place: int, pair: StepPair, carried: Carried) -> Carried:
        """Count a step's divergences and list what there is room for."""
        outcome, options = self.outcome, self.options
        counts = self.tally
        counts["steps"] += 1
        counts["diverged"] += pair.diverged
        counts["only_a"] += len(pair.only_a)
        counts["only_b"] += len(pair.only_b)
        if options.want_map:
            if outcome.heat is None:
                outcome.heat = Heat(self.alignment, outcome.paired.steps.tolist())
            outcome.heat.add(place, pair, self.layouts_a, self.layouts_b)
        room = options.limit is None or len(outcome.listed) < options.limit
        if outcome.first is not None and not room:
            return carried
        items = in_order(self.alignment, pair)
        whole = pair if self.full else self._match(*outcome.paired[place], everything=True)
        everything = items if self.full else in_order(self.alignment, whole)
        facts = Facts(self.alignment, whole, everything, carried)
        if self.full:
            positions = np.arange(len(items))
        else:
            place_of = {
                (int(a), int(b)): i for i, (a, b) in enumerate(zip(everything.row_a, everything.row_b, strict=True))
            }
            positions = np.array(
                [place_of[int(a), int(b)] for a, b in zip(items.row_a, items.row_b, strict=True)], dtype=np.int64
            )
        for position in positions:
            if outcome.first is not None and options.limit is not None and len(outcome.listed) >= options.limit:
                break
            cause = judge(facts, int(position))
            if outcome.first is None and cause.role is Role.PROPAGATED and self.resumed:
                cause = Cause(Role.PROPAGATED, Reason.RESUMED)
            floors = [floor.floor for floor in self.floors]
            divergence = materialise(self.sides, facts, int(position), cause, self.layouts_a, self.layouts_b, floors)
            if outcome.first is None:
                outcome.first, outcome.cause, outcome.facts = divergence, cause, facts
                if place > 0:
                    outcome.previous = self._match(*outcome.paired[place - 1], everything=True)
            if options.limit is None or len(outcome.listed) < options.limit:
                outcome.listed.append(divergence)
        return carry_over(facts, carried, self.recorded)
