"""Which of thousands of ranks has other copies than the rest: a bad device, as a rule.

All rules over all records of 4,096 ranks take an hour. But copies that were once apart stay apart. So the last step
alone is read: ranks with the same share of a model are compared by one number each, and only where one is in the
minority are two ranks opened to say which parameter it is, and since when.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.health.check import finding_of
from introspect_cli.health.equal import copies_differ
from introspect_cli.health.findings import CheckResult, Hit
from introspect_cli.records import KIND_CODES, Kind
from introspect_cli.store.tasks import tasks_of
from introspect_cli.sums import mix, number_of
from introspect_cli.texts import count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.names import SiteTable
    from introspect_cli.store.reader import RankReader
    from introspect_cli.store.run import Run
    from introspect_cli.store.tasks import Task, Work

    Array = NDArray[Any]

_KINDS = [KIND_CODES[kind] for kind in (Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE)]
_GROUP = 64
"""Ranks that one task looks at."""

_HELD = np.dtype([("share", "<u8"), ("sites", "<u8"), ("number", "<u8"), ("rank", "<u4")])
"""What a rank has: a kind with a part of the whole; digests of its sites, and of their values."""

_CAUSE = "a device that computes wrongly, or memory that changed: train without it, or on it alone"


def shares_of(task: Task) -> Array:
    """A row of `_HELD` for each rank of the task and each share of parameters, gradients or optimizer states it holds.

    Two ranks with the same share and sites hold copies; equal numbers mean that these are equal after step
    `task.given`. A rank without that step has no rows.
    """
    with task.opened() as [run]:
        held = [_held_by(run.rank(rank), task.given) for rank in run.ranks if task.given in run.rank(rank)]
        return np.concatenate([np.zeros(0, _HELD), *held])


def _held_by(reader: RankReader, step: int) -> Array:
    """A row of `_HELD` for each share that the reader's rank holds in a step; reads the step."""
    key, checksum, share, _ = _records_of(reader, reader.read(step))
    names, which = np.unique(share, return_inverse=True)
    out = np.zeros(len(names), _HELD)
    out["share"], out["rank"] = names, reader.rank
    np.add.at(out["sites"], which, mix(key))
    np.add.at(out["number"], which, mix(key ^ mix(checksum)))
    return out


def _records_of(reader: RankReader, batch: StepBatch, of: int | None = None) -> tuple[Array, Array, Array, Array]:
    """(key of the site, checksum, share, row) of each record of parameters, gradients and optimizer states.

    Those of the share `of` alone, if it is given.
    """
    codes = _codes_of(reader.sites)
    rows = np.flatnonzero(np.isin(codes, _KINDS)[batch.site])
    site = batch.site[rows]
    places = np.array([number_of(repr(each.part).encode()) for each in reader.layouts], np.uint64)
    share = mix(places[batch.layout[rows]] ^ codes[site])
    held = np.asarray(reader.sites.key, np.uint64)[site], np.asarray(batch.checksum[rows]), share, rows
    return held if of is None else tuple(each[share == of] for each in held)


@lru_cache(maxsize=4)  # many ranks have one table
def _codes_of(sites: SiteTable) -> Array:
    return np.array([KIND_CODES[kind] for kind in sites.kind], np.uint64)


def minority_ranks(run: Run, work: Work) -> CheckResult:
    """Find ranks whose copies differ from those of most ranks at the end of the last step that all have.

    One finding a rank, by step. The rule is undecided with one rank, and where a share has no majority and nothing was
    found.

    Args:
        run: the run.
        work: runs tasks, each for some of its ranks.

    Raises:
        StoreError: the run is damaged.
    """
    path, ranks, last = str(run.path), run.recorded, run.last_step
    steps = 0 if last is None else int((run.rank(ranks[0]).entries["step"] <= last).sum())
    tasks = tasks_of([run], ranks, last, _GROUP) if last is not None and len(ranks) > 1 else ()
    held = np.concatenate([np.zeros(0, _HELD), *work(shares_of, tasks)])
    if len(np.unique(held["rank"])) < max(len(ranks), 2):
        return CheckResult(path, (), (), ((copies_differ.id, "several ranks with parameters"),), (*run.endings,), steps)
    unequal, shares, undecided = _unequal(held)
    seen: dict[int, list[tuple[int, int, Hit]]] = {}
    for share, rank, base, most in unequal:
        seen.setdefault(rank, []).extend(_differing_records(run, share, rank, base, most))
    ordered = ([hit for *_, hit in sorted(every, key=lambda one: one[:2])] for every in seen.values())
    findings = [replace(finding_of(copies_differ, hits), cause=_CAUSE) for hits in ordered if hits]
    findings.sort(key=lambda finding: (finding.step, finding.rank))
    scope = (
        f"only copies of parameters, gradients and optimizer state of step {last} were compared: on one rank alone "
        f"{(shares == 1).sum()}, without a value that most ranks have {undecided} of {count(len(shares), 'share')}"
    )
    notes = (*run.endings, scope)
    unseen = ((copies_differ.id, f"a value that most ranks have of {count(undecided, 'share')}"),)
    decided, missing = ((), unseen) if undecided and not findings else ((copies_differ.id,), ())
    return CheckResult(path, tuple(findings), decided, missing, notes, steps)


def _unequal(held: Array) -> tuple[list[tuple[int, int, int, int]], Array, int]:
    """(share, rank, lowest rank of the majority, size of the majority) for each share and each rank in its minority.

    And on how many ranks each share is, and the number of shares without a majority, which is more than half of the
    ranks that have the share; of those, no rank is given.
    """
    _, share, holders = np.unique(held[["share", "sites"]], return_inverse=True, return_counts=True)
    unequal, undecided = [], 0
    order = np.lexsort((held["rank"], share))
    for rows in np.split(held[order], np.cumsum(holders)[:-1]):
        _, first, which, times = np.unique(rows["number"], return_index=True, return_inverse=True, return_counts=True)
        most = int(times.argmax())
        if 2 * times[most] <= len(rows):
            undecided += 1
            continue
        base = int(rows["rank"][first[most]])
        others = rows[which != most]
        unequal += [(share, rank, base, int(times[most])) for share, rank in others[["share", "rank"]].tolist()]
    return unequal, holders, undecided


def _differing_records(run: Run, of: int, rank: int, base: int, most: int) -> list[tuple[int, int, Hit]]:
    """Read two ranks: (step, sequence, hit) of the records of a share that differ, in the first step that has any.

    [] if no step that both have has any. Records that one rank alone has do not count.

    Args:
        run: the run.
        of: the share.
        rank: the one in the minority.
        base: one of the majority.
        most: how many ranks the majority has.
    """
    one, two = run.rank(base), run.rank(rank)
    host = run.manifests.get(rank, {}).get("host")
    for row, step in enumerate(two.entries["step"].tolist()):
        if step not in one or two.entries["digest"][row] == one.entries["digest"][one.row_of(step)]:
            continue
        batch = two.read(step)
        theirs, copies, *_ = _records_of(one, one.read(step), of)
        keys, checksums, _, rows = _records_of(two, batch, of)
        _, there, here = np.intersect1d(theirs, keys, return_indices=True)
        hits = []
        for at in rows[here[copies[there] != checksums[here]]].tolist():
            site, _ = two.sites[int(batch.site[at])]
            device = two.layouts[int(batch.layout[at])].device
            where = ", ".join(text for text in (device, f"host {host}" if host else "") if text)
            evidence = (
                f"from step {step} on rank {rank}'s {site.kind.one.removeprefix('the ')} {site.fqn}{site.path} differs "
                f"from that of {count(most, 'rank')} with equal copies{f' ({where})' if where else ''}"
            )
            hit = Hit(step, f"{site.kind.value} {site.fqn}{site.path}", evidence, rank)
            hits.append((step, int(batch.sequence[at]), hit))
        if hits:
            return hits
    return []
