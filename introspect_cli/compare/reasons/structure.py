"""A record that only one run has: a module, a parameter, a call, a gradient that the other does not have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.evidence import Cause, Known
from introspect_cli.compare.join.sites import PHASES
from introspect_cli.compare.match.merged import merge_words
from introspect_cli.compare.match.names import FORWARD, owner_of
from introspect_cli.compare.reasons.base import Reason
from introspect_cli.compare.reasons.hyperparameters import (
    first_parameter,
    has_parameter,
    holders,
    names_in,
    other_optimizer,
    renumbered,
)
from introspect_cli.compare.reasons.module import other_class
from introspect_cli.compare.reasons.operator import attention_back_ends
from introspect_cli.compare.reasons.words import although, how_far, listed, often, what
from introspect_cli.compare.rests_on import Place, backward
from introspect_cli.compare.result import Role, Size
from introspect_cli.compare.table import EQUAL, Table
from introspect_cli.records import Kind, ModuleInfo, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step import Step


class Structure(Reason):
    """Whatever only one run has."""

    word = "structure"
    meaning = "Only one run has this value: the runs differ in modules, calls or names."
    place = "the structure"
    priority = 30
    names = re.compile(r"layer|depth|head|accum|freeze|tie|batch|step|block|width|bias", re.IGNORECASE)

    def applies(self, step: Step, position: int) -> Cause | None:
        """What is the outermost thing that only this run has, and is this its first record?"""
        if step.divergences.row_a[position] >= 0 and step.divergences.row_b[position] >= 0:
            return None
        subject, role = subject_of(step, position)
        return self.cause(role=role, subject=subject)

    def sentence(self, scene: Scene) -> str:
        """What only one run has and why, the most telling reason first."""
        first = scene.first
        side, other = ("a", "b") if first.b is None else ("b", "a")
        return next(text for look in _LOOKS if (text := look(scene, side, other))) + _follows(scene)


def subject_of(step: Step, position: int) -> tuple[str, Role]:
    """The outermost thing that only the run with this record has, and whether this record is the first of it."""
    first_of = step.one_sided("a" if step.divergences.row_a[position] >= 0 else "b")
    subject = step.sites[position].fqn
    head = owner_of(subject)
    while head and head in first_of.names:
        subject, head = head, owner_of(head)
    if step.carried.diverged or first_of.inside.get(subject, position) != position:
        return subject, Role.PROPAGATED
    earlier = bool(((step.divergences.row_a[:position] >= 0) & (step.divergences.row_b[:position] >= 0)).any())
    other = step.alignment.names_b if step.divergences.row_b[position] < 0 else step.alignment.names_a
    return subject, Role.PROPAGATED if earlier and subject in other else Role.ORIGIN


def drawn(step: Step) -> int | None:
    """The first parameter that one run only has, where all tensors found before it are equal; None for none.

    A parameter that is drawn at random takes numbers from the generator, so that all that is drawn after it differs:
    tensors that are equal before it show that the seed was the same.
    """
    for position, site in enumerate(step.sites):
        if site.phase is not Phase.START or site.kind not in {Kind.PARAM, Kind.BUFFER}:
            continue
        if step.divergences.row_a[position] >= 0 and step.divergences.row_b[position] >= 0:
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


def _operator(scene: Scene, side: str, other: str) -> str:
    if scene.site.kind is not Kind.OP_OUTPUT:
        return ""
    line = f", at {scene.first.source}" if scene.first.source else ""
    text = f"only {side} has {what(scene.site)}{line}: different operators run there in {other}."
    return text + attention_back_ends(scene)


def _tied(scene: Scene, side: str, other: str) -> str:
    trees = {"a": scene.modules[0], "b": scene.modules[1]}
    target = _tied_to(trees[other], scene.site.fqn)
    if not target or target == _tied_to(trees[side], scene.site.fqn):
        return ""
    return f"the parameter {scene.site.fqn} exists only in {side}; in {other} it is tied to {target}."


def _not_optimized(scene: Scene, side: str, other: str) -> str:
    if scene.site.kind not in {Kind.GRAD, Kind.OPTIMIZER_STATE}:
        return ""
    runs = {"a": scene.run_a, "b": scene.run_b}
    has = [has_parameter(runs[name].settings.get("optimizers"), scene.site.fqn) for name in (side, other)]
    if has != [True, False]:
        return ""
    return (
        f"only {side} has {what(scene.site)}, as the optimizer sees it: no optimizer that steps in {other} has this "
        "parameter."
    )


def _other_optimizer(scene: Scene, side: str, _other: str) -> str:
    if scene.site.kind not in {Kind.GRAD, Kind.OPTIMIZER_STATE}:
        return ""
    held = (scene.run_a.settings.get("optimizers"), scene.run_b.settings.get("optimizers"))
    changed = other_optimizer(*held, scene.site.fqn)
    return f"only {side} has {what(scene.site)} at this optimizer step: {changed}." if changed else ""


def _losses(scene: Scene, side: str, _other: str) -> str:
    one, two = scene.losses
    if one == two or scene.site.kind is not Kind.LOSS:
        return ""
    return f"only {side} has {what(scene.site)}: backward runs {often(one)} in this step of a and {often(two)} in b."


def _no_forward(scene: Scene, side: str, _other: str) -> str:
    forward = [
        name
        for name in ("a", "b")
        if any(PHASES[scene.step.alignment.phase[union]] is Phase.FORWARD for union in scene.table.rows_of(name))
    ]
    if len(forward) != 1:
        return ""
    lacking = "b" if forward == ["a"] else "a"
    return (
        f"only {side} has {what(scene.site)}: this step of {lacking} holds no forward pass, so its optimizer stepped "
        "once more for the same gradients."
    )


def _did_not_run(scene: Scene, side: str, other: str) -> str:
    lacking = _side_without_run(scene.table, scene.site.fqn)
    if not lacking or _missing(scene, other):
        return ""
    return f"only {side} has {what(scene.site)}: {scene.site.fqn} does not run in this step of {lacking}."


def _merged(scene: Scene, _side: str, other: str) -> str:
    """That a module is one of several which the other run has as one, and how the first value of both differs."""
    subject = scene.cause.subject
    for merge in scene.merges:
        parts, whole = tuple(map(owner_of, merge.parts)), owner_of(merge.whole)
        if subject not in {*parts, whole} or not _missing(scene, other):
            continue
        text = f"{merge_words(listed(parts), whole, merge.side)}."
        shared = scene.shared
        if shared is None or scene.narrowed:
            return text
        beyond = " by more than was let pass" if scene.tolerated else ""
        how = "by rounding" if shared.size is Size.ROUNDING else "by more than rounding"
        when = f" in step {shared.step}" if shared.step != scene.first.step else ""
        first = f" The first value of both runs that differs{beyond} is {what(shared.site)}{when}: {how}"
        return f"{text}{first if shared.rel_l2 is not None else first.rpartition(':')[0]}{how_far(shared)}."
    return ""


def _subject(scene: Scene, side: str, other: str) -> str:
    if not _missing(scene, other):
        return ""
    subject = scene.cause.subject
    tensor = scene.site.kind in {Kind.PARAM, Kind.BUFFER} and subject == scene.site.fqn
    kind = "parameter" if tensor and scene.site.kind is Kind.PARAM else "buffer" if tensor else "module"
    replaced = other_class(scene, owner_of(subject))
    if replaced:
        return (
            f"the structure differs: {owner_of(subject)} is {replaced[0]} in a and {replaced[1]} in b; the {kind} "
            f"{subject} exists only in {side}."
        )
    if tensor:
        return f"the structure differs: the {kind} {subject} exists only in {side}."
    trees = dict(zip("ab", scene.step.modules, strict=True))
    known = trees[side].get(subject)
    name = known.module_class if known is not None else scene.first.module_class if subject == scene.site.fqn else ""
    told = f" ({name})" if name not in {"", subject} else ""
    if subject in trees[other] or (known is not None and not owner_of(subject)):  # it may be there and not be called
        return f"the structure differs: the {kind} {subject} runs only in {side}{told}."
    return f"the structure differs: the {kind} {subject} exists only in {side}{told}."


def _evaluations(scene: Scene, _side: str, _other: str) -> str:
    """That an optimizer with a closure evaluates the loss another number of times within its step."""
    if scene.site.phase is not Phase.OPTIMIZER or not scene.site.call or scene.losses[0] == scene.losses[1]:
        return ""
    names = listed(list(dict.fromkeys([*scene.optimizers[0], *scene.optimizers[1]]))) or "the optimizer"
    changes = [f"{label} {a} -> {b}" for label, (a, b) in scene.hyperparameters.items()]
    why = f": {', '.join(changes)}" if changes else ", though its hyper-parameters are equal"
    one, two = map(often, scene.losses)
    return f"{names} evaluates the loss {one} within the step of a and {two} in b{why}."


def _calls(scene: Scene, side: str, _other: str) -> str:
    if not scene.calls:
        return ""
    name, one, two = scene.calls
    whole = not owner_of(name) and scene.losses[0] != scene.losses[1]
    why = "a different number of accumulated batches" if whole else "one run calls it more often"
    one_of, two_of = (sorted(_graded(scene, name)) for name in "ab")
    if one_of and two_of and not {*one_of} & {*two_of}:
        why = f"in a an optimizer that has {one_of[0]} steps first, in b one that has {two_of[0]}"
    return (
        f"only {side} has {what(scene.site)}: {name} runs {often(one)} in this step of a and {often(two)} in b ({why})."
    )


def _gradient(scene: Scene, side: str, other: str) -> str:
    if scene.site.kind not in {Kind.GRAD, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT}:
        return ""
    if scene.site.kind is Kind.GRAD:
        order = scene.optimizers if all(scene.optimizers) else _stepping(scene)
        if order[0] != order[1] and (sorted(order[0]) == sorted(order[1]) or _exchange_steps(scene, *map(set, order))):
            return (
                f"only {side} has {what(scene.site)}, as the optimizer sees it: the optimizers step in a different "
                f"order ({', '.join(order[0])} in a; {', '.join(order[1])} in b)."
            )
        elsewhere = _another_steps(scene, side, other, order)
        if elsewhere:
            return elsewhere
        (passed,) = backward(scene.step, Place(scene.site, np.inf))
        if passed.known in {Known.EQUAL, Known.WITHIN}:
            return (
                f"only {side} has {what(scene.site)}, as the optimizer sees it{although([passed])}: in {other} it "
                "was cleared between the backward pass and the optimizer step (zero_grad), or the parameter was "
                "replaced in the model after the optimizer was built."
            )
    ways = "frozen, detached, under no_grad, not part of the loss"
    if scene.site.kind is Kind.GRAD:
        ways += ", or replaced in the model after the optimizer was built"
    return f"only {side} has {what(scene.site)}: in {other} no gradient reaches it ({ways})."


def _another_steps(scene: Scene, side: str, other: str, order: tuple[list[str], list[str]]) -> str:
    """That a run's step is of an optimizer which has no such parameter, though another of its optimizers has it."""
    here = [order["ab".index(name)] for name in (side, other)]
    runs = {"a": scene.run_a, "b": scene.run_b}
    has = [holders(runs[name].settings.get("optimizers"), {scene.site.fqn}) for name in (side, other)]
    if not {*here[0]} & {*has[0]} or not here[1] or not has[1] or {*here[1]} & {*has[1]}:
        return ""
    if here[0] == here[1] and renumbered(
        scene.run_a.settings.get("optimizers"), scene.run_b.settings.get("optimizers")
    ):
        first = first_parameter(runs[other].settings.get("optimizers"), here[1][0])
        return (
            f"only {side} has {what(scene.site)}, as the optimizer sees it: in {side} the "
            f"{here[0][0].partition('#')[0]} that has it steps here, and in {other} the one that has {first}."
        )
    return (
        f"only {side} has {what(scene.site)}, as the optimizer sees it: {listed(here[0])} "
        f"{'steps' if len(here[0]) == 1 else 'step'} here in {side}, and in {other} {listed(here[1])}, which "
        f"{'does' if len(here[1]) == 1 else 'do'} not have this parameter."
    )


def _stepping(scene: Scene) -> tuple[list[str], list[str]]:
    """The optimizers that step in a and in b, by whose parameters' gradients are there."""
    one, two = (
        holders(run.settings.get("optimizers"), _graded(scene, side))
        for side, run in (("a", scene.run_a), ("b", scene.run_b))
    )
    return one, two


def _graded(scene: Scene, side: str) -> set[str]:
    """The parameters whose gradients an optimizer sees in this step of a run."""
    rows = scene.table.rows_of(side)
    return {scene.step.alignment.fqn[u] for u in scene.step.of(Kind.GRAD, frozenset({Phase.OPTIMIZER})) if u in rows}


def _exchange_steps(scene: Scene, a: set[str], b: set[str]) -> bool:
    """Whether each run has the optimizers that step in either here, and none of them steps in both."""
    every = (names_in(run.settings.get("optimizers")) for run in scene.runs)
    return bool(a and b) and not a & b and all(a | b <= names for names in every)


def _state(scene: Scene, side: str, other: str) -> str:
    if scene.site.kind is not Kind.OPTIMIZER_STATE:
        return ""
    text = f"only {side} has {what(scene.site)}"
    return f"{text}: the optimizer of {other} does not keep it, or does not step this parameter."


def _paths(scene: Scene, side: str, _other: str) -> str:
    paths = _other_paths(scene)
    if paths is None:
        return ""
    told = {Kind.INPUT: "it is called with different arguments", Kind.BATCH: "the structure of the batch is different"}
    text = told.get(scene.site.kind, "the structure of its output is different")
    return f"only {side} has {what(scene.site)}: {text} ({paths[0]} in a; {paths[1]} in b)."


def _else(scene: Scene, side: str, _other: str) -> str:
    if scene.site.kind is Kind.BATCH:
        return f"only {side} draws {what(scene.site)}: a different number of batches."
    return f"only {side} has {what(scene.site)}: the structure differs there."


_LOOKS = (
    _operator,
    _not_optimized,
    _other_optimizer,
    _tied,
    _losses,
    _no_forward,
    _did_not_run,
    _merged,
    _subject,
    _evaluations,
    _calls,
    _gradient,
    _state,
    _paths,
    _else,
)


def _tied_to(modules: list[ModuleInfo], fqn: str) -> str:
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


def _missing(scene: Scene, side: str) -> bool:
    """Whether a run has nothing at all of the subject or inside it."""
    alignment, subject = scene.step.alignment, scene.cause.subject or scene.site.fqn
    prefix = subject + "."
    names = alignment.names_a if side == "a" else alignment.names_b
    return not any(name == subject or name.startswith(prefix) for name in names)


def _other_paths(scene: Scene) -> tuple[str, str] | None:
    """What a call of a module is given, or gives, on either side, where both have something and not the same."""
    alignment, site = scene.step.alignment, scene.site
    paths = []
    for side in ("a", "b"):
        recorded = set(scene.table.rows_of(side))
        own = [u for u in scene.step.of_call(site.phase, site.kind, site.fqn, site.call) if u in recorded]
        paths.append([alignment.path[u] or "the value itself" for u in own])
    if not paths[0] or not paths[1]:
        return None
    shown = [", ".join(path[:4]) + (", ..." if len(path) > 4 else "") for path in paths]
    return shown[0], shown[1]


def _side_without_run(table: Table, fqn: str) -> str:
    """The side on which nothing of this module's forward pass was recorded in the step, though the other has some."""
    alignment = table.alignment
    ran = {
        side
        for side in ("a", "b")
        for union in alignment.by_fqn.get(fqn, [])
        if PHASES[alignment.phase[union]] in FORWARD and union in set(table.rows_of(side))
    }
    return "" if len(ran) != 1 else "b" if ran == {"a"} else "a"


REASONS = (Structure(),)
