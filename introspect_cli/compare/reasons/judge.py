"""Role and reason of a divergence: the first reason, by priority, that applies and lacks no needed evidence."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from introspect_cli.compare.evidence import Cause, Known, with_state
from introspect_cli.compare.reasons.rows import ROWS
from introspect_cli.compare.result import Role

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.base import Reason
    from introspect_cli.compare.step import Step
    from introspect_cli.records import Kind


@cache
def reasons() -> tuple[Reason, ...]:
    """All reasons, sorted by priority, then by word; cached."""
    return tuple(sorted(ROWS, key=lambda reason: (reason.priority, reason.word)))


@cache
def _reasons_for(kind: Kind) -> tuple[Reason, ...]:
    """Reasons that apply to records of a kind, in the order of `reasons`; cached."""
    return tuple(reason for reason in reasons() if not reason.kinds or kind in reason.kinds)


@cache
def reason_named(word: str) -> Reason:
    """The reason with this word; StopIteration where there is none; cached."""
    return next(reason for reason in reasons() if reason.word == word)


def judge(step: Step, position: int) -> Cause:
    """The cause of one divergence: the first one, by the priority of its reason, whose evidence does not differ.

    Where evidence that is needed for an origin was not observed, the cause is `gap` instead, propagated, with that
    reason in `instead`; only `resumed` comes before it.

    Args:
        step: the step.
        position: index of the divergence in `step.sites`.
    """
    gap: Cause | None = None
    for reason in _reasons_for(step.sites[position].kind):
        if gap is not None and reason.priority < 90:
            continue
        made = reason.cause_of(step, position)
        if made is None or with_state(made.evidence, Known.DIFFERS):
            continue
        if made.role is Role.ORIGIN and any(fact.needed for fact in with_state(made.evidence, Known.UNSEEN)):
            gap = replace(made, role=Role.PROPAGATED, reason="gap", instead=reason.word)
            if gap.module not in {"", step.sites[position].fqn}:
                gap = replace(gap, evidence=tuple(replace(fact, inside=gap.module) for fact in gap.evidence))
            continue
        if gap is None or reason.word == "resumed":
            return made
        return gap
    raise AssertionError(step.sites[position])  # `propagated` always applies
