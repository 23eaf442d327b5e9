"""What cutting a batch into microbatches gets wrong, or changes by itself.

A gradient is a sum over samples, so that two splits of a batch give the same one, if the loss of each microbatch counts
as much as its samples do. What goes wrong shows as a factor (losses that are added up, not averaged), or as losses that
are right for their own samples and count alike though they have more or fewer of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.compare.join.microbatches import Microbatch, Microbatches, microbatches, values_of
from introspect_cli.compare.reasons.base import Reason
from introspect_cli.compare.step.rests_on import RESTS_ON, Place, rests_on
from introspect_cli.compare.terms.names import FORWARD
from introspect_cli.compare.terms.sites import kind_code
from introspect_cli.compare.terms.table import OTHER
from introspect_cli.compare.terms.words import listed, named, what
from introspect_cli.records import DRAWN_BEFORE, Kind, Phase
from introspect_cli.store.format.batch import fitted
from introspect_cli.texts import count

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.evidence import Cause

_CLOSE, _EXACT = 1e-3, 1e-4
_NORMS = re.compile(r"BatchNorm")
_DRAWS = re.compile(r"Dropout|RReLU")
_ROUND = 1e-5
"""How near to a number of three digits a norm is that clipping left."""

SplitFault = Callable[["Scene"], str]
"""What a split of the batch gets wrong, or changes by itself: the function that says it."""


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
        return _of_losses(step, position)
    if site.kind is Kind.BATCH or (site.kind is Kind.INPUT and site.fqn == splits.root):
        one, two = (sum(micro.samples for micro in cut.micro) * cut.ranks for cut in _cuts(step))
        return _amount if one and two and one != two else None
    return None


class Cut(NamedTuple):
    """How a run takes the batch of the step.

    Attributes:
        side: which run.
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


def _cuts(step: Step) -> tuple[Cut, Cut]:
    """Those of a and of b, where both have a split on record."""
    comparison, splits, table = step.comparison, step.comparison.splits, step.table
    assert splits is not None
    one, two = (
        Cut(side, microbatches(reader, splits.root, number, rule), rule, reader.many)
        for side, reader, number, rule in (
            ("a", comparison.a, table.step, splits.a),
            ("b", comparison.b, table.step_b, splits.b),
        )
    )
    return one, two


def _by_itself(step: Step, position: int) -> SplitFault | None:
    """What no split of a batch leaves as it is: statistics over the batch, and random numbers for each sample."""
    site = step.sites[position]
    drew = [step.alignment.path[union] for union in step.of(Kind.RNG, FORWARD, site.fqn).tolist()]
    if site.kind is Kind.INPUT:
        return _drawn if any(path.endswith(DRAWN_BEFORE) for path in drew) else None
    module = step.modules[0].get(site.fqn) or step.modules[1].get(site.fqn)
    if module is None:
        return None
    if _NORMS.search(module.module_class):
        return _statistics
    return _drawn if _DRAWS.search(module.module_class) or drew else None


def _of_gradients(step: Step) -> SplitFault | None:
    """A factor that all gradients have, or a norm that clipping left."""
    a, b = _cuts(step)
    factor = _common_factor(step)
    if factor is None:
        return _of_clipping(step)
    inside = step.comparison.gathered.times if step.comparison.gathered is not None else None
    # A factor that only comes after the backward pass is no loss's.
    times = factor if inside is None else inside / (b.ranks / a.ranks)
    for side, summed in (("b", b.number), ("a", 1 / a.number), ("", b.number / a.number)):
        if summed != 1 and _near(times, summed) and (_near(times, factor) or (times > 1) == (factor > 1)):
            return partial(_summed, side=side, factor=factor, times=times)
    for cut, wanted in ((b, factor), (a, 1 / factor)):
        if cut.number < cut.usual and _near(wanted, cut.number / cut.usual):
            return partial(_incomplete, side=cut.side)
    return None


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
    if all(written) and not _near(norms[0], norms[1]):
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


def _of_losses(step: Step, position: int) -> SplitFault | None:
    """Losses that are right for their own samples and count alike, or are divided by more than there are."""
    site, comparison = step.sites[position], step.comparison
    values_a = values_of(comparison.a, replace(site, fqn=_name_in_a(step, site.fqn)), step.table.step)
    values_b = values_of(comparison.b, site, step.table.step_b)
    a, b = _cuts(step)
    one, two = ([*chain.from_iterable(of_ranks)] for of_ranks in (values_a, values_b))
    for cut, parts, whole in ((b, two, one), (a, one, two)):
        number = len(parts)
        if number < 2 or len(whole) != 1:
            continue
        if number < cut.usual and _near(sum(parts) * cut.usual / number, whole[0], _EXACT):
            return partial(_incomplete, side=cut.side)
        for by in ("samples", "tokens"):
            counts = [getattr(micro, by) for micro in chain.from_iterable(cut.of_ranks)]
            if len(counts) != number or not all(counts) or len(set(counts)) == 1:
                continue
            weighted = float(np.average(parts, weights=counts))
            if any(_near(weighted * times, whole[0], _EXACT) for times in {1, number, cut.number, cut.usual}):
                return partial(_uneven, side=cut.side, counts=counts, by=by)
    return None


def _name_in_a(step: Step, fqn: str) -> str:
    """What run a itself calls what is compared as `fqn`."""
    change = step.comparison.rename
    if change is None:
        return fqn
    return next((name for name in dict.fromkeys(step.comparison.a.sites.fqn) if change(name) == fqn), fqn)


def _near(one: float, two: float, close: float = _CLOSE) -> bool:
    return abs(one - two) <= close * max(abs(one), abs(two))


# --- in words


def _summed(scene: Scene, side: str, factor: float, times: float) -> str:
    """Losses that are added up: b is `factor` times a where the optimizer sees it, `times` in the backward pass."""
    a, b = _cuts(scene.step)
    later = "" if _near(times, factor) else f"and {factor:.4g} x when the optimizer sees them (clipping), "
    text = f"gradients of b are {times:.4g} x those of a, {later}{what(scene.site)} first: "
    number = (a if side == "a" else b).number
    whose, by = f"in {side} the losses of the {number} microbatches of a step", str(number)
    if not side:
        numbers = f"({a.number} in a, {b.number} in b)"
        whose, by = f"in both runs the losses of the microbatches of a step {numbers}", "their number"
    return f"{text}{whose} are added up, not averaged. Divide each by {by}."


def _incomplete(scene: Scene, side: str) -> str:
    cut = _cuts(scene.step)[side == "b"]
    number, usual = len(cut.micro), cut.usual
    value = "gradients" if scene.site.kind is Kind.GRAD else "losses"
    return (
        f"{value} of {side} are {number / usual:.4g} x those of {OTHER[side]}, {what(scene.site)} first: the step has "
        f"the last {count(number, 'microbatch', 'microbatches')} alone, and each loss is divided by {usual} there as "
        "well."
    )


def _uneven(scene: Scene, side: str, counts: list[int], by: str) -> str:
    """Means over uneven `counts` that count alike; `by` is what is counted: `tokens`, `samples`."""
    last = ""
    if by == "samples" and len(set(counts[:-1])) == 1 and counts[-1] < counts[0]:
        last = " (the last one is incomplete)"
    that = " that count" if by == "tokens" else ""
    cut = _cuts(scene.step)[side == "b"]
    each, every = ("rank", "ranks") if len(cut.of_ranks) > 1 == cut.number else ("microbatch", "microbatches")
    return (
        f"{what(scene.site)} differs: in {side} each {each}'s loss is a mean over its own {by}, and these means "
        f"have equal weight, though the {every} have {listed([f'{number:,}' for number in counts])} {by}{that}{last}. "
        f"Weighted by these, the losses of {side} are that of {OTHER[side]}."
    )


def _clipped(scene: Scene, side: str, norm: float) -> str:
    """Gradients whose norm together is one that clipping left; in both runs where no side is given."""
    a, b = _cuts(scene.step)
    clips = side or ("b" if b.as_a_rule.number > a.as_a_rule.number else "a")
    return (
        f"the gradients, {what(scene.site)} first, are no multiples of one another, and their norm is {norm:.4g} "
        f"altogether in {side or 'both runs'}, as clipping leaves it: {clips} probably clips before the gradients of "
        "all microbatches are added up."
    )


def _amount(scene: Scene) -> str:
    clauses, more = [], ""
    for cut in _cuts(scene.step):
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
        for cut in _cuts(scene.step)
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
