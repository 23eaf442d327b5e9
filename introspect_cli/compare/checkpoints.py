"""Two checkpoints, or a run beside one: which tensors differ, and which are the same under other names or forms.

*Of a run* that is compared with a checkpoint, the moment counts at which it had the checkpoint's values. Of all moments
at which a run recorded its parameters (when it began, after each recorded step), the one with most of the checkpoint's
checksums. Where no checksum is shared, as for another element type, the moment whose tensors are nearest to those with
the same names. The run's state at that moment is written as a checkpoint, and the two are compared.

*A checkpoint* is one moment, without a first divergence: the answer counts tensors. A tensor that one side lacks may be
there under another name (tied weights are saved once or twice), transposed, or as a part of a larger one. Checksums
find equal bits under other names; extrema and moments, which neither order nor cutting changes, find candidates for
transposes and parts; one of another element type may hold the same values rounded. The elements prove it where both
files can be read again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.compare.elements import rounded
from introspect_cli.compare.ledger import At, Ledger, Moment, Tensor, ledgers
from introspect_cli.compare.match import distinctive_rows
from introspect_cli.compare.measure import (
    ROUNDING,
    Layouts,
    Moments,
    Records,
    distances,
    moments,
    relative,
    same_numbers,
)
from introspect_cli.compare.result import DiffResult, Divergence, Origin, Size, StructureChange, Verdict
from introspect_cli.compare.resumed import steps_counted
from introspect_cli.compare.say import far, key_of, listed, some
from introspect_cli.compare.table import KINDS, columns, kind_code
from introspect_cli.errors import StoreError
from introspect_cli.labels import step_words
from introspect_cli.records import Kind, Phase, Site, Status, Summary
from introspect_cli.store.tasks import as_one
from introspect_cli.texts import begin_alike, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from introspect_cli.compare.names import Rename
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.store.reader import Reader
    from introspect_cli.store.run import Run


MODEL = (Kind.PARAM, Kind.BUFFER)
_STATE = kind_code(Kind.OPTIMIZER_STATE)


def is_checkpoint(run: Run) -> bool:
    """Whether a run was read from a checkpoint file."""
    return isinstance(run.manifest.get("checkpoint"), dict)


def as_moments(a: Run, b: Run, write: Callable[..., Run]) -> tuple[Run, Run]:
    """Both runs unchanged if both or neither are checkpoints; else the run replaced by a moment of it, as a checkpoint.

    Closing the checkpoint closes that moment too.

    Args:
        a: run a.
        b: run b.
        write: writes records as a checkpoint, from summaries by site, path, settings and additions to the manifest.

    Raises:
        StoreError: the run has no step or no parameters on record.
    """
    if is_checkpoint(a) == is_checkpoint(b):
        return a, b
    run, checkpoint = (b, a) if is_checkpoint(a) else (a, b)
    reader = _reader(run)
    (step, when), state = _choose_moment(reader, checkpoint, str(run.path))
    named = step_words(step, reader.labels.get(step, {}))
    about = {"moment": f"after {named}" if when == "after" else f"when {named} begins"}
    records = _records_at(reader, state, checkpoint, run)
    moment = write(records, run.path, {}, {"checkpoint": about, "not_observed": []})
    checkpoint.on_close(moment.close)
    return (moment, b) if run is a else (a, moment)


def _reader(run: Run) -> Reader:
    """Reader of a run's lowest recorded rank; of all ranks as one where they hold parts of tensors.

    Raises:
        StoreError: no step was recorded.
    """
    if not run.recorded:
        raise StoreError(f"{run.path} has no step on record")
    lowest = run.rank(run.recorded[0])
    return as_one(run) if any(layout.part is not None for layout in lowest.layouts) else lowest


# --- which moment


def _choose_moment(reader: Reader, checkpoint: Run, called: str) -> tuple[Moment, Ledger]:
    """The moment that matches the checkpoint, and the run's state then; reads all steps twice.

    Most equal checksums of the model decide, else of the optimizer, else the earlier moment. Where less than half of
    the model match, or all of several moments match alike but not entirely, it is the one whose tensors are nearest to
    those of the same names.

    Args:
        reader: of the run.
        checkpoint: the checkpoint.
        called: the run's path, for the message.

    Raises:
        StoreError: the run has no parameters on record.
    """
    held, sites = _checksums_held(checkpoint), columns(reader.sites)
    goals = [
        np.array([checksum for (kind, _, _), checksum in held.items() if (kind == _STATE) is of_optimizer], np.uint64)
        for of_optimizer in (False, True)
    ]
    scores: dict[Moment, list[int]] = {}
    for moment, state in ledgers(reader, sites):
        sides = state.checksum[~state.of_optimizer], state.checksum[state.of_optimizer]
        if sides[0].any():
            scores[moment] = [int(np.isin(goal, side).sum()) for goal, side in zip(goals, sides, strict=True)]
    if not scores:
        raise StoreError(f"{called} has no parameters on record: no step of it can be compared with a checkpoint")
    best = max(scores, key=scores.__getitem__)
    most = scores[best][0]
    decided = len({score[0] for score in scores.values()}) > 1 and 2 * most >= len(goals[0])
    if not decided and most < len(goals[0]):
        best = min(scores, key=lambda moment: _distance_at(moment, At(reader, sites, moment[0]), checkpoint))
    return best, next(state for moment, state in ledgers(reader, sites) if moment == best)


def _checksums_held(checkpoint: Run) -> dict[Tensor, int]:
    """Checksums of a checkpoint's parameters, buffers and optimizer states; 0 is left out."""
    reader = checkpoint.rank(0)
    held = At.first(reader, columns(reader.sites)).tensors()
    return {tensor: checksum for tensor, checksum in held.items() if checksum}


def _distance_at(moment: Moment, at: At, checkpoint: Run) -> float:
    """Mean relative L2 of what a run recorded at a moment from the checkpoint's model tensors of the same names.

    Names are the same after a common prefix is changed. Infinite where no distance is finite.
    """
    other, phase = checkpoint.rank(0), Phase.START if moment[1] == "before" else Phase.OPTIMIZER
    held = At.first(other, columns(other.sites))
    mine, theirs = (
        {fqn: row for (kind, fqn, _), row in rows.items() if kind != _STATE}
        for rows in (at.tensor_rows(phase), held.tensor_rows())
    )
    change = prefix_change(mine, theirs)
    partners = {row: theirs.get(re.sub(*change, fqn), -1) for fqn, row in mine.items()}
    rows = np.array([pair for pair in partners.items() if pair[1] >= 0], np.int64).reshape(-1, 2)
    sides = (
        Records(at.batch, rows[:, 0], Layouts(at.reader.layouts)),
        Records(held.batch, rows[:, 1], Layouts(other.layouts)),
    )
    rel = relative(*distances(*sides))
    return float(rel[np.isfinite(rel)].mean()) if np.isfinite(rel).any() else np.inf


# --- names


_OF_A_MODEL = r"^(?!(?:[^.]+\.\d+|torch|python|numpy|cuda.*)$)"
"""Begins names that are neither a numbered parameter of an optimizer's nor a generator."""


def checkpoint_options(options: DiffOptions, a: Run, b: Run) -> DiffOptions:
    """Options for comparing two checkpoints: strict, with all divergences listed and no map.

    If the user gave no `rename`, and allows matching by value, one is added that changes a prefix of all names: where
    at most a third of the names is shared as they are, and at least half after the change. Both are counted in the
    checkpoint with fewer names.
    """
    options = replace(options, strict=True, limit=None, whole_step=True, want_map=False)
    one, two = names = [_names(run) for run in (a, b)]
    if options.rename or not options.by_value or 3 * len(one.keys() & two.keys()) > min(map(len, names)):
        return options
    change = prefix_change(one, two)
    shared = sum(re.sub(*change, name) in two for name in one)
    return options if 2 * shared < min(map(len, names)) else replace(options, rename=(change,))


def _names(run: Run) -> dict[str, None]:
    """Names of parameters and buffers of a checkpoint, in order, as keys."""
    sites, kinds = run.rank(0).sites, {kind.value for kind in MODEL}
    return dict.fromkeys(fqn for fqn, kind in zip(sites.fqn, sites.kind, strict=True) if kind in kinds)


def prefix_change(names: Iterable[str], others: Iterable[str]) -> tuple[str, str]:
    """(regular expression, replacement) of the prefix by which most names differ from their partner in `others`.

    A name's partner is the one name of `others` with the most equal components at its end, at least two (one, where
    that is the other's whole name). It has none where several have as many. ("", "") where no name has one.
    """
    ends: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in others:
        ends[tuple(name.split(".")[-2:])].append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for name in names:
        parts = name.split(".")
        both = [
            (begin_alike(parts[::-1], other.split(".")[::-1]), other)
            for other in ends.get(tuple(parts[-2:]), ends.get((parts[-1],), []))
        ]
        most = max((length for length, _ in both), default=0)
        best = [other for length, other in both if length == most]
        if len(best) == 1:
            votes[".".join(parts[:-most]), ".".join(best[0].split(".")[:-most])] += 1
    if not votes:
        return "", ""
    old, new = votes.most_common(1)[0][0]
    return rf"^{re.escape(old)}\." if old else _OF_A_MODEL, f"{new}." if new else ""


# --- what the run had


def _numbered_names(run: Run, checkpoint: Run, root: str) -> dict[str, str]:
    """By parameter of the run, its number in the checkpoint's optimizer state: `optimizer.3`.

    By the order in which the run's only optimizer of this model lists them. Empty where the state has names, or several
    optimizers come into question.

    Args:
        run: the run.
        checkpoint: the checkpoint.
        root: a regular expression for the beginning of names of the model that the checkpoint is of.
    """
    names = [fqn for (kind, fqn, _) in _checksums_held(checkpoint) if kind == _STATE]
    heads = {name.rpartition(".")[0] for name in names}
    if len(heads) != 1 or not all(name.rpartition(".")[2].isdecimal() for name in names):
        return {}
    listed = [
        [str(name) for group in document.get("groups", []) for name in group.get("params", [])]
        for document in run.settings.get("optimizers", [])
        if isinstance(document, dict)
    ]
    of_model = [members for members in listed if members and all(re.match(root, name) for name in members)]
    return {
        name: f"{heads.copy().pop()}.{number}" for number, name in enumerate(of_model[0] if len(of_model) == 1 else ())
    }


def _records_at(reader: Reader, state: Ledger, checkpoint: Run, run: Run) -> dict[Site, Summary]:
    """The run's state at a moment as records of a checkpoint, by site; reads their steps.

    Models other than the checkpoint's are left out, unless the run has less than half of its names; parameters and
    buffers get the kind they have in the checkpoint, optimizer states the numbers they have there. All get the phase
    `start`.

    Args:
        reader: of the run.
        state: the run's tensors at the moment.
        checkpoint: the checkpoint.
        run: the run.
    """
    theirs = {fqn: kind for (kind, fqn, _) in _checksums_held(checkpoint) if kind != _STATE}
    mine = [fqn for kind, fqn, _ in state.tensors if kind != _STATE]
    change = prefix_change(mine, theirs)
    most = 2 * sum(re.sub(*change, fqn) in theirs for fqn in mine) >= len(theirs)
    root = change[0] if most and change[0] != _OF_A_MODEL else ""
    numbers = _numbered_names(run, checkpoint, root)
    batches: dict[int, Any] = {}
    rows: dict[Site, Summary] = {}
    for number, (kind, fqn, path) in enumerate(state.tensors):
        if not re.match(root, fqn) or not state.checksum[number]:
            continue
        step = int(state.step[number])
        batch = batches.get(step) or batches.setdefault(step, reader.read(step))
        record = reader.record(batch, int(state.row[number]), step)
        of_optimizer = kind == _STATE
        name = numbers.get(fqn, fqn) if of_optimizer else fqn
        called = KINDS[kind if of_optimizer else theirs.get(re.sub(*change, fqn), kind)]
        rows[Site(Phase.START, called, name, 0, path)] = record.summary
    return rows


# --- what differs


_MAX_NAMED = 3
_MAX_PERMUTED = 4
"""Parts of one tensor that are put together in every order."""

_GROUPS = (
    (MODEL, "tensor of the model", "tensors of the model"),
    ((Kind.OPTIMIZER_STATE,), "value of the optimizer state", "values of the optimizer state"),
    ((Kind.RNG,), "random state", "random states"),
)


class Form(NamedTuple):
    """A tensor of a that b holds under another name or in another form.

    Attributes:
        a: its name, or those of several that are one in b, in their order.
        b: its name in b, or those of several.
        words: how one is the other.
        proven: whether the elements are the same; None where they could not be compared.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    words: str
    proven: bool | None = True


_EQUAL = "{a} of a equals {b} of b"
_TURNED = "{a} of a is {b} in b, transposed or in another shape"
_MERGED = "{a} of a, put together, is {b} in b"
_DOUBTS = {
    True: "",
    False: "; by extrema and moments, but its elements are in another order",
    None: "; by extrema and moments, its elements were not compared",
}


@dataclass
class Differences:
    """How two checkpoints differ.

    Attributes:
        counts: tensors that both have, by kind.
        tensors: those that differ, by how (`_how`), in the order in which they are listed.
        forms: what one has in another form than the other.
        kinds: kinds that a alone holds, and that b alone holds.
        unread: tensors that could not be read.
        within: values that differ within the tolerance or noise given.
        run: `a` or `b`, where that is the moment of a run and no checkpoint; "" where both are checkpoints.
        moment: which moment, in words.
        unrecorded: tensors of the checkpoint that the run has not recorded, and buffers that the checkpoint lacks.
    """

    counts: Counter[Kind]
    tensors: dict[str, list[Divergence]]
    forms: list[Form]
    kinds: tuple[list[Kind], list[Kind]]
    unread: int
    within: int
    run: str = ""
    moment: str = ""
    unrecorded: list[Divergence] = field(default_factory=list)

    @property
    def every(self) -> list[Divergence]:
        """Tensors that differ: in shape, in a alone, in b alone, in value or type, the last by `_model_then_farthest`.

        Forms and `unrecorded` are left out.
        """
        first = [tensor for how in ("shape", "a", "b") for tensor in self.tensors[how]]
        rest = [tensor for how, tensors in self.tensors.items() if how not in ("shape", "a", "b") for tensor in tensors]
        return [*first, *sorted(rest, key=_model_then_farthest)]

    @property
    def verdict(self) -> Verdict:
        """UNDECIDED if no tensor is in both; else DIVERGED if anything differs (`every`) or a form is disproven.

        Else UNDECIDED if any tensor could not be read or any form is not proven; else SAME.
        """
        proofs = {form.proven for form in self.forms}
        if self.counts.total() and (self.every or False in proofs):
            return Verdict.DIVERGED
        unknown = not self.counts.total() or self.unread or None in proofs
        return Verdict.UNDECIDED if unknown else Verdict.SAME


def of_checkpoints(answer: DiffResult, runs: tuple[Run, Run], asked: DiffOptions, outcome: RankOutcome) -> DiffResult:
    """The answer for two checkpoints (or a checkpoint and a moment of a run), made from that of comparing them as runs.

    Divergences are listed up to the limit asked for. `training`, `evaluation` and `strip` are emptied, and changes of
    structure and origins taken from `findings`.

    Args:
        answer: of the comparison as runs.
        runs: the checkpoints a and b.
        asked: the options as the user gave them.
        outcome: of their only rank.
    """
    differences = _differences(runs, asked, outcome)
    verdict, every = differences.verdict, differences.every
    sentence, evidence = sentence_of(differences, runs)
    names, there = _names(runs[0]), _names(runs[1])
    rename = outcome.match.rename or str
    renamed = [f"{name} is {new} in b" for name in names if (new := rename(name)) != name and new in there]
    if renamed and not differences.run:
        evidence.append(f"names differ: {some(renamed)}")
    steps = [steps_counted(At.first(run.rank(0), columns(run.rank(0).sites)), Phase.START) for run in runs]
    if steps[0] != steps[1] and None not in steps:
        a, b = (count(int(step or 0), "step") for step in steps)
        evidence.append(f"the optimizer has made {a} in a and {b} in b")
    first = every[0] if every and verdict is Verdict.DIVERGED else None
    return replace(
        answer.unexplained(),
        subject="checkpoints",
        verdict=verdict,
        sentence=sentence,
        evidence=tuple(evidence),
        first=first,
        candidates=(first,) if first is not None else (),
        divergences=tuple(every if asked.limit is None or asked.whole_step else every[: asked.limit]),
        # what the files do not tell; not what captures of runs leave out
        notes=tuple(
            f"{name}: {text}." for name, run in zip("ab", runs, strict=True) for text in run.manifest["not_observed"]
        ),
        counts=answer.counts._replace(diverged=len(every)),
        training=None,
        evaluation=None,
        strip=(),
        findings=tuple(one for one in answer.findings if not isinstance(one, (StructureChange, Origin))),
    )


def _differences(runs: tuple[Run, Run], asked: DiffOptions, outcome: RankOutcome) -> Differences:
    """How two checkpoints differ, in kinds that both have; tensors in other forms are matched, which reads them.

    Where one is a moment of a run, what one side alone has may not have been recorded: it goes to `unrecorded`, but for
    parameters of the run.

    Args:
        runs: the checkpoints a and b.
        asked: the options as the user gave them.
        outcome: of comparing them by name.
    """
    changes: tuple[Rename, Rename] = (outcome.match.rename or str, str)
    one, two = (_count_held(run, asked, change) for run, change in zip(runs, changes, strict=True))
    common, tensors = one.keys() & two.keys(), {how: list[Divergence]() for how in ("shape", "a", "b", "value")}
    for tensor in outcome.listed:
        if tensor.site.kind in common:
            tensors[_how(tensor)].append(tensor)
    counts = Counter({kind: one[kind] - sum(tensor.site.kind is kind for tensor in tensors["a"]) for kind in common})
    forms = _forms_of(runs, tensors, changes)
    counts[Kind.PARAM] += sum(len(form.a) for form in forms if form.a != form.b)
    for side, settled in zip("ab", _settled(forms), strict=True):
        for how in (side, "shape"):
            tensors[how] = [
                each for each in tensors[how] if each.site.kind not in MODEL or each.site.fqn not in settled
            ]
    in_a = {changes[0](name): name for name in runs[0].rank(0).sites.fqn}
    differences = Differences(
        counts=counts,
        tensors={**tensors, "value": sorted(tensors["value"], key=_model_then_farthest)},
        forms=[form._replace(a=tuple(in_a.get(name, name) for name in form.a)) for form in forms],
        kinds=([kind for kind in one if kind not in two], [kind for kind in two if kind not in one]),
        unread=max(int((run.rank(0).read_row(0).status == int(Status.NOT_OBSERVED)).sum()) for run in runs),
        within=outcome.tally["within"],
    )
    for run, name, other in zip(runs, "ab", "ba", strict=True):
        about = run.manifest["checkpoint"]
        if "moment" in about:  # what one of them alone has may not have been recorded, or not been saved
            differences.run, differences.moment = name, str(about["moment"])
            alone, differences.tensors[other] = differences.tensors[name], []
            differences.tensors[name] = [each for each in alone if each.site.kind is Kind.PARAM]
            differences.unrecorded = [*tensors[other], *(each for each in alone if each.site.kind is not Kind.PARAM)]
    return differences


def _how(tensor: Divergence) -> str:
    """What differs of a tensor: `shape`, `a` or `b` where that side alone has it, else `value`."""
    shapes = {side.layout.shape for side in (tensor.a, tensor.b) if side is not None}
    return tensor.only or ("shape" if len(shapes) > 1 else "value")


def _model_then_farthest(divergence: Divergence) -> tuple[bool, bool, float]:
    """Sort key: the model's tensors before others; in each, counts (integers, single numbers) last; farthest first.

    Farthest by relative L2, where an unknown one is 0.
    """
    counts = (
        divergence.a is None
        or divergence.a.layout.numel < 2
        or not divergence.a.layout.dtype.startswith(("float", "bfloat", "complex"))
    )
    return divergence.site.kind not in MODEL, counts, -(divergence.rel_l2 or 0.0)


def _count_held(run: Run, asked: DiffOptions, rename: Rename) -> Counter[Kind]:
    """Number of tensors and values in a checkpoint, by kind, of those that the options select; names after `rename`."""
    reader = run.rank(0)
    sites = [reader.sites[int(number)][0] for number in np.asarray(reader.read_row(0).site)]
    return Counter(site.kind for site in sites if asked.wants(site.kind, rename(site.fqn)))


# --- the same in another form


def _forms_of(
    runs: tuple[Run, Run], tensors: dict[str, list[Divergence]], changes: tuple[Rename, Rename]
) -> list[Form]:
    """Tensors that one side lacks by name, or in this shape, matched with tensors of the other; reads these tensors.

    All names are b's. Where bits are equal, the n-th of a is the n-th of b: constants are equal to many.

    Args:
        runs: the checkpoints a and b.
        tensors: what differs, by how (`_how`).
        changes: what changes the names of a, and of b.
    """
    values, forms = list(map(_model_values, runs, changes)), list[Form]()
    alone = [
        {
            each.site.fqn: next(side.checksum for side in (each.a, each.b) if side is not None)
            for each in tensors[side]
            if each.site.kind in MODEL
        }
        for side in "ab"
    ]

    def read(side: int, name: str) -> Any:
        """The whole tensor of a name in one checkpoint (0 for a, 1 for b); None where it cannot be read."""
        return runs[side].tensor(values[side][name].checksum)

    def turned(a: str, b: str) -> Form:
        """The form of a tensor of b that has the numbers of one of a."""
        return Form((a,), (b,), _TURNED, _joined(read(1, b), [read(0, a)])[1])

    same_bits: dict[int, list[str]] = defaultdict(list)
    for name, checksum in alone[1].items():
        same_bits[checksum].append(name)
    for name, checksum in alone[0].items():
        if same_bits[checksum]:
            forms.append(Form((name,), (same_bits[checksum].pop(0),), _EQUAL))
    of_a, of_b = (
        [held[name] for name in names if name in held and name not in settled]
        for held, names, settled in zip(values, alone, _settled(forms), strict=True)
    )
    pairs, merges = parameters(of_a, of_b)
    forms += [turned(one.name, two.name) for one, two in pairs]
    for parts, whole, holder in merges:
        in_b = holder == "b"
        order, proven = _joined(read(in_b, whole), [read(not in_b, name) for name in parts])
        names = (tuple(parts[at] for at in order), (whole,))[:: 1 if in_b else -1]
        forms.append(Form(names[0], names[1], _MERGED, proven))
    for side, left in enumerate((of_a, of_b)):  # of tied tensors one is paired, or has its name
        others = {value.checksum: name for name, value in values[1 - side].items()}
        others |= {pair[side].checksum: pair[1 - side].name for pair in pairs}
        for name, checksum, _ in left:
            if checksum in others and name not in _settled(forms)[side]:
                names = ((name,), (others[checksum],))[:: -1 if side else 1]
                forms.append(Form(names[0], names[1], _EQUAL))
    for name in (each.site.fqn for each in tensors["shape"]):
        both = [held[name].moments for held in values if name in held]
        if len(both) > 1 and same_numbers(both[0], both[1]):
            forms.append(turned(name, name))
    return forms


def _model_values(run: Run, rename: Rename) -> dict[str, Value]:
    """Parameters and buffers of a checkpoint whose values are distinctive, by their names after `rename`."""
    reader, values = run.rank(0), dict[str, Value]()
    batch = reader.read(0)
    for row in np.flatnonzero(distinctive_rows(batch)).tolist():
        record = reader.record(batch, row, 0)
        sums = moments(record.summary) if record.site.kind in MODEL else None
        if sums is not None:
            name = rename(record.site.fqn)
            values[name] = Value(name, record.summary.checksum, sums)
    return values


def _settled(forms: Iterable[Form]) -> tuple[set[str], set[str]]:
    """Names of a, and of b, that are among these forms."""
    return {name for form in forms for name in form.a}, {name for form in forms for name in form.b}


def _joined(whole: Any, pieces: Sequence[Any]) -> tuple[Sequence[int], bool | None]:
    """(order of the pieces, whether they make `whole` in it): concatenated along some dimension, or all transposed.

    In the shape that gives, or reshaped. Of more than `_MAX_PERMUTED` pieces only the order given is tried; not known
    (None) where any cannot be read.
    """
    in_turn = tuple(range(len(pieces)))
    if whole is None or any(piece is None for piece in pieces):
        return in_turn, None
    for order in permutations(in_turn) if len(pieces) <= _MAX_PERMUTED else [in_turn]:
        for forms in ([pieces[at] for at in order], [pieces[at].T for at in order]):
            for axis in range(forms[0].ndim):
                with suppress(ValueError):  # shapes that cannot stand beside one another
                    if np.array_equal(np.concatenate(forms, axis).reshape(whole.shape), whole):
                        return order, True
    return in_turn, False


def _is_rounded(runs: tuple[Run, Run], tensor: Divergence) -> bool:
    """Whether a's tensor is b's rounded to a's type, or the other way round, element by element.

    False where either cannot be read, or has another shape.
    """
    assert tensor.a is not None
    assert tensor.b is not None
    one, two = runs[0].tensor(tensor.a.checksum), runs[1].tensor(tensor.b.checksum)
    return any(
        fine is not None
        and other is not None
        and coarse in ROUNDING
        and fine.dtype.kind == "f"
        and np.array_equal(rounded(fine, coarse), other, equal_nan=True)
        for fine, coarse, other in ((one, tensor.b.layout.dtype, two), (two, tensor.a.layout.dtype, one))
    )


# --- tensors by their numbers

_MAX_PARTS = 8  # parts of one whole


class Merge(NamedTuple):
    """Several tensors of one run that are one tensor of the other.

    Attributes:
        parts: FQNs of the parts, in order.
        whole: FQN of the whole.
        side: the run that has the whole.
    """

    parts: tuple[str, ...]
    whole: str
    side: str


_OF_PARTS: tuple[Callable[[Any], Any], ...] = (sum, min, max, min, sum, sum)
"""How each of the moments of a whole follows from those of its parts."""


def _merges(parts: dict[str, Moments], wholes: dict[str, Moments], side: str) -> list[Merge]:
    """Merges of 2 to `_MAX_PARTS` tensors that follow one another into one with their moments.

    Each tensor is used once.

    Candidates are tensors of one name whose modules have one parent (`attn.q.weight`, `attn.k.weight`).

    Args:
        parts: moments of one run's tensors, in order.
        wholes: moments of the other run's.
        side: `a` or `b`, the run that has the wholes.
    """
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in parts:
        owner, _, leaf = name.rpartition(".")
        families[owner.rpartition(".")[0], leaf].append(name)
    index: dict[tuple[int, float, float], list[str]] = defaultdict(list)
    for name, sums in wholes.items():
        index[sums.numel, sums.low, sums.high].append(name)
    merges, used = [], set[str]()
    for members in families.values():
        for start in range(len(members)):
            for length in range(2, min(_MAX_PARTS, len(members) - start) + 1):
                names = members[start : start + length]
                columns = zip(*(parts[name] for name in names), strict=True)
                sums = Moments(*(of(column) for of, column in zip(_OF_PARTS, columns, strict=True)))
                for whole in index.get((sums.numel, sums.low, sums.high), ()):
                    if same_numbers(sums, wholes[whole]) and not used & {whole, *names}:
                        used |= {whole, *names}
                        merges.append(Merge(tuple(names), whole, side))
    return merges


class Value(NamedTuple):
    """A parameter or buffer with distinctive, finite values."""

    name: str
    checksum: int
    moments: Moments


def parameters(one: Sequence[Value], two: Sequence[Value]) -> tuple[list[tuple[Value, Value]], list[Merge]]:
    """(pairs, merges) of the tensors of a (`one`) and b (`two`): by checksum, else by moments, else as merges."""
    pairs, *rest = _pair_up(one, two)
    left_a, left_b = ({value.name: value.moments for value in left} for left in rest)
    return pairs, [*_merges(left_a, left_b, "b"), *_merges(left_b, left_a, "a")]


def _pair_up(one: Sequence[Value], two: Sequence[Value]) -> tuple[list[tuple[Value, Value]], list[Value], list[Value]]:
    """(pairs, those of `one` without a partner, those of `two` without one).

    Paired by equal checksum first, then by `same_numbers`, each with the first of `two` that no other has taken.
    """
    pairs, left, rest = list[tuple[Value, Value]](), list(one), list(two)
    for agree in (lambda x, y: x.checksum == y.checksum, lambda x, y: same_numbers(x.moments, y.moments)):
        for value in tuple(left):
            other = next((other for other in rest if agree(value, other)), None)
            if other is not None:
                pairs.append((value, other))
                left.remove(value)
                rest.remove(other)
    return pairs, left, rest


# --- words


def sentence_of(differences: Differences, runs: tuple[Run, Run]) -> tuple[str, list[str]]:
    """(the answer in a sentence, further lines of evidence).

    Args:
        differences: how they differ.
        runs: the checkpoints a and b.
    """
    total, run, forms, verdict = differences.counts.total(), differences.run, differences.forms, differences.verdict
    clauses, rest = _differing_clauses(differences, runs), _further_lines(differences)
    kinds = [kind.several for kind in MODEL if differences.counts[kind]]
    holds = "The checkpoints agree" if differences.within else "The checkpoints hold the same"
    if run and kinds:
        close = " within the tolerance" if differences.within else ""
        of = "b" if run == "a" else "a"
        holds = f"Checkpoint {of} has the {listed(kinds)} that run {run} has {differences.moment}{close}"
    if not total:
        return "Could not tell: the checkpoints have no kind of tensor in common.", rest
    if verdict is Verdict.UNDECIDED:
        text = f"all that could be read is equal, but {differences.unread} could not be read"
        if doubtful := sum(form.proven is None for form in forms):
            text = f"of {count(total, 'tensor')} {doubtful:,} in another form agree by extrema and moments alone"
            text += ", the others are equal"
        return f"Could not tell: {text}.", rest
    if not clauses:
        form = ", in part in another form" if any(one.words != _EQUAL for one in forms) else ""
        form = ", in part in another order" if verdict is Verdict.DIVERGED else form
        return f"{holds}{' values' * bool(form and not run)}{form}: {_all_equal(differences)}.", rest
    lead, model_differs = clauses.pop(0), any(tensor.site.kind in MODEL for tensor in differences.every)
    text = f"The checkpoints differ: {lead}"
    if run and not model_differs:
        text = f"{holds}, but {lead}"
    elif run:
        nearest = f"At no recorded step has run {run} all tensors of the checkpoint: nearest is {differences.moment}"
        text = f"{nearest}, where {lead}"
    elif not model_differs and (models := _of_kinds(differences, MODEL)):
        text = f"The checkpoints differ: the models are equal ({count(models, 'tensor')}), but {lead}"
    return f"{text}.", [*clauses, *rest]


def _of_kinds(differences: Differences, kinds: Iterable[Kind]) -> int:
    """How many tensors of these kinds both checkpoints have."""
    return sum(differences.counts[kind] for kind in kinds)


def _further_lines(differences: Differences) -> list[str]:
    """Lines of evidence on other forms, on what only one side recorded, and on kinds that one side alone holds.

    One line for forms of one kind that are as well proven, with the first example and the number of others.
    """
    lines, alike = list[str](), defaultdict[tuple[str, bool | None], list[Form]](list)
    for form in differences.forms:
        alike[form.words, form.proven].append(form)
    for (words, proven), [form, *others] in alike.items():
        more = f" (and {len(others):,} more so)" if others else ""
        lines.append(f"{words.format(a=' + '.join(form.a), b=' + '.join(form.b))}{more}{_DOUBTS[proven]}")
    if differences.unrecorded:
        lines.append(f"not compared, because only one side recorded it: {_first_names(differences.unrecorded)}")
    for side, kinds in zip("ab", differences.kinds, strict=True):
        if kinds:
            names = [kind.several for kind in sorted(kinds, key=lambda kind: kind is Kind.RNG)]
            lines.append(f"only {side} holds {listed(names)}: not compared")
    return lines


def _all_equal(differences: Differences) -> str:
    """Clause on what both have: `all 9 tensors of the model and 18 values of the optimizer state are equal`."""
    parts = [count(number, *words) for kinds, *words in _GROUPS if (number := _of_kinds(differences, kinds))]
    passed = f", {differences.within:,} of them only within the tolerance or noise given" if differences.within else ""
    every = f"{listed(parts)} is" if differences.counts.total() == 1 else f"all {listed(parts)} are"
    return f"{every} equal{passed}"


def _first_names(tensors: Iterable[Divergence], *, distances: bool = False) -> str:
    """The first three names, with how far they are apart where that is asked for, and the number of others."""
    names = []
    for tensor in tensors:
        site, how_far = tensor.site, far(tensor) if distances else ""
        parts = [how_far] if how_far else []
        if distances and tensor.elements is not None:
            parts.append(f"{tensor.elements.differing:,} of {count(tensor.elements.total, 'element')}")
        of_state = site.kind is Kind.OPTIMIZER_STATE
        name = f"{key_of(site.path)} of {site.fqn}" if of_state else f"{site.fqn}{site.path}"
        names.append(name + (f" ({'; '.join(parts)})" if parts else ""))
    return some(names)


def _differing_clauses(differences: Differences, runs: tuple[Run, Run]) -> list[str]:
    """Clauses on tensors that differ: values and element types by group of kinds, then shapes, then what one lacks.

    At most `_MAX_NAMED` tensors are named with their distances; of more, the largest relative L2 and the farthest. Of
    other element types, whether all are the other's values rounded; that reads these tensors.
    """
    clauses, values = [], defaultdict[tuple[int, str], list[Divergence]](list)
    for tensor in differences.tensors["value"]:
        dtypes = list(dict.fromkeys(side.layout.dtype for side in (tensor.a, tensor.b) if side is not None))
        group = next(at for at, (kinds, *_) in enumerate(_GROUPS) if tensor.site.kind in kinds)
        values[group, " in a and ".join(dtypes) if dtypes[1:] else ""].append(tensor)
    for (group, types), members in sorted(values.items(), key=lambda each: each[0]):
        kinds, one, several = _GROUPS[group]
        total, measured = _of_kinds(differences, kinds), [each.rel_l2 for each in members if each.rel_l2 is not None]
        some_of = f"all {total:,}" if len(members) == total else f"{len(members):,} of {total:,}"
        subject, single = f"{some_of} {several}" if total > 1 else f"the {one}", len(members) == 1
        verb = f"{'is' if single else 'are'} {types} in b" if types else "differs" if single else "differ"
        if types and all(_is_rounded(runs, tensor) for tensor in members):
            where = ", the same values rounded, element by element"
        elif len(members) <= _MAX_NAMED or not measured:
            where = f": {_first_names(members, distances=True)}"
        else:
            small = ", the size of rounding" if all(member.size is Size.ROUNDING for member in members) else ""
            where = f", by relative L2 up to {max(measured):.1e}{small}, most in {_first_names(members[:1])}"
        clauses.append(f"{subject} {verb}{where}")
    if shapes := differences.tensors["shape"]:
        clauses.append(f"other shapes: {_first_names(shapes, distances=True)}")
    for side, other in zip("ab", "ba", strict=True):
        if only := differences.tensors[side]:
            clauses.append(f"{other} lacks {count(len(only), 'tensor')} of {side}: {_first_names(only)}")
    return clauses
