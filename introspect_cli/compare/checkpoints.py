"""Two checkpoints: which tensors differ, and which are the same under other names or in another form.

A checkpoint is one moment, so nothing happens first and nothing follows from anything: the answer counts tensors.
What the comparison of runs found out record by record is sorted here. A tensor that one side lacks may be there under
another name (tied weights are saved once or twice), transposed, or as a part of a larger one (`checkpoint_forms`); one
of another element type may hold the same values rounded, which the elements prove where both files can be read again.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.checkpoint_forms import Forms
from introspect_cli.compare.checkpoint_words import Cast, Found, sentence_of
from introspect_cli.compare.element.elements import rounded
from introspect_cli.compare.join.distance import ROUNDING
from introspect_cli.compare.moment import MODEL, changed, prefixes
from introspect_cli.compare.result import DiffResult, Divergence, SettingChange, StructureChange, Verdict
from introspect_cli.records import Kind, Status, Summary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.match.names import Rename
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.store.reader import Run

_OF_A_MODEL = r"^(?!(?:[^.]+\.\d+|torch|python|numpy|cuda.*)$)"
"""Begins names that are neither a numbered parameter of an optimizer's nor a generator."""
_COUNTS = re.compile(r"(^|[._])(global_step|step|steps|epoch|iteration|lr)$")
"""Settings that say how far a training is."""


def strictly(options: DiffOptions, a: Run, b: Run) -> DiffOptions:
    """The options under which checkpoints are compared: names count, and all that differs is looked at.

    Where hardly a name is shared, but most are with another beginning, that is a renaming: values of two steps differ,
    and could not tell it.
    """
    options = replace(options, strict=True, limit=None, whole_step=True, want_map=False)
    names = [_names(run) for run in (a, b)]
    if options.rename or not options.by_value or 3 * len(names[0].keys() & names[1].keys()) > min(map(len, names)):
        return options
    change = old, new = prefixes(*names)
    known = sum(changed(name, change) in names[1] for name in names[0])
    if old == new or 2 * known < min(map(len, names)):
        return options
    pattern = f"^{re.escape(old)}\\." if old else _OF_A_MODEL
    return replace(options, rename=((pattern, f"{new}." if new else ""),))


def _names(run: Run) -> dict[str, None]:
    """Names of the model's tensors."""
    sites, kinds = run.rank(0).sites, {kind.value for kind in MODEL}
    return dict.fromkeys(fqn for fqn, kind in zip(sites.fqn, sites.kind, strict=True) if kind in kinds)


def of_checkpoints(answer: DiffResult, runs: tuple[Run, Run], asked: DiffOptions, outcome: RankOutcome) -> DiffResult:
    """The answer for two checkpoints, in the place of one for two runs."""
    by_fate = _sorted(runs, asked, outcome)
    compared = sum(by_fate.counts.values())
    if not compared or (by_fate.same and by_fate.unread) or by_fate.doubtful:
        verdict = Verdict.UNDECIDED
    else:
        verdict = Verdict.SAME if by_fate.same else Verdict.DIVERGED
    renamed = [change for change in answer.structure if change.change == "renamed"]
    settings = tuple(sorted(answer.settings, key=_counters_first))
    names = [change.text for change in renamed]
    if not asked.rename and outcome.match.patterns and not by_fate.run:
        names += _prefixed(*outcome.match.patterns[0])
    sentence, evidence = sentence_of(by_fate, verdict, names, settings)
    listed = [*by_fate.differ, *(one for cast in by_fate.casts for one in cast.tensors)]
    listed = [*by_fate.shapes, *by_fate.only_a, *by_fate.only_b, *sorted(listed, key=_farthest_first)]
    first = listed[0] if listed and verdict is Verdict.DIVERGED else None
    return replace(
        answer,
        subject="checkpoints",
        verdict=verdict,
        sentence=sentence,
        evidence=tuple(evidence),
        settings=settings,
        first=first,
        candidates=(first,) if first is not None else (),
        divergences=tuple(listed if asked.limit is None or asked.whole_step else listed[: asked.limit]),
        notes=tuple(_notes(runs)),
        suggestions=(),
        counts=replace(answer.counts, diverged=len(listed)),
        training=None,
        evaluation=None,
        strip=(),
        suspect=None,
        tree=(),
    ).with_findings(StructureChange, ())


def _prefixed(pattern: str, new: str) -> list[str]:
    """That names have another beginning, in words."""
    old = "" if pattern == _OF_A_MODEL else re.sub(r"[\^\\]", "", pattern)
    if old and new:
        return [f"{old} before names in a is {new} in b"]
    return [f"names in {'a' if old else 'b'} have {old or new} before them"]


def _notes(runs: tuple[Run, Run]) -> list[str]:
    """What the files do not tell; not what captures of runs leave out."""
    return [f"{name}: {text}." for run, name in zip(runs, "ab", strict=True) for text in run.manifest["not_observed"]]


def _sorted(runs: tuple[Run, Run], asked: DiffOptions, outcome: RankOutcome) -> Found:
    by_fate = Found()
    changes: tuple[Rename, Rename] = (outcome.match.rename or str, str)
    one, two = (_held(run, asked, change) for run, change in zip(runs, changes, strict=True))
    by_fate.kinds_a = tuple(kind for kind in Kind if kind in one and kind not in two)
    by_fate.kinds_b = tuple(kind for kind in Kind if kind in two and kind not in one)
    common = one.keys() & two.keys()
    every = [own for own in outcome.listed if own.site.kind in common]
    only = [own for own in every if own.b is None], [own for own in every if own.a is None]
    for kind in sorted(common, key=list(Kind).index):
        alone = sum(own.site.kind is kind for own in only[0])
        by_fate.counts[kind] = one[kind] - alone
    forms = Forms(runs, only, outcome)
    by_fate.shapes = forms.look(only, [own for own in every if _other_shape(own)])
    by_fate.forms = forms.matched
    moved = [form for form in forms.matched if form.a != form.b]
    by_fate.counts[Kind.PARAM] += sum(len(form.a) for form in moved)
    settled = forms.settled
    by_fate.only_a, by_fate.only_b = (
        [own for own in side if own.site.kind not in MODEL or own.site.fqn not in done]
        for side, done in zip(only, settled, strict=True)
    )
    _set_aside(by_fate, runs)
    plain = [own for own in every if own.a is not None and own.b is not None and not _other_shape(own)]
    cast = [own for own in plain if own.a and own.b and own.a.layout.dtype != own.b.layout.dtype]
    by_fate.casts = _casts(runs, cast)
    by_fate.differ = sorted((own for own in plain if own not in cast), key=_farthest_first)
    by_fate.steps = _optimizer_step(runs[0]), _optimizer_step(runs[1])
    by_fate.within = outcome.tally["within"]
    by_fate.selected = bool(asked.kinds or asked.modules)
    by_fate.unread = max(sum(_is_unread(run)) for run in runs)
    return by_fate


def _set_aside(by_fate: Found, runs: tuple[Run, Run]) -> None:
    """Of a run's moment: what it did not record, and buffers that are not saved, are no difference."""
    for place, name in enumerate("ab"):
        about = runs[place].manifest["checkpoint"]
        if "moment" not in about:
            continue
        by_fate.run, by_fate.moment, by_fate.alike = (
            name,
            str(about["moment"]),
            tuple(map(str, about.get("alike", ()))),
        )
        mine, theirs = (by_fate.only_a, by_fate.only_b) if name == "a" else (by_fate.only_b, by_fate.only_a)
        by_fate.unrecorded = [*theirs, *(own for own in mine if own.site.kind is not Kind.PARAM)]
        theirs.clear()
        mine[:] = [own for own in mine if own.site.kind is Kind.PARAM]


def _counters_first(change: SettingChange) -> tuple[bool, bool]:
    return not _COUNTS.search(change.name), "sched" in change.name


def _farthest_first(divergence: Divergence) -> tuple[bool, bool, float]:
    """The model before the rest; what counts, as batches or steps, last: it moves by more than any weight."""
    counts = (
        divergence.a is None
        or divergence.a.layout.numel < 2
        or not divergence.a.layout.dtype.startswith(("float", "bfloat", "complex"))
    )
    return divergence.site.kind not in MODEL, counts, -(divergence.rel_l2 or 0.0)


def _held(run: Run, asked: DiffOptions, rename: Rename) -> Counter[Kind]:
    """How many tensors and values a checkpoint holds, by kind, of those selected."""
    reader = run.rank(0)
    sites = [reader.sites[int(number)][0] for number in np.asarray(reader.read_row(0).site)]
    return Counter(site.kind for site in sites if asked.wants(site.kind, rename(site.fqn)))


def _is_unread(run: Run) -> list[bool]:
    return [int(status) == int(Status.NOT_OBSERVED) for status in np.asarray(run.rank(0).read_row(0).status)]


def _other_shape(own: Divergence) -> bool:
    return own.a is not None and own.b is not None and own.a.layout.shape != own.b.layout.shape


def _optimizer_step(run: Run) -> float | None:
    """How many steps an optimizer has made, by its state; None where its parameters say different numbers."""
    reader = run.rank(0)
    steps = set()
    for record in reader.records(0):
        if record.site.kind is Kind.OPTIMIZER_STATE and record.site.path == "['step']":
            number = record.summary.stats.get("mean")
            steps.add(number if number is not None else _number(record.summary.text))
    return next(iter(steps)) if len(steps) == 1 else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# --- the same in another element type


def _casts(runs: tuple[Run, Run], cast: Sequence[Divergence]) -> list[Cast]:
    groups: dict[tuple[str, str], list[Divergence]] = {}
    for own in cast:
        assert own.a is not None
        assert own.b is not None
        groups.setdefault((own.a.layout.dtype, own.b.layout.dtype), []).append(own)
    casts = []
    for (a, b), members in groups.items():
        proofs = [_is_rounded(runs, member.a, member.b) for member in members]
        proven = None if any(proof is None for proof in proofs) else all(proofs)
        measured = [member.rel_l2 for member in members if member.rel_l2 is not None]
        casts.append(Cast(a, b, tuple(members), proven, max(measured, default=None)))
    return casts


def _is_rounded(runs: tuple[Run, Run], a: Summary | None, b: Summary | None) -> bool | None:
    """Whether one of two tensors holds the other's values, rounded to its type; None where it cannot be told."""
    if a is None or b is None:
        return None
    one, two = runs[0].tensor(a.checksum), runs[1].tensor(b.checksum)
    if one is None or two is None or one.shape != two.shape:
        return None
    return any(
        (found := _rounded(fine, coarse)) is not None and np.array_equal(found, other, equal_nan=True)
        for fine, coarse, other in ((one, b.layout.dtype, two), (two, a.layout.dtype, one))
    )


def _rounded(array: Any, dtype: str) -> Any:
    """Values rounded to a type, to nearest and to even, as numbers; None for a type that is not rounded to."""
    if dtype == "bfloat16" and array.dtype == np.float32:
        return rounded(array, dtype)
    if dtype in ROUNDING and dtype != "bfloat16" and array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return array.astype(dtype)
    return None
