"""Faults and effects of cutting a batch into microbatches.

A gradient is a sum over samples: two splits of a batch give the same one if each microbatch's loss is weighted by its
samples. Faults show as a factor (losses added up, not averaged), or as means over uneven numbers of samples that are
weighted alike.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.compare.ledger import At
from introspect_cli.compare.names import FORWARD
from introspect_cli.compare.reasons.base import cause
from introspect_cli.compare.say import finds, found
from introspect_cli.compare.step import RESTS_ON, Place, rests_on
from introspect_cli.compare.table import OTHER, columns, kind_code
from introspect_cli.compare.wholes import Microbatch, Microbatches, microbatches
from introspect_cli.derived import scale_between
from introspect_cli.records import DRAWN_BEFORE, Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.compare.evidence import Cause
    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.result import Finding
    from introspect_cli.compare.step import Step
    from introspect_cli.records import Site

_CLOSE, _EXACT = 1e-3, 1e-4
_ROUND = 1e-5
"""How near to a number of two digits a norm is that clipping left."""
NORMS = re.compile(r"BatchNorm")
DRAWS = re.compile(r"Dropout|RReLU")


class Cut(NamedTuple):
    """The microbatches of a run's step.

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
    def number(self) -> int:
        """Number of microbatches of the step on the first rank; where not recorded, the usual number of the run."""
        return len(self.of_ranks[0]) or self.as_a_rule.usual


def cuts_of(step: Step) -> tuple[Cut, Cut]:
    """The microbatches of a and of b in this step; asserts that `comparison.splits` is set."""
    comparison, splits, table = step.comparison, step.comparison.splits, step.table
    assert splits is not None
    one, two = (
        Cut(side, microbatches(reader, root, number), rule, reader.rank_count)
        for side, reader, root, number, rule in (
            ("a", comparison.a, _name_in_a(step, splits.root), table.step, splits.a),
            ("b", comparison.b, splits.root, table.step_b, splits.b),
        )
    )
    return one, two


def split_cause(step: Step, position: int) -> Cause | None:
    """Cause `split` where `split_finding` finds something and nothing differs before; None otherwise.

    Its evidence is that of a gradient, loss or batch, none of it needed.
    """
    if step.anything_before(step.order_at(position)) or split_finding(step, position) is None:
        return None
    site = step.sites[position]
    edges = RESTS_ON[{Kind.GRAD: "gradient", Kind.LOSS: "loss"}.get(site.kind, "batch")]
    evidence = rests_on(step, Place(site, step.order_at(position)), edges)
    return cause("split", *(replace(fact, needed=False) for fact in evidence))


@finds("split")
def find_split_effect(at: View) -> Iterator[Finding]:
    """Findings on the effect of the split, and, where the runs split a batch in different ways, on how each does."""
    finding, splits = split_finding(at.step, at.position), at.step.comparison.splits
    if finding is not None:
        yield finding
    if splits is not None and splits.differ:
        yield found("split", a=splits.words[0], b=splits.words[1])


def split_finding(step: Step, position: int) -> Finding | None:
    """The finding on how the split made a divergence; None where it did not, or cannot have.

    It cannot for a record of one run alone or of an evaluation. Inputs and outputs of modules are asked for what
    depends on the batch; gradients at the optimizer and losses only where the splits differ.
    """
    splits, site = step.comparison.splits, step.sites[position]
    if splits is None or step.is_one_sided(position) or site.evaluates:
        return None
    if site.phase is Phase.FORWARD and site.kind in (Kind.INPUT, Kind.OUTPUT):
        finding = _batch_dependence_finding(step, position)
        if finding is not None:
            return finding
    if not (splits.differ or (site.kind is Kind.LOSS and step.comparison.a.rank_count != step.comparison.b.rank_count)):
        return None
    if site.kind is Kind.GRAD and site.phase is Phase.OPTIMIZER:
        return _gradient_finding(step)
    layout = step.comparison.a.layouts[int(step.table.a.layout[int(step.divergences.row_a[position])])]
    if site.kind is Kind.LOSS or (site.kind is Kind.OUTPUT and not layout.shape):
        return _loss_finding(step, position)
    return None


def _batch_dependence_finding(step: Step, position: int) -> Finding | None:
    """Finding where a module's value depends on how a batch is cut: batch statistics, or random numbers drawn.

    Of an input, only numbers drawn before the module is called count. None where neither is known of the module, or
    neither run has it in its module tree.
    """
    site = step.sites[position]
    drew = [step.alignment.path[union] for union in step.of(Kind.RNG, FORWARD, site.fqn).tolist()]
    if site.kind is Kind.INPUT:
        return found("split-draws") if any(path.endswith(DRAWN_BEFORE) for path in drew) else None
    module = step.modules[0].get(site.fqn) or step.modules[1].get(site.fqn)
    if module is None:
        return None
    if NORMS.search(module.module_class):
        return found("split-statistics")
    return found("split-draws") if DRAWS.search(module.module_class) or drew else None


def _gradient_finding(step: Step) -> Finding | None:
    """Finding where gradients were summed over microbatches instead of averaged, or clipped; None otherwise.

    Summed where one factor fits all gradients and is the number of microbatches of either run, or their ratio. Clipped
    where no factor fits: see `_clipping_finding`.
    """
    a, b = cuts_of(step)
    factor = _common_factor(step)
    if factor is None and (clipped := _clipping_finding(step)):
        return clipped
    if factor is not None:
        inside = step.learned.backward_ratio
        # A factor that only comes after the backward pass is no loss's.
        times = factor if inside is None else inside / (b.ranks / a.ranks)
        for side, number in (("b", b.number), ("a", 1 / a.number), ("", b.number / a.number)):
            if number != 1 and is_near(times, number) and (is_near(times, factor) or (times > 1) == (factor > 1)):
                by = (a if side == "a" else b).number
                return found("split-summed", times=f"{times:.4g}", side=side or "a, b", number=by)
    return None


def _clipping_finding(step: Step) -> Finding | None:
    """Finding where clipping left a norm of two digits (1.0, 0.25).

    None where neither run has one, or both differ in it.

    The norm is that of all gradients of the step, to a relative `_ROUND`.
    """
    norms = _gradient_norm(step, "a"), _gradient_norm(step, "b")
    written = [norm > 0 and abs(float(f"{norm:.2g}") / norm - 1) < _ROUND for norm in norms]
    if not any(written) or (all(written) and not is_near(*norms)):
        return None
    a, b = cuts_of(step)
    more = "b" if b.as_a_rule.number > a.as_a_rule.number else "a"
    side = more if all(written) else "b" if written[1] else "a"
    return found("split-clipped", side=side, norm=f"{norms[written.index(True)]:.4g}")


def _gradient_norm(step: Step, side: str) -> float:
    """L2 norm of all gradients of a step's first call together; NaN without statistics."""
    _, batch, sites, _ = step.table.halves[side == "b"]
    if "mean" not in batch.floats or "var" not in batch.floats:
        return float("nan")
    layouts = step.comparison.layouts[side == "b"]
    rows = np.flatnonzero((step.alignment.kind[sites] == kind_code(Kind.GRAD)) & (step.alignment.call[sites] == 0))
    mean, var = (np.asarray(batch.floats[name], np.float64)[rows] for name in ("mean", "var"))
    elements = layouts.numel[batch.layout[rows]]
    return float(np.sqrt((elements * (var + mean**2)).sum()))


def _loss_finding(step: Step, position: int) -> Finding | None:
    """Finding where one run's only loss is the mean of the other's, weighted by samples or tokens; None otherwise.

    The other run has two losses or more, of unequal numbers. The mean may also be multiplied by the number of losses or
    of microbatches; it counts to a relative `_EXACT`.
    """
    one, two = _recorded_numbers(step, step.sites[position])
    a, b = cuts_of(step)
    for cut, parts, whole in ((b, two, one), (a, one, two)):
        number = len(parts)
        if number < 2 or len(whole) != 1:
            continue
        for by in ("samples", "tokens"):
            counts = [getattr(micro, by) for micro in chain.from_iterable(cut.of_ranks)]
            if len(counts) != number or not all(counts) or len(set(counts)) == 1:
                continue
            weighted = float(np.average(parts, weights=counts))
            if any(is_near(weighted * times, whole[0], _EXACT) for times in {1, number, cut.number}):
                numbers = ", ".join(f"{count:,}" for count in counts)
                return found("split-uneven", side=cut.side, by=by, counts=numbers, other=OTHER[cut.side])
    return None


def _common_factor(step: Step) -> float | None:
    """The factor above 0 by which b's gradients are a's, all of them, to `_CLOSE`; None where none fits.

    It is found by the sketches of gradients at the optimizer that differ, of first calls alone; None where there are
    none or a sketch is missing.
    """
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
    factor, _ = scale_between(one.ravel(), two.ravel())
    rest = np.linalg.norm(two - factor * one, axis=1)
    sizes = np.linalg.norm(two, axis=1)
    fits = rest <= _CLOSE * np.maximum(sizes, _CLOSE * sizes.max())
    return factor if factor > 0 and bool(fits.all()) else None


def _recorded_numbers(step: Step, site: Site) -> tuple[list[float], list[float]]:
    """Numbers recorded at a site in the step, of all ranks and calls: those of a, those of b."""
    a, b = step.comparison.a, step.comparison.b
    names = _name_in_a(step, site.fqn), site.fqn
    one, two = (
        [
            np.nan if number.value is None else number.value
            for rank in reader.readers
            for number in At(rank, columns(rank.sites), at).numbers(site.kind, site.phase)
            if (number.fqn, number.path) == (fqn, site.path)
        ]
        for reader, fqn, at in zip((a, b), names, (step.table.step, step.table.step_b), strict=True)
    )
    return one, two


def _name_in_a(step: Step, fqn: str) -> str:
    """The name in run a of a module or parameter whose name in b is `fqn`; `fqn` itself if it was not renamed."""
    change = step.comparison.rename
    if change is None:
        return fqn
    return next((name for name in dict.fromkeys(step.comparison.a.sites.fqn) if change(name) == fqn), fqn)


def is_near(one: float, two: float, close: float = _CLOSE) -> bool:
    """Whether two numbers differ by at most `close` (inclusive), relative to the larger magnitude."""
    return abs(one - two) <= close * max(abs(one), abs(two))
