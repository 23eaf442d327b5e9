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
from introspect_cli.compare.checkpoint_words import Cast, Differences, sentence_of
from introspect_cli.compare.element.elements import rounded
from introspect_cli.compare.findings import StructureChange
from introspect_cli.compare.join.at import At
from introspect_cli.compare.join.distance import ROUNDING
from introspect_cli.compare.join.sites import columns
from introspect_cli.compare.moment import MODEL, changed, prefixes
from introspect_cli.compare.result import DiffResult, Divergence, SettingChange, Verdict
from introspect_cli.records import Kind, Phase, Status, Summary

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
    shared = sum(changed(name, change) in names[1] for name in names[0])
    if old == new or 2 * shared < min(map(len, names)):
        return options
    pattern = f"^{re.escape(old)}\\." if old else _OF_A_MODEL
    return replace(options, rename=((pattern, f"{new}." if new else ""),))


def _names(run: Run) -> dict[str, None]:
    """Names of the model's tensors."""
    sites, kinds = run.rank(0).sites, {kind.value for kind in MODEL}
    return dict.fromkeys(fqn for fqn, kind in zip(sites.fqn, sites.kind, strict=True) if kind in kinds)


def of_checkpoints(answer: DiffResult, runs: tuple[Run, Run], asked: DiffOptions, outcome: RankOutcome) -> DiffResult:
    """The answer for two checkpoints, in the place of one for two runs."""
    differences = _sorted(runs, asked, outcome)
    compared = sum(differences.counts.values())
    if not compared or (differences.same and differences.unread) or differences.doubtful:
        verdict = Verdict.UNDECIDED
    else:
        verdict = Verdict.SAME if differences.same else Verdict.DIVERGED
    renamed = [change for change in answer.structure if change.change == "renamed"]
    settings = tuple(sorted(answer.settings, key=_counters_first))
    names = [change.text for change in renamed]
    if not asked.rename and outcome.match.patterns and not differences.run:
        names += _prefixed(*outcome.match.patterns[0])
    sentence, evidence = sentence_of(differences, verdict, names, settings)
    listed = [*differences.differ, *(one for cast in differences.casts for one in cast.tensors)]
    listed = [*differences.shapes, *differences.only[0], *differences.only[1], *sorted(listed, key=_farthest_first)]
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


def _sorted(runs: tuple[Run, Run], asked: DiffOptions, outcome: RankOutcome) -> Differences:
    changes: tuple[Rename, Rename] = (outcome.match.rename or str, str)
    one, two = (_held(run, asked, change) for run, change in zip(runs, changes, strict=True))
    common = one.keys() & two.keys()
    every = [tensor for tensor in outcome.listed if tensor.site.kind in common]
    only = [tensor for tensor in every if tensor.b is None], [tensor for tensor in every if tensor.a is None]
    forms = Forms(runs, only, outcome)
    shapes = forms.look(only, [tensor for tensor in every if _other_shape(tensor)])
    plain = [tensor for tensor in every if tensor.a is not None and tensor.b is not None and not _other_shape(tensor)]
    cast = [tensor for tensor in plain if tensor.a and tensor.b and tensor.a.layout.dtype != tensor.b.layout.dtype]
    left = [
        [tensor for tensor in side if tensor.site.kind not in MODEL or tensor.site.fqn not in settled]
        for side, settled in zip(only, forms.settled, strict=True)
    ]
    differences = Differences(
        counts=Counter(
            {kind: one[kind] - sum(tensor.site.kind is kind for tensor in only[0]) for kind in Kind if kind in common}
        ),
        differ=sorted((tensor for tensor in plain if tensor not in cast), key=_farthest_first),
        shapes=shapes,
        casts=_casts(runs, cast),
        forms=forms.matched,
        only=(left[0], left[1]),
        kinds=([kind for kind in one if kind not in two], [kind for kind in two if kind not in one]),
        steps=(_optimizer_step(runs[0]), _optimizer_step(runs[1])),
        unread=max(_unread(run) for run in runs),
        within=outcome.tally["within"],
        selected=bool(asked.kinds or asked.modules),
    )
    differences.counts[Kind.PARAM] += sum(len(form.a) for form in forms.matched if form.a != form.b)
    for place, name in enumerate("ab"):
        about = runs[place].manifest["checkpoint"]
        if "moment" in about:
            differences.run, differences.moment = name, str(about["moment"])
            differences.alike = tuple(map(str, about.get("alike", ())))
            _set_aside(differences, place)
    return differences


def _set_aside(differences: Differences, run: int) -> None:
    """Of a run's moment: what it did not record, and buffers that are not saved, are no difference."""
    only, others = differences.only[run], differences.only[1 - run]
    differences.unrecorded = [*others, *(tensor for tensor in only if tensor.site.kind is not Kind.PARAM)]
    others.clear()
    only[:] = [tensor for tensor in only if tensor.site.kind is Kind.PARAM]


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


def _unread(run: Run) -> int:
    return int((run.rank(0).read_row(0).status == int(Status.NOT_OBSERVED)).sum())


def _other_shape(tensor: Divergence) -> bool:
    return tensor.a is not None and tensor.b is not None and tensor.a.layout.shape != tensor.b.layout.shape


def _optimizer_step(run: Run) -> float | None:
    """How many steps an optimizer has made, by its state; None where its parameters say different numbers."""
    reader = run.rank(0)
    numbers = At.first(reader, columns(reader.sites)).numbers(Kind.OPTIMIZER_STATE, Phase.START)
    steps = {number.value for number in numbers if number.path == "['step']"}
    return next(iter(steps)) if len(steps) == 1 else None


# --- the same in another element type


def _casts(runs: tuple[Run, Run], cast: Sequence[Divergence]) -> list[Cast]:
    groups: dict[tuple[str, str], list[Divergence]] = {}
    for tensor in cast:
        if tensor.a is not None and tensor.b is not None:
            groups.setdefault((tensor.a.layout.dtype, tensor.b.layout.dtype), []).append(tensor)
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
        (values := _rounded(fine, coarse)) is not None and np.array_equal(values, other, equal_nan=True)
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
