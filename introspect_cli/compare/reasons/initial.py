"""A parameter or buffer differs before any training: initialisation, seed or checkpoint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import listed, random_state
from introspect_cli.compare.reasons.facts import BLIND, EQUAL, WITHIN
from introspect_cli.compare.reasons.words import apart, what
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts
    from introspect_cli.records import Summary

_TINY, _HUGE = 1e-20, 1e15
"""No initialisation makes a tensor whose largest value is beyond."""

TENSORS = frozenset({Kind.PARAM, Kind.BUFFER})


class Initial(Reason):
    """A tensor that a step finds for the first time."""

    word = "initial"
    place = "the initialisation"
    kinds = TENSORS
    weights: ClassVar = {"command": 0.9, "seeds": 1.0, "options": 0.95}
    names = re.compile(r"seed|init|hidden|embd|layer|head|width|depth|pretrained|checkpoint|resume", re.IGNORECASE)

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """It is drawn at random or loaded before anything recorded."""
        site = facts.sites[position]
        if site.phase is not Phase.START or one_sided(facts, position) or facts.was_there(site.fqn):
            return None
        return None if facts.rng_differs() or facts.carried.diverged else self.cause(random_state(facts))

    def sentence(self, scene: Scene) -> str:
        """How many of the initial tensors differ, and what the script ran elsewhere."""
        step = scene.first.step
        late = scene.is_first_step and step > 0  # training had begun when the captures did
        when = "when recording begins" if late else "before any training"
        when = when if scene.is_first_step else f"when it is first recorded, in step {step}"
        text = f"{what(scene.site)} differs {when}{apart(scene.first)}"
        text += _others(scene.facts)
        children = _children(scene)
        if children:
            return (
                f"{text}: the script runs {children} in a process of its own, which is not recorded and may have "
                "changed them; or the initialisation, seed or checkpoint is different."
            )
        a, b = scene.first.a, scene.first.b
        if a is not None and b is not None and a.layout.dtype != b.layout.dtype:
            return f"{text}: the model was cast, to {a.layout.dtype} in a and to {b.layout.dtype} in b."
        other = _exchanged(scene)
        if other:
            return (
                f"{text}: the initial values of {scene.site.fqn} and {other} are exchanged between a and b: they are "
                "initialised in a different order, or one is taken for the other."
            )
        if not scene.is_first_step:
            return f"{text}: it was built, copied or updated differently before."
        if late:
            return (
                f"{text}: the steps before step {step} {scene.absent}, so the runs diverged there or began with "
                "a different initialisation, seed or checkpoint."
            )
        wild = _wild(a, "a") or _wild(b, "b")
        if wild:
            return (
                f"{text}: {wild}, as in memory that was never written to (to_empty, torch.empty); or a different "
                "initialisation, seed or checkpoint."
            )
        return (
            f"{text}: a different initialisation or seed, a different checkpoint was loaded, or the script changed it "
            "before it was recorded."
        )


def _wild(summary: Summary | None, run: str) -> str:
    """What is odd about values that somebody is to have initialised; "" for nothing."""
    stats = summary.stats if summary is not None else {}
    if any(stats.get(name, 0) > 0 for name in ("nans", "posinfs", "neginfs")):
        return f"in {run} some of it is not finite"
    largest = max(abs(stats.get("min", 0.0)), abs(stats.get("max", 0.0)))
    return f"in {run} its largest value is {largest:.1e}" if 0 < largest < _TINY or largest > _HUGE else ""


def one_sided(facts: Facts, position: int) -> bool:
    """Whether one run only has the record."""
    return bool(facts.items.row_a[position] < 0 or facts.items.row_b[position] < 0)


def initial_tensors(facts: Facts) -> tuple[int, int]:
    """How many tensors differ at the start of the step, and how many were recorded there."""
    differ = sum(site.phase is Phase.START and site.kind in TENSORS for site in facts.sites)
    return differ, len(_states(facts))


def _states(facts: Facts) -> list[int]:
    """What is known of each tensor that was recorded at the start of the step."""
    starts = [u for kind in TENSORS for u in facts.unions(kind, frozenset({Phase.START}))]
    return [int(facts.state[union]) for union in starts if facts.state[union]]


def _others(facts: Facts) -> str:
    """What is known of the tensors that were recorded there beside the one that differs."""
    differ, total = initial_tensors(facts)
    states, others = _states(facts), total - 1
    if not others:
        return ""
    whole = f"the other {f'{others} tensors' if others > 1 else 'tensor'} recorded there"
    if differ > 1:
        some = whole if differ == total else f"{differ - 1} of {whole}"
        return f", as {'does' if differ == 2 else 'do'} {some}"
    parts = [(states.count(state), word) for state, word in _KNOWN]
    told = [(f"{number} ", f"{'is' if number == 1 else 'are'} {word}") for number, word in parts if number]
    if len(told) == 1:
        return f"; {whole} {told[0][1]}"
    return f"; of {whole}, {listed([''.join(pair) for pair in told])}"


_KNOWN = ((EQUAL, "equal"), (WITHIN, "within tolerance"), (BLIND, "not known"))


def _exchanged(scene: Scene) -> str:
    """The tensor whose initial values this one has in the other run, both ways."""
    facts, step = scene.facts, scene.step
    one, two = step.checksum(scene.union, "a"), step.checksum(scene.union, "b")
    for kind in TENSORS:
        for union in facts.unions(kind, frozenset({Phase.START})):
            if (step.checksum(int(union), "b"), step.checksum(int(union), "a")) == (one, two) and union != scene.union:
                return str(facts.alignment.fqn[union])
    return ""


def _children(scene: Scene) -> str:
    """What either script ran in processes of its own."""
    told = [run.manifest.get("children") for run in (scene.run_a, scene.run_b)]
    return ", ".join(dict.fromkeys(str(name) for names in told if isinstance(names, list) for name in names))


REASONS = (Initial(),)
