"""The parameters and buffers that modules hold, and what is known of one's value when something computes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.terms.evidence import Known, answer
from introspect_cli.compare.terms.names import FORWARD, ancestors
from introspect_cli.compare.terms.sites import KINDS
from introspect_cli.compare.terms.table import DIFFERENT, EQUAL, WITHIN
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from introspect_cli.compare.step.step import Step


def unseen_inside(step: Step, fqn: str) -> list[str]:
    """Modules inside one whose outputs are not on record in this step, nor those of a module between."""
    prefix = fqn + "."
    inside = dict.fromkeys(name for tree in step.modules for name in tree if name.startswith(prefix))
    seen = [union for union in step.of(Kind.OUTPUT, FORWARD) if step.state[union] in {EQUAL, WITHIN, DIFFERENT}]
    recorded = inside.keys() & {step.alignment.fqn[union] for union in seen}
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


def value_of(step: Step, fqn: str, kind: Kind, order: float) -> Known:
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
