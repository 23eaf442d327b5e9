"""Buffers that data-parallel ranks have in common and that become different.

DDP broadcasts the first rank's buffers before the next forward pass, unless it was told not to; the running statistics
that a step leaves on the other ranks are then used by nobody, and differ by design. FSDP broadcasts none, nor does a
script that reduces gradients by hand: there each rank evaluates, and saves, statistics of its own samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from introspect_cli.health.aligned import AlignedStep, Gathered, Ranks
from introspect_cli.health.copies import is_data_parallel, whose
from introspect_cli.health.findings import Hit, Level, observed, rank_rule
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.health.aligned import Difference


@dataclass
class Buffers(Gathered):
    """Since when copies of buffers differ.

    Attributes:
        compared: buffers that two data-parallel ranks hold.
        differing: those that differed when they were last seen, and since when, by FQN.
    """

    compared: set[str] = field(default_factory=set)
    differing: dict[str, Difference] = field(default_factory=dict)

    def step(self, now: AlignedStep) -> None:
        """Compare what the step leaves, or begins with where nothing else is on record."""
        for number in now.in_order(Kind.BUFFER):
            fqn, rows = now.sites[number].fqn, now.rows[number]
            for group in self.ranks.groups or [frozenset(self.ranks.numbers)]:
                held = {rank: row for rank, row in rows.items() if rank in group and now.is_whole(rank, row)}
                if len(held) < 2 or len({now.layout(rank, row) for rank, row in held.items()}) > 1:
                    continue
                self.compared.add(fqn)
                difference = now.difference(held)
                if difference is None:
                    self.differing.pop(fqn, None)
                else:
                    self.differing.setdefault(fqn, difference)


@rank_rule(
    "buffers-differ",
    Level.WARNING,
    "buffers of data-parallel ranks differ, and nothing makes them equal",
    "they differ at the end of the last step that has them, and no wrapper broadcasts them before a forward pass",
    "BatchNorm statistics of each rank's samples, so that what is evaluated and saved depends on the rank: "
    "SyncBatchNorm, or DDP with broadcast_buffers",
)
def buffers_differ(ranks: Ranks) -> Iterator[Hit]:
    buffers = ranks.of(Buffers)
    observed(buffers.compared and is_data_parallel(ranks), "data-parallel ranks and their buffers")
    said = [manifest.get("broadcasts_buffers", "") for manifest in ranks.run.manifests.values()]
    observed("" not in said, "whether buffers are broadcast")
    if True in said:
        return
    who = "its wrapper broadcasts none" if False in said else "nobody broadcasts it"
    for fqn, difference in buffers.differing.items():
        size = f" ({difference.size})" if difference.size else ""
        evidence = f"{fqn} differs on {whose(difference)}{size} from step {difference.step} to the last, and {who}"
        yield Hit(difference.step, f"buffer {fqn}", evidence, difference.rank)
