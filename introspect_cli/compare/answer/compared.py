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
from introspect_cli.compare.outcome import NAMES, RESULTS, TRAINED, changes_of, sentence_of
from introspect_cli.compare.result import Counts, Separate, Verdict
from introspect_cli.compare.say import listed, some, told, what, what_diverges
from introspect_cli.compare.table import OTHER
from introspect_cli.compare.watched import (
    blindness_notes,
    chooses_modules,
    has_failed,
    observed_kinds,
    option_notes,
    perturbed_notes,
    ran_unseen,
    stopped_within,
)
from introspect_cli.labels import step_words
from introspect_cli.records import Joined, Kind, Phase
from introspect_cli.texts import count, rank_list

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


@dataclass(frozen=True)
class Raised:
    """An exception that ended a run.

    Attributes:
        side: a or b.
        exception: class and message.
        file: of the innermost frame that is the user's own; "" for none.
        line: its line.
        function: its function; "" for none.
    """

    side: str
    exception: str
    file: str = ""
    line: int = 0
    function: str = ""

    @property
    def same_as(self) -> tuple[str, str]:
        """Key by which exceptions of two runs are the same: class and message without directories, and function."""
        return _DIRECTORIES.sub("/", self.exception), self.function

    @property
    def words(self) -> str:
        """The exception with its place: `ValueError: bad shape, at model.py:41 in forward`.

        Without the place it has at most `_LONGEST` characters.
        """
        text = " ".join(self.exception.split())
        text = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
        inside = f" in {self.function}" if self.function not in {"", "<module>"} else ""
        return f"{text}, at {self.file}:{self.line}{inside}" if self.file else text


def exception_of(run: Run, side: str) -> Raised | None:
    """The exception that ended a run, as its manifest notes it; None where none did.

    `side` is what the run is called in words: `a`, `b` or "".
    """
    manifest = run.manifest
    text = manifest.get("exception")
    if manifest.get("how") != "exception" or not isinstance(text, str) or not text:
        return None
    at = manifest.get("raised_at")
    if not isinstance(at, Mapping) or not isinstance(at.get("file"), str) or not isinstance(at.get("line"), int):
        return Raised(side, text)
    return Raised(side, text, at["file"], at["line"], str(at.get("function") or ""))


def exception_of_one(one: Raised | None, two: Raised | None) -> Raised | None:
    """The exception of the run that alone ended by one; b's where they differ.

    None where both are the same or none is.
    """
    if one is not None and two is not None and one.same_as == two.same_as:
        return None
    return two or one


def cut_short(scene: View) -> Raised | None:
    """The exception that ended one run within the step of the first divergence; b's where two different ones did.

    None for none, or the same in both runs.
    """
    one, two = (exception_of(run, side) for run, side in zip(scene.runs, "ab", strict=True))
    endings = () if exception_of_one(one, two) is None else (two, one)
    return next((ending for ending in endings if ending is not None and _is_in_diverging_step(ending, scene)), None)


def _is_in_diverging_step(ending: Raised, scene: View) -> bool:
    """Whether its run ended in the first divergence's step, with that record missing or the step cut off."""
    first, in_b = scene.first, ending.side == "b"
    cut = scene.side_without == ending.side or scene.runs[in_b].manifest.get("remainder") is True
    reader, step = (scene.step.comparison.b, first.step_b) if in_b else (scene.step.comparison.a, first.step)
    return cut and reader.last_step == step


# --- two runs

_ORDER = (Phase.START, Phase.DATA, Phase.FORWARD, Phase.RECOMPUTE, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)


def order_of_ranks(first: Divergence) -> tuple[int, int, bool, int]:
    """Sort key for the first divergences of ranks: (step, phase, whether a collective received it, rank).

    Phases are those of a step in order, all others (evaluation) last. In the optimizer phase, gradients come before all
    else.
    """
    site = first.site
    place = _ORDER.index(site.phase) if site.phase in _ORDER else len(_ORDER)
    late = site.phase is Phase.OPTIMIZER and site.kind is not Kind.GRAD
    came = site.kind is Kind.COLLECTIVE and ".out" in site.path  # from another rank, then
    return first.step, 2 * place + late, came, first.rank


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
        # ranks that are put together do not tell which steps have one
        steps = [(self.evaluation and outcome.evaluated) or outcome.paired for outcome in self.outcomes]
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
    def evaluation(self) -> bool | None:
        """True where the outcomes are of evaluation alone, False where of training alone, else None."""
        return self.outcomes[0].evaluation if self.outcomes else None

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
        from introspect_cli.compare.reasons.update import hyperparameter_changes_of
        from introspect_cli.compare.reasons.view import View

        tied = [outcome for key, outcome in sorted(diverging, key=lambda pair: pair[0]) if key[:-1] == best[0][:-1]]
        tied = [outcome for outcome in tied if outcome.step is not None]  # what was compared elsewhere has none
        return next((each for each in tied if hyperparameter_changes_of(View(each, tied))), best[1])

    def structure(self, *, same: bool = False) -> tuple[StructureChange, ...]:
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
        if options.strict or options.narrowed or self.evaluation is not None:
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
    def unchanged(self) -> str:
        """Sentence on results that agree in every step although the runs diverge.

        "" where nothing diverges, for several ranks, and where parameters do not agree. Of results that are NaN
        throughout it says instead that they prove nothing.
        """
        outcome = self.outcomes[0]
        first, kinds, steps = outcome.first, outcome.results, len(outcome.paired)
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
    notes += [*blindness_notes(*manifests), *some_ranks]
    notes += filter(None, dict.fromkeys(outcome.unused_note for outcome in outcomes))
    if unopened := sum(outcome.unopened for outcome in outcomes):
        notes.append(told("unopened", steps=f"{unopened:,}"))
    notes += perturbed_notes(*manifests)
    if blind := compared.tally["blind_both"]:
        notes.append(told("blind-both", blind=f"{blind:,}", all=count(compared.counts.records, "record")))
    return notes


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
        one, two = (
            {fqn for fqn, kind in zip(sites.fqn, sites.kind, strict=True) if kind == Kind.PRODUCT}
            for sites in (paired.a.sites, paired.b.sites)
        )
        for name, alone in (("a", one - two), ("b", two - one)):
            # a run that was stopped may have ended before it came to that
            stopped = runs[OTHER[name]].manifest.get("stopped") is True
            if alone and not stopped and compared.options.steps is None:
                yield told("only-saves", run=name, names=some(sorted(alone)))
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


# --- verdict and sentence where nothing diverged


_RESULTS = {
    (Kind.LOSS.value, Phase.LOSS.value),
    (Kind.GRAD.value, Phase.OPTIMIZER.value),
    (Kind.PARAM.value, Phase.OPTIMIZER.value),
}
"""What a step's forward pass ends in: where one of them agrees in all steps, so did what was not seen on the way."""


class Agreement(NamedTuple):
    """The verdict where no result diverges, for the whole, for training and for evaluation (None without one)."""

    verdict: Verdict
    sentence: str
    training: Separate
    evaluation: Separate | None


def agreement(compared: Compared) -> Agreement:
    """Verdict and sentence where no result diverges; other differences pass if `compared.results_agree`.

    The sentence names an exception that ended a run. Training has the same, and so has evaluation if any step evaluates
    (else None). Where an evaluation ran unobserved, the whole and evaluation are UNDECIDED, and training is not.
    """
    split = any(outcome.gathered is not None and outcome.gathered.by_samples for outcome in compared.outcomes)
    verdict, text = undiverged_verdict(
        compared, told("samples-are" if split else "runs-are"), results=compared.results_agree
    )
    if verdict is Verdict.UNDECIDED:
        text = _raised_before_words(compared) or text
    else:
        text += _raised_after_words(compared)
    training = Separate(verdict, text)
    if not any(outcome.evaluated for outcome in compared.outcomes):
        return Agreement(verdict, text, training, None)
    unseen = _unseen_names(compared, Phase.EVAL)
    if unseen and verdict is Verdict.SAME:
        verdict, text = Verdict.UNDECIDED, told("evaluation-unseen", names=unseen, text=text)
    return Agreement(verdict, text, training, Separate(verdict, text))


def undiverged_verdict(compared: Compared, subject: str, *, results: bool = False) -> tuple[Verdict, str]:
    """Verdict and sentence where nothing diverges: UNDECIDED with the first of `_doubts`, else SAME.

    Args:
        compared: both runs and what came of each rank.
        subject: of the sentence, with its verb: `The runs are`.
        results: whether all results are known to agree, so that other differences and records of one run pass.
    """
    why = next(_doubts(compared, results=results), "")
    if why:
        return Verdict.UNDECIDED, told("could-not-tell", why=why)
    if results and _differs_beside(compared):
        return Verdict.SAME, _results_sentence(compared)
    agree = told("agree", extent=compared.extent + "," * bool(compared.counts.within), until=compared.until)
    changes = "" if compared.evaluation is not None else sentence_of(compared.structure(same=True))
    agree = told("same-numbers", agree=agree) if changes else told("the-same", subject=subject, agree=agree)
    return Verdict.SAME, f"{agree}.{changes}{_nan_words(compared.outcomes)}"


def _differs_beside(compared: Compared) -> bool:
    """Whether anything differs beside results that agree, or one run alone observed it."""
    return compared.best is not None or bool(compared.tally["blind"])


def _unseen_names(compared: Compared, phase: Phase) -> str:
    """Models or modules that ran without being observed in a phase, in either run, in words; "" for none."""
    names = list(dict.fromkeys(name for _, run in compared.runs for name in ran_unseen(run.manifest, phase)))
    return some(names) if names else ""


def _has_results(compared: Compared) -> bool:
    """Whether any compared rank of run a has sites of losses, gradients or parameters after an optimizer's step."""
    tables = [outcome.paired.a.sites for outcome in compared.outcomes if len(outcome.paired)]
    recorded = {pair for sites in tables for pair in zip(sites.kind, sites.phase, strict=True)}
    return not recorded.isdisjoint(_RESULTS)


def _doubts(compared: Compared, *, results: bool) -> Iterator[str]:
    """Why it cannot be told that runs agree in which nothing diverges, the weightiest first.

    Too little was compared: no step, no record that agrees, nothing of a last step, less than half of the records. One
    run alone recorded a step cut off, records (which do not count if `results` are known to agree), ranks or later
    steps. Structure differs and results are missing; modules ran unobserved and nothing shows what they computed; a
    capture failed.
    """
    counts, tally, runs = compared.counts, compared.tally, compared.runs
    if not counts.steps_compared:
        if empty := [name for name, run in runs if run.last_step is None]:
            yield told("no-complete-step", runs=", ".join(empty))
        yield told("not-selected-in-both" if compared.options.steps else "no-common-step")
    if counts.equal + counts.within == 0:
        yield told("nothing-in-common")
    if tally["blank"]:
        yield told("blank-step")
    if 2 * tally["blind_both"] > counts.records:
        yield told("mostly-unseen", unseen=tally["blind_both"], all=counts.records)
    if tally["cut"]:
        name, run = next(each for each in runs if stopped_within(each[1].manifest))
        ended = run.manifest.get("exit_code") if run.manifest.get("how") == "exit" else None
        ended_by = {"exit": "" if ended is None else str(ended), "cut": ended is None}
        yield told("cut-within", run=name, step=run.last_step, **ended_by)
    if tally["blind"] and not results:
        yield told("seen-by-one", records=count(tally["blind"], "record"), first=compared.blind_site)
    for (name, run), (_, other) in zip(runs, runs[::-1], strict=True):
        missing = [rank for rank in other.recorded if rank not in run.ranks and rank < run.world_size]
        if missing and compared.splits is None and not compared.options.ranks:
            yield told("ranks-missing", until=compared.until, ranks=rank_list(missing), run=name)
    agreed = told("agreed-within" if counts.within else "equal-until", until=compared.until)
    for paired in (outcome.paired for outcome in compared.outcomes):
        for long, tail in (("a", paired.tail_a), ("b", paired.tail_b)):
            if tail and paired.changed:
                yield told("changed-at-the-end", agreed=agreed, run=long, name=paired.changed)
            elif tail:
                yield told("ends-before", agreed=agreed, short=OTHER[long], run=long, more=tail)
    unrecorded = any(outcome.unrecorded is not None for outcome in compared.outcomes) and compared.evaluation is None
    if unrecorded and not (results and _differs_beside(compared)) and compared.structure(same=True):
        yield told("no-results")
    if not _has_results(compared) and (unseen := _unseen_names(compared, Phase.FORWARD)):
        yield told("but-ran-unseen", names=unseen)
    if broken := [name for name, run in runs if has_failed(run.manifest)]:
        yield told("but-failed", runs=", ".join(broken))


def _results_sentence(compared: Compared) -> str:
    """Sentence where all results agree, with the first other difference, unobserved records and structural changes."""
    code = "results-equal" if not compared.within else "results-within"
    kinds = frozenset.intersection(*(one.results for one in compared.outcomes if one.results is not None))
    text = told(code, names=_kinds_words(kinds), until=compared.until)
    first = None if compared.best is None else compared.best.first
    if first is not None:
        text += told("changed-none", step=first.step_words, what=what_diverges(first))
    if blind := compared.tally["blind"]:
        text += told("not-compared", records=count(blind, "record"), first=compared.blind_site)
    return f"{text}{sentence_of(compared.structure())}{_nan_words(compared.outcomes)}"


def _nan_words(outcomes: Sequence[RankOutcome]) -> str:
    """Sentence that counts the records that are NaN throughout in the last compared step of each rank; "" for none.

    They are counted in a. NaN equals NaN whatever was computed, so that they are equal proves nothing.
    """
    every, empty, name = 0, 0, ""
    for paired in (outcome.paired for outcome in outcomes if len(outcome.paired)):
        reader, step = paired.a, int(paired.steps[-1])
        batch = reader.read(step)
        rows = np.flatnonzero(nan_throughout(batch, Layouts(reader.layouts)))
        every, empty = every + len(batch), empty + len(rows)
        if len(rows) and not name:
            first = int(rows[np.argmin(batch.sequence[rows])])
            name = what(reader.record(batch, first, step).site)
    return told("nan-throughout", empty=f"{empty:,}", all=count(every, "record"), first=name) if empty else ""


# --- training and evaluation alone


def separate_answers(compared: Compared) -> tuple[Separate | None, Separate | None]:
    """The answers for training alone and evaluation alone, of runs that diverge; (None, None) without an evaluation.

    Ranks that were not compared again count as a whole for training.
    """
    parts: dict[bool, list[RankOutcome]] = {True: [], False: []}
    for outcome in compared.outcomes:
        parts[False].append(outcome.parts.get(False) or replace(outcome, evaluation=False))
        parts[True] += [outcome.parts[True]] if True in outcome.parts else []
    if not parts[True]:
        return None, None
    training, evaluation = (
        _separate_answer(replace(compared, outcomes=parts[which]), name)
        for which, name in ((False, "Training"), (True, "Evaluation"))
    )
    return training, evaluation


def _separate_answer(compared: Compared, name: str) -> Separate:
    """The answer for training or evaluation (`name`): where it diverges first, else SAME or UNDECIDED.

    `compared` holds only that part's outcomes already.
    """
    first = None if compared.best is None else compared.best.first
    if first is not None:
        return Separate(Verdict.DIVERGED, diverges_words(name, first), first)
    subject = told("selected-is", name=name.lower()) if compared.options.narrowed else told("it-is", name=name)
    return Separate(*undiverged_verdict(compared, subject))


def diverges_words(name: str, first: Divergence, *, too: bool = False) -> str:
    """Sentence on where training or evaluation (`name`) diverges; `too` where the other does as well."""
    return told("diverges", name=name, step=first.step_words, too=", too" * too, what=what_diverges(first))


# --- a run that ended by an exception


def _raised_after_words(compared: Compared) -> str:
    """Sentence, to be appended, on exceptions that ended a run after all that agreed; "" where none did.

    Also where both runs ended by the same one.
    """
    ending, same = compared.ending, compared.raised[1]
    if ending is None:
        return "" if same is None else told("both-raised", words=same.words)
    other = compared.raised[0] if ending.side == "b" else None
    return told("raised-after", run=ending.side, words=ending.words, other="" if other is None else other.words)


def _raised_before_words(compared: Compared) -> str:
    """Sentence where an exception ended one run alone, and the other has later steps or none in common.

    "" otherwise.
    """
    ending = compared.ending
    if ending is None:
        return ""
    side, run = ending.side, dict(compared.runs)[ending.side]
    if not compared.until:
        has_steps = any(len(run.rank(rank)) for rank in run.ranks)
        return told("raised-no-common" if has_steps else "raised-early", run=side, words=ending.words)
    if not any(one.paired.tail_a if side == "b" else one.paired.tail_b for one in compared.outcomes):
        return ""
    within = bool(compared.tally["within"])
    ended = {"run": side, "other": OTHER[side], "words": ending.words}
    return told("raised-earlier", **ended, until=compared.until, within=within)
