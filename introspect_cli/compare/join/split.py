"""Whether two runs cut the batch of a step into other microbatches, and which calls of theirs then belong together.

A run that accumulates gradients calls its model several times a step, each time with a part of the batch. These parts
are put together as ranks' shares are. A model may call a layer several times itself: of each microbatch, the first
calls belong together, then the second ones. How many tokens of a microbatch count follows from the gradient of what the
loss is computed of: it is zero for each token that the loss leaves out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.sites import columns as columns_of
from introspect_cli.compare.join.sites import evaluating, phase_code
from introspect_cli.records import KIND_CODES, Kind, Phase, Site
from introspect_cli.store.whole import Reader, readers_of
from introspect_cli.store.whole_names import stages_in
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from introspect_cli.store.rank_reader import RankReader
    from introspect_cli.store.reader import Run

    Calls = Mapping[tuple[bool, str], int]


_MODULE = [KIND_CODES[kind.value] for kind in (Kind.INPUT, Kind.OUTPUT)]
_CALLED = [*_MODULE, *(KIND_CODES[kind.value] for kind in (Kind.BATCH, Kind.LOSS, Kind.VALUE))]
_CLOSE = 0.2
"""How near losses are where all that is known of a split is them: means of means are no further off, as a rule."""


@dataclass(frozen=True)
class Microbatch:
    """One call of the model on one rank.

    Attributes:
        samples: leading size of what it is given; 0 where that is not on record.
        elements: how many elements that has.
        tokens: rows of the gradient of what the loss is computed of that are not zero; 0 where that is not on record.
    """

    samples: int = 0
    elements: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Microbatches:
    """How one rank of a run takes the batch of a step.

    Attributes:
        number: forward passes of a step, at most.
        first: those of the first step of both; empty where their samples are not on record.
    """

    number: int
    first: tuple[Microbatch, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each."""
        return tuple(micro.samples for micro in self.first)

    @property
    def elements(self) -> int:
        """Elements of what all are given."""
        return sum(micro.elements for micro in self.first)

    @property
    def usual(self) -> int:
        """How many a step has, as the first step has it where that is on record."""
        return len(self.first) or self.number

    @property
    def words(self) -> str:
        """`4 microbatches of 2 samples`, `8 samples at once`."""
        sizes = list(dict.fromkeys(self.sizes))
        if self.number == 1:
            return f"{count(sizes[0], 'sample')} at once" if sizes else "all samples at once"
        if not sizes:
            return f"{self.number} microbatches"
        if len(sizes) > 1:
            return f"{len(self.sizes)} microbatches of {', '.join(map(str, self.sizes))} samples"
        return f"{len(self.sizes)} microbatches of {count(sizes[0], 'sample')}"


@dataclass(frozen=True)
class Splits:
    """How both runs take the batch of a step, and which calls belong together.

    Attributes:
        a: of run a.
        b: of run b.
        folds: of run a, and of run b, how many calls of a name one microbatch makes; of what is to be put together.
        differ: whether they cut the same batch into other microbatches, as far as that is on record.
        root: the outermost module that both call; "" where none is on record.
    """

    a: Microbatches
    b: Microbatches
    folds: tuple[Calls, Calls]
    differ: bool = False
    root: str = ""

    @property
    def assumed(self) -> bool:
        """Whether the losses alone say that both take the same batch: no size of it is on record."""
        return not (self.a.sizes and self.b.sizes)

    @property
    def folded(self) -> bool:
        """Whether any calls are put together."""
        return any(self.folds)


class _Called:
    """How often a run calls in a step what it calls, at most."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.most: dict[tuple[bool, str], int] = {}
        self.batches: set[tuple[bool, str]] = set()
        self._modules: dict[str, int] = {}
        every = stages_in(run.manifests)
        for rank in run.ranks:
            table, stages = run.rank(rank).sites, every.get(rank)
            sites = columns_of(table)
            is_evaluated = evaluating(sites.phase, sites.fqn)
            for at in np.flatnonzero(np.isin(sites.kind, _CALLED)).tolist():
                fqn = table.fqn[at] if stages is None else stages.name(table.fqn[at])
                key = bool(is_evaluated[at]), fqn
                self.most[key] = max(self.most.get(key, 0), int(sites.call[at]) + 1)
                if sites.kind[at] == KIND_CODES[Kind.BATCH.value]:
                    self.batches.add(key)
                if sites.kind[at] in _MODULE and sites.phase[at] == phase_code(Phase.FORWARD):
                    self._modules[fqn] = self.most[key]

    @cached_property
    def modules(self) -> dict[str, int]:
        """The modules that run in training, and how often."""
        return {name: self.most[False, name] for name in self._modules if (False, name) in self.most}

    @property
    def losses(self) -> int:
        """How many losses a step has."""
        return self.most.get((False, "loss"), 0)

    def microbatches(self, root: str, number: int, step: int | None) -> Microbatches:
        """How the lowest rank takes the batch of a step, by what goes into a module."""
        first = [] if step is None else _of_rank(self._run.rank(self._run.recorded[0]), root, step)
        return Microbatches(number, tuple(first) if all(micro.samples for micro in first) else ())


def splits_of(a: Run, b: Run, *, alike: bool) -> Splits:
    """How both runs take the batch of a step."""
    if alike and _same_sites(a, b):
        return Splits(Microbatches(1), Microbatches(1), ({}, {}))
    one, two = _Called(a), _Called(b)
    root = _root(one.modules, two.modules)
    numbers = (one.modules[root], two.modules[root]) if root else (one.losses or 1, two.losses or 1)
    folds = _folds(one, two, *numbers), _folds(two, one, *numbers[::-1])
    steps = [set(run.rank(run.recorded[0]).entries["step"].tolist()) if run.recorded else set() for run in (a, b)]
    step = min(steps[0] & steps[1], default=None)
    splits = Splits(
        one.microbatches(root, numbers[0], step), two.microbatches(root, numbers[1], step), folds, root=root
    )
    return replace(splits, differ=_cut_differently(a, b, splits, step, alike=alike))


def _folds(called: _Called, other: _Called, number: int, others: int) -> dict[tuple[bool, str], int]:
    """How many calls one microbatch makes of what is to be put together, given how many of these either run has."""
    folds: dict[tuple[bool, str], int] = {}
    for key, times in called.most.items():
        evaluated, partner = key[0], other.most.get(key)
        each, rest = divmod(times, number)
        if key in called.batches:
            if number != others and not evaluated:
                folds[key] = 1  # a loader may be asked for several batches ahead
        elif partner is None:
            if number != others and times > 1 and not evaluated:
                folds[key] = 1 if rest else each
        elif partner != times:
            folds[key] = each if not rest and each * others == partner and not evaluated else 1
    return folds


def _same_sites(a: Run, b: Run) -> bool:
    """Whether both have the same calls of all that they call, by one rank."""
    rank = next((rank for rank in a.ranks if rank in b.ranks), None)
    return rank is not None and np.array_equal(a.rank(rank).sites.key, b.rank(rank).sites.key)


def _root(a: Mapping[str, int], b: Mapping[str, int]) -> str:
    """The outermost module that both call, if possible one that is called more often in one of them; "" for none."""
    both = [name for name in a if name in b]
    depth = min((name.count(".") for name in both), default=0)
    outer = [name for name in both if name.count(".") == depth]
    return min(outer, key=lambda name: (a[name] == b[name], a[name] * b[name]), default="")


def _cut_differently(a: Run, b: Run, splits: Splits, step: int | None, *, alike: bool) -> bool:
    """Whether two runs cut the same batch into other microbatches.

    In one layout they do where the parts add up to as much. Where no inputs are on record, the losses have to add up,
    or have the same mean.
    """
    one, two = splits.a, splits.b
    if one.number == two.number or step is None:
        return False
    if not alike:
        return True
    if one.sizes and two.sizes:
        cut = len(one.sizes) != len(two.sizes)  # from the first step on
        return cut and (sum(one.sizes) == sum(two.sizes) or one.elements == two.elements)
    losses = [_losses(run.rank(run.recorded[0]), step) for run in (a, b)]
    if not all(losses) or len(losses[0]) == len(losses[1]):
        return False  # runs that cut a batch differently do so from their first step on
    sums = [sum(values) for values in losses]
    means = [total / len(values) for total, values in zip(sums, losses, strict=True)]
    return any(_near(x, y) for x, y in ((sums[0], sums[1]), (means[0], means[1])))


def _near(one: float, two: float) -> bool:
    return abs(one - two) <= _CLOSE * max(abs(one), abs(two))


def _losses(reader: RankReader, step: int) -> Sequence[float]:
    """The losses of a step, where their values are on record."""
    sites, batch = reader.sites, reader.read(step)
    if "mean" not in batch.floats:
        return []
    rows = [row for row, site in enumerate(batch.site.tolist()) if sites.kind[site] == Kind.LOSS.value]
    return [float(batch.floats["mean"][row]) for row in rows]


def microbatches(reader: Reader, root: str, step: int) -> list[list[Microbatch]]:
    """The microbatches of a step, of each rank."""
    return [_of_rank(rank, root, step) for rank in readers_of(reader)]


def _of_rank(reader: RankReader, root: str, step: int) -> list[Microbatch]:
    """One for each call of the outermost module, by what is first of what it is given and gives."""
    sites, batch = reader.sites, reader.read(step)
    given: dict[int, tuple[int, ...]] = {}
    tokens: dict[int, int] = {}
    last = ""
    for row in np.argsort(batch.sequence, kind="stable").tolist():
        number = int(batch.site[row])
        call, kind, fqn = int(sites.call[number]), sites.kind[number], sites.fqn[number]
        shape = reader.layouts[int(batch.layout[row])].shape
        if fqn == root and sites.phase[number] == Phase.FORWARD.value and kind in {"input", "output"}:
            given[call] = given.get(call) or shape
        elif kind == Kind.GRAD_OUTPUT.value and len(shape) > 1 and "zeros" in batch.counts:
            last = last or fqn
            if fqn == last and call not in tokens:
                tokens[call] = _counted(shape, int(batch.counts["zeros"][row]))
    exact = all(tokens.get(call, 0) > 0 for call in given) and len(tokens) == len(given)
    return [
        Microbatch(shape[0] if shape else 0, math.prod(shape) if shape else 0, tokens[call] if exact else 0)
        for call, shape in sorted(given.items())
    ]


def _counted(shape: tuple[int, ...], zeros: int) -> int:
    """Rows of a gradient that are not zero; 0 where zeros do not come by whole rows."""
    rows, rest = math.prod(shape[:-1]), zeros % shape[-1]
    return 0 if zeros < 0 or rest else rows - zeros // shape[-1]


def values_of(reader: Reader, site: Site, step: int, each: int = 1) -> list[list[float]]:
    """The single numbers that the calls of a rank gave at a site, of each rank, in order of the calls.

    A microbatch makes `each` calls there; the site's call is that within one microbatch.
    """
    of_ranks = []
    for rank in readers_of(reader):
        sites, batch = rank.sites, rank.read(step)
        values: dict[int, float] = {}
        for row, number in enumerate(batch.site.tolist()):
            there = sites.phase[number], sites.kind[number], sites.fqn[number], sites.path[number]
            call = int(sites.call[number])
            if there == (site.phase.value, site.kind.value, site.fqn, site.path) and call % each == site.call % each:
                values[call] = float(batch.floats["mean"][row]) if "mean" in batch.floats else np.nan
        of_ranks.append([values[call] for call in sorted(values)])
    return of_ranks
