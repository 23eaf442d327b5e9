"""The microbatches of a step, as its records tell them: how many samples each has, and how many of its tokens count.

A run that accumulates gradients calls its model several times a step, each time with a part of the batch. How many
tokens of a microbatch count follows from the gradient of what the loss is computed of: it is zero for each token that
the loss leaves out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Kind, Phase, Site
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Collection

    from introspect_cli.store.ranks.whole_reader import Reader
    from introspect_cli.store.read.rank_reader import RankReader


@dataclass(frozen=True)
class Microbatch:
    """One call of the model on one rank.

    Attributes:
        samples: leading size of what it is given; 0 where that is not on record.
        elements: how many elements that has.
        tokens: rows of the gradient of what the loss is computed of that are not zero; 0 where that is not on record.
        shape: of what it is given.
    """

    samples: int = 0
    elements: int = 0
    tokens: int = 0
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Microbatches:
    """How one rank of a run takes the batch of a step.

    Attributes:
        number: forward passes of a step, at most.
        first: those of the first step of both; empty where their samples are not on record.
        singly: whether each is one sample, without a dimension for samples.
    """

    number: int
    first: tuple[Microbatch, ...] = ()
    singly: bool = False

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
        if self.singly:
            return f"{len(self.sizes)} samples, one at a time"
        if self.number == 1:
            return f"{count(sizes[0], 'sample')} at once" if sizes else "all samples at once"
        if not sizes:
            return f"{self.number} microbatches"
        if len(sizes) > 1:
            return f"{len(self.sizes)} microbatches of {', '.join(map(str, self.sizes))} samples"
        return f"{len(self.sizes)} microbatches of {count(sizes[0], 'sample')}"


def microbatches_of(reader: RankReader, root: str, step: int | None, number: int) -> Microbatches:
    """How a rank takes the batch of a step in so many forward passes, by what goes into its outermost module."""
    first = [] if step is None else _of_rank(reader, root, step)
    return Microbatches(number, tuple(first) if all(micro.samples for micro in first) else ())


def one_by_one(cut: Microbatches, other: Microbatches) -> Microbatches:
    """Those of a run, each as one sample where the other run is given several such at once."""
    wholes = {micro.shape[1:] for micro in other.first}
    if other.number >= cut.number or not cut.first or any(micro.shape not in wholes for micro in cut.first):
        return cut
    return replace(cut, first=tuple(replace(micro, samples=1) for micro in cut.first), singly=True)


def microbatches(reader: Reader, root: str, step: int, rule: Microbatches) -> list[list[Microbatch]]:
    """The microbatches of a step, of each rank, of a run that takes its batches by a rule."""
    ranks = [_of_rank(rank, root, step) for rank in reader.readers]
    return [[replace(micro, samples=1) for micro in rank] for rank in ranks] if rule.singly else ranks


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
        Microbatch(shape[0] if shape else 0, math.prod(shape) if shape else 0, tokens[call] if exact else 0, shape)
        for call, shape in sorted(given.items())
    ]


def _counted(shape: tuple[int, ...], zeros: int) -> int:
    """Rows of a gradient that are not zero; 0 where zeros do not come by whole rows."""
    rows, rest = math.prod(shape[:-1]), zeros % shape[-1]
    return 0 if zeros < 0 or rest else rows - zeros // shape[-1]


def values_of(reader: Reader, site: Site, step: int) -> list[list[float]]:
    """The single numbers that the calls of a rank gave at a site, of each rank, in order of the calls."""
    of_ranks = []
    for rank in reader.readers:
        sites, batch = rank.sites, rank.read(step)
        values: dict[int, float] = {}
        for row, number in enumerate(batch.site.tolist()):
            there = sites.phase[number], sites.kind[number], sites.fqn[number], sites.path[number]
            if there == (site.phase.value, site.kind.value, site.fqn, site.path):
                values[int(sites.call[number])] = float(batch.floats["mean"][row]) if "mean" in batch.floats else np.nan
        of_ranks.append([values[call] for call in sorted(values)])
    return of_ranks


def most_calls(reader: Reader, kinds: Collection[str]) -> int:
    """How often a run calls in a step what records one of these kinds, at most."""
    most = 0
    for rank in reader.readers:  # calls may be folded in a whole
        calls, kind_of = rank.sites.call, rank.sites.kind
        most = max([most, *(int(calls[at]) for at in np.flatnonzero(calls).tolist() if kind_of[at] in kinds)])
    return most + 1


def losses_of(reader: RankReader, step: int) -> int:
    """How many losses a step has."""
    return sum(reader.sites.kind[site] == Kind.LOSS.value for site in reader.read(step).site.tolist())
