"""Reasons of the forward pass: modules, operators, batches, the script's inputs and losses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.evidence import RANDOM, Cause, Known, Thing
from introspect_cli.compare.names import THEN
from introspect_cli.compare.reasons.base import cause, evidence_of, is_fed
from introspect_cli.compare.reasons.draws import draws_before
from introspect_cli.compare.say import LEFT_OUT_ARGUMENT, finds, found, often
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.compare.step import (
    LEFT_OUT,
    RESTS_ON,
    Call,
    Place,
    batches,
    loss,
    outputs,
    random_at_start,
    rests_on,
    trained,
)
from introspect_cli.compare.table import DIFFERENT
from introspect_cli.compare.watched import ran_evaluation
from introspect_cli.records import DRAWN_BEFORE, GIVEN, SCALER, Kind, Phase, Site

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.result import Finding
    from introspect_cli.compare.step import Step

# --- when a module's call, or what runs between the modules inside it, is where the runs part


def call_cause(step: Step, position: int) -> Cause | None:
    """Cause of an output or input of a module, or of parameters given to one, by the call around it.

    Around an output that is its own module's call; the cause is `own_code` if submodules ran in it, else `module`.
    Around an input it is the call that gives it, whose own code computes something else: `own_code`; `script` where no
    call is around it. None where something that goes into that call differs: an input of it, a record inside the module
    from its start on, a tensor of the module, or a random state at the start of the step; without a call, where
    anything differs before it.
    """
    site, order, of_itself = step.sites[position], step.orders[position], step.sites[position].kind is Kind.OUTPUT
    if site.kind is Kind.PARAM and site.path != GIVEN:
        return None
    running = step.around(site.fqn, order)
    if of_itself:
        begun = step.table.order_of[step.of(Kind.INPUT, site.phase, fqn=site.fqn, call=site.call)].min(initial=np.inf)
        running = Call(site.fqn, site.call, float(begun), order) if np.isfinite(begun) else None
    if running is None:
        if is_fed(step, position):
            return None
        return cause("module", *evidence_of("module", step, position)) if of_itself else _script_cause(step, position)
    fqn, call, start, _ = running
    # The module that is given a parameter is not under way yet, and the one around it has made that.
    before = order if of_itself else order - 0.25
    fed = step.state[step.of(Kind.INPUT, site.phase, fqn=fqn, call=call)] == DIFFERENT
    if fed.any() or step.differs_inside(fqn, start, before) or step.rng_differs():
        return None
    after = last_child(step, fqn, start, order)
    if of_itself and not after:
        return cause("module", *evidence_of("module", step, position))
    place = Place(Site(site.phase, Kind.INPUT, fqn, call), order, "" if of_itself else fqn, start if after else -1.0)
    evidence = rests_on(step, place, RESTS_ON["own_code"])
    return cause("own_code", *evidence, module=fqn, after=after, before="" if of_itself else site.fqn)


def _script_cause(step: Step, position: int) -> Cause:
    """Cause `script`, with what is known of the model's outputs before."""
    evidence = evidence_of("script", step, position)
    place = Place(step.sites[position], step.orders[position])
    before = [LEFT_OUT] if step.comparison.leaves_modules_out else outputs(step, place)
    known = (fact for fact in before if fact is LEFT_OUT or fact.known in {Known.EQUAL, Known.WITHIN})
    return cause("script", *evidence, *known)


def last_child(step: Step, fqn: str, low: float, high: float) -> str:
    """FQN of the module in `fqn` that gave the last output from `low` to below `high` in a's sequence; "" for none.

    Of a deeper module it is the child of `fqn` around it, if that has records.
    """
    alignment, batch, prefix = step.alignment, step.table.a, f"{fqn}."
    outputs = alignment.are(Kind.OUTPUT, sites=batch.site)
    rows = np.flatnonzero(outputs & (batch.sequence >= low) & (batch.sequence < high))
    names = (alignment.fqn[union] for union in batch.site[rows[np.argsort(batch.sequence[rows])[::-1]]].tolist())
    name = next((name for name in names if name.startswith(prefix)), "")
    child = prefix + name.removeprefix(prefix).partition(".")[0]
    return child if name and child in alignment.by_fqn else name


# --- what is found of a module


@finds("module", "own_code")
def find_class(at: View, name: str = "") -> Iterator[Finding]:
    """Finding where module `name`, or without one the module to blame, has another class in b."""
    if classes := at.classes_of(name or at.module):
        yield found("class", module=name or at.module, a=classes[0], b=classes[1])


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
        own = list(find_attributes_of(at, at.module))
        yield from own or (each for name in at.unseen_inside for each in find_attributes_of(at, name))


def find_attributes_of(at: View, name: str) -> Iterator[Finding]:
    """Findings on attributes of module `name` that differ (`eps 1e-05 -> 0.001`), or that are absent in one run.

    `training` is worded as the modes `train` and `eval`. The module is named unless it is the one to blame.
    """
    modes = {"True": "train", "False": "eval"}
    for key, a, b in at.attributes(name):
        fields = {"name": key, "of": "" if name == at.module else name}
        if key == "training":
            one, two = (THEN.join(modes.get(mode, "?") for mode in (text or "").split(THEN)) for text in (a, b))
            yield found("mode", a=one, b=two, of=fields["of"])
        else:
            yield found("attribute", **fields, a="absent" if a is None else a, b="absent" if b is None else b)


@finds("module")
def find_dtypes(at: View) -> Iterator[Finding]:
    """Finding where the record has another dtype in b."""
    if at.dtypes:
        yield found("dtype", a=at.dtypes[0], b=at.dtypes[1])


@finds("module", "own_code")
def find_draws(at: View) -> Iterator[Finding]:
    """Finding where one run alone draws random numbers in the module's call; for reason `own_code`, just before it."""
    call, before = (at.site.fqn, at.site.call, at.site.phase), at.cause.reason == "own_code"
    there = [draw for draw in draws_before(at) if (draw.site.fqn, draw.site.call, draw.site.phase) == call]
    yield from [draw.finding for draw in there if draw.site.path.endswith(DRAWN_BEFORE) is before][:1]


_DRAW_NOTHING = re.compile(
    r"(Conv|Embedding).*|(Bil|L)inear|.*(Norm|Pool|Loss)(\dd)?|(GE|(Leaky)?Re|Si|E)LU6?|Mish|Tanh|Sigmoid"
    r"|(Log)?Softmax|Softplus|Hardswish|(Unf|F)latten|Identity|PixelShuffle|Upsample"
)


def draws_nothing(module_class: str) -> bool:
    """Whether modules of a class are known to draw no random number; False for unknown classes."""
    return _DRAW_NOTHING.fullmatch(module_class) is not None


def left_in_module(at: View) -> Iterator[str]:
    """Codes of the remaining causes: code and mode, options and kernel.

    Earlier draws, changed parameters and changed buffers too, where they were not observed.
    """
    yield from ("code", "kernel")
    random = at.cause.rests_on(*RANDOM)
    if not draws_nothing(at.first.module_class) and any(fact.thing is Thing.RANDOM_AT_START for fact in random):
        yield "draws-before"
    if not at.is_first_step and at.cause.rests_on(Thing.PARAMETERS):
        yield "parameters-after"
    if at.cause.rests_on(Thing.BUFFERS_AT_START):
        yield "buffers-after"


# --- operators


@finds("op")
def find_arguments(at: View) -> Iterator[Finding]:
    """Findings on the first 3 arguments of the operator that differ, as settings note them for its first call."""
    site = at.site
    key = f"{site.phase.value} {site.fqn} {site.call} {site.path.partition('[')[0]}"
    a, b = (settings.document("operators").get(key) for settings in at.documents)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name, one, two in list(unequal(a, b))[:3]:
            values = {"a": one if name in a else LEFT_OUT_ARGUMENT, "b": two if name in b else LEFT_OUT_ARGUMENT}
            yield found("argument", name=name, **values)


# --- batches


def batch_cause(step: Step, position: int) -> Cause | None:
    """Cause `batch`; None where a random state differs, or, in the step before, one or what its loader gave."""
    site = step.sites[position]
    loaded = step.of(Kind.BATCH, site.phase, fqn=site.fqn)
    before = np.concatenate([loaded, step.of(Kind.RNG)])
    fed = step.rng_differs() or step.differed_before(before)
    return None if fed else cause("batch", *evidence_of("batch", step, position))


# --- what the script gives to a model


@finds("script", "loss")
def find_call_counts(at: View) -> Iterator[Finding]:
    """Finding where a module that both call runs a different number of times in b's forward pass: the outermost.

    Nothing where equal shapes diverge in a call of that module that both runs make: there the number of calls follows,
    as with a solver that takes more steps for other values.
    """
    unions = [union for kind in (Kind.INPUT, Kind.OUTPUT) for union in at.step.of(kind, Phase.FORWARD)]
    names, calls = at.step.alignment.fqn, at.step.alignment.call
    made = (dict.fromkeys((names[union], int(calls[union])) for union in at.recorded(side, unions)) for side in "ab")
    one, two = (Counter(name for name, _ in each) for each in made)
    changed = [name for name in one if 0 != two[name] != one[name]]
    if changed:
        name = min(changed, key=lambda name: name.count("."))
        both_make_it = f"{at.site.fqn}.".startswith(f"{name}.") and at.site.call < min(one[name], two[name])
        if at.reshaped or not both_make_it:
            aside = " and ".join(compress("ab", ran_evaluation(at.table, at.step.comparison.manifests)))
            yield found("calls", module=name, a=often(one[name]), b=often(two[name]), aside=aside)


def left_in_script(at: View) -> Iterator[str]:
    """Codes of the remaining causes.

    Where the model's outputs agree or modules were left out, values made of outputs or by the script; else preparation,
    and data if batches were not observed, or others if one run alone has some.
    """
    if at.cause.rests_on(Thing.OUTPUTS, Thing.LEFT_OUT):
        yield "from-outputs"
        return
    known = {fact.known for fact in at.cause.rests_on(Thing.BATCHES)}
    yield from ("preparation", *(["data"] if Known.UNSEEN in known else [] if known else ["other-batches"]))


# --- the loss, values


@finds("loss")
def find_grad_scale(at: View) -> Iterator[Finding]:
    """Finding where the losses differ by the ratio of the `GradScaler`'s scales, to five digits."""
    sites = at.table.alignment.by_fqn.get(SCALER, [])
    scales = [next(filter(None, (at.table.plain(site, side) for site in sites)), "") for side in "ab"]
    with suppress(ValueError):  # where any is no number
        one, two = map(float, scales)
        a, b = (float(at.table.plain(at.union, side) or "") for side in "ab")
        if one != two and abs(one * b - two * a) <= 1e-5 * abs(one * b):
            yield found("scaler", a=scales[0], b=scales[1])


def plain_cause(step: Step, position: int) -> Cause | None:
    """Cause `plain` of a loss or gradient where no module is called; None where anything differs before it."""
    site, order = step.sites[position], step.orders[position]
    without = {Kind.OUTPUT, Kind.OP_OUTPUT} & step.comparison.kinds == {Kind.OUTPUT} and not any(step.modules)
    if not without or step.alignment.are(Kind.INPUT, Kind.OUTPUT).any() or is_fed(step, position):
        return None
    losses = (loss,) if site.kind is Kind.GRAD else ()
    data = (batches,) if step.of(Kind.BATCH, Phase.DATA).size else ()
    return cause("plain", *rests_on(step, Place(site, order), (*losses, trained, *data, random_at_start)))
