"""The ranks' outcomes as one answer: the earliest divergence with its sentence, settings beside it, notes below."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.changes.between import code_changes, with_code
from introspect_cli.compare.endings import after_the_end, at_the_end, before_the_end
from introspect_cli.compare.match.names import suggest_renames, tree_at
from introspect_cli.compare.overview import strip_of, tree_of
from introspect_cli.compare.passes.form import forms_note
from introspect_cli.compare.reach import leaves_words, measured_by_one, perturbed_notes
from introspect_cli.compare.reasons.base import reason_named
from introspect_cli.compare.reasons.documents import on_some_ranks
from introspect_cli.compare.reasons.module import suspect
from introspect_cli.compare.reasons.ranks import together, upstream
from introspect_cli.compare.reasons.scene import Scene
from introspect_cli.compare.reasons.settings import Blame, nothing_changed, setting_changes
from introspect_cli.compare.reasons.update import changes
from introspect_cli.compare.reasons.words import listed
from introspect_cli.compare.result import DiffResult, Divergence, Finding, Separate, SettingChange, Verdict
from introspect_cli.compare.table import OTHER
from introspect_cli.compare.training import answer_of_both, separately
from introspect_cli.compare.verdict import agreeing_lines, lines_of, undiverged
from introspect_cli.compare.watched import blindness_notes, option_notes
from introspect_cli.records import Kind
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.compare.changes.clues import CodeChanges
    from introspect_cli.compare.compared import Compared
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.store.reader import Run


_SHOWN = 3


def answer_for(compared: Compared) -> DiffResult:
    """Put the ranks' outcomes together."""
    best = compared.best
    answer = _agreeing(compared) if best is None or compared.results_agree else _diverging(compared, best)
    return replace(answer, notes=(*_notes(compared), *answer.notes), counts=compared.counts)


def _notes(compared: Compared) -> list[str]:
    """What was not compared, and what else a reader must know, whatever the answer is."""
    a, b, outcomes = compared.a, compared.b, compared.outcomes
    manifests, of_ranks = (a.manifest, b.manifest), dict.fromkeys(note for one in outcomes for note in one.notes)
    notes = [*_state_notes(compared), *of_ranks, *option_notes(*manifests), *_missing_notes(compared)]
    notes += [*blindness_notes(*manifests), *_unopened_notes(outcomes)]
    notes += on_some_ranks(a, b) if len(outcomes) > 1 else []
    notes += [note for note in dict.fromkeys(forms_note(outcome.forms) for outcome in outcomes) if note]
    notes += perturbed_notes(*manifests, foreign=any(outcome.foreign for outcome in outcomes))
    if blind := compared.tally["blind_both"]:
        seen = f"About {blind:,} of {count(compared.counts.records, 'record')} could not be observed"
        notes.append(f"{seen}, so nothing is said of them.")
    return notes


def _agreeing(compared: Compared) -> DiffResult:
    """The answer where nothing diverged, or nothing that a result rests on."""
    a, b, outcomes = compared.a, compared.b, compared.outcomes
    split = any(outcome.gathered is not None and outcome.gathered.by_samples for outcome in outcomes)
    subject = "Over the samples of each step, the runs are" if split else "The runs are"
    verdict, text = undiverged(compared, subject, results=compared.results_agree)
    if verdict is Verdict.UNDECIDED:
        text = before_the_end(compared) or text
    else:
        text += after_the_end(a, b)
    code, settings = _explained(compared)
    alike = Separate(verdict, text)
    return DiffResult(
        a=str(a.path),
        b=str(b.path),
        verdict=verdict,
        sentence=text,
        settings=settings,
        findings=_present(code, compared.reach),
        training=alike,
        evaluation=alike if any(outcome.evaluated for outcome in outcomes) else None,
    )


def _diverging(compared: Compared, best: RankOutcome) -> DiffResult:
    """The answer where something diverged: why, and what else a reader needs to check it."""
    options, reach = compared.options, compared.reach
    scene = Scene(best, compared.outcomes)
    first, reason = scene.first, scene.cause.reason
    code, scene.settings = _explained(compared, scene)
    training, evaluation = separately(compared)
    place, why = answer_of_both(scene, training, evaluation)
    if reach is not None:
        place = leaves_words(reach, first) + place
    place, why, later = at_the_end(scene, place, why)
    sentence = f"{place}: {why}"
    before = agreeing_lines(scene)
    unexplained = nothing_changed(scene.runs, scene.settings, code, scene.cause, rounding=scene.rounding)
    trees = tree_at(best.paired.a.modules), tree_at(best.paired.b.modules)
    renamed = reason in {"structure", "initial"}
    return DiffResult(
        a=str(compared.a.path),
        b=str(compared.b.path),
        verdict=Verdict.DIVERGED,
        sentence=sentence,
        why=why,
        evidence=(*before, *lines_of(scene), *together(scene), *unexplained),
        before=before,
        first=first,
        candidates=tuple(sorted(scene.peers, key=upstream)),
        divergences=_listed(compared.outcomes, first, None if options.whole_step else options.limit),
        settings=scene.settings,
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


def _explained(compared: Compared, scene: Scene | None = None) -> tuple[CodeChanges | None, tuple[SettingChange, ...]]:
    """How the source differs, and which settings do, the strongest explanation of a divergence first."""
    a, b = compared.a, compared.b
    code, blame, rounding = code_changes(a, b, scene), Blame(), False
    if scene is not None:
        tuned = changes(scene) if scene.cause.reason == "optimizer" else scene.hyperparameters
        rounding, rates = scene.rounding and not tuned, bool(tuned) or scene.no_rates
        reason = reason_named(scene.cause.reason)
        blame = Blame(reason, tuned, scene.rounding, scene.blamed, scene.fed, rates=rates)
    return code, with_code(setting_changes(a, b, blame), code, rounding=rounding)


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


def _state_notes(compared: Compared) -> Iterator[str]:
    """Runs that did not end, or have not yet."""
    for name, run in compared.runs:
        last = run.last_step
        until = f"up to and including step {last}" if last is not None else "no complete step"
        if run.state.value == "running":
            yield f"Run {name} is still being written: {until} is compared."
        elif run.state.value == "interrupted":
            yield f"Run {name} was interrupted: it holds {until}."
        yield from (f"Run {name}: {sentence}." for sentence in run.endings)
        for text in dict.fromkeys(str(one) for rank in run.ranks for one in run.rank(rank).thinned):
            yield f"Run {name} does not hold {text}: nothing is said of what was there."


def _missing_notes(compared: Compared) -> Iterator[str]:
    """Ranks, files and steps that only one run has."""
    runs: dict[str, Run] = dict(compared.runs)
    for name, run in runs.items():
        missing = [rank for rank in run.ranks if rank not in runs[OTHER[name]].ranks]
        if missing and not compared.as_one:
            ranks = ", ".join(map(str, missing[:8])) + ("..." if len(missing) > 8 else "")
            yield f"Only run {name} has rank{'s' * (len(missing) > 1)} {ranks}: not compared."
    for paired in (outcome.paired for outcome in compared.outcomes[:1]):
        saved = {
            name: {fqn for fqn, kind in zip(sites.fqn, sites.kind, strict=True) if kind == Kind.PRODUCT.value}
            for name, sites in (("a", paired.a.sites), ("b", paired.b.sites))
        }
        for name, names in saved.items():
            if alone := names - saved[OTHER[name]]:
                yield f"Only run {name} saves {listed(sorted(alone)[:_SHOWN])}: not compared."
        for name, steps in (("a", paired.only_a), ("b", paired.only_b)):
            if steps:
                ended = f" (run {OTHER[name]} was ended at its first divergence)"
                why = ended if runs[OTHER[name]].manifest.get("stopped") is True else ""
                yield f"Only run {name} has step{'s' * (len(steps) > 1)} {_ranges(steps)}: not compared{why}."


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
