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
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from introspect_cli.compare.elements import rounded
from introspect_cli.compare.ledger import At, Ledger, Moment, Tensor, ledgers
from introspect_cli.compare.measure import (
    ROUNDING,
    WHOLE,
    Layouts,
    Moments,
    Records,
    distances,
    moments,
    relative,
    same_numbers,
)
from introspect_cli.compare.names import owner_of
from introspect_cli.compare.result import DiffResult, Divergence, Origin, Size, StructureChange, Verdict
from introspect_cli.compare.resumed import steps_counted
from introspect_cli.compare.say import far, key_of, listed, some
from introspect_cli.compare.table import KINDS, OTHER, columns, kind_code
from introspect_cli.errors import StoreError
from introspect_cli.labels import step_words
from introspect_cli.records import Kind, Phase, Site, Status, Summary
from introspect_cli.store.tasks import as_one
from introspect_cli.texts import begin_alike, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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
    """(regular expression, replacement) of the prefix by which most names differ from names in `others`.

    These are names with equal components at their ends, at least two (one, where that is the other's whole name). ("",
    "") where there are none.
    """
    ends: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for theirs in (name.split(".") for name in others):
        ends[tuple(theirs[-2:])].append(theirs)
    votes: Counter[tuple[str, str]] = Counter()
    for parts in (name.split(".") for name in names):
        for theirs in ends.get(tuple(parts[-2:]), ends.get((parts[-1],), [])):
            alike = begin_alike(parts[::-1], theirs[::-1])
            votes[".".join(parts[:-alike]), ".".join(theirs[:-alike])] += 1
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
_GROUPS = (
    (MODEL, "tensor of the model", "tensors of the model"),
    ((Kind.OPTIMIZER_STATE,), "value of the optimizer state", "values of the optimizer state"),
    ((Kind.RNG,), "random state", "random states"),
)


@dataclass
class Differences:
    """How two checkpoints differ.

    Attributes:
        counts: tensors that both have, by kind.
        tensors: those that differ, in the order in which they are listed (`_listing_order`).
        forms: what one has in another form than the other.
        kinds: kinds that a alone holds, and that b alone holds.
        unread: tensors that could not be read.
        within: values that differ within the tolerance or noise given.
        run: `a` or `b`, where that is the moment of a run and no checkpoint; "" where both are checkpoints.
        moment: which moment, in words.
        unrecorded: tensors of the checkpoint that the run has not recorded, and buffers that the checkpoint lacks.
    """

    counts: Counter[Kind]
    tensors: list[Divergence]
    forms: list[Form]
    kinds: tuple[list[Kind], list[Kind]]
    unread: int
    within: int
    run: str
    moment: str
    unrecorded: list[Divergence]

    @property
    def verdict(self) -> Verdict:
        """UNDECIDED if no tensor is in both; else DIVERGED if any differs or a form is disproven.

        Else UNDECIDED if any tensor could not be read or any form is not proven; else SAME.
        """
        proofs, held = {form.proven for form in self.forms}, self.counts.total()
        if held and (self.tensors or False in proofs):
            return Verdict.DIVERGED
        return Verdict.UNDECIDED if not held or self.unread or None in proofs else Verdict.SAME

    def of_kinds(self, kinds: Iterable[Kind]) -> int:
        """How many tensors of these kinds both checkpoints have."""
        return sum(self.counts[kind] for kind in kinds)


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
    verdict, tensors = differences.verdict, differences.tensors
    sentence, evidence = sentence_of(differences, runs)
    there, rename = _names(runs[1]), outcome.match.rename or str
    renamed = [f"{name} is {new} in b" for name in _names(runs[0]) if (new := rename(name)) != name and new in there]
    if renamed and not differences.run:
        evidence.append(f"names differ: {some(renamed)}")
    steps = [steps_counted(At.first(run.rank(0), columns(run.rank(0).sites)), Phase.START) for run in runs]
    if steps[0] != steps[1] and None not in steps:
        a, b = (count(int(step or 0), "step") for step in steps)
        evidence.append(f"the optimizer has made {a} in a and {b} in b")
    first = tuple(tensors[:1]) if verdict is Verdict.DIVERGED else ()
    return replace(
        answer.unexplained(),
        subject="checkpoints",
        verdict=verdict,
        sentence=sentence,
        evidence=tuple(evidence),
        first=next(iter(first), None),
        candidates=first,
        divergences=tuple(tensors if asked.whole_step else tensors[: asked.limit]),
        # what the files do not tell; not what captures of runs leave out
        notes=tuple(
            f"{name}: {text}." for name, run in zip("ab", runs, strict=True) for text in run.manifest["not_observed"]
        ),
        counts=answer.counts._replace(diverged=len(tensors)),
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
    moments_of = {name: run.manifest["checkpoint"].get("moment") for name, run in zip("ab", runs, strict=True)}
    run = next((name for name, moment in moments_of.items() if moment), "")
    records = [list(each.rank(0).records(0)) for each in runs]
    changes: tuple[Callable[[str], str], ...] = (outcome.match.rename or str, str)
    named = [[(change(one.site.fqn), one) for one in every] for change, every in zip(changes, records, strict=True)]
    kinds = [Counter(one.site.kind for name, one in each if asked.wants(one.site.kind, name)) for each in named]
    original = {name: one.site.fqn for name, one in named[0]}
    common = kinds[0].keys() & kinds[1].keys()
    tensors = sorted((tensor for tensor in outcome.listed if tensor.site.kind in common), key=_listing_order)
    counts = Counter({kind: kinds[0][kind] for kind in common})
    counts.subtract(tensor.site.kind for tensor in tensors if tensor.only == "a")
    forms = Forms(runs, [{name: one.summary for name, one in each if one.site.kind in MODEL} for each in named])
    forms.find(tensors)
    counts[Kind.PARAM] += sum(len(form.a) for form in forms.found if form.a != form.b)
    tensors = [
        tensor
        for tensor in tensors
        if _how(tensor) == "value" or tensor.site.kind not in MODEL or tensor.site.fqn not in forms.settled
    ]
    unrecorded = [
        tensor
        for tensor in tensors
        if run and tensor.only and (tensor.only != run or tensor.site.kind is not Kind.PARAM)
    ]
    return Differences(
        counts=counts,
        tensors=[tensor for tensor in tensors if tensor not in unrecorded],
        forms=[form._replace(a=tuple(original.get(name, name) for name in form.a)) for form in forms.found],
        kinds=([kind for kind in kinds[0] if kind not in common], [kind for kind in kinds[1] if kind not in common]),
        unread=max(sum(one.summary.status is Status.NOT_OBSERVED for one in every) for every in records),
        within=outcome.tally["within"],
        run=run,
        moment=str(moments_of.get(run)),
        unrecorded=unrecorded,
    )


def _how(tensor: Divergence) -> str:
    """What differs of a tensor: `shape`, `a` or `b` where that side alone has it, else `value`."""
    shapes = {side.layout.shape for side in (tensor.a, tensor.b) if side is not None}
    return tensor.only or ("shape" if len(shapes) > 1 else "value")


def _listing_order(tensor: Divergence) -> tuple[int, bool, bool, float]:
    """Sort key: other shapes, what a alone has, what b alone has, then values.

    Of values the model's before others; in each, counts (integers, single numbers) last; farthest first, where an
    unknown distance is 0.
    """
    how, side = _how(tensor), tensor.a
    if how != "value" or side is None:
        return ("shape", "a", "b").index(how), False, False, 0.0
    counts = side.layout.numel < 2 or not side.layout.dtype.startswith(WHOLE)
    return 3, tensor.site.kind not in MODEL, counts, -(tensor.rel_l2 or 0.0)


# --- the same in another form


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
_MAX_PARTS = 8
"""Parts of one whole."""
_MAX_PERMUTED = 4
"""Parts of one tensor that are put together in every order."""
_OF_PARTS: tuple[Callable[[Any], Any], ...] = (sum, min, max, min, sum, sum)
"""How each of the moments of a whole follows from those of its parts."""


T = TypeVar("T")


class Forms:
    """Tensors that one of two checkpoints lacks by name, or in this shape, matched with tensors of the other.

    All names are b's.

    Attributes:
        found: the forms so far.
        settled: all names in them.
    """

    def __init__(self, runs: tuple[Run, Run], tensors: Sequence[dict[str, Summary]]) -> None:
        """Begin with no form; constants, which are equal to many, have no moments here.

        Args:
            runs: the checkpoints a and b.
            tensors: parameters and buffers of each, by name.
        """
        self._runs, self.found, self.settled = runs, list[Form](), set[str]()
        self._bits = [{name: summary.checksum for name, summary in each.items()} for each in tensors]
        every = [((name, moments(summary)) for name, summary in each.items()) for each in tensors]
        self._moments = [{name: sums for name, sums in each if sums and sums.low != sums.high} for each in every]

    def find(self, differing: Iterable[Divergence]) -> None:
        """Match what differs by bits, by extrema, as parts, and with tensors that are paired already; reads tensors.

        Where bits are equal, the n-th of a is the n-th of b.
        """
        of_model = [tensor for tensor in differing if tensor.site.kind in MODEL]
        alone = [[tensor.site.fqn for tensor in of_model if tensor.only == side] for side in "ab"]
        for a, b in _paired(*self._left(alone, self._bits)):
            self._add(0, [a], b, _EQUAL)
        for a, b in _paired(*({name: sums[:4] for name, sums in each.items()} for each in self._left(alone))):
            self._add(0, [a], b, _TURNED)
        for side in (0, 1):
            for parts, whole in _merges(*self._left(alone)[:: -1 if side else 1]):
                self._add(side, parts, whole, _MERGED)
        for side, left in enumerate(self._left(alone)):  # of tied tensors one is paired, or has its name
            others = {self._bits[1 - side][name]: name for name in self._moments[1 - side]}
            for name in left:
                if other := others.get(self._bits[side][name]):
                    self._add(side, [name], other, _EQUAL)
        for name in (tensor.site.fqn for tensor in of_model if _how(tensor) == "shape"):
            both = [each[name] for each in self._moments if name in each]
            if len(both) > 1 and same_numbers(both[0], both[1]):
                self._add(0, [name], name, _TURNED)

    def _left(self, names: Sequence[Iterable[str]], values: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Values (moments by default) of those of these names of a, and of b, that have one and are in no form."""
        return [
            {name: each[name] for name in alone if name in each and name not in self.settled}
            for alone, each in zip(names, values or self._moments, strict=True)
        ]

    def _add(self, side: int, parts: Sequence[str], whole: str, words: str) -> None:
        """Add the form of tensors of one side (0 for a, 1 for b) that are one of the other; proves it, unless equal."""
        order, proven = (range(len(parts)), True) if words is _EQUAL else self._joined(side, parts, whole)
        names = tuple(parts[at] for at in order), (whole,)
        self.found.append(Form(names[side], names[1 - side], words, proven))
        self.settled.update(parts, (whole,))

    def _joined(self, side: int, parts: Sequence[str], whole: str) -> tuple[Sequence[int], bool | None]:
        """(order of the parts, whether they make the whole in it): concatenated, or all transposed.

        In the shape that gives, or reshaped. Of more than `_MAX_PERMUTED` parts only the order given is tried; not
        known (None) where any cannot be read.
        """
        read = [self._runs[side].tensor(self._bits[side][name]) for name in parts]
        pieces = [piece for piece in read if piece is not None]
        one, in_turn = self._runs[1 - side].tensor(self._bits[1 - side][whole]), tuple(range(len(parts)))
        if one is None or len(pieces) < len(parts):
            return in_turn, None
        for order in permutations(in_turn) if len(pieces) <= _MAX_PERMUTED else [in_turn]:
            for forms in ([pieces[at] for at in order], [pieces[at].T for at in order]):
                for axis in range(forms[0].ndim):
                    with suppress(ValueError):  # shapes that cannot stand beside one another
                        if np.array_equal(np.concatenate(forms, axis).reshape(one.shape), one):
                            return order, True
        return in_turn, False


def _paired(one: dict[str, T], two: dict[str, T]) -> Iterator[tuple[str, str]]:
    """Pairs of names with equal values, the n-th of `one` with the n-th of `two`."""
    places: dict[T, list[str]] = defaultdict(list)
    for name, value in reversed(two.items()):
        places[value].append(name)
    return ((name, places[value].pop()) for name, value in one.items() if places[value])


def _merges(parts: dict[str, Moments], wholes: dict[str, Moments]) -> Iterator[tuple[list[str], str]]:
    """2 to `_MAX_PARTS` tensors that follow one another, with the one that has their moments; each is used once.

    Candidates are tensors of one name whose modules have one parent (`attn.q.weight`, `attn.k.weight`).

    Args:
        parts: moments of one checkpoint's tensors, in order.
        wholes: moments of the other's.
    """
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in parts:
        families[owner_of(owner_of(name)), name.rpartition(".")[2]].append(name)
    index: dict[tuple[float, ...], list[str]] = defaultdict(list)
    for name, sums in wholes.items():
        index[sums[:4]].append(name)
    used = set[str]()
    for members in families.values():
        for start, length in product(range(len(members)), range(2, _MAX_PARTS + 1)):
            names = members[start : start + length]
            columns = zip(*(parts[name] for name in names), strict=True)
            sums = Moments(*(of(column) for of, column in zip(_OF_PARTS, columns, strict=True)))
            for whole in index.get(sums[:4], ()) if len(names) == length else ():
                if same_numbers(sums, wholes[whole]) and not used & {whole, *names}:
                    used |= {whole, *names}
                    yield names, whole


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
    lead, model_differs = clauses.pop(0), any(tensor.site.kind in MODEL for tensor in differences.tensors)
    text = f"The checkpoints differ: {lead}"
    if run and not model_differs:
        text = f"{holds}, but {lead}"
    elif run:
        nearest = f"At no recorded step has run {run} all tensors of the checkpoint: nearest is {differences.moment}"
        text = f"{nearest}, where {lead}"
    elif not model_differs and (models := differences.of_kinds(MODEL)):
        text = f"The checkpoints differ: the models are equal ({count(models, 'tensor')}), but {lead}"
    return f"{text}.", [*clauses, *rest]


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
    parts = [count(number, *words) for kinds, *words in _GROUPS if (number := differences.of_kinds(kinds))]
    passed = f", {differences.within:,} of them only within the tolerance or noise given" if differences.within else ""
    every = f"{listed(parts)} is" if differences.counts.total() == 1 else f"all {listed(parts)} are"
    return f"{every} equal{passed}"


def _name_of(tensor: Divergence) -> str:
    """The name of a tensor; of an optimizer state `exp_avg of fc.weight`."""
    site = tensor.site
    return f"{key_of(site.path)} of {site.fqn}" if site.kind is Kind.OPTIMIZER_STATE else f"{site.fqn}{site.path}"


def _first_names(tensors: Iterable[Divergence]) -> str:
    """The first three names, each with how far it is apart and in how many elements, and the number of others."""
    names = []
    for tensor in tensors:
        elements = tensor.elements
        some_of = f"{elements.differing:,} of {count(elements.total, 'element')}" if elements is not None else ""
        about = "; ".join(filter(None, (far(tensor), some_of)))
        names.append(f"{_name_of(tensor)} ({about})" if about else _name_of(tensor))
    return some(names)


def _differing_clauses(differences: Differences, runs: tuple[Run, Run]) -> list[str]:
    """Clauses on tensors that differ: values and element types by group of kinds, then shapes, then what one lacks.

    At most `_MAX_NAMED` tensors are named with their distances; of more, the largest relative L2 and the farthest. Of
    other element types, whether all are the other's values rounded; that reads these tensors.
    """
    clauses, values = list[str](), defaultdict[tuple[int, str], list[Divergence]](list)
    others = defaultdict[str, list[Divergence]](list)
    for tensor in differences.tensors:
        dtypes = list(dict.fromkeys(side.layout.dtype for side in (tensor.a, tensor.b) if side is not None))
        group = next(at for at, (kinds, *_) in enumerate(_GROUPS) if tensor.site.kind in kinds)
        key = group, " in a and ".join(dtypes) if dtypes[1:] else ""
        (values[key] if (how := _how(tensor)) == "value" else others[how]).append(tensor)
    for (group, types), members in sorted(values.items(), key=lambda each: each[0]):
        kinds, one, several = _GROUPS[group]
        total, measured = differences.of_kinds(kinds), [each.rel_l2 for each in members if each.rel_l2 is not None]
        some_of = f"all {total:,}" if len(members) == total else f"{len(members):,} of {total:,}"
        subject, single = f"{some_of} {several}" if total > 1 else f"the {one}", len(members) == 1
        verb = f"{'is' if single else 'are'} {types} in b" if types else "differs" if single else "differ"
        if types and all(_is_rounded(runs, tensor) for tensor in members):
            where = ", the same values rounded, element by element"
        elif len(members) <= _MAX_NAMED or not measured:
            where = f": {_first_names(members)}"
        else:
            small = ", the size of rounding" if all(member.size is Size.ROUNDING for member in members) else ""
            where = f", by relative L2 up to {max(measured):.1e}{small}, most in {_name_of(members[0])}"
        clauses.append(f"{subject} {verb}{where}")
    for how, members in sorted(others.items(), key=lambda each: each[0] != "shape"):
        lacks = f"{OTHER.get(how)} lacks {count(len(members), 'tensor')} of {how}"
        clauses.append(f"{'other shapes' if how == 'shape' else lacks}: {_first_names(members)}")
    return clauses
