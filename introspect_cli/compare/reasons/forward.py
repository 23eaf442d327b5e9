"""Reasons of the forward pass: modules, operators, batches, the script's inputs and losses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.evidence import RANDOM, Cause, Known, Thing
from introspect_cli.compare.measure import WHOLE, moments, straight_line
from introspect_cli.compare.names import THEN
from introspect_cli.compare.reasons.base import cause, evidence_of
from introspect_cli.compare.reasons.draws import side_that_draws
from introspect_cli.compare.say import LEFT_OUT_ARGUMENT, finds, found, often, same_values
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.compare.step import (
    LEFT_OUT,
    RESTS_ON,
    Place,
    batches,
    loss,
    outputs,
    random_at_start,
    rests_on,
    trained,
)
from introspect_cli.compare.table import OTHER, kind_code
from introspect_cli.records import GIVEN, SCALER, Kind, Phase, Site

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.result import Finding
    from introspect_cli.compare.step import Step

# --- when a module's call, or what runs between the modules inside it, is where the runs part


def module_cause(step: Step, position: int) -> Cause | None:
    """Cause `module` of an output, or `own_code` if submodules ran in the call.

    None where something that goes into the call differs.
    """
    site, order = step.sites[position], step.order_at(position)
    start = _start_if_fed_equally(step, site, order)
    if start is None:
        return None
    after = last_child(step, site.fqn, start, order) if start >= 0 else ""
    if not after:
        return cause("module", *evidence_of("module", step, position))
    evidence = rests_on(step, Place(site, order, start=start), RESTS_ON["own_code"])
    return cause("own_code", *evidence, module=site.fqn, after=after)


def input_cause(step: Step, position: int) -> Cause | None:
    """Cause `own_code` of an input of a submodule, or of parameters given to it; `script` where no call is around it.

    `own_code` is that a module's code before its next submodule computes something else. None where something that goes
    into the call around it differs, or, without a call, where anything differs before it.
    """
    site, order = step.sites[position], step.order_at(position)
    if site.kind is Kind.PARAM and site.path != GIVEN:
        return None
    # The module that is given a parameter is not under way yet, and the one around it has made that.
    running = step.calls.around(site.fqn, order)
    if running is not None:
        parent, start, call = running
        if _call_is_fed(step, site.phase, parent, call, start, order - 0.25):
            return None
        after = last_child(step, parent, start, order)
        place = Place(Site(site.phase, Kind.INPUT, parent, call), order, of=parent, start=start if after else -1.0)
        evidence = rests_on(step, place, RESTS_ON["own_code"])
        return cause("own_code", *evidence, module=parent, after=after, before=site.fqn)
    if step.anything_before(order):
        return None
    evidence = evidence_of("script", step, position)
    if step.comparison.leaves_modules_out:
        return cause("script", *evidence, LEFT_OUT)
    known = (output for output in outputs(step, Place(site, order)) if output.known in {Known.EQUAL, Known.WITHIN})
    return cause("script", *evidence, *known)


def _start_if_fed_equally(step: Step, site: Site, order: float) -> float | None:
    """Sequence number at which the call of a site began; None where something that goes into the call differs.

    -1.0 where no input is on record and nothing differs before `order`, the sequence number of the divergence.
    """
    inputs = step.of_call(site.phase, Kind.INPUT, site.fqn, site.call)
    start = step.sequence_of(inputs) if inputs else None
    if start is None:
        return None if step.anything_before(order) else -1.0
    return None if _call_is_fed(step, site.phase, site.fqn, site.call, start, order) else start


def _call_is_fed(step: Step, phase: Phase, fqn: str, call: int, start: float, order: float) -> bool:
    """Whether something that goes into a call differs before `order`.

    That is an input of the call, a record inside the module from `start` on, a tensor of the module, or a random state
    at the start of the step.

    Args:
        step: the step.
        phase: of the call.
        fqn: of the module.
        call: number of the call in the step.
        start: sequence number at which the call began.
        order: sequence number up to which it counts.
    """
    return (
        step.differs(phase, Kind.INPUT, fqn, call)
        or step.differs_inside(fqn, start, order)
        or step.tensors_differ(fqn, order)
        or step.rng_differs()
    )


def last_child(step: Step, fqn: str, low: float, high: float) -> str:
    """FQN of the module in `fqn` that gave the last output from `low` to below `high` in a's sequence; "" for none.

    Of a deeper module it is the child of `fqn` around it, if that has records.
    """
    alignment, batch, prefix = step.alignment, step.table.a, f"{fqn}."
    outputs = alignment.kind[batch.site] == kind_code(Kind.OUTPUT)
    rows = np.flatnonzero(outputs & (batch.sequence >= low) & (batch.sequence < high))
    names = (alignment.fqn[union] for union in batch.site[rows[np.argsort(batch.sequence[rows])[::-1]]].tolist())
    name = next((name for name in names if name.startswith(prefix)), "")
    child = prefix + name.removeprefix(prefix).partition(".")[0]
    return child if name and child in alignment.by_fqn else name


# --- what is found of a module


@finds("module", "own_code")
def find_class(at: View) -> Iterator[Finding]:
    """Finding where the module to blame has another class in b."""
    if classes := at.classes_of(at.module):
        yield found("class", module=at.module, a=classes[0], b=classes[1])


@finds("module", "own_code", "gradient", "loss", "buffer", "gap")
def find_attributes(at: View) -> Iterator[Finding]:
    """Findings on attributes that differ: of the module to blame, else of submodules without recorded outputs.

    For a gradient, of the module that uses the parameter; for a loss, of modules in both runs whose class ends in
    `Loss` or `Criterion`; for a gap, only where it is a module's or a loss.
    """
    one, two = at.step.modules
    if at.site.kind is Kind.LOSS:
        losses = (name for name in one if one[name].module_class.endswith(("Loss", "Criterion")) and name in two)
        yield from (each for name in losses for each in find_attributes_of(at, name))
    elif at.cause.reason == "gradient":
        yield from find_attributes_of(at, at.parameter_user)
    elif at.cause.reason != "gap" or at.cause.instead == "module":
        own = list(find_attributes_of(at, at.module, of=""))
        yield from own or (each for name in at.unseen_inside for each in find_attributes_of(at, name))


def find_attributes_of(at: View, name: str, of: str | None = None) -> Iterator[Finding]:
    """Findings on attributes of module `name` that differ (`eps 1e-05 -> 0.001`), or that one run alone has.

    `training` is worded as the modes `train` and `eval`.

    Args:
        at: the divergence.
        name: FQN of the module.
        of: the module that the text names; "" for none, None for `name`.
    """
    modes = {"True": "train", "False": "eval"}
    for key, a, b in at.attributes(name):
        fields = {"name": key, "of": name if of is None else of}
        if key == "training":
            one, two = (THEN.join(modes.get(mode, "?") for mode in (text or "").split(THEN)) for text in (a, b))
            yield found("mode", a=one, b=two, of=fields["of"])
        elif a is None or b is None:
            yield found("attribute-in-one", **fields, value=b if a is None else a, side="b" if a is None else "a")
        else:
            yield found("attribute", **fields, a=a, b=b)


@finds("module")
def find_dtypes(at: View) -> Iterator[Finding]:
    """Finding where the record has another dtype in b."""
    if at.dtypes is not None:
        yield found("dtype", a=at.dtypes[0], b=at.dtypes[1])


@finds("module", "own_code")
def find_draws(at: View) -> Iterator[Finding]:
    """Finding where one run alone draws random numbers in the module's call; for reason `own_code`, just before it."""
    if side := side_that_draws(at, before=at.cause.reason == "own_code"):
        yield found("draws", side=side, other=OTHER[side])


_DRAW_NOTHING = re.compile(
    r"(Conv|Embedding).*|(Bil|L)inear|.*(Norm|Pool|Loss)(\dd)?|(GE|(Leaky)?Re|Si|E)LU6?|Mish|Tanh|Sigmoid"
    r"|(Log)?Softmax|Softplus|Hardswish|(Unf|F)latten|Identity|PixelShuffle|Upsample"
)


def draws_nothing(module_class: str) -> bool:
    """Whether modules of a class are known to draw no random number; False for unknown classes."""
    return _DRAW_NOTHING.fullmatch(module_class) is not None


def left_in_module(at: View) -> Iterator[str]:
    """Codes of the remaining causes: code, options, mode, kernel.

    Earlier draws and changed parameters too, where they were not observed.
    """
    yield from ("code", "options", "mode", "kernel")
    random = at.cause.rests_on(*RANDOM)
    if not draws_nothing(at.first.module_class) and any(fact.thing is Thing.RANDOM_AT_START for fact in random):
        yield "draws-before"
    if at.steps_before and at.cause.rests_on(Thing.PARAMETERS):
        yield "parameters-after"


# --- operators


@finds("op")
def find_arguments(at: View) -> Iterator[Finding]:
    """Findings on the first `_MOST` arguments of the operator that differ, as settings note them for its first call."""
    site = at.site
    key = f"{site.phase.value} {site.fqn} {site.call} {site.path.partition('[')[0]}"
    a, b = (settings.document("operators").get(key) for settings in at.documents)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name, one, two in list(unequal(a, b))[:_MOST]:
            yield found(
                "argument",
                name=name,
                a=LEFT_OUT_ARGUMENT if name not in a else one,
                b=two if name in b else LEFT_OUT_ARGUMENT,
            )


_MOST = 3


# --- batches


def batch_is_fed(step: Step, position: int) -> bool:
    """Whether something that goes into a batch differs: a random state, or, in the step before, one or its loader."""
    site = step.sites[position]
    loaded = step.of(Kind.BATCH, frozenset({site.phase}), site.fqn)
    before = np.concatenate([loaded, step.of(Kind.RNG, frozenset(Phase))])
    return step.rng_differs() or step.differed_before(before)


@finds("batch", "script")
def find_repetition(at: View) -> Iterator[Finding]:
    """Finding where one run alone has the value again that it had the last time."""
    had = {side: at.step.last(at.union, side) for side in "ab"}
    again = [
        side for side, last in had.items() if last and last[0].checksum[last[1]] == at.table.checksum(at.union, side)
    ]
    if len(again) == 1:
        yield found("repeated", side=again[0])


@finds("batch")
def find_shuffled_batch(at: View) -> Iterator[Finding]:
    """Finding where the batch has the same values in another order."""
    if same_values(at.first) and at.dtypes is None and not at.reshaped:
        yield found("shuffled")


@finds("batch", "script")
def find_normalisation(at: View) -> Iterator[Finding]:
    """Finding where the statistics of a batch or input of floats are those of a straight line through the other's."""
    a, b = at.first.a, at.first.b
    if a and b and a.layout.dtype.startswith(WHOLE) and (line := straight_line(moments(a), moments(b))):
        yield found("normalised", line=f"{line[0]:.4g} a {'-' if line[1] < 0 else '+'} {abs(line[1]):.4g}")


def left_in_batch(at: View) -> Iterator[str]:
    """Codes of the remaining causes.

    Sizes, else conversion, else this part if all others are equal, else all that shuffles.
    """
    unions = at.step.of(Kind.BATCH, frozenset({at.site.phase}), at.site.fqn)
    rest = unions[(at.step.alignment.call[unions] == at.site.call) & (unions != at.union)]
    if at.reshaped:
        yield "batch-size"
    elif at.dtypes is not None:
        yield "conversion"
    else:
        yield "this-part" if at.step.known(rest) is Known.EQUAL else "samples"


# --- what the script gives to a model


@finds("script", "loss")
def find_call_counts(at: View) -> Iterator[Finding]:
    """Finding where a module runs a different number of times in b's step.

    Nothing for reason `structure`, nor where equal shapes diverge in a call of that module that both runs make: there
    the number of calls follows, as with a solver that takes more steps for other values.
    """
    if at.calls and at.cause.reason != "structure":
        name, one, two = at.calls
        if f"{at.site.fqn}.".startswith(f"{name}.") and at.site.call < min(one, two) and not at.reshaped:
            return
        yield found("calls", module=name, a=often(one), b=often(two))


def left_in_script(at: View) -> Iterator[str]:
    """Codes of the remaining causes.

    Where the model's outputs agree or modules were left out, values made of outputs or by the script; else preparation,
    and data if batches were not observed. Then models and steps that were not recorded.
    """
    unseen = at.known(Thing.BATCHES) is Known.UNSEEN
    if at.cause.rests_on(Thing.OUTPUTS, Thing.LEFT_OUT):
        yield "from-outputs"
    else:
        yield from ("preparation", "data") if unseen else ("preparation",)
    if at.cause.rests_on(Thing.PASSED_OVER):
        yield "passed-over"
    if at.step.begins.gap:
        yield "step-before"


# --- the loss, values, files


_UPSTREAM = frozenset({Phase.DATA, Phase.FORWARD, Phase.EVAL})


def loss_is_fed(step: Step, position: int) -> bool:
    """Whether something that goes into a loss differs: data, forward pass, evaluation, a random state, a parameter.

    Gradients recorded before it do not count.
    """
    before = step.differs_before(step.order_at(position), _UPSTREAM)
    return before or step.rng_differs() or bool(step.begins.names)


@finds("loss")
def find_grad_scale(at: View) -> Iterator[Finding]:
    """Finding where the losses differ by the ratio of the `GradScaler`'s scales, to a relative `_SIX_DIGITS`.

    Nothing where the scales are equal, or a scale or loss is no plain number.
    """
    table = at.table
    sites = table.alignment.by_fqn.get(SCALER, [])
    scales = [next(filter(None, (table.plain(site, side) for site in sites)), "") for side in "ab"]
    losses = [table.plain(at.union, side) for side in "ab"]
    one, two, loss_a, loss_b = map(number_of, (*scales, *losses))
    if one != two and abs(one * loss_b - two * loss_a) <= _SIX_DIGITS * abs(one * loss_b):
        yield found("scaler", a=scales[0], b=scales[1])


def number_of(text: str | None) -> float:
    """The number that a text is; NaN where it is none."""
    try:
        return float(text or "nan")
    except ValueError:
        return float("nan")


_SIX_DIGITS = 1e-5


def left_in_loss(at: View) -> Iterator[str]:
    """Codes of the remaining causes.

    The loss code; targets where batches are not known to agree; calls where some were not observed.
    """
    yield "loss-code"
    if at.known(Thing.BATCHES) not in {Known.EQUAL, Known.WITHIN} or at.cause.rests_on(Thing.PASSED_OVER):
        yield "targets"
    if at.cause.rests_on(Thing.RAN_UNSEEN):
        yield "ran-unseen"


def plain_cause(step: Step, position: int) -> Cause | None:
    """Cause `plain` of a loss or gradient where no module is called; None where anything differs before it."""
    site, order = step.sites[position], step.order_at(position)
    if not step.has_no_modules or step.rng_differs() or step.anything_before(order):
        return None
    losses = (loss,) if site.kind is Kind.GRAD else ()
    data = (batches,) if step.of(Kind.BATCH, frozenset({Phase.DATA})).size else ()
    return cause("plain", *rests_on(step, Place(site, order), (*losses, trained, *data, random_at_start)))


def product_is_fed(step: Step, position: int) -> bool:
    """Whether anything but saved files differs.

    Another record of the step, or a random state.
    """
    del position
    return step.rng_differs() or any(site.kind is not Kind.PRODUCT for site in step.sites)
