"""What lies around the first divergence and tells more than the divergence itself.

Each clue is looked up in the records of the diverging step and the one before, once, for the first divergence only;
how, is told in `traces`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.distance import ROUNDING
from introspect_cli.compare.join.sites import KINDS, PHASES, Alignment, kind_code
from introspect_cli.compare.reasons.facts import Facts, owner_of
from introspect_cli.compare.reasons.hyperparameters import hyperparameter_changes
from introspect_cli.compare.reasons.step_view import (
    StepRecords,
    call_change,
    fresh_state,
    frozen_buffers,
    identity_side,
    idle_side,
    losses_of,
    no_forward_side,
    optimizers_of,
    other_paths,
    phases_of,
    stale_side,
    value_before,
)
from introspect_cli.compare.reasons.words import what
from introspect_cli.compare.result import Divergence, Reason
from introspect_cli.records import SETTING_KINDS, Kind, ModuleInfo, Phase, Site

if TYPE_CHECKING:
    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.reasons.origin import Cause

_SMALL = 64  # roundings; more is not summation order any more


@dataclass(frozen=True)
class Clues:
    """What was found.

    Attributes:
        first_step: first step that was compared, in a's numbering.
        batches_before: how many compared steps came before.
        same_values: the two tensors hold the same values in another order, as far as statistics tell.
        initial_differ: parameters and buffers that differ at the start.
        initial_total: parameters and buffers recorded at the start.
        unequal_tensors: tensors that the later of two captures did not begin with as the other had them.
        batches_seen: whether batches were recorded in this step.
        fed: what went into a module and is equal, in words.
        class_b: class of the module in run b, where it is another.
        rounding: whether the distance is a few roundings of the dtype.
        dtype_changed: whether dtypes differ.
        stale: the side whose gradient still holds that of the step before.
        grad_equal: whether the parameter's gradient was recorded and is equal.
        value_before_equal: whether the parameter's value before the step is known and equal.
        optimizers: names of the optimizers that stepped.
        optimizer_classes: optimizers of a and of b, where they differ.
        untouched: the side where the step left the tensor as it was.
        fresh: the side whose optimizer state began afresh.
        fresh_text: how that shows.
        hyperparameters: name to (value in a, value in b) of those that differ at this step.
        tied_to: what the parameter is tied to in the other run.
        calls: (name, calls in a, calls in b) of the outermost thing that runs another number of times.
        accumulation: whether that thing is a whole model, and the step has another number of losses too.
        line_search: the optimizer that runs the model several times a step and changes it in between.
        subject_missing: whether the other run never has the thing at all.
        before: records that agree before the divergence in this step.
        rng_equal: whether random states were recorded at this step and agree.
        gradients: (differing, recorded) gradients in this step.
        identity: the side where the module hands its input on unchanged while the other does not.
        frozen_buffers: the side where the module's buffers do not change in this step while the other's do.
        paths: (paths in a, paths in b) of the values at this call, where both runs have some but not the same.
        gap: whether the step before was not recorded.
        losses: how many losses the step has in a and in b.
        earliest: the first record of the step that differs, in words, where it is not the one told of.
        idle: the side on which a module that both runs have does not run in this step.
        recomputed: whether the module was run again in the backward pass, under activation checkpointing.
        no_forward: the side whose step holds no forward pass at all.
        not_optimized: the side whose optimizer does not have the parameter.
        by_hand: whether no optimizer ever steps in either run.
        children: what the runs' scripts ran in processes of their own.
        unseeded: random generators that both runs began to draw from in this step, or the one before, unseeded.
    """

    first_step: int = 0
    batches_before: int = 0
    same_values: bool = False
    initial_differ: int = 0
    initial_total: int = 0
    unequal_tensors: tuple[str, ...] = ()
    batches_seen: bool = False
    fed: str = "inputs"
    class_b: str = ""
    rounding: bool = False
    dtype_changed: bool = False
    stale: str = ""
    grad_equal: bool = False
    value_before_equal: bool = False
    optimizers: str = ""
    optimizer_classes: tuple[str, str] | None = None
    untouched: str = ""
    fresh: str = ""
    fresh_text: str = ""
    hyperparameters: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    tied_to: str = ""
    calls: tuple[str, int, int] | None = None
    accumulation: bool = False
    line_search: str = ""
    subject_missing: bool = False
    before: int = 0
    rng_equal: bool | None = None
    gradients: tuple[int, int] = (0, 0)
    identity: str = ""
    earliest: str = ""
    idle: str = ""
    losses: tuple[int, int] = (0, 0)
    recomputed: bool = False
    gap: bool = False
    paths: tuple[str, str] | None = None
    frozen_buffers: str = ""
    no_forward: str = ""
    not_optimized: str = ""
    by_hand: bool = False
    children: str = ""
    unseeded: tuple[str, ...] = ()


def find_clues(
    facts: Facts,
    divergence: Divergence,
    cause: Cause,
    previous: StepPair | None,
    modules_a: list[ModuleInfo],
    modules_b: list[ModuleInfo],
    first_step: int,
    steps_before: int,
) -> Clues:
    """Look around the first divergence.

    Args:
        facts: its step.
        divergence: the divergence.
        cause: why it is one.
        previous: the compared step before, where there is one.
        modules_a: module tree of run a.
        modules_b: module tree of run b.
        first_step: first compared step.
        steps_before: compared steps before this one.
    """
    alignment = facts.alignment
    step = StepRecords(alignment, facts.pair)
    before = StepRecords(alignment, previous) if previous is not None else None
    site = divergence.site
    union = int(facts.items.union[_position(facts, divergence)])
    names_a, names_b = optimizers_of(step, "a"), optimizers_of(step, "b")
    kinds = {(PHASES[alignment.phase[u]], KINDS[alignment.kind[u]]) for u in step.rows_a}
    starts = [u for u in step.rows_a if _is_start_tensor(alignment, u)]
    grads = [u for u in step.rows_a if KINDS[alignment.kind[u]] is Kind.GRAD]
    start_items = [s for s in facts.sites if s.phase is Phase.START and s.kind in (Kind.PARAM, Kind.BUFFER)]
    known_before = value_before(facts, step, before, union)
    subject = cause.subject or site.fqn
    other = "b" if divergence.b is None else "a"
    calls = call_change(facts, step)
    fresh, fresh_text = fresh_state(step, site.fqn) if cause.reason is Reason.OPTIMIZER else ("", "")
    losses = (losses_of(step, "a"), losses_of(step, "b"))
    return Clues(
        first_step=first_step,
        batches_before=steps_before,
        same_values=_same_values(divergence),
        initial_differ=len(start_items),
        initial_total=len(starts),
        unequal_tensors=(
            *sorted(facts.carried.params | facts.carried.buffers),
            *(f"{path} of {fqn}" for fqn, path in sorted(facts.carried.states)),
        ),
        batches_seen=any(kind is Kind.BATCH for _, kind in kinds),
        fed=_fed(facts, kinds, site.fqn),
        class_b=alignment.b_class.get(union, ""),
        rounding=_is_rounding(divergence),
        dtype_changed=bool(divergence.a and divergence.b and divergence.a.layout.dtype != divergence.b.layout.dtype),
        stale=stale_side(step, before, union) if cause.reason is Reason.GRADIENT else "",
        grad_equal=not site.call and _grad_equal(facts, site.fqn),
        value_before_equal=known_before[0] and site.fqn not in facts.carried.params,
        optimizers=", ".join(names_a) if names_a == names_b else "",
        optimizer_classes=(", ".join(names_a), ", ".join(names_b))
        if names_a and names_b and names_a != names_b
        else None,
        untouched=known_before[1] if cause.reason in (Reason.OPTIMIZER, Reason.BUFFER) else "",
        fresh=fresh,
        fresh_text=fresh_text,
        hyperparameters=hyperparameter_changes(alignment, step),
        tied_to=_tied(modules_a if other == "a" else modules_b, site.fqn) if cause.reason is Reason.STRUCTURE else "",
        calls=calls,
        accumulation=bool(calls and not owner_of(calls[0]) and losses[0] != losses[1]),
        losses=losses,
        line_search=_line_search(names_a, site, cause),
        subject_missing=_missing(alignment, subject, other),
        before=_agreeing_before(facts, divergence),
        rng_equal=None if not any(kind is Kind.RNG for _, kind in kinds) else not facts.rng_differs(),
        gradients=(sum(s.kind is Kind.GRAD for s in facts.sites), len(grads)),
        identity=identity_side(facts, step, union) if cause.reason is Reason.MODULE else "",
        frozen_buffers=frozen_buffers(facts, step, before, site.fqn) if cause.reason is Reason.MODULE else "",
        paths=other_paths(facts, step, union) if cause.reason is Reason.STRUCTURE else None,
        gap=facts.gap,
        by_hand=not np.isin(alignment.kind, [kind_code(kind) for kind in SETTING_KINDS]).any(),
        no_forward=no_forward_side(step),
        idle=idle_side(step, site.fqn) if cause.reason is Reason.STRUCTURE else "",
        earliest=what(facts.sites[0]) if facts.sites and facts.sites[0] != site else "",
        recomputed=(Phase.RECOMPUTE in phases_of(step, site.fqn)),
    )


def _position(facts: Facts, divergence: Divergence) -> int:
    return facts.sites.index(divergence.site)


def _is_start_tensor(alignment: Alignment, union: int) -> bool:
    return PHASES[alignment.phase[union]] is Phase.START and KINDS[alignment.kind[union]] in (Kind.PARAM, Kind.BUFFER)


def _same_values(divergence: Divergence) -> bool:
    a, b = divergence.a, divergence.b
    if a is None or b is None or a.layout != b.layout or a.layout.numel < 2:
        return False
    names = ("min", "max", "zeros", "nans", "posinfs", "neginfs")
    if not a.stats or any(a.stats.get(name) != b.stats.get(name) for name in names) or a.stats["min"] == a.stats["max"]:
        return False
    return all(
        abs(a.stats.get(name, 0.0) - b.stats.get(name, 0.0)) <= 1e-9 * max(abs(a.stats.get(name, 0.0)), 1e-30)
        for name in ("mean", "var")
    )


def _is_rounding(divergence: Divergence) -> bool:
    a, b, rel = divergence.a, divergence.b, divergence.rel_l2
    if a is None or b is None or rel is None or a.layout.dtype != b.layout.dtype:
        return False
    unit = ROUNDING.get(a.layout.dtype)
    return unit is not None and rel <= _SMALL * unit


def _fed(facts: Facts, kinds: set[tuple[Phase, Kind]], fqn: str) -> str:
    """What went into a module and is equal, in words."""
    alignment = facts.alignment
    inputs = [u for u in alignment.by_fqn.get(fqn, []) if KINDS[alignment.kind[u]] is Kind.INPUT]
    parts = ["inputs" if inputs else "everything recorded before it"]
    prefix = fqn + "."
    held = {KINDS[kind] for kind, name in zip(alignment.kind, alignment.fqn, strict=True) if name.startswith(prefix)}
    if Kind.PARAM in held:
        parts.append("parameters")
    if Kind.BUFFER in held:
        parts.append("buffers")
    if any(kind is Kind.RNG for _, kind in kinds):
        parts.append("random state")
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _grad_equal(facts: Facts, fqn: str) -> bool:
    alignment = facts.alignment
    recorded = any(KINDS[alignment.kind[u]] is Kind.GRAD for u in alignment.by_fqn.get(fqn, []))
    return recorded and not facts.differing(Kind.GRAD, fqn)


def _tied(modules: list[ModuleInfo], fqn: str) -> str:
    """What a parameter is tied to, by the aliases of its module."""
    owner, _, name = fqn.rpartition(".")
    for module in modules:
        for alias in module.aliases:
            own, equals, target = alias.partition("=")
            if equals and module.fqn == owner and own == name:
                return target
            if equals and target == fqn:
                return f"{module.fqn}.{own}"
    return ""


def _line_search(optimizers: list[str], site: Site, cause: Cause) -> str:
    """The optimizer that may have changed a module between its calls within one step."""
    if cause.reason is not Reason.MODULE or not site.call:
        return ""
    return next((name for name in optimizers if name.startswith("LBFGS")), "")


def _missing(alignment: Alignment, subject: str, side: str) -> bool:
    """Whether a run has nothing at all of this name or inside it."""
    names = alignment.a.fqn if side == "a" else alignment.b.fqn
    prefix = subject + "."
    return not any(name == subject or name.startswith(prefix) for name in set(names))


def _agreeing_before(facts: Facts, divergence: Divergence) -> int:
    return int((np.asarray(facts.pair.a.sequence) < divergence.sequence).sum())
