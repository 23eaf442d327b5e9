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

from introspect_cli.compare.join.sites import Mask, columns, evaluating, kind_code, phase_code, selected
from introspect_cli.compare.reasons.words import what_diverges
from introspect_cli.compare.result import Divergence, Separate, Verdict
from introspect_cli.compare.verdict import counts_of, doubted, extent, first_of, sentence, undiverged
from introspect_cli.compare.walk import compare_rank
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.compare.join.steps import Paired, Sides
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.store.reader import Run
    from introspect_cli.store.whole import Reader


def add_evaluation(outcome: RankOutcome, sides: Sides, options: DiffOptions) -> None:
    """Give an outcome its steps of evaluation, and as its first divergence the earlier of training's and evaluation's.

    Where ranks are put together, evaluation is not told apart.
    """
    tables = sides.a.sites, sides.b.sites
    if outcome.gathered is not None:
        return
    outcome.paired = replace(
        outcome.paired,
        tail_a=0 if _only_evaluates(sides.a, outcome.paired.only_a, outcome.paired.tail_a) else outcome.paired.tail_a,
        tail_b=0 if _only_evaluates(sides.b, outcome.paired.only_b, outcome.paired.tail_b) else outcome.paired.tail_b,
    )
    if all(Phase.EVAL.value not in table.phase for table in tables):
        return
    steps = _evaluated(outcome.paired, *_masks(sides, options))
    if outcome.first is None:
        outcome.evaluated = tuple(step for step in [next(steps, None)] if step is not None)
        return
    outcome.evaluated = tuple(steps)

    @cache
    def alone(evaluation: bool) -> RankOutcome:
        narrow = replace(options, evaluation=evaluation, limit=0, whole_step=False, want_map=False)
        found = compare_rank(sides, narrow, outcome.offset)
        found.evaluated = outcome.evaluated
        return found

    outcome.alone = alone
    parts = [alone(False), *([alone(True)] if outcome.evaluated else [])]
    _adopt(outcome, parts, options)


def _only_evaluates(reader: Reader, only: Sequence[int], tail: int) -> bool:
    """Whether the one step that a run has after the last common one holds no training: an evaluation, what is saved."""
    if tail != 1 or only[-1] not in reader:
        return False
    own = columns(reader.sites)
    sites = np.asarray(reader.read(only[-1]).site)
    start = own.phase[sites] == phase_code(Phase.START)
    saved = own.kind[sites] == kind_code(Kind.PRODUCT)
    return bool((start | saved | evaluating(own.phase, own.fqn)[sites]).all())


def _masks(sides: Sides, options: DiffOptions) -> tuple[Mask, Mask]:
    """By site number of either run, what belongs to evaluation and was selected."""
    masks = []
    for reader, rename in ((sides.a, sides.rename), (sides.b, None)):
        own = columns(reader.sites, rename)
        mask = selected(own.kind, own.fqn, options.kinds, options.modules)
        masks.append(mask & evaluating(own.phase, own.fqn))
    return masks[0], masks[1]


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
    found = [(part.first.step, part.first.sequence, part) for part in parts if part.first is not None]
    if not found:
        return
    part = min(found, key=lambda own: own[:2])[2]
    first = part.first
    assert first is not None  # of those that were found
    listed = [own for own in outcome.listed if (own.step, own.site) != (first.step, first.site)]
    outcome.first, outcome.cause, outcome.step, outcome.tolerated = first, part.cause, part.step, part.tolerated
    outcome.origins = part.origins
    room = len(outcome.listed) if options.whole_step else options.limit
    outcome.listed = [first, *listed][:room]


def separately(
    a: Run, b: Run, options: DiffOptions, outcomes: Sequence[RankOutcome]
) -> tuple[Separate | None, Separate | None]:
    """The answers for training and for evaluation alone, of runs that diverge; None without an evaluation."""
    evaluated = [outcome for outcome in outcomes if outcome.evaluated and outcome.alone is not None]
    if not evaluated:
        return None, None
    training = [outcome.alone(False) if outcome.alone is not None else outcome for outcome in outcomes]
    evaluation = [outcome.alone(True) for outcome in evaluated if outcome.alone is not None]
    return (
        _answer(a, b, replace(options, evaluation=False), training, "Training"),
        _answer(a, b, replace(options, evaluation=True), evaluation, "Evaluation"),
    )


def _answer(a: Run, b: Run, options: DiffOptions, outcomes: Sequence[RankOutcome], name: str) -> Separate:
    """What came out for one of the two."""
    best = first_of(outcomes)
    if best is not None and best.first is not None:
        first = best.first
        return Separate(Verdict.DIVERGED, _diverges(name, first), first)
    counts = counts_of(a, b, outcomes)
    if options.evaluation:
        counts = replace(counts, steps_compared=sum(len(outcome.evaluated) for outcome in outcomes))
    verdict, text = undiverged(options, counts, outcomes, _subject(name, narrowed=options.narrowed))
    if verdict is Verdict.SAME:
        verdict, text = doubted(a, b) or (verdict, text)
    return Separate(verdict, text, extent=extent(counts, outcomes) if verdict is Verdict.SAME else "")


def _subject(name: str, *, narrowed: bool) -> str:
    """What a sentence calls the same: `Training is`."""
    return f"What was selected of {name.lower()} is" if narrowed else f"{name} is"


def _diverges(name: str, first: Divergence, *, too: bool = False) -> str:
    """Where training or evaluation diverges; `too` where the other does as well."""
    return f"{name} diverges at {first.step_words}{', too' if too else ''}: {what_diverges(first)}."


def separate_sentence(scene: Scene, training: Separate | None, evaluation: Separate | None) -> str:
    """The answer, with what is known of the other of the two."""
    if training is None or evaluation is None:
        return sentence(scene)
    if not scene.site.evaluates:
        return f"{sentence(scene)} {_beside(evaluation, 'Evaluation')}"
    if training.verdict is Verdict.SAME:
        subject = _subject("Training", narrowed=scene.narrowed)
        return sentence(scene, f"{subject} the same ({training.extent}); evaluation diverges at")
    return f"{sentence(scene)} {_beside(training, 'Training')}"


def _beside(separate: Separate, name: str) -> str:
    """The answer for one of the two, after that for the other."""
    if separate.verdict is Verdict.UNDECIDED:
        return f"{name}: {separate.sentence[0].lower()}{separate.sentence[1:]}"
    if separate.first is not None:
        return _diverges(name, separate.first, too=True)
    return separate.sentence
