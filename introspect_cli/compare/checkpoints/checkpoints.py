"""Two checkpoints: which tensors differ, and which are the same under other names or in another form.

A checkpoint is one moment, so nothing happens first and nothing follows from anything: the answer counts tensors.
What the comparison of runs found out record by record is sorted here. A tensor that one side lacks may be there under
another name (tied weights are saved once or twice), transposed, or as a part of a larger one. Checksums find equal bits
under other names; extrema and moments, which neither order nor cutting changes, find what may be transposed or a part;
one of another element type may hold the same values rounded. The elements prove it where both files can be read again.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.checkpoints.moment import MODEL, OF_A_MODEL
from introspect_cli.compare.checkpoints.words import Cast, Differences, TensorForm, sentence_of
from introspect_cli.compare.elements import rounded
from introspect_cli.compare.terms.at import At
from introspect_cli.compare.terms.distance import ROUNDING
from introspect_cli.compare.terms.findings import StructureChange
from introspect_cli.compare.terms.result import DiffResult, Divergence, Verdict
from introspect_cli.compare.terms.sites import columns
from introspect_cli.compare.values import Merge, parameters, same_numbers, telling_values
from introspect_cli.records import Kind, Phase, Status, Summary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.compare.step.outcome import RankOutcome
    from introspect_cli.compare.terms.names import Rename
    from introspect_cli.compare.terms.options import DiffOptions
    from introspect_cli.compare.values import Value
    from introspect_cli.store.read.run import Run

_PERMUTED = 4
"""Parts of one tensor that are put together in every order."""
_COUNTS = re.compile(r"(^|[._])(global_step|step|steps|epoch|iteration|lr)$")
"""Settings that say how far a training is."""


def of_checkpoints(answer: DiffResult, runs: tuple[Run, Run], asked: DiffOptions, outcome: RankOutcome) -> DiffResult:
    """The answer for two checkpoints, in the place of one for two runs."""
    differences = _sorted(runs, asked, outcome)
    compared = sum(differences.counts.values())
    if not compared or (differences.same and differences.unread) or differences.doubtful:
        verdict = Verdict.UNDECIDED
    else:
        verdict = Verdict.SAME if differences.same else Verdict.DIVERGED
    renamed = [change for change in answer.structure if change.change == "renamed"]
    settings = tuple(sorted(answer.settings, key=lambda one: (not _COUNTS.search(one.name), "sched" in one.name)))
    names = [change.text for change in renamed]
    if not asked.rename and outcome.match.patterns and not differences.run:
        names += _prefixed(*outcome.match.patterns[0])
    # what the files do not tell; not what captures of runs leave out
    notes = [f"{name}: {text}." for name, run in zip("ab", runs, strict=True) for text in run.manifest["not_observed"]]
    sentence, evidence = sentence_of(differences, verdict, names, settings)
    listed = [*differences.differ, *(one for cast in differences.casts for one in cast.tensors)]
    listed = [*differences.shapes, *differences.only[0], *differences.only[1], *sorted(listed, key=_farthest_first)]
    first = listed[0] if listed and verdict is Verdict.DIVERGED else None
    return replace(
        answer.unexplained(),
        subject="checkpoints",
        verdict=verdict,
        sentence=sentence,
        evidence=tuple(evidence),
        settings=settings,
        first=first,
        candidates=(first,) if first is not None else (),
        divergences=tuple(listed if asked.limit is None or asked.whole_step else listed[: asked.limit]),
        notes=tuple(notes),
        suggestions=(),
        counts=replace(answer.counts, diverged=len(listed)),
        training=None,
        evaluation=None,
        strip=(),
        tree=(),
    ).with_findings(StructureChange, ())


def _prefixed(pattern: str, new: str) -> list[str]:
    """That names have another beginning, in words."""
    old = "" if pattern == OF_A_MODEL else re.sub(r"[\^\\]", "", pattern)
    if old and new:
        return [f"{old} before names in a is {new} in b"]
    return [f"names in {'a' if old else 'b'} have {old or new} before them"]


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


# --- the same in another form


class Forms:
    """Tensors that one side lacks by name, looked for on the other in another form."""

    def __init__(self, runs: tuple[Run, Run], only: Sequence[Sequence[Divergence]], outcome: RankOutcome) -> None:
        rename: Rename = outcome.match.rename or str
        self.runs, self.matched = runs, list[TensorForm]()
        changes: tuple[Rename, Rename] = (rename, str)  # to b's names, as divergences have them
        self.every = tuple(map(_model, runs, changes))
        self._in_a = {rename(name): name for name in runs[0].rank(0).sites.fqn}
        self.settled: tuple[set[str], set[str]] = set(), set()
        self.left = tuple(
            {name: values[name] for value in side if (name := value.site.fqn) in values}
            for side, values in zip(only, self.every, strict=True)
        )

    def look(self, only: Sequence[Sequence[Divergence]], shapes: Sequence[Divergence]) -> list[Divergence]:
        """Look for all of them; of tensors that have another shape, those that are left."""
        for side in (0, 1):
            every, left = self.every[1 - side], self.left[1 - side]
            self._tied(side, {value.checksum: name for name, value in every.items() if name not in left})
        turned = [shape.site.fqn for shape in shapes if self._has_same_numbers(shape.site.fqn)]
        matched = parameters(list(self.left[0].values()), list(self.left[1].values()))
        for one, two in matched.pairs:
            a, b, equal = one.site.fqn, two.site.fqn, one.checksum == two.checksum
            self._add((a,), (b,), "tied" if equal else "transposed", proven=equal or self._is_turned(a, b))
        for merge in matched.merges:
            self._merge(merge)
        for side in (0, 1):  # of tied tensors one is paired, and the others are that one, too
            self._tied(side, {pair[side].checksum: pair[1 - side].site.fqn for pair in matched.pairs})
        self._constants(only)
        for name in turned:
            self._add((name,), (name,), "transposed", proven=self._is_turned(name, name))
        return [shape for shape in shapes if shape.site.fqn not in turned]

    def _add(self, a: tuple[str, ...], b: tuple[str, ...], form: str, *, proven: bool | None) -> None:
        self.matched.append(TensorForm(tuple(self._in_a.get(name, name) for name in a), b, form, proven))
        self.settled[0].update(a)
        self.settled[1].update(b)
        for side, names in zip(self.left, (a, b), strict=True):
            for name in names:
                side.pop(name, None)

    def _tied(self, side: int, others: Mapping[int, str]) -> None:
        for name, value in list(self.left[side].items()):
            if value.checksum in others:
                other = others[value.checksum]
                a, b = (name, other) if side == 0 else (other, name)
                self._add((a,), (b,), "tied", proven=True)

    def _constants(self, only: Sequence[Sequence[Divergence]]) -> None:
        """Tensors that hold one number all over are equal to as many others that do, whichever is which."""
        alike: list[dict[int, list[str]]] = [{}, {}]
        for side, members in enumerate(only):
            for member in members:
                summary = member.a if side == 0 else member.b
                if member.site.kind in MODEL and member.site.fqn not in self.settled[side] and summary is not None:
                    alike[side].setdefault(summary.checksum, []).append(member.site.fqn)
        for checksum, names in alike[0].items():
            for a, b in zip(names, alike[1].get(checksum, []), strict=False):
                self._add((a,), (b,), "constant", proven=True)

    def _tensor(self, side: int, name: str) -> Any:
        return self.runs[side].tensor(self.every[side][name].checksum)

    def _is_turned(self, a: str, b: str) -> bool | None:
        """Whether two tensors hold the same elements, one transposed or in another shape; None where nobody knows."""
        one, two = self._tensor(0, a), self._tensor(1, b)
        if one is None or two is None:
            return None
        forms = [one.T, one.reshape(two.shape)] if one.size == two.size else []
        return any(form.shape == two.shape and np.array_equal(form, two) for form in forms)

    def _has_same_numbers(self, name: str) -> bool:
        """Whether a tensor that has another shape under its name holds the same numbers."""
        one, two = (side.get(name) for side in self.every)
        return one is not None and two is not None and same_numbers(one.moments, two.moments)

    def _merge(self, merge: Merge) -> None:
        """Tensors of one that are one in the other, put together and compared."""
        whole, parts = (1, 0) if merge.side == "b" else (0, 1)
        members, result = merge.parts, merge.whole
        one, pieces = self._tensor(whole, result), [self._tensor(parts, name) for name in members]
        order: Sequence[int] | None = None
        readable = one is not None and all(piece is not None for piece in pieces)
        if readable:
            every = permutations(range(len(pieces))) if len(pieces) <= _PERMUTED else [tuple(range(len(pieces)))]
            order = next((chosen for chosen in every if _are_joined(one, [pieces[at] for at in chosen])), None)
        together = tuple(members[at] for at in order or range(len(members)))
        a, b = (together, (result,)) if parts == 0 else ((result,), together)
        self._add(a, b, "merged", proven=order is not None if readable else None)


def _model(run: Run, rename: Rename) -> dict[str, Value]:
    """The telling tensors of a model by their names in b."""
    values = [value for value in telling_values(run.rank(0), 0) if value.site.kind in MODEL]
    named = [replace(value, site=replace(value.site, fqn=rename(value.site.fqn))) for value in values]
    return {value.site.fqn: value for value in named}


def _are_joined(whole: Any, pieces: Sequence[Any]) -> bool:
    """Whether tensors, or their transposes, put together along one dimension are another one."""
    for forms in (pieces, [piece.T for piece in pieces]):
        for axis in range(whole.ndim):
            shapes = {(*form.shape[:axis], *form.shape[axis + 1 :]) for form in forms if form.ndim == whole.ndim}
            rest = (*whole.shape[:axis], *whole.shape[axis + 1 :])
            if all(form.ndim == whole.ndim for form in forms) and shapes == {rest}:
                joined = np.concatenate(forms, axis)
                if joined.shape == whole.shape and np.array_equal(joined, whole):
                    return True
    return False
