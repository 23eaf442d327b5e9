"""Tensors that a step changes and no optimizer: buffers, and parameters that a script changes by hand."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.base import Reason
from introspect_cli.compare.reasons.module import attribute_changes
from introspect_cli.compare.step.rests_on import Place, drawn_from, lacks_gradient
from introspect_cli.compare.step.tensor_at import untouched_side
from introspect_cli.compare.terms.evidence import Cause, Evidence, Known, Thing, those
from introspect_cli.compare.terms.names import FORWARD, owner_of
from introspect_cli.compare.terms.table import OTHER
from introspect_cli.compare.terms.words import although, how_far, some, what
from introspect_cli.records import Kind, Phase, Site

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step.step import Step


class ByHand(Reason):
    """A parameter changed within a step, and not by an optimizer: in the forward pass, or without a gradient."""

    word = "by_hand"
    place = "the script's code that changes the parameter"
    kinds = frozenset({Kind.PARAM})

    def is_fed(self, step: Step, position: int) -> bool:
        """It may be made of all that was computed before; an optimizer changes what has a gradient."""
        site = step.sites[position]
        without = site.phase is Phase.OPTIMIZER and not site.call and lacks_gradient(step, site.fqn)
        if not (without or site.phase is Phase.FORWARD):
            return True
        ran = [ended for _, ended in step.calls.spans_of(owner_of(site.fqn))] if site.phase is Phase.FORWARD else []
        made_by = max(ran, default=step.order_at(position))  # it is recorded at the end of the pass
        return step.rng_differs() or step.anything_before(made_by)

    def sentence(self, scene: Scene) -> str:
        """In which run, and how it can be."""
        first, forward = scene.first, scene.first.site.phase is Phase.FORWARD
        left = untouched_side(scene.table, scene.step.before, scene.union)
        side = first.only or (OTHER[left] if left else "")
        name, place = what(first.site), "forward pass" if forward else "step"
        text = f"{name} differs after the {place}{how_far(first)}{although(scene.cause.evidence)}"
        text = f"{name} was changed within the {place} in {side} only" if side else text
        why = "" if forward else "it has no gradient, for which an optimizer would change it: "
        return f"{text}; {why}the script changes it by hand (a moving average, copying, in-place code)."


def _overwritten(step: Step) -> tuple[bool, bool]:
    """Whether a wrapper gives the compared rank of a, and of b, another rank's buffers before each forward pass."""
    rank, stored = step.comparison.rank, step.comparison.tensors
    manifests = [run.manifests.get(rank, {}) for run in (stored.a, stored.b)]
    groups = [held if isinstance(held := manifest.get("data_parallel"), list) else [] for manifest in manifests]
    one, two = (
        manifest.get("broadcasts_buffers") is True and group[:1] not in ([], [rank])
        for manifest, group in zip(manifests, groups, strict=True)
    )
    return one, two


class Buffer(Reason):
    """A buffer differs at the end of the step: how its module updates it."""

    word = "buffer"
    place = "the way the module updates it"
    kinds = frozenset({Kind.BUFFER})
    names = re.compile(r"momentum|ema|stat|norm", re.IGNORECASE)

    def applies(self, step: Step, position: int) -> Cause | None:
        """It comes from the inputs of its module and its value before."""
        site, order = step.sites[position], step.order_at(position)
        owner = owner_of(site.fqn)
        if site.phase is Phase.START or site.fqn in step.carried.buffers:
            return None
        if step.differing(Kind.INPUT, owner) or step.differing(Kind.BUFFER, site.fqn)[:1] != [position]:
            return None
        unions = step.of(Kind.INPUT, FORWARD, owner)
        spans, call = step.calls.spans_of(owner), Site(Phase.FORWARD, Kind.OUTPUT, owner)
        if any(step.inside(owner, begun, ended) for begun, ended in spans):
            return None  # what ran inside it may be what it keeps
        if any(step.tensors_differ(owner, begun) for begun, _ in spans) or those(
            drawn_from(step, Place(call, order)), Known.DIFFERS
        ):
            return None  # it may be made of what else the module holds or draws
        seen = any(step.state[unions])
        if not seen and step.differs_before(order, FORWARD):
            return None
        needed = seen or Kind.INPUT not in step.comparison.kinds
        inputs = [Evidence(Thing.INPUTS, step.known(unions), needed=needed, of=owner)] if needed else []
        before = self.rests_on(step, position)
        if any(_overwritten(step)):  # what the step before left is not what the module begins with
            before = [fact for fact in before if fact.thing is not Thing.VALUE_BEFORE]
        return self.cause(*inputs, *before, module=owner)

    def sentence(self, scene: Scene) -> str:
        """Whether it is updated in both runs."""
        text = (
            f"{what(scene.site)} differs at the end of the step{how_far(scene.first)}{although(scene.cause.evidence)};"
        )
        overwritten = _overwritten(scene.step)
        if overwritten[0] != overwritten[1]:
            one, other = "ab" if overwritten[0] else "ba"
            how = f"DDP broadcasts buffers before each forward pass, and not in {other} (broadcast_buffers)"
            return f"{text} in {one}, {how}."
        side = untouched_side(scene.table, scene.step.before, scene.union)
        changed = attribute_changes(scene, owner_of(scene.site.fqn))
        if side:
            why = (
                f": its module has {some(changed, between='; ')}"
                if changed
                else " (eval mode, frozen or not updated there)"
            )
            return f"{text} it does not change in {side}{why}."
        if changed:
            return f"{text} it is updated differently: its module has {some(changed, between='; ')}."
        return f"{text} it is updated differently (momentum, mode, or a different number of times)."
