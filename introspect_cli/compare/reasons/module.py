"""A module's output differs, though what went into it does not: its computation or its forward code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from introspect_cli.compare.reasons.base import KERNEL_WEIGHTS, Reason
from introspect_cli.compare.reasons.operator import memory_formats
from introspect_cli.compare.reasons.random_state import side_that_draws
from introspect_cli.compare.settings.differences import unequal
from introspect_cli.compare.step.rests_on import RESTS_ON, Place, rests_on
from introspect_cli.compare.step.tensor_at import untouched_side
from introspect_cli.compare.terms.evidence import RANDOM, Cause, Thing
from introspect_cli.compare.terms.names import THEN, ancestors, owner_of
from introspect_cli.compare.terms.sites import KINDS
from introspect_cli.compare.terms.table import OTHER
from introspect_cli.compare.terms.words import some
from introspect_cli.records import Kind, Phase, Site

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step.step import Step

_DRAW_NOTHING = {
    *("Linear", "Bilinear", "GELU", "ReLU", "ReLU6", "LeakyReLU", "SiLU", "Mish", "ELU", "Tanh", "Sigmoid", "Softmax"),
    *("LogSoftmax", "Softplus", "Hardswish", "Flatten", "Unflatten", "Identity", "PixelShuffle", "Upsample"),
}
_SORTS = tuple(f"{sort}{dims}" for sort in ("Norm", "Pool") for dims in ("1d", "2d", "3d"))


def _draws_nothing(module_class: str) -> bool:
    """Whether modules of a class draw no random number."""
    return (
        module_class in _DRAW_NOTHING
        or module_class.startswith(("Conv", "Embedding"))
        or module_class.endswith(("Norm", "Loss", *_SORTS))
    )


class Module(Reason):
    """A module whose inputs, parameters and buffers are equal computes a different output.

    The cause is its code, its options, its mode, or the kernel that ran.
    """

    word = "module"
    place = "this module's own computation"
    kinds = frozenset({Kind.OUTPUT})
    priority = 41
    weights: ClassVar = KERNEL_WEIGHTS
    names = re.compile(
        r"drop|eps|bias|act|attn|sdpa|flash|dtype|amp|[bf]p?16|compile|determin|thread|tf32", re.IGNORECASE
    )

    def applies(self, step: Step, position: int) -> Cause | None:
        """An output comes from the inputs, the parameters, the buffers and the random state."""
        site, order = step.sites[position], step.order_at(position)
        start = _fed_equally(step, site, order)
        if start is None or (start >= 0 and last_child(step, site.fqn, start, order)):
            return None
        return self.cause(*self.rests_on(step, position))

    def sentence(self, scene: Scene) -> str:
        """What inside the module it is, as far as the records show."""
        quiet = _draws_nothing(scene.first.module_class)
        taken = scene.computed_from if quiet else scene.cause.evidence
        return f"{scene.differs(taken)}{scene.scaled}; {_inside(scene)}"


class ForwardCode(Reason):
    """A module's own forward code, between the modules inside it or after them, computes something else."""

    word = "own_code"
    place = "the module's own forward code"
    kinds = frozenset({Kind.INPUT, Kind.OUTPUT})
    priority = 42
    weights: ClassVar = {"runtime": 0.7}
    names = re.compile("_sdp$")  # back ends of attention draw dropout in different ways

    def applies(self, step: Step, position: int) -> Cause | None:
        """It comes from the module's inputs, its tensors, and what the modules inside it gave before."""
        site, order = step.sites[position], step.order_at(position)
        if site.kind is Kind.OUTPUT:
            start = _fed_equally(step, site, order)
            after = last_child(step, site.fqn, start, order) if start is not None and start >= 0 else ""
            if not after or start is None:
                return None
            evidence = rests_on(step, Place(site, order, start=start), RESTS_ON[self.word])
            return self.cause(*evidence, module=site.fqn, after=after)
        running = parent_call(step, site.fqn, order)
        if running is None:
            return None
        parent, start, call = running
        if _is_fed(step, site.phase, parent, call, start, order - 0.25):
            return None
        after = last_child(step, parent, start, order)
        place = Place(Site(site.phase, Kind.INPUT, parent, call), order, of=parent, start=start if after else -1.0)
        return self.cause(*rests_on(step, place, RESTS_ON[self.word]), module=parent, after=after, before=site.fqn)

    def where(self, module: str = "", scene: Scene | None = None) -> str:
        """The forward code of the module, by its name."""
        del scene
        return f"{module or 'the module'}'s own forward code"

    def sentence(self, scene: Scene) -> str:
        """Between which of the modules inside."""
        cause, site = scene.cause, scene.site
        text = f"{scene.differs(named=site.kind is Kind.OUTPUT)}{scene.scaled}; "
        text += f"{scene.the_cause_is} in the forward code of {cause.module} itself, "
        if cause.before:
            text += f"between {cause.after} and {cause.before}" if cause.after else f"before {cause.before}"
        else:
            text += f"after {cause.after}"
        replaced, side = other_class(scene, cause.module), side_that_draws(scene, before=True)
        if replaced:
            text += f": its class is {replaced[0]} in a and {replaced[1]} in b"
        else:
            clauses = attribute_changes(scene, cause.module)
            clauses += [f"in {side} it draws random numbers there, in {OTHER[side]} it does not"] if side else []
            around = parent_call(scene.step, site.fqn, scene.first.sequence) if cause.before else None
            kept = f", or in what {cause.module} keeps from earlier calls"
            kept = kept if scene.steps_before or (around[2] if around else site.call) else ""
            text += f": {some(clauses, between='; ')}" if clauses else kept  # which is equal where it has buffers
        return f"{text}.{scene.rounding_words()}"


def _fed_equally(step: Step, site: Site, order: float) -> float | None:
    """When a module's call began, -1 where that is not known; None where something that went in differs."""
    inputs = step.of_call(site.phase, Kind.INPUT, site.fqn, site.call)
    start = step.sequence_of(inputs) if inputs else None
    if start is None:
        return None if step.anything_before(order) else -1.0
    return None if _is_fed(step, site.phase, site.fqn, site.call, start, order) else start


def _is_fed(step: Step, phase: Phase, fqn: str, call: int, start: float, order: float) -> bool:
    """Whether something differs that went into a module's call by a place of the sequence."""
    return (
        step.differs(phase, Kind.INPUT, fqn, call)
        or step.inside(fqn, start, order)
        or step.tensors_differ(fqn, order)
        or step.rng_differs()
    )


def parent_call(step: Step, fqn: str, order: float) -> tuple[str, float, int] | None:
    """The module that ran when another was called, which need not hold it: name, when its call began, call index."""
    around = step.calls.around(fqn, order)
    for parent in ancestors(fqn):
        calls = step.calls.running(parent, order)
        if calls is not None:
            return around if around is not None and around[1] > calls[0] else (parent, *calls)
    return around


def last_child(step: Step, fqn: str, low: float, high: float) -> str:
    """The last module that gave an output inside a call of `fqn`, between two places of the sequence; "" for none."""
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


def _inside(scene: Scene) -> str:
    """What inside the module the cause may be."""
    changed, inside = changes_within(scene), f"{scene.the_cause_is} inside this module: "
    if side := "" if changed else _identity_side(scene):
        zero = ", or a parameter of 0 adds nothing" if scene.cause.rests_on(Thing.PARAMETERS) else ""
        return f"{inside}in {side} it returns its input unchanged (switched off or in eval mode{zero})."
    if side := "" if changed else _frozen_buffers(scene):
        return f"its buffers do not change in {side}: it is in eval mode there."
    if other := scene.step.alignment.b_class.get(scene.union, ""):
        return f"{inside}its class is {scene.first.module_class} in a and {other} in b."
    a, b = scene.first.a, scene.first.b
    if a is not None and b is not None and a.layout.dtype != b.layout.dtype:
        return f"{inside}it computes in a different precision."
    if changed:
        return f"{inside}{some(changed, between='; ')}.{scene.rounding_words()}"
    if side := side_that_draws(scene):
        return f"{inside}in {side} it draws random numbers, in {OTHER[side]} it does not."
    text = f"{inside}its code, options, train/eval mode or kernel"
    random = scene.cause.rests_on(*RANDOM)
    if not _draws_nothing(scene.first.module_class) and any(fact.thing is Thing.RANDOM_AT_START for fact in random):
        text += "; or, if it draws random numbers, different ones were drawn before it in this step"
    if scene.steps_before and scene.cause.rests_on(Thing.PARAMETERS):
        text += "; or its parameters changed after they were recorded (.data, numpy)"
    if formats := memory_formats(scene):
        text += f"; {' and '.join(formats[:2])}, which may choose another kernel"
    return f"{text}.{scene.rounding_words()}"


def _identity_side(scene: Scene) -> str:
    """The side on which a module's output is its input, where that is so on one side only."""
    site, step = scene.site, scene.table
    inputs = scene.step.of_call(site.phase, Kind.INPUT, site.fqn, site.call)
    same = [
        side
        for side in ("a", "b")
        if any(step.checksum(u, side) == step.checksum(scene.union, side) is not None for u in inputs)
    ]
    return same[0] if len(same) == 1 else ""


def other_class(scene: Scene, name: str) -> tuple[str, ...]:
    """The class of a module in a and in b, where that is another one; none else."""
    classes = tuple(tree[name].module_class for tree in scene.step.modules if name in tree)
    return classes if len(set(classes)) > 1 and owner_of(name) else ()


def attribute_changes(scene: Scene, fqn: str = "") -> list[str]:
    """How a module, that of the record unless named, is set up differently: `eps 1e-05 -> 0.001`, `eval mode in b`."""
    one, two = (tree.get(fqn or scene.site.fqn) for tree in scene.step.modules)
    if one is None or two is None or not (one.attributes and two.attributes):
        return []
    a, b = dict(one.attributes), dict(two.attributes)
    modes, changes = {"True": "train mode", "False": "eval mode"}, list[str]()
    sources = [settings.get("sources") for settings in scene.documents]
    edited = all(sources) and len({*map(str, sources)}) > 1  # what changed code sets says no more than that it changed
    for name, _, _ in unequal(a, b):
        if name == "training":
            words = [THEN.join(modes.get(text, "?") for text in each.get(name, "").split(THEN)) for each in (a, b)]
            changes.insert(0, f"{words[0]} in a, {words[1]} in b")
        elif name not in a or name not in b:
            changes += [] if edited else [f"{name} {a.get(name, b.get(name))}, only in {'a' if name in a else 'b'}"]
        else:
            changes.append(f"{name} {a[name]} -> {b[name]}")
    return changes


def changes_within(scene: Scene) -> list[str]:
    """How a module is set up differently, or those inside it whose outputs are not on record."""
    return attribute_changes(scene) or [
        f"{each} of {name}" for name in scene.unseen_inside for each in attribute_changes(scene, name)
    ]


def attribute_words(scene: Scene, fqn: str) -> str:
    """How a module is set up differently, in brackets after a blank, for the middle of a sentence; "" for alike."""
    changed = attribute_changes(scene, fqn)
    return f" ({some(changed, between='; ')})" if changed else ""


def changes_of_losses(scene: Scene) -> list[str]:
    """How loss functions that are objects are set up differently: `CrossEntropyLoss: label_smoothing 0.0 -> 0.1`."""
    one, two = scene.step.modules
    losses = [name for name in one if name in two and one[name].module_class.endswith(("Loss", "Criterion"))]
    return [f"{name}: {changed}" for name in losses for changed in attribute_changes(scene, name)]


def _frozen_buffers(scene: Scene) -> str:
    """The side where the buffers of a module stay as they are in the step, where the other's change."""
    trees = (tree.get(scene.site.fqn) for tree in scene.step.modules)
    if any(module is not None and "training" in dict(module.attributes) for module in trees):
        return ""  # else another mode would be among its changes
    for index, site in enumerate(scene.step.sites):
        own, number = owner_of(site.fqn) == scene.site.fqn, int(scene.step.divergences.site[index])
        if site.kind is Kind.BUFFER and own and (side := untouched_side(scene.table, scene.step.before, number)):
            return side
    return ""
