"""Two runs in, one answer out: every rank compared, the first divergence explained, settings beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.divergence_map import tree_of
from introspect_cli.compare.join.by_value import Correspondence, correspond
from introspect_cli.compare.join.coverage import blindness_notes, chooses_modules, option_notes
from introspect_cli.compare.join.distance import Tensors
from introspect_cli.compare.join.dump import lists, ordered
from introspect_cli.compare.join.flow import CLOSE
from introspect_cli.compare.join.moved import moved_modules, suggest_renames, tree_at
from introspect_cli.compare.join.offset import detect, named_apart
from introspect_cli.compare.join.renames import renamer
from introspect_cli.compare.join.sites import columns
from introspect_cli.compare.join.steps import Sides
from introspect_cli.compare.join.wholes import copies_told, same_layout, stages_apart, tolerances, wholes
from introspect_cli.compare.join.wholes import told as layouts_differ
from introspect_cli.compare.options import DiffOptions
from introspect_cli.compare.ports import answer_of, are_ports, flow_of
from introspect_cli.compare.reasons.base import Scene, reason_named
from introspect_cli.compare.reasons.hardware import fault_sentence, on_one_device, suspect
from introspect_cli.compare.reasons.optimizer import changes
from introspect_cli.compare.reasons.ranks import together, upstream
from introspect_cli.compare.reasons.settings import on_some_ranks, setting_changes
from introspect_cli.compare.result import DiffResult, Divergence, Separate, Verdict
from introspect_cli.compare.results import unchanged
from introspect_cli.compare.samples import samples_told
from introspect_cli.compare.separate import separately, tell_apart, told_separately
from introspect_cli.compare.strip import strip_of
from introspect_cli.compare.structure import roots_told
from introspect_cli.compare.verdict import counts_of, doubted, first_of, structure_of, undiverged
from introspect_cli.compare.walk import compare_rank
from introspect_cli.errors import UsageError
from introspect_cli.records import count
from introspect_cli.selection import check_selection
from introspect_cli.store.whole import WholeReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.store.reader import Run
    from introspect_cli.store.whole import Reader


def compare_runs(a: Run, b: Run, options: DiffOptions, noise: Sequence[Run] = ()) -> DiffResult:
    """Compare two opened runs.

    Args:
        a: the reference run.
        b: the run that should equal it.
        options: what counts.
        noise: runs that should equal a, whose spread is let pass.

    Raises:
        StoreError: a store turns out to be damaged.
        UsageError: nothing can be meant by the options for these runs.
    """
    options = check_selection(options, (a, b), renamer(options.rename, {}))
    ranks = [rank for rank in a.ranks if rank in b.ranks and options.wants_rank(rank)]
    if options.ranks and not ranks:
        raise UsageError(f"no rank of {options.ranks} is in both runs; run a has {a.ranks} and run b {b.ranks}.")
    notes: list[str] = []
    outcomes: list[RankOutcome] = []
    if a.ranks and b.ranks and not options.ranks and not same_layout(a, b):
        return _as_wholes(a, b, options, noise)
    for rank in ranks:
        left = replace(options, later=options.later - sum(outcome.later for outcome in outcomes))
        outcome, told = _rank(a, b, (a.rank(rank), b.rank(rank)), left, noise)
        outcomes.append(outcome)
        notes += [note for note in told if note not in notes]
    answer = _answer(a, b, options, outcomes, notes)
    answer = replace(answer, structure=structure_of(outcomes, same=answer.verdict is Verdict.SAME))
    # what is nowhere may have been left out, and of what was left out nothing is known
    entire = not options.narrowed and not any(chooses_modules(run.manifest) for run in (a, b))
    plain = options.by_value and not options.strict and entire
    if answer.verdict is not Verdict.SAME and len(outcomes) == 1 and plain:
        answer = _by_flow(answer, (a, b), options, outcomes[0])
    if answer.first is not None:
        bitwise = entire and not options.tolerant and not noise
        kept = unchanged(outcomes[0]) if len(outcomes) == 1 and bitwise else ""
        told = [text for text in (samples_told(a, b, answer.first), kept) if text]
        answer = replace(answer, evidence=(*answer.evidence, *told))
    fault = _fault(a, b, options, noise) if noise and on_one_device([a, b, *noise]) else ""
    return replace(answer, notes=(*answer.notes, fault)) if fault else answer


def _by_flow(answer: DiffResult, runs: tuple[Run, Run], options: DiffOptions, outcome: RankOutcome) -> DiffResult:
    """The answer for two implementations that share hardly a name: where the flow of values stops agreeing."""
    a, b = (run.rank(outcome.rank) for run in runs)
    listed = any(lists(run.manifest) for run in runs)
    if answer.first is None and outcome.found is not None and outcome.found.names and not listed:
        return answer  # what has other names was found, and compared
    if not len(outcome.paired) or not are_ports(a, b, answer.first, listed=listed):
        return answer
    step = int(outcome.paired.steps[0])
    if step not in a or step not in b:
        return answer
    known = ordered(runs[0].manifest), ordered(runs[1].manifest)
    found = flow_of(a, b, step, options.rtol or CLOSE, known)
    return answer_of(answer, found) if found.related else answer


def _as_wholes(a: Run, b: Run, options: DiffOptions, noise: Sequence[Run]) -> DiffResult:
    """Compare two layouts: all ranks of each run put together."""
    readers = wholes(a, b)
    options = tolerances(options, readers)
    outcome, told = _rank(a, b, readers, options, ())
    folded = any(isinstance(reader, WholeReader) and reader.fold_calls for reader in readers)
    notes = [layouts_differ(a, b, options, fold_calls=folded), *stages_apart(readers), *told]
    if outcome.first is not None:
        notes = [*copies_told(outcome.first, (a, b)), *notes]
    if noise:
        notes.append("The noise runs are not used: they say nothing of what another layout changes.")
    answer = _answer(a, b, options, [outcome], notes)
    if outcome.first is None or outcome.facts is None or outcome.gathered is None:
        return answer
    return replace(answer, evidence=(*answer.evidence, *outcome.gathered.samples_told(outcome.facts, outcome.first)))


def _fault(a: Run, b: Run, options: DiffOptions, noise: Sequence[Run]) -> str:
    """What run a against each of the others, without tolerance, says of the device."""
    exact = DiffOptions(rename=options.rename, offset=options.offset, limit=1)
    return fault_sentence([compare_runs(a, other, exact) for other in (b, *noise)])


def _rank(
    a: Run, b: Run, readers: tuple[Reader, Reader], options: DiffOptions, noise: Sequence[Run]
) -> tuple[RankOutcome, list[str]]:
    """Compare one rank, or all as one, under the offset and the moves that make their sites meet."""
    notes = []
    one, two = readers
    rank = one.rank
    moved: dict[str, str] = {}
    alike = Correspondence()
    if _last_chain(one) != _last_chain(two):
        if options.by_value and not (isinstance(one, WholeReader) or isinstance(two, WholeReader)):
            shift = options.offset if options.offset is not None else named_apart(one.labels, two.labels) or 0
            close = max(CLOSE, options.rtol or 0.0)
            alike = correspond(one, two, renamer(options.rename, {}), offset=shift, close=close)
        looks = moved_modules(one, two, options.rename)
        moved = {old: new for old, new in looks.items() if not old.startswith(alike.settled)}
        for old, new in moved.items():
            notes.append(f"{old} of a is compared with {new} of b: the modules around it were inserted or removed.")
        moved |= alike.names
    sides = Sides(
        rank=rank,
        a=one,
        b=two,
        noise=tuple(run.rank(rank) for run in noise if rank in run.ranks),
        manifest_a=a.manifest,
        manifest_b=b.manifest,
        tensors=Tensors(a, b),
        rename=renamer(options.rename, moved),
    )
    offset = options.offset
    if offset is None:
        offset = 0
        apart = named_apart(one.labels, two.labels)
        if apart:
            offset = apart
            one_step, other = (f"step {max(apart, 0)} of a", f"step {max(-apart, 0)} of b")
            notes.append(
                f"Steps with the same global_step are compared, {one_step} with {other} (--offset {apart}): one of the "
                "runs counts on from a checkpoint."
            )
        elif a.world_size == b.world_size and _starts_apart(one, two):
            found = detect(one, columns(one.sites, sides.rename), two, columns(two.sites))
            if found:
                offset = found
                whole, late = ("a", "b") if offset > 0 else ("b", "a")
                notes.append(
                    f"Run {late} begins with the parameters that run {whole} has after step {abs(offset) - 1}: "
                    f"step 0 of {late} is compared with step {abs(offset)} of {whole} (--offset {offset})."
                )
    # What ranks that went on alone recorded has no partner: a rank that was lost takes the others' last step with it.
    ends = (a.last_step if a.endings else None, b.last_step if b.endings else None)
    outcome = compare_rank(sides, options, offset, ends)
    outcome.found = alike
    tell_apart(outcome, sides, options, ends)
    if outcome.first is not None and (which := roots_told(outcome.first.site.fqn, alike, sides.rename)):
        notes.append(which)
    return outcome, [*notes, *(outcome.gathered.notes() if outcome.gathered is not None else ())]


def _starts_apart(a: Reader, b: Reader) -> bool:
    """Whether the first captured steps differ, so that a resumed run is worth looking for."""
    return len(a) > 0 and len(b) > 0 and bool(a.entry(0).digest != b.entry(0).digest)


def _last_chain(reader: Reader) -> tuple[int, bytes]:
    """What is equal for two ranks that recorded the same everywhere."""
    return (len(reader), reader.entry(len(reader) - 1).chain) if len(reader) else (0, b"")


def _answer(a: Run, b: Run, options: DiffOptions, outcomes: Sequence[RankOutcome], notes: list[str]) -> DiffResult:
    """Put the ranks' outcomes together."""
    counts = counts_of(a, b, outcomes)
    notes = [*_state_notes(a, b), *notes, *option_notes(a.manifest, b.manifest), *_missing_notes(a, b, outcomes)]
    notes += [*blindness_notes(a.manifest, b.manifest), *_unopened_notes(outcomes)]
    notes += on_some_ranks(a, b) if len(outcomes) > 1 else []
    blind = sum(outcome.tally.blind_both for outcome in outcomes)
    if blind:
        notes.append(
            f"About {blind:,} of {count(counts.records, 'record')} could not be observed, so nothing is said of them."
        )
    best = first_of(outcomes)
    if best is None or best.first is None:
        verdict, text = undiverged(options, counts, outcomes)
        if verdict is Verdict.SAME:
            verdict, text = doubted(a, b) or (verdict, text)
        settings = setting_changes(a, b, None, {})
        alike = Separate(verdict, text)
        return DiffResult(
            a=str(a.path),
            b=str(b.path),
            verdict=verdict,
            sentence=text,
            settings=settings,
            notes=tuple(notes),
            counts=counts,
            training=alike,
            evaluation=alike if any(outcome.evaluated for outcome in outcomes) else None,
        )
    assert best.cause is not None and best.facts is not None  # noqa: PT018 - they are set together
    scene = Scene(
        best.facts,
        best.first,
        best.cause,
        (a, b),
        best.paired.steps,
        ranks=len(outcomes),
        narrowed=options.narrowed,
        tolerated=best.tolerated,
        peers=[outcome.first for outcome in outcomes if outcome.first is not None],
        merges=best.apart.merges if best.apart is not None else (),
        shared=best.shared,
    )
    tuned = changes(scene) if best.cause.reason == "optimizer" else scene.hyperparameters
    scene.settings = settings = setting_changes(
        a, b, reason_named(best.cause.reason), tuned, rounding=scene.rounding, blamed=scene.blamed
    )
    candidates = [outcome.first for outcome in outcomes if outcome.first is not None]
    training, evaluation = separately(a, b, options, outcomes)
    told = told_separately(scene, training, evaluation)
    listed = _listed(outcomes, best.first, None if options.whole_step else options.limit)
    suggestions: tuple[str, ...] = ()
    if best.cause.reason in {"structure", "initial"}:
        suggestions = suggest_renames(best.paired.a, best.paired.b, options.rename)
    return DiffResult(
        a=str(a.path),
        b=str(b.path),
        verdict=Verdict.DIVERGED,
        sentence=told,
        evidence=(*scene.lines(), *together(scene)),
        first=best.first,
        candidates=tuple(sorted(candidates, key=upstream)),
        divergences=listed,
        settings=settings,
        notes=tuple(notes),
        suggestions=suggestions,
        counts=counts,
        map=best.heat.result() if best.heat is not None else None,
        tree=tree_of(best.facts, tree_at(best.paired.a.modules), tree_at(best.paired.b.modules), best.first, best.cause)
        if options.want_map
        else (),
        suspect=suspect(scene),
        strip=strip_of(best.facts, best.first.site),
        training=training or Separate(Verdict.DIVERGED, told, best.first),
        evaluation=evaluation,
    )


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
        lonely = [rank for rank in one.ranks if rank not in other.ranks]
        if lonely and not any(outcome.gathered is not None for outcome in outcomes):
            ranks = ", ".join(map(str, lonely[:8])) + ("..." if len(lonely) > 8 else "")
            notes.append(f"Only run {name} has rank{'s' * (len(lonely) > 1)} {ranks}: not compared.")
    for outcome in outcomes[:1]:
        for steps, name in ((outcome.paired.only_a, "a"), (outcome.paired.only_b, "b")):
            if steps:
                notes.append(f"Only run {name} has step{'s' * (len(steps) > 1)} {_ranges(steps)}: not compared.")
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
