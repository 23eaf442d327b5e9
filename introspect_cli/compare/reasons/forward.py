"""Reasons of the forward pass: modules, operators, batches, the script's inputs and losses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from introspect_cli.compare.reasons.base import cause, evidence_of
from introspect_cli.compare.reasons.draws import is_drawn_otherwise, side_that_draws
from introspect_cli.compare.say import LEFT_OUT_ARGUMENT, finds, found, often
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.compare.step.rests_on import (
    LEFT_OUT,
    RESTS_ON,
    Place,
    batches,
    calls_left_out,
    loss,
    outputs,
    random_at_start,
    rests_on,
    trained,
)
from introspect_cli.compare.terms.evidence import RANDOM, Cause, Known, Thing, joint_known
from introspect_cli.compare.terms.names import THEN, ancestors
from introspect_cli.compare.terms.sites import KINDS
from introspect_cli.compare.terms.table import OTHER
from introspect_cli.compare.terms.words import is_kept, same_values
from introspect_cli.records import GIVEN, SCALER, Kind, Phase, Site

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.findings import Finding

# --- when a module's call, or what runs between the modules inside it, is where the runs part


def module_cause(step: Step, position: int) -> Cause | None:
    """Cause where a module's inputs, tensors and random state do not differ; None otherwise or if submodules ran."""
    site, order = step.sites[position], step.order_at(position)
    start = _fed_equally(step, site, order)
    if start is None or (start >= 0 and last_child(step, site.fqn, start, order)):
        return None
    return cause("module", *evidence_of("module", step, position))


def own_code_cause(step: Step, position: int) -> Cause | None:
    """Cause where the code between submodules differs: nothing that went in and no submodule before does."""
    site, order, edges = step.sites[position], step.order_at(position), RESTS_ON["own_code"]
    if site.kind is Kind.PARAM and site.path != GIVEN:
        return None
    if site.kind is Kind.OUTPUT:
        start = _fed_equally(step, site, order)
        after = last_child(step, site.fqn, start, order) if start is not None and start >= 0 else ""
        if not after or start is None:
            return None
        evidence = rests_on(step, Place(site, order, start=start), edges)
        return cause("own_code", *evidence, module=site.fqn, after=after)
    # The module that is given a parameter is not under way yet, and the one around it has made that.
    around = step.calls.around if site.kind is Kind.PARAM else partial(parent_call, step)
    running = around(site.fqn, order)
    if running is None:
        return None
    parent, start, call = running
    if _is_fed(step, site.phase, parent, call, start, order - 0.25):
        return None
    after = last_child(step, parent, start, order)
    place = Place(Site(site.phase, Kind.INPUT, parent, call), order, of=parent, start=start if after else -1.0)
    return cause("own_code", *rests_on(step, place, edges), module=parent, after=after, before=site.fqn)


def _fed_equally(step: Step, site: Site, order: float) -> float | None:
    """Order at which the call began (-1.0: unknown); None where an input, tensor or random state differs."""
    inputs = step.of_call(site.phase, Kind.INPUT, site.fqn, site.call)
    start = step.sequence_of(inputs) if inputs else None
    if start is None:
        return None if step.anything_before(order) else -1.0
    return None if _is_fed(step, site.phase, site.fqn, site.call, start, order) else start


def _is_fed(step: Step, phase: Phase, fqn: str, call: int, start: float, order: float) -> bool:
    """Whether inputs, records inside, tensors or random states of a call differ before `order`."""
    return (
        step.differs(phase, Kind.INPUT, fqn, call)
        or step.inside(fqn, start, order)
        or step.tensors_differ(fqn, order)
        or step.rng_differs()
    )


def parent_call(step: Step, fqn: str, order: float) -> tuple[str, float, int] | None:
    """(name, start, call index) of the innermost call running when `fqn` was called; None for none."""
    around = step.calls.around(fqn, order)
    for parent in ancestors(fqn):
        calls = step.calls.running(parent, order)
        if calls is not None:
            return around if around is not None and around[1] > calls[0] else (parent, *calls)
    return around


def last_child(step: Step, fqn: str, low: float, high: float) -> str:
    """Name of the last submodule with an output between `low` and `high` in the sequence; "" for none."""
    alignment = step.alignment
    sequence = step.table.a.sequence
    rows = np.flatnonzero((sequence >= low) & (sequence < high))
    prefix = fqn + "."
    for row in rows[np.argsort(sequence[rows])[::-1]]:
        union = int(step.table.a.site[row])
        name = alignment.fqn[union]
        if KINDS[alignment.kind[union]] is not Kind.OUTPUT or name == fqn:
            continue
        if name.startswith(prefix):
            child = prefix + name[len(prefix) :].partition(".")[0]
            return child if child in alignment.by_fqn else name
        if not step.is_gathered:
            return name
    return ""


# --- what is found of a module


@finds("module", "own_code")
def find_class(at: View) -> Iterator[Finding]:
    """Finding where the module, or the tensor's owner, has another class in b."""
    if classes := at.classes_of(at.module):
        yield found("class", module=at.module, a=classes[0], b=classes[1])
    elif other := at.step.alignment.b_class.get(at.union, ""):
        yield found("class", module=at.module, a=at.first.module_class, b=other)


@finds("module", "own_code")
def find_attributes(at: View) -> Iterator[Finding]:
    """Findings on attributes that differ: the module's own, else those of unobserved submodules."""
    own = list(find_attributes_of(at, at.module, of=""))
    yield from own or [one for name in at.unseen_inside for one in find_attributes_of(at, name)]


def find_attributes_of(at: View, name: str, of: str | None = None) -> Iterator[Finding]:
    """Findings on attributes of module `name` that differ: `eps 1e-05 -> 0.001`.

    `of` is the module named in the text; None for `name`.
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


@finds("gradient")
def find_attributes_of_user(at: View) -> Iterator[Finding]:
    """Findings on attributes of the module that uses the parameter."""
    return find_attributes_of(at, at.parameter_user)


@finds("loss")
def find_attributes_of_losses(at: View) -> Iterator[Finding]:
    """Findings on attributes of loss modules (class ending in `Loss` or `Criterion`) in both runs."""
    one, two = at.step.modules
    for name in one:
        if name in two and one[name].module_class.endswith(("Loss", "Criterion")):
            yield from find_attributes_of(at, name)


@finds("module")
def find_dtypes(at: View) -> Iterator[Finding]:
    """Finding where the dtypes differ."""
    if at.dtypes is not None:
        yield found("dtype", a=at.dtypes[0], b=at.dtypes[1])


@finds("module", "own_code")
def find_draws(at: View) -> Iterator[Finding]:
    """Finding where one run alone draws random numbers in the module, or for own code just before it."""
    if side := side_that_draws(at, before=at.cause.reason == "own_code"):
        yield found("draws", side=side, other=OTHER[side])


_DRAW_NOTHING = {
    *("Linear", "Bilinear", "GELU", "ReLU", "ReLU6", "LeakyReLU", "SiLU", "Mish", "ELU", "Tanh", "Sigmoid", "Softmax"),
    *("LogSoftmax", "Softplus", "Hardswish", "Flatten", "Unflatten", "Identity", "PixelShuffle", "Upsample"),
}
_SORTS = tuple(f"{sort}{dims}" for sort in ("Norm", "Pool") for dims in ("1d", "2d", "3d"))


def draws_nothing(module_class: str) -> bool:
    """Whether modules of a class are known to draw no random number; False for unknown classes."""
    return (
        module_class in _DRAW_NOTHING
        or module_class.startswith(("Conv", "Embedding"))
        or module_class.endswith(("Norm", "Loss", *_SORTS))
    )


def left_in_module(at: View) -> Iterator[str]:
    """Remaining causes: code, options, mode, kernel; earlier draws or changed parameters where unobserved."""
    yield from ("code", "options", "mode", "kernel")
    random = at.cause.rests_on(*RANDOM)
    if not draws_nothing(at.first.module_class) and any(fact.thing is Thing.RANDOM_AT_START for fact in random):
        yield "draws-before"
    if at.steps_before and at.cause.rests_on(Thing.PARAMETERS):
        yield "parameters-after"


def left_in_own_code(at: View) -> Iterator[str]:
    """Remaining causes: the forward code, and state kept from earlier calls if there were any."""
    around = parent_call(at.step, at.site.fqn, at.first.sequence) if at.cause.before else None
    yield "forward-code"
    if at.steps_before or (around[2] if around else at.site.call):
        yield "kept-from-calls"


# --- operators


@finds("op")
def find_arguments(at: View) -> Iterator[Finding]:
    """Findings on up to `_MOST` arguments of the operator that differ, as noted at its first call."""
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
_LISTED: Final = (
    r"^aten\.(index_add_?|index_copy_?|_?index_put(_impl)?_?|put_?|histc|bincount|kthvalue|median|nanmedian"
    r"|scatter_?|scatter_add_?|scatter_reduce_?|cumsum_?|nll_loss2d_(forward|backward)|_?ctc_loss_backward"
    r"|max_unpool[23]d|fractional_max_pool[23]d_backward|_adaptive_avg_pool[23]d_backward"
    r"|adaptive_max_pool[23]d_backward|avg_pool3d_backward|max_pool3d_with_indices_backward"
    r"|upsample_(linear1d|bilinear2d|bicubic2d|trilinear3d)_backward|reflection_pad[123]d_backward"
    r"|replication_pad[123]d_backward|grid_sampler_[23]d_backward|_embedding_bag_backward"
    r"|_embedding_bag_dense_backward|(cudnn_)?convolution(_backward)?)\b"
)
"""What `torch.use_deterministic_algorithms` lists; reading a run needs no torch."""
_GPU: Final = re.compile(r"^cuda\b")
"""ROCm devices are called so as well."""


@finds("op")
def find_nondeterminism(at: View) -> Iterator[Finding]:
    """Finding where the operator is on torch's list of nondeterministic ones and ran on CUDA in both runs."""
    on_gpu = all(side is not None and _GPU.match(side.layout.device) for side in (at.first.a, at.first.b))
    if on_gpu and re.match(_LISTED, at.site.path):
        yield found("nondeterministic")


def left_in_operator(at: View) -> Iterator[str]:
    """Remaining causes: options or kernel; for a backward operator, its forward operator."""
    yield from ("backward-of-operator",) if at.site.phase is Phase.BACKWARD else ("options", "kernel")


# --- batches


def batch_is_fed(step: Step, position: int) -> bool:
    """Whether random states, or earlier batches of the loader, differ."""
    site = step.sites[position]
    return step.rng_differs() or (site.phase, site.fqn) in step.carried.loaders or bool(step.carried.rng)


@finds("batch")
def find_shuffled_batch(at: View) -> Iterator[Finding]:
    """Finding where draws between start and batch differ, or the batch has the same values in another order."""
    if is_drawn_otherwise(at):
        yield found("drew-before-batch")
    elif same_values(at.first) and at.dtypes is None and not at.reshaped:
        yield found("shuffled")


def left_in_batch(at: View) -> Iterator[str]:
    """Remaining causes: sizes, conversion, this part of the batch, or order, seed, workers and files."""
    step, site = at.step, at.site
    unions = step.of(Kind.BATCH, frozenset({site.phase}), site.fqn)
    calls = step.alignment.call[unions]
    rest = unions[calls == site.call]
    if at.reshaped:
        yield from ("batch-size", "lengths")
    elif at.dtypes is not None:
        yield "conversion"
    elif step.known(rest[rest != at.union]) is Known.EQUAL:
        yield "this-part"
    else:
        yield from ("order", "data-seed", "workers", "augmentation", "files")


def batch_before(at: View) -> str:
    """State of the loader's earlier batches: `equal` or `within tolerance`; "" where they differ or are unobserved."""
    step, site = at.step, at.site
    unions = step.of(Kind.BATCH, frozenset({site.phase}), site.fqn)
    state = step.known(unions[step.alignment.call[unions] < site.call])
    if state is Known.UNSEEN and step.state_before is not None:
        state = joint_known(step.state_before[unions])
    return state.value if state in {Known.EQUAL, Known.WITHIN} else ""


# --- what the script gives to a model


def script_cause(step: Step, position: int) -> Cause | None:
    """Cause of a root module's input, or of given parameters, where nothing differs before; None otherwise."""
    site, order = step.sites[position], step.order_at(position)
    if site.kind is Kind.PARAM and site.path != GIVEN:
        return None
    around = step.calls.around if site.kind is Kind.PARAM else partial(parent_call, step)
    if around(site.fqn, order) is not None or step.anything_before(order):
        return None
    evidence = evidence_of("script", step, position)
    if calls_left_out(step, site.fqn):
        return cause("script", *evidence, LEFT_OUT)
    known = (output for output in outputs(step, Place(site, order)) if output.known in {Known.EQUAL, Known.WITHIN})
    return cause("script", *evidence, *known)


@finds("script", "loss")
def find_call_counts(at: View) -> Iterator[Finding]:
    """Finding where a module runs a different number of times in the step; not for a one-sided record."""
    if at.calls and at.cause.reason != "structure":
        name, one, two = at.calls
        yield found("calls", module=name, a=often(one), b=often(two))


def left_in_script(at: View) -> Iterator[str]:
    """Remaining causes: the script's preparation or data, unrecorded models, the step before."""
    unseen = at.known(Thing.BATCHES) is Known.UNSEEN
    if at.cause.rests_on(Thing.OUTPUTS, Thing.LEFT_OUT):
        yield from ("from-outputs", "values-of-script")
    else:
        yield from ("preparation", "data") if unseen else ("preparation",)
    if at.cause.rests_on(Thing.PASSED_OVER):
        yield "passed-over"
    if at.step.gap:
        yield "step-before"


# --- the loss, values, files


_UPSTREAM = frozenset({Phase.DATA, Phase.FORWARD, Phase.EVAL})


def loss_is_fed(step: Step, position: int) -> bool:
    """Whether data, forward or evaluation records, random states or parameters differ before.

    Gradients do not count.
    """
    before = step.differs_before(step.order_at(position), _UPSTREAM)
    return before or step.rng_differs() or bool(step.carried.params)


@finds("loss")
def find_grad_scale(at: View) -> Iterator[Finding]:
    """Finding where the losses differ exactly by the ratio of `GradScaler`'s scales."""
    table = at.table
    sites = table.alignment.by_fqn.get(SCALER, [])
    scales = [next((value for site in sites if (value := table.plain(site, side))), "") for side in "ab"]
    losses = [table.plain(at.union, side) for side in "ab"]
    try:
        one, two, loss_a, loss_b = (float(value or "nan") for value in (*scales, *losses))
    except ValueError:
        return
    if one != two and abs(one * loss_b - two * loss_a) <= _SIX_DIGITS * abs(one * loss_b):
        yield found("scaler", a=scales[0], b=scales[1])


_SIX_DIGITS = 1e-5


def left_in_loss(at: View) -> Iterator[str]:
    """Remaining causes: the loss code; targets where batches are not known to agree; unobserved calls."""
    yield "loss-code"
    if at.known(Thing.BATCHES) not in {Known.EQUAL, Known.WITHIN} or at.cause.rests_on(Thing.PASSED_OVER):
        yield "targets"
    if at.cause.rests_on(Thing.RAN_UNSEEN):
        yield "ran-unseen"


def plain_cause(step: Step, position: int) -> Cause | None:
    """Cause of a loss or gradient in a script without module calls, where nothing differs before; None otherwise."""
    site, order = step.sites[position], step.order_at(position)
    if not step.without_modules or step.rng_differs() or step.anything_before(order):
        return None
    losses = (loss,) if site.kind is Kind.GRAD else ()
    data = (batches,) if step.of(Kind.BATCH, frozenset({Phase.DATA})).size else ()
    return cause("plain", *rests_on(step, Place(site, order), (*losses, trained, *data, random_at_start)))


def product_is_fed(step: Step, position: int) -> bool:
    """Whether anything but saved files differs in the step or in its start."""
    del position
    return step.rng_differs() or step.carried.diverged or any(site.kind is not Kind.PRODUCT for site in step.sites)


def left_in_product(at: View) -> Iterator[str]:
    """Remaining causes: saving; for a kept copy, averaging and a resume that did not restore it."""
    if is_kept(at.site) and at.step.comparison.resume_point is not None:
        yield "not-restored"
    yield "averaging" if is_kept(at.site) else "saving"
