"""What is found of two checkpoints, and how it is said."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from introspect_cli.compare.checkpoints.moment import MODEL
from introspect_cli.compare.settings.differences import describe
from introspect_cli.compare.terms.distance import ROUNDING
from introspect_cli.compare.terms.result import Divergence, SettingChange, Size, Verdict
from introspect_cli.compare.terms.words import far, key_of, listed, some
from introspect_cli.records import Kind
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_NAMED = 3
_SETTINGS = 4


@dataclass(frozen=True)
class Cast:
    """Tensors of one element type in a and another in b.

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
    """A tensor of a that is in b in another form.

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
    """What differs between two checkpoints.

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
        """All that differs beside names and forms."""
        casts = [tensor for cast in self.casts for tensor in cast.tensors]
        return [*self.differ, *self.shapes, *casts, *self.only[0], *self.only[1]]

    @property
    def same(self) -> bool:
        """Whether nothing differs that both could have, but for its name or a form that was proven."""
        return not self.every and all(form.proven for form in self.forms)

    @property
    def doubtful(self) -> int:
        """Where nothing else differs: how many tensors are in another form whose elements were not compared."""
        if self.every or any(form.proven is False for form in self.forms):
            return 0
        return sum(form.proven is None for form in self.forms)

    @property
    def checkpoint(self) -> str:
        """The letter of the checkpoint that a run's moment is compared with."""
        return "b" if self.run == "a" else "a"


# --- words


def sentence_of(
    differences: Differences, verdict: Verdict, renamed: Sequence[str], settings: Sequence[SettingChange]
) -> tuple[str, list[str]]:
    """The sentence, and what else is to be said."""
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
    """That a checkpoint is of a moment of a run; "" where both are checkpoints."""
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
    """A tensor, with its place in an optimizer's state."""
    if tensor.site.kind is Kind.OPTIMIZER_STATE:
        return f"{key_of(tensor.site.path)} of {tensor.site.fqn}"
    return f"{tensor.site.fqn}{tensor.site.path}"


def _names(tensors: Iterable[Divergence]) -> str:
    return some([_name(tensor) for tensor in tensors])


def _differ(differences: Differences) -> list[str]:
    """Clauses on tensors whose values differ, a kind after the other."""
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
    """Which tensors differ, by how much; of many the span, and the farthest."""
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
    """What has another form, a line for each; of many of one form an example and the number."""
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
