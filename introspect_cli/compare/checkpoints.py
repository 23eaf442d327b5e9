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
from functools import cache
from itertools import chain, compress, permutations, product
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.ledger import TENSORS, At, Moment, ledgers, tensor_of
from introspect_cli.compare.measure import Layouts, Moments, Records, distances, moments, relative, same_numbers
from introspect_cli.compare.names import grouped, owner_of, strip_wrappers
from introspect_cli.compare.outcome import star
from introspect_cli.compare.result import DiffResult, Divergence, Verdict
from introspect_cli.compare.say import listed, some, tensor_name
from introspect_cli.compare.settings.hyperparameters import OPTIMIZERS, optimizers_by_name
from introspect_cli.compare.table import KINDS, OTHER, columns
from introspect_cli.errors import StoreError
from introspect_cli.labels import step_words
from introspect_cli.records import KIND_CODES, Kind, Phase, Site, Status, Summary
from introspect_cli.store.tasks import as_one
from introspect_cli.texts import begin_alike, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from introspect_cli.compare.measure import Ids
    from introspect_cli.compare.outcome import RankOutcome
    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.compare.table import Columns
    from introspect_cli.store.reader import Reader
    from introspect_cli.store.run import Run


_STATE = KIND_CODES[Kind.OPTIMIZER_STATE]


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
    held, beside = _moment_of(checkpoint), At.first(reader, columns(reader.sites))
    if not beside.sites.are(*TENSORS).any():
        raise StoreError(f"{run.path} has no parameters on record: no step of it can be compared with a checkpoint")
    partners, root = _partners(beside.sites, held)
    (step, when), state = _choose_moment(beside, held, partners)
    named = step_words(step, reader.labels.get(step, {}))
    about = {"moment": f"after {named}" if when == "after" else f"when {named} begins"}
    records = _records(beside, state, held, partners, root, _numbered_names(run, held, root))
    moment = write(records, run.path, {}, {"checkpoint": about, "not_observed": []})
    checkpoint.on_close(moment.close)
    return (moment, b) if run is a else (a, moment)


def _moment_of(checkpoint: Run) -> At:
    """The one step of a checkpoint."""
    reader = checkpoint.rank(0)
    return At.first(reader, columns(reader.sites))


# --- which moment


def _choose_moment(run: At, held: At, partners: Ids) -> tuple[Moment, Any]:
    """The moment that matches the checkpoint, and the run's ledger then; reads all steps twice.

    That with most equal checksums, if it has half. Of several, or of all where none has, the one whose tensors are
    nearest to those of the same names, then the earliest.

    Args:
        run: any step of the run.
        held: the checkpoint.
        partners: the checkpoint's row of each of the run's sites.
    """
    every = run.sites.are(Kind.OPTIMIZER_STATE).any()
    goal = np.array([checksum for (kind, _, _), checksum in held.tensors().items() if every or kind != _STATE])
    scores = {moment: int(np.isin(goal, of["checksum"]).sum()) for moment, of in ledgers(run.reader, run.sites)}
    most = max(scores.values())
    rivals = {moment for moment, equal in scores.items() if equal == most or 2 * most < len(goal)}
    nearest = ((moment, of.copy()) for moment, of in ledgers(run.reader, run.sites) if moment in rivals)
    return min(nearest, key=lambda at: _distance(run.later(at[0][0] - run.step), at[1], held, partners))


def _distance(run: At, state: Any, held: At, partners: Ids) -> float:
    """Mean relative L2 of what a run recorded last, in this step, from the checkpoint's model tensors.

    Infinite where no distance is finite.
    """
    sites = np.flatnonzero((state["step"] == run.step) & (state["checksum"] != 0) & (partners >= 0))
    pairs = (run, state["row"][sites]), (held, partners[sites])
    rel = relative(*distances(*(Records(at.batch, rows, Layouts(at.reader.layouts)) for at, rows in pairs)))
    return float(rel[np.isfinite(rel)].mean()) if np.isfinite(rel).any() else np.inf


def _partners(sites: Columns, held: At) -> tuple[Ids, str]:
    """(by site of a run, the row of the checkpoint's model tensor of that name, -1 for none; how such names begin).

    Names are the same after a common prefix is changed. That is a regular expression for names of the model that the
    checkpoint is of; "", which fits all, if the run has less than half of the checkpoint's names.
    """
    theirs = {fqn: row for (kind, fqn, _), row in held.tensor_rows().items() if kind != _STATE}
    mine = sites.are(*TENSORS)
    change = prefix_change({*compress(sites.fqn, mine.tolist())}, theirs)
    partners = np.where(mine, [theirs.get(re.sub(*change, name), -1) for name in sites.fqn], -1)
    shared = len(np.unique(partners[partners >= 0]))
    return partners, change[0] if 2 * shared >= len(theirs) and change[0] != _OF_A_MODEL else ""


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
    one, two = ({fqn for kind, fqn, _ in _moment_of(run).tensors() if KINDS[kind] in TENSORS} for run in (a, b))
    fewer, change = min(len(one), len(two)), prefix_change(one, two)
    renames = not options.rename and options.by_value and 3 * len(one & two) <= fewer
    shared = sum(re.sub(*change, name) in two for name in one)
    return replace(options, rename=(change,)) if renames and 2 * shared >= fewer else options


def prefix_change(names: Iterable[str], others: Iterable[str]) -> tuple[str, str]:
    """(regular expression, replacement) of the prefix by which most names differ from names in `others`.

    These are names with equal components at their ends, at least two (one, where that is the other's whole name). One
    that changes nothing where there are none.
    """
    ends = grouped((tuple(parts[-2:]), parts) for parts in (name.split(".") for name in others))
    votes: Counter[tuple[str, str]] = Counter()
    for parts in (name.split(".") for name in names):
        for theirs in ends.get(tuple(parts[-2:]), ends.get((parts[-1],), [])):
            alike = begin_alike(parts[::-1], theirs[::-1])
            votes[".".join(parts[:-alike]), ".".join(theirs[:-alike])] += 1
    old, new = max(sorted(votes), key=votes.__getitem__, default=("", ""))
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
    names = [fqn for kind, fqn, _ in held.tensors() if kind == _STATE]
    heads = {owner_of(name) if name.rpartition(".")[2].isdecimal() else "" for name in names}
    optimizers = optimizers_by_name(run.settings.get(OPTIMIZERS)).values()
    of_model = [held for held in optimizers if held and all(re.match(root, name) for name in held)]
    if len(heads) != 1 or "" in heads or len(of_model) != 1:
        return {}
    return {name: f"{head}.{number}" for head in heads for number, name in enumerate(of_model[0])}


def _records(run: At, state: Any, held: At, partners: Ids, root: str, numbers: dict[str, str]) -> dict[Site, Summary]:
    """The run's state at a moment as records of a checkpoint, by site; reads their steps.

    Parameters and buffers get the kind they have in the checkpoint, optimizer states the numbers they have there. All
    get the phase `start`.

    Args:
        run: any step of the run.
        state: the run's ledger at the moment.
        held: the checkpoint.
        partners: the checkpoint's row of each of the run's sites.
        root: a regular expression for the beginning of names of the checkpoint's model; others are left out.
        numbers: by parameter, its number in the checkpoint's optimizer state.
    """
    kinds = np.where(partners < 0, run.sites.kind, held.sites.kind[held.batch.site[partners]])  # -1 is any row
    read, records = cache(run.reader.read), dict[Site, Summary]()
    for number in np.flatnonzero(state["checksum"]).tolist():
        (kind, fqn, path), (_, step, row) = tensor_of(run.sites, number), state[number].tolist()
        if re.match(root, fqn):
            name = numbers.get(fqn, fqn) if kind == _STATE else fqn
            site = Site(Phase.START, KINDS[kinds[number]], name, 0, path)
            records[site] = run.reader.record(read(step), row, step).summary
    return records


# --- the answer


_GROUPS = (
    (TENSORS, "tensor of the model", "tensors of the model"),
    ((Kind.OPTIMIZER_STATE,), "value of the optimizer state", "values of the optimizer state"),
    ((Kind.RNG,), "random state", "random states"),
)


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
    rename = outcome.match.rename or strip_wrappers
    named = [
        {(one.site.kind, change(one.site.fqn), one.site.path): one.summary for one in each.rank(0).records(0)}
        for change, each in zip((rename, strip_wrappers), runs, strict=True)
    ]
    kinds = [{kind for kind, fqn, _ in each if asked.wants(kind, fqn)} for each in named]
    counts = Counter(kind for kind, fqn, _ in named[0].keys() & named[1].keys() if asked.wants(kind, fqn))
    checkpoints = {side: each.manifest["checkpoint"] for side, each in zip("ab", runs, strict=True)}
    moment, run = max((str(about.get("moment", "")), side) for side, about in checkpoints.items())  # "" if neither is
    tensors = sorted((one for one in outcome.listed if one.site.kind in kinds[0] & kinds[1]), key=_listing_order)
    left = [one for one in tensors if one.site.kind in TENSORS and _how(one) != "value"]
    models = [{fqn: summary for (kind, fqn, _), summary in each.items() if kind in TENSORS} for each in named]
    forms = forms_of(runs, models, [[one.site.fqn for one in left if one.only != side] for side in "ba"])
    settled = [names for of_form in forms.values() for names in of_form]
    counts[Kind.PARAM] += sum(len(of_a) for of_a, of_b in settled if of_a != of_b)
    found = set(chain.from_iterable(chain.from_iterable(settled)))
    tensors = [one for one in tensors if one not in left or one.site.fqn not in found]
    unrecorded = [one for one in tensors if moment and one.only and (one.only, one.site.kind) != (run, Kind.PARAM)]
    tensors = [one for one in tensors if one not in unrecorded]
    doubts, evidence, own = list[str](), list[str](), {rename(fqn): fqn for fqn in runs[0].rank(0).sites.fqn}
    if unread := max(sum(one.status is Status.NOT_OBSERVED for one in each.values()) for each in named):
        doubts.append(f"{unread:,} could not be read")
    for (words, proven), [(of_a, of_b), *others] in forms.items():
        text = words.format(a=" + ".join(own[name] for name in of_a), b=" + ".join(of_b))
        text += f" (and {len(others):,} more so)" if others else ""
        (evidence if proven else doubts).append(text if proven else f"{text}{_UNPROVEN}")
    evidence += [f"not compared, because only one side recorded it: {_names(unrecorded)}"] if unrecorded else []
    for side, alone in (("a", kinds[0] - kinds[1]), ("b", kinds[1] - kinds[0])):
        names = sorted(kind.several for kind in alone)
        evidence += [f"only {side} holds {listed(names)}: not compared"] if names else []
    differs, within = _clauses(tensors, counts), outcome.tally["within"]
    equal = f"agree, {within:,} of them only within the tolerance or noise given" if within else "are equal"
    if not counts.total():
        verdict, sentence = Verdict.UNDECIDED, "Could not tell: the checkpoints have no kind of tensor in common."
    elif differs:
        nearest = f"At no recorded step has run {run} all tensors of the checkpoint: nearest is {moment}, where "
        apart = nearest if moment else "The checkpoints differ: "
        if any(map(counts.get, TENSORS)) and not doubts and all(one.site.kind not in TENSORS for one in tensors):
            apart = f"The models {equal}{moment and f' {moment}'}, but "
        verdict, sentence, evidence = Verdict.DIVERGED, f"{apart}{differs[0]}.", [*differs[1:], *doubts, *evidence]
    elif doubts:
        verdict, sentence = Verdict.UNDECIDED, f"Could not tell: {'; '.join(doubts)}; all else is equal."
    else:
        parts = [count(number, *words) for kinds, *words in _GROUPS if (number := sum(counts[kind] for kind in kinds))]
        changed = ", in part in another form" * any(words is not _EQUAL for words, _ in forms)
        of_run = f"Checkpoint {OTHER[run]} has what run {run} has {moment}"
        holds = of_run if moment else "The checkpoints hold the same"
        verdict, sentence = Verdict.SAME, f"{holds}{changed}: all {listed(parts)} {equal}."
    renamed = [f"{old} is {new} in b" for new, old in own.items() if new != old and new in models[1]]
    evidence += [f"names differ: {some(renamed)}"] if renamed and not moment else []
    first = tuple(tensors[:1]) if verdict is Verdict.DIVERGED else ()
    # what the files do not tell; not what captures of runs leave out
    notes = (f"{name}: {text}." for name, run in zip("ab", runs, strict=True) for text in run.manifest["not_observed"])
    plain = DiffResult(answer.a, answer.b, verdict, sentence, settings=answer.settings, subject="checkpoints")
    return replace(
        plain,
        evidence=tuple(evidence),
        first=first[0] if first else None,
        candidates=first,
        divergences=tuple(tensors if asked.whole_step else tensors[: asked.limit]),
        notes=tuple(notes),
        counts=answer.counts._replace(diverged=len(tensors)),
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
    return ("shape", "a", "b", "value").index(how), tensor.site.kind not in TENSORS, single, -(tensor.rel_l2 or 0.0)


# --- the same in another form


Forms = dict[tuple[str, bool], list[tuple[tuple[str, ...], tuple[str, ...]]]]
"""By the words for a form, and whether it is proven by the elements (else by extrema and moments): (names of tensors of
a, in b's words, names of those of b that they are)."""

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


def forms_of(runs: tuple[Run, Run], models: Sequence[Mapping[str, Summary]], left: Sequence[Sequence[str]]) -> Forms:
    """Tensors that are in the other checkpoint under another name, in another shape, or in parts; reads tensors.

    First those of equal bits, the n-th of a with the n-th of b, or with one that is paired already (tied); then one or
    several that follow one another and have the moments of one of the other. Constants have no moments.

    Args:
        runs: the checkpoints a and b.
        models: parameters and buffers of each, by b's names.
        left: names that the other lacks, or has in another shape, of a and of b.
    """
    found: Forms = defaultdict(list)
    free = [dict.fromkeys(names) for names in left]
    known = [{name: of for name, one in each.items() if (of := moments(one)) and of.low != of.high} for each in models]
    wanted = [[name for name in models[side] if name in free[side] or name in known[side]] for side in (0, 1)]
    alike = [grouped((models[side][name].checksum, name) for name in wanted[side]) for side in (0, 1)]

    def add(side: int, parts: Sequence[str], whole: str, words: str, *, proven: bool = True) -> None:
        """Add the form of tensors of one side (0 for a, 1 for b) that are one of the other."""
        names = tuple(parts), (whole,)
        found[words, proven].append((names[side], names[1 - side]))
        for name in parts:
            free[side].pop(name, None)
        free[1 - side].pop(whole, None)

    for side in (0, 1):
        for name in [*free[side]]:
            equal = alike[1 - side][models[side][name].checksum]
            if whole := max(equal, key=free[1 - side].__contains__, default=""):
                add(side, [name], whole, _EQUAL)
    for side in (0, 1):
        mine, theirs = known[side], known[1 - side]
        index = grouped((theirs[name][:4], name) for name in free[1 - side] if name in theirs)
        for names in _neighbours([*filter(mine.__contains__, free[side])]):
            columns = zip(*(mine[name] for name in names), strict=True)
            joined = Moments(*(of(column) for of, column in zip(_OF_PARTS, columns, strict=True)))
            for whole in index[joined[:4]]:
                if free[side].keys() >= {*names} and whole in free[1 - side] and same_numbers(joined, theirs[whole]):
                    pieces = [runs[side].tensor(models[side][name].checksum) for name in names]
                    target = runs[1 - side].tensor(models[1 - side][whole].checksum)
                    read = target is not None and all(piece is not None for piece in pieces)
                    order = _order_of(pieces, target) if read else range(len(names))
                    if order is not None:
                        words = _MERGED if len(names) > 1 else _TURNED
                        add(side, [names[at] for at in order], whole, words, proven=read)
    return found


def _neighbours(names: Iterable[str]) -> Iterator[list[str]]:
    """1 to `_MAX_PARTS` tensors of one name that follow one another, and whose modules have one parent.

    As `attn.q.weight`, `attn.k.weight`. Of one parent's, single ones come first.
    """
    families = grouped(((owner_of(owner_of(name)), name.rpartition(".")[2]), name) for name in names)
    for members, length in product(families.values(), range(1, _MAX_PARTS + 1)):
        for start in range(len(members) - length + 1):
            yield members[start : start + length]


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
    clauses = list[str]()
    for kinds, *words in _GROUPS:
        if members := [tensor for tensor in tensors if tensor.site.kind in kinds and _how(tensor) == "value"]:
            of = count(sum(counts[kind] for kind in kinds), *words)
            clauses.append(f"{len(members):,} of {of} differ{'s' * (len(members) == 1)}: {_names(members)}")
    for how in ("shape", "a", "b"):
        if members := [tensor for tensor in tensors if _how(tensor) == how]:
            lacks = f"{OTHER.get(how)} lacks {count(len(members), 'tensor')} of {how}"
            clauses.append(f"{'other shapes' if how == 'shape' else lacks}: {_names(members)}")
    return clauses


def _names(tensors: Iterable[Divergence]) -> str:
    """The first three names and the number of others; an optimizer state is `exp_avg of fc.weight`.

    Names that differ in numbers alone are one, with `*` for these.
    """
    names = (tensor_name(tensor.site.fqn, tensor.site.path) for tensor in tensors)
    alike = grouped((star(name), name) for name in names)
    return some([names[0] if len(names) == 1 else pattern for pattern, names in alike.items()])
