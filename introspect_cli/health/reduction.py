"""Gradients that differ between ranks when the optimizer takes them, and what the records prove of their reduction.

A script divides before a reduction, after it, or never, so what an optimizer takes is a multiple of what came out of
the collective. Sketches tell multiples. Of gradients that a wrapper reduces in one bucket nothing is proved.

Where collectives were not recorded, a bias that is added to a module's output still tells, and the rows of an
embedding: the elements of their gradient add up to those of the gradient of the output. Where these sums differ between
ranks, they tell whose gradient an optimizer takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.health.aligned import Gathered
from introspect_cli.health.collectives import Collectives
from introspect_cli.health.copies import Copies, copies_of, since, whose
from introspect_cli.health.findings import Hit, Level, rank_rule
from introspect_cli.health.outputs import Outputs, Progress
from introspect_cli.health.peers import Peers
from introspect_cli.records import Status
from introspect_cli.store.format.batch import fitted
from introspect_cli.texts import count, group_size, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from introspect_cli.health.aligned import AlignedStep, Ranks, Rows, Value

_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce", "broadcast")
_PARALLEL = 1e-5
_ROUNDING, _RANKS_DIFFER = 1e-5, 1e-3


@dataclass
class Reductions(Gathered):
    """Why gradients differ between ranks, looked up in the step in which they begin to.

    Attributes:
        proofs: what the records prove of the reduction of a parameter's gradient, in words, by FQN.
        alike: ranks by the gradient that they have, where some have one and others another, by FQN.
    """

    proofs: dict[str, str] = field(default_factory=dict)
    alike: dict[str, list[list[int]]] = field(default_factory=dict)

    def step(self, now: AlignedStep) -> None:
        """Explain the gradients that begin to differ in a step."""
        copies, collectives = self.ranks.of(Copies), self.ranks.of(Collectives)
        if not copies.unequal:
            return
        recorded = _Recorded(now, self.ranks) if collectives.seen else None
        for fqn, rows in copies.unequal.items():
            proof = recorded.proof(rows) if recorded is not None else ""
            proof = proof or self._not_added(now, fqn, rows)
            if proof:
                self.proofs[fqn] = proof
            self.alike[fqn] = self._alike(now, rows)

    def _alike(self, now: AlignedStep, rows: Rows) -> list[list[int]]:
        """Ranks by their gradient; nothing where each has another, or a part."""
        ranks: dict[int, list[int]] = {}
        for rank, row in rows.items():
            if now.layout(rank, row).part is not None:
                return []
            ranks.setdefault(now.checksum(rank, row), []).append(rank)
        return [sorted(same) for same in ranks.values()] if len(ranks) < len(rows) else []

    def _not_added(self, now: AlignedStep, fqn: str, rows: Rows) -> str:
        """That ranks take what their backward passes gave, by sums of elements; "" where that is not known."""
        outputs = [now.rows[number] for number in self.ranks.adding_up.get(fqn, ()) if number in now.rows]
        if len(rows) < 2 or not outputs:
            return ""
        given, size, taken = {}, {}, {}
        for rank, row in rows.items():
            total, passed = finite(now, rank, row), passed_back(now, outputs, [rank])
            if total is None or passed is None:
                return ""
            (given[rank], size[rank]), taken[rank] = passed, total.total
        middle, scale = float(np.mean(list(given.values()))), max(size.values())
        alone = [
            rank
            for rank, total in given.items()
            if abs(total - middle) > _RANKS_DIFFER * scale and abs(taken[rank] - total) <= _ROUNDING * scale
        ]
        if not alone:
            return ""
        where = "any rank" if len(alone) == self.ranks.run.world_size else rank_list(sorted(alone))
        return f"its gradient was not reduced on {where}"


def finite(now: AlignedStep, rank: int, row: int) -> Value | None:
    """A record whose sums are known: None where it is a part, or not all finite."""
    value, counts = now.value(rank, row), now.batches[rank].counts
    odd = any(int(counts[name][row]) != 0 for name in ("nans", "posinfs", "neginfs") if name in counts)
    whole = now.layout(rank, row).part is None and not odd and np.isfinite([value.total, value.size]).all()
    return value if whole else None


def passed_back(now: AlignedStep, outputs: Sequence[Rows], ranks: Iterable[int]) -> tuple[float, float] | None:
    """What the backward passes of some ranks gave at outputs, added up, and its absolutes; None where that is open."""
    given = [finite(now, rank, held[rank]) for rank in ranks for held in outputs if rank in held]
    values = [value for value in given if value is not None]
    if not values or len(values) < len(given):
        return None
    return sum(value.total for value in values), sum(value.size for value in values)


class _Passed(NamedTuple):
    """A tensor that went into a collective or came out of one.

    Attributes:
        value: what is on record of it.
        group: the ranks of the collective.
        number: which collective of that group.
        where: what it is, with its line.
    """

    value: Value
    group: str
    number: int
    where: str


class _Recorded:
    """The reductions of one step, rank by rank."""

    def __init__(self, now: AlignedStep, ranks: Ranks) -> None:
        self._now = now
        self._given: dict[int, list[_Passed]] = {}
        self._gives: dict[int, list[_Passed]] = {}
        for rank, calls in ranks.of(Collectives).calls.items():
            sides: tuple[list[_Passed], list[_Passed]] = [], []
            for (group, number), call in calls.items():
                for path, row in call.rows.items() if call.operation in _REDUCTIONS else ():
                    value = _measured(now, rank, row)
                    if value is not None:
                        sides[path.startswith(".out")].append(_Passed(value, group, number, call.where))
            self._given[rank], self._gives[rank] = sides

    def proof(self, rows: Rows) -> str:
        """Why a gradient differs between ranks, as far as the collectives tell; "" where they do not."""
        gradients = {rank: _measured(self._now, rank, row) for rank, row in rows.items()}
        values = {rank: value for rank, value in gradients.items() if value is not None and value.squares > 0}
        if len(values) < len(rows) or not all(self._gives[rank] or self._given[rank] for rank in rows):
            return ""
        came, went = (
            {rank: passed for rank, value in values.items() if (passed := _same(value, among[rank])) is not None}
            for among in (self._gives, self._given)
        )
        if len(came) == len(rows):
            return _over_whom(came)
        kept = [rank for rank in went if rank not in came]
        if kept:
            return (
                f"its gradient was not reduced on {rank_list(sorted(kept))}: its optimizer takes what went into "
                f"{went[kept[0]].where} there, not what came out"
            )
        return ""


def _measured(now: AlignedStep, rank: int, row: int) -> Value | None:
    """A record with all that reductions are recognised by; None where any of it is absent."""
    value = now.value(rank, row)
    if value.sketch is None or now.batches[rank].status[row] == Status.NOT_OBSERVED:
        return None
    numbers = (value.low, value.high, value.mean, value.amean, value.squares)
    return value if np.isfinite(numbers).all() and np.isfinite(value.sketch).all() else None


def _is_multiple(one: Value, two: Value) -> bool:
    """Whether two tensors of as many elements are positive multiples of each other, by their sketches."""
    if one.numel != two.numel or one.numel < 2 or one.sketch is None or two.sketch is None:
        return False  # a single element is a multiple of any other
    factor, rest = fitted(two.sketch, one.sketch)
    return factor > 0 and rest <= _PARALLEL


def _same(gradient: Value, among: Sequence[_Passed]) -> _Passed | None:
    """The first tensor that a gradient is a multiple of."""
    return next((passed for passed in among if _is_multiple(gradient, passed.value)), None)


def _over_whom(came: Mapping[int, _Passed]) -> str:
    """What is wrong with the collectives that a gradient came out of on each rank."""
    base = min(came)
    first, groups = came[base], dict.fromkeys(passed.group for passed in came.values())
    if len(groups) > 1:
        if any(group_size(name) == len(came) for name in groups):
            return ""
        over = " and over ".join(f"{name} alone" for name in groups)
        return f"its gradient was reduced over {over} ({first.where})"
    other = next((rank for rank in sorted(came) if came[rank].number != first.number), None)
    if other is None:
        return ""
    return (
        f"its gradient came out of collective {first.number} of {first.group} on rank {base} and out of collective "
        f"{came[other].number} on rank {other} ({first.where}), so the ranks reduced gradients in another order"
    )


@rank_rule(
    "reduction",
    Level.ERROR,
    "gradients of one parameter differ between ranks when the optimizer takes them",
    "the parameter was equal on them before; --record default,collective tells over whom the gradient was reduced",
    "an all-reduce that is missing, over the wrong group, or skipped on some ranks; of multiples, clipping or "
    "unscaling by what each rank has of its own",
)
def reduction(ranks: Ranks) -> Iterator[Hit]:
    copies = copies_of(ranks)
    alone = {fqn for fqn, difference in copies.grads.items() if not difference.is_multiple and not difference.single}
    begun = {copies.grads[fqn].step for fqn in alone}
    # Where one gradient differs, all others are multiples that step, as clipping by a norm makes them.
    others = {fqn: difference.step for fqn, difference in copies.grads.items() if fqn not in alone}
    followers = {fqn: step for fqn, step in others.items() if step in begun}
    looked_at = count(len(ranks.steps), "step")
    for fqn, gradient in copies.grads.items():
        if fqn in followers:
            continue
        param, proof = copies.params.get(fqn), ranks.of(Reductions).proofs.get(fqn)
        why = proof or _likely(ranks, fqn)
        if param is not None and proof:
            evidence = f"{since(fqn, param)}: {why}"
        elif param is not None:
            far = f" ({gradient.size})" if gradient.size else ""
            evidence = f"{since(fqn, param)}, and its gradient{far} when the optimizer takes it: {why}"
        else:
            evidence = (
                f"the gradient of {fqn} differs on {whose(gradient)} ({gradient.size}) when the optimizer takes it, "
                f"although the parameter was equal on all ranks: {why}"
            )
        number = sum(step == gradient.step for step in followers.values())
        if number:
            are = "are multiples there, as clipping by a norm that this one is part of makes them"
            is_ = "is a multiple there, as clipping by a norm that this one is part of makes it"
            evidence += f"; {count(number, 'other gradient')} {are if number > 1 else is_}"
        if copies.rejoined is not None and not proof:
            averaged = "as averaging them now and then (local SGD) leaves them"
            evidence += f"; all copies are equal again in step {copies.rejoined}, {averaged}"
        yield Hit(gradient.step, f"grad {fqn}", f"{evidence} ({looked_at} looked at)", gradient.rank)


def _likely(ranks: Ranks, fqn: str) -> str:
    """Why gradients of copies differ, where nothing is proved: the reduction, unless the ranks differed before it."""
    gradient = ranks.of(Copies).grads[fqn]
    peers = ranks.of(Peers).first
    began = [hit.step for hit in (*ranks.of(Progress).hits, *([] if peers is None else [peers]))]
    began += [each.first.step for each in ranks.of(Outputs).compared.values() if each.first is not None]
    if any(step <= gradient.step for step in began):
        return "the ranks had diverged before it, as another finding says"
    if gradient.is_multiple:
        return "it is a multiple there: divided by another number, clipped by a norm of its own or unscaled alone"
    alike = ranks.of(Reductions).alike.get(fqn)
    if alike:
        which = " and another ".join(f"on {rank_list(same)}" for same in alike)
        return f"it is one gradient {which}: it was not reduced over all ranks, or changed after that"
    return "it was not reduced, or not over these ranks, or changed on one after that"
