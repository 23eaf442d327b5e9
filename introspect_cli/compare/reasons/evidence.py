"""What is known of the things that a divergence depends on.

A sentence like "although its inputs are equal" is true only where both runs recorded them and their checksums agree. A
value that was not recorded, and one that tolerance let pass, are not equal. So whoever explains a divergence asks here,
gets one of four answers for each thing, and makes its sentence from these with `although`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.sites import KINDS
from introspect_cli.compare.reasons.facts import BLIND, DIFFERS, EQUAL, FORWARD, WITHIN, Facts, owner_of
from introspect_cli.records import DRAWN_BEFORE, Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from introspect_cli.compare.join.sites import Ids

_START = frozenset({Phase.START})
_AFTER = frozenset({Phase.OPTIMIZER})
_TENSOR_KINDS = {Kind.PARAM: "parameters", Kind.BUFFER: "buffers"}
GRADIENT = "its gradient"
PASSES = frozenset({Phase.DATA, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD})


class Known(Enum):
    """What is known of a thing in both runs."""

    EQUAL = "equal"
    WITHIN = "within tolerance"
    UNSEEN = "not recorded"
    DIFFERS = "different"


@dataclass(frozen=True)
class Evidence:
    """One thing that a divergence depends on.

    Attributes:
        name: what it is, in words: `its inputs`.
        known: what is known of it.
        needed: whether nothing can be concluded where it was not seen.
        plural: whether it takes a plural verb.
    """

    name: str
    known: Known
    needed: bool = False
    plural: bool = True


def listed(names: Sequence[str]) -> str:
    """Names as a list in a sentence: `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _verb(found: Sequence[Evidence], one: str, many: str) -> str:
    return many if len(found) > 1 or found[0].plural else one


def of(evidence: Iterable[Evidence], known: Known) -> list[Evidence]:
    """The evidence with this answer."""
    return [found for found in evidence if found.known is known]


def although(evidence: Sequence[Evidence], word: str = "although") -> str:
    """` although its inputs are equal`, and what is not known, for the middle of a sentence; "" for none."""
    clauses = []
    for known, text in ((Known.EQUAL, "equal"), (Known.WITHIN, "within tolerance")):
        found = of(evidence, known)
        if found:
            clauses.append(f"{listed([e.name for e in found])} {_verb(found, 'is', 'are')} {text}")
    text = f" {word} {' and '.join(clauses)}" if clauses else ""
    unseen = of(evidence, Known.UNSEEN)
    if unseen:
        text += f" ({listed([e.name for e in unseen])} {_verb(unseen, 'was', 'were')} not recorded)"
    return text


def of_module(evidence: Sequence[Evidence], fqn: str) -> tuple[Evidence, ...]:
    """The evidence with the name of the module that it is about, where `its` would be read as another's."""
    return tuple(replace(found, name=_of_module(found.name, found.known, fqn)) for found in evidence)


def _of_module(name: str, known: Known, fqn: str) -> str:
    if name.startswith("its "):  # those of the modules inside it count too, and of these some may be on record
        return f"{'some' if known is Known.UNSEEN else 'the'} {name.removeprefix('its ')} of {fqn}"
    return f"{name} inside {fqn}" if name == "the random state" else name.replace("inside it", f"inside {fqn}")


def lines(evidence: Sequence[Evidence]) -> list[str]:
    """The evidence as lines under the sentence."""
    texts = []
    for known in (Known.EQUAL, Known.WITHIN, Known.UNSEEN):
        found = of(evidence, known)
        if found:
            texts.append(f"{known.value.capitalize()}: {listed([e.name for e in found])}.")
    return texts


def known_of(facts: Facts, unions: Ids | Sequence[int], before: float = np.inf, *, every: bool = False) -> Known:
    """What is known of some sites in this step.

    Args:
        facts: the step.
        unions: union numbers of the sites.
        before: only what was recorded earlier than this counts.
        every: whether one record that was not seen makes the whole not seen.
    """
    numbers = np.asarray(unions, dtype=np.int64)
    states = facts.state[numbers]
    if np.isfinite(before):
        states = states[facts.order[numbers] < before]
    return answer(states, every=every)


def answer(states: npt.NDArray[np.int8], *, every: bool = False) -> Known:
    """What is known of several sites together, given what is known of each.

    Args:
        states: of each site, as `facts.states` gives them.
        every: whether one that was not seen makes the whole not seen.
    """
    if (states == DIFFERS).any():
        return Known.DIFFERS
    if every and (states == BLIND).any():
        return Known.UNSEEN
    if (states == WITHIN).any():
        return Known.WITHIN
    return Known.EQUAL if (states == EQUAL).any() else Known.UNSEEN


def random_state(facts: Facts) -> Evidence:
    """The random state at the start of the step."""
    known = known_of(facts, facts.unions(Kind.RNG, _START))
    return Evidence("the random state at the start of the step", known, plural=False)


def drawn_from(facts: Facts, site: Site, order: float) -> list[Evidence]:
    """The random states that a module's call drew from: nothing where it is known that it drew none.

    Args:
        facts: the step.
        site: an input or output of the call.
        order: when it was recorded; what is drawn later does not matter.
    """
    states = facts.unions(Kind.RNG, FORWARD)
    own = [union for union in states if facts.order[union] < order and _drew(facts.alignment.site(int(union)), site)]
    known = known_of(facts, own)
    if known is not Known.UNSEEN:
        return [Evidence("the random state", known, plural=False)]
    told = facts.draws_known and site.phase is not Phase.RECOMPUTE
    return [] if told else [random_state(facts)]


def is_random(evidence: Evidence) -> bool:
    """Whether this is about a random state."""
    return evidence.name.startswith("the random state")


def _drew(own: Site, site: Site) -> bool:
    """Whether a random state was drawn from in a module's call: by its own code, or by a module inside it."""
    inside = own.fqn.startswith(site.fqn + ".")
    itself = own.fqn == site.fqn and own.call == site.call and not own.path.endswith(DRAWN_BEFORE)
    return own.phase is site.phase and (inside or itself)


def batches(facts: Facts, order: float = np.inf) -> Evidence:
    """The batches of the step."""
    return Evidence("the batches", known_of(facts, facts.unions(Kind.BATCH, frozenset({Phase.DATA})), order))


def inputs_of(facts: Facts, site: Site, name: str = "its inputs") -> Evidence | None:
    """What a module is given at a call; None where inputs were recorded, but this call has none."""
    unions = facts.recorded(site.phase, Kind.INPUT, site.fqn, site.call)
    present = [union for union in unions if facts.state[union]]
    if not present and Kind.INPUT in facts.kinds and not facts.modules_chosen:
        return None
    return Evidence(name, known_of(facts, present, every=True), needed=True)


def outputs_before(facts: Facts, order: float) -> Evidence:
    """The outputs of all modules that ran before a place of the sequence."""
    known = known_of(facts, facts.unions(Kind.OUTPUT, FORWARD), order)
    if _left_out(facts, known, order):
        return LEFT_OUT
    if known is Known.UNSEEN:
        return Evidence("module outputs before it", known, needed=True)
    return Evidence("every module output recorded before it", known, needed=True, plural=False)


def all_before(facts: Facts, order: float) -> list[Evidence] | None:
    """What is equal before a place of the sequence, for what may come from all of it; None where any of it differs."""
    if facts.anything_before(order) or facts.rng_differs():
        return None
    equal = [found for found in (outputs_before(facts, order), batches(facts, order)) if found.known is Known.EQUAL]
    return [*equal, random_state(facts)]


def forward_pass(facts: Facts) -> Evidence:
    """The forward pass of the step."""
    unions = np.concatenate([facts.unions(kind, FORWARD) for kind in (Kind.INPUT, Kind.OUTPUT)])
    known = known_of(facts, unions)
    return LEFT_OUT if _left_out(facts, known) else Evidence("the forward pass", known, needed=True, plural=False)


LEFT_OUT = Evidence("the modules that a capture was told to leave out", Known.UNSEEN, needed=True)


def calls_left_out(facts: Facts, fqn: str) -> bool:
    """Whether a capture was told to leave modules out, and one of these may have made what a module is given."""
    if not facts.modules_chosen:
        return False
    root, names = fqn.partition(".")[0], {name for tree in facts.modules for name in tree}
    others = {name for name in names if "." not in name and name != root}
    return bool(owner_of(fqn)) or any(name.partition(".")[0] in others and "." in name for name in names)


def _left_out(facts: Facts, known: Known, order: float = np.inf) -> bool:
    """Whether what modules gave is equal as far as it is on record, and a capture chose modules and not the model."""
    if known not in {Known.EQUAL, Known.WITHIN} or not facts.modules_chosen:
        return False
    outputs = facts.unions(Kind.OUTPUT, FORWARD)
    roots = [union for union in outputs if not owner_of(facts.alignment.fqn[union]) and facts.order[union] < order]
    return known_of(facts, roots) is Known.UNSEEN


def loss_of(facts: Facts) -> list[Evidence]:
    """The losses of the step; nothing where losses were recorded, but this step has none."""
    unions = facts.unions(Kind.LOSS, frozenset({Phase.LOSS}))
    if not facts.state[unions].any() and Kind.LOSS in facts.kinds:
        return []
    return [Evidence("the loss", known_of(facts, unions), needed=True, plural=False)]


def backward_before(facts: Facts, order: float, name: str, *, needed: bool = True) -> Evidence:
    """The gradients that hooks recorded in the backward pass before a place of the sequence."""
    backward = frozenset({Phase.BACKWARD})
    unions = np.concatenate([facts.unions(kind, backward) for kind in (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)])
    return Evidence(name, known_of(facts, unions, order), needed=needed, plural=name.endswith("s before it"))


def tensors_of(facts: Facts, fqn: str, order: float, *, whole: bool = True) -> list[Evidence]:
    """The parameters and the buffers that a module computes with.

    Args:
        facts: the step.
        fqn: the module.
        order: when it computes.
        whole: whether those of the modules inside it count, as far as their outputs were not recorded.
    """
    owners = [fqn, *(_blind_inside(facts, fqn) if whole else ())]
    found = []
    for kind, word in _TENSOR_KINDS.items():
        names = _expected(facts, owners, kind)
        if names:
            answers = [_tensor(facts, name, kind, order) for name in sorted(names)]
            known = next((k for k in (Known.DIFFERS, Known.UNSEEN, Known.WITHIN) if k in answers), Known.EQUAL)
            found.append(Evidence(f"its {word}", known, needed=True))
    if not found and not facts.modules[0] and Kind.PARAM not in facts.kinds:
        found.append(Evidence("its parameters", Known.UNSEEN, needed=True))
    return found


def _blind_inside(facts: Facts, fqn: str) -> list[str]:
    """Modules inside one whose outputs are not on record in this step, nor those of a module between."""
    prefix = fqn + "."
    inside = {name for tree in facts.modules for name in tree if name.startswith(prefix)}
    told = {
        name
        for name in inside
        if any(facts.state[union] in {EQUAL, WITHIN, DIFFERS} for union in facts.unions(Kind.OUTPUT, FORWARD, name))
    }

    def hidden(name: str) -> bool:
        while name and name != fqn:
            if name in told:
                return False
            name = owner_of(name)
        return True

    return [name for name in inside if hidden(name)]


def _expected(facts: Facts, owners: Iterable[str], kind: Kind) -> set[str]:
    """FQNs of the tensors that modules hold, tied ones under the name they are recorded by."""
    names: set[str] = set()
    for owner in owners:
        for tree in facts.modules:
            module = tree.get(owner)
            if module is None:
                continue
            names |= {f"{owner}.{name}" for name in (module.parameters if kind is Kind.PARAM else module.buffers)}
            tied = (alias.partition("=") for alias in module.aliases)
            names |= {target for _, equals, target in tied if equals and _is(facts, target, kind)}
    names |= {name for owner in owners for name in facts.tensors_in(owner) if _is(facts, name, kind)}
    return names


def _is(facts: Facts, fqn: str, kind: Kind) -> bool:
    return any(KINDS[facts.alignment.kind[union]] is kind for union in facts.alignment.by_fqn.get(fqn, []))


def _tensor(facts: Facts, fqn: str, kind: Kind, order: float) -> Known:
    """What is known of a tensor's value when something computes with it."""
    alignment, carried = facts.alignment, facts.carried
    own = [union for union in alignment.by_fqn.get(fqn, []) if KINDS[alignment.kind[union]] is kind]
    now = [union for union in own if facts.state[union] and facts.order[union] < order]
    if now:
        return known_of(facts, [max(now, key=lambda union: facts.order[union])], every=True)
    if fqn in carried.params or fqn in carried.buffers:
        return Known.DIFFERS
    before = facts.state_before
    if before is not None and own and before[own].any():
        return answer(before[[union for union in own if before[union]][-1:]], every=True)
    if not any(facts.alignment.in_both[union] for union in own) or (facts.gap and fqn in facts.ended):
        return Known.UNSEEN
    return Known.WITHIN if fqn in carried.within else Known.EQUAL


def trained_before(facts: Facts, order: float) -> Evidence:
    """All tensors that are trained, as a place of the sequence finds them."""
    names = {facts.alignment.fqn[u] for u in np.flatnonzero(facts.alignment.kind == KINDS.index(Kind.PARAM))}
    answers = [_tensor(facts, name, Kind.PARAM, order) for name in sorted(names)]
    known = next((k for k in (Known.DIFFERS, Known.UNSEEN, Known.WITHIN) if k in answers), Known.EQUAL)
    known = known if answers else Known.UNSEEN
    return Evidence("every tensor that requires gradients", known, needed=True, plural=False)


def value_before(facts: Facts, site: Site, order: float) -> Evidence:
    """A parameter's or buffer's own value before a record of it."""
    return Evidence("its value before", _tensor(facts, site.fqn, site.kind, order), plural=False)


def state_before(facts: Facts, site: Site) -> list[Evidence]:
    """The optimizer's state for a parameter, as the step before left it; nothing where there is none yet."""
    if any(name == site.fqn for name, _ in facts.carried.states):
        return [Evidence("the optimizer state before", Known.DIFFERS, plural=False)]
    unions = facts.unions(Kind.OPTIMIZER_STATE, _AFTER | _START, site.fqn)
    started = [union for union in unions if facts.alignment.phase[union] != facts.alignment.phase[unions[0]]]
    if facts.state_before is not None and len(unions) and facts.state_before[unions].any():
        return [Evidence("the optimizer state before", answer(facts.state_before[unions], every=True), plural=False)]
    known = known_of(facts, started) if started else Known.UNSEEN
    begun = facts.step == 0 and facts.pair.step_b == 0
    return [] if begun and known is Known.UNSEEN else [Evidence("the optimizer state before", known, plural=False)]


def gradient_of(facts: Facts, fqn: str) -> Evidence:
    """A parameter's gradient, as the optimizer sees it."""
    return Evidence(
        GRADIENT, known_of(facts, facts.unions(Kind.GRAD, _AFTER, fqn), every=True), needed=True, plural=False
    )
