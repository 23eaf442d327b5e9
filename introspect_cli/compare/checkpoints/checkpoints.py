"""Two checkpoints: which tensors differ, and which are the same under other names or in another form.

A checkpoint is one moment, without a first divergence: the answer counts tensors. A tensor that one side lacks may be
there under another name (tied weights are saved once or twice), transposed, or as a part of a larger one. Checksums
find equal bits under other names; extrema and moments, which neither order nor cutting changes, find candidates for
transposes and parts; one of another element type may hold the same values rounded. The elements prove it where both
files can be read again.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.checkpoints.moment import MODEL, OF_A_MODEL
from introspect_cli.compare.elements import rounded
from introspect_cli.compare.settings.differences import describe
from introspect_cli.compare.terms.at import At
from introspect_cli.compare.terms.distance import ROUNDING
from introspect_cli.compare.terms.findings import StructureChange
from introspect_cli.compare.terms.result import DiffResult, Divergence, Origin, SettingChange, Size, Verdict
from introspect_cli.compare.terms.sites import columns
from introspect_cli.compare.terms.words import far, key_of, listed, some
from introspect_cli.compare.values import Merge, parameters, same_numbers, telling_values
from introspect_cli.records import Kind, Phase, Status, Summary
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from introspect_cli.compare.step.outcome import RankOutcome
    from introspect_cli.compare.terms.names import Rename
    from introspect_cli.compare.terms.options import DiffOptions
    from introspect_cli.compare.values import Value
    from introspect_cli.store.read.run import Run

_NAMED = 3
_SETTINGS = 4


@dataclass(frozen=True)
class Cast:
    """Tensors with one element type in a and another in b.

    Attributes:
        a: the type in a.
        b: the type in b.
        rounded: whether each holds the values of the other, rounded to the coarser type where it is coarser, element
            by element; None where the elements could not be compared.
        farthest: the largest relative distance; None where none is known.
    """

    a: str
    b: str
    tensors: tuple[Divergence, ...]
    rounded: bool | None
    farthest: float | None


@dataclass(frozen=True)
class TensorForm:
    """A tensor of a that b holds in another form.

    Attributes:
        a: its name, or those of several that are one in b, in their order.
        b: its name in b, or those of several.
        form: `tied` (equal bits under another name), `transposed`, `merged`, or `constant` (the same number all over).
        proven: whether the elements are the same; None where they could not be compared.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    form: str
    proven: bool | None


@dataclass
class Differences:
    """How two checkpoints differ.

    Attributes:
        counts: tensors that both have, by kind.
        differ: those whose values differ, the largest distance first.
        shapes: those with another shape.
        casts: those of another element type.
        forms: what one has in another form than the other.
        only: what a alone has, and what b alone has.
        kinds: kinds that a alone holds, and that b alone holds.
        steps: of a and of b, how many steps their optimizer has made; None where that is not one number.
        unread: tensors that could not be read.
        within: values that differ within the tolerance or noise given.
        selected: whether a part of the checkpoints was selected.
        run: `a` or `b`, where that is the moment of a run and no checkpoint; "" where both are checkpoints.
        moment: which moment, in words.
        alike: moments at which the run has the same tensors of the model.
        unrecorded: tensors of the checkpoint that the run has not recorded, and buffers that the checkpoint lacks.
    """

    counts: Counter[Kind] = field(default_factory=Counter)
    differ: list[Divergence] = field(default_factory=list)
    shapes: list[Divergence] = field(default_factory=list)
    casts: list[Cast] = field(default_factory=list)
    forms: list[TensorForm] = field(default_factory=list)
    only: tuple[list[Divergence], list[Divergence]] = field(default_factory=lambda: ([], []))
    kinds: tuple[list[Kind], list[Kind]] = field(default_factory=lambda: ([], []))
    steps: tuple[float | None, float | None] = (None, None)
    unread: int = 0
    within: int = 0
    selected: bool = False
    run: str = ""
    moment: str = ""
    alike: tuple[str, ...] = ()
    unrecorded: list[Divergence] = field(default_factory=list)

    @property
    def every(self) -> list[Divergence]:
        """All tensors that differ in value, shape or type, or that one side lacks."""
        casts = [tensor for cast in self.casts for tensor in cast.tensors]
        return [*self.differ, *self.shapes, *casts, *self.only[0], *self.only[1]]

    @property
    def same(self) -> bool:
        """Whether `every` is empty and all other forms are proven."""
        return not self.every and all(form.proven for form in self.forms)

    @property
    def doubtful(self) -> int:
        """Number of forms with uncompared elements, where nothing else differs; 0 otherwise."""
        if self.every or any(form.proven is False for form in self.forms):
            return 0
        return sum(form.proven is None for form in self.forms)

    @property
    def checkpoint(self) -> str:
        """`a` or `b`: the side that is a checkpoint, where the other is a moment of a run."""
        return "b" if self.run == "a" else "a"


_PERMUTED = 4
"""Parts of one tensor that are put together in every order."""
_COUNTS = re.compile(r"(^|[._])(global_step|step|steps|epoch|iteration|lr)$")
"""Settings that say how far a training is."""


def of_checkpoints(answer: DiffResult, runs: tuple[Run, Run], asked: DiffOptions, outcome: RankOutcome) -> DiffResult:
    """The answer for two checkpoints.

    UNDECIDED where nothing is in common, or all readable tensors are equal but some unread or in doubtful form.
    """
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
        findings=tuple(one for one in answer.findings if not isinstance(one, (StructureChange, Origin))),
    )


def _prefixed(pattern: str, new: str) -> list[str]:
    """A clause on the prefix of names that differs between a and b."""
    old = "" if pattern == OF_A_MODEL else re.sub(r"[\^\\]", "", pattern)
    if old and new:
        return [f"{old} before names in a is {new} in b"]
    return [f"names in {'a' if old else 'b'} have {old or new} before them"]


def _sorted(runs: tuple[Run, Run], asked: DiffOptions, outcome: RankOutcome) -> Differences:
    """The listed divergences sorted into `Differences`."""
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
    """Move tensors of the checkpoint alone, and buffers and states of the run (side `run`) alone, to `unrecorded`."""
    only, others = differences.only[run], differences.only[1 - run]
    differences.unrecorded = [*others, *(tensor for tensor in only if tensor.site.kind is not Kind.PARAM)]
    others.clear()
    only[:] = [tensor for tensor in only if tensor.site.kind is Kind.PARAM]


def _farthest_first(divergence: Divergence) -> tuple[bool, bool, float]:
    """Sort key: model tensors first, counts (integers, single numbers) last, then by falling relative L2."""
    counts = (
        divergence.a is None
        or divergence.a.layout.numel < 2
        or not divergence.a.layout.dtype.startswith(("float", "bfloat", "complex"))
    )
    return divergence.site.kind not in MODEL, counts, -(divergence.rel_l2 or 0.0)


def _held(run: Run, asked: DiffOptions, rename: Rename) -> Counter[Kind]:
    """Number of selected tensors and values in a checkpoint, by kind."""
    reader = run.rank(0)
    sites = [reader.sites[int(number)][0] for number in np.asarray(reader.read_row(0).site)]
    return Counter(site.kind for site in sites if asked.wants(site.kind, rename(site.fqn)))


def _unread(run: Run) -> int:
    """Number of tensors that could not be read."""
    return int((run.rank(0).read_row(0).status == int(Status.NOT_OBSERVED)).sum())


def _other_shape(tensor: Divergence) -> bool:
    return tensor.a is not None and tensor.b is not None and tensor.a.layout.shape != tensor.b.layout.shape


def _optimizer_step(run: Run) -> float | None:
    """The step count in the optimizer state; None where parameters disagree or have none."""
    reader = run.rank(0)
    numbers = At.first(reader, columns(reader.sites)).numbers(Kind.OPTIMIZER_STATE, Phase.START)
    steps = {number.value for number in numbers if number.path == "['step']"}
    return next(iter(steps)) if len(steps) == 1 else None


# --- the same in another element type


def _casts(runs: tuple[Run, Run], cast: Sequence[Divergence]) -> list[Cast]:
    """Tensors of differing element types, grouped by the pair of types.

    `rounded` True if all are proven, None if any is unknown.
    """
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
    """Whether one tensor is the other rounded to its type, element by element; None where either cannot be read."""
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
    """Values rounded to `dtype`, to nearest, ties to even; None where the type is no narrower float."""
    if dtype == "bfloat16" and array.dtype == np.float32:
        return rounded(array, dtype)
    if dtype in ROUNDING and dtype != "bfloat16" and array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return array.astype(dtype)
    return None


# --- the same in another form


class Forms:
    """Matches tensors that one side lacks by name with tensors of the other in another form."""

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
        """Match all forms (tied, transposed, merged, constant); returns the `shapes` that no form explains."""
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
        """Note a matched form and take its tensors off those left."""
        self.matched.append(TensorForm(tuple(self._in_a.get(name, name) for name in a), b, form, proven))
        self.settled[0].update(a)
        self.settled[1].update(b)
        for side, names in zip(self.left, (a, b), strict=True):
            for name in names:
                side.pop(name, None)

    def _tied(self, side: int, others: Mapping[int, str]) -> None:
        """Match tensors left on `side` with others of equal checksum (`others`: checksum to name)."""
        for name, value in list(self.left[side].items()):
            if value.checksum in others:
                other = others[value.checksum]
                a, b = (name, other) if side == 0 else (other, name)
                self._add((a,), (b,), "tied", proven=True)

    def _constants(self, only: Sequence[Sequence[Divergence]]) -> None:
        """Pair leftover tensors with equal checksums in order, at most as many as both sides have."""
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
        """Whether elements are equal after a transpose or reshape; None where either tensor cannot be read."""
        one, two = self._tensor(0, a), self._tensor(1, b)
        if one is None or two is None:
            return None
        forms = [one.T, one.reshape(two.shape)] if one.size == two.size else []
        return any(form.shape == two.shape and np.array_equal(form, two) for form in forms)

    def _has_same_numbers(self, name: str) -> bool:
        """Whether a name's two tensors of other shape have equal extrema and moments."""
        one, two = (side.get(name) for side in self.every)
        return one is not None and two is not None and same_numbers(one.moments, two.moments)

    def _merge(self, merge: Merge) -> None:
        """Note a merge; proven by joining the parts, in every order for up to `_PERMUTED` of them."""
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
    """Parameters and buffers whose values are distinctive, by their names in b."""
    values = [value for value in telling_values(run.rank(0), 0) if value.site.kind in MODEL]
    named = [replace(value, site=replace(value.site, fqn=rename(value.site.fqn))) for value in values]
    return {value.site.fqn: value for value in named}


def _are_joined(whole: Any, pieces: Sequence[Any]) -> bool:
    """Whether the pieces, or all their transposes, concatenated along any dimension equal `whole`."""
    for forms in (pieces, [piece.T for piece in pieces]):
        for axis in range(whole.ndim):
            shapes = {(*form.shape[:axis], *form.shape[axis + 1 :]) for form in forms if form.ndim == whole.ndim}
            rest = (*whole.shape[:axis], *whole.shape[axis + 1 :])
            if all(form.ndim == whole.ndim for form in forms) and shapes == {rest}:
                joined = np.concatenate(forms, axis)
                if joined.shape == whole.shape and np.array_equal(joined, whole):
                    return True
    return False


# --- words


def sentence_of(
    differences: Differences, verdict: Verdict, renamed: Sequence[str], settings: Sequence[SettingChange]
) -> tuple[str, list[str]]:
    """The sentence, and further evidence lines."""
    rest = [*_forms(differences), *_also(differences), *_alone(differences), *_steps(differences)]
    names = f"names differ: {'; '.join(renamed[:_NAMED])}" if renamed else ""
    more = f", and {len(renamed) - _NAMED} more" if len(renamed) > _NAMED else ""
    rest = [names + more, *rest] if names else rest
    if not sum(differences.counts.values()):
        return "Could not tell: the checkpoints have no kind of tensor in common.", rest
    if verdict is Verdict.UNDECIDED:
        every = count(sum(differences.counts.values()), "tensor")
        text = f"all that could be read is equal, but {differences.unread} could not be read"
        if differences.doubtful:
            text = f"of {every} {differences.doubtful:,} in another form agree by extrema and moments alone"
            text += ", the others are equal"
        return f"Could not tell: {text}.", rest
    if verdict is Verdict.SAME:
        if settings:
            rest.append(f"what differs beside them: {some([describe(change) for change in settings], _SETTINGS)}")
        other = any(each.form not in ("tied", "constant") for each in differences.forms)
        form = ", in part in another form" if other else ""
        same = f"The checkpoints hold the same{' values' if form else ''}"
        same = "The checkpoints agree" if differences.within else same
        return f"{_at(differences) or same}{form}: {_all_equal(differences)}.", rest
    clauses = [*_differ(differences), *_cast(differences), *_shapes(differences), *_lacking(differences)]
    if not clauses:  # forms that are not proven
        same = "The checkpoints hold the same numbers, in part in another order"
        return f"{same}: {_all_equal(differences)} otherwise.", rest
    (lead, *others), moment = clauses, differences.moment
    model_differs = any(each.site.kind in MODEL for each in differences.every)
    if differences.run and not model_differs:
        return f"{_at(differences)}, but {lead}.", [*others, *rest]
    if differences.run and not (differences.differ or differences.shapes or differences.casts):
        text = f"What checkpoint {differences.checkpoint} holds of the model, run {differences.run} has {moment}"
        return f"{text}, but {lead}.", [*others, *rest]
    if differences.run:
        text = f"At no recorded step has run {differences.run} all tensors of the checkpoint: nearest is {moment}"
        return f"{text}, where {lead}.", [*others, *rest]
    if not model_differs and _of(differences, MODEL):
        lead = f"the models are equal ({count(_of(differences, MODEL), 'tensor')}), but {lead}"
    return f"The checkpoints differ: {lead}.", [*others, *rest]


def _at(tensors: Differences) -> str:
    """`Checkpoint a has the parameters that run b has after step 4`; "" where both are checkpoints."""
    if not tensors.run:
        return ""
    kinds = listed([kind.several for kind in MODEL if tensors.counts[kind]])
    close = " within the tolerance" if tensors.within else ""
    return f"Checkpoint {tensors.checkpoint} has the {kinds} that run {tensors.run} has {tensors.moment}{close}"


def _also(differences: Differences) -> list[str]:
    clauses = [f"run {differences.run} has the same {some(differences.alike)}"] if differences.alike else []
    if differences.unrecorded:
        clauses.append(f"not compared, because only one side recorded it: {_names(differences.unrecorded)}")
    return clauses


def _of(differences: Differences, kinds: Iterable[Kind]) -> int:
    return sum(differences.counts[kind] for kind in kinds)


_GROUPS = (
    (MODEL, "tensor of the model", "tensors of the model"),
    ((Kind.OPTIMIZER_STATE,), "value of the optimizer state", "values of the optimizer state"),
    ((Kind.RNG,), "random state", "random states"),
)


def _all_equal(differences: Differences) -> str:
    """`all 9 tensors of the model and 18 values of the optimizer state are equal`."""
    parts = [count(number, *words) for kinds, *words in _GROUPS if (number := _of(differences, kinds))]
    verb = "is" if sum(differences.counts.values()) == 1 else "are"
    passed = f", {differences.within:,} of them only within the tolerance or noise given" if differences.within else ""
    every = f"all {listed(parts)}" if verb == "are" else listed(parts)
    return f"{every} {verb} equal{passed}{', of those selected' if differences.selected else ''}"


def _name(tensor: Divergence) -> str:
    """A tensor's name: `exp_avg of layer.weight` for optimizer state, else name and path."""
    if tensor.site.kind is Kind.OPTIMIZER_STATE:
        return f"{key_of(tensor.site.path)} of {tensor.site.fqn}"
    return f"{tensor.site.fqn}{tensor.site.path}"


def _names(tensors: Iterable[Divergence]) -> str:
    return some([_name(tensor) for tensor in tensors])


def _differ(differences: Differences) -> list[str]:
    """Clauses on tensors whose values differ, one per group of kinds (model, optimizer state, random states)."""
    clauses = []
    for kinds, one, several in _GROUPS:
        members = [tensor for tensor in differences.differ if tensor.site.kind in kinds]
        if not members:
            continue
        total = _of(differences, kinds)
        some_of = f"all {total:,}" if len(members) == total else f"{len(members):,} of {total:,}"
        subject = f"{some_of} {several}" if total > 1 else f"the {one}"
        clauses.append(f"{subject} {'differs' if len(members) == 1 else 'differ'}{_where(members)}")
    return clauses


def _where(members: Sequence[Divergence]) -> str:
    """Names and distances of up to `_NAMED` tensors; of more, the span of relative L2 and the farthest."""
    measured = [member.rel_l2 for member in members if member.rel_l2 is not None]
    if len(members) <= _NAMED or not measured:
        return f": {some([_name(tensor) + _far(tensor) for tensor in members])}"
    least, most = min(measured), max(measured)
    span = f"{least:.1e} to {most:.1e}" if 0 < least < most else f"{'up to ' * (least < most)}{most:.1e}"
    small = ", the size of rounding" if all(member.size is Size.ROUNDING for member in members) else ""
    return f", by relative L2 {span}{small}, most in {_name(members[0])}"


def _far(tensor: Divergence) -> str:
    parts = [far(tensor)] if far(tensor) else []
    if tensor.elements is not None:
        parts.append(f"{tensor.elements.differing:,} of {count(tensor.elements.total, 'element')}")
    return f" ({'; '.join(parts)})" if parts else ""


def _cast(differences: Differences) -> list[str]:
    """Clauses on tensors whose element types differ, one per pair of types."""
    clauses = []
    for cast in differences.casts:
        number, coarse = len(cast.tensors), max((cast.a, cast.b), key=lambda name: ROUNDING.get(name, 0.0))
        total = _of(differences, {tensor.site.kind for tensor in cast.tensors} | set(MODEL))
        which = f"{number:,} of {total:,} tensors are" if number > 1 else f"{_name(cast.tensors[0])} is"
        how = {True: f", the same values rounded to {coarse}, element by element", None: ""}
        how[False] = f", and not all are the other's values rounded to {coarse}"
        amount = f" (relative L2 up to {cast.farthest:.1e})" if cast.farthest is not None and not cast.rounded else ""
        clauses.append(f"{which} {cast.a} in a and {cast.b} in b{how[cast.rounded]}{amount}")
    return clauses


def _shapes(differences: Differences) -> list[str]:
    words = [
        f"{_name(shape)} is {_shape(shape, 'a')} in a and {_shape(shape, 'b')} in b" for shape in differences.shapes
    ]
    return [some(words)] if words else []


def _shape(tensor: Divergence, side: str) -> str:
    summary = tensor.a if side == "a" else tensor.b
    return "x".join(map(str, summary.layout.shape)) or "a scalar" if summary is not None else "-"


def _lacking(differences: Differences) -> list[str]:
    """Clauses on tensors that one side lacks, one per side."""
    return [
        f"{side} lacks {count(len(only), 'tensor')} of {other}: {_names(only)}"
        for only, side, other in zip(differences.only, "ba", "ab", strict=True)
        if only
    ]


_FORMS = {
    "tied": "{a} of a is {b} in b: equal, under another name",
    "transposed": "{a} of a is {b} in b, transposed or in another shape",
    "merged": "{a} of a, put together, is {b} in b",
    "constant": "{a} of a may be {b} in b: both hold the same number all over",
}


_DOUBTS = {
    True: "",
    False: "; by extrema and moments, but its elements are in another order",
    None: "; by extrema and moments, its elements were not compared",
}


def _forms(differences: Differences) -> list[str]:
    """One line per form and proof: its first example and the number of others."""
    clauses = []
    for form, text in _FORMS.items():
        for proven, doubt in _DOUBTS.items():
            members = [each for each in differences.forms if each.form == form and each.proven is proven]
            if not members:
                continue
            first = text.format(a=" + ".join(members[0].a), b=" + ".join(members[0].b))
            more = f" (and {len(members) - 1:,} more so)" if len(members) > 1 else ""
            clauses.append(f"{first}{more}{doubt}")
    return clauses


_LAST = [*sorted(Kind, key=lambda kind: kind is Kind.RNG)]


def _alone(differences: Differences) -> list[str]:
    """Clauses on kinds that one side alone holds."""
    return [
        f"only {side} holds {listed([kind.several for kind in sorted(kinds, key=_LAST.index)])}: not compared"
        for side, kinds in zip("ab", differences.kinds, strict=True)
        if kinds
    ]


def _steps(differences: Differences) -> list[str]:
    a, b = differences.steps
    if a is None or b is None or a == b:
        return []
    return [f"the optimizer has made {count(int(a), 'step')} in a and {count(int(b), 'step')} in b"]
