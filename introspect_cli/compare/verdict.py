"""The verdict where nothing diverged, and the answer in plain sentences where something did.

"Same" is said of what both runs recorded and both saw; where one ends earlier, or was blind, the answer is that it
cannot be told.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.distance import Layouts
from introspect_cli.compare.reach import within_words
from introspect_cli.compare.reasons import ranks
from introspect_cli.compare.reasons.base import reason_named
from introspect_cli.compare.reasons.beginning import MAY_REST_ON_THEM, script_generators
from introspect_cli.compare.reasons.copies import copies_words
from introspect_cli.compare.reasons.differences import describe
from introspect_cli.compare.reasons.random_state import draws_before, unseeded_sentence
from introspect_cli.compare.reasons.split import Split
from introspect_cli.compare.reasons.update import tuned
from introspect_cli.compare.reasons.words import lines, often, what, what_diverges
from introspect_cli.compare.result import Verdict
from introspect_cli.compare.structure import sentence_of
from introspect_cli.compare.watched import failed
from introspect_cli.records import Phase
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.compared import Compared
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.compare.reasons.scene import Scene


def undiverged(compared: Compared, subject: str = "The runs are", *, results: bool = False) -> tuple[Verdict, str]:
    """Verdict and sentence where nothing diverged, or nothing that a result rests on."""
    why = _too_little(compared) or _one_saw_more(compared, results=results)
    if why:
        return Verdict.UNDECIDED, f"Could not tell: {why}."
    verdict, text = _agree(compared, subject, results=results)
    broken = [name for name, run in compared.runs if failed(run.manifest)]
    if verdict is Verdict.SAME and broken:
        which = "both captures" if len(broken) == 2 else f"the capture of run {broken[0]}"
        rest = f"part of {which} failed, and the rest was not seen."
        return Verdict.UNDECIDED, f"Could not tell: all that both runs recorded agrees, but {rest}"
    return verdict, text


def _agree(compared: Compared, subject: str, *, results: bool) -> tuple[Verdict, str]:
    counts, options, outcomes, reach = compared.counts, compared.options, compared.outcomes, compared.reach
    if results and (compared.best is not None or compared.tally["blind"]):
        return Verdict.SAME, _by_results(compared)
    extent = compared.extent + ("," if counts.within else "")
    agree = f"{extent} agree{'s' * (counts.equal == 1)} {compared.until}"
    changes = sentence_of(compared.structure(same=True))
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


def _too_little(compared: Compared) -> str:
    """Why there was too little to compare; "" where there was enough."""
    counts, unseen = compared.counts, compared.tally["blind_both"]
    if not counts.steps_compared:
        return "no selected step is in both runs" if compared.options.steps else "the runs have no step in common"
    if not counts.records or counts.equal + counts.within == 0:
        return "the runs have nothing in common that both observed"
    if 2 * unseen > counts.records:
        return f"about {unseen:,} of {count(counts.records, 'record')} in common could not be observed"
    return ""


def _one_saw_more(compared: Compared, *, results: bool) -> str:
    """What one run alone saw, of records or of steps; "" where both saw the same."""
    blind = count(compared.tally["blind"], "record")
    if compared.tally["blind"] and not results:
        only = f"{blind} only one of them could see (the first: {compared.blind_site})"
        return f"all that both runs saw agrees, but {only}"
    for tails in ((outcome.paired.tail_a, outcome.paired.tail_b) for outcome in compared.outcomes):
        if any(tails):
            long, short, tail = ("a", "b", tails[0]) if tails[0] else ("b", "a", tails[1])
            agree = "agreed within the tolerance or noise given" if compared.counts.within else "equal"
            more = f"{tail} more step{'s' * (tail > 1)}"
            return f"{agree} {compared.until}, where run {short} ends; run {long} has {more}"
    return ""


def _by_results(compared: Compared) -> str:
    """The sentence where all results are equal, with what else differs or was not seen."""
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
        text += f" Nothing is said of {unseen}."
    return f"{text}{sentence_of(compared.structure(same=False))}{emptied(compared.outcomes)}"


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


_ROOM = 240
"""Characters that the likely causes may take in the first sentence."""


def place_and_why(scene: Scene, head: str = "First divergence at") -> tuple[str, str]:
    """The answer: the place, and what differs there and why; `head` is what stands before the place."""
    first, cause = scene.first, scene.cause
    where = first.step_words
    reduced = ranks.summed(scene)
    where += ", backward" if reduced else ranks.where(scene)
    if first.site.phase is Phase.RECOMPUTE:
        where += ", recomputed"
    elif first.site.evaluates and "evaluation" not in head:
        where += ", in evaluation"
    why = reason_named(scene.tells).sentence(scene) + copies_words(scene)
    if cause.grown and not reduced and cause.reason != Split.word:
        why += f" It may also have grown from what tolerance let pass, from {scene.tolerated} on."
    why += unseeded_sentence(scene)
    settled = {"hyperparameter", "optimizers"} if cause.reason == "optimizer" else set()
    blamed = [
        change for change in scene.settings if change.explains and change.weight >= 0.8 and change.source not in settled
    ]
    if blamed and not scene.lost:
        lead = " It likely comes from" if tuned(scene) else " Likely cause:"
        causes = [describe(change) for change in blamed[:3]]
        fitting = sum(total <= _ROOM for total in accumulate(map(len, causes)))
        why += f"{lead} {'; '.join(causes[: max(1, fitting)])}."
    return f"{head} {where}", why


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
        clauses += [f"{one[0].upper()}{one[1:]}." for one in map(str, draws_before(scene)[:1])]
    if scene.is_first_step and scene.tells in MAY_REST_ON_THEM:
        own = script_generators(scene.runs, scene.first.rank)
        clauses += [f"A generator that the script made differs: {own}."] * bool(own)
    return tuple(clauses + reason_named(scene.tells).evidence(scene))
