"""Whether the ranks of two runs hold the same parts of what they train, so that they can be compared one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.records import Kind
from introspect_cli.store.ranks.tasks import tasks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.store.ranks.tasks import Task, Work
    from introspect_cli.store.ranks.whole_reader import Reader
    from introspect_cli.store.read.name_tables import SiteTable
    from introspect_cli.store.read.rank_reader import RankReader
    from introspect_cli.store.read.run import Run

    Pairs = Sequence[tuple[RankReader, RankReader]]

_TRAINED = frozenset({Kind.PARAM.value, Kind.GRAD.value})
_STATES = frozenset({Kind.PARAM.value, Kind.OPTIMIZER_STATE.value})

_Names = frozenset[tuple[str, str]]


def are_alike(a: Run, b: Run, pairs: Pairs, work: Work | None) -> bool:
    """Whether each rank of one run has its partner in the other, with the same share of every tensor.

    What one of the runs has on no rank, such as a layer of its own, tells nothing of how the others are shared out.
    """
    if a.world_size != b.world_size or bool(a.whole_of) != bool(b.whole_of):
        return False
    if a.whole_of:
        return bool(a.manifest["whole"].get("layout") == b.manifest["whole"].get("layout"))
    if len(a.ranks) == len(b.ranks) == 1:
        return True
    if work is not None and not _held(pairs[:1])[0]:
        return False  # as other layouts are, as a rule: no task is needed
    every = [_held(pairs)] if work is None else list(work(_held_by, tasks_of([a, b], [one.rank for one, _ in pairs])))
    if not all(alike for alike, _ in every) or not _cut_alike(*pairs[0]):
        return False
    held = set[tuple[_Names, _Names]]().union(*(states for _, states in every))
    of_a, of_b = (frozenset[tuple[str, str]]().union(*each) for each in zip(*held, strict=True)) if held else ((), ())
    both = frozenset(of_a) & frozenset(of_b)
    if not both:  # it shows only where each rank has all
        return all(len(set(each)) < 2 for each in zip(*held, strict=True))
    return all(one & both == two & both for one, two in held)


def _cut_alike(one: RankReader, two: RankReader) -> bool:
    """Whether a rank's parameters and gradients are parts in both runs or in neither, in their first common step."""
    if not (_parts(one) or _parts(two)):
        return True  # no step has to be read
    step = min({*one.entries["step"].tolist()} & {*two.entries["step"].tolist()}, default=None)
    cut_a, cut_b = ({}, {}) if step is None else (_cut(one, step), _cut(two, step))
    return all(cut_a[name] == cut_b[name] for name in cut_a.keys() & cut_b.keys())


def _cut(reader: RankReader, step: int) -> dict[tuple[str, str], bool]:
    """Of the parameters and gradients of a step, whether a rank has a part of each, or a share of a sum."""
    batch, sites = reader.read(step), reader.sites
    return {
        (sites.kind[site], sites.fqn[site]): reader.layouts[layout].part is not None
        for site, layout in zip(batch.site.tolist(), batch.layout.tolist(), strict=True)
        if sites.kind[site] in _TRAINED
    }


def _held_by(task: Task) -> tuple[bool, set[tuple[_Names, _Names]]]:
    """As `_held`, of the ranks of a task."""
    with task.opened() as [a, b]:
        return _held([(a.rank(rank), b.rank(rank)) for rank in task.ranks])


def _held(pairs: Pairs) -> tuple[bool, set[tuple[_Names, _Names]]]:
    """Whether each rank has the same parts of tensors in both runs, and the states of ranks in a and b, each once."""
    states: set[tuple[_Names, _Names]] = set()
    names: dict[int, _Names] = {}
    for one, two in pairs:
        if _parts(one) != _parts(two):
            return False, states
        states.add((_state(one.sites, names), _state(two.sites, names)))
    return True, states


def _state(sites: SiteTable, kept: dict[int, _Names]) -> _Names:
    """The names of states among sites, which ranks share as a rule."""
    if id(sites) not in kept:
        names = zip(sites.fqn, sites.kind, strict=True)
        kept[id(sites)] = frozenset((fqn, kind) for fqn, kind in names if kind in _STATES)
    return kept[id(sites)]


def _parts(reader: Reader) -> frozenset[object]:
    return frozenset((layout.shape, layout.part) for layout in reader.layouts if layout.part is not None)
