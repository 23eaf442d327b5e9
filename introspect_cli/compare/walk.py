"""One rank of both runs, compared step by step.

Only steps whose digests differ are opened, one at a time. Counting is done on arrays; divergences become objects, and
their origins are judged, only as far as they are to be listed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.divergence_map import Heat
from introspect_cli.compare.effects import (
    Causes,
    brings_values,
    explains_itself,
    records_results,
    results_agree,
    watches_results,
)
from introspect_cli.compare.items import materialise
from introspect_cli.compare.join.coverage import coverage, draws_apart, options_of, seen, uncounted
from introspect_cli.compare.join.distance import Layouts
from introspect_cli.compare.join.dump import in_order_of, lists, ordered
from introspect_cli.compare.join.live_in import Carried, is_gap, kept, redundant_starts, resumed, starts, with_starts
from introspect_cli.compare.join.noise import NoiseFloor, keep_rows, relative_rows, within_tolerance
from introspect_cli.compare.join.rows import Items, StepPair, in_order, match, sites_of, with_equal
from introspect_cli.compare.join.sites import KINDS, PHASES, align, columns, evaluating, phase_code, selected
from introspect_cli.compare.join.steps import Paired, differing, known_tails, pair_steps
from introspect_cli.compare.join.wholes import Gathered
from introspect_cli.compare.outcome import RankOutcome
from introspect_cli.compare.reasons.base import judge
from introspect_cli.compare.reasons.facts import Facts, carry_over, within_tolerance_of
from introspect_cli.compare.reasons.structure import drawn
from introspect_cli.compare.reasons.words import what
from introspect_cli.compare.result import Role
from introspect_cli.compare.results import agreed_kinds
from introspect_cli.compare.structure import Apart
from introspect_cli.records import Kind, Phase, Status
from introspect_cli.store.whole import WholeReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from introspect_cli.compare.join.sites import Ids, Mask
    from introspect_cli.compare.join.steps import Sides
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.compare.reasons.base import Cause
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.index import StepEntry
    from introspect_cli.store.whole import Reader


class Walk:
    """What must be remembered from step to step while one rank is compared."""

    def __init__(self, sides: Sides, options: DiffOptions, outcome: RankOutcome, places: Sequence[int]) -> None:
        self.sides, self.options, self.outcome, self.places = sides, options, outcome, places
        self.alignment = align(columns(sides.a.sites, sides.rename), columns(sides.b.sites))
        self._layouts = Layouts(sides.a.layouts), Layouts(sides.b.layouts)
        self.counted = self.alignment.mask(options.kinds, options.modules)
        self.every = self.alignment.mask(frozenset(), ())
        if options.evaluation is not None:
            self.counted = self.counted & (self.alignment.evaluating == options.evaluation)
        if outcome.gathered is not None:
            states = self.alignment.kind == KINDS.index(Kind.RNG)
            self.counted, self.every = self.counted & ~states, self.every & ~states
        apart = draws_apart(self.alignment, sides.manifest_a, sides.manifest_b)
        self.counted, self.every = self.counted & ~apart, self.every & ~apart
        self.full = not (options.kinds or options.modules) and options.evaluation is None
        self.carried = resumed(sides, self.alignment, outcome.offset)
        self.resumed = bool(self.carried.params or self.carried.buffers or self.carried.states)
        same_start = sides.a.entry(0).step == sides.b.entry(0).step + outcome.offset
        self.cover = coverage(self.alignment, sides.manifest_a, sides.manifest_b, same_start=same_start)
        self.floors = [
            NoiseFloor(align(self.alignment.a, columns(reader.sites, sides.rename)), len(self.alignment.a))
            for reader in sides.noise
        ]
        self.recorded = self._recorded()
        self.last: int | None = None
        change = sides.rename or str
        trees = [replace(module, fqn=change(module.fqn)) for module in sides.a.modules], sides.b.modules
        self.causes = None if options.strict else Causes(self.alignment, trees)
        self.apart = outcome.apart = Apart(self.alignment)
        self.early: tuple[int, StepPair] | None = None
        self.brought = False

    @property
    def layouts(self) -> tuple[Layouts, Layouts]:
        """Lookup tables over the layouts of both; where ranks are put together, a step may have brought new ones."""
        one, two = self.sides.a.layouts, self.sides.b.layouts
        if len(self._layouts[0].numel) < len(one) or len(self._layouts[1].numel) < len(two):
            self._layouts = Layouts(one), Layouts(two)
        return self._layouts

    def _recorded(self) -> frozenset[str]:
        """FQNs of tensors that are recorded at the end of a step."""
        alignment = self.alignment
        tensors = np.isin(alignment.kind, [KINDS.index(Kind.PARAM), KINDS.index(Kind.BUFFER)])
        at_end = alignment.phase == PHASES.index(Phase.OPTIMIZER)
        return frozenset(alignment.fqn[union] for union in np.flatnonzero(tensors & at_end))

    def run(self) -> None:
        """Walk the steps, filling in the outcome; of training or evaluation alone, up to the first divergence.

        The answer needs none after that: they are counted as long as it takes seconds.
        """
        outcome, counts_all = self.outcome, self.options.want_map or self.options.limit is None
        for place, pair in self._pairs():
            if pair.diverged:
                self._take(place, pair)
            if outcome.first is not None and self.options.evaluation is not None:
                break
            if outcome.first is not None and not counts_all:
                outcome.later += len(pair.a) * _ranks(self.sides.a) + len(pair.b) * _ranks(self.sides.b)
                if outcome.later > self.options.later:
                    outcome.cut(place + 1)
                    break

    def _pairs(self) -> Iterator[tuple[int, StepPair]]:
        """Differing steps, matched and filtered; with noise runs, every step is a lesson."""
        chosen = set(self.places)
        for place in range(len(self.outcome.paired)) if self.floors else self.places:
            entry_a, entry_b = self.outcome.paired[place]
            if self.floors:
                self._learn(entry_a)
            if place in chosen:
                pair = self._match(entry_a.step, entry_b.step, self.counted)
                more = int(self.counted[pair.left].sum()) if len(pair.a) > entry_a.rows else 0
                self._count(apart=self._without_partner(pair), records=more)
                yield place, self._filtered(pair)

    def _without_partner(self, pair: StepPair) -> int:
        """Records of a that were compared with nothing, and of which nothing else is said: they are not equal."""
        own, other = pair.sites(self.alignment)
        lost = ~np.isin(own, other) if self.full else ~np.isin(own, other) & self.counted[own]
        said = np.isin(own, pair.alone)
        said[pair.only_a] = True
        return int((lost & ~said).sum())

    def _match(self, step_a: int, step_b: int, counted: Mask) -> StepPair:
        """A step of both runs, one-sided sites that mean nothing left out."""
        batch_a, batch_b, left = self._read(step_a, step_b)
        pair = replace(match(self.alignment, counted, step_a, step_b, batch_a, batch_b), left=left)
        if self.outcome.gathered is not None and (same := self.outcome.gathered.same_samples(pair)).any():
            pair = with_equal(pair, same)
        site_a, site_b = pair.sites(self.alignment)
        manifests = self.sides.manifest_a, self.sides.manifest_b
        if not ordered(manifests[0]) and ordered(manifests[1]):
            pair = replace(pair, a=in_order_of(self.alignment, batch_a, batch_b, site_a, site_b))
        listed = zip(manifests, (site_a[pair.only_a], site_b[pair.only_b]), strict=True)
        alone = [own for manifest, own in listed if lists(manifest)]
        only_a = pair.only_a[self.cover.only_a[site_a[pair.only_a]]]
        only_b = pair.only_b[self.cover.only_b[site_b[pair.only_b]]]
        only_a = only_a[seen(self.alignment, site_a[only_a], batch_b, site_b)]
        only_b = only_b[seen(self.alignment, site_b[only_b], batch_a, site_a)]
        pair = self._without_uncounted(replace(pair, only_a=only_a, only_b=only_b), site_a, site_b)
        if alone:
            pair = replace(pair, alone=np.concatenate([pair.alone, *alone]))
        only_a, only_b = pair.only_a, pair.only_b
        if starts(self.alignment, np.concatenate([site_a[only_a], site_b[only_b]])).any():
            again_a, again_b = redundant_starts(self.sides, self.alignment, pair)
            pair = replace(pair, only_a=only_a[~again_a], only_b=only_b[~again_b])
        return pair

    def _read(self, step_a: int, step_b: int) -> tuple[StepBatch, StepBatch, Ids]:
        """A step's records; where one run lists tensors at its start, with what the step before left in the other."""
        batch_a, batch_b, left = self.sides.a.read(step_a), self.sides.b.read(step_b), np.empty(0, np.int64)
        listing = lists(self.sides.manifest_a), lists(self.sides.manifest_b)
        if listing[0] == listing[1] or self.outcome.gathered is not None:
            return batch_a, batch_b, left
        alignment, (site_a, site_b) = self.alignment, sites_of(self.alignment, batch_a, batch_b)
        if listing[0]:
            batch_b, left = with_starts(alignment, self.sides.b, step_b, batch_b, alignment.b_ids, site_a)
        else:
            batch_a, left = with_starts(alignment, self.sides.a, step_a, batch_a, None, site_b)
        return batch_a, batch_b, left

    def _without_uncounted(self, pair: StepPair, site_a: Ids, site_b: Ids) -> StepPair:
        """A step in which operators whose numbers need not mean the same in both runs count as not seen."""
        mask = uncounted(self.alignment, site_a, site_b)
        if mask is None:
            return pair
        lost_a, lost_b = mask[site_a[pair.only_a]], mask[site_b[pair.only_b]]
        lost = mask[site_a[pair.rows_a]]
        return replace(
            pair,
            only_a=pair.only_a[~lost_a],
            only_b=pair.only_b[~lost_b],
            rows_a=pair.rows_a[~lost],
            rows_b=pair.rows_b[~lost],
            alone=np.concatenate([site_a[pair.only_a[lost_a]], site_b[pair.only_b[lost_b]], site_a[pair.rows_a[lost]]]),
        )

    def _filtered(self, pair: StepPair) -> StepPair:
        """The step without what tolerance or noise lets pass, which is counted, as is what was not seen."""
        self._count_unseen(pair)
        rest = self._standing_out(pair)
        if len(rest.only_a) < len(pair.only_a) or len(rest.only_b) < len(pair.only_b):
            self._count(apart=len(pair.only_a) - len(rest.only_a))
            runs = self._evaluates(pair)
            if runs[0] != runs[1]:
                self.apart.evaluations.setdefault(pair.step, "a" if runs[0] else "b")
        if len(rest.within_a) and not self.outcome.tolerated and self.outcome.first is None:
            sequence = np.asarray(pair.a.sequence)[rest.within_a]
            union = int(np.asarray(pair.a.site)[rest.within_a[int(np.argmin(sequence))]])
            self.outcome.tolerated = f"{what(self.alignment.site(union))} in step {pair.step}"
        self._count(within=len(pair.rows_a) - len(rest.rows_a))
        return rest

    def _standing_out(self, pair: StepPair) -> StepPair:
        """The step without what tolerance or noise lets pass, and without an evaluation that one run alone makes."""
        pair = self._without_lonely_evaluation(pair)
        if len(pair.rows_a) and self.outcome.gathered is not None:
            pair = keep_rows(pair, ~self.outcome.gathered.agree(self.alignment, pair, self.options.rtol))
        if len(pair.rows_a) and self.options.tolerant:
            pair = keep_rows(pair, ~within_tolerance(self.alignment, pair, self.options, *self.layouts))
        if len(pair.rows_a) and self.floors:
            rel = relative_rows(pair, *self.layouts)
            passes = [floor.within(pair, rel, self.options.noise_factor) for floor in self.floors]
            pair = keep_rows(pair, ~np.logical_or.reduce(passes))
        return pair

    def _without_lonely_evaluation(self, pair: StepPair) -> StepPair:
        """The step without what is there only because one run evaluates more often: it says nothing of the other.

        A copy that is only evaluated is recorded when it first is.
        """
        alignment = self.alignment
        if self.options.strict or not alignment.evaluating.any():
            return pair
        every = self.options.evaluation is False or not all(self._evaluates(pair))
        kept = []
        for own, only in zip(pair.sites(alignment), (pair.only_a, pair.only_b), strict=True):
            start = alignment.phase[own[only]] == phase_code(Phase.START)
            kept.append(only[~(alignment.evaluating[own[only]] & (start | every))])
        return replace(pair, only_a=kept[0], only_b=kept[1])

    def _evaluates(self, pair: StepPair) -> tuple[bool, bool]:
        """Whether run a and run b evaluate in a step."""
        phase = self.alignment.phase == phase_code(Phase.EVAL)
        site_a, site_b = pair.sites(self.alignment)
        return bool(phase[site_a].any()), bool(phase[site_b].any())

    def _count(self, **more: int) -> None:
        tally = self.outcome.tally
        self.outcome.tally = replace(tally, **{name: getattr(tally, name) + number for name, number in more.items()})

    def _count_unseen(self, pair: StepPair) -> None:
        if len(pair.alone):
            self._count(not_observed=len(pair.alone), blind=len(pair.alone))
            self._first_blind(int(pair.alone[0]), pair.step)
        if not len(pair.unseen_a):
            return
        seen_a = np.asarray(pair.a.status)[pair.unseen_a] != int(Status.NOT_OBSERVED)
        seen_b = np.asarray(pair.b.status)[pair.unseen_b] != int(Status.NOT_OBSERVED)
        one_sided = seen_a != seen_b
        self._count(not_observed=len(pair.unseen_a), blind=int(one_sided.sum()))
        if one_sided.any():
            self._first_blind(int(np.asarray(pair.a.site)[pair.unseen_a[np.argmax(one_sided)]]), pair.step)

    def _first_blind(self, union: int, step: int) -> None:
        if not self.outcome.blind_site:
            site = self.alignment.site(union)
            when = {Phase.EVAL: "in the evaluation of", Phase.START: "at the start of"}.get(site.phase, "at")
            self.outcome.blind_site = f"{site.kind.value} of {site.fqn} {when} step {step}"

    def _learn(self, entry_a: StepEntry) -> None:
        """Let each noise run raise its floor at a step, where it has that step and differs there."""
        for reader, floor in zip(self.sides.noise, self.floors, strict=True):
            if entry_a.step not in reader:
                continue
            entry = reader.entry(reader.row_of(entry_a.step))
            if entry.digest != entry_a.digest:
                batches = self.sides.a.read(entry_a.step), reader.read(entry.step)
                counted = floor.alignment.mask(frozenset(), ())
                pair = match(floor.alignment, counted, entry_a.step, entry.step, *batches)
                floor.learn(pair, self.layouts[0], Layouts(reader.layouts))

    def _before(self, pair: StepPair) -> tuple[StepPair | None, Carried]:
        """The step before, where both runs have it, and what it left different."""
        step_a, step_b = pair.step - 1, pair.step_b - 1
        if step_a not in self.sides.a or step_b not in self.sides.b:
            first = self.last is None
            return None, self.carried if first else kept(self.carried, self.recorded)
        before = self._standing_out(self._match(step_a, step_b, self.every))
        if self.last == step_a:
            return before, self.carried
        carried = kept(self.carried, self.recorded)
        carried.rng |= {name for name, step in self.apart.random.items() if step < pair.step}
        if before.diverged and (self.causes is None or self.causes.split(before)[0].diverged):
            facts = Facts(self.sides, self.alignment, before, in_order(self.alignment, before), carried)
            return before, carry_over(facts, carried, self.recorded)
        carried.within |= within_tolerance_of(self.alignment, before)
        return before, carried

    def _take(self, place: int, pair: StepPair) -> None:
        """Count a step's divergences and list what there is room for."""
        outcome, limit = self.outcome, self.options.limit
        if self.full and outcome.agreed != frozenset():
            kinds = agreed_kinds(self.alignment, pair)
            outcome.agreed = kinds if outcome.agreed is None else outcome.agreed & kinds
        if self.causes is not None and self._only_causes(place, pair, self.causes):
            return
        self._count(diverged_steps=1, diverged=pair.diverged, only_a=len(pair.only_a), only_b=len(pair.only_b))
        if self.options.want_map:
            if outcome.heat is None:
                outcome.heat = Heat(self.alignment, outcome.paired.steps.tolist())
            outcome.heat.add(place, pair, *self.layouts)
        if outcome.first is not None and limit is not None and len(outcome.listed) >= limit:
            return
        begins = outcome.first is None
        whole_step = self.options.whole_step and begins
        items = in_order(self.alignment, pair)
        whole = pair if self.full else self._standing_out(self._match(pair.step, pair.step_b, self.every))
        everything = items if self.full else in_order(self.alignment, whole)
        before, carried = self._before(pair)
        gap = is_gap(self.sides, pair)
        afresh = self.resumed and outcome.first is None

        def known(pair: StepPair, items: Items) -> Facts:
            return Facts(self.sides, self.alignment, pair, items, carried, before=before, gap=gap, resumed=afresh)

        facts = known(whole, everything)
        positions = _positions(items, everything)
        if outcome.first is None and self.causes is not None:
            positions = self._begin(facts, positions, known, self.causes)
        for position in positions:
            full = limit is not None and len(outcome.listed) >= limit and not whole_step
            if outcome.first is not None and full:
                break
            self._list(facts, position, full=full)
        if begins:
            self._share(facts, positions)
        self.carried, self.last = carry_over(facts, carried, self.recorded), pair.step

    def _list(self, facts: Facts, position: int, cause: Cause | None = None, *, full: bool = False) -> None:
        """Make one divergence of a step an object; the first of all is kept with what is known of it."""
        outcome = self.outcome
        cause = cause or judge(facts, position)
        floors = [floor.floor for floor in self.floors]
        divergence = materialise(self.sides, facts, position, cause, *self.layouts, floors)
        if outcome.first is None:
            outcome.first, outcome.cause, outcome.facts = divergence, cause, facts
            facts.resumed = False
        if not full:
            outcome.listed.append(divergence)

    def _share(self, facts: Facts, positions: Iterable[int]) -> None:
        """Keep the first divergence of the step in which the first one is that both runs have, if that one is not."""
        first, items = self.outcome.first, facts.items
        if first is None or (first.a is not None and first.b is not None):
            return
        place = next((own for own in positions if min(items.row_a[own], items.row_b[own]) >= 0), None)
        if place is not None:
            floors = [floor.floor for floor in self.floors]
            self.outcome.shared = materialise(self.sides, facts, place, judge(facts, place), *self.layouts, floors)

    def _only_causes(self, place: int, pair: StepPair, causes: Causes) -> bool:
        """Take in what differs in structure in a step; whether that is all that differs."""
        effects, others = causes.split(pair)
        if not others.diverged:
            return False
        self.apart.see(others, self.layouts)
        if effects.diverged:
            return False
        self.early = self.early or (place, pair)
        self.brought = self.brought or brings_values(self.alignment, others)
        if self.outcome.first is None:
            self._count(apart=len(others.rows_a) + len(others.only_a))
            if not self.options.evaluation and not results_agree(self.alignment, pair):
                if records_results(self.alignment, pair):
                    self.outcome.lonely = pair.step
                elif not watches_results(self.sides.manifest_a, self.sides.manifest_b):
                    self.outcome.unrecorded = pair.step
        return True

    def _begin(
        self, facts: Facts, positions: list[int], known: Callable[[StepPair, Items], Facts], causes: Causes
    ) -> list[int]:
        """List the first divergence of all, and say which of the step's are left to be listed.

        An effect that explains itself is the first. Else the first cause is to blame: of the steps in which nothing but
        causes differed, or of this step.
        """
        effect = next((place for place in positions if not causes.is_cause(facts, place)), None)
        if effect is None or (effect == positions[0] and self.early is None):
            return positions
        effects, others = causes.split(facts.pair)
        judged = replace(
            effects,
            rows_a=np.concatenate([others.rows_a, effects.rows_a]),
            rows_b=np.concatenate([others.rows_b, effects.rows_b]),
        )
        alone = known(judged, in_order(self.alignment, judged))
        place = alone.sites.index(facts.sites[effect])
        cause = judge(alone, place)
        before = [facts.sites[own] for own in positions[: positions.index(effect)]]
        idle = min(facts.items.row_a[effect], facts.items.row_b[effect]) >= 0
        idle = idle and facts.sites[effect].phase in {Phase.DATA, Phase.FORWARD, Phase.LOSS}
        idle = idle and not (self.brought or self.apart.random or brings_values(self.alignment, others))
        if (idle and cause.role is Role.ORIGIN) or explains_itself(alone, place, cause, [*before, *self.apart.sites()]):
            self._list(alone, place, cause)
            return [own for own in positions if own != effect]
        if self.early is not None:
            began = self.early[1]
            old = Facts(self.sides, self.alignment, began, in_order(self.alignment, began), Carried())
            self._list(old, drawn(old) or 0)
            return positions
        blamed = drawn(facts) if facts.sites[positions[0]].kind is Kind.RNG else None
        if blamed in positions:
            self._list(facts, blamed)
            return [own for own in positions if own != blamed]
        return positions


def _ranks(reader: Reader) -> int:
    """How many ranks' records are read for those of a reader."""
    return len(reader.readers) if isinstance(reader, WholeReader) else 1


def _positions(items: Items, everything: Items) -> list[int]:
    """Where the selected divergences of a step stand among all of them."""
    if items is everything:
        return list(range(len(items)))
    place_of = {(int(a), int(b)): i for i, (a, b) in enumerate(zip(everything.row_a, everything.row_b, strict=True))}
    return [place_of[int(a), int(b)] for a, b in zip(items.row_a, items.row_b, strict=True)]


def compare_rank(
    sides: Sides, options: DiffOptions, offset: int, ends: tuple[int | None, int | None] = (None, None)
) -> RankOutcome:
    """Compare one rank of two runs.

    Args:
        sides: the runs.
        options: what counts.
        offset: step k of b belongs to step k + offset of a.
        ends: the last step of a and of b that counts; None for all there are.
    """
    wanted = options.wants_step if options.steps else None
    told = options_of(sides.manifest_a), options_of(sides.manifest_b)
    listing = lists(sides.manifest_a), lists(sides.manifest_b)
    paired = known_tails(pair_steps(sides.a, sides.b, offset, wanted, ends), told, offset, listing)
    outcome = RankOutcome(sides.rank, paired, offset)
    if isinstance(sides.a, WholeReader) or isinstance(sides.b, WholeReader):
        outcome.gathered = Gathered(sides)
    places = differing(paired)
    own = columns(sides.a.sites, sides.rename)
    counted = selected(own.kind, own.fqn, options.kinds, options.modules)
    if options.evaluation is not None:
        counted &= evaluating(own.phase, own.fqn) == options.evaluation
    if places:
        Walk(sides, options, outcome, places).run()
        if outcome.first is None and outcome.lonely is not None and not options.strict:
            return compare_rank(sides, replace(options, strict=True), offset, ends)
    paired = outcome.paired  # as far as it was walked
    records = _records(paired, None if counted.all() else counted)  # ranks as one know it of what was read
    blind = _blind_rows(sides.a, paired, counted)
    outcome.tally = replace(outcome.tally, records=records + outcome.tally.records, blind_both=blind)
    return outcome


def _records(paired: Paired, counted: Mask | None) -> int:
    """How many records of run a count in the common steps; `counted` says it by site number, None for all."""
    if counted is None:
        return paired.records
    return sum(int(counted[np.asarray(paired.a.read(entry.step).site)].sum()) for entry, _ in paired)


def _blind_rows(reader: Reader, paired: Paired, counted: Mask) -> int:
    """How many records run a could not see, in all compared steps.

    Steps with equal digests are not opened to find out, and what a run cannot see hardly changes from step to step: the
    first and the last common step are counted, and the last stands for those between.
    """
    if not len(paired):
        return 0
    first, last = (_blind_in(reader, paired[place][0], counted) for place in (0, len(paired) - 1))
    return first + last * (len(paired) - 1)


def _blind_in(reader: Reader, entry: StepEntry, counted: Mask) -> int:
    batch = reader.read(entry.step)
    status = np.asarray(batch.status)
    partial = (status == int(Status.PARTIAL)) & (np.asarray(batch.checksum) == 0)
    unseen = (status == int(Status.NOT_OBSERVED)) | partial
    return int((unseen & counted[np.asarray(batch.site)]).sum())
