"""Which of thousands of ranks has other copies than the rest: a bad device, as a rule.

All rules over all records of 4,096 ranks take an hour. What the records of each step add up to (`store.totals`) says in
some bytes a rank whether copies are equal: ranks with the same share of a model are compared by one number for all
steps, and only where one is in the minority are two ranks opened to say which
parameter it is, and since when.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.health.check import finding_of
from introspect_cli.health.equal import copies_differ
from introspect_cli.health.findings import CheckResult, Hit
from introspect_cli.records import KIND_CODES, Kind
from introspect_cli.store.tasks import tasks_of
from introspect_cli.store.totals import SHARE, part_hash
from introspect_cli.sums import MASK, mix
from introspect_cli.texts import count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.reader import RankReader
    from introspect_cli.store.run import Run
    from introspect_cli.store.tasks import Task, Work

    Array = NDArray[Any]

_KINDS = tuple(KIND_CODES[kind] for kind in (Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE))
_GROUP = 64
"""Ranks that one task looks at."""

_HELD = np.dtype([("share", "S32"), ("number", "<u8"), ("rank", "<u4")])
"""What a rank has: a share, and one number for its totals in all steps."""

_CAUSE = "a device that computes wrongly, or memory that changed: train without it, or on it alone"
_LACKING = "totals of each step, which a launch keeps since this version"


def shares_of(task: Task) -> Array:
    """A row of `_HELD` for each rank of the task and each share of parameters, gradients or optimizer states it holds.

    A share says which records were added up; two ranks with the same one hold copies. `number` covers what they add up
    to in all steps up to `task.given`, inclusive: equal numbers mean equal copies in all of them. A rank whose store
    has no totals has no rows.
    """
    with task.opened() as [run]:
        return np.concatenate([np.zeros(0, _HELD), *(_totals_of(run.rank(rank), task.given) for rank in run.ranks)])


def _totals_of(reader: RankReader, last: int) -> Array:
    """A row of `_HELD` for each share of parameters, gradients or optimizer states that the reader's rank holds.

    `number` covers the share's totals in all steps up to `last`, inclusive. Empty where the store has no totals.
    """
    totals = reader.totals
    steps = reader.entries["step"]
    numbers_of: dict[bytes, int] = {}
    for form, shares in enumerate(totals.forms):
        rows = np.flatnonzero((totals.form == form) & (steps <= last))
        numbers = steps[rows].astype(np.uint64)
        for column, share in enumerate(shares):
            if share["kind"] in _KINDS:
                total = totals.totals[form][totals.position[rows], column]
                mixed = mix(total[:, 0] ^ mix(total[:, 1] ^ mix(numbers + np.uint64(1))))
                numbers_of[share.tobytes()] = numbers_of.get(share.tobytes(), 0) + int(mixed.sum(dtype=np.uint64))
    out = np.zeros(len(numbers_of), _HELD)
    for row, (share, number) in enumerate(numbers_of.items()):
        out[row] = share, number & MASK, reader.rank
    return out


def minority_ranks(run: Run, work: Work) -> CheckResult:
    """Find ranks whose copies differ from those of most ranks, by totals of records alone.

    One finding a rank, by step. The rule is undecided with one rank, with a rank without totals, and where a share has
    no majority and nothing was found.

    Args:
        run: the run.
        work: runs tasks, each for some of its ranks.

    Raises:
        StoreError: the run is damaged.
    """
    path, ranks, last = str(run.path), run.recorded, run.last_step
    groups = tasks_of([run], ranks, last or 0, _GROUP)
    steps = 0 if last is None else int((run.rank(ranks[0]).entries["step"] <= last).sum())
    held = np.concatenate([np.zeros(0, _HELD), *work(shares_of, groups if last is not None and len(ranks) > 1 else ())])
    if len(np.unique(held["rank"])) < max(len(ranks), 2):
        needs = _LACKING if len(ranks) > 1 else "several ranks"
        return CheckResult(path, (), (), ((copies_differ.id, needs),), tuple(run.endings), steps)
    unequal, undecided = _unequal(held)
    seen: dict[int, list[tuple[int, int, Hit]]] = {}
    for share, rank, base, most in unequal:
        seen.setdefault(rank, []).extend(_differing_records(run, share, rank, base, most))
    ordered = ([hit for *_, hit in sorted(every, key=lambda one: one[:2])] for every in seen.values())
    findings = [replace(finding_of(copies_differ, hits), cause=_CAUSE) for hits in ordered if hits]
    findings.sort(key=lambda finding: (finding.step, finding.rank))
    shares, holders = np.unique(held["share"], return_counts=True)
    scope = (
        f"only copies of parameters, gradients and optimizer state were compared: {count(len(shares), 'share')} of "
        f"them, of which on one rank alone: {(holders == 1).sum()}; with no value that most of its ranks have, of "
        f"which nothing is said: {undecided}"
    )
    notes = (*run.endings, scope)
    needs = f"a value that most ranks have of {count(undecided, 'share')}"
    if undecided and not findings:
        return CheckResult(path, (), (), ((copies_differ.id, needs),), notes, steps)
    return CheckResult(path, tuple(findings), (copies_differ.id,), (), notes, steps)


def _unequal(held: Array) -> tuple[list[tuple[bytes, int, int, int]], int]:
    """(share, rank, lowest rank of the majority, size of the majority) for each share and each rank in its minority.

    And the number of shares without a majority, which is more than half of the ranks that have the share; of those, no
    rank is given.
    """
    names, share = np.unique(held["share"], return_inverse=True)
    order = np.lexsort((held["rank"], held["number"], share))
    share, number, rank = share[order], held["number"][order], held["rank"][order].astype(np.int64)
    starts = np.flatnonzero((np.diff(share, prepend=-1) != 0) | (np.diff(number, prepend=number[:1]) != 0))
    sizes = np.diff(starts, append=len(order))
    most = 2 * sizes > np.bincount(share, minlength=len(names))[share[starts]]
    base = dict(
        zip(share[starts[most]].tolist(), zip(starts[most].tolist(), sizes[most].tolist(), strict=True), strict=True)
    )
    unequal = [
        (bytes(names[of]).ljust(SHARE.itemsize, b"\0"), int(rank[at]), int(rank[base[of][0]]), base[of][1])
        for start, size, of in zip(starts.tolist(), sizes.tolist(), share[starts].tolist(), strict=True)
        if of in base and start != base[of][0]
        for at in range(start, start + size)
    ]
    return unequal, len(names) - len(base)


def _differing_records(run: Run, of: bytes, rank: int, base: int, most: int) -> list[tuple[int, int, Hit]]:
    """Read two ranks: (step, sequence, hit) of the records of a share that differ, in the first step that has any.

    [] if no step that both have has any. Records that one rank alone has do not count.

    Args:
        run: the run.
        of: the share, as bytes of a `SHARE`.
        rank: the one in the minority.
        base: one of the majority.
        most: how many ranks the majority has.
    """
    one, two, share = run.rank(base), run.rank(rank), np.frombuffer(of, SHARE)[0]
    host = run.manifests.get(rank, {}).get("host")
    for row, step in enumerate(two.entries["step"].tolist()):
        if step not in one or two.entries["digest"][row] == one.entries["digest"][one.row_of(step)]:
            continue
        batches = one.read(step), two.read(step)
        records = [_rows_of_share(reader, batch, share) for reader, batch in zip((one, two), batches, strict=True)]
        hits = []
        for key, at in records[1].items():
            if key not in records[0] or batches[0].checksum[records[0][key]] == batches[1].checksum[at]:
                continue
            site, _ = two.sites[int(batches[1].site[at])]
            device = two.layouts[int(batches[1].layout[at])].device
            where = ", ".join(text for text in (device, f"host {host}" if host else "") if text)
            evidence = (
                f"from step {step} on rank {rank}'s {site.kind.one.removeprefix('the ')} {site.fqn}{site.path} differs "
                f"from that of {count(most, 'rank')} with equal copies{f' ({where})' if where else ''}"
            )
            hit = Hit(step, f"{site.kind.value} {site.fqn}{site.path}", evidence, rank)
            hits.append((step, int(batches[1].sequence[at]), hit))
        if hits:
            return hits
    return []


def _rows_of_share(reader: RankReader, batch: StepBatch, share: Any) -> dict[int, int]:
    """Row numbers in `batch` of the records whose kind and part are the share's, by the key of their site."""
    kinds = np.array([KIND_CODES[kind] for kind in reader.sites.kind], np.int64)
    places = np.array([part_hash(layout) for layout in reader.layouts], np.uint64)
    rows = np.flatnonzero((kinds[batch.site] == share["kind"]) & (places[batch.layout] == share["part"]))
    return dict(zip(reader.sites.key[batch.site[rows]].tolist(), rows.tolist(), strict=True))
