"""A gradient of a module's input or output differs, though the forward pass and the loss do not: the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from introspect_cli.compare.join.sites import PHASES
from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import (
    Evidence,
    Known,
    although,
    backward_before,
    forward_pass,
    is_random,
    loss_of,
    random_state,
)
from introspect_cli.compare.reasons.module import WEIGHTS
from introspect_cli.compare.reasons.words import apart, named, scaled, what
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts


class Backward(Reason):
    """Gradients of module inputs and outputs. These are totals over all uses of a tensor: nothing may differ before."""

    word = "backward"
    place = "the backward pass"
    kinds = frozenset({Kind.GRAD_INPUT, Kind.GRAD_OUTPUT})
    weights: ClassVar = WEIGHTS

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """It comes from everything before it in the step."""
        order = float(facts.items.order[position])
        if facts.anything_before(order) or facts.rng_differs():
            return None
        found = [forward_pass(facts), *loss_of(facts), random_state(facts)]
        earlier = backward_before(facts, order, "the gradients before it", needed=False)
        return self.cause(*found, *([] if earlier.known is Known.UNSEEN else [earlier]))

    def sentence(self, scene: Scene) -> str:
        """Through which module, or of which output."""
        first, taken = scene.first, [e for e in scene.cause.evidence if not is_random(e)]
        text = f"{what(first.site)} differs{apart(first)}{although(taken)}{scaled(first)}. "
        text += "The cause is in the backward pass "
        module = named(first.site, first.module_class)
        if _recomputed(scene):
            return (
                f"{text}through {module}, which was recomputed under activation checkpointing: look at what that draws "
                "or computes differently (preserve_rng_state)."
            )
        if first.site.kind is Kind.GRAD_INPUT:
            return f"{text}through {module}."
        if _taken_by_no_module(scene):
            around = "" if _leaves_the_model(scene) else first.site.fqn.rpartition(".")[0]
            code = f"the forward code of {around} or what is around it, or the loss code" if around else "the loss code"
            return f"{text}of what uses that output, which no module takes: {code}."
        if not _any_before(scene.cause.evidence):
            return f"{text}of what uses that output: the loss code, if no module does."
        return f"{text}of what uses that output."


def _any_before(evidence: tuple[Evidence, ...]) -> bool:
    return any(found.name == "the gradients before it" for found in evidence)


def _output(scene: Scene) -> int:
    """Checksum in run a of the output whose gradient it is; 0 where that is not on record."""
    facts, site = scene.facts, scene.site
    own = [
        u
        for phase in (Phase.FORWARD, Phase.EVAL)
        for u in facts.recorded(phase, Kind.OUTPUT, site.fqn, site.call)
        if facts.alignment.path[u] == site.path
    ]
    return (scene.step.checksum(own[0], "a") or 0) if own else 0


def _taken_by_no_module(scene: Scene) -> bool:
    """Whether no module is given this output in run a, by its checksum; False where that is not on record."""
    facts, checksum = scene.facts, _output(scene)
    if not checksum or facts.modules_chosen or Kind.INPUT not in facts.kinds:
        return False
    given = facts.unions(Kind.INPUT, frozenset({Phase.FORWARD}))
    return all(scene.step.checksum(int(union), "a") != checksum for union in given)


def _leaves_the_model(scene: Scene) -> bool:
    """Whether the output is one of the whole model's, by its checksum: only the loss code can use it."""
    outputs = scene.facts.unions(Kind.OUTPUT, frozenset({Phase.FORWARD, Phase.EVAL}))
    roots = (int(union) for union in outputs if "." not in scene.facts.alignment.fqn[int(union)])
    return any(scene.step.checksum(union, "a") == _output(scene) for union in roots)


def _recomputed(scene: Scene) -> bool:
    """Whether the module was run again in the backward pass."""
    alignment = scene.facts.alignment
    own = alignment.by_fqn.get(scene.site.fqn, [])
    return any(scene.facts.state[u] and PHASES[alignment.phase[u]] is Phase.RECOMPUTE for u in own)


REASONS = (Backward(),)
