"""What a step leaves of parameters, optimizer state and buffers, where what it was given does not differ."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from introspect_cli.compare.reasons.base import Reason
from introspect_cli.compare.reasons.copies import with_copies
from introspect_cli.compare.settings.differences import MOST_RANKS, Difference
from introspect_cli.compare.settings.hyperparameters import (
    OPTIMIZERS,
    RECORDED,
    Optimizers,
    hyperparameter_changes,
    in_words,
    recorded_names,
)
from introspect_cli.compare.settings.settings import chooses_kernel
from introspect_cli.compare.step.rests_on import (
    PASSES,
    Place,
    gradients_in_step,
    lacks_gradient,
    owing_side,
    state_before,
    value_before,
)
from introspect_cli.compare.step.tensor_at import untouched_side
from introspect_cli.compare.terms.evidence import Cause, Known, Thing, those
from introspect_cli.compare.terms.sites import KINDS, kind_code, phase_code
from introspect_cli.compare.terms.words import although, how_far, key_of, listed, what
from introspect_cli.records import Kind, Phase
from introspect_cli.texts import rank_list

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.table import Table
    from introspect_cli.store.read.rank_reader import RankReader


class Optimizer(Reason):
    """A parameter or optimizer state differs after the step although its gradient and its value before are equal.

    The cause is the optimizer or its hyper-parameters.
    """

    word = "optimizer"
    place = "the optimizer or its hyper-parameters"
    kinds = frozenset({Kind.PARAM, Kind.OPTIMIZER_STATE})
    weights: ClassVar = {"hyperparameter": 1.0, "optimizers": 0.98}
    names = re.compile(r"lr|learning|beta|momentum|decay|eps|optim|warm|sched|fused|foreach|amsgrad", re.IGNORECASE)

    def applies(self, step: Step, position: int) -> Cause | None:
        """It comes from the gradient, the value and the optimizer's state before."""
        site, order = step.sites[position], step.order_at(position)
        new = site.phase is Phase.START and site.kind is Kind.OPTIMIZER_STATE and step.number == step.table.step_b == 0
        if new and not step.resumed:
            return self.cause()
        if site.phase is not Phase.OPTIMIZER or (site.kind is Kind.PARAM and lacks_gradient(step, site.fqn)):
            return None
        carried = step.carried
        fed = site.fqn in carried.params or any(name == site.fqn for name, _ in carried.states)
        seen = not site.call and bool(step.of_call(Phase.OPTIMIZER, Kind.GRAD, site.fqn, 0))
        fed = fed or (bool(step.differing(Kind.GRAD, site.fqn)) if seen else step.differs_before(order, PASSES))
        earlier = any(
            step.divergences.order[i] < order and (step.sites[i].phase is Phase.START or step.sites[i].call)
            for i in step.differing(Kind.PARAM, site.fqn)
        )
        if fed or earlier:
            return None
        place = Place(site, order)
        before = state_before(step, place)
        if site.kind is Kind.PARAM:
            # what equal steps before left is equal; what a checkpoint left may be lost
            unseen = those(before, Known.UNSEEN) if step.comparison.offset else []
            unseen = [replace(fact, needed=True) for fact in unseen]
            before = [*value_before(step, place), *those(before, Known.WITHIN), *unseen]
        if site.call:
            return self.cause(*before, *gradients_in_step(step, place))
        evidence = self.rests_on(step, position)
        if those(evidence, Known.UNSEEN) and hyperparameter_changes(step.table, step.standing):
            evidence = [replace(fact, needed=False) for fact in evidence]  # a cause is on record all the same
        return self.cause(*evidence, *before)

    def sentence(self, scene: Scene) -> str:
        """Which optimizer, and how it was set up differently."""
        first = scene.first
        call = first.site.call
        when = f"within the optimizer step, before its forward pass {call}" if call else "after the optimizer step"
        when = "when the first step begins" if first.site.phase is Phase.START else when
        text = f"{what(first.site)} differs {when}{how_far(first)}{although(scene.cause.evidence)};"
        a, b = scene.steppers
        name = ", ".join(a) if a and a == b else "the optimizer"
        if a and b and a != b:
            return f"{text} the optimizer is {', '.join(a)} in a and {', '.join(b)} in b."
        if scene.cause.rests_on(Thing.GRADIENT_SUM):
            return f"{text} {_owed(scene)}"
        if with_copies(first):
            return f"{text} {_on_ranks(scene, with_copies(first), name)}"
        other = scene.setup.other_for(first.site.fqn)
        if other:
            return f"{text} {scene.the_cause_is} another optimizer: {other}."
        side = untouched_side(scene.table, scene.step.before, scene.union)
        if side:
            return f"{text} {_left_alone(scene, side, name)}"
        side, counts = _fresh_state(scene)
        if side:
            return f"{text} the optimizer state of {side} started from scratch ({counts})."
        changed = changes(scene)
        words = _in_words(scene, changed)
        if not changed and first.site.phase is Phase.START:
            return f"{text} another state was loaded into it, or {name} made it otherwise."
        if not changed and scene.cause.grown:
            return f"{text} {_amplified(name)}"
        if call and those(scene.cause.evidence, Known.UNSEEN):
            causes = f"{name}, its hyper-parameters{words}, or the gradients it computed (zero_grad)"
            return f"{text} {scene.the_cause_is} {causes}."
        applying = tuned(scene)
        if applying:
            whose = f"{name}'s " if len(set(a)) == 1 else ""
            return f"{text} {scene.the_cause_is} {whose}{in_words(applying).strip(' ()')}."
        rounded = scene.rounding_words() if all(chooses_kernel(change.name) for change in changed) else ""
        unseen = not scene.is_first_step and Kind.OPTIMIZER_STATE not in scene.step.comparison.kinds
        what_it_has = ", its state" if unseen else ""
        return f"{text} {scene.the_cause_is} {name}{what_it_has} or its hyper-parameters{words}.{rounded}"


def _owed(scene: Scene) -> str:
    """That one run's ranks had not added up the gradient when the optimizer took it."""
    sites = scene.step.of(Kind.GRAD, frozenset({Phase.OPTIMIZER}), scene.site.fqn)
    side = owing_side(scene.step, sites.tolist())
    copies = with_copies(scene.first)
    if copies and copies != side:
        took = f"in {copies}, each rank's optimizer takes its own share of the gradient, which nobody added up"
        return f"{took}; in {side} it is a partial sum, which the optimizer adds up."
    return (
        f"in {side} its gradient is still a partial sum on each rank when the optimizer takes it: it was not "
        "reduced, so an optimizer that takes each rank's share makes another step."
    )


def written_within(scene: Scene) -> str:
    """That one run alone writes a tensor of the model between an optimizer's begin and a forward pass in its step."""
    site, alignment = scene.site, scene.table.alignment
    if not site.call or not any(alignment.in_both[union] for union in alignment.by_fqn.get(site.fqn, [])):
        return ""
    return (
        f"only {scene.first.only} changes {what(replace(site, call=0))} since the last optimizer step, before the "
        "forward pass: a checkpoint or an average was loaded into it, or the script writes it."
    )


def _on_ranks(scene: Scene, side: str, name: str) -> str:
    """What the optimizers of one run's ranks have otherwise, which leave different copies of a parameter."""
    run = scene.runs[side == "b"]
    base, *others = run.recorded[:MOST_RANKS]
    for rank in others:
        setup = Optimizers(run.settings_of(base).get(OPTIMIZERS), run.settings_of(rank).get(OPTIMIZERS))
        words = [
            f"{one.name} is {one.a} on rank {base} and {one.b} on rank {rank}"
            for one in setup.changes_for(scene.site.fqn)
        ]
        if words:
            return f"in {side}, {name}'s {listed(words)}."
    step, site = scene.first.step if side == "a" else scene.first.step_b, scene.site
    has = [rank for rank in run.recorded[:MOST_RANKS] if _has_gradient(run.rank(rank), step, site.fqn)]
    without = [rank for rank in run.recorded[:MOST_RANKS] if rank not in has]
    if has and without:
        return f"in {side}, {rank_list(without)} has no gradient of it, and {rank_list(has)} steps it."
    return f"in {side}, its ranks make different steps."


def _has_gradient(reader: RankReader, step: int, fqn: str) -> bool:
    """Whether a rank's optimizer had a gradient of a parameter in a step."""
    sites, wanted = reader.sites, (fqn, Kind.GRAD.value, Phase.OPTIMIZER.value)
    numbers = reader.read(step).site.tolist() if step in reader else []
    return any((sites.fqn[number], sites.kind[number], sites.phase[number]) == wanted for number in numbers)


def _left_alone(scene: Scene, side: str, name: str) -> str:
    """Why one run's optimizer leaves a parameter as it was, as far as the records tell."""
    changed, has = changes(scene), scene.setup.has(side, scene.site.fqn)
    rates = [change for change in changed if change.about == "lr" and getattr(change, side) == "0"]
    if rates:
        return f"the cause is lr {rates[0].a} -> {rates[0].b}: with lr 0, {name} leaves it as it was in {side}."
    left = f"in {side}, {name} leaves this parameter as it was"
    if has is None:
        return f"{left} (not among its parameters, or lr 0)."
    words = _in_words(scene, changed)
    among = f", although it is among its parameters{words}" if has else ": it is not among its parameters"
    return f"{left}{among}."


def _amplified(name: str) -> str:
    """That the optimizer made a tolerated difference larger, where its hyper-parameters are equal."""
    text = f"the likely cause is a small difference in its inputs, amplified by {name}"
    if re.match(r"(N?R?Adam|RMSprop|Ada|Lion|Sign|Rprop|LAMB|SparseAdam)", name, re.IGNORECASE):
        text += ", which divides a gradient by its size (in the first step only its sign is left)"
    return f"{text}."


def tuned(scene: Scene) -> list[Difference]:
    """The diverging parameter's hyper-parameters that differ, where all else that it rests on is on record and equal.

    Not those that choose the kernel alone, nor those of a group or an optimizer that may be another parameter's.
    """
    if scene.tells != Optimizer.word or those(scene.cause.evidence, Known.UNSEEN):
        return []
    others = scene.optimizers[0] != scene.optimizers[1] and all(scene.optimizers)
    if others or scene.cause.rests_on(Thing.GRADIENT_SUM) or _fresh_state(scene)[0]:
        return []  # that comes first
    return [
        change
        for change in changes(scene)
        if change.name == change.about and not chooses_kernel(change.name) and not change.name.startswith(_FACTOR)
    ]


def changes(scene: Scene) -> list[Difference]:
    """Hyper-parameters that differ and apply to the diverging parameter: by settings, and as recorded at the step.

    Settings are those of a run's first step. The learning rate is recorded in each, and counts as it is there in the
    group of the parameter. Where another step of a is compared with that of b, settings say nothing of what both
    recorded, or did not look at.
    """
    settled, recorded = scene.setup.changes_for(scene.site.fqn), recorded_names(scene.table)
    if scene.step.comparison.offset:
        settled = [change for change in settled if "lr" in recorded and change.name not in recorded]
    if any(change.name == "lr" for change in settled) and "lr" in recorded:
        here = [change for change in scene.hyperparameters if change.about == "lr"]
        if all(not change.of and change.name == "lr" for change in here):
            settled = [*here, *(change for change in settled if change.name != "lr")]
    names = {change.name for change in settled}
    others = [
        change
        for change in scene.hyperparameters
        if not (not change.of and change.about in names) and not (settled and None in (change.a, change.b))
    ]
    rates = None if scene.setup.renumbered else _rates(scene)
    if rates is None:
        return [*settled, *others]
    rest = [change for change in (*settled, *others) if change.about != "lr"]
    if rates[0] == rates[1]:
        return rest
    factors = [change for change in rest if change.about.startswith(_FACTOR)]
    return [Difference(RECORDED, "lr", *rates, "lr"), *(change for change in rest if change not in factors)]


_FACTOR = "lr_"
"""How a script's notes begin of what it makes a group's rates of; no optimizer reads them."""


def _rates(scene: Scene) -> tuple[str, str] | None:
    """The learning rates of the group that a parameter is in, in a and in b; None where these are not on record."""
    held = scene.setup.groups_of(scene.site.fqn)
    if held is None:
        return None
    table, name = scene.table, held[0]
    one, two = (
        next((table.plain(u, side) for u in table.rows_of(side) if _is_rate(table, u, name, number)), None)
        for side, number in zip("ab", held[1:], strict=True)
    )
    return None if one is None or two is None else (one, two)


def _is_rate(table: Table, union: int, optimizer: str, group: int) -> bool:
    alignment = table.alignment
    return alignment.fqn[union] == optimizer and alignment.path[union] == f"[{group}]['lr']"


def _in_words(scene: Scene, changed: list[Difference]) -> str:
    """Those that differ, in brackets; that none does only where some are known of this step."""
    later = scene.step.comparison.offset or not scene.is_first_step
    unseen = not changed and later and not recorded_names(scene.table)
    return " (not recorded in this step)" if unseen else in_words(changed)


def _fresh_state(scene: Scene) -> tuple[str, str]:
    """The side whose optimizer begins anew with a parameter, and how its state tells that."""
    table, fqn = scene.table, scene.site.fqn
    alignment = table.alignment
    for union in alignment.by_fqn.get(fqn, []):
        if KINDS[alignment.kind[union]] is Kind.OPTIMIZER_STATE and "step" in alignment.path[union]:
            one, two = table.plain(union, "a"), table.plain(union, "b")
            try:
                counts = float(one or "nan"), float(two or "nan")
            except ValueError:
                return "", ""
            if None not in (one, two) and counts[0] != counts[1] and 1.0 in counts:
                return ("a" if counts[0] == 1.0 else "b"), f"it has counted {one} steps in a and {two} in b"
    goes = scene.step.comparison.goes
    if goes is None or not scene.step.comparison.goes_on_at(scene.first.step):
        return "", ""
    before, begun = goes.there.to(goes.at - 1).state_of(fqn, Phase.OPTIMIZER), goes.begins.state_of(fqn, Phase.START)
    late, whole = (at.state_of(fqn, Phase.OPTIMIZER) for at in (goes.begins, goes.there))
    lost = sorted(map(key_of, before.keys() - begun.keys()))
    return (goes.late, f"it begins without {listed(lost)}") if lost and late != whole else ("", "")


def not_optimized(scene: Scene) -> str:
    """That no optimizer of the other run has the parameter."""
    has, lacks = (scene.setup.has(side, scene.site.fqn) for side in (scene.first.only, scene.lacks))
    text = f"{scene.only_has}, as the optimizer sees it: no optimizer that steps in {scene.lacks} has this parameter."
    return text if has is True and lacks is False else ""


def changed_optimizer(scene: Scene) -> str:
    """That another of the optimizers, which both runs have, steps it."""
    changed = scene.setup.other_for(scene.site.fqn)
    return f"{scene.only_has} at this optimizer step: {changed}." if changed else ""


def other_optimizer(scene: Scene) -> str:
    """That an optimizer of another class steps it, which keeps something else of it."""
    one, two = scene.steppers
    another = one and two and {name.partition("#")[0] for name in one} != {name.partition("#")[0] for name in two}
    return f"{scene.only_has}: the optimizer is {listed(one)} in a and {listed(two)} in b." if another else ""


def not_stepped(scene: Scene) -> str:
    """That an optimizer steps a parameter in one run alone, in the step at hand; or that its model first runs there."""
    root, alignment = scene.site.fqn.partition(".")[0], scene.step.alignment
    sites = scene.table.sites_a if scene.lacks == "a" else scene.table.sites_b
    before = sites[alignment.phase[sites] != phase_code(Phase.OPTIMIZER)]
    ran = any(alignment.fqn[site].partition(".")[0] == root for site in before.tolist())
    new = not ran and not scene.site.call and not scene.step.was_there(scene.site.fqn)
    if scene.site.phase is Phase.START and new:
        return f"{scene.only_has} when the step begins: in {scene.lacks} its model has not run in training by then."
    if scene.site.phase is not Phase.OPTIMIZER:
        return ""
    return f"{scene.only_has} after this step: in {scene.lacks} no optimizer steps it here."


def only_saves(scene: Scene) -> str:
    """That one run does nothing in the step but save files, as one that finds its training done."""
    sites = scene.table.sites_a if scene.lacks == "a" else scene.table.sites_b
    if not (scene.step.alignment.kind[sites] == kind_code(Kind.PRODUCT)).all():
        return ""
    return f"{scene.only_has}: {scene.lacks} trains nothing in this step, it only saves files."
