"""Findings from several ranks: sums for means, unequal copies, collectives, incomplete parts.

Sketches are linear: where the mean of the ranks' gradients equals the other run's gradient, the gradient was not
reduced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.ledger import At
from introspect_cli.compare.reasons.base import cause
from introspect_cli.compare.say import finds, found
from introspect_cli.compare.table import OTHER, columns
from introspect_cli.records import Joined, Kind, Site, Status, Summary
from introspect_cli.texts import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.compare.evidence import Cause
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.result import Divergence, Finding
    from introspect_cli.compare.step import Step

_CLOSE, _APART = 1e-4, 1e-2


def reduction_factor(at: View) -> str:
    """What a whole factor between the runs is equal to the number of ranks of: `world` or `group`; "" for none.

    The size of either run's world, or of a data-parallel group that wrappers recorded. The factor counts from 2,
    upwards or downwards, to a relative `_CLOSE`. "" also for one rank, or where several are compared and not all have
    that factor.
    """
    scale, groups = at.first.scale, [each.get("data_parallel") for run in at.runs for each in run.manifests.values()]
    factor = max(scale, 1 / scale) if scale and scale > 0 and _is_on_all_ranks(at) else 0.0
    sizes = {len(group): "group" for group in groups if isinstance(group, list)}
    sizes |= {run.world_size: "world" for run in at.runs}
    is_whole = round(factor) >= 2 and abs(factor / round(factor) - 1) <= _CLOSE
    return sizes.get(round(factor), "") if is_whole else ""


def ranks_of(at: View) -> dict[str, str]:
    """Where the ranks diverge first: the `rank` of the first divergence, or the number of `ranks` if all do.

    {} where one rank was compared.
    """
    if at.ranks < 2:
        return {}
    return {"ranks": str(at.ranks)} if _is_on_all_ranks(at) else {"rank": str(at.first.rank)}


def _is_on_all_ranks(at: View) -> bool:
    """Whether all compared ranks diverge first at one step and site, all by one factor (to four digits) or all without.

    True for one rank.
    """
    alike = {(peer.step, peer.site, peer.scale and f"{peer.scale:.4g}") for peer in at.peers}
    return len(at.peers) == at.ranks and len(alike) == 1


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
    both = {each: summary for each, summary in (("a", first.a), ("b", first.b)) if summary is not None}
    if first.site.kind not in _COPIED or (not side and (at.ranks < 2 or len(both) < 2)):
        return
    text = both[side].text if side else ""
    if not side:
        held = {each: _copies_by_rank(at, each, first.site) for each in both}
        apart = [each for each, copies in held.items() if len({copy.checksum for copy in copies.values()}) > 1]
        if len(apart) != 1 or any(len(copies) != at.ranks for copies in held.values()):
            return
        side = apart[0]
        base = min(held[side])
        others = [rank for rank, copy in held[side].items() if copy.checksum != held[side][base].checksum]
        text = f"{rank_list(others)} / rank {base}"
    yield found("copies", side=side, text=text)
    if first.site.kind is Kind.GRAD:
        sketches = [copy.sketch for copy in _copies_by_rank(at, side, first.site).values()]
        proved = OTHER[side] in both and _add_up_to(sketches, both[OTHER[side]].sketch)
        yield found("not-reduced-proved" if proved else "not-reduced", side=side)


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
        of_step = At(reader, columns(reader.sites), step)
        rows = [row for row, number in of_step.rows([site.kind], site.phase) if reader.sites[number][0] == site]
        summary = reader.record(of_step.batch, rows[0], step).summary if rows else None
        if summary is None or summary.status is not Status.OBSERVED or summary.layout.part is not None:
            return {}
        copies[rank] = summary
    return copies


def _add_up_to(copies: Sequence[Sequence[float]], wanted: Sequence[float]) -> bool:
    """Whether gradients that are apart add up to, or average to, the other run's: by sketches, False without any.

    They are apart by over `_APART` of their mean, and agree to `_CLOSE`, both relative.
    """
    if len(copies) < 2 or not wanted or not all(copies):
        return False
    held, one = np.array(copies, np.float64), np.array(wanted, np.float64)
    mean = held.mean(axis=0)
    apart = np.linalg.norm(held - mean, axis=1).max() > _APART * np.linalg.norm(mean)
    far = min(np.linalg.norm(total - one) for total in (mean, mean * len(held)))
    return bool(apart and far <= _CLOSE * np.linalg.norm(one))


# --- parts


def parts_cause(step: Step, position: int) -> Cause | None:
    """Cause `parts` where a run's ranks lack elements of a tensor or hold some twice; None otherwise."""
    rows = int(step.divergences.row_a[position]), int(step.divergences.row_b[position])
    batches = zip((step.table.a.how, step.table.b.how), rows, strict=True)
    incomplete = [row >= 0 and how is not None and how[row] == Joined.INCOMPLETE for how, row in batches]
    return cause("parts") if any(incomplete) else None


@finds("parts")
def find_incomplete_parts(at: View) -> Iterator[Finding]:
    """Findings naming the run and its incomplete parts."""
    for summary, side in ((at.first.a, "a"), (at.first.b, "b")):
        if summary is not None and summary.joined is Joined.INCOMPLETE:
            yield found("parts", side=side, text=summary.text.partition(": ")[2])
