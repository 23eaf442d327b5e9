"""What the records of a step, and of the one before, give away beyond that they differ.

A parameter that is after the step what it was before was not stepped; a module that runs more often in one run has
more calls; an optimizer steps where its settings are on record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.join.sites import KINDS, PHASES
from introspect_cli.records import SCALER, SETTING_KINDS, Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.table import Table


def untouched_side(table: Table, before: Table | None, union: int) -> str:
    """The side where a step did not change a tensor, where the other side's step did."""
    found = {side: last_value(table, before, union, side) for side in ("a", "b")}
    same = [side for side in ("a", "b") if found[side] is not None and found[side] == table.checksum(union, side)]
    return same[0] if len(same) == 1 else ""


def last_value(table: Table, before: Table | None, union: int, side: str) -> int | None:
    """Checksum of what a tensor was when last recorded before a record of it, in this step or the one before."""
    alignment = table.alignment
    site = alignment.site(union)
    own = [
        u
        for u in alignment.by_fqn.get(site.fqn, [])
        if KINDS[alignment.kind[u]] is site.kind and alignment.path[u] == site.path
    ]
    now = table.sequence(union, side)
    earlier = {u: at for u in own if (at := table.sequence(u, side)) is not None and now is not None and at < now}
    if earlier:
        return table.checksum(max(earlier, key=lambda u: earlier[u]), side)
    last = {u: at for u in own if before is not None and (at := before.sequence(u, side)) is not None}
    return before.checksum(max(last, key=lambda u: last[u]), side) if before is not None and last else None


def losses_of(table: Table, side: str) -> int:
    """How many losses a step has."""
    alignment = table.alignment
    return sum(KINDS[alignment.kind[union]] is Kind.LOSS for union in table.rows_of(side))


def call_change(table: Table) -> tuple[str, int, int] | None:
    """The outermost module that both runs call, but a different number of times in this table."""
    alignment = table.alignment
    counts: dict[str, list[set[int]]] = {}
    for side in ("a", "b"):
        for union in table.rows_of(side):
            if (
                KINDS[alignment.kind[union]] in (Kind.OUTPUT, Kind.INPUT)
                and PHASES[alignment.phase[union]] is Phase.FORWARD
            ):
                name = alignment.fqn[union]
                counts.setdefault(name, [set(), set()])[side == "b"].add(int(alignment.call[union]))
    changed = [(name, len(a), len(b)) for name, (a, b) in counts.items() if a and b and len(a) != len(b)]
    return min(changed, key=lambda item: item[0].count("."), default=None)


def optimizers_of(table: Table, side: str) -> list[str]:
    """Names of the optimizers that stepped."""
    alignment = table.alignment
    names = (alignment.fqn[u] for u in table.rows_of(side) if KINDS[alignment.kind[u]] in SETTING_KINDS)
    return [name for name in dict.fromkeys(names) if name != SCALER]
