"""Two runs with the outcomes of all ranks: how much was compared, agrees, or was not observed.

Where all results (losses, gradients, parameters) of both runs are recorded and agree, the runs are the same, and other
differences are told beside it. Unobserved values do not become equal by that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from introspect_cli.compare.answer.endings import Raised, exception_of, exception_of_one
from introspect_cli.compare.evidence import Known
from introspect_cli.compare.outcome import NAMES, RESULTS, TRAINED, changes_of
from introspect_cli.compare.reasons.ranks import order_of_ranks
from introspect_cli.compare.reasons.update import hyperparameter_changes_of
from introspect_cli.compare.reasons.view import View
from introspect_cli.compare.result import Counts
from introspect_cli.compare.say import listed, some, told, what
from introspect_cli.compare.table import OTHER
from introspect_cli.compare.watched import (
    blindness_notes,
    chooses_modules,
    has_failed,
    observed_kinds,
    option_notes,
    perturbed_notes,
)
from introspect_cli.labels import step_words
from introspect_cli.records import Joined, Kind, Phase
from introspect_cli.texts import count, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.compare.result import DiffOptions, Divergence, StructureChange
    from introspect_cli.compare.wholes import Splits
    from introspect_cli.store.run import Run


@dataclass(frozen=True, eq=False)
class Compared:
    """Two runs with the outcome of each rank.

    Attributes:
        outcomes: of each rank, or of all ranks as one.
        splits: how the runs are split up, where all ranks were compared as one.
    """

    a: Run
    b: Run
    options: DiffOptions
    outcomes: Sequence[RankOutcome]
    splits: Splits | None = None

    @property
    def runs(self) -> tuple[tuple[str, Run], tuple[str, Run]]:
        """Both runs with their names: (("a", a), ("b", b))."""
        return ("a", self.a), ("b", self.b)

    # --- how much

    @cached_property
    def tally(self) -> Counter[str]:
        """Sum of the ranks' tallies by name: `equal`, `diverged`, `blind` (only one run observed it) and so on."""
        return sum((outcome.tally for outcome in self.outcomes), Counter())

    @cached_property
    def counts(self) -> Counts:
        """Totals over all ranks.

        If evaluation alone is compared, `steps_compared` counts only steps with an evaluation.
        """
        total = self.tally
        evaluates = self.options.evaluation  # ranks that are put together do not tell which steps have one
        steps = [(evaluates and outcome.evaluated) or outcome.paired for outcome in self.outcomes]
        return Counts(
            steps_a=self.a.steps,
            steps_b=self.b.steps,
            steps_compared=sum(map(len, steps)),
            not_observed=max(total["not_observed"], total["blind_both"]),
            **{
                name: total[name]
                for name in ("steps_diverged", "records", "equal", "diverged", "only_a", "only_b", "within")
            },
        )

    @property
    def as_one(self) -> bool:
        """Whether all ranks of each run were compared as one."""
        return any(outcome.gathered is not None for outcome in self.outcomes)

    @property
    def extent(self) -> str:
        """Number of records and steps that agree, in words: `2,410 records of 16 steps`."""
        counts = self.counts
        thinned = any(outcome.paired.a.thinned or outcome.paired.b.thinned for outcome in self.outcomes)
        return told(
            "extent",
            records=count(counts.equal, "record"),
            steps=count(counts.steps_compared, "step"),
            thinned=thinned,
            within=counts.within,
            by=told("as-one" if self.as_one else "tolerated"),
        )

    @cached_property
    def until(self) -> str:
        """The last step (in a) that was compared on any rank: `up to and including step 12`; "" where none was."""
        ends = [outcome.paired for outcome in self.outcomes if len(outcome.paired)]
        if not ends:
            return ""
        last, reader = max(((int(paired.steps[-1]), paired.a) for paired in ends), key=lambda end: end[0])
        return told("until", step=step_words(last, reader.labels.get(last, {})))

    @property
    def blind_site(self) -> str:
        """The first record that one run alone observed, in words; "" for none."""
        return next((outcome.blind_site for outcome in self.outcomes if outcome.tally["blind"]), "")

    # --- what came of it

    @cached_property
    def raised(self) -> tuple[Raised | None, Raised | None]:
        """The exceptions that ended a and b; None for a run that none ended."""
        return exception_of(self.a, "a"), exception_of(self.b, "b")

    @cached_property
    def ending(self) -> Raised | None:
        """The exception that ended one run alone; b's where both ended by different ones.

        None where none did, or the same.
        """
        return exception_of_one(*self.raised)

    @cached_property
    def best(self) -> RankOutcome | None:
        """The outcome of the rank that diverges first, by `order_of_ranks`; None where nothing diverges.

        Where its cause is `optimizer`, it is the first rank with an equal key (but for the number) whose
        hyper-parameters differ.
        """
        diverging = [(order_of_ranks(outcome.first), outcome) for outcome in self.outcomes if outcome.first is not None]
        best = min(diverging, key=lambda pair: pair[0], default=(None, None))
        if best[1] is None or best[1].cause is None or best[1].cause.reason != "optimizer":
            return best[1]
        tied = [outcome for key, outcome in sorted(diverging, key=lambda pair: pair[0]) if key[:-1] == best[0][:-1]]
        tied = [outcome for outcome in tied if outcome.step is not None]  # what was compared elsewhere has none
        return next((each for each in tied if hyperparameter_changes_of(View(each, tied))), best[1])

    @cached_property
    def structure(self) -> tuple[StructureChange, ...]:
        """Structural changes of the first rank that has any."""
        return self._first_structure(same=False)

    @cached_property
    def structure_if_same(self) -> tuple[StructureChange, ...]:
        """Structural changes of the first rank that has any, worded for runs in which no value differs.

        It does not check that.
        """
        return self._first_structure(same=True)

    def _first_structure(self, *, same: bool) -> tuple[StructureChange, ...]:
        """Structural changes of the first rank that has any; `same`: worded for runs in which no value differs."""
        every = (outcome.structure for outcome in self.outcomes if outcome.structure is not None)
        return next((changes for structure in every if (changes := changes_of(structure, same=same))), ())

    @cached_property
    def results_agree(self) -> bool:
        """Whether losses, gradients and parameters of all compared steps are recorded in both runs and do not differ.

        False also if options are strict, narrow what is compared, or select training or evaluation; if a capture failed
        or chose modules; if a step was left unopened; or if they agree only within tolerance while something diverges.
        """
        options, outcomes = self.options, self.outcomes
        if options.strict or options.narrowed or options.evaluation is not None:
            return False
        wanted = {kind.value for kind in RESULTS}
        for _, run in self.runs:
            if has_failed(run.manifest) or chooses_modules(run.manifest) or not wanted <= observed_kinds(run.manifest):
                return False
        if any(outcome.results_known is Known.DIFFERS or outcome.unopened for outcome in outcomes):
            return False
        if self.within and self.best is not None:
            return False
        opened = [outcome.results for outcome in outcomes if outcome.results is not None]
        return bool(opened) and all(kinds >= TRAINED for kinds in opened)

    @property
    def diverges(self) -> bool:
        """Whether any rank diverges and `results_agree` is False."""
        return self.best is not None and not self.results_agree

    @property
    def within(self) -> bool:
        """Whether on any rank results agree only within tolerance or noise."""
        return any(outcome.results_known is Known.WITHIN for outcome in self.outcomes)

    @property
    def results(self) -> str:
        """Kinds of results that agree in every opened step on every rank, in words; some rank must have opened one."""
        kinds = frozenset.intersection(*(outcome.results for outcome in self.outcomes if outcome.results is not None))
        return _kinds_words(kinds)

    @property
    def unchanged(self) -> str:
        """Sentence on results that agree in every step although the runs diverge.

        "" where nothing diverges, for several ranks, and where parameters do not agree. Of results that are NaN
        throughout it says instead that they prove nothing.
        """
        outcome = self.outcomes[0]
        first, kinds, steps = outcome.first, outcome.agreed, len(outcome.paired)
        if first is None or len(self.outcomes) > 1:
            return ""
        if outcome.hidden:
            return told("hidden", names=_kinds_words(outcome.hidden))
        if not kinds or Kind.PARAM not in kinds:
            return ""
        return told("unchanged", names=_kinds_words(kinds), steps=steps)


def _kinds_words(kinds: frozenset[Kind]) -> str:
    """Kinds of results as a list in a sentence: `losses and gradients`."""
    return listed([name for kind, name in NAMES.items() if kind in kinds])


# --- what was not compared


def notes_on(compared: Compared, some_ranks: list[str]) -> list[str]:
    """Notes for any verdict: what was not compared or not observed, and differing options; a note may be there twice.

    Args:
        compared: both runs and what came of each rank.
        some_ranks: notes of `notes_on_some_ranks`.
    """
    a, b, outcomes = compared.a, compared.b, compared.outcomes
    manifests, of_ranks = (a.manifest, b.manifest), dict.fromkeys(note for one in outcomes for note in one.notes)
    notes = [*_state_notes(compared), *of_ranks, *option_notes(*manifests), *_missing_notes(compared)]
    notes += [*blindness_notes(*manifests), *_unopened_notes(outcomes), *some_ranks]
    notes += filter(None, dict.fromkeys(outcome.unused_note for outcome in outcomes))
    notes += perturbed_notes(*manifests)
    if blind := compared.tally["blind_both"]:
        notes.append(told("blind-both", blind=f"{blind:,}", all=count(compared.counts.records, "record")))
    return notes


def _unopened_notes(outcomes: Sequence[RankOutcome]) -> list[str]:
    """At most one note: that steps after the first divergence were not opened, to save time."""
    unopened = [outcome for outcome in outcomes if outcome.unopened]
    if not unopened:
        return []
    if len(outcomes) == 1:
        return [told("unopened-after", step=int(unopened[0].paired.steps[-1]))]
    return [told("unopened", steps=f"{sum(outcome.unopened for outcome in unopened):,}")]


def _state_notes(compared: Compared) -> Iterator[str]:
    """Notes on runs still being written or interrupted, on how ranks ended, on thinned records, and on missing steps.

    Missing are steps that the manifest counts and the run lacks; of a thinned run that is not said.
    """
    for name, run in compared.runs:
        until = told("no-step") if run.last_step is None else told("until", step=f"step {run.last_step}")
        if run.state.value in {"running", "interrupted"}:
            yield told(run.state.value, run=name, until=until)
        yield from (told("ranks-ended", run=name, how=sentence) for sentence in run.endings)
        thinned = dict.fromkeys(str(one) for rank in run.ranks for one in run.rank(rank).thinned)
        yield from (told("thinned", run=name, what=text) for text in thinned)
        said = run.manifest.get("steps")
        if isinstance(said, int) and run.steps < said and not thinned:
            yield told("fewer-steps", run=name, steps=f"{run.steps:,}", said=count(said, "step"))


_SAVED = ((Phase.FORWARD, "only-saves-files"), (Phase.OPTIMIZER, "only-keeps-copies"))


def _missing_notes(compared: Compared) -> Iterator[str]:
    """Notes on ranks, saved files, copies kept by the script and steps that one run alone has.

    All but ranks are those of the first outcome. No note on ranks that were compared as one; none on files and copies
    where the other run was stopped or `options.steps` selects.
    """
    runs: dict[str, Run] = dict(compared.runs)
    for name, run in runs.items():
        missing = [rank for rank in run.ranks if rank not in runs[OTHER[name]].ranks]
        if missing and not compared.as_one:
            yield told("only-has", run=name, what=rank_list(missing))
    for paired in (outcome.paired for outcome in compared.outcomes[:1]):
        for phase, code in _SAVED:
            one, two = (
                {
                    fqn
                    for fqn, *of in zip(sites.fqn, sites.kind, sites.phase, strict=True)
                    if of == [Kind.PRODUCT, phase]
                }
                for sites in (paired.a.sites, paired.b.sites)
            )
            for name, alone in (("a", one - two), ("b", two - one)):
                # a run that was stopped may have ended before it came to that
                stopped = runs[OTHER[name]].manifest.get("stopped") is True
                if alone and not stopped and compared.options.steps is None:
                    yield told(code, run=name, names=some(sorted(alone)))
        for name, steps in (("a", paired.only_a), ("b", paired.only_b)):
            if steps:
                stopped = runs[OTHER[name]].manifest.get("stopped") is True
                yield told("only-has", run=name, what=_steps_words(steps), stopped=OTHER[name] * stopped)


def _steps_words(steps: Sequence[int]) -> str:
    """Ascending steps in words: `step 3`, `steps 5-9`; `4 steps from 5 to 9` where one between is not among them."""
    first, last = steps[0], steps[-1]
    if last - first == len(steps) - 1:
        return f"step {first}" if len(steps) == 1 else f"steps {first}-{last}"
    return told("some-steps", steps=f"{len(steps):,}", first=first, last=last)


def copies_note(first: Divergence) -> list[str]:
    """Notes, one a run, where the first divergence is of a tensor whose copies on that run's ranks differ."""
    return [
        told("copies-differ", run=name, name=what(first.site), text=summary.text)
        for summary, name in ((first.a, "a"), (first.b, "b"))
        if summary is not None and summary.joined is Joined.COPIES
    ]
