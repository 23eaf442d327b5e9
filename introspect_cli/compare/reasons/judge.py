"""Role and reason of a divergence: the first reason, by priority, that applies and lacks no needed evidence."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.rows import ROWS
from introspect_cli.compare.terms.evidence import Cause, Known, with_state
from introspect_cli.compare.terms.result import Role

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.base import Reason
    from introspect_cli.compare.step.step import Step
    from introspect_cli.records import Kind


@cache
def reasons() -> tuple[Reason, ...]:
    """All reasons, sorted by priority, then by word."""
    return tuple(sorted(ROWS, key=lambda reason: (reason.priority, reason.word)))


@cache
def _about(kind: Kind) -> tuple[Reason, ...]:
    """The reasons that apply to a kind, in order."""
    return tuple(reason for reason in reasons() if not reason.kinds or kind in reason.kinds)


@cache
def reason_named(word: str) -> Reason:
    """The reason with this word; StopIteration for none."""
    return next(reason for reason in reasons() if reason.word == word)


def judge(step: Step, position: int) -> Cause:
    """The cause of one divergence: the first reason by priority that applies and whose evidence does not differ.

    If a needed fact is unobserved, the cause becomes `gap` (propagated) and only reasons of priority 90 on are tried.
    """
    gap: Cause | None = None
    for reason in _about(step.sites[position].kind):
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
