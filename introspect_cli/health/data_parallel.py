"""What ranks that train one model are given, and by what their gradients are scaled.

The gradient of a bias adds up to that of its module's output. So what an optimizer takes tells, beside what the
backward passes of all ranks gave, whether they were averaged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.aligned import AlignedStep, Gathered, Ranks
from introspect_cli.health.equal import has_other_samples, is_data_parallel
from introspect_cli.health.findings import Hit, Level, require, rule
from introspect_cli.health.progress import Progress, uneven_ends
from introspect_cli.records import Kind, Phase
from introspect_cli.texts import count, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.health.aligned import Rows

    Pairs = dict[tuple[int, int], tuple[int, int, int]]

_NEAR, _TELLS = 1e-5, 1e-3


@dataclass
class RankInputs(Gathered):
    """Batches, model inputs and gradient scales, compared between ranks.

    Attributes:
        batches: of each two ranks, in how many draws of a loader their batches were equal, the number of draws, and the
            first step in which they were equal, -1 for none.
        inputs: the same of what goes into outermost modules.
        sizes: the first step in which batches are of different sizes; inputs where there are no batches.
        summed: the first step in which a gradient is the sum of what the ranks' backward passes gave, by FQN.
        averaged: parameters whose gradient is the mean of these.
    """

    batches: Pairs = field(default_factory=dict)
    inputs: Pairs = field(default_factory=dict)
    sizes: Hit | None = None
    summed: dict[str, int] = field(default_factory=dict)
    averaged: set[str] = field(default_factory=set)

    def step(self, now: AlignedStep) -> None:
        """Compare batches and outermost inputs of each two ranks, and gradients with what the backward passes gave.

        Adds to `batches` and `inputs`, by pair of ranks, how many records are equal, how many there are, and the first
        equal one's step; sets `sizes` once. Adds to `summed` and `averaged` only where ranks train on other samples in
        parallel, and all ranks of the launch have the step.
        """
        inputs = [number for number in now.of(Kind.INPUT, Phase.FORWARD) if "." not in now.sites[number].fqn]
        for pairs, numbers in ((self.batches, now.of(Kind.BATCH, Phase.DATA)), (self.inputs, inputs)):
            for number in numbers:
                if self.sizes is None and (pairs is self.batches or not self.batches):
                    self.sizes = _uneven_sizes(now, number)
                rows = now.rows[number]
                for pair in combinations(sorted(rows), 2):
                    same, every, first = pairs.get(pair, (0, 0, -1))
                    equal = len({now.checksum(rank, rows[rank]) for rank in pair}) == 1
                    pairs[pair] = same + equal, every + 1, now.step if equal and first < 0 else first
        base, *others = self.ranks.numbers
        together = is_data_parallel(self.ranks) and all(has_other_samples(self.ranks, base, rank) for rank in others)
        if together and len(now.batches) >= max(self.ranks.run.world_size, 2):
            for number in now.of(Kind.GRAD, Phase.OPTIMIZER):
                self._note_reduction(now, now.sites[number].fqn, now.rows[number])

    def _note_reduction(self, now: AlignedStep, fqn: str, rows: Rows) -> None:
        """Note whether a parameter's gradient is the sum of what the ranks' backward passes gave, or their mean.

        Sets its first such step in `summed`, or adds its name to `averaged`. Nothing is noted where sum and mean are
        about equal, one is unknown, or the gradient is neither.
        """
        outputs = [at for n in self.ranks.adding_up.get(fqn, ()) for at in now.rows.get(n, {}).items()]
        if not outputs or any(now.layout(*at).part is not None for at in outputs):
            return
        taken, ranks = _taken_sum(now, rows), len(now.batches)
        passed, size = np.sum([now.total(*at) for at in outputs], axis=0)
        if abs(passed) * (1 - 1 / ranks) > _TELLS * size:  # else sum and mean are as good as equal
            if abs(taken - passed) <= _NEAR * size:
                self.summed.setdefault(fqn, now.step)
            elif abs(taken - passed / ranks) <= _NEAR * size:
                self.averaged.add(fqn)


def _uneven_sizes(now: AlignedStep, number: int) -> Hit | None:
    """A hit at the rank with the fewest samples, where ranks' batches or inputs at the site `number` differ in size.

    None unless they differ in dimension 0, and in nothing else of their shapes.
    """
    kind = now.sites[number].kind
    shapes = {rank: now.layout(rank, row).shape for rank, row in now.rows[number].items()}
    if len({shape[1:] for shape in shapes.values()}) > 1 or len(set(shapes.values())) < 2 or not all(shapes.values()):
        return None
    words = ", ".join(f"rank {rank}: {shape[0]}" for rank, shape in list(shapes.items())[:8])
    evidence = f"{kind.several} of step {now.step} differ in size ({words}): a mean of means weighs samples unevenly"
    return Hit(now.step, kind.value, evidence, min(shapes, key=lambda rank: shapes[rank][0]))


def _taken_sum(now: AlignedStep, rows: Rows) -> float:
    """The sum of a gradient's elements over all parts, as the optimizer takes it.

    NaN where a part is missing, still to be summed or not finite, or whole gradients differ between ranks.
    """
    parts = {now.layout(rank, row).part: now.total(rank, row) for rank, row in rows.items() if now.numel(rank, row)}
    same = len(parts) == 1 and len({now.checksum(rank, row) for rank, row in rows.items()}) == 1
    if len(rows) < len(now.batches) or (None in parts and not same) or any(part and part.reduction for part in parts):
        return np.nan
    return sum(float(total[0]) for total in parts.values())


@rule(Level.WARNING, over_ranks=True)
def same_samples(ranks: Ranks) -> Iterator[Hit]:
    # Without a loader of torch's, what the models are given shows it, where a wrapper says who shares samples.
    """Data-parallel ranks are given the same batches.

    When: every batch of one is bit for bit that of the other; without a torch DataLoader, every input of their
        models
    Cause: a loader without a DistributedSampler, or one that does not know its rank
    """
    given = ranks.of(RankInputs)
    drawn = given.batches or (given.inputs if ranks.groups else {})
    require(drawn and is_data_parallel(ranks), "data-parallel ranks and their batches")
    # Of one batch, each rank may take its stretch: models that are not given the same.
    taking_shares = {pair for pair, (same, every, _) in given.inputs.items() if same < every}
    site, what, call = ("batch", "batch", "draw") if given.batches else ("input", "inputs", "call")
    alike: dict[tuple[int, int, int], list[int]] = {}
    for (one, two), (same, every, first) in sorted(drawn.items()):
        lowest = min(rank for rank in ranks.numbers if rank == two or has_other_samples(ranks, rank, two))
        if same == every and (one, two) not in taking_shares and has_other_samples(ranks, one, two) and one == lowest:
            alike.setdefault((one, every, first), []).append(two)
    for (one, every, first), others in alike.items():
        evidence = f"{rank_list(others)}: the same {what} as rank {one} in {every} of {count(every, call)}"
        yield Hit(first, site, evidence, others[0])


@rule(Level.WARNING, over_ranks=True)
def uneven_batches(ranks: Ranks) -> Iterator[Hit]:
    """Data-parallel ranks are given batches of different sizes, or more of them.

    When: in one step, batches differ in their first dimension alone; without a torch DataLoader, inputs of their
        models; or ranks that skipped no step end after different numbers of steps
    Cause: a last batch that is not full, or uneven inputs (join); weigh by samples, or drop it
    """
    why = "every step has its loss, so its data was used up before theirs"
    ends = [replace(hit, evidence=f"{hit.evidence}: {why}") for hit in uneven_ends(ranks)] if is_used_up(ranks) else []
    yield from ends
    given = ranks.of(RankInputs)
    held = ends or given.batches or given.inputs
    require(held and is_data_parallel(ranks), "data-parallel ranks and their batches")
    if given.sizes is not None:
        yield given.sizes


@rule(Level.ERROR, over_ranks=True)
def rank_steps(ranks: Ranks) -> Iterator[Hit]:
    """Ranks are at different steps: one skipped an optimizer step, or took one more.

    When: no parameter of a rank changes in a step in which others' do, or it has more losses in one; ranks that
        share no samples end after different numbers of steps
    Cause: a step that one rank skips alone (gradients not finite there), or a condition on its own loss
    """
    hits = ranks.of(Progress).hits
    yield from hits.values()
    if not hits and not is_used_up(ranks):
        yield from uneven_ends(ranks)


def is_used_up(ranks: Ranks) -> bool:
    """Whether ranks that end early only ran out of data.

    All are data-parallel, recorded every step from their first to their last, have had a loss, and were never seen at
    different steps.
    """
    progress, steps = ranks.of(Progress), [ranks.run.rank(rank).entries["step"] for rank in ranks.numbers]
    all_seen = all(len(each) and len(each) == each[-1] - each[0] + 1 for each in steps)
    computing = progress.computing == {*ranks.numbers} and not progress.hits
    return all_seen and computing and is_data_parallel(ranks)


@rule(Level.WARNING, over_ranks=True)
def summed_gradients(ranks: Ranks) -> Iterator[Hit]:
    """Gradients are summed over data-parallel ranks, not averaged.

    When: by the sums of a bias's or an embedding's gradient and of that of its module's output on all ranks, where
        these are not near zero, nor clipped or scaled
    Cause: an all-reduce without the division by the number of ranks; the learning rate is as many times as large
    """
    given = ranks.of(RankInputs)
    needs = "gradients of biases or embeddings of data-parallel ranks, and of their modules' outputs"
    require(given.summed or given.averaged, f"{needs} (capture --record default)")
    for fqn, step in given.summed.items():
        evidence = f"the gradient of {fqn} is the sum, not the mean, of those of {count(ranks.run.world_size, 'rank')}"
        yield Hit(step, f"grad {fqn}", evidence)
