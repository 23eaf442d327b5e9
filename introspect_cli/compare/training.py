"""Training and evaluation, each with a first divergence and a verdict of its own.

One run that evaluates another way may train the same, and a reader who is told "diverged" looks for a fault in
training that is not there. Evaluation touches training only through what training's own records show: random states,
parameters, buffers. So the steps are walked once for each, with the other's records masked, though a reason still
knows of all of them. The first divergence is the earlier of the two.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.sites import Mask, evaluating, kind_code, phase_code, selected
from introspect_cli.compare.reasons.words import what_diverges
from introspect_cli.compare.result import Divergence, Separate, Verdict
from introspect_cli.compare.verdict import place_and_why, undiverged
from introspect_cli.compare.walk import compare_rank
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.compare.compared import Compared
    from introspect_cli.compare.comparison import Comparison
    from introspect_cli.compare.join.sites import Columns
    from introspect_cli.compare.join.steps import Paired
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.store.whole import Reader


def add_evaluation(outcome: RankOutcome, comparison: Comparison) -> None:
    """Give an outcome its steps of evaluation, and as its first divergence the earlier of training's and evaluation's.

    Where ranks are put together, evaluation is not told apart.
    """
    options = comparison.options
    if outcome.gathered is not None:
        return
    paired, (sites_a, sites_b) = outcome.paired, comparison.sites
    outcome.paired = replace(
        paired,
        tail_a=_trained(comparison.a, sites_a, paired.only_a, paired.tail_a),
        tail_b=_trained(comparison.b, sites_b, paired.only_b, paired.tail_b),
    )
    if all(phase_code(Phase.EVAL) not in sites.phase for sites in comparison.sites):
        return
    steps = _evaluated(outcome.paired, *(_mask(sites, options) for sites in comparison.sites))
    if outcome.first is None:
        outcome.evaluated = tuple(step for step in [next(steps, None)] if step is not None)
        return
    outcome.evaluated = tuple(steps)

    @cache
    def alone(evaluation: bool) -> RankOutcome:
        narrow = replace(options, evaluation=evaluation, limit=0, whole_step=False, want_map=False)
        part = compare_rank(replace(comparison, options=narrow))
        part.evaluated = outcome.evaluated
        return part

    outcome.alone = alone
    parts = [alone(False), *([alone(True)] if outcome.evaluated else [])]
    _adopt(outcome, parts, options)


def _trained(reader: Reader, sites: Columns, only: Sequence[int], tail: int) -> int:
    """How many steps a run has after the last common one; 0 for one without training: an evaluation, what is saved."""
    if tail != 1 or only[-1] not in reader:
        return tail
    numbers = np.asarray(reader.read(only[-1]).site)
    start = sites.phase[numbers] == phase_code(Phase.START)
    saved = sites.kind[numbers] == kind_code(Kind.PRODUCT)
    return int(not (start | saved | evaluating(sites.phase, sites.fqn)[numbers]).all())


def _mask(sites: Columns, options: DiffOptions) -> Mask:
    """By site number of a run, what belongs to evaluation and was selected."""
    mask = selected(sites.kind, sites.fqn, options.kinds, options.modules)
    return mask & evaluating(sites.phase, sites.fqn)


def _evaluated(paired: Paired, mask_a: Mask, mask_b: Mask) -> Iterator[int]:
    """The compared steps in which both runs have an evaluation."""
    if not (mask_a.any() and mask_b.any()):
        return
    for entry_a, entry_b in paired:
        if all(
            mask[np.asarray(reader.read(entry.step).site)].any()
            for reader, entry, mask in ((paired.a, entry_a, mask_a), (paired.b, entry_b, mask_b))
        ):
            yield entry_a.step


def _adopt(outcome: RankOutcome, parts: Sequence[RankOutcome], options: DiffOptions) -> None:
    """Make the earliest first divergence of the parts that of the whole, also in what is listed."""
    firsts = [(part.first, part) for part in parts if part.first is not None]
    if not firsts:
        return
    first, part = min(firsts, key=lambda pair: (pair[0].step, pair[0].sequence))
    listed = [other for other in outcome.listed if (other.step, other.site) != (first.step, first.site)]
    outcome.first, outcome.cause, outcome.step, outcome.tolerated = first, part.cause, part.step, part.tolerated
    outcome.origins = part.origins
    room = len(outcome.listed) if options.whole_step else options.limit
    outcome.listed = [first, *listed][:room]


def separately(compared: Compared) -> tuple[Separate | None, Separate | None]:
    """The answers for training and for evaluation alone, of runs that diverge; None without an evaluation."""
    parts: dict[bool, list[RankOutcome]] = {True: [], False: []}
    for outcome in compared.outcomes:
        parts[False].append(outcome.alone(False) if outcome.alone is not None else outcome)
        parts[True] += [outcome.alone(True)] if outcome.evaluated and outcome.alone is not None else []
    if not parts[True]:
        return None, None
    training, evaluation = (
        _answer(replace(compared, options=replace(compared.options, evaluation=which), outcomes=parts[which]), name)
        for which, name in ((False, "Training"), (True, "Evaluation"))
    )
    return training, evaluation


def _answer(compared: Compared, name: str) -> Separate:
    """What came out for one of the two."""
    first = None if compared.best is None else compared.best.first
    if first is not None:
        return Separate(Verdict.DIVERGED, _diverges(name, first), first)
    verdict, text = undiverged(compared, _subject(name, narrowed=compared.options.narrowed))
    return Separate(verdict, text, extent=compared.extent if verdict is Verdict.SAME else "")


def _subject(name: str, *, narrowed: bool) -> str:
    """What a sentence calls the same: `Training is`."""
    return f"What was selected of {name.lower()} is" if narrowed else f"{name} is"


def _diverges(name: str, first: Divergence, *, too: bool = False) -> str:
    """Where training or evaluation diverges; `too` where the other does as well."""
    return f"{name} diverges at {first.step_words}{', too' if too else ''}: {what_diverges(first)}."


def answer_of_both(scene: Scene, training: Separate | None, evaluation: Separate | None) -> tuple[str, str]:
    """The place, and what differs there and why, with what is known of the other of the two."""
    if training is None or evaluation is None:
        return place_and_why(scene)
    if scene.site.evaluates and training.verdict is Verdict.SAME:
        subject = _subject("Training", narrowed=scene.narrowed)
        return place_and_why(scene, f"{subject} the same ({training.extent}); evaluation diverges at")
    place, why = place_and_why(scene)
    other = _beside(training, "Training") if scene.site.evaluates else _beside(evaluation, "Evaluation")
    return place, f"{why} {other}"


def _beside(separate: Separate, name: str) -> str:
    """The answer for one of the two, after that for the other."""
    if separate.verdict is Verdict.UNDECIDED:
        return f"{name}: {separate.sentence[0].lower()}{separate.sentence[1:]}"
    if separate.first is not None:
        return _diverges(name, separate.first, too=True)
    return separate.sentence
