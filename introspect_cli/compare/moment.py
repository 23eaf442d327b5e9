"""A run compared with a checkpoint: the moment at which the run had the checkpoint's values.

Of all moments at which a run recorded its parameters (when it began, after each recorded step), the one with most of
the checkpoint's checksums. Where no checksum is shared, as for another element type, the moment whose tensors are
nearest to those with the same names. The run's state at that moment is written as a checkpoint, and the two are
compared.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.table import Layouts, distances, relative
from introspect_cli.errors import StoreError
from introspect_cli.labels import step_words
from introspect_cli.records import Kind, Phase, Site, Summary
from introspect_cli.store.whole import WholeReader
from introspect_cli.texts import begin_alike

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from introspect_cli.compare.result import DiffOptions
    from introspect_cli.store.reader import Reader
    from introspect_cli.store.run import Run


TensorName = tuple[str, str, str]
"""Kind, FQN and path."""

_PHASES = {Phase.START: "before", Phase.OPTIMIZER: "after"}
MODEL = (Kind.PARAM, Kind.BUFFER)
_KINDS = frozenset(kind.value for kind in (*MODEL, Kind.OPTIMIZER_STATE))


@dataclass(eq=False)
class State:
    """The last recorded value of each of a run's tensors at a moment, as arrays with an element per tensor.

    Attributes:
        tensors: kind, FQN and path of each.
        checksum: uint64, 0 where none was recorded yet.
        step: int64, number of the step of the record.
        row: int64, its row in that step.
    """

    tensors: list[TensorName]
    checksum: Any
    step: Any
    row: Any

    def copy(self) -> State:
        """A copy that later moments do not change."""
        return State(self.tensors, self.checksum.copy(), self.step.copy(), self.row.copy())

    @cached_property
    def of_optimizer(self) -> Any:
        """Mask of the tensors that are optimizer state."""
        return np.array([kind == Kind.OPTIMIZER_STATE.value for kind, _, _ in self.tensors], np.bool_)


Moment = tuple[int, str]
"""A step, and `before` or `after` it."""


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


def _moments(reader: Reader) -> Iterator[tuple[Moment, State]]:
    """Each moment at which tensors were recorded, with the run's state then; reads all steps, one after the other.

    Of a step, before it first, then after it. Records without a checksum change nothing. The state is one object, which
    later moments change: copy it to keep it.
    """
    sites = reader.sites
    numbers: dict[TensorName, int] = {}
    of_site = np.array(
        [
            numbers.setdefault((kind, fqn, path), len(numbers)) if kind in _KINDS else -1
            for kind, fqn, path in zip(sites.kind, sites.fqn, sites.path, strict=True)
        ],
        np.int64,
    )
    at = {phase: np.array([site == phase.value for site in sites.phase], np.bool_) for phase in _PHASES}
    blank = np.zeros(len(numbers), np.int64)
    now = State(list(numbers), np.zeros(len(numbers), np.uint64), blank.copy(), blank.copy())
    for step in np.asarray(reader.entries["step"]).tolist():
        batch = reader.read(step)
        site, checksums = batch.site.astype(np.int64), batch.checksum
        for phase, when in _PHASES.items():
            rows = np.flatnonzero((of_site[site] >= 0) & at[phase][site] & (checksums != 0))
            if len(rows):
                ids = of_site[site[rows]]
                now.checksum[ids], now.step[ids], now.row[ids] = checksums[rows], step, rows
                yield (step, when), now


# --- which moment


def _choose_moment(reader: Reader, checkpoint: Run, called: str) -> tuple[Moment, State]:
    """The moment that matches the checkpoint, and the run's state then.

    Most equal checksums of the model decide, else of the optimizer, else the earlier moment. Where less than half of
    the model match, or all of several moments match alike but not entirely, `_nearest` decides.

    Args:
        reader: of the run.
        checkpoint: the checkpoint.
        called: the run's path, for the message.

    Raises:
        StoreError: the run has no parameters on record.
    """
    held = _checksums_held(checkpoint)
    goal, beside = (
        np.array(
            [checksum for (kind, _, _), checksum in held.items() if (kind == Kind.OPTIMIZER_STATE.value) is wanted],
            np.uint64,
        )
        for wanted in (False, True)
    )
    scores: dict[Moment, tuple[int, int]] = {}
    best: tuple[Moment, State] | None = None
    for moment, state in _moments(reader):
        model, states = state.checksum[~state.of_optimizer], state.checksum[state.of_optimizer]
        scores[moment] = int(np.isin(goal, model).sum()), int(np.isin(beside, states).sum())
        if best is None or scores[moment] > scores[best[0]]:
            best = moment, state.copy()
    if best is None or not (best[1].checksum[~best[1].of_optimizer] != 0).any():
        raise StoreError(f"{called} has no parameters on record: no step of it can be compared with a checkpoint")
    most = scores[best[0]][0]
    decided = len({score[0] for score in scores.values()}) > 1 and 2 * most >= len(goal)
    return best if decided or most == len(goal) or len(scores) == 1 else _nearest(reader, checkpoint, best)


def _checksums_held(checkpoint: Run) -> dict[TensorName, int]:
    """Checksums of a checkpoint's parameters, buffers and optimizer states by (kind, FQN, path); 0 is left out."""
    reader = checkpoint.rank(0)
    batch, sites = reader.read_row(0), reader.sites
    pairs = zip(batch.site.tolist(), batch.checksum.tolist(), strict=True)
    return {
        (sites.kind[number], sites.fqn[number], sites.path[number]): checksum
        for number, checksum in pairs
        if sites.kind[number] in _KINDS and checksum
    }


def _nearest(reader: Reader, checkpoint: Run, otherwise: tuple[Moment, State]) -> tuple[Moment, State]:
    """The moment with the least mean relative L2 to the checkpoint's model tensors of the same names; reads all steps.

    Names are the same after a common prefix is changed.

    Args:
        reader: of the run.
        checkpoint: the checkpoint.
        otherwise: the answer where no distance is finite.
    """
    other = checkpoint.rank(0)
    batch, kinds = other.read_row(0), {kind.value for kind in MODEL}
    rows = {
        other.sites.fqn[number]: row
        for row, number in enumerate(batch.site.tolist())
        if other.sites.kind[number] in kinds
    }
    change = prefixes([fqn for kind, fqn, _ in otherwise[1].tensors if kind in kinds], rows)
    layouts = Layouts(reader.layouts), Layouts(other.layouts)
    partner = np.array(
        [
            rows.get(with_prefix_changed(fqn, change), -1) if kind in kinds else -1
            for kind, fqn, _ in otherwise[1].tensors
        ]
    )
    best, least = otherwise, np.inf
    for moment, state in _moments(reader):
        shared = np.flatnonzero((partner >= 0) & (state.checksum != 0))
        distances_of_steps = [
            relative(*distances(reader.read(int(step)), batch, state.row[of_step], partner[of_step], *layouts))
            for step in sorted(set(state.step[shared].tolist()))
            if len(of_step := shared[state.step[shared] == step])
        ]
        every = np.concatenate(distances_of_steps) if distances_of_steps else np.zeros(0)
        finite = every[np.isfinite(every)]
        if len(finite) and finite.mean() < least:
            best, least = (moment, state.copy()), float(finite.mean())
    return best


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
    names = [fqn for (kind, fqn, _) in _checksums_held(checkpoint) if kind == Kind.OPTIMIZER_STATE.value]
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


def _records_at(reader: Reader, state: State, checkpoint: Run, run: Run) -> dict[Site, Summary]:
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
    theirs = {fqn: kind for (kind, fqn, _) in _checksums_held(checkpoint) if kind != Kind.OPTIMIZER_STATE.value}
    mine = [fqn for kind, fqn, _ in state.tensors if kind != Kind.OPTIMIZER_STATE.value]
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
        of_optimizer = kind == Kind.OPTIMIZER_STATE.value
        name = numbers.get(fqn, fqn) if of_optimizer else fqn
        called = Kind(kind if of_optimizer else theirs.get(with_prefix_changed(fqn, change), kind))
        rows[Site(Phase.START, called, name, 0, path)] = record.summary
    return rows
