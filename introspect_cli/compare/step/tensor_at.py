"""What is known of one tensor at a place of a step: which modules hold it, and what it was when last recorded.

A parameter is recorded where training finds it, as an optimizer leaves it, and where else it was written to. What a
module computes with is the last of these before its call; where the forward pass itself changes it, that is not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.terms.evidence import Known, answer
from introspect_cli.compare.terms.names import FORWARD, ancestors, owner_of
from introspect_cli.compare.terms.sites import KINDS
from introspect_cli.compare.terms.table import DIFFERENT, EQUAL, NOT_SEEN, WITHIN
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.table import Table


def unseen_inside(step: Step, fqn: str) -> list[str]:
    """Modules inside one of which not all outputs are on record in this step, nor those of a module between."""
    prefix = fqn + "."
    inside = dict.fromkeys(name for tree in step.modules for name in tree if name.startswith(prefix))
    outputs, names = step.of(Kind.OUTPUT, FORWARD), step.alignment.fqn
    seen = {names[union] for union in outputs if step.state[union] in {EQUAL, WITHIN, DIFFERENT}}
    recorded = inside.keys() & (seen - {names[union] for union in outputs if step.state[union] == NOT_SEEN})
    return [name for name in inside if recorded.isdisjoint((name, *ancestors(name)))]


def held_by(step: Step, owners: Iterable[str], kind: Kind) -> set[str]:
    """FQNs of the tensors that modules hold, tied ones under the name they are recorded by."""
    names: set[str] = set()
    for owner in owners:
        for module in (tree[owner] for tree in step.modules if owner in tree):
            tied = {name: target for name, target in module.tied.items() if _is(step, target, kind)}
            held = module.parameters if kind is Kind.PARAM else module.buffers
            names |= {tied.get(name, f"{owner}.{name}") for name in held} | {*tied.values()}
    names |= {name for owner in owners for name in step.comparison.tensors_in(owner) if _is(step, name, kind)}
    return names


def _is(step: Step, fqn: str, kind: Kind) -> bool:
    return any(KINDS[step.alignment.kind[union]] is kind for union in step.alignment.by_fqn.get(fqn, []))


def is_rewritten(step: Step, fqn: str, kind: Kind, order: float) -> bool:
    """Whether a forward pass has changed a tensor in either run, before or after a place of it."""
    table, unions = step.table, step.of(kind, frozenset({Phase.FORWARD}), fqn)
    later = [union for union in unions.tolist() if step.state[union] and table.order_of[union] > order]
    pairs = [(last_value(table, step.before, u, side), table.checksum(u, side)) for u in later for side in "ab"]
    return any(now not in {None, before} for before, now in pairs)


def written_inside(step: Step, fqn: str, order: float) -> list[int]:
    """Divergences of tensors that modules inside one hold, which a forward pass changed by a place of it.

    Each module was given what is equal and gave what is equal: code around it may compute with what it holds.
    """
    return [
        position
        for position in step.written
        if (owner := owner_of(step.sites[position].fqn)).startswith(f"{fqn}.")
        and any(ended < order < step.order_at(position) for _, ended in step.calls.spans_of(owner))
        and not step.differing(Kind.INPUT, owner) + step.differing(Kind.OUTPUT, owner)
        and known_at(step, step.sites[position].fqn, step.sites[position].kind, order) is Known.EQUAL
    ]


def known_at(step: Step, fqn: str, kind: Kind, order: float) -> Known:
    """What is known of a tensor's value when something computes with it."""
    alignment, carried = step.alignment, step.carried
    unions = [union for union in alignment.by_fqn.get(fqn, []) if KINDS[alignment.kind[union]] is kind]
    now = [union for union in unions if step.state[union] and step.table.order_of[union] < order]
    if now:
        return step.known([max(now, key=lambda union: step.table.order_of[union])], every=True)
    if fqn in carried.params or fqn in carried.buffers:
        return Known.DIFFERS
    before = step.state_before
    if before is not None and unions and before[unions].any():
        return answer(before[[union for union in unions if before[union]][-1:]], every=True)
    if not any(step.alignment.in_both[union] for union in unions) or (step.gap and fqn in step.comparison.ended):
        return Known.UNSEEN
    return Known.WITHIN if fqn in carried.within else Known.EQUAL


def untouched_side(table: Table, before: Table | None, union: int) -> str:
    """The side where a step did not change a tensor, where the other side's step did."""
    last = {side: last_value(table, before, union, side) for side in "ab"}
    same = [side for side in "ab" if last[side] is not None and last[side] == table.checksum(union, side)]
    return same[0] if len(same) == 1 else ""


def last_value(table: Table, before: Table | None, union: int, side: str) -> int | None:
    """Checksum of what a tensor was when last recorded before a record of it, in this step or the one before."""
    alignment = table.alignment
    site = alignment.site(union)
    unions = [
        u
        for u in alignment.by_fqn.get(site.fqn, [])
        if KINDS[alignment.kind[u]] is site.kind and alignment.path[u] == site.path
    ]
    now = table.sequence(union, side)
    earlier = {u: at for u in unions if (at := table.sequence(u, side)) is not None and now is not None and at < now}
    if earlier:
        return table.checksum(max(earlier, key=lambda u: earlier[u]), side)
    last = {u: at for u in unions if before is not None and (at := before.sequence(u, side)) is not None}
    return before.checksum(max(last, key=lambda u: last[u]), side) if before is not None and last else None
