"""Causes before the step, or not recorded: initial values, changes between steps, checkpoints, gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.evidence import Cause, Known, Thing
from introspect_cli.compare.ledger import TENSORS
from introspect_cli.compare.reasons.base import cause, evidence_of
from introspect_cli.compare.reasons.forward import find_attributes_of
from introspect_cli.compare.reasons.structure import subject_of
from introspect_cli.compare.reasons.update import is_fed_by_then
from introspect_cli.compare.result import Role
from introspect_cli.compare.say import finds, found, what
from introspect_cli.compare.settings.beginning import find_filling
from introspect_cli.compare.step import updates_by_hand
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.result import Finding
    from introspect_cli.compare.step import Step


def start_cause(step: Step, position: int) -> Cause | None:
    """Cause of a tensor or optimizer state that differs at the start of a step; None for other phases.

    `gap` after steps that were not recorded; else `initial` of a tensor that no earlier step has; else `outside`, also
    where one run alone has it. None where a random state differs, of what one run alone has after a gap or from the
    start, of what a step in which something differs has changed by then, and of an optimizer state that no earlier step
    has, or after no gap.
    """
    site = step.sites[position]
    if site.phase is not Phase.START:
        return None
    before, is_tensor = step.is_recorded_before(site.fqn), site.kind in TENSORS
    if step.alone[position]:
        subject, role = subject_of(step, position)
        return cause("outside", role=role, subject=subject) if before and is_tensor and not step.begins.gap else None
    if step.rng_differs() or not (is_tensor or (before and step.begins.gap)):
        return None
    if step.begins.gap:
        return cause("gap", role=Role.PROPAGATED)
    if site.call and is_fed_by_then(step, position):
        return None
    return cause("outside") if before or site.call else cause("initial", *evidence_of("initial", step, position))


@finds("initial")
def find_initial_draw(at: View) -> Iterator[Finding]:
    """Findings on what filled a tensor before the first step in another way; of a buffer also its module's attributes.

    Nothing in a later step than the first, where dtype or shape differ, or the distance is rounding; and of two
    implementations of one model, which are given its values afterwards.
    """
    if at.first.step or at.dtypes or at.reshaped or at.rounding or at.step.comparison.match.is_port:
        return
    if at.site.kind is Kind.BUFFER:
        yield from find_attributes_of(at, at.site.fqn.rpartition(".")[0])
    yield from find_filling(at.runs, at.first.rank, at.site.fqn)


def left_in_initial(at: View) -> Iterator[str]:
    """Codes of the remaining causes of an initial value.

    `before-recorded` alone in a later step than the first, `built` alone where dtype or shape differ. Else
    initialisation, seed, checkpoint and changes by the script; no seed where random states at the start are equal,
    where b is a multiple of a, or where only rounding differs.
    """
    if at.first.step:
        yield "before-recorded"
    elif at.dtypes or (at.reshaped and not at.step.comparison.match.is_port):
        yield "built"
    else:
        seeded = at.known(Thing.RANDOM_AT_START) is not Known.EQUAL and at.first.scale is None and not at.rounding
        yield from ("initialisation", *(["seed"] if seeded else []), "checkpoint")


# --- changed between two steps


def left_outside(at: View) -> Iterator[str]:
    """Codes of the remaining causes of a change between steps.

    `update-before` where one run alone lists start values in each step. Then `rule-by-hand` alone where a run updates
    its parameters without an optimizer; else `updates` for a buffer, loading, averaging, copying and
    changes in place.
    """
    if len({*at.step.comparison.lists_starts}) > 1:  # the start values of one run are what its step before left
        yield "update-before"
    if updates_by_hand(at.step):
        yield "rule-by-hand"
    else:
        yield from ("updates", "by-hand") if at.site.kind is Kind.BUFFER else ("by-hand",)


# --- where the records do not show the cause, or it lies elsewhere


@finds("resumed")
def find_unrestored(at: View) -> Iterator[Finding]:
    """Finding that names the first 3 tensors with which the resumed run began otherwise.

    Parameters and buffers by name, then optimizer state; nothing where only random states differ.
    """
    begins = at.step.begins
    names = [*sorted(begins.names), *(f"{path} of {fqn}" for fqn, path in sorted(begins.states))]
    if names:
        yield found("not-restored", names=", ".join(names[:3]))


@finds("propagated")
def find_first_difference(at: View) -> Iterator[Finding]:
    """Finding that names the first record of the step that differs; none if that is this record."""
    if at.step.sites[0] != at.site:
        yield found("upstream", name=what(at.step.sites[0]))
