"""Two runs with the outcomes of all ranks: how much was compared, agrees or was not observed, and how that is said.

Where all results (losses, gradients, parameters) of both runs are recorded and agree, the runs are the same, and other
differences are told beside it. Unobserved values do not become equal by that. "Same" covers what both runs recorded and
observed; where one ends earlier or was blind, the verdict is UNDECIDED. An exception that ended a run is told with what
agreed until then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.compare.evidence import Known
from introspect_cli.compare.measure import Layouts, nan_throughout
from introspect_cli.compare.outcome import RESULTS, TRAINED
from introspect_cli.compare.result import Counts, Separate, Verdict
from introspect_cli.compare.say import some, told, what, what_diverges
from introspect_cli.compare.table import OTHER
from introspect_cli.compare.watched import (
    chooses_modules,
    has_failed,
    notes_on_captures,
    notes_on_neither,
    observed_kinds,
    ran_unseen,
    stopped_within,
)
from introspect_cli.labels import step_words
from introspect_cli.records import Kind, Phase
from introspect_cli.texts import clean, count, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.result import DiffOptions, Divergence, StructureChange
    from introspect_cli.compare.wholes import Splits
    from introspect_cli.store.run import Run


# --- exceptions that ended a run


_LONGEST = 160
_DIRECTORIES = re.compile(r"(?:/[^/\s'\"]+)+/")


class Raised(NamedTuple):
    """An exception that ended a run.

    Attributes:
        side: a or b.
        exception: class and message.
        where: `file:line` of the innermost frame that is the user's own; "" for none.
        function: its function; "" for none.
    """

    side: str
    exception: str
    where: str
    function: str

    @property
    def words(self) -> str:
        """The exception with its place: `ValueError: bad shape, at model.py:41 in forward`."""
        text = clean(" ".join(self.exception.split()), _LONGEST)
        return told("exception", text=text, where=self.where, function=self.function.replace("<module>", ""))


def exception_of(run: Run, side: str) -> Raised | None:
    """The exception that ended a run, as its manifest notes it; None where none did.

    `side` is what the run is called in words: `a`, `b` or "".
    """
    text, at = run.manifest.get("exception"), run.manifest.get("raised_at")
    if run.manifest.get("how") != "exception" or not isinstance(text, str) or not text:
        return None
    at = at if isinstance(at, Mapping) else {}
    where = f"{at['file']}:{at.get('line')}" if at.get("file") else ""
    return Raised(side, text, where, str(at.get("function") or ""))


def exceptions_of(runs: Sequence[Run]) -> list[Raised]:
    """The exceptions that ended run a and run b; of two that are the same, the one with the side "" for both.

    They are the same by class and message, without directories, and function.
    """
    raised = [each for run, side in zip(runs, "ab", strict=True) if (each := exception_of(run, side)) is not None]
    alike = {(_DIRECTORIES.sub("/", each.exception), each.function) for each in raised}
    return [raised[0]._replace(side="")] if len(raised) > len(alike) else raised


def raised_words(raised: Sequence[Raised], **where: str) -> str:
    """A sentence for each exception; `where` has the step that it cut off, and the run that goes on."""
    said = (told("raised", run=each.side, both=not each.side, words=each.words, **where) for each in raised)
    return " ".join(said)


def cut_short(scene: View) -> Raised | None:
    """The exception that ended one run within the step of the first divergence; b's where two different ones did.

    That record is missing in the run, or the step was cut off. None for none, or the same in both runs.
    """
    first, compared = scene.first, scene.step.comparison
    last = {"a": compared.a.last_step == first.step, "b": compared.b.last_step == first.step_b, "": False}
    cut = {side: run.manifest.get("remainder") is True for side, run in zip("ab", scene.runs, strict=True)}
    endings = [each for each in exceptions_of(scene.runs) if last[each.side]]
    return next((each for each in endings[::-1] if scene.side_without == each.side or cut[each.side]), None)


# --- two runs


def order_of_ranks(first: Divergence) -> tuple[int, int, int]:
    """Sort key for the first divergences of ranks: (step, phase, rank).

    Phases are those of a step in order, evaluation last. In the optimizer phase, gradients come before all else.
    """
    site, place = first.site, list(Phase).index(first.site.phase)
    late = site.phase is Phase.OPTIMIZER and site.kind is not Kind.GRAD
    return first.step, 2 * place + late, first.rank


@dataclass(frozen=True, eq=False)
class Compared:
    """Two runs with the outcome of each rank.

    Attributes:
        outcomes: of each rank, or of all ranks as one.
        splits: how the runs are split up, where all ranks were compared as one.
        evaluation: True where the outcomes are of evaluation alone, False where of training alone, else None.
    """

    a: Run
    b: Run
    options: DiffOptions
    outcomes: Sequence[RankOutcome]
    splits: Splits | None = None
    evaluation: bool | None = None

    @property
    def runs(self) -> tuple[tuple[str, Run, Run], ...]:
        """Both runs with their names, each with the other one: (("a", a, b), ("b", b, a))."""
        return ("a", self.a, self.b), ("b", self.b, self.a)

    # --- how much

    @cached_property
    def tally(self) -> Counter[str]:
        """Sum of the ranks' tallies by name: `equal`, `diverged`, `blind` (only one run observed it) and so on."""
        return sum((outcome.tally for outcome in self.outcomes), Counter())

    @cached_property
    def counts(self) -> Counts:
        """Totals over all ranks."""
        total, steps = self.tally, sum(len(outcome.paired) for outcome in self.outcomes)
        names = "steps_diverged", "records", "equal", "diverged", "only_a", "only_b", "within"
        unseen = max(total["not_observed"], total["blind_both"])
        named = {name: total[name] for name in names}
        return Counts(self.a.steps, self.b.steps, steps, not_observed=unseen, **named)

    @cached_property
    def until(self) -> str:
        """The last step (in a) that was compared on any rank: `up to and including step 12`; "" where none was."""
        ends = [(int(one.paired.steps[-1]), one.paired.readers[0]) for one in self.outcomes if len(one.paired)]
        last, reader = max(ends, key=lambda end: end[0], default=(0, None))
        return "" if reader is None else told("until", step=step_words(last, reader.labels.get(last, {})))

    @property
    def blind_words(self) -> str:
        """How many records one run alone observed, and the first of them, in words; "" for none."""
        first = next((outcome.blind_site for outcome in self.outcomes if outcome.tally["blind"]), "")
        return first and told("blind", records=count(self.tally["blind"], "record"), first=first)

    # --- what came of it

    @cached_property
    def best(self) -> RankOutcome | None:
        """The outcome of the rank that diverges first, by `order_of_ranks`; None where nothing diverges."""
        diverging = [(order_of_ranks(outcome.first), outcome) for outcome in self.outcomes if outcome.first is not None]
        return min(diverging, key=lambda pair: pair[0], default=(None, None))[1]

    @property
    def structure(self) -> tuple[StructureChange, ...]:
        """Structural changes of the first rank that has any."""
        return next((outcome.changes for outcome in self.outcomes if outcome.changes), ())

    @cached_property
    def results_agree(self) -> bool:
        """Whether losses, gradients and parameters of all compared steps are recorded in both runs and do not differ.

        False also if options are strict, narrow what is compared, or select training or evaluation; if a capture failed
        or chose modules; if a step was left unopened; or if they agree only within tolerance while something diverges.
        """
        options, outcomes, wanted = self.options, self.outcomes, {kind.value for kind in RESULTS}
        manifests = self.a.manifest, self.b.manifest
        opened = [outcome.results for outcome in outcomes if outcome.results is not None]
        differ = any(outcome.results_known is Known.DIFFERS for outcome in outcomes) or self.tally["unopened"]
        return (
            not (options.strict or options.narrowed or self.evaluation is not None or differ)
            and not any(has_failed(one) or chooses_modules(one) or wanted - observed_kinds(one) for one in manifests)
            and not (self.within and self.best is not None)
            and bool(opened)
            and all(kinds >= TRAINED for kinds in opened)
        )

    @property
    def by_results(self) -> bool:
        """Whether all results agree, and something else differs or was observed by one run alone."""
        return self.results_agree and (self.best is not None or bool(self.tally["blind"]))

    @property
    def diverges(self) -> bool:
        """Whether any rank diverges and `results_agree` is False."""
        return self.best is not None and not self.results_agree

    @property
    def within(self) -> bool:
        """Whether on any rank results agree only within tolerance or noise."""
        return any(outcome.results_known is Known.WITHIN for outcome in self.outcomes)

    @property
    def hidden(self) -> str:
        """Sentence on results of a single rank that are NaN throughout, so that they prove nothing; "" for none."""
        return told("hidden", names=_kinds_words(self.outcomes[0].hidden if len(self.outcomes) == 1 else None))


def _kinds_words(kinds: frozenset[Kind] | None) -> str:
    """Kinds of results in words: `losses, parameter gradients`."""
    return ", ".join(kind.several for kind in RESULTS if kind in (kinds or ()))


# --- what was not compared


def notes_on(compared: Compared) -> Iterator[str]:
    """Notes: what was not compared or not observed, and differing options; where nothing diverges, also equal ones.

    A note may be there twice, or be "".
    """
    for name, run, other in compared.runs:
        yield from _notes_on_run(compared, name, run, other)
    yield from (note for outcome in compared.outcomes for note in outcome.notes)
    yield from notes_on_captures(compared.a.manifest, compared.b.manifest)
    if not compared.diverges:
        yield from notes_on_neither(compared.a.manifest, compared.b.manifest, frozenset(kind.value for kind in RESULTS))
    yield told("unopened", steps=compared.tally["unopened"])
    yield told("lean", lean=compared.tally["lean"])
    yield told("blind-both", blind=compared.tally["blind_both"], all=count(compared.counts.records, "record"))


def _notes_on_run(compared: Compared, name: str, run: Run, other: Run) -> Iterator[str]:
    """Notes on a run still being written or interrupted, on how ranks ended, on thinned records, and what it alone has.

    That is ranks, unless they were compared as one, and of the first outcome steps, saved files and copies kept by the
    script; files and copies not where the other run was stopped or `options.steps` selects.
    """
    until = told("no-step") if run.last_step is None else told("until", step=f"step {run.last_step}")
    if run.state.value in {"running", "interrupted"}:
        yield told(run.state.value, run=name, until=until)
    yield from (told("ranks-ended", run=name, how=sentence) for sentence in run.endings)
    thinned = dict.fromkeys(str(one) for rank in run.ranks for one in run.rank(rank).thinned)
    yield from (told("thinned", run=name, what=text) for text in thinned)
    stopped = OTHER[name] * (other.manifest.get("stopped") is True)  # it may have ended before it came to that
    ranks = [rank for rank in run.ranks if rank not in other.ranks]
    alone = [rank_list(ranks)] if ranks and compared.splits is None else []
    for paired in (outcome.paired for outcome in compared.outcomes[:1]):
        saved = [
            {fqn for fqn, kind in zip(reader.sites.fqn, reader.sites.kind, strict=True) if kind == Kind.PRODUCT}
            for reader in paired.readers
        ]
        own = "ab".index(name)
        files, steps = saved[own] - saved[1 - own], paired.only[own]
        if files and not stopped and compared.options.steps is None:
            alone.append(some(sorted(files)))
        if steps:
            several = told("some-steps", steps=count(len(steps), "step"), first=steps[0], last=steps[-1])
            alone.append(several if len(steps) > 1 else f"step {steps[0]}")
    yield from (told("only-has", run=name, what=each, stopped=stopped) for each in alone)


# --- verdict and sentence where nothing diverged


_RESULTS = {
    (Kind.LOSS.value, Phase.LOSS.value),
    (Kind.GRAD.value, Phase.OPTIMIZER.value),
    (Kind.PARAM.value, Phase.OPTIMIZER.value),
}
"""What a step's forward pass ends in: where one of them agrees in all steps, so did what was not seen on the way."""


def agreement(compared: Compared, name: str = "") -> tuple[Verdict, str]:
    """Verdict and sentence where no result diverges: UNDECIDED with the first of `_doubts`, else SAME.

    Args:
        compared: both runs and what came of each rank.
        name: `Training` or `Evaluation`, of which alone the outcomes are; "" for all.
    """
    if why := next(_doubts(compared), ""):
        return Verdict.UNDECIDED, told("could-not-tell", of=name.lower(), why=why)
    counts, by_results = compared.counts, compared.by_results
    changes = () if name and not by_results else compared.structure
    first = None if compared.best is None else compared.best.first
    agreed = [outcome.results for outcome in compared.outcomes if outcome.results is not None]
    text = told(
        "same-results" if by_results else "same",
        name=name,
        plain=not name and not changes,
        structure=bool(changes),
        names=by_results and _kinds_words(frozenset.intersection(*agreed)),
        records=count(counts.equal, "record"),
        steps=count(counts.steps_compared, "step"),
        thinned=any(reader.thinned for outcome in compared.outcomes for reader in outcome.paired.readers),
        within=counts.within,
        tolerated=compared.within,
        until=compared.until,
        first=first and first.step_words,
        what=first and what_diverges(first),
        blind=compared.blind_words,
    )
    besides = told("besides", changes=some([change.text for change in changes], between="; ") if changes else "")
    return Verdict.SAME, f"{text}{besides}{_nan_words(compared.outcomes)}"


def unseen_names(compared: Compared, phase: Phase) -> str:
    """Models or modules that ran without being observed in a phase, in either run, in words; "" for none."""
    names = ran_unseen((compared.a.manifest, compared.b.manifest), phase)
    return some(names) if names else ""


def _doubts(compared: Compared) -> Iterator[str]:
    """Why it cannot be told that runs agree in which nothing diverges, the weightiest first.

    Too little was compared: no step, no record that agrees, nothing of a last step, less than half of the records. One
    run alone recorded a step cut off, records (which do not count if all results agree), ranks or later steps.
    Structure differs and results are missing; modules ran unobserved and nothing shows what they computed; a capture
    failed.
    """
    counts, tally = compared.counts, compared.tally
    if not counts.steps_compared:
        yield told("no-common-step")
    if counts.equal + counts.within == 0 or tally["blank"] or 2 * tally["blind_both"] > counts.records:
        yield told("mostly-unseen", unseen=tally["blind_both"], all=counts.records)
    if compared.blind_words and not compared.by_results:
        yield told("but", blind=compared.blind_words)
    if tally["later"]:
        yield told("later", within=counts.within, until=compared.until, more=count(tally["later"], "step"))
    for name, run, other in compared.runs:
        if tally["cut"] and stopped_within(run.manifest):
            yield told("but", cut=name, step=str(run.last_step), how=run.manifest["how"])
        missing = [rank for rank in other.recorded if rank not in run.ranks and rank < run.world_size]
        if missing and compared.splits is None and not compared.options.ranks:
            yield told("but", until=compared.until, ranks=rank_list(missing), run=name)
    for paired in (outcome.paired for outcome in compared.outcomes):
        for long, tail in zip("ab", paired.tails, strict=True):
            if tail:
                agreed, more = {"within": counts.within, "until": compared.until}, count(tail, "step")
                yield told("ends-before", **agreed, short=OTHER[long], run=long, more=more)
    if tally["unrecorded"] and compared.evaluation is None and not compared.by_results and compared.structure:
        yield told("but", structure=True)
    tables = [outcome.paired.readers[0].sites for outcome in compared.outcomes if len(outcome.paired)]
    recorded = {pair for sites in tables for pair in zip(sites.kind, sites.phase, strict=True)}
    if recorded.isdisjoint(_RESULTS) and (unseen := unseen_names(compared, Phase.FORWARD)):
        yield told("but", names=unseen)
    if broken := [name for name, run, _ in compared.runs if has_failed(run.manifest)]:
        yield told("but", failed=", ".join(broken))


def _nan_words(outcomes: Sequence[RankOutcome]) -> str:
    """Sentence that counts the records that are NaN throughout in the last compared step of each rank; "" for none.

    They are counted in a. NaN equals NaN whatever was computed, so that they are equal proves nothing.
    """
    every, empty, name = 0, 0, ""
    for paired in (outcome.paired for outcome in outcomes if len(outcome.paired)):
        reader, step = paired.readers[0], int(paired.steps[-1])
        batch = reader.read(step)
        rows = np.flatnonzero(nan_throughout(batch, Layouts(reader.layouts)))
        every, empty = every + len(batch), empty + len(rows)
        if len(rows) and not name:
            first = int(rows[np.argmin(batch.sequence[rows])])
            name = what(reader.record(batch, first, step).site)
    return told("nan-throughout", empty=empty, all=count(every, "record"), first=name) if empty else ""


# --- training and evaluation alone


def separate_answers(compared: Compared) -> tuple[Separate | None, Separate | None]:
    """The answers for training alone and evaluation alone, of runs that diverge; (None, None) without an evaluation.

    Ranks that were not compared again count as a whole for training.
    """
    parts = {
        "Training": [outcome.parts.get(False, outcome) for outcome in compared.outcomes],
        "Evaluation": [outcome.parts[True] for outcome in compared.outcomes if True in outcome.parts],
    }
    if not parts["Evaluation"]:
        return None, None
    answers = []
    for name, outcomes in parts.items():
        part = replace(compared, outcomes=outcomes, evaluation=name == "Evaluation")
        first = None if part.best is None else part.best.first
        words = first and told("diverges", name=name, step=first.step_words, what=what_diverges(first))
        answers.append(Separate(Verdict.DIVERGED, words, first) if words else Separate(*agreement(part, name)))
    return answers[0], answers[1]
