"""Verdict and sentence where nothing diverged, for all records, or for training or evaluation alone.

"Same" covers what both runs recorded and observed; where one ends earlier or was blind, the verdict is UNDECIDED. An
exception that ended a run is told with what agreed until then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.compare.say import some, told, what, what_diverges
from introspect_cli.compare.step.structure import sentence_of
from introspect_cli.compare.terms.distance import Layouts, nan_throughout
from introspect_cli.compare.terms.result import Separate, Verdict
from introspect_cli.compare.terms.table import OTHER
from introspect_cli.compare.terms.watched import has_failed, ran_unseen, stopped_within
from introspect_cli.records import Kind, Phase
from introspect_cli.texts import count, rank_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.answer.compared import Compared
    from introspect_cli.compare.step.outcome import RankOutcome
    from introspect_cli.compare.terms.result import Divergence


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
    if unseen and verdict is Verdict.SAME and compared.options.evaluation is not False:
        verdict, text = Verdict.UNDECIDED, told("evaluation-unseen", names=unseen, text=text)
    return Agreement(verdict, text, training, Separate(verdict, text))


def undiverged_verdict(compared: Compared, subject: str, *, results: bool = False) -> tuple[Verdict, str]:
    """Verdict (SAME or UNDECIDED) and sentence where nothing diverges.

    UNDECIDED, with the first reason that holds: too little was compared; one run recorded more; structure differs and
    results are missing; modules ran unobserved and no results were recorded; a capture failed.

    Args:
        compared: both runs and what came of each rank.
        subject: of the sentence, with its verb: `The runs are`.
        results: whether all results are known to agree, so that other differences and records of one run pass.
    """
    why = _why_too_little(compared) or _why_one_saw_more(compared, results=results)
    if why:
        return Verdict.UNDECIDED, told("could-not-tell", why=why)
    verdict, text = _agreed_verdict(compared, subject, results=results)
    unseen = "" if _has_results(compared) else _unseen_names(compared, Phase.FORWARD)
    broken = [name for name, run in compared.runs if has_failed(run.manifest)]
    if verdict is Verdict.SAME and (unseen or broken):
        why = told("but-ran-unseen", names=unseen) if unseen else told("but-failed", runs=", ".join(broken))
        return Verdict.UNDECIDED, told("could-not-tell", why=why)
    return verdict, text


def _unseen_names(compared: Compared, phase: Phase) -> str:
    """Models or modules that ran without being observed in a phase, in either run, in words; "" for none."""
    names = list(dict.fromkeys(name for _, run in compared.runs for name in ran_unseen(run.manifest, phase)))
    return some(names) if names else ""


def _has_results(compared: Compared) -> bool:
    """Whether any compared rank of run a has sites of losses, gradients or parameters after an optimizer's step."""
    tables = [outcome.paired.a.sites for outcome in compared.outcomes if len(outcome.paired)]
    recorded = {pair for sites in tables for pair in zip(sites.kind, sites.phase, strict=True)}
    return not recorded.isdisjoint(_RESULTS)


def _agreed_verdict(compared: Compared, subject: str, *, results: bool) -> tuple[Verdict, str]:
    """Verdict and sentence where no compared value differs.

    SAME, or UNDECIDED if structure differs and results are missing.

    `results`: whether all results are known to agree, so that other differences pass.
    """
    counts, outcomes = compared.counts, compared.outcomes
    if results and (compared.best is not None or compared.tally["blind"]):
        return Verdict.SAME, _results_sentence(compared)
    agree = told("agree", extent=compared.extent + "," * bool(counts.within), until=compared.until)
    changes = sentence_of(compared.structure_if_same)
    if not changes or compared.options.evaluation is not None:
        agree, changes = told("the-same", subject=subject, agree=agree), ""
    elif any(outcome.unrecorded is not None for outcome in outcomes):
        return Verdict.UNDECIDED, told("could-not-tell", why=told("no-results", agree=agree)) + changes
    else:
        agree = told("same-numbers", agree=agree)
    return Verdict.SAME, f"{agree}.{changes}{_nan_words(outcomes)}"


def _why_too_little(compared: Compared) -> str:
    """Why too little was compared to tell, the first that holds; "" if none does.

    No compared step, as a run has none, or none is common or selected; no record that is equal or within tolerance; a
    last step of which nothing was observed; more than half of the records not observed in either run.
    """
    counts, unseen = compared.counts, compared.tally["blind_both"]
    if not counts.steps_compared:
        empty = [name for name, run in compared.runs if run.last_step is None]
        if empty:
            return told("no-complete-step", runs=", ".join(empty))
        return told("not-selected-in-both" if compared.options.steps else "no-common-step")
    if not counts.records or counts.equal + counts.within == 0:
        return told("nothing-in-common")
    if compared.tally["blank"]:
        return told("blank-step")
    return told("mostly-unseen", unseen=unseen, all=counts.records) if 2 * unseen > counts.records else ""


def _why_one_saw_more(compared: Compared, *, results: bool) -> str:
    """What one run alone recorded, the first that holds; "" for none: a step cut off, records, ranks, later steps.

    Records that one run alone observed do not count if `results` are known to agree.
    """
    if compared.tally["cut"]:
        name, run = next(each for each in compared.runs if stopped_within(each[1].manifest))
        ended = run.manifest.get("exit_code") if run.manifest.get("how") == "exit" else None
        ended_by = {"exit": "" if ended is None else str(ended), "cut": ended is None}
        return told("cut-within", run=name, step=run.last_step, **ended_by)
    if compared.tally["blind"] and not results:
        return told("seen-by-one", records=count(compared.tally["blind"], "record"), first=compared.blind_site)
    for name, run, other in (("a", compared.a, compared.b), ("b", compared.b, compared.a)):
        missing = [rank for rank in other.recorded if rank not in run.ranks and rank < run.world_size]
        if missing and compared.splits is None and not compared.options.ranks:
            return told("ranks-missing", until=compared.until, ranks=rank_list(missing), run=name)
    agreed = told("agreed-within" if compared.counts.within else "equal-until", until=compared.until)
    for paired in (outcome.paired for outcome in compared.outcomes):
        if paired.tail_a or paired.tail_b:
            long, tail = ("a", paired.tail_a) if paired.tail_a else ("b", paired.tail_b)
            changed = next((outcome.paired.changed for outcome in compared.outcomes if outcome.paired.changed), "")
            if changed:
                return told("changed-at-the-end", agreed=agreed, run=long, name=changed)
            return told("ends-before", agreed=agreed, short=OTHER[long], run=long, more=tail)
    return ""


def _results_sentence(compared: Compared) -> str:
    """Sentence where all results agree, with the first other difference, unobserved records and structural changes."""
    code = "results-equal" if not compared.within else "results-within"
    text = told(code, names=compared.results, until=compared.until)
    first = None if compared.best is None else compared.best.first
    if first is not None:
        text += told("changed-none", step=first.step_words, what=what_diverges(first))
    if blind := compared.tally["blind"]:
        text += told("not-compared", records=count(blind, "record"), first=compared.blind_site)
    return f"{text}{sentence_of(compared.structure)}{_nan_words(compared.outcomes)}"


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
        parts[False].append(outcome.alone(False) if outcome.alone is not None else outcome)
        parts[True] += [outcome.alone(True)] if outcome.evaluated and outcome.alone is not None else []
    if not parts[True]:
        return None, None
    training, evaluation = (
        _separate_answer(
            replace(compared, options=replace(compared.options, evaluation=which), outcomes=parts[which]), name
        )
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
    verdict, text = undiverged_verdict(compared, subject_of(name, narrowed=compared.options.narrowed))
    return Separate(verdict, text, extent=compared.extent if verdict is Verdict.SAME else "")


def subject_of(name: str, *, narrowed: bool) -> str:
    """Subject of a sentence with its verb: `Training is`; `narrowed`: of the selected records of it."""
    return told("selected-is", name=name.lower()) if narrowed else told("it-is", name=name)


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
    paired = [outcome.paired for outcome in compared.outcomes if len(outcome.paired)]
    if not any(steps.tail_a if side == "b" else steps.tail_b for steps in paired):
        return ""
    cut = [rank for rank in run.ranks if not run.rank(rank).ended]
    return told(
        "raised-earlier",
        run=side,
        ranks=rank_list(cut) if cut else "",
        other=OTHER[side],
        words=ending.words,
        until=compared.until,
        which=told("selected" if compared.options.narrowed else "both-recorded"),
        within=bool(compared.tally["within"]),
    )
