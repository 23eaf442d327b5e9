"""A record that only one run has: a module, a parameter, a call, a gradient that the other does not have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.reasons.base import Reason
from introspect_cli.compare.reasons.module import other_class
from introspect_cli.compare.reasons.operator import attention_back_ends
from introspect_cli.compare.reasons.script import more_batches
from introspect_cli.compare.reasons.update import (
    changed_optimizer,
    not_optimized,
    not_stepped,
    only_saves,
    other_optimizer,
    written_within,
)
from introspect_cli.compare.step.rests_on import Place, backward
from introspect_cli.compare.terms.evidence import Known
from introspect_cli.compare.terms.names import FORWARD, owner_of
from introspect_cli.compare.terms.result import Role, Size
from introspect_cli.compare.terms.sites import PHASES, kind_code, phase_code
from introspect_cli.compare.terms.table import EQUAL, OTHER
from introspect_cli.compare.terms.words import although, how_far, listed, often, what
from introspect_cli.compare.values import merge_words, tied_to
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.evidence import Cause

_TENSORS = frozenset({Kind.PARAM, Kind.BUFFER})


class OneSided(Reason):
    """Only one run has this value: the runs differ in modules, calls or names."""

    word = "structure"
    place = "the structure"
    priority = 30
    names = re.compile(r"layer|depth|head|accum|freeze|tie|batch|step|block|width|bias", re.IGNORECASE)

    def applies(self, step: Step, position: int) -> Cause | None:
        """What is the outermost thing that only this run has, and is this its first record?"""
        if not step.is_one_sided(position):
            return None
        subject, role = subject_of(step, position)
        return self.cause(role=role, subject=subject)

    def sentence(self, scene: Scene) -> str:
        """What only one run has and why, the most telling reason first."""
        clauses = (clause for kinds, clause in _CLAUSES if scene.site.kind in kinds)
        return next(text for clause in clauses if (text := clause(scene))) + _follows(scene)


def subject_of(step: Step, position: int) -> tuple[str, Role]:
    """The outermost thing that only the run with this record has, and whether this record is the first of it."""
    names, inside = step.one_sided("a" if step.divergences.row_a[position] >= 0 else "b")
    subject, head = step.sites[position].fqn, owner_of(step.sites[position].fqn)
    while head and head in names:
        subject, head = head, owner_of(head)
    if step.carried.diverged or inside.get(subject, position) != position:
        return subject, Role.PROPAGATED
    computed = step.alignment.kind[step.divergences.site[:position]] != kind_code(Kind.PRODUCT)  # files change nothing
    earlier = bool((computed & ~step.divergences.one_sided[:position]).any())
    other = step.alignment.names_b if step.divergences.row_b[position] < 0 else step.alignment.names_a
    return subject, Role.PROPAGATED if earlier and subject in other else Role.ORIGIN


def drawn(step: Step) -> int | None:
    """The first parameter that one run only has, where all tensors recorded before it are equal; None for none.

    A parameter that is drawn at random takes numbers from the generator, so that all that is drawn after it differs:
    tensors that are equal before it show that the seed was the same.
    """
    for position, site in enumerate(step.sites):
        if site.phase is not Phase.START or site.kind not in _TENSORS:
            continue
        if not step.is_one_sided(position):
            return None
        equal = (step.state == EQUAL) & (step.table.order_of < step.divergences.order[position])
        before = np.isin(step.of(Kind.PARAM, frozenset({Phase.START})), np.flatnonzero(equal))
        return position if before.any() else None
    return None


def _follows(scene: Scene) -> str:
    """That a random state differs because a parameter was drawn in one run only."""
    if drawn(scene.step) != scene.position or not scene.step.rng_differs():
        return ""
    names = [site.fqn for site in scene.step.sites if site.kind is Kind.RNG and site.phase is Phase.START]
    return (
        f" The parameters found before it are equal, so the random state of {' and '.join(names)}, which differs too, "
        "follows from it where it is drawn at random."
    )


# --- why one run alone has it: each of these says so, or gives "" where it is something else


def _operator(scene: Scene) -> str:
    line = f", at {scene.first.source}" if scene.first.source else ""
    return f"{scene.only_has}{line}: different operators run there in {scene.lacks}.{attention_back_ends(scene)}"


def _tied(scene: Scene) -> str:
    tied = {side: tied_to(tree.values(), scene.site.fqn) for side, tree in zip("ab", scene.step.modules, strict=True)}
    target = tied[scene.lacks]
    if not target or target == tied[scene.first.only]:
        return ""
    return f"the parameter {scene.site.fqn} exists only in {scene.first.only}; in {scene.lacks} it is tied to {target}."


def _losses(scene: Scene) -> str:
    one, two = scene.losses
    runs = f"backward runs {often(one)} in this step of a and {often(two)} in b"
    return f"{scene.only_has}: {runs}." if one != two else ""


def _no_forward(scene: Scene) -> str:
    forward = np.flatnonzero(scene.step.alignment.phase == phase_code(Phase.FORWARD)).tolist()
    lacking = _side_without(scene, forward) if Kind.OUTPUT in scene.step.comparison.kinds else ""
    what_it_does = "holds no forward pass, so its optimizer stepped once more for the same gradients."
    if lacking and scene.losses["ab".index(lacking)]:
        what_it_does = "trains on what was taken for an evaluation, in eval mode from another loader: not recorded."
    return f"{scene.only_has}: this step of {lacking} {what_it_does}" if lacking else ""


def _did_not_run(scene: Scene) -> str:
    alignment, fqn = scene.step.alignment, scene.site.fqn
    lacking = _side_without(
        scene, (union for union in alignment.by_fqn.get(fqn, []) if PHASES[alignment.phase[union]] in FORWARD)
    )
    if not lacking or _missing(scene):
        return ""
    return f"{scene.only_has}: {fqn} does not run in this step of {lacking}."


def _side_without(scene: Scene, unions: Iterable[int]) -> str:
    """The side that recorded none of these sites in the step, where the other recorded some; "" for none."""
    every = list(unions)
    recorded = [side for side in "ab" if scene.recorded(side, every)]
    return OTHER[recorded[0]] if len(recorded) == 1 else ""


def _merged(scene: Scene) -> str:
    """That a module is one of several which the other run has as one, and how the first value of both differs."""
    subject = scene.cause.subject
    structure = scene.outcome.structure
    for merge in structure.merges if structure is not None else ():
        parts, whole = tuple(map(owner_of, merge.parts)), owner_of(merge.whole)
        if subject not in {*parts, whole} or not _missing(scene):
            continue
        text = f"{merge_words(listed(parts), whole, merge.side)}."
        shared = scene.outcome.shared
        if shared is None or scene.narrowed:
            return text
        beyond = " by more than was let pass" if scene.tolerated else ""
        how = "by rounding" if shared.size is Size.ROUNDING else "by more than rounding"
        when = f" in step {shared.step}" if shared.step != scene.first.step else ""
        first = f" The first value of both runs that differs{beyond} is {what(shared.site)}{when}: {how}"
        return f"{text}{first if shared.rel_l2 is not None else first.rpartition(':')[0]}{how_far(shared)}."
    return ""


def _subject(scene: Scene) -> str:
    subject, side = scene.cause.subject, scene.first.only
    if not _missing(scene):
        if classes := other_class(scene, subject):
            return f"the structure differs: {subject} is {' in a and '.join(classes)} in b; {scene.only_has}."
        if scene.site.kind in _TENSORS:  # a module that both have may lack a tensor in one run
            subject = scene.site.fqn
        if not _missing(scene, subject):
            return ""
    tensor = scene.site.kind in _TENSORS and subject == scene.site.fqn
    kind = scene.site.kind.one.removeprefix("the ") if tensor else "module"
    replaced = other_class(scene, owner_of(subject))
    text, verb, of_class = "the structure differs:", "exists", ""
    if replaced:
        text += f" {owner_of(subject)} is {replaced[0]} in a and {replaced[1]} in b;"
    elif not tensor:
        trees = dict(zip("ab", scene.step.modules, strict=True))
        module = trees[side].get(subject)
        name = scene.first.module_class if subject == scene.site.fqn else ""
        name = name if module is None else module.module_class
        of_class = f" ({name})" if name not in {"", subject} else ""
        # it may be there and not be called
        verb = "runs" if subject in trees[scene.lacks] or (module is not None and not owner_of(subject)) else verb
    return f"{text} the {kind} {subject} {verb} only in {side}{of_class}."


def _missing(scene: Scene, name: str = "") -> bool:
    """Whether the run that lacks it has nothing at all of the subject, or of what is named, or inside it."""
    alignment, subject = scene.step.alignment, name or scene.cause.subject or scene.site.fqn
    names = alignment.names_a if scene.lacks == "a" else alignment.names_b
    return not any(name == subject or name.startswith(f"{subject}.") for name in names)


def _calls(scene: Scene) -> str:
    if not scene.calls:
        return ""
    name, one, two = scene.calls
    whole = not owner_of(name) and scene.losses[0] != scene.losses[1]
    whole = whole and one * scene.losses[1] == two * scene.losses[0]  # as many losses as batches
    why = "a different number of accumulated batches" if whole else "one run calls it more often"
    one_of, two_of = (sorted(_graded(scene, name)) for name in "ab")
    if one_of and two_of and not {*one_of} & {*two_of}:
        why = f"in a an optimizer that has {one_of[0]} steps first, in b one that has {two_of[0]}"
    return f"{scene.only_has}: {name} runs {often(one)} in this step of a and {often(two)} in b ({why})."


def _paths(scene: Scene) -> str:
    """What a call of a module is given, or gives, on either side, where both have something and not the same."""
    alignment, site, times = scene.step.alignment, scene.site, []
    given: list[list[str]] = []
    for side in "ab":
        unions = scene.recorded(side, scene.step.of_call(site.phase, site.kind, site.fqn, site.call))
        paths = [alignment.path[u] or "the value itself" for u in unions]
        given.append(paths)
        times.append(max((1 + int(path.partition("@")[2] or 0) for path in paths), default=0))
    if not all(times):
        return ""
    if times[0] != times[1]:  # one that each call of what is around it makes anew
        runs = " and ".join(f"{often(count)} in {side}" for count, side in zip(times, "ab", strict=True))
        return f"{scene.only_has}: it runs {runs} while what is around it runs once."
    shown = []
    for side, paths, others in zip("ab", given, reversed(given), strict=True):
        alone = [path for path in paths if path not in others or len(paths) <= _PATHS] or paths  # they tell most
        shown.append(f"{', '.join(alone[:_PATHS])}{', ...' * (len(alone) > _PATHS)} in {side}")
    of = "the batch" if site.kind is Kind.BATCH else "its output"
    text = "it is called with different arguments" if site.kind is Kind.INPUT else f"the structure of {of} is different"
    return f"{scene.only_has}: {text} ({'; '.join(shown)})."


# --- what an optimizer takes or keeps in one run alone


def _evaluations(scene: Scene) -> str:
    """That an optimizer with a closure evaluates the loss another number of times within its step."""
    if scene.site.phase is not Phase.OPTIMIZER or not scene.site.call or scene.losses[0] == scene.losses[1]:
        return ""
    names = list(dict.fromkeys([*scene.optimizers[0], *scene.optimizers[1]]))
    changes = [f"{change.name} {change.a} -> {change.b}" for change in scene.hyperparameters]
    why = f": {', '.join(changes)}" if changes else ", though its hyper-parameters are equal"
    if not names:  # with them, its hyper-parameters are on record
        names, why = ["the optimizer (its hyper-parameters were not recorded)"], ""
    one, two = map(often, scene.losses)
    return f"{listed(names)} evaluates the loss {one} within the step of a and {two} in b{why}."


def _unused(scene: Scene) -> str:
    """A parameter's gradient that one optimizer step alone takes."""
    seen, setup = f"{scene.only_has}, as the optimizer sees it", scene.setup
    one, two = scene.optimizers
    if not one or not two:  # then by whose parameters' gradients are there
        one, two = (setup.holders(side, _graded(scene, side)) for side in "ab")
    # each run has the optimizers that step in either here, and none of them steps in both
    both = {*one, *two}
    exchanged = one and two and not {*one} & {*two} and all(both <= held.keys() for held in setup.named.values())
    if one != two and (sorted(one) == sorted(two) or exchanged):
        by_run = f"{', '.join(one)} in a; {', '.join(two)} in b"
        return f"{seen}: the optimizers step in a different order ({by_run})."
    elsewhere = _another_steps(scene, {"a": one, "b": two})
    if elsewhere:
        return f"{seen}: {elsewhere}"
    (passed,) = backward(scene.step, Place(scene.site, np.inf))
    if passed.known not in {Known.EQUAL, Known.WITHIN}:
        return ""
    why = "it is frozen (requires_grad), was cleared between the backward pass and the optimizer step (zero_grad), or "
    why += "was replaced in the model after the optimizer was built"
    if not scene.recorded(scene.lacks, np.flatnonzero(scene.step.alignment.phase == phase_code(Phase.OPTIMIZER))):
        why = "no optimizer steps in this step (the script updates the parameters by hand, or not at all)"
    return f"{seen}{although([passed])}: in {scene.lacks} {why}."


def _another_steps(scene: Scene, steps: dict[str, list[str]]) -> str:
    """That a run's step is of an optimizer which has no such parameter, though another of its optimizers has it."""
    setup, here, there = scene.setup, steps[scene.first.only], steps[scene.lacks]
    held_here, held_there = ({*setup.holders(side, {scene.site.fqn})} for side in (scene.first.only, scene.lacks))
    if not {*here} & held_here or not there or not held_there or {*there} & held_there:
        return ""
    if here == there and setup.renumbered:
        shared = {name for held in here for name in setup.named[scene.first.only].get(held, ())}
        first = next((name for name in setup.named[scene.lacks].get(there[0], ()) if name not in shared), "")
        return (
            f"in {scene.first.only} the {here[0].partition('#')[0]} that has it steps here, and in {scene.lacks} the "
            f"one that has {first}."
        )
    return (
        f"{listed(here)} {'steps' if len(here) == 1 else 'step'} here in {scene.first.only}, and in {scene.lacks} "
        f"{listed(there)}, which {'does' if len(there) == 1 else 'do'} not have this parameter."
    )


def _graded(scene: Scene, side: str) -> set[str]:
    """The parameters whose gradients an optimizer sees in this step of a run."""
    gradients = scene.step.of(Kind.GRAD, frozenset({Phase.OPTIMIZER}))
    return {scene.step.alignment.fqn[union] for union in scene.recorded(side, gradients)}


def _no_gradient(scene: Scene) -> str:
    """That no gradient reaches it in the other run, and in which ways that happens."""
    ways = "frozen, detached, under no_grad, not part of the loss"
    if scene.site.kind is Kind.GRAD:
        ways += ", or replaced in the model after the optimizer was built"
        if scene.site.phase is Phase.OPTIMIZER and len(scene.setup.named[scene.lacks]) > 1:
            ways += ", or not of the optimizer that steps here"
    return f"{scene.only_has}: in {scene.lacks} no gradient reaches it ({ways})."


_PATHS = 4
_NO_STATE = "the optimizer of {} does not keep it, or does not step this parameter."
_UPDATED = frozenset({Kind.GRAD, Kind.OPTIMIZER_STATE})
_GRADIENTS = frozenset({Kind.GRAD, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT})
_ALL = frozenset(Kind)
_CLAUSES: tuple[tuple[frozenset[Kind], Callable[[Scene], str]], ...] = (
    (_ALL, only_saves),
    (frozenset({Kind.OP_OUTPUT}), _operator),
    (_UPDATED, not_optimized),
    (_UPDATED, changed_optimizer),
    (_ALL, _tied),
    (frozenset({Kind.LOSS}), _losses),
    (_ALL, _no_forward),
    (_ALL, _did_not_run),
    (_ALL, _merged),
    (_ALL, _subject),
    (_ALL, _evaluations),
    (_ALL, _calls),
    (frozenset({Kind.GRAD}), _unused),
    (_GRADIENTS, _no_gradient),
    (frozenset({Kind.OPTIMIZER_STATE}), other_optimizer),
    (frozenset({Kind.OPTIMIZER_STATE}), lambda at: f"{at.only_has}: {_NO_STATE.format(at.lacks)}"),
    (_ALL, _paths),
    (frozenset({Kind.BATCH}), more_batches),
    (_TENSORS, written_within),
    (frozenset({Kind.PARAM}), not_stepped),
    (_ALL, lambda scene: f"{scene.only_has}: the structure differs there."),
)
"""Asked in this order, each of records of these kinds; the first that says something is the reason."""
