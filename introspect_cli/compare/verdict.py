"""How much was compared, the verdict where nothing diverged, and the answer in plain sentences where something did.

"Same" is said of what both runs recorded and both saw; where one ends earlier, or was blind, the answer is that it
cannot be told.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.distance import Layouts
from introspect_cli.compare.outcome import names_of, within
from introspect_cli.compare.reach import furthest_of, within_words
from introspect_cli.compare.reasons import ranks
from introspect_cli.compare.reasons.base import reason_named
from introspect_cli.compare.reasons.beginning import MAY_REST_ON_THEM, script_generators
from introspect_cli.compare.reasons.copies import copies_words
from introspect_cli.compare.reasons.differences import describe
from introspect_cli.compare.reasons.random_state import unseeded_sentence
from introspect_cli.compare.reasons.ranks import upstream
from introspect_cli.compare.reasons.split import Split
from introspect_cli.compare.reasons.update import tuned
from introspect_cli.compare.reasons.words import lines, often, what, what_diverges
from introspect_cli.compare.result import Counts, StructureChange, Verdict
from introspect_cli.compare.structure import changes_of, sentence_of
from introspect_cli.compare.watched import failed
from introspect_cli.labels import step_words
from introspect_cli.records import Phase, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.store.reader import Run


def structure_of(outcomes: Sequence[RankOutcome], *, same: bool) -> tuple[StructureChange, ...]:
    """What differs in structure, of the first rank on which anything does."""
    for outcome in outcomes:
        if outcome.structure is not None and (changes := changes_of(outcome.structure, outcome.match, same=same)):
            return changes
    return ()


def counts_of(a: Run, b: Run, outcomes: Sequence[RankOutcome]) -> Counts:
    """How much was compared and what came of it, over all ranks."""
    total: Counter[str] = sum((outcome.tally for outcome in outcomes), Counter())
    agree = total["records"] - (total["diverged"] - total["only_b"]) - total["not_observed"] - total["causes"]
    return Counts(
        steps_a=max((len(a.rank(rank)) for rank in a.ranks), default=0),
        steps_b=max((len(b.rank(rank)) for rank in b.ranks), default=0),
        steps_compared=sum(len(outcome.paired) for outcome in outcomes),
        equal=max(agree, 0),
        not_observed=max(total["not_observed"], total["blind_both"]),
        **{name: total[name] for name in ("steps_diverged", "records", "diverged", "only_a", "only_b", "within")},
    )


def first_of(outcomes: Sequence[RankOutcome]) -> RankOutcome | None:
    """The rank that diverges at the earliest step; of several, in the earliest phase, then the lowest number."""
    diverging = [(upstream(outcome.first), outcome) for outcome in outcomes if outcome.first is not None]
    return min(diverging, key=lambda pair: pair[0], default=(None, None))[1]


def extent(counts: Counts, outcomes: Sequence[RankOutcome]) -> str:
    """How much agrees, in words: `2,410 records of 16 steps`."""
    layouts = any(outcome.gathered is not None for outcome in outcomes)
    by = "only within the tolerance or by extrema and means" if layouts else "within the tolerance or noise given"
    passed = f", {counts.within} of them {by}" if counts.within else ""
    thinned = any(outcome.paired.a.thinned or outcome.paired.b.thinned for outcome in outcomes)
    kept = " that both runs kept" if thinned else ""
    return f"{count(counts.equal, 'record')} of {count(counts.steps_compared, 'step')}{kept}{passed}"


def undiverged(
    options: DiffOptions,
    counts: Counts,
    outcomes: Sequence[RankOutcome],
    subject: str = "The runs are",
    *,
    results: bool = False,
) -> tuple[Verdict, str]:
    """Verdict and sentence where nothing diverged, or nothing that a result rests on."""
    why = _too_little(options, counts, outcomes) or _one_saw_more(counts, outcomes, results=results)
    if why:
        return Verdict.UNDECIDED, f"Could not tell: {why}."
    until = _until(outcomes)
    if results and (first_of(outcomes) is not None or any(outcome.tally["blind"] for outcome in outcomes)):
        return Verdict.SAME, _by_results(outcomes, until)
    told = extent(counts, outcomes) + ("," if counts.within else "")
    agree = f"{told} agree{'s' * (counts.equal == 1)} {until}"
    reach = furthest_of(outcome.reach for outcome in outcomes)
    changes = sentence_of(structure_of(outcomes, same=True))
    if reach is not None and counts.within and not options.tolerant:
        agree, changes = f"{within_words(reach)}: {agree}", ""
    elif not changes or options.evaluation is not None:
        agree, changes = f"{subject} the same: {agree}", ""
    elif any(outcome.unrecorded is not None for outcome in outcomes):
        why = "the results of the steps (losses, gradients, parameters) were not recorded, and not all else is the same"
        return Verdict.UNDECIDED, f"Could not tell: {agree}, but {why}.{changes}"
    else:
        agree = f"The runs have the same numbers: {agree}"
    return Verdict.SAME, f"{agree}.{changes}{emptied(outcomes)}"


def _too_little(options: DiffOptions, counts: Counts, outcomes: Sequence[RankOutcome]) -> str:
    """Why there was too little to compare; "" where there was enough."""
    if not counts.steps_compared:
        return "no selected step is in both runs" if options.steps else "the runs have no step in common"
    if not counts.records or counts.equal + counts.within == 0:
        return "the runs have nothing in common that both observed"
    unseen = sum(outcome.tally["blind_both"] for outcome in outcomes)
    if 2 * unseen > counts.records:
        return f"about {unseen:,} of {count(counts.records, 'record')} in common could not be observed"
    return ""


def _one_saw_more(counts: Counts, outcomes: Sequence[RankOutcome], *, results: bool) -> str:
    """What one run alone saw, of records or of steps; "" where both saw the same."""
    blind = next((outcome for outcome in outcomes if outcome.tally["blind"]), None)
    if blind is not None and not results:
        number = count(sum(outcome.tally["blind"] for outcome in outcomes), "record")
        only = f"{number} only one of them could see (the first: {blind.blind_site})"
        return f"all that both runs saw agrees, but {only}"
    for tails in ((outcome.paired.tail_a, outcome.paired.tail_b) for outcome in outcomes):
        if any(tails):
            long, short, tail = ("a", "b", tails[0]) if tails[0] else ("b", "a", tails[1])
            agree = "agreed within the tolerance or noise given" if counts.within else "equal"
            more = f"{tail} more step{'s' * (tail > 1)}"
            return f"{agree} {_until(outcomes)}, where run {short} ends; run {long} has {more}"
    return ""


def _until(outcomes: Sequence[RankOutcome]) -> str:
    """The last step that was compared: `up to and including step 12`."""
    ends = [outcome.paired for outcome in outcomes if len(outcome.paired)]
    last, reader = max(((int(paired.steps[-1]), paired.a) for paired in ends), key=lambda end: end[0])
    return f"up to and including {step_words(last, reader.labels.get(last, {}))}"


def _by_results(outcomes: Sequence[RankOutcome], until: str) -> str:
    """The sentence where all results are equal, with what else differs or was not seen."""
    reach = furthest_of(outcome.reach for outcome in outcomes)
    text = f"The runs have the same results: the {names_of(outcomes)} are equal {until}."
    if within(outcomes) and reach is not None:
        text = f"{within_words(reach)}: the {names_of(outcomes)} agree to that {until}."
    elif within(outcomes):
        how = "within the tolerance or noise given"
        text = f"The runs have the same results {how}: the {names_of(outcomes)} agree {until}, not all bit for bit."
    best = first_of(outcomes)
    if best is not None and best.first is not None:
        first = best.first
        text += f" What differs changed none of them, first at {first.step_words}: {what_diverges(first)}."
    blind = next((outcome for outcome in outcomes if outcome.tally["blind"]), None)
    if blind is not None:
        number = sum(outcome.tally["blind"] for outcome in outcomes)
        unseen = f"{count(number, 'record')} that only one run could see (the first: {blind.blind_site})"
        text += f" Nothing is said of {unseen}."
    return f"{text}{sentence_of(structure_of(outcomes, same=False))}{emptied(outcomes)}"


def emptied(outcomes: Sequence[RankOutcome]) -> str:
    """A sentence on equal records of the last step that are NaN throughout; "" where there are none.

    NaN equals NaN whatever was computed: a fault in what follows from it leaves the same bits.
    """
    every, empty, name = 0, 0, ""
    for outcome in outcomes:
        if not len(outcome.paired):
            continue
        reader = outcome.paired.a
        step = int(outcome.paired.steps[-1])
        batch = reader.read(step)
        every += len(batch)
        if "nans" not in batch.counts:
            continue
        sizes = Layouts(reader.layouts).numel[batch.layout]
        rows = np.flatnonzero((np.asarray(batch.counts["nans"]) == sizes) & (sizes > 0))
        empty += len(rows)
        if len(rows) and not name:
            first = int(rows[np.argmin(batch.sequence[rows])])
            name = what(reader.record(batch, first, step).site)
    if not empty:
        return ""
    much = f"{empty:,} of {count(every, 'record')} {'is' if empty == 1 else 'are'} NaN throughout in both runs"
    return f" In the last step {much} (the first: {name}): these are equal whatever was computed."


def doubted(a: Run, b: Run) -> tuple[Verdict, str] | None:
    """Verdict and sentence where nothing diverged, but part of a capture failed; None where none did."""
    names = [name for run, name in ((a, "a"), (b, "b")) if failed(run.manifest)]
    if not names:
        return None
    which = "both captures" if len(names) == 2 else f"the capture of run {names[0]}"
    return (
        Verdict.UNDECIDED,
        f"Could not tell: all that both runs recorded agrees, but part of {which} failed, and the rest was not seen.",
    )


_ROOM = 240
"""Characters that the likely causes may take in the first sentence."""


def sentence(scene: Scene, head: str = "First divergence at") -> str:
    """The answer; `head` is what stands before the place."""
    first, cause = scene.first, scene.cause
    where = first.step_words
    reduced = ranks.summed(scene)
    where += ", backward" if reduced else ranks.where(scene)
    if first.site.phase is Phase.RECOMPUTE:
        where += ", recomputed"
    elif first.site.evaluates and "evaluation" not in head:
        where += ", in evaluation"
    told_by_reason = reason_named(scene.tells).sentence(scene) + copies_words(scene)
    if cause.grown and not reduced and cause.reason != Split.word:
        told_by_reason += f" It may also have grown from what tolerance let pass, from {scene.tolerated} on."
    text = f"{head} {where}: {told_by_reason}{unseeded_sentence(scene)}"
    told = {"hyperparameter", "optimizers"} if cause.reason == "optimizer" else set()
    blamed = [
        change for change in scene.settings if change.explains and change.weight >= 0.8 and change.source not in told
    ]
    if blamed and not scene.lost:
        lead = " It likely comes from" if tuned(scene) else " Likely cause:"
        causes = [describe(change) for change in blamed[:3]]
        fitting = sum(total <= _ROOM for total in accumulate(map(len, causes)))
        text += f"{lead} {'; '.join(causes[: max(1, fitting)])}."
    return text


def agreeing_lines(scene: Scene) -> tuple[str, ...]:
    """What agrees before the first divergence: steps, and records of its step, one sentence each."""
    clauses = []
    if scene.steps_before:
        last = "all steps before agree" if scene.steps_before > 1 else "the step before agrees"
        how = " within tolerance" if scene.tolerated else " in what was selected" if scene.narrowed else " entirely"
        clauses.append(f"{scene.steps_before} compared step{'s' * (scene.steps_before > 1)}: {last}{how}.")
    equal, within, unseen, formed, other = scene.agreeing_before.values()
    if equal or within:
        every = equal + within + unseen + formed + other
        verb = "is" if equal == 1 else "are"
        much = count(equal, "record") if equal == every else f"{equal:,} of {count(every, 'record')}"
        rest = [f"{within:,} within tolerance"] if within else []
        rest += [f"{unseen:,} not observed in both runs"] if unseen else []
        rest += [f"{formed:,} in another form"] if formed else []
        rest += [f"{other:,} different"] if other else []
        also = f"; {', '.join(rest)}" if rest else ""
        clauses.append(f"{much} before it in step {scene.first.step} {verb} equal{also}.")
    return tuple(clauses)


def lines_of(scene: Scene) -> tuple[str, ...]:
    """What else the conclusion rests on, one sentence each: a reader can check it instead of believing it."""
    clauses = []
    if scene.tolerated:
        clauses.append(f"The first difference that was let pass is {scene.tolerated}.")
    clauses += lines(scene.cause.evidence)
    if scene.calls and scene.cause.reason != "structure":
        name, one, two = scene.calls
        clauses.append(f"{name} runs {often(one)} in this step of a and {often(two)} in b.")
    if scene.cause.reason != "rng":
        clauses += [f"{one[0].upper()}{one[1:]}." for one in map(str, scene.draws[:1])]
    if scene.is_first_step and scene.tells in MAY_REST_ON_THEM:
        own = script_generators(scene.runs, scene.first.rank)
        clauses += [f"A generator that the script made differs: {own}."] * bool(own)
    return tuple(clauses + reason_named(scene.tells).evidence(scene))
