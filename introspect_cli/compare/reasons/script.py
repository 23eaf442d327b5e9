"""What the script's own code gives and computes: batches, inputs, losses, values that it records, what it saves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from introspect_cli.compare.reasons.base import Reason
from introspect_cli.compare.reasons.module import parent_call
from introspect_cli.compare.reasons.ranks import uneven_ranks
from introspect_cli.compare.reasons.stale import stale_side
from introspect_cli.compare.step.rests_on import (
    LEFT_OUT,
    Place,
    batches,
    calls_left_out,
    loss,
    outputs,
    random_at_start,
    rests_on,
    trained,
)
from introspect_cli.compare.terms.distance import shapes_differ
from introspect_cli.compare.terms.evidence import Cause, Known, Thing, answer
from introspect_cli.compare.terms.names import FORWARD
from introspect_cli.compare.terms.table import DIFFERENT
from introspect_cli.compare.terms.words import is_kept, often, same_values, what
from introspect_cli.records import SCALER, Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step.step import Step


class Batch(Reason):
    """The data loader gave another batch."""

    word = "batch"
    place = "the data pipeline"
    kinds = frozenset({Kind.BATCH})
    weights: ClassVar = {"command": 0.9, "seeds": 0.95}
    names = re.compile(r"seed|worker|batch|shuffle|data|block|seq|sampler|augment", re.IGNORECASE)

    def is_fed(self, step: Step, position: int) -> bool:
        """A batch comes from the loader, the batches before it and the random states."""
        site = step.sites[position]
        return step.rng_differs() or (site.phase, site.fqn) in step.carried.loaders or bool(step.carried.rng)

    def sentence(self, scene: Scene) -> str:
        """Whether the values are the same in another order, and whether batches before it are equal."""
        text, a, b = f"{scene.differs()};", scene.first.a, scene.first.b
        if a is not None and b is not None and shapes_differ(a, b):
            why = "batch size, sequence length, cropping or padding"
            if drawn_otherwise(scene):
                why = f"it likely has other samples, because since the step began, {_OTHER_DRAWS}"
            return f"{text} its shape is different: {why}."
        if a is not None and b is not None and a.layout.dtype != b.layout.dtype:
            return f"{text} its dtype is different: the data is converted differently."
        why = "it is shuffled or shifted differently." if same_values(scene.first) else _before(scene)
        return f"{text} {why}"


_OTHER_DRAWS = "one run drew other random numbers (in an evaluation, for shuffling or augmentation)"


def _before(scene: Scene) -> str:
    """What is known of the rest of this batch and of those before it, and where to look."""
    step, site = scene.step, scene.site
    unions = step.of(Kind.BATCH, frozenset({site.phase}), site.fqn)
    calls = step.alignment.call[unions]
    state = step.known(unions[calls < site.call])
    if state is Known.UNSEEN and step.state_before is not None:
        state = answer(step.state_before[unions])
    if state in {Known.EQUAL, Known.WITHIN}:
        text = f"the batch before it is {state.value}"
    elif scene.steps_before:
        text = "no batch of this loader was recorded just before it"
    else:
        text = "the data differs from the first recorded batch on"
    if drawn_otherwise(scene):
        return f"{text}: since the step began, {_OTHER_DRAWS}."
    rest = unions[calls == site.call]
    if step.known(rest[rest != scene.union]) is Known.EQUAL:
        return (
            "the rest of this batch is equal: most likely the samples are the same, and this part of them is made "
            "differently (files, augmentation or its seed, labels, masks)."
        )
    return f"{text}: look at the data pipeline (order, seed, workers, augmentation, files)."


def drawn_otherwise(scene: Scene) -> bool:
    """Whether draws around the batch differ: the state drawn from next differs, and that of the start is equal."""
    step, order = scene.step, scene.table.order_of
    drawn = step.of(Kind.RNG, frozenset(Phase) - {Phase.START})
    drawn = drawn[(order[drawn] > scene.first.sequence) & (step.state[drawn] > 0)]
    at_start = [fact.known for fact in scene.cause.evidence if fact.thing is Thing.RANDOM_AT_START]
    return at_start == [Known.EQUAL] and bool(len(drawn)) and step.state[drawn[np.argmin(order[drawn])]] == DIFFERENT


def more_batches(scene: Scene) -> str:
    """That one run alone draws a batch."""
    return f"only {scene.first.only} draws {what(scene.site)}: a different number of batches."


class Script(Reason):
    """The code between the data loader and the model gives the model another input."""

    word = "script"
    place = "the script's code before this module"
    kinds = frozenset({Kind.INPUT})
    priority = 40

    def applies(self, step: Step, position: int) -> Cause | None:
        """It may come from everything that was computed before."""
        site, order = step.sites[position], step.order_at(position)
        if parent_call(step, site.fqn, order) is not None or step.anything_before(order):
            return None
        evidence = self.rests_on(step, position)
        if step.loader_around(site.fqn, order):
            return self.cause(*(fact for fact in evidence if fact.thing is not Thing.BATCHES))
        if calls_left_out(step, site.fqn):
            return self.cause(*evidence, LEFT_OUT)
        if not step.outputs_before(order)[1]:
            return self.cause(*evidence)  # what ran while a loader made the batch is in it
        known = (output for output in outputs(step, Place(site, order)) if output.known in {Known.EQUAL, Known.WITHIN})
        return self.cause(*evidence, *known)

    def sentence(self, scene: Scene) -> str:
        """Whether a batch was seen to be equal, and whether modules ran before."""
        text = scene.differs(values=True, named=False)
        if loader := scene.step.loader_around(scene.site.fqn, scene.first.sequence):
            return (
                f"{text}; {scene.site.fqn} runs while {loader} makes the batch, so {scene.the_cause_is} in the data "
                "pipeline (order, seed, workers, augmentation, files)."
            )
        carried = _carried(scene)
        if carried:
            return f"{text}: {carried}; {scene.the_cause_is} in the script's own code that carries it over."
        (seen,) = scene.cause.rests_on(Thing.BATCHES)
        unseen = seen.known is Known.UNSEEN
        if scene.cause.rests_on(Thing.OUTPUTS, Thing.LEFT_OUT):
            if scene.calls:
                name, one, two = scene.calls
                text += f"; {name} runs {often(one)} in this step of a and {often(two)} in b"
            given = f"module outputs, {'data that came from no loader' if unseen else 'the batch'}"
            return (
                f"{text}{scene.scaled}; {scene.the_cause_is} in the script's own code that computes it: from {given} "
                f"or values of its own (targets, masks, weights).{scene.rounding_words()}"
            )
        passed = ", or a model that ran without gradients, which was not recorded"
        passed = passed if scene.cause.rests_on(Thing.PASSED_OVER) else ""
        if not unseen:
            how = "equal" if seen.known is Known.EQUAL else "within tolerance"
            taken = scene.step.of_call(scene.site.phase, Kind.INPUT, scene.site.fqn, scene.site.call)
            if scene.step.known(taken, scene.first.sequence) is Known.EQUAL:  # another one is the batch
                return (
                    f"{text} although the batch is {how}; {scene.the_cause_is} in the script's own code that computes "
                    f"it: from the batch, parameters or values of its own (masks, positions, weights){passed}."
                )
            return (
                f"{text} although the batch is {how}; the script changes it between the data loader and "
                f"{scene.site.fqn} (preprocessing, noise, masks, positions){passed}."
            )
        loaded = "no data loader was recorded"
        if scene.by_samples and scene.step.of(Kind.BATCH, frozenset({Phase.DATA})).size:
            loaded = "the loader's batches of the step are not what it uses"
        before = ", or what a step before that is not recorded gave it" if scene.step.gap else ""
        earlier = scene.step.sites[: scene.position]
        saved = next((f"as {what(site)} does before it" for site in earlier if site.kind is Kind.PRODUCT), "")
        return (
            f"{text}, {saved or 'before any other record of the step'}; {scene.the_cause_is} the data pipeline or the "
            f"script's own preparation of the batch ({loaded}){before}{passed}."
        )


def _carried(scene: Scene) -> str:
    """Which output of the step before an input is in each run, where these are not the same; "" for none."""
    step, given = scene.step, {}
    before = step.before
    for side, summary in (("a", scene.first.a), ("b", scene.first.b)):
        if before is None or summary is None or summary.stats.get("min") == summary.stats.get("max"):
            continue  # a constant tells nothing of where it comes from
        checksum = scene.table.checksum(scene.union, side)
        same = [union for union in step.of(Kind.OUTPUT, FORWARD).tolist() if before.checksum(union, side) == checksum]
        for site in sorted(map(step.alignment.site, same), key=lambda site: site.fqn.count("."))[:1]:
            given[side] = what(site)  # as the outermost module gave it
    if len(set(given.values())) == 1 < len(given) or not given:
        return ""
    clauses = [f"in {side} it is {given.get(side, 'not')}" for side in sorted("ab", key=lambda side: side not in given)]
    return f"{clauses[0]} in the step before, {clauses[1]}"


_UPSTREAM = frozenset({Phase.DATA, Phase.FORWARD, Phase.EVAL})


class Loss(Reason):
    """The loss differs although the model's outputs are equal: the loss code, or the targets."""

    word = "loss"
    place = "the loss code or the targets"
    kinds = frozenset({Kind.LOSS})
    weights: ClassVar = {"scalers": 0.96}
    names = re.compile(r"loss|smooth|reduc|label|ignore|pad|accum|scale", re.IGNORECASE)

    def is_fed(self, step: Step, position: int) -> bool:
        """A difference of an earlier gradient does not reach it."""
        before = step.differs_before(step.order_at(position), _UPSTREAM)
        return before or step.rng_differs() or bool(step.carried.params)

    def sentence(self, scene: Scene) -> str:
        """The values, and what could have made them."""
        outputs, seen, _, *unseen = scene.cause.evidence
        text = f"{scene.differs([outputs, seen, *unseen], values=True)}{scene.scaled}"
        if scene.calls:
            name, one, two = scene.calls
            text += f"; {name} runs {often(one)} in this step of a and {often(two)} in b"
        scales = _scaler_words(scene)
        if scales:
            return f"{text}; {scene.the_cause_is} the scale of GradScaler: {scales}.{scene.rounding_words()}"
        model = "".join(f", or in {fact.of}, whose call was not seen" for fact in unseen if fact.of)
        targets = "" if seen.known in {Known.EQUAL, Known.WITHIN} and not unseen else " or the targets"
        uneven = uneven_ranks(scene)
        if uneven:
            return (
                f"{text}; {scene.the_cause_is} that {' and '.join(uneven)}: the mean of their means is not the mean "
                f"over all samples. Else it is in the loss code{targets}."
            )
        causes = f"(reduction, mask, weighting, scale){targets}{model}.{scene.rounding_words()}"
        return f"{text}; {scene.the_cause_is} in the loss code {causes}"


def _scaler_words(scene: Scene) -> str:
    """Both runs' scales, where `GradScaler` multiplies the losses by them; "" where these differ by anything else."""
    table = scene.table
    sites = table.alignment.by_fqn.get(SCALER, [])
    values = [next((value for at in sites if (value := table.plain(at, side))), "") for side in "ab"]
    losses = [table.plain(scene.union, side) for side in "ab"]
    try:
        one, two, loss_a, loss_b = (float(value or "nan") for value in (*values, *losses))
    except ValueError:
        return ""
    same = abs(one * loss_b - two * loss_a) <= _SIX_DIGITS * abs(one * loss_b)
    return f"{values[0]} in a, {values[1]} in b" if one != two and same else ""


_SIX_DIGITS = 1e-5


class RecordedValue(Reason):
    """A value that the script gave to `introspect_cli.record` differs."""

    word = "value"
    place = "the script's code that computes this value"
    kinds = frozenset({Kind.VALUE})
    priority = 40

    def sentence(self, scene: Scene) -> str:
        """Both values of a number, and where to look."""
        return (
            f"{scene.differs(scene.cause.evidence, values=True)}{scene.scaled}; {scene.the_cause_is} in the script's "
            "code that computes it, or in what it was computed from and is not recorded."
            f"{scene.rounding_words()}"
        )


_UNSEEN = "No module is called in these runs, so no operation between these tensors and the loss was recorded"


class Plain(Reason):
    """The loss or a gradient differs in a script that calls no module, so no place inside the model can be named."""

    word = "plain"
    place = "the script's own operations"
    kinds = frozenset({Kind.LOSS, Kind.GRAD})
    priority = 45

    def applies(self, step: Step, position: int) -> Cause | None:
        """It comes from the tensors that are trained, the data and the script's operations."""
        site, order = step.sites[position], step.order_at(position)
        if not step.without_modules or step.rng_differs() or step.anything_before(order):
            return None
        losses = (loss,) if site.kind is Kind.GRAD else ()
        data = (batches,) if step.of(Kind.BATCH, frozenset({Phase.DATA})).size else ()
        return self.cause(*rests_on(step, Place(site, order), (*losses, trained, *data, random_at_start)))

    def sentence(self, scene: Scene) -> str:
        """What is not known, and how to know it."""
        first = scene.first
        text = f"{scene.differs(scene.computed_from, values=True, named=False)}{scene.scaled}."
        side = stale_side(scene.step, scene.position) if first.site.kind is Kind.GRAD else ""
        if side:
            mixed = f"In {side} it is the other run's gradient plus that of the step before"
            return f"{text} {mixed}: it was not set to zero in {side}."
        if first.site.kind is Kind.GRAD:
            return f"{text} {_UNSEEN}: the cause is in their backward passes, or in what was done to the gradient."
        return f"{text} {_UNSEEN}: the cause is there, or in the data (capture --level op records every operator)."


_SAVES = "computes what is saved (a moving average, a copy, a conversion)"


class Product(Reason):
    """A file that the script saves, or a copy that it keeps, differs although what it is computed from is equal."""

    word = "product"
    place = "the script's code that computes what is saved or kept"
    kinds = frozenset({Kind.PRODUCT})
    priority = 20
    names = re.compile(r"ema|average|swa|momentum|decay|save|checkpoint|half|precision", re.IGNORECASE)

    def is_fed(self, step: Step, position: int) -> bool:
        """Where anything but what is saved differs."""
        del position
        return step.rng_differs() or step.carried.diverged or any(site.kind is not Kind.PRODUCT for site in step.sites)

    def sentence(self, scene: Scene) -> str:
        """That it differs, or is in one run's file alone, and where to look."""
        if scene.first.only:
            return f"{scene.only_has}: {scene.lacks} {'keeps' if is_kept(scene.site) else 'saves the file'} without it."
        text = scene.differs(scene.cause.evidence)
        if is_kept(scene.site) and scene.step.comparison.goes is not None:
            return f"{text}; resuming did not restore it, or the script's code updates it otherwise (a moving average)."
        done = "updates it (a moving average)" if is_kept(scene.site) else _SAVES
        return f"{text}; {scene.the_cause_is} in the script's code that {done}."
