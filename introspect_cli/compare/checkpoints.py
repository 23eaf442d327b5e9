"""Two checkpoints, or a run beside one: which tensors differ, and which are the same under other names or forms.

*Of a run* that is compared with a checkpoint, the moment counts at which it had the checkpoint's values. Of all moments
at which a run recorded its parameters (when it began, after each recorded step), the one with most of the checkpoint's
checksums; where hardly any is shared, as for another element type, the one whose tensors are nearest to those with the
same names. The run's state at that moment is written as a checkpoint, and the two are compared.

*A checkpoint* is one moment, without a first divergence: the answer counts tensors. A tensor that one side lacks may be
there under another name (tied weights are saved once or twice), transposed, or as a part of a larger one. Checksums
find equal bits under other names; extrema and moments, which neither order nor cutting changes, find candidates for
transposes and parts, and the elements prove it where both files can be read again.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import replace
from itertools import permutations, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.compare.elements import rounded
from introspect_cli.compare.ledger import At, Ledger, Moment, ledgers
from introspect_cli.compare.measure import (
    Layouts,
    Moments,
    Records,
    distances,
    moments,
    relative,
    same_numbers,
)
from introspect_cli.compare.names import owner_of
from introspect_cli.compare.result import DiffResult, Divergence, Verdict
from introspect_cli.compare.resumed import steps_counted
from introspect_cli.compare.say import key_of, listed, some
from introspect_cli.compare.table import KINDS, OTHER, columns, kind_code
from introspect_cli.derived import ROUNDING
from introspect_cli.errors import StoreError
from introspect_cli.labels import step_words
from introspect_cli.records import Kind, Phase, Site, Status, Summary
from introspect_cli.store.tasks import as_one
from introspect_cli.texts import begin_alike, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
    if not run.recorded:
        raise StoreError(f"{run.path} has no step on record")
    reader: Reader = run.rank(run.recorded[0])
    if any(layout.part is not None for layout in reader.layouts):
        reader = as_one(run)
    held = _moment_of(checkpoint)
    (step, when), state = _choose_moment(reader, held, str(run.path))
    named = step_words(step, reader.labels.get(step, {}))
    about = {"moment": f"after {named}" if when == "after" else f"when {named} begins"}
    records = _records_at(reader, state, held, run)
    moment = write(records, run.path, {}, {"checkpoint": about, "not_observed": []})
    checkpoint.on_close(moment.close)
    return (moment, b) if run is a else (a, moment)


def _moment_of(checkpoint: Run) -> At:
    """The one step of a checkpoint."""
    reader = checkpoint.rank(0)
    return At.first(reader, columns(reader.sites))


# --- which moment


def _choose_moment(reader: Reader, held: At, called: str) -> tuple[Moment, Ledger]:
    """The moment that matches the checkpoint, and the run's state then; reads all steps twice.

    That with most equal checksums of the model, if it has half. Of several, or of all where none has, the one whose
    tensors are nearest to those of the same names, then that with most of the optimizer's, then the earliest.

    Args:
        reader: of the run.
        held: the checkpoint.
        called: the run's path, for the message.

    Raises:
        StoreError: the run has no parameters on record.
    """
    sites, scores = columns(reader.sites), dict[Moment, list[int]]()
    goals = [
        np.array([checksum for (kind, _, _), checksum in held.tensors().items() if (kind == _STATE) is of_optimizer])
        for of_optimizer in (False, True)
    ]
    for moment, state in ledgers(reader, sites):
        sides = state.checksum[~state.of_optimizer], state.checksum[state.of_optimizer]
        if sides[0].any():
            scores[moment] = [int(np.isin(goal, side).sum()) for goal, side in zip(goals, sides, strict=True)]
    if not scores:
        raise StoreError(f"{called} has no parameters on record: no step of it can be compared with a checkpoint")
    most = max(model for model, _ in scores.values())
    rivals = [moment for moment, (model, _) in scores.items() if model == most or 2 * most < len(goals[0])]
    best = min(
        rivals, key=lambda moment: (_distance_at(moment, At(reader, sites, moment[0]), held), -scores[moment][1])
    )
    return best, next(state for moment, state in ledgers(reader, sites) if moment == best)


def _distance_at(moment: Moment, at: At, held: At) -> float:
    """Mean relative L2 of what a run recorded at a moment from the checkpoint's model tensors of the same names.

    Names are the same after a common prefix is changed. Infinite where no distance is finite.
    """
    phase = Phase.START if moment[1] == "before" else Phase.OPTIMIZER
    mine, theirs = (
        {fqn: row for (kind, fqn, _), row in rows.items() if kind != _STATE}
        for rows in (at.tensor_rows(phase), held.tensor_rows())
    )
    change = prefix_change(mine, theirs)
    pairs = [(row, theirs[name]) for fqn, row in mine.items() if (name := re.sub(*change, fqn)) in theirs]
    rows = np.array(pairs, np.int64).reshape(-1, 2).T
    sides = zip((at, held), rows, strict=True)
    rel = relative(*distances(*(Records(side.batch, of_side, Layouts(side.reader.layouts)) for side, of_side in sides)))
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
    one, two = ({fqn for kind, fqn, _ in _moment_of(run).tensors() if KINDS[kind] in MODEL} for run in (a, b))
    fewer, change = min(len(one), len(two)), prefix_change(one, two)
    renames = not options.rename and options.by_value and 3 * len(one & two) <= fewer
    shared = sum(re.sub(*change, name) in two for name in one)
    return replace(options, rename=(change,)) if renames and 2 * shared >= fewer else options


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
    old, new = max(sorted(votes), key=votes.__getitem__)
    return rf"^{re.escape(old)}\." if old else _OF_A_MODEL, f"{new}." if new else ""


# --- what the run had


def _numbered_names(run: Run, held: At, root: str) -> dict[str, str]:
    """By parameter of the run, its number in the checkpoint's optimizer state: `optimizer.3`.

    By the order in which the run's only optimizer of this model lists them. Empty where the state has names, or several
    optimizers come into question.

    Args:
        run: the run.
        held: the checkpoint.
        root: a regular expression for the beginning of names of the model that the checkpoint is of.
    """
    numbered = [fqn.rpartition(".") for kind, fqn, _ in held.tensors() if kind == _STATE]
    heads = {head if number.isdecimal() else "" for head, _, number in numbered}
    listed = [
        [str(name) for group in document.get("groups", []) for name in group.get("params", [])]
        for document in run.settings.get("optimizers", [])
        if isinstance(document, dict)
    ]
    of_model = [members for members in listed if members and all(re.match(root, name) for name in members)]
    if len(heads) != 1 or "" in heads or len(of_model) != 1:
        return {}
    return {name: f"{next(iter(heads))}.{number}" for number, name in enumerate(of_model[0])}


def _records_at(reader: Reader, state: Ledger, held: At, run: Run) -> dict[Site, Summary]:
    """The run's state at a moment as records of a checkpoint, by site; reads their steps.

    Models other than the checkpoint's are left out, unless the run has less than half of its names; parameters and
    buffers get the kind they have in the checkpoint, optimizer states the numbers they have there. All get the phase
    `start`.

    Args:
        reader: of the run.
        state: the run's tensors at the moment.
        held: the checkpoint.
        run: the run.
    """
    theirs = {fqn: kind for kind, fqn, _ in held.tensors() if kind != _STATE}
    mine = [fqn for kind, fqn, _ in state.tensors if kind != _STATE]
    change = prefix_change(mine, theirs)
    most = 2 * sum(re.sub(*change, fqn) in theirs for fqn in mine) >= len(theirs)
    root = change[0] if most and change[0] != _OF_A_MODEL else ""
    numbers, batches = _numbered_names(run, held, root), dict[int, Any]()
    rows: dict[Site, Summary] = {}
    columns = (state.step.tolist(), state.row.tolist(), state.checksum.tolist())
    for (kind, fqn, path), step, row, checksum in zip(state.tensors, *columns, strict=True):
        if re.match(root, fqn) and checksum:
            batch = batches.get(step) or batches.setdefault(step, reader.read(step))
            name = numbers.get(fqn, fqn) if kind == _STATE else fqn
            called = KINDS[kind if kind == _STATE else theirs.get(re.sub(*change, fqn), kind)]
            rows[Site(Phase.START, called, name, 0, path)] = reader.record(batch, row, step).summary
    return rows


# --- the answer


_GROUPS = (
    (MODEL, "tensor of the model", "tensors of the model"),
    ((Kind.OPTIMIZER_STATE,), "value of the optimizer state", "values of the optimizer state"),
    ((Kind.RNG,), "random state", "random states"),
)
_KINDS = [kind for kinds, *_ in _GROUPS for kind in kinds]


def of_checkpoints(answer: DiffResult, runs: tuple[Run, Run], asked: DiffOptions, outcome: RankOutcome) -> DiffResult:
    """The answer for two checkpoints (or a checkpoint and a moment of a run), made from that of comparing them as runs.

    Divergences are listed up to the limit asked for; of the answer as runs, settings and counts are kept.

    Args:
        answer: of the comparison as runs.
        runs: the checkpoints a and b.
        asked: the options as the user gave them.
        outcome: of their only rank.
    """
    rename, there = outcome.match.rename or str, {*runs[1].rank(0).sites.fqn}
    found = _differences(runs, asked, outcome, rename)
    verdict, sentence, evidence = _said(found, runs)
    names = {old: rename(old) for old in runs[0].rank(0).sites.fqn}
    renamed = [f"{old} is {new} in b" for old, new in names.items() if new != old and new in there]
    if renamed and not found.moment:
        evidence.append(f"names differ: {some(renamed)}")
    steps = [steps_counted(_moment_of(run), Phase.START) for run in runs]
    if steps[0] != steps[1] and None not in steps:
        a, b = (count(int(step or 0), "step") for step in steps)
        evidence.append(f"the optimizer has made {a} in a and {b} in b")
    first = found.tensors[0] if verdict is Verdict.DIVERGED and found.tensors else None
    # what the files do not tell; not what captures of runs leave out
    notes = (f"{name}: {text}." for name, run in zip("ab", runs, strict=True) for text in run.manifest["not_observed"])
    return DiffResult(
        answer.a,
        answer.b,
        verdict,
        sentence,
        evidence=tuple(evidence),
        first=first,
        candidates=() if first is None else (first,),
        divergences=tuple(found.tensors if asked.whole_step else found.tensors[: asked.limit]),
        settings=answer.settings,
        notes=tuple(notes),
        counts=answer.counts._replace(diverged=len(found.tensors)),
        subject="checkpoints",
    )


class Differences(NamedTuple):
    """How two checkpoints differ.

    Attributes:
        counts: tensors that both have, by kind.
        tensors: those that differ, in the order in which they are listed (`_listing_order`).
        forms: what one has in another form than the other.
        beside: lines on what was not compared.
        unread: tensors that could not be read.
        within: values that differ within the tolerance or noise given.
        run: `a` or `b`, where that is the moment of a run and no checkpoint; "" where both are checkpoints.
        moment: which moment, in words; "" for none.
    """

    counts: Counter[Kind]
    tensors: list[Divergence]
    forms: list[Form]
    beside: list[str]
    unread: int
    within: int
    run: str
    moment: str


def _differences(
    runs: tuple[Run, Run], asked: DiffOptions, outcome: RankOutcome, rename: Callable[[str], str]
) -> Differences:
    """How two checkpoints differ, in kinds that both have; tensors in other forms are matched, which reads them.

    Where one is a moment of a run, what one side alone has may not have been recorded, and is not compared, but for
    parameters of the run.

    Args:
        runs: the checkpoints a and b.
        asked: the options as the user gave them.
        outcome: of comparing them by name.
        rename: a's names to b's.
    """
    moments_of = {
        str(each.manifest["checkpoint"].get("moment", "")): side for side, each in zip("ab", runs, strict=True)
    }
    moment = max(moments_of)
    run = moments_of[moment] if moment else ""
    changes: tuple[Callable[[str], str], ...] = rename, str
    named = [
        {(one.site.kind, change(one.site.fqn), one.site.path): one.summary for one in each.rank(0).records(0)}
        for change, each in zip(changes, runs, strict=True)
    ]
    wanted = [[key for key in each if asked.wants(*key[:2])] for each in named]
    kinds = [{kind for kind, _, _ in each} for each in wanted]
    models = [{fqn: summary for (kind, fqn, _), summary in each.items() if kind in MODEL} for each in named]
    tensors = sorted((one for one in outcome.listed if one.site.kind in kinds[0] & kinds[1]), key=_listing_order)
    left = [one for one in tensors if one.site.kind in MODEL and _how(one) != "value"]
    forms = forms_of(runs, models, [[one.site.fqn for one in left if one.only != side] for side in "ba"])
    settled = {name for form in forms for name in (*form.a, *form.b)}
    tensors = [one for one in tensors if one not in left or one.site.fqn not in settled]
    unrecorded = [one for one in tensors if run and one.only and (one.only, one.site.kind) != (run, Kind.PARAM)]
    counts = Counter(key[0] for key in wanted[0] if key in named[1])
    counts[Kind.PARAM] += sum(len(form.a) for form in forms if form.a != form.b)
    beside = [f"not compared, because only one side recorded it: {_names(unrecorded)}"] if unrecorded else []
    for side, alone in (("a", kinds[0] - kinds[1]), ("b", kinds[1] - kinds[0])):
        names = [kind.several for kind in _KINDS if kind in alone]
        beside += [f"only {side} holds {listed(names)}: not compared"] if names else []
    tensors = [one for one in tensors if one not in unrecorded]
    own = {rename(fqn): fqn for fqn in runs[0].rank(0).sites.fqn}
    forms = [form._replace(a=tuple(own[name] for name in form.a)) for form in forms]
    unread = max(sum(one.status is Status.NOT_OBSERVED for one in each.values()) for each in named)
    return Differences(counts, tensors, forms, beside, unread, outcome.tally["within"], run, moment)


def _how(tensor: Divergence) -> str:
    """What differs of a tensor: `shape`, `a` or `b` where that side alone has it, else `value`."""
    shapes = {side.layout.shape for side in (tensor.a, tensor.b) if side is not None}
    return tensor.only or ("shape" if len(shapes) > 1 else "value")


def _listing_order(tensor: Divergence) -> tuple[int, bool, bool, float]:
    """Sort key: other shapes, what a alone has, what b alone has, then values.

    Of values the model's before others; in each, single numbers last; farthest first, where an unknown distance is 0.
    """
    side, how = tensor.a or tensor.b, _how(tensor)
    single = side is not None and side.layout.numel < 2
    return ("shape", "a", "b", "value").index(how), tensor.site.kind not in MODEL, single, -(tensor.rel_l2 or 0.0)


# --- the same in another form


class Form(NamedTuple):
    """A tensor of a that b holds under another name or in another form.

    Attributes:
        a: its name (b's word for it), or those of several that are one in b, in their order.
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


def forms_of(
    runs: tuple[Run, Run], models: Sequence[Mapping[str, Summary]], left: Sequence[Sequence[str]]
) -> list[Form]:
    """Tensors that are in the other checkpoint under another name, in another shape, or in parts; reads tensors.

    First those of equal bits, the n-th of a with the n-th of b; then one or several that follow one another and have
    the moments of one of the other; then those equal to one that is paired already (tied). Constants have no moments.

    Args:
        runs: the checkpoints a and b.
        models: parameters and buffers of each, by b's names.
        left: names that the other lacks, or has in another shape, of a and of b.
    """
    found, free = list[Form](), [dict.fromkeys(names) for names in left]
    bits = [{name: summary.checksum for name, summary in each.items()} for each in models]
    every = [{name: moments(summary) for name, summary in each.items()} for each in models]
    known = [{name: sums for name, sums in each.items() if sums and sums.low != sums.high} for each in every]

    def add(side: int, parts: Sequence[str], whole: str, words: str) -> None:
        """Add the form of tensors of one side (0 for a, 1 for b) that are one of the other."""
        form: tuple[tuple[str, ...], bool | None] = tuple(parts), True
        if words is not _EQUAL:
            pieces = [runs[side].tensor(bits[side][name]) for name in parts]
            form = _proof(parts, pieces, runs[1 - side].tensor(bits[1 - side][whole]))
        names = form[0], (whole,)
        found.append(Form(names[side], names[1 - side], words, form[1]))
        for name in parts:
            free[side].pop(name, None)
        free[1 - side].pop(whole, None)

    alike: dict[int, list[str]] = defaultdict(list)
    for name in reversed(free[1]):
        alike[bits[1][name]].append(name)
    for name in [*free[0]]:
        if alike[bits[0][name]]:
            add(0, [name], alike[bits[0][name]].pop(), _EQUAL)
    for side in (0, 1):
        one, two = ({name: of[name] for name in names if name in of} for names, of in zip(free, known, strict=True))
        for parts, whole in _merges(*((two, one) if side else (one, two))):
            add(side, parts, whole, _MERGED if len(parts) > 1 else _TURNED)
    for side, names in enumerate([[*each] for each in free]):
        others = {bits[1 - side][name]: name for name in known[1 - side]}
        for name in names:
            if other := others.get(bits[side][name]):
                add(side, [name], other, _EQUAL)
    return found


def _merges(parts: Mapping[str, Moments], wholes: Mapping[str, Moments]) -> Iterator[tuple[list[str], str]]:
    """1 to `_MAX_PARTS` tensors that follow one another, with the one that has their moments; each is used once.

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
    used: tuple[set[str], set[str]] = set(), set()
    for members, length in product(families.values(), range(1, _MAX_PARTS + 1)):
        for start in range(len(members) - length + 1):
            names = members[start : start + length]
            columns = zip(*(parts[name] for name in names), strict=True)
            sums = Moments(*(of(column) for of, column in zip(_OF_PARTS, columns, strict=True)))
            for whole in index.get(sums[:4], ()):
                if same_numbers(sums, wholes[whole]) and whole not in used[1] and not used[0].intersection(names):
                    used[0].update(names)
                    used[1].add(whole)
                    yield names, whole


def _proof(names: Sequence[str], pieces: Sequence[Any], whole: Any) -> tuple[tuple[str, ...], bool | None]:
    """(parts in order, whether they make the whole in it): concatenated, or all transposed, and reshaped.

    Of more than `_MAX_PERMUTED` parts only the order given is tried; not known (None) where any cannot be read.
    """
    if whole is None or any(piece is None for piece in pieces):
        return tuple(names), None
    given = [*zip(names, pieces, strict=True)]
    for order in permutations(given) if len(given) <= _MAX_PERMUTED else [given]:
        for forms in ([piece for _, piece in order], [piece.T for _, piece in order]):
            for axis in range(forms[0].ndim):
                with suppress(ValueError):  # shapes that cannot stand beside one another
                    if np.array_equal(np.concatenate(forms, axis).reshape(whole.shape), whole):
                        return tuple(name for name, _ in order), True
    return tuple(names), False


def _are_rounded(runs: tuple[Run, Run], tensors: Iterable[Divergence]) -> bool:
    """Whether of each tensor one value is the other rounded to its element type; False where any cannot be read."""
    for tensor in tensors:
        both = zip((tensor.a, tensor.b), runs, strict=True)
        sides = [(side.layout.dtype, run.tensor(side.checksum)) for side, run in both if side is not None]
        (_, fine), (dtype, coarse) = sorted(sides, key=lambda side: ROUNDING.get(side[0], np.inf))
        if fine is None or coarse is None or fine.dtype.kind != "f" or dtype not in ROUNDING:
            return False
        if sides[0][0] == sides[1][0] or not np.array_equal(rounded(fine, dtype), coarse, equal_nan=True):
            return False
    return True


# --- words


def _said(differences: Differences, runs: tuple[Run, Run]) -> tuple[Verdict, str, list[str]]:
    """(verdict, the answer in a sentence, further lines of evidence).

    UNDECIDED if no tensor is in both; DIVERGED if any differs or a form is disproven; UNDECIDED if any tensor could not
    be read or any form is not proven; else SAME.
    """
    counts, run, when, within = differences.counts, differences.run, differences.moment, differences.within
    differs, doubts, lines = _clauses(differences, runs), list[str](), list[str]()
    if differences.unread:
        doubts.append(f"{differences.unread:,} could not be read")
    alike = defaultdict[tuple[str, bool | None], list[Form]](list)
    for form in differences.forms:
        alike[form.words, form.proven].append(form)
    for (words, proven), [form, *others] in alike.items():
        more = f" (and {len(others):,} more so)" if others else ""
        text = f"{words.format(a=' + '.join(form.a), b=' + '.join(form.b))}{more}{_DOUBTS[proven]}"
        {True: lines, False: differs, None: doubts}[proven].append(text)
    lines += differences.beside
    if not counts.total():
        return Verdict.UNDECIDED, "Could not tell: the checkpoints have no kind of tensor in common.", lines
    models = [kind.several for kind in MODEL if counts[kind]]
    holds = f"The checkpoints {'agree' if within else 'hold the same'}"
    if run and models:
        holds = f"Checkpoint {OTHER[run]} has the {listed(models)} that run {run} has {when}"
    if differs:
        close = "within the tolerance" if within else "equal"
        holds = f"{holds}, but " if run and not within else f"The checkpoints differ, though the models are {close}: "
        agree = all(form.proven for form in differences.forms) and not differences.unread
        if not models or not agree or any(tensor.site.kind in MODEL for tensor in differences.tensors):
            nearest = f"At no recorded step has run {run} all tensors of the checkpoint: nearest is {when}, where "
            holds = nearest if run else "The checkpoints differ: "
        return Verdict.DIVERGED, f"{holds}{differs[0]}.", [*differs[1:], *doubts, *lines]
    if doubts:
        return Verdict.UNDECIDED, f"Could not tell: {'; '.join(doubts)}; all else is equal.", lines
    changed = ", in part in another form" if any(one.words is not _EQUAL for one in differences.forms) else ""
    parts = [count(number, *words) for kinds, *words in _GROUPS if (number := sum(counts[kind] for kind in kinds))]
    equal = f"agree, {within:,} of them only within the tolerance or noise given" if within else "are equal"
    return Verdict.SAME, f"{holds}{changed}: all {listed(parts)} {equal}.", lines


def _clauses(differences: Differences, runs: tuple[Run, Run]) -> list[str]:
    """Clauses on tensors that differ: values by group of kinds, other shapes, then what one lacks.

    Of other element types, whether all are the other's values rounded; that reads these tensors.
    """
    clauses, by_how = list[str](), defaultdict[str, list[Divergence]](list)
    for tensor in differences.tensors:
        by_how[_how(tensor)].append(tensor)
    for kinds, *words in _GROUPS:
        if members := [tensor for tensor in by_how["value"] if tensor.site.kind in kinds]:
            total, rounds = sum(differences.counts[kind] for kind in kinds), _are_rounded(runs, members)
            text = f"{len(members):,} of {count(total, *words)} differ{'s' * (len(members) == 1)}: {_names(members)}"
            clauses.append(f"{text}{', the same values rounded, element by element' * rounds}")
    for how in ("shape", "a", "b"):
        lacks = f"{OTHER.get(how)} lacks {count(len(by_how[how]), 'tensor')} of {how}"
        clauses += [f"{'other shapes' if how == 'shape' else lacks}: {_names(by_how[how])}"] if by_how[how] else []
    return clauses


def _names(tensors: Iterable[Divergence]) -> str:
    """The first three names and the number of others; an optimizer state is `exp_avg of fc.weight`."""
    sites = (tensor.site for tensor in tensors)
    names = [f"{key_of(site.path)} of {site.fqn}" if site.path else site.fqn for site in sites]
    return some(names)
