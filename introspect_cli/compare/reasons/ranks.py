"""What the ranks of a launch add to an answer: sums for means, collectives, parts that are not the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.base import Reason
from introspect_cli.compare.terms.words import how_far, what
from introspect_cli.compare.wholes import most_calls
from introspect_cli.records import Joined, Kind, Phase, Site, Summary
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.evidence import Cause
    from introspect_cli.compare.terms.result import Divergence
    from introspect_cli.store.read.rank_reader import RankReader
    from introspect_cli.store.read.run import Run

_CLOSE = 1e-4
_EXACT = 1e-8  # what is left beside a factor cannot be told below this
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
    reduction = _reduction(scene)
    if reduction is None or scene.first.scale is None:
        return ""
    is_sum = scene.first.scale > 1
    how = "a sum where a mean was expected" if is_sum else "a mean where a sum was expected, or one taken twice"
    return f"{how} ({' or '.join(reduction[1].values())})"


def summed(scene: Scene) -> str:
    """The sentence of a gradient that is as many times a's as ranks share the samples; "" for any other.

    Where the backward pass agrees and a's is the mean over those ranks, b's is the sum over them.
    """
    first, reduction = scene.first, _reduction(scene)
    of_gradient = scene.tells == "gradient" and first.site.phase is Phase.OPTIMIZER
    if reduction is None or not of_gradient or first.scale is None or first.scale < 1:
        return ""
    whole, as_many = reduction
    if "batches" in as_many:
        return ""
    rest = first.residual or 0.0
    residual = f"{rest:.0e}".replace("e-0", "e-") if rest >= _EXACT else f"below {_EXACT:.0e}".replace("e-0", "e-")
    ranks = _ranks(scene)
    on = f" on {ranks}" if ranks else ""
    group = "the data-parallel group" if whole in _groups(scene.runs[1]) else f"the {whole} ranks"
    times = f"{first.scale:.6g} x that of a (residual {residual})"
    text = f"the gradient of {first.site.fqn} is {times}{on}: it is summed over {group} instead of averaged"
    differ, recorded = differing_gradients(scene)
    also = ", or all gradients are scaled after that (clipping, unscaling)" if differ == recorded > 1 else ""
    return f"{text}{also}."


def share_of_ranks(run: Run, share: float) -> tuple[str, str]:
    """Of what some ranks of a run did alone and all took the mean of: `0.5 x ` and `on 1 of 2 ranks `; else blanks."""
    some = round(share * run.world_size)
    alone = 0 < some < run.world_size and abs(share * run.world_size / some - 1) < _CLOSE
    return (f"{share:.3g} x ", f"on {some} of {run.world_size} ranks ") if alone else ("", "")


def differing_gradients(scene: Scene) -> tuple[int, int]:
    """How many gradients differ in the step, and how many were recorded in it."""
    differ = sum(site.kind is Kind.GRAD for site in scene.step.sites)
    recorded = [u for u in scene.step.of(Kind.GRAD, frozenset({scene.site.phase})) if scene.step.state[u]]
    return differ, len(recorded)


def _reduction(scene: Scene) -> tuple[int, dict[str, str]] | None:
    """The factor between the runs, where it is a whole number, and of what there are as many, in words; else None.

    What is reduced over ranks comes out alike on all of them: what some ranks alone do is no reduction.
    """
    scale, runs = scene.first.scale, scene.runs
    if not scale or scale < 0 or max(run.world_size for run in runs) == 1:
        return None
    if scene.ranks > 1 and not _scaled_on_all(scene):
        return None
    factor = scale if scale > 1 else 1 / scale
    whole = round(factor)
    if whole < 2 or abs(factor / whole - 1) > _CLOSE:
        return None
    as_many: dict[str, str] = {}
    if whole in {run.world_size for run in runs}:
        as_many["world"] = f"world size {whole}"
    elif whole in _groups(runs[0]) | _groups(runs[1]):
        as_many["group"] = f"a data-parallel group of {whole}"
    if max(most_calls(reader, _CALLED) for reader in (scene.step.comparison.a, scene.step.comparison.b)) == whole:
        as_many["batches"] = f"{whole} microbatches or accumulated batches"
    return (whole, as_many) if as_many else None


def _groups(run: Run) -> set[int]:
    """How many ranks share the samples between them, as wrappers recorded it on each rank."""
    groups = [manifest.get("data_parallel") for manifest in run.manifests.values()]
    return {len(group) for group in groups if isinstance(group, list)} - {0, 1}


def together(scene: Scene) -> list[str]:
    """Lines on how the ranks diverge at the place of the first divergence."""
    uneven = [f"{text[0].upper()}{text[1:]}." for text in uneven_ranks(scene)]
    same = _at_the_place(scene)
    if len(same) < 2:
        return uneven
    scales = {peer.rank: peer.scale for peer in same}
    if all(scales.values()) and len({f"{scale:.4g}" for scale in scales.values()}) > 1:
        factors = ", ".join(f"rank {rank}: {scale:.4g}" for rank, scale in list(scales.items())[:8])
        return [f"b is another multiple of a on each rank ({factors}): each scales or clips by a norm of its own."]
    return uneven


def uneven_ranks(scene: Scene) -> list[str]:
    """The runs whose ranks have different numbers of samples in the step of the first divergence, as clauses."""
    comparison, first = scene.step.comparison, scene.first
    clauses = []
    for side, reader, step in (("a", comparison.a, first.step), ("b", comparison.b, first.step_b)):
        sizes = _samples_of_ranks(reader.readers, step)  # one rank alone has one size
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"rank {rank}: {size}" for rank, size in list(sizes.items())[:8])
            clauses.append(
                f"the ranks of {side} had different numbers of samples ({listed}{', ...' * (len(sizes) > 8)})"
            )
    return clauses


def _samples_of_ranks(readers: Sequence[RankReader], step: int) -> dict[int, int]:
    """How many samples each rank's batches of a step have, by the first tensor of each; nothing where one has none."""
    sizes: dict[int, int] = {}
    for reader in readers:
        if step not in reader:
            return {}
        batch, seen = reader.read(step), set()
        for number, layout in zip(batch.site.tolist(), batch.layout.tolist(), strict=True):
            shape, draw = reader.layouts[layout].shape, (reader.sites.fqn[number], int(reader.sites.call[number]))
            is_batch = reader.sites.kind[number] == Kind.BATCH.value and reader.sites.phase[number] == Phase.DATA.value
            if is_batch and shape and draw not in seen:
                seen.add(draw)
                sizes[reader.rank] = sizes.get(reader.rank, 0) + int(shape[0])
        if reader.rank not in sizes:
            return {}
    return sizes


def where(scene: Scene) -> str:
    """Which ranks a sentence is about, after the step: `, rank 1`; "" where all diverge alike, or one was compared."""
    if scene.ranks < 2:
        return ""
    return f", {'on ' if _on_all(scene) else ''}{_ranks(scene)}"


def _ranks(scene: Scene) -> str:
    """The ranks of b that a sentence is about: `rank 1`, `both ranks`; "" where b has one, or that is not known."""
    first = scene.first
    if scene.ranks > 1:
        every = scene.ranks if _on_all(scene) else 0
    else:
        run, wanted = scene.runs[1], (first.site.fqn, first.site.kind.value)
        tables = [run.rank(rank).sites for rank in run.recorded]
        have = sum(wanted in zip(sites.fqn, sites.kind, strict=True) for sites in tables)
        unequal = first.b is not None and first.b.joined is Joined.COPIES
        every = have if have == run.world_size and not unequal else 0
        if every < 2:
            return ""
    if not every:
        return f"rank {first.rank}"
    return "both ranks" if every == 2 else f"all {every} ranks"


def _on_all(scene: Scene) -> bool:
    """Whether all ranks that are compared diverge first at the same place, by the same factor or without one."""
    alike = _at_the_place(scene)
    return len(alike) == scene.ranks and _one(alike)


def _at_the_place(scene: Scene) -> list[Divergence]:
    """The first divergences of ranks that are where the first of all is."""
    return [peer for peer in scene.peers if (peer.step, peer.site) == (scene.first.step, scene.first.site)]


def _scaled_on_all(scene: Scene) -> bool:
    """Whether all ranks diverge first in this step, at such a record, and by no other factor: stages have others."""
    first = scene.first
    alike = [peer for peer in scene.peers if (peer.step, peer.site.kind) == (first.step, first.site.kind)]
    return len(alike) == scene.ranks and _one([peer for peer in alike if peer.scale is not None])


def _one(peers: Sequence[Divergence]) -> bool:
    """Whether ranks diverge by the same factor, or without one."""
    return len({None if peer.scale is None else f"{peer.scale:.4g}" for peer in peers}) == 1


class Collective(Reason):
    """Ranks sent or received something else."""

    word = "collective"
    place = "the collectives of the ranks"
    kinds = frozenset({Kind.COLLECTIVE})
    priority = 5

    def sentence(self, scene: Scene) -> str:
        """Both collectives, each with its line, and how many there are in the step."""
        return f"{self._differs(scene)}{_counted(scene)}"

    def _differs(self, scene: Scene) -> str:
        first, site = scene.first, scene.site
        lines = tuple(_line(scene, side) for side in "ab")
        name = what(site)
        if first.only:
            side, other, line = first.only, scene.lacks, lines["ab".index(first.only)]
            text = _shown(first.a or first.b)
            other_line = _in_its_place(scene, other)
            if other_line:
                return f"{name} is {text}{line} in {side}, and another one{other_line} in {other}: their order differs."
            return (
                f"only {side} has {name}{f' ({text}{line})' if text or line else ''}: it is missing in {other}, one "
                f"too many in {side}, or in another place."
            )
        if "." not in site.path:
            return (
                f"{name} is another one: {_shown(first.a)}{lines[0]} in a, {_shown(first.b)}{lines[1]} in b. One is "
                "missing, doubled or in another place."
            )
        return f"{name} differs{how_far(first)}{lines[1]}: what the ranks compute, or the order of collectives."


def _counted(scene: Scene) -> str:
    """How many collectives of these ranks either run has in the step, and whether no_sync may be missing in one."""
    table, fqn = scene.table, scene.site.fqn
    calls: dict[Kind, tuple[set[int], set[int]]] = {Kind.COLLECTIVE: (set(), set()), Kind.LOSS: (set(), set())}
    for number, row_a, row_b in zip(table.site.tolist(), table.row_a.tolist(), table.row_b.tolist(), strict=True):
        site = table.alignment.site(number)
        if site.kind is Kind.LOSS or (site.kind is Kind.COLLECTIVE and site.fqn == fqn):
            for of_run, row in zip(calls[site.kind], (row_a, row_b), strict=True):
                of_run.update({site.call} if row >= 0 else ())
    a, b = map(len, calls[Kind.COLLECTIVE])
    if a == b:
        return ""
    text = f" In that step, there are {count(a, 'collective')} of {fqn} in a and {b:,} in b."
    passes = {len(of_run) for of_run in calls[Kind.LOSS]}
    several = max(passes)
    if len(passes) == 1 and 1 < several <= abs(a - b) + 1:
        more = "b" if b > a else "a"
        text += f" With {several} backward passes, gradients may be reduced after each of them in {more} (no_sync)."
    return text


def _shown(summary: Summary | None) -> str:
    return "" if summary is None else summary.text.strip("'\"")


def _in_its_place(scene: Scene, side: str) -> str:
    """Where the run that lacks a collective calls what it has in its place; "" where it has nothing there."""
    wanted = scene.site
    for site in scene.step.sites:
        same = (site.kind, site.fqn, site.call, _name(site)) == (wanted.kind, wanted.fqn, wanted.call, _name(wanted))
        if same and "." not in site.path and site.path != wanted.path:
            return _line(scene, side, site)
    return ""


def _name(site: Site) -> str:
    return site.path.partition(".")[0].partition("~")[0]


def _line(scene: Scene, side: str, site: Site | None = None) -> str:
    """Where a run calls it (or another), for the end of a clause."""
    reader = scene.step.comparison.a if side == "a" else scene.step.comparison.b
    sites = reader.sites
    wanted = site or scene.site
    for number, fqn in enumerate(sites.fqn):
        if fqn == wanted.fqn and sites.kind[number] == Kind.COLLECTIVE.value and int(sites.call[number]) == wanted.call:
            source = sites.source[number]
            if source and sites.path[number] == wanted.path:
                return f" at {source}"
    return ""


class NotWhole(Reason):
    """The ranks of a run do not hold each element of a tensor exactly once."""

    word = "parts"
    place = "how it is cut over the ranks"
    kinds = frozenset({Kind.PARAM, Kind.BUFFER, Kind.GRAD, Kind.OPTIMIZER_STATE})
    priority = 5

    def applies(self, step: Step, position: int) -> Cause | None:
        """The layouts alone say so; nothing that went into it matters."""
        rows = int(step.divergences.row_a[position]), int(step.divergences.row_b[position])
        batches = step.table.a, step.table.b
        incomplete = [
            row >= 0 and batch.how is not None and batch.how[row] == Joined.INCOMPLETE
            for batch, row in zip(batches, rows, strict=True)
        ]
        return self.cause() if any(incomplete) else None

    def sentence(self, scene: Scene) -> str:
        """In which run, and what of it there is."""
        first = scene.first
        clauses = [
            f"in {name} {summary.text.partition(': ')[2]}"
            for summary, name in ((first.a, "a"), (first.b, "b"))
            if summary is not None and summary.joined is Joined.INCOMPLETE
        ]
        text = f"the parts of {what(first.site)} are not the whole: {', and '.join(clauses)}"
        return f"{text}; {scene.the_cause_is} {self.place}."
