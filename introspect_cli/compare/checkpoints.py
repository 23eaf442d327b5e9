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
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.elements import rounded
from introspect_cli.compare.ledger import At, Ledger, Moment, Tensor, ledgers
from introspect_cli.compare.match import distinctive_values, parameters
from introspect_cli.compare.measure import ROUNDING, Layouts, Records, distances, relative, same_numbers
from introspect_cli.compare.result import (
    DiffResult,
    Divergence,
    Origin,
    SettingChange,
    Size,
    StructureChange,
    Verdict,
)
from introspect_cli.compare.resumed import steps_counted
from introspect_cli.compare.say import far, key_of, listed, some
from introspect_cli.compare.settings.differences import describe
from introspect_cli.compare.table import KINDS, columns, kind_code
from introspect_cli.errors import StoreError
from introspect_cli.labels import step_words
from introspect_cli.records import Kind, Phase, Site, Status, Summary
from introspect_cli.store.whole import WholeReader
from introspect_cli.texts import begin_alike, count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from introspect_cli.compare.match import Value
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
    moment = _write_moment(run, checkpoint, write)
    checkpoint.on_close(moment.close)
    return (moment, b) if run is a else (a, moment)


def _write_moment(run: Run, checkpoint: Run, write: Callable[..., Run]) -> Run:
    """The moment of `run` that matches a checkpoint, chosen here and written by `write` as a checkpoint."""
    reader = _reader(run)
    (step, when), state = _choose_moment(reader, checkpoint, str(run.path))
    named = step_words(step, reader.labels.get(step, {}))
    about = {"moment": f"after {named}" if when == "after" else f"when {named} begins"}
    return write(_records_at(reader, state, checkpoint, run), run.path, {}, {"checkpoint": about, "not_observed": []})


def _reader(run: Run) -> Reader:
    """Reader of a run's lowest recorded rank; of all ranks as one where they hold parts of tensors.

    Raises:
        StoreError: no step was recorded.
    """
    if not run.recorded:
        raise StoreError(f"{run.path} has no step on record")
    readers = [run.rank(rank) for rank in run.recorded]
    parted = any(layout.part is not None for layout in readers[0].layouts)
    whole = parted and len(readers) > 1
    return WholeReader(str(run.path), readers, complete=True) if whole else readers[0]


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
    goal, beside = (
        np.array([checksum for (kind, _, _), checksum in held.items() if (kind == _STATE) is wanted], np.uint64)
        for wanted in (False, True)
    )
    scores: dict[Moment, tuple[int, int]] = {}
    for moment, state in ledgers(reader, sites):
        model, states = state.checksum[~state.of_optimizer], state.checksum[state.of_optimizer]
        if model.any():
            scores[moment] = int(np.isin(goal, model).sum()), int(np.isin(beside, states).sum())
    if not scores:
        raise StoreError(f"{called} has no parameters on record: no step of it can be compared with a checkpoint")
    best = max(scores, key=scores.__getitem__)
    most = scores[best][0]
    decided = len({score[0] for score in scores.values()}) > 1 and 2 * most >= len(goal)
    if not (decided or most == len(goal) or len(scores) == 1):
        far = {moment: _distance_at(moment, At(reader, sites, moment[0]), checkpoint) for moment in scores}
        best = min(far, key=far.__getitem__)
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
    change = prefixes(mine, theirs)
    partners = {row: theirs.get(with_prefix_changed(fqn, change), -1) for fqn, row in mine.items()}
    rows = np.array([pair for pair in partners.items() if pair[1] >= 0], np.int64).reshape(-1, 2)
    sides = (
        Records(at.batch, rows[:, 0], Layouts(at.reader.layouts)),
        Records(held.batch, rows[:, 1], Layouts(other.layouts)),
    )
    rel = relative(*distances(*sides))
    return float(rel[np.isfinite(rel)].mean()) if np.isfinite(rel).any() else np.inf


# --- names


OF_A_MODEL = r"^(?!(?:[^.]+\.\d+|torch|python|numpy|cuda.*)$)"
"""Begins names that are neither a numbered parameter of an optimizer's nor a generator."""


def checkpoint_options(options: DiffOptions, a: Run, b: Run) -> DiffOptions:
    """Options for comparing two checkpoints: strict, with all divergences listed and no map.

    If the user gave no `rename`, and allows matching by value, one is added that changes a prefix of all names: where
    at most a third of the names is shared as they are, and at least half after the change. Both are counted in the
    checkpoint with fewer names.
    """
    options = replace(options, strict=True, limit=None, whole_step=True, want_map=False)
    names = [_names(run) for run in (a, b)]
    if options.rename or not options.by_value or 3 * len(names[0].keys() & names[1].keys()) > min(map(len, names)):
        return options
    change = old, new = prefixes(*names)
    shared = sum(with_prefix_changed(name, change) in names[1] for name in names[0])
    if old == new or 2 * shared < min(map(len, names)):
        return options
    pattern = f"^{re.escape(old)}\\." if old else OF_A_MODEL
    return replace(options, rename=((pattern, f"{new}." if new else ""),))


def _names(run: Run) -> dict[str, None]:
    """Names of parameters and buffers of a checkpoint, in order, as keys."""
    sites, kinds = run.rank(0).sites, {kind.value for kind in MODEL}
    return dict.fromkeys(fqn for fqn, kind in zip(sites.fqn, sites.kind, strict=True) if kind in kinds)


def prefixes(names: Iterable[str], others: Iterable[str]) -> tuple[str, str]:
    """(prefix in `names`, prefix in `others`) by which most names differ from their partner; ("", "") for no partners.

    A name's partner is the one name of `others` with the most equal components at its end, at least two (one, where
    that is the other's whole name). It has none where several have as many. Prefixes are without a dot at the end.
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
    return votes.most_common(1)[0][0] if votes else ("", "")


def with_prefix_changed(name: str, change: tuple[str, str]) -> str:
    """A name with the leading dotted parts `change[0]` replaced by `change[1]`; both without a dot at the end.

    `GPT` begins `GPT.head`, but neither `GPT2.head` nor `GPT` itself; a name that does not begin so is unchanged. "" as
    the first puts the second in front of every name, "" as the second drops the first.
    """
    old, new = change
    if old and not name.startswith(f"{old}."):
        return name
    rest = name[len(old) + 1 :] if old else name
    return f"{new}.{rest}" if new else rest


# --- what the run had


def _numbered_names(run: Run, checkpoint: Run, root: str) -> dict[str, str]:
    """By parameter of the run, its number in the checkpoint's optimizer state: `optimizer.3`.

    By the order in which the run's only optimizer of this model lists them. Empty where the state has names, or several
    optimizers come into question.

    Args:
        run: the run.
        checkpoint: the checkpoint.
        root: the module of the run that the checkpoint is of; "" for all.
    """
    names = [fqn for (kind, fqn, _) in _checksums_held(checkpoint) if kind == _STATE]
    heads = {name.rpartition(".")[0] for name in names}
    if not names or len(heads) != 1 or not all(name.rpartition(".")[2].isdecimal() for name in names):
        return {}
    documents = run.settings.get("optimizers", [])
    listed = [
        [str(name) for group in document.get("groups", []) for name in group.get("params", [])]
        for document in documents
        if isinstance(document, dict)
    ]
    of_model = [members for members in listed if members and all(_is_below(name, root) for name in members)]
    if len(of_model) != 1:
        return {}
    return {name: f"{next(iter(heads))}.{number}" for number, name in enumerate(of_model[0])}


def _is_below(name: str, root: str) -> bool:
    """Whether a name is inside module `root`, not that module itself; always for ""."""
    return not root or name.startswith(f"{root}.")


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
    change = prefixes(mine, theirs)
    root = change[0] if 2 * sum(with_prefix_changed(fqn, change) in theirs for fqn in mine) >= len(theirs) else ""
    numbers = _numbered_names(run, checkpoint, root)
    batches: dict[int, Any] = {}
    rows: dict[Site, Summary] = {}
    for number, (kind, fqn, path) in enumerate(state.tensors):
        if not _is_below(fqn, root) or not state.checksum[number]:
            continue
        step = int(state.step[number])
        if step not in batches:
            batches[step] = reader.read(step)
        record = reader.record(batches[step], int(state.row[number]), step)
        of_optimizer = kind == _STATE
        name = numbers.get(fqn, fqn) if of_optimizer else fqn
        called = KINDS[kind if of_optimizer else theirs.get(with_prefix_changed(fqn, change), kind)]
        rows[Site(Phase.START, called, name, 0, path)] = record.summary
    return rows


_MAX_NAMED = 3
_MAX_SETTINGS = 4
_MAX_PERMUTED = 4
"""Parts of one tensor that are put together in every order."""
_PROGRESS = re.compile(r"(^|[._])(global_step|step|steps|epoch|iteration|lr)$")
"""Settings that say how far a training is."""


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
        casts: those of another element type, by the types in a and in b.
        forms: what one has in another form than the other.
        only: what a alone has, and what b alone has.
        kinds: kinds that a alone holds, and that b alone holds.
        unread: tensors that could not be read.
        within: values that differ within the tolerance or noise given.
        run: `a` or `b`, where that is the moment of a run and no checkpoint; "" where both are checkpoints.
        moment: which moment, in words.
        unrecorded: tensors of the checkpoint that the run has not recorded, and buffers that the checkpoint lacks.
    """

    counts: Counter[Kind]
    differ: list[Divergence]
    shapes: list[Divergence]
    casts: dict[tuple[str, str], list[Divergence]]
    forms: list[TensorForm]
    only: tuple[list[Divergence], list[Divergence]]
    kinds: tuple[list[Kind], list[Kind]]
    unread: int
    within: int
    run: str = ""
    moment: str = ""
    unrecorded: list[Divergence] = field(default_factory=list)

    @property
    def every(self) -> list[Divergence]:
        """Tensors that differ, in this order: in shape, in a alone, in b alone, in value or type (farthest first).

        The last ones in the order of `_model_then_farthest`; forms and `unrecorded` are left out.
        """
        casts = [tensor for tensors in self.casts.values() for tensor in tensors]
        return [*self.shapes, *self.only[0], *self.only[1], *sorted([*self.differ, *casts], key=_model_then_farthest)]

    @property
    def verdict(self) -> Verdict:
        """UNDECIDED if no tensor is in both; else DIVERGED if anything differs (`every`) or a form is disproven.

        Else UNDECIDED if any tensor could not be read or any form is not proven; else SAME.
        """
        proofs = {form.proven for form in self.forms}
        if not self.counts.total():
            return Verdict.UNDECIDED
        if self.every or False in proofs:
            return Verdict.DIVERGED
        return Verdict.UNDECIDED if self.unread or None in proofs else Verdict.SAME

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
    verdict, every = differences.verdict, differences.every
    settings = tuple(sorted(answer.settings, key=lambda one: (not _PROGRESS.search(one.name), "sched" in one.name)))
    names = [change.text for change in answer.structure if change.change == "renamed"]
    if not asked.rename and outcome.match.patterns and not differences.run:
        names.append(_prefixed(*outcome.match.patterns[0]))
    # what the files do not tell; not what captures of runs leave out
    notes = [f"{name}: {text}." for name, run in zip("ab", runs, strict=True) for text in run.manifest["not_observed"]]
    sentence, evidence = sentence_of(differences, runs, settings)
    if names:
        more = f", and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        evidence.append(f"names differ: {'; '.join(names[:_MAX_NAMED])}{more}")
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
        settings=settings,
        first=first,
        candidates=(first,) if first is not None else (),
        divergences=tuple(every if asked.limit is None or asked.whole_step else every[: asked.limit]),
        notes=tuple(notes),
        counts=replace(answer.counts, diverged=len(every)),
        training=None,
        evaluation=None,
        strip=(),
        findings=tuple(one for one in answer.findings if not isinstance(one, (StructureChange, Origin))),
    )


def _prefixed(pattern: str, new: str) -> str:
    """Clause that names in a and b differ by a prefix.

    Args:
        pattern: regular expression of `checkpoint_options` for the prefix in a.
        new: the prefix in b; "" for none.
    """
    old = "" if pattern == OF_A_MODEL else re.sub(r"[\^\\]", "", pattern)
    if old and new:
        return f"{old} before names in a is {new} in b"
    return f"names in {'a' if old else 'b'} have {old or new} before them"


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
    in_a = {changes[0](name): name for name in runs[0].rank(0).sites.fqn}
    one, two = (_count_held(run, asked, change) for run, change in zip(runs, changes, strict=True))
    common = one.keys() & two.keys()
    every = [tensor for tensor in outcome.listed if tensor.site.kind in common]
    only = [tensor for tensor in every if tensor.only == "a"], [tensor for tensor in every if tensor.only == "b"]
    shapes = [tensor for tensor in every if len(_layouts(tensor, "shape")) > 1]
    values = list(map(_model_values, runs, changes))
    turned = {
        name
        for name in (tensor.site.fqn for tensor in shapes)
        if name in values[0] and name in values[1] and same_numbers(values[0][name].moments, values[1][name].moments)
    }
    forms = _forms_of(runs, only, values, turned)
    plain = [tensor for tensor in every if not tensor.only and len(_layouts(tensor, "shape")) == 1]
    casts: dict[tuple[str, str], list[Divergence]] = {}
    for tensor in plain:
        if tensor.a is not None and tensor.b is not None and len(_layouts(tensor, "dtype")) > 1:
            casts.setdefault((tensor.a.layout.dtype, tensor.b.layout.dtype), []).append(tensor)
    left = [
        [tensor for tensor in side if tensor.site.kind not in MODEL or tensor.site.fqn not in settled]
        for side, settled in zip(only, _settled(forms), strict=True)
    ]
    differences = Differences(
        counts=Counter(
            {kind: one[kind] - sum(tensor.site.kind is kind for tensor in only[0]) for kind in Kind if kind in common}
        ),
        differ=sorted((tensor for tensor in plain if len(_layouts(tensor, "dtype")) == 1), key=_model_then_farthest),
        shapes=[tensor for tensor in shapes if tensor.site.fqn not in turned],
        casts=casts,
        forms=[replace(form, a=tuple(in_a.get(name, name) for name in form.a)) for form in forms],
        only=(left[0], left[1]),
        kinds=([kind for kind in one if kind not in two], [kind for kind in two if kind not in one]),
        unread=max(int((run.rank(0).read_row(0).status == int(Status.NOT_OBSERVED)).sum()) for run in runs),
        within=outcome.tally["within"],
    )
    differences.counts[Kind.PARAM] += sum(len(form.a) for form in forms if form.a != form.b)
    for place, name in enumerate("ab"):
        about = runs[place].manifest["checkpoint"]
        if "moment" in about:  # what one of them alone has may not have been recorded, or not been saved
            differences.run, differences.moment = name, str(about["moment"])
            of_run, others = left[place], left[1 - place]
            differences.unrecorded = [*others, *(tensor for tensor in of_run if tensor.site.kind is not Kind.PARAM)]
            others.clear()
            of_run[:] = [tensor for tensor in of_run if tensor.site.kind is Kind.PARAM]
    return differences


def _layouts(tensor: Divergence, name: str) -> set[Any]:
    """Values of a property of layouts (`shape`, `dtype`) in a and b; one where they agree or one side has it."""
    return {getattr(side.layout, name) for side in (tensor.a, tensor.b) if side is not None}


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
    runs: tuple[Run, Run],
    only: Sequence[Sequence[Divergence]],
    values: Sequence[dict[str, Value]],
    turned: Iterable[str],
) -> list[TensorForm]:
    """Tensors that one side lacks by name, matched with tensors of the other in another form; reads these tensors.

    All names are b's.

    Args:
        runs: the checkpoints a and b.
        only: what a alone has by name, and what b alone has.
        values: the model's distinctive values of a, and of b, by name.
        turned: names under which both have the same numbers in another shape.
    """
    alone = [
        {
            tensor.site.fqn: next(side.checksum for side in (tensor.a, tensor.b) if side is not None)
            for tensor in side_only
            if tensor.site.kind in MODEL
        }
        for side_only in only
    ]
    left = [[of[name] for name in names if name in of] for of, names in zip(values, alone, strict=True)]

    def tensor(side: int, name: str) -> Any:
        """The whole tensor of a name in one checkpoint (0 for a, 1 for b); None where it cannot be read."""
        return runs[side].tensor(values[side][name].checksum)

    def is_turned(a: str, b: str) -> bool | None:
        """Whether b's tensor is a's transposed or reshaped, element by element; None where either cannot be read."""
        one, two = tensor(0, a), tensor(1, b)
        if one is None or two is None:
            return None
        forms = [one.T, one.reshape(two.shape)] if one.size == two.size else []
        return any(form.shape == two.shape and np.array_equal(form, two) for form in forms)

    matched, forms = parameters(*left), list[TensorForm]()
    for one, two in matched.pairs:
        a, b, equal = one.site.fqn, two.site.fqn, one.checksum == two.checksum
        forms.append(TensorForm((a,), (b,), "tied" if equal else "transposed", equal or is_turned(a, b)))
    for parts, whole, holder in matched.merges:
        in_b = holder == "b"
        order, proven = _joined(tensor(in_b, whole), [tensor(not in_b, name) for name in parts])
        together = tuple(parts[at] for at in order)
        forms.append(TensorForm(together if in_b else (whole,), (whole,) if in_b else together, "merged", proven))
    for side in (0, 1):  # of tied tensors one is paired, or has its name, and the others are that one, too
        others = {value.checksum: name for name, value in values[1 - side].items()}
        others |= {pair[side].checksum: pair[1 - side].site.fqn for pair in matched.pairs}
        settled = _settled(forms)[side]
        for name, other in ((value.site.fqn, others.get(value.checksum)) for value in left[side]):
            if other and name not in settled:
                a, b = (name, other) if side == 0 else (other, name)
                forms.append(TensorForm((a,), (b,), "tied", proven=True))
    rest = [
        {name: checksum for name, checksum in of.items() if name not in done}
        for of, done in zip(alone, _settled(forms), strict=True)
    ]
    constants: dict[int, list[str]] = defaultdict(list)
    for name, checksum in rest[1].items():
        constants[checksum].append(name)
    for name, checksum in rest[0].items():  # the n-th of a with the n-th of b
        if constants[checksum]:
            forms.append(TensorForm((name,), (constants[checksum].pop(0),), "constant", proven=True))
    return [*forms, *(TensorForm((name,), (name,), "transposed", is_turned(name, name)) for name in turned)]


def _model_values(run: Run, rename: Rename) -> dict[str, Value]:
    """Parameters and buffers of a checkpoint whose values are distinctive, by their names after `rename`."""
    values = [value for value in distinctive_values(run.rank(0), 0) if value.site.kind in MODEL]
    named = [replace(value, site=replace(value.site, fqn=rename(value.site.fqn))) for value in values]
    return {value.site.fqn: value for value in named}


def _settled(forms: Iterable[TensorForm]) -> tuple[set[str], set[str]]:
    """Names of a, and of b, that are among these forms."""
    return {name for form in forms for name in form.a}, {name for form in forms for name in form.b}


def _joined(whole: Any, pieces: Sequence[Any]) -> tuple[Sequence[int], bool | None]:
    """(order of the pieces, whether they make `whole` in it): concatenated along some dimension, or all transposed.

    Of more than `_MAX_PERMUTED` pieces only the order given is tried; not known (None) where any cannot be read.
    """
    in_turn = tuple(range(len(pieces)))
    if whole is None or any(piece is None for piece in pieces):
        return in_turn, None
    for order in permutations(in_turn) if len(pieces) <= _MAX_PERMUTED else [in_turn]:
        for forms in ([pieces[at] for at in order], [pieces[at].T for at in order]):
            for axis in range(whole.ndim):
                shapes = {(*form.shape[:axis], None, *form.shape[axis + 1 :]) for form in forms}
                if shapes == {(*whole.shape[:axis], None, *whole.shape[axis + 1 :])}:
                    joined = np.concatenate(forms, axis)
                    if joined.shape == whole.shape and np.array_equal(joined, whole):
                        return order, True
    return in_turn, False


def _is_rounded(runs: tuple[Run, Run], tensor: Divergence) -> bool | None:
    """Whether a's tensor is b's rounded to a's type, or the other way round, element by element.

    None where either cannot be read, or has another shape.
    """
    if tensor.a is None or tensor.b is None:
        return None
    one, two = runs[0].tensor(tensor.a.checksum), runs[1].tensor(tensor.b.checksum)
    if one is None or two is None or one.shape != two.shape:
        return None
    return any(
        coarse in ROUNDING and fine.dtype.kind == "f" and np.array_equal(rounded(fine, coarse), other, equal_nan=True)
        for fine, coarse, other in ((one, tensor.b.layout.dtype, two), (two, tensor.a.layout.dtype, one))
    )


# --- words

_GROUPS = (
    (MODEL, "tensor of the model", "tensors of the model"),
    ((Kind.OPTIMIZER_STATE,), "value of the optimizer state", "values of the optimizer state"),
    ((Kind.RNG,), "random state", "random states"),
)

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


def sentence_of(
    differences: Differences, runs: tuple[Run, Run], settings: Sequence[SettingChange]
) -> tuple[str, list[str]]:
    """(the answer in a sentence, further lines of evidence).

    Args:
        differences: how they differ.
        runs: the checkpoints a and b.
        settings: settings that differ, named where the tensors are the same.
    """
    rest, total, run = _further_lines(differences), differences.counts.total(), differences.run
    clauses = [*_differing_clauses(differences), *_cast_clauses(differences, runs)]
    if differences.shapes:
        clauses.append(some([f"{_name(tensor)} has {far(tensor)}" for tensor in differences.shapes]))
    for only, side, other in zip(differences.only, "ba", "ab", strict=True):
        if only:
            clauses.append(f"{side} lacks {count(len(only), 'tensor')} of {other}: {_first_names(only)}")
    verdict, forms = differences.verdict, differences.forms
    if not total:
        return "Could not tell: the checkpoints have no kind of tensor in common.", rest
    if verdict is Verdict.UNDECIDED:
        text = f"all that could be read is equal, but {differences.unread} could not be read"
        if doubtful := sum(form.proven is None for form in forms):
            text = f"of {count(total, 'tensor')} {doubtful:,} in another form agree by extrema and moments alone"
            text += ", the others are equal"
        return f"Could not tell: {text}.", rest
    if verdict is Verdict.SAME:
        if settings:
            rest.append(f"what differs beside them: {some([describe(change) for change in settings], _MAX_SETTINGS)}")
        form = ", in part in another form" if any(one.form not in {"tied", "constant"} for one in forms) else ""
        same = f"The checkpoints hold the same{' values' if form else ''}"
        same = "The checkpoints agree" if differences.within else same
        return f"{_moment_words(differences) if run else same}{form}: {_all_equal(differences)}.", rest
    if not clauses:  # forms that are not proven
        same = "The checkpoints hold the same numbers, in part in another order"
        return f"{same}: {_all_equal(differences)} otherwise.", rest
    lead, model_differs = clauses.pop(0), any(tensor.site.kind in MODEL for tensor in differences.every)
    text = f"The checkpoints differ: {lead}"
    if run and not model_differs:
        text = f"{_moment_words(differences)}, but {lead}"
    elif run:
        nearest = f"At no recorded step has run {run} all tensors of the checkpoint: nearest is {differences.moment}"
        text = f"{nearest}, where {lead}"
    elif not model_differs and (models := differences.of_kinds(MODEL)):
        text = f"The checkpoints differ: the models are equal ({count(models, 'tensor')}), but {lead}"
    return f"{text}.", [*clauses, *rest]


def _moment_words(differences: Differences) -> str:
    """Clause that the checkpoint agrees with the run at a moment.

    `Checkpoint a has the parameters that run b has after step 4`.
    """
    kinds = listed([kind.several for kind in MODEL if differences.counts[kind]])
    close = " within the tolerance" if differences.within else ""
    of, run = "b" if differences.run == "a" else "a", differences.run
    return f"Checkpoint {of} has the {kinds} that run {run} has {differences.moment}{close}"


def _further_lines(differences: Differences) -> list[str]:
    """Lines of evidence on other forms, on what only one side recorded, and on kinds that one side alone holds.

    One line per form and per whether it is proven, with its first example and the number of others.
    """
    lines = []
    for form, text in _FORMS.items():
        for proven, doubt in _DOUBTS.items():
            members = [each for each in differences.forms if each.form == form and each.proven is proven]
            if members:
                first = text.format(a=" + ".join(members[0].a), b=" + ".join(members[0].b))
                more = f" (and {len(members) - 1:,} more so)" if len(members) > 1 else ""
                lines.append(f"{first}{more}{doubt}")
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


def _name(tensor: Divergence) -> str:
    """A tensor's name in words: `exp_avg of layer.weight` for optimizer state, else its name and path."""
    if tensor.site.kind is Kind.OPTIMIZER_STATE:
        return f"{key_of(tensor.site.path)} of {tensor.site.fqn}"
    return f"{tensor.site.fqn}{tensor.site.path}"


def _first_names(tensors: Iterable[Divergence]) -> str:
    """The first three names, and the number of others."""
    return some([_name(tensor) for tensor in tensors])


def _differing_clauses(differences: Differences) -> list[str]:
    """Clauses on tensors whose values differ, one per group of kinds (model, optimizer state, random states).

    At most `_MAX_NAMED` tensors are named with their distances; of more, the largest relative L2 and the farthest.
    """
    clauses = []
    for kinds, one, several in _GROUPS:
        members = [tensor for tensor in differences.differ if tensor.site.kind in kinds]
        if not members:
            continue
        total, measured = differences.of_kinds(kinds), [each.rel_l2 for each in members if each.rel_l2 is not None]
        some_of = f"all {total:,}" if len(members) == total else f"{len(members):,} of {total:,}"
        subject = f"{some_of} {several}" if total > 1 else f"the {one}"
        if len(members) <= _MAX_NAMED or not measured:
            where = f": {some([_name(tensor) + _far_words(tensor) for tensor in members])}"
        else:
            small = ", the size of rounding" if all(member.size is Size.ROUNDING for member in members) else ""
            where = f", by relative L2 up to {max(measured):.1e}{small}, most in {_name(members[0])}"
        clauses.append(f"{subject} {'differs' if len(members) == 1 else 'differ'}{where}")
    return clauses


def _far_words(tensor: Divergence) -> str:
    """` (distance; number of differing elements)` of a tensor, as far as known; "" where neither is."""
    parts = [far(tensor)] if far(tensor) else []
    if tensor.elements is not None:
        parts.append(f"{tensor.elements.differing:,} of {count(tensor.elements.total, 'element')}")
    return f" ({'; '.join(parts)})" if parts else ""


def _cast_clauses(differences: Differences, runs: tuple[Run, Run]) -> list[str]:
    """Clauses on tensors whose element types differ, one per pair of types; reads these tensors.

    Each says whether all are the other's values rounded, unless some cannot be read; if not, the largest relative L2.
    """
    clauses = []
    for (a, b), tensors in differences.casts.items():
        proofs = [_is_rounded(runs, tensor) for tensor in tensors]
        number, coarse = len(tensors), max((a, b), key=lambda name: ROUNDING.get(name, 0.0))
        total = differences.of_kinds({tensor.site.kind for tensor in tensors} | set(MODEL))
        text = f"{number:,} of {total:,} tensors are" if number > 1 else f"{_name(tensors[0])} is"
        text += f" {a} in a and {b} in b"
        if all(proofs):
            text += f", the same values rounded to {coarse}, element by element"
        elif None not in proofs:
            text += f", and not all are the other's values rounded to {coarse}"
        measured = [tensor.rel_l2 for tensor in tensors if tensor.rel_l2 is not None]
        clauses.append(text if all(proofs) or not measured else f"{text} (relative L2 up to {max(measured):.1e})")
    return clauses
