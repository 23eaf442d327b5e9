"""What cutting a batch into microbatches makes of its losses.

Losses that are right for their own samples may count alike though they have more or fewer of them, be divided by more
than there are, or be those of modules that look at all samples of a microbatch together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.compare.terms.table import OTHER
from introspect_cli.compare.terms.words import how_far, listed, what
from introspect_cli.compare.wholes import Microbatch, Microbatches, microbatches, values_of
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step.step import Step
    from introspect_cli.records import ModuleInfo, Site

_CLOSE, _EXACT = 1e-3, 1e-4
_MOST_APART = 0.5
NORMS = re.compile(r"BatchNorm")
DRAWS = re.compile(r"Dropout|RReLU")

SplitFault = Callable[["Scene"], str]
"""What a split of the batch gets wrong, or changes by itself: the function that says it."""


class Cut(NamedTuple):
    """How a run takes the batch of the step.

    Attributes:
        of_ranks: microbatches of the step, of each rank.
        as_a_rule: those of most steps.
        ranks: how many ranks are read.
    """

    side: str
    of_ranks: list[list[Microbatch]]
    as_a_rule: Microbatches
    ranks: int

    @property
    def micro(self) -> list[Microbatch]:
        """Those of one rank."""
        return self.of_ranks[0]

    @property
    def usual(self) -> int:
        """How many there are in most steps."""
        return self.as_a_rule.usual

    @property
    def number(self) -> int:
        """How many microbatches there are, as far as is known."""
        return len(self.micro) or self.usual


def cuts(step: Step) -> tuple[Cut, Cut]:
    """Those of a and of b, where both have a split on record."""
    comparison, splits, table = step.comparison, step.comparison.splits, step.table
    assert splits is not None
    one, two = (
        Cut(side, microbatches(reader, root, number, rule), rule, reader.many)
        for side, reader, root, number, rule in (
            ("a", comparison.a, _name_in_a(step, splits.root), table.step, splits.a),
            ("b", comparison.b, splits.root, table.step_b, splits.b),
        )
    )
    return one, two


def of_losses(step: Step, position: int) -> SplitFault | None:
    """Losses that are right for their own samples and count alike, or are divided by more than there are."""
    splits = step.comparison.splits
    assert splits is not None
    one, two = _values(step, step.sites[position])
    a, b = cuts(step)
    for cut, parts, whole in ((b, two, one), (a, one, two)):
        number = len(parts)
        if not number or len(whole) != 1:
            continue
        if number < cut.usual and near(sum(parts) * cut.usual / number, whole[0], _EXACT):
            return partial(incomplete, side=cut.side, number=number)
        if number < 2:
            continue
        if near(sum(parts) * number, whole[0], _EXACT):
            return partial(_divided_again, side=cut.side, number=number)
        for by in ("samples", "tokens"):
            counts = [getattr(micro, by) for micro in chain.from_iterable(cut.of_ranks)]
            if len(counts) != number or not all(counts) or len(set(counts)) == 1:
                continue
            weighted = float(np.average(parts, weights=counts))
            if any(near(weighted * times, whole[0], _EXACT) for times in {1, number, cut.number, cut.usual}):
                return partial(_uneven, side=cut.side, counts=counts, by=by)
        together = _looking_at_all(step)
        if together and splits.assumed and _about(parts, whole[0]):
            return partial(_changed_by_itself, side=cut.side, parts=parts, whole=whole[0], modules=together)
    return None


def _about(parts: Sequence[float], whole: float) -> bool:
    """Whether losses may be those of parts of a batch, whether or not they are divided by how many there are."""
    return any(abs(value - whole) <= _MOST_APART * abs(whole) for value in (sum(parts), sum(parts) / len(parts)))


def _looking_at_all(step: Step) -> list[ModuleInfo]:
    """The modules that look at all samples of a microbatch together, and those that draw for each of them."""
    return [
        module
        for module in step.modules[0].values()
        if NORMS.search(module.module_class)
        or (DRAWS.search(module.module_class) and dict(module.attributes).get("p", "0") not in ("0", "0.0"))
    ]


def undivided(step: Step) -> SplitFault | None:
    """Losses of microbatches that are each as large as that of the batch, where no factor of the gradients shows it."""
    site = next((step.alignment.site(int(at)) for at in step.of(Kind.LOSS, frozenset({Phase.LOSS}))), None)
    one, two = _values(step, site) if site is not None else ([], [])
    for side, parts, whole in (("b", two, one), ("a", one, two)):
        if len(parts) > 1 == len(whole) and near(sum(parts) / len(parts), whole[0], _EXACT):
            return partial(_added_up, side=side, number=len(parts))
    return None


def _values(step: Step, site: Site) -> tuple[list[float], list[float]]:
    """The numbers at a site of all ranks and calls, of a and of b."""
    a, b = step.comparison.a, step.comparison.b
    of_runs = (
        values_of(a, replace(site, fqn=_name_in_a(step, site.fqn)), step.table.step),
        values_of(b, site, step.table.step_b),
    )
    one, two = ([*chain.from_iterable(of_ranks)] for of_ranks in of_runs)
    return one, two


def _name_in_a(step: Step, fqn: str) -> str:
    """What run a itself calls what is compared as `fqn`."""
    change = step.comparison.rename
    if change is None:
        return fqn
    return next((name for name in dict.fromkeys(step.comparison.a.sites.fqn) if change(name) == fqn), fqn)


def near(one: float, two: float, close: float = _CLOSE) -> bool:
    """Whether two numbers are one but for rounding."""
    return abs(one - two) <= close * max(abs(one), abs(two))


# --- in words


def incomplete(scene: Scene, side: str, number: int) -> str:
    """Fewer losses than usual, that are divided by as many as usual."""
    usual = cuts(scene.step)[side == "b"].usual
    value = "gradients" if scene.site.kind is Kind.GRAD else "losses"
    last = "microbatch" if number == 1 else f"{number} microbatches"
    return (
        f"{value} of {side} are {number / usual:.4g} x those of {OTHER[side]}, {what(scene.site)} first: the step has "
        f"the last {last} alone, and each loss is divided by {usual} there as well."
    )


def _added_up(scene: Scene, side: str, number: int) -> str:
    return (
        f"{what(scene.site)} differs{how_far(scene.first)}: of the losses of the {number} microbatches of {side}, none "
        f"is divided by {number} (their mean is the loss of {OTHER[side]}). So their gradients are added up, not "
        "averaged, unless something divides them later; clipping can hide the factor."
    )


def _divided_again(scene: Scene, side: str, number: int) -> str:
    return (
        f"{what(scene.site)} differs: the losses of the {number} microbatches of {side} add up to 1/{number} of the "
        f"loss of {OTHER[side]}. Each is divided by {number} twice: look for a division that the framework makes as "
        "well, or for a mean that is divided again."
    )


def _changed_by_itself(
    scene: Scene, side: str, parts: Sequence[float], whole: float, modules: Sequence[ModuleInfo]
) -> str:
    """A loss that splitting a batch changes, where only the number of losses says that one is split."""
    norm = next((module for module in modules if NORMS.search(module.module_class)), None)
    first = norm or modules[0]
    of_each = "takes its statistics over each of them" if norm else "draws random numbers for each of them"
    number, total = len(parts), sum(parts)
    added = ""
    if abs(total / number - whole) < abs(total - whole):
        added = (
            f" Each loss of {side} is about as large as that of {OTHER[side]}, not divided by {number}: unless "
            "something divides their gradients later, these are added up and not averaged."
        )
    return (
        f"{what(scene.site)} differs: {OTHER[side]} has one loss in this step, {side} has {number}. If these are of "
        f"microbatches of one batch (no batch is on record), {first.fqn} ({first.module_class}) {of_each}, which "
        f"changes the loss by itself, even where all else is right.{added}"
    )


def _uneven(scene: Scene, side: str, counts: list[int], by: str) -> str:
    """Means over uneven `counts` that count alike; `by` is what is counted: `tokens`, `samples`."""
    last = ""
    if by == "samples" and len(set(counts[:-1])) == 1 and counts[-1] < counts[0]:
        last = " (the last one is incomplete)"
    that = " that count" if by == "tokens" else ""
    cut = cuts(scene.step)[side == "b"]
    each, every = ("rank", "ranks") if len(cut.of_ranks) > 1 == cut.number else ("microbatch", "microbatches")
    return (
        f"{what(scene.site)} differs: in {side} each {each}'s loss is a mean over its own {by}, and these means "
        f"have equal weight, though the {every} have {listed([f'{number:,}' for number in counts])} {by}{that}{last}. "
        f"Weighted by these, the losses of {side} are that of {OTHER[side]}."
    )
