"""What each rank computes, and how far it gets: what was skipped, what has no gradient, and outputs of one module.

Equal inputs, parameters and buffers must give equal outputs. The random states that modules draw from are looked at
beside: where they differ, outputs may.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.aligned import AlignedStep, Gathered, Ranks
from introspect_cli.health.copies import Copies, is_data_parallel
from introspect_cli.health.findings import Hit, Level, rank_rule
from introspect_cli.records import Kind, Phase
from introspect_cli.store.ranks.tasks import ended_unevenly
from introspect_cli.texts import count, rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from introspect_cli.health.aligned import Difference


@dataclass
class Progress(Gathered):
    """Steps in which ranks did not do the same.

    Attributes:
        losses: the first step in which ranks have another number of losses.
        unmoved: the first step in which no parameter of some ranks changed, and those of others did.
        missing: the first step in which only some ranks have a gradient of a parameter, by its FQN.
        computing: ranks that have had a loss.
    """

    losses: Hit | None = None
    unmoved: Hit | None = None
    missing: dict[str, Hit] = field(default_factory=dict)
    computing: set[int] = field(default_factory=set)
    _last: dict[tuple[int, str], int] = field(default_factory=dict)  # checksums of each rank's parameters, as last seen

    @property
    def hits(self) -> list[Hit]:
        """Where ranks began to be at different steps."""
        return [hit for hit in (self.losses, self.unmoved) if hit is not None]

    def step(self, now: AlignedStep) -> None:
        """Compare what the ranks did in a step."""
        self._gradients(now)
        if self.losses is None:
            self.losses = self._losses(now)
        moved = self._moves(now)
        if self.unmoved is None and len(set(moved.values())) > 1:
            changed, unchanged = ([rank for rank in sorted(moved) if moved[rank] is flag] for flag in (True, False))
            evidence = (
                f"no parameter of {rank_list(unchanged)} was changed in step {now.step}, those of {rank_list(changed)} "
                "were: the optimizer step was skipped there alone (a gradient that was not finite, or a condition of "
                "its own)"
            )
            self.unmoved = Hit(now.step, f"rank {unchanged[0]}", evidence, unchanged[0])

    def _losses(self, now: AlignedStep) -> Hit | None:
        times = Counter(rank for number in now.of(Kind.LOSS, Phase.LOSS) for rank in now.rows[number])
        self.computing |= times.keys()
        numbers = [rank for rank in self.ranks.numbers if rank in self.computing]  # of a pipeline, the last stage's
        if len({times[rank] for rank in numbers}) < 2:
            return None
        most, least = (pick(numbers, key=lambda rank: times[rank]) for pick in (max, min))
        why = "it did not step its optimizer where the others did, or ran more batches for it"
        if not times[least]:
            why = f"rank {least} stepped its optimizer once more, without a forward pass"
        evidence = (
            f"rank {most} has {count(times[most], 'loss', 'losses')} in step {now.step} and rank {least} "
            f"{times[least]}: {why}"
        )
        return Hit(now.step, f"rank {most}", evidence, most)

    def _gradients(self, now: AlignedStep) -> None:
        holders = {now.sites[n].fqn: now.rows[n] for n in now.of(Kind.PARAM, Phase.START, Phase.OPTIMIZER)}
        gradients = now.of(Kind.GRAD, Phase.OPTIMIZER)
        stepping = {rank for number in gradients for rank in now.rows[number]}
        for number in gradients:
            fqn, rows = now.sites[number].fqn, now.rows[number]
            params = [item for item in holders.get(fqn, {}).items() if item[0] in stepping and item[0] not in rows]
            without = [rank for rank, row in params if now.numel(rank, row)]
            if without and all(now.layout(rank, row).part is None for rank, row in rows.items()):
                evidence = (
                    f"{rank_list(without)} has no gradient of {fqn} in step {now.step} and {rank_list(list(rows))} has "
                    "one: it was not used there, and nobody reduced it"
                )
                self.missing.setdefault(fqn, Hit(now.step, f"grad {fqn}", evidence, without[0]))

    def _moves(self, now: AlignedStep) -> dict[int, bool]:
        """Whether a rank changed any of the parameters that it has a gradient of."""
        with_grad = {(rank, now.sites[n].fqn) for n in now.of(Kind.GRAD, Phase.OPTIMIZER) for rank in now.rows[n]}
        before, moved = dict(self._last), dict[int, bool]()
        for phase in (Phase.START, Phase.OPTIMIZER):
            for number in now.of(Kind.PARAM, phase):
                for rank, row in now.rows[number].items():
                    held, checksum = (rank, now.sites[number].fqn), now.checksum(rank, row)
                    if phase is Phase.START:
                        before[held] = checksum
                    elif held in before and held in with_grad:
                        moved[rank] = moved.get(rank, False) or before[held] != checksum
                    self._last[held] = checksum
        return moved


@rank_rule(
    "lost-rank",
    Level.ERROR,
    "a rank left nothing, was cut off, or ended before the others",
    "its records are missing, have no end, or stop at an earlier step than the others'",
    "a crash, a kill or a hang of that rank; its own output says more",
)
def lost_rank(ranks: Ranks) -> Iterator[Hit]:
    run = ranks.run
    if ended_unevenly(run):
        return  # other rules say why
    last = {rank: run.rank(rank).last_step for rank in run.ranks}
    missing = [rank for rank in range(run.world_size) if last.get(rank) is None]
    latest = max((step for step in last.values() if step is not None), default=0)
    short = [rank for rank, step in last.items() if step is not None and step < latest]
    rank = (missing or short or [0])[0]
    for sentence in run.lost_ranks:
        yield Hit(last.get(rank) or 0, f"rank {rank}", sentence, rank)


@rank_rule(
    "rank-steps",
    Level.ERROR,
    "ranks are at different steps: one skipped an optimizer step, or took one more",
    "no parameter of a rank changes in a step in which others' do, or it has more losses in one; ranks that share no "
    "samples end after different numbers of steps",
    "a step that one rank skips alone (gradients not finite there), or a condition on its own loss",
)
def rank_steps(ranks: Ranks) -> Iterator[Hit]:
    hits = ranks.of(Progress).hits
    yield from hits
    if not hits and not used_up(ranks):
        yield from uneven_ends(ranks)


def uneven_ends(ranks: Ranks) -> Iterator[Hit]:
    """Ranks that ended by themselves after fewer steps than others."""
    if ended_unevenly(ranks.run):
        last = {rank: ranks.run.rank(rank).last_step or 0 for rank in ranks.numbers}
        rank = min(last, key=lambda each: (last[each], each))
        yield Hit(last[rank], f"rank {rank}", "; ".join(ranks.run.lost_ranks), rank)


def used_up(ranks: Ranks) -> bool:
    """Whether data-parallel ranks that end early have no other reason than their data: no step is without a loss."""
    progress, steps = ranks.of(Progress), [ranks.run.rank(rank).entries["step"] for rank in ranks.numbers]
    all_seen = all(len(each) and len(each) == each[-1] - each[0] + 1 for each in steps)
    computing = progress.computing == {*ranks.numbers} and not progress.hits
    return all_seen and computing and is_data_parallel(ranks)


@rank_rule(
    "rank-gradients",
    Level.ERROR,
    "a parameter has a gradient on some ranks only",
    "both have other gradients in the step; parameters that are cut over ranks do not count",
    "a parameter that some ranks do not use, and a reduction that leaves out what is None",
)
def rank_gradients(ranks: Ranks) -> Iterable[Hit]:
    return ranks.of(Progress).missing.values()


# --- outputs of one module on several ranks

_BY_DESIGN = 0.1
"""Outputs that always differ by more, without a draw, are meant to: a module that takes its rank's share."""


@dataclass
class Compared:
    """How often a module's outputs differ on ranks where its inputs and parameters are equal.

    Attributes:
        first: the first time; None while they never did.
        drew: whether it then drew from random states that differ.
        times: in how many calls.
        chances: of how many calls with equal inputs and parameters.
    """

    first: Difference | None = None
    drew: bool = False
    times: int = 0
    chances: int = 0


@dataclass
class Outputs(Gathered):
    """The outputs of all modules, held against one another.

    Attributes:
        compared: what came of it, by FQN of the module.
    """

    compared: dict[str, Compared] = field(default_factory=dict)

    def step(self, now: AlignedStep) -> None:
        """Look at modules in the order in which they ran, up to the first whose outputs differ: others follow it."""
        inputs, draws = _by_call(now, Kind.INPUT), _by_call(now, Kind.RNG)
        unsound = self._unsound(now)
        differs = False
        for number in sorted(now.of(Kind.OUTPUT, Phase.FORWARD), key=now.begun):
            site, rows = now.sites[number], now.rows[number]
            call = site.fqn, site.call
            if len(rows) < 2 or call not in inputs:
                continue
            drawn = draws.get(call, ())
            for group in _with_equal_inputs(now, inputs[call], rows):
                same = {rank: rows[rank] for rank in group}
                placed = any(now.layout(rank, row).part is not None for rank, row in same.items())
                # some of the ranks are to have samples, and so draws, that the others have not
                draws_differ = drawn and any(len(same.keys() & ranks) > 1 for ranks in self.ranks.groups)
                if len(same) < 2 or differs or site.fqn in unsound or placed or draws_differ:
                    continue
                differs = len(now.values(number, group)) > 1
                compared = self.compared.setdefault(site.fqn, Compared())
                compared.chances += 1
                compared.times += differs
                if differs and compared.first is None:
                    compared.first = now.difference(same)
                    compared.drew = any(len(now.values(other, group)) > 1 for other in drawn)

    def _unsound(self, now: AlignedStep) -> set[str]:
        """Modules that hold parameters or buffers which are not equal on all ranks, or were not in the step before."""
        equal = self.ranks.of(Copies).equal
        params = now.of(Kind.PARAM, Phase.START, Phase.OPTIMIZER), now.of(Kind.BUFFER, Phase.START, Phase.FORWARD)
        names = {now.sites[number].fqn for numbers in params for number in numbers if not now.is_equal(number)}
        names |= {now.sites[number].fqn for number in now.of(Kind.PARAM)} - equal
        inside: set[str] = set()
        for name in names:
            while name:
                name = name.rpartition(".")[0]  # noqa: PLW2901 - one name, shortened
                inside.add(name)
        return inside


def _by_call(now: AlignedStep, kind: Kind) -> dict[tuple[str, int], list[int]]:
    by_call: dict[tuple[str, int], list[int]] = {}
    for number in now.of(kind, Phase.FORWARD):
        site = now.sites[number]
        by_call.setdefault((site.fqn, site.call), []).append(number)
    return by_call


def _with_equal_inputs(now: AlignedStep, inputs: Sequence[int], ranks: Iterable[int]) -> list[list[int]]:
    """The ranks by what a call was given: all of several, or those of each replica."""
    groups: dict[object, list[int]] = {}
    for rank in ranks:
        complete = all(rank in now.rows[number] for number in inputs)
        given = tuple(frozenset(now.values(number, [rank])) for number in inputs) if complete else rank
        groups.setdefault(given, []).append(rank)
    return list(groups.values())


@rank_rule(
    "rank-outputs",
    Level.ERROR,
    "a module's output differs between ranks although inputs and parameters are equal",
    "any bit differs in a call; what always differs, without a draw, by more than a relative L2 of "
    f"{_BY_DESIGN:g} is meant to",
    "random states that differ where ranks must draw alike, other flags or kernels, or a faulty device",
)
def rank_outputs(ranks: Ranks) -> Iterator[Hit]:
    differing = [(each.first, fqn, each) for fqn, each in ranks.of(Outputs).compared.items() if each.first]
    for first, fqn, compared in sorted(differing, key=lambda item: item[0].step):
        if compared.times == compared.chances and not compared.drew and first.distance > _BY_DESIGN:
            continue
        far = "" if np.isnan(first.distance) else f" (relative L2 {first.distance:.1e})"
        why = "the random states it draws from differ" if compared.drew else "nothing it was given explains why"
        evidence = (
            f"the output of {fqn} on rank {first.rank} differs from that on rank {first.base}{far} although inputs "
            f"and parameters are equal, in {compared.times} of {count(compared.chances, 'call')}: {why}"
        )
        yield Hit(first.step, f"output {fqn}", evidence, first.rank)
