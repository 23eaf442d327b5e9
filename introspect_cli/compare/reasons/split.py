"""Faults and effects of cutting a batch into microbatches.

A gradient is a sum over samples: two splits of a batch give the same one if each microbatch's loss is weighted by its
samples. Faults show as a factor (losses added up, not averaged), or as means over uneven numbers of samples that are
weighted alike.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import chain
from math import isclose
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.ledger import At
from introspect_cli.compare.measure import Records
from introspect_cli.compare.names import FORWARD
from introspect_cli.compare.reasons.base import cause, evidence_of, is_fed
from introspect_cli.compare.say import finds, found
from introspect_cli.compare.table import OTHER, columns
from introspect_cli.compare.wholes import Microbatch, microbatches
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
_is_near = partial(isclose, rel_tol=_CLOSE)
_ROUND = 1e-5
"""How near to a number of two digits a norm is that clipping left."""
_DEPENDS_ON_PARTS = re.compile(r"BatchNorm|Dropout|RReLU")


def cuts_of(step: Step) -> list[tuple[list[Microbatch], int]]:
    """Of a and of b the microbatches of this step on all ranks, and how many the first rank has.

    Where that is not recorded, the usual number of the run. Asserts that `comparison.splits` is set.
    """
    comparison, splits, table, cuts = step.comparison, step.comparison.splits, step.table, []
    assert splits is not None
    readers, steps = (comparison.a, comparison.b), (table.step, table.step_b)
    for reader, cut, at in zip(readers, splits.cuts, steps, strict=True):
        of_ranks = [microbatches(rank, cut.root, at) for rank in reader.readers]
        cuts.append(([*chain.from_iterable(of_ranks)], len(of_ranks[0]) or cut.number))
    return cuts


def split_cause(step: Step, position: int) -> Cause | None:
    """Cause `split` where `split_finding` finds something and nothing differs before; None otherwise."""
    if is_fed(step, position) or split_finding(step, position) is None:
        return None
    return cause("split", *evidence_of("split", step, position))


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
    if splits is None or step.alone[position] or site.evaluates:
        return None
    if site.phase is Phase.FORWARD and site.kind in (Kind.INPUT, Kind.OUTPUT) and _depends_on_parts(step, site):
        return found("split-parts")
    if not (splits.differ or (site.kind is Kind.LOSS and step.comparison.a.rank_count != step.comparison.b.rank_count)):
        return None
    if site.kind is Kind.GRAD and site.phase is Phase.OPTIMIZER:
        return _gradient_finding(step)
    layout = step.comparison.a.layouts[int(step.table.a.layout[int(step.divergences.row_a[position])])]
    if site.kind is Kind.LOSS or (site.kind is Kind.OUTPUT and not layout.shape):
        return _loss_finding(step, site)
    return None


def _depends_on_parts(step: Step, site: Site) -> bool:
    """Whether a module's value depends on how a batch is cut: batch statistics, or random numbers drawn.

    Of an input, only numbers drawn before the module is called count.
    """
    drew = [step.alignment.path[union] for union in step.of(Kind.RNG, *FORWARD, fqn=site.fqn).tolist()]
    if site.kind is Kind.INPUT:
        return any(path.endswith(DRAWN_BEFORE) for path in drew)
    module = step.modules[0].get(site.fqn) or step.modules[1].get(site.fqn)
    return module is not None and bool(drew or _DEPENDS_ON_PARTS.search(module.module_class))


def _gradient_finding(step: Step) -> Finding | None:
    """Finding where gradients were summed over microbatches instead of averaged, or clipped; None otherwise.

    Summed where one factor fits all gradients and is the number of microbatches of either run, or their ratio. Clipped
    where no factor fits: see `_clipping_finding`.
    """
    (_, a), (_, b) = cuts_of(step)
    factor = _common_factor(step)
    if factor is None:
        return _clipping_finding(step, "b" if b > a else "a")
    inside = step.learned.backward_ratio
    # A factor that only comes after the backward pass is no loss's.
    times = factor if inside is None else inside / (step.comparison.b.rank_count / step.comparison.a.rank_count)
    for side, wanted, by in (("b", b, b), ("a", 1 / a, a), ("a, b", b / a, b)):
        if wanted != 1 and _is_near(times, wanted) and (_is_near(times, factor) or (times > 1) == (factor > 1)):
            return found("split-summed", times=f"{times:.4g}", side=side, number=by)
    return None


def _clipping_finding(step: Step, more: str) -> Finding | None:
    """Finding where clipping left a norm of two digits (1.0, 0.25).

    None where neither run has one, or both differ in it.

    The norm is that of all gradients of the step's first calls, to a relative `_ROUND`.

    Args:
        step: the step.
        more: the run with more microbatches, which is to blame where both have that norm.
    """
    norms = []
    for half, layouts in zip(step.table.halves, step.table.layouts, strict=True):
        of_grad = step.alignment.are(Kind.GRAD, sites=half.sites)
        rows = np.flatnonzero(of_grad & (step.alignment.call[half.sites] == 0))
        norms.append(float(np.linalg.norm(Records(half.batch, rows, layouts).norms)))
    written = [norm > 0 and abs(float(f"{norm:.2g}") / norm - 1) < _ROUND for norm in norms]
    if not any(written) or (all(written) and not _is_near(*norms)):
        return None
    side = more if all(written) else "ab"[written.index(True)]
    return found("split-clipped", side=side, norm=f"{norms[written.index(True)]:.4g}")


def _loss_finding(step: Step, site: Site) -> Finding | None:
    """Finding where one run's only loss is the mean of the other's, weighted by samples or tokens; None otherwise.

    The other run has two losses or more, of unequal numbers. The mean may also be multiplied by the number of losses or
    of microbatches; it counts to a relative `_EXACT`.
    """
    one, two = _recorded_numbers(step, site)
    a, b = cuts_of(step)
    for side, (every, usual), parts, whole in (("b", b, two, one), ("a", a, one, two)):
        for by in ("samples", "tokens"):
            counts, number = [getattr(micro, by) for micro in every], len(parts)
            if number < 2 or len(whole) != 1 or len(counts) != number or not all(counts) or len(set(counts)) == 1:
                continue
            weighted = float(np.average(parts, weights=counts))
            if any(_is_near(weighted * times, whole[0], rel_tol=_EXACT) for times in {1, number, usual}):
                numbers = ", ".join(f"{count:,}" for count in counts)
                return found("split-uneven", side=side, by=by, counts=numbers, other=OTHER[side])
    return None


def _recorded_numbers(step: Step, site: Site) -> list[list[float]]:
    """Numbers recorded at a site in the step, of all ranks and calls: those of a, those of b."""
    comparison, steps = step.comparison, (step.table.step, step.table.step_b)
    return [
        [
            np.nan if number is None else number
            for rank in reader.readers
            for of, number in At(rank, columns(rank.sites, change), at).numbers(site.kind, site.phase)
            if of == (site.fqn, site.path)
        ]
        for reader, change, at in zip((comparison.a, comparison.b), (comparison.rename, None), steps, strict=True)
    ]


def _common_factor(step: Step) -> float | None:
    """The factor above 0 by which b's gradients are a's, all of them, to `_CLOSE`; None where none fits.

    It is found by the sketches of gradients at the optimizer that differ, of first calls alone; None where there are
    none or a sketch is missing.
    """
    of_grad = [site.kind is Kind.GRAD and site.phase is Phase.OPTIMIZER and not site.call for site in step.sites]
    sketches = [step.table.sketches(union) for union in step.divergences.site[np.flatnonzero(of_grad)].tolist()]
    pairs = [pair for pair in sketches if pair is not None]
    if not pairs or len(pairs) < len(sketches):
        return None
    one, two = (np.stack(of_run) for of_run in zip(*pairs, strict=True))
    factor, _ = scale_between(one.ravel(), two.ravel())
    sizes = np.linalg.norm(two, axis=1)
    fits = np.linalg.norm(two - factor * one, axis=1) <= _CLOSE * np.maximum(sizes, _CLOSE * sizes.max())
    return factor if factor > 0 and bool(fits.all()) else None
