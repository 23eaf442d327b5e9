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

from introspect_cli.compare.step.step import Step
from introspect_cli.compare.terms.evidence import Evidence, Known, Thing, joint_known, worst_of
from introspect_cli.compare.terms.names import FORWARD, ancestors, owner_of
from introspect_cli.compare.terms.sites import FLOWING_BACK, KINDS, of_kinds, phase_code
from introspect_cli.compare.terms.table import DIFFERENT, EQUAL, NOT_SEEN, WITHIN
from introspect_cli.compare.terms.words import some
from introspect_cli.records import DRAWN_BEFORE, SETTING_KINDS, Joined, Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterable


def unseen_inside(step: Step, fqn: str) -> list[str]:
    """Submodules of `fqn` without recorded outputs, of their own or of an ancestor, in this step."""
    prefix = fqn + "."
    inside = dict.fromkeys(name for tree in step.modules for name in tree if name.startswith(prefix))
    outputs, names = step.of(Kind.OUTPUT, FORWARD), step.alignment.fqn
    seen = {names[union] for union in outputs if step.state[union] in {EQUAL, WITHIN, DIFFERENT}}
    recorded = inside.keys() & (seen - {names[union] for union in outputs if step.state[union] == NOT_SEEN})
    return [name for name in inside if recorded.isdisjoint((name, *ancestors(name)))]


def tensors_held(step: Step, owners: Iterable[str], kind: Kind) -> set[str]:
    """FQNs of parameters or buffers of these modules; tied ones under the name they are recorded by."""
    names: set[str] = set()
    for owner in owners:
        for module in (tree[owner] for tree in step.modules if owner in tree):
            tied = {name: target for name, target in module.tied.items() if _is(step, target, kind)}
            held = module.parameters if kind is Kind.PARAM else module.buffers
            names |= {tied.get(name, f"{owner}.{name}") for name in held} | {*tied.values()}
    names |= {name for owner in owners for name in step.comparison.tensors_in(owner) if _is(step, name, kind)}
    return names


def _is(step: Step, fqn: str, kind: Kind) -> bool:
    """Whether any site of this FQN is of this kind."""
    return any(KINDS[step.alignment.kind[union]] is kind for union in step.alignment.by_fqn.get(fqn, []))


def is_written_later(step: Step, fqn: str, kind: Kind, order: float) -> bool:
    """Whether a forward pass changed the tensor after `order` in either run."""
    table, unions = step.table, step.of(kind, frozenset({Phase.FORWARD}), fqn)
    later = [union for union in unions.tolist() if step.state[union] and table.order_of[union] > order]
    return any(step.repeats_last(union, side) is False for union in later for side in "ab")


def tensors_written_inside(step: Step, fqn: str, order: float) -> list[int]:
    """Positions of divergences of submodules' tensors that the forward pass changed before `order`.

    Only where inputs and outputs of the submodule do not differ.
    """
    phases = {Kind.PARAM: Phase.FORWARD, Kind.BUFFER: Phase.OPTIMIZER}  # as a forward pass, or the step, leaves them
    return [
        position
        for position, site in enumerate(step.sites)
        if phases.get(site.kind) is site.phase
        and (owner := owner_of(site.fqn)).startswith(f"{fqn}.")
        and any(ended < order < step.order_at(position) for _, ended in step.calls.spans_of(owner))
        and not step.differing(Kind.INPUT, owner) + step.differing(Kind.OUTPUT, owner)
        and tensor_known(step, site.fqn, site.kind, order) is Known.EQUAL
    ]


def tensor_known(step: Step, fqn: str, kind: Kind, order: float) -> Known:
    """What is known of a tensor at `order`: its last record of the step, else what the step before left of it.

    EQUAL where neither has it and nothing says that it differs; UNSEEN in one run alone, or after steps not recorded.
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
    if not any(step.alignment.in_both[union] for union in unions) or (step.gap and fqn in step.comparison.ended):
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
    """A place in a step at which something is computed.

    Attributes:
        site: what is computed; for a call of a module, an input or output of it.
        order: when; what was recorded later does not matter.
        of: the module whose call it is, where that is not the diverging one.
        start: when the call began in which other modules ran before; -1 where none did, or that is not known.
    """

    site: Site
    order: float
    of: str = ""
    start: float = -1.0


Edge = Callable[[Step, Place], list[Evidence]]


def rests_on(step: Step, place: Place, edges: Iterable[Edge]) -> list[Evidence]:
    """All evidence from these edges, in order."""
    return [fact for edge in edges for fact in edge(step, place)]


def _before(thing: Thing, kinds: tuple[Kind, ...], phases: frozenset[Phase], *, needed: bool = False) -> Edge:
    """Edge: what is known of all records of these kinds and phases before the place."""

    def edge(step: Step, place: Place) -> list[Evidence]:
        sites = np.concatenate([step.of(kind, phases) for kind in kinds])
        state = step.known(sites, place.order)
        return [Evidence(thing, state, needed)]

    return edge


# --- random numbers and data


def random_at_start(step: Step, _place: Place) -> list[Evidence]:
    """Edge: start random states; nothing in a resumed run's first step where draws agree."""
    if step.comparison.is_resume_step(step.number):
        drawn = [number for number in step.of(Kind.RNG, FORWARD).tolist() if step.state[number]]
        if step.known(drawn) is Known.EQUAL:
            return []
    ranks = step.comparison.gathered is not None  # each may have another
    return [Evidence(Thing.RANDOM_AT_START, step.known(step.of(Kind.RNG, _START), every=ranks))]


def drawn_from(step: Step, place: Place) -> list[Evidence]:
    """Edge: states the call drew from; nothing if none drew and all draws are recorded, else the start states."""
    sites = step.of(Kind.RNG, FORWARD).tolist()
    drawn = [
        number
        for number in sites
        if step.table.order_of[number] < place.order and _drew(step.alignment.site(number), place.site)
    ]
    state = step.known(drawn)
    if state is not Known.UNSEEN:
        return [Evidence(Thing.DRAWN_FROM, state)]
    noticed = step.comparison.notices_all_draws and place.site.phase is not Phase.RECOMPUTE
    return [] if noticed else random_at_start(step, place)


def _drew(state: Site, site: Site) -> bool:
    """Whether a state was drawn from in a call, by the module itself or a submodule."""
    inside = state.fqn.startswith(site.fqn + ".")
    itself = state.fqn == site.fqn and state.call == site.call and not state.path.endswith(DRAWN_BEFORE)
    return state.phase is site.phase and (inside or itself)


batches = _before(Thing.BATCHES, (Kind.BATCH,), _DATA)
"""The batches of the step."""


def loading(step: Step, place: Place) -> list[Evidence]:
    """Edge: DIFFERS where outputs or draws before the batch differ; nothing otherwise."""
    made = [*step.of(Kind.OUTPUT, FORWARD).tolist(), *step.of(Kind.RNG, _DATA, place.site.fqn).tolist()]
    return [Evidence(Thing.EVERYTHING, Known.DIFFERS)] if step.known(made, place.order) is Known.DIFFERS else []


# --- the forward pass


def passed_over(step: Step, _place: Place) -> list[Evidence]:
    """Edge: UNSEEN where an evaluation in the step was not recorded; nothing otherwise."""
    return (
        [Evidence(Thing.PASSED_OVER, Known.UNSEEN)]
        if step.comparison.passes_over(step.number, step.table.step_b)
        else []
    )


def inputs(step: Step, place: Place) -> list[Evidence]:
    """Edge: inputs of a call; nothing where inputs are recorded but this call has none."""
    site = place.site
    sites = step.of_call(site.phase, Kind.INPUT, site.fqn, site.call)
    present = [number for number in sites if step.state[number]]
    none = not present and Kind.INPUT in step.comparison.kinds and not step.comparison.modules_chosen
    return [] if none else [Evidence(Thing.INPUTS, step.known(present, every=True), needed=True, of=place.of)]


def inside(step: Step, place: Place) -> list[Evidence]:
    """Evidence on outputs recorded between the call's start and the place; nothing where the start is unknown.

    Of every other module; with ranks put together, of submodules by name. One that is unseen makes it UNSEEN.
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
    """Edge: parameters and buffers of the module, and of submodules without recorded outputs."""
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
    if place.start >= 0 and tensors_written_inside(step, fqn, place.order):
        facts.append(Evidence(Thing.REWRITTEN, Known.UNSEEN, needed=True))
    if not facts and not step.modules[0] and Kind.PARAM not in step.comparison.kinds:
        facts.append(Evidence(Thing.PARAMETERS, Known.UNSEEN, needed=True))
    return facts


def outputs(step: Step, place: Place) -> list[Evidence]:
    """Edge: all module outputs before the place.

    LEFT_OUT where a capture chose modules and root outputs are missing.
    """
    state = step.known(step.of(Kind.OUTPUT, FORWARD), place.order)
    return [LEFT_OUT if _is_left_out(step, state, place.order) else Evidence(Thing.OUTPUTS, state, needed=True)]


def unseen(step: Step, place: Place) -> list[Evidence]:
    """Edge: modules that ran unobserved; nothing where none did."""
    names = step.comparison.ran_unseen(place.site.phase if place.site.phase is Phase.EVAL else Phase.FORWARD)
    return [Evidence(Thing.RAN_UNSEEN, Known.UNSEEN, of=some(names))] if names else []


def forward(step: Step, place: Place) -> list[Evidence]:
    """Edge: inputs and outputs of the forward pass before the place; LEFT_OUT where modules were left out."""
    (flow,) = _flow(step, place)
    return [LEFT_OUT if _is_left_out(step, flow.known, place.order) else flow]


_flow = _before(Thing.FORWARD, (Kind.INPUT, Kind.OUTPUT), FORWARD, needed=True)


LEFT_OUT = Evidence(Thing.LEFT_OUT, Known.UNSEEN, needed=True)
"""The modules that a capture was told to leave out."""


def calls_left_out(step: Step, fqn: str) -> bool:
    """Whether a capture left out modules, and one of them may have produced this module's input."""
    if not step.comparison.modules_chosen:
        return False
    root, names = fqn.partition(".")[0], {name for tree in step.modules for name in tree}
    others = {name for name in names if "." not in name and name != root}
    return bool(owner_of(fqn)) or any(name.partition(".")[0] in others and "." in name for name in names)


def _is_left_out(step: Step, state: Known, order: float) -> bool:
    """Whether outputs agree but root outputs before `order` are missing since modules were chosen."""
    if state not in {Known.EQUAL, Known.WITHIN} or not step.comparison.modules_chosen:
        return False
    sites = step.of(Kind.OUTPUT, FORWARD)
    roots = [
        number for number in sites if not owner_of(step.alignment.fqn[number]) and step.table.order_of[number] < order
    ]
    return step.known(roots) is Known.UNSEEN


def everything(step: Step, place: Place) -> list[Evidence]:
    """Edge: all records before the place."""
    earlier = np.flatnonzero(step.state * (step.table.order_of < place.order))
    return [Evidence(Thing.EVERYTHING, step.known(earlier))]


def what_is_equal(step: Step, place: Place) -> list[Evidence]:
    """Edge: module outputs and batches before the place, only if EQUAL."""
    return [fact for fact in (*outputs(step, place), *batches(step, place)) if fact.known is Known.EQUAL]


# --- the backward pass


def loss(step: Step, place: Place) -> list[Evidence]:
    """Edge: losses before the place; nothing where losses are recorded but this step has none."""
    sites = step.of(Kind.LOSS, frozenset({Phase.LOSS}))
    none = not step.state[sites].any() and Kind.LOSS in step.comparison.kinds
    return [] if none else [Evidence(Thing.LOSS, step.known(sites, place.order), needed=True)]


backward = _before(Thing.BACKWARD, FLOWING_BACK, _BACKWARD, needed=True)
"""The backward pass, by the gradients that hooks recorded in it."""


def gradients(step: Step, place: Place) -> list[Evidence]:
    """Edge: backward gradients before the place; nothing where none are recorded."""
    (flow,) = backward(step, place)
    return [] if flow.known is Known.UNSEEN else [Evidence(Thing.GRADIENTS, flow.known)]


# --- the optimizer


def gradient(step: Step, place: Place) -> list[Evidence]:
    """Edge: the parameter's gradient at the optimizer step, or its sum where ranks of one run still owe it."""
    sites = step.of(Kind.GRAD, _AFTER, place.site.fqn)
    if lacks_gradient(step, place.site.fqn):
        return []
    state = step.known(sites, every=True)
    return [Evidence(Thing.GRADIENT_SUM if owing_side(step, sites) else Thing.GRADIENT, state, needed=True)]


def lacks_gradient(step: Step, fqn: str) -> bool:
    """Whether the step has gradients at the optimizer, but none of this parameter."""
    every = step.of(Kind.GRAD, _AFTER)
    return bool(step.state[every].any()) and not step.state[step.of(Kind.GRAD, _AFTER, fqn)].any()


def owing_side(step: Step, sites: Iterable[int]) -> str:
    """The run alone in which ranks have not summed a gradient; "" for neither or both."""
    owing = [
        half.side
        for half in step.table.halves
        if half.batch.how is not None and (half.batch.how[np.isin(half.sites, list(sites))] == Joined.OWED).any()
    ]
    return owing[0] if len(owing) == 1 else ""


gradients_in_step = _before(Thing.GRADIENTS_IN_STEP, (Kind.GRAD,), _AFTER)
"""The gradients that an optimizer computed before, within its step."""


def value_before(step: Step, place: Place) -> list[Evidence]:
    """Edge: the tensor's value before the record."""
    return [Evidence(Thing.VALUE_BEFORE, tensor_known(step, place.site.fqn, place.site.kind, place.order))]


def state_before(step: Step, place: Place) -> list[Evidence]:
    """Edge: the parameter's optimizer state before the step; nothing where there is none yet."""
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
    """Edge: all parameters at the place; EQUAL only if all are."""
    names = {step.alignment.fqn[u] for u in np.flatnonzero(step.alignment.kind == KINDS.index(Kind.PARAM))}
    answers = [tensor_known(step, name, Kind.PARAM, place.order) for name in sorted(names)]
    return [Evidence(Thing.TRAINED, worst_of(answers) if answers else Known.UNSEEN, needed=True)]


def updates_by_hand(step: Step) -> bool:
    """Whether neither run has any record of an optimizer or hyper-parameter."""
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
