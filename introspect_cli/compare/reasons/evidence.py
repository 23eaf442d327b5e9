"""What a conclusion rests on, one sentence each: a reader can check it instead of believing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.facts import FORWARD, Facts
from introspect_cli.compare.reasons.words import often
from introspect_cli.compare.result import Divergence, Reason
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.clues import Clues
    from introspect_cli.compare.reasons.origin import Cause


def evidence(clues: Clues, divergence: Divergence, cause: Cause, facts: Facts) -> tuple[str, ...]:
    """The equalities that the conclusion rests on, one sentence each."""
    lines = []
    if clues.batches_before:
        last = "all steps before agree" if clues.batches_before > 1 else "the step before agrees"
        lines.append(f"{clues.batches_before} compared step{'s' * (clues.batches_before > 1)}: {last} entirely.")
    if clues.before:
        lines.append(f"{clues.before} records before it in step {divergence.step} agree.")
    if cause.reason in (Reason.MODULE, Reason.OWN_CODE) and divergence.site.kind is Kind.OUTPUT:
        lines.append(f"Equal going in: {clues.fed}.")
    if clues.rng_equal is not None and cause.reason is not Reason.RNG:
        lines.append(f"Random states at the start of the step {'agree' if clues.rng_equal else 'differ'}.")
    if cause.reason is Reason.GRADIENT and clues.gradients[1]:
        differ, total = clues.gradients
        lines.append(f"{differ} of {total} gradients differ in this step.")
    if clues.calls and cause.reason is not Reason.STRUCTURE:
        name, one, two = clues.calls
        lines.append(f"{name} runs {often(one)} in this step of a and {often(two)} in b.")
    forward = any(site.phase in FORWARD for site in facts.sites)
    if cause.reason in (Reason.GRADIENT, Reason.OPTIMIZER) and not divergence.site.call and not forward:
        lines.append("Every recorded value of the forward pass agrees in this step.")
    return tuple(lines)
