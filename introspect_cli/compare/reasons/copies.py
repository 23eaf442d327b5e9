"""Copies of one tensor on the ranks of a run that are not equal: which, and what the other run tells of it.

Sketches are linear. Where gradients of ranks differ and their mean is the gradient of a run in which they are equal,
each rank took what its backward pass gave: nobody reduced them. That holds for any parameter, whatever made its
gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.compare.reasons.gradient import no_multiples
from introspect_cli.records import Joined, Kind, Site, Status
from introspect_cli.store.format.batch import fitted
from introspect_cli.texts import rank_list

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.terms.result import Divergence
    from introspect_cli.store.read.run import Run

_KINDS = frozenset({Kind.PARAM, Kind.GRAD, Kind.OPTIMIZER_STATE})
_CLOSE, _APART = 1e-4, 1e-2
_UNKNOWN = ": it was not reduced, or not over these ranks"


class _Copy(NamedTuple):
    """What one rank has of a tensor: its checksum, and its sketch as float64 (16,), None where there is none."""

    checksum: int
    sketch: NDArray[np.float64] | None


def with_copies(first: Divergence) -> str:
    """The run whose ranks have different copies of what diverges; "" where that is neither, or both."""
    joined = [summary is not None and summary.joined is Joined.COPIES for summary in (first.a, first.b)]
    return "" if joined[0] == joined[1] else "ab"[joined[1]]


def copies_words(scene: Scene) -> str:
    """That copies of what diverges are not equal in one run, while they are in the other; "" where that is not seen."""
    first = scene.first
    if first.site.kind not in _KINDS:
        return ""
    for summary, other, name in ((first.b, first.a, "b"), (first.a, first.b, "a")):
        if summary is not None and summary.joined is Joined.COPIES:
            if other is not None and other.joined is Joined.COPIES:
                return ""
            return f" In {name} its {summary.text}{_why(first, name, _copies(scene, name, first.site))}."
    if scene.ranks < 2 or first.a is None or first.b is None:
        return ""
    copies = {name: _copies(scene, name, first.site) for name in "ab"}
    equal = {name: len({copy.checksum for copy in held.values()}) == 1 for name, held in copies.items()}
    if not all(len(held) == scene.ranks for held in copies.values()) or equal["a"] == equal["b"]:
        return ""
    name, sound = ("b", "a") if equal["a"] else ("a", "b")
    held = copies[name]
    base = min(held)
    others = [rank for rank, copy in held.items() if copy.checksum != held[base].checksum]
    return (
        f" In {name} its copies differ: {rank_list(others)} from rank {base}; in {sound} they are "
        f"equal{_why(first, name, held)}.{_beside(scene, name, held)}"
    )


def _beside(scene: Scene, name: str, held: dict[int, _Copy]) -> str:
    """What was not done to a gradient that is no multiple where the first is, as far as it is known; "" for no such."""
    alone = no_multiples(scene)
    factors = _factors(scene.first, name, held)
    if not alone or not factors:
        return ""
    site, sound = replace(scene.first.site, fqn=alone[0]), "a" if name == "b" else "b"
    copies, wanted = _copies(scene, name, site), next(iter(_copies(scene, sound, site).values()), None)
    if not copies or wanted is None or wanted.sketch is None:
        return ""
    bare = {
        rank: copy._replace(sketch=None if copy.sketch is None else copy.sketch / factors[rank])
        for rank, copy in copies.items()
    }
    why = _not_done(bare, wanted.sketch, sound)
    return "" if why == _UNKNOWN else f" The gradients of {alone[0]}, each without its rank's factor{why}."


def _copies(scene: Scene, name: str, site: Site) -> dict[int, _Copy]:
    """What each rank of a run has at a site of the first step; {} where any has a part of it, or was not seen."""
    first, run = scene.first, scene.runs[name == "b"]
    step = first.step if name == "a" else first.step_b
    copies = {}
    for rank in run.recorded:
        copy = _copy(run, rank, step, site)
        if copy is None:
            return {}
        copies[rank] = copy
    return copies


def _copy(run: Run, rank: int, step: int, site: Site) -> _Copy | None:
    reader = run.rank(rank)
    numbers = [number for number, fqn in enumerate(reader.sites.fqn) if fqn == site.fqn]
    number = next((candidate for candidate in numbers if reader.sites[candidate][0] == site), None)
    if number is None or not (reader.entries["step"] == step).any():
        return None
    batch = reader.read(step)
    rows = np.flatnonzero(batch.site == number)
    if not len(rows) or batch.status[rows[0]] != Status.OBSERVED:
        return None
    row = int(rows[0])
    if reader.layouts[int(batch.layout[row])].part is not None:
        return None
    sketch = None if batch.sketch is None else np.asarray(batch.sketch[row], np.float64)
    return _Copy(int(batch.checksum[row]), sketch)


def _why(first: Divergence, name: str, copies: dict[int, _Copy]) -> str:
    """What was not done to a gradient whose copies differ in one run, as far as that of the other tells."""
    if first.site.kind is not Kind.GRAD:
        return ""
    sound = "a" if name == "b" else "b"
    factors = _factors(first, name, copies)
    if factors:
        times = {rank: f"{factor:.6g}" for rank, factor in sorted(factors.items())[:8]}
        clauses = [
            f"rank {rank} has {'' if factor == '1' else f'{factor} x '}that of {sound}"
            for rank, factor in times.items()
        ]
        return f": {', '.join(clauses)}{' and so on' if len(factors) > 8 else ''}"
    return _not_done(copies, _wanted(first, name), sound)


def _wanted(first: Divergence, name: str) -> NDArray[np.float64]:
    """The sketch of the run whose copies are equal."""
    summary = first.a if name == "b" else first.b
    return np.array(summary.sketch if summary is not None else (), np.float64)


def _factors(first: Divergence, name: str, copies: dict[int, _Copy]) -> dict[int, float]:
    """Of each rank, how many times the other run's gradient it has; {} where any has something else than a multiple."""
    wanted = _wanted(first, name)
    if not wanted.size or first.a is None or first.a.layout.numel < 2:  # one element is a multiple of any other
        return {}
    factors = {}
    for rank, copy in copies.items():
        factor, rest = (0.0, 0.0) if copy.sketch is None else fitted(wanted, copy.sketch)
        if not factor > 0 or rest > _CLOSE:
            return {}
        factors[rank] = factor
    return factors


def _not_done(copies: dict[int, _Copy], wanted: NDArray[np.float64], sound: str) -> str:
    sketches = {rank: copy.sketch for rank, copy in copies.items() if copy.sketch is not None}
    if len(sketches) < 2 or len(sketches) < len(copies) or not wanted.size or not np.linalg.norm(wanted) > 0:
        return _UNKNOWN
    middle = np.mean(list(sketches.values()), axis=0)
    if not max(_far(copy, middle) for copy in sketches.values()) > _APART:
        return _UNKNOWN
    right = [rank for rank, copy in sketches.items() if _far(copy, wanted) <= _CLOSE]
    for word, total in (("mean", middle), ("sum", middle * len(sketches))):
        if _far(total, wanted) <= _CLOSE:
            text = f": their {word} is that of {sound}, so"
            alike = _alike(copies)
            if len(alike) == len(copies):
                return f"{text} each rank took its own: it was not reduced"
            each = " and ".join(f"on {rank_list(ranks)}" for ranks in alike)
            return f"{text} it was not reduced over all ranks (it is one {each})"
    if right:
        others = rank_list([rank for rank in sketches if rank not in right])
        return f": {rank_list(right)} has that of {sound}; on {others} it was not reduced, or changed after that"
    return _UNKNOWN


def _alike(copies: dict[int, _Copy]) -> list[list[int]]:
    by_checksum: dict[int, list[int]] = {}
    for rank, copy in copies.items():
        by_checksum.setdefault(copy.checksum, []).append(rank)
    return list(by_checksum.values())


def _far(one: NDArray[np.float64], two: NDArray[np.float64]) -> float:
    size = max(float(np.linalg.norm(one)), float(np.linalg.norm(two)))
    return float(np.linalg.norm(one - two)) / size if size else 0.0
