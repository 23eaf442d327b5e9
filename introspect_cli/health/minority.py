"""Which of thousands of ranks has other copies than the rest: a bad device, as a rule.

All rules over all records of 4,096 ranks take an hour. What the records of each step add up to (`store.totals`) says in
some bytes a rank whether copies are equal: ranks with the same share of a model are compared by one number for all
steps, the numbers are gathered in a tree, and only where one is in the minority are two ranks opened to say which
parameter it is, and since when.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.health.check import folded
from introspect_cli.health.equal import copies_differ
from introspect_cli.health.findings import CheckResult, Hit
from introspect_cli.records import KIND_CODES, Kind
from introspect_cli.store.format.totals import SHARE, place_of
from introspect_cli.store.ranks.tasks import tasks_of
from introspect_cli.sums import MASK, mix
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.ranks.tasks import Task
    from introspect_cli.store.read.rank_reader import RankReader
    from introspect_cli.store.read.run import Run

    Array = NDArray[Any]

_KINDS = tuple(KIND_CODES[kind] for kind in (Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE))
_GROUP = 64
"""Ranks that one task looks at."""

_HELD = np.dtype([("share", "S32"), ("number", "<u8"), ("rank", "<u4")])
"""What a rank has: a share, and one number for its totals in all steps."""

_CAUSE = "a device that computes wrongly, or memory that changed: train without it, or on it alone"
_LACKING = "totals of each step, which a launch keeps since this version"


def shares_of(task: Task) -> Array:
    """The shares of some ranks up to the last step that counts, as `_HELD`; of a rank that keeps no totals, none."""
    with task.opened() as [run]:
        return np.concatenate([np.zeros(0, _HELD), *(_of_rank(run.rank(rank), task.given) for rank in run.ranks)])


def _of_rank(reader: RankReader, last: int) -> Array:
    totals = reader.totals
    steps = reader.entries["step"]
    numbers_of: dict[bytes, int] = {}
    for form, shares in enumerate(totals.forms):
        rows = np.flatnonzero((totals.form == form) & (steps <= last))
        numbers = steps[rows].astype(np.uint64)
        for column, share in enumerate(shares):
            if share["kind"] in _KINDS:
                total = totals.totals[form][totals.place[rows], column]
                mixed = mix(total[:, 0] ^ mix(total[:, 1] ^ mix(numbers + np.uint64(1))))
                numbers_of[share.tobytes()] = numbers_of.get(share.tobytes(), 0) + int(mixed.sum(dtype=np.uint64))
    out = np.zeros(len(numbers_of), _HELD)
    for row, (share, number) in enumerate(numbers_of.items()):
        out[row] = share, number & MASK, reader.rank
    return out


def concatenated(*groups: Array) -> Array:
    """The shares of all ranks of some groups."""
    return np.concatenate(groups)


def minority_ranks(run: Run, total: Callable[..., Array]) -> CheckResult:
    """Compare the copies that ranks have, by what their records add up to.

    Args:
        run: the run.
        total: adds up the results of tasks, wherever they run; see `engine.Engine`.

    Raises:
        StoreError: the run is damaged.
    """
    path, ranks, last = str(run.path), run.recorded, run.last_step
    groups = tasks_of([run], ranks, last or 0, _GROUP)
    steps = 0 if last is None else int((run.rank(ranks[0]).entries["step"] <= last).sum())
    held = total(shares_of, groups, concatenated) if last is not None and len(ranks) > 1 else np.zeros(0, _HELD)
    if len(np.unique(held["rank"])) < max(len(ranks), 2):
        needs = _LACKING if len(ranks) > 1 else "several ranks"
        return CheckResult(path, (), (), ((copies_differ.id, needs),), tuple(run.endings), steps)
    unequal, undecided = _unequal(held)
    seen: dict[int, list[tuple[int, int, Hit]]] = {}
    for each in unequal:
        seen.setdefault(each.rank, []).extend(_looked_at(run, each))
    ordered = ([hit for *_, hit in sorted(every, key=lambda one: one[:2])] for every in seen.values())
    findings = [replace(folded(copies_differ, hits), cause=_CAUSE) for hits in ordered if hits]
    findings.sort(key=lambda finding: (finding.step, finding.rank))
    alone = int((np.unique(held["share"], return_counts=True)[1] == 1).sum())
    notes = [*run.endings, _scope(len(np.unique(held["share"])), alone, undecided)]
    if undecided and not findings:
        needs = f"a value that most ranks have of {count(undecided, 'share')}"
        return CheckResult(path, (), (), ((copies_differ.id, needs),), tuple(notes), steps)
    return CheckResult(path, tuple(findings), (copies_differ.id,), (), tuple(notes), steps)


def _scope(shares: int, alone: int, undecided: int) -> str:
    """What was compared, and what was not."""
    scope = f"only copies of parameters, gradients and optimizer state were compared: {count(shares, 'share')} of them"
    if alone:
        scope += f", of which {alone} {'is' if alone == 1 else 'are'} on one rank alone"
    if undecided:
        scope += f", and {undecided} with no value that most of its ranks have, of which nothing is said"
    return scope


class _Unequal(NamedTuple):
    """A share of which most ranks have one number, and some another.

    Attributes:
        share: as `totals.SHARE`, in bytes.
        rank: one that has another.
        base: the lowest of those that have the one.
    """

    share: bytes
    rank: int
    base: int
    most: int


def _unequal(held: Array) -> tuple[list[_Unequal], int]:
    """The shares of which a minority of the ranks has another number, and how many shares have no majority."""
    names, share = np.unique(held["share"], return_inverse=True)
    order = np.lexsort((held["rank"], held["number"], share))
    share, number, rank = share[order], held["number"][order], held["rank"][order].astype(np.int64)
    new = np.ones(len(order), np.bool_)
    new[1:] = (np.diff(share) != 0) | (np.diff(number) != 0)
    starts = np.flatnonzero(new)
    sizes = np.diff(starts, append=len(order))
    holders = np.bincount(share, minlength=len(names))
    of_share = share[starts]
    most = 2 * sizes > holders[of_share]
    base = np.full(len(names), -1, np.int64)
    base[of_share[most]] = starts[most]
    size_of = np.zeros(len(names), np.int64)
    size_of[of_share[most]] = sizes[most]
    unequal = [
        _Unequal(bytes(names[of]).ljust(SHARE.itemsize, b"\0"), int(rank[at]), int(rank[base[of]]), int(size_of[of]))
        for start, size, of in zip(starts.tolist(), sizes.tolist(), of_share.tolist(), strict=True)
        if base[of] >= 0 and start != base[of]
        for at in range(start, start + size)
    ]
    return unequal, int((base < 0).sum())


def _looked_at(run: Run, unequal: _Unequal) -> list[tuple[int, int, Hit]]:
    """The records of a share that differ, of the first step in which any does, with when they were recorded."""
    one, two = (run.rank(rank) for rank in (unequal.base, unequal.rank))
    share = np.frombuffer(unequal.share, SHARE)[0]
    for row, step in enumerate(two.entries["step"].tolist()):
        if step not in one or two.entries["digest"][row] == one.entries["digest"][one.row_of(step)]:
            continue
        batches = one.read(step), two.read(step)
        records = [_of_share(reader, batch, share) for reader, batch in zip((one, two), batches, strict=True)]
        shared = [key for key in records[1] if key in records[0]]
        differ = [k for k in shared if batches[0].checksum[records[0][k]] != batches[1].checksum[records[1][k]]]
        if differ:
            return [_seen_at(run, unequal, step, batches[1], records[1][key]) for key in differ]
    return []


def _of_share(reader: RankReader, batch: StepBatch, share: Any) -> dict[int, int]:
    """The rows of a share by the keys of their sites."""
    kinds = np.array([KIND_CODES[kind] for kind in reader.sites.kind], np.int64)
    places = np.array([place_of(layout) for layout in reader.layouts], np.uint64)
    rows = np.flatnonzero((kinds[batch.site] == share["kind"]) & (places[batch.layout] == share["place"]))
    return dict(zip(reader.sites.key[batch.site[rows]].tolist(), rows.tolist(), strict=True))


def _seen_at(run: Run, unequal: _Unequal, step: int, batch: StepBatch, row: int) -> tuple[int, int, Hit]:
    reader = run.rank(unequal.rank)
    site, _ = reader.sites[int(batch.site[row])]
    device = reader.layouts[int(batch.layout[row])].device
    host = run.manifests.get(unequal.rank, {}).get("host")
    where = ", ".join(text for text in (device, f"host {host}" if host else "") if text)
    evidence = (
        f"from step {step} on rank {unequal.rank}'s {site.kind.one.removeprefix('the ')} {site.fqn}{site.path} differs "
        f"from that of {count(unequal.most, 'rank')} with equal copies{f' ({where})' if where else ''}"
    )
    hit = Hit(step, f"{site.kind.value} {site.fqn}{site.path}", evidence, unequal.rank)
    return step, int(batch.sequence[row]), hit
