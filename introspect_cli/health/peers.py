"""Ranks that compute parts of one output, as tensor parallelism has it: what all of them hold whole must be equal.

Parts of an output make a whole only if each rank computes its part from the same input. So where a module's output is
cut over ranks, an input of it that each rank has whole is compared, and what went in before it tells why it differs: a
batch, or a parameter of which each rank begins with another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from introspect_cli.health.aligned import AlignedStep, Gathered, Ranks
from introspect_cli.health.findings import Hit, Level, observed, rank_rule
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from introspect_cli.health.aligned import Rows
    from introspect_cli.records import Part


@dataclass
class Peers(Gathered):
    """The first input that peers have otherwise.

    Attributes:
        compared: whether peers were given anything.
        first: where it is; None while there is none.
    """

    compared: bool = False
    first: Hit | None = None

    @cached_property
    def groups(self) -> list[list[int]]:
        """Ranks that are given the same samples: those of one place in their groups, where wrappers cut batches."""
        sharing = {rank: {rank} for rank in self.ranks.numbers}  # each with all that share its samples
        for group in self.ranks.groups:
            together = set(group).union(*(sharing[rank] for rank in group if rank in sharing))
            sharing |= dict.fromkeys(together & sharing.keys(), together)
        places: dict[int, list[int]] = {}
        for rank, together in sharing.items():
            places.setdefault(sorted(together).index(rank), []).append(rank)
        return [peers for peers in places.values() if len(peers) > 1]

    def step(self, now: AlignedStep) -> None:
        """Look at what modules are given whose output or table is cut, in the order in which they ran."""
        if self.first is not None or not self.groups:
            return
        outputs, tables = (
            {now.sites[number].fqn: parts for number in numbers if (parts := _parts(now, now.rows[number]))}
            for numbers in (now.of(Kind.OUTPUT, Phase.FORWARD), now.of(Kind.PARAM, Phase.START, Phase.OPTIMIZER))
        )
        for number in sorted(now.of(Kind.INPUT, Phase.FORWARD), key=now.begun):
            site, rows = now.sites[number], now.rows[number]
            # where no output is cut, ranks have parts of what each of them gathers for samples of its own (ZeRO)
            table = tables.get(f"{site.fqn}.weight", {}) if outputs and site.fqn in self._embeddings else {}
            for parts, words in ((outputs.get(site.fqn, {}), "outputs"), (table, "tables")):
                self._compare(now, number, [rank for rank in rows if rank in parts], parts, words)

    @cached_property
    def _embeddings(self) -> set[str]:
        return {module.fqn for module in self.ranks.whole.modules if module.module_class == "Embedding"}

    def _compare(self, now: AlignedStep, number: int, ranks: list[int], parts: Mapping[int, Part], words: str) -> None:
        site, rows = now.sites[number], now.rows[number]
        for peers in self.groups:
            held = {rank: rows[rank] for rank in peers if rank in ranks}
            if len({parts[rank] for rank in held}) < 2 or not all(now.is_whole(*item) for item in held.items()):
                continue
            self.compared = True
            difference = now.difference(held)
            if difference is not None and self.first is None:
                name = f"input {site.path} of {site.fqn}" if site.path else f"input of {site.fqn}"
                why = self._why(now, difference.base, difference.rank)
                evidence = (
                    f"rank {difference.rank}'s {name} is not that of rank {difference.base}, although their {words} "
                    f"are parts of one whole{why}"
                )
                self.first = Hit(now.step, f"input {site.fqn}", evidence, difference.rank)

    @staticmethod
    def _why(now: AlignedStep, one: int, two: int) -> str:
        """What differs before it, as a clause: the batch, or a parameter that both begin the step with."""
        for kind, phase in ((Kind.BATCH, Phase.DATA), (Kind.PARAM, Phase.START)):
            for number in sorted(now.of(kind, phase), key=now.begun):
                rows = {rank: row for rank, row in now.rows[number].items() if rank in (one, two)}
                whole = all(now.layout(rank, row).part is None for rank, row in rows.items())
                if len(rows) == 2 and whole and now.difference(rows) is not None:
                    return ": their batches differ" if kind is Kind.BATCH else f": {now.sites[number].fqn} differs"
        return ""


def _parts(now: AlignedStep, rows: Rows) -> dict[int, Part]:
    """The part that each rank has of a whole; {} where one has none, or a sum is owed."""
    parts = {rank: now.layout(rank, row).part for rank, row in rows.items()}
    return (
        {rank: part for rank, part in parts.items() if part is not None and not part.owed}
        if None not in parts.values()
        else {}
    )


@rank_rule(
    "peers-differ",
    Level.ERROR,
    "ranks that compute parts of one output are given different inputs",
    "an output or the table of an embedding is cut over ranks, and an input of its module that each of them has whole "
    "differs",
    "a sampler that takes the rank of a process for that of a data-parallel group, or a parameter outside of the mesh "
    "that each rank drew from another seed",
)
def peers_differ(ranks: Ranks) -> Iterator[Hit]:
    peers = ranks.of(Peers)
    observed(peers.compared or peers.first, "inputs of modules whose output is cut over ranks")
    if peers.first is not None:
        yield peers.first
