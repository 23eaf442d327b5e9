"""Gradients: of what flows through modules, and of parameters as an optimizer step finds them.

Clipping by a norm, unscaling and averaging over accumulated batches multiply all gradients of an optimizer by one
factor. So where a gradient differs by no factor, or where another one that is not zero is equal, they were not what
changed. A missing zero_grad adds the gradient of the step before, which the sketches show. Several ranks or several
backward passes in a step are left out of this: what clips a part of a gradient before it is added up leaves no factor
in the sum.
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from introspect_cli.compare.reasons.base import KERNEL_WEIGHTS, Reason
from introspect_cli.compare.reasons.module import attribute_words
from introspect_cli.compare.reasons.ranks import differing_gradients, reduction_words, share_of_ranks, summed
from introspect_cli.compare.reasons.stale import stale_share, stale_side
from introspect_cli.compare.step.rests_on import PASSES
from introspect_cli.compare.terms.distance import ROUNDING
from introspect_cli.compare.terms.evidence import Cause, Known, Thing, those
from introspect_cli.compare.terms.names import ancestors, owner_of
from introspect_cli.compare.terms.sites import PHASES
from introspect_cli.compare.terms.table import EQUAL, OTHER
from introspect_cli.compare.terms.words import how_far, named
from introspect_cli.records import Kind, Phase
from introspect_cli.store.format.batch import fitted
from introspect_cli.texts import count

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.table import Table


_REST = 1e-5
"""What is left of a gradient beside the best multiple of the other, where that is no rounding of a factor."""

_MEASURED, _OF_THE_REST = 1e-4, 0.3


class Handling(Enum):
    """What is done to gradients between the backward pass and the update: in words, and the names that scripts call."""

    CLIPPING = (
        "clipping",
        ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_gradients", "clip_grads_with_norm_"),
    )
    UNSCALING = "unscaling", ("unscale_",)
    ACCUMULATION = "accumulation", ("accumulate", "no_sync")
    ZERO_GRAD = "zero_grad", ("zero_grad", "set_to_none")
    BY_HAND = "a change of the gradient by hand", ()

    def __init__(self, words: str, calls: tuple[str, ...]) -> None:
        self.words = words
        self.calls = calls


TOGETHER = frozenset({Handling.CLIPPING, Handling.UNSCALING, Handling.ACCUMULATION})
"""What multiplies all gradients by one factor, where a step has one backward pass."""


def excluded(scene: Scene) -> frozenset[Handling]:
    """What the records show not to have made the gradient differ."""
    if (
        max(run.world_size for run in scene.runs) > 1
        or scene.losses != (1, 1)
        or scene.site.call
        or _sparse_sides(scene)
    ):
        return frozenset()
    some_equal = max(map(len, scene.optimizers)) < 2 and others_equal(scene)
    gone = TOGETHER if some_equal or _no_factor(scene) else frozenset()
    nothing_left = some_equal and (not scene.first.step or others_equal(scene, also_before=True))
    return gone | {Handling.ZERO_GRAD} if nothing_left or _not_of_before(scene) else gone


def _sparse_sides(scene: Scene) -> str:
    """The runs that have it as a sparse tensor, of which a sketch has the entries, and not where they stand."""
    both = zip("ab", (scene.first.a, scene.first.b), strict=True)
    return "".join(side for side, summary in both if summary is not None and summary.layout.is_sparse)


def others_equal(scene: Scene, *, also_before: bool = False) -> bool:
    """Whether a gradient of the same optimizer step that is not zero, nor was in the step before, is equal."""
    unions = map(int, scene.step.of(Kind.GRAD, frozenset({scene.site.phase})))
    tables = [scene.table, *([scene.step.before] if also_before else [])]
    return any(scene.step.state[union] == EQUAL and all(_is_some(table, union) for table in tables) for union in unions)


def _is_some(table: Table | None, union: int) -> bool:
    """Whether run a has a gradient there that is not zero."""
    row, means = (None, None) if table is None else (table.rows_of("a").get(union), table.a.floats.get("amean"))
    return row is not None and means is not None and float(means[row]) > 0


def _not_of_before(scene: Scene) -> bool:
    """Whether what a gradient differs by is not made of it and that of the step before, as it is without zero_grad."""
    before = scene.step.before
    old = None if before is None else before.sketch(scene.union, "a")
    sketches = scene.table.sketches(scene.union)
    if sketches is None or old is None:
        return False
    a, b = sketches
    distance, basis = float(np.linalg.norm(b - a)), np.stack([a, old], axis=1)
    if distance < _MEASURED * float(np.linalg.norm(a)):
        return False  # of so small a difference, sketches have no direction
    rest = b - basis @ np.linalg.lstsq(basis, b, rcond=None)[0]
    return float(np.linalg.norm(rest)) > _OF_THE_REST * distance


def _no_factor(scene: Scene) -> bool:
    """Whether no factor makes one run's gradient the other's, by far more than it rounds."""
    first = scene.first
    if first.a is None or first.b is None or first.scale is not None or first.a.layout.numel <= 16:
        return False
    if max(ROUNDING.get(summary.layout.dtype, 1.0) for summary in (first.a, first.b)) > ROUNDING["float32"]:
        return False
    sketches = scene.table.sketches(scene.union)
    return sketches is not None and fitted(*sketches)[1] > _REST


class Backward(Reason):
    """The backward pass of a module gives another gradient although what went into it is equal."""

    word = "backward"
    place = "the backward pass"
    kinds = frozenset({Kind.GRAD_INPUT, Kind.GRAD_OUTPUT})
    weights: ClassVar = KERNEL_WEIGHTS

    def sentence(self, scene: Scene) -> str:
        """Through which module, or of which output."""
        first, module = scene.first, named(scene.site, scene.first.module_class)
        text = f"{scene.differs(scene.computed_from, named=False)}{scene.scaled}; {scene.the_cause_is} in the "
        text += "backward pass "
        step, alignment = scene.step, scene.step.alignment
        unions = alignment.by_fqn.get(first.site.fqn, [])
        if any(step.state[union] and PHASES[alignment.phase[union]] is Phase.RECOMPUTE for union in unions):
            return (
                f"{text}through {module}, which was recomputed under activation checkpointing. Look at what that draws "
                "or computes differently (preserve_rng_state)."
            )
        if first.site.kind is Kind.GRAD_INPUT:
            return f"{text}through {module}.{scene.rounding_words()}"
        if _taken_by_no_module(scene):
            around = "" if _is_all_of_the_model(scene) else first.site.fqn.rpartition(".")[0]
            code = f"the forward code of {around} or what is around it, or the loss code" if around else "the loss code"
            where = f", which no module takes: {code}"
        else:
            where = "" if scene.cause.rests_on(Thing.GRADIENTS) else ": the loss code, if no module does"
        return f"{text}of what uses that output{where}.{scene.rounding_words()}"


def _output(scene: Scene) -> int:
    """Checksum in run a of the output whose gradient it is; 0 where that is not on record."""
    step, site = scene.step, scene.site
    outputs = [
        u
        for phase in (Phase.FORWARD, Phase.EVAL)
        for u in step.of_call(phase, Kind.OUTPUT, site.fqn, site.call)
        if step.alignment.path[u] == site.path
    ]
    return (scene.table.checksum(outputs[0], "a") or 0) if outputs else 0


def _taken_by_no_module(scene: Scene) -> bool:
    """Whether no module is given this output in run a, by its checksum; False where that is not on record."""
    step, checksum = scene.step, _output(scene)
    if not checksum or step.comparison.modules_chosen or Kind.INPUT not in step.comparison.kinds:
        return False
    given = step.of(Kind.INPUT, frozenset({Phase.FORWARD}))
    return all(scene.table.checksum(int(union), "a") != checksum for union in given)


def _is_all_of_the_model(scene: Scene) -> bool:
    """Whether the output is all that the whole model gives, by its checksum: else its forward code may use it, too."""
    root = scene.site.fqn.partition(".")[0]
    given = scene.step.of(Kind.OUTPUT, frozenset({Phase.FORWARD, Phase.EVAL}), root).tolist()
    return bool(given) and all(scene.table.checksum(union, "a") == _output(scene) for union in given)


_NO_MULTIPLE = 1e-2


class Gradient(Reason):
    """A parameter's gradient differs when the optimizer sees it, although the backward pass agrees.

    The cause is clipping, unscaling, accumulation, zero_grad, or the reduction over ranks.
    """

    word = "gradient"
    place = "clipping, unscaling, accumulation, zero_grad or a change of the gradient by hand"
    kinds = frozenset({Kind.GRAD})
    weights: ClassVar = {"hyperparameter": 0.3, "optimizers": 0.3, "scalers": 0.96}
    names = re.compile(r"clip|accum|scale|zero|norm|amp|micro", re.IGNORECASE)

    def applies(self, step: Step, position: int) -> Cause | None:
        """It comes from the forward pass, the loss and the backward pass of the step."""
        site, order = step.sites[position], step.order_at(position)
        upstream = step.differs_before(order, PASSES | {Phase.START}) or step.rng_differs() or step.carried.params
        if upstream or not site.fqn:
            return None
        passes = self.rests_on(step, position)
        if those(passes, Known.UNSEEN) and stale_side(step, position):
            passes = [replace(fact, needed=False) for fact in passes]  # the values alone tell the cause
        return self.cause(*passes)

    def where(self, module: str = "", scene: Scene | None = None, *, last: bool = True) -> str:
        """What may have been done to it, without what the records exclude; `last` where nothing follows in the list."""
        del module
        gone = frozenset[Handling]() if scene is None else excluded(scene)
        names = [handling.words for handling in Handling if handling not in gone]
        if Handling.CLIPPING in gone:
            names.insert(0, "clipping by value")
        if not last:
            return ", ".join(names)
        return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]

    def sentence(self, scene: Scene) -> str:
        """What was done to it, where the values tell."""
        first = scene.first
        reduced = summed(scene)
        if reduced:
            return reduced
        when = f", in evaluation {first.site.call} of the optimizer's closure" if first.site.call else ""
        seen = f", as the optimizer sees it{when}," if first.site.phase is Phase.OPTIMIZER else ""
        stored = _sparse_sides(scene)
        if len(stored) == 1:
            owner = user_of(scene)
            form = f"is sparse in {stored} and dense in {OTHER[stored]}, which are not compared with one another"
            how = f"how {owner or 'the script'} itself uses the parameter{attribute_words(scene, owner)}"
            return f"the gradient of {first.site.fqn}{seen} {form}; {scene.the_cause_is} {how}."
        text = f"the gradient of {first.site.fqn}{seen} differs{how_far(first)}"
        side, share = stale_share(scene.step, scene.position)
        if side:
            before = "evaluation" if first.site.call else "step"
            times, where = share_of_ranks(scene.runs[side == "b"], share)
            old = f"plus {times}that of the {before} before: zero_grad is missing or late {where}in {side}"
            return f"{text}; in {side} it is the other run's gradient {old}."
        in_module = _use_in_module(scene)
        if first.scale is not None:
            words = reduction_words(scene)
            if words:
                factor = f"b is {first.scale:.6g} x a: {words}"
                return f"{text}; {factor}; {scene.the_cause_is} averaging over ranks or batches, clipping or unscaling."
            text += scene.scaled
            alone = no_multiples(scene)
            if alone:
                place = f"its reduction over the ranks, {self.place}" if scene.runs[1].world_size > 1 else self.place
                more, them = (f" and {count(len(alone) - 1, 'more')}", "them") if len(alone) > 1 else ("", "it")
                return (
                    f"{text}, as if clipped by the norm of all gradients after another one changed; that of "
                    f"{alone[0]}{more} is no such multiple. The likely cause is what is done to {them}: {place}."
                )
            if not excluded(scene) >= TOGETHER:
                last = in_module or ", or their order"
                return f"{text}; {scene.the_cause_is} clipping, unscaling, averaging over accumulated batches{last}."
        if scene.rounding and Handling.CLIPPING in excluded(scene) and owner_of(first.site.fqn):
            return f"{text}; {_rounded(scene)}"
        in_module = in_module or ", or how the loss code uses the parameters (a penalty)"
        place = self.where(scene=scene, last=False)
        if max(run.world_size for run in scene.runs) > 1:
            place = f"its reduction over the ranks, {place}"
        return f"{text}; {scene.the_cause_is} {place}{in_module}.{scene.rounding_words()}"

    def evidence(self, scene: Scene) -> list[str]:
        """How many gradients differ."""
        differ, recorded = differing_gradients(scene)
        alone = ", by no common factor: nothing clipped, unscaled or averaged them together"
        how = alone if excluded(scene) >= TOGETHER else ""
        lines = [f"{differ} of {recorded} gradients differ in this step{how}."]
        words = reduction_words(scene) if summed(scene) else ""
        return [f"b is {scene.first.scale:.6g} x a: {words}.", *lines] if words else lines


def _rounded(scene: Scene) -> str:
    """That a gradient which was not rescaled with the others was rounded otherwise where it was computed."""
    fqn = owner_of(scene.site.fqn)
    owners = [tree[fqn].module_class for tree in scene.step.modules if fqn in tree]
    place = f"{fqn} ({owners[0]})" if owners else fqn
    return f"judging by its size, that is rounding in the backward pass of {place}{attribute_words(scene, fqn)}."


def no_multiples(scene: Scene) -> list[str]:
    """Parameters whose gradients differ in the step of the first, but not by its factor, in order; few of all, or none.

    One norm clips all gradients by one factor: those changed before it show.
    """
    step, first = scene.step, scene.first
    differ, recorded = differing_gradients(scene)
    if first.scale is None or differ < recorded:
        return []
    table = step.table
    others, multiples = [], 0
    for site, union in zip(step.sites, step.divergences.site.tolist(), strict=True):
        if (site.kind, site.phase, site.call) != (Kind.GRAD, scene.site.phase, scene.site.call):
            continue
        sketches = table.sketches(union)
        if sketches is None:
            return []
        a, b = sketches
        rest = float(np.linalg.norm(b - first.scale * a))
        if rest > _NO_MULTIPLE * float(np.linalg.norm(b)):
            others.append(site.fqn)
        else:
            multiples += 1
    return others if len(others) < multiples else []


def _use_in_module(scene: Scene) -> str:
    """That the code of the parameter's module may compute another gradient for it, as the end of a list.

    No hook sees that gradient before the optimizer does, nor that of a penalty. What is done to gradients is done to
    all of them, as a rule.
    """
    owner = user_of(scene)
    changed = attribute_words(scene, owner)
    differ, recorded = differing_gradients(scene)
    if not owner or (differ == recorded and not changed):
        return ""
    return f", or how {owner} itself {'' if changed else 'or the loss code '}uses the parameter{changed}"


def user_of(scene: Scene) -> str:
    """The module that computes with the parameter: the one that holds it or, where that never runs, one around it."""
    owner, step = owner_of(scene.site.fqn), scene.step
    if step.comparison.modules_chosen:  # which of them ran is not on record
        return owner
    running = frozenset({Phase.FORWARD, Phase.EVAL})
    ran = (name for name in (owner, *ancestors(owner)) if step.state[step.of(Kind.OUTPUT, running, name)].any())
    return next(ran, owner)
