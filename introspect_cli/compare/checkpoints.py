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
from introspect_cli.compare.outcome import star
from introspect_cli.compare.result import DiffResult, Divergence, Verdict
from introspect_cli.compare.say import key_of, listed, some
from introspect_cli.compare.table import KINDS, OTHER, columns, kind_code
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

    That with most equal checksums, if it has half. Of several, or of all where none has, the one whose tensors are
    nearest to those of the same names, then the earliest.

    Args:
        reader: of the run.
        held: the checkpoint.
        called: the run's path, for the message.

    Raises:
        StoreError: the run has no parameters on record.
    """
    sites = columns(reader.sites)
    if not sites.are(*MODEL).any():
        raise StoreError(f"{called} has no parameters on record: no step of it can be compared with a checkpoint")
    every = sites.are(Kind.OPTIMIZER_STATE).any()
    goal = np.array([checksum for (kind, _, _), checksum in held.tensors().items() if every or kind != _STATE])
    scores = {moment: int(np.isin(goal, state.checksum).sum()) for moment, state in ledgers(reader, sites)}
    most = max(scores.values())
    rivals = [moment for moment, equal in scores.items() if equal == most or 2 * most < len(goal)]
    best = min(rivals, key=lambda moment: _distance_at(moment, At(reader, sites, moment[0]), held))
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

    Divergences are listed up to the limit asked for; of the answer as runs, settings and counts are kept. Tensors in
    other forms are matched, which reads them. Where one side is a moment of a run, what one side alone has may not have
    been recorded, and is not compared, but for parameters of the run.

    Args:
        answer: of the comparison as runs.
        runs: the checkpoints a and b.
        asked: the options as the user gave them.
        outcome: of their only rank.
    """
    rename = outcome.match.rename or str
    changes: tuple[Callable[[str], str], ...] = rename, str
    named = [
        {(one.site.kind, change(one.site.fqn), one.site.path): one.summary for one in each.rank(0).records(0)}
        for change, each in zip(changes, runs, strict=True)
    ]
    kinds = [{kind for kind, fqn, _ in each if asked.wants(kind, fqn)} for each in named]
    moments_of = [str(each.manifest["checkpoint"].get("moment", "")) for each in runs]
    run = next((side for side, moment in zip("ab", moments_of, strict=True) if moment), "")
    tensors = sorted((one for one in outcome.listed if one.site.kind in kinds[0] & kinds[1]), key=_listing_order)
    left = [one for one in tensors if one.site.kind in MODEL and _how(one) != "value"]
    models = [{fqn: summary for (kind, fqn, _), summary in each.items() if kind in MODEL} for each in named]
    forms = forms_of(runs, models, [[one.site.fqn for one in left if one.only != side] for side in "ba"])
    settled = {name for form in forms for name in (*form.a, *form.b)}
    tensors = [one for one in tensors if one not in left or one.site.fqn not in settled]
    unrecorded = [one for one in tensors if run and one.only and (one.only, one.site.kind) != (run, Kind.PARAM)]
    tensors = [one for one in tensors if one not in unrecorded]
    counts = Counter(kind for kind, fqn, path in named[0] if (kind, fqn, path) in named[1] and asked.wants(kind, fqn))
    counts[Kind.PARAM] += sum(len(form.a) for form in forms if form.a != form.b)
    differs, doubts, evidence = _clauses(tensors, counts), list[str](), list[str]()
    if unread := max(sum(one.status is Status.NOT_OBSERVED for one in each.values()) for each in named):
        doubts.append(f"{unread:,} could not be read")
    own = {rename(fqn): fqn for fqn in runs[0].rank(0).sites.fqn}
    alike = defaultdict[tuple[str, bool], list[Form]](list)
    for form in forms:
        alike[form.words, form.proven].append(form)
    for (words, proven), [form, *others] in alike.items():
        text = words.format(a=" + ".join(own[name] for name in form.a), b=" + ".join(form.b))
        text += f" (and {len(others):,} more so)" if others else ""
        (evidence if proven else doubts).append(text if proven else f"{text}{_UNPROVEN}")
    evidence += [f"not compared, because only one side recorded it: {_names(unrecorded)}"] if unrecorded else []
    for side, alone in (("a", kinds[0] - kinds[1]), ("b", kinds[1] - kinds[0])):
        names = [kind.several for kind in _KINDS if kind in alone]
        evidence += [f"only {side} holds {listed(names)}: not compared"] if names else []
    within, moment = outcome.tally["within"], max(moments_of)
    models_of = [kind.several for kind in MODEL if counts[kind]]
    if not counts.total():
        verdict, sentence = Verdict.UNDECIDED, "Could not tell: the checkpoints have no kind of tensor in common."
    elif differs:
        agree = f"The models {'agree' if within else 'are equal'}{f' {moment}' if run else ''}, but "
        nearest = f"At no recorded step has run {run} all tensors of the checkpoint: nearest is {moment}, where "
        model_differs = doubts or not models_of or any(one.site.kind in MODEL for one in tensors)
        apart = nearest if run else "The checkpoints differ: "
        verdict, sentence = Verdict.DIVERGED, f"{apart if model_differs else agree}{differs[0]}."
        evidence = [*differs[1:], *doubts, *evidence]
    elif doubts:
        verdict, sentence = Verdict.UNDECIDED, f"Could not tell: {'; '.join(doubts)}; all else is equal."
    else:
        of_run = f"Checkpoint {OTHER.get(run)} has the {listed(models_of)} that run {run} has {moment}"
        holds = of_run if run and models_of else f"The checkpoints {'agree' if within else 'hold the same'}"
        parts = [count(number, *words) for kinds, *words in _GROUPS if (number := sum(counts[kind] for kind in kinds))]
        equal = f"agree, {within:,} of them only within the tolerance or noise given" if within else "are equal"
        changed = ", in part in another form" * any(one.words is not _EQUAL for one in forms)
        verdict, sentence = Verdict.SAME, f"{holds}{changed}: all {listed(parts)} {equal}."
    there = {*runs[1].rank(0).sites.fqn}
    renamed = [f"{old} is {new} in b" for new, old in own.items() if new != old and new in there]
    if renamed and not run:
        evidence.append(f"names differ: {some(renamed)}")
    first = tuple(tensors[:1]) if verdict is Verdict.DIVERGED else ()
    # what the files do not tell; not what captures of runs leave out
    notes = (f"{name}: {text}." for name, run in zip("ab", runs, strict=True) for text in run.manifest["not_observed"])
    return DiffResult(
        answer.a,
        answer.b,
        verdict,
        sentence,
        evidence=tuple(evidence),
        first=first[0] if first else None,
        candidates=first,
        divergences=tuple(tensors if asked.whole_step else tensors[: asked.limit]),
        settings=answer.settings,
        notes=tuple(notes),
        counts=answer.counts._replace(diverged=len(tensors)),
        subject="checkpoints",
    )


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
        proven: whether the elements were compared, and are the same; else extrema and moments are.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    words: str
    proven: bool = True


_EQUAL = "{a} of a equals {b} of b"
_TURNED = "{a} of a is {b} in b, transposed or in another shape"
_MERGED = "{a} of a, put together, is {b} in b"
_UNPROVEN = "; by extrema and moments, its elements were not compared"
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

    First those of equal bits, the n-th of a with the n-th of b, or with one that is paired already (tied); then one or
    several that follow one another and have the moments of one of the other. Constants have no moments.

    Args:
        runs: the checkpoints a and b.
        models: parameters and buffers of each, by b's names.
        left: names that the other lacks, or has in another shape, of a and of b.
    """
    found, free = list[Form](), [dict.fromkeys(names) for names in left]
    sums = [{name: moments(summary) for name, summary in each.items()} for each in models]
    known = [{name: of for name, of in each.items() if of and of.low != of.high} for each in sums]
    alike: list[dict[int, list[str]]] = [defaultdict(list), defaultdict(list)]
    for side, each in enumerate(models):
        for name, summary in each.items():
            if name in free[side] or name in known[side]:
                alike[side][summary.checksum].append(name)

    def add(side: int, parts: Sequence[str], whole: str, words: str, *, proven: bool = True) -> None:
        """Add the form of tensors of one side (0 for a, 1 for b) that are one of the other."""
        names = tuple(parts), (whole,)
        found.append(Form(names[side], names[1 - side], words, proven))
        for name in parts:
            free[side].pop(name, None)
        free[1 - side].pop(whole, None)

    for side in (0, 1):
        for name in [*free[side]]:
            others = alike[1 - side][models[side][name].checksum]
            if whole := min(others, key=lambda other: other not in free[1 - side], default=""):
                add(side, [name], whole, _EQUAL)
    for side in (0, 1):
        parts, wholes = ({name: known[of][name] for name in free[of] if name in known[of]} for of in (side, 1 - side))
        for names, whole in _merges(parts, wholes):
            pieces = [runs[side].tensor(models[side][name].checksum) for name in names]
            target = runs[1 - side].tensor(models[1 - side][whole].checksum)
            read = target is not None and all(piece is not None for piece in pieces)
            order = _order_of(pieces, target) if read else range(len(names))
            if order is not None:
                words = _MERGED if len(names) > 1 else _TURNED
                add(side, [names[at] for at in order], whole, words, proven=read)
    return found


def _merges(parts: dict[str, Moments], wholes: dict[str, Moments]) -> Iterator[tuple[list[str], str]]:
    """1 to `_MAX_PARTS` tensors that follow one another, with the one that has their moments; each is used once.

    Candidates are tensors of one name whose modules have one parent (`attn.q.weight`, `attn.k.weight`).

    Args:
        parts: moments of one checkpoint's tensors, in order; what is yielded is taken out.
        wholes: moments of the other's; as with `parts`.
    """
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in parts:
        families[owner_of(owner_of(name)), name.rpartition(".")[2]].append(name)
    index: dict[tuple[float, ...], list[str]] = defaultdict(list)
    for name, sums in wholes.items():
        index[sums[:4]].append(name)
    for members, length in product(families.values(), range(1, _MAX_PARTS + 1)):
        for start in range(len(members) - length + 1):
            names = members[start : start + length]
            if all(name in parts for name in names):
                columns = zip(*(parts[name] for name in names), strict=True)
                sums = Moments(*(of(column) for of, column in zip(_OF_PARTS, columns, strict=True)))
                alike = (whole for whole in index[sums[:4]] if whole in wholes and same_numbers(sums, wholes[whole]))
                if whole := next(alike, ""):
                    yield names, whole
                    del wholes[whole]
                    for name in names:
                        del parts[name]


def _order_of(pieces: Sequence[Any], whole: Any) -> Sequence[int] | None:
    """The order in which pieces make the whole: concatenated, or all transposed, and reshaped; None for none.

    Of more than `_MAX_PERMUTED` pieces only the order given is tried.
    """
    given = range(len(pieces))
    for order in permutations(given) if len(pieces) <= _MAX_PERMUTED else [given]:
        for forms in ([pieces[at] for at in order], [pieces[at].T for at in order]):
            for axis in range(forms[0].ndim):
                with suppress(ValueError):  # shapes that cannot stand beside one another
                    if np.array_equal(np.concatenate(forms, axis).reshape(whole.shape), whole):
                        return order
    return None


# --- words


def _clauses(tensors: Iterable[Divergence], counts: Counter[Kind]) -> list[str]:
    """Clauses on tensors that differ: values by group of kinds, other shapes, then what one lacks."""
    clauses, by_how = list[str](), defaultdict[str, list[Divergence]](list)
    for tensor in tensors:
        by_how[_how(tensor)].append(tensor)
    for kinds, *words in _GROUPS:
        if members := [tensor for tensor in by_how["value"] if tensor.site.kind in kinds]:
            of = count(sum(counts[kind] for kind in kinds), *words)
            clauses.append(f"{len(members):,} of {of} differ{'s' * (len(members) == 1)}: {_names(members)}")
    for how in ("shape", "a", "b"):
        lacks = f"{OTHER.get(how)} lacks {count(len(by_how[how]), 'tensor')} of {how}"
        clauses += [f"{'other shapes' if how == 'shape' else lacks}: {_names(by_how[how])}"] if by_how[how] else []
    return clauses


def _names(tensors: Iterable[Divergence]) -> str:
    """The first three names and the number of others; an optimizer state is `exp_avg of fc.weight`.

    Names that differ in numbers alone are one, with `*` for these.
    """
    alike = defaultdict[str, list[str]](list)
    for site in (tensor.site for tensor in tensors):
        name = f"{key_of(site.path)} of {site.fqn}" if site.path else site.fqn
        alike[star(name)].append(name)
    return some([names[0] if len(names) == 1 else pattern for pattern, names in alike.items()])
