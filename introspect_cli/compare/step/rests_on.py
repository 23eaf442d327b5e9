"""What each record rests on, and functions that look up what is known of it.

An output rests on its call's inputs, parameters, buffers, submodules and draws; a gradient on the forward pass, the
loss and earlier gradients. A divergence is an origin where all it rests on was recorded and does not differ.

A parameter is recorded as training finds it, after an optimizer step, and where it is written to. The last of these
before a call is what the module computes with; unknown where the forward pass itself changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.compare.say import some
from introspect_cli.compare.step.step import Step
from introspect_cli.compare.terms.evidence import Evidence, Known, Thing, joint_known, worst_of
from introspect_cli.compare.terms.names import FORWARD, ancestors
from introspect_cli.compare.terms.sites import FLOWING_BACK, KINDS, of_kinds, phase_code
from introspect_cli.compare.terms.table import DIFFERENT, EQUAL, NOT_SEEN, WITHIN
from introspect_cli.records import DRAWN_BEFORE, SETTING_KINDS, Joined, Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterable


def unseen_inside(step: Step, fqn: str) -> list[str]:
    """Modules inside `fqn` without recorded outputs in this step, nor any module between them and `fqn` with some.

    Of either run's module tree, a's order first. Recorded means: at least one output has a value in both runs, and none
    is NOT_SEEN.
    """
    prefix = fqn + "."
    inside = dict.fromkeys(name for tree in step.modules for name in tree if name.startswith(prefix))
    outputs, names = step.of(Kind.OUTPUT, FORWARD), step.alignment.fqn
    seen = {names[union] for union in outputs if step.state[union] in {EQUAL, WITHIN, DIFFERENT}}
    recorded = inside.keys() & (seen - {names[union] for union in outputs if step.state[union] == NOT_SEEN})
    return [name for name in inside if recorded.isdisjoint((name, *ancestors(name)))]


def tensors_held(step: Step, owners: Iterable[str], kind: Kind) -> set[str]:
    """FQNs of the parameters (or buffers) that these modules themselves hold, by either run's module tree or records.

    A tied tensor is under the name that it is recorded by.

    Args:
        step: the step, whose module trees count.
        owners: FQNs of modules.
        kind: PARAM or BUFFER.
    """
    names: set[str] = set()
    for owner in owners:
        for module in (tree[owner] for tree in step.modules if owner in tree):
            tied = {name: target for name, target in module.tied.items() if _has_kind(step, target, kind)}
            held = module.parameters if kind is Kind.PARAM else module.buffers
            names |= {tied.get(name, f"{owner}.{name}") for name in held} | {*tied.values()}
    names |= {name for owner in owners for name in step.comparison.tensors_in(owner) if _has_kind(step, name, kind)}
    return names


def _has_kind(step: Step, fqn: str, kind: Kind) -> bool:
    """Whether any site with this FQN, in either run and any step, is of this kind."""
    return any(KINDS[step.alignment.kind[union]] is kind for union in step.alignment.by_fqn.get(fqn, []))


def is_written_later(step: Step, fqn: str, kind: Kind, order: float) -> bool:
    """Whether either run recorded, after `order`, that a forward pass changed the tensor.

    Args:
        step: the step.
        fqn: of the tensor.
        kind: PARAM or BUFFER.
        order: position in run a's sequence; records at it do not count.
    """
    table, unions = step.table, step.of(kind, frozenset({Phase.FORWARD}), fqn)
    later = [union for union in unions.tolist() if step.state[union] and table.order_of[union] > order]
    return any(step.repeats_last(union, side) is False for union in later for side in "ab")


def tensor_known(step: Step, fqn: str, kind: Kind, order: float) -> Known:
    """What is known of a tensor at `order`: by its last earlier record in this step, else by its state before the step.

    Before the step: DIFFERS if `carried` has it; else its last record of the previous step; else UNSEEN if no site of
    it is in both runs, or the previous step was not recorded and optimizers change the tensor; else WITHIN if `carried`
    says so, or EQUAL.

    Args:
        step: the step.
        fqn: of the tensor.
        kind: PARAM or BUFFER.
        order: position in run a's sequence.
    """
    alignment, carried = step.alignment, step.carried
    unions = [union for union in alignment.by_fqn.get(fqn, []) if KINDS[alignment.kind[union]] is kind]
    now = [union for union in unions if step.state[union] and step.table.order_of[union] < order]
    if now:
        return step.known([max(now, key=lambda union: step.table.order_of[union])], every=True)
    if fqn in carried.params or fqn in carried.buffers:
        return Known.DIFFERS
    before = step.state_before
    if before is not None and unions and before[unions].any():
        return joint_known(before[[union for union in unions if before[union]][-1:]], every=True)
    if not any(step.alignment.in_both[union] for union in unions) or (
        step.gap and fqn in step.comparison.recorded_after_steps
    ):
        return Known.UNSEEN
    return Known.WITHIN if fqn in carried.within else Known.EQUAL


# --- what rests on what


PASSES = frozenset({Phase.DATA, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD})
_START = frozenset({Phase.START})
_AFTER = frozenset({Phase.OPTIMIZER})
_DATA = frozenset({Phase.DATA})
_BACKWARD = frozenset({Phase.BACKWARD})
_TENSORS = {Kind.PARAM: Thing.PARAMETERS, Kind.BUFFER: Thing.BUFFERS}


class Place(NamedTuple):
    """The moment in a step at which something is computed.

    Attributes:
        site: what is computed; for a call of a module, an input or output of it.
        order: position in run a's sequence; what was recorded at it or later does not matter.
        of: the module whose call it is, where that is not the diverging one.
        start: order at which the call began, if it has other modules' calls inside; -1 if it has none, or that is
            unknown.
    """

    site: Site
    order: float
    of: str = ""
    start: float = -1.0


Edge = Callable[[Step, Place], list[Evidence]]
"""Looks up one thing that a record rests on: what is known of it at a place of the step, as any number of facts."""


def rests_on(step: Step, place: Place, edges: Iterable[Edge]) -> list[Evidence]:
    """Evidence from each of these edges at `place`, one after the other; an edge may give none."""
    return [fact for edge in edges for fact in edge(step, place)]


def _all_before(thing: Thing, kinds: tuple[Kind, ...], phases: frozenset[Phase], *, needed: bool = False) -> Edge:
    """Edge: one fact on `thing`, the joint state of all records of these kinds and phases before `place.order`.

    DIFFERS if any differs; records that were not seen are left out, and it is UNSEEN where no others are there.

    Args:
        thing: what the fact is about.
        kinds: kinds of the records.
        phases: phases of the records.
        needed: as in `Evidence`: whether nothing can be concluded where none was seen.
    """

    def edge(step: Step, place: Place) -> list[Evidence]:
        sites = np.concatenate([step.of(kind, phases) for kind in kinds])
        state = step.known(sites, place.order)
        return [Evidence(thing, state, needed)]

    return edge


# --- random numbers and data


def random_at_start(step: Step, _place: Place) -> list[Evidence]:
    """Edge: the random states at the start of the step.

    Nothing in a resumed run's first step if all states drawn from in the forward pass are equal. With ranks put
    together, one state that was not seen makes it UNSEEN.
    """
    if step.comparison.is_resume_step(step.number):
        drawn = [number for number in step.of(Kind.RNG, FORWARD).tolist() if step.state[number]]
        if step.known(drawn) is Known.EQUAL:
            return []
    ranks = step.comparison.gathered is not None  # each may have another
    return [Evidence(Thing.RANDOM_AT_START, step.known(step.of(Kind.RNG, _START), every=ranks))]


def drawn_from(step: Step, place: Place) -> list[Evidence]:
    """Edge: the random states that the call drew from before `place.order`.

    Where none of these was seen in both runs: nothing if both captures record all draws (but in a recomputation), else
    the states at the start of the step (`random_at_start`).
    """
    sites = step.of(Kind.RNG, FORWARD).tolist()
    drawn = [
        number
        for number in sites
        if step.table.order_of[number] < place.order and _is_drawn_in(step.alignment.site(number), place.site)
    ]
    state = step.known(drawn)
    if state is not Known.UNSEEN:
        return [Evidence(Thing.DRAWN_FROM, state)]
    noticed = step.comparison.notices_all_draws and place.site.phase is not Phase.RECOMPUTE
    return [] if noticed else random_at_start(step, place)


def _is_drawn_in(state: Site, site: Site) -> bool:
    """Whether an `rng` record is of a draw in the call of `site`: in its phase, by a submodule or by that very call.

    A submodule's counts in any of its calls; of the module itself, records made before the draw (DRAWN_BEFORE) do not.

    Args:
        state: site of the `rng` record.
        site: what the call computes.
    """
    inside = state.fqn.startswith(site.fqn + ".")
    itself = state.fqn == site.fqn and state.call == site.call and not state.path.endswith(DRAWN_BEFORE)
    return state.phase is site.phase and (inside or itself)


batches = _all_before(Thing.BATCHES, (Kind.BATCH,), _DATA)
"""The batches of the step."""


def loading(step: Step, place: Place) -> list[Evidence]:
    """Edge: EVERYTHING as DIFFERS where an output, or a draw of this loader, before the batch differs.

    Nothing otherwise.
    """
    made = [*step.of(Kind.OUTPUT, FORWARD).tolist(), *step.of(Kind.RNG, _DATA, place.site.fqn).tolist()]
    return [Evidence(Thing.EVERYTHING, Known.DIFFERS)] if step.known(made, place.order) is Known.DIFFERS else []


# --- the forward pass


def passed_over(step: Step, _place: Place) -> list[Evidence]:
    """Edge: PASSED_OVER as UNSEEN where either run did not record an evaluation in the step; nothing otherwise."""
    return (
        [Evidence(Thing.PASSED_OVER, Known.UNSEEN)]
        if step.comparison.passes_over(step.number, step.table.step_b)
        else []
    )


def inputs(step: Step, place: Place) -> list[Evidence]:
    """Edge: the inputs of the call together: DIFFERS if any differs, else UNSEEN if any was not seen.

    Nothing where both captures record all inputs but this call has none; UNSEEN if it has none otherwise.
    """
    site = place.site
    sites = step.of_call(site.phase, Kind.INPUT, site.fqn, site.call)
    present = [number for number in sites if step.state[number]]
    none = not present and Kind.INPUT in step.comparison.kinds and not step.comparison.leaves_modules_out
    return [] if none else [Evidence(Thing.INPUTS, step.known(present, every=True), needed=True, of=place.of)]


def inside(step: Step, place: Place) -> list[Evidence]:
    """Edge: outputs of other modules recorded from the call's start to before the place.

    Nothing where `place.start` is -1. With ranks put together only those of submodules, by name. UNSEEN where there is
    none, or one was not seen, unless another differs.
    """
    if place.start < 0:
        return []
    fqn, order, names = place.site.fqn, step.table.order_of, step.alignment.fqn
    outputs_inside = [
        number
        for number in step.of(Kind.OUTPUT, FORWARD)
        if place.start <= order[number] < place.order
        and (names[number].startswith(f"{fqn}.") if step.is_gathered else names[number] != fqn)
    ]
    return [Evidence(Thing.INSIDE, step.known(outputs_inside, every=True), needed=True)]


def tensors(step: Step, place: Place) -> list[Evidence]:
    """Edge: parameters and buffers of the module and of submodules without recorded outputs.

    One fact per kind of tensor that there is, the worst state of its tensors; in the phase `forward`, REWRITTEN as
    UNSEEN instead where the forward pass changes one after the place. Where no module tree and no parameters are on
    record, PARAMETERS is UNSEEN.
    """
    fqn = place.site.fqn
    owners = [fqn, *unseen_inside(step, fqn)]
    facts = []
    for kind, thing in _TENSORS.items():
        names = tensors_held(step, owners, kind)
        if names:
            answers = [tensor_known(step, name, kind, place.order) for name in sorted(names)]
            facts.append(Evidence(thing, worst_of(answers), needed=True))
        if place.site.phase is Phase.FORWARD and any(is_written_later(step, name, kind, place.order) for name in names):
            facts[-1] = Evidence(Thing.REWRITTEN, Known.UNSEEN, needed=True)
    if not facts and not step.modules[0] and Kind.PARAM not in step.comparison.kinds:
        facts.append(Evidence(Thing.PARAMETERS, Known.UNSEEN, needed=True))
    return facts


def outputs(step: Step, place: Place) -> list[Evidence]:
    """Edge: one fact, the joint state of all module outputs recorded before the place.

    `LEFT_OUT` (UNSEEN) instead where these agree, but a capture was told to leave modules out.
    """
    state = step.known(step.of(Kind.OUTPUT, FORWARD), place.order)
    return [_unless_left_out(step, Evidence(Thing.OUTPUTS, state, needed=True))]


def unseen(step: Step, place: Place) -> list[Evidence]:
    """Edge: RAN_UNSEEN, with their names, where modules ran unobserved in the place's evaluation or forward pass.

    Else nothing.
    """
    names = step.comparison.ran_unseen(place.site.phase if place.site.phase is Phase.EVAL else Phase.FORWARD)
    return [Evidence(Thing.RAN_UNSEEN, Known.UNSEEN, of=some(names))] if names else []


def forward(step: Step, place: Place) -> list[Evidence]:
    """Edge: one fact, the joint state of all module inputs and outputs recorded before the place.

    `LEFT_OUT` (UNSEEN) instead where these agree, but a capture was told to leave modules out.
    """
    return [_unless_left_out(step, flow) for flow in _flow(step, place)]


_flow = _all_before(Thing.FORWARD, (Kind.INPUT, Kind.OUTPUT), FORWARD, needed=True)


LEFT_OUT = Evidence(Thing.LEFT_OUT, Known.UNSEEN, needed=True)
"""The modules that a capture was told to leave out."""


def _unless_left_out(step: Step, fact: Evidence) -> Evidence:
    """The fact, or `LEFT_OUT` where it is that things agree, and a capture was told to leave modules out."""
    agrees = fact.known in {Known.EQUAL, Known.WITHIN}
    return LEFT_OUT if agrees and step.comparison.leaves_modules_out else fact


def everything(step: Step, place: Place) -> list[Evidence]:
    """Edge: one fact, the joint state of all of a's records before the place, those that a alone has included.

    Records that b alone has do not count, as they have no place in a's order.
    """
    earlier = np.flatnonzero(step.state * (step.table.order_of < place.order))
    return [Evidence(Thing.EVERYTHING, step.known(earlier))]


def what_is_equal(step: Step, place: Place) -> list[Evidence]:
    """Edge: of module outputs and of batches before the place, each only if it is EQUAL."""
    return [fact for fact in (*outputs(step, place), *batches(step, place)) if fact.known is Known.EQUAL]


# --- the backward pass


def loss(step: Step, place: Place) -> list[Evidence]:
    """Edge: one fact, the joint state of losses before the place.

    Nothing where both runs record losses but no loss of this step was compared.
    """
    sites = step.of(Kind.LOSS, frozenset({Phase.LOSS}))
    none = not step.state[sites].any() and Kind.LOSS in step.comparison.kinds
    return [] if none else [Evidence(Thing.LOSS, step.known(sites, place.order), needed=True)]


backward = _all_before(Thing.BACKWARD, FLOWING_BACK, _BACKWARD, needed=True)
"""The backward pass, by the gradients that hooks recorded in it."""


def gradients(step: Step, place: Place) -> list[Evidence]:
    """Edge: gradients that hooks recorded in the backward pass before the place; nothing where none was seen."""
    (flow,) = backward(step, place)
    return [] if flow.known is Known.UNSEEN else [Evidence(Thing.GRADIENTS, flow.known)]


# --- the optimizer


def gradient(step: Step, place: Place) -> list[Evidence]:
    """Edge: the parameter's gradient as the optimizer takes it; nothing if it alone has none (`lacks_gradient`).

    GRADIENT_SUM instead where the ranks of one run alone have not summed it yet. UNSEEN without a record of it.
    """
    sites = step.of(Kind.GRAD, _AFTER, place.site.fqn)
    if lacks_gradient(step, place.site.fqn):
        return []
    state = step.known(sites, every=True)
    return [Evidence(Thing.GRADIENT_SUM if owing_side(step, sites) else Thing.GRADIENT, state, needed=True)]


def lacks_gradient(step: Step, fqn: str) -> bool:
    """Whether the optimizer phase of the step has gradients in any state, but none of this parameter."""
    every = step.of(Kind.GRAD, _AFTER)
    return bool(step.state[every].any()) and not step.state[step.of(Kind.GRAD, _AFTER, fqn)].any()


def owing_side(step: Step, sites: Iterable[int]) -> str:
    """`a` or `b`, if ranks have yet to sum (`Joined.OWED`) a gradient among `sites` in that run alone.

    "" for neither or both.
    """
    owing = [
        half.side
        for half in step.table.halves
        if half.batch.how is not None and (half.batch.how[np.isin(half.sites, list(sites))] == Joined.OWED).any()
    ]
    return owing[0] if len(owing) == 1 else ""


gradients_in_step = _all_before(Thing.GRADIENTS_IN_STEP, (Kind.GRAD,), _AFTER)
"""The gradients that an optimizer computed before, within its step."""


def value_before(step: Step, place: Place) -> list[Evidence]:
    """Edge: the tensor's last value before the record, as `tensor_known` has it: in this step, else before it."""
    return [Evidence(Thing.VALUE_BEFORE, tensor_known(step, place.site.fqn, place.site.kind, place.order))]


def state_before(step: Step, place: Place) -> list[Evidence]:
    """Edge: the parameter's optimizer state before the step.

    DIFFERS if `carried` has any of it; else its records of the previous step, else those at this step's start, else
    UNSEEN. Nothing instead of UNSEEN where there is no state yet: in step 0 of both, or in a resumed run's first step
    if states are recorded.
    """
    fqn = place.site.fqn
    if any(name == fqn for name, _ in step.carried.states):
        return [Evidence(Thing.STATE_BEFORE, Known.DIFFERS)]
    sites = step.of(Kind.OPTIMIZER_STATE, _AFTER | _START, fqn)
    started = [number for number in sites if step.alignment.phase[number] != step.alignment.phase[sites[0]]]
    if step.state_before is not None and len(sites) and step.state_before[sites].any():
        return [Evidence(Thing.STATE_BEFORE, joint_known(step.state_before[sites], every=True))]
    state = step.known(started) if started else Known.UNSEEN
    find_resume_point = step.comparison.is_resume_step(step.number) and Kind.OPTIMIZER_STATE in step.comparison.kinds
    begun = (step.number == 0 and step.table.step_b == 0) or find_resume_point
    return [] if begun and state is Known.UNSEEN else [Evidence(Thing.STATE_BEFORE, state)]


def trained(step: Step, place: Place) -> list[Evidence]:
    """Edge: all parameters as they are at the place: the worst of their states; UNSEEN where there are none."""
    names = {step.alignment.fqn[u] for u in np.flatnonzero(step.alignment.kind == KINDS.index(Kind.PARAM))}
    answers = [tensor_known(step, name, Kind.PARAM, place.order) for name in sorted(names)]
    return [Evidence(Thing.TRAINED, worst_of(answers) if answers else Known.UNSEEN, needed=True)]


def updates_by_hand(step: Step) -> bool:
    """Whether neither run has, in any step, a hyper-parameter or a record of the optimizer phase."""
    settings = of_kinds(step.alignment.kind, SETTING_KINDS)
    return not (settings | (step.alignment.phase == phase_code(Phase.OPTIMIZER))).any()


RESTS_ON: dict[str, tuple[Edge, ...]] = {
    **dict.fromkeys(("rng", "initial", "split"), (random_at_start,)),
    "batch": (random_at_start, loading),
    "module": (inputs, tensors, drawn_from),
    "own_code": (inputs, inside, tensors, drawn_from),
    "script": (batches, random_at_start, passed_over),
    "op": (everything, random_at_start),
    **dict.fromkeys(("value", "collective"), (what_is_equal, random_at_start)),
    "product": (trained,),
    "loss": (outputs, batches, random_at_start, passed_over, unseen),
    "backward": (forward, loss, random_at_start, gradients),
    "gradient": (forward, loss, backward, random_at_start),
    "optimizer": (gradient,),
    **dict.fromkeys(("buffer", "by_hand"), (value_before,)),
}
"""By the word of a reason, what its records rest on; what one case needs besides is added in `applies`."""
