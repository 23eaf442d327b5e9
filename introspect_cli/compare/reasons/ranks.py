"""Findings from several ranks: sums for means, unequal copies, collectives, incomplete parts.

Sketches are linear: where the mean of the ranks' gradients equals the other run's gradient, the gradient was not
reduced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.reasons.base import cause
from introspect_cli.compare.say import finds, found, told
from introspect_cli.records import Joined, Kind, Site, Status, Summary
from introspect_cli.texts import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from introspect_cli.compare.evidence import Cause
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.result import Divergence, Finding
    from introspect_cli.compare.step import Step

_CLOSE, _APART = 1e-4, 1e-2


def reduction_factor(at: View) -> str:
    """What a whole factor between the runs is equal to: `world` or `group`; "" for none.

    The size of either run's world, or of a data-parallel group that wrappers recorded. The factor counts from 2,
    upwards or downwards, to a relative `_CLOSE`. "" also for one rank, or where several are compared and not all have
    that factor.
    """
    scale, runs = at.first.scale, at.runs
    if not scale or scale < 0 or not _is_on_all_ranks(at):
        return ""
    factor = scale if scale > 1 else 1 / scale
    whole = round(factor)
    if whole < 2 or abs(factor / whole - 1) > _CLOSE:
        return ""
    groups = [manifest.get("data_parallel") for run in runs for manifest in run.manifests.values()]
    sizes = {len(group) for group in groups if isinstance(group, list)}
    return "world" if whole in {run.world_size for run in runs} else "group" if whole in sizes else ""


def ranks_words(at: View) -> str:
    """Where the ranks diverge first: the rank of the first divergence, or all ranks if `_is_on_all_ranks`.

    "" where one rank was compared.
    """
    if at.ranks < 2:
        return ""
    return told("on-all-ranks", ranks=at.ranks) if _is_on_all_ranks(at) else told("on-rank", rank=at.first.rank)


def _is_on_all_ranks(at: View) -> bool:
    """Whether all compared ranks diverge first at one step and site, all by one factor (to four digits) or all without.

    True for one rank.
    """
    alike = [peer.scale for peer in at.peers if (peer.step, peer.site) == (at.first.step, at.first.site)]
    return len(alike) == at.ranks and len({scale and f"{scale:.4g}" for scale in alike}) == 1


# --- copies of one tensor on the ranks of a run that are not equal


_COPIED = frozenset({Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE})


def side_with_copies(first: Divergence) -> str:
    """The run, `a` or `b`, whose copies on several ranks differ while the other's do not; "" for neither or both."""
    joined = [summary is not None and summary.joined is Joined.COPIES for summary in (first.a, first.b)]
    return "" if joined[0] == joined[1] else "ab"[joined[1]]


@finds("*")
def find_unequal_copies(at: View) -> Iterator[Finding]:
    """Finding where copies of a parameter, gradient or optimizer state differ between the ranks of one run alone.

    Of a gradient also that it is not reduced. Ranks compared one by one have to hold all of it.
    """
    first, side = at.first, side_with_copies(at.first)
    if first.site.kind not in _COPIED:
        return
    if side:
        held = _copies_by_rank(at, side, first.site)
        summary = first.a if side == "a" else first.b
        yield found("copies", side=side, text="" if summary is None else summary.text)
    elif at.ranks > 1 and first.a is not None and first.b is not None:
        copies = {name: _copies_by_rank(at, name, first.site) for name in "ab"}
        equal = {name: len({copy.checksum for copy in held.values()}) == 1 for name, held in copies.items()}
        if not all(len(held) == at.ranks for held in copies.values()) or equal["a"] == equal["b"]:
            return
        side = "b" if equal["a"] else "a"
        held, base = copies[side], min(copies[side])
        others = [rank for rank, copy in held.items() if copy.checksum != held[base].checksum]
        yield found("copies", side=side, text=f"{rank_list(others)} / rank {base}")
    else:
        return
    if first.site.kind is Kind.GRAD:
        summary = first.a if side == "b" else first.b
        wanted = np.array(summary.sketch if summary is not None else (), np.float64)
        yield from _find_missing_reduction(held, wanted, side)


def _copies_by_rank(at: View, name: str, site: Site) -> dict[int, Summary]:
    """Copies of a site in the divergence's step, by rank; {} if any recorded rank has none that is whole and observed.

    Args:
        at: the divergence.
        name: the run, `a` or `b`.
        site: of the tensor.
    """
    first, run = at.first, at.runs[name == "b"]
    step = first.step if name == "a" else first.step_b
    copies = {}
    for rank in run.recorded:
        reader = run.rank(rank)
        numbers = [n for n, fqn in enumerate(reader.sites.fqn) if fqn == site.fqn and reader.sites[n][0] == site]
        batch = reader.read(step) if numbers and step in reader else None
        row = None if batch is None else next(iter(np.flatnonzero(batch.site == numbers[0])), None)
        summary = None if batch is None or row is None else reader.record(batch, int(row), step).summary
        if summary is None or summary.status is not Status.OBSERVED or summary.layout.part is not None:
            return {}
        copies[rank] = summary
    return copies


def _find_missing_reduction(copies: dict[int, Summary], wanted: NDArray[np.float64], side: str) -> Iterator[Finding]:
    """Finding that a gradient was not reduced over ranks.

    Proved if the copies' mean or sum is the other run's gradient.

    Proved needs copies that differ by over `_APART`, and an agreement to `_CLOSE`, both relative.

    Args:
        copies: by rank, of the run whose copies differ.
        wanted: sketch of the other run's gradient (16,); empty where there is none.
        side: the run whose copies differ.
    """
    sketches = {rank: np.array(copy.sketch, np.float64) for rank, copy in copies.items() if copy.sketch}
    known = len(sketches) == len(copies) > 1 and wanted.size and np.linalg.norm(wanted) > 0
    middle = np.mean(list(sketches.values()), axis=0) if known else wanted

    def distance(one: NDArray[np.float64], two: NDArray[np.float64]) -> float:
        """Distance of two sketches, over the norm of the second."""
        return float(np.linalg.norm(one - two) / np.linalg.norm(two))

    apart = known and max(distance(copy, middle) for copy in sketches.values()) > _APART
    proved = apart and any(distance(total, wanted) <= _CLOSE for total in (middle, middle * len(sketches)))
    yield found("not-reduced-proved" if proved else "not-reduced", side=side)


# --- collectives


@finds("collective")
def find_collective(at: View) -> Iterator[Finding]:
    """Finding where one run alone has the collective."""
    summary = at.first.a or at.first.b
    if (side := at.first.only) and summary is not None:
        yield found("collective-missing", side=side, other=at.side_without, name=summary.text.strip("'\""))


# --- parts


def parts_cause(step: Step, position: int) -> Cause | None:
    """Cause `parts` where a run's ranks lack elements of a tensor or hold some twice; None otherwise."""
    rows = int(step.divergences.row_a[position]), int(step.divergences.row_b[position])
    batches = step.table.a, step.table.b
    incomplete = [
        row >= 0 and batch.how is not None and batch.how[row] == Joined.INCOMPLETE
        for batch, row in zip(batches, rows, strict=True)
    ]
    return cause("parts") if any(incomplete) else None


@finds("parts")
def find_incomplete_parts(at: View) -> Iterator[Finding]:
    """Findings naming the run and its incomplete parts."""
    for summary, side in ((at.first.a, "a"), (at.first.b, "b")):
        if summary is not None and summary.joined is Joined.INCOMPLETE:
            yield found("parts", side=side, text=summary.text.partition(": ")[2])
