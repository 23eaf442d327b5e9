"""What cutting a batch into microbatches gets wrong, or changes by itself.

A gradient is a sum over samples, so that two splits of a batch give the same one, if the loss of each microbatch counts
as much as its samples do. What goes wrong shows as a factor (losses that are added up, not averaged), or as losses that
are right for their own samples and count alike though they have more or fewer of them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.reasons.base import Reason
from introspect_cli.compare.reasons.split_losses import (
    DRAWS,
    NORMS,
    SplitFault,
    cuts,
    incomplete,
    near,
    of_losses,
    undivided,
)
from introspect_cli.compare.step.rests_on import RESTS_ON, Place, rests_on
from introspect_cli.compare.terms.names import FORWARD
from introspect_cli.compare.terms.sites import kind_code
from introspect_cli.compare.terms.words import named, what
from introspect_cli.records import DRAWN_BEFORE, Kind, Phase
from introspect_cli.store.format.batch import fitted
from introspect_cli.texts import count

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.evidence import Cause

_CLOSE, _EXACT = 1e-3, 1e-4
_ROUND = 1e-5
"""How near to a number of three digits a norm is that clipping left."""


class Split(Reason):
    """A batch is cut into microbatches in another way, and that has an effect.

    Their losses are added up and not averaged, means over uneven numbers of tokens or samples count alike, the last
    step has fewer microbatches, gradients are clipped before all are added up, or the samples are others.
    """

    word = "split"
    place = "how the batch is cut into microbatches"
    kinds = frozenset({Kind.LOSS, Kind.GRAD, Kind.OUTPUT, Kind.INPUT, Kind.BATCH})
    priority = 4
    names = re.compile(r"accum|micro|batch|loss|reduc|clip|sync", re.IGNORECASE)

    def applies(self, step: Step, position: int) -> Cause | None:
        """Where both runs cut the same batch differently, and the values tell that it is that."""
        if step.anything_before(step.order_at(position)) or split_finding(step, position) is None:
            return None
        site = step.sites[position]
        edges = RESTS_ON[{Kind.GRAD: "gradient", Kind.LOSS: "loss"}.get(site.kind, "batch")]
        evidence = rests_on(step, Place(site, step.order_at(position)), edges)
        return self.cause(*(replace(fact, needed=False) for fact in evidence))

    def sentence(self, scene: Scene) -> str:
        """What it is, in which run, by which numbers."""
        finding = split_finding(scene.step, scene.position)
        assert finding is not None
        return finding(scene)

    def evidence(self, scene: Scene) -> list[str]:
        """How each run cuts the batch."""
        splits = scene.step.comparison.splits
        return [] if splits is None or not splits.differ else [f"a takes {splits.a.words}, b {splits.b.words}."]


# --- what it is


def split_finding(step: Step, position: int) -> SplitFault | None:
    """What a split of the batch made of a divergence; None where that is not seen."""
    splits, site = step.comparison.splits, step.sites[position]
    if splits is None or step.is_one_sided(position) or site.evaluates:
        return None
    if site.phase is Phase.FORWARD and site.kind in (Kind.INPUT, Kind.OUTPUT):
        finding = _by_itself(step, position)
        if finding is not None:
            return finding
    if not (splits.differ or (site.kind is Kind.LOSS and step.comparison.a.many != step.comparison.b.many)):
        return None
    if site.kind is Kind.GRAD and site.phase is Phase.OPTIMIZER:
        return _of_gradients(step)
    layout = step.comparison.a.layouts[int(step.table.a.layout[int(step.divergences.row_a[position])])]
    if site.kind is Kind.LOSS or (site.kind is Kind.OUTPUT and not layout.shape):
        return of_losses(step, position)
    if site.kind is Kind.BATCH or (site.kind is Kind.INPUT and site.fqn == splits.root):
        one, two = (sum(micro.samples for micro in cut.micro) * cut.ranks for cut in cuts(step))
        return _amount if one and two and one != two else None
    return None


def _by_itself(step: Step, position: int) -> SplitFault | None:
    """What no split of a batch leaves as it is: statistics over the batch, and random numbers for each sample."""
    site = step.sites[position]
    drew = [step.alignment.path[union] for union in step.of(Kind.RNG, FORWARD, site.fqn).tolist()]
    if site.kind is Kind.INPUT:
        return _drawn if any(path.endswith(DRAWN_BEFORE) for path in drew) else None
    module = step.modules[0].get(site.fqn) or step.modules[1].get(site.fqn)
    if module is None:
        return None
    if NORMS.search(module.module_class):
        return _statistics
    return _drawn if DRAWS.search(module.module_class) or drew else None


def _of_gradients(step: Step) -> SplitFault | None:
    """A factor that all gradients have, or a norm that clipping left."""
    a, b = cuts(step)
    factor = _common_factor(step)
    if factor is None:
        return _of_clipping(step) or undivided(step)
    inside = step.learned.times
    # A factor that only comes after the backward pass is no loss's.
    times = factor if inside is None else inside / (b.ranks / a.ranks)
    for side, summed in (("b", b.number), ("a", 1 / a.number), ("", b.number / a.number)):
        if summed != 1 and near(times, summed) and (near(times, factor) or (times > 1) == (factor > 1)):
            return partial(_summed, side=side, factor=factor, times=times)
    for cut, wanted in ((b, factor), (a, 1 / factor)):
        if cut.number < cut.usual and near(wanted, cut.number / cut.usual):
            return partial(incomplete, side=cut.side, number=cut.number)
    return undivided(step)


def _common_factor(step: Step) -> float | None:
    """How many times those of a the gradients of b are, all of them; None where no factor fits."""
    table, pairs = step.table, []
    for site, union in zip(step.sites, step.divergences.site.tolist(), strict=True):
        if site.kind is Kind.GRAD and site.phase is Phase.OPTIMIZER and not site.call:
            sketches = table.sketches(union)
            if sketches is None:
                return None
            pairs.append(sketches)
    if not pairs:
        return None
    one, two = (np.stack(sketch) for sketch in zip(*pairs, strict=True))
    factor, _ = fitted(one.ravel(), two.ravel())
    rest = np.linalg.norm(two - factor * one, axis=1)
    sizes = np.linalg.norm(two, axis=1)
    fits = rest <= _CLOSE * np.maximum(sizes, _CLOSE * sizes.max())
    return factor if factor > 0 and bool(fits.all()) else None


def _of_clipping(step: Step) -> SplitFault | None:
    """A norm of all gradients that is a number somebody wrote, of gradients that are no multiples of the others."""
    norms = _norm(step, "a"), _norm(step, "b")
    written = [norm > 0 and abs(float(f"{norm:.2g}") / norm - 1) < _ROUND for norm in norms]
    if not any(written):
        return None
    if all(written) and not near(norms[0], norms[1]):
        return None
    side = "" if all(written) else "b" if written[1] else "a"
    return partial(_clipped, side=side, norm=norms[written.index(True)])


def _norm(step: Step, side: str) -> float:
    """The L2 norm of all gradients of a step together; NaN where they are not on record."""
    _, batch, sites, _ = step.table.halves[side == "b"]
    if "mean" not in batch.floats or "var" not in batch.floats:
        return float("nan")
    layouts = step.comparison.layouts[side == "b"]
    rows = np.flatnonzero((step.alignment.kind[sites] == kind_code(Kind.GRAD)) & (step.alignment.call[sites] == 0))
    mean, var = (np.asarray(batch.floats[name], np.float64)[rows] for name in ("mean", "var"))
    elements = layouts.numel[batch.layout[rows]]
    return float(np.sqrt((elements * (var + mean**2)).sum()))


# --- in words


def _summed(scene: Scene, side: str, factor: float, times: float) -> str:
    """Losses that are added up: b is `factor` times a where the optimizer sees it, `times` in the backward pass."""
    a, b = cuts(scene.step)
    later = "" if near(times, factor) else f"and {factor:.4g} x when the optimizer sees them (clipping), "
    text = f"gradients of b are {times:.4g} x those of a, {later}{what(scene.site)} first: "
    number = (a if side == "a" else b).number
    whose, by = f"in {side} the losses of the {number} microbatches of a step", str(number)
    if not side:
        numbers = f"({a.number} in a, {b.number} in b)"
        whose, by = f"in both runs the losses of the microbatches of a step {numbers}", "their number"
    return f"{text}{whose} are added up, not averaged. Divide each by {by}."


def _clipped(scene: Scene, side: str, norm: float) -> str:
    """Gradients whose norm together is one that clipping left; in both runs where no side is given."""
    a, b = cuts(scene.step)
    clips = side or ("b" if b.as_a_rule.number > a.as_a_rule.number else "a")
    return (
        f"the gradients, {what(scene.site)} first, are no multiples of one another, and their norm is {norm:.4g} "
        f"altogether in {side or 'both runs'}, as clipping leaves it: {clips} probably clips, or sets gradients to "
        "zero, before those of all microbatches are added up."
    )


def _amount(scene: Scene) -> str:
    clauses, more = [], ""
    for cut in cuts(scene.step):
        number = len(cut.micro)
        each = " on each rank" if cut.ranks > 1 else ""
        many = count(number, "microbatch", "microbatches")
        samples = count(sum(micro.samples for micro in cut.micro), "sample")
        clauses.append(f"{cut.side} takes {many} with {samples} in all{each}")
        if number > cut.usual > 0:
            more = (
                f" In {cut.side} that is {number - cut.usual} more than usual: gradients are left of microbatches "
                "that no optimizer step followed."
            )
    return f"{what(scene.site)} has other samples: {clauses[0]}, {clauses[1]}.{more}"


def _statistics(scene: Scene) -> str:
    sizes = [
        f"{', '.join(map(str, dict.fromkeys(cut.as_a_rule.sizes)))} samples{' on each rank' * (cut.ranks > 1)} in "
        f"{cut.side}"
        for cut in cuts(scene.step)
        if cut.as_a_rule.sizes
    ]
    over = f" ({', '.join(sizes)})" if len(sizes) == 2 else ""
    return (
        f"{what(scene.site, scene.first.module_class)} differs: its statistics are taken over each part of a batch"
        f"{over}. Splitting a batch changes that by itself, even where all else is right."
    )


def _drawn(scene: Scene) -> str:
    drawn = f"{named(scene.site, scene.first.module_class)} draws random numbers, and its output differs"
    if scene.site.kind is Kind.INPUT:
        drawn = f"{what(scene.site, scene.first.module_class)} differs, and random numbers are drawn just before it"
    return (
        f"{drawn}: each part of a batch draws its own, so samples get other numbers. Splitting a batch changes that by "
        "itself; with dropout at 0 the rest can be compared."
    )
