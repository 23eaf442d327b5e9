"""Where the cause cannot be told: something that went in was not recorded, or differs too."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from introspect_cli.compare.evidence import Cause, Known, those
from introspect_cli.compare.reasons.base import Reason, reason_named
from introspect_cli.compare.reasons.module import Module, attribute_changes, changes_of_losses
from introspect_cli.compare.reasons.start import TENSORS, initial_tensors
from introspect_cli.compare.reasons.words import how_far, listed, thing, what
from introspect_cli.compare.result import Role
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step import Step


class Gap(Reason):
    """Nothing that differs went in, but not all that went in was recorded.

    Most gaps are other reasons that lack evidence. This class itself finds the tensors that differ when a step begins
    after steps that were not recorded.
    """

    word = "gap"
    meaning = (
        "Not everything that went in was recorded, so the cause cannot be named. The sentence lists "
        "what is missing and which causes remain."
    )
    priority = 21
    weights: ClassVar = {"scalers": 0.6}

    def applies(self, step: Step, position: int) -> Cause | None:
        """A tensor was there before, and the step before was not recorded."""
        site = step.sites[position]
        if site.phase is not Phase.START or not step.gap or step.carried.diverged or step.rng_differs():
            return None
        if site.kind not in TENSORS | {Kind.OPTIMIZER_STATE} or not step.was_there(site.fqn):
            return None
        return self.cause(role=Role.PROPAGATED)

    def sentence(self, scene: Scene) -> str:
        """What is known, and between which records it happened."""
        cause, site = scene.cause, scene.site
        if not cause.instead:
            differ, _ = initial_tensors(scene.step)
            more = f", as {'does' if differ == 2 else 'do'} {differ - 1} more" if differ > 1 else ""
            text = f"{what(site)} differs when the step begins{how_far(scene.first)}{more}"
            return f"{text}. {_between(scene, 'before')}"
        unseen = those(cause.evidence, Known.UNSEEN)
        text = scene.differs([fact for fact in cause.evidence if fact.known is not Known.UNSEEN])
        lacks = "is not on record" if scene.dropped else "was not recorded"
        lacks += f" ({listed([thing(fact)[0] for fact in unseen])})"
        place = reason_named(cause.instead).where("" if cause.module == site.fqn else cause.module, scene)
        changed = attribute_changes(scene) if cause.instead == Module.word else []
        changed += changes_of_losses(scene) if site.kind is Kind.LOSS else []
        place += f" ({'; '.join(changed[:3])})" if changed else ""
        if scene.step.gap:
            return f"{text}; {scene.the_cause_is} {place}, or lies earlier or in what {lacks}. {_between(scene, 'by')}"
        text = f"{text}; {scene.the_cause_is} {place}, or lies in what {lacks}."
        return text if site.phase is Phase.START else text + scene.rounding_words()


def _between(scene: Scene, until: str) -> str:
    """Between which recorded steps the runs diverged; `until` is `before` or `by` the step at hand."""
    last, now = scene.last_before, scene.first.step
    if last is None:
        return f"The steps before step {now} {scene.absent}: the runs diverged {until} step {now}."
    steps = range(last + 1, now)
    names = (
        f"steps {steps[0]} {'and' if len(steps) == 2 else 'to'} {steps[-1]}" if len(steps) > 1 else f"step {now - 1}"
    )
    return f"The records of step {last} agree and {names} cannot be compared: the runs diverged {until} step {now}."


class Resumed(Reason):
    """A run that goes on from a checkpoint that did not restore everything."""

    word = "resumed"
    meaning = "A run that continues from a checkpoint began with values that the checkpoint did not restore."
    place = "the checkpoint"
    priority = 90

    def applies(self, step: Step, position: int) -> Cause | None:
        """One run began later, with other values than the other had then."""
        del position
        return self.cause(role=Role.PROPAGATED) if step.resumed else None

    def sentence(self, scene: Scene) -> str:
        """Which tensors were not restored."""
        carried = scene.step.carried
        unequal = (
            *sorted(carried.params | carried.buffers),
            *(f"{path} of {fqn}" for fqn, path in sorted(carried.states)),
        )
        return (
            f"{scene.differs(named=False)}, because the later run began with different values than the earlier run had "
            f"then ({', '.join(unequal[:3])}): the checkpoint did not restore them."
        )


class Propagated(Reason):
    """What went into a record differs already."""

    word = "propagated"
    meaning = "Something that went into this record differs already. The cause lies further up."
    priority = 100

    def applies(self, step: Step, position: int) -> Cause | None:
        """Always."""
        del step, position
        return self.cause(role=Role.PROPAGATED)

    def sentence(self, scene: Scene) -> str:
        """Where to look instead."""
        text = f"{scene.differs(named=False)}, but what went into it differs too or was not compared"
        earliest = scene.step.sites[0]
        if earliest != scene.site:
            return f"{text}. The first of all records that differ in this step is {what(earliest)}."
        return f"{text}, so the origin lies elsewhere (earlier, or outside of what was selected)."
