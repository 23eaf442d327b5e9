"""A run beside a checkpoint: the moment at which the run had what the checkpoint holds.

Values say it, not names: of all moments at which a run recorded its parameters (when it began, after each recorded
step), the one that has most of the checkpoint's checksums. Where no checksum is shared, as of a checkpoint in another
element type, it is the moment whose tensors are nearest to those with the same names. What the run had then is written
down as a checkpoint of its own, and the two are compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.checkpoint_words import MODEL
from introspect_cli.compare.join.distance import Layouts, distances, relative
from introspect_cli.errors import StoreError
from introspect_cli.labels import step_words
from introspect_cli.records import Kind, Phase, Site
from introspect_cli.store.whole import WholeReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from introspect_cli.records import Summary
    from introspect_cli.store.reader import Run
    from introspect_cli.store.whole import Reader

Tensor = tuple[str, str, str]
"""Kind, FQN and path."""

_KINDS = frozenset(kind.value for kind in (*MODEL, Kind.OPTIMIZER_STATE))


@dataclass(frozen=True)
class _Place:
    """Where a tensor's record is: step and row."""

    step: int
    row: int
    checksum: int


State = dict[Tensor, _Place]
"""What a run had at a moment."""


def is_checkpoint(run: Run) -> bool:
    """Whether a run was made of a checkpoint."""
    return isinstance(run.manifest.get("checkpoint"), dict)


def as_moments(a: Run, b: Run, write: Callable[..., Run]) -> tuple[Run, Run]:
    """Both as they are; of a run beside a checkpoint, the moment of it that the checkpoint is of.

    Args:
        a: run a.
        b: run b.
        write: makes a run of one step of records; it is closed with the checkpoint.

    Raises:
        StoreError: the run has no parameters on record.
    """
    if is_checkpoint(a) == is_checkpoint(b):
        return a, b
    run, checkpoint = (b, a) if is_checkpoint(a) else (a, b)
    moment = _moment(run, checkpoint, write)
    checkpoint.when_closed(moment.close)
    return (moment, b) if run is a else (a, moment)


def _moment(run: Run, checkpoint: Run, write: Callable[..., Run]) -> Run:
    reader = _reader(run)
    moments = _moments(reader)
    if not any(kind in (own.value for own in MODEL) for state in moments.values() for kind, _, _ in state):
        raise StoreError(f"{run.path} has no parameters on record: a checkpoint can be compared with none of its steps")
    chosen, alike = _chosen(reader, moments, checkpoint)
    rows = _rows(reader, moments[chosen], checkpoint, run)
    about = {
        "checkpoint": {"moment": _words(reader, *chosen), "alike": _later(reader, alike)},
        "not_observed": [],
    }
    return write(rows, run.path, {}, about)


def _words(reader: Reader, step: int, when: str) -> str:
    step_named = step_words(step, reader.labels.get(step, {}))
    return f"after {step_named}" if when == "after" else f"when {step_named} begins"


def _later(reader: Reader, alike: Sequence[tuple[int, str]]) -> list[str]:
    """Moments in words; when a step begins is told where it does not follow one that is told."""
    after = {step for step, when in alike if when == "after"}
    return [_words(reader, step, when) for step, when in alike if when == "after" or step - 1 not in after]


def _reader(run: Run) -> Reader:
    """The lowest rank; all ranks as one where they hold parts."""
    if not run.recorded:
        raise StoreError(f"{run.path} has no step on record")
    readers = [run.rank(rank) for rank in run.recorded]
    parted = any(layout.part is not None for layout in readers[0].layouts)
    return WholeReader(str(run.path), readers, complete=True) if parted and len(readers) > 1 else readers[0]


def _moments(reader: Reader) -> dict[tuple[int, str], State]:
    """What a run had at each moment: when a step began that says so, and after each step."""
    found: dict[tuple[int, str], State] = {}
    now: State = {}
    sites = reader.sites
    wanted = {
        number: (kind, fqn, path)
        for number, (kind, fqn, path) in enumerate(zip(sites.kind, sites.fqn, sites.path, strict=True))
        if kind in _KINDS
    }
    for step in np.asarray(reader.entries["step"]).tolist():
        batch = reader.read(step)
        numbers, checksums = np.asarray(batch.site).tolist(), np.asarray(batch.checksum).tolist()
        for phase in (Phase.START.value, Phase.OPTIMIZER.value):
            fresh = {
                wanted[number]: _Place(step, row, checksums[row])
                for row, number in enumerate(numbers)
                if number in wanted and sites.phase[number] == phase and checksums[row]
            }
            if fresh:
                now = {**now, **fresh}
                when = "before" if phase == Phase.START.value else "after"
                found[step, when] = now
    return found


# --- which moment


def _chosen(
    reader: Reader, moments: Mapping[tuple[int, str], State], checkpoint: Run
) -> tuple[tuple[int, str], list[tuple[int, str]]]:
    """The moment, and others at which the run had just as many of the model's tensors."""
    held = _held(checkpoint)
    goal = Counter(checksum for (kind, _, _), checksum in held.items() if kind in (own.value for own in MODEL))
    beside = Counter(checksum for (kind, _, _), checksum in held.items() if kind == Kind.OPTIMIZER_STATE.value)
    scores = {}
    for moment, state in moments.items():
        model = Counter(place.checksum for (kind, _, _), place in state.items() if kind != Kind.OPTIMIZER_STATE.value)
        states = Counter(place.checksum for (kind, _, _), place in state.items() if kind == Kind.OPTIMIZER_STATE.value)
        scores[moment] = sum((goal & model).values()), sum((beside & states).values())
    best = max(scores.values())
    first = [moment for moment, score in scores.items() if score == best]
    if len({score[0] for score in scores.values()}) > 1 or best[0] == sum(goal.values()) or len(moments) == 1:
        alike = [moment for moment, score in scores.items() if score[0] == best[0] and moment != first[0]]
        return first[0], alike
    return _nearest(reader, moments, checkpoint), []


def _held(checkpoint: Run) -> dict[Tensor, int]:
    """Checksums of a checkpoint's tensors."""
    reader = checkpoint.rank(0)
    batch, sites = reader.read_row(0), reader.sites
    pairs = zip(np.asarray(batch.site).tolist(), np.asarray(batch.checksum).tolist(), strict=True)
    return {
        (sites.kind[number], sites.fqn[number], sites.path[number]): checksum
        for number, checksum in pairs
        if sites.kind[number] in _KINDS and checksum
    }


def _nearest(reader: Reader, moments: Mapping[tuple[int, str], State], checkpoint: Run) -> tuple[int, str]:
    """The moment whose tensors are nearest to the checkpoint's of the same names; the last where nothing tells."""
    other = checkpoint.rank(0)
    batch = other.read_row(0)
    rows = {
        other.sites.fqn[number]: row
        for row, number in enumerate(np.asarray(batch.site).tolist())
        if other.sites.kind[number] in {kind.value for kind in MODEL}
    }
    last = list(moments)[-1]
    names = [fqn for kind, fqn, _ in moments[last] if kind != Kind.OPTIMIZER_STATE.value]
    change = prefixes(names, rows)
    layouts = Layouts(reader.layouts), Layouts(other.layouts)
    best, least = last, np.inf
    for moment, state in moments.items():
        apart = []
        steps: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for (kind, fqn, _), place in state.items():
            name = changed(fqn, change)
            if kind != Kind.OPTIMIZER_STATE.value and name in rows:
                steps[place.step].append((place.row, rows[name]))
        for step, pairs in steps.items():
            mine, theirs = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
            apart.append(relative(*distances(reader.read(step), batch, mine, theirs, *layouts)))
        every = np.concatenate(apart) if apart else np.array([np.inf])
        known = every[np.isfinite(every)]
        mean = float(known.mean()) if len(known) else np.inf
        if mean < least:
            best, least = moment, mean
    return best


# --- names


def prefixes(names: Iterable[str], others: Iterable[str]) -> tuple[str, str]:
    """What names begin with where the others begin with something else, as most of them tell; ("", "") for nothing.

    A run names the root by its class, frameworks put `model.` before all: what follows is the same.
    """
    ends: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in others:
        ends[tuple(name.split(".")[-2:])].append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for name in names:
        own = name.split(".")
        found = [
            (_shared(own, other.split(".")), other) for other in ends.get(tuple(own[-2:]), ends.get((own[-1],), []))
        ]
        most = max((length for length, _ in found), default=0)
        best = [other for length, other in found if length == most]
        if len(best) == 1:
            votes[".".join(own[:-most]), ".".join(best[0].split(".")[:-most])] += 1
    return votes.most_common(1)[0][0] if votes else ("", "")


def _shared(one: list[str], two: list[str]) -> int:
    """How many components at the end are the same."""
    count = 0
    for a, b in zip(reversed(one), reversed(two), strict=False):
        if a != b:
            break
        count += 1
    return count


def changed(name: str, change: tuple[str, str]) -> str:
    """A name with another beginning."""
    old, new = change
    if old and not name.startswith(f"{old}."):
        return name
    rest = name[len(old) + 1 :] if old else name
    return f"{new}.{rest}" if new else rest


# --- what the run had


def _numbers(run: Run, checkpoint: Run, root: str) -> dict[str, str]:
    """By name, what a checkpoint calls a parameter whose optimizer state is numbered; empty where it has names."""
    names = [fqn for (kind, fqn, _) in _held(checkpoint) if kind == Kind.OPTIMIZER_STATE.value]
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
    return not root or name.startswith(f"{root}.")


def _rows(reader: Reader, state: State, checkpoint: Run, run: Run) -> dict[Site, Summary]:
    """The records of a moment, as a checkpoint has them.

    A run may have several models: those whose names tell that the checkpoint is not of them are left out. A file may
    not tell buffers from parameters, and number what the run has names for.
    """
    theirs = {fqn: kind for (kind, fqn, _) in _held(checkpoint) if kind != Kind.OPTIMIZER_STATE.value}
    mine = [fqn for kind, fqn, _ in state if kind != Kind.OPTIMIZER_STATE.value]
    change = prefixes(mine, theirs)
    root = change[0] if 2 * sum(changed(fqn, change) in theirs for fqn in mine) >= len(theirs) else ""
    numbers = _numbers(run, checkpoint, root)
    batches: dict[int, Any] = {}
    found: dict[Site, Summary] = {}
    for (kind, fqn, path), place in state.items():
        if not _is_below(fqn, root):
            continue
        if place.step not in batches:
            batches[place.step] = reader.read(place.step)
        record = reader.record(batches[place.step], place.row, place.step)
        of_optimizer = kind == Kind.OPTIMIZER_STATE.value
        name = numbers.get(fqn, fqn) if of_optimizer else fqn
        called = Kind(kind if of_optimizer else theirs.get(changed(fqn, change), kind))
        found[Site(Phase.START, called, name, 0, path)] = record.summary
    return found
