"""Verdict and sentence where nothing diverged, for all records, or for training or evaluation alone.

"Same" covers what both runs recorded and observed; where one ends earlier or was blind, the verdict is UNDECIDED. An
exception that ended a run is told with what agreed until then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.step.structure import sentence_of
from introspect_cli.compare.terms.distance import Layouts, nan_throughout
from introspect_cli.compare.terms.reach import within_words
from introspect_cli.compare.terms.result import DiffResult, Separate, Verdict
from introspect_cli.compare.terms.table import OTHER
from introspect_cli.compare.terms.watched import failed, ran_unseen, stopped_within
from introspect_cli.compare.terms.words import some, what, what_diverges
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


def agreeing(compared: Compared) -> DiffResult:
    """The answer where no result diverges; `compared.results_agree` lets other differences pass."""
    split = any(outcome.gathered is not None and outcome.gathered.by_samples for outcome in compared.outcomes)
    subject = "Over the samples of each step, the runs are" if split else "The runs are"
    verdict, text = undiverged(compared, subject, results=compared.results_agree)
    if verdict is Verdict.UNDECIDED:
        text = _before_the_end(compared) or text
    else:
        text += _after_the_end(compared)
    alike = Separate(verdict, text)
    evaluation = alike if any(outcome.evaluated for outcome in compared.outcomes) else None
    unseen = _ran_unseen(compared, Phase.EVAL) if evaluation is not None else ""
    if unseen and verdict is Verdict.SAME and compared.options.evaluation is not False:
        verdict = Verdict.UNDECIDED
        text = f"Could not tell: of the evaluation, what {unseen} computes was not seen. What was seen: {text}"
        evaluation = Separate(verdict, text)
    return DiffResult(
        a=str(compared.a.path),
        b=str(compared.b.path),
        verdict=verdict,
        sentence=text,
        training=alike,
        evaluation=evaluation,
    )


def undiverged(compared: Compared, subject: str = "The runs are", *, results: bool = False) -> tuple[Verdict, str]:
    """Verdict (SAME or UNDECIDED) and sentence where nothing diverged, or nothing that a result rests on."""
    why = _too_little(compared) or _one_saw_more(compared, results=results)
    if why:
        return Verdict.UNDECIDED, f"Could not tell: {why}."
    verdict, text = _agree(compared, subject, results=results)
    broken = [name for name, run in compared.runs if failed(run.manifest)]
    unseen = "" if _has_results(compared) else _ran_unseen(compared, Phase.FORWARD)
    if verdict is Verdict.SAME and unseen:
        but = f"what {unseen} computes was not seen, and no result of it (losses, gradients, updates) is on record"
        return Verdict.UNDECIDED, f"Could not tell: all that both runs recorded agrees, but {but}."
    if verdict is Verdict.SAME and broken:
        which = "both captures" if len(broken) == 2 else f"the capture of run {broken[0]}"
        rest = f"part of {which} failed, and the rest was not seen."
        return Verdict.UNDECIDED, f"Could not tell: all that both runs recorded agrees, but {rest}"
    return verdict, text


def _ran_unseen(compared: Compared, phase: Phase) -> str:
    """Models or modules of either run that ran unobserved in a phase, in words; "" for none."""
    names = list(dict.fromkeys(name for _, run in compared.runs for name in ran_unseen(run.manifest, phase)))
    return some(names) if names else ""


def _has_results(compared: Compared) -> bool:
    """Whether losses, gradients or parameters after an optimizer's step are on record."""
    tables = [outcome.paired.a.sites for outcome in compared.outcomes if len(outcome.paired)]
    recorded = {pair for sites in tables for pair in zip(sites.kind, sites.phase, strict=True)}
    return not recorded.isdisjoint(_RESULTS)


def _agree(compared: Compared, subject: str, *, results: bool) -> tuple[Verdict, str]:
    """Verdict and sentence where no compared value differs; UNDECIDED if structure differs and results are missing."""
    counts, options, outcomes, reach = compared.counts, compared.options, compared.outcomes, compared.reach
    if results and (compared.best is not None or compared.tally["blind"]):
        return Verdict.SAME, _by_results(compared)
    extent = compared.extent + ("," if counts.within else "")
    agree = f"{extent} agree{'s' * (counts.equal == 1)} {compared.until}"
    changes = sentence_of(compared.harmless_structure)
    if reach is not None and counts.within and not options.tolerant:
        agree, changes = f"{within_words(reach)}: {agree}", ""
    elif not changes or options.evaluation is not None:
        agree, changes = f"{subject} the same: {agree}", ""
    elif any(outcome.unrecorded is not None for outcome in outcomes):
        why = "the results of the steps (losses, gradients, parameters) were not recorded, and not all else is the same"
        return Verdict.UNDECIDED, f"Could not tell: {agree}, but {why}.{changes}"
    else:
        agree = f"The runs have the same numbers: {agree}"
    return Verdict.SAME, f"{agree}.{changes}{_emptied(outcomes)}"


def _too_little(compared: Compared) -> str:
    """Why too little was compared, the first that holds; "" if none.

    A run without a complete step; no common step; no record that is equal or within tolerance; a last step of which
    nothing was observed; over half of the common records unobserved.
    """
    counts, unseen = compared.counts, compared.tally["blind_both"]
    if not counts.steps_compared:
        empty = [name for name, run in compared.runs if run.last_step is None]
        if empty:
            return "neither run has a complete step" if len(empty) == 2 else f"run {empty[0]} has no complete step"
        return "no selected step is in both runs" if compared.options.steps else "the runs have no step in common"
    if not counts.records or counts.equal + counts.within == 0:
        return "the runs have nothing in common that both observed"
    if compared.tally["blank"]:
        return "what the last compared step computes could not be observed, and it has no loss and no gradient"
    if 2 * unseen > counts.records:
        return f"about {unseen:,} of {count(counts.records, 'record')} in common could not be observed"
    return ""


def _one_saw_more(compared: Compared, *, results: bool) -> str:
    """What only one run recorded: an interrupted step, records, ranks, or later steps; "" for none."""
    if compared.tally["cut"]:
        name, run = next(each for each in compared.runs if stopped_within(each[1].manifest))
        code = run.manifest.get("exit_code")
        how = f"ended with exit code {code}" if run.manifest.get("how") == "exit" else "was interrupted"
        return f"all that both runs recorded agrees until run {name} {how} within step {run.last_step}"
    blind = count(compared.tally["blind"], "record")
    if compared.tally["blind"] and not results:
        only = f"{blind} only one of them could see (the first: {compared.blind_site})"
        return f"all that both runs saw agrees, but {only}"
    for name, run, other in (("a", compared.a, compared.b), ("b", compared.b, compared.a)):
        missing = [rank for rank in other.recorded if rank not in run.ranks and rank < run.world_size]
        if missing and compared.splits is None and not compared.options.ranks:
            return (
                f"all that both runs recorded agrees {compared.until}, but {rank_list(missing)} of {name} left nothing"
            )
    for tails in ((outcome.paired.tail_a, outcome.paired.tail_b) for outcome in compared.outcomes):
        if any(tails):
            long, short, tail = ("a", "b", tails[0]) if tails[0] else ("b", "a", tails[1])
            agree = "agreed within the tolerance or noise given" if compared.counts.within else "equal"
            if changed := next((outcome.paired.changed for outcome in compared.outcomes if outcome.paired.changed), ""):
                outside = "outside of an optimizer step, and no step follows that would show what comes of it"
                return f"{agree} {compared.until}; after that, run {long} alone changes {changed} {outside}"
            more = f"{tail} more step{'s' * (tail > 1)}"
            return f"{agree} {compared.until}, where run {short} ends; run {long} has {more}"
    return ""


def _by_results(compared: Compared) -> str:
    """Sentence where all results agree, with the first other difference and unobserved records."""
    names, until = compared.results, compared.until
    text = f"The runs have the same results: the {names} are equal {until}."
    if compared.within and compared.reach is not None:
        text = f"{within_words(compared.reach)}: the {names} agree to that {until}."
    elif compared.within:
        how = "within the tolerance or noise given"
        text = f"The runs have the same results {how}: the {names} agree {until}, not all bit for bit."
    first = None if compared.best is None else compared.best.first
    if first is not None:
        text += f" What differs changed none of them, first at {first.step_words}: {what_diverges(first)}."
    if blind := compared.tally["blind"]:
        unseen = f"{count(blind, 'record')} that only one run could see (the first: {compared.blind_site})"
        text += f" Not compared: {unseen}."
    return f"{text}{sentence_of(compared.structure)}{_emptied(compared.outcomes)}"


def _emptied(outcomes: Sequence[RankOutcome]) -> str:
    """Sentence counting records of the last step that are NaN throughout in both runs.

    "" for none. NaN equals NaN whatever was computed, so equality proves nothing there.
    """
    every, empty, name = 0, 0, ""
    for outcome in outcomes:
        if not len(outcome.paired):
            continue
        reader = outcome.paired.a
        step = int(outcome.paired.steps[-1])
        batch = reader.read(step)
        every += len(batch)
        rows = np.flatnonzero(nan_throughout(batch, Layouts(reader.layouts)))
        empty += len(rows)
        if len(rows) and not name:
            first = int(rows[np.argmin(batch.sequence[rows])])
            name = what(reader.record(batch, first, step).site)
    if not empty:
        return ""
    much = f"{empty:,} of {count(every, 'record')} {'is' if empty == 1 else 'are'} NaN throughout in both runs"
    return f" In the last step {much} (the first: {name}): these are equal whatever was computed."


# --- training and evaluation alone


def separately(compared: Compared) -> tuple[Separate | None, Separate | None]:
    """(training, evaluation) answers of runs that diverge; (None, None) without a recorded evaluation."""
    parts: dict[bool, list[RankOutcome]] = {True: [], False: []}
    for outcome in compared.outcomes:
        parts[False].append(outcome.alone(False) if outcome.alone is not None else outcome)
        parts[True] += [outcome.alone(True)] if outcome.evaluated and outcome.alone is not None else []
    if not parts[True]:
        return None, None
    training, evaluation = (
        _alone(replace(compared, options=replace(compared.options, evaluation=which), outcomes=parts[which]), name)
        for which, name in ((False, "Training"), (True, "Evaluation"))
    )
    return training, evaluation


def _alone(compared: Compared, name: str) -> Separate:
    """The separate answer for training or for evaluation; `compared` is narrowed to it already."""
    first = None if compared.best is None else compared.best.first
    if first is not None:
        return Separate(Verdict.DIVERGED, diverges_words(name, first), first)
    verdict, text = undiverged(compared, subject_of(name, narrowed=compared.options.narrowed))
    return Separate(verdict, text, extent=compared.extent if verdict is Verdict.SAME else "")


def subject_of(name: str, *, narrowed: bool) -> str:
    """Subject of a sentence with its verb: `Training is`."""
    return f"What was selected of {name.lower()} is" if narrowed else f"{name} is"


def diverges_words(name: str, first: Divergence, *, too: bool = False) -> str:
    """Sentence on where training or evaluation (`name`) diverges; `too` where the other does as well."""
    return f"{name} diverges at {first.step_words}{', too' if too else ''}: {what_diverges(first)}."


# --- a run that ended by an exception


def _after_the_end(compared: Compared) -> str:
    """Sentence on exceptions that ended a run after all agreed; "" where none did."""
    ending, same = compared.ending, compared.raised[1]
    if ending is None:
        return "" if same is None else f" Both runs ended by the same exception: {same.words}."
    other = compared.raised[0] if ending.side == "b" else None
    rest = f", and run a by another one: {other.words}" if other is not None else ""
    return f" After that, run {ending.side} ended by an exception: {ending.words}{rest}."


def _before_the_end(compared: Compared) -> str:
    """Sentence where one run ended by an exception in a step that the other goes on from, and all before agrees.

    "" otherwise.
    """
    ending = compared.ending
    if ending is None:
        return ""
    side, run = ending.side, dict(compared.runs)[ending.side]
    if not compared.until:
        if any(len(run.rank(rank)) for rank in run.ranks):
            return f"Run {side} ended by an exception: {ending.words}. The runs have no step in common."
        return f"Run {side} ended by an exception before its first step was complete: {ending.words}."
    paired = [outcome.paired for outcome in compared.outcomes if len(outcome.paired)]
    if not any(steps.tail_a if side == "b" else steps.tail_b for steps in paired):
        return ""
    everything = "everything selected" if compared.options.narrowed else "everything that both recorded"
    within = " within tolerance" if compared.tally["within"] else ""
    cut = [rank for rank in run.ranks if not run.rank(rank).ended]
    what_ended = f"{rank_list(cut)} of run {side} {'was' if len(cut) == 1 else 'were'} cut off, and the rest"
    return (
        f"{what_ended.capitalize() if cut else f'Run {side}'} ended by an exception where run {OTHER[side]} goes on: "
        f"{ending.words}. Until then, {compared.until}, {everything} agrees{within}."
    )
