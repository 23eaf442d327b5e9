"""Two runs in different layouts: their ranks put together on either side, and what may then be asked of a pair.

Where every rank of a has its partner in b, ranks are compared one by one. Where one run has other ranks, or cut its
tensors otherwise, whole is compared with whole. Two layouts add up in another order, so nothing that follows from a sum
can be bit-equal, and a tolerance is put to it that is told with the answer. Of values that were gathered from several
ranks (samples, activations) only extrema and means are known: those are compared (`passes/tolerate.py`), and no more is
claimed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from introspect_cli.compare.join.split import splits_of
from introspect_cli.records import Joined, Kind
from introspect_cli.store.spread import spread, tasks_of
from introspect_cli.store.whole import Reader, WholeReader
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.join.split import Splits
    from introspect_cli.compare.options import DiffOptions
    from introspect_cli.compare.result import Divergence
    from introspect_cli.store.name_tables import SiteTable
    from introspect_cli.store.reader import Run
    from introspect_cli.store.spread import Task, Work


RTOL, RTOL_COARSE, ATOL = 1e-4, 3e-2, 1e-8
"""What another order of summation may change, in float32 and where both runs compute in bfloat16 or float16.

Between layouts of one training, parameters after AdamW were seen to differ by 2e-5 and by 1e-2."""

_COARSE = frozenset({"bfloat16", "float16"})
_STATES = frozenset({Kind.PARAM.value, Kind.OPTIMIZER_STATE.value})

_Names = frozenset[tuple[str, str]]


def wholes(a: Run, b: Run, splits: Splits | None = None, work: Work | None = None) -> tuple[Reader, Reader]:
    """All ranks of each run as one, calls put together where one run calls its modules more often than the other.

    Where there is `work`, it puts steps together.
    """
    splits = splits or splits_of(a, b, alike=False)
    return spread(a, splits.folds[0], work), spread(b, splits.folds[1], work)


def same_layout(a: Run, b: Run, work: Work | None = None) -> bool:
    """Whether each rank of one run has its partner in the other, with the same share of every tensor.

    What one of the runs has on no rank, such as a layer of its own, tells nothing of how the others are shared out.
    """
    if a.world_size != b.world_size or bool(a.whole_of) != bool(b.whole_of):
        return False
    if a.whole_of:
        return bool(a.manifest["whole"].get("layout") == b.manifest["whole"].get("layout"))
    common = [rank for rank in a.ranks if rank in b.ranks]
    if len(a.ranks) == len(b.ranks) == 1:
        return True
    if work is not None and not _held(a, b, common[:1])[0]:
        return False  # as other layouts are, as a rule: no task is needed
    every = [_held(a, b, common)] if work is None else list(work(_held_by, tasks_of([a, b], common)))
    if not all(alike for alike, _ in every):
        return False
    held = set[tuple[_Names, _Names]]().union(*(states for _, states in every))
    of_a, of_b = (frozenset[tuple[str, str]]().union(*each) for each in zip(*held, strict=True)) if held else ((), ())
    both = frozenset(of_a) & frozenset(of_b)
    if not both:  # it shows only where each rank has all
        return all(len(set(each)) < 2 for each in zip(*held, strict=True))
    return all(one & both == two & both for one, two in held)


def _held_by(task: Task) -> tuple[bool, set[tuple[_Names, _Names]]]:
    """As `_held`, of the ranks of a task."""
    with task.opened() as [a, b]:
        return _held(a, b, task.ranks)


def _held(a: Run, b: Run, ranks: Iterable[int]) -> tuple[bool, set[tuple[_Names, _Names]]]:
    """Whether each rank has the same parts of tensors in both runs, and the states of ranks in a and b, each once."""
    states: set[tuple[_Names, _Names]] = set()
    names: dict[int, _Names] = {}
    for rank in ranks:
        readers = a.rank(rank), b.rank(rank)
        if _parts(readers[0]) != _parts(readers[1]):
            return False, states
        sites = [reader.sites for reader in readers]
        states.add((_state(sites[0], names), _state(sites[1], names)))
    return True, states


def _state(sites: SiteTable, kept: dict[int, _Names]) -> _Names:
    """The names of states among sites, which ranks share as a rule."""
    if id(sites) not in kept:
        names = zip(sites.fqn, sites.kind, strict=True)
        kept[id(sites)] = frozenset((fqn, kind) for fqn, kind in names if kind in _STATES)
    return kept[id(sites)]


def _parts(reader: Reader) -> frozenset[object]:
    return frozenset((layout.shape, layout.part) for layout in reader.layouts if layout.part is not None)


def tolerances(options: DiffOptions, readers: Iterable[Reader]) -> DiffOptions:
    """The options with the tolerance that different layouts need, where none was asked for."""
    if options.tolerant:
        return options
    coarse = all(any(_COARSE & {*layout.dtype.split(" and ")} for layout in reader.layouts) for reader in readers)
    return replace(options, rtol=RTOL_COARSE if coarse else RTOL, rtol_fine=RTOL if coarse else 0.0, atol=ATOL)


def layouts_note(a: Run, b: Run, options: DiffOptions, splits: Splits) -> str:
    """A note on what is compared."""
    folded = ", calls of a module together" if splits.folded else ""
    sizes = [count(run.world_size, "rank") if run.world_size > 1 else "one process" for run in (a, b)]
    sizes = [f"{size}{' put together' * bool(run.whole_of)}" for size, run in zip(sizes, (a, b), strict=True)]
    recorded = any(Kind.OP_OUTPUT.value in run.rank(rank).sites.kind for run in (a, b) for rank in run.recorded[:1])
    operators = " and results of operators" if splits.folded and recorded else ""
    differ, each = "The layouts differ", "rank to rank"
    if bool(a.whole_of) != bool(b.whole_of):
        differ = "The ranks of one run are put together"
    if splits.differ:
        cut = splits.a.words, splits.b.words
        if a.world_size == b.world_size == 1:
            sizes, differ, each = list(cut), "The batch of a step is cut differently", "call to call"
        else:
            sizes = [
                f"{size}, {words}{' each' * (size != 'one process')}" for size, words in zip(sizes, cut, strict=True)
            ]
            each = "rank to rank or call to call"
    sampled = all(run.rank(run.recorded[0]).has_samples for run in (a, b) if run.recorded)
    by = (
        "by its samples where these are on record and equal, else by extrema and means"
        if sampled
        else "by its extrema and means alone"
    )
    coarse = f"; those in {' or '.join(sorted(_COARSE))}, and what comes of them, by {options.rtol:g}"
    coarse = coarse if options.rtol_fine else ""
    return (
        f"{differ} (a: {sizes[0]}, b: {sizes[1]}), so wholes are compared: parts added up, copies counted "
        f"once{folded}, what differs from {each} {by}, random states{operators} not at all. "
        f"Sums in another order may differ by {options.rtol_fine or options.rtol:g} of the values{coarse}."
    )


def stages_note(readers: Iterable[Reader]) -> list[str]:
    """Notes on pipelines whose stages give one name to several things."""
    notes = []
    for name, reader in zip("ab", readers, strict=True):
        roots = sorted(reader.names.distinct_roots) if isinstance(reader, WholeReader) else []
        notes += [
            f"The stages of run {name} have different parameters under equal names: {root} of stage 1 is called "
            f"{root}[stage 1] here, and so on."
            for root in roots
        ]
    return notes


def copies_note(first: Divergence, runs: tuple[Run, Run]) -> list[str]:
    """Notes on copies that are not equal within one run, where the first divergence is of that."""
    notes = [
        f"In run {name} the {first.site.kind.value} {first.site.fqn} is not one value: its {summary.text}."
        for summary, name in ((first.a, "a"), (first.b, "b"))
        if summary is not None and summary.joined is Joined.COPIES
    ]
    return [*notes, *_samples_note(first, runs)]


def _samples_note(first: Divergence, runs: tuple[Run, Run]) -> list[str]:
    """That a run's batch is as small as one rank's share, where it is: all its ranks were given the same."""
    if first.site.kind is not Kind.BATCH or first.a is None or first.b is None:
        return []
    shapes = first.a.layout.shape, first.b.layout.shape
    if not all(shapes) or shapes[0][1:] != shapes[1][1:]:
        return []
    for run, name, shape, other in ((runs[1], "b", *shapes[::-1]), (runs[0], "a", *shapes)):
        if run.world_size > 1 and other[0] == shape[0] * run.world_size:
            size = count(run.world_size, "rank")
            return [f"In run {name} the {size} have one batch between them: each was given the same samples."]
    return []
