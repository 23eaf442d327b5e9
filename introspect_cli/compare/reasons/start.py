"""Causes before the step, or not recorded: initial values, changes between steps, checkpoints, gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.base import cause
from introspect_cli.compare.reasons.forward import find_attributes, find_attributes_of, find_attributes_of_losses
from introspect_cli.compare.reasons.structure import subject_of
from introspect_cli.compare.say import finds, found
from introspect_cli.compare.settings.beginning import find_filling
from introspect_cli.compare.step.rests_on import updates_by_hand
from introspect_cli.compare.terms.evidence import Cause, Known, Thing
from introspect_cli.compare.terms.result import Role, Size
from introspect_cli.compare.terms.table import EQUAL, OTHER
from introspect_cli.compare.terms.words import what
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.findings import Finding

TENSORS = frozenset({Kind.PARAM, Kind.BUFFER})


def initial_is_fed(step: Step, position: int) -> bool:
    """False for a start value of both runs, never seen before, if no random state and nothing before differs."""
    site = step.sites[position]
    if site.phase is not Phase.START or step.is_one_sided(position) or step.is_recorded_before(site.fqn):
        return True
    return step.rng_differs() or step.carried.diverged


def is_recorded_late(at: View) -> bool:
    """Whether the first compared step is also the first of recording, but not step 0."""
    return at.is_first_step and at.first.step > 0


@finds("initial")
def find_child_processes(at: View) -> Iterator[Finding]:
    """Finding where the script runs another, unrecorded process."""
    names = {str(name): None for run in at.runs for name in run.manifest.get("children", [])}
    if names:
        yield found("children", names=", ".join(names))


@finds("initial")
def find_initial_draw(at: View) -> Iterator[Finding]:
    """Findings on what filled the tensor differently before the first step; for buffers, their module's attributes."""
    if not at.is_first_step or is_recorded_late(at) or at.dtypes or at.reshaped or at.first.size is Size.ROUNDING:
        return
    if at.site.kind is Kind.BUFFER:
        yield from find_attributes_of(at, at.site.fqn.rpartition(".")[0])
    yield from find_filling(at.runs, at.first.rank, at.site.fqn)


@finds("initial")
def find_tied_parameter(at: View) -> Iterator[Finding]:
    """Finding where one run alone ties this parameter to another module that both have."""
    for tree, other, side in zip(at.step.modules, at.step.modules[::-1], "ab", strict=True):
        for fqn in sorted(tree.keys() & other.keys()):
            for name, target in sorted(tree[fqn].tied.items() - other[fqn].tied.items()):
                if target == at.site.fqn:
                    yield found("tied-in-one", name=f"{fqn}.{name}", side=side, other=OTHER[side])
                    return


def left_in_initial(at: View) -> Iterator[str]:
    """Remaining causes of an initial value.

    No seed where other drawn tensors are equal, b is a multiple of a, or only rounding differs.
    """
    if not at.is_first_step:
        yield "before-recorded"
        return
    if at.dtypes is not None:
        yield "cast"
    elif at.reshaped:
        yield "sizes"
    else:
        if is_recorded_late(at):
            yield "steps-before"
        yield "initialisation"
        others = at.known(Thing.RANDOM_AT_START) is Known.EQUAL and EQUAL in at.initial[1]
        if at.first.scale is None and not others and at.first.size is not Size.ROUNDING:
            yield "seed"
        yield from ("checkpoint", "changed-by-script")


# --- changed between two steps


def outside_cause(step: Step, position: int) -> Cause | None:
    """Cause of a start value recorded before, where the previous step's end is on record and agrees; None otherwise."""
    site = step.sites[position]
    if site.phase is not Phase.START or not step.is_recorded_before(site.fqn):
        return None
    if step.is_one_sided(position):
        subject, role = subject_of(step, position)
        return None if step.gap else cause("outside", role=role, subject=subject)
    if step.rng_differs() or step.carried.diverged or step.gap:
        return None
    return cause("outside")


@finds("outside")
def find_change_between_steps(at: View) -> Iterator[Finding]:
    """Finding where one run alone changed it after the step, or no optimizer steps in a run."""
    if at.first.only:
        yield found("changed-outside", side=at.first.only, step=at.first.step - (not at.site.call))
    hand = [side for side, by_hand in zip("ab", at.step.comparison.by_hand, strict=True) if by_hand]
    if at.union in at.table.left and hand:
        yield found("no-optimizer", side=hand[0])


def left_outside(at: View) -> Iterator[str]:
    """Remaining causes of a change between steps: an unrecorded update, or loading, averaging, copying."""
    if at.union in at.table.left and not at.first.only:
        yield "update-before"
    if updates_by_hand(at.step):
        yield "rule-by-hand"
        return
    if at.site.kind is Kind.BUFFER:
        yield "evaluation-in-train"
    yield from ("loading", "averaging", "copying", "in-place")


# --- where the records do not show the cause, or it lies elsewhere


def gap_cause(step: Step, position: int) -> Cause | None:
    """Cause `gap` of a start value after unrecorded steps; None otherwise."""
    site = step.sites[position]
    if site.phase is not Phase.START or not step.gap or step.carried.diverged or step.rng_differs():
        return None
    if site.kind not in TENSORS | {Kind.OPTIMIZER_STATE} or not step.is_recorded_before(site.fqn):
        return None
    return cause("gap", role=Role.PROPAGATED)


@finds("gap")
def find_attributes_in_gap(at: View) -> Iterator[Finding]:
    """Findings on differing attributes of the module or of loss modules."""
    if at.cause.instead == "module":
        yield from find_attributes(at)
    elif at.site.kind is Kind.LOSS:
        yield from find_attributes_of_losses(at)


def resumed_cause(step: Step, position: int) -> Cause | None:
    """Cause `resumed` where one run began later with other values; None otherwise."""
    del position
    return cause("resumed", role=Role.PROPAGATED) if step.resumed else None


@finds("resumed")
def find_unrestored(at: View) -> Iterator[Finding]:
    """Finding with up to three tensors that the later run began with differently."""
    carried = at.step.carried
    names = [*sorted(carried.params | carried.buffers), *(f"{path} of {fqn}" for fqn, path in sorted(carried.states))]
    if names:
        yield found("not-restored", names=", ".join(names[:3]))


def propagated_cause(step: Step, position: int) -> Cause | None:
    """Cause `propagated`, for any divergence."""
    del step, position
    return cause("propagated", role=Role.PROPAGATED)


@finds("propagated")
def find_first_difference(at: View) -> Iterator[Finding]:
    """Finding with the first record of the step that differs, unless that is this one."""
    if at.step.sites[0] != at.site:
        yield found("upstream", name=what(at.step.sites[0]))
