"""What is found of two checkpoints, and how it is said."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from introspect_cli.compare.join.distance import ROUNDING
from introspect_cli.compare.moment import MODEL
from introspect_cli.compare.reasons.differences import describe
from introspect_cli.compare.reasons.words import amount, listed, some
from introspect_cli.compare.result import Divergence, SettingChange, Size, Verdict
from introspect_cli.records import Kind, count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_NAMED = 3
_SETTINGS = 4


@dataclass(frozen=True)
class Form:
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


@dataclass(frozen=True)
class Cast:
    """Tensors of one element type in a and another in b.

    Attributes:
        a: the type in a.
        b: the type in b.
        tensors: these.
        rounded: whether each holds the values of the other, rounded to the coarser type where it is coarser, element
            by element; None where the elements could not be compared.
        farthest: the largest relative distance; None where none is known.
    """

    a: str
    b: str
    tensors: tuple[Divergence, ...]
    rounded: bool | None
    farthest: float | None


@dataclass
class Found:
    """What differs between two checkpoints.

    Attributes:
        counts: tensors that both have, by kind.
        differ: those whose values differ, the largest distance first.
        shapes: those with another shape.
        casts: those of another element type.
        forms: what one has in another form than the other.
        only_a: what a alone has.
        only_b: what b alone has.
        kinds_a: kinds that a alone holds.
        kinds_b: kinds that b alone holds.
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
    forms: list[Form] = field(default_factory=list)
    only_a: list[Divergence] = field(default_factory=list)
    only_b: list[Divergence] = field(default_factory=list)
    kinds_a: tuple[Kind, ...] = ()
    kinds_b: tuple[Kind, ...] = ()
    steps: tuple[float | None, float | None] = (None, None)
    unread: int = 0
    within: int = 0
    selected: bool = False
    run: str = ""
    moment: str = ""
    alike: tuple[str, ...] = ()
    unrecorded: list[Divergence] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether nothing differs that both could have, but for its name or a form that was proven."""
        return not self.rest and all(form.proven for form in self.forms)

    @property
    def doubtful(self) -> int:
        """Where nothing else differs: how many tensors are in another form whose elements were not compared."""
        if self.rest or any(form.proven is False for form in self.forms):
            return 0
        return sum(form.proven is None for form in self.forms)

    @property
    def rest(self) -> bool:
        """Whether anything differs beside names and forms."""
        return bool(self.differ or self.shapes or self.casts or self.only_a or self.only_b)


# --- words


def sentence_of(
    by_fate: Found, verdict: Verdict, renamed: Sequence[str], settings: Sequence[SettingChange]
) -> tuple[str, list[str]]:
    """The sentence, and what else is to be said."""
    rest = [*_forms(by_fate), *_also(by_fate), *_alone(by_fate), *_steps(by_fate)]
    names = f"names differ: {'; '.join(renamed[:_NAMED])}" if renamed else ""
    more = f", and {len(renamed) - _NAMED} more" if len(renamed) > _NAMED else ""
    rest = [names + more, *rest] if names else rest
    if not sum(by_fate.counts.values()):
        return "Could not tell: the checkpoints have no kind of tensor in common.", rest
    if verdict is Verdict.UNDECIDED and by_fate.doubtful:
        every = count(sum(by_fate.counts.values()), "tensor")
        text = f"Could not tell: of {every} {by_fate.doubtful:,} in another form agree"
        return f"{text} by extrema and moments alone, the others are equal.", rest
    if verdict is Verdict.UNDECIDED:
        return f"Could not tell: all that could be read is equal, but {by_fate.unread} could not be read.", rest
    if verdict is Verdict.SAME:
        if settings:
            rest.append(f"what differs beside them: {some([describe(change) for change in settings], _SETTINGS)}")
        form = ", in part in another form" if any(own.form not in ("tied", "constant") for own in by_fate.forms) else ""
        same = f"The checkpoints hold the same{' values' if form else ''}"
        same = "The checkpoints agree" if by_fate.within else same
        return f"{_at(by_fate) or same}{form}: {_all_equal(by_fate)}.", rest
    clauses = [*_differ(by_fate), *_cast(by_fate), *_shapes(by_fate), *_lacking(by_fate)]
    if not clauses:  # forms that are not proven
        return (
            f"The checkpoints hold the same numbers, in part in another order: {_all_equal(by_fate)} otherwise.",
            rest,
        )
    lead, *others = clauses
    model_differs = any(own.site.kind in MODEL for own in _all(by_fate))
    if by_fate.run and not model_differs:
        return f"{_at(by_fate)}, but {lead}.", [*others, *rest]
    if by_fate.run and not (by_fate.differ or by_fate.shapes or by_fate.casts):
        letter = "b" if by_fate.run == "a" else "a"
        text = f"What checkpoint {letter} holds of the model, run {by_fate.run} has {by_fate.moment}, but {lead}."
        return text, [*others, *rest]
    if by_fate.run:
        text = f"At no recorded step has run {by_fate.run} all tensors of the checkpoint: nearest is {by_fate.moment}"
        return f"{text}, where {lead}.", [*others, *rest]
    if not model_differs and _of(by_fate, MODEL):
        lead = f"the models are equal ({count(_of(by_fate, MODEL), 'tensor')}), but {lead}"
    return f"The checkpoints differ: {lead}.", [*others, *rest]


def _at(tensors: Found) -> str:
    """That a checkpoint is of a moment of a run; "" where both are checkpoints."""
    if not tensors.run:
        return ""
    kinds = [kind.several for kind in MODEL if tensors.counts[kind]]
    other = "b" if tensors.run == "a" else "a"
    close = " within the tolerance" if tensors.within else ""
    return f"Checkpoint {other} has the {listed(kinds)} that run {tensors.run} has {tensors.moment}{close}"


def _also(found: Found) -> list[str]:
    clauses = []
    if found.alike:
        clauses.append(f"run {found.run} has the same {some(found.alike)}")
    if found.unrecorded:
        clauses.append(
            f"not compared, for one side alone has it on record: {some([_name(own) for own in found.unrecorded])}"
        )
    return clauses


def _all(found: Found) -> list[Divergence]:
    casts = [tensor for cast in found.casts for tensor in cast.tensors]
    return [*found.differ, *found.shapes, *casts, *found.only_a, *found.only_b]


def _of(found: Found, kinds: Iterable[Kind]) -> int:
    return sum(found.counts[kind] for kind in kinds)


_GROUPS = (
    (MODEL, "tensor of the model", "tensors of the model"),
    ((Kind.OPTIMIZER_STATE,), "value of the optimizer state", "values of the optimizer state"),
    ((Kind.RNG,), "random state", "random states"),
)


def _all_equal(found: Found) -> str:
    """`all 9 tensors of the model and 18 values of the optimizer state are equal`."""
    parts = [count(number, *words) for kinds, *words in _GROUPS if (number := _of(found, kinds))]
    verb = "is" if sum(found.counts.values()) == 1 else "are"
    passed = f", {found.within:,} of them only within the tolerance or noise given" if found.within else ""
    every = f"all {listed(parts)}" if verb == "are" else listed(parts)
    return f"{every} {verb} equal{passed}{', of those selected' if found.selected else ''}"


def _name(tensor: Divergence) -> str:
    """A tensor, with its place in an optimizer's state."""
    if tensor.site.kind is Kind.OPTIMIZER_STATE:
        return f"{tensor.site.path.strip('[]').strip(chr(39))} of {tensor.site.fqn}"
    return f"{tensor.site.fqn}{tensor.site.path}"


def _differ(found: Found) -> list[str]:
    """Clauses on tensors whose values differ, a kind after the other."""
    clauses = []
    for kinds, one, several in _GROUPS:
        members = [own for own in found.differ if own.site.kind in kinds]
        if not members:
            continue
        total = _of(found, kinds)
        number = (
            f"all {total:,}" if len(members) == total > 1 else f"{len(members):,} of {total:,}" if total > 1 else "the"
        )
        noun = several if total > 1 else one
        verb = "differs" if len(members) == 1 else "differ"
        clauses.append(f"{number} {noun} {verb}{_where(members)}")
    return clauses


def _where(members: Sequence[Divergence]) -> str:
    """Which tensors differ, by how much; of many the span, and the farthest."""
    if len(members) <= _NAMED:
        return f": {', '.join(_name(own) + _far(own) for own in members)}"
    measured = [member for member in members if member.rel_l2 is not None]
    if not measured:
        return f": {some([_name(own) for own in members])}"
    farthest = measured[0]
    least = min(member.rel_l2 or 0.0 for member in measured)
    most = farthest.rel_l2 or 0.0
    span = f"{least:.1e} to {most:.1e}" if 0 < least < most else f"{'up to ' * (least < most)}{most:.1e}"
    small = ", the size of rounding" if all(member.size is Size.ROUNDING for member in members) else ""
    return f", by relative L2 {span}{small}, most in {_name(farthest)}"


def _far(tensor: Divergence) -> str:
    if tensor.a is None or tensor.b is None:
        return ""
    if tensor.rel_l2 is None:
        odd = [[summary.stats.get(name, 0.0) for name in ("nans", "infs")] for summary in (tensor.a, tensor.b)]
        words = [
            f"{count(int(b), word, word)} in b, {int(a):,} in a"
            for word, a, b in zip(("NaN", "Inf"), *odd, strict=True)
            if a != b
        ]
        return f" ({'; '.join(words)})" if words else ""
    text = f" ({amount(tensor.rel_l2, tensor.a.layout.dtype, tensor.b.layout.dtype, coarser=False)}"
    if tensor.elements is not None:
        text += f"; {tensor.elements.differing:,} of {count(tensor.elements.total, 'element')}"
    return f"{text})"


def _cast(found: Found) -> list[str]:
    clauses = []
    for cast in found.casts:
        number = len(cast.tensors)
        kinds = {tensor.site.kind for tensor in cast.tensors}
        what = _name(cast.tensors[0]) if number == 1 else f"{number:,} of {_of(found, kinds | set(MODEL)):,} tensors"
        text = f"{what} {'is' if number == 1 else 'are'} {cast.a} in a and {cast.b} in b"
        coarse = max((cast.a, cast.b), key=lambda name: ROUNDING.get(name, 0.0))
        if cast.rounded:
            text += f", the same values rounded to {coarse}, element by element"
        elif cast.rounded is False:
            text += f", and not all are the other's values rounded to {coarse}"
        elif cast.farthest is not None and cast.farthest <= ROUNDING.get(coarse, 0.0):
            text += f", no farther off than {coarse} rounds (relative L2 at most {cast.farthest:.1e})"
        if cast.farthest is not None and not cast.rounded and cast.farthest > ROUNDING.get(coarse, 0.0):
            text += f" (relative L2 up to {cast.farthest:.1e})"
        clauses.append(text)
    return clauses


def _shapes(found: Found) -> list[str]:
    words = [f"{_name(shape)} is {_shape(shape, 'a')} in a and {_shape(shape, 'b')} in b" for shape in found.shapes]
    return [some(words)] if words else []


def _shape(own: Divergence, side: str) -> str:
    summary = own.a if side == "a" else own.b
    return "x".join(map(str, summary.layout.shape)) or "a scalar" if summary is not None else "-"


def _lacking(found: Found) -> list[str]:
    return [
        f"{side} lacks {count(len(only), 'tensor')} of {other}: {some([_name(own) for own in only])}"
        for only, side, other in ((found.only_a, "b", "a"), (found.only_b, "a", "b"))
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


def _forms(found: Found) -> list[str]:
    """What has another form, a line for each; of many of one form an example and the number."""
    clauses = []
    for form, text in _FORMS.items():
        for proven, doubt in _DOUBTS.items():
            members = [own for own in found.forms if own.form == form and own.proven is proven]
            if not members:
                continue
            first = text.format(a=" + ".join(members[0].a), b=" + ".join(members[0].b))
            more = f" (and {len(members) - 1:,} more so)" if len(members) > 1 else ""
            clauses.append(f"{first}{more}{doubt}")
    return clauses


_LAST = [*sorted(Kind, key=lambda kind: kind is Kind.RNG)]


def _alone(found: Found) -> list[str]:
    return [
        f"{side} alone holds {listed([kind.several for kind in sorted(kinds, key=_LAST.index)])}: not compared"
        for side, kinds in (("a", found.kinds_a), ("b", found.kinds_b))
        if kinds
    ]


def _steps(found: Found) -> list[str]:
    a, b = found.steps
    if a is None or b is None or a == b:
        return []
    return [f"the optimizer has made {count(int(a), 'step')} in a and {count(int(b), 'step')} in b"]
