"""Copies of parameters on several ranks, and the gradients that move them.

Which parameters ought to be equal on all ranks is written nowhere. So what was equal on all of them at first, or gets
one gradient on all of them, is taken for copies; what differs from the start and has gradients that differ belongs to
its rank (a local expert). Parts of a whole are compared with copies of the same part alone, and what has no known place
with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from introspect_cli.health.aligned import Gathered
from introspect_cli.health.findings import Hit, Level, observed, rank_rule
from introspect_cli.health.parts import Parts
from introspect_cli.records import Kind, Phase, Status
from introspect_cli.store.launch import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from introspect_cli.health.aligned import AlignedStep, Difference, Ranks, Rows

_TENSORS = frozenset({int(Status.OBSERVED), int(Status.PARTIAL)})


@dataclass
class Copies(Gathered):
    """Since when copies differ.

    Attributes:
        all: parameters that two ranks or more hold.
        shared: those whose copies were equal when they were first seen.
        equal: those whose copies were equal when they were last seen.
        params: the first difference of copies that had been equal, by FQN.
        grads: the first difference of gradients of equal copies, by FQN.
        graded: parameters of which gradients of two ranks were compared.
        stale: parameters that differ from the first step on although their gradients are equal, by FQN.
        layouts: parameters whose shapes or dtypes differ from rank to rank, by FQN.
        dtypes: the first step in which a module's output has another dtype on some ranks, by FQN.
        unequal: in the latest step, the rows of gradients in `grads` that began to differ and are no multiples.
        reduced: in the latest step, the rows of the gradients that are equal, or multiples.
    """

    all: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    equal: set[str] = field(default_factory=set)
    params: dict[str, Difference] = field(default_factory=dict)
    grads: dict[str, Difference] = field(default_factory=dict)
    graded: set[str] = field(default_factory=set)
    stale: dict[str, Difference] = field(default_factory=dict)
    layouts: dict[str, Hit] = field(default_factory=dict)
    dtypes: dict[str, Hit] = field(default_factory=dict)
    unequal: dict[str, Rows] = field(default_factory=dict)
    reduced: list[Rows] = field(default_factory=list)
    _since: dict[str, Difference] = field(default_factory=dict)  # of parameters whose copies are not equal

    def step(self, now: AlignedStep) -> None:
        """Compare the copies of each parameter, of its gradient, and the dtypes of each output."""
        self.unequal, self.reduced = {}, []
        for number in now.in_order(Kind.PARAM, Kind.GRAD, Kind.OUTPUT):
            site, rows = now.sites[number], now.rows[number]
            if len(rows) < 2:
                continue
            if site.kind == Kind.PARAM:
                self._parameter(now, site.fqn, rows)
            elif site.kind == Kind.GRAD and site.phase == Phase.OPTIMIZER:
                self._gradient(now, site.fqn, rows)
            elif site.kind == Kind.OUTPUT and site.phase == Phase.FORWARD and site.fqn not in self.dtypes:
                seen = {rank: row for rank, row in rows.items() if now.batches[rank].status[row] in _TENSORS}
                dtypes = {rank: now.layout(rank, row).dtype for rank, row in seen.items()}
                if len(set(dtypes.values())) > 1:
                    rank, words = unlike(dtypes)
                    evidence = f"the output of {site.fqn} differs in dtype ({words})"
                    self.dtypes[site.fqn] = Hit(now.step, f"output {site.fqn}", evidence, rank)

    def _parameter(self, now: AlignedStep, fqn: str, rows: Rows) -> None:
        layouts = [(rank, now.layout(rank, row)) for rank, row in rows.items()]
        described = {rank: f"{layout.dtype} {list(layout.shape)}" for rank, layout in layouts}
        if len(set(described.values())) > 1:
            rank, words = unlike(described)
            evidence = f"{fqn} differs in dtype or shape ({words})"
            self.layouts.setdefault(fqn, Hit(self.ranks.steps[0], f"param {fqn}", evidence, rank))
            return
        difference = _difference(now, rows)
        first = fqn not in self.all
        self.all.add(fqn)
        if difference is None:
            self.equal.add(fqn)
            self._since.pop(fqn, None)
            if first:
                self.shared.add(fqn)
            return
        self._since.setdefault(fqn, difference)
        if fqn in self.equal:
            self.params.setdefault(fqn, difference)
        self.equal.discard(fqn)

    def _gradient(self, now: AlignedStep, fqn: str, rows: Rows) -> None:
        difference = _difference(now, rows)
        self.graded.add(fqn)
        if fqn not in self.grads:
            if difference is not None and fqn in self.equal:
                self.grads[fqn] = difference
                if not difference.is_multiple:
                    self.unequal[fqn] = rows
            elif difference is None and fqn in self._since:
                self.stale.setdefault(fqn, self._since[fqn])
        if difference is None or difference.is_multiple:
            self.reduced.append(rows)


def _difference(now: AlignedStep, rows: Rows) -> Difference | None:
    """How copies differ; None where all are equal, or hold different parts."""
    by_part: dict[object, dict[int, int]] = {}
    for rank, row in rows.items():
        layout, status = now.layout(rank, row), now.batches[rank].status[row]
        unplaced = status == Status.PARTIAL and (layout.part is None or bool(layout.part.owed))
        if status == Status.NOT_OBSERVED or unplaced:
            return None
        by_part.setdefault((layout.shape, layout.part), {})[rank] = row
    return next((difference for same in by_part.values() if (difference := now.difference(same)) is not None), None)


def is_data_parallel(ranks: Ranks) -> bool:
    """Whether ranks are to be given different samples: a wrapper says so, or each holds all parameters."""
    wrapped = frozenset[int]().union(*ranks.groups)
    if wrapped:
        return set(ranks.numbers) <= wrapped
    copies = ranks.of(Copies)
    return bool(copies.shared) and 2 * len(copies.shared) >= len(copies.all) and not ranks.has_parts


def share_samples(ranks: Ranks, one: int, two: int) -> bool:
    """Whether two ranks are to be given different samples; peers of tensor parallelism get the same."""
    if ranks.groups:
        return any(one in group and two in group for group in ranks.groups)
    return is_data_parallel(ranks)


def copies_of(ranks: Ranks) -> Copies:
    """What is known of copies."""
    copies = ranks.of(Copies)
    observed(copies.all, "two ranks that recorded the same parameter")
    return copies


def since(fqn: str, difference: Difference) -> str:
    """`from step 3 on rank 1's parameter head.bias differs from rank 0's (relative L2 1.4e-03)`."""
    far = f" ({difference.size})" if difference.size else ""
    whose = f"rank {difference.rank}'s parameter {fqn}"
    if len(difference.others) > 1:
        whose = f"the parameter {fqn} of {rank_list(list(difference.others))}"
    return f"from step {difference.step} on {whose} differs from rank {difference.base}'s{far}"


def whose(difference: Difference) -> str:
    """`ranks 1, 2, compared with rank 0`."""
    return f"{rank_list(list(difference.others))}, compared with rank {difference.base}"


@rank_rule(
    "copies-differ",
    Level.ERROR,
    "copies of a parameter differ between ranks",
    "no gradient of it was seen to differ; or it differs from the first step on, although its gradients are equal",
    "a checkpoint that only some ranks loaded, a step that only some took, settings that differ, or experts whose "
    "gradients are averaged over the wrong group",
)
def copies_differ(ranks: Ranks) -> Iterator[Hit]:
    copies = copies_of(ranks)
    for fqn, difference in copies.params.items():
        if fqn in copies.grads and copies.grads[fqn].step <= difference.step:
            continue  # the rule on reductions says so
        why = (
            "although no gradient of it was seen to differ"
            if fqn in copies.graded
            else "and its gradients were not recorded"
        )
        yield Hit(difference.step, f"param {fqn}", f"{since(fqn, difference)}, {why}", difference.rank)
    for fqn, difference in copies.stale.items():
        if fqn not in copies.params and fqn not in ranks.of(Parts).wrong:
            evidence = (
                f"{fqn} differs on {whose(difference)} ({difference.size}) from the first step on record, although its "
                "gradient is equal on all of them: one of them was loaded or written to alone, or these are experts of "
                "their own ranks and their gradients were averaged over them"
            )
            yield Hit(difference.step, f"param {fqn}", evidence, difference.rank)


@rank_rule(
    "rank-layout",
    Level.ERROR,
    "a parameter has another dtype or shape, or a module's output another dtype, on some ranks",
    "it is so in any step that all ranks have",
    "a model that is built or cast differently there, or an autocast that is not entered on all ranks",
)
def rank_layout(ranks: Ranks) -> Iterator[Hit]:
    copies = ranks.of(Copies)
    if not copies.layouts:
        copies_of(ranks)
    yield from (*copies.layouts.values(), *copies.dtypes.values())


def unlike(values: Mapping[int, str]) -> tuple[int, str]:
    """The first rank whose value is not that of the first one, and all values in words."""
    first = next(iter(values.values()))
    words = "; ".join(f"rank {rank}: {value}" for rank, value in values.items())
    return next(rank for rank, value in values.items() if value != first), words
