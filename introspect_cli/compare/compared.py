"""Two runs and what came out of comparing each of their ranks: how much was compared, and which rank diverges first.

Where all results of both runs (what training is for) are on record and agree, the runs are the same, and what else
differs is told beside it. Nothing unseen becomes equal by that: it rests on results that both recorded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from introspect_cli.compare.evidence import Known
from introspect_cli.compare.outcome import NAMES, RESULTS, TRAINED
from introspect_cli.compare.reach import furthest_of
from introspect_cli.compare.reasons.ranks import upstream
from introspect_cli.compare.reasons.words import listed
from introspect_cli.compare.result import Counts
from introspect_cli.compare.structure import changes_of
from introspect_cli.compare.watched import chooses_modules, failed, observed_kinds
from introspect_cli.labels import step_words
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.findings import Reach, StructureChange
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.store.reader import Run


@dataclass(frozen=True, eq=False)
class Compared:
    """Two runs, and what came out of comparing them.

    Attributes:
        a: the reference run.
        b: the run that should equal it.
        options: what counts.
        outcomes: of each rank, or of all ranks as one.
    """

    a: Run
    b: Run
    options: DiffOptions
    outcomes: Sequence[RankOutcome]

    @property
    def runs(self) -> tuple[tuple[str, Run], tuple[str, Run]]:
        """Both, each with its name."""
        return ("a", self.a), ("b", self.b)

    # --- how much

    @cached_property
    def tally(self) -> Counter[str]:
        """What was counted, over all ranks."""
        return sum((outcome.tally for outcome in self.outcomes), Counter())

    @cached_property
    def counts(self) -> Counts:
        """How much was compared and what came of it; of evaluation alone, the steps that have one."""
        total = self.tally
        agree = total["records"] - (total["diverged"] - total["only_b"]) - total["not_observed"] - total["causes"]
        evaluates = self.options.evaluation  # ranks that are put together do not tell which steps have one
        steps = [(evaluates and outcome.evaluated) or outcome.paired for outcome in self.outcomes]
        return Counts(
            steps_a=self.a.steps,
            steps_b=self.b.steps,
            steps_compared=sum(map(len, steps)),
            equal=max(agree, 0),
            not_observed=max(total["not_observed"], total["blind_both"]),
            **{name: total[name] for name in ("steps_diverged", "records", "diverged", "only_a", "only_b", "within")},
        )

    @property
    def as_one(self) -> bool:
        """Whether all ranks were compared as one."""
        return any(outcome.gathered is not None for outcome in self.outcomes)

    @property
    def extent(self) -> str:
        """How much agrees, in words: `2,410 records of 16 steps`."""
        counts = self.counts
        by = "within the tolerance or noise given"
        if self.as_one:
            by = "only within the tolerance or by extrema and means"
        passed = f", {counts.within} of them {by}" if counts.within else ""
        thinned = any(outcome.paired.a.thinned or outcome.paired.b.thinned for outcome in self.outcomes)
        kept = " that both runs kept" if thinned else ""
        return f"{count(counts.equal, 'record')} of {count(counts.steps_compared, 'step')}{kept}{passed}"

    @cached_property
    def until(self) -> str:
        """The last step that was compared: `up to and including step 12`; "" where none was."""
        ends = [outcome.paired for outcome in self.outcomes if len(outcome.paired)]
        if not ends:
            return ""
        last, reader = max(((int(paired.steps[-1]), paired.a) for paired in ends), key=lambda end: end[0])
        return f"up to and including {step_words(last, reader.labels.get(last, {}))}"

    @property
    def blind_site(self) -> str:
        """The first record that only one run could see; "" for none."""
        return next((outcome.blind_site for outcome in self.outcomes if outcome.tally["blind"]), "")

    # --- what came of it

    @cached_property
    def best(self) -> RankOutcome | None:
        """The rank that diverges first."""
        return first_of(self.outcomes)

    @cached_property
    def reach(self) -> Reach | None:
        """How far rounding carries a, and b beside it; None without perturbed runs."""
        return furthest_of(outcome.reach for outcome in self.outcomes)

    def structure(self, *, same: bool) -> tuple[StructureChange, ...]:
        """What differs in structure, of the first rank on which anything does."""
        for outcome in self.outcomes:
            if outcome.structure is not None and (changes := changes_of(outcome.structure, outcome.match, same=same)):
                return changes
        return ()

    @cached_property
    def results_agree(self) -> bool:
        """Whether all results of all compared steps are on record in both runs and agree, so that they decide.

        Equal ones decide of whatever else differs. Ones that agree within tolerance decide of what was not seen alone:
        a value beyond the tolerance is one. Steps that were not opened agree in everything.
        """
        options, outcomes = self.options, self.outcomes
        if options.strict or options.narrowed or options.evaluation is not None:
            return False
        wanted = {kind.value for kind in RESULTS}
        for _, run in self.runs:
            if failed(run.manifest) or chooses_modules(run.manifest) or not wanted <= observed_kinds(run.manifest):
                return False
        if any(outcome.results_known is Known.DIFFERS or outcome.unopened for outcome in outcomes):
            return False
        if self.within and self.best is not None:
            return False
        opened = [outcome.results for outcome in outcomes if outcome.results is not None]
        return bool(opened) and all(kinds >= TRAINED for kinds in opened)

    @property
    def within(self) -> bool:
        """Whether results agree within tolerance or noise only."""
        return any(outcome.results_known is Known.WITHIN for outcome in self.outcomes)

    @property
    def results(self) -> str:
        """The results that agree in every opened step, as a list in a sentence."""
        kinds = frozenset.intersection(*(outcome.results for outcome in self.outcomes if outcome.results is not None))
        return listed([name for kind, name in NAMES.items() if kind in kinds])


def first_of(outcomes: Sequence[RankOutcome]) -> RankOutcome | None:
    """The rank that diverges at the earliest step; of several, in the earliest phase, then the lowest number."""
    diverging = [(upstream(outcome.first), outcome) for outcome in outcomes if outcome.first is not None]
    return min(diverging, key=lambda pair: pair[0], default=(None, None))[1]
