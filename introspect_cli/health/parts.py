"""Parts of one whole on several ranks, and tied weights under two names: what has to fit together at the start.

A parameter that is cut over ranks has each element once. Weights that are tied across the stages of a pipeline begin
equal and get one gradient between them, so they stay equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from introspect_cli.health.aligned import AlignedStep, Gathered, Ranks
from introspect_cli.health.findings import Hit, Level, observed, rank_rule
from introspect_cli.records import Kind, Part, Phase
from introspect_cli.store.plan import Covering, covering, same_parts, share

if TYPE_CHECKING:
    from collections.abc import Iterator


_LEAST = 8  # elements of a parameter whose equality on two ranks is no accident


@dataclass
class Parts(Gathered):
    """Parameters as they are at the first step, and whether ties hold after it.

    Attributes:
        wrong: what is wrong with the parts of a parameter, by FQN.
        untied: parameters that begin equal on two ranks under two names that neither has both of, by rank and name of
            both: the step after which they are equal no more, None while they are.
    """

    wrong: dict[str, str] = field(default_factory=dict)
    untied: dict[tuple[tuple[int, str], tuple[int, str]], int | None] = field(default_factory=dict)

    def step(self, now: AlignedStep) -> None:
        """Look at the parts and find the ties in the first step; see in each whether the ties hold."""
        if now.step == self.ranks.steps[0]:
            self._tie(now)
            if len(self.ranks.numbers) >= self.ranks.run.world_size:
                self._look_at_parts(now)
        if None not in self.untied.values():
            return
        after = {
            (rank, now.sites[number].fqn): now.checksum(rank, row)
            for number in now.of(Kind.PARAM, Phase.OPTIMIZER)
            for rank, row in now.rows[number].items()
        }
        for (one, two), step in self.untied.items():
            if step is None and one in after and two in after and after[one] != after[two]:
                self.untied[one, two] = now.step

    def _look_at_parts(self, now: AlignedStep) -> None:
        for number in now.of(Kind.PARAM, Phase.START):
            rows = now.rows[number]
            parts: dict[Part, tuple[int, int]] = {}
            for rank, row in rows.items():
                part = now.layout(rank, row).part
                if part is not None and part.numel and not part.owed:
                    parts.setdefault(part, (rank, row))
            if parts:
                wrong = self._covered(now, number, parts) or self._written_twice(now, parts)
                if wrong:
                    self.wrong[now.sites[number].fqn] = wrong

    def _covered(self, now: AlignedStep, number: int, parts: dict[Part, tuple[int, int]]) -> str:
        """What the parts leave out of the whole, or have twice."""
        rows = now.rows[number]
        covered, whole = covering(list(parts)), now.layout(*next(iter(parts.values()))).numel
        if len(rows) != self.ranks.run.world_size or covered is None or covered == Covering(whole, 0):
            return ""
        twice = f", and several parts have {share(covered.doubled, whole)}" if covered.doubled else ""
        holders = [(rank, now.layout(rank, row).part) for rank, row in rows.items()]
        same = same_parts(holders) if covered.covered < whole else ""
        return f"its parts cover {share(covered.covered, whole)}{twice}{same}"

    def _written_twice(self, now: AlignedStep, parts: dict[Part, tuple[int, int]]) -> str:
        """Two parts of different places with the same extrema and moments, to the last bit."""
        seen: dict[object, int] = {}
        for part, (rank, row) in parts.items():
            floats = now.batches[rank].floats
            if part.numel < _LEAST or not {"min", "max", "mean", "var"} <= floats.keys() or not floats["var"][row] > 0:
                return ""
            key = (part.numel, *(float(floats[name][row]) for name in ("min", "max", "mean", "var")))
            other = seen.setdefault(key, rank)
            if other != rank:
                return (
                    f"rank {rank} holds the same values as rank {other} (extrema, mean and variance are equal to the "
                    "last bit), at another place of the whole"
                )
        return ""

    def _tie(self, now: AlignedStep) -> None:
        holders: dict[object, list[tuple[int, str]]] = {}
        names: dict[int, set[str]] = {}
        for number in now.of(Kind.PARAM, Phase.START):
            fqn = now.sites[number].fqn
            for rank, row in now.rows[number].items():
                names.setdefault(rank, set()).add(fqn)
                layout, floats = now.layout(rank, row), now.batches[rank].floats
                if layout.part is None and layout.numel >= _LEAST and "var" in floats and floats["var"][row] > 0:
                    value = layout.shape, layout.dtype, now.checksum(rank, row)
                    holders.setdefault(value, []).append((rank, fqn))
        for one, *others in holders.values():
            for two in others:
                if one[0] != two[0] and one[1] not in names[two[0]] and two[1] not in names[one[0]]:
                    self.untied[one, two] = None


@rank_rule(
    "shards",
    Level.ERROR,
    "parts of a parameter overlap, leave some of it out, or hold the same values",
    "at the start, the ranges of indices that ranks hold do not have each element once, or two parts have the same "
    "extrema and moments, to the last bit",
    "a checkpoint that was cut with another rank's offset, or ranks that each drew their part from one seed",
)
def shards(ranks: Ranks) -> Iterator[Hit]:
    observed(ranks.has_parts, "parameters that are cut over ranks")
    first = ranks.steps[0] if ranks.steps else 0
    for fqn, wrong in ranks.of(Parts).wrong.items():
        yield Hit(first, f"param {fqn}", f"of {fqn}, {wrong}", ranks.numbers[0])


@rank_rule(
    "tied-weights",
    Level.ERROR,
    "tied weights on two ranks differ",
    "parameters that begin equal on two ranks, under two names, differ after a step",
    "an embedding and a head on two stages whose gradients are not all-reduced",
)
def tied_weights(ranks: Ranks) -> Iterator[Hit]:
    untied = observed(ranks.of(Parts).untied, "parameters that begin equal under different names on two ranks")
    for ((rank, one), (other, two)), step in untied.items():
        if step is not None:
            evidence = (
                f"{one} of rank {rank} and {two} of rank {other} begin equal, as tied weights do, and differ after "
                f"step {step}: their gradients were not added up"
            )
            yield Hit(step, f"param {two}", evidence, other)
