"""Outputs of one module on several ranks: equal inputs, parameters and buffers must give equal outputs.

The random states that modules draw from are looked at beside: where they differ, outputs may, and where ranks have
samples of their own, they ought to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.aligned import Gathered
from introspect_cli.health.copies import Copies, is_data_parallel
from introspect_cli.health.findings import Hit, Level, observed, rank_rule
from introspect_cli.records import Kind, Phase
from introspect_cli.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from introspect_cli.health.aligned import AlignedStep, Difference, Ranks

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
class Draws:
    """How often a module drew from one random state on ranks with different inputs.

    Attributes:
        ranks: the lowest and the highest of them.
        step: the first step.
        times: in how many calls.
    """

    ranks: tuple[int, int]
    step: int
    times: int = 0


@dataclass
class Outputs(Gathered):
    """The outputs of all modules, held against one another.

    Attributes:
        compared: what came of it, by FQN of the module.
        draws: modules that drew from one state on different inputs, by FQN.
    """

    compared: dict[str, Compared] = field(default_factory=dict)
    draws: dict[str, Draws] = field(default_factory=dict)

    @property
    def begun(self) -> list[int]:
        """The steps in which outputs of a module began to differ."""
        return [compared.first.step for compared in self.compared.values() if compared.first is not None]

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
            groups = _with_equal_inputs(now, inputs[call], rows)
            if len(groups) > 1 and drawn and all(map(now.is_equal, drawn)):
                self.draws.setdefault(site.fqn, Draws((min(rows), max(rows)), now.step)).times += 1
            for group in groups:
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
        why = "the random states it draws from differ" if compared.drew else "nothing that it was given tells why"
        evidence = (
            f"the output of {fqn} on rank {first.rank} differs from that on rank {first.base}{far} although inputs "
            f"and parameters are equal, in {compared.times} of {count(compared.chances, 'call')}: {why}"
        )
        yield Hit(first.step, f"output {fqn}", evidence, first.rank)


@rank_rule(
    "rank-draws",
    Level.WARNING,
    "data-parallel ranks draw from equal random states",
    "a module's inputs differ on two ranks, and its draws begin from one random state",
    "one seed on all ranks: add the rank to it after the model is made",
)
def rank_draws(ranks: Ranks) -> Iterator[Hit]:
    observed(is_data_parallel(ranks), "data-parallel ranks and their random draws")
    draws = ranks.of(Outputs).draws
    observed(draws or _sees_draws(ranks), "every random draw of every rank (`--record rng`, and the compiled kernels)")
    for fqn, drew in draws.items():
        evidence = (
            f"{fqn} draws from equal random states on rank {drew.ranks[0]} and rank {drew.ranks[1]} although their "
            f"inputs differ ({count(drew.times, 'call')}): they get the same random numbers, such as one dropout mask"
        )
        yield Hit(drew.step, f"rng {fqn}", evidence, drew.ranks[1])


def _sees_draws(ranks: Ranks) -> bool:
    """Whether each rank noticed every draw of random numbers, which takes the compiled kernels."""
    noticed = all(ranks.run.manifests.get(rank, {}).get("draws") is True for rank in ranks.numbers)
    return noticed and any(site.kind == Kind.RNG for site in ranks.sites)
