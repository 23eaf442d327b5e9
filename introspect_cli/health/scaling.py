"""By what gradients are scaled on their way to the optimizer: sums in place of means, and clipping by a local norm.

The gradient of a bias adds up to that of its module's output. So what an optimizer takes tells, beside what the
backward passes of all ranks gave, whether they were averaged. And gradients that were clipped have the norm that they
were clipped to: where different gradients of all ranks have one norm, each rank clipped by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from introspect_cli.health.aligned import Gathered
from introspect_cli.health.collectives import Collectives
from introspect_cli.health.copies import is_data_parallel, share_samples
from introspect_cli.health.findings import Hit, Level, observed, rank_rule
from introspect_cli.health.reduction import REDUCTIONS, passed_back
from introspect_cli.records import Kind, Phase
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from introspect_cli.health.aligned import AlignedStep, Rows, Value
    from introspect_cli.health.aligned import Ranks as RanksOfRun

_NEAR, _TELLS = 1e-5, 1e-3
_ONE_NORM, _OTHER = 1e-6, 1e-3


@dataclass
class Scaling(Gathered):
    """How gradients are scaled.

    Attributes:
        summed: the first step in which a gradient is the sum of what the ranks' backward passes gave, by FQN.
        averaged: parameters whose gradient is the mean of these.
        clipped: the first step in which all ranks' gradients have one norm though they differ.
        compared: whether norms of different gradients were compared.
    """

    summed: dict[str, int] = field(default_factory=dict)
    averaged: set[str] = field(default_factory=set)
    clipped: Hit | None = None
    compared: bool = False

    def step(self, now: AlignedStep) -> None:
        """Compare what optimizers take with what backward passes gave, and the ranks' norms."""
        if len(now.batches) < max(self.ranks.run.world_size, 2):
            return
        gradients = {now.sites[number].fqn: now.rows[number] for number in now.of(Kind.GRAD, Phase.OPTIMIZER)}
        if self._share_samples():
            for fqn, numbers in self.ranks.adding_up.items():
                if fqn in gradients:
                    self._compare(now, fqn, gradients[fqn], [now.rows[n] for n in numbers if n in now.rows])
        if self.clipped is None:
            self._norms(now, gradients)

    def _share_samples(self) -> bool:
        """Whether all ranks train one model on samples of their own."""
        base, *others = self.ranks.numbers
        return is_data_parallel(self.ranks) and all(share_samples(self.ranks, base, rank) for rank in others)

    def _compare(self, now: AlignedStep, fqn: str, rows: Rows, outputs: Sequence[Rows]) -> None:
        taken, passed, ranks = self._taken(now, rows), passed_back(now, outputs, now.batches), len(now.batches)
        if taken is None or passed is None:
            return
        total, size = passed
        if abs(total) * (1 - 1 / ranks) <= _TELLS * size:
            return  # sum and mean are as good as equal
        if abs(taken - total) <= _NEAR * size:
            self.summed.setdefault(fqn, now.step)
        elif abs(taken - total / ranks) <= _NEAR * size:
            self.averaged.add(fqn)

    @staticmethod
    def _taken(now: AlignedStep, rows: Rows) -> float | None:
        """What the elements of a gradient add up to, of which each rank has all or a part; None where that is open."""
        if len(rows) < len(now.batches):
            return None
        parts = {now.layout(rank, row).part: now.value(rank, row) for rank, row in rows.items()}
        if None in parts:
            same = len(parts) == 1 and len({now.checksum(rank, row) for rank, row in rows.items()}) == 1
            return next(iter(parts.values())).total if same else None
        if any(part.owed for part in parts if part is not None):
            return None
        return sum(value.total for value in parts.values() if value.numel)

    def _norms(self, now: AlignedStep, gradients: Mapping[str, Rows]) -> None:
        """Look at the norms of the parts that optimizers take, and of what goes into reductions."""
        parts: dict[int, list[Value]] = {rank: [] for rank in now.batches}
        for rows in gradients.values():
            for rank, row in rows.items():
                part = now.layout(rank, row).part
                if part is not None and not part.owed and part.numel:
                    parts[rank].append(now.value(rank, row))
        self._one_norm(now, parts, "the parts of gradients that each optimizer takes have")
        sent: dict[int, list[Value]] = {rank: [] for rank in now.batches}
        for rank, calls in self.ranks.of(Collectives).calls.items():
            for call in calls.values() if rank in sent else ():
                if call.operation in REDUCTIONS:
                    went = [row for path, row in call.rows.items() if path.startswith(".in")]
                    sent[rank] += [now.value(rank, row) for row in went]
        self._one_norm(now, sent, "what goes into the reductions of each rank has")

    def _one_norm(self, now: AlignedStep, values: Mapping[int, list[Value]], words: str) -> None:
        kept = {rank: [value for value in values[rank] if value.numel > 1 and value.squares > 0] for rank in values}
        if not all(kept.values()) or len({len(several) for several in kept.values()}) > 1:
            return
        base, *others = kept.values()
        if all(
            abs(one.squares - two.squares) <= _OTHER * one.squares
            for other in others
            for one, two in zip(base, other, strict=True)
        ):
            return  # equal copies have one norm
        self.compared = True
        norms = [sum(value.squares for value in several) ** 0.5 for several in kept.values()]
        if max(norms) - min(norms) <= _ONE_NORM * max(norms) and self.clipped is None:
            evidence = (
                f"{words} one norm, {norms[0]:.6g}, though they differ: each rank clips by the norm of these alone"
            )
            self.clipped = Hit(now.step, "grad norm", evidence)


@rank_rule(
    "summed-gradients",
    Level.WARNING,
    "gradients are summed over data-parallel ranks, not averaged",
    "by the sums of a bias's or an embedding's gradient and of that of its module's output on all ranks, where these "
    "are not near zero, nor clipped or scaled",
    "an all-reduce without the division by the number of ranks; the learning rate is as many times as large",
)
def summed_gradients(ranks: RanksOfRun) -> Iterator[Hit]:
    scaling = ranks.of(Scaling)
    needs = "gradients of biases or embeddings of data-parallel ranks, and of their modules' outputs"
    observed(scaling.summed or scaling.averaged, f"{needs} (capture --record default)")
    size = count(ranks.run.world_size, "rank")
    for fqn, step in scaling.summed.items():
        evidence = (
            f"the gradient of {fqn} that the optimizer takes is the sum of what the backward passes of the {size} "
            "gave, not their mean: right only where each rank divides its loss by the samples of all"
        )
        if scaling.averaged:
            evidence += f"; that of {min(scaling.averaged)} is the mean"
        yield Hit(step, f"grad {fqn}", evidence)


@rank_rule(
    "local-clip",
    Level.WARNING,
    "each rank clips its gradients by a norm of its part of them",
    "norms of different gradients are equal on all ranks, to rounding",
    "clip_grad_norm_ on local shards, or before the reduction; the norm has to be that of all ranks",
)
def local_clip(ranks: RanksOfRun) -> Iterator[Hit]:
    scaling = ranks.of(Scaling)
    needs = (
        "gradients of which each rank has a part, or what goes into reductions (capture --record default,collective)"
    )
    observed(scaling.compared, needs)
    if scaling.clipped is not None:
        yield scaling.clipped
