"""The cause lies before the step, or further up: tensors that differ at its start, and what the records do not show.

A tensor is initialised differently, or changed by no optimizer step; a checkpoint did not restore it; something that
went in was not recorded, or differs too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from introspect_cli.compare.reasons.base import Reason, reason_named
from introspect_cli.compare.reasons.copies import with_copies
from introspect_cli.compare.reasons.module import Module, attribute_changes, changes_of_losses, changes_within
from introspect_cli.compare.reasons.structure import subject_of
from introspect_cli.compare.settings.beginning import filled, filled_on_ranks
from introspect_cli.compare.step.rests_on import updates_by_hand
from introspect_cli.compare.terms.evidence import Cause, Known, answer, those
from introspect_cli.compare.terms.result import Role, Size
from introspect_cli.compare.terms.table import EQUAL, NOT_SEEN, OTHER, WITHIN
from introspect_cli.compare.terms.words import how_far, listed, some, thing, what
from introspect_cli.records import Kind, Phase, perturbed_by

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step.step import Step

TENSORS = frozenset({Kind.PARAM, Kind.BUFFER})


class Initial(Reason):
    """A parameter or buffer differs before any training: its initialisation, or the checkpoint that it came from."""

    word = "initial"
    place = "the initialisation"
    kinds = TENSORS
    weights: ClassVar = {"command": 0.9, "seeds": 1.0, "options": 0.95, "checkpoints": 0.97}
    names = re.compile(r"seed|init|hidden|embd|layer|head|width|depth|pretrained|checkpoint|resume", re.IGNORECASE)

    def is_fed(self, step: Step, position: int) -> bool:
        """It is drawn at random or loaded before anything recorded."""
        site = step.sites[position]
        if site.phase is not Phase.START or step.is_one_sided(position) or step.was_there(site.fqn):
            return True
        return step.rng_differs() or step.carried.diverged

    def sentence(self, scene: Scene) -> str:
        """How many of the initial tensors differ, and what the script ran elsewhere."""
        step = scene.first.step
        late = scene.is_first_step and step > 0  # training had begun when the captures did
        when = "when recording begins" if late else "before any training"
        when = when if scene.is_first_step else f"when it is first recorded, in step {step}"
        text = f"{what(scene.site)} differs {when}{how_far(scene.first)}"
        return _why(scene, text, late=late) + _tied(scene) + _others(scene.step)


def _why(scene: Scene, text: str, *, late: bool) -> str:
    """What made the tensor differ, as far as the records tell; `text` says that it does."""
    seeds = [perturbed_by(run.manifest) for run in scene.runs]
    if seeds[0] != seeds[1] and scene.is_first_step and scene.first.size is not Size.MORE:
        moved = [f"--perturb {seed} in {name}" for seed, name in zip(seeds, "ab", strict=True) if seed is not None]
        return f"{text}: {listed(moved)} moved the initial parameters by one rounding."
    children = [run.manifest.get("children", []) for run in scene.runs]
    if any(children):
        those = ", ".join(dict.fromkeys(str(name) for names in children for name in names))
        return (
            f"{text}; the cause may be that the script runs {those} in a process of its own, which is not "
            "recorded and may have changed them; or the initialisation, seed or checkpoint is different."
        )
    a, b = scene.first.a, scene.first.b
    if a is not None and b is not None and a.layout.dtype != b.layout.dtype:
        return f"{text}; the model was cast, to {a.layout.dtype} in a and to {b.layout.dtype} in b."
    if a is not None and b is not None and a.layout.shape != b.layout.shape:
        return f"{text}; the model is built with other sizes."
    if scene.is_first_step and scene.first.size is Size.ROUNDING:
        return f"{text}. No other seed makes so small a difference; it was computed, stored or loaded in another way."
    starts = (int(union) for kind in TENSORS for union in scene.step.of(kind, frozenset({Phase.START})))
    other = scene.exchanged_with(starts)
    if other is not None:
        both = f"{scene.site.fqn} and {scene.step.alignment.fqn[other]}"
        return (
            f"{text}; the initial values of {both} are exchanged between a and b. They are initialised in a different "
            "order, or one is taken for the other."
        )
    if not scene.is_first_step:
        return f"{text}: it was built, copied or updated differently before."
    if late:
        return (
            f"{text}. The steps before step {scene.first.step} {scene.absent}, so the runs diverged there or began "
            "with a different initialisation, seed or checkpoint."
        )
    owner = scene.site.fqn.rpartition(".")[0]
    setup = attribute_changes(scene, owner) if scene.site.kind is Kind.BUFFER else []
    if setup:
        return f"{text}; the cause may be that {owner} is set up differently: {listed(setup)}."
    drawn, side = "", with_copies(scene.first)
    if side:
        drawn = filled_on_ranks(scene.runs[side == "b"], side, scene.site.fqn)
    drawn = drawn or filled(scene.runs, scene.first.rank, scene.site.fqn)
    if drawn:
        return f"{text}: {drawn}."
    return (
        f"{text}; the cause is a different initialisation or seed, a different checkpoint, or a change by the "
        "script before it was recorded."
    )


def initial_tensors(step: Step) -> tuple[int, int]:
    """How many tensors differ at the start of the step, and how many were recorded there."""
    differ = sum(site.phase is Phase.START and site.kind in TENSORS for site in step.sites)
    return differ, len(_states(step))


def _states(step: Step) -> list[int]:
    """What is known of each tensor that was recorded at the start of the step."""
    starts = [u for kind in TENSORS for u in step.of(kind, frozenset({Phase.START}))]
    return [int(step.state[union]) for union in starts if step.state[union]]


def _others(step: Step) -> str:
    """What is known of the tensors that were recorded there beside the one that differs."""
    differ, total = initial_tensors(step)
    states, others = _states(step), total - 1
    if not others:
        return ""
    whole = f"other {f'{others} tensors' if others > 1 else 'tensor'} recorded there"
    if differ > 1:
        some = "The" if differ == total else f"{differ - 1} of the"
        return f" {some} {whole} {'differs' if differ == 2 else 'differ'}, too."
    parts = [(states.count(state), word) for state, word in _KNOWN]
    clauses = [(f"{number} ", f"{'is' if number == 1 else 'are'} {word}") for number, word in parts if number]
    if len(clauses) == 1:
        return f" The {whole} {clauses[0][1]}."
    return f" Of the {whole}, {listed([''.join(pair) for pair in clauses])}."


def _tied(scene: Scene) -> str:
    """Which module of both runs has this parameter as its own in one of them; "" for none."""
    for tree, other, side in zip(scene.step.modules, scene.step.modules[::-1], "ab", strict=True):
        for fqn in sorted(tree.keys() & other.keys()):
            for name, target in sorted(tree[fqn].tied.items() - other[fqn].tied.items()):
                if target == scene.site.fqn:
                    return f" {fqn}.{name} is tied to it in {side}, and not in {OTHER[side]}."
    return ""


_KNOWN = ((EQUAL, "equal"), (WITHIN, "within tolerance"), (NOT_SEEN, "not known"))


class Outside(Reason):
    """A parameter or buffer changed between two steps, and not by an optimizer step."""

    word = "outside"
    place = "a change outside of an optimizer step"
    kinds = TENSORS
    weights: ClassVar = {"checkpoints": 0.97}
    priority = 20

    def applies(self, step: Step, position: int) -> Cause | None:
        """The tensor was there before, and what the step before left of it is on record."""
        site = step.sites[position]
        if site.phase is not Phase.START or not step.was_there(site.fqn):
            return None
        if step.is_one_sided(position):
            subject, role = subject_of(step, position)
            return None if step.gap else self.cause(role=role, subject=subject)
        if step.rng_differs() or step.carried.diverged or step.gap:
            return None
        return self.cause()

    def sentence(self, scene: Scene) -> str:
        """In which run, and between which records."""
        first = scene.first
        differ, _ = initial_tensors(scene.step)
        more = f"{differ - 1} more tensor{'s' * (differ > 2)}" if differ > 1 else ""
        again = bool(first.site.call)  # it was recorded in this step before
        step, when = f"step {first.step - (not again)}", "later in the step" if again else "when the step begins"
        if first.only:
            side = first.only
            were = f", as {'was' if differ == 2 else 'were'} {more}" if more else ""
            left = "was recorded before" if again else f"{step} left"
            return (
                f"{what(first.site)} was changed outside of an optimizer step in {side} only{were}: {when} it is not "
                f"what {left} ({_ways(scene)})."
            )
        do = f", as {'does' if differ == 2 else 'do'} {more}" if more else ""
        text = f"{what(first.site)} differs {when}{how_far(first)}"
        if scene.union in scene.step.table.left:  # what the step before left is on record in one run alone
            hand = [side for side, by_hand in zip("ab", scene.step.comparison.by_hand, strict=True) if by_hand]
            alone = f" No optimizer steps in {hand[0]}." if hand else ""
            update = f"the update of {step} is different, or something changed it after{_gradient(scene, step)}"
            return f"{text}{do}: {update}.{alone}"
        if updates_by_hand(scene.step):
            also = f" So {'does' if differ == 2 else 'do'} {more}." if more else ""
            return (
                f"{text}, although {scene.all_before}; the script updates it by hand after the backward pass of "
                f"{step}, {_rule(scene)}. No optimizer steps in these runs.{also}"
            )
        return (
            f"{text}{do}, although {scene.all_before}; it was changed outside of an optimizer step ({_ways(scene)}) "
            f"after {step} was recorded."
        )


def _ways(scene: Scene) -> str:
    """How a tensor changes without an optimizer."""
    ways = "loading a checkpoint, a moving average, copying, in-place code"
    return f"an evaluation in train mode, {ways}" if scene.site.kind is Kind.BUFFER else ways


def _rule(scene: Scene) -> str:
    """What of an update by hand may be different, given whether the gradient of the step before is on record."""
    step = scene.step
    gradients = step.of(Kind.GRAD, frozenset({Phase.BACKWARD}), scene.site.fqn)
    if step.state_before is not None and answer(step.state_before[gradients], every=True) is Known.EQUAL:
        return "with a different learning rate or rule (its gradient there is equal)"
    return "with a different gradient (clipping, scaling), learning rate or rule"


def _gradient(scene: Scene, number: str) -> str:
    """What is known of the gradient that the update before was made of; "" for nothing."""
    step = scene.step
    if step.state_before is None:
        return ""
    gradients = step.of(Kind.GRAD, frozenset({Phase.BACKWARD, Phase.OPTIMIZER}), scene.site.fqn)
    equal = answer(step.state_before[gradients], every=True) is Known.EQUAL
    return f"; its gradient in {number} is equal" if equal else ""


# --- where the records do not show the cause, or it lies elsewhere


class Gap(Reason):
    """Not everything that went in was recorded, so the cause cannot be named.

    The sentence lists what is missing and which causes remain.
    """

    word = "gap"
    priority = 21
    weights: ClassVar = {"scalers": 0.6}

    def applies(self, step: Step, position: int) -> Cause | None:
        """Most gaps are other reasons that lack evidence; this one is of tensors after steps that were not recorded."""
        site = step.sites[position]
        if site.phase is not Phase.START or not step.gap or step.carried.diverged or step.rng_differs():
            return None
        if site.kind not in TENSORS | {Kind.OPTIMIZER_STATE} or not step.was_there(site.fqn):
            return None
        return self.cause(role=Role.PROPAGATED)

    def sentence(self, scene: Scene) -> str:
        """What is known, and between which records it happened."""
        cause, site = scene.cause, scene.site
        if not cause.instead:
            differ, _ = initial_tensors(scene.step)
            more = f", as {'does' if differ == 2 else 'do'} {differ - 1} more" if differ > 1 else ""
            text = f"{what(site)} differs when the step begins{how_far(scene.first)}{more}"
            return f"{text}. {_between(scene, 'before')}"
        unseen = those(cause.evidence, Known.UNSEEN)
        text = scene.differs([fact for fact in cause.evidence if fact.known is not Known.UNSEEN])
        lacks = "is not on record" if scene.dropped else "was not recorded"
        lacks += f" ({listed([thing(fact)[0] for fact in unseen])})"
        place = reason_named(cause.instead).where("" if cause.module == site.fqn else cause.module, scene)
        changed = changes_within(scene) if cause.instead == Module.word else []
        changed += changes_of_losses(scene) if site.kind is Kind.LOSS else []
        place += f" ({some(changed, between='; ')})" if changed else ""
        if scene.step.gap:
            return f"{text}; {scene.the_cause_is} {place}, or lies earlier or in what {lacks}. {_between(scene, 'by')}"
        text = f"{text}; {scene.the_cause_is} {place}, or lies in what {lacks}."
        return text if site.phase is Phase.START else text + scene.rounding_words()


def _between(scene: Scene, until: str) -> str:
    """Between which recorded steps the runs diverged; `until` is `before` or `by` the step at hand."""
    now = scene.first.step
    earlier = scene.compared[scene.compared < now]
    if not len(earlier):
        return f"The steps before step {now} {scene.absent}: the runs diverged {until} step {now}."
    last = int(earlier[-1])
    steps = range(last + 1, now)
    names = (
        f"steps {steps[0]} {'and' if len(steps) == 2 else 'to'} {steps[-1]}" if len(steps) > 1 else f"step {now - 1}"
    )
    return f"The records of step {last} agree and {names} cannot be compared: the runs diverged {until} step {now}."


class Resumed(Reason):
    """A run that continues from a checkpoint began with values that the checkpoint did not restore."""

    word = "resumed"
    place = "the checkpoint"
    priority = 90

    def applies(self, step: Step, position: int) -> Cause | None:
        """One run began later, with other values than the other had then."""
        del position
        return self.cause(role=Role.PROPAGATED) if step.resumed else None

    def sentence(self, scene: Scene) -> str:
        """Which tensors were not restored."""
        carried = scene.step.carried
        unequal = (
            *sorted(carried.params | carried.buffers),
            *(f"{path} of {fqn}" for fqn, path in sorted(carried.states)),
        )
        return (
            f"{scene.differs(named=False)}, because the later run began with different values than the earlier run had "
            f"then ({', '.join(unequal[:3])}): the checkpoint did not restore them."
        )


class Propagated(Reason):
    """Something that went into this record differs already. The cause lies further up."""

    word = "propagated"
    priority = 100

    def applies(self, step: Step, position: int) -> Cause | None:
        """Always."""
        del step, position
        return self.cause(role=Role.PROPAGATED)

    def sentence(self, scene: Scene) -> str:
        """Where to look instead."""
        text = f"{scene.differs(named=False)}, but what went into it differs too or was not compared"
        earliest = scene.step.sites[0]
        if earliest != scene.site:
            return f"{text}. The first of all records that differ in this step is {what(earliest)}."
        return f"{text}, so the origin lies elsewhere (earlier, or outside of what was selected)."
