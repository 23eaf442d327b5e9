"""What the ranks of a launch add to an answer: sums for means, who diverges with whom.

Where ranks are compared one by one, what another rank did earlier arrives with the first reduction; so all ranks' first
divergences are looked at together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.records import Kind, Phase
from introspect_cli.store.together import DIFFERENT_COPIES
from introspect_cli.store.whole import WholeReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.reasons.base import Scene
    from introspect_cli.compare.result import Divergence
    from introspect_cli.store.reader import Run

_CLOSE = 1e-4
_EXACT = 1e-8  # what is left beside a factor cannot be told below this
_SIZES = ("world size", "a data-parallel group")
_ORDER = (Phase.START, Phase.DATA, Phase.FORWARD, Phase.RECOMPUTE, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)
_CALLED = frozenset({Kind.OUTPUT.value, Kind.INPUT.value, Kind.LOSS.value, Kind.BATCH.value})


def upstream(first: Divergence) -> tuple[int, int, bool, int]:
    """What the first divergences of ranks are sorted by: an earlier phase on one rank reaches the others later."""
    site = first.site
    place = _ORDER.index(site.phase) if site.phase in _ORDER else len(_ORDER)
    late = site.phase is Phase.OPTIMIZER and site.kind is not Kind.GRAD
    came = site.kind is Kind.COLLECTIVE and ".out" in site.path  # from another rank, then
    return first.step, 2 * place + late, came, first.rank


def reduction_words(scene: Scene) -> str:
    """What a factor between the runs looks like: `a sum where a mean was expected (world size 2)`; "" if nothing."""
    found = _reduction(scene)
    if found is None or scene.first.scale is None:
        return ""
    is_sum = scene.first.scale > 1
    how = "a sum where a mean was expected" if is_sum else "a mean where a sum was expected, or one taken twice"
    return f"{how} ({' or '.join(found[1])})"


def summed(scene: Scene) -> str:
    """The sentence of a gradient that is as many times a's as ranks share the samples; "" for any other.

    Where the backward pass agrees and a's is the mean over those ranks, b's is the sum over them.
    """
    first, found = scene.first, _reduction(scene)
    of_gradient = scene.tells == "gradient" and first.site.phase is Phase.OPTIMIZER
    if found is None or not of_gradient or first.scale is None or first.scale < 1 or len(found[1]) > 1:
        return ""
    whole, (told,) = found
    if not told.startswith(_SIZES):
        return ""
    rest = first.residual or 0.0
    residual = f"{rest:.0e}".replace("e-0", "e-") if rest >= _EXACT else f"below {_EXACT:.0e}".replace("e-0", "e-")
    ranks = _ranks(scene)
    on = f" on {ranks}" if ranks else ""
    group = "the data-parallel group" if whole in _groups(scene.run_b) else f"the {whole} ranks"
    times = f"{first.scale:.6g} x that of a (residual {residual})"
    text = f"the gradient of {first.site.fqn} is {times}{on}: it is summed over {group} instead of averaged"
    differ, recorded = differing_gradients(scene)
    also = ", or all gradients are scaled after that (clipping, unscaling)" if differ == recorded > 1 else ""
    return f"{text}{also}."


def differing_gradients(scene: Scene) -> tuple[int, int]:
    """How many gradients differ in the step, and how many were recorded in it."""
    differ = sum(site.kind is Kind.GRAD for site in scene.facts.sites)
    recorded = [u for u in scene.facts.unions(Kind.GRAD, frozenset({scene.site.phase})) if scene.facts.state[u]]
    return differ, len(recorded)


def _reduction(scene: Scene) -> tuple[int, list[str]] | None:
    """A factor between the runs as a whole number, and of what there are as many; None where it is none, or nothing.

    What is reduced over ranks comes out alike on all of them: what some ranks alone do is no reduction.
    """
    scale = scene.first.scale
    runs = scene.run_a, scene.run_b
    if not scale or scale < 0 or max(run.world_size for run in runs) == 1:
        return None
    if scene.ranks > 1 and not _scaled_on_all(scene):
        return None
    factor = scale if scale > 1 else 1 / scale
    whole = round(factor)
    if whole < 2 or abs(factor / whole - 1) > _CLOSE:
        return None
    told = []
    if whole in {run.world_size for run in runs}:
        told.append(f"{_SIZES[0]} {whole}")
    elif whole in _groups(runs[0]) | _groups(runs[1]):
        told.append(f"{_SIZES[1]} of {whole}")
    if max(_calls(scene)) == whole:
        told.append(f"{whole} microbatches or accumulated batches")
    return (whole, told) if told else None


def _groups(run: Run) -> set[int]:
    """How many ranks share the samples between them, as wrappers told each rank."""
    groups = [manifest.get("data_parallel") for manifest in run.manifests.values()]
    return {len(group) for group in groups if isinstance(group, list)} - {0, 1}


def _calls(scene: Scene) -> tuple[int, int]:
    """How often any module runs in a step, or any loss is computed, at most, in a and in b."""
    found = []
    for side in (scene.facts.sides.a, scene.facts.sides.b):
        most = 1
        for reader in side.readers if isinstance(side, WholeReader) else [side]:  # calls may be folded in a whole
            calls = zip(reader.sites.kind, reader.sites.call.tolist(), strict=True)
            most = max([most, *(call + 1 for kind, call in calls if kind in _CALLED)])
        found.append(most)
    return found[0], found[1]


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
    told = _ranks(scene)
    return f", {told}" if told.startswith("rank") else f", on {told}"


def _ranks(scene: Scene) -> str:
    """The ranks of b that a sentence is about: `rank 1`, `both ranks`; "" where b has one, or that is not known."""
    first = scene.first
    if scene.ranks > 1:
        every = scene.ranks if _on_all(scene) else 0
    else:
        have = [rank for rank in scene.run_b.recorded if _has(scene.run_b, rank, first)]
        every = len(have) if len(have) == scene.run_b.world_size and not _differ(first) else 0
        if every < 2:
            return ""
    if not every:
        return f"rank {first.rank}"
    return "both ranks" if every == 2 else f"all {every} ranks"


def _on_all(scene: Scene) -> bool:
    """Whether all ranks that are compared diverge first at the same place, by the same factor or without one."""
    first = scene.first
    alike = [peer for peer in scene.peers if (peer.step, peer.site) == (first.step, first.site)]
    return len(alike) == scene.ranks and _one(alike)


def _scaled_on_all(scene: Scene) -> bool:
    """Whether all ranks diverge first in this step, at such a record, and by no other factor: stages have others."""
    first = scene.first
    alike = [peer for peer in scene.peers if (peer.step, peer.site.kind) == (first.step, first.site.kind)]
    return len(alike) == scene.ranks and _one([peer for peer in alike if peer.scale is not None])


def _has(run: Run, rank: int, first: Divergence) -> bool:
    sites = run.rank(rank).sites
    wanted = first.site.fqn, first.site.kind.value
    return any(own == wanted for own in zip(sites.fqn, sites.kind, strict=True))


def _differ(first: Divergence) -> bool:
    return first.b is not None and first.b.text.startswith(DIFFERENT_COPIES)


def _one(peers: Sequence[Divergence]) -> bool:
    """Whether ranks diverge by the same factor, or without one."""
    return len({None if peer.scale is None else f"{peer.scale:.4g}" for peer in peers}) == 1
