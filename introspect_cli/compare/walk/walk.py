"""One rank of both runs, compared step by step.

Only steps whose digests differ are opened, one at a time, and go through the passes. Counting is done on columns;
divergences become objects, and their origins are judged, only as far as they are to be listed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.steps import Paired, differing, steps_of
from introspect_cli.compare.passes.cover import cover, evaluates
from introspect_cli.compare.passes.dead import dead, dead_note
from introspect_cli.compare.passes.pair import matched, pair
from introspect_cli.compare.passes.tolerate import combine, tolerate
from introspect_cli.compare.passes.unsettled import unsettle
from introspect_cli.compare.reasons.base import judge
from introspect_cli.compare.resumed.began import Carried, is_gap, kept, resumed
from introspect_cli.compare.step.outcome import (
    RankOutcome,
    agreed_kinds,
    nan_kinds,
    records_results,
    results_agree,
    results_known,
    trains,
    updates,
    watches_results,
)
from introspect_cli.compare.step.overview import Heat
from introspect_cli.compare.step.size import materialise
from introspect_cli.compare.step.step import Step, carry_over, within_tolerance_of
from introspect_cli.compare.step.structure import Structure
from introspect_cli.compare.terms.distance import Layouts
from introspect_cli.compare.terms.evidence import Cause, Known, least
from introspect_cli.compare.terms.result import Role, Size
from introspect_cli.compare.terms.sites import Mask, evaluating, kind_code, selected
from introspect_cli.compare.terms.table import ABSENT, DEAD, NOT_SEEN, WITHIN, Because, Table
from introspect_cli.compare.terms.words import what
from introspect_cli.compare.walk.choose import brings_values, choose, origins, separate, shown_by
from introspect_cli.records import Kind, Phase, Status, perturbed_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from introspect_cli.compare.step.comparison import Comparison
    from introspect_cli.store.format.index import StepEntry
    from introspect_cli.store.ranks.whole_reader import Reader

PASSES: tuple[Callable[[Table, Comparison], Table], ...] = (
    cover,  # first, since no later pass may take what a run could not have recorded for a divergence
    combine,  # before any tolerance: equal samples are equal, and a share of a batch has no distance to the whole
    tolerate,  # before causes are told from values, so that what is let pass is neither
    unsettle,  # after it, since only where differences are let pass may those of rounding alone be
    dead,  # after it, since what rests on a value may be within tolerance, and before causes are told from values
    separate,  # last: marks what diverges still
)
"""What each opened step goes through, in this order, after `pair` has put its records side by side.

Of the first step that diverges then, `choose` finds the divergence that leads, and `judge` explains it.
"""


class Walk:
    """What must be remembered from step to step while one rank is compared."""

    def __init__(self, comparison: Comparison, outcome: RankOutcome) -> None:
        self.comparison, self.options, self.outcome = comparison, comparison.options, outcome
        self.structure = outcome.structure = Structure(comparison.alignment, comparison.match)
        self.carried = resumed(comparison, comparison.offset)
        self.resumed = bool(self.carried.params or self.carried.buffers or self.carried.states)
        if self.resumed:  # what a checkpoint did not restore
            outcome.results_known = Known.DIFFERS
        self.last: int | None = None
        self.began: Table | None = None
        self.new_values = False
        if comparison.options.evaluation is None and not comparison.options.narrowed:
            outcome.resumption = comparison.resumption()

    def run(self, places: Sequence[int]) -> None:
        """Walk the steps at these places, filling in the outcome.

        Of training or evaluation alone, up to the first divergence. The answer needs no step after that: they are
        counted as long as it takes seconds.
        """
        outcome, counts_all = self.outcome, self.options.want_map or self.options.limit is None
        one, two = self.comparison.a, self.comparison.b
        for reader, rows in ((one, self.outcome.paired.rows_a), (two, self.outcome.paired.rows_b)):
            reader.ahead(rows[list(places)].tolist())
        for place, table in self._opened(places):
            if (table.diverging & table.chosen).any():
                self._take(place, table)
            if outcome.first is not None and self.options.evaluation is not None:
                break
            if outcome.first is not None and not counts_all:
                records = len(table.a) * len(one.readers) + len(table.b) * len(two.readers)
                outcome.later += max(records, self.options.least)
                if outcome.later > self.options.later:
                    outcome.cut(place + 1)
                    break

    def _opened(self, places: Sequence[int]) -> Iterator[tuple[int, Table]]:
        """Differing steps after the passes; with noise runs, every step is a lesson."""
        opened, floors = set(places), self.comparison.floors
        for place in range(len(self.outcome.paired)) if floors else places:
            entry_a, entry_b = self.outcome.paired[place]
            if floors:
                self._learn(entry_a)
            if place in opened:
                table = self._passed(entry_a.step, entry_b.step)
                self._count_passed(table, entry_a)
                self._see_results(table)
                yield place, table

    def _passed(self, step_a: int, step_b: int) -> Table:
        """A step of both runs, after all passes."""
        table = pair(self.comparison, step_a, step_b)
        for step_pass in PASSES:
            table = step_pass(table, self.comparison)
        return table

    def _learn(self, entry_a: StepEntry) -> None:
        """Let each noise run raise its floor at a step, where it has that step and differs there."""
        comparison = self.comparison
        for (reader, _), floor in zip(comparison.noise, comparison.floors, strict=True):
            if entry_a.step not in reader:
                continue
            entry = reader.entry(reader.row_of(entry_a.step))
            if entry.digest == entry_a.digest and floor.seed is not None:
                comparison.reached.agree(entry_a.step)
            if entry.digest != entry_a.digest:
                batches = comparison.a.read(entry_a.step), reader.read(entry.step)
                compared = floor.alignment.mask(frozenset(), ())
                table = matched(floor.alignment, compared, (entry_a.step, entry.step), batches)
                floor.learn(table, comparison.layouts[0], Layouts(reader.layouts), comparison.reached)

    # --- counts

    def _count_passed(self, table: Table, entry_a: StepEntry) -> None:
        """Count what the passes of a step let pass, or found that nothing can be said of."""
        comparison, outcome, chosen = self.comparison, self.outcome, table.chosen
        alone = (table.row_b < 0) | (table.because == Because.DEAD)
        operators = table.alignment.kind[table.site] == kind_code(Kind.OP_OUTPUT)
        of_a = alone & (table.state == ABSENT) | operators & (table.because == Because.NOT_COMPARED)
        of_a |= table.because == Because.RESTORED
        of_a &= table.row_a >= 0  # compared with nothing, so not equal
        self.outcome.tally.update(causes=int((of_a if comparison.entire else of_a & chosen).sum()))
        if len(table.a) > entry_a.rows:
            self.outcome.tally.update(records=int(comparison.chosen[table.left].sum()))
        if (chosen & (table.because == Because.EVALUATION)).any() and (runs := evaluates(table))[0] != runs[1]:
            self.structure.evaluations.setdefault(table.step, "a" if runs[0] else "b")
        formed = np.flatnonzero(chosen & (table.state == DEAD))
        self.outcome.tally.update(causes=len(formed))
        outcome.formed = outcome.formed or dead_note(table, formed.tolist(), comparison)
        within = np.flatnonzero(chosen & (table.state == WITHIN))
        self.outcome.tally.update(within=len(within))
        if len(within) and not outcome.tolerated and outcome.first is None:
            first = within[int(np.argmin(table.order[within]))]
            outcome.tolerated = f"{what(table.named(first))} in step {table.step}"
        self.outcome.tally.update(cut=int((chosen & (table.because == Because.CUT)).sum()))
        self._count_unseen(table)

    def _see_results(self, table: Table) -> None:
        """Remember which results agree in every step, while all of them do.

        What both run after they have trained for the last time has none, or losses of an accumulation that no update
        ends: what was trained until then decides. NaN throughout from the first step on hides what a difference does.
        """
        outcome = self.outcome
        if outcome.results is None or outcome.hidden:
            outcome.hidden = nan_kinds(table, self.comparison.layouts[0])
        if outcome.results is not None and not trains(table):
            return
        if self.comparison.entire and outcome.results_known is not Known.DIFFERS:
            kinds = agreed_kinds(table) - outcome.hidden
            if outcome.results is None or updates(table):
                outcome.results = kinds if outcome.results is None else outcome.results & kinds
            outcome.results_known = least((outcome.results_known, results_known(table)))

    def _count_unseen(self, table: Table) -> None:
        """Count records that one run or both could not see."""
        unseen = table.chosen & (table.state == NOT_SEEN)
        lost = np.flatnonzero(unseen & np.isin(table.because, (Because.NOT_COUNTED, Because.LISTED)))
        self.outcome.tally.update(not_observed=len(lost), blind=len(lost))
        blind = np.flatnonzero(unseen & (table.because == Because.NOT_OBSERVED))
        status = np.asarray(table.a.status)[table.row_a[blind]], np.asarray(table.b.status)[table.row_b[blind]]
        seen_a, seen_b = (column != int(Status.NOT_OBSERVED) for column in status)
        by_one = blind[seen_a != seen_b]
        self.outcome.tally.update(not_observed=len(blind), blind=len(by_one))
        lost = np.concatenate([lost[table.one_sided[lost]], lost[~table.one_sided[lost]], by_one])
        if len(lost) and not self.outcome.blind_site:
            site = table.named(lost[0])
            when = {Phase.EVAL: "in the evaluation of", Phase.START: "at the start of"}.get(site.phase, "at")
            self.outcome.blind_site = f"{site.kind.value} of {site.fqn} {when} step {table.step}"

    # --- divergences

    def _take(self, place: int, table: Table) -> None:
        """Count a step's divergences and list what there is room for."""
        comparison, outcome, limit = self.comparison, self.outcome, self.options.limit
        chosen = table if comparison.entire else table.keeping(table.chosen)
        if comparison.entire and outcome.agreed != frozenset():
            kinds = agreed_kinds(table) - outcome.hidden
            outcome.agreed = kinds if outcome.agreed is None else outcome.agreed & kinds
        if self._only_causes(chosen):
            return
        self.outcome.tally.update(
            steps_diverged=1, diverged=chosen.diverged, only_a=len(chosen.only_a), only_b=len(chosen.only_b)
        )
        if self.options.want_map:
            if outcome.heat is None:
                outcome.heat = Heat(comparison.alignment, outcome.paired.steps.tolist())
            outcome.heat.add(place, chosen, comparison.layouts)
        if outcome.first is not None and limit is not None and len(outcome.listed) >= limit:
            return
        before, carried = self._before(table)
        begins = outcome.first is None
        gap, resumed_now = is_gap(comparison, table), self.resumed and begins
        step = Step(comparison, table, carried, before=before, gap=gap, resumed=resumed_now)
        place_of = {row: place for place, row in enumerate(table.in_order.tolist())}
        positions = [place_of[row] for row in chosen.in_order.tolist()]
        if begins:  # a file that is saved shows what was there before: it leads where nothing else differs
            positions.sort(key=lambda position: step.sites[position].kind is Kind.PRODUCT)
        if begins and comparison.causes is not None:
            lead = choose(step, positions, self.structure, self.began, new_values=self.new_values)
            if lead is not None:
                self._list(lead.step, lead.position)
                positions = [position for position in positions if position != lead.stands_for]
        lost = shown_by(step, outcome.resumption) if begins else {}
        for position in positions:
            room = limit is None or len(outcome.listed) < limit or (begins and self.options.whole_step)
            if outcome.first is not None and not room:
                break
            self._list(step, position, lost.get(position) if outcome.first is not None else None)
        if begins:
            outcome.lost += [materialise(step, position, cause) for position, cause in lost.items()]
            self._see_others(step, positions)
        self.carried, self.last = carry_over(step, carried, comparison.ended), table.step

    def _before(self, table: Table) -> tuple[Table | None, Carried]:
        """The step before, where both runs have it, and what it left different."""
        comparison = self.comparison
        step_a, step_b = table.step - 1, table.step_b - 1
        if step_a not in comparison.a or step_b not in comparison.b:
            return None, self.carried if self.last is None else kept(self.carried, comparison.ended)
        before = self._passed(step_a, step_b)
        if self.last == step_a:
            return before, self.carried
        carried = kept(self.carried, comparison.ended)
        carried.rng |= {name for name, step in self.structure.random.items() if step < table.step}
        if (before.diverging & ~before.cause).any():
            return before, carry_over(Step(comparison, before, carried), carried, comparison.ended)
        carried.within |= within_tolerance_of(before)
        return before, carried

    def _only_causes(self, table: Table) -> bool:
        """Take in what differs in structure in a step; whether that is all that differs."""
        causes = table.keeping(table.cause)
        if self.comparison.causes is None or not causes.diverged:
            return False
        self.structure.see(causes, self.comparison.layouts)
        if causes.diverged < table.diverged:
            return False
        outcome = self.outcome
        self.began = self.began or table
        self.new_values = self.new_values or brings_values(causes)
        if outcome.first is None:
            self.outcome.tally.update(causes=len(causes.rows_a) + len(causes.only_a))
            if not self.options.evaluation and (outcome.hidden or not results_agree(table)):
                if records_results(table):
                    outcome.one_sided_step = table.step
                elif not watches_results(*self.comparison.manifests):
                    outcome.unrecorded = table.step
        return True

    def _list(self, step: Step, position: int, cause: Cause | None = None) -> None:
        """Make one divergence of a step an object; the first of all is kept with what is known of it."""
        outcome = self.outcome
        cause = cause or judge(step, position)
        divergence = materialise(step, position, cause)
        if outcome.first is None:
            outcome.first, outcome.cause, outcome.step = divergence, cause, step
            step.resumed = False
        outcome.listed.append(divergence)

    def _see_others(self, step: Step, positions: Sequence[int]) -> None:
        """Keep what else of the step rests on nothing that differs, and the first that both runs have."""
        first, cause = self.outcome.first, self.outcome.cause
        if first is None or cause is None:
            return
        both = (position for position in positions if not step.is_one_sided(position))
        if first.only and (position := next(both, None)) is not None:
            self.outcome.shared = materialise(step, position, judge(step, position))
        if cause.role is Role.ORIGIN and first.step == step.number:
            for position, other in origins(step, positions, first.site, cause):
                divergence = materialise(step, position, other)
                if first.size is Size.ROUNDING or divergence.size is not Size.ROUNDING or other.reason != "module":
                    self.outcome.origins.append((divergence, other))  # else the same numbers lie elsewhere in memory


def compare_rank(comparison: Comparison) -> RankOutcome:
    """Compare one rank of two runs."""
    options, paired = comparison.options, steps_of(comparison, comparison.options, comparison.offset)
    outcome = RankOutcome(comparison.rank, paired, offset=comparison.offset)
    outcome.match, outcome.gathered = comparison.match, comparison.gathered
    places = differing(paired)
    sites = comparison.sites[0]
    counted = selected(sites.kind, sites.fqn, options.kinds, options.modules)
    if options.evaluation is not None:
        counted &= evaluating(sites.phase, sites.fqn) == options.evaluation
    if places:
        Walk(comparison, outcome).run(places)
        if outcome.first is None and outcome.one_sided_step is not None and not options.strict:
            return compare_rank(replace(comparison, options=replace(options, strict=True)))
    paired = outcome.paired  # as far as it was walked
    seeds = [floor.seed for floor in comparison.floors if floor.seed is not None]
    outcome.reach = comparison.reached.result(seeds, paired.steps.tolist()) if seeds else None
    outcome.foreign = sum(perturbed_by(manifest) is not None for _, manifest in comparison.noise) - len(seeds)
    records = paired.records  # ranks as one know it of what was read
    if not counted.all():
        records = sum(int(counted[np.asarray(comparison.a.read(entry.step).site)].sum()) for entry, _ in paired)
    outcome.tally.update(records=records, blind_both=_blind_rows(comparison.a, paired, counted))
    if not places and options.evaluation is None and not options.narrowed:
        outcome.resumption = comparison.resumption()
    return outcome


def _blind_rows(reader: Reader, paired: Paired, counted: Mask) -> int:
    """How many records run a could not see, in all compared steps.

    Steps with equal digests are not opened to find out, and what a run cannot see hardly changes from step to step: the
    first and the last common step are counted, and the last stands for those between.
    """

    def blind(place: int) -> int:
        batch = reader.read(paired[place][0].step)
        status = np.asarray(batch.status)
        partial = (status == int(Status.PARTIAL)) & (np.asarray(batch.checksum) == 0)
        unseen = (status == int(Status.NOT_OBSERVED)) | partial
        return int((unseen & counted[np.asarray(batch.site)]).sum())

    last = len(paired) - 1
    return blind(0) + blind(last) * last if len(paired) else 0
