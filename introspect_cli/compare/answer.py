"""The ranks' outcomes as one answer: the earliest divergence with its sentence, settings beside it, notes below."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.between import code_changes
from introspect_cli.compare.changes.settings import nothing_changed, with_code
from introspect_cli.compare.endings import after_the_end, at_the_end, before_the_end
from introspect_cli.compare.match.trees import suggest_renames, tree_at
from introspect_cli.compare.outcome import same_results
from introspect_cli.compare.overview import strip_of, tree_of
from introspect_cli.compare.passes.form import forms_note
from introspect_cli.compare.reach import furthest_of, leaves_words, measured_by_one, perturbed_notes
from introspect_cli.compare.reasons.base import reason_named
from introspect_cli.compare.reasons.differences import on_some_ranks
from introspect_cli.compare.reasons.hardware import suspect
from introspect_cli.compare.reasons.ranks import together, upstream
from introspect_cli.compare.reasons.scene import Scene
from introspect_cli.compare.reasons.settings import Blame, setting_changes
from introspect_cli.compare.reasons.update import changes
from introspect_cli.compare.reasons.words import listed
from introspect_cli.compare.result import Counts, DiffResult, Divergence, Finding, Separate, Verdict
from introspect_cli.compare.separate import separate_sentence, separately
from introspect_cli.compare.verdict import agreeing_lines, counts_of, doubted, first_of, lines_of, undiverged
from introspect_cli.compare.watched import blindness_notes, option_notes
from introspect_cli.records import Kind, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.store.reader import Run


_SHOWN = 3


def answer_for(a: Run, b: Run, options: DiffOptions, outcomes: Sequence[RankOutcome], notes: list[str]) -> DiffResult:
    """Put the ranks' outcomes together."""
    counts = counts_of(a, b, outcomes)
    notes = _notes(a, b, outcomes, counts, notes)
    best = first_of(outcomes)
    results = same_results(a, b, options, outcomes)
    if best is None or best.first is None or results:
        answer = _agreeing(a, b, options, outcomes, counts, results=results)
    else:
        answer = _diverging(a, b, options, outcomes, best)
    return replace(answer, notes=(*notes, *answer.notes), counts=counts)


def _notes(a: Run, b: Run, outcomes: Sequence[RankOutcome], counts: Counts, given: list[str]) -> list[str]:
    """What was not compared, and what else a reader must know, whatever the answer is."""
    manifests = a.manifest, b.manifest
    notes = [*_state_notes(a, b), *given, *option_notes(*manifests), *_missing_notes(a, b, outcomes)]
    notes += [*blindness_notes(*manifests), *_unopened_notes(outcomes)]
    notes += on_some_ranks(a, b) if len(outcomes) > 1 else []
    notes += [note for note in dict.fromkeys(forms_note(outcome.forms) for outcome in outcomes) if note]
    notes += perturbed_notes(*manifests, foreign=any(outcome.foreign for outcome in outcomes))
    if blind := sum(outcome.tally["blind_both"] for outcome in outcomes):
        seen = f"About {blind:,} of {count(counts.records, 'record')} could not be observed"
        notes.append(f"{seen}, so nothing is said of them.")
    return notes


def _agreeing(
    a: Run, b: Run, options: DiffOptions, outcomes: Sequence[RankOutcome], counts: Counts, *, results: bool
) -> DiffResult:
    """The answer where nothing diverged, or nothing that a result rests on."""
    split = any(outcome.gathered is not None and outcome.gathered.by_samples for outcome in outcomes)
    subject = "Over the samples of each step, the runs are" if split else "The runs are"
    verdict, text = undiverged(options, counts, outcomes, subject, results=results)
    if verdict is Verdict.SAME:
        verdict, text = doubted(a, b) or (verdict, text)
    if verdict is Verdict.UNDECIDED:
        text = before_the_end(a, b, options, outcomes) or text
    else:
        text += after_the_end(a, b)
    code = code_changes(a, b, None)
    alike = Separate(verdict, text)
    return DiffResult(
        a=str(a.path),
        b=str(b.path),
        verdict=verdict,
        sentence=text,
        settings=with_code(setting_changes(a, b), code),
        findings=_present(code, furthest_of(outcome.reach for outcome in outcomes)),
        training=alike,
        evaluation=alike if any(outcome.evaluated for outcome in outcomes) else None,
    )


def _diverging(a: Run, b: Run, options: DiffOptions, outcomes: Sequence[RankOutcome], best: RankOutcome) -> DiffResult:
    """The answer where something diverged: why, and what else a reader needs to check it."""
    scene = Scene(best, outcomes)
    first, reason = scene.first, scene.cause.reason
    tuned = changes(scene) if reason == "optimizer" else scene.hyperparameters
    blame = Blame(
        reason_named(reason), tuned, scene.rounding, scene.blamed, scene.fed, rates=bool(tuned) or scene.no_rates
    )
    code = code_changes(a, b, scene)
    scene.settings = settings = with_code(setting_changes(a, b, blame), code, rounding=scene.rounding and not tuned)
    training, evaluation = separately(a, b, options, outcomes)
    sentence = separate_sentence(scene, training, evaluation)
    reach = furthest_of(outcome.reach for outcome in outcomes)
    if reach is not None:
        sentence = leaves_words(reach, first) + sentence
    sentence, later = at_the_end(scene, sentence)
    before = agreeing_lines(scene)
    trees = tree_at(best.paired.a.modules), tree_at(best.paired.b.modules)
    renamed = reason in {"structure", "initial"}
    return DiffResult(
        a=str(a.path),
        b=str(b.path),
        verdict=Verdict.DIVERGED,
        sentence=sentence,
        evidence=(*before, *lines_of(scene), *together(scene), *nothing_changed(scene, code)),
        before=before,
        first=first,
        candidates=tuple(sorted(scene.peers, key=upstream)),
        divergences=_listed(outcomes, first, None if options.whole_step else options.limit),
        settings=settings,
        findings=_present(code, reach),
        notes=tuple(note for note in (measured_by_one(reach) if reach is not None else "", later) if note),
        suggestions=suggest_renames(best.paired.a, best.paired.b, options.rename) if renamed else (),
        map=best.heat.result() if best.heat is not None else None,
        tree=tree_of(scene.step, *trees, first, scene.cause) if options.want_map else (),
        suspect=suspect(scene),
        strip=strip_of(scene.step, first.site),
        training=training or Separate(Verdict.DIVERGED, sentence, first),
        evaluation=evaluation,
    )


def _present(*findings: Finding | None) -> tuple[Finding, ...]:
    return tuple(one for one in findings if one is not None)


def _listed(outcomes: Sequence[RankOutcome], first: Divergence, limit: int | None) -> tuple[Divergence, ...]:
    """Divergences of all ranks, the first of all before the others: each rank in its own order, by step.

    No order between ranks within a step is meant.
    """
    everything = [divergence for outcome in outcomes for divergence in outcome.listed]
    everything.sort(key=lambda d: (d is not first, d.step, d.rank, d.sequence))
    return tuple(everything if limit is None else everything[:limit])


def _unopened_notes(outcomes: Sequence[RankOutcome]) -> list[str]:
    """That later steps were not compared, where it would have taken long."""
    unopened = [outcome for outcome in outcomes if outcome.unopened]
    if not unopened:
        return []
    which = f"{sum(outcome.unopened for outcome in unopened):,} later steps, over all ranks,"
    if len(outcomes) == 1:
        which = f"Steps after {int(unopened[0].paired.steps[-1])}"
    return [f"{which} were not compared: the first divergence does not depend on them (--map compares them all)."]


def _state_notes(a: Run, b: Run) -> list[str]:
    """Runs that did not end, or have not yet."""
    notes = []
    for run, name in ((a, "a"), (b, "b")):
        last = run.last_step
        until = f"up to and including step {last}" if last is not None else "no complete step"
        if run.state.value == "running":
            notes.append(f"Run {name} is still being written: {until} is compared.")
        elif run.state.value == "interrupted":
            notes.append(f"Run {name} was interrupted: it holds {until}.")
        notes += [f"Run {name}: {sentence}." for sentence in run.endings]
        dropped = dict.fromkeys(str(own) for rank in run.ranks for own in run.rank(rank).thinned)
        notes += [f"Run {name} does not hold {text}: nothing is said of what was there." for text in dropped]
    return notes


def _missing_notes(a: Run, b: Run, outcomes: Sequence[RankOutcome]) -> list[str]:
    """Ranks and steps that only one run has."""
    notes = []
    for one, other, name in ((a, b, "a"), (b, a, "b")):
        missing = [rank for rank in one.ranks if rank not in other.ranks]
        if missing and not any(outcome.gathered is not None for outcome in outcomes):
            ranks = ", ".join(map(str, missing[:8])) + ("..." if len(missing) > 8 else "")
            notes.append(f"Only run {name} has rank{'s' * (len(missing) > 1)} {ranks}: not compared.")
    for outcome in outcomes[:1]:
        saved_a, saved_b = (
            {fqn for fqn, kind in zip(sites.fqn, sites.kind, strict=True) if kind == Kind.PRODUCT.value}
            for sites in (outcome.paired.a.sites, outcome.paired.b.sites)
        )
        for names, name in ((saved_a - saved_b, "a"), (saved_b - saved_a, "b")):
            if names:
                notes.append(f"Only run {name} saves {listed(sorted(names)[:_SHOWN])}: not compared.")
        for steps, name, other in ((outcome.paired.only_a, "a", b), (outcome.paired.only_b, "b", a)):
            if steps:
                ended = f" (run {'ab'[name == 'a']} was ended at its first divergence)"
                why = ended if other.manifest.get("stopped") is True else ""
                notes.append(f"Only run {name} has step{'s' * (len(steps) > 1)} {_ranges(steps)}: not compared{why}.")
    return notes


def _ranges(steps: Sequence[int]) -> str:
    """Steps as ranges: `3, 5-9`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs[:6])
    return shown + (", ..." if len(runs) > 6 else "")
