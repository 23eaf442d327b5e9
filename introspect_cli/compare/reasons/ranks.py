"""What the ranks of a launch add to an answer: copies that are not equal, sums for means, who diverges with whom.

Where ranks are compared one by one, what another rank did earlier arrives with the first reduction; so all ranks' first
divergences are looked at together. Where wholes are compared, a copy that differs says so itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.records import Kind, Phase
from introspect_cli.store.launched import rank_list
from introspect_cli.store.together import DIFFERENT_COPIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.reasons.base import Scene
    from introspect_cli.compare.result import Divergence

_CLOSE = 1e-4
_ORDER = (Phase.START, Phase.DATA, Phase.FORWARD, Phase.RECOMPUTE, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)
_COPIES = frozenset({Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE})


def upstream(first: Divergence) -> tuple[int, int, bool, int]:
    """What the first divergences of ranks are sorted by: an earlier phase on one rank reaches the others later."""
    site = first.site
    place = _ORDER.index(site.phase) if site.phase in _ORDER else len(_ORDER)
    late = site.phase is Phase.OPTIMIZER and site.kind is not Kind.GRAD
    came = site.kind is Kind.COLLECTIVE and ".out" in site.path  # from another rank, then
    return first.step, 2 * place + late, came, first.rank


def reduction_words(scene: Scene) -> str:
    """What a factor between the runs looks like: `a sum where a mean was expected (world size 2)`; "" if nothing."""
    scale = scene.first.scale
    worlds = {run.world_size for run in (scene.run_a, scene.run_b)} - {1}
    if not scale or not worlds:
        return ""
    whole = round(scale if scale > 1 else 1 / scale)
    if whole < 2 or abs((scale if scale > 1 else 1 / scale) / whole - 1) > _CLOSE:
        return ""
    sizes = [f"world size {whole}"] if whole in worlds else []
    if max(_calls(scene)) == whole:
        sizes.append(f"{whole} microbatches or accumulated batches")
    if not sizes:
        return ""
    how = "a sum where a mean was expected" if scale > 1 else "a mean where a sum was expected, or one taken twice"
    return f"{how} ({' or '.join(sizes)})"


def _calls(scene: Scene) -> tuple[int, int]:
    """How often any module runs in a step, at most, in a and in b."""
    found = []
    for side in (scene.facts.sides.a, scene.facts.sides.b):
        calls = zip(side.sites.kind, side.sites.call.tolist(), strict=True)
        found.append(max((call + 1 for kind, call in calls if kind == Kind.OUTPUT.value), default=1))
    return found[0], found[1]


def copies_words(scene: Scene) -> str:
    """That copies of what diverges are not equal in one run, while they are in the other; "" where that is not seen."""
    first = scene.first
    if first.site.kind not in _COPIES:
        return ""
    for summary, other, name in ((first.b, first.a, "b"), (first.a, first.b, "a")):
        if summary is not None and summary.text.startswith(DIFFERENT_COPIES):
            if other is not None and other.text.startswith(DIFFERENT_COPIES):
                return ""
            return f" In {name} its {summary.text}{_why(first)}."
    peers = [peer for peer in scene.peers if peer.site == first.site and peer.step == first.step]
    if len(peers) < 2 or any(own is None or own.layout.part for peer in peers for own in (peer.a, peer.b)):
        return ""
    marks = [[own.checksum for own in (peer.a, peer.b) if own is not None] for peer in peers]
    equal_a, equal_b = ({own[at] for own in marks} for at in (0, 1))
    if (len(equal_a) == 1) == (len(equal_b) == 1):
        return ""
    name, at = ("b", 1) if len(equal_a) == 1 else ("a", 0)
    others = [peer.rank for peer, own in zip(peers, marks, strict=True) if own[at] != marks[0][at]]
    sound = "a" if name == "b" else "b"
    return (
        f" In {name} its copies differ: {rank_list(others)} from rank {peers[0].rank}; in {sound} they are "
        f"equal{_why(first)}."
    )


def _why(first: Divergence) -> str:
    if first.site.kind is not Kind.GRAD:
        return ""
    return ": it was not reduced, or not over these ranks"


def together(scene: Scene) -> list[str]:
    """Lines on how the ranks diverge at the place of the first divergence."""
    first = scene.first
    same = [peer for peer in scene.peers if (peer.step, peer.site) == (first.step, first.site)]
    if len(same) < 2:
        return []
    scales = {peer.rank: peer.scale for peer in same}
    if all(scales.values()) and len({f"{scale:.4g}" for scale in scales.values()}) > 1:
        told = ", ".join(f"rank {rank}: {scale:.4g}" for rank, scale in list(scales.items())[:8])
        return [f"b is another multiple of a on each rank ({told}): each scales or clips by a norm of its own."]
    return []


def where(scene: Scene) -> str:
    """Which ranks a sentence is about, after the step: `, rank 1`; "" where all diverge alike, or one was compared."""
    if scene.ranks < 2:
        return ""
    first = scene.first
    alike = [peer for peer in scene.peers if (peer.step, peer.site) == (first.step, first.site)]
    if len(alike) == scene.ranks and _one(alike):
        return ", on both ranks" if scene.ranks == 2 else f", on all {scene.ranks} ranks"
    return f", rank {first.rank}"


def _one(peers: Sequence[Divergence]) -> bool:
    """Whether ranks diverge by the same factor, or without one."""
    return len({None if peer.scale is None else f"{peer.scale:.4g}" for peer in peers}) == 1
