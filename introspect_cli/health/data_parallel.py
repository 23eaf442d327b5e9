"""What ranks that train one model are given, and at which steps they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from introspect_cli.health.aligned import AlignedStep, Gathered, Ranks
from introspect_cli.health.equal import has_other_samples, is_data_parallel
from introspect_cli.health.findings import Hit, Level, require, rule
from introspect_cli.health.progress import Progress, uneven_ends
from introspect_cli.records import Kind, Phase
from introspect_cli.texts import count, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator

    Pairs = dict[tuple[int, int], tuple[int, int, int]]


class RankInputs(Gathered):
    """Batches and model inputs, compared between ranks.

    Attributes:
        batches: of each two ranks, in how many draws of a loader their batches were equal, the number of draws, and the
            first step in which they were equal, -1 for none.
        inputs: the same of what goes into outermost modules.
        sizes: the first step in which batches are of different sizes; inputs where there are no batches.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Begin with nothing seen; `step` compares."""
        super().__init__(ranks)
        self.batches: Pairs = {}
        self.inputs: Pairs = {}
        self.sizes: Hit | None = None

    def step(self, now: AlignedStep) -> None:
        """Compare batches and outermost inputs of each two ranks.

        Adds to `batches` and `inputs`, by pair of ranks, how many records are equal, how many there are, and the first
        equal one's step; sets `sizes` once.
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


def _uneven_sizes(now: AlignedStep, number: int) -> Hit | None:
    """A hit at the rank with the fewest samples, where ranks' batches or inputs at the site `number` differ in size.

    None unless they differ in dimension 0, and in nothing else of their shapes.
    """
    kind = now.sites[number].kind
    shapes = {rank: now.layout(rank, row).shape for rank, row in now.rows[number].items()}
    if len({shape[1:] for shape in shapes.values()}) > 1 or len(set(shapes.values())) < 2 or not all(shapes.values()):
        return None
    words = ", ".join(f"rank {rank}: {shape[0]}" for rank, shape in list(shapes.items())[:8])
    evidence = (
        f"{'batches' if kind == Kind.BATCH else 'inputs'} of step {now.step} are of different sizes ({words}): where "
        "each rank takes a mean, and the mean of those is taken, samples of the smaller batch count for more"
    )
    return Hit(now.step, kind, evidence, min(shapes, key=lambda rank: shapes[rank][0]))


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
    require(
        (ends or given.batches or given.inputs) and is_data_parallel(ranks), "data-parallel ranks and their batches"
    )
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
    yield from hits
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
