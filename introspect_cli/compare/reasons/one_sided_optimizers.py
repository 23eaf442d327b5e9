"""What an optimizer takes or keeps in one run alone: gradients, states, evaluations of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.evidence import Known
from introspect_cli.compare.reasons.hyperparameters import (
    first_parameter,
    has_parameter,
    holders,
    names_in,
    other_optimizer,
    renumbered,
)
from introspect_cli.compare.reasons.words import although, listed, often
from introspect_cli.compare.rests_on import Place, backward
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene


def not_optimized(scene: Scene) -> str:
    """That no optimizer of the other run has the parameter."""
    has = {side: has_parameter(held, scene.site.fqn) for side, held in scene.documents("optimizers").items()}
    if (has[scene.first.only], has[scene.lacks]) != (True, False):
        return ""
    steps = f"no optimizer that steps in {scene.lacks} has this parameter."
    return f"{scene.only_has}, as the optimizer sees it: {steps}"


def changed_optimizer(scene: Scene) -> str:
    """That another of the optimizers, which both runs have, steps it."""
    changed = other_optimizer(scene.documents("optimizers"), scene.site.fqn)
    return f"{scene.only_has} at this optimizer step: {changed}." if changed else ""


def evaluations(scene: Scene) -> str:
    """That an optimizer with a closure evaluates the loss another number of times within its step."""
    if scene.site.phase is not Phase.OPTIMIZER or not scene.site.call or scene.losses[0] == scene.losses[1]:
        return ""
    names = list(dict.fromkeys([*scene.optimizers[0], *scene.optimizers[1]]))
    changes = [f"{label} {a} -> {b}" for label, (a, b) in scene.hyperparameters.items()]
    why = f": {', '.join(changes)}" if changes else ", though its hyper-parameters are equal"
    if not names:  # with them, its hyper-parameters are on record
        names, why = ["the optimizer (its hyper-parameters were not recorded)"], ""
    one, two = map(often, scene.losses)
    return f"{listed(names)} evaluates the loss {one} within the step of a and {two} in b{why}."


def unused(scene: Scene) -> str:
    """A parameter's gradient that one optimizer step alone takes."""
    seen = f"{scene.only_has}, as the optimizer sees it"
    settings = scene.documents("optimizers")
    one, two = scene.optimizers
    if not one or not two:  # then by whose parameters' gradients are there
        one, two = (holders(held, graded(scene, side)) for side, held in settings.items())
    # each run has the optimizers that step in either here, and none of them steps in both
    both = {*one, *two}
    exchanged = one and two and not {*one} & {*two} and all(both <= names_in(held) for held in settings.values())
    if one != two and (sorted(one) == sorted(two) or exchanged):
        by_run = f"{', '.join(one)} in a; {', '.join(two)} in b"
        return f"{seen}: the optimizers step in a different order ({by_run})."
    elsewhere = _another_steps(scene, {"a": one, "b": two})
    if elsewhere:
        return f"{seen}: {elsewhere}"
    (passed,) = backward(scene.step, Place(scene.site, np.inf))
    if passed.known in {Known.EQUAL, Known.WITHIN}:
        return (
            f"{seen}{although([passed])}: in {scene.lacks} it was cleared between the backward pass and the optimizer "
            "step (zero_grad), or the parameter was replaced in the model after the optimizer was built."
        )
    return ""


def no_gradient(scene: Scene) -> str:
    """That no gradient reaches it in the other run, and in which ways that happens."""
    ways = "frozen, detached, under no_grad, not part of the loss"
    if scene.site.kind is Kind.GRAD:
        ways += ", or replaced in the model after the optimizer was built"
    return f"{scene.only_has}: in {scene.lacks} no gradient reaches it ({ways})."


def _another_steps(scene: Scene, steps: dict[str, list[str]]) -> str:
    """That a run's step is of an optimizer which has no such parameter, though another of its optimizers has it."""
    settings = scene.documents("optimizers")
    has = {side: holders(held, {scene.site.fqn}) for side, held in settings.items()}
    here, there = steps[scene.first.only], steps[scene.lacks]
    held_here, held_there = {*has[scene.first.only]}, {*has[scene.lacks]}
    if not {*here} & held_here or not there or not held_there or {*there} & held_there:
        return ""
    if here == there and renumbered(*settings.values()):
        first = first_parameter(settings[scene.lacks], there[0])
        return (
            f"in {scene.first.only} the {here[0].partition('#')[0]} that has it steps here, and in {scene.lacks} the "
            f"one that has {first}."
        )
    return (
        f"{listed(here)} {'steps' if len(here) == 1 else 'step'} here in {scene.first.only}, and in {scene.lacks} "
        f"{listed(there)}, which {'does' if len(there) == 1 else 'do'} not have this parameter."
    )


def graded(scene: Scene, side: str) -> set[str]:
    """The parameters whose gradients an optimizer sees in this step of a run."""
    rows = scene.table.rows_of(side)
    return {scene.step.alignment.fqn[u] for u in scene.step.of(Kind.GRAD, frozenset({Phase.OPTIMIZER})) if u in rows}


def no_state(scene: Scene) -> str:
    """That the other run keeps no such state."""
    return f"{scene.only_has}: the optimizer of {scene.lacks} does not keep it, or does not step this parameter."
